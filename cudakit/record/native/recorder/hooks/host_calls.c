#include "hooks/hooks.h"

#include <stdlib.h>

#include "exact/module_switch.h"
#include "hooks/driver_api.h"
#include "model/graphs.h"
#include "model/ids.h"
#include "model/stream_order.h"
#include "recorder.h"
#include "write/call_sites.h"

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

void host_calls_enqueue_marker(CUcontext context, CUstream stream)
{
    Sanitizer_StreamHandle handle = NULL;
    call_site stack;
    if (graphs_is_capturing() || sanitizer.stream_handle(context, stream, &handle) || !handle)
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
