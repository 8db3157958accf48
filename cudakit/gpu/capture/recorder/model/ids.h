/* Ids for CUDA handles. The driver reuses handles; an id is never reused. The lock is held in all calls. */
#ifndef CK_IDS_H
#define CK_IDS_H

#include <stdbool.h>
#include <stdint.h>

#include "hooks/sanitizer_api.h"

/* Return the id of a handle, assigning one to a handle that was not seen before; 0 for NULL. */
uint32_t context_id(CUcontext context);
uint32_t stream_id(Sanitizer_StreamHandle stream, CUcontext context);
uint32_t event_id(CUevent event);

void context_created(CUcontext context, CUdevice device);
bool context_is_created(CUcontext context);
void context_forget(CUcontext context);

/* Assign an id to a new stream and record its creation. */
uint32_t stream_created(Sanitizer_StreamHandle stream, CUcontext context, uint8_t flag, int16_t priority,
                        uint32_t site);
uint32_t stream_forget(Sanitizer_StreamHandle stream);

void event_created(CUevent event);
void event_forget(CUevent event);

uint32_t new_graph_id(void);

/* Remember which graph an executable was instantiated from, and how many kernel nodes that graph has. */
void executable_created(CUgraphExec executable, uint32_t graph, uint32_t kernel_count);
void executable_forget(CUgraphExec executable);

/* Return the graph id of an executable, or 0 if unknown; set its own id and its number of kernel nodes. */
uint32_t executable_graph(CUgraphExec executable, uint32_t *id, uint32_t *kernel_count);

/* Forget all handles and live allocations: after a fork they belong to the parent. */
void ids_clear(void);

#endif
