/* State that all parts of the recorder share: the lock, per-thread call state, and how records begin.
 *
 * Callbacks arrive on any thread, while frameworks and the driver hold locks of their own. Therefore nothing in
 * the recorder waits for the GIL, and no CUDA function is called while the recorder's lock is held: the lock
 * only protects short, bounded work.
 */
#ifndef CK_RECORDER_H
#define CK_RECORDER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hooks/driver_api.h"
#include "hooks/sanitizer_api.h"
#include "write/record.h"

struct kernel_layout;
struct launch_arena;

/* A launch of a graph whose kernel nodes write their accesses to an arena. */
typedef struct {
    record launch_record;
    uint32_t executable, kernels, kernels_left; /* kernels_left: expected kernels that have not launched yet */
    uint32_t first_index, index_count;          /* launch indices; capacity 0: not reserved yet */
    uint64_t first_grid_id;                     /* %gridid that maps to first_index */
    bool reservation_failed;
} graph_launch;

typedef struct {
    uint64_t id;           /* kernel thread id (gettid) */
    bool in_recorder_call; /* inside a CUDA call that the recorder itself makes */
    bool is_patching;      /* and that call patches a module */
    bool in_graph_launch;  /* inside a graph launch, whose nodes are already recorded */
    uint32_t cbid;         /* cbid of the current driver call; 0: one that is not subscribed */

    /* Kernel launch */
    void **parameters, **extra;
    const struct kernel_layout *parameter_layout;
    uint64_t user_data;        /* passed to the device patch */
    uint64_t launch_signature; /* of the launch that was prepared, for estimates of its space */
    /* Stream creation */
    uint32_t stream_flags;
    int32_t stream_priority;
    /* 3D copy: rows from one slice to the next */
    uint64_t source_height, destination_height;
    /* Graph instantiation: graph id and its number of kernel nodes */
    uint32_t instantiated_graph, instantiated_kernels;
    /* Graph launch */
    uint32_t expected_kernels, launched_kernels, launched_graph;
    graph_launch pending_graph_launch;
    /* Launch that has a slot in an arena but may not be in its stream yet */
    struct launch_arena *pending_arena;
    Sanitizer_StreamHandle pending_stream;
} thread_state;

extern __thread thread_state this_thread;
extern pthread_mutex_t recorder_lock;
extern sanitizer_api sanitizer;

/* Begin a record: fill in its common part, with a new ``seq`` and the given call site. The lock is held. */
record record_begin(uint16_t kind, uint32_t context, uint32_t stream, uint32_t site);

/* Set the device that records of a context carry. The lock is held. */
void set_context_device(uint32_t context, CUdevice device);

/* Return the device of a context, or -1 if unknown. The lock is held. */
int context_device(CUcontext context);

/* Append one record. The lock is held. */
void record_append(const record *rec);

/* Take the lock and begin a record of this thread's current call; append it and release the lock. */
record record_begin_and_lock(uint16_t kind, CUcontext context, Sanitizer_StreamHandle stream);
void record_append_and_unlock(const record *rec);

/* Append a GAP record: ``what`` could not be recorded, ``count`` times. The lock is held. */
void record_gap(const char *reason);
void record_gaps(const char *reason, uint64_t count);
void record_gap_detail(const char *reason, const char *detail);

#endif
