/* Prepares launches for recording and reads their accesses back. exact.h has the contract of each function: the lock that
 * the caller holds, and whether CUDA is called. */
#include "exact/exact.h"

#include <string.h>

#include "containers.h"
#include "decode/emit_accesses.h"
#include "exact/arena_pool.h"
#include "exact/patching.h"
#include "model/graphs.h"
#include "model/ids.h"
#include "recorder.h"

/* The memory budget and the finished arenas are checked once per this number of launches: the check calls CUDA. */
#define LAUNCHES_PER_POLL 64

/* --- launch indices --------------------------------------------------------------------------- */

static bool reserve_launches(launch_arena *arena, size_t indices)
{
    if (arena->launch_count + indices > CK_MAX_LAUNCHES)
        return false;
    const size_t before = arena->launch_capacity;
    launch_group *groups =
        array_reserve(arena->groups, &arena->group_capacity, arena->group_count + 1, sizeof *groups, 1024);
    if (groups)
        arena->groups = groups;
    arena_launch *launches = array_reserve(arena->launches, &arena->launch_capacity, arena->launch_count + indices,
                                           sizeof *launches, 1024);
    if (!groups || !launches)
        return false;
    memset(launches + before, 0, (arena->launch_capacity - before) * sizeof *launches);
    arena->launches = launches;
    return true;
}

/* Assign the next ``indices`` launch indices, which were reserved, and return the first. */
static uint32_t take_launches(launch_arena *arena, uint32_t indices)
{
    const launch_group group = {arena->launch_count, indices, this_thread.signature};
    arena->groups[arena->group_count++] = group;
    arena->launch_count += indices;
    return group.first;
}

static void set_launch(launch_arena *arena, uint32_t index, const record *launch_record, uint32_t node,
                       bool is_incomplete)
{
    arena_launch *launch = arena->launches + index;
    *launch = (arena_launch){*launch_record, is_incomplete};
    memset(launch->base.own, 0, sizeof launch->base.own);
    launch->base.access.node = node;
}

static launch_arena *current_arena(CUcontext context)
{
    arena_pool *pool = pool_find(context);
    return pool ? pool->current : NULL;
}

static void emit_unknown_node(graph_launch *graph, uint32_t node)
{
    graph->launch_record.access.node = node;
    emit_unknown_accesses(&graph->launch_record);
}

/* Write that the accesses of expected kernels of a graph that did not launch are unknown. */
static void finish_pending(void)
{
    launch_arena *arena = this_thread.pending_arena;
    if (!arena)
        return;
    for (graph_launch *graph = &this_thread.pending_graph; graph->kernels_left; graph->kernels_left--)
        emit_unknown_node(graph, 0);
    arena_streams_enqueued(&arena->streams, this_thread.pending_stream);
    arena->launches_entering--;
    this_thread.pending_arena = NULL;
}

static void begin_pending(launch_arena *arena, Sanitizer_StreamHandle stream)
{
    finish_pending(); /* a launch whose end was not reported */
    arena->launches_entering++;
    this_thread.pending_arena = arena;
    this_thread.pending_stream = stream;
}

#define FROM_ARGUMENTS "launch inferred from arguments: "

/* --- kernels --------------------------------------------------------------------------------------- */

uint64_t exact_assign(const record *launch_record, const Sanitizer_LaunchData *launch)
{
    if (!patching_is_active(launch->context))
        return 0;
    const unreported_accesses unreported = patching_unreported(launch->module, launch->functionName);
    const char *reason = unreported.reason;
    launch_arena *arena = current_arena(launch->context);
    const bool is_patched = !reason || strcmp(reason, MACHINE_CODE_NOT_PATCHED) != 0;
    if (!is_patched || !arena || !reserve_launches(arena, 1) ||
        !arena_streams_get(&arena->streams, launch->hStream)) {
        record_gap_detail(FROM_ARGUMENTS, reason ? reason : "arena full");
        return 0;
    }
    if (unreported.tensor_modes &&
        !tma_stores_add(&arena->stores, arena->launch_count, unreported.tensor_modes, this_thread.layout,
                        this_thread.parameters, this_thread.extra) &&
        !reason)
        reason = MACHINE_CODE_TENSOR_STORES;
    if (reason)
        record_gap_detail(FROM_ARGUMENTS, reason);
    uint32_t index = take_launches(arena, 1);
    set_launch(arena, index, launch_record, 0, reason != NULL);
    begin_pending(arena, launch->hStream);
    return CK_USERDATA(arena->memory.base, arena->memory.entries_log2, index);
}

void exact_enqueued(void)
{
    if (!this_thread.pending_arena)
        return;
    pthread_mutex_lock(&recorder_lock);
    finish_pending();
    pthread_mutex_unlock(&recorder_lock);
}

void exact_assign_failed(void)
{
    pthread_mutex_lock(&recorder_lock);
    if (this_thread.pending_arena)
        this_thread.pending_arena->attribution_lost = true;
    record_gap("launch inferred from arguments: its user data could not be set");
    pthread_mutex_unlock(&recorder_lock);
}

/* --- graphs ---------------------------------------------------------------------------------------- */

/* All kernel nodes of a linear graph receive the user data that was set last. They are distinguished by
 * %gridid, which is the same in every launch of an executable: a launch index is a base plus %gridid. */
#define MAX_EXECUTABLES 65536
static struct {
    uint64_t lo, hi; /* range of %gridid of its kernels; 0: unknown */
} grids[MAX_EXECUTABLES];

/* Estimated range of %gridid around the first kernel, while the actual range is unknown. */
#define GRIDS_BEFORE 64
#define GRIDS_AFTER(kernels) (4 * (uint64_t)(kernels) + 256)

static uint64_t needed_indices(uint32_t executable, uint32_t kernels)
{
    const uint64_t lo = grids[executable].lo, hi = grids[executable].hi;
    return hi ? hi - lo + 1 : GRIDS_BEFORE + GRIDS_AFTER(kernels) + 1;
}

static void record_graph_gap(void)
{
    record_gap("graph launch inferred from arguments: arena full");
}

uint32_t exact_assign_graph(const record *launch_record, const Sanitizer_GraphLaunchData *launch,
                            uint32_t executable, uint32_t kernels)
{
    arena_pool *pool = patching_is_active(launch->context) ? pool_find(launch->context) : NULL;
    graph_launch *graph = &this_thread.pending_graph;
    finish_pending();
    *graph = (graph_launch){0};
    if (!kernels || !patching_is_active(launch->context))
        return 0;
    if (!pool || !pool->current || executable >= MAX_EXECUTABLES ||
        !arena_streams_get(&pool->current->streams, launch->hStream)) {
        record_graph_gap();
        return 0;
    }
    graph->launch_record = *launch_record;
    graph->executable = executable;
    graph->kernels = graph->kernels_left = kernels;
    pool->launches_since_poll += kernels;
    begin_pending(pool->current, launch->hStream);
    return kernels;
}

/* Reserve the launch indices of all kernel nodes when the first kernel launches. */
static bool reserve_graph(launch_arena *arena, graph_launch *graph, uint64_t grid)
{
    const uint32_t of = graph->executable;
    const bool known = grids[of].hi && grid >= grids[of].lo && grid <= grids[of].hi;
    if (!known)
        grids[of].lo = grids[of].hi = 0;
    const uint64_t capacity = needed_indices(of, graph->kernels);
    graph->first_grid = known ? grids[of].lo : grid > GRIDS_BEFORE ? grid - GRIDS_BEFORE : 0;
    if (capacity > CK_MAX_LAUNCHES || !reserve_launches(arena, capacity)) {
        record_graph_gap();
        return false;
    }
    graph->capacity = (uint32_t)capacity;
    graph->first_index = take_launches(arena, graph->capacity);
    return true;
}

static uint64_t graph_user_data(const launch_arena *arena, const graph_launch *graph)
{
    uint32_t field = (uint32_t)(graph->first_index - graph->first_grid) & (CK_MAX_LAUNCHES - 1);
    return CK_USERDATA(arena->memory.base, arena->memory.entries_log2, field) | CK_BY_GRID;
}

static void widen_grids(uint32_t executable, uint64_t grid)
{
    if (!grids[executable].hi || grid < grids[executable].lo)
        grids[executable].lo = grid;
    if (grid > grids[executable].hi)
        grids[executable].hi = grid;
}

/* Assign a kernel its index in the reserved range. False if it has none: then its accesses may be attributed
 * to other kernels. */
static bool assign_node(launch_arena *arena, graph_launch *graph, uint64_t grid, uint32_t node, bool is_incomplete)
{
    const uint64_t offset = grid - graph->first_grid;
    widen_grids(graph->executable, grid);
    if (offset >= graph->capacity) {
        arena->attribution_lost = true;
        return false;
    }
    if (node)
        set_launch(arena, graph->first_index + (uint32_t)offset, &graph->launch_record, node, is_incomplete);
    return node;
}

/* Add the tensors that a node stores to; false if its tensor maps are not known. */
static bool add_node_stores(launch_arena *arena, const graph_launch *graph, uint64_t grid, uint32_t node,
                            uint8_t mode)
{
    size_t count;
    const tma_store *maps = node_tensor_maps(this_thread.launched_graph, graph->executable, node, &count);
    return grid - graph->first_grid < graph->capacity &&
           tma_stores_copy(&arena->stores, graph->first_index + (uint32_t)(grid - graph->first_grid), mode, maps,
                           count);
}

/* Unexpected additional kernels receive user data, too: the user data may be shared by the others. */
uint64_t exact_assign_node(const Sanitizer_LaunchData *launch, uint32_t node)
{
    launch_arena *arena = this_thread.pending_arena;
    graph_launch *graph = &this_thread.pending_graph;
    if (!arena || !graph->kernels)
        return 0;
    const bool expected = graph->kernels_left > 0;
    const unreported_accesses unreported = patching_unreported(launch->module, launch->functionName);
    const char *reason = unreported.reason;
    graph->kernels_left -= expected;
    memset(graph->launch_record.own, 0, sizeof graph->launch_record.own);
    if (!graph->refused && !graph->capacity)
        graph->refused = !reserve_graph(arena, graph, launch->gridId);
    if (!graph->refused && !reason && unreported.tensor_modes &&
        !add_node_stores(arena, graph, launch->gridId, node, unreported.tensor_modes))
        reason = MACHINE_CODE_TENSOR_STORES;
    if (reason)
        record_gap_detail("graph kernel inferred from arguments: ", reason);
    const bool placed =
        !graph->refused && assign_node(arena, graph, launch->gridId, expected ? node : 0, reason != NULL);
    if (expected && !placed)
        emit_unknown_node(graph, node);
    return graph->refused ? 0 : graph_user_data(arena, graph);
}

/* --- preparation and synchronisation ---------------------------------------------------------- */

static void prepare(CUcontext context, uint64_t signature, uint64_t threads, uint64_t indices)
{
    arena_pool *pool = pool_open(context);
    this_thread.signature = signature;
    if (!pool || pool->disabled)
        return;
    pthread_mutex_lock(&recorder_lock);
    bool due = !pool->current || ++pool->launches_since_poll >= LAUNCHES_PER_POLL;
    arena_space needed = space_estimate(signature, threads);
    pthread_mutex_unlock(&recorder_lock);
    if (due) {
        arena_budget_query(pool);
        pool_poll(pool, false);
    }
    needed.indices = indices;
    pool_reserve(pool, needed);
}

void exact_prepare(CUcontext context, CUfunction function, uint64_t threads)
{
    if (patching_is_enabled())
        prepare(context, space_signature(function, threads), threads, 1);
}

void exact_prepare_graph(CUcontext context, CUgraphExec executable)
{
    uint32_t number, kernels;
    if (!patching_is_enabled())
        return;
    pthread_mutex_lock(&recorder_lock);
    executable_graph(executable, &number, &kernels);
    uint64_t indices = kernels && number < MAX_EXECUTABLES ? needed_indices(number, kernels) : 0;
    pthread_mutex_unlock(&recorder_lock);
    if (indices) /* more than fits: do not wait */
        prepare(context, space_signature(executable, kernels), 0, indices > CK_MAX_LAUNCHES ? 0 : indices);
}

static arena_pool *active_pool(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    arena_pool *pool = context ? pool_find(context) : NULL;
    bool disabled = !pool || pool->disabled;
    pthread_mutex_unlock(&recorder_lock);
    return disabled ? NULL : pool;
}

void exact_event_completed(CUcontext context)
{
    arena_pool *pool = active_pool(context);
    if (pool)
        pool_poll(pool, true);
}

void exact_synchronized(CUcontext context, Sanitizer_StreamHandle stream)
{
    arena_pool *pool = active_pool(context);
    if (!pool)
        return;
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        arena_streams_synchronized(&pool->arenas[i].streams, stream);
    pthread_mutex_unlock(&recorder_lock);
    pool_poll(pool, true);
}

bool exact_owns_stream(Sanitizer_StreamHandle stream)
{
    pthread_mutex_lock(&recorder_lock);
    bool ours = pool_owns_stream(stream);
    pthread_mutex_unlock(&recorder_lock);
    return ours;
}

void exact_stream_destroying(CUcontext context, Sanitizer_StreamHandle stream)
{
    arena_pool *pool = active_pool(context);
    if (pool)
        pool_stream_destroying(pool, stream);
}

void exact_context_destroying(CUcontext context)
{
    if (!patching_is_enabled() || !context)
        return;
    pool_finish(context);
    pthread_mutex_lock(&recorder_lock);
    patching_context_destroying(context);
    pthread_mutex_unlock(&recorder_lock);
}

void exact_read(void)
{
    if (patching_is_enabled())
        pool_read();
}

void exact_finish(void)
{
    if (patching_is_enabled())
        pool_finish(NULL);
}

void exact_clear(void)
{
    if (!patching_is_enabled())
        return;
    pool_clear();
    patching_clear();
    memset(grids, 0, sizeof grids);
}
