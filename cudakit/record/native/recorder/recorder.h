/* State that all parts of the recorder share: the recorder lock, per-thread call state, and how records begin.
 *
 * Callbacks arrive on any thread, while frameworks and the driver hold locks of their own. Therefore nothing in
 * the recorder waits for the GIL, and no CUDA function is called while ``recorder_lock`` is held: that lock only
 * protects short, bounded work. In the comments of all files, "the recorder lock" is ``recorder_lock``.
 */
#ifndef CK_RECORDER_H
#define CK_RECORDER_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "exact/templates.h"
#include "hooks/driver_api.h"
#include "hooks/sanitizer_api.h"
#include "model/ranges.h"
#include "profile/window.h"
#include "write/record.h"

struct kernel_layout;
struct launch_arena;

/* The memory that a launch reaches, and its pointers: consecutive elements of the arena's ``reached_ranges`` and
 * ``pointers``. */
typedef struct {
    uint32_t first_range, range_count, first_pointer, pointer_count;
} reached_memory;

/* A launch of a graph whose kernel nodes write their accesses to an arena. */
typedef struct {
    record launch_record;
    CUgraphExec executable;
    uint32_t expected_kernel_count,
        remaining_kernel_count;    /* number of expected kernels; number of those that have not launched yet */
    uint32_t first_launch_index;   /* first reserved launch index */
    uint32_t launch_index_count;   /* number of reserved launch indices; 0: none reserved yet */
    uint64_t first_grid_id;        /* %gridid that maps to first_launch_index */
    launch_signature signature;    /* launches of the same signature are expected to have the same accesses */
    reached_memory reached_memory; /* memory that the nodes reach */
    bool reservation_failed;       /* the arena has too few launch indices left */
} graph_launch;

typedef struct {
    uint32_t id;              /* kernel thread id (gettid) */
    bool in_recorder_call;    /* the recorder itself makes a CUDA call, whose callbacks are ignored */
    bool is_patching;         /* the CUDA call of the recorder patches a module */
    bool in_graph_launch;     /* the thread launches a graph, whose nodes are already recorded */
    uint32_t cbid;            /* callback id of the current driver call; 0 if its callbacks are not subscribed */
    bool has_reported_unload; /* the current driver call unloads a module, whose handle was reported */
    uint64_t call_number;     /* number of subscribed driver calls that the thread has made so far */

    /* Fields of a kernel launch: arguments of cuLaunchKernel */
    CUfunction entered_function;
    uint64_t entered_stream_key; /* key of the stream in exact/patch_restoring.c */
    void **parameters, **extra;
    const struct kernel_layout *parameter_layout;
    uint64_t user_data;       /* value that the device patch receives */
    uint64_t space_signature; /* signature of the prepared launch, by which its arena space is estimated */
    uint64_t reserved_pages, reserved_boxes; /* arena space that is reserved for the prepared launch */
    uint64_t delayed_seq; /* ``seq`` of the launch that the recorder delays; 0 if no launch is delayed */
    /* Fields of a stream creation */
    uint32_t stream_flags;
    int32_t stream_priority;
    /* Fields of a 3D copy: number of rows from one slice to the next */
    uint64_t source_height, destination_height;
    /* Fields of a graph instantiation: id of the graph, number of its kernel nodes, and whether an executable graph
     * was created or updated from the graph */
    uint32_t instantiated_graph_id, instantiated_kernel_count;
    bool is_graph_in_use;
    /* Fields of a graph launch */
    uint32_t expected_kernel_count, launched_kernel_count, launched_graph_id;
    graph_launch pending_graph_launch;
    /* The launch that has a launch index in an arena but may not be enqueued on its stream yet */
    struct launch_arena *pending_arena;
    Sanitizer_StreamHandle pending_stream;
    /* Open NVTX ranges of the thread. ``range_copy_generation`` is the generation of the copies (model/ranges.c) that
     * the thread has. */
    open_ranges open_ranges;
    uint32_t range_copy_generation;
    /* Id of the last NCCL plan that this thread launched, 0 once its buffers are reported; and whether the thread is
     * launching the plan */
    uint64_t collective_plan_id;
    bool in_collective_launch;
    profiled_call profiled_call; /* call of the runtime or driver that is being profiled */
} thread_state;

extern __thread thread_state this_thread;
extern pthread_mutex_t recorder_lock;
extern sanitizer_api sanitizer;

/* Return a record whose common fields are set, with a new ``seq``. ``site`` is the id of a call site. The recorder lock
 * is held. */
record record_begin(uint16_t kind, uint32_t context, uint32_t stream, uint32_t site);

/* Do the same as record_begin(), with a time that the caller has read. The recorder lock is held. */
record record_begin_at(int64_t time_ns, uint16_t kind, uint32_t context, uint32_t stream, uint32_t site);

/* Return the time of the trace's clock, CLOCK_MONOTONIC, in nanoseconds. */
int64_t monotonic_ns(void);

/* Set the device of a context, which record_begin() copies to records. The recorder lock is held. */
void set_context_device(uint32_t context, CUdevice device);

/* Return the device of a context, or -1 if unknown. The recorder lock is held. */
int context_device(CUcontext context);

/* Return the device of a context by its id, or 0 if it is unknown. The recorder lock is held. */
int context_number_device(uint32_t context);

/* Append one record. The recorder lock is held. */
void record_append(const record *rec);

/* Take the recorder lock and begin a record of this thread's current call. record_append_and_unlock() appends the
 * record and releases the recorder lock. */
record record_begin_and_lock(uint16_t kind, CUcontext context, Sanitizer_StreamHandle stream);
void record_append_and_unlock(const record *rec);

/* Begin a delay of this thread's launch: record its ``seq``, so that work of other threads during the delay does not
 * order the launch. Takes the recorder lock. */
void launch_begin_delay(void);

/* Return the ``seq`` of this thread's launch: that of the begin of the delay, or ``new_seq`` without a delay. */
uint64_t launch_seq(uint64_t new_seq);

/* End the delay of this thread's launch, if the recorder delayed it. The recorder lock is held. */
void launch_end_delay(void);

/* Append a GAP record: work could not be recorded in full for this reason, ``count`` times. ``detail`` is appended
 * to the reason. The recorder lock is held. */
void record_gap(const char *reason);
void record_gaps(const char *reason, uint64_t count);
void record_gap_detail(const char *reason, const char *detail);

#endif
