/* CUDA graphs: their nodes and edges, queried from the driver when a graph is instantiated.
 *
 * The callbacks of the Sanitizer API report nodes without edges. Therefore the graph is queried at the entry of
 * cuGraphInstantiate and cuGraphExecUpdate, before the driver takes its locks.
 */
#ifndef CK_GRAPHS_H
#define CK_GRAPHS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "decode/tensor_maps.h"
#include "hooks/driver_api.h"
#include "write/call_sites.h"

struct kernel_layout;

typedef struct {
    CUgraphNode handle; /* NULL: the end of a child graph */
    int type;
    bool is_child_graph; /* represents a child graph; the end node and the nodes of the child follow */
    const char *name;
    const struct kernel_layout *layout;
    union {
        kernel_node_params kernel;
        memcpy3d_params copy;
        memset_node_params fill;
        alloc_node_params alloc;
        uint64_t freed;
    };
} graph_node;

typedef struct {
    uint32_t before, after;
} graph_edge;

typedef struct {
    const driver_functions *driver;
    graph_node *nodes; /* node i has the id i + 1 */
    graph_edge *edges;
    size_t node_count, node_capacity, edge_count, edge_capacity;
    bool failed, has_conditional;
} graph_structure;

/* Query the nodes and edges of a graph; return its number of kernel nodes. Calls CUDA: the lock is not held. */
uint32_t graph_structure_query(graph_structure *structure, CUgraph graph);

void graph_structure_free(graph_structure *structure);

/* Record the structure of a graph. Return its id, or 0 if it cannot be queried; set ``kernels`` to its number of
 * kernel nodes. Calls CUDA: the lock is not held. */
uint32_t graphs_record(CUgraph graph, const call_site *stack, uint32_t *kernel_count);

/* Return the node id of the ``nth`` kernel of a graph launch, or 0 if unknown. The lock is held. */
uint32_t graphs_find_node(uint32_t graph, CUgraphNode handle, uint32_t kernel_position);

/* Count stream captures: +1 when one begins, -1 when one ends. */
void graphs_count_captures(int change);

/* Whether any stream is being captured. */
bool graphs_is_capturing(void);

/* After a call that may have added a node to a capture on ``stream``: remember the node's call site. Calls CUDA:
 * the lock is not held. */
void graphs_node_captured(CUstream stream);

/* Return the tensor maps among the parameters of a kernel node, and their number. The lock is held. */
const tma_store *node_tensor_maps(uint32_t graph, uint32_t executable, uint32_t node, size_t *count);

/* Record the new parameters of a node of an executable graph: a kernel, copy or memset, of which ``changed`` has the type
 * and the parameters, or all those of a child graph. Return false if not all could be recorded. Calls CUDA: the lock is
 * not held. */
bool graphs_node_changed(CUgraphExec executable, CUgraphNode node, const graph_node *changed);
bool graphs_child_graph_changed(CUgraphExec executable, CUgraphNode node, CUgraph child);

/* Forget the nodes and captures. */
void graphs_clear(void);

#endif
