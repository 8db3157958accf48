/* Assigns launches to arenas. exact.h states for each function whether the recorder lock is held and whether CUDA is
 * called; the static functions need the recorder lock, except prepare_launch() and active_pool(). */
#include "exact/exact.h"

#include <string.h>

#include "containers.h"
#include "exact/arena_pool.h"
#include "exact/emit_accesses.h"
#include "exact/launch_order.h"
#include "exact/machine_code.h"
#include "exact/modules.h"
#include "exact/patch_restoring.h"
#include "exact/space_estimates.h"
#include "exact/templates.h"
#include "model/collectives.h"
#include "model/graphs.h"
#include "model/ids.h"
#include "model/kernels.h"
#include "model/stream_order.h"
#include "recorder.h"

/* The memory budget and the complete arenas are checked once per this number of launches, because the check calls
 * CUDA. */
#define LAUNCHES_PER_POLL 64

/* A launch of a graph whose kernel nodes write their accesses to an arena. */
typedef struct {
    record launch_record;
    uint32_t graph; /* id of the graph */
    CUgraphExec executable;
    uint32_t expected_kernel_count,
        remaining_kernel_count;    /* number of expected kernels; number of those that have not launched yet */
    uint32_t first_launch_index;   /* first reserved launch index */
    uint32_t launch_index_count;   /* number of reserved launch indices; 0: none reserved yet */
    uint64_t first_grid_id;        /* %gridid that maps to first_launch_index */
    launch_signature signature;    /* launches of the same signature are expected to have the same accesses */
    reached_memory reached_memory; /* memory that the nodes reach */
    bool reservation_failed;       /* the arena has too few launch indices left */
} graph_launch;

/* The launch that this thread has prepared, or that has a launch index in an arena but may not be enqueued on its stream
 * yet. */
typedef struct {
    uint64_t space_signature; /* signature of the prepared launch, by which its arena space is estimated */
    uint64_t reserved_pages, reserved_boxes; /* arena space that is reserved for the prepared launch */
    launch_arena *arena;
    Sanitizer_StreamHandle stream;
    graph_launch graph;
} pending_launch;
static __thread pending_launch pending;

/* --- launch indices --------------------------------------------------------------------------- */

/* Make sure that the arena can assign ``launch_index_count`` more launch indices. Return false if fewer are left. */
static bool reserve_launch_indices(launch_arena *arena, size_t launch_index_count)
{
    if (arena->launch_count + launch_index_count > CK_MAX_LAUNCHES)
        return false;
    const size_t old_capacity = arena->launch_capacity;
    launch_group *groups =
        array_reserve(arena->groups, &arena->group_capacity, arena->group_count + 1, sizeof *groups, 1024);
    if (groups)
        arena->groups = groups;
    arena_launch *launches = array_reserve(arena->launches, &arena->launch_capacity,
                                           arena->launch_count + launch_index_count, sizeof *launches, 1024);
    if (!groups || !launches)
        return false;
    memset(launches + old_capacity, 0, (arena->launch_capacity - old_capacity) * sizeof *launches);
    arena->launches = launches;
    return true;
}

/* Assign the next ``launch_index_count`` launch indices, which must be reserved, to the kernels of one call, and return
 * the first of them. */
static uint32_t assign_launch_indices(launch_arena *arena, uint32_t launch_index_count, uint32_t expected_launches,
                                      const launch_signature *signature, reached_memory reached)
{
    const launch_group group = {arena->launch_count, launch_index_count, pending.space_signature,
                                expected_launches,   *signature,         reached};
    arena->groups[arena->group_count++] = group;
    arena->launch_count += launch_index_count;
    pending.reserved_pages = pending.reserved_boxes = 0;
    return group.first_launch_index;
}

/* Store an allocation that a launch reaches. If no memory is left, accesses to this allocation count as accesses
 * outside of the reached memory. */
static void store_reached_range(launch_arena *arena, const allocation *reached, reached_memory *memory)
{
    reached_range *ranges = array_reserve(arena->reached_ranges, &arena->reached_range_capacity,
                                          arena->reached_range_count + 1, sizeof *ranges, 4096);
    if (!ranges)
        return;
    arena->reached_ranges = ranges;
    ranges[arena->reached_range_count++] = (reached_range){reached->lo, reached->hi};
    memory->range_count++;
}

/* Store the pointers of a launch. If no memory is left, the launch has none. */
static void store_pointers(launch_arena *arena, const uint64_t *pointers, size_t pointer_count,
                           reached_memory *memory)
{
    uint64_t *new_pointers = array_reserve(arena->pointers, &arena->pointer_capacity,
                                           arena->pointer_count + pointer_count, sizeof *new_pointers, 4096);
    memory->first_pointer = (uint32_t)arena->pointer_count;
    if (!new_pointers || !pointer_count)
        return;
    arena->pointers = new_pointers;
    memcpy(new_pointers + arena->pointer_count, pointers, pointer_count * sizeof *pointers);
    arena->pointer_count += pointer_count;
    memory->pointer_count = (uint32_t)pointer_count;
}

static reached_memory store_reached_memory(launch_arena *arena, const launch_arguments *arguments)
{
    reached_memory memory = {.first_range = (uint32_t)arena->reached_range_count};
    for (size_t i = 0; i < arguments->allocation_count; i++)
        store_reached_range(arena, arguments->allocations[i], &memory);
    store_pointers(arena, arguments->pointers, arguments->pointer_count, &memory);
    return memory;
}

static void set_arena_launch(launch_arena *arena, uint32_t index, const record *launch_record, uint32_t node,
                             bool is_incomplete)
{
    arena_launch *launch = arena->launches + index;
    *launch = (arena_launch){*launch_record, is_incomplete};
    memset(launch->template_record.kind_fields, 0, sizeof launch->template_record.kind_fields);
    launch->template_record.access.node = node;
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

/* End this thread's pending launch. For kernels of a graph that were expected but did not launch, record unknown
 * accesses. */
static void finish_pending_launch(void)
{
    launch_arena *arena = pending.arena;
    if (!arena)
        return;
    for (graph_launch *graph = &pending.graph; graph->remaining_kernel_count; graph->remaining_kernel_count--)
        emit_unknown_node(graph, 0);
    arena_streams_count_launch(&arena->streams, pending.stream);
    arena->entering_launch_count--;
    pending.arena = NULL;
}

static void begin_pending_launch(launch_arena *arena, Sanitizer_StreamHandle stream)
{
    finish_pending_launch(); /* ends an earlier launch whose end was not reported */
    arena->entering_launch_count++;
    pending.arena = arena;
    pending.stream = stream;
}

#define FROM_ARGUMENTS "launch inferred from arguments: "

/* --- kernels --------------------------------------------------------------------------------------- */

/* Release the arena space that was reserved for a launch that is not recorded. */
static void release_reserved_space(CUcontext context)
{
    launch_arena *arena = current_arena(context);
    if (arena && arena->expected_space.pages >= pending.reserved_pages &&
        arena->expected_space.boxes >= pending.reserved_boxes) {
        arena->expected_space.pages -= pending.reserved_pages;
        arena->expected_space.boxes -= pending.reserved_boxes;
    }
    pending.reserved_pages = pending.reserved_boxes = 0;
}

launch_template exact_choose_template(const record *launch_record, const Sanitizer_LaunchData *launch,
                                      const launch_arguments *arguments, launch_signature *signature)
{
    *signature = (launch_signature){0};
    if (!templates_are_enabled())
        return (launch_template){0};
    const uint32_t module = patching_module_id(launch->module);
    const launch_shape shape = {
        .module = module,
        .name = launch_record->launch.name,
        .context = launch_record->context,
        .grid = {launch->gridDim_x, launch->gridDim_y, launch->gridDim_z},
        .block = {launch->blockDim_x, launch->blockDim_y, launch->blockDim_z},
        .cluster = {launch->clusterDim_x, launch->clusterDim_y, launch->clusterDim_z},
    };
    const launch_hashes hashes = templates_hash_launch(&shape, arguments);
    *signature = templates_find_signature(&hashes);
    const launch_memory memory = {.operation = order_enqueue(launch_record->stream, launch_record->context),
                                  .allocations = arguments->allocations,
                                  .allocation_count = arguments->allocation_count,
                                  .certainties = arguments->allocation_certainties,
                                  .pointers = arguments->pointers,
                                  .footprint = templates_footprint(signature)};
    const launch_template chosen_template =
        templates_choose(signature, launch_begin_work(&memory), module_has_patch(module));
    launch_add_accesses(&memory);
    if (!signature->is_check)
        module_count_launch(module, !chosen_template.id);
    if (chosen_template.id)
        release_reserved_space(launch->context);
    return chosen_template;
}

bool exact_lacks_patch(const Sanitizer_LaunchData *launch)
{
    const uint32_t module = templates_are_enabled() ? patching_module_id(launch->module) : 0;
    return module && !module_has_patch(module);
}

uint64_t exact_assign_launch(const record *launch_record, const Sanitizer_LaunchData *launch,
                             const launch_signature *signature, const launch_arguments *arguments)
{
    if (!patching_is_active(launch->context))
        return 0;
    const unreported_accesses unreported = patching_unreported_accesses(launch->module, launch->functionName);
    const char *reason = unreported.reason;
    launch_arena *arena = current_arena(launch->context);
    const bool is_patched = !reason || strcmp(reason, MACHINE_CODE_NOT_PATCHED) != 0;
    if (!is_patched || !arena || !reserve_launch_indices(arena, 1) ||
        !arena_streams_get(&arena->streams, launch->hStream)) {
        record_gap_detail(FROM_ARGUMENTS, reason ? reason : "arena full");
        return 0;
    }
    if (unreported.tensor_modes &&
        !kernels_add_tensor_maps(&arena->tma_stores, arena->launch_count, unreported.tensor_modes,
                                 this_launch.layout, this_launch.parameters, this_launch.extra) &&
        !reason)
        reason = MACHINE_CODE_TENSOR_STORES;
    if (reason)
        record_gap_detail(FROM_ARGUMENTS, reason);
    uint32_t index = assign_launch_indices(arena, 1, 1, signature,
                                           signature->state_index ? store_reached_memory(arena, arguments)
                                                                  : (reached_memory){0});
    set_arena_launch(arena, index, launch_record, 0, reason != NULL);
    pool_find(launch->context)->recorded_since_poll++;
    begin_pending_launch(arena, launch->hStream);
    return CK_USERDATA(arena->memory.base_address, arena->memory.entries_log2, index);
}

void exact_launch_ended(void)
{
    if (!pending.arena)
        return;
    pthread_mutex_lock(&recorder_lock);
    finish_pending_launch();
    pthread_mutex_unlock(&recorder_lock);
}

void exact_assign_failed(void)
{
    pthread_mutex_lock(&recorder_lock);
    if (pending.arena)
        pending.arena->is_attribution_lost = true;
    record_gap("launch inferred from arguments: its user data could not be set");
    pthread_mutex_unlock(&recorder_lock);
}

/* --- graphs ---------------------------------------------------------------------------------------- */

/* The driver passes the user data that was set last to all kernel nodes of a linear graph. The patch distinguishes the
 * nodes by %gridid, which is the same in every launch of an executable graph: the launch index of a node is a base
 * plus its %gridid. */
/* Assumed distance of the lowest and of the highest %gridid of a graph from that of its first kernel, until the
 * actual range is known. */
#define GRID_IDS_BEFORE 64
#define GRID_IDS_AFTER(kernels) (4 * (uint64_t)(kernels) + 256)

/* Return the number of launch indices that a graph launch needs: one for each %gridid in the range. */
static uint64_t count_needed_launch_indices(const executable_info *executable)
{
    return executable->highest_grid_id ? executable->highest_grid_id - executable->lowest_grid_id + 1
                                       : GRID_IDS_BEFORE + GRID_IDS_AFTER(executable->kernel_count) + 1;
}

static void record_graph_gap(void)
{
    record_gap("graph launch inferred from arguments: arena full");
}

/* Return the allocations that contain the addresses, and set ``count`` to their number. The array is valid while the
 * recorder lock is held. */
static allocation *const *find_allocations(const uint64_t *addresses, size_t address_count, size_t *count)
{
    static allocation **found_allocations;
    static size_t capacity;
    allocation **new_array = array_reserve(found_allocations, &capacity, address_count, sizeof *new_array, 256);
    *count = 0;
    if (!new_array)
        return found_allocations;
    found_allocations = new_array;
    for (size_t i = 0; i < address_count; i++) {
        allocation *container = allocations_find(addresses[i]);
        if (container && (!*count || found_allocations[*count - 1] != container))
            found_allocations[(*count)++] = container;
    }
    return found_allocations;
}

/* Return the pointers of a graph's nodes, to which accesses are relative, and set ``count`` to their number. With too
 * many pointers, accesses are compared by address. */
static const uint64_t *graph_pointers(const graph_memory *reached, size_t *count)
{
    *count = reached->address_count <= MAX_ACCESSES ? reached->address_count : 0;
    return reached->addresses;
}

/* Return whether a launch of a graph probably has a template and accesses no contested bytes
 * (model/access_history.h). */
static bool graph_has_template(uint32_t graph, uint32_t context)
{
    const graph_memory reached = graphs_memory(graph);
    const launch_hashes hashes = templates_hash_graph(reached.content_hash, context);
    const launch_signature signature = templates_find_signature(&hashes);
    const launch_memory memory = {.pointers = reached.addresses, .footprint = templates_footprint(&signature)};
    size_t allocation_count;
    allocation *const *allocations = find_allocations(reached.addresses, reached.address_count, &allocation_count);
    bool is_shared = false;
    for (size_t i = 0; i < allocation_count; i++)
        is_shared = is_shared || allocations[i]->history;
    return templates_apply_to(&signature, is_shared) && !launch_has_contested_bytes(&memory);
}

launch_template exact_choose_graph_template(const record *launch_record, launch_signature *signature)
{
    *signature = (launch_signature){0};
    if (!templates_are_enabled())
        return (launch_template){0};
    const graph_memory reached = graphs_memory(launch_record->graph_launch.graph);
    const launch_hashes hashes = templates_hash_graph(reached.content_hash, launch_record->context);
    *signature = templates_find_signature(&hashes);
    launch_memory memory = {.operation = order_enqueue(launch_record->stream, launch_record->context)};
    memory.allocations = find_allocations(reached.addresses, reached.address_count, &memory.allocation_count);
    memory.pointers = reached.addresses;
    if (!reached.has_copies) /* the footprint has the accesses of kernels only */
        memory.footprint = templates_footprint(signature);
    const bool can_be_recorded = !modules_include_unpatched();
    launch_template chosen_template = templates_choose(signature, launch_begin_work(&memory), can_be_recorded);
    if (!chosen_template.id && !can_be_recorded)
        chosen_template = templates_use_instead(signature);
    launch_add_accesses(&memory);
    return chosen_template;
}

/* Store the allocations that a graph reaches. */
static reached_memory store_graph_reach(launch_arena *arena, uint32_t graph)
{
    reached_memory memory = {(uint32_t)arena->reached_range_count, 0, 0, 0};
    const graph_memory reached = graphs_memory(graph);
    const allocation *last_allocation = NULL;
    for (size_t i = 0; i < reached.address_count; i++) {
        const allocation *reached_allocation = allocations_find(reached.addresses[i]);
        if (reached_allocation && reached_allocation != last_allocation)
            store_reached_range(arena, last_allocation = reached_allocation, &memory);
    }
    size_t pointer_count;
    const uint64_t *pointers = graph_pointers(&reached, &pointer_count);
    store_pointers(arena, pointers, pointer_count, &memory);
    return memory;
}

uint32_t exact_assign_graph(const record *launch_record, const Sanitizer_GraphLaunchData *launch, uint32_t kernels,
                            const launch_signature *signature)
{
    arena_pool *pool = patching_is_active(launch->context) ? pool_find(launch->context) : NULL;
    graph_launch *graph = &pending.graph;
    finish_pending_launch();
    *graph = (graph_launch){0};
    if (!kernels || !patching_is_active(launch->context))
        return 0;
    if (!pool || !pool->current || !arena_streams_get(&pool->current->streams, launch->hStream)) {
        record_graph_gap();
        return 0;
    }
    graph->launch_record = *launch_record;
    graph->graph = launch_record->graph_launch.graph;
    graph->executable = launch->graphExec;
    graph->signature = *signature;
    graph->reached_memory = signature->state_index
                                ? store_graph_reach(pool->current, launch_record->graph_launch.graph)
                                : (reached_memory){0};
    graph->expected_kernel_count = graph->remaining_kernel_count = kernels;
    pool->recorded_since_poll += kernels;
    begin_pending_launch(pool->current, launch->hStream);
    return kernels;
}

void exact_skip_graph(CUcontext context)
{
    finish_pending_launch();
    pending.graph = (graph_launch){0};
    release_reserved_space(context);
}

/* Assign the launch indices of all kernel nodes. Called when the first kernel launches, whose %gridid is
 * ``grid_id``. */
static bool reserve_graph_launch_indices(launch_arena *arena, graph_launch *graph, uint64_t grid_id)
{
    executable_info *executable = executable_find(graph->executable);
    if (!executable)
        return false; /* another thread has destroyed the executable graph */
    const bool is_in_range = executable->highest_grid_id && grid_id >= executable->lowest_grid_id &&
                             grid_id <= executable->highest_grid_id;
    if (!is_in_range)
        executable->lowest_grid_id = executable->highest_grid_id = 0;
    const uint64_t launch_index_count = count_needed_launch_indices(executable);
    graph->first_grid_id = is_in_range                 ? executable->lowest_grid_id
                           : grid_id > GRID_IDS_BEFORE ? grid_id - GRID_IDS_BEFORE
                                                       : 0;
    if (launch_index_count > CK_MAX_LAUNCHES || !reserve_launch_indices(arena, launch_index_count)) {
        record_graph_gap();
        return false;
    }
    graph->launch_index_count = (uint32_t)launch_index_count;
    graph->first_launch_index = assign_launch_indices(
        arena, graph->launch_index_count, graph->expected_kernel_count, &graph->signature, graph->reached_memory);
    return true;
}

static uint64_t graph_user_data(const launch_arena *arena, const graph_launch *graph)
{
    uint32_t launch_bits = (uint32_t)(graph->first_launch_index - graph->first_grid_id) & (CK_MAX_LAUNCHES - 1);
    return CK_USERDATA(arena->memory.base_address, arena->memory.entries_log2, launch_bits) | CK_BY_GRID;
}

static void extend_grid_id_range(executable_info *executable, uint64_t grid_id)
{
    if (!executable->highest_grid_id || grid_id < executable->lowest_grid_id)
        executable->lowest_grid_id = grid_id;
    if (grid_id > executable->highest_grid_id)
        executable->highest_grid_id = grid_id;
}

/* Use the launch index of a kernel node in the assigned range. Return false if its %gridid is outside of the range: its
 * accesses may then be attributed to other kernels. */
static bool use_node_launch_index(launch_arena *arena, graph_launch *graph, uint64_t grid_id, uint32_t node,
                                  bool is_incomplete)
{
    const uint64_t offset = grid_id - graph->first_grid_id;
    executable_info *executable = executable_find(graph->executable);
    if (executable)
        extend_grid_id_range(executable, grid_id);
    if (offset >= graph->launch_index_count) {
        arena->is_attribution_lost = true;
        return false;
    }
    if (node)
        set_arena_launch(arena, graph->first_launch_index + (uint32_t)offset, &graph->launch_record, node,
                         is_incomplete);
    return node;
}

/* Add the tensors that a kernel node stores to through tensor maps. Return false if its tensor maps are unknown. */
static bool add_node_stores(launch_arena *arena, const graph_launch *graph, uint64_t grid_id, uint32_t node,
                            uint8_t mode)
{
    size_t map_count;
    const executable_info *executable = executable_find(graph->executable);
    const tma_store *maps = node_tensor_maps(graph->graph, executable ? executable->id : 0, node, &map_count);
    return grid_id - graph->first_grid_id < graph->launch_index_count &&
           tma_stores_copy(&arena->tma_stores,
                           graph->first_launch_index + (uint32_t)(grid_id - graph->first_grid_id), mode, maps,
                           map_count);
}

/* A kernel that was not expected gets user data as well, because the other kernels of the graph may share it. */
uint64_t exact_assign_node(const Sanitizer_LaunchData *launch, uint32_t node)
{
    launch_arena *arena = pending.arena;
    graph_launch *graph = &pending.graph;
    if (!graph->signature.is_check)
        module_count_launch(patching_module_id(launch->module), arena != NULL);
    if (!arena || !graph->expected_kernel_count)
        return 0;
    const bool is_expected = graph->remaining_kernel_count > 0;
    /* NCCL's kernels are not patched: the accesses of a collective follow its record in the graph. */
    const bool is_nccl = is_nccl_kernel(launch->functionName);
    const unreported_accesses unreported =
        is_nccl ? (unreported_accesses){0} : patching_unreported_accesses(launch->module, launch->functionName);
    const char *reason = unreported.reason;
    graph->remaining_kernel_count -= is_expected;
    memset(graph->launch_record.kind_fields, 0, sizeof graph->launch_record.kind_fields);
    if (!graph->reservation_failed && !graph->launch_index_count)
        graph->reservation_failed = !reserve_graph_launch_indices(arena, graph, launch->gridId);
    if (!graph->reservation_failed && !reason && unreported.tensor_modes &&
        !add_node_stores(arena, graph, launch->gridId, node, unreported.tensor_modes))
        reason = MACHINE_CODE_TENSOR_STORES;
    if (reason)
        record_gap_detail("graph kernel inferred from arguments: ", reason);
    const bool has_index =
        !graph->reservation_failed &&
        use_node_launch_index(arena, graph, launch->gridId, is_expected && !is_nccl ? node : 0, reason != NULL);
    if (is_expected && !has_index)
        emit_unknown_node(graph, node);
    return graph->reservation_failed ? 0 : graph_user_data(arena, graph);
}

/* --- preparation and synchronization ---------------------------------------------------------- */

/* Return whether the arenas must be read or replaced soon, or their budget may have changed. */
static bool poll_is_due(const arena_pool *pool)
{
    return !pool->current || pool->recorded_since_poll >= LAUNCHES_PER_POLL ||
           (pool_has_unread_launches(pool) && monotonic_ns() - pool->last_poll_ns >= POLL_INTERVAL_NS);
}

/* Reserve arena space for the next launch, which needs no space unless ``may_be_recorded``, and read complete arenas from
 * time to time. Calls CUDA: the recorder lock is not held. */
static void prepare_launch(CUcontext context, uint64_t signature, uint64_t threads, uint64_t launch_index_count,
                           bool may_be_recorded)
{
    arena_space needed_space = {0};
    pthread_mutex_lock(&recorder_lock);
    arena_pool *pool = context ? pool_find(context) : NULL;
    const bool must_poll = !pool || poll_is_due(pool);
    if (may_be_recorded) {
        needed_space = space_estimate(signature, threads);
        needed_space.launch_indices = launch_index_count;
    }
    const bool is_patched = pool || patching_is_active(context);
    const bool is_prepared = !must_poll && (!may_be_recorded || pool_try_reserve(pool, needed_space));
    pthread_mutex_unlock(&recorder_lock);
    pending.space_signature = signature;
    pending.reserved_pages = pending.reserved_boxes = 0;
    if (!is_prepared) {
        pool = pool_open(context, is_patched);
        if (!pool || pool->is_disabled)
            return;
        if (must_poll) {
            arena_budget_query(pool);
            pool_poll(pool, false);
        }
        if (may_be_recorded)
            pool_reserve(pool, needed_space);
    }
    pending.reserved_pages = needed_space.pages;
    pending.reserved_boxes = needed_space.boxes;
}

void exact_prepare(CUcontext context, CUfunction function, uint64_t threads, bool may_be_recorded)
{
    if (patching_is_enabled())
        prepare_launch(context, space_signature(function, threads), threads, 1, may_be_recorded);
}

void exact_prepare_graph(CUcontext context, CUgraphExec executable)
{
    if (!patching_is_enabled())
        return;
    pthread_mutex_lock(&recorder_lock);
    const executable_info *info = executable_find(executable);
    const uint32_t graph = info ? info->graph : 0, kernel_count = info ? info->kernel_count : 0;
    const bool must_restore = modules_include_unpatched() && !graph_has_template(graph, context_id(context));
    const uint64_t launch_index_count = kernel_count ? count_needed_launch_indices(info) : 0;
    pthread_mutex_unlock(&recorder_lock);
    if (must_restore) {
        launch_begin_delay();
        modules_restore_all_patches(); /* the graph may have kernels of any module */
    }
    /* A graph that needs more launch indices than any arena has must not wait for an arena: it requests 0 launch indices. */
    if (launch_index_count)
        prepare_launch(context, space_signature(executable, kernel_count), 0,
                       launch_index_count > CK_MAX_LAUNCHES ? 0 : launch_index_count, true);
}

static arena_pool *active_pool(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    arena_pool *pool = context ? pool_find(context) : NULL;
    bool is_disabled = !pool || pool->is_disabled;
    pthread_mutex_unlock(&recorder_lock);
    return is_disabled ? NULL : pool;
}

void exact_on_completed_event(CUcontext context)
{
    arena_pool *pool = active_pool(context);
    if (!pool)
        return;
    pool_poll(pool, true);
    modules_request_review();
}

void exact_on_synchronize(CUcontext context, Sanitizer_StreamHandle stream)
{
    arena_pool *pool = active_pool(context);
    if (!pool)
        return;
    pthread_mutex_lock(&recorder_lock);
    for (size_t i = 0; i < ARENAS; i++)
        arena_streams_mark_complete(&pool->arenas[i].streams, stream);
    pthread_mutex_unlock(&recorder_lock);
    pool_poll(pool, true);
    modules_request_review();
}

bool exact_is_recorder_stream(Sanitizer_StreamHandle stream)
{
    pthread_mutex_lock(&recorder_lock);
    bool is_recorder_stream = pool_is_recorder_stream(stream);
    pthread_mutex_unlock(&recorder_lock);
    return is_recorder_stream;
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

void exact_read_all(void)
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
    pending = (pending_launch){0};
    if (!patching_is_enabled())
        return;
    pool_clear();
    patching_clear();
    templates_clear();
    patch_restoring_clear();
}
