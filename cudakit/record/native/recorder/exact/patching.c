#include "exact/patching.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "exact/arena_pool.h"
#include "exact/module_switch.h"
#include "hooks/driver_api.h"
#include "model/collectives.h"
#include "recorder.h"

#define MAX_PATCHES 16
#define MAX_CONTEXTS 64
#define LOCK_WAIT_LIMIT_NS 20000000
/* The load of a module waits longer for the patching lock, because the accesses of an unpatched module are inferred
 * from arguments. */
#define LOAD_WAIT_LIMIT_NS 2000000000

static struct {
    int capability;
    void *image;
} patches[MAX_PATCHES];
static size_t patch_count;

enum { UNKNOWN, PATCHED, REFUSED };

static struct {
    CUcontext context;
    int patch_state;
} contexts[MAX_CONTEXTS];
static size_t context_count;

/* The Sanitizer API requires that one thread at a time patches (sanitizer_patching.h). */
static pthread_mutex_t patching_lock = PTHREAD_MUTEX_INITIALIZER;
/* ``module_ids`` has the ids of patched modules by their handles. ``unreported_reasons`` has the unreported accesses of
 * functions by function_key(): each bit is an index of ``reasons``. */
static hash_table module_ids, unreported_reasons;
static uint32_t last_module;
static bool multicast_used; /* read and written with atomic operations */

static const struct {
    int instruction; /* Sanitizer_InstructionId */
    const char *callback;
} CALLBACKS[] = {
    {3, "ck_memory_access"},   /* GLOBAL_MEMORY_ACCESS */
    {14, "ck_copy_async"},     /* MEMCPY_ASYNC */
    {30, "ck_bulk_load"},      /* BULK_COPY_GLOBAL_TO_SHARED */
    {35, "ck_bulk_store"},     /* BULK_COPY_SHARED_TO_GLOBAL */
    {37, "ck_bulk_reduction"}, /* BULK_REDUCTION_SHARED_TO_GLOBAL */
    {43, "ck_tensor_load"},    /* TMA_LOAD */
    {44, "ck_tensor_store"},   /* TMA_STORE */
};

int patching_add_image(int capability, const void *image, size_t image_bytes)
{
    void *image_copy = patch_count < MAX_PATCHES ? malloc(image_bytes) : NULL;
    if (!image_copy)
        return -1;
    memcpy(image_copy, image, image_bytes);
    patches[patch_count].capability = capability;
    patches[patch_count++].image = image_copy;
    return 0;
}

bool patching_is_enabled(void)
{
    return patch_count > 0;
}

/* --- contexts ------------------------------------------------------------------------------------ */

static const void *patch_for(int device)
{
    const driver_functions *driver = driver_api();
    int major = 0, minor = 0;
    if (!driver || driver->cuDeviceGetAttribute(&major, COMPUTE_CAPABILITY_MAJOR, device) ||
        driver->cuDeviceGetAttribute(&minor, COMPUTE_CAPABILITY_MINOR, device))
        return NULL;
    for (size_t i = 0; i < patch_count; i++)
        if (patches[i].capability == major * 10 + minor)
            return patches[i].image;
    return NULL;
}

static int *context_state(CUcontext context)
{
    for (size_t i = 0; i < context_count; i++)
        if (contexts[i].context == context)
            return &contexts[i].patch_state;
    if (context_count == MAX_CONTEXTS)
        return NULL;
    contexts[context_count].context = context;
    contexts[context_count].patch_state = UNKNOWN;
    return &contexts[context_count++].patch_state;
}

/* Load the patch into a context before its first module is patched. Return false if there is no patch for the
 * device. The patching lock is held. */
static bool load_patch(CUcontext context)
{
    pthread_mutex_lock(&recorder_lock);
    int *state = context_state(context), current = state ? *state : REFUSED;
    int device = context_device(context);
    pthread_mutex_unlock(&recorder_lock);
    if (current != UNKNOWN)
        return current == PATCHED;
    const void *image = patch_for(device);
    current = image && !sanitizer.add_patches(image, context) ? PATCHED : REFUSED;
    pthread_mutex_lock(&recorder_lock);
    if ((state = context_state(context)))
        *state = current;
    if (current == REFUSED)
        record_gap("context without device patch: accesses inferred from arguments");
    pthread_mutex_unlock(&recorder_lock);
    return current == PATCHED;
}

bool patching_is_active(CUcontext context)
{
    for (size_t i = 0; i < context_count; i++)
        if (contexts[i].context == context)
            return contexts[i].patch_state == PATCHED;
    return false;
}

void patching_context_destroying(CUcontext context)
{
    for (size_t i = 0; i < context_count; i++)
        if (contexts[i].context == context)
            contexts[i] = contexts[--context_count];
}

/* --- modules ------------------------------------------------------------------------------------- */

static uint64_t function_key(uint32_t module, const char *function)
{
    uint64_t hash = module * 0x9E3779B97F4A7C15ull ^ 0xcbf29ce484222325ull; /* FNV-1a */
    for (; *function; function++)
        hash = (hash ^ (uint8_t)*function) * 0x100000001b3ull;
    return hash | 1;
}

static const char *reasons[32]; /* strings of machine_code.c; the bit of a reason is its index */
static uint32_t reason_count;

static uint32_t reason_bit(const char *reason)
{
    uint32_t i = 0;
    while (i < reason_count && strcmp(reasons[i], reason))
        i++;
    if (i == reason_count && reason_count < sizeof reasons / sizeof *reasons)
        reasons[reason_count++] = reason;
    return 1u << i;
}

static void add_unreported_kind(void *module, const char *function, const char *reason)
{
    pthread_mutex_lock(&recorder_lock);
    uint64_t key = function_key(*(const uint32_t *)module, function);
    hash_table_put(&unreported_reasons, key, hash_table_get(&unreported_reasons, key) | reason_bit(reason));
    pthread_mutex_unlock(&recorder_lock);
}

static bool patch_module(CUmodule module)
{
    for (size_t i = 0; i < sizeof CALLBACKS / sizeof *CALLBACKS; i++)
        if (sanitizer.patch_instructions(CALLBACKS[i].instruction, module, CALLBACKS[i].callback))
            return false;
    return !sanitizer.patch_module(module);
}

/* Acquire the patching lock. Return false if another thread holds it for too long: that thread may wait for a lock of
 * the driver that this thread holds. */
static bool acquire_lock_within(int64_t limit_ns)
{
    const int64_t deadline_ns = monotonic_ns() + limit_ns;
    while (pthread_mutex_trylock(&patching_lock)) {
        if (monotonic_ns() >= deadline_ns)
            return false;
        sleep_briefly();
    }
    return true;
}

void patching_module_loaded(const Sanitizer_ResourceModuleData *data)
{
    const bool was_in_recorder_call =
        this_thread.in_recorder_call; /* a query of the recorder may make the driver load a module lazily */
    this_thread.in_recorder_call = this_thread.is_patching = true;
    const bool is_locked = acquire_lock_within(LOAD_WAIT_LIMIT_NS);
    bool is_patched = is_locked && load_patch(data->context) &&
                      !machine_code_has_function(data->pCubin, data->cubinSize, is_nccl_kernel) &&
                      patch_module(data->module);
    uint32_t module_id = is_locked ? ++last_module : 0;
    if (is_locked)
        pthread_mutex_unlock(&patching_lock);
    this_thread.in_recorder_call = was_in_recorder_call;
    this_thread.is_patching = false;
    if (!is_patched)
        return;
    if (machine_code_find_unreported(data->pCubin, data->cubinSize, add_unreported_kind, &module_id) < 0)
        return;
    pthread_mutex_lock(&recorder_lock);
    patching_module_unloading(
        data->module); /* the handle may be that of a module whose unloading was not reported */
    if (module_add(module_id, data->module))
        hash_table_put(&module_ids, (uint64_t)(uintptr_t)data->module, module_id);
    pthread_mutex_unlock(&recorder_lock);
}

void patching_module_unloading(CUmodule module)
{
    module_forget(hash_table_remove(&module_ids, (uint64_t)(uintptr_t)module));
}

bool patching_lock_try(void)
{
    return !pthread_mutex_trylock(&patching_lock);
}

bool patching_lock_acquire(void)
{
    return acquire_lock_within(LOCK_WAIT_LIMIT_NS);
}

void patching_lock_release(void)
{
    pthread_mutex_unlock(&patching_lock);
}

/* Patch or unpatch a module. The callbacks of the driver calls that this makes are ignored. */
static bool switch_patch(CUmodule module, bool apply)
{
    const bool was_in_recorder_call = this_thread.in_recorder_call;
    this_thread.in_recorder_call = this_thread.is_patching = true;
    const bool is_switched = apply ? patch_module(module) : !sanitizer.unpatch_module(module);
    this_thread.in_recorder_call = was_in_recorder_call;
    this_thread.is_patching = false;
    return is_switched;
}

bool patching_apply(CUmodule module)
{
    return switch_patch(module, true);
}

bool patching_remove(CUmodule module)
{
    return switch_patch(module, false);
}

uint32_t patching_module_id(CUmodule module)
{
    return hash_table_get(&module_ids, (uint64_t)(uintptr_t)module);
}

void patching_record_multicast_use(void)
{
    __atomic_store_n(&multicast_used, true, __ATOMIC_RELAXED);
}

unreported_accesses patching_unreported_accesses(CUmodule module, const char *function)
{
    unreported_accesses accesses = {NULL, 0};
    uint32_t module_id = hash_table_get(&module_ids, (uint64_t)(uintptr_t)module);
    const bool uses_multicast = __atomic_load_n(&multicast_used, __ATOMIC_RELAXED);
    if (!module_id || !module_has_patch(module_id)) {
        accesses.reason = MACHINE_CODE_NOT_PATCHED;
        return accesses;
    }
    uint32_t reason_bits = function ? hash_table_get(&unreported_reasons, function_key(module_id, function)) : 0;
    for (uint32_t i = 0; i < reason_count; i++) {
        if (!(reason_bits >> i & 1))
            continue;
        if (!strcmp(reasons[i], MACHINE_CODE_TENSOR_STORES))
            accesses.tensor_modes |= MODE_WRITE;
        else if (!strcmp(reasons[i], MACHINE_CODE_TENSOR_REDUCTIONS))
            accesses.tensor_modes |= MODE_READ | MODE_WRITE | MODE_ATOMIC;
        else if (strcmp(reasons[i], MACHINE_CODE_MULTIMEM) != 0 || uses_multicast)
            accesses.reason = reasons[i];
    }
    return accesses;
}

void patching_clear(void)
{
    patching_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    context_count = 0;
    multicast_used = false;
    modules_clear();
    hash_table_clear(&module_ids);
    hash_table_clear(&unreported_reasons);
}
