/* Handles the entries and exits of driver calls: launch arguments, graph nodes, results and stream captures, which no
 * other callback reports. */
#include "hooks/hooks.h"

#include <stdlib.h>
#include <string.h>

#include "exact/exact.h"
#include "exact/modules.h"
#include "exact/patch_restoring.h"
#include "model/allocations.h"
#include "model/graphs.h"
#include "model/ids.h"
#include "model/kernels.h"
#include "model/stream_order.h"
#include "recorder.h"
#include "vendor/driver_api.h"
#include "write/call_sites.h"

__thread driver_call this_call;

/* --- host functions ------------------------------------------------------------------------------- */

typedef struct {
    uint32_t context, stream, site;
    uint32_t event;     /* id of the event that was recorded before the host function was enqueued */
    order_point *point; /* work before the host function; NULL without templates, or if no memory is left */
} host_call;

/* Record an event before a host function is enqueued. When the function runs, only the work before this event is
 * complete: work that is enqueued after the function may not have started. Return the id of the event. The recorder
 * lock is held. */
static uint32_t record_event_before(const host_call *call)
{
    record rec = record_begin(KIND_EVENT_RECORD, call->context, call->stream, call->site);
    rec.event.event = new_event_id();
    record_append(&rec);
    return rec.event.event;
}

/* Record that a stream has reached a host function. The host function may set a flag or release a lock that a thread
 * of the program waits for, which cannot be observed. Therefore the race analysis treats the record as a wait of all
 * host threads for the event that was recorded before the function was enqueued. Takes the recorder lock. */
static void record_host_call(const host_call *call)
{
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin(KIND_HOST_CALL, call->context, call->stream, call->site);
    rec.host_call.event = call->event;
    rec.host_call.phase = PHASE_BEGIN;
    record_append(&rec);
    rec.host_call.phase = PHASE_END;
    record_append(&rec);
    order_host_reached(call->point);
    pthread_mutex_unlock(&recorder_lock);
    modules_request_review();
}

static void marker_function(void *call)
{
    record_host_call(call);
    free(call);
}

static bool enqueue_marker(CUstream stream, host_call *call)
{
    const driver_functions *driver = driver_api();
    this_thread.in_recorder_call = true;
    bool is_enqueued = driver && !driver->cuLaunchHostFunc(stream, marker_function, call);
    this_thread.in_recorder_call = false;
    return is_enqueued;
}

/* Enqueue a marker before a host function of the program. The marker is a host function of the recorder; it records
 * that the stream has reached this point. Called at the entry of the program's call. Calls CUDA: the recorder lock is
 * not held. */
static void enqueue_host_call_marker(CUcontext context, CUstream stream)
{
    Sanitizer_StreamHandle handle = NULL;
    call_site stack;
    if (order_is_capturing() || sanitizer.stream_handle(context, stream, &handle) || !handle)
        return; /* during a capture, the marker would become a graph node */
    host_call *call = malloc(sizeof *call);
    if (!call)
        return;
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    call->context = context_id(context);
    call->stream = stream_id(handle, context);
    call->site = call_site_id(&stack);
    call->event = record_event_before(call);
    call->point = templates_are_enabled() ? order_point_of_stream(call->stream, call->context) : NULL;
    pthread_mutex_unlock(&recorder_lock);
    if (!enqueue_marker(stream, call)) {
        free(call->point);
        call->point = NULL;
        marker_function(
            call); /* recording the marker too early may hide a race; without it, a false race may be reported */
    }
}

/* --- entries of calls ----------------------------------------------------------------------------- */

static uint64_t count_launch_threads(const uint32_t grid[3], const uint32_t block[3])
{
    return (uint64_t)grid[0] * grid[1] * grid[2] * block[0] * block[1] * block[2];
}

static void enter_launch(CUcontext context, CUstream stream, const uint32_t grid[3], const uint32_t block[3],
                         CUfunction function, void **parameters, void **extra)
{
    this_launch.function = function;
    this_launch.parameters = parameters;
    this_launch.extra = extra;
    this_launch.layout = kernels_layout(function); /* at the entry of the launch, the module is already loaded */
    const bool may_be_recorded =
        !templates_are_enabled() || patch_restoring_enter_launch(context, stream, grid, block);
    exact_prepare(context, function, count_launch_threads(grid, block), may_be_recorded);
}

static void enter_3d_copy(const memcpy3d_params *copy)
{
    this_call.source_height = copy->src.height;
    this_call.destination_height = copy->dst.height;
}

/* Forget all function handles before a module or a library is unloaded: the driver may give the handle of a kernel to a
 * kernel with other parameters. The callback RESOURCE_MODULE_UNLOADING is not made for each of these calls. */
static void enter_unload(CUmodule module)
{
    pthread_mutex_lock(&recorder_lock);
    if (module)
        patching_module_unloading(module);
    patch_restoring_clear();
    kernels_clear();
    this_call.has_reported_unload = module != NULL;
    pthread_mutex_unlock(&recorder_lock);
}

/* After a library was unloaded, forget all templates if it is unknown which modules the library had. */
static void exit_library_unload(void)
{
    if (this_call.has_reported_unload)
        return;
    pthread_mutex_lock(&recorder_lock);
    templates_renew_signatures();
    pthread_mutex_unlock(&recorder_lock);
}

static void enter_host_call_ptsz(CUcontext context, CUstream stream)
{
    enqueue_host_call_marker(context, stream ? stream : STREAM_PER_THREAD_HANDLE);
}

static void on_call_entry(uint32_t cbid, const void *parameters, CUcontext context)
{
    const launch_params *launch = parameters;
    const launch_ex_params *launch_ex = parameters;
    const stream_create_params *stream = parameters;
    const green_stream_create_params *green_stream = parameters;
    this_call.cbid = cbid;
    this_thread.call_number++;
    if (templates_are_enabled())
        modules_review(context); /* in the first driver call after a wait, the device is still idle */
    switch (cbid) {
    case CBID_cuLaunchKernel:
    case CBID_cuLaunchKernel_ptsz:
        enter_launch(context, launch->hStream, launch->grid, launch->block, launch->f, launch->kernelParams,
                     launch->extra);
        break;
    case CBID_cuLaunchCooperativeKernel:
    case CBID_cuLaunchCooperativeKernel_ptsz:
        enter_launch(context, launch->hStream, launch->grid, launch->block, launch->f, launch->kernelParams, NULL);
        break;
    case CBID_cuLaunchKernelEx:
    case CBID_cuLaunchKernelEx_ptsz:
        enter_launch(context, launch_ex->config->hStream, launch_ex->config->grid, launch_ex->config->block,
                     launch_ex->f, launch_ex->kernelParams, launch_ex->extra);
        break;
    case CBID_cuLaunchHostFunc:
    case CBID_cuLaunchHostFunc_v2:
    case CBID_cuStreamAddCallback: enqueue_host_call_marker(context, *(const CUstream *)parameters); break;
    case CBID_cuLaunchHostFunc_ptsz:
    case CBID_cuLaunchHostFunc_v2_ptsz:
    case CBID_cuStreamAddCallback_ptsz: enter_host_call_ptsz(context, *(const CUstream *)parameters); break;
    case CBID_cuGraphLaunch:
    case CBID_cuGraphLaunch_ptsz: exact_prepare_graph(context, *(const CUgraphExec *)parameters); break;
    case CBID_cuStreamCreate:
        this_call.stream_flags = stream->flags;
        this_call.stream_priority = 0;
        break;
    case CBID_cuStreamCreateWithPriority:
        this_call.stream_flags = stream->flags;
        this_call.stream_priority = stream->priority;
        break;
    case CBID_cuGreenCtxStreamCreate:
        this_call.stream_flags = green_stream->flags;
        this_call.stream_priority = green_stream->priority;
        break;
    case CBID_cuMemcpy3D_v2:
    case CBID_cuMemcpy3D_v2_ptds:
    case CBID_cuMemcpy3DAsync_v2:
    case CBID_cuMemcpy3DAsync_v2_ptsz: enter_3d_copy(*(const memcpy3d_params *const *)parameters); break;
    case CBID_cuGraphInstantiate:
    case CBID_cuGraphInstantiate_v2:
    case CBID_cuGraphInstantiateWithFlags:
    case CBID_cuGraphInstantiateWithParams:
    case CBID_cuGraphInstantiateWithParams_ptsz:
        graphs_instantiation_begins(((const instantiate_params *)parameters)->hGraph);
        break;
    case CBID_cuGraphExecUpdate:
    case CBID_cuGraphExecUpdate_v2:
        graphs_instantiation_begins(((const graph_exec_params *)parameters)->second_parameter);
        break;
    case CBID_cuModuleUnload: enter_unload(*(const CUmodule *)parameters); break;
    case CBID_cuLibraryUnload: enter_unload(NULL); break;
    }
}

/* --- exits of calls ------------------------------------------------------------------------------- */

static void record_event_completed(CUevent event)
{
    call_site stack;
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin(KIND_EVENT_QUERY_OK, 0, 0, call_site_id(&stack));
    rec.event.event = event_id(event);
    order_host_waited_for_event(rec.event.event);
    record_append(&rec);
    pthread_mutex_unlock(&recorder_lock);
}

static void lock_and_record_gap(const char *reason)
{
    pthread_mutex_lock(&recorder_lock);
    record_gap(reason);
    pthread_mutex_unlock(&recorder_lock);
}

static void exit_graph_update(CUgraphExec executable)
{
    pthread_mutex_lock(&recorder_lock);
    graphs_executable_created(executable);
    pthread_mutex_unlock(&recorder_lock);
}

/* Read the new parameters of a node. Version 1 of the parameters of a kernel node is the beginning of version 2. */
static graph_node changed_node(uint32_t cbid, const void *parameters)
{
    const any_node_params *node_parameters = parameters;
    graph_node node = {.type = NODE_EMPTY};
    switch (cbid) {
    case CBID_cuGraphExecKernelNodeSetParams:
        node.type = NODE_KERNEL;
        memcpy(&node.kernel, parameters, offsetof(kernel_node_params, kern));
        break;
    case CBID_cuGraphExecKernelNodeSetParams_v2:
        node.type = NODE_KERNEL;
        node.kernel = *(const kernel_node_params *)parameters;
        break;
    case CBID_cuGraphExecMemcpyNodeSetParams:
        node.type = NODE_MEMCPY;
        node.copy = *(const memcpy3d_params *)parameters;
        break;
    case CBID_cuGraphExecMemsetNodeSetParams:
        node.type = NODE_MEMSET;
        node.fill = *(const memset_node_params *)parameters;
        break;
    case CBID_cuGraphExecNodeSetParams:
        node.type = node_parameters->type;
        if (node_parameters->type == NODE_KERNEL)
            node.kernel = node_parameters->kernel;
        else if (node_parameters->type == NODE_MEMCPY)
            node.copy = node_parameters->copy.parameters;
        else if (node_parameters->type == NODE_MEMSET)
            node.fill = node_parameters->fill;
        break;
    }
    return node;
}

/* Handle a change of a graph that could not be recorded: its launches have no template from now on. */
static void exit_unrecorded_change(CUgraphExec executable)
{
    pthread_mutex_lock(&recorder_lock);
    const executable_info *info = executable_find(executable);
    record_gap("executable graph whose nodes were changed");
    graphs_always_record(info ? info->graph : 0);
    pthread_mutex_unlock(&recorder_lock);
}

static void exit_node_change(uint32_t cbid, const node_set_params *change)
{
    bool is_recorded;
    if (cbid == CBID_cuGraphExecChildGraphNodeSetParams) {
        is_recorded = graphs_child_graph_changed(change->hGraphExec, change->hNode, change->parameters);
    } else {
        const graph_node node = changed_node(cbid, change->parameters);
        is_recorded = graphs_node_changed(change->hGraphExec, change->hNode, &node);
    }
    if (!is_recorded)
        exit_unrecorded_change(change->hGraphExec);
}

static void on_call_success(uint32_t cbid, const void *parameters, CUcontext context)
{
    const event_elapsed_params *elapsed_params = parameters;
    switch (cbid) {
    case CBID_cuEventQuery:
        record_event_completed(*(const CUevent *)parameters);
        exact_on_completed_event(context);
        break;
    case CBID_cuEventElapsedTime:
    case CBID_cuEventElapsedTime_v2:
        record_event_completed(elapsed_params->hStart);
        record_event_completed(elapsed_params->hEnd);
        break;
    case CBID_cuLaunchKernel:
    case CBID_cuLaunchKernel_ptsz:
    case CBID_cuLaunchCooperativeKernel:
    case CBID_cuLaunchCooperativeKernel_ptsz:
        graphs_node_captured(((const launch_params *)parameters)->hStream);
        break;
    case CBID_cuLaunchKernelEx:
    case CBID_cuLaunchKernelEx_ptsz:
        graphs_node_captured(((const launch_ex_params *)parameters)->config->hStream);
        break;
    case CBID_cuMemcpyAsync:
    case CBID_cuMemcpyAsync_ptsz:
    case CBID_cuMemcpyHtoDAsync_v2:
    case CBID_cuMemcpyHtoDAsync_v2_ptsz:
    case CBID_cuMemcpyDtoHAsync_v2:
    case CBID_cuMemcpyDtoHAsync_v2_ptsz:
    case CBID_cuMemcpyDtoDAsync_v2:
    case CBID_cuMemcpyDtoDAsync_v2_ptsz:
    case CBID_cuMemsetD8Async:
    case CBID_cuMemsetD8Async_ptsz:
    case CBID_cuMemsetD16Async:
    case CBID_cuMemsetD16Async_ptsz:
    case CBID_cuMemsetD32Async:
    case CBID_cuMemsetD32Async_ptsz:
        graphs_node_captured(((const linear_copy_params *)parameters)->hStream);
        break;
    case CBID_cuStreamBeginCapture:
    case CBID_cuStreamBeginCapture_ptsz:
    case CBID_cuStreamBeginCapture_v2:
    case CBID_cuStreamBeginCapture_v2_ptsz:
    case CBID_cuStreamBeginCaptureToGraph:
    case CBID_cuStreamBeginCaptureToGraph_ptsz: order_count_captures(+1); break;
    case CBID_cuGraphExecUpdate:
    case CBID_cuGraphExecUpdate_v2: exit_graph_update(((const graph_exec_params *)parameters)->hGraphExec); break;
    case CBID_cuGraphExecKernelNodeSetParams:
    case CBID_cuGraphExecKernelNodeSetParams_v2:
    case CBID_cuGraphExecMemcpyNodeSetParams:
    case CBID_cuGraphExecMemsetNodeSetParams:
    case CBID_cuGraphExecChildGraphNodeSetParams:
    case CBID_cuGraphExecNodeSetParams: exit_node_change(cbid, parameters); break;
    case CBID_cuGraphNodeSetEnabled:
        exit_unrecorded_change(((const node_set_params *)parameters)->hGraphExec);
        break;
    case CBID_cuGraphLaunchWithArguments:
        lock_and_record_gap("graph launched with cuGraphLaunchWithArguments");
        break;
    case CBID_cuMulticastCreate:
    case CBID_cuMulticastAddDevice:
    case CBID_cuMulticastBindMem:
    case CBID_cuMulticastBindMem_v2:
    case CBID_cuMulticastBindAddr:
    case CBID_cuMulticastBindAddr_v2: patching_record_multicast_use(); break;
    case CBID_cuLibraryUnload: exit_library_unload(); break;
    case CBID_cuIpcOpenEventHandle: lock_and_record_gap("event imported from another process"); break;
    case CBID_cuSignalExternalSemaphoresAsync:
    case CBID_cuSignalExternalSemaphoresAsync_ptsz:
    case CBID_cuWaitExternalSemaphoresAsync:
    case CBID_cuWaitExternalSemaphoresAsync_ptsz: lock_and_record_gap("external semaphore"); break;
    }
}

/* End the delay of a launch that failed before its callback. */
static void exit_failed_launch(void)
{
    pthread_mutex_lock(&recorder_lock);
    launch_end_delay();
    pthread_mutex_unlock(&recorder_lock);
}

void on_driver_call(uint32_t cbid, const Sanitizer_CallbackData *data)
{
    if (data->callbackSite == 0) {
        on_call_entry(cbid, data->functionParams, data->context);
        return;
    }
    if (data->functionReturnValue && *(const int *)data->functionReturnValue == 0)
        on_call_success(cbid, data->functionParams, data->context);
    if (cbid == CBID_cuStreamEndCapture || cbid == CBID_cuStreamEndCapture_ptsz)
        order_count_captures(-1); /* a capture that failed has ended as well */
    exact_launch_ended();         /* also if the launch failed: it is no longer pending */
    if (this_thread.delayed_seq)
        exit_failed_launch();
    if (cbid == CBID_cuGraphLaunch || cbid == CBID_cuGraphLaunch_ptsz)
        this_call.in_graph_launch = false;
    this_call.cbid = 0;
    this_launch = (entered_launch){0};
    this_call.source_height = this_call.destination_height = 0;
    graphs_instantiation_ended();
}
