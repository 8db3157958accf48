#include "exact.h"

#include <stdlib.h>
#include <string.h>

#include "machine_code.h"
#include "patching.h"
#include "pool.h"
#include "recorder.h"
#include "telling.h"

#define LOOK_AT_CALLS 64

/* --- places ---------------------------------------------------------------------------------------- */

static bool has_room(arena *of, size_t indices)
{
    if (of->used + indices > CK_MAX_LAUNCHES)
        return false;
    if (of->used + indices <= of->room)
        return true;
    size_t room = of->room ? of->room : 1024;
    while (room < of->used + indices)
        room *= 2;
    record *moved = realloc(of->launches, room * sizeof *moved);
    if (!moved)
        return false;
    memset(moved + of->room, 0, (room - of->room) * sizeof *moved);
    of->launches = moved;
    of->room = room;
    return true;
}

static void place(arena *in, uint32_t index, const record *like, uint32_t node)
{
    record *at = in->launches + index;
    *at = *like;
    memset(at->own, 0, sizeof at->own);
    at->access.node = node;
}

static arena *arena_for(CUcontext context)
{
    pool *of = pool_of(context);
    return of ? of->current : NULL;
}

static void enter(arena *in, Sanitizer_StreamHandle stream)
{
    in->entering++;
    this_thread.entered = in;
    this_thread.entered_stream = stream;
}

#define ALONE "a launch from arguments alone: "

/* --- kernels --------------------------------------------------------------------------------------- */

uint64_t exact_take(const record *like, const Sanitizer_LaunchData *launch)
{
    if (!patching_is_in(launch->context))
        return 0;
    const char *lacks = patching_lacks(launch->module, launch->functionName);
    arena *in = arena_for(launch->context);
    bool stores = lacks && !strcmp(lacks, MACHINE_CODE_TENSOR_STORES);
    if ((lacks && !stores) || !in || !has_room(in, 1) || !pool_use(in, launch->hStream)) {
        record_gap_with(ALONE, lacks ? lacks : "no room for its accesses");
        return 0;
    }
    uint32_t index = in->used;
    if (lacks && !stores_add(&in->stores, index, this_thread.layout, this_thread.parameters, this_thread.extra)) {
        record_gap_with(ALONE, lacks);
        return 0;
    }
    in->used++;
    place(in, index, like, 0);
    enter(in, launch->hStream);
    return CK_USERDATA(in->memory.base, in->memory.entries_log2, index);
}

void exact_entered(void)
{
    if (!this_thread.entered)
        return;
    pthread_mutex_lock(&recorder_lock);
    arena *in = this_thread.entered;
    stream_use *use = pool_use(in, this_thread.entered_stream);
    if (use)
        use->enqueued++;
    in->entering--;
    pthread_mutex_unlock(&recorder_lock);
    this_thread.entered = NULL;
}

/* --- graphs ---------------------------------------------------------------------------------------- */

/* The nodes of a graph that lie in one line all get the user data that was set last, so they are told apart by
 * %gridid, which is the same in every launch of an executable: their index is a base and that. */
#define MAX_EXECUTABLES 65536
static struct {
    uint64_t lo, hi; /* the grids of its kernels; 0: not known */
} grids[MAX_EXECUTABLES];

/* How far the others may be from the first of them, while they are not known. */
#define GRIDS_BEFORE 64
#define GRIDS_BEHIND(kernels) (4 * (uint64_t)(kernels) + 256)

uint32_t exact_graph(const record *like, const Sanitizer_GraphLaunchData *launch, uint32_t executable,
                     uint32_t kernels)
{
    arena *in = patching_is_in(launch->context) ? arena_for(launch->context) : NULL;
    graph_entry *graph = &this_thread.entry;
    *graph = (graph_entry){0};
    if (!in || !kernels || executable >= MAX_EXECUTABLES || !pool_use(in, launch->hStream)) {
        if (kernels && patching_is_in(launch->context))
            record_gap("the launch of a graph from arguments alone: no room for its accesses");
        return 0;
    }
    graph->like = *like;
    graph->executable = executable;
    graph->kernels = graph->left = kernels;
    enter(in, launch->hStream);
    return kernels;
}

/* Reserve the indices of all nodes when the first one comes. */
static bool reserve(arena *in, graph_entry *graph, uint64_t grid)
{
    uint64_t lo = grids[graph->executable].lo, hi = grids[graph->executable].hi;
    if (!hi || grid < lo || grid > hi) {
        lo = grid > GRIDS_BEFORE ? grid - GRIDS_BEFORE : 0;
        hi = grid + GRIDS_BEHIND(graph->kernels);
        grids[graph->executable].lo = grids[graph->executable].hi = grid;
    }
    graph->room = (uint32_t)(hi - lo + 1);
    if (hi - lo >= CK_MAX_LAUNCHES || !has_room(in, graph->room))
        return false;
    graph->base = in->used;
    graph->first_grid = lo;
    in->used += graph->room;
    return true;
}

static uint64_t userdata_of(const arena *in, const graph_entry *graph)
{
    uint32_t field = (uint32_t)(graph->base - graph->first_grid) & (CK_MAX_LAUNCHES - 1);
    return CK_USERDATA(in->memory.base, in->memory.entries_log2, field) | CK_BY_GRID;
}

static void widen(uint32_t executable, uint64_t grid)
{
    if (grid < grids[executable].lo)
        grids[executable].lo = grid;
    if (grid > grids[executable].hi)
        grids[executable].hi = grid;
}

static void leave_out(graph_entry *graph, uint32_t node)
{
    graph->like.access.node = node;
    tell_nothing(&graph->like);
}

uint64_t exact_node(const Sanitizer_LaunchData *launch, uint32_t node)
{
    arena *in = this_thread.entered;
    graph_entry *graph = &this_thread.entry;
    if (!in || !graph->left)
        return 0;
    graph->left--;
    memset(graph->like.own, 0, sizeof graph->like.own);
    if (!graph->refused && !graph->room && !reserve(in, graph, launch->gridId))
        graph->refused = true;
    const char *lacks = patching_lacks(launch->module, launch->functionName);
    if (lacks)
        record_gap_with("a kernel of a graph from arguments alone: ", lacks);
    if (graph->refused || lacks || !node) {
        leave_out(graph, node);
        return graph->refused ? 0 : userdata_of(in, graph);
    }
    widen(graph->executable, launch->gridId);
    uint64_t behind = launch->gridId - graph->first_grid;
    if (behind >= graph->room) {
        in->spoiled = true; /* it may leave its accesses in another one's place */
        leave_out(graph, node);
    } else {
        place(in, graph->base + (uint32_t)behind, &graph->like, node);
    }
    return userdata_of(in, graph);
}

void exact_graph_end(void)
{
    graph_entry *graph = &this_thread.entry;
    for (; this_thread.entered && graph->left; graph->left--)
        leave_out(graph, 0);
}

/* --- waits ----------------------------------------------------------------------------------------- */

/* A thread that streams memory reads and writes 16 bytes, as a guess: what takes more is said to be missing. */
#define THREADS_OF_A_PAGE (CK_BITMAP_BITS * 4 / 16 / 2)

void exact_prepare(CUcontext context, uint64_t threads)
{
    if (!patching_wanted())
        return;
    pool *of = pool_open(context);
    if (!of || of->off)
        return;
    if (!of->current || ++of->since_looked >= LOOK_AT_CALLS)
        pool_look(of, false);
    pool_reserve(of, threads / THREADS_OF_A_PAGE);
}

void exact_reached(CUcontext context)
{
    if (!patching_wanted())
        return;
    pthread_mutex_lock(&recorder_lock);
    pool *of = pool_of(context);
    pthread_mutex_unlock(&recorder_lock);
    if (of && !of->off)
        pool_look(of, true);
}

static void waited(arena *of, Sanitizer_StreamHandle stream)
{
    for (size_t i = 0; i < of->use_count; i++)
        if (!stream || of->uses[i].stream == stream)
            of->uses[i].done = of->uses[i].enqueued;
}

void exact_waited(CUcontext context, Sanitizer_StreamHandle stream)
{
    if (!patching_wanted())
        return;
    pthread_mutex_lock(&recorder_lock);
    pool *of = pool_of(context);
    for (size_t i = 0; of && i < ARENAS; i++)
        waited(of->arenas + i, stream);
    pthread_mutex_unlock(&recorder_lock);
    if (of && !of->off)
        pool_look(of, true);
}

void exact_stream_gone(CUcontext context, Sanitizer_StreamHandle stream)
{
    pthread_mutex_lock(&recorder_lock);
    pool *of = pool_of(context);
    pthread_mutex_unlock(&recorder_lock);
    if (of && !of->off && stream != of->stream)
        pool_mark(of, stream);
}

void exact_context_gone(CUcontext context)
{
    pool_finish(context, true);
    pthread_mutex_lock(&recorder_lock);
    patching_context_gone(context);
    pthread_mutex_unlock(&recorder_lock);
}

void exact_finish(void)
{
    if (patching_wanted())
        pool_finish(NULL, false);
}

void exact_clear(void)
{
    if (!patching_wanted())
        return;
    pool_clear();
    patching_clear();
    memset(grids, 0, sizeof grids);
}
