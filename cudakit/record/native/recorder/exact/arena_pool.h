/* The two arenas of each context: the current one, to which launches write, and the replaced one, which is read when
 * its launches are complete. */
#ifndef CK_ARENA_POOL_H
#define CK_ARENA_POOL_H

#include <stdbool.h>
#include <stdint.h>

#include "exact/arena.h"
#include "vendor/driver_api.h"

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

/* Return the pool of a context. With ``may_create``, because the patch is loaded into the context, a missing pool is
 * created if no stream is being captured. Calls CUDA: the recorder lock is not held. */
arena_pool *pool_open(CUcontext context, bool may_create);

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

/* Query the free device memory if the arenas of a pool may grow. Must be called where the driver holds no locks. Calls
 * CUDA: the recorder lock is not held. */
void arena_budget_query(arena_pool *pool);

#endif
