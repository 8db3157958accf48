/* Plays the log of a run with exact accesses with --accesses auto: reads the records of the log in the order of their
 * calls, and writes those that the recorder would have written. Built by template_player.py from the recorder's own
 * files. Those whose static functions are called are included; functions that are not called are not linked.
 *
 * Patches are never removed, changed nodes of graphs are written at once, and there are no GAP records, because their
 * texts are not among the records. A log does not have the arguments that are not pointers. */
#define _GNU_SOURCE
#include <stdio.h>

/* NOLINTBEGIN(bugprone-suspicious-include) */
#include "exact/emit_accesses.c"
#include "exact/exact.c"
#include "model/graphs.c"
#include "model/kernels.c"
/* NOLINTEND(bugprone-suspicious-include) */

/* --- the parts of the recorder that are replaced ----------------------------------------------------- */

__thread thread_state this_thread;
pthread_mutex_t recorder_lock = PTHREAD_MUTEX_INITIALIZER;

static uint64_t last_seq; /* of the log, or of a record that was begun since */

bool templates_are_enabled(void)
{
    return true;
}

/* Begin a record of a forgotten template, the only record that is not of a call in the log. */
record record_begin(uint16_t kind, uint32_t context, uint32_t stream, uint32_t site)
{
    return (record){.seq = ++last_seq, .kind = kind, .context = context, .stream = stream, .site = site};
}

void record_append(const record *rec)
{
    spool_records(rec, 1);
}

void record_gap(const char *reason)
{
    (void)reason;
}

void spool_records(const record *records, size_t count)
{
    fwrite(records, sizeof *records, count, stdout);
}

void spool_allocate_ahead(void)
{
}

uint32_t patching_module_id(CUmodule module)
{
    (void)module;
    return 1; /* all kernels are of one module */
}

bool module_has_patch(uint32_t id)
{
    return id;
}

void module_count_launch(uint32_t id, bool must_be_recorded)
{
    (void)id, (void)must_be_recorded;
}

bool modules_include_unpatched(void)
{
    return false;
}

arena_pool *pool_find(CUcontext context)
{
    (void)context;
    return NULL;
}

/* --- launches ---------------------------------------------------------------------------------------- */

static launch_arena arena;         /* the arena of the current launch only */
static launch_arguments arguments; /* of the current launch, or of the kernel of the current node */

/* Find the arguments of a kernel by the assumed accesses among the records of its call. */
static void find_arguments(const record *call, size_t count)
{
    begin_arguments(&arguments);
    for (size_t i = 1; i < count && arguments.pointer_count < MAX_ACCESSES; i++) {
        const bool is_pointer = call[i].kind == KIND_ACCESS && call[i].access.precision >= PRECISION_ASSUMED;
        allocation *reached = is_pointer ? allocations_find(call[i].access.lo) : NULL;
        if (reached)
            add_pointer(&arguments, i, call[i].access.lo, call[i].access.precision, reached);
    }
    arguments.is_complete = arguments.pointer_count < MAX_ACCESSES;
}

/* Write a launch that is recorded, and compare its accesses with those of earlier launches. The last record of its call is
 * an ACCESSED record, unless nothing was recorded. */
static void write_recorded_launch(const record *call, size_t count, const launch_signature *signature,
                                  reached_memory memory)
{
    const record *last = call + count - 1;
    arena_launch launch = {.template_record = *call};
    launch_group group = {
        .launch_index_count = 1, .expected_launch_count = 1, .signature = *signature, .reached_memory = memory};
    emitter writer = {.launches = &launch, .launch_count = 1, .arena = &arena};
    if (last->kind != KIND_ACCESSED) {
        spool_records(call, count);
        return;
    }
    arena.groups = &group;
    arena.group_count = 1;
    begin_group(&writer);
    for (const record *rec = call + 1; rec < last; rec++) {
        if (rec->kind == KIND_ACCESSED) {
            group.expected_launch_count++;
            writer.exact_launch_count += rec->accessed.exact;
        } else if (rec->kind == KIND_ACCESS && rec->access.precision < PRECISION_ASSUMED) {
            const uint64_t pieces = rec->access.count ? rec->access.count : 1;
            const uint64_t stride = (uint64_t)rec->access.stride_bytes;
            const uint64_t bytes = rec->access.hi - rec->access.lo - (pieces - 1) * stride;
            launch.template_record.access.node = rec->access.node;
            add_range_to_digest(&writer, rec->access.lo, bytes, stride, pieces,
                                rec->access.mode + (rec->access.precision == PRECISION_SUMMARY ? 16u : 0));
        }
    }
    spool_records(call, count - 1);
    compare_group_with_template(&writer, last->accessed.exact);
    write_buffered_records(&writer);
    spool_records(last, 1);
}

static void play_launch(record *call, size_t count)
{
    record pointer_records[MAX_ACCESSES];
    const Sanitizer_LaunchData data = {
        .gridDim_x = call->launch.grid[0],
        .gridDim_y = call->launch.grid[1],
        .gridDim_z = call->launch.grid[2],
        .blockDim_x = call->launch.block[0],
        .blockDim_y = call->launch.block[1],
        .blockDim_z = call->launch.block[2],
    };
    launch_signature signature;
    find_arguments(call, count);
    const launch_template chosen_template = exact_choose_template(call, &data, &arguments, &signature);
    if (!chosen_template.id) {
        const reached_memory memory =
            signature.state_index ? store_reached_memory(&arena, &arguments) : (reached_memory){0};
        write_recorded_launch(call, count, &signature, memory);
        return;
    }
    call->launch.pending = false;
    call->launch.template_id = chosen_template.id;
    call->launch.is_relative = chosen_template.is_relative;
    call->launch.is_checked = chosen_template.is_checked;
    spool_records(call, 1);
    if (chosen_template.is_relative)
        spool_records(pointer_records,
                      kernels_write_pointers(arguments.pointers, arguments.pointer_count, call, pointer_records));
}

/* --- graphs ------------------------------------------------------------------------------------------ */

#define MAX_GRAPHS 4096
static graph_structure structures[MAX_GRAPHS]; /* by graph id; only the edges are used */

/* Add or change a node of a graph. */
static void play_node(record *call, size_t count)
{
    const uint32_t graph = call->node.graph;
    node_writer writer = {.node_record = *call, .accesses = call + 1, .access_count = count - 1};
    graph_node node = {0};
    while (TRACE_NODE_TYPE[node.type] != call->node.node_type)
        node.type++;
    if (node.type == NODE_KERNEL) {
        find_arguments(call, count);
        writer.argument_hash = kernels_hash_arguments(&arguments);
    }
    if (!graph_contents_find(graph))
        graph_contents_add(graph);
    set_node_reach(call, &node, writer.accesses, writer.access_count, content_hash_of(&writer, &node));
}

static void play_edge(const record *rec)
{
    graph_structure *structure = structures + rec->edge.graph;
    structure->edges = array_reserve(structure->edges, &structure->edge_capacity, structure->edge_count + 1,
                                     sizeof *structure->edges, 16);
    structure->edges[structure->edge_count++] = (graph_edge){rec->edge.before, rec->edge.after};
}

static void play_graph_launch(record *call, size_t count)
{
    const uint32_t graph = call->graph_launch.graph;
    const graph_contents *contents = graph_contents_find(graph);
    launch_signature signature;
    structures[graph].node_count = contents ? contents->node_count - 1 : 0; /* node ids begin with 1 */
    if (!nodes_are_ordered(structures + graph))
        graphs_always_record(graph);
    const launch_template chosen_template = exact_choose_graph_template(call, &signature);
    if (!chosen_template.id) {
        const reached_memory memory =
            signature.state_index ? store_graph_reach(&arena, graph) : (reached_memory){0};
        write_recorded_launch(call, count, &signature, memory);
        return;
    }
    call->graph_launch.pending = false;
    call->graph_launch.template_id = chosen_template.id;
    call->graph_launch.is_checked = chosen_template.is_checked;
    spool_records(call, 1);
}

/* --- other calls -------------------------------------------------------------------------------------- */

static order_point **event_points; /* the work before the last record of each event, by event id */
static size_t event_count, event_capacity;

static void play_event_record(const record *rec)
{
    const uint32_t event = rec->event.event;
    event_points = array_reserve(event_points, &event_capacity, event + 1u, sizeof(order_point *), 1024);
    while (event_count <= event)
        event_points[event_count++] = NULL;
    free(event_points[event]);
    event_points[event] = order_point_of_stream(rec->stream, rec->context);
    order_event_recorded(event, rec->stream, rec->context);
}

/* A host function runs. It names the event that was recorded before it was enqueued. */
static void play_host_call(const record *rec)
{
    const uint32_t event = rec->host_call.event;
    if (event < event_count) {
        order_host_reached(event_points[event]);
        event_points[event] = NULL;
    }
}

static void play_alloc(const record *rec)
{
    allocations_add(rec->memory.address, rec->memory.size_bytes, rec->memory.allocation_kind);
    if (rec->memory.allocation_kind == ALLOCATION_STREAM_ORDERED)
        allocations_add_work(rec->memory.address, order_enqueue(rec->stream, rec->context));
}

/* A copy has a record for each of its slices. */
static void play_copy(const record *first, const record *last)
{
    const stream_operation operation = order_enqueue(first->stream, first->context);
    const uint64_t next_rows = first->copy.rows - 1, row_bytes = first->copy.size_bytes;
    allocations_add_access(first->copy.source,
                           last->copy.source + next_rows * first->copy.source_pitch_bytes + row_bytes, false,
                           operation);
    allocations_add_access(first->copy.destination,
                           last->copy.destination + next_rows * first->copy.destination_pitch_bytes + row_bytes,
                           true, operation);
}

static void play_fill(const record *rec)
{
    allocations_add_access(rec->fill.address,
                           rec->fill.address + (rec->fill.rows - 1) * rec->fill.pitch_bytes + rec->fill.size_bytes,
                           true, order_enqueue(rec->stream, rec->context));
}

static void play_call(record *call, size_t count)
{
    allocation removed;
    arena.reached_range_count = arena.pointer_count = 0;
    switch (call->kind) {
    case KIND_LAUNCH: play_launch(call, count); return;
    case KIND_GRAPH_LAUNCH: play_graph_launch(call, count); return;
    case KIND_GRAPH_NODE: play_node(call, count); break;
    case KIND_GRAPH_EDGE: play_edge(call); break;
    case KIND_GRAPH_DESTROY: graph_contents_free(call->graph_destroy.graph); break;
    case KIND_COPY: play_copy(call, call + count - 1); break;
    case KIND_FILL: play_fill(call); break;
    case KIND_EVENT_RECORD: play_event_record(call); break;
    case KIND_STREAM_WAIT: order_stream_waits(call->stream, call->context, call->event.event); break;
    case KIND_EVENT_SYNC:
    case KIND_EVENT_QUERY_OK: order_host_waited_for_event(call->event.event); break;
    case KIND_STREAM_SYNC: order_host_waited_for_stream(call->stream); break;
    case KIND_CONTEXT_SYNC: order_host_waited_for_context(call->context); break;
    case KIND_HOST_CALL: play_host_call(call); break;
    case KIND_STREAM_DESTROY: order_stream_destroyed(call->stream); break;
    case KIND_ALLOC:
        if (call->memory.layer == LAYER_DRIVER)
            play_alloc(call);
        break;
    case KIND_FREE:
        if (call->memory.layer == LAYER_DRIVER)
            allocations_remove(call->memory.address, &removed);
        break;
    }
    spool_records(call, count);
}

int main(void)
{
    enum { RECORDS_PER_READ = 1 << 16 };
    record *log = NULL;
    size_t count = 0, capacity = 0, read_count;
    do {
        log = array_reserve(log, &capacity, count + RECORDS_PER_READ, sizeof *log, RECORDS_PER_READ);
        read_count = fread(log + count, sizeof *log, RECORDS_PER_READ, stdin);
        count += read_count;
    } while (read_count);
    for (size_t i = 0; i < count; i++)
        last_seq = log[i].seq; /* the calls are in order */
    for (size_t first = 0, next = 0; first < count; first = next) {
        while (next < count && log[next].seq == log[first].seq)
            next++;
        play_call(log + first, next - first);
    }
    return 0;
}
