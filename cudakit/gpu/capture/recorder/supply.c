#include "supply.h"

#include "allocations.h"
#include "driver.h"
#include "graphs.h"
#include "recorder.h"

/* Of what the program has allocated, arenas take a tenth in all, and at least 256 MiB. */
#define LEAST_ENTRIES_LOG2 17

Sanitizer_StreamHandle supply_stream(CUcontext context, CUstream *stream)
{
    const driver_queries *ask = driver();
    Sanitizer_StreamHandle handle = NULL;
    if (ask && !ask->cuStreamCreate(stream, STREAM_NON_BLOCKING) &&
        sanitizer.stream_handle(context, *stream, &handle))
        handle = NULL;
    return handle;
}

static void tell_size(const pool *of)
{
    uint64_t bytes = 0;
    for (size_t i = 0; i < ARENAS; i++)
        bytes += of->arenas[i].memory.allocated ? of->arenas[i].memory.size_bytes : 0;
    pthread_mutex_lock(&recorder_lock);
    record made = record_begin(KIND_ARENAS, number_of_context(of->context), 0, 0);
    made.arenas.size_bytes = bytes;
    record_one(&made);
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

bool supply_memory(const pool *of, arena *unused)
{
    unsigned wanted = wanted_entries_log2();
    arena_memory larger;
    if (unused->memory.allocated && unused->memory.entries_log2 >= wanted)
        return true;
    if (graphs_are_captured() || !arena_make(&larger, of->context, of->stream, wanted))
        return unused->memory.allocated; /* to allocate could break the capture */
    arena_free(&unused->memory);
    unused->memory = larger;
    tell_size(of);
    return true;
}

void supply_end(pool *of, bool stream)
{
    const driver_queries *ask = driver();
    bool any = false;
    for (size_t i = 0; i < ARENAS; i++) {
        any = any || of->arenas[i].memory.allocated;
        arena_free(&of->arenas[i].memory);
    }
    if (any)
        tell_size(of);
    if (ask && stream)
        ask->cuStreamDestroy_v2(of->own);
}
