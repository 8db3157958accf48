/* The parts of the CUDA driver API that the recorder uses: callback ids, parameter structs, and functions.
 *
 * A callback passes the parameters of a driver function as a struct, in their order. Callback ids are the same in
 * every release (cuda.h, and sanitizer_driver_cbid.h of the Sanitizer API). Fields have their names in cuda.h.
 */
#ifndef CK_DRIVER_API_H
#define CK_DRIVER_API_H

#include <stddef.h>
#include <stdint.h>

#include "vendor/sanitizer_api.h"

/* X(name, callback id) for every driver function whose calls are subscribed. */
#define SUBSCRIBED_FUNCTIONS(X) \
    X(cuEventQuery, 120) \
    X(cuEventElapsedTime, 123) \
    X(cuEventElapsedTime_v2, 780) \
    X(cuStreamCreate, 124) \
    X(cuStreamCreateWithPriority, 367) \
    X(cuGreenCtxStreamCreate, 758) \
    X(cuGraphLaunch, 514) \
    X(cuGraphLaunch_ptsz, 515) \
    X(cuLaunchKernel, 307) \
    X(cuLaunchKernel_ptsz, 442) \
    X(cuLaunchKernelEx, 652) \
    X(cuLaunchKernelEx_ptsz, 653) \
    X(cuLaunchCooperativeKernel, 477) \
    X(cuLaunchCooperativeKernel_ptsz, 478) \
    X(cuMemcpyAsync, 306) \
    X(cuMemcpyAsync_ptsz, 418) \
    X(cuMemcpyHtoDAsync_v2, 277) \
    X(cuMemcpyHtoDAsync_v2_ptsz, 421) \
    X(cuMemcpyDtoHAsync_v2, 279) \
    X(cuMemcpyDtoHAsync_v2_ptsz, 422) \
    X(cuMemcpyDtoDAsync_v2, 281) \
    X(cuMemcpyDtoDAsync_v2_ptsz, 423) \
    X(cuMemsetD8Async, 216) \
    X(cuMemsetD8Async_ptsz, 428) \
    X(cuMemsetD16Async, 218) \
    X(cuMemsetD16Async_ptsz, 429) \
    X(cuMemsetD32Async, 220) \
    X(cuMemsetD32Async_ptsz, 430) \
    X(cuMemcpy3D_v2, 290) \
    X(cuMemcpy3D_v2_ptds, 407) \
    X(cuMemcpy3DAsync_v2, 291) \
    X(cuMemcpy3DAsync_v2_ptsz, 425) \
    X(cuStreamBeginCapture, 495) \
    X(cuStreamBeginCapture_ptsz, 496) \
    X(cuStreamBeginCapture_v2, 539) \
    X(cuStreamBeginCapture_v2_ptsz, 540) \
    X(cuStreamBeginCaptureToGraph, 720) \
    X(cuStreamBeginCaptureToGraph_ptsz, 721) \
    X(cuStreamEndCapture, 497) \
    X(cuStreamEndCapture_ptsz, 498) \
    X(cuGraphInstantiate, 513) \
    X(cuGraphInstantiate_v2, 578) \
    X(cuGraphInstantiateWithFlags, 643) \
    X(cuGraphInstantiateWithParams, 656) \
    X(cuGraphInstantiateWithParams_ptsz, 657) \
    X(cuGraphExecUpdate, 561) \
    X(cuGraphExecUpdate_v2, 696) \
    X(cuGraphExecKernelNodeSetParams, 538) \
    X(cuGraphExecKernelNodeSetParams_v2, 692) \
    X(cuGraphExecMemcpyNodeSetParams, 562) \
    X(cuGraphExecMemsetNodeSetParams, 563) \
    X(cuGraphExecChildGraphNodeSetParams, 586) \
    X(cuGraphExecNodeSetParams, 714) \
    X(cuGraphNodeSetEnabled, 650) \
    X(cuGraphLaunchWithArguments, 819) \
    X(cuLaunchHostFunc, 527) \
    X(cuLaunchHostFunc_ptsz, 528) \
    X(cuLaunchHostFunc_v2, 831) \
    X(cuLaunchHostFunc_v2_ptsz, 832) \
    X(cuStreamAddCallback, 346) \
    X(cuStreamAddCallback_ptsz, 437) \
    X(cuModuleUnload, 22) \
    X(cuLibraryUnload, 680) \
    X(cuMulticastCreate, 706) \
    X(cuMulticastAddDevice, 707) \
    X(cuMulticastBindMem, 708) \
    X(cuMulticastBindMem_v2, 820) \
    X(cuMulticastBindAddr, 709) \
    X(cuMulticastBindAddr_v2, 821) \
    X(cuIpcOpenEventHandle, 335) \
    X(cuSignalExternalSemaphoresAsync, 490) \
    X(cuSignalExternalSemaphoresAsync_ptsz, 491) \
    X(cuWaitExternalSemaphoresAsync, 492) \
    X(cuWaitExternalSemaphoresAsync_ptsz, 493)

enum {
#define X(name, number) CBID_##name = number,
    SUBSCRIBED_FUNCTIONS(X)
#undef X
};

#define STREAM_NON_BLOCKING 1                  /* CU_STREAM_NON_BLOCKING */
#define STREAM_PER_THREAD_HANDLE ((CUstream)2) /* CU_STREAM_PER_THREAD */

/* --- parameters ---------------------------------------------------------------------------------- */

typedef struct {
    CUfunction f;
    uint32_t grid[3], block[3], sharedMemBytes;
    CUstream hStream;
    void **kernelParams;
    void **extra; /* absent in cuLaunchCooperativeKernel */
} launch_params;

typedef struct {
    uint32_t grid[3], block[3], sharedMemBytes;
    CUstream hStream;
} launch_config;

typedef struct {
    const launch_config *config;
    CUfunction f;
    void **kernelParams;
    void **extra;
} launch_ex_params;

typedef struct { /* parameters of 1D copies and memsets: three words, then the stream */
    uint64_t words[3];
    CUstream hStream;
} linear_copy_params;

typedef struct {
    CUstream *phStream;
    uint32_t flags;
    int32_t priority;
} stream_create_params;

typedef struct {
    CUstream *phStream;
    CUgreenCtx greenCtx;
    uint32_t flags;
    int32_t priority;
} green_stream_create_params;

typedef struct {
    float *pMilliseconds;
    CUevent hStart, hEnd;
} event_elapsed_params;

typedef struct { /* the first parameters of cuGraphInstantiate and its variants */
    CUgraphExec *phGraphExec;
    CUgraph hGraph;
} instantiate_params;

typedef struct { /* the first parameters of functions that change an executable graph */
    CUgraphExec hGraphExec;
    void *second_parameter; /* for cuGraphExecUpdate, the graph */
} graph_exec_params;

typedef struct { /* cuGraphExec*NodeSetParams */
    CUgraphExec hGraphExec;
    CUgraphNode hNode;
    void *parameters; /* for cuGraphExecChildGraphNodeSetParams, the child graph */
} node_set_params;

/* --- graph nodes ------------------------------------------------------------------------ */

/* CUgraphNodeType */
enum {
    NODE_KERNEL = 0,
    NODE_MEMCPY = 1,
    NODE_MEMSET = 2,
    NODE_HOST = 3,
    NODE_GRAPH = 4,
    NODE_EMPTY = 5,
    NODE_WAIT_EVENT = 6,
    NODE_EVENT_RECORD = 7,
    NODE_MEM_ALLOC = 10,
    NODE_MEM_FREE = 11,
    NODE_BATCH_MEM_OP = 12,
    NODE_CONDITIONAL = 13,
};

typedef struct { /* CUDA_KERNEL_NODE_PARAMS_v2 */
    CUfunction func;
    uint32_t grid[3], block[3], sharedMemBytes;
    void **kernelParams;
    void **extra;
    void *kern;
    CUcontext ctx;
} kernel_node_params;

enum { MEMORY_HOST = 1, MEMORY_DEVICE = 2, MEMORY_ARRAY = 3 }; /* CUmemorytype */

typedef struct { /* source or destination in CUDA_MEMCPY3D_v2 */
    size_t x, y, z, lod;
    uint32_t type;
    const void *host;
    uint64_t device;
    void *array;
    void *reserved;
    size_t pitch, height;
} memcpy3d_operand;

typedef struct { /* CUDA_MEMCPY3D_v2 */
    memcpy3d_operand src, dst;
    size_t width, height, depth;
} memcpy3d_params;

typedef struct { /* CUDA_MEMSET_NODE_PARAMS */
    uint64_t dst;
    size_t pitch;
    uint32_t value, elementSize;
    size_t width, height;
} memset_node_params;

typedef struct { /* CUgraphNodeParams */
    int type, reserved[3];
    union {
        kernel_node_params kernel;
        struct { /* CUDA_MEMCPY_NODE_PARAMS */
            int flags, reserved;
            CUcontext context;
            memcpy3d_params parameters;
        } copy;
        memset_node_params fill; /* the beginning of CUDA_MEMSET_NODE_PARAMS_v2 */
    };
} any_node_params;

typedef struct { /* CUDA_MEM_ALLOC_NODE_PARAMS */
    uint8_t poolProps[88];
    const void *accessDescs;
    size_t accessDescCount;
    size_t bytesize;
    uint64_t dptr;
} alloc_node_params;

typedef struct { /* CUgraphEdgeData */
    uint8_t from_port, to_port, type, reserved[5];
} edge_data;

/* CUdevice_attribute */
enum { COMPUTE_CAPABILITY_MAJOR = 75, COMPUTE_CAPABILITY_MINOR = 76 };

/* X(name, parameter types) for every driver function that the recorder calls. */
#define CALLED_FUNCTIONS(X) \
    X(cuFuncGetParamInfo, (CUfunction, size_t, size_t *, size_t *)) \
    X(cuKernelGetParamInfo, (void *, size_t, size_t *, size_t *)) \
    X(cuFuncGetName, (const char **, CUfunction)) \
    X(cuKernelGetName, (const char **, void *)) \
    X(cuGraphGetNodes, (CUgraph, CUgraphNode *, size_t *)) \
    X(cuGraphGetEdges_v2, (CUgraph, CUgraphNode *, CUgraphNode *, edge_data *, size_t *)) \
    X(cuGraphNodeGetType, (CUgraphNode, int *)) \
    X(cuGraphKernelNodeGetParams_v2, (CUgraphNode, kernel_node_params *)) \
    X(cuGraphMemcpyNodeGetParams, (CUgraphNode, memcpy3d_params *)) \
    X(cuGraphMemsetNodeGetParams, (CUgraphNode, memset_node_params *)) \
    X(cuGraphMemAllocNodeGetParams, (CUgraphNode, alloc_node_params *)) \
    X(cuGraphMemFreeNodeGetParams, (CUgraphNode, uint64_t *)) \
    X(cuGraphChildGraphNodeGetGraph, (CUgraphNode, CUgraph *)) \
    X(cuDeviceGetAttribute, (int *, int, CUdevice)) \
    X(cuMemGetInfo_v2, (size_t *, size_t *)) \
    X(cuStreamCreate, (CUstream *, unsigned)) \
    X(cuStreamDestroy_v2, (CUstream)) \
    X(cuLaunchHostFunc, (CUstream, void (*)(void *), void *)) \
    X(cuStreamGetCaptureInfo_v3, \
      (CUstream, int *, uint64_t *, CUgraph *, const CUgraphNode **, const edge_data **, size_t *)) \
    X(cuEventCreate, (CUevent *, unsigned)) \
    X(cuEventQuery, (CUevent))

/* The same for functions that older drivers lack: cuCtxRecordEvent is new in CUDA 12.5. */
#define OPTIONAL_FUNCTIONS(X) X(cuCtxRecordEvent, (CUcontext, CUevent))

#define EVENT_DISABLE_TIMING 2 /* CU_EVENT_DISABLE_TIMING */

typedef struct {
#define X(name, parameters) int(*name) parameters;
    CALLED_FUNCTIONS(X)
    OPTIONAL_FUNCTIONS(X)
#undef X
} driver_functions;

/* Return the functions of the loaded driver, or NULL if a function is missing. Optional functions may be NULL. */
const driver_functions *driver_api(void);

#endif
