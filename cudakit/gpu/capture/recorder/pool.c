#include "pool.h"

#include <stdlib.h>
#include <string.h>

#include "graphs.h"
#include "looking.h"
#include "patching.h"
#include "recorder.h"
#include "supply.h"
#include "telling.h"

#define MAX_POOLS 32
#define LOOK_EVERY_NS 20000000
#define READ_EVERY_NS 100000000
/* So many make an arena worth reading, and so many are enqueued before it is read: with fewer, a device that is
 * behind the host would run out of them meanwhile; with more, the bits of two arenas leave its cache. */
#define ENOUGH_LAUNCHES 256
/* So long a launch is held back while there is no room; what is not told then is said to be missing. */
#define PATIENCE_NS 500000000
#define PATIENCE_AT_END_NS 5000000000

static pool *pools[MAX_POOLS];
static size_t pool_count;
static arena_copy copy; /* of whoever looks */

pool *pool_of(CUcontext context)
{
    for (size_t i = 0; i < pool_count; i++)
        if (pools[i]->context == context)
            return pools[i];
    return NULL;
}

bool pool_owns(Sanitizer_StreamHandle stream)
{
    for (size_t i = 0; i < pool_count; i++)
        if (stream && pools[i]->stream == stream)
            return true;
    return false;
}

static void reset(arena *of)
{
    pthread_mutex_lock(&recorder_lock);
    if (of->used)
        memset(of->launches, 0, of->used * sizeof *of->launches);
    of->used = of->uses.markers = 0;
    of->expected = of->stores.count = 0;
    of->uses.count = 0;
    of->spoiled = of->retired = false;
    pthread_mutex_unlock(&recorder_lock);
}

/* --- pools come ------------------------------------------------------------------------------------ */

/* Pools are never freed, a thread may be about to look at one; but that of a context that is gone is given to
 * another one. */
static pool *new_pool(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    pool *made = pool_of(NULL);
    if (made)
        made->context = context;
    pthread_mutex_unlock(&recorder_lock);
    for (size_t i = 0; made && i < ARENAS; i++) {
        made->arenas[i].memory.allocated = NULL; /* what was not freed is gone with its context */
        reset(made->arenas + i);
    }
    if (!made && pool_count < MAX_POOLS && (made = calloc(1, sizeof *made)))
        made->context = context;
    return made;
}

static pool *make(CUcontext context)
{
    pool *made = new_pool(context);
    if (!made)
        return NULL;
    made->stream = supply_stream(context, &made->own);
    bool works = made->stream && supply_memory(made, made->arenas);
    pthread_mutex_lock(&recorder_lock);
    made->looked_ns = looking_now_ns();
    made->read_ns = 0;
    made->current = works ? made->arenas : NULL;
    made->off = !works;
    made->stuck = false;
    if (!pool_of(context))
        pools[pool_count++] = made;
    if (!works)
        record_gap("no device memory for what kernels access: accesses from arguments");
    pthread_mutex_unlock(&recorder_lock);
    return made;
}

pool *pool_open(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    pool *of = context ? pool_of(context) : NULL;
    bool wanted = !of && patching_is_in(context) && !graphs_are_captured();
    pthread_mutex_unlock(&recorder_lock);
    if (!wanted || !looking_begin(PATIENCE_NS))
        return of;
    of = pool_of(context); /* of another thread's making, meanwhile */
    if (!of)
        of = make(context);
    looking_end();
    return of;
}

/* --- arenas are read ------------------------------------------------------------------------------- */

static bool is_complete(const arena *of)
{
    arena_top top;
    pthread_mutex_lock(&recorder_lock);
    bool entered = !of->entering;
    pthread_mutex_unlock(&recorder_lock);
    if (!entered || uses_are_done(&of->uses, NULL))
        return entered;
    return of->uses.markers && arena_look(&of->memory, &top) && uses_are_done(&of->uses, &top);
}

/* Tell what a retired arena holds, and have it ready for other launches. */
static void take(pool *of, arena *from)
{
    bool fetched = from->memory.allocated && arena_fetch(&from->memory, &copy);
    if (!fetched)
        memset(&copy.top, 0, sizeof copy.top), copy.pages.count = 0;
    tell(&copy, from->launches, from->used, &from->stores, from->spoiled || !fetched);
    if (!fetched || !arena_clear(&from->memory, &copy.top.header))
        arena_free(&from->memory); /* the next launches get a new one */
    reset(from);
    of->stuck = false;
    of->read_ns = looking_now_ns();
}

static void read_one(pool *of, arena *one)
{
    uses_mark(&one->uses, &one->memory, NULL); /* what could not be, when it was retired */
    if (is_complete(one))
        take(of, one);
}

static void read_retired(pool *of)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (of->arenas[i].retired)
            read_one(of, of->arenas + i);
}

/* The next launch may need the room, and would be held back. */
static bool is_much(const arena *one)
{
    return one->expected > one->memory.pages / 4;
}

/* When the host has waited, the device has nothing to do: what was retired then is read behind the next launches.
 * Not so where there were none for so long that this may have been the last time. */
static bool is_due(const pool *of, const arena *one)
{
    return is_much(one) || !of->current || of->current->used >= ENOUGH_LAUNCHES ||
           looking_now_ns() - of->read_ns >= READ_EVERY_NS;
}

static void read_due(pool *of)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (of->arenas[i].retired && is_due(of, of->arenas + i))
            read_one(of, of->arenas + i);
}

/* --- arenas are retired ---------------------------------------------------------------------------- */

static arena *free_arena(pool *of)
{
    for (size_t i = 0; i < ARENAS; i++)
        if (of->arenas + i != of->current && !of->arenas[i].retired)
            return of->arenas + i;
    return NULL;
}

static bool retire(pool *of)
{
    arena *next = free_arena(of);
    bool provided = next && supply_memory(of, next);
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
        uses_mark(&full->uses, &full->memory, NULL);
    return turned;
}

/* --- when ------------------------------------------------------------------------------------------ */

#define MOST(of_all) ((of_all) / 8 * 7)

enum { ROOM, HALF_FULL, FULL };

static int filled(const arena *of)
{
    arena_top top;
    pthread_mutex_lock(&recorder_lock);
    uint32_t used = of->used;
    bool many_streams = of->uses.count > MAX_MARKERS / 2;
    pthread_mutex_unlock(&recorder_lock);
    if (used > MOST(CK_MAX_LAUNCHES))
        return FULL;
    if (!arena_look(&of->memory, &top))
        return ROOM;
    if (top.header.cursor > MOST(of->memory.pages))
        return FULL;
    bool half = top.header.cursor > of->memory.pages / 2 || used > CK_MAX_LAUNCHES / 2;
    return half || many_streams ? HALF_FULL : ROOM;
}

/* Where it was in vain, as behind a kernel that waits for the host, the next launches are not held back. */
static void wait_for_room(pool *of)
{
    const int64_t until = looking_now_ns() + PATIENCE_NS;
    read_retired(of);
    while (!retire(of)) {
        if (of->stuck || looking_now_ns() >= until) {
            of->stuck = true;
            return;
        }
        looking_pause();
        read_retired(of);
    }
}

static void look(pool *of, bool host_waits)
{
    read_due(of);
    of->looked_ns = looking_now_ns();
    of->since_looked = 0;
    if (!of->current || (host_waits && of->current->used)) {
        if (retire(of))
            read_due(of);
        return;
    }
    int state = filled(of->current);
    if (state != ROOM)
        read_retired(of);
    if (state == HALF_FULL)
        retire(of);
    if (state == FULL)
        wait_for_room(of);
}

void pool_look(pool *of, bool host_waits)
{
    pthread_mutex_lock(&recorder_lock);
    bool early = host_waits && of->current && of->current->used < ENOUGH_LAUNCHES && !is_much(of->current) &&
                 looking_now_ns() - of->looked_ns < LOOK_EVERY_NS;
    pthread_mutex_unlock(&recorder_lock);
    if (early || !looking_begin(0))
        return;
    if (!of->off)
        look(of, host_waits);
    looking_end();
}

static bool has_room(const arena *in, uint64_t pages, uint64_t indices)
{
    return !in->used || (in->expected + pages <= MOST(in->memory.pages) && in->used + indices <= CK_MAX_LAUNCHES);
}

void pool_reserve(pool *of, uint64_t pages, uint64_t indices)
{
    pthread_mutex_lock(&recorder_lock);
    bool wanted = of->current && !has_room(of->current, pages, indices);
    pthread_mutex_unlock(&recorder_lock);
    if (wanted && looking_begin(0)) {
        if (of->current && !has_room(of->current, pages, indices))
            wait_for_room(of);
        looking_end();
    }
    pthread_mutex_lock(&recorder_lock);
    if (of->current)
        of->current->expected += pages;
    pthread_mutex_unlock(&recorder_lock);
}

/* --- streams and contexts go ----------------------------------------------------------------------- */

void pool_stream_gone(pool *of, Sanitizer_StreamHandle stream)
{
    bool wanted = false;
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        wanted = wanted || uses_wait_for(&of->arenas[i].uses, stream);
    pthread_mutex_unlock(&recorder_lock);
    if (wanted && looking_begin(PATIENCE_NS)) {
        for (size_t i = 0; i < ARENAS; i++)
            uses_mark(&of->arenas[i].uses, &of->arenas[i].memory, stream);
        looking_end();
    }
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        uses_forget(&of->arenas[i].uses, stream);
    pthread_mutex_unlock(&recorder_lock);
}

/* Read an arena at the end. Markers are waited for, not streams: a kernel that never ends would keep the
 * process from ending. What it may still write to is not given back. */
static void finish_arena(pool *of, arena *one)
{
    const int64_t until = looking_now_ns() + PATIENCE_AT_END_NS;
    arena_top top;
    uses_mark(&one->uses, &one->memory, NULL);
    if (!uses_wait(&one->uses))
        one->spoiled = true;
    while (!is_complete(one)) {
        if (looking_now_ns() >= until || !arena_look(&one->memory, &top)) {
            one->memory.allocated = NULL;
            break;
        }
        looking_pause();
    }
    take(of, one);
}

static void finish(pool *of)
{
    pthread_mutex_lock(&recorder_lock);
    if (of->current)
        of->current->retired = of->current->used;
    of->current = NULL;
    pthread_mutex_unlock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        if (of->arenas[i].retired)
            finish_arena(of, of->arenas + i);
}

void pool_read(void)
{
    if (!looking_begin(PATIENCE_AT_END_NS))
        return;
    for (size_t i = 0; i < pool_count; i++)
        if (pools[i]->context && !pools[i]->off)
            finish(pools[i]);
    looking_end();
}

/* Somebody looks for too long: the arenas go with their context, unread. */
static void abandon(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    pool *of = pool_of(context);
    if (of) {
        of->off = true;
        of->context = NULL;
        of->current = NULL;
        record_gap("a context that was destroyed before what its kernels access was read");
    }
    pthread_mutex_unlock(&recorder_lock);
}

void pool_finish(CUcontext context)
{
    if (!looking_begin(PATIENCE_AT_END_NS)) {
        if (context)
            abandon(context);
        return;
    }
    for (size_t i = pool_count; i-- > 0;) {
        pool *of = pools[i];
        if (!of->context || (context && of->context != context))
            continue;
        if (!of->off) {
            finish(of);
            supply_end(of, !context);
        }
        pthread_mutex_lock(&recorder_lock);
        of->off = true;
        if (context)
            of->context = NULL;
        pthread_mutex_unlock(&recorder_lock);
    }
    looking_end();
}

void pool_clear(void)
{
    looking_clear();
    memset(&copy, 0, sizeof copy); /* another thread may have been about to change it */
    pool_count = 0;
}
