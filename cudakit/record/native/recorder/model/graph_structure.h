/* The nodes and edges of a CUDA graph, queried from the driver. */
#ifndef CK_GRAPH_STRUCTURE_H
#define CK_GRAPH_STRUCTURE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vendor/driver_api.h"

struct kernel_layout;

typedef struct {
    CUgraphNode handle; /* NULL for the empty node that ends a child graph */
    int type;           /* NODE_* */

    bool is_child_graph; /* begin of a child graph: the nodes of the child and the node that ends it follow */
    const char *name;
    const struct kernel_layout *layout;
    union {
        kernel_node_params kernel;
        memcpy3d_params copy;
        memset_node_params fill;
        alloc_node_params alloc;
        uint64_t freed_address;
    };
} graph_node;

typedef struct {
    uint32_t before, after; /* node ids */
} graph_edge;

typedef struct {
    const driver_functions *driver;
    graph_node *nodes; /* nodes[i] has the node id i + 1 */
    graph_edge *edges;
    size_t node_count, node_capacity, edge_count, edge_capacity;
    bool has_failed;      /* the driver refused a query, or no memory is left */
    bool has_conditional; /* the graph has a conditional node */
} graph_structure;

/* Query the nodes and edges of a graph from the driver, and return its number of kernel nodes. Calls CUDA: the recorder
 * lock is not held. */
uint32_t graph_structure_query(graph_structure *structure, CUgraph graph);

void graph_structure_free(graph_structure *structure);

#endif
