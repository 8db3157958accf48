#define _GNU_SOURCE
#include "pool.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "allocations.h"
#include "driver.h"
#include "graphs.h"
#include "patching.h"
#include "recorder.h"
#include "telling.h"

#define MAX_POOLS 32
/* Of what the program has allocated, arenas take a tenth in all, and at least 256 MiB. */
#define LEAST_ENTRIES_LOG2 17
#define LOOK_EVERY_NS 20000000
#define LOOK_AT_LAUNCHES 512
/* So long a launch is held back while there is no room; what is not told then is said to be missing. */
#define PATIENCE_NS 500000000
#define PATIENCE_STEP_US 200

static pool *pools[MAX_POOLS];
static size_t pool_count;
static pthread_mutex_t looking = PTHREAD_MUTEX_INITIALIZER; /* whoever reads, makes or clears arenas */
static arena_copy copy;                                     /* guarded by it */

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

pool *pool_of(CUcontext context)
{
    for (size_t i = 0; i < pool_count; i++)
        if (pools[i]->context == context)
            return pools[i];
    return NULL;
}

stream_use *pool_use(arena *of, Sanitizer_StreamHandle stream)
{
    for (size_t i = of->use_count; i-- > 0;)
        if (of->uses[i].stream == stream)
            return of->uses + i;
    if (of->use_count == of->use_room) {
        size_t room = of->use_room ? 2 * of->use_room : 16;
        stream_use *moved = realloc(of->uses, room * sizeof *moved);
        if (!moved)
            return NULL;
        of->uses = moved;
        of->use_room = room;
    }
    of->uses[of->use_count] = (stream_use){.stream = stream};
    return of->uses + of->use_count++;
}

/* --- arenas come ----------------------------------------------------------------------------------- */

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

/* An arena that launches can use: of the size that is wanted now, and empty. */
static bool provide(pool *of, arena *free)
{
    unsigned wanted = wanted_entries_log2();
    arena_memory larger;
    if (free->memory.allocated && free->memory.entries_log2 >= wanted)
        return true;
    if (!arena_make(&larger, of->context, of->stream, wanted))
        return free->memory.allocated;
    arena_free(&free->memory);
    free->memory = larger;
    tell_size(of);
    return true;
}

static Sanitizer_StreamHandle stream_of_our_own(CUcontext context)
{
    const driver_queries *ask = driver();
    Sanitizer_StreamHandle handle = NULL;
    CUstream stream;
    if (ask && !ask->cuStreamCreate(&stream, STREAM_NON_BLOCKING) &&
        sanitizer.stream_handle(context, stream, &handle))
        handle = NULL;
    return handle;
}

pool *pool_open(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    pool *of = pool_of(context);
    bool wanted = !of && patching_is_in(context) && pool_count < MAX_POOLS && !graphs_are_captured();
    pthread_mutex_unlock(&recorder_lock);
    if (!wanted || pthread_mutex_trylock(&looking))
        return of;
    this_thread.own_query = true;
    pool *made = pool_of(context) ? NULL : calloc(1, sizeof *made);
    if (made) {
        made->context = context;
        made->stream = stream_of_our_own(context);
        made->off = !made->stream || !provide(made, made->arenas);
        made->current = made->off ? NULL : made->arenas;
        made->looked_ns = now_ns();
    }
    this_thread.own_query = false;
    pthread_mutex_lock(&recorder_lock);
    if (made)
        pools[pool_count++] = made;
    if (made && made->off)
        record_gap("no device memory for what kernels access: accesses from arguments");
    pthread_mutex_unlock(&recorder_lock);
    pthread_mutex_unlock(&looking);
    return made;
}

/* --- arenas are retired ---------------------------------------------------------------------------- */

static arena *free_arena(pool *of)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (of->arenas + i != of->current && !of->arenas[i].retired)
            return of->arenas + i;
    return NULL;
}

/* Have the streams that nobody waited for say when they have come so far. What is captured runs never. */
static void mark(arena *of, Sanitizer_StreamHandle only)
{
    for (size_t i = 0; i < of->use_count; i++) {
        pthread_mutex_lock(&recorder_lock);
        stream_use use = of->uses[i];
        bool needed = use.stream && use.done < use.enqueued && use.marked < use.enqueued &&
                      (!only || use.stream == only) && of->markers < MAX_MARKERS &&
                      !graphs_are_captured();
        uint32_t marker = needed ? of->markers++ : 0;
        pthread_mutex_unlock(&recorder_lock);
        if (!needed || !arena_mark(&of->memory, marker, use.stream))
            continue;
        pthread_mutex_lock(&recorder_lock);
        of->uses[i].marker = marker;
        of->uses[i].marked = use.enqueued;
        pthread_mutex_unlock(&recorder_lock);
    }
}

static bool retire(pool *of)
{
    arena *next = free_arena(of);
    bool provided = next && provide(of, next);
    pthread_mutex_lock(&recorder_lock);
    arena *full = of->current;
    bool turned = provided && (!full || (full->used && !full->entering));
    if (turned) {
        if (full)
            full->retired = true;
        of->current = next;
    }
    pthread_mutex_unlock(&recorder_lock);
    if (turned && full)
        mark(full, NULL);
    return turned;
}

/* --- arenas are read ------------------------------------------------------------------------------- */

static bool is_done(const stream_use *use, const arena_top *top)
{
    return use->done == use->enqueued ||
           (top && use->marked == use->enqueued && top->markers[use->marker]);
}

static bool is_complete(const arena *of, const arena_top *top)
{
    bool complete = !of->entering;
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < of->use_count; i++)
        complete = complete && is_done(of->uses + i, top);
    pthread_mutex_unlock(&recorder_lock);
    return complete;
}

static void reset(arena *of)
{
    pthread_mutex_lock(&recorder_lock);
    memset(of->launches, 0, of->used * sizeof *of->launches);
    of->used = of->markers = 0;
    of->large_pages = of->stores.count = 0;
    of->use_count = 0;
    of->spoiled = of->retired = false;
    pthread_mutex_unlock(&recorder_lock);
}

/* Read what a retired arena holds, if all of it is there. */
static bool read_arena(arena *of)
{
    arena_top top;
    if (!is_complete(of, NULL) &&
        (!of->markers || !arena_look(&of->memory, &top) || !is_complete(of, &top)))
        return false;
    bool fetched = arena_fetch(&of->memory, &copy);
    if (!fetched)
        memset(&copy.top, 0, sizeof copy.top), copy.pages.count = 0;
    tell(&copy, of->launches, of->used, &of->stores, of->spoiled || !fetched);
    if (fetched && arena_clear(&of->memory, &copy.top.header)) {
        reset(of);
        return true;
    }
    arena_free(&of->memory); /* the next launches get a new one */
    reset(of);
    return true;
}

static void read_retired(pool *of)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (of->arenas[i].retired)
            read_arena(of->arenas + i);
}

/* --- when ------------------------------------------------------------------------------------------ */

enum { ROOM, HALF_FULL, FULL };

static int filled(const arena *of)
{
    arena_top top;
    if (of->used > CK_MAX_LAUNCHES / 8 * 7)
        return FULL;
    if (!arena_look(&of->memory, &top))
        return ROOM;
    if (top.header.cursor > of->memory.pages / 8 * 7)
        return FULL;
    return top.header.cursor > of->memory.pages / 2 || of->used > CK_MAX_LAUNCHES / 2 ? HALF_FULL : ROOM;
}

static void wait_for_room(pool *of)
{
    const int64_t until = now_ns() + PATIENCE_NS;
    while (!retire(of) && now_ns() < until) {
        usleep(PATIENCE_STEP_US);
        read_retired(of);
    }
}

static void look(pool *of, bool host_waits)
{
    read_retired(of);
    of->looked_ns = now_ns();
    of->since_looked = 0;
    if (!of->current || (host_waits && of->current->used)) {
        if (retire(of))
            read_retired(of);
        return;
    }
    int state = filled(of->current);
    if (state == HALF_FULL)
        retire(of);
    if (state == FULL)
        wait_for_room(of);
}

void pool_look(pool *of, bool host_waits)
{
    if (host_waits && of->current && of->current->used < LOOK_AT_LAUNCHES &&
        now_ns() - of->looked_ns < LOOK_EVERY_NS)
        return;
    if (pthread_mutex_trylock(&looking))
        return;
    this_thread.own_query = true;
    look(of, host_waits);
    this_thread.own_query = false;
    pthread_mutex_unlock(&looking);
}

#define MOST(pages) ((pages) / 8 * 7)

void pool_reserve(pool *of, uint64_t pages)
{
    if (!of->current || pages < of->current->memory.pages / 8 || pthread_mutex_trylock(&looking))
        return;
    this_thread.own_query = true;
    if (of->current->large_pages && of->current->large_pages + pages > MOST(of->current->memory.pages))
        wait_for_room(of);
    of->current->large_pages += pages;
    this_thread.own_query = false;
    pthread_mutex_unlock(&looking);
}

void pool_mark(pool *of, Sanitizer_StreamHandle stream)
{
    /* Where another thread reads, the stream goes unmarked: the context will be waited for, or the end. */
    if (!pthread_mutex_trylock(&looking)) {
        this_thread.own_query = true;
        for (size_t i = 0; i < ARENAS; i++)
            mark(of->arenas + i, stream);
        this_thread.own_query = false;
        pthread_mutex_unlock(&looking);
    }
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        for (size_t j = 0; j < of->arenas[i].use_count; j++)
            if (of->arenas[i].uses[j].stream == stream)
                of->arenas[i].uses[j].stream = NULL;
    pthread_mutex_unlock(&recorder_lock);
}

static void finish(pool *of)
{
    for (size_t i = 0; i < ARENAS; i++) {
        arena *one = of->arenas + i;
        for (size_t j = 0; j < one->use_count; j++) {
            stream_use *use = one->uses + j;
            if (use->done < use->enqueued && use->stream)
                sanitizer.stream_synchronize(use->stream);
            use->done = use->enqueued;
        }
        if (one->used && one->memory.allocated)
            read_arena(one);
    }
}

void pool_finish(CUcontext context, bool gone)
{
    pthread_mutex_lock(&looking);
    this_thread.own_query = true;
    for (size_t i = pool_count; i-- > 0;) {
        pool *of = pools[i];
        if (context && of->context != context)
            continue;
        finish(of);
        if (!gone)
            continue;
        pthread_mutex_lock(&recorder_lock);
        of->current = NULL;
        of->off = true;
        of->context = NULL; /* the pool stays: a thread may be about to look at it */
        pthread_mutex_unlock(&recorder_lock);
        for (size_t j = 0; j < ARENAS; j++)
            arena_free(&of->arenas[j].memory);
    }
    this_thread.own_query = false;
    pthread_mutex_unlock(&looking);
}

void pool_clear(void)
{
    looking = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    pool_count = 0;
}
