#include "model/graphs.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "hooks/driver_api.h"
#include "model/kernels.h"
#include "recorder.h"

static uint32_t add_node(graph_structure *all, CUgraphNode handle, int type)
{
    graph_node *nodes = array_reserve(all->nodes, &all->node_capacity, all->node_count + 1, sizeof *nodes, 64);
    if (!nodes) {
        all->failed = true;
        return 0;
    }
    all->nodes = nodes;
    graph_node *made = all->nodes + all->node_count++;
    memset(made, 0, sizeof *made);
    made->handle = handle;
    made->type = type;
    return (uint32_t)all->node_count;
}

static void add_edge(graph_structure *all, uint32_t before, uint32_t after)
{
    graph_edge *edges = array_reserve(all->edges, &all->edge_capacity, all->edge_count + 1, sizeof *edges, 64);
    if (!edges) {
        all->failed = true;
        return;
    }
    all->edges = edges;
    all->edges[all->edge_count++] = (graph_edge){before, after};
}

static void query_work(graph_structure *all, graph_node *node)
{
    const driver_queries *api = all->driver;
    int failed = 0;
    switch (node->type) {
    case NODE_KERNEL: failed = api->cuGraphKernelNodeGetParams_v2(node->handle, &node->kernel); break;
    case NODE_MEMCPY: failed = api->cuGraphMemcpyNodeGetParams(node->handle, &node->copy); break;
    case NODE_MEMSET: failed = api->cuGraphMemsetNodeGetParams(node->handle, &node->fill); break;
    case NODE_MEM_ALLOC: failed = api->cuGraphMemAllocNodeGetParams(node->handle, &node->alloc); break;
    case NODE_MEM_FREE: failed = api->cuGraphMemFreeNodeGetParams(node->handle, &node->freed); break;
    case NODE_CONDITIONAL: all->has_conditional = true; break;
    }
    if (failed)
        node->type = NODE_EMPTY;
    all->failed |= failed != 0;
}

static void query_graph(graph_structure *all, CUgraph graph, uint32_t begin, uint32_t end);

/* The nodes where edges to and from a node attach: a child graph has one node for each. */
typedef struct {
    CUgraphNode handle;
    uint32_t first, last;
    bool has_predecessor, has_successor;
} node_span;

static node_span query_node(graph_structure *all, CUgraphNode handle)
{
    int type = NODE_EMPTY;
    CUgraph inner = NULL;
    all->failed |= all->driver->cuGraphNodeGetType(handle, &type) != 0;
    uint32_t number = add_node(all, handle, type == NODE_GRAPH ? NODE_EMPTY : type);
    node_span at = {handle, number, number, false, false};
    if (!number)
        return at;
    if (type == NODE_GRAPH && all->driver->cuGraphChildGraphNodeGetGraph(handle, &inner) == 0) {
        at.last = add_node(all, NULL, NODE_EMPTY);
        add_edge(all, at.first, at.last);
        query_graph(all, inner, at.first, at.last);
    } else {
        query_work(all, all->nodes + number - 1);
    }
    return at;
}

static node_span *find_span(node_span *spans, const table *index, CUgraphNode handle)
{
    uint32_t at = table_get(index, (uint64_t)(uintptr_t)handle);
    return at ? spans + at - 1 : NULL;
}

static void query_edges(graph_structure *all, CUgraph graph, node_span *spans, const table *index)
{
    size_t count = 0;
    if (all->driver->cuGraphGetEdges_v2(graph, NULL, NULL, NULL, &count) || !count)
        return;
    CUgraphNode *from = calloc(2 * count, sizeof *from), *to = from + count;
    edge_data *data = calloc(count, sizeof *data);
    if (from && data && all->driver->cuGraphGetEdges_v2(graph, from, to, data, &count) == 0) {
        for (size_t i = 0; i < count; i++) {
            node_span *before = find_span(spans, index, from[i]), *after = find_span(spans, index, to[i]);
            if (!before || !after)
                continue;
            before->has_successor = after->has_predecessor = true;
            add_edge(all, before->last, after->first);
        }
    } else {
        all->failed = true;
    }
    free(from);
    free(data);
}

/* Add the nodes of a graph. The nodes of a child graph go between the nodes ``begin`` and ``end`` that
 * represent it. */
static void query_graph(graph_structure *all, CUgraph graph, uint32_t begin, uint32_t end)
{
    size_t count = 0;
    table index = {0};
    if (all->driver->cuGraphGetNodes(graph, NULL, &count)) {
        all->failed = true;
        return;
    }
    CUgraphNode *handles = calloc(count + 1, sizeof *handles);
    node_span *spans = calloc(count + 1, sizeof *spans);
    if (handles && spans && all->driver->cuGraphGetNodes(graph, handles, &count) == 0) {
        for (size_t i = 0; i < count; i++) {
            spans[i] = query_node(all, handles[i]);
            table_put(&index, (uint64_t)(uintptr_t)handles[i], (uint32_t)(i + 1));
        }
        query_edges(all, graph, spans, &index);
        for (size_t i = 0; begin && i < count; i++) {
            if (!spans[i].has_predecessor)
                add_edge(all, begin, spans[i].first);
            if (!spans[i].has_successor)
                add_edge(all, spans[i].last, end);
        }
    } else {
        all->failed = true;
    }
    table_clear(&index);
    free(handles);
    free(spans);
}

/* Query names and parameter layouts of the kernels, once all nodes are known. */
static uint32_t query_kernels(graph_structure *all)
{
    uint32_t kernels = 0;
    for (size_t i = 0; i < all->node_count; i++) {
        graph_node *node = all->nodes + i;
        if (node->type != NODE_KERNEL)
            continue;
        CUfunction function = node->kernel.func ? node->kernel.func : node->kernel.kern;
        node->layout = kernels_layout(function);
        node->name = kernels_name(function);
        kernels++;
    }
    return kernels;
}

uint32_t graph_structure_query(graph_structure *all, CUgraph graph)
{
    memset(all, 0, sizeof *all);
    all->driver = driver();
    all->failed = !all->driver || !graph;
    if (all->failed)
        return 0;
    this_thread.in_own_call = true;
    query_graph(all, graph, 0, 0);
    this_thread.in_own_call = false;
    return query_kernels(all);
}

void graph_structure_free(graph_structure *all)
{
    free(all->nodes);
    free(all->edges);
}
