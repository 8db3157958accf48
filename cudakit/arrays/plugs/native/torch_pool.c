/* Driver memory for PyTorch's MemPool: for each kind of memory, one C function that allocates and one that frees.
 *
 * cudakit.torch_pool() passes this library and the names of two functions to
 * torch.cuda.memory.CUDAPluggableAllocator. PyTorch calls the functions while it holds the lock of its allocator. No
 * Python code may run there: another thread may hold the GIL while it waits for this lock, which would be a
 * deadlock. Therefore the functions are in C and do not call the interpreter.
 *
 * The signatures are those of torch/csrc/cuda/CUDAPluggableAllocator.h. A failure returns NULL, which PyTorch treats
 * as out of memory. The driver is not linked but looked up, so that the library also loads on machines without a
 * GPU. The names and versions of its functions are those of the CUDA Driver API. */
#define Py_LIMITED_API 0x030B0000
#include <Python.h>

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORTED __attribute__((visibility("default")))

typedef uint64_t address; /* CUdeviceptr */
typedef void *handle;     /* CUcontext, CUstream */

enum { ATTACH_GLOBAL = 1 }; /* CU_MEM_ATTACH_GLOBAL */

/* X(name, parameters): the driver functions; each returns a CUresult, 0 for success. */
#define FUNCTIONS(X) \
    X(cuDeviceGet, (int *device, int ordinal)) \
    X(cuDevicePrimaryCtxRetain, (handle *context, int device)) \
    X(cuDevicePrimaryCtxRelease_v2, (int device)) \
    X(cuCtxPushCurrent_v2, (handle context)) \
    X(cuCtxPopCurrent_v2, (handle *context)) \
    X(cuMemAlloc_v2, (address *ptr, size_t size)) \
    X(cuMemAllocManaged, (address *ptr, size_t size, unsigned flags)) \
    X(cuMemAllocAsync, (address *ptr, size_t size, handle stream)) \
    X(cuMemFree_v2, (address ptr)) \
    X(cuMemFreeAsync, (address ptr, handle stream)) \
    X(cuStreamIsCapturing, (handle stream, int *status))

#define X(name, parameters) static int(*name) parameters;
FUNCTIONS(X)
#undef X

static bool driver_is_loaded;

static void load_driver(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!driver)
        return;
    driver_is_loaded = true;
#define X(name, parameters) \
    *(void **)&name = dlsym(driver, #name); \
    driver_is_loaded = driver_is_loaded && name;
    FUNCTIONS(X)
#undef X
}

/* Make the primary context of a device, which PyTorch uses, current in this thread. Return false if the driver is missing
 * or fails. */
static bool push_context(int ordinal, int *device)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    handle context;

    pthread_once(&once, load_driver);
    if (!driver_is_loaded || cuDeviceGet(device, ordinal) || cuDevicePrimaryCtxRetain(&context, *device))
        return false;
    if (!cuCtxPushCurrent_v2(context))
        return true;
    cuDevicePrimaryCtxRelease_v2(*device);
    return false;
}

static void pop_context(int device)
{
    handle context;

    cuCtxPopCurrent_v2(&context);
    cuDevicePrimaryCtxRelease_v2(device);
}

/* X(kind, call that allocates, call that frees) for each kind of memory. */
#define KINDS(X) \
    X(driver, cuMemAlloc_v2(&ptr, size), cuMemFree_v2((address)ptr)) \
    X(managed, cuMemAllocManaged(&ptr, size, ATTACH_GLOBAL), cuMemFree_v2((address)ptr)) \
    X(async, allocate_in_stream_order(&ptr, size, stream), free_in_stream_order((address)ptr, stream))

/* Allocate in stream order. Fails during a capture: the allocation would become part of the graph, but memory of
 * PyTorch's pools outlives the graph. */
static int allocate_in_stream_order(address *ptr, size_t size, handle stream)
{
    int is_capturing = 1;

    return cuStreamIsCapturing(stream, &is_capturing) || is_capturing || cuMemAllocAsync(ptr, size, stream);
}

/* Free in stream order, or with cuMemFree if the stream of the allocation was destroyed or is being captured. */
static int free_in_stream_order(address ptr, handle stream)
{
    int is_capturing = 1;

    if (!cuStreamIsCapturing(stream, &is_capturing) && !is_capturing && !cuMemFreeAsync(ptr, stream))
        return 0;
    return cuMemFree_v2(ptr);
}

#define X(kind, allocate, release) \
    EXPORTED void *cudakit_##kind##_alloc(ptrdiff_t size, int ordinal, handle stream) \
    { \
        address ptr = 0; \
        int device; \
        (void)stream; \
        if (size <= 0 || !push_context(ordinal, &device)) \
            return NULL; \
        if (allocate) \
            ptr = 0; \
        pop_context(device); \
        return (void *)ptr; \
    } \
    EXPORTED void cudakit_##kind##_free(void *ptr, size_t size, int ordinal, handle stream) \
    { \
        int device; \
        (void)size, (void)stream; \
        if (!ptr || !push_context(ordinal, &device)) \
            return; \
        release; \
        pop_context(device); \
    }
KINDS(X)
#undef X

/* The module has no slots, because the limited API of 3.11 has no Py_mod_gil. */
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_torch_pool",
    .m_doc = "C functions for PyTorch, none of them for Python.",
};

PyMODINIT_FUNC PyInit__torch_pool(void)
{
    return PyModuleDef_Init(&MODULE);
}
