/* Collectives and point-to-point operations of NCCL: which kernel launch or graph node performs them.
 *
 * NCCL reports an operation in several events (hooks/nccl_profiler.c): the call of the program, the launch of the
 * kernel, and then the buffers. One launch may perform several operations of a group. A *plan* is one launch with
 * its operations, as in NCCL's source. All functions take the recorder lock, unless their comments say that it is held.
 */
#ifndef CK_COLLECTIVES_H
#define CK_COLLECTIVES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vendor/sanitizer_api.h"
#include "write/record.h"

/* Version of NCCL's profiler interface from which on NCCL reports calls and kernel launches. */
#define NCCL_VERSION_WITH_CALLS 5

/* The properties of a communicator that NCCL reports when the program creates the communicator. */
typedef struct {
    uint64_t hash;        /* hash of the communicator, which is the same in all ranks; 0 if unknown */
    const char *name;     /* name of the communicator; NULL if the program gave none */
    int rank;             /* rank of the process; -1 if unknown */
    int rank_count;       /* number of ranks; 0 if unknown */
    int profiler_version; /* version of NCCL's profiler interface */
} communicator_info;

/* A collective or point-to-point operation of one rank. */
typedef struct {
    uint8_t function;         /* type of the operation, COLLECTIVE_* */
    uint8_t datatype;         /* type of the elements, DATATYPE_* */
    uint64_t send_address;    /* address of the send buffer; 0 if there is none */
    uint64_t receive_address; /* address of the receive buffer; 0 if there is none */
    uint64_t element_count;   /* number of elements, as NCCL counts them */
    int32_t root;             /* root rank, or the other rank of a send or receive */
} collective;

/* Add a communicator, and return its number, which is not 0. */
uint32_t communicator_open(const communicator_info *info);

/* Set the hash and rank of a communicator that NCCL created without reporting its hash and rank. */
void communicator_set_hash_and_rank(uint32_t communicator, uint64_t hash, int rank);

/* Close a communicator that the program destroyed or aborted, and end its plans. */
void communicator_close(uint32_t communicator);

/* Record the program's call of an NCCL function, such as ncclAllReduce, with the call stack of this thread. ``group``
 * identifies the group of the call. Return the id of the call, which is not 0. */
uint64_t collective_record_call(uint32_t communicator, uint64_t group, const collective *operation,
                                bool is_captured);

/* Begin the launch of a kernel of NCCL on this thread, and return the id of its plan; 0 if no memory is left. */
uint64_t collective_launch_begin(uint32_t communicator);
/* End the launch of the kernel of a plan on this thread. */
void collective_launch_end(uint64_t plan);

/* Return whether this thread is launching a kernel of NCCL. */
bool collectives_is_launching(void);

/* Begin NCCL's report of the buffers of a plan, and return the id of the plan. The plan is the last one that this
 * thread launched, or else the first plan of the communicator whose buffers are not reported. */
uint64_t collective_report_begin(uint32_t communicator);
/* End NCCL's report of the buffers of a plan. */
void collective_report_end(uint64_t plan);

/* Add an operation with its buffers to a plan. ``call`` is the id of the program's call, or 0 if unknown. */
void collective_add_to_plan(uint64_t plan, uint64_t call, const collective *operation);

/* Count an operation whose buffers NCCL does not report. */
void collective_count_unreported(const char *reason);

/* Return whether a kernel with this name belongs to NCCL and performs operations of communicators. */
bool is_nccl_kernel(const char *function_name);

/* Assign the launch of a kernel of NCCL to the plan that this thread launches. If this thread launches no plan, the
 * buffers of the kernel stay unknown: write a GAP record and return false. The recorder lock is held. */
bool collectives_assign_launch(const record *launch_record);

/* End the plan of the last launch of this thread that NCCL did not announce. Called when this thread records an
 * event after the launch: NCCL should have reported the buffers before. */
void collectives_end_unannounced_plan(void);

/* Assign a node of a captured graph to the plan that this thread launches. Forget the operations of an earlier node
 * with this handle, which no longer exists. The recorder lock is held. */
void collectives_assign_node(CUgraphNode node);

/* Write the operations of a captured graph node after the record of the node. Return false if the node performs no
 * operations. The recorder lock is held. */
bool collectives_write_node(CUgraphNode handle, const record *node_record);

/* Set the reason why NCCL does not load the recorder as its plugin; NULL if NCCL loads it. */
void collectives_set_refusal(const char *reason);

/* Remove the operations that are not written yet, because their launch or report was not recorded. */
void collectives_discard_plans(void);

/* Forget all communicators and operations, in the child of a fork. */
void collectives_clear(void);

#endif
