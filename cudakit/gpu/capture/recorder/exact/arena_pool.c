#include "exact/arena_pool.h"

#include <stdlib.h>
#include <string.h>

#include "decode/emit_accesses.h"
#include "exact/patching.h"
#include "model/graphs.h"
#include "recorder.h"

#define MAX_POOLS 32
#define POLL_INTERVAL_NS 20000000
#define READ_INTERVAL_NS 100000000
/* Minimum number of launches in an arena before it is read, and in the current arena while the other one is
 * read. With fewer, a device that lags behind the host would run out of queued launches during the read; with
 * more, the bitmaps of two arenas no longer fit into the L2 cache. */
#define MIN_LAUNCHES_PER_READ 256
/* Maximum time that a launch is delayed while no arena has space; accesses that are lost then are reported
 * as gaps. */
#define LAUNCH_WAIT_LIMIT_NS 500000000
#define FINISH_WAIT_LIMIT_NS 5000000000

static arena_pool *pools[MAX_POOLS];
static size_t pool_count;
static arena_copy copy; /* protected by the reader lock */

arena_pool *pool_find(CUcontext context)
{
    for (size_t i = 0; i < pool_count; i++)
        if (pools[i]->context == context)
            return pools[i];
    return NULL;
}

bool pool_owns_stream(Sanitizer_StreamHandle stream)
{
    for (size_t i = 0; i < pool_count; i++)
        if (stream && pools[i]->stream == stream)
            return true;
    return false;
}

static void reset(arena *one)
{
    pthread_mutex_lock(&recorder_lock);
    if (one->used)
        memset(one->launches, 0, one->used * sizeof *one->launches);
    one->used = one->streams.markers = 0;
    one->expected_pages = one->stores.count = 0;
    one->streams.count = 0;
    one->spoiled = one->retired = false;
    pthread_mutex_unlock(&recorder_lock);
}

/* --- creation --------------------------------------------------------------------------------- */

/* Pools are never freed, because another thread may be about to use one. The pool of a destroyed context is
 * reused. */
static arena_pool *new_pool(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    arena_pool *made = pool_find(NULL);
    if (made)
        made->context = context;
    pthread_mutex_unlock(&recorder_lock);
    for (size_t i = 0; made && i < ARENAS; i++) {
        made->arenas[i].memory.allocated = NULL; /* was destroyed with its context */
        reset(made->arenas + i);
    }
    if (!made && pool_count < MAX_POOLS && (made = calloc(1, sizeof *made)))
        made->context = context;
    return made;
}

static arena_pool *create_pool(CUcontext context)
{
    arena_pool *made = new_pool(context);
    if (!made)
        return NULL;
    made->stream = supply_stream(context, &made->own_stream);
    bool works = made->stream && supply_memory(made, made->arenas);
    pthread_mutex_lock(&recorder_lock);
    made->polled_ns = monotonic_now_ns();
    made->read_ns = 0;
    made->current = works ? made->arenas : NULL;
    made->off = !works;
    made->stuck = false;
    if (!pool_find(context))
        pools[pool_count++] = made;
    if (!works)
        record_gap("no device memory for what kernels access: accesses from arguments");
    pthread_mutex_unlock(&recorder_lock);
    return made;
}

arena_pool *pool_open(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    arena_pool *pool = context ? pool_find(context) : NULL;
    bool wanted = !pool && patching_is_active(context) && !graphs_is_capturing();
    pthread_mutex_unlock(&recorder_lock);
    if (!wanted || !reader_lock_acquire(LAUNCH_WAIT_LIMIT_NS))
        return pool;
    pool = pool_find(context); /* another thread may have created it meanwhile */
    if (!pool)
        pool = create_pool(context);
    reader_lock_release();
    return pool;
}

/* --- reading ---------------------------------------------------------------------------------- */

static bool is_complete(const arena *one)
{
    arena_top top;
    pthread_mutex_lock(&recorder_lock);
    bool enqueued = !one->entering;
    pthread_mutex_unlock(&recorder_lock);
    if (!enqueued || arena_streams_complete(&one->streams, NULL))
        return enqueued;
    return one->streams.markers && arena_copy_top(&one->memory, &top) &&
           arena_streams_complete(&one->streams, &top);
}

/* Write the accesses in a retired arena to the trace and clear it for reuse. */
static void read_arena(arena_pool *pool, arena *from)
{
    bool fetched = from->memory.allocated && arena_copy_all(&from->memory, &copy);
    if (!fetched)
        memset(&copy.top, 0, sizeof copy.top), copy.pages.count = 0;
    emit_accesses(&copy, from->launches, from->used, &from->stores, from->spoiled || !fetched);
    if (!fetched || !arena_clear(&from->memory, &copy.top.header))
        arena_free(&from->memory); /* the next launches get new memory */
    reset(from);
    pool->stuck = false;
    pool->read_ns = monotonic_now_ns();
}

static void read_if_complete(arena_pool *pool, arena *one)
{
    arena_streams_mark(&one->streams, &one->memory, NULL); /* on streams that could not be marked before */
    if (is_complete(one))
        read_arena(pool, one);
}

static void read_retired(arena_pool *pool)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (pool->arenas[i].retired)
            read_if_complete(pool, pool->arenas + i);
}

/* Whether the next launches may need the space, and would be delayed. */
static bool is_large(const arena *one)
{
    return one->expected_pages > one->memory.pages / 4;
}

/* When the host has just waited, the device is idle. Reading is deferred until new launches keep the device
 * busy, but not for long: there may be no further launches. */
static bool is_due(const arena_pool *pool, const arena *one)
{
    return is_large(one) || !pool->current || pool->current->used >= MIN_LAUNCHES_PER_READ ||
           monotonic_now_ns() - pool->read_ns >= READ_INTERVAL_NS;
}

static void read_due(arena_pool *pool)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (pool->arenas[i].retired && is_due(pool, pool->arenas + i))
            read_if_complete(pool, pool->arenas + i);
}

/* --- replacing the current arena -------------------------------------------------------------- */

static arena *unused_arena(arena_pool *pool)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (pool->arenas + i != pool->current && !pool->arenas[i].retired)
            return pool->arenas + i;
    return NULL;
}

static bool replace_current(arena_pool *pool)
{
    arena *next = unused_arena(pool);
    bool provided = next && supply_memory(pool, next);
    pthread_mutex_lock(&recorder_lock);
    arena *full = pool->current;
    bool replaced = provided && (!full || (full->used && !full->entering));
    if (replaced) {
        if (full)
            full->retired = true;
        pool->current = next;
    }
    pthread_mutex_unlock(&recorder_lock);
    if (replaced && full)
        arena_streams_mark(&full->streams, &full->memory, NULL);
    return replaced;
}

/* --- polling ---------------------------------------------------------------------------------- */

#define SEVEN_EIGHTHS(total) ((total) / 8 * 7)

enum { HAS_SPACE, HALF_FULL, FULL };

static int fill_level(const arena *one)
{
    arena_top top;
    pthread_mutex_lock(&recorder_lock);
    uint32_t used = one->used;
    bool many_streams = one->streams.count > MAX_MARKERS / 2;
    pthread_mutex_unlock(&recorder_lock);
    if (used > SEVEN_EIGHTHS(CK_MAX_LAUNCHES))
        return FULL;
    if (!arena_copy_top(&one->memory, &top))
        return HAS_SPACE;
    if (top.header.cursor > SEVEN_EIGHTHS(one->memory.pages))
        return FULL;
    bool half = top.header.cursor > one->memory.pages / 2 || used > CK_MAX_LAUNCHES / 2;
    return half || many_streams ? HALF_FULL : HAS_SPACE;
}

/* After a timeout, as behind a kernel that waits for the host, later launches are not delayed. */
static void wait_for_free_arena(arena_pool *pool)
{
    const int64_t until = monotonic_now_ns() + LAUNCH_WAIT_LIMIT_NS;
    read_retired(pool);
    while (!replace_current(pool)) {
        if (pool->stuck || monotonic_now_ns() >= until) {
            pool->stuck = true;
            return;
        }
        sleep_briefly();
        read_retired(pool);
    }
}

static void poll_pool(arena_pool *pool, bool host_waits)
{
    read_due(pool);
    pool->polled_ns = monotonic_now_ns();
    pool->launches_since_poll = 0;
    if (!pool->current || (host_waits && pool->current->used)) {
        if (replace_current(pool))
            read_due(pool);
        return;
    }
    int state = fill_level(pool->current);
    if (state != HAS_SPACE)
        read_retired(pool);
    if (state == HALF_FULL)
        replace_current(pool);
    if (state == FULL)
        wait_for_free_arena(pool);
}

void pool_poll(arena_pool *pool, bool host_waits)
{
    pthread_mutex_lock(&recorder_lock);
    bool early = host_waits && pool->current && pool->current->used < MIN_LAUNCHES_PER_READ &&
                 !is_large(pool->current) && monotonic_now_ns() - pool->polled_ns < POLL_INTERVAL_NS;
    pthread_mutex_unlock(&recorder_lock);
    if (early || !reader_lock_acquire(0))
        return;
    if (!pool->off)
        poll_pool(pool, host_waits);
    reader_lock_release();
}

static bool has_space(const arena *in, uint64_t pages, uint64_t indices)
{
    return !in->used || (in->expected_pages + pages <= SEVEN_EIGHTHS(in->memory.pages) &&
                         in->used + indices <= CK_MAX_LAUNCHES);
}

void pool_reserve(arena_pool *pool, uint64_t pages, uint64_t indices)
{
    pthread_mutex_lock(&recorder_lock);
    bool wanted = pool->current && !has_space(pool->current, pages, indices);
    pthread_mutex_unlock(&recorder_lock);
    if (wanted && reader_lock_acquire(0)) {
        if (pool->current && !has_space(pool->current, pages, indices))
            wait_for_free_arena(pool);
        reader_lock_release();
    }
    pthread_mutex_lock(&recorder_lock);
    if (pool->current)
        pool->current->expected_pages += pages;
    pthread_mutex_unlock(&recorder_lock);
}

/* --- destruction of streams and contexts ------------------------------------------------------ */

void pool_stream_destroying(arena_pool *pool, Sanitizer_StreamHandle stream)
{
    bool wanted = false;
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        wanted = wanted || arena_streams_pending(&pool->arenas[i].streams, stream);
    pthread_mutex_unlock(&recorder_lock);
    if (wanted && reader_lock_acquire(LAUNCH_WAIT_LIMIT_NS)) {
        for (size_t i = 0; i < ARENAS; i++)
            arena_streams_mark(&pool->arenas[i].streams, &pool->arenas[i].memory, stream);
        reader_lock_release();
    }
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        arena_streams_forget(&pool->arenas[i].streams, stream);
    pthread_mutex_unlock(&recorder_lock);
}

/* Read an arena at program end. Wait for markers, not for streams: a kernel that never ends must not keep
 * the process from exiting. Memory that such a kernel may still write to is not freed. */
static void finish_arena(arena_pool *pool, arena *one)
{
    const int64_t until = monotonic_now_ns() + FINISH_WAIT_LIMIT_NS;
    arena_top top;
    arena_streams_mark(&one->streams, &one->memory, NULL);
    if (!arena_streams_wait_unmarked(&one->streams))
        one->spoiled = true;
    while (!is_complete(one)) {
        if (monotonic_now_ns() >= until || !arena_copy_top(&one->memory, &top)) {
            one->memory.allocated = NULL;
            break;
        }
        sleep_briefly();
    }
    read_arena(pool, one);
}

static void finish(arena_pool *pool)
{
    pthread_mutex_lock(&recorder_lock);
    if (pool->current)
        pool->current->retired = pool->current->used;
    pool->current = NULL;
    pthread_mutex_unlock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        if (pool->arenas[i].retired)
            finish_arena(pool, pool->arenas + i);
}

void pool_read(void)
{
    if (!reader_lock_acquire(FINISH_WAIT_LIMIT_NS))
        return;
    for (size_t i = 0; i < pool_count; i++)
        if (pools[i]->context && !pools[i]->off)
            finish(pools[i]);
    reader_lock_release();
}

/* Another thread holds the reader lock for too long: the arenas are destroyed unread, with their context. */
static void abandon_context(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    arena_pool *pool = pool_find(context);
    if (pool) {
        pool->off = true;
        pool->context = NULL;
        pool->current = NULL;
        record_gap("a context that was destroyed before what its kernels access was read");
    }
    pthread_mutex_unlock(&recorder_lock);
}

void pool_finish(CUcontext context)
{
    if (!reader_lock_acquire(FINISH_WAIT_LIMIT_NS)) {
        if (context)
            abandon_context(context);
        return;
    }
    for (size_t i = pool_count; i-- > 0;) {
        arena_pool *pool = pools[i];
        if (!pool->context || (context && pool->context != context))
            continue;
        if (!pool->off) {
            finish(pool);
            supply_end(pool, !context);
        }
        pthread_mutex_lock(&recorder_lock);
        pool->off = true;
        if (context)
            pool->context = NULL;
        pthread_mutex_unlock(&recorder_lock);
    }
    reader_lock_release();
}

void pool_clear(void)
{
    reader_lock_reset();
    memset(&copy, 0, sizeof copy); /* another thread may have been changing it during the fork */
    pool_count = 0;
}
