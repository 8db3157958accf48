/* The subscription to callbacks of the Sanitizer API, and the handlers of these callbacks. */
#ifndef CK_HOOKS_H
#define CK_HOOKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vendor/sanitizer_api.h"

/* The driver call that this thread makes, as far as the callbacks that follow need it. */
typedef struct {
    uint32_t cbid;            /* callback id of the call; 0 if its callbacks are not subscribed */
    bool has_reported_unload; /* the call unloads a module, whose handle was reported */
    uint64_t user_data;       /* of a kernel launch: value that the device patch receives */
    /* Of a stream creation */
    uint32_t stream_flags;
    int32_t stream_priority;
    /* Of a 3D copy: number of rows from one slice to the next */
    uint64_t source_height, destination_height;
    /* Of a graph launch, whose nodes are already recorded */
    bool in_graph_launch;
    uint32_t expected_kernel_count, launched_kernel_count;
    uint32_t launched_graph; /* id of the graph */
} driver_call;

extern __thread driver_call this_call;

/* Load the library of the Sanitizer API and start recording. With ``memory_only``, record only allocations and
 * frees. On failure return false and write the reason to ``error``. */
bool subscription_begin(const char *library, bool memory_only, char *error, size_t error_bytes);

/* Stop recording. Also runs at process exit: after the program, and before the driver's exit handlers. */
void subscription_end(void);

/* Record NVTX ranges and marks to the open trace, and handle forks and the end of the process.
 * subscription_begin() calls this function; a recording without a subscription must call it directly. A second
 * call does nothing. */
void tracing_begin(void);

/* Start or stop recording the calls of NVTX. */
void nvtx_enable(bool enable);

/* Make NVTX load this library in the process and its children. Return NULL, or the path of another library that the
 * user has chosen and that is loaded instead. Call it before the program uses NVTX. */
const char *nvtx_inject(void);

/* Make NCCL load this library as its profiler plugin in the process and its children, and record collectives until
 * nccl_detach(). Call it before the program uses NCCL. */
void nccl_attach(void);
void nccl_detach(void);

/* Pause or resume the recording of NCCL operations. Takes the recorder lock. */
void nccl_pause(bool pause);

/* Handle a callback of the Sanitizer API. */
void on_callback(void *unused, int domain, uint32_t cbid, const void *data);

/* Handle the entry or exit of a driver call. */
void on_driver_call(uint32_t cbid, const Sanitizer_CallbackData *data);

/* A memory block that a pool above the driver, such as CuPy's, allocates or frees. */
typedef struct {
    const char *pool_name; /* name of the pool */
    uint64_t address, size_bytes, requested_bytes;
    int device;
    bool allocates_from_driver; /* the pool allocates from the driver, whose callbacks are not recorded */
    int skipped_frame_count;    /* number of innermost Python frames, which belong to cudakit */
} pool_block;

/* Record an allocation or a free of a pool, with the call stack of this thread. Takes the recorder lock. */
void pools_record_alloc(const pool_block *block);
void pools_record_free(const pool_block *block);

/* Record that a pool could not allocate size_bytes of the block, with the free memory of its device. Takes the recorder
 * lock. */
void pools_record_out_of_memory(const pool_block *block, uint64_t free_bytes);

/* Record an NVTX mark of the domain "cudakit", with the call stack of this thread. Takes the recorder lock. */
void pools_record_mark(const char *name, int skipped_frames);

#endif
