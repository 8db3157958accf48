#include "exact/arena_pool.h"

#include "hooks/driver_api.h"
#include "model/allocations.h"
#include "model/graphs.h"
#include "model/ids.h"
#include "recorder.h"

/* Arenas take a tenth of the memory that the program has allocated, but at least 256 MiB. */
#define LEAST_ENTRIES_LOG2 17

Sanitizer_StreamHandle arena_stream_create(CUcontext context, CUstream *stream)
{
    const driver_functions *driver = driver_api();
    Sanitizer_StreamHandle handle = NULL;
    if (driver && !driver->cuStreamCreate(stream, STREAM_NON_BLOCKING) &&
        sanitizer.stream_handle(context, *stream, &handle))
        handle = NULL;
    return handle;
}

static void record_arena_size(const arena_pool *pool)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < ARENAS; i++)
        bytes += pool->arenas[i].memory.allocated ? pool->arenas[i].memory.size_bytes : 0;
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin(KIND_ARENAS, context_id(pool->context), 0, 0);
    rec.arenas.size_bytes = bytes;
    record_append(&rec);
    pthread_mutex_unlock(&recorder_lock);
}

static unsigned wanted_entries_log2(void)
{
    pthread_mutex_lock(&recorder_lock);
    uint64_t share = allocations_device_bytes() / 10 / ARENAS;
    pthread_mutex_unlock(&recorder_lock);
    unsigned log2 = LEAST_ENTRIES_LOG2;
    while (log2 < CK_MAX_ENTRIES_LOG2 && arena_bytes(log2 + 1) <= share)
        log2++;
    return log2;
}

bool arena_memory_provide(const arena_pool *pool, launch_arena *unused)
{
    unsigned wanted = wanted_entries_log2();
    arena_memory larger;
    if (unused->memory.allocated && unused->memory.entries_log2 >= wanted)
        return true;
    if (graphs_is_capturing() || !arena_create(&larger, pool->context, pool->stream, wanted))
        return unused->memory.allocated; /* allocating could invalidate the capture */
    arena_free(&unused->memory);
    unused->memory = larger;
    record_arena_size(pool);
    return true;
}

void arena_memory_release(arena_pool *pool, bool stream)
{
    const driver_functions *driver = driver_api();
    bool any = false;
    for (size_t i = 0; i < ARENAS; i++) {
        any = any || pool->arenas[i].memory.allocated;
        arena_free(&pool->arenas[i].memory);
    }
    if (any)
        record_arena_size(pool);
    if (driver && stream)
        driver->cuStreamDestroy_v2(pool->own_stream);
}
