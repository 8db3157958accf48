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

static void leave_out(graph_entry *graph, uint32_t node)
{
    graph->like.access.node = node;
    tell_nothing(&graph->like);
}

/* Kernels of a graph that were expected and did not come will not be told. */
static void entered(void)
{
    arena *in = this_thread.entered;
    if (!in)
        return;
    for (graph_entry *graph = &this_thread.entry; graph->left; graph->left--)
        leave_out(graph, 0);
    uses_enqueued(&in->uses, this_thread.entered_stream);
    in->entering--;
    this_thread.entered = NULL;
}

static void enter(arena *in, Sanitizer_StreamHandle stream)
{
    entered(); /* one whose end was not told */
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
    if ((lacks && !stores) || !in || !has_room(in, 1) || !uses_of(&in->uses, launch->hStream)) {
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
    entered();
    pthread_mutex_unlock(&recorder_lock);
}

void exact_unset(void)
{
    pthread_mutex_lock(&recorder_lock);
    if (this_thread.entered)
        this_thread.entered->spoiled = true;
    record_gap("a launch that could not be told where to leave its accesses");
    pthread_mutex_unlock(&recorder_lock);
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

static uint64_t room_of(uint32_t executable, uint32_t kernels)
{
    const uint64_t lo = grids[executable].lo, hi = grids[executable].hi;
    return hi ? hi - lo + 1 : GRIDS_BEFORE + GRIDS_BEHIND(kernels) + 1;
}

static void refuse_graph(void)
{
    record_gap("the launch of a graph from arguments alone: no room for its accesses");
}

uint32_t exact_graph(const record *like, const Sanitizer_GraphLaunchData *launch, uint32_t executable,
                     uint32_t kernels)
{
    pool *of = patching_is_in(launch->context) ? pool_of(launch->context) : NULL;
    graph_entry *graph = &this_thread.entry;
    entered();
    *graph = (graph_entry){0};
    if (!kernels || !patching_is_in(launch->context))
        return 0;
    if (!of || !of->current || executable >= MAX_EXECUTABLES || !uses_of(&of->current->uses, launch->hStream)) {
        refuse_graph();
        return 0;
    }
    graph->like = *like;
    graph->executable = executable;
    graph->kernels = graph->left = kernels;
    of->since_looked += kernels;
    enter(of->current, launch->hStream);
    return kernels;
}

/* Reserve the indices of all nodes when the first one comes. */
static bool reserve(arena *in, graph_entry *graph, uint64_t grid)
{
    const uint32_t of = graph->executable;
    const bool known = grids[of].hi && grid >= grids[of].lo && grid <= grids[of].hi;
    if (!known)
        grids[of].lo = grids[of].hi = 0;
    const uint64_t room = room_of(of, graph->kernels);
    graph->first_grid = known ? grids[of].lo : grid > GRIDS_BEFORE ? grid - GRIDS_BEFORE : 0;
    if (room > CK_MAX_LAUNCHES || !has_room(in, room)) {
        refuse_graph();
        return false;
    }
    graph->room = (uint32_t)room;
    graph->base = in->used;
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
    if (!grids[executable].hi || grid < grids[executable].lo)
        grids[executable].lo = grid;
    if (grid > grids[executable].hi)
        grids[executable].hi = grid;
}

/* Give a kernel its place in those of its graph: false where it has none, and the accesses of others may be
 * its own. */
static bool place_node(arena *in, graph_entry *graph, uint64_t grid, uint32_t node)
{
    const uint64_t behind = grid - graph->first_grid;
    widen(graph->executable, grid);
    if (behind >= graph->room) {
        in->spoiled = true;
        return false;
    }
    if (node)
        place(in, graph->base + (uint32_t)behind, &graph->like, node);
    return node;
}

/* A node more than were expected has user data as well: it may be that of the others. */
uint64_t exact_node(const Sanitizer_LaunchData *launch, uint32_t node)
{
    arena *in = this_thread.entered;
    graph_entry *graph = &this_thread.entry;
    if (!in || !graph->kernels)
        return 0;
    const bool expected = graph->left > 0;
    const char *lacks = patching_lacks(launch->module, launch->functionName);
    graph->left -= expected;
    memset(graph->like.own, 0, sizeof graph->like.own);
    if (lacks)
        record_gap_with("a kernel of a graph from arguments alone: ", lacks);
    if (!graph->refused && !graph->room)
        graph->refused = !reserve(in, graph, launch->gridId);
    const bool placed =
        !graph->refused && place_node(in, graph, launch->gridId, expected && !lacks ? node : 0);
    if (expected && !placed)
        leave_out(graph, node);
    return graph->refused ? 0 : userdata_of(in, graph);
}

/* --- waits ----------------------------------------------------------------------------------------- */

/* A thread that streams memory reads and writes 32 bytes, as a guess: what takes more is said to be missing. */
#define THREADS_OF_A_PAGE (CK_BITMAP_BITS * 4 / 32 / 2)

static void prepare(CUcontext context, uint64_t pages, uint64_t indices)
{
    if (!patching_wanted())
        return;
    pool *of = pool_open(context);
    if (!of || of->off)
        return;
    pthread_mutex_lock(&recorder_lock);
    bool due = !of->current || ++of->since_looked >= LOOK_AT_CALLS;
    pthread_mutex_unlock(&recorder_lock);
    if (due)
        pool_look(of, false);
    pool_reserve(of, pages, indices);
}

void exact_prepare(CUcontext context, uint64_t threads)
{
    prepare(context, threads / THREADS_OF_A_PAGE, 1);
}

void exact_prepare_graph(CUcontext context, CUgraphExec executable)
{
    uint32_t number, kernels;
    pthread_mutex_lock(&recorder_lock);
    graph_of_executable(executable, &number, &kernels);
    uint64_t indices = kernels && number < MAX_EXECUTABLES ? room_of(number, kernels) : 0;
    pthread_mutex_unlock(&recorder_lock);
    if (indices) /* for more than there can be, nobody waits */
        prepare(context, 0, indices > CK_MAX_LAUNCHES ? 0 : indices);
}

static pool *pool_to_look_at(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    pool *of = context ? pool_of(context) : NULL;
    bool off = !of || of->off;
    pthread_mutex_unlock(&recorder_lock);
    return off ? NULL : of;
}

void exact_reached(CUcontext context)
{
    pool *of = pool_to_look_at(context);
    if (of)
        pool_look(of, true);
}

void exact_waited(CUcontext context, Sanitizer_StreamHandle stream)
{
    pool *of = pool_to_look_at(context);
    if (!of)
        return;
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        uses_waited(&of->arenas[i].uses, stream);
    pthread_mutex_unlock(&recorder_lock);
    pool_look(of, true);
}

bool exact_owns(Sanitizer_StreamHandle stream)
{
    pthread_mutex_lock(&recorder_lock);
    bool ours = pool_owns(stream);
    pthread_mutex_unlock(&recorder_lock);
    return ours;
}

void exact_stream_gone(CUcontext context, Sanitizer_StreamHandle stream)
{
    pool *of = pool_to_look_at(context);
    if (of)
        pool_stream_gone(of, stream);
}

void exact_context_gone(CUcontext context)
{
    if (!patching_wanted() || !context)
        return;
    pool_finish(context);
    pthread_mutex_lock(&recorder_lock);
    patching_context_gone(context);
    pthread_mutex_unlock(&recorder_lock);
}

void exact_read(void)
{
    if (patching_wanted())
        pool_read();
}

void exact_finish(void)
{
    if (patching_wanted())
        pool_finish(NULL);
}

void exact_clear(void)
{
    if (!patching_wanted())
        return;
    pool_clear();
    patching_clear();
    memset(grids, 0, sizeof grids);
}
