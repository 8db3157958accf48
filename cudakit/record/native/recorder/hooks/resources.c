/* Handles the creation and destruction of memory, contexts, streams and modules. */
#include "hooks/hooks.h"

#include "exact/exact.h"
#include "exact/patch_restoring.h"
#include "exact/patching.h"
#include "model/allocations.h"
#include "model/ids.h"
#include "model/kernels.h"
#include "model/stream_order.h"
#include "recorder.h"
#include "write/call_sites.h"

/* --- memory -------------------------------------------------------------------------------------- */

/* Return the kind of an allocation, ALLOCATION_*. */
static uint8_t allocation_kind(uint32_t cbid, const Sanitizer_ResourceMemoryData *memory)
{
    switch (cbid) {
    case RESOURCE_ALLOC_ASYNC: return ALLOCATION_STREAM_ORDERED;
    case RESOURCE_HOST_ALLOC: return ALLOCATION_PINNED;
    case RESOURCE_POOL_IMPORT: return ALLOCATION_VIRTUAL;
    }
    if (memory->flags & MEMORY_MANAGED)
        return ALLOCATION_MANAGED;
    return memory->context ? ALLOCATION_SYNC : ALLOCATION_VIRTUAL; /* only mapped virtual memory has no context */
}

static void on_alloc(uint32_t cbid, const Sanitizer_ResourceMemoryData *memory)
{
    record rec = record_begin_and_lock(KIND_ALLOC, memory->context, memory->hStream);
    rec.memory.address = memory->address;
    rec.memory.size_bytes = memory->size;
    rec.memory.allocation_kind = allocation_kind(cbid, memory);
    rec.memory.layer = LAYER_DRIVER;
    rec.device = (int16_t)memory->device;
    allocations_add(memory->address, memory->size, rec.memory.allocation_kind);
    if (cbid == RESOURCE_ALLOC_ASYNC) /* later work must be ordered after the allocation */
        allocations_add_work(memory->address, order_enqueue(rec.stream, rec.context));
    record_append_and_unlock(&rec);
}

static void on_free(uint32_t cbid, const Sanitizer_ResourceMemoryData *memory)
{
    allocation freed_allocation = {memory->address, memory->address + memory->size, ALLOCATION_SYNC};
    record rec = record_begin_and_lock(KIND_FREE, memory->context, memory->hStream);
    allocations_remove(memory->address, &freed_allocation);
    rec.memory.address = memory->address;
    rec.memory.size_bytes = freed_allocation.hi - freed_allocation.lo;
    rec.memory.layer = LAYER_DRIVER;
    rec.device = (int16_t)memory->device;
    if (cbid == RESOURCE_FREE_ASYNC)
        rec.memory.allocation_kind = ALLOCATION_STREAM_ORDERED;
    else /* cuMemFree synchronizes with the device, even if the memory is from cuMemAllocAsync */
        rec.memory.allocation_kind =
            freed_allocation.memory_kind == ALLOCATION_PINNED || freed_allocation.memory_kind == ALLOCATION_VIRTUAL
                ? freed_allocation.memory_kind
                : ALLOCATION_SYNC;
    record_append_and_unlock(&rec);
}

/* --- contexts and streams ------------------------------------------------------------------------ */

static void on_context_created(const Sanitizer_ResourceContextData *data)
{
    Sanitizer_StreamHandle legacy_stream = NULL;
    if (sanitizer.stream_handle(data->context, NULL, &legacy_stream))
        legacy_stream = NULL;
    pthread_mutex_lock(&recorder_lock);
    context_created(data->context, data->device);
    if (legacy_stream)
        stream_created(legacy_stream, data->context, STREAM_LEGACY, 0, 0, 0);
    pthread_mutex_unlock(&recorder_lock);
}

static void on_context_destroying(const Sanitizer_ResourceContextData *data)
{
    exact_context_destroying(data->context);
    record rec = record_begin_and_lock(KIND_CONTEXT_SYNC, data->context, NULL);
    context_forget(data->context);
    order_context_destroyed(rec.context);
    record_append_and_unlock(&rec);
}

/* Return the kind of a new stream, STREAM_*. */
static uint8_t flag_of_new_stream(const Sanitizer_ResourceStreamData *data)
{
    switch (this_thread.cbid) {
    case CBID_cuStreamCreate:
    case CBID_cuStreamCreateWithPriority:
        return this_thread.stream_flags & STREAM_NON_BLOCKING ? STREAM_NONBLOCKING : STREAM_BLOCKING;
    case CBID_cuGreenCtxStreamCreate: return STREAM_NONBLOCKING;
    }
    /* No call creates the per-thread default stream: it is created at its first use. The driver also creates streams
     * of its own, while it creates a context and for graphs. */
    bool is_internal =
        !context_is_created(data->context) || this_thread.instantiated_graph_id || this_thread.in_graph_launch;
    return data->stream || is_internal ? STREAM_NONBLOCKING : STREAM_PER_THREAD;
}

static void on_stream_created(const Sanitizer_ResourceStreamData *data)
{
    call_site stack;
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    stream_created(data->hStream, data->context, flag_of_new_stream(data), (int16_t)this_thread.stream_priority,
                   call_site_id(&stack), call_site_program_call(&stack));
    pthread_mutex_unlock(&recorder_lock);
}

static void on_stream_destroying(const Sanitizer_ResourceStreamData *data)
{
    if (exact_is_recorder_stream(data->hStream))
        return;
    exact_stream_destroying(data->context, data->hStream);
    record rec = record_begin_and_lock(KIND_STREAM_DESTROY, data->context, data->hStream);
    order_stream_destroyed(stream_forget(data->hStream));
    patch_restoring_forget_streams();
    record_append_and_unlock(&rec);
}

void on_resource(uint32_t cbid, const void *data)
{
    switch (cbid) {
    case RESOURCE_CONTEXT_CREATED: on_context_created(data); break;
    case RESOURCE_CONTEXT_DESTROYING: on_context_destroying(data); break;
    case RESOURCE_STREAM_CREATED: on_stream_created(data); break;
    case RESOURCE_STREAM_DESTROYING: on_stream_destroying(data); break;
    case RESOURCE_MODULE_LOADED: patching_module_loaded(data); break;
    case RESOURCE_MODULE_UNLOADING:
        pthread_mutex_lock(&recorder_lock);
        patch_restoring_clear();
        patching_module_unloading(((const Sanitizer_ResourceModuleData *)data)->module);
        kernels_clear();
        this_thread.has_reported_unload = true;
        pthread_mutex_unlock(&recorder_lock);
        break;
    case RESOURCE_DEVICE_ALLOC:
    case RESOURCE_HOST_ALLOC:
    case RESOURCE_ALLOC_ASYNC:
    case RESOURCE_POOL_IMPORT: on_alloc(cbid, data); break;
    case RESOURCE_DEVICE_FREE:
    case RESOURCE_HOST_FREE:
    case RESOURCE_FREE_ASYNC: on_free(cbid, data); break;
    }
}
