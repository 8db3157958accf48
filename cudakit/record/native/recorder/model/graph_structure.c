#include "model/graph_structure.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "model/kernels.h"
#include "recorder.h"
#include "vendor/driver_api.h"

static uint32_t add_node(graph_structure *structure, CUgraphNode handle, int type)
{
    graph_node *nodes =
        array_reserve(structure->nodes, &structure->node_capacity, structure->node_count + 1, sizeof *nodes, 64);
    if (!nodes) {
        structure->has_failed = true;
        return 0;
    }
    structure->nodes = nodes;
    graph_node *node = structure->nodes + structure->node_count++;
    memset(node, 0, sizeof *node);
    node->handle = handle;
    node->type = type;
    return (uint32_t)structure->node_count;
}

static void add_edge(graph_structure *structure, uint32_t before, uint32_t after)
{
    graph_edge *edges =
        array_reserve(structure->edges, &structure->edge_capacity, structure->edge_count + 1, sizeof *edges, 64);
    if (!edges) {
        structure->has_failed = true;
        return;
    }
    structure->edges = edges;
    structure->edges[structure->edge_count++] = (graph_edge){before, after};
}

/* Query the parameters of one node. */
static void query_node_parameters(graph_structure *structure, graph_node *node)
{
    const driver_functions *driver = structure->driver;
    int result = 0;
    switch (node->type) {
    case NODE_KERNEL: result = driver->cuGraphKernelNodeGetParams_v2(node->handle, &node->kernel); break;
    case NODE_MEMCPY: result = driver->cuGraphMemcpyNodeGetParams(node->handle, &node->copy); break;
    case NODE_MEMSET: result = driver->cuGraphMemsetNodeGetParams(node->handle, &node->fill); break;
    case NODE_MEM_ALLOC: result = driver->cuGraphMemAllocNodeGetParams(node->handle, &node->alloc); break;
    case NODE_MEM_FREE: result = driver->cuGraphMemFreeNodeGetParams(node->handle, &node->freed_address); break;
    case NODE_CONDITIONAL: structure->has_conditional = true; break;
    }
    if (result)
        node->type = NODE_EMPTY;
    structure->has_failed |= result != 0;
}

static void query_graph(graph_structure *structure, CUgraph graph, uint32_t begin_node, uint32_t end_node);

/* The node ids to which the edges of a node are attached: edges to the node end at ``first_node_id``, edges from the
 * node begin at ``last_node_id``. ``first_node_id`` and ``last_node_id`` differ only for a child graph. */
typedef struct {
    CUgraphNode handle;
    uint32_t first_node_id, last_node_id;
    bool has_predecessor, has_successor;
} node_span;

/* Add one node, and the nodes of the child graph if it has one. */
static node_span query_node(graph_structure *structure, CUgraphNode handle)
{
    int type = NODE_EMPTY;
    CUgraph child_graph = NULL;
    structure->has_failed |= structure->driver->cuGraphNodeGetType(handle, &type) != 0;
    uint32_t node_id = add_node(structure, handle, type == NODE_GRAPH ? NODE_EMPTY : type);
    node_span span = {handle, node_id, node_id, false, false};
    if (!node_id)
        return span;
    if (type == NODE_GRAPH && structure->driver->cuGraphChildGraphNodeGetGraph(handle, &child_graph) == 0) {
        span.last_node_id = add_node(structure, NULL, NODE_EMPTY);
        structure->nodes[node_id - 1].is_child_graph = true;
        add_edge(structure, span.first_node_id, span.last_node_id);
        query_graph(structure, child_graph, span.first_node_id, span.last_node_id);
    } else {
        query_node_parameters(structure, structure->nodes + node_id - 1);
    }
    return span;
}

static node_span *find_span(node_span *spans, const hash_table *span_numbers, CUgraphNode handle)
{
    uint32_t span_number = hash_table_get(span_numbers, (uint64_t)(uintptr_t)handle);
    return span_number ? spans + span_number - 1 : NULL;
}

static void query_edges(graph_structure *structure, CUgraph graph, node_span *spans,
                        const hash_table *span_numbers)
{
    size_t edge_count = 0;
    if (structure->driver->cuGraphGetEdges_v2(graph, NULL, NULL, NULL, &edge_count) || !edge_count)
        return;
    CUgraphNode *from_nodes = calloc(2 * edge_count, sizeof *from_nodes), *to_nodes = from_nodes + edge_count;
    edge_data *edge_properties = calloc(edge_count, sizeof *edge_properties);
    if (from_nodes && edge_properties &&
        structure->driver->cuGraphGetEdges_v2(graph, from_nodes, to_nodes, edge_properties, &edge_count) == 0) {
        for (size_t i = 0; i < edge_count; i++) {
            node_span *predecessor = find_span(spans, span_numbers, from_nodes[i]),
                      *successor = find_span(spans, span_numbers, to_nodes[i]);
            if (!predecessor || !successor)
                continue;
            predecessor->has_successor = successor->has_predecessor = true;
            add_edge(structure, predecessor->last_node_id, successor->first_node_id);
        }
    } else {
        structure->has_failed = true;
    }
    free(from_nodes);
    free(edge_properties);
}

/* Add the nodes of a graph. The nodes of a child graph are placed between the nodes ``begin_node`` and ``end_node``
 * that represent it; both are 0 for the outermost graph. */
static void query_graph(graph_structure *structure, CUgraph graph, uint32_t begin_node, uint32_t end_node)
{
    size_t node_count = 0;
    hash_table span_numbers = {0};
    if (structure->driver->cuGraphGetNodes(graph, NULL, &node_count)) {
        structure->has_failed = true;
        return;
    }
    if (!node_count)
        return; /* the driver rejects a query for 0 nodes */
    CUgraphNode *handles = calloc(node_count + 1, sizeof *handles);
    node_span *spans = calloc(node_count + 1, sizeof *spans);
    if (handles && spans && structure->driver->cuGraphGetNodes(graph, handles, &node_count) == 0) {
        for (size_t i = 0; i < node_count; i++) {
            spans[i] = query_node(structure, handles[i]);
            hash_table_put(&span_numbers, (uint64_t)(uintptr_t)handles[i], (uint32_t)(i + 1));
        }
        query_edges(structure, graph, spans, &span_numbers);
        for (size_t i = 0; begin_node && i < node_count; i++) {
            if (!spans[i].has_predecessor)
                add_edge(structure, begin_node, spans[i].first_node_id);
            if (!spans[i].has_successor)
                add_edge(structure, spans[i].last_node_id, end_node);
        }
    } else {
        structure->has_failed = true;
    }
    hash_table_clear(&span_numbers);
    free(handles);
    free(spans);
}

/* Query the names and parameter layouts of the kernel nodes, and return the number of kernel nodes. */
static uint32_t query_kernels(graph_structure *structure)
{
    uint32_t kernel_count = 0;
    for (size_t i = 0; i < structure->node_count; i++) {
        graph_node *node = structure->nodes + i;
        if (node->type != NODE_KERNEL)
            continue;
        CUfunction function = node->kernel.func ? node->kernel.func : node->kernel.kern;
        node->layout = kernels_layout(function);
        node->name = kernels_name(function);
        kernel_count++;
    }
    return kernel_count;
}

uint32_t graph_structure_query(graph_structure *structure, CUgraph graph)
{
    memset(structure, 0, sizeof *structure);
    structure->driver = driver_api();
    structure->has_failed = !structure->driver || !graph;
    if (structure->has_failed)
        return 0;
    this_thread.in_recorder_call = true;
    query_graph(structure, graph, 0, 0);
    this_thread.in_recorder_call = false;
    return query_kernels(structure);
}

void graph_structure_free(graph_structure *structure)
{
    free(structure->nodes);
    free(structure->edges);
}
