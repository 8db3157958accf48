/* The recorder keeps the contents of each instantiated graph until the executable graph is destroyed: the node ids, the
 * tensor maps, and the memory that the nodes reach. Callers hold the recorder lock. */
#ifndef CK_GRAPH_CONTENTS_H
#define CK_GRAPH_CONTENTS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "containers.h"
#include "decode/tensor_maps.h"
#include "vendor/sanitizer_api.h"
#include "write/record.h"

/* The tensor maps among the parameters of a kernel node. They are stored when the graph is instantiated or the node is
 * changed, because the callback of a node's launch has no parameters. */
typedef struct {
    tma_store *maps;
    size_t map_count;
} node_maps;

/* The memory that a node of a graph reaches, and the records of its last change. */
typedef struct {
    uint64_t *addresses; /* addresses at which the accesses and allocations begin */
    size_t address_count;
    uint64_t content_hash; /* hash of the node's parameters */
    uint32_t name;         /* text id of the name of a kernel */
    /* Records of the changed node and of its accesses, which are written before the next launch that is recorded */
    record *unwritten_records;
    size_t unwritten_count;
} node_contents;

typedef struct {
    hash_table node_ids; /* node ids of kernels, copies, memsets and child graphs: see graph_contents_add_node() */
    hash_table map_indices; /* index in ``maps`` plus 1, by executable graph and node */
    node_maps *maps;
    size_t map_count, map_capacity;
    node_contents *nodes; /* by node id */
    size_t node_count, node_capacity;
    uint64_t *addresses; /* addresses of all nodes, sorted, each once; invalid if ``is_outdated`` */
    size_t address_count, address_capacity;
    uint64_t content_hash;    /* sum of the hashes of all nodes */
    bool is_outdated;         /* a node changed after ``addresses`` was computed */
    bool has_copies;          /* the graph has copies or memsets */
    bool has_unwritten_nodes; /* changed nodes are not written */
    bool is_always_recorded;  /* launches of the graph have no template */
} graph_contents;

/* Add a graph without nodes. Return NULL if no memory is left. */
graph_contents *graph_contents_add(uint32_t graph);

/* Return the contents of a graph, or NULL if the graph is unknown or its executable graph was destroyed. */
graph_contents *graph_contents_find(uint32_t graph);

/* Free the contents of a graph. */
void graph_contents_free(uint32_t graph);

/* Return a node, which is empty if it is new. Return NULL if no memory is left. */
node_contents *graph_contents_node(graph_contents *contents, uint32_t node);

/* Remember the id of a node by its handle, and, unless it is 0, by its position among the kernels, counted from 1. */
void graph_contents_add_node(graph_contents *contents, uint32_t node, CUgraphNode handle,
                             uint32_t kernel_position);

/* Return the id of a node, or 0 if it is unknown: by its handle, or by its position among the kernels. */
uint32_t graph_contents_node_id(const graph_contents *contents, CUgraphNode handle);
uint32_t graph_contents_kernel_id(const graph_contents *contents, uint32_t kernel_position);

/* Return the tensor maps of a node, or NULL if there are none. With ``executable`` 0, these are the maps of the
 * instantiation, otherwise those that were changed in this executable graph. */
const node_maps *graph_contents_maps(const graph_contents *contents, uint32_t executable, uint32_t node);

/* Replace the tensor maps of a node by ``maps``, which graph_contents_free() frees. */
void graph_contents_set_maps(graph_contents *contents, uint32_t executable, uint32_t node, node_maps maps);

/* Compute the addresses of all nodes. Return false if no memory is left. */
bool graph_contents_update_addresses(graph_contents *contents);

/* Free the contents of all graphs, in the child of a fork. */
void graph_contents_clear(void);

#endif
