#define _GNU_SOURCE
#include "profile/callbacks.h"

#include <ctype.h>
#include <pthread.h>
#include <string.h>

#include "containers.h"
#include "model/collectives.h"
#include "profile/activity.h"
#include "recorder.h"
#include "vendor/driver_api.h"
#include "write/call_sites.h"
#include "write/spool.h"

#define MAX_CALLBACKS 2048 /* callback ids of a domain; CUDA 13.0 has 523 and 807 */
#define MAX_NAME_BYTES 128

/* The reason why the recorder handles the callback of a CUDA function. */
typedef enum { ROLE_NONE, ROLE_WORK, ROLE_ALLOCATION, ROLE_START, ROLE_STOP } callback_role;

/* Beginnings of the names of functions that enqueue or wait for work, or that free memory. Functions of the runtime
 * are not listed: each calls a driver function with the same correlation number, and two more callbacks for each call
 * cost as much as the rest of the recording. */
static const char *const WORK_PREFIXES[] = {
    "cuLaunch",         "cuGraphLaunch",       "cuMemcpy",           "cuMemset",
    "cuMemPrefetch",    "cuMemFree",           "cuMemHostRegister",  "cuMemHostUnregister",
    "cuMemMap",         "cuMemUnmap",          "cuMemRelease",       "cuMemAllocPitch",
    "cuCtxSynchronize", "cuStreamSynchronize", "cuEventSynchronize",
};

/* Names of functions whose second argument is the number of bytes to allocate. */
static const char *const ALLOCATION_FUNCTIONS[] = {
    "cuMemAlloc",      "cuMemAllocHost",          "cuMemHostAlloc", "cuMemAllocManaged",
    "cuMemAllocAsync", "cuMemAllocFromPoolAsync", "cuMemCreate",
};

/* Functions that run host code and enqueue no work of the GPU. */
static const char *const EXCLUDED_FUNCTIONS[] = {"cuLaunchHostFunc"};

static uint8_t roles[CUPTI_DOMAIN_RESOURCE][MAX_CALLBACKS]; /* role of each callback, by domain and callback id */
static uint32_t function_name_ids[CUPTI_DOMAIN_RESOURCE]
                                 [MAX_CALLBACKS]; /* text ids of plain names; 0: not written yet */

/* The call of the runtime or driver that this thread has entered. */
typedef struct {
    int domain; /* 0: the thread is in no recorded call */
    uint32_t correlation, generation;
    int64_t start_ns;
} profiled_call;
static __thread profiled_call this_call;

/* --- the recorded functions --------------------------------------------------------------------- */

/* Copy the name of a function without the suffixes of its version and of its per-thread default stream, as programs
 * write the name: "cuMemAlloc_v2" becomes "cuMemAlloc". */
static void copy_plain_name(const char *name, char *plain)
{
    size_t length = strnlen(name, MAX_NAME_BYTES - 1);
    memcpy(plain, name, length);
    plain[length] = 0;
    for (char *suffix; (suffix = strrchr(plain, '_')) != NULL;) {
        const bool is_version = suffix[1] == 'v' && isdigit((unsigned char)suffix[2]);
        if (!is_version && strcmp(suffix, "_ptsz") != 0 && strcmp(suffix, "_ptds") != 0)
            break;
        *suffix = 0;
    }
}

static bool is_name_among(const char *name, const char *const *names, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (!strcmp(name, names[i]))
            return true;
    return false;
}

static callback_role role_of(const char *name)
{
    if (!strcmp(name, "cudaProfilerStart") || !strcmp(name, "cuProfilerStart"))
        return ROLE_START;
    if (!strcmp(name, "cudaProfilerStop") || !strcmp(name, "cuProfilerStop"))
        return ROLE_STOP;
    if (is_name_among(name, EXCLUDED_FUNCTIONS, sizeof EXCLUDED_FUNCTIONS / sizeof *EXCLUDED_FUNCTIONS))
        return ROLE_NONE;
    if (is_name_among(name, ALLOCATION_FUNCTIONS, sizeof ALLOCATION_FUNCTIONS / sizeof *ALLOCATION_FUNCTIONS))
        return ROLE_ALLOCATION;
    for (size_t i = 0; i < sizeof WORK_PREFIXES / sizeof *WORK_PREFIXES; i++)
        if (!strncmp(name, WORK_PREFIXES[i], strlen(WORK_PREFIXES[i])))
            return ROLE_WORK;
    return ROLE_NONE;
}

void api_calls_find(void)
{
    for (int domain = CUPTI_DOMAIN_DRIVER; domain <= CUPTI_DOMAIN_RUNTIME; domain++) {
        for (uint32_t cbid = 1; cbid < MAX_CALLBACKS; cbid++) {
            const char *name = NULL;
            char unversioned_name[MAX_NAME_BYTES];
            roles[domain][cbid] = ROLE_NONE;
            if (cupti.callback_name(domain, cbid, &name) || !name)
                continue;
            copy_plain_name(name, unversioned_name);
            roles[domain][cbid] = (uint8_t)role_of(unversioned_name);
        }
    }
}

/* Enable or disable the callbacks of functions with one of two roles. Return 0, or the result code of the first
 * failure. */
static int enable_callbacks_with_roles(CUpti_SubscriberHandle subscriber, bool enable, callback_role first_role,
                                       callback_role second_role)
{
    int result = 0;
    for (int domain = CUPTI_DOMAIN_DRIVER; domain <= CUPTI_DOMAIN_RUNTIME; domain++)
        for (uint32_t cbid = 1; cbid < MAX_CALLBACKS && !result; cbid++)
            if (roles[domain][cbid] == first_role || roles[domain][cbid] == second_role)
                result = cupti.enable_callback(enable, subscriber, domain, cbid);
    return result;
}

int api_calls_enable(CUpti_SubscriberHandle subscriber, bool enable)
{
    return enable_callbacks_with_roles(subscriber, enable, ROLE_WORK, ROLE_ALLOCATION);
}

int api_calls_enable_control(CUpti_SubscriberHandle subscriber)
{
    return enable_callbacks_with_roles(subscriber, true, ROLE_START, ROLE_STOP);
}

/* --- records ------------------------------------------------------------------------------------ */

void api_calls_forked(void)
{
    memset(function_name_ids, 0, sizeof function_name_ids);
    this_call = (profiled_call){0};
}

/* Return the text id of the plain name of a function. The recorder lock is held. */
static uint32_t function_name_id(int domain, uint32_t cbid, const char *name)
{
    uint32_t *id = &function_name_ids[domain][cbid];
    if (!*id && name) {
        char unversioned_name[MAX_NAME_BYTES];
        copy_plain_name(name, unversioned_name);
        *id = spool_text(unversioned_name);
    }
    return *id;
}

static bool is_kernel_launch(const CUpti_CallbackData *data)
{
    return data->functionName && !strncmp(data->functionName, "cuLaunchKernel", strlen("cuLaunchKernel"));
}

/* Write the record of a call that ends now. The stack is read here and not at the entry: the Python frames of a thread
 * do not change while it is inside a call. */
static void record_call(const CUpti_CallbackData *data, uint32_t cbid, const profiled_call *call)
{
    call_site stack;
    const int64_t end_ns = monotonic_ns();
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    record rec = record_begin_at(call->start_ns, KIND_API_CALL, data->contextUid, 0, call_site_id(&stack));
    rec.api_call.function = function_name_id(call->domain, cbid, data->functionName);
    rec.api_call.correlation = data->correlationId;
    rec.api_call.start_ns = call->start_ns;
    rec.api_call.end_ns = end_ns;
    if (roles[call->domain][cbid] == ROLE_ALLOCATION && data->functionParams)
        rec.api_call.size_bytes = ((const uint64_t *)data->functionParams)[1];
    if (collectives_is_launching() && is_kernel_launch(data))
        collectives_assign_launch(
            &rec); /* the COLLECTIVE records of the launch will have the ``seq`` of this call */
    record_append_and_unlock(&rec);
}

profiler_control api_calls_on_callback(int domain, uint32_t cbid, const CUpti_CallbackData *data,
                                       uint32_t generation, bool is_open)
{
    profiled_call *call = &this_call;
    if (cbid >= MAX_CALLBACKS || this_thread.in_recorder_call)
        return PROFILER_UNCHANGED;
    const callback_role role = (callback_role)roles[domain][cbid];
    const bool is_entry = !data->callbackSite;
    if (role == ROLE_START || role == ROLE_STOP) {
        /* The runtime's function calls the driver's function, so both callbacks arrive. The second callback changes
         * nothing. */
        return is_entry ? PROFILER_UNCHANGED : role == ROLE_STOP ? PROFILER_STOP : PROFILER_START;
    }
    const bool is_inside_call = call->domain && call->generation == generation;
    if (is_entry) {
        if (!is_inside_call)
            *call = (profiled_call){domain, data->correlationId, generation, monotonic_ns()};
        return PROFILER_UNCHANGED;
    }
    if (!is_inside_call || call->domain != domain || call->correlation != data->correlationId)
        return PROFILER_UNCHANGED;
    if (is_open)
        record_call(data, cbid, call);
    call->domain = 0;
    return PROFILER_UNCHANGED;
}

/* --- graph nodes and contexts --------------------------------------------------------------------- */

static const uint32_t RESOURCE_CALLBACKS[] = {
    CUPTI_RESOURCE_CONTEXT_CREATED,
    CUPTI_RESOURCE_CONTEXT_DESTROY_STARTING,
    CUPTI_RESOURCE_MODULE_UNLOAD_STARTING,
    CUPTI_RESOURCE_GRAPHNODE_CREATED,
    CUPTI_RESOURCE_GRAPHNODE_DESTROY_STARTING,
    CUPTI_RESOURCE_GRAPHNODE_CLONED,
};

/* Id of the call site of each graph node, by the number of the node. A node without call site has the value NO_SITE,
 * because value 0 means "no entry". Protected by the recorder lock. */
static hash_table node_sites;
#define NO_SITE UINT32_MAX

int resources_enable(CUpti_SubscriberHandle subscriber, bool enable)
{
    int result = 0;
    for (size_t i = 0; i < sizeof RESOURCE_CALLBACKS / sizeof *RESOURCE_CALLBACKS && !result; i++)
        result = cupti.enable_callback(enable, subscriber, CUPTI_DOMAIN_RESOURCE, RESOURCE_CALLBACKS[i]);
    return result;
}

/* Store the device of a new context, for records of API calls. */
static void on_context_created(CUcontext context)
{
    uint32_t context_number, device;
    if (cupti.context_id(context, &context_number) || cupti.device_id(context, &device))
        return;
    pthread_mutex_lock(&recorder_lock);
    set_context_device(context_number, (int)device);
    pthread_mutex_unlock(&recorder_lock);
}

static bool is_recorded_node(int type)
{
    return type == NODE_KERNEL || type == NODE_MEMCPY || type == NODE_MEMSET;
}

/* Write the call site of a node, and keep it for copies of the node. The recorder lock is held. */
static void record_site(uint64_t node, uint32_t site)
{
    hash_table_put(&node_sites, node, site ? site : NO_SITE);
    record rec = record_begin(KIND_GRAPH_NODE_SITE, 0, 0, site);
    rec.graph_node_site.graph_node = node;
    record_append(&rec);
}

static void on_node_created(const CUpti_GraphData *graph)
{
    uint64_t node;
    call_site stack;
    if (!is_recorded_node(graph->nodeType) || cupti.graph_node_id(graph->node, &node) || !node)
        return;
    call_site_read(&stack);
    pthread_mutex_lock(&recorder_lock);
    record_site(node, call_site_id(&stack));
    pthread_mutex_unlock(&recorder_lock);
}

/* The nodes of an executable graph are copies of those of the captured graph, with numbers of their own. */
static void on_node_cloned(const CUpti_GraphData *graph)
{
    uint64_t node, original_node;
    if (!is_recorded_node(graph->nodeType) || cupti.graph_node_id(graph->node, &node) || !node ||
        cupti.graph_node_id(graph->originalNode, &original_node))
        return;
    pthread_mutex_lock(&recorder_lock);
    const uint32_t site = hash_table_get(&node_sites, original_node);
    if (site)
        record_site(node, site == NO_SITE ? 0 : site);
    pthread_mutex_unlock(&recorder_lock);
}

static void on_node_destroyed(const CUpti_GraphData *graph)
{
    uint64_t node;
    if (!is_recorded_node(graph->nodeType) || cupti.graph_node_id(graph->node, &node) || !node)
        return;
    pthread_mutex_lock(&recorder_lock);
    hash_table_remove(&node_sites, node);
    pthread_mutex_unlock(&recorder_lock);
}

void resources_on_callback(uint32_t cbid, const CUpti_ResourceData *data)
{
    const CUpti_GraphData *graph = data->resourceDescriptor;
    switch (cbid) {
    case CUPTI_RESOURCE_CONTEXT_CREATED: on_context_created(data->context); break;
    case CUPTI_RESOURCE_CONTEXT_DESTROY_STARTING: activity_flush(); break;
    case CUPTI_RESOURCE_MODULE_UNLOAD_STARTING: activity_forget_names(); break;
    case CUPTI_RESOURCE_GRAPHNODE_CREATED:
        if (graph)
            on_node_created(graph);
        break;
    case CUPTI_RESOURCE_GRAPHNODE_CLONED:
        if (graph)
            on_node_cloned(graph);
        break;
    case CUPTI_RESOURCE_GRAPHNODE_DESTROY_STARTING:
        if (graph)
            on_node_destroyed(graph);
        break;
    }
}

void resources_forked(void)
{
    hash_table_clear(&node_sites);
}
