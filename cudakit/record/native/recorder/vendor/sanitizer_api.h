/* The parts of NVIDIA's Sanitizer API, release 13.4 and newer, that the recorder uses.
 *
 * They are declared here, so that no NVIDIA header is needed to build the recorder. ``offsets()`` in module.c returns
 * the offsets of the fields, and ``struct_layouts.py`` compares these with the headers of the installed library.
 * Structs and fields have their names in the API.
 */
#ifndef CK_SANITIZER_API_H
#define CK_SANITIZER_API_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef void *CUcontext, *CUstream, *CUevent, *CUmodule, *CUfunction, *CUgraph, *CUgraphExec;
typedef void *CUgraphNode, *CUmemoryPool, *CUgreenCtx;
typedef int CUdevice;
typedef void *Sanitizer_StreamHandle, *Sanitizer_LaunchHandle, *Sanitizer_SubscriberHandle;

/* Sanitizer_CallbackDomain */
enum {
    DOMAIN_DRIVER_API = 1,
    DOMAIN_RESOURCE = 3,
    DOMAIN_SYNCHRONIZE = 4,
    DOMAIN_LAUNCH = 5,
    DOMAIN_MEMCPY = 6,
    DOMAIN_MEMSET = 7,
    DOMAIN_BATCH_MEMOP = 8,
    DOMAIN_GRAPHS = 10,
    DOMAIN_EVENTS = 11,
};

/* Sanitizer_CallbackIdResource */
enum {
    RESOURCE_CONTEXT_CREATED = 3,
    RESOURCE_CONTEXT_DESTROYING = 4,
    RESOURCE_STREAM_CREATED = 6,
    RESOURCE_STREAM_DESTROYING = 7,
    RESOURCE_MODULE_LOADED = 9,
    RESOURCE_MODULE_UNLOADING = 10,
    RESOURCE_DEVICE_ALLOC = 11,
    RESOURCE_DEVICE_FREE = 12,
    RESOURCE_HOST_ALLOC = 13,
    RESOURCE_HOST_FREE = 14,
    RESOURCE_ALLOC_ASYNC = 15,
    RESOURCE_FREE_ASYNC = 16,
    RESOURCE_POOL_IMPORT = 28,
};

/* Sanitizer_ResourceMemoryFlags */
enum {
    MEMORY_MANAGED = 0x2,
};

/* Sanitizer_CallackIdSync */
enum {
    SYNC_STREAM = 1,
    SYNC_CONTEXT = 2,
    SYNC_GREEN_CONTEXT = 3,
};

enum { LAUNCH_BEGIN = 1, LAUNCH_END = 3 }; /* Sanitizer_CallbackIdLaunch */

/* Sanitizer_CallbackIdMemcpy */
enum {
    MEMCPY_STARTING = 1,
    MEMCPY_BATCH_ITEM_STARTING = 2,
};

/* Sanitizer_MemcpyDirection */
enum {
    MEMCPY_HOST_TO_HOST = 1,
    MEMCPY_HOST_TO_DEVICE = 2,
    MEMCPY_DEVICE_TO_HOST = 3,
    MEMCPY_DEVICE_TO_DEVICE = 4,
};

/* Sanitizer_CallbackIdBatchMemop */
enum {
    MEMOP_WRITE = 1,
    MEMOP_WAIT = 2,
    MEMOP_REDUCTION = 3,
};

/* Sanitizer_CallbackIdGraphs */
enum {
    GRAPHS_EXEC_CREATED = 2,
    GRAPHS_EXEC_DESTROYING = 3,
    GRAPHS_NODE_BEGIN = 4,
    GRAPHS_LAUNCH_BEGIN = 6,
    GRAPHS_LAUNCH_END = 7,
};

/* Sanitizer_CallbackIdEvents */
enum {
    EVENTS_CREATED = 1,
    EVENTS_DESTROYED = 2,
    EVENTS_RECORD = 3,
    EVENTS_STREAM_WAIT = 4,
    EVENTS_SYNCHRONIZE = 5,
};

typedef struct {
    int callbackSite; /* 0: entry of the call, 1: exit */
    const char *functionName;
    const void *functionParams;
    const void *functionReturnValue;
    const char *symbolName;
    CUcontext context;
} Sanitizer_CallbackData;

typedef struct {
    CUcontext context;
    CUgreenCtx greenContext;
    CUdevice device;
} Sanitizer_ResourceContextData;

typedef struct {
    CUcontext context;
    CUgreenCtx greenContext;
    CUstream stream;
    Sanitizer_StreamHandle hStream;
} Sanitizer_ResourceStreamData;

typedef struct {
    CUcontext context;
    CUmodule module;
    size_t cubinSize;
    const char *pCubin;
    void *library;
} Sanitizer_ResourceModuleData;

typedef struct {
    uint64_t address;
    uint64_t size;
    CUcontext context;
    CUdevice device;
    CUstream stream;
    Sanitizer_StreamHandle hStream;
    CUmemoryPool memoryPool;
    uint32_t flags;
    uint32_t permissions;
    int visibility;
    CUdevice sourceDevice;
} Sanitizer_ResourceMemoryData;

typedef struct {
    CUcontext context;
    CUstream stream;
    Sanitizer_StreamHandle hStream;
    CUgreenCtx greenContext;
} Sanitizer_SynchronizeData;

typedef struct {
    CUcontext context;
    CUstream stream;
    Sanitizer_StreamHandle hStream;
    CUmodule module;
    CUfunction function;
    const char *functionName;
    uint32_t gridDim_x, gridDim_y, gridDim_z;
    uint32_t blockDim_x, blockDim_y, blockDim_z;
    uint32_t clusterDim_x, clusterDim_y, clusterDim_z;
    uint64_t gridId;
    Sanitizer_LaunchHandle hLaunch;
    CUdevice device;
    CUcontext apiContext;
    CUstream apiStream;
    Sanitizer_StreamHandle hApiStream;
    uint32_t splitLaunchPart;
} Sanitizer_LaunchData;

typedef struct {
    CUcontext srcContext;
    CUcontext dstContext;
    CUstream srcStream;
    Sanitizer_StreamHandle hSrcStream;
    CUstream dstStream;
    Sanitizer_StreamHandle hDstStream;
    uint64_t srcAddress;
    uint64_t dstAddress;
    uint64_t size;
    uint64_t width;
    uint64_t height;
    uint64_t depth;
    uint64_t srcPitch;
    uint64_t dstPitch;
    uint32_t isAsync;
    int direction;
    CUcontext apiContext;
    CUstream apiStream;
    Sanitizer_StreamHandle hApiStream;
} Sanitizer_MemcpyData;

typedef struct {
    CUcontext context;
    CUstream stream;
    Sanitizer_StreamHandle hStream;
    uint64_t address;
    uint64_t width;
    uint64_t height;
    uint64_t pitch;
    uint32_t elementSize;
    uint32_t value;
    uint32_t isAsync;
} Sanitizer_MemsetData;

typedef struct {
    CUcontext context;
    CUstream stream;
    Sanitizer_StreamHandle hStream;
    uint64_t address;
    uint64_t value;
    int type;
    int atomicOperation;
} Sanitizer_BatchMemopData;

typedef struct {
    CUgraph graph;
    CUgraphExec graphExec;
    uint32_t isDeviceLaunch;
    uint32_t containsDeviceGraphLaunches;
    CUcontext deviceGraphLaunchesContext;
} Sanitizer_GraphExecData;

typedef struct {
    CUgraphExec graphExec;
    uint32_t launchId;
    CUgraphNode node;
    int nodeType;
    union { /* the API has further members, none of them larger */
        Sanitizer_LaunchData launchData;
        Sanitizer_MemcpyData memcpyData;
    };
    uint32_t isGraphUpload;
} Sanitizer_GraphNodeLaunchData;

typedef struct {
    CUcontext context;
    CUstream stream;
    Sanitizer_StreamHandle hStream;
    CUgraphExec graphExec;
    uint32_t isGraphUpload;
} Sanitizer_GraphLaunchData;

typedef struct {
    CUevent event;
    CUcontext context;
    CUgreenCtx greenCtx;
    CUstream stream;
    Sanitizer_StreamHandle hStream;
} Sanitizer_EventData;

typedef void (*Sanitizer_CallbackFunc)(void *userdata, int domain, uint32_t cbid, const void *cbdata);

/* The functions of the Sanitizer API that the recorder calls. */
typedef struct {
    int (*subscribe)(Sanitizer_SubscriberHandle *, Sanitizer_CallbackFunc, void *);
    int (*unsubscribe)(Sanitizer_SubscriberHandle);
    int (*enable_domain)(uint32_t, Sanitizer_SubscriberHandle, int);
    int (*enable_callback)(uint32_t, Sanitizer_SubscriberHandle, int, uint32_t);
    int (*stream_handle)(CUcontext, CUstream, Sanitizer_StreamHandle *);
    int (*result_string)(int, const char **);
    int (*add_patches)(const void *, CUcontext);
    int (*patch_instructions)(int, CUmodule, const char *);
    int (*patch_module)(CUmodule);
    int (*unpatch_module)(CUmodule);
    int (*set_launch_data)(Sanitizer_LaunchHandle, CUfunction, Sanitizer_StreamHandle, const void *);
    int (*alloc)(CUcontext, void **, size_t);
    int (*free)(CUcontext, void *);
    int (*memset)(void *, int, size_t, Sanitizer_StreamHandle);
    int (*copy_to_host)(void *, void *, size_t, Sanitizer_StreamHandle);
    int (*copy_to_device)(void *, void *, size_t, Sanitizer_StreamHandle);
    int (*stream_synchronize)(Sanitizer_StreamHandle);
} sanitizer_api;

/* The functions of the loaded library; valid after sanitizer_load(). */
extern sanitizer_api sanitizer;

/* Load the library and look up its functions. On failure return false and write the reason to ``error``. */
bool sanitizer_load(const char *path, char *error, size_t error_bytes);

#endif
