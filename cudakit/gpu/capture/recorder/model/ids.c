/* Maps from driver handles to ids. The driver reuses handles; ids are assigned once. */
#include "model/ids.h"

#include <string.h>

#include "containers.h"
#include "model/allocations.h"
#include "recorder.h"

#define MAX_EXECUTABLES 65536

static table contexts, created, streams, events, executables;
static uint32_t last_context, last_stream, last_event, last_graph, last_executable;
static struct {
    uint32_t graph, kernels;
} executable_info[MAX_EXECUTABLES];

static uint64_t key(const void *handle)
{
    return (uint64_t)(uintptr_t)handle;
}

void ids_clear(void)
{
    table_clear(&contexts);
    table_clear(&created);
    table_clear(&streams);
    table_clear(&events);
    table_clear(&executables);
    allocations_clear();
    last_context = last_stream = last_event = last_graph = last_executable = 0;
}

/* --- contexts ------------------------------------------------------------------------------------ */

uint32_t context_id(CUcontext context)
{
    if (!context)
        return 0;
    uint32_t number = table_get(&contexts, key(context));
    if (!number)
        table_put(&contexts, key(context), number = ++last_context);
    return number;
}

void context_created(CUcontext context, CUdevice device)
{
    uint32_t number = context_id(context);
    table_put(&created, key(context), number);
    set_context_device(number, device);
}

bool context_is_created(CUcontext context)
{
    return context && table_get(&created, key(context));
}

void context_forget(CUcontext context)
{
    if (!context)
        return;
    table_remove(&contexts, key(context));
    table_remove(&created, key(context));
}

/* --- streams ------------------------------------------------------------------------------------- */

uint32_t stream_created(Sanitizer_StreamHandle stream, CUcontext context, uint8_t flag, int16_t priority,
                        uint32_t site)
{
    uint32_t number = ++last_stream;
    table_put(&streams, key(stream), number);
    record rec = record_begin(KIND_STREAM_CREATE, context_id(context), number, site);
    rec.stream_create.flag = flag;
    rec.stream_create.priority = priority;
    record_append(&rec);
    return number;
}

uint32_t stream_id(Sanitizer_StreamHandle stream, CUcontext context)
{
    if (!stream)
        return 0;
    uint32_t number = table_get(&streams, key(stream));
    if (number)
        return number;
    /* Assume a blocking stream, which is ordered with most others, to avoid false races. */
    record_gap("stream whose creation was not recorded");
    return stream_created(stream, context, STREAM_BLOCKING, 0, 0);
}

uint32_t stream_forget(Sanitizer_StreamHandle stream)
{
    return stream ? table_remove(&streams, key(stream)) : 0;
}

/* --- events -------------------------------------------------------------------------------------- */

void event_created(CUevent event)
{
    if (event)
        table_put(&events, key(event), ++last_event);
}

void event_forget(CUevent event)
{
    if (event)
        table_remove(&events, key(event));
}

uint32_t event_id(CUevent event)
{
    if (!event)
        return 0;
    uint32_t number = table_get(&events, key(event));
    if (!number)
        table_put(&events, key(event), number = ++last_event);
    return number;
}

/* --- graphs -------------------------------------------------------------------------------------- */

uint32_t new_graph_id(void)
{
    return ++last_graph;
}

void executable_created(CUgraphExec executable, uint32_t graph, uint32_t kernels)
{
    uint32_t number = table_get(&executables, key(executable));
    if (!number)
        table_put(&executables, key(executable), number = ++last_executable);
    if (number < MAX_EXECUTABLES) {
        executable_info[number].graph = graph;
        executable_info[number].kernels = kernels;
    }
}

void executable_forget(CUgraphExec executable)
{
    table_remove(&executables, key(executable));
}

uint32_t executable_graph(CUgraphExec executable, uint32_t *number, uint32_t *kernels)
{
    *number = table_get(&executables, key(executable));
    *kernels = *number < MAX_EXECUTABLES ? executable_info[*number].kernels : 0;
    return *number && *number < MAX_EXECUTABLES ? executable_info[*number].graph : 0;
}
