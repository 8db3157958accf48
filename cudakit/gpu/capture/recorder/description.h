/* What a graph consists of, as the driver tells it: nodes in the order of their numbers, and edges. */
#ifndef CK_DESCRIPTION_H
#define CK_DESCRIPTION_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "driver_api.h"

struct kernel_layout;

typedef struct {
    CUgraphNode handle; /* NULL: the end of a graph that is a node */
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
} graph_node;

typedef struct {
    uint32_t before, after;
} graph_edge;

typedef struct {
    const driver_queries *ask;
    graph_node *nodes; /* node i has the number i + 1 */
    graph_edge *edges;
    size_t node_count, node_capacity, edge_count, edge_capacity;
    bool failed, conditional;
} description;

/* Ask the driver what a graph consists of; return how many kernels it has. Calls CUDA: the lock is not held. */
uint32_t description_ask(description *all, CUgraph graph);

void description_free(description *all);

#endif
