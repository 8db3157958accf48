#include "exact/arena_pool.h"

#include "hooks/driver_api.h"
#include "model/allocations.h"
#include "model/graphs.h"
#include "model/ids.h"
#include "recorder.h"

/* Memory budget of the arenas of a context: a tenth of the device memory that the program has allocated, but at least
 * 361 MiB (two arenas of 2^17 entries), at most 1 GiB, and at most half of the free device memory. */
#define MIN_ENTRIES_LOG2 17
#define MIN_ENTRIES_LOG2_IF_FULL 12 /* minimum on a device with little free memory */
#define MAX_BYTES (1ull << 30)

Sanitizer_StreamHandle arena_stream_create(CUcontext context, CUstream *stream)
{
    const driver_functions *driver = driver_api();
    Sanitizer_StreamHandle handle = NULL;
    if (driver && !driver->cuStreamCreate(stream, STREAM_NON_BLOCKING) &&
        sanitizer.stream_handle(context, *stream, &handle))
        handle = NULL;
    return handle;
}

static uint64_t allocated_bytes(const arena_pool *pool)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < ARENAS; i++)
        bytes += pool->arenas[i].memory.device_memory ? pool->arenas[i].memory.size_bytes : 0;
    return bytes;
}

static void record_arena_size(const arena_pool *pool)
{
    const uint64_t bytes = allocated_bytes(pool);
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin(KIND_ARENAS, context_id(pool->context), 0, 0);
    rec.arenas.size_bytes = bytes;
    record_append(&rec);
    pthread_mutex_unlock(&recorder_lock);
}

/* Return the log2 of the number of entries of an arena within the budget, without regard to free memory. */
static unsigned target_entries_log2(void)
{
    pthread_mutex_lock(&recorder_lock);
    uint64_t budget_bytes = allocations_device_bytes() / 10;
    pthread_mutex_unlock(&recorder_lock);
    if (budget_bytes > MAX_BYTES)
        budget_bytes = MAX_BYTES;
    unsigned entries_log2 = MIN_ENTRIES_LOG2;
    while (entries_log2 < CK_MAX_ENTRIES_LOG2 && ARENAS * arena_bytes(entries_log2 + 1) <= budget_bytes)
        entries_log2++;
    return entries_log2;
}

/* Return the log2 of the number of entries of an arena within the budget and the free memory. */
static unsigned affordable_entries_log2(const arena_pool *pool)
{
    unsigned entries_log2 = target_entries_log2();
    while (entries_log2 > MIN_ENTRIES_LOG2_IF_FULL && ARENAS * arena_bytes(entries_log2) > pool->free_bytes / 2)
        entries_log2--;
    return entries_log2;
}

void arena_budget_query(arena_pool *pool)
{
    const driver_functions *driver = driver_api();
    size_t free_bytes = 0, total_bytes = 0;
    const uint64_t arena_bytes_held = allocated_bytes(pool);
    if (arena_bytes_held >= ARENAS * arena_bytes(target_entries_log2()) || graphs_is_capturing() || !driver)
        return;
    const bool was_in_recorder_call = this_thread.in_recorder_call;
    this_thread.in_recorder_call = true;
    if (!driver->cuMemGetInfo_v2(&free_bytes, &total_bytes))
        pool->free_bytes = free_bytes + arena_bytes_held;
    this_thread.in_recorder_call = was_in_recorder_call;
}

bool arena_memory_provide(const arena_pool *pool, launch_arena *unused)
{
    unsigned entries_log2 = affordable_entries_log2(pool);
    arena_memory new_memory;
    if (unused->memory.device_memory && unused->memory.entries_log2 >= entries_log2)
        return true;
    if (graphs_is_capturing() || !arena_create(&new_memory, pool->context, pool->stream, entries_log2))
        return unused->memory
            .device_memory; /* during a stream capture, an allocation could invalidate the capture */
    arena_free(&unused->memory);
    unused->memory = new_memory;
    record_arena_size(pool);
    return true;
}

void arena_memory_release(arena_pool *pool, bool destroy_stream)
{
    const driver_functions *driver = driver_api();
    bool has_freed_memory = false;
    for (size_t i = 0; i < ARENAS; i++) {
        has_freed_memory = has_freed_memory || pool->arenas[i].memory.device_memory;
        arena_free(&pool->arenas[i].memory);
    }
    if (has_freed_memory)
        record_arena_size(pool);
    if (driver && destroy_stream)
        driver->cuStreamDestroy_v2(pool->driver_stream);
}
