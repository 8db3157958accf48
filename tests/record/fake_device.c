/* The part of the fake Sanitizer API that patches and allocates, and streams that can defer their work, so
 * that events happen in the order of a real device. Kernels run the device patch, built for the host. */
#define _GNU_SOURCE
#include "fake_device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "patch_on_host.h"

int ck_memory_access(ck_u64, ck_u64, ck_u64, ck_u32, ck_u32, const void *);
int ck_tensor_load(ck_u64, ck_u64, ck_u64, ck_u32, ck_u32, ck_u32, ck_u32, ck_u32, ck_u32, ck_u32, ck_u32, ck_u32,
                   ck_u32, ck_u32);

/* --- streams --------------------------------------------------------------------------------------- */

enum { MAX_STREAMS = 1024, MAX_WORK = 4096, MAX_MODULES = 16 };

typedef struct {
    fake_launch launch;
    touch *touches;
    uint32_t count;
    void (*function)(void *); /* host function, called with ``memory``; NULL: none */
    void *memory;             /* NULL: a kernel; otherwise the memory to set */
    int value;
    size_t bytes;
} work;

static struct {
    Sanitizer_StreamHandle handle;
    bool defers, defers_functions;
    work *deferred;
    size_t count;
} streams[MAX_STREAMS];
static size_t stream_count;
static pthread_mutex_t device_lock = PTHREAD_MUTEX_INITIALIZER;

/* Return the index of a stream. A new stream gets the place of a destroyed one without work, or the next place. */
static size_t stream_index(Sanitizer_StreamHandle handle)
{
    size_t unused = stream_count;
    for (size_t i = stream_count; i-- > 0;) {
        if (streams[i].handle == handle)
            return i;
        if (streams[i].handle == streams + i && !streams[i].count)
            unused = i;
    }
    if (unused == stream_count)
        stream_count++;
    streams[unused].handle = handle;
    streams[unused].defers = streams[unused].defers_functions = false;
    return unused;
}

static void set_memory(void *memory, int value, size_t bytes)
{
    const size_t page = 4096, begin = (page - (uintptr_t)memory % page) % page;
    if (!value && bytes > 16 * page) { /* mostly untouched memory */
        const size_t inner = (bytes - begin) / page * page;
        madvise((char *)memory + begin, inner, MADV_DONTNEED);
        memset(memory, 0, begin);
        memset((char *)memory + begin + inner, 0, bytes - begin - inner);
    } else {
        memset(memory, value, bytes);
    }
}

/* Access memory in whole warps whose lanes are consecutive. Return the number of accesses. */
static uint64_t touch_in_warps(const fake_launch *target, const touch *accesses)
{
    uint64_t i = 0;
    for (; accesses->flags && accesses->stride == accesses->bytes && i + LANES <= accesses->count; i += LANES) {
        warp_access warp = {
            .userdata = target->user_data, .lanes = ~0u, .bytes = accesses->bytes, .flags = accesses->flags};
        for (uint64_t lane = 0; lane < LANES; lane++)
            warp.address[lane] = accesses->address + (i + lane) * accesses->stride;
        access_in_warp(&warp);
    }
    return i;
}

static void touch_all(const fake_launch *target, const touch *accesses)
{
    for (uint64_t i = touch_in_warps(target, accesses); i < accesses->count; i++)
        if (accesses->flags)
            ck_memory_access(target->user_data, 0, accesses->address + i * accesses->stride, accesses->bytes,
                             accesses->flags, NULL);
        else
            ck_tensor_load(target->user_data, 0, accesses->address, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0);
}

static void run_work(const work *item)
{
    if (item->function) {
        item->function(item->memory);
        return;
    }
    if (item->memory) {
        set_memory(item->memory, item->value, item->bytes);
        return;
    }
    set_grid_id(item->launch.grid);
    for (uint32_t i = 0; i < item->count; i++)
        touch_all(&item->launch, item->touches + i);
}

static void enqueue(Sanitizer_StreamHandle handle, work item)
{
    size_t i = stream_index(handle);
    if (!streams[i].defers && !(streams[i].defers_functions && item.function)) {
        run_work(&item);
        return;
    }
    if (item.count) {
        touch *copied = malloc(item.count * sizeof *copied);
        item.touches = memcpy(copied, item.touches, item.count * sizeof *copied);
    }
    if (!streams[i].deferred)
        streams[i].deferred = malloc(MAX_WORK * sizeof item);
    streams[i].deferred[streams[i].count++] = item;
}

void device_drain(Sanitizer_StreamHandle handle)
{
    pthread_mutex_lock(&device_lock);
    for (size_t i = 0; i < stream_count; i++) {
        if (handle &&streams[i].handle != handle)
            continue;
        for (size_t j = 0; j < streams[i].count; j++)
            run_work(streams[i].deferred + j);
        streams[i].count = 0;
    }
    pthread_mutex_unlock(&device_lock);
}

bool device_is_busy(void)
{
    bool is_busy = false;
    pthread_mutex_lock(&device_lock);
    for (size_t i = 0; i < stream_count; i++)
        is_busy = is_busy || streams[i].count;
    pthread_mutex_unlock(&device_lock);
    return is_busy;
}

int cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *data)
{
    pthread_mutex_lock(&device_lock);
    enqueue(stream, (work){.function = function, .memory = data});
    pthread_mutex_unlock(&device_lock);
    return 0;
}

/* Defer the work of a stream until it is waited for; run it again at once. */
void defer_work(void *stream)
{
    pthread_mutex_lock(&device_lock);
    streams[stream_index(stream)].defers = true;
    pthread_mutex_unlock(&device_lock);
}

/* Defer the host functions of a stream until it is waited for or run_next_host_function() runs them. Later kernels
 * run at once, unlike on a real device, so that the recorder reads their accesses at once. */
void defer_host_functions(void *stream)
{
    pthread_mutex_lock(&device_lock);
    streams[stream_index(stream)].defers_functions = true;
    pthread_mutex_unlock(&device_lock);
}

void device_destroy_stream(Sanitizer_StreamHandle handle)
{
    pthread_mutex_lock(&device_lock);
    size_t i = stream_index(handle);
    streams[i].handle = streams + i;
    pthread_mutex_unlock(&device_lock);
}

/* Run the deferred work of a stream, or of all streams if it is NULL, and defer no later work. */
void stop_deferring(void *stream)
{
    device_drain(stream);
    pthread_mutex_lock(&device_lock);
    for (size_t i = 0; i < stream_count; i++)
        if (!stream || streams[i].handle == stream)
            streams[i].defers = false;
    pthread_mutex_unlock(&device_lock);
}

/* Run the deferred work of a stream up to its next host function, and this function. */
void run_next_host_function(void *stream)
{
    pthread_mutex_lock(&device_lock);
    const size_t i = stream_index(stream);
    size_t done = 0;
    while (done < streams[i].count && !streams[i].deferred[done].function)
        run_work(streams[i].deferred + done++);
    if (done < streams[i].count)
        run_work(streams[i].deferred + done++);
    streams[i].count -= done;
    if (done)
        memmove(streams[i].deferred, streams[i].deferred + done, streams[i].count * sizeof *streams[i].deferred);
    pthread_mutex_unlock(&device_lock);
}

/* --- patches ---------------------------------------------------------------------------------------- */

static CUmodule modules[MAX_MODULES];
static size_t module_count;
/* Results of calls that are refused; 0: no refusal. Set by tests. */
int refuse_patches, refuse_unpatching, refuse_memory;
int launches_without_user_data; /* number of launches in a patched context without user data */
static bool has_patch;

static bool is_patched(CUmodule module)
{
    for (size_t i = 0; i < module_count; i++)
        if (modules[i] == module)
            return true;
    return false;
}

void device_launch(Sanitizer_StreamHandle stream, const fake_launch *launch, const touch *touches, uint32_t count)
{
    if (has_patch && !launch->is_set)
        __atomic_fetch_add(&launches_without_user_data, 1, __ATOMIC_RELAXED);
    if (!is_patched(launch->module))
        return;
    if (!launch->is_set) {
        fprintf(stderr, "a patched kernel without user data\n");
        abort();
    }
    pthread_mutex_lock(&device_lock);
    enqueue(stream, (work){.launch = *launch, .touches = (touch *)touches, .count = count});
    pthread_mutex_unlock(&device_lock);
}

int sanitizerAddPatches(const void *image, CUcontext context)
{
    (void)image, (void)context;
    has_patch = true;
    return 0;
}

int sanitizerPatchInstructions(int instruction, CUmodule module, const char *callback)
{
    (void)instruction, (void)module, (void)callback;
    return refuse_patches;
}

int sanitizerPatchModule(CUmodule module)
{
    if (!is_patched(module))
        modules[module_count++] = module;
    return 0;
}

/* Return the number of modules that are patched now. */
size_t patched_modules(void)
{
    return module_count;
}

int sanitizerUnpatchModule(CUmodule module)
{
    if (refuse_unpatching)
        return refuse_unpatching;
    for (size_t i = 0; i < module_count; i++)
        if (modules[i] == module)
            modules[i] = modules[--module_count];
    return 0;
}

int sanitizerSetLaunchCallbackData(Sanitizer_LaunchHandle launch, CUfunction function,
                                   Sanitizer_StreamHandle stream, const void *data)
{
    fake_launch *target = launch;
    (void)function, (void)stream;
    if (!target)
        return 1;
    target->user_data = (uintptr_t)data;
    target->is_set = true;
    return 0;
}

/* --- memory ----------------------------------------------------------------------------------------- */

static size_t allocated_bytes;

size_t device_allocated_bytes(void)
{
    return __atomic_load_n(&allocated_bytes, __ATOMIC_RELAXED);
}

int sanitizerAlloc(CUcontext context, void **memory, size_t bytes)
{
    (void)context;
    if (refuse_memory)
        return 2;
    const int map_flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size_t *begin = mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE, map_flags, -1, 0);
    if (begin == MAP_FAILED)
        return 2;
    *begin = bytes + 4096;
    __atomic_add_fetch(&allocated_bytes, bytes, __ATOMIC_RELAXED);
    *memory = (char *)begin + 4096;
    return 0;
}

int sanitizerFree(CUcontext context, void *memory)
{
    size_t *begin = (size_t *)((char *)memory - 4096);
    (void)context;
    __atomic_sub_fetch(&allocated_bytes, *begin - 4096, __ATOMIC_RELAXED);
    return munmap(begin, *begin);
}

int sanitizerMemset(void *memory, int value, size_t bytes, Sanitizer_StreamHandle stream)
{
    pthread_mutex_lock(&device_lock);
    enqueue(stream, (work){.memory = memory, .value = value, .bytes = bytes});
    pthread_mutex_unlock(&device_lock);
    return 0;
}

int copy_duration_ms; /* duration of each copy from the device to the host; tests may change it */

int sanitizerMemcpyDeviceToHost(void *to, void *from, size_t bytes, Sanitizer_StreamHandle stream)
{
    (void)stream;
    if (copy_duration_ms)
        usleep((unsigned)copy_duration_ms * 1000);
    memcpy(to, from, bytes);
    return 0;
}

int sanitizerMemcpyHostToDeviceAsync(void *to, void *from, size_t bytes, Sanitizer_StreamHandle stream)
{
    (void)stream;
    memcpy(to, from, bytes);
    return 0;
}

int sanitizerStreamSynchronize(Sanitizer_StreamHandle stream)
{
    device_drain(stream);
    return 0;
}
