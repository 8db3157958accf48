/* Collectives and point-to-point operations of NCCL: which kernel launch or graph node performs them.
 *
 * NCCL reports an operation in several events (hooks/nccl_profiler.c): the call of the program, the launch of the
 * kernel, and then the buffers. One launch may perform several operations of a group. A *plan* is one launch with
 * its operations, as in NCCL's source. All functions take the lock, unless they say that it is held.
 */
#ifndef CK_COLLECTIVES_H
#define CK_COLLECTIVES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hooks/sanitizer_api.h"
#include "write/record.h"

/* Version of NCCL's profiler interface from which on NCCL reports calls and kernel launches. */
#define NCCL_VERSION_WITH_CALLS 5

/* A communicator, as NCCL reports it when it is created. */
typedef struct {
    uint64_t hash;    /* the same in all ranks; 0 if unknown */
    const char *name; /* name that the program gave; may be NULL */
    int rank, rank_count, version;
} communicator_info;

/* An operation of one rank. */
typedef struct {
    uint8_t function, datatype; /* COLLECTIVE_*, DATATYPE_* */
    uint64_t send, receive;     /* addresses; 0 if there is no such buffer */
    uint64_t count;             /* number of elements, as NCCL counts them */
    int32_t root;               /* root, or the other rank of a send or receive */
} collective;

/* Add a communicator, and return its number, which is not 0. */
uint32_t communicator_open(const communicator_info *info);

/* Set the hash and rank of a communicator that was opened without them. */
void communicator_identify(uint32_t communicator, uint64_t hash, int rank);

/* End a communicator: it was destroyed or aborted. */
void communicator_close(uint32_t communicator);

/* Record a call of the program for an operation, with the call stack of this thread. ``group`` identifies the group of
 * the call. Return the id of the call, which is not 0. */
uint64_t collective_called(uint32_t communicator, uint64_t group, const collective *operation, bool is_captured);

/* Begin the launch of a kernel of NCCL on this thread, and return the id of its plan. */
uint64_t collective_launch_begin(uint32_t communicator);
void collective_launch_end(uint64_t plan);

/* Begin the report of the buffers of a plan, and return the id of the plan. It is the last plan that this thread
 * launched, or else the first plan of the communicator whose buffers are not reported. */
uint64_t collective_report_begin(uint32_t communicator);
void collective_report_end(uint64_t plan);

/* Add an operation with its buffers to a plan. ``call`` is the id of the program's call, or 0 if unknown. */
void collective_add(uint64_t plan, uint64_t call, const collective *operation);

/* Count an operation that NCCL does not report in full. */
void collective_unknown(const char *reason);

/* Return whether a kernel is one of NCCL's that perform operations of communicators. */
bool is_nccl_kernel(const char *function_name);

/* Assign the launch of a kernel of NCCL to the plan that this thread launches. Return false if there is none: the
 * buffers of the kernel stay unknown, and a GAP record says so. The lock is held. */
bool collectives_launched(const record *launch_record);

/* A CUDA call behind the launch of a kernel: end the plan of an old NCCL, whose buffers were not reported. */
void collectives_event_recorded(void);

/* Assign a node of a captured graph to the plan that this thread launches; any other node with this handle no longer
 * exists. The lock is held. */
void collectives_node_captured(CUgraphNode node);

/* Write the operations of a captured node behind the record of the node in a graph. Return false if the node performs
 * none. The lock is held. */
bool collectives_write_node(CUgraphNode handle, const record *node_record);

/* Set why NCCL does not load the recorder as its plugin; NULL if it does. */
void collectives_set_refusal(const char *reason);

/* Remove the operations that are not written yet, because their launch or report was not recorded. */
void collectives_discard_plans(void);

/* Forget everything, in the child of a fork. */
void collectives_clear(void);

#endif
