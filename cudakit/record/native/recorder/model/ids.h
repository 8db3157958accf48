/* Ids of CUDA objects, by their handles. The driver reuses handles; an id is never reused. Callers hold the recorder
 * lock. */
#ifndef CK_IDS_H
#define CK_IDS_H

#include <stdbool.h>
#include <stdint.h>

#include "vendor/sanitizer_api.h"

/* Return the id of a handle; a new handle is assigned a new id. Return 0 for NULL. */
uint32_t context_id(CUcontext context);
uint32_t stream_id(Sanitizer_StreamHandle stream, CUcontext context);
uint32_t event_id(CUevent event);

/* Store the device of a new context. */
void context_created(CUcontext context, CUdevice device);
/* Return whether the creation of the context is complete. */
bool context_is_created(CUcontext context);
/* Remove the handle of a destroyed context: the driver may reuse it. */
void context_forget(CUcontext context);

/* Assign an id to a new stream, record its creation, and return the id. */
uint32_t stream_created(Sanitizer_StreamHandle stream, CUcontext context, uint8_t flag, int16_t priority,
                        uint32_t site, uint32_t program_call);
/* Remove the handle of a destroyed stream and return its id. */
uint32_t stream_forget(Sanitizer_StreamHandle stream);

/* Assign a new id to an event, and remove the handle of a destroyed event. */
void event_created(CUevent event);
void event_destroyed(CUevent event);

/* Return a new id for an event of the recorder, which has no handle. */
uint32_t new_event_id(void);

uint32_t new_graph_id(void);

/* Properties of an executable graph. */
typedef struct {
    uint32_t id;
    uint32_t graph;                           /* id of the graph that it was instantiated from; 0 if unknown */
    uint32_t kernel_count;                    /* number of kernel nodes */
    uint64_t lowest_grid_id, highest_grid_id; /* lowest and highest %gridid of its kernels; 0 if unknown */
} executable_info;

/* Add an executable graph, or set the graph and the number of kernel nodes of an executable graph that was updated. */
void executable_add(CUgraphExec executable, uint32_t graph, uint32_t kernel_count);
/* Remove the handle of a destroyed executable graph. */
void executable_remove(CUgraphExec executable);

/* Return the properties of an executable graph, or NULL if it is unknown. They are valid until the next
 * executable_add() or executable_remove(). */
executable_info *executable_find(CUgraphExec executable);

/* Remove all handles and live allocations: after a fork they belong to the parent. */
void ids_clear(void);

#endif
