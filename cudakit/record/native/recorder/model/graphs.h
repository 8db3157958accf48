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
#include "model/graph_structure.h"

/* Record the nodes and edges of a graph that this thread instantiates, with its call stack, and return whether it
 * instantiates one. The first function calls CUDA: the recorder lock is not held. */
void graphs_instantiation_begins(CUgraph graph);
bool graphs_is_instantiating(void);

/* Handle the creation or the update of an executable graph from the graph that this thread has recorded, and the
 * destruction of an executable graph. The recorder lock is held. */
void graphs_executable_created(CUgraphExec executable);
void graphs_executable_destroyed(CUgraphExec executable);

/* Handle the end of a call that may have recorded a graph. If no executable graph was created or updated, because the
 * call failed, free the contents that were stored of the recorded graph. Takes the recorder lock. */
void graphs_instantiation_ended(void);

/* Return the id of a node, or 0 if it is unknown: by its handle, or, unless ``kernel_position`` is 0, by its position
 * among the kernels of the graph launch, counted from 1. The recorder lock is held. */
uint32_t graphs_find_node(uint32_t graph, CUgraphNode handle, uint32_t kernel_position);

/* Store the call site of the node that a CUDA call has just added to a capture on ``stream``; if the stream is not
 * captured, do nothing. Calls CUDA: the recorder lock is not held. */
void graphs_node_captured(CUstream stream);

/* Return the tensor maps among the parameters of a kernel node, and set ``count`` to their number. The recorder lock is
 * held. */
const tma_store *node_tensor_maps(uint32_t graph, uint32_t executable, uint32_t node, size_t *count);

/* Record the new parameters of a node of an executable graph. For a kernel, copy or memset, ``changed`` has the type
 * and the parameters; for a child graph, ``child`` has the nodes with the new parameters. Return false if some
 * parameters could not be recorded. Calls CUDA: the recorder lock is not held. */
bool graphs_node_changed(CUgraphExec executable, CUgraphNode node, const graph_node *changed);
bool graphs_child_graph_changed(CUgraphExec executable, CUgraphNode node, CUgraph child);

/* Write the stored records of changed nodes of a graph, before a launch that does not use a template. The recorder
 * lock is held. */
void graphs_write_changed_nodes(uint32_t graph);

/* The memory that the nodes of a graph reach. */
typedef struct {
    const uint64_t
        *addresses; /* pointers of the nodes, sorted, each once; valid while the recorder lock is held */
    size_t address_count;
    uint64_t content_hash; /* hash of the parameters of all nodes; 0: launches must always be recorded */
    bool has_copies;       /* whether the graph has copies or memsets */
} graph_memory;

/* Return the memory that a graph reaches. The recorder lock is held. */
graph_memory graphs_memory(uint32_t graph);

/* Always record the launches of a graph. The recorder lock is held. */
void graphs_always_record(uint32_t graph);

/* Remove all nodes and captures, in the child of a fork. */
void graphs_clear(void);

#endif
