#define _GNU_SOURCE
#include "hooks/hooks.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "exact/exact.h"
#include "exact/modules.h"
#include "model/collectives.h"
#include "model/graphs.h"
#include "model/ids.h"
#include "model/kernels.h"
#include "model/ranges.h"
#include "profile/window.h"
#include "recorder.h"
#include "write/call_sites.h"
#include "write/spool.h"

static Sanitizer_SubscriberHandle subscriber;
static bool is_subscribed, is_tracing; /* is_tracing: NVTX ranges are recorded */

/* A callback of a domain that the recorder subscribes to; cbid 0 stands for all callbacks of the domain. Driver calls
 * are not in these lists. */
typedef struct {
    int domain;
    uint32_t cbid;
} callback;

/* Callbacks that are subscribed in every recording. A recording of memory alone subscribes to nothing else, so that
 * other calls of the program cost nothing. */
static const callback MEMORY_CALLBACKS[] = {
    {DOMAIN_RESOURCE, RESOURCE_CONTEXT_CREATED}, {DOMAIN_RESOURCE, RESOURCE_CONTEXT_DESTROYING},
    {DOMAIN_RESOURCE, RESOURCE_DEVICE_ALLOC},    {DOMAIN_RESOURCE, RESOURCE_DEVICE_FREE},
    {DOMAIN_RESOURCE, RESOURCE_HOST_ALLOC},      {DOMAIN_RESOURCE, RESOURCE_HOST_FREE},
    {DOMAIN_RESOURCE, RESOURCE_ALLOC_ASYNC},     {DOMAIN_RESOURCE, RESOURCE_FREE_ASYNC},
    {DOMAIN_RESOURCE, RESOURCE_POOL_IMPORT},
};

/* Callbacks that are also subscribed when work on streams is recorded. */
static const callback WORK_CALLBACKS[] = {
    {DOMAIN_RESOURCE, RESOURCE_STREAM_CREATED},
    {DOMAIN_RESOURCE, RESOURCE_STREAM_DESTROYING},
    {DOMAIN_RESOURCE, RESOURCE_MODULE_UNLOADING},
    {DOMAIN_SYNCHRONIZE, 0},
    {DOMAIN_LAUNCH, LAUNCH_BEGIN},
    {DOMAIN_MEMCPY, MEMCPY_STARTING},
    {DOMAIN_MEMCPY, MEMCPY_BATCH_ITEM_STARTING},
    {DOMAIN_MEMSET, 0},
    {DOMAIN_BATCH_MEMOP, 0},
    {DOMAIN_GRAPHS, GRAPHS_EXEC_CREATED},
    {DOMAIN_GRAPHS, GRAPHS_EXEC_DESTROYING},
    {DOMAIN_GRAPHS, GRAPHS_NODE_BEGIN},
    {DOMAIN_GRAPHS, GRAPHS_LAUNCH_BEGIN},
    {DOMAIN_GRAPHS, GRAPHS_LAUNCH_END},
    {DOMAIN_EVENTS, 0},
};

/* Callbacks that are subscribed only with a device patch. */
static const callback PATCH_CALLBACKS[] = {
    {DOMAIN_RESOURCE, RESOURCE_MODULE_LOADED},
    {DOMAIN_LAUNCH, LAUNCH_END},
};

/* Callback id of cuCtxSynchronize_v2, a function of CUDA 13.0, which every supported library can report. */
#define NEWEST_KNOWN_CBID 800

static const uint32_t SUBSCRIBED_CBIDS[] = {
#define X(name, number) number,
    SUBSCRIBED_FUNCTIONS(X)
#undef X
};

/* Write the failed call and its result to ``error``. */
static void format_error(const char *failed_call, int result, char *error, size_t error_bytes)
{
    const char *description = NULL;
    sanitizer.result_string(result, &description);
    snprintf(error, error_bytes, "%s: %s (%d)", failed_call, description ? description : "unknown result", result);
}

/* Subscribe callbacks. Return 0, or the result code of the first failure. */
static int enable_callback_list(const callback *callbacks, size_t count)
{
    int result = 0;
    for (const callback *next_callback = callbacks; next_callback < callbacks + count && !result; next_callback++)
        result = next_callback->cbid
                     ? sanitizer.enable_callback(1, subscriber, next_callback->domain, next_callback->cbid)
                     : sanitizer.enable_domain(1, subscriber, next_callback->domain);
    return result;
}

/* Subscribe all callbacks; with ``memory_only``, only those of memory. Return 0, or the result code of the first
 * failure. */
static int enable_all_callbacks(bool memory_only)
{
    int result = enable_callback_list(MEMORY_CALLBACKS, sizeof MEMORY_CALLBACKS / sizeof *MEMORY_CALLBACKS);
    if (result || memory_only)
        return result;
    result = enable_callback_list(WORK_CALLBACKS, sizeof WORK_CALLBACKS / sizeof *WORK_CALLBACKS);
    if (patching_is_enabled() && !result)
        result = enable_callback_list(PATCH_CALLBACKS, sizeof PATCH_CALLBACKS / sizeof *PATCH_CALLBACKS);
    /* A library rejects the ids of functions that are newer than the library. A driver of the same release does not
     * have these functions either, so the error is ignored. */
    for (size_t i = 0; i < sizeof SUBSCRIBED_CBIDS / sizeof *SUBSCRIBED_CBIDS && !result; i++) {
        int call_result = sanitizer.enable_callback(1, subscriber, DOMAIN_DRIVER_API, SUBSCRIBED_CBIDS[i]);
        result = SUBSCRIBED_CBIDS[i] <= NEWEST_KNOWN_CBID ? call_result : 0;
    }
    return result;
}

/* --- forks and exits -------------------------------------------------------------------------- */

static void before_fork(void)
{
    pthread_mutex_lock(&recorder_lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&recorder_lock);
}

static void after_fork_in_child(void)
{
    recorder_lock = (pthread_mutex_t)PTHREAD_ADAPTIVE_MUTEX_INITIALIZER_NP;
    this_thread = (thread_state){0};
    this_call = (driver_call){0};
    this_launch = (entered_launch){0};
    spool_forked();
    call_sites_clear();
    ranges_clear();
    graphs_clear();
    collectives_clear();
    kernels_clear();
    ids_clear();
    exact_clear();
    profile_forked();
}

/* Exit handlers run in reverse order of registration. subscription_end() is registered after NVIDIA's Sanitizer library is
 * loaded, so that it runs before the exit handler of that library, which would otherwise access contexts that no longer
 * exist. */
static void register_process_handlers(void)
{
    pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
    atexit(subscription_end);
}

void tracing_begin(void)
{
    static pthread_once_t register_once = PTHREAD_ONCE_INIT;
    pthread_once(&register_once, register_process_handlers);
    is_tracing = true;
    nvtx_enable(true);
}

bool subscription_begin(const char *library, bool memory_only, char *error, size_t error_bytes)
{
    if (is_subscribed) {
        snprintf(error, error_bytes, "this process is being recorded already");
        return false;
    }
    if (!sanitizer_load(library, error, error_bytes))
        return false;
    int result = sanitizer.subscribe(&subscriber, on_callback, NULL);
    if (result) {
        format_error("another tool may be attached to CUDA; sanitizerSubscribe", result, error, error_bytes);
        return false;
    }
    is_subscribed = true;
    result = enable_all_callbacks(memory_only);
    if (result) {
        format_error("sanitizerEnableCallback", result, error, error_bytes);
        subscription_end();
        return false;
    }
    tracing_begin();
    if (!memory_only)
        nccl_attach();
    return true;
}

void subscription_end(void)
{
    profile_end();
    if (!is_subscribed && !is_tracing)
        return;
    nvtx_enable(false);
    nccl_detach();
    is_tracing = false;
    if (is_subscribed) {
        exact_finish();
        is_subscribed = false;
        sanitizer.unsubscribe(subscriber);
    }
    pthread_mutex_lock(&recorder_lock);
    spool_close();
    pthread_mutex_unlock(&recorder_lock);
}
