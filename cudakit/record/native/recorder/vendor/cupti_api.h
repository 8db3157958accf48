/* The parts of NVIDIA's CUPTI, release 12.0 and newer, that the recorder uses.
 *
 * They are declared here, so that no NVIDIA header is needed to build the recorder. Newer releases append fields to
 * activity records and keep the earlier ones in place, so each struct has only the fields that are read. Structs and
 * fields have their names in the API. Source: cupti_activity.h, cupti_callbacks.h and cupti_result.h of CUDA 12.1 to
 * 13.5.
 */
#ifndef CK_CUPTI_API_H
#define CK_CUPTI_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vendor/sanitizer_api.h"

typedef struct CUpti_Subscriber_st *CUpti_SubscriberHandle;

/* CUptiResult */
enum {
    CUPTI_SUCCESS = 0,
    CUPTI_ERROR_NOT_INITIALIZED = 15,
    CUPTI_ERROR_NOT_SUPPORTED = 27,
    CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED = 33,
    CUPTI_ERROR_INSUFFICIENT_PRIVILEGES = 35,
    CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED = 39,
    CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES = 40,
    CUPTI_ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED = 41,
};

/* CUpti_CallbackDomain */
enum { CUPTI_DOMAIN_DRIVER = 1, CUPTI_DOMAIN_RUNTIME = 2, CUPTI_DOMAIN_RESOURCE = 3 };

/* CUpti_CallbackIdResource */
enum {
    CUPTI_RESOURCE_CONTEXT_CREATED = 1,
    CUPTI_RESOURCE_CONTEXT_DESTROY_STARTING = 2,
    CUPTI_RESOURCE_MODULE_UNLOAD_STARTING = 7,
    CUPTI_RESOURCE_GRAPHNODE_CREATED = 13,
    CUPTI_RESOURCE_GRAPHNODE_DESTROY_STARTING = 14,
    CUPTI_RESOURCE_GRAPHNODE_CLONED = 20,
};

/* CUpti_ActivityKind */
enum {
    ACTIVITY_MEMCPY = 1,
    ACTIVITY_MEMSET = 2,
    ACTIVITY_CONCURRENT_KERNEL = 10,
    ACTIVITY_MEMCPY2 = 22,
};

/* CUpti_ActivityMemcpyKind */
enum {
    MEMCPY_HTOD = 1,
    MEMCPY_DTOH = 2,
    MEMCPY_HTOA = 3,
    MEMCPY_ATOH = 4,
    MEMCPY_HTOH = 9,
};

#define ACTIVITY_FLUSH_FORCED 1                           /* CUPTI_ACTIVITY_FLAG_FLUSH_FORCED */
#define ATTRIBUTE_ZEROED_OUT_ACTIVITY_BUFFER 5            /* CUpti_ActivityAttribute */
#define OLD_SUBSCRIBER_NAME_BYTES 64                      /* CUPTI_OLD_SUBSCRIBER_NAME_MIN_LEN */
#define RECORD_STRUCT __attribute__((packed, aligned(8))) /* PACKED_ALIGNMENT */

typedef struct {
    int callbackSite; /* 0: entry of the call, 1: exit */
    const char *functionName;
    const void *functionParams;
    void *functionReturnValue;
    const char *symbolName;
    CUcontext context;
    uint32_t contextUid;
    uint64_t *correlationData;
    uint32_t correlationId;
} CUpti_CallbackData;

typedef struct {
    CUgraph graph, originalGraph;
    CUgraphNode node, originalNode;
    int nodeType;
} CUpti_GraphData;

typedef struct {
    CUcontext context;
    void *resourceHandle;
    void *resourceDescriptor; /* a CUpti_GraphData in callbacks of graph nodes */
} CUpti_ResourceData;

typedef struct {
    size_t structSize;
    const char *subscriberName;
    char *oldSubscriberName; /* name of the subscriber because of which the call failed */
    size_t oldSubscriberSize;
} CUpti_SubscriberParams;

typedef struct {
    int kind;
} CUpti_Activity;

/* The first fields of CUpti_ActivityKernel8 and newer. */
typedef struct RECORD_STRUCT {
    int kind;
    uint8_t cacheConfig, sharedMemoryConfig;
    uint16_t registersPerThread;
    int partitionedGlobalCacheRequested, partitionedGlobalCacheExecuted;
    uint64_t start, end, completed;
    uint32_t deviceId, contextId, streamId;
    int32_t gridX, gridY, gridZ, blockX, blockY, blockZ;
    int32_t staticSharedMemory, dynamicSharedMemory;
    uint32_t localMemoryPerThread, localMemoryTotal, correlationId;
    int64_t gridId;
    const char *name;
    void *reserved0;
    uint64_t queued, submitted;
    uint8_t launchType, isSharedMemoryCarveoutRequested, sharedMemoryCarveoutRequested, padding;
    uint32_t sharedMemoryExecuted;
    uint64_t graphNodeId;
} CUpti_ActivityKernel;

/* The first fields of CUpti_ActivityMemcpy5 and newer. */
typedef struct RECORD_STRUCT {
    int kind;
    uint8_t copyKind, srcKind, dstKind, flags;
    uint64_t bytes, start, end;
    uint32_t deviceId, contextId, streamId, correlationId, runtimeCorrelationId, pad;
    void *reserved0;
    uint64_t graphNodeId;
} CUpti_ActivityMemcpy;

/* The first fields of CUpti_ActivityMemcpyPtoP3 and newer: a copy between two devices. */
typedef struct RECORD_STRUCT {
    int kind;
    uint8_t copyKind, srcKind, dstKind, flags;
    uint64_t bytes, start, end;
    uint32_t deviceId, contextId, streamId;
    uint32_t srcDeviceId, srcContextId, dstDeviceId, dstContextId, correlationId;
    void *reserved0;
    uint64_t graphNodeId;
} CUpti_ActivityMemcpyPtoP;

/* The first fields of CUpti_ActivityMemset3 and newer. */
typedef struct RECORD_STRUCT {
    int kind;
    uint32_t value;
    uint64_t bytes, start, end;
    uint32_t deviceId, contextId, streamId, correlationId;
    uint16_t flags, memoryKind;
    uint32_t pad;
    void *reserved0;
    uint64_t graphNodeId;
} CUpti_ActivityMemset;

/* The offsets in the headers of CUDA 12.1, 12.4, 12.6, 12.9, 13.0 and 13.5 (nvidia-cuda-cupti on PyPI). */
#define ASSERT_OFFSET(type, field, bytes) _Static_assert(offsetof(type, field) == (bytes), "offset in CUPTI")
ASSERT_OFFSET(CUpti_ActivityKernel, registersPerThread, 6);
ASSERT_OFFSET(CUpti_ActivityKernel, start, 16);
ASSERT_OFFSET(CUpti_ActivityKernel, end, 24);
ASSERT_OFFSET(CUpti_ActivityKernel, deviceId, 40);
ASSERT_OFFSET(CUpti_ActivityKernel, contextId, 44);
ASSERT_OFFSET(CUpti_ActivityKernel, streamId, 48);
ASSERT_OFFSET(CUpti_ActivityKernel, gridX, 52);
ASSERT_OFFSET(CUpti_ActivityKernel, blockX, 64);
ASSERT_OFFSET(CUpti_ActivityKernel, staticSharedMemory, 76);
ASSERT_OFFSET(CUpti_ActivityKernel, dynamicSharedMemory, 80);
ASSERT_OFFSET(CUpti_ActivityKernel, correlationId, 92);
ASSERT_OFFSET(CUpti_ActivityKernel, name, 104);
ASSERT_OFFSET(CUpti_ActivityKernel, graphNodeId, 144);
ASSERT_OFFSET(CUpti_ActivityMemcpy, copyKind, 4);
ASSERT_OFFSET(CUpti_ActivityMemcpy, srcKind, 5);
ASSERT_OFFSET(CUpti_ActivityMemcpy, dstKind, 6);
ASSERT_OFFSET(CUpti_ActivityMemcpy, bytes, 8);
ASSERT_OFFSET(CUpti_ActivityMemcpy, start, 16);
ASSERT_OFFSET(CUpti_ActivityMemcpy, end, 24);
ASSERT_OFFSET(CUpti_ActivityMemcpy, deviceId, 32);
ASSERT_OFFSET(CUpti_ActivityMemcpy, contextId, 36);
ASSERT_OFFSET(CUpti_ActivityMemcpy, streamId, 40);
ASSERT_OFFSET(CUpti_ActivityMemcpy, correlationId, 44);
ASSERT_OFFSET(CUpti_ActivityMemcpy, graphNodeId, 64);
ASSERT_OFFSET(CUpti_ActivityMemcpyPtoP, copyKind, 4);
ASSERT_OFFSET(CUpti_ActivityMemcpyPtoP, bytes, 8);
ASSERT_OFFSET(CUpti_ActivityMemcpyPtoP, start, 16);
ASSERT_OFFSET(CUpti_ActivityMemcpyPtoP, deviceId, 32);
ASSERT_OFFSET(CUpti_ActivityMemcpyPtoP, streamId, 40);
ASSERT_OFFSET(CUpti_ActivityMemcpyPtoP, srcDeviceId, 44);
ASSERT_OFFSET(CUpti_ActivityMemcpyPtoP, dstDeviceId, 52);
ASSERT_OFFSET(CUpti_ActivityMemcpyPtoP, correlationId, 60);
ASSERT_OFFSET(CUpti_ActivityMemcpyPtoP, graphNodeId, 72);
ASSERT_OFFSET(CUpti_ActivityMemset, bytes, 8);
ASSERT_OFFSET(CUpti_ActivityMemset, start, 16);
ASSERT_OFFSET(CUpti_ActivityMemset, end, 24);
ASSERT_OFFSET(CUpti_ActivityMemset, deviceId, 32);
ASSERT_OFFSET(CUpti_ActivityMemset, contextId, 36);
ASSERT_OFFSET(CUpti_ActivityMemset, streamId, 40);
ASSERT_OFFSET(CUpti_ActivityMemset, correlationId, 44);
ASSERT_OFFSET(CUpti_ActivityMemset, graphNodeId, 64);

typedef void (*CUpti_CallbackFunc)(void *userdata, int domain, uint32_t cbid, const void *cbdata);
typedef void (*CUpti_BufferRequestFunc)(uint8_t **buffer, size_t *size, size_t *maxNumRecords);
typedef void (*CUpti_BufferCompleteFunc)(CUcontext context, uint32_t streamId, uint8_t *buffer, size_t size,
                                         size_t validSize);

/* X(field, function, parameter types) for every function that the recorder calls. */
#define CUPTI_FUNCTIONS(X) \
    X(get_version, cuptiGetVersion, (uint32_t *)) \
    X(result_string, cuptiGetResultString, (int, const char **)) \
    X(subscribe, cuptiSubscribe, (CUpti_SubscriberHandle *, CUpti_CallbackFunc, void *)) \
    X(unsubscribe, cuptiUnsubscribe, (CUpti_SubscriberHandle)) \
    X(enable_callback, cuptiEnableCallback, (uint32_t, CUpti_SubscriberHandle, int, uint32_t)) \
    X(callback_name, cuptiGetCallbackName, (int, uint32_t, const char **)) \
    X(activity_enable, cuptiActivityEnable, (int)) \
    X(activity_disable, cuptiActivityDisable, (int)) \
    X(set_attribute, cuptiActivitySetAttribute, (int, size_t *, void *)) \
    X(register_buffers, cuptiActivityRegisterCallbacks, (CUpti_BufferRequestFunc, CUpti_BufferCompleteFunc)) \
    X(register_timestamp, cuptiActivityRegisterTimestampCallback, (uint64_t (*)(void))) \
    X(next_record, cuptiActivityGetNextRecord, (uint8_t *, size_t, CUpti_Activity **)) \
    X(dropped_records, cuptiActivityGetNumDroppedRecords, (CUcontext, uint32_t, size_t *)) \
    X(flush_all, cuptiActivityFlushAll, (uint32_t)) \
    X(context_id, cuptiGetContextId, (CUcontext, uint32_t *)) \
    X(device_id, cuptiGetDeviceId, (CUcontext, uint32_t *)) \
    X(graph_node_id, cuptiGetGraphNodeId, (CUgraphNode, uint64_t *))

typedef struct {
#define X(field, function, parameters) int(*field) parameters;
    CUPTI_FUNCTIONS(X)
#undef X
    /* The functions below are NULL in libraries of CUDA 12. */
    int (*subscribe_v2)(CUpti_SubscriberHandle *, CUpti_CallbackFunc, void *, CUpti_SubscriberParams *);
} cupti_functions;

/* The functions of the loaded library; valid after library_subscribe(). */
extern cupti_functions cupti;

/* Load the library at ``path`` and subscribe ``callback``. On failure return NULL and write the reason and a remedy
 * to ``error``. */
CUpti_SubscriberHandle library_subscribe(const char *path, CUpti_CallbackFunc callback, char *error,
                                         size_t error_bytes);

/* Write the failed call, the description of its result and a remedy to ``error``. */
void library_describe_error(const char *failed_call, int result, char *error, size_t error_bytes);

#endif
