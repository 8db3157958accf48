/* The two arenas of each context: which arena launches write to, and when the other can be read. */
#ifndef CK_ARENA_POOL_H
#define CK_ARENA_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "decode/emit_accesses.h"
#include "decode/tensor_maps.h"
#include "exact/arena_memory.h"
#include "write/record.h"

/* Space in an arena. */
typedef struct {
    uint64_t pages, boxes, indices; /* number of launch indices */
} arena_space;

/* The launches of one call: one kernel, or the kernels of a graph. */
typedef struct {
    uint32_t first_index, index_count; /* launch indices */
    uint64_t signature;
} launch_group;

typedef struct launch_arena {
    arena_memory memory;
    bool retired;               /* new launches no longer write to it */
    bool attribution_lost;      /* accesses can no longer be attributed to launches */
    uint32_t launch_count;      /* launch indices that were assigned */
    uint32_t launches_entering; /* launches with an index that may not be in their stream yet */
    arena_launch *launches;     /* by index */
    launch_group *groups;
    size_t launch_capacity, group_count, group_capacity;
    tma_store_set stores;
    arena_space expected_space; /* by the launches so far; its indices are not used */
    arena_streams streams;
} launch_arena;

#define ARENAS 2

typedef struct {
    CUcontext context;             /* NULL: destroyed */
    Sanitizer_StreamHandle stream; /* the recorder's own */
    CUstream driver_stream;        /* the same stream, as a driver handle */
    bool disabled;                 /* accesses cannot be recorded in this context */
    uint64_t free_bytes;           /* device memory that was free at the last query */
    bool wait_timed_out;           /* a wait for a free arena timed out, and no arena was read since */
    launch_arena arenas[ARENAS];
    launch_arena *current; /* NULL: no arena is free. Changed with both the lock and the reader lock held */
    uint32_t launches_since_poll;
    int64_t polled_ns, read_ns; /* time of the last poll, and of the last read of an arena */
} arena_pool;

/* Return the pool of a context, or NULL; for NULL, a pool whose context was destroyed. The lock is held. */
arena_pool *pool_find(CUcontext context);

/* Whether a stream is the recorder's own. The lock is held. */
bool pool_is_recorder_stream(Sanitizer_StreamHandle stream);

/* Return the pool of a context, creating it if the patch is loaded there. Calls CUDA: the lock is not held. */
arena_pool *pool_open(CUcontext context);

/* Read complete arenas, and replace the current arena if the host waits or free pages get scarce. Does nothing
 * while another thread does this. Calls CUDA: the lock is not held. */
void pool_poll(arena_pool *pool, bool host_waits);

/* Make sure that the current arena has space left for the next launch. Calls CUDA: the lock is not held. */
void pool_reserve(arena_pool *pool, arena_space needed);

/* A stream is about to be destroyed: enqueue a marker on it. Calls CUDA: the lock is not held. */
void pool_stream_destroying(arena_pool *pool, Sanitizer_StreamHandle stream);

/* Wait for the launches in the arenas of a context that is about to be destroyed, and read them. NULL: the
 * arenas of all contexts, at program end. Calls CUDA: the lock is not held. */
void pool_finish(CUcontext context);

/* Wait for all launches so far, and read their arenas. Calls CUDA: the lock is not held. */
void pool_read(void);

/* Forget all pools. */
void pool_clear(void);

/* --- estimates of space: the lock is held ---------------------------------------------------------- */

/* Return a number that identifies launches of the same function, or executable graph, with as many threads. */
uint64_t space_signature(const void *function, uint64_t threads);

/* Return the space that a launch is expected to need: the maximum that launches of this signature needed so far, or
 * an estimate from its number of threads. */
arena_space space_estimate(uint64_t signature, uint64_t threads);

/* Remember the space that the launches in an arena needed. */
void space_learn(const launch_arena *arena, const arena_copy *copy);

/* Forget all signatures. */
void space_clear(void);

/* --- device memory. Calls CUDA: the lock is not held ----------------------------------------------- */

/* Create a stream of the recorder's own in the current context; NULL on failure. */
Sanitizer_StreamHandle arena_stream_create(CUcontext context, CUstream *stream);

/* Query the free device memory if the arenas of a pool may grow. Only where the driver holds no locks. */
void arena_budget_query(arena_pool *pool);

/* Make sure that an unused arena has as much memory as the budget allows; false if it has none. */
bool arena_memory_provide(const arena_pool *pool, launch_arena *unused);

/* Free all arenas, and destroy the stream if ``stream``: otherwise it is destroyed with its context. */
void arena_memory_release(arena_pool *pool, bool destroy_stream);

/* --- reader lock --------------------------------------------------------------------------------- */

/* One thread at a time creates, reads or clears arenas; its CUDA calls are not recorded until the release.
 *
 * Bounded try-lock: false if another thread holds the lock for longer than ``timeout_ns``. The holder makes CUDA
 * calls, and a blocked waiter may itself be inside a call that the holder depends on; waiting forever could
 * deadlock. */
bool reader_lock_acquire(int64_t timeout_ns);
void reader_lock_release(void);

/* Unlock in the child of a fork, which has no other threads. */
void reader_lock_reset(void);

/* Return the monotonic time; sleep for a fraction of a millisecond. */
int64_t monotonic_now_ns(void);
void sleep_briefly(void);

#endif
