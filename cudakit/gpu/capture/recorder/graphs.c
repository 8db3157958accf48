#include "graphs.h"

#include <stdlib.h>
#include <string.h>

#include "allocations.h"
#include "driver.h"
#include "kernels.h"
#include "recorder.h"
#include "spool.h"
#include "table.h"

#define MAX_SLICES 64 /* of a box; one with more is taken as one piece */

typedef struct {
    CUgraphNode handle;
    int type;
    const char *name;
    const struct kernel_layout *layout;
    union {
        kernel_node_params kernel;
        box_copy copy;
        memset_node_params fill;
        alloc_node_params alloc;
        uint64_t freed;
    };
} node;

typedef struct {
    uint32_t before, after;
} edge;

typedef struct {
    const driver_queries *ask;
    node *nodes; /* node i has the number i + 1 */
    edge *edges;
    size_t node_count, node_capacity, edge_count, edge_capacity;
    bool failed, conditional;
} description;

static table sites_of_nodes; /* of captures, by the handle of the node */
static int captures;

/* --- asking -------------------------------------------------------------------------------------- */

static uint32_t add_node(description *all, CUgraphNode handle, int type)
{
    if (all->node_count == all->node_capacity) {
        size_t larger = all->node_capacity ? all->node_capacity * 2 : 64;
        node *moved = realloc(all->nodes, larger * sizeof *moved);
        if (!moved) {
            all->failed = true;
            return 0;
        }
        all->nodes = moved;
        all->node_capacity = larger;
    }
    node *made = all->nodes + all->node_count++;
    memset(made, 0, sizeof *made);
    made->handle = handle;
    made->type = type;
    return (uint32_t)all->node_count;
}

static void add_edge(description *all, uint32_t before, uint32_t after)
{
    if (all->edge_count == all->edge_capacity) {
        size_t larger = all->edge_capacity ? all->edge_capacity * 2 : 64;
        edge *moved = realloc(all->edges, larger * sizeof *moved);
        if (!moved) {
            all->failed = true;
            return;
        }
        all->edges = moved;
        all->edge_capacity = larger;
    }
    all->edges[all->edge_count++] = (edge){before, after};
}

static void ask_work(description *all, node *one)
{
    const driver_queries *ask = all->ask;
    int failed = 0;
    switch (one->type) {
    case NODE_KERNEL:
        failed = ask->cuGraphKernelNodeGetParams_v2(one->handle, &one->kernel);
        break;
    case NODE_MEMCPY:
        failed = ask->cuGraphMemcpyNodeGetParams(one->handle, &one->copy);
        break;
    case NODE_MEMSET:
        failed = ask->cuGraphMemsetNodeGetParams(one->handle, &one->fill);
        break;
    case NODE_MEM_ALLOC:
        failed = ask->cuGraphMemAllocNodeGetParams(one->handle, &one->alloc);
        break;
    case NODE_MEM_FREE:
        failed = ask->cuGraphMemFreeNodeGetParams(one->handle, &one->freed);
        break;
    case NODE_CONDITIONAL:
        all->conditional = true;
        break;
    }
    if (failed)
        one->type = NODE_EMPTY;
    all->failed |= failed != 0;
}

static void ask_graph(description *all, CUgraph graph, uint32_t begin, uint32_t end);

/* Where an edge to a node leads, and where one from it comes from: two places for a graph in a graph. */
typedef struct {
    CUgraphNode handle;
    uint32_t first, last;
    bool waits, is_waited_for;
} place;

static place ask_node(description *all, CUgraphNode handle)
{
    int type = NODE_EMPTY;
    CUgraph inner = NULL;
    all->failed |= all->ask->cuGraphNodeGetType(handle, &type) != 0;
    uint32_t number = add_node(all, handle, type == NODE_GRAPH ? NODE_EMPTY : type);
    place at = {handle, number, number, false, false};
    if (!number)
        return at;
    if (type == NODE_GRAPH && all->ask->cuGraphChildGraphNodeGetGraph(handle, &inner) == 0) {
        at.last = add_node(all, NULL, NODE_EMPTY);
        add_edge(all, at.first, at.last);
        ask_graph(all, inner, at.first, at.last);
    } else {
        ask_work(all, all->nodes + number - 1);
    }
    return at;
}

static place *find(place *places, const table *index, CUgraphNode handle)
{
    uint32_t at = table_get(index, (uint64_t)(uintptr_t)handle);
    return at ? places + at - 1 : NULL;
}

static void ask_edges(description *all, CUgraph graph, place *places, const table *index)
{
    size_t count = 0;
    if (all->ask->cuGraphGetEdges_v2(graph, NULL, NULL, NULL, &count) || !count)
        return;
    CUgraphNode *from = calloc(2 * count, sizeof *from), *to = from + count;
    edge_data *data = calloc(count, sizeof *data);
    if (from && data && all->ask->cuGraphGetEdges_v2(graph, from, to, data, &count) == 0) {
        for (size_t i = 0; i < count; i++) {
            place *before = find(places, index, from[i]), *after = find(places, index, to[i]);
            if (!before || !after)
                continue;
            before->is_waited_for = after->waits = true;
            add_edge(all, before->last, after->first);
        }
    } else {
        all->failed = true;
    }
    free(from);
    free(data);
}

/* Add the nodes of a graph; in a graph that is a node, between the two that stand for it. */
static void ask_graph(description *all, CUgraph graph, uint32_t begin, uint32_t end)
{
    size_t count = 0;
    table index = {0};
    if (all->ask->cuGraphGetNodes(graph, NULL, &count)) {
        all->failed = true;
        return;
    }
    CUgraphNode *handles = calloc(count + 1, sizeof *handles);
    place *places = calloc(count + 1, sizeof *places);
    if (handles && places && all->ask->cuGraphGetNodes(graph, handles, &count) == 0) {
        for (size_t i = 0; i < count; i++) {
            places[i] = ask_node(all, handles[i]);
            table_put(&index, (uint64_t)(uintptr_t)handles[i], (uint32_t)(i + 1));
        }
        ask_edges(all, graph, places, &index);
        for (size_t i = 0; begin && i < count; i++) {
            if (!places[i].waits)
                add_edge(all, begin, places[i].first);
            if (!places[i].is_waited_for)
                add_edge(all, places[i].last, end);
        }
    } else {
        all->failed = true;
    }
    table_clear(&index);
    free(handles);
    free(places);
}

/* What else must be asked of the kernels, once all nodes are known. */
static uint32_t ask_kernels(description *all)
{
    uint32_t kernels = 0;
    for (size_t i = 0; i < all->node_count; i++) {
        node *one = all->nodes + i;
        if (one->type != NODE_KERNEL)
            continue;
        CUfunction function = one->kernel.func ? one->kernel.func : one->kernel.kern;
        one->layout = kernels_layout(function);
        one->name = kernels_name(function);
        kernels++;
    }
    return kernels;
}

/* --- writing down -------------------------------------------------------------------------------- */

static const uint8_t WORK_OF[] = {
    [NODE_KERNEL] = WORK_LAUNCH,      [NODE_MEMCPY] = WORK_COPY,
    [NODE_MEMSET] = WORK_FILL,        [NODE_HOST] = WORK_HOST,
    [NODE_MEM_ALLOC] = WORK_ALLOC,    [NODE_MEM_FREE] = WORK_FREE,
    [NODE_BATCH_MEM_OP] = WORK_MEMOP, [NODE_CONDITIONAL] = WORK_EMPTY,
};

static uint64_t address_of(const box_side *side)
{
    if (side->type == MEMORY_ARRAY)
        return 0;
    return side->type == MEMORY_HOST ? (uint64_t)(uintptr_t)side->host : side->device;
}

typedef struct {
    record like;
    record *out;
    size_t count;
} writer;

static void write_access(writer *to, uint64_t lo, size_t row_bytes, size_t pitch, size_t rows, uint8_t mode)
{
    if (!lo || !row_bytes || !rows || to->count == MAX_ACCESSES)
        return;
    record *access = to->out + to->count++;
    *access = to->like;
    access->kind = KIND_ACCESS;
    memset(access->own, 0, sizeof access->own);
    access->access.lo = lo;
    access->access.hi = lo + pitch * (rows - 1) + row_bytes;
    access->access.mode = mode;
    access->access.known = KNOWN_EXACT;
    access->access.stride_bytes = rows > 1 ? (int64_t)pitch : 0;
    access->access.count = rows > 1 ? rows : 0;
    access->access.node = to->like.node.node;
}

static void write_box(writer *to, const box_side *side, const box_copy *copy, uint8_t mode)
{
    uint64_t address = address_of(side);
    size_t rows = copy->height ? copy->height : 1, slices = copy->depth ? copy->depth : 1;
    size_t slice_bytes = side->pitch * (side->height ? side->height : rows);
    if (!address)
        return;
    address += side->z * slice_bytes + side->y * side->pitch + side->x;
    if (slices > MAX_SLICES) {
        write_access(to, address, slice_bytes * (slices - 1) + copy->width, 0, 1, mode);
        return;
    }
    for (size_t i = 0; i < slices; i++)
        write_access(to, address + i * slice_bytes, copy->width, side->pitch, rows, mode);
}

static void write_accesses(writer *to, const node *one)
{
    const memset_node_params *fill = &one->fill;
    allocation was;
    switch (one->type) {
    case NODE_KERNEL:
        to->count = kernels_scan(one->layout, one->kernel.kernelParams, one->kernel.extra, &to->like,
                                 to->out, MAX_ACCESSES);
        for (size_t i = 0; i < to->count; i++)
            to->out[i].access.node = to->like.node.node;
        break;
    case NODE_MEMCPY:
        write_box(to, &one->copy.src, &one->copy, MODE_READ);
        write_box(to, &one->copy.dst, &one->copy, MODE_WRITE);
        break;
    case NODE_MEMSET:
        write_access(to, fill->dst, fill->width * fill->elementSize, fill->pitch, fill->height,
                     MODE_WRITE);
        break;
    case NODE_MEM_ALLOC:
        allocations_add(one->alloc.dptr, one->alloc.bytesize, HOW_GRAPH);
        write_access(to, one->alloc.dptr, one->alloc.bytesize, 0, 1, MODE_WRITE);
        break;
    case NODE_MEM_FREE:
        if (allocations_remove(one->freed, &was))
            write_access(to, was.lo, was.hi - was.lo, 0, 1, MODE_WRITE);
        break;
    }
}

static void write_node(uint32_t graph, uint32_t number, const node *one, uint32_t site, record *buffer)
{
    uint32_t captured_at = one->handle ? table_get(&sites_of_nodes, (uint64_t)(uintptr_t)one->handle) : 0;
    record made = record_begin(KIND_GRAPH_NODE, number_of_context(NULL), 0, captured_at ? captured_at : site);
    made.node.graph = graph;
    made.node.node = number;
    made.node.work = one->type < (int)sizeof WORK_OF ? WORK_OF[one->type] : WORK_EMPTY;
    made.node.name = one->name ? spool_text(one->name) : 0;
    writer to = {made, buffer + 1, 0};
    buffer[0] = made;
    write_accesses(&to, one);
    spool_records(buffer, 1 + to.count);
}

static uint32_t write_graph(const description *all, const site *here)
{
    record *buffer = calloc(1 + MAX_ACCESSES, sizeof *buffer);
    if (!buffer)
        return 0;
    pthread_mutex_lock(&recorder_lock);
    uint32_t graph = new_graph(), site = sites_number(here);
    for (size_t i = 0; i < all->node_count; i++)
        write_node(graph, (uint32_t)(i + 1), all->nodes + i, site, buffer);
    for (size_t i = 0; i < all->edge_count; i++) {
        record made = record_begin(KIND_GRAPH_EDGE, 0, 0, site);
        made.edge.graph = graph;
        made.edge.before = all->edges[i].before;
        made.edge.after = all->edges[i].after;
        record_one(&made);
    }
    if (all->failed)
        record_gap("a graph that could not be read in full");
    if (all->conditional)
        record_gap("a conditional node of a graph");
    pthread_mutex_unlock(&recorder_lock);
    free(buffer);
    return graph;
}

uint32_t graphs_describe(CUgraph graph, const site *here, uint32_t *kernels)
{
    description all = {.ask = driver()};
    *kernels = 0;
    if (!all.ask || !graph)
        return 0;
    this_thread.own_query = true;
    ask_graph(&all, graph, 0, 0);
    *kernels = ask_kernels(&all); /* each query of a kernel ends with own_query unset */
    this_thread.own_query = false;
    uint32_t number = write_graph(&all, here);
    free(all.nodes);
    free(all.edges);
    return number;
}

/* --- captures ------------------------------------------------------------------------------------ */

void graphs_capture(int change)
{
    __atomic_add_fetch(&captures, change, __ATOMIC_RELAXED);
}

bool graphs_are_captured(void)
{
    return __atomic_load_n(&captures, __ATOMIC_RELAXED) > 0;
}

void graphs_captured(CUstream stream)
{
    const driver_queries *ask = driver();
    int status = 0;
    uint64_t id;
    CUgraph graph;
    const CUgraphNode *last = NULL;
    const edge_data *data = NULL;
    size_t count = 0;
    if (!graphs_are_captured() || !ask)
        return;
    this_thread.own_query = true;
    int failed = ask->cuStreamGetCaptureInfo_v3(stream, &status, &id, &graph, &last, &data, &count);
    this_thread.own_query = false;
    if (failed || status != 1 || count != 1)
        return;
    site here;
    sites_here(&here);
    pthread_mutex_lock(&recorder_lock);
    table_put(&sites_of_nodes, (uint64_t)(uintptr_t)last[0], sites_number(&here));
    pthread_mutex_unlock(&recorder_lock);
}

void graphs_clear(void)
{
    table_clear(&sites_of_nodes);
    __atomic_store_n(&captures, 0, __ATOMIC_RELAXED);
}
