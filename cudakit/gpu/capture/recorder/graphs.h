/* Graphs: what their nodes do and in which order, asked of the driver when a graph is made executable.
 *
 * The callbacks of the Sanitizer API give nodes without edges. The graph itself is asked at the entry of
 * cuGraphInstantiate and cuGraphExecUpdate, when the driver has not begun and holds no lock.
 */
#ifndef CK_GRAPHS_H
#define CK_GRAPHS_H

#include <stdbool.h>
#include <stdint.h>

#include "sanitizer_api.h"
#include "sites.h"

/* Write a graph down. Return its number, 0 where it cannot be asked; ``kernels`` counts its kernel nodes.
 * Calls CUDA: the lock is not held. */
uint32_t graphs_describe(CUgraph graph, const site *here, uint32_t *kernels);

/* The number of a kernel node of a graph that is launched, the ``nth`` of its kernels; 0 where it is none. The
 * lock is held. */
uint32_t graphs_node(uint32_t graph, CUgraphNode handle, uint32_t nth);

/* Captures that are under way began or ended. */
void graphs_capture(int change);

/* Whether a capture is under way, of whatever stream. */
bool graphs_are_captured(void);

/* After a call that may have added a node to a capture of a stream: remember where that was.
 * Calls CUDA: the lock is not held. */
void graphs_captured(CUstream stream);

/* Forget where nodes come from. */
void graphs_clear(void);

#endif
