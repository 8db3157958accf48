#include "model/graphs.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "exact/patching.h"
#include "hooks/driver_api.h"
#include "model/allocations.h"
#include "model/ids.h"
#include "model/kernels.h"
#include "recorder.h"
#include "write/spool.h"

#define MAX_SLICES 64 /* per copy; more slices are recorded as one range */

static table node_call_sites; /* of captured nodes, by node handle */
static table kernel_nodes;    /* node ids, by graph and handle, and by graph and position among the kernels */
static int active_captures;

/* --- records ---------------------------------------------------------------------------------- */

static const uint8_t WORK_OF[] = {
    [NODE_KERNEL] = WORK_LAUNCH,      [NODE_MEMCPY] = WORK_COPY,       [NODE_MEMSET] = WORK_FILL,
    [NODE_HOST] = WORK_HOST,          [NODE_MEM_ALLOC] = WORK_ALLOC,   [NODE_MEM_FREE] = WORK_FREE,
    [NODE_BATCH_MEM_OP] = WORK_MEMOP, [NODE_CONDITIONAL] = WORK_EMPTY,
};

static uint64_t side_address(const box_side *side)
{
    if (side->type == MEMORY_ARRAY)
        return 0;
    return side->type == MEMORY_HOST ? (uint64_t)(uintptr_t)side->host : side->device;
}

typedef struct {
    record node_record;
    record *out;
    size_t count;
} writer;

static void write_access(writer *to, uint64_t lo, size_t row_bytes, size_t pitch, size_t rows, uint8_t mode)
{
    if (!lo || !row_bytes || !rows || to->count == MAX_ACCESSES)
        return;
    record *access = to->out + to->count++;
    *access = to->node_record;
    access->kind = KIND_ACCESS;
    memset(access->own, 0, sizeof access->own);
    access->access.lo = lo;
    access->access.hi = lo + pitch * (rows - 1) + row_bytes;
    access->access.mode = mode;
    access->access.known = KNOWN_EXACT;
    access->access.stride_bytes = rows > 1 ? (int64_t)pitch : 0;
    access->access.count = rows > 1 ? rows : 0;
    access->access.node = to->node_record.node.node;
}

static void write_copy_side(writer *to, const box_side *side, const box_copy *copy, uint8_t mode)
{
    uint64_t address = side_address(side);
    size_t rows = copy->height ? copy->height : 1, slices = copy->depth ? copy->depth : 1;
    size_t slice_bytes = side->pitch * (side->height ? side->height : rows);
    if (!address)
        return;
    address += side->z * slice_bytes + side->y * side->pitch + side->x;
    if (slices > MAX_SLICES) {
        write_access(to, address, (slices - 1) * slice_bytes + copy->width, 0, 1, mode);
        return;
    }
    for (size_t i = 0; i < slices; i++)
        write_access(to, address + i * slice_bytes, copy->width, side->pitch, rows, mode);
}

static void write_accesses(writer *to, const graph_node *one)
{
    const memset_node_params *fill = &one->fill;
    allocation freed;
    switch (one->type) {
    case NODE_KERNEL:
        to->count = kernels_find_pointers(one->layout, one->kernel.kernelParams, one->kernel.extra,
                                          &to->node_record, to->out, MAX_ACCESSES);
        for (size_t i = 0; i < to->count; i++)
            to->out[i].access.node = to->node_record.node.node;
        break;
    case NODE_MEMCPY:
        write_copy_side(to, &one->copy.src, &one->copy, MODE_READ);
        write_copy_side(to, &one->copy.dst, &one->copy, MODE_WRITE);
        break;
    case NODE_MEMSET:
        write_access(to, fill->dst, fill->width * fill->elementSize, fill->pitch, fill->height, MODE_WRITE);
        break;
    case NODE_MEM_ALLOC:
        allocations_add(one->alloc.dptr, one->alloc.bytesize, HOW_GRAPH);
        write_access(to, one->alloc.dptr, one->alloc.bytesize, 0, 1, MODE_WRITE);
        break;
    case NODE_MEM_FREE:
        if (allocations_remove(one->freed, &freed))
            write_access(to, freed.lo, freed.hi - freed.lo, 0, 1, MODE_WRITE);
        break;
    }
}

static uint64_t node_key(uint32_t graph, uint64_t key)
{
    return (key * 0x9E3779B97F4A7C15ull ^ (uint64_t)graph << 40 ^ graph) | 1;
}

uint32_t graphs_node(uint32_t graph, CUgraphNode handle, uint32_t nth)
{
    uint32_t number = table_get(&kernel_nodes, node_key(graph, (uint64_t)(uintptr_t)handle));
    return number ? number : table_get(&kernel_nodes, node_key(graph, nth));
}

static void add_kernel_node(uint32_t graph, CUgraphNode handle, uint32_t nth, uint32_t number)
{
    table_put(&kernel_nodes, node_key(graph, (uint64_t)(uintptr_t)handle), number);
    table_put(&kernel_nodes, node_key(graph, nth), number);
}

static void write_node(uint32_t graph, uint32_t number, const graph_node *one, uint32_t site, record *buffer)
{
    uint32_t captured_at = one->handle ? table_get(&node_call_sites, (uint64_t)(uintptr_t)one->handle) : 0;
    record made = record_begin(KIND_GRAPH_NODE, context_id(NULL), 0, captured_at ? captured_at : site);
    made.node.graph = graph;
    made.node.node = number;
    made.node.work = one->type < (int)sizeof WORK_OF ? WORK_OF[one->type] : WORK_EMPTY;
    made.node.name = one->name ? spool_text(one->name) : 0;
    writer to = {made, buffer + 1, 0};
    buffer[0] = made;
    write_accesses(&to, one);
    spool_records(buffer, 1 + to.count);
}

static uint32_t write_graph(const graph_structure *all, const call_site *here)
{
    record *buffer = calloc(1 + MAX_ACCESSES, sizeof *buffer);
    if (!buffer)
        return 0;
    pthread_mutex_lock(&recorder_lock);
    uint32_t graph = new_graph_id(), site = call_site_id(here);
    for (size_t i = 0, kernels = 0; i < all->node_count; i++) {
        write_node(graph, (uint32_t)(i + 1), all->nodes + i, site, buffer);
        if (all->nodes[i].type == NODE_KERNEL && patching_is_enabled())
            add_kernel_node(graph, all->nodes[i].handle, (uint32_t)++kernels, (uint32_t)(i + 1));
    }
    for (size_t i = 0; i < all->edge_count; i++) {
        record made = record_begin(KIND_GRAPH_EDGE, 0, 0, site);
        made.edge.graph = graph;
        made.edge.before = all->edges[i].before;
        made.edge.after = all->edges[i].after;
        record_one(&made);
    }
    if (all->failed)
        record_gap("a graph that could not be read in full");
    if (all->has_conditional)
        record_gap("a conditional node of a graph");
    pthread_mutex_unlock(&recorder_lock);
    free(buffer);
    return graph;
}

uint32_t graphs_record(CUgraph graph, const call_site *here, uint32_t *kernels)
{
    graph_structure all;
    *kernels = graph_structure_query(&all, graph);
    uint32_t number = all.driver && graph ? write_graph(&all, here) : 0;
    graph_structure_free(&all);
    return number;
}

/* --- captures --------------------------------------------------------------------------------- */

void graphs_count_captures(int change)
{
    __atomic_add_fetch(&active_captures, change, __ATOMIC_RELAXED);
}

bool graphs_is_capturing(void)
{
    return __atomic_load_n(&active_captures, __ATOMIC_RELAXED) > 0;
}

void graphs_node_captured(CUstream stream)
{
    const driver_queries *api = driver();
    int status = 0;
    uint64_t id;
    CUgraph graph;
    const CUgraphNode *last = NULL;
    const edge_data *data = NULL;
    size_t count = 0;
    if (!graphs_is_capturing() || !api)
        return;
    this_thread.in_own_call = true;
    int failed = api->cuStreamGetCaptureInfo_v3(stream, &status, &id, &graph, &last, &data, &count);
    this_thread.in_own_call = false;
    if (failed || status != 1 || count != 1)
        return;
    call_site here;
    call_site_here(&here);
    pthread_mutex_lock(&recorder_lock);
    table_put(&node_call_sites, (uint64_t)(uintptr_t)last[0], call_site_id(&here));
    pthread_mutex_unlock(&recorder_lock);
}

void graphs_clear(void)
{
    table_clear(&node_call_sites);
    table_clear(&kernel_nodes);
    __atomic_store_n(&active_captures, 0, __ATOMIC_RELAXED);
}
