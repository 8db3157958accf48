#include "description.h"

#include <stdlib.h>
#include <string.h>

#include "driver.h"
#include "kernels.h"
#include "recorder.h"
#include "table.h"

static uint32_t add_node(description *all, CUgraphNode handle, int type)
{
    if (all->node_count == all->node_capacity) {
        size_t larger = all->node_capacity ? all->node_capacity * 2 : 64;
        graph_node *moved = realloc(all->nodes, larger * sizeof *moved);
        if (!moved) {
            all->failed = true;
            return 0;
        }
        all->nodes = moved;
        all->node_capacity = larger;
    }
    graph_node *made = all->nodes + all->node_count++;
    memset(made, 0, sizeof *made);
    made->handle = handle;
    made->type = type;
    return (uint32_t)all->node_count;
}

static void add_edge(description *all, uint32_t before, uint32_t after)
{
    if (all->edge_count == all->edge_capacity) {
        size_t larger = all->edge_capacity ? all->edge_capacity * 2 : 64;
        graph_edge *moved = realloc(all->edges, larger * sizeof *moved);
        if (!moved) {
            all->failed = true;
            return;
        }
        all->edges = moved;
        all->edge_capacity = larger;
    }
    all->edges[all->edge_count++] = (graph_edge){before, after};
}

static void ask_work(description *all, graph_node *one)
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
        graph_node *one = all->nodes + i;
        if (one->type != NODE_KERNEL)
            continue;
        CUfunction function = one->kernel.func ? one->kernel.func : one->kernel.kern;
        one->layout = kernels_layout(function);
        one->name = kernels_name(function);
        kernels++;
    }
    return kernels;
}

uint32_t description_ask(description *all, CUgraph graph)
{
    memset(all, 0, sizeof *all);
    all->ask = driver();
    all->failed = !all->ask || !graph;
    if (all->failed)
        return 0;
    this_thread.own_query = true;
    ask_graph(all, graph, 0, 0);
    this_thread.own_query = false;
    return ask_kernels(all);
}

void description_free(description *all)
{
    free(all->nodes);
    free(all->edges);
}
