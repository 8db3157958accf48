/* The two arenas of each context: the current one, to which launches write, and the replaced one, which is read when
 * its launches are complete. */
#ifndef CK_ARENA_POOL_H
#define CK_ARENA_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "decode/emit_accesses.h"
#include "decode/tensor_maps.h"
#include "exact/arena_memory.h"
#include "write/record.h"

/* Amount of space in an arena. */
typedef struct {
    uint64_t pages, boxes, launch_indices; /* numbers of pages, of boxes and of launch indices */
} arena_space;

typedef struct launch_arena {
    arena_memory memory;
    bool is_retired;                /* new launches no longer write to this arena */
    bool is_attribution_lost;       /* accesses can no longer be attributed to launches */
    uint32_t launch_count;          /* number of assigned launch indices */
    uint32_t entering_launch_count; /* number of launches that have an index but may not be enqueued yet */
    arena_launch *launches;         /* launches by launch index */
    launch_group *groups;           /* all launch indices, grouped by call */
    size_t launch_capacity, group_count, group_capacity;
    reached_range *reached_ranges; /* allocations that the launches reach */
    size_t reached_range_count, reached_range_capacity;
    uint64_t *pointers; /* pointers among the arguments of the launches */
    size_t pointer_count, pointer_capacity;
    tma_store_set tma_stores; /* tensor maps through which launches may store */
    arena_space
        expected_space; /* space that the launches so far are expected to need; its launch_indices are unused */
    arena_streams streams;
} launch_arena;

#define ARENAS 2

typedef struct {
    CUcontext context;             /* NULL after the context was destroyed */
    Sanitizer_StreamHandle stream; /* stream of the recorder, for its CUDA calls */
    CUstream driver_stream;        /* the driver handle of ``stream`` */
    bool is_disabled;              /* whether accesses cannot be recorded in this context */
    uint64_t free_bytes;           /* device memory that was free at the last query */
    bool wait_timed_out; /* whether no arena was read since a wait for a free arena timed out; read atomically */
    launch_arena arenas[ARENAS];
    /* The arena to which launches write; NULL if no arena is free. A thread that changes it holds the recorder lock and
     * the reader lock. */
    launch_arena *current;
    uint32_t recorded_since_poll; /* number of recorded kernels since the last pool_poll() */
    /* Times of the last pool_poll(), of the last wait of the host, of the last read of an arena, and of the last
     * replacement of the current arena */
    int64_t last_poll_ns, last_wait_ns, last_read_ns, last_replacement_ns;
} arena_pool;

/* Return the pool of a context, or NULL. ``context`` NULL finds a pool whose context was destroyed. The recorder lock
 * is held. */
arena_pool *pool_find(CUcontext context);

/* Return the number of launches that have an index but may not be enqueued on their stream yet. The recorder lock is
 * held. */
uint32_t pool_count_entering_launches(void);

/* Return whether a stream belongs to the recorder. The recorder lock is held. */
bool pool_is_recorder_stream(Sanitizer_StreamHandle stream);

/* Return the pool of a context; it is created if the patch is loaded into the context and no stream is being captured.
 * Calls CUDA: the recorder lock is not held. */
arena_pool *pool_open(CUcontext context);

/* Read complete arenas, and replace the current arena if the host waits for the device or few pages are left. If
 * another thread holds the reader lock, do nothing. Calls CUDA: the recorder lock is not held. */
void pool_poll(arena_pool *pool, bool host_waits);

/* Maximum interval between two calls of pool_poll() while an arena has launches that are not read. */
#define POLL_INTERVAL_NS 20000000

/* Return whether an arena has launches that are not read. The recorder lock is held. */
bool pool_has_unread_launches(const arena_pool *pool);

/* Reserve space for the next launch in the current arena. Return false if no space is left. The recorder lock is held. */
bool pool_try_reserve(arena_pool *pool, arena_space needed);

/* Make sure that the current arena has space left for the next launch. Calls CUDA: the recorder lock is not held. */
void pool_reserve(arena_pool *pool, arena_space needed);

/* Enqueue a marker on a stream that is about to be destroyed. Calls CUDA: the recorder lock is not held. */
void pool_stream_destroying(arena_pool *pool, Sanitizer_StreamHandle stream);

/* Wait for all launches of a context that is about to be destroyed, and read its arenas. If the context is NULL, do
 * so for all contexts, at program end. Calls CUDA: the recorder lock is not held. */
void pool_finish(CUcontext context);

/* Wait for all launches so far, and read their arenas. Calls CUDA: the recorder lock is not held. */
void pool_read(void);

/* Forget all pools, in the child of a fork. */
void pool_clear(void);

/* --- estimates of space: the recorder lock is held ------------------------------------------------- */

/* Return the key of launches of one function, or of one executable graph, with the same number of threads. */
uint64_t space_signature(const void *function, uint64_t threads);

/* Return the space that a launch is expected to need: the maximum of the launches with this signature so far, or an
 * estimate from the number of threads if there were none. */
arena_space space_estimate(uint64_t signature, uint64_t threads);

/* Count the space that each launch in the copy of an arena used. ``launches`` is the number of launch indices. The reader
 * lock is held, but not the recorder lock, because an arena has up to 100,000 pages. */
void space_count_used(uint32_t launches, const arena_copy *copy);

/* Store the space that the launches in an arena needed, by their signatures, after space_count_used(). The reader lock
 * is held, too. */
void space_store_needed(const launch_arena *arena, const arena_copy *copy);

/* Forget all signatures. */
void space_clear(void);

/* --- device memory; calls CUDA: the recorder lock is not held -------------------------------------- */

/* Create a stream for the recorder in the current context. Return NULL on failure. */
Sanitizer_StreamHandle arena_stream_create(CUcontext context, CUstream *stream);

/* Query the free device memory if the arenas of a pool may grow. Must be called where the driver holds no locks. */
void arena_budget_query(arena_pool *pool);

/* Make sure that an unused arena has as much memory as the budget allows. Return false if no unused arena has
 * memory. */
bool arena_memory_provide(const arena_pool *pool, launch_arena *unused);

/* Free all arenas. Also destroy the stream of the pool if ``destroy_stream``; otherwise it is destroyed with its
 * context. */
void arena_memory_release(arena_pool *pool, bool destroy_stream);

/* --- reader lock --------------------------------------------------------------------------------- */

/* The thread that holds the reader lock may create, read and clear arenas. Its CUDA calls are not recorded.
 *
 * Return false if another thread holds the reader lock for longer than ``timeout_ns``. The holder makes CUDA calls, and
 * a waiting thread may itself be inside a call that the holder depends on. Without a timeout both could deadlock. */
bool reader_lock_acquire(int64_t timeout_ns);
void reader_lock_release(void);

/* Unlock the reader lock in the child of a fork, which has no other threads. */
void reader_lock_reset(void);

/* Return the monotonic time in ns. */
int64_t monotonic_now_ns(void);

/* Sleep for 0.2 ms. */
void sleep_briefly(void);

#endif
