/* The part of the fake Sanitizer API that patches and allocates, and streams that can defer their work, so
 * that events happen in the order of a real device. Kernels run the device patch, built for the host. */
#define _GNU_SOURCE
#include "fake_device.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "patch_on_host.h"

int ck_memory_access(ck_u64, ck_u64, ck_u64, ck_u32, ck_u32, const void *);
int ck_tensor_load(ck_u64, ck_u64, ck_u64, ck_u32, ck_u32, ck_u32, ck_u32, ck_u32, ck_u32, ck_u32, ck_u32, ck_u32,
                   ck_u32, ck_u32);

/* --- streams --------------------------------------------------------------------------------------- */

enum { MOST_STREAMS = 1024, MOST_WORK = 4096, MOST_MODULES = 16 };

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
    bool holds;
    work *held;
    size_t count;
} streams[MOST_STREAMS];
static size_t stream_count;
static pthread_mutex_t device = PTHREAD_MUTEX_INITIALIZER;

static size_t number_of(Sanitizer_StreamHandle handle)
{
    for (size_t i = 0; i < stream_count; i++)
        if (streams[i].handle == handle)
            return i;
    streams[stream_count].handle = handle;
    return stream_count++;
}

static void set(void *memory, int value, size_t bytes)
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
static uint64_t touch_in_warps(const fake_launch *of, const touch *all)
{
    uint64_t i = 0;
    for (; all->flags && all->stride == all->bytes && i + LANES <= all->count; i += LANES) {
        together warp = {.userdata = of->user_data, .lanes = ~0u, .bytes = all->bytes, .flags = all->flags};
        for (uint64_t lane = 0; lane < LANES; lane++)
            warp.address[lane] = all->address + (i + lane) * all->stride;
        access_together(&warp);
    }
    return i;
}

static void touch_all(const fake_launch *of, const touch *all)
{
    for (uint64_t i = touch_in_warps(of, all); i < all->count; i++)
        if (all->flags)
            ck_memory_access(of->user_data, 0, all->address + i * all->stride, all->bytes, all->flags, NULL);
        else
            ck_tensor_load(of->user_data, 0, all->address, 0, 0, 0, 0, 0, 0, 0, 2, 0, 0, 0);
}

static void run(const work *one)
{
    if (one->function) {
        one->function(one->memory);
        return;
    }
    if (one->memory) {
        set(one->memory, one->value, one->bytes);
        return;
    }
    set_grid(one->launch.grid);
    for (uint32_t i = 0; i < one->count; i++)
        touch_all(&one->launch, one->touches + i);
}

static void enqueue(Sanitizer_StreamHandle handle, work one)
{
    size_t i = number_of(handle);
    if (!streams[i].holds) {
        run(&one);
        return;
    }
    if (one.count) {
        touch *copied = malloc(one.count * sizeof *copied);
        one.touches = memcpy(copied, one.touches, one.count * sizeof *copied);
    }
    if (!streams[i].held)
        streams[i].held = malloc(MOST_WORK * sizeof one);
    streams[i].held[streams[i].count++] = one;
}

void device_drain(Sanitizer_StreamHandle handle)
{
    pthread_mutex_lock(&device);
    for (size_t i = 0; i < stream_count; i++) {
        if (handle &&streams[i].handle != handle)
            continue;
        for (size_t j = 0; j < streams[i].count; j++)
            run(streams[i].held + j);
        streams[i].count = 0;
    }
    pthread_mutex_unlock(&device);
}

int cuLaunchHostFunc(CUstream stream, void (*function)(void *), void *data)
{
    pthread_mutex_lock(&device);
    enqueue(stream, (work){.function = function, .memory = data});
    pthread_mutex_unlock(&device);
    return 0;
}

/* Defer the work of a stream until it is waited for; run it again at once. */
void hold(void *stream)
{
    pthread_mutex_lock(&device);
    streams[number_of(stream)].holds = true;
    pthread_mutex_unlock(&device);
}

void device_forget(Sanitizer_StreamHandle handle)
{
    pthread_mutex_lock(&device);
    size_t i = number_of(handle);
    streams[i].handle = streams + i;
    pthread_mutex_unlock(&device);
}

void resume(void *stream) /* NULL: all streams */
{
    device_drain(stream);
    pthread_mutex_lock(&device);
    for (size_t i = 0; i < stream_count; i++)
        if (!stream || streams[i].handle == stream)
            streams[i].holds = false;
    pthread_mutex_unlock(&device);
}

/* --- patches ---------------------------------------------------------------------------------------- */

static CUmodule modules[MOST_MODULES];
static size_t module_count;
int patches_refused, memory_refused; /* set by tests */
int times_unset;                     /* number of launches in a patched context without user data */
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
        __atomic_fetch_add(&times_unset, 1, __ATOMIC_RELAXED);
    if (!is_patched(launch->module))
        return;
    if (!launch->is_set) {
        fprintf(stderr, "a patched kernel without user data\n");
        abort();
    }
    pthread_mutex_lock(&device);
    enqueue(stream, (work){.launch = *launch, .touches = (touch *)touches, .count = count});
    pthread_mutex_unlock(&device);
}

int sanitizerAddPatches(const void *image, CUcontext context)
{
    (void)image, (void)context;
    has_patch = true;
    return 0;
}

int sanitizerPatchInstructions(int instruction, CUmodule module, const char *called)
{
    (void)instruction, (void)module, (void)called;
    return patches_refused;
}

int sanitizerPatchModule(CUmodule module)
{
    if (!is_patched(module))
        modules[module_count++] = module;
    return 0;
}

int sanitizerSetLaunchCallbackData(Sanitizer_LaunchHandle launch, CUfunction function,
                                   Sanitizer_StreamHandle stream, const void *data)
{
    fake_launch *of = launch;
    (void)function, (void)stream;
    if (!of)
        return 1;
    of->user_data = (uintptr_t)data;
    of->is_set = true;
    return 0;
}

/* --- memory ----------------------------------------------------------------------------------------- */

static size_t allocated;

size_t device_allocated(void)
{
    return __atomic_load_n(&allocated, __ATOMIC_RELAXED);
}

int sanitizerAlloc(CUcontext context, void **memory, size_t bytes)
{
    (void)context;
    if (memory_refused)
        return 2;
    const int how = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    size_t *begin = mmap(NULL, bytes + 4096, PROT_READ | PROT_WRITE, how, -1, 0);
    if (begin == MAP_FAILED)
        return 2;
    *begin = bytes + 4096;
    __atomic_add_fetch(&allocated, bytes, __ATOMIC_RELAXED);
    *memory = (char *)begin + 4096;
    return 0;
}

int sanitizerFree(CUcontext context, void *memory)
{
    size_t *begin = (size_t *)((char *)memory - 4096);
    (void)context;
    __atomic_sub_fetch(&allocated, *begin - 4096, __ATOMIC_RELAXED);
    return munmap(begin, *begin);
}

int sanitizerMemset(void *memory, int value, size_t bytes, Sanitizer_StreamHandle stream)
{
    pthread_mutex_lock(&device);
    enqueue(stream, (work){.memory = memory, .value = value, .bytes = bytes});
    pthread_mutex_unlock(&device);
    return 0;
}

int sanitizerMemcpyDeviceToHost(void *to, void *from, size_t bytes, Sanitizer_StreamHandle stream)
{
    (void)stream;
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
