/* A fake driver and Sanitizer API. Each function below makes the callbacks of one CUDA call, in the order
 * observed with the real ones. Built and used by test_recorder.py. */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>

#include "fake_device.h"
#include "vendor/driver_api.h"

static Sanitizer_CallbackFunc subscribed_callback;

/* --- Sanitizer API ---------------------------------------------------------------------------- */

int sanitizerSubscribe(Sanitizer_SubscriberHandle *subscriber, Sanitizer_CallbackFunc callback, void *data)
{
    (void)data;
    if (subscribed_callback)
        return 8; /* only one subscriber is allowed */
    subscribed_callback = callback;
    *subscriber = &subscribed_callback;
    return 0;
}

int sanitizerUnsubscribe(Sanitizer_SubscriberHandle subscriber)
{
    (void)subscriber;
    subscribed_callback = NULL;
    return 0;
}

int sanitizerEnableDomain(uint32_t enable, Sanitizer_SubscriberHandle subscriber, int domain)
{
    (void)enable, (void)subscriber, (void)domain;
    return 0;
}

int sanitizerEnableCallback(uint32_t enable, Sanitizer_SubscriberHandle subscriber, int domain, uint32_t cbid)
{
    (void)enable, (void)subscriber, (void)domain, (void)cbid;
    return 0;
}

int sanitizerGetStreamHandle(CUcontext context, CUstream stream, Sanitizer_StreamHandle *handle)
{
    /* The handle of a stream is the stream itself; that of the legacy default stream follows its context. */
    *handle = stream ? stream : (char *)context + 1;
    return 0;
}

int sanitizerGetResultString(int result, const char **text)
{
    *text = result == 8 ? "MAX_LIMIT_REACHED" : "OTHER";
    return 0;
}

/* --- callbacks -------------------------------------------------------------------------------------- */

static void notify(int domain, uint32_t cbid, const void *data)
{
    if (subscribed_callback)
        subscribed_callback(NULL, domain, cbid, data);
}

static void *current_context;

static void notify_call(uint32_t cbid, int site, const void *parameters, int result)
{
    Sanitizer_CallbackData data = {site, "", parameters, site ? &result : NULL, NULL, current_context};
    notify(DOMAIN_DRIVER_API, cbid, &data);
}

/* --- driver queries --------------------------------------------------------------------------- */

typedef struct {
    const char *name;
    size_t parameters, offsets[8], sizes[8];
} kernel;

int capability = 90; /* compute capability of the device; tests may change it */

size_t free_bytes = (size_t)64 << 30; /* free memory of the device; tests may change it */

int cuMemGetInfo_v2(size_t *free, size_t *total)
{
    *free = free_bytes - device_allocated_bytes();
    *total = (size_t)80 << 30;
    return 0;
}

int cuDeviceGetAttribute(int *value, int attribute, CUdevice device)
{
    (void)device;
    *value = attribute == COMPUTE_CAPABILITY_MAJOR ? capability / 10 : capability % 10;
    return 0;
}

static char recorder_stream;

int cuStreamCreate(CUstream *stream, unsigned flags)
{
    (void)flags;
    *stream = &recorder_stream;
    return 0;
}

void destroy_recorder_stream(void *context)
{
    Sanitizer_ResourceStreamData data = {context, NULL, &recorder_stream, &recorder_stream};
    notify(DOMAIN_RESOURCE, RESOURCE_STREAM_DESTROYING, &data);
}

int cuStreamDestroy_v2(CUstream stream)
{
    (void)stream;
    return 0;
}

int refuse_context_events = 801; /* result of cuCtxRecordEvent (not supported); tests may change it */

int cuEventCreate(CUevent *event, unsigned flags)
{
    static char created_event;
    (void)flags;
    *event = &created_event;
    return 0;
}

int cuCtxRecordEvent(CUcontext context, CUevent event)
{
    (void)context, (void)event;
    return refuse_context_events;
}

int cuEventQuery(CUevent event)
{
    (void)event;
    return device_is_busy() ? 600 : 0;
}

int cuFuncGetParamInfo(CUfunction function, size_t i, size_t *offset, size_t *size)
{
    const kernel *queried = function;
    if (i >= queried->parameters)
        return 1;
    *offset = queried->offsets[i];
    *size = queried->sizes[i];
    return 0;
}

int cuKernelGetParamInfo(void *function, size_t i, size_t *offset, size_t *size)
{
    (void)function, (void)i, (void)offset, (void)size;
    return 400;
}

int cuFuncGetName(const char **name, CUfunction function)
{
    *name = ((const kernel *)function)->name;
    return 0;
}

int cuKernelGetName(const char **name, void *function)
{
    (void)name, (void)function;
    return 400;
}

typedef struct graph {
    size_t nodes, edges;
    struct node *node[8];
    int before[8], after[8];
} graph;

typedef struct node {
    int type;
    kernel_node_params kernel;
    memcpy3d_params copy;
    memset_node_params fill;
    graph *child;
} node;

int cuGraphGetNodes(CUgraph handle, CUgraphNode *nodes, size_t *count)
{
    const graph *queried = handle;
    for (size_t i = 0; nodes && i < queried->nodes; i++)
        nodes[i] = queried->node[i];
    *count = queried->nodes;
    return 0;
}

int cuGraphGetEdges_v2(CUgraph handle, CUgraphNode *from, CUgraphNode *to, edge_data *data, size_t *count)
{
    const graph *queried = handle;
    (void)data;
    for (size_t i = 0; from && i < queried->edges; i++) {
        from[i] = queried->node[queried->before[i]];
        to[i] = queried->node[queried->after[i]];
    }
    *count = queried->edges;
    return 0;
}

int cuGraphNodeGetType(CUgraphNode handle, int *type)
{
    *type = ((const node *)handle)->type;
    return 0;
}

int cuGraphKernelNodeGetParams_v2(CUgraphNode handle, kernel_node_params *parameters)
{
    *parameters = ((const node *)handle)->kernel;
    return 0;
}

int cuGraphMemcpyNodeGetParams(CUgraphNode handle, memcpy3d_params *copy)
{
    *copy = ((const node *)handle)->copy;
    return 0;
}

int cuGraphMemsetNodeGetParams(CUgraphNode handle, memset_node_params *fill)
{
    *fill = ((const node *)handle)->fill;
    return 0;
}

int cuGraphMemAllocNodeGetParams(CUgraphNode handle, alloc_node_params *alloc)
{
    (void)handle, (void)alloc;
    return 1;
}

int cuGraphMemFreeNodeGetParams(CUgraphNode handle, uint64_t *address)
{
    (void)handle, (void)address;
    return 1;
}

int cuGraphChildGraphNodeGetGraph(CUgraphNode handle, CUgraph *child)
{
    *child = ((const node *)handle)->child;
    return 0;
}

static CUgraphNode captured_node; /* node that the last captured launch has added; NULL outside of captures */

int cuStreamGetCaptureInfo_v3(CUstream stream, int *status, uint64_t *id, CUgraph *captured_graph,
                              const CUgraphNode **last, const edge_data **data, size_t *count)
{
    (void)stream, (void)id, (void)captured_graph, (void)data;
    *status = captured_node != NULL;
    *count = captured_node != NULL;
    *last = &captured_node;
    return 0;
}

/* --- calls of programs ------------------------------------------------------------------------ */

void make_context(void *context, int device)
{
    Sanitizer_ResourceStreamData internal = {context, NULL, NULL, (char *)context + 2};
    Sanitizer_ResourceContextData data = {context, NULL, device};
    current_context = context;
    notify(DOMAIN_RESOURCE, RESOURCE_STREAM_CREATED, &internal);
    notify(DOMAIN_RESOURCE, RESOURCE_CONTEXT_CREATED, &data);
}

void make_stream(void *context, void *stream, uint32_t flags)
{
    stream_create_params parameters = {NULL, flags, 0};
    Sanitizer_ResourceStreamData data = {context, NULL, stream, stream};
    notify_call(CBID_cuStreamCreate, 0, &parameters, 0);
    notify(DOMAIN_RESOURCE, RESOURCE_STREAM_CREATED, &data);
    notify_call(CBID_cuStreamCreate, 1, &parameters, 0);
}

void create_per_thread_stream(void *context, void *stream)
{
    Sanitizer_ResourceStreamData data = {context, NULL, NULL, stream};
    notify(DOMAIN_RESOURCE, RESOURCE_STREAM_CREATED, &data);
}

void destroy_stream(void *context, void *stream)
{
    Sanitizer_ResourceStreamData data = {context, NULL, stream, stream};
    notify(DOMAIN_RESOURCE, RESOURCE_STREAM_DESTROYING, &data);
    device_destroy_stream(stream);
}

void memory(uint32_t cbid, void *context, void *stream, uint64_t address, uint64_t size, uint32_t flags)
{
    Sanitizer_ResourceMemoryData data = {
        .address = address, .size = size, .context = context, .hStream = stream, .flags = flags};
    notify(DOMAIN_RESOURCE, cbid, &data);
}

void copy_rows(void *context, void *stream, uint64_t to, uint64_t from, const uint64_t *box, int direction)
{
    Sanitizer_MemcpyData data = {.srcAddress = from,
                                 .dstAddress = to,
                                 .size = box[0] * box[1] * box[2],
                                 .width = box[0],
                                 .height = box[1],
                                 .depth = box[2],
                                 .srcPitch = box[3],
                                 .dstPitch = box[4],
                                 .isAsync = 1,
                                 .direction = direction,
                                 .apiContext = context,
                                 .hApiStream = stream};
    memcpy3d_params parameters = {.src = {.height = box[5]}, .dst = {.height = box[5]}};
    const void *call = &parameters;
    notify_call(CBID_cuMemcpy3DAsync_v2, 0, &call, 0);
    notify(DOMAIN_MEMCPY, MEMCPY_STARTING, &data);
    notify_call(CBID_cuMemcpy3DAsync_v2, 1, &call, 0);
}

void fill(void *context, void *stream, uint64_t address, uint64_t width, uint32_t element_size)
{
    Sanitizer_MemsetData data = {context, NULL, stream, address, width, 1, 0, element_size, 0, 1};
    notify(DOMAIN_MEMSET, 1, &data);
}

static __thread const touch *touches; /* accesses that the next kernels of this thread make */
static __thread uint32_t touch_count;
static __thread int launch_result;
static void *module;
static uint64_t last_grid;

/* Set the accesses of the next kernels; nodes of a graph make one each. Launches fail if the result is not
 * 0. */
void set_next_accesses(const touch *accesses, uint32_t count, int result)
{
    touches = accesses;
    touch_count = count;
    launch_result = result;
}

void load_module(void *context, void *loaded, const char *cubin, size_t bytes)
{
    Sanitizer_ResourceModuleData data = {context, loaded, bytes, cubin, NULL};
    module = loaded;
    notify(DOMAIN_RESOURCE, RESOURCE_MODULE_LOADED, &data);
}

static Sanitizer_LaunchData launch_data(void *context, void *stream, const kernel *function, fake_launch *handle)
{
    handle->module = module;
    return (Sanitizer_LaunchData){.context = context,
                                  .hStream = stream,
                                  .module = module,
                                  .function = (char *)function + 1,
                                  .functionName = function->name,
                                  .gridDim_x = 2,
                                  .gridDim_y = 3,
                                  .gridDim_z = 4,
                                  .blockDim_x = 32,
                                  .blockDim_y = 1,
                                  .blockDim_z = 1,
                                  .gridId = handle->grid,
                                  .hLaunch = handle};
}

static uint32_t blocks;

/* Set the number of blocks, of 1024 threads each, that launches report. */
void set_blocks(uint32_t count)
{
    blocks = count;
}

void launch(void *context, void *stream, kernel *function, void **parameters, void **extra)
{
    /* Without set_blocks(), the grid and the block are those of launch_data(). */
    launch_params call = {.f = function,
                          .grid = {blocks ? blocks : 2, blocks ? 1 : 3, blocks ? 1 : 4},
                          .block = {blocks ? 1024 : 32, 1, 1},
                          .hStream = stream,
                          .kernelParams = parameters,
                          .extra = extra};
    fake_launch handle = {.grid = __atomic_add_fetch(&last_grid, 1, __ATOMIC_RELAXED)};
    Sanitizer_LaunchData data = launch_data(context, stream, function, &handle);
    notify_call(CBID_cuLaunchKernel, 0, &call, 0);
    notify(DOMAIN_LAUNCH, LAUNCH_BEGIN, &data);
    if (!launch_result) {
        device_launch(stream, &handle, touches, touch_count);
        notify(DOMAIN_LAUNCH, LAUNCH_END, &data);
    }
    notify_call(CBID_cuLaunchKernel, 1, &call, launch_result);
}

/* Launch a kernel on a stream that is being captured: it becomes a node, and no launch callback is made. */
void capture_launch(void *stream, kernel *function, void *captured)
{
    launch_params call = {.f = function, .grid = {1, 1, 1}, .block = {32, 1, 1}, .hStream = stream};
    notify_call(CBID_cuStreamBeginCapture_v2, 1, &call, 0);
    notify_call(CBID_cuLaunchKernel, 0, &call, 0);
    captured_node = captured;
    notify_call(CBID_cuLaunchKernel, 1, &call, 0);
    captured_node = NULL;
    notify_call(CBID_cuStreamEndCapture, 1, &call, 0);
}

void event(uint32_t cbid, void *event, void *context, void *stream)
{
    Sanitizer_EventData data = {event, context, NULL, NULL, stream};
    notify(DOMAIN_EVENTS, cbid, &data);
}

void query_event(void *event, int result)
{
    notify_call(CBID_cuEventQuery, 0, &event, 0);
    notify_call(CBID_cuEventQuery, 1, &event, result);
}

static void enqueue_host_function(uint32_t cbid, void *stream)
{
    struct {
        CUstream stream;
        void *function, *data;
    } call = {stream, NULL, NULL};
    notify_call(cbid, 0, &call, 0);
    notify_call(cbid, 1, &call, 0);
}

void call_host(void *stream)
{
    enqueue_host_function(CBID_cuLaunchHostFunc, stream);
}

void add_callback(void *stream)
{
    enqueue_host_function(CBID_cuStreamAddCallback, stream);
}

void synchronize(uint32_t cbid, void *context, void *stream)
{
    Sanitizer_SynchronizeData data = {context, NULL, stream, NULL};
    device_drain(cbid == SYNC_STREAM ? stream : NULL);
    notify(DOMAIN_SYNCHRONIZE, cbid, &data);
}

/* Synchronize with one stream, but report another one to the callbacks. */
void synchronize_in_two_steps(void *context, void *stream, int notifies)
{
    Sanitizer_SynchronizeData data = {context, NULL, stream, NULL};
    if (notifies)
        notify(DOMAIN_SYNCHRONIZE, SYNC_STREAM, &data);
    else
        device_drain(stream);
}

/* Call a driver function that makes no other callback. */
void call_driver(uint32_t cbid, const void *parameters)
{
    notify_call(cbid, 0, parameters, 0);
    notify_call(cbid, 1, parameters, 0);
}

void instantiate(graph *source, void *executable)
{
    instantiate_params call = {NULL, source};
    Sanitizer_GraphExecData data = {source, executable, 0, 0, NULL};
    notify_call(CBID_cuGraphInstantiateWithFlags, 0, &call, 0);
    notify(DOMAIN_GRAPHS, GRAPHS_EXEC_CREATED, &data);
    notify_call(CBID_cuGraphInstantiateWithFlags, 1, &call, 0);
}

/* Fail to instantiate a graph. */
void fail_to_instantiate(graph *source)
{
    instantiate_params call = {NULL, source};
    notify_call(CBID_cuGraphInstantiateWithFlags, 0, &call, 0);
    notify_call(CBID_cuGraphInstantiateWithFlags, 1, &call, 2);
}

void destroy_executable(void *executable)
{
    Sanitizer_GraphExecData data = {NULL, executable, 0, 0, NULL};
    notify(DOMAIN_GRAPHS, GRAPHS_EXEC_DESTROYING, &data);
}

/* Replace the nodes of an executable graph by those of a graph with the same structure. */
void update_executable(void *executable, graph *source, int result)
{
    void *call[] = {executable, source};
    notify_call(CBID_cuGraphExecUpdate_v2, 0, call, 0);
    notify_call(CBID_cuGraphExecUpdate_v2, 1, call, result);
}

void launch_graph(void *context, void *stream, void *executable, int kernels)
{
    Sanitizer_GraphLaunchData data = {context, NULL, stream, executable, 0};
    struct {
        Sanitizer_GraphNodeLaunchData head;
        char work[512];
    } node = {.head = {.graphExec = executable, .launchId = 1, .nodeType = NODE_KERNEL}};
    Sanitizer_MemcpyData node_copy = {.direction = MEMCPY_HOST_TO_DEVICE, .size = 8, .width = 8};
    notify(DOMAIN_GRAPHS, GRAPHS_LAUNCH_BEGIN, &data);
    for (int i = 0; i < kernels; i++)
        notify(DOMAIN_GRAPHS, GRAPHS_NODE_BEGIN, &node);
    notify(DOMAIN_MEMCPY, MEMCPY_STARTING, &node_copy); /* memcpy nodes also make memcpy callbacks */
    notify(DOMAIN_GRAPHS, GRAPHS_LAUNCH_END, &data);
}

/* Launch a graph of kernels, each with its own access. Kernels of a linear graph all have the user data that
 * was set last. The first one has the given grid id, the others the following ones. */
void launch_kernels(void *context, void *stream, void *executable, void *graph_handle, uint64_t first_grid,
                    int shares_user_data)
{
    enum { MAX_KERNELS = 8 };
    const graph *queried = graph_handle;
    struct {
        void *executable, *stream;
    } call = {executable, stream};
    Sanitizer_GraphLaunchData data = {context, NULL, stream, executable, 0};
    fake_launch handles[MAX_KERNELS] = {0};
    notify_call(CBID_cuGraphLaunch, 0, &call, 0);
    notify(DOMAIN_GRAPHS, GRAPHS_LAUNCH_BEGIN, &data);
    for (size_t i = 0; i < queried->nodes; i++) {
        if (queried->node[i]->type != NODE_KERNEL)
            continue; /* host nodes make no callback */
        handles[i].grid = first_grid + i;
        Sanitizer_GraphNodeLaunchData node = {
            .graphExec = executable, .launchId = 1, .node = queried->node[i], .nodeType = NODE_KERNEL};
        node.launchData = launch_data(context, stream, queried->node[i]->kernel.func, handles + i);
        notify(DOMAIN_GRAPHS, GRAPHS_NODE_BEGIN, &node);
    }
    for (size_t i = 0; i < queried->nodes && !launch_result; i++) {
        if (queried->node[i]->type != NODE_KERNEL)
            continue;
        if (shares_user_data)
            handles[i].user_data = handles[queried->nodes - 1].user_data;
        device_launch(stream, handles + i, touches + i, 1);
    }
    if (!launch_result)
        notify(DOMAIN_GRAPHS, GRAPHS_LAUNCH_END, &data);
    notify_call(CBID_cuGraphLaunch, 1, &call, launch_result);
}

void unload_module(void)
{
    Sanitizer_ResourceModuleData data = {.module = module};
    notify(DOMAIN_RESOURCE, RESOURCE_MODULE_UNLOADING, &data);
}

void destroy_context(void *context, int device)
{
    Sanitizer_ResourceContextData data = {context, NULL, device};
    notify(DOMAIN_RESOURCE, RESOURCE_CONTEXT_DESTROYING, &data);
}

/* Measure callback time: launch a kernel with three pointers many times. */
void launch_often(void *context, void *stream, kernel *function, void **parameters, int times)
{
    for (int i = 0; i < times; i++)
        launch(context, stream, function, parameters, NULL);
}

/* --- a thread without Python ------------------------------------------------------------------ */

typedef struct {
    const char *name;
    void *context, *stream;
    kernel *function;
} launch_job;

static void *launch_job_main(void *argument)
{
    launch_job *job = argument;
    prctl(PR_SET_NAME, job->name);
    launch(job->context, job->stream, job->function, NULL, NULL);
    return NULL;
}

/* Launch a kernel on a new thread with this name, as a thread of autograd does, and wait for its end. */
void launch_on_thread(const char *name, void *context, void *stream, kernel *function)
{
    launch_job job = {name, context, stream, function};
    pthread_t thread;
    if (!pthread_create(&thread, NULL, launch_job_main, &job))
        pthread_join(thread, NULL);
}
