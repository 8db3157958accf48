/* Memory straight from the driver, as torch's MemPool takes it: two C functions for each kind.
 *
 * They run inside the lock of torch's allocator, where no Python may: whoever waits for that lock may hold the
 * interpreter's. The signatures are those of torch/csrc/cuda/CUDAPluggableAllocator.h; what fails is NULL, which
 * torch takes for out of memory. Names and versions of functions are those of the CUDA Driver API.
 */
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

/* X(name, parameters): what is called of the driver; each returns a CUresult, 0 for success. */
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

static bool found;

static void look_up(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    if (!driver)
        return;
    found = true;
#define X(name, parameters) \
    *(void **)&name = dlsym(driver, #name); \
    found = found && name;
    FUNCTIONS(X)
#undef X
}

/* Make the primary context of a device, which is torch's, the current one of this thread. */
static bool enter(int ordinal, int *device)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    handle context;

    pthread_once(&once, look_up);
    if (!found || cuDeviceGet(device, ordinal) || cuDevicePrimaryCtxRetain(&context, *device))
        return false;
    if (!cuCtxPushCurrent_v2(context))
        return true;
    cuDevicePrimaryCtxRelease_v2(*device);
    return false;
}

static void leave(int device)
{
    handle context;

    cuCtxPopCurrent_v2(&context);
    cuDevicePrimaryCtxRelease_v2(device);
}

/* X(kind, how to allocate, how to free): what of the driver a kind of memory is. */
#define KINDS(X) \
    X(driver, cuMemAlloc_v2(&ptr, size), cuMemFree_v2((address)ptr)) \
    X(managed, cuMemAllocManaged(&ptr, size, ATTACH_GLOBAL), cuMemFree_v2((address)ptr)) \
    X(async, allocate_in_order(&ptr, size, stream), free_in_order((address)ptr, stream))

/* A capture would make it part of the graph, and torch's pools outlive that. */
static int allocate_in_order(address *ptr, size_t size, handle stream)
{
    int capturing = 1;

    return cuStreamIsCapturing(stream, &capturing) || capturing || cuMemAllocAsync(ptr, size, stream);
}

/* The stream may be gone since. */
static int free_in_order(address ptr, handle stream)
{
    int capturing = 1;

    if (!cuStreamIsCapturing(stream, &capturing) && !capturing && !cuMemFreeAsync(ptr, stream))
        return 0;
    return cuMemFree_v2(ptr);
}

#define X(kind, allocate, release) \
    EXPORTED void *cudakit_##kind##_alloc(ptrdiff_t size, int ordinal, handle stream) \
    { \
        address ptr = 0; \
        int device; \
        (void)stream; \
        if (size <= 0 || !enter(ordinal, &device)) \
            return NULL; \
        if (allocate) \
            ptr = 0; \
        leave(device); \
        return (void *)ptr; \
    } \
    EXPORTED void cudakit_##kind##_free(void *ptr, size_t size, int ordinal, handle stream) \
    { \
        int device; \
        (void)size, (void)stream; \
        if (!ptr || !enter(ordinal, &device)) \
            return; \
        release; \
        leave(device); \
    }
KINDS(X)
#undef X

/* No slots: the limited API of 3.11 has neither Py_mod_gil nor Py_mod_multiple_interpreters. */
static struct PyModuleDef MODULE = {
    PyModuleDef_HEAD_INIT,
    .m_name = "_native",
    .m_doc = "C functions that torch calls; there is nothing for Python in it.",
};

PyMODINIT_FUNC PyInit__native(void)
{
    return PyModuleDef_Init(&MODULE);
}
