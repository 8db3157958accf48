/* A fake CUPTI for test_profile_recording.py, which calls the functions below to make callbacks and to deliver records.
 *
 * Callback ids are those of FUNCTIONS. Names have the suffixes that CUPTI gives them. */
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "vendor/cupti_api.h"

#define MAX_KINDS 64
#define MAX_CALLBACK_IDS 32

static const char *const FUNCTIONS[3][MAX_CALLBACK_IDS] = {
    [CUPTI_DOMAIN_DRIVER] = {NULL, "cuLaunchKernel", "cuMemAlloc_v2", "cuGetProcAddress_v2", "cuProfilerStart",
                             "cuProfilerStop", "cuLaunchHostFunc", "cuMemcpyAsync_ptsz"},
    [CUPTI_DOMAIN_RUNTIME] = {NULL, "cudaLaunchKernel_v7000", "cudaProfilerStart_v4000"},
};

static CUpti_CallbackFunc subscribed_callback;
static CUpti_BufferRequestFunc request_buffer;
static CUpti_BufferCompleteFunc complete_buffer;
static uint64_t (*read_time)(void);
static bool enabled_callbacks[4][MAX_CALLBACK_IDS];
static bool enabled_kinds[MAX_KINDS];
static uint64_t enabled_resources; /* bit i: callback i of the resource domain */
static size_t record_bytes[MAX_KINDS], dropped;
static uint8_t unfinished[256];
static size_t unfinished_bytes;
static uint8_t queued[4096]; /* records that the next flush delivers */
static size_t queued_bytes;
static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static int subscribe_result, enable_result;
static bool expects_zeros; /* whether the recorder gives buffers of zeros */

/* --- the functions of CUPTI --------------------------------------------------------------------- */

int cuptiGetVersion(uint32_t *version)
{
    *version = 28;
    return 0;
}

int cuptiGetResultString(int result, const char **text)
{
    *text = result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED ? "MULTIPLE_SUBSCRIBERS" : "OTHER";
    return 0;
}

int cuptiSubscribe(CUpti_SubscriberHandle *subscriber, CUpti_CallbackFunc callback, void *data)
{
    (void)data;
    if (subscribe_result)
        return subscribe_result;
    subscribed_callback = callback;
    *subscriber = (void *)&subscribed_callback;
    return 0;
}

int cuptiSubscribe_v2(CUpti_SubscriberHandle *subscriber, CUpti_CallbackFunc callback, void *data,
                      CUpti_SubscriberParams *parameters)
{
    (void)subscriber, (void)callback, (void)data;
    strncpy(parameters->oldSubscriberName, "Other Profiler", parameters->oldSubscriberSize);
    return subscribe_result;
}

int cuptiUnsubscribe(CUpti_SubscriberHandle subscriber)
{
    (void)subscriber;
    subscribed_callback = NULL;
    return 0;
}

int cuptiEnableCallback(uint32_t enable, CUpti_SubscriberHandle subscriber, int domain, uint32_t cbid)
{
    (void)subscriber;
    if (domain == CUPTI_DOMAIN_RESOURCE)
        enabled_resources = enable ? enabled_resources | 1ull << cbid : enabled_resources & ~(1ull << cbid);
    else
        enabled_callbacks[domain][cbid] = enable;
    return 0;
}

int cuptiGetCallbackName(int domain, uint32_t cbid, const char **name)
{
    *name = cbid < MAX_CALLBACK_IDS ? FUNCTIONS[domain][cbid] : NULL;
    return *name ? 0 : 1;
}

int cuptiActivityEnable(int kind)
{
    enabled_kinds[kind] = !enable_result;
    return enable_result;
}

int cuptiActivityDisable(int kind)
{
    enabled_kinds[kind] = false;
    return 0;
}

int cuptiActivitySetAttribute(int attribute, size_t *value_bytes, void *value)
{
    if (attribute == ATTRIBUTE_ZEROED_OUT_ACTIVITY_BUFFER && *value_bytes == 1)
        expects_zeros = *(uint8_t *)value;
    return 0;
}

int cuptiActivityRegisterCallbacks(CUpti_BufferRequestFunc request, CUpti_BufferCompleteFunc complete)
{
    request_buffer = request;
    complete_buffer = complete;
    return 0;
}

int cuptiActivityRegisterTimestampCallback(uint64_t (*function)(void))
{
    read_time = function;
    return 0;
}

/* Return the next record: the first if ``record`` is NULL. A record may exceed the valid bytes. */
int cuptiActivityGetNextRecord(uint8_t *buffer, size_t valid_bytes, CUpti_Activity **record)
{
    uint8_t *next = *record ? (uint8_t *)*record + record_bytes[(*record)->kind] : buffer;
    if (next >= buffer + valid_bytes)
        return CUPTI_ERROR_NOT_INITIALIZED; /* the real function returns MAX_LIMIT_REACHED */
    *record = (CUpti_Activity *)next;
    return 0;
}

int cuptiActivityGetNumDroppedRecords(CUcontext context, uint32_t stream, size_t *count)
{
    (void)context, (void)stream;
    *count = dropped;
    dropped = 0;
    return 0;
}

int deliver(const void *records, size_t bytes);

/* Deliver the queued records, and if the flush is forced the unfinished record. */
int cuptiActivityFlushAll(uint32_t flag)
{
    uint8_t records[sizeof queued];
    pthread_mutex_lock(&queue_lock);
    const size_t bytes = queued_bytes;
    memcpy(records, queued, bytes);
    queued_bytes = 0;
    pthread_mutex_unlock(&queue_lock);
    if (bytes)
        deliver(records, bytes);
    if (flag && unfinished_bytes)
        deliver(unfinished, unfinished_bytes);
    return 0;
}

int cuptiGetContextId(CUcontext context, uint32_t *id)
{
    *id = (uint32_t)(uintptr_t)context;
    return 0;
}

/* The device of a context is its number, modulo 8. */
int cuptiGetDeviceId(CUcontext context, uint32_t *id)
{
    *id = (uint32_t)(uintptr_t)context % 8;
    return 0;
}

/* The number of a node is its handle. */
int cuptiGetGraphNodeId(CUgraphNode node, uint64_t *id)
{
    *id = (uint64_t)(uintptr_t)node;
    return 0;
}

/* --- for the test ------------------------------------------------------------------------------- */

/* Set the result of later subscriptions, or of enabling activities. */
void set_subscribe_result(int result)
{
    subscribe_result = result;
}

void set_enable_result(int result)
{
    enable_result = result;
}

/* Set the size of records of a kind, which is that of a release of CUPTI. */
void set_record_bytes(int kind, size_t bytes)
{
    record_bytes[kind] = bytes;
}

/* Set a record that the next forced flush delivers. */
void set_unfinished(const void *record, size_t bytes)
{
    memcpy(unfinished, record, bytes);
    unfinished_bytes = bytes;
}

/* Add a record to those that the next flush delivers. */
void queue(const void *record, size_t bytes)
{
    pthread_mutex_lock(&queue_lock);
    memcpy(queued + queued_bytes, record, bytes);
    queued_bytes += bytes;
    pthread_mutex_unlock(&queue_lock);
}

void set_dropped(size_t count)
{
    dropped = count;
}

/* Make the callback of the entry (exits 0) or exit (1) of a function, if it is enabled. Return whether it is. */
int call(int domain, uint32_t cbid, int exits, uint32_t correlation, uint32_t context, const void *parameters)
{
    if (!subscribed_callback || !enabled_callbacks[domain][cbid])
        return 0;
    CUpti_CallbackData data = {.callbackSite = exits,
                               .functionName = FUNCTIONS[domain][cbid],
                               .functionParams = parameters,
                               .contextUid = context,
                               .correlationId = correlation};
    subscribed_callback(NULL, domain, cbid, &data);
    return 1;
}

/* Make a callback of the resource domain, about a context or a graph node. */
void resource(uint32_t cbid, void *context, void *node, void *original, int node_type)
{
    CUpti_GraphData graph = {.node = node, .originalNode = original, .nodeType = node_type};
    CUpti_ResourceData data = {context, NULL, node ? &graph : NULL};
    if (subscribed_callback && enabled_resources >> cbid & 1)
        subscribed_callback(NULL, CUPTI_DOMAIN_RESOURCE, cbid, &data);
}

static bool is_zero(const uint8_t *buffer, size_t bytes)
{
    return !*buffer && !memcmp(buffer, buffer + 1, bytes - 1);
}

/* Deliver a buffer with these bytes; return 0 if the recorder gives no buffer, or not one of zeros as announced. */
int deliver(const void *records, size_t bytes)
{
    uint8_t *buffer = NULL;
    size_t size = 0, max_records = 0;
    request_buffer(&buffer, &size, &max_records);
    if (!buffer || size < bytes || (expects_zeros && !is_zero(buffer, size)))
        return 0;
    memcpy(buffer, records, bytes);
    complete_buffer(NULL, 0, buffer, size, bytes);
    return 1;
}

/* Request buffers until the recorder gives none; return their number. */
int exhaust_buffers(void)
{
    uint8_t *buffer = NULL;
    size_t size, max_records;
    int count = 0;
    do
        request_buffer(&buffer, &size, &max_records);
    while (buffer && ++count);
    return count;
}

typedef struct {
    const void *records;
    size_t bytes;
    int count;
} delivery;

static void *deliver_repeatedly(void *argument)
{
    const delivery *each = argument;
    for (int i = 0; i < each->count; i++)
        deliver(each->records, each->bytes);
    return NULL;
}

/* Deliver a buffer ``count`` times on each of four threads at once. */
void deliver_on_threads(const void *records, size_t bytes, int count)
{
    pthread_t threads[4];
    delivery each = {records, bytes, count};
    for (int i = 0; i < 4; i++)
        pthread_create(threads + i, NULL, deliver_repeatedly, &each);
    for (int i = 0; i < 4; i++)
        pthread_join(threads[i], NULL);
}

uint64_t current_time(void)
{
    return read_time();
}

/* Return whether anything is subscribed or enabled. */
int is_active(void)
{
    int active = subscribed_callback != NULL;
    for (int kind = 0; kind < MAX_KINDS; kind++)
        active |= enabled_kinds[kind];
    return active;
}

/* Return whether kernels are recorded. */
int records_kernels(void)
{
    return enabled_kinds[ACTIVITY_CONCURRENT_KERNEL];
}
