/* Callbacks of the Sanitizer API: converts the creation and destruction of resources, launches, copies, synchronization
 * and graph launches to records. */
#include "hooks/hooks.h"

#include <string.h>

#include "exact/exact.h"
#include "exact/modules.h"
#include "exact/patch_restoring.h"
#include "model/allocations.h"
#include "model/collectives.h"
#include "model/graphs.h"
#include "model/ids.h"
#include "model/kernels.h"
#include "model/stream_order.h"
#include "recorder.h"
#include "write/call_sites.h"
#include "write/spool.h"

/* Take the recorder lock and begin a record of this thread's current call. record_append_and_unlock() appends the
 * record and releases the recorder lock. */
static record record_begin_and_lock(uint16_t kind, CUcontext context, Sanitizer_StreamHandle stream)
{
    call_site stack;
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    uint32_t context_number = context_id(context), stream_number = stream_id(stream, context);
    record rec = record_begin(kind, context_number, stream_number, call_site_id(&stack));
    rec.program_call = call_site_program_call(&stack);
    return rec;
}

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
    allocation freed_allocation = {
        .lo = memory->address, .hi = memory->address + memory->size, .memory_kind = ALLOCATION_SYNC};
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
    switch (this_call.cbid) {
    case CBID_cuStreamCreate:
    case CBID_cuStreamCreateWithPriority:
        return this_call.stream_flags & STREAM_NON_BLOCKING ? STREAM_NONBLOCKING : STREAM_BLOCKING;
    case CBID_cuGreenCtxStreamCreate: return STREAM_NONBLOCKING;
    }
    /* No call creates the per-thread default stream: it is created at its first use. The driver also creates streams
     * of its own, while it creates a context and for graphs. */
    bool is_internal =
        !context_is_created(data->context) || graphs_is_instantiating() || this_call.in_graph_launch;
    return data->stream || is_internal ? STREAM_NONBLOCKING : STREAM_PER_THREAD;
}

static void on_stream_created(const Sanitizer_ResourceStreamData *data)
{
    call_site stack;
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    stream_created(data->hStream, data->context, flag_of_new_stream(data), (int16_t)this_call.stream_priority,
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

static void on_resource(uint32_t cbid, const void *data)
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
        this_call.has_reported_unload = true;
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

/* --- work on streams -------------------------------------------------------------------------- */

/* Set the user data that the patch receives for a launch. A patched kernel without user data would fault. */
static bool set_user_data(const Sanitizer_LaunchData *launch, uint64_t data)
{
    return !sanitizer.set_launch_data(launch->hLaunch, launch->function, launch->hStream, (const void *)data);
}

/* Return whether the driver has split the launch into several parts. The end of such a launch is the return of the
 * driver call, not the launch-end callback. */
static bool is_split_launch(const Sanitizer_LaunchData *launch)
{
    return launch->splitLaunchPart > 0;
}

/* Write the record of a launch. After it, write the pointers of the launch if its template is from a launch with
 * other pointers, or its assumed accesses if it has no template. Launches of NCCL that are pending have neither,
 * because their arguments are pointers to NCCL's own memory. The recorder lock is held. */
static void write_launch(const record *launch_record, const launch_arguments *arguments, bool has_accesses)
{
    static record records[1 + MAX_ACCESSES]; /* protected by the recorder lock */
    size_t record_count = 0;
    if (launch_record->launch.is_relative)
        record_count =
            kernels_write_pointers(arguments->pointers, arguments->pointer_count, launch_record, records + 1);
    else if (!launch_record->launch.template_id && has_accesses)
        record_count = kernels_write_accesses(arguments, launch_record, records + 1);
    records[0] = *launch_record;
    spool_records(records, 1 + record_count);
    if (has_accesses && arguments->pointer_count == MAX_ACCESSES)
        record_gap("kernel with more than 512 pointer arguments");
}

static void on_launch(const Sanitizer_LaunchData *launch)
{
    bool has_accesses = true;
    launch_signature signature;
    if (launch->splitLaunchPart > 1) {
        set_user_data(launch, this_call.user_data);
        return;
    }
    record rec = record_begin_and_lock(KIND_LAUNCH, launch->context, launch->hStream);
    rec.seq = launch_seq(rec.seq);
    rec.device = (int16_t)launch->device;
    const launch_arguments *arguments = kernels_arguments_of_launch();
    rec.launch.name = kernels_name_id(launch->function, launch->functionName);
    memcpy(rec.launch.grid, &launch->gridDim_x, sizeof rec.launch.grid);
    memcpy(rec.launch.block, &launch->blockDim_x, sizeof rec.launch.block);
    if (is_nccl_kernel(launch->functionName)) {
        rec.launch.pending = collectives_assign_launch(&rec);
        has_accesses = !rec.launch.pending;
        this_call.user_data = 0;
    } else {
        launch_template chosen_template = exact_choose_template(&rec, launch, arguments, &signature);
        const bool lacks_patch = !chosen_template.id && exact_lacks_patch(launch);
        if (lacks_patch) {
            chosen_template = templates_use_instead(&signature);
            module_request_restoring(patching_module_id(launch->module));
            if (!chosen_template.id)
                record_gap("launch inferred from arguments: its instrumentation was removed");
        }
        rec.launch.template_id = chosen_template.id;
        rec.launch.is_relative = chosen_template.is_relative;
        rec.launch.is_checked = chosen_template.is_checked && !lacks_patch;
        rec.launch.is_unordered = lacks_patch && chosen_template.id;
        this_call.user_data =
            chosen_template.id || lacks_patch ? 0 : exact_assign_launch(&rec, launch, &signature, arguments);
        if (templates_are_enabled())
            patch_restoring_add_kernel(&rec, launch);
        rec.launch.pending = this_call.user_data != 0;
    }
    write_launch(&rec, arguments, has_accesses);
    launch_end_delay();
    bool context_is_patched = patching_is_active(launch->context);
    pthread_mutex_unlock(&recorder_lock);
    if (context_is_patched && !set_user_data(launch, this_call.user_data) && this_call.user_data)
        exact_assign_failed();
}

static const uint8_t DIRECTION_OF[] = {
    [0] = DEVICE_TO_DEVICE, /* direction unknown: a copy between managed allocations */
    [MEMCPY_HOST_TO_HOST] = HOST_TO_HOST,
    [MEMCPY_HOST_TO_DEVICE] = HOST_TO_DEVICE,
    [MEMCPY_DEVICE_TO_HOST] = DEVICE_TO_HOST,
    [MEMCPY_DEVICE_TO_DEVICE] = DEVICE_TO_DEVICE,
};

/* Return whether an address is in pinned or managed memory. The recorder lock is held. */
static bool is_pinned(uint64_t address)
{
    const allocation *memory = allocations_find(address);
    return memory && (memory->memory_kind == ALLOCATION_PINNED || memory->memory_kind == ALLOCATION_MANAGED);
}

/* Return whether the host memory of a copy is pinned or pageable. The recorder lock is held. */
static uint8_t host_memory_of_copy(uint8_t direction, const Sanitizer_MemcpyData *copy)
{
    switch (direction) {
    case HOST_TO_DEVICE: return is_pinned(copy->srcAddress) ? HOST_PINNED : HOST_PAGEABLE;
    case DEVICE_TO_HOST: return is_pinned(copy->dstAddress) ? HOST_PINNED : HOST_PAGEABLE;
    case HOST_TO_HOST:
        return is_pinned(copy->srcAddress) && is_pinned(copy->dstAddress) ? HOST_PINNED : HOST_PAGEABLE;
    }
    return HOST_NONE;
}

static uint64_t value_or_default(uint64_t value, uint64_t fallback)
{
    return value ? value : fallback;
}

/* Return the number of bytes from the first to the last of several rows. */
static uint64_t bytes_of_rows(uint64_t row_count, uint64_t row_bytes, uint64_t pitch_bytes)
{
    return (row_count - 1) * pitch_bytes + row_bytes;
}

/* Add a copy to the work on the memory that it accesses. The last slice begins ``source_bytes`` behind the first
 * one in the source, and ``destination_bytes`` behind it in the destination. The recorder lock is held. */
static void add_copy_accesses(const record *rec, const Sanitizer_MemcpyData *copy, uint64_t source_bytes,
                              uint64_t destination_bytes)
{
    const stream_operation operation = order_enqueue(rec->stream, rec->context);
    source_bytes += bytes_of_rows(rec->copy.rows, rec->copy.size_bytes, rec->copy.source_pitch_bytes);
    destination_bytes += bytes_of_rows(rec->copy.rows, rec->copy.size_bytes, rec->copy.destination_pitch_bytes);
    allocations_add_access(copy->srcAddress, copy->srcAddress + source_bytes, false, operation);
    allocations_add_access(copy->dstAddress, copy->dstAddress + destination_bytes, true, operation);
}

static void on_copy(const Sanitizer_MemcpyData *copy)
{
    CUcontext context = copy->apiContext ? copy->apiContext : copy->dstContext;
    Sanitizer_StreamHandle stream = copy->hApiStream ? copy->hApiStream : copy->hDstStream;
    if (this_call.in_graph_launch || copy->direction < 0 || copy->direction > MEMCPY_DEVICE_TO_DEVICE)
        return;
    uint64_t row_count = value_or_default(copy->height, 1), slice_count = value_or_default(copy->depth, 1);
    uint64_t source_slice_bytes = copy->srcPitch * value_or_default(this_call.source_height, row_count);
    uint64_t destination_slice_bytes = copy->dstPitch * value_or_default(this_call.destination_height, row_count);
    record rec = record_begin_and_lock(KIND_COPY, context, stream);
    rec.copy.size_bytes = value_or_default(copy->width, copy->size);
    rec.copy.rows = row_count;
    rec.copy.source_pitch_bytes = row_count > 1 ? copy->srcPitch : 0;
    rec.copy.destination_pitch_bytes = row_count > 1 ? copy->dstPitch : 0;
    rec.copy.direction = DIRECTION_OF[copy->direction];
    rec.copy.host = host_memory_of_copy(rec.copy.direction, copy);
    rec.copy.asynchronous = copy->isAsync != 0;
    if (templates_are_enabled())
        add_copy_accesses(&rec, copy, (slice_count - 1) * source_slice_bytes,
                          (slice_count - 1) * destination_slice_bytes);
    for (uint64_t i = 0; i < slice_count; i++) {
        rec.copy.source = copy->srcAddress + i * source_slice_bytes;
        rec.copy.destination = copy->dstAddress + i * destination_slice_bytes;
        record_append(&rec);
    }
    pthread_mutex_unlock(&recorder_lock);
}

static void on_memset(const Sanitizer_MemsetData *fill)
{
    if (this_call.in_graph_launch)
        return;
    record rec = record_begin_and_lock(KIND_FILL, fill->context, fill->hStream);
    rec.fill.address = fill->address;
    rec.fill.size_bytes = fill->width * fill->elementSize;
    rec.fill.rows = value_or_default(fill->height, 1);
    rec.fill.pitch_bytes = rec.fill.rows > 1 ? fill->pitch : 0;
    rec.fill.asynchronous = fill->isAsync != 0;
    if (templates_are_enabled())
        allocations_add_access(
            fill->address, fill->address + bytes_of_rows(rec.fill.rows, rec.fill.size_bytes, rec.fill.pitch_bytes),
            true, order_enqueue(rec.stream, rec.context));
    record_append_and_unlock(&rec);
}

static void on_memop(uint32_t cbid, const Sanitizer_BatchMemopData *memop)
{
    if (this_call.in_graph_launch)
        return;
    record rec = record_begin_and_lock(KIND_MEMOP, memop->context, memop->hStream);
    rec.memop.address = memop->address;
    rec.memop.flag = cbid == MEMOP_WAIT ? FLAG_WAIT : FLAG_WRITE;
    record_append_and_unlock(&rec);
}

/* --- synchronization -------------------------------------------------------------------------- */

static void on_synchronize(uint32_t cbid, const Sanitizer_SynchronizeData *sync)
{
    if (cbid != SYNC_STREAM && cbid != SYNC_CONTEXT) {
        pthread_mutex_lock(&recorder_lock);
        record_gap("synchronization of a green context");
        pthread_mutex_unlock(&recorder_lock);
        return;
    }
    bool is_stream_sync = cbid == SYNC_STREAM;
    record rec = record_begin_and_lock(is_stream_sync ? KIND_STREAM_SYNC : KIND_CONTEXT_SYNC, sync->context,
                                       is_stream_sync ? sync->hStream : NULL);
    if (is_stream_sync)
        order_host_waited_for_stream(rec.stream);
    else
        order_host_waited_for_context(rec.context);
    record_append_and_unlock(&rec);
    if (!is_stream_sync || sync->hStream)
        exact_on_synchronize(sync->context, is_stream_sync ? sync->hStream : NULL);
}

static void on_event_lifetime(uint32_t cbid, CUevent event)
{
    pthread_mutex_lock(&recorder_lock);
    if (cbid == EVENTS_CREATED)
        event_created(event);
    else
        event_destroyed(event);
    pthread_mutex_unlock(&recorder_lock);
}

/* Apply the order that a call with an event creates. The recorder lock is held. */
static void add_event_order(uint32_t cbid, const record *rec)
{
    switch (cbid) {
    case EVENTS_RECORD: order_event_recorded(rec->event.event, rec->stream, rec->context); break;
    case EVENTS_STREAM_WAIT: order_stream_waits(rec->stream, rec->context, rec->event.event); break;
    case EVENTS_SYNCHRONIZE: order_host_waited_for_event(rec->event.event); break;
    }
}

static void on_event(uint32_t cbid, const Sanitizer_EventData *data)
{
    static const uint16_t KIND_OF[] = {
        [EVENTS_RECORD] = KIND_EVENT_RECORD,
        [EVENTS_STREAM_WAIT] = KIND_STREAM_WAIT,
        [EVENTS_SYNCHRONIZE] = KIND_EVENT_SYNC,
    };
    if (cbid == EVENTS_CREATED || cbid == EVENTS_DESTROYED) {
        on_event_lifetime(cbid, data->event);
        return;
    }
    if (cbid == EVENTS_RECORD)
        collectives_end_unannounced_plan();
    bool is_stream_event = cbid <= EVENTS_SYNCHRONIZE;
    record rec = record_begin_and_lock(is_stream_event ? KIND_OF[cbid] : KIND_GAP, data->context,
                                       cbid == EVENTS_SYNCHRONIZE ? NULL : data->hStream);
    if (is_stream_event) {
        rec.event.event = event_id(data->event);
        add_event_order(cbid, &rec);
        record_append(&rec);
    } else {
        record_gap("event recorded on a whole context");
    }
    pthread_mutex_unlock(&recorder_lock);
    if (cbid == EVENTS_SYNCHRONIZE)
        exact_on_completed_event(data->context);
}

/* --- graphs ----------------------------------------------------------------------------------- */

static void on_executable(uint32_t cbid, const Sanitizer_GraphExecData *data)
{
    pthread_mutex_lock(&recorder_lock);
    if (cbid == GRAPHS_EXEC_DESTROYING) {
        graphs_executable_destroyed(data->graphExec);
    } else {
        graphs_executable_created(data->graphExec);
        if (data->isDeviceLaunch || data->containsDeviceGraphLaunches)
            record_gap("graph launched from the device");
    }
    pthread_mutex_unlock(&recorder_lock);
}

static void on_graph_launch(const Sanitizer_GraphLaunchData *data)
{
    launch_signature signature;
    if (data->isGraphUpload)
        return;
    record rec = record_begin_and_lock(KIND_GRAPH_LAUNCH, data->context, data->hStream);
    rec.seq = launch_seq(rec.seq);
    const executable_info *info = executable_find(data->graphExec);
    rec.graph_launch.graph = info ? info->graph : 0;
    rec.graph_launch.executable = info ? info->id : 0;
    this_call.expected_kernel_count = info ? info->kernel_count : 0;
    this_call.launched_graph = rec.graph_launch.graph;
    const launch_template chosen_template = exact_choose_graph_template(&rec, &signature);
    if (!chosen_template.id) {
        graphs_write_changed_nodes(rec.graph_launch.graph);
        rec.seq = record_begin(KIND_GRAPH_LAUNCH, rec.context, rec.stream, rec.site).seq; /* behind the nodes */
    }
    rec.graph_launch.template_id = chosen_template.id;
    rec.graph_launch.is_checked = chosen_template.is_checked;
    rec.graph_launch.is_unordered = chosen_template.is_unordered;
    if (rec.graph_launch.template_id)
        exact_skip_graph(data->context);
    else
        rec.graph_launch.pending = exact_assign_graph(&rec, data, this_call.expected_kernel_count, &signature);
    if (rec.graph_launch.graph)
        record_append(&rec);
    else
        record_gap("graph launch whose instantiation was not recorded");
    launch_end_delay();
    this_call.in_graph_launch = true;
    this_call.launched_kernel_count = 0;
    pthread_mutex_unlock(&recorder_lock);
}

static void on_graph_launched(void)
{
    exact_launch_ended();
    if (this_call.in_graph_launch && this_call.launched_kernel_count != this_call.expected_kernel_count) {
        pthread_mutex_lock(&recorder_lock);
        record_gap("graph launch with a different number of kernels than instantiated");
        pthread_mutex_unlock(&recorder_lock);
    }
    this_call.in_graph_launch = false;
}

static void on_node(const Sanitizer_GraphNodeLaunchData *node)
{
    const Sanitizer_LaunchData *launch = &node->launchData;
    bool is_launched = this_call.in_graph_launch && !node->isGraphUpload;
    uint64_t user_data = 0;
    if (node->nodeType != NODE_KERNEL)
        return;
    this_call.launched_kernel_count += is_launched;
    pthread_mutex_lock(&recorder_lock);
    if (is_launched)
        user_data = exact_assign_node(
            launch, graphs_find_node(this_call.launched_graph, node->node, this_call.launched_kernel_count));
    bool context_is_patched = patching_is_active(launch->context);
    pthread_mutex_unlock(&recorder_lock);
    if (context_is_patched)
        set_user_data(launch, user_data);
}

static void on_graphs(uint32_t cbid, const void *data)
{
    switch (cbid) {
    case GRAPHS_EXEC_CREATED:
    case GRAPHS_EXEC_DESTROYING: on_executable(cbid, data); break;
    case GRAPHS_NODE_BEGIN: on_node(data); break;
    case GRAPHS_LAUNCH_BEGIN: on_graph_launch(data); break;
    case GRAPHS_LAUNCH_END: on_graph_launched(); break;
    }
}

void on_callback(void *unused, int domain, uint32_t cbid, const void *data)
{
    (void)unused;
    bool is_module_load = domain == DOMAIN_RESOURCE && cbid == RESOURCE_MODULE_LOADED && !patching_is_running();
    if (this_thread.in_recorder_call && !is_module_load)
        return;
    switch (domain) {
    case DOMAIN_DRIVER_API: on_driver_call(cbid, data); break;
    case DOMAIN_RESOURCE: on_resource(cbid, data); break;
    case DOMAIN_SYNCHRONIZE: on_synchronize(cbid, data); break;
    case DOMAIN_LAUNCH:
        if (cbid == LAUNCH_BEGIN)
            on_launch(data);
        else if (cbid == LAUNCH_END && !this_call.in_graph_launch && !is_split_launch(data))
            exact_launch_ended();
        break;
    case DOMAIN_MEMCPY:
        if (cbid == MEMCPY_STARTING || cbid == MEMCPY_BATCH_ITEM_STARTING)
            on_copy(data);
        break;
    case DOMAIN_MEMSET: on_memset(data); break;
    case DOMAIN_BATCH_MEMOP: on_memop(cbid, data); break;
    case DOMAIN_GRAPHS: on_graphs(cbid, data); break;
    case DOMAIN_EVENTS: on_event(cbid, data); break;
    }
}
