#include "model/graphs.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "model/allocations.h"
#include "model/collectives.h"
#include "model/graph_contents.h"
#include "model/ids.h"
#include "model/kernels.h"
#include "recorder.h"
#include "vendor/driver_api.h"
#include "write/call_sites.h"
#include "write/spool.h"

#define MAX_SLICES 64 /* maximum number of slices of a 3D copy; a copy with more slices is recorded as one range */

static hash_table node_call_sites;    /* call site ids of captured nodes, by node handle */
static hash_table node_program_calls; /* numbers of program calls (walker.h), by handle of the captured node */

/* The graph that this thread instantiates: its id, the number of its kernel nodes, and whether an executable graph was
 * created or updated from it. */
typedef struct {
    uint32_t graph, kernel_count;
    bool is_graph_in_use;
} graph_instantiation;
static __thread graph_instantiation instantiation;

/* --- records ---------------------------------------------------------------------------------- */

static const uint8_t TRACE_NODE_TYPE[] = {
    [NODE_KERNEL] = NODE_TYPE_LAUNCH,      [NODE_MEMCPY] = NODE_TYPE_COPY,       [NODE_MEMSET] = NODE_TYPE_FILL,
    [NODE_HOST] = NODE_TYPE_HOST,          [NODE_MEM_ALLOC] = NODE_TYPE_ALLOC,   [NODE_MEM_FREE] = NODE_TYPE_FREE,
    [NODE_BATCH_MEM_OP] = NODE_TYPE_MEMOP, [NODE_CONDITIONAL] = NODE_TYPE_EMPTY,
};

static uint64_t operand_address(const memcpy3d_operand *operand)
{
    if (operand->type == MEMORY_ARRAY)
        return 0;
    return operand->type == MEMORY_HOST ? (uint64_t)(uintptr_t)operand->host : operand->device;
}

typedef struct {
    record node_record;
    record *accesses; /* ACCESS records of the node */
    size_t access_count;
    uint64_t argument_hash; /* hash of the arguments of a kernel; 0 if they are unknown */
} node_writer;

static void write_access(node_writer *writer, uint64_t lo, size_t row_bytes, size_t pitch, size_t row_count,
                         uint8_t mode)
{
    if (!lo || !row_bytes || !row_count || writer->access_count == MAX_ACCESSES)
        return;
    record *access = writer->accesses + writer->access_count++;
    *access = writer->node_record;
    access->kind = KIND_ACCESS;
    memset(access->kind_fields, 0, sizeof access->kind_fields);
    access->access.lo = lo;
    access->access.hi = lo + pitch * (row_count - 1) + row_bytes;
    access->access.mode = mode;
    access->access.precision = PRECISION_EXACT;
    access->access.stride_bytes = row_count > 1 ? (int64_t)pitch : 0;
    access->access.count = row_count > 1 ? row_count : 0;
    access->access.node = writer->node_record.node.node;
}

static void write_copy_operand(node_writer *writer, const memcpy3d_operand *operand, const memcpy3d_params *copy,
                               uint8_t mode)
{
    uint64_t address = operand_address(operand);
    size_t row_count = copy->height ? copy->height : 1, slice_count = copy->depth ? copy->depth : 1;
    size_t slice_bytes = operand->pitch * (operand->height ? operand->height : row_count);
    if (!address)
        return;
    address += operand->z * slice_bytes + operand->y * operand->pitch + operand->x;
    if (slice_count > MAX_SLICES) {
        write_access(writer, address, (slice_count - 1) * slice_bytes + copy->width, 0, 1, mode);
        return;
    }
    for (size_t i = 0; i < slice_count; i++)
        write_access(writer, address + i * slice_bytes, copy->width, operand->pitch, row_count, mode);
}

static void write_accesses(node_writer *writer, const graph_node *node)
{
    static launch_arguments arguments; /* protected by the recorder lock */
    const memset_node_params *fill = &node->fill;
    allocation freed_allocation;
    switch (node->type) {
    case NODE_KERNEL:
        kernels_find_arguments(node->layout, node->kernel.kernelParams, node->kernel.extra, &arguments);
        writer->access_count = kernels_write_accesses(&arguments, &writer->node_record, writer->accesses);
        writer->argument_hash = kernels_hash_arguments(&arguments);
        for (size_t i = 0; i < writer->access_count; i++)
            writer->accesses[i].access.node = writer->node_record.node.node;
        break;
    case NODE_MEMCPY:
        write_copy_operand(writer, &node->copy.src, &node->copy, MODE_READ);
        write_copy_operand(writer, &node->copy.dst, &node->copy, MODE_WRITE);
        break;
    case NODE_MEMSET:
        write_access(writer, fill->dst, fill->width * fill->elementSize, fill->pitch, fill->height, MODE_WRITE);
        break;
    case NODE_MEM_ALLOC:
        allocations_add(node->alloc.dptr, node->alloc.bytesize, ALLOCATION_GRAPH);
        write_access(writer, node->alloc.dptr, node->alloc.bytesize, 0, 1, MODE_WRITE);
        break;
    case NODE_MEM_FREE:
        if (allocations_remove(node->freed_address, &freed_allocation))
            write_access(writer, freed_allocation.lo, freed_allocation.hi - freed_allocation.lo, 0, 1, MODE_WRITE);
        break;
    }
}

uint32_t graphs_find_node(uint32_t graph, CUgraphNode handle, uint32_t kernel_position)
{
    const graph_contents *contents = graph_contents_find(graph);
    const uint32_t node_id = contents ? graph_contents_node_id(contents, handle) : 0;
    return node_id || !contents || !kernel_position ? node_id
                                                    : graph_contents_kernel_id(contents, kernel_position);
}

/* --- tensor maps of kernel nodes ----------------------------------------------------------------- */

/* Store the tensor maps among the parameters of a kernel node: those of the instantiation if ``executable`` is 0, else
 * those that were changed in this executable graph. */
static void set_tensor_maps(uint32_t graph, uint32_t executable, uint32_t node_id, const graph_node *node)
{
    graph_contents *contents = graph_contents_find(graph);
    tma_store_set parameter_maps = {0};
    if (!contents)
        return;
    kernels_add_tensor_maps(&parameter_maps, 0, 0, node->layout, node->kernel.kernelParams, node->kernel.extra);
    graph_contents_set_maps(contents, executable, node_id,
                            (node_maps){parameter_maps.maps, parameter_maps.map_count});
}

const tma_store *node_tensor_maps(uint32_t graph, uint32_t executable, uint32_t node, size_t *count)
{
    const graph_contents *contents = graph_contents_find(graph);
    const node_maps *maps = contents ? graph_contents_maps(contents, executable, node) : NULL;
    if (contents && !maps)
        maps = graph_contents_maps(contents, 0, node);
    *count = maps ? maps->map_count : 0;
    return maps ? maps->maps : NULL;
}

/* --- reached memory -------------------------------------------------------------------------------- */

void graphs_always_record(uint32_t graph)
{
    graph_contents *contents = graph_contents_find(graph);
    if (contents)
        contents->is_always_recorded = true;
}

/* Set the memory that a node of a graph reaches to the addresses of its accesses. ``content_hash`` is a hash of its
 * parameters, or 0 if they are unknown. */
static void set_node_reach(const record *node_record, const graph_node *node, const record *accesses,
                           size_t access_count, uint64_t content_hash)
{
    graph_contents *contents = graph_contents_find(node_record->node.graph);
    node_contents *changed = contents ? graph_contents_node(contents, node_record->node.node) : NULL;
    uint64_t *addresses = changed ? realloc(changed->addresses, (access_count + 1) * sizeof *addresses) : NULL;
    if (!addresses) {
        graphs_always_record(node_record->node.graph);
        return;
    }
    for (size_t i = 0; i < access_count; i++)
        addresses[i] = accesses[i].access.lo;
    contents->content_hash += content_hash - changed->content_hash;
    contents->is_outdated = true;
    contents->has_copies = contents->has_copies || node->type == NODE_MEMCPY || node->type == NODE_MEMSET;
    /* Each launch of a graph with allocation nodes may get other memory. */
    contents->is_always_recorded = contents->is_always_recorded || !content_hash || node->type == NODE_MEM_ALLOC ||
                                   node->type == NODE_MEM_FREE;
    changed->addresses = addresses;
    changed->address_count = access_count;
    changed->content_hash = content_hash;
}

graph_memory graphs_memory(uint32_t graph)
{
    graph_contents *contents = graph_contents_find(graph);
    if (!contents || (contents->is_outdated && !graph_contents_update_addresses(contents)))
        return (graph_memory){0};
    return (graph_memory){contents->addresses, contents->address_count,
                          contents->is_always_recorded ? 0 : contents->content_hash | 1, contents->has_copies};
}

/* --- writing graphs ------------------------------------------------------------------------------ */

/* Return whether a node's accesses follow from its parameters, which the program can set in the executable graph. */
static bool has_changeable_accesses(const graph_node *node)
{
    return node->type == NODE_KERNEL || node->type == NODE_MEMCPY || node->type == NODE_MEMSET;
}

/* Return a hash of a node's parameters, or 0 if some of them are unknown. Two nodes with the same hash access the same
 * memory, unless their kernel chooses addresses by the content of memory. */
static uint64_t content_hash_of(const node_writer *writer, const graph_node *node)
{
    const kernel_node_params *kernel = &node->kernel;
    uint64_t hash = mix_hash(mix_hash(1, writer->node_record.node.node), (uint64_t)node->type);
    if (writer->access_count == MAX_ACCESSES || (node->type == NODE_KERNEL && !writer->argument_hash))
        return 0;
    if (node->type == NODE_KERNEL) {
        hash = mix_hash(mix_hash(hash, writer->node_record.node.name), writer->argument_hash);
        for (int i = 0; i < 3; i++)
            hash = mix_hash(mix_hash(hash, kernel->grid[i]), kernel->block[i]);
    }
    for (size_t i = 0; node->type != NODE_KERNEL && i < writer->access_count; i++)
        hash = mix_hash(mix_hash(hash, writer->accesses[i].access.lo), writer->accesses[i].access.hi);
    return hash | 1;
}

/* Fill ``buffer`` with the records of a node and of its accesses, and return the number of records.
 * write_node_records() sets the common fields of their call. */
static size_t fill_node_records(uint32_t graph, uint32_t node_id, const graph_node *node, uint32_t site,
                                record *buffer)
{
    uint32_t captured_site =
        node->handle ? hash_table_get(&node_call_sites, (uint64_t)(uintptr_t)node->handle) : 0;
    record rec = {.kind = KIND_GRAPH_NODE, .site = captured_site ? captured_site : site};
    rec.program_call = node->handle ? hash_table_get(&node_program_calls, (uint64_t)(uintptr_t)node->handle) : 0;
    rec.node.graph = graph;
    rec.node.node = node_id;
    rec.node.node_type = node->type < (int)sizeof TRACE_NODE_TYPE ? TRACE_NODE_TYPE[node->type] : NODE_TYPE_EMPTY;
    rec.node.name = node->name ? spool_text(node->name) : 0;
    node_writer writer = {rec, buffer + 1, 0, 0};
    buffer[0] = rec;
    if (node->type == NODE_KERNEL && is_nccl_kernel(node->name))
        return 1;
    write_accesses(&writer, node);
    set_node_reach(&rec, node, buffer + 1, writer.access_count, content_hash_of(&writer, node));
    return 1 + writer.access_count;
}

/* Write the records of a node. */
static void write_node_records(record *records, size_t record_count)
{
    const record call = record_begin(KIND_GRAPH_NODE, 0, 0, 0);
    for (size_t i = 0; i < record_count; i++) {
        records[i].seq = call.seq;
        records[i].time_ns = call.time_ns;
        records[i].thread = call.thread;
        records[i].device = call.device;
    }
    spool_records(records, record_count);
}

/* Write the records of a node of a graph, and discard earlier records of the node that are not written. */
static void write_records_of_node(uint32_t graph, uint32_t node_id, record *records, size_t record_count)
{
    graph_contents *contents = graph_contents_find(graph);
    write_node_records(records, record_count);
    if (!contents || node_id >= contents->node_count)
        return;
    contents->nodes[node_id].name = records[0].node.name;
    contents->nodes[node_id].unwritten_count = 0;
}

static void write_node(uint32_t graph, uint32_t node_id, const graph_node *node, uint32_t site, record *buffer)
{
    write_records_of_node(graph, node_id, buffer, fill_node_records(graph, node_id, node, site, buffer));
    if (node->type == NODE_KERNEL && is_nccl_kernel(node->name) && !collectives_write_node(node->handle, buffer))
        record_gap("captured collective whose buffers are unknown");
}

/* Remember a node for launches and changes: a kernel by its handle and its position among the kernels, a copy, a
 * memset and a child graph by their handles. */
static void index_node(uint32_t graph, uint32_t node_id, const graph_node *node, uint32_t *kernel_count)
{
    graph_contents *contents = graph_contents_find(graph);
    if (!contents || (!has_changeable_accesses(node) && !node->is_child_graph))
        return;
    graph_contents_add_node(contents, node_id, node->handle, node->type == NODE_KERNEL ? ++*kernel_count : 0);
    if (node->type == NODE_KERNEL && patching_is_enabled())
        set_tensor_maps(graph, 0, node_id, node);
}

/* For each node id: the number of edges to the node that has_total_order() has not followed yet, and the nodes
 * that follow the node. */
typedef struct {
    uint32_t *edge_counts;
    uint32_t *first_successors; /* index of the first successor of each node in ``successors`` */
    uint32_t *successors;
} node_order;

/* Sort the edges of a graph by the node at which they begin. The arrays of ``order`` contain zeros before the
 * call. */
static void sort_edges(const graph_structure *structure, node_order *order)
{
    uint32_t *indices = order->first_successors, edge_count = 0;
    for (size_t i = 0; i < structure->edge_count; i++) {
        order->edge_counts[structure->edges[i].after]++;
        indices[structure->edges[i].before]++;
    }
    for (size_t i = 1; i <= structure->node_count; i++)
        indices[i] = edge_count += indices[i]; /* index behind the last successor */
    indices[structure->node_count + 1] = edge_count;
    for (size_t i = 0; i < structure->edge_count; i++)
        order->successors[--indices[structure->edges[i].before]] = structure->edges[i].after;
}

/* Return whether each node of a graph is ordered before or after each other node. Then exactly one node can be next at
 * any time. */
static bool has_total_order(const graph_structure *structure, node_order *order)
{
    size_t passed_count = 0;
    uint32_t node = 0, next_count = 0, next_node = 0;
    for (uint32_t i = 1; i <= structure->node_count; i++)
        if (!order->edge_counts[i])
            next_node = i, next_count++;
    for (; next_count == 1; passed_count++) {
        node = next_node, next_count = 0;
        for (uint32_t i = order->first_successors[node]; i < order->first_successors[node + 1]; i++)
            if (!--order->edge_counts[order->successors[i]])
                next_node = order->successors[i], next_count++;
    }
    return !next_count && passed_count == structure->node_count;
}

/* Return whether the edges order all nodes one after the other. Nodes that are not ordered may race with each other. */
static bool nodes_are_ordered(const graph_structure *structure)
{
    node_order order = {
        .edge_counts = calloc(structure->node_count + 1, sizeof(uint32_t)),
        .first_successors = calloc(structure->node_count + 2, sizeof(uint32_t)),
        .successors = calloc(structure->edge_count + 1, sizeof(uint32_t)),
    };
    bool are_ordered = order.edge_counts && order.first_successors && order.successors;
    if (are_ordered) {
        sort_edges(structure, &order);
        are_ordered = has_total_order(structure, &order);
    }
    free(order.edge_counts);
    free(order.first_successors);
    free(order.successors);
    return are_ordered;
}

static uint32_t write_graph(const graph_structure *structure, const call_site *stack)
{
    record *buffer = calloc(1 + MAX_ACCESSES, sizeof *buffer);
    if (!buffer)
        return 0;
    pthread_mutex_lock(&recorder_lock);
    uint32_t graph = new_graph_id(), site = call_site_id(stack);
    uint32_t kernel_count = 0;
    if (!graph_contents_add(graph))
        record_gap("graph whose nodes are unknown, because no host memory is left");
    for (size_t i = 0; i < structure->node_count; i++) {
        write_node(graph, (uint32_t)(i + 1), structure->nodes + i, site, buffer);
        index_node(graph, (uint32_t)(i + 1), structure->nodes + i, &kernel_count);
    }
    for (size_t i = 0; i < structure->edge_count; i++) {
        record rec = record_begin(KIND_GRAPH_EDGE, 0, 0, site);
        rec.edge.graph = graph;
        rec.edge.before = structure->edges[i].before;
        rec.edge.after = structure->edges[i].after;
        record_append(&rec);
    }
    if (structure->has_failed || structure->has_conditional || !nodes_are_ordered(structure))
        graphs_always_record(graph);
    if (structure->has_failed)
        record_gap("graph with nodes that could not be queried");
    if (structure->has_conditional)
        record_gap("conditional graph node");
    pthread_mutex_unlock(&recorder_lock);
    free(buffer);
    return graph;
}

void graphs_instantiation_begins(CUgraph graph)
{
    graph_structure structure;
    call_site stack;
    call_site_read(&stack);
    instantiation.kernel_count = graph_structure_query(&structure, graph);
    instantiation.graph = structure.driver && graph ? write_graph(&structure, &stack) : 0;
    graph_structure_free(&structure);
}

bool graphs_is_instantiating(void)
{
    return instantiation.graph;
}

/* --- executable graphs ------------------------------------------------------------------------------ */

/* Free the contents of a graph that is not launched any more, and write a record so that the analysis frees its nodes as
 * well. ``executable`` is the id of its executable graph if that was destroyed, else 0. The recorder lock is held. */
static void destroy_graph(uint32_t graph, uint32_t executable)
{
    record rec = record_begin(KIND_GRAPH_DESTROY, 0, 0, 0);
    rec.graph_destroy.graph = graph;
    rec.graph_destroy.executable = executable;
    record_append(&rec);
    graph_contents_free(graph);
}

void graphs_executable_created(CUgraphExec executable)
{
    const executable_info *info = executable_find(executable);
    const uint32_t old_graph = info ? info->graph : 0;
    executable_add(executable, instantiation.graph, instantiation.kernel_count);
    instantiation.is_graph_in_use = true;
    if (old_graph && old_graph != instantiation.graph)
        destroy_graph(old_graph, 0);
}

void graphs_executable_destroyed(CUgraphExec executable)
{
    const executable_info *info = executable_find(executable);
    if (info)
        destroy_graph(info->graph, info->id);
    executable_remove(executable);
}

void graphs_instantiation_ended(void)
{
    if (instantiation.graph && !instantiation.is_graph_in_use) {
        pthread_mutex_lock(&recorder_lock);
        destroy_graph(instantiation.graph, 0);
        pthread_mutex_unlock(&recorder_lock);
    }
    instantiation = (graph_instantiation){0};
}

/* --- changed nodes of executable graphs ------------------------------------------------------------ */

/* Store the records of a changed kernel until the next launch that is recorded, and return true. Until then the
 * analysis does not need them, because a launch that uses a template has the accesses of the template. Return
 * false if the records must be written now. XLA changes all nodes before each launch, so writing all records would
 * take long. */
static bool store_node_records(uint32_t graph, uint32_t node_id, const record *records, size_t record_count)
{
    graph_contents *contents = graph_contents_find(graph);
    node_contents *changed = contents && node_id < contents->node_count ? contents->nodes + node_id : NULL;
    if (!changed || !templates_are_enabled() || contents->has_copies || contents->is_always_recorded ||
        changed->name != records[0].node.name)
        return false;
    record *unwritten_records = realloc(changed->unwritten_records, record_count * sizeof *unwritten_records);
    if (!unwritten_records)
        return false;
    memcpy(unwritten_records, records, record_count * sizeof *unwritten_records);
    changed->unwritten_records = unwritten_records;
    changed->unwritten_count = record_count;
    contents->has_unwritten_nodes = true;
    return true;
}

void graphs_write_changed_nodes(uint32_t graph)
{
    graph_contents *contents = graph_contents_find(graph);
    if (!contents || !contents->has_unwritten_nodes)
        return;
    for (size_t i = 0; i < contents->node_count; i++) {
        node_contents *changed = contents->nodes + i;
        if (changed->unwritten_count)
            write_node_records(changed->unwritten_records, changed->unwritten_count);
        changed->unwritten_count = 0;
    }
    contents->has_unwritten_nodes = false;
}

/* Write the new parameters of a node, which replace the earlier ones in the analysis, or store them until the next
 * launch that is recorded. The recorder lock is held. */
static void write_changed_node(uint32_t graph, uint32_t executable, uint32_t node_id, const graph_node *node,
                               uint32_t site, record *buffer)
{
    if (node->type != NODE_KERNEL || is_nccl_kernel(node->name)) {
        write_node(graph, node_id, node, site, buffer);
        return;
    }
    const size_t record_count = fill_node_records(graph, node_id, node, site, buffer);
    if (!store_node_records(graph, node_id, buffer, record_count)) {
        graphs_write_changed_nodes(graph);
        write_records_of_node(graph, node_id, buffer, record_count);
    }
    if (patching_is_enabled())
        set_tensor_maps(graph, executable, node_id, node);
}

bool graphs_node_changed(CUgraphExec executable, CUgraphNode handle, const graph_node *changed)
{
    static record buffer[1 + MAX_ACCESSES]; /* protected by the recorder lock */
    graph_node node = *changed;
    uint32_t node_id = 0;
    call_site stack;
    if (!has_changeable_accesses(&node))
        return false;
    node.handle = handle;
    if (node.type == NODE_KERNEL) {
        CUfunction function = node.kernel.func ? node.kernel.func : node.kernel.kern;
        node.layout = kernels_layout(function);
        node.name = kernels_name(function);
    }
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    const executable_info *info = executable_find(executable);
    node_id = info ? graphs_find_node(info->graph, handle, 0) : 0;
    if (node_id)
        write_changed_node(info->graph, info->id, node_id, &node, call_site_id(&stack), buffer);
    pthread_mutex_unlock(&recorder_lock);
    return node_id != 0;
}

/* Write the nodes of a new child graph, which are in the same order as the replaced nodes. ``first_node`` is the id of
 * the first replaced node. Return false if there are nodes whose new parameters are unknown. The recorder lock is
 * held. */
static bool write_changed_child(const graph_structure *child, uint32_t graph, uint32_t executable,
                                uint32_t first_node, uint32_t site, record *buffer)
{
    bool is_complete = true;
    for (size_t i = 0; i < child->node_count; i++) {
        const graph_node *node = child->nodes + i;
        if (has_changeable_accesses(node))
            write_changed_node(graph, executable, first_node + (uint32_t)i, node, site, buffer);
        else if (node->type != NODE_EMPTY && node->type != NODE_HOST)
            is_complete = false;
    }
    return is_complete;
}

bool graphs_child_graph_changed(CUgraphExec executable, CUgraphNode handle, CUgraph child)
{
    graph_structure structure;
    call_site stack;
    bool all_updated = false;
    record *buffer = calloc(1 + MAX_ACCESSES, sizeof *buffer);
    if (!buffer)
        return false;
    graph_structure_query(&structure, child);
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    const executable_info *info = executable_find(executable);
    const uint32_t node_id = info ? graphs_find_node(info->graph, handle, 0) : 0;
    if (node_id && !structure.has_failed) /* the nodes of the child graph follow the two nodes that represent it */
        all_updated =
            write_changed_child(&structure, info->graph, info->id, node_id + 2, call_site_id(&stack), buffer);
    pthread_mutex_unlock(&recorder_lock);
    graph_structure_free(&structure);
    free(buffer);
    return all_updated;
}

/* --- captures --------------------------------------------------------------------------------- */

void graphs_node_captured(CUstream stream)
{
    const driver_functions *driver = driver_api();
    int capture_status = 0;
    uint64_t capture_id;
    CUgraph graph;
    const CUgraphNode *last_nodes = NULL;
    const edge_data *edges = NULL;
    size_t node_count = 0;
    if (!order_is_capturing() || !driver)
        return;
    this_thread.in_recorder_call = true;
    int result = driver->cuStreamGetCaptureInfo_v3(stream, &capture_status, &capture_id, &graph, &last_nodes,
                                                   &edges, &node_count);
    this_thread.in_recorder_call = false;
    if (result || capture_status != 1 || node_count != 1)
        return;
    call_site stack;
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    const uint64_t key = (uint64_t)(uintptr_t)last_nodes[0];
    hash_table_put(&node_call_sites, key, call_site_id(&stack));
    hash_table_remove(&node_program_calls, key); /* the driver reuses handles */
    const uint32_t program_call = call_site_program_call(&stack);
    if (program_call)
        hash_table_put(&node_program_calls, key, program_call);
    collectives_assign_node(last_nodes[0]);
    pthread_mutex_unlock(&recorder_lock);
}

void graphs_clear(void)
{
    hash_table_clear(&node_call_sites);
    hash_table_clear(&node_program_calls);
    graph_contents_clear();
    instantiation = (graph_instantiation){0};
}
