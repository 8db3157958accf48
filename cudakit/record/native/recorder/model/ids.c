/* Maps from driver handles to ids. The driver reuses handles; ids are assigned once. */
#include "model/ids.h"

#include <string.h>

#include "containers.h"
#include "model/allocations.h"
#include "model/stream_order.h"
#include "recorder.h"

static hash_table context_ids, created_contexts, stream_ids, event_ids;
static uint32_t last_context, last_stream, last_event, last_graph, last_executable;
static hash_table executable_indices;     /* index in ``executable_infos`` plus 1, by handle */
static executable_info *executable_infos; /* without gaps */
static CUgraphExec *executable_handles;   /* handle of each element of ``executable_infos`` */
static size_t executable_count, executable_capacity, executable_handle_capacity;

static uint64_t handle_key(const void *handle)
{
    return (uint64_t)(uintptr_t)handle;
}

void ids_clear(void)
{
    hash_table_clear(&context_ids);
    hash_table_clear(&created_contexts);
    hash_table_clear(&stream_ids);
    hash_table_clear(&event_ids);
    hash_table_clear(&executable_indices);
    executable_count = 0;
    allocations_clear();
    stream_order_clear();
    last_context = last_stream = last_event = last_graph = last_executable = 0;
}

/* --- contexts ------------------------------------------------------------------------------------ */

uint32_t context_id(CUcontext context)
{
    if (!context)
        return 0;
    uint32_t id = hash_table_get(&context_ids, handle_key(context));
    if (!id)
        hash_table_put(&context_ids, handle_key(context), id = ++last_context);
    return id;
}

void context_created(CUcontext context, CUdevice device)
{
    uint32_t id = context_id(context);
    hash_table_put(&created_contexts, handle_key(context), id);
    set_context_device(id, device);
}

bool context_is_created(CUcontext context)
{
    return context && hash_table_get(&created_contexts, handle_key(context));
}

void context_forget(CUcontext context)
{
    if (!context)
        return;
    hash_table_remove(&context_ids, handle_key(context));
    hash_table_remove(&created_contexts, handle_key(context));
}

/* --- streams ------------------------------------------------------------------------------------- */

uint32_t stream_created(Sanitizer_StreamHandle stream, CUcontext context, uint8_t flag, int16_t priority,
                        uint32_t site, uint32_t program_call)
{
    uint32_t id = ++last_stream;
    hash_table_put(&stream_ids, handle_key(stream), id);
    record rec = record_begin(KIND_STREAM_CREATE, context_id(context), id, site);
    rec.program_call = program_call;
    rec.stream_create.flag = flag;
    rec.stream_create.priority = priority;
    record_append(&rec);
    return id;
}

uint32_t stream_id(Sanitizer_StreamHandle stream, CUcontext context)
{
    if (!stream)
        return 0;
    uint32_t id = hash_table_get(&stream_ids, handle_key(stream));
    if (id)
        return id;
    /* Assume a blocking stream, which is ordered with most other streams, to avoid false races. */
    record_gap("stream whose creation was not recorded");
    return stream_created(stream, context, STREAM_BLOCKING, 0, 0, 0);
}

uint32_t stream_forget(Sanitizer_StreamHandle stream)
{
    return stream ? hash_table_remove(&stream_ids, handle_key(stream)) : 0;
}

/* --- events -------------------------------------------------------------------------------------- */

void event_created(CUevent event)
{
    if (event)
        hash_table_put(&event_ids, handle_key(event), ++last_event);
}

void event_destroyed(CUevent event)
{
    if (event)
        order_event_destroyed(hash_table_remove(&event_ids, handle_key(event)));
}

uint32_t event_id(CUevent event)
{
    if (!event)
        return 0;
    uint32_t id = hash_table_get(&event_ids, handle_key(event));
    if (!id)
        hash_table_put(&event_ids, handle_key(event), id = ++last_event);
    return id;
}

uint32_t new_event_id(void)
{
    return ++last_event;
}

/* --- graphs -------------------------------------------------------------------------------------- */

uint32_t new_graph_id(void)
{
    return ++last_graph;
}

executable_info *executable_find(CUgraphExec executable)
{
    const uint32_t index_plus_one = hash_table_get(&executable_indices, handle_key(executable));
    return index_plus_one ? executable_infos + index_plus_one - 1 : NULL;
}

/* Add an executable graph with a new id. Return NULL if no memory is left. */
static executable_info *add_executable(CUgraphExec executable)
{
    executable_info *infos =
        array_reserve(executable_infos, &executable_capacity, executable_count + 1, sizeof *infos, 64);
    executable_infos = infos ? infos : executable_infos;
    CUgraphExec *handles = array_reserve(executable_handles, &executable_handle_capacity, executable_count + 1,
                                         sizeof(CUgraphExec), 64);
    executable_handles = handles ? handles : executable_handles;
    if (!infos || !handles ||
        hash_table_put(&executable_indices, handle_key(executable), (uint32_t)executable_count + 1))
        return NULL;
    infos[executable_count] = (executable_info){.id = ++last_executable};
    handles[executable_count] = executable;
    return infos + executable_count++;
}

void executable_add(CUgraphExec executable, uint32_t graph, uint32_t kernel_count)
{
    executable_info *info = executable_find(executable);
    if (!info)
        info = add_executable(executable);
    if (!info)
        return;
    info->graph = graph;
    info->kernel_count = kernel_count;
}

void executable_remove(CUgraphExec executable)
{
    const uint32_t index_plus_one = hash_table_remove(&executable_indices, handle_key(executable));
    if (!index_plus_one)
        return;
    /* The last element takes the place of the removed one. */
    executable_count--;
    if (index_plus_one - 1 < executable_count) {
        executable_infos[index_plus_one - 1] = executable_infos[executable_count];
        executable_handles[index_plus_one - 1] = executable_handles[executable_count];
        hash_table_put(&executable_indices, handle_key(executable_handles[index_plus_one - 1]), index_plus_one);
    }
}
