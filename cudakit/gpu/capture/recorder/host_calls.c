#include "host_calls.h"

#include <stdlib.h>

#include "driver.h"
#include "graphs.h"
#include "recorder.h"
#include "sites.h"

typedef struct {
    uint32_t context, stream, site;
} host_call;

/* Whoever waits for what the function does knows from here on that the stream has come so far; how it waits,
 * by a lock or a flag, is not seen. So to the host as a whole this is a wait, at the moment it is over. */
static void write_call(const host_call *call)
{
    pthread_mutex_lock(&recorder_lock);
    record made = record_begin(KIND_HOST_CALL, call->context, call->stream, call->site);
    made.host_call.phase = PHASE_BEGIN;
    record_one(&made);
    made.host_call.phase = PHASE_END;
    record_one(&made);
    pthread_mutex_unlock(&recorder_lock);
}

static void on_turn(void *of)
{
    write_call(of);
    free(of);
}

static bool put_before(CUstream stream, host_call *call)
{
    const driver_queries *ask = driver();
    this_thread.own_query = true;
    bool put = ask && !ask->cuLaunchHostFunc(stream, on_turn, call);
    this_thread.own_query = false;
    return put;
}

void host_calls_expect(CUcontext context, CUstream stream)
{
    Sanitizer_StreamHandle handle = NULL;
    site here;
    if (graphs_are_captured() || sanitizer.stream_handle(context, stream, &handle) || !handle)
        return; /* of a graph it is a node */
    host_call *call = malloc(sizeof *call);
    if (!call)
        return;
    sites_here(&here);
    pthread_mutex_lock(&recorder_lock);
    call->context = number_of_context(context);
    call->stream = number_of_stream(handle, context);
    call->site = sites_number(&here);
    pthread_mutex_unlock(&recorder_lock);
    if (!put_before(stream, call))
        on_turn(call); /* early, so that no race is made up */
}
