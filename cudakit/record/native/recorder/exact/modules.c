#include "exact/modules.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "exact/arena_pool.h"
#include "exact/machine_code.h"
#include "exact/reader_lock.h"
#include "model/collectives.h"
#include "model/ids.h"
#include "model/stream_order.h"
#include "recorder.h"
#include "vendor/driver_api.h"
#include "write/record.h"

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

static __thread bool is_patching; /* the CUDA call of the recorder patches a module */

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
    patching_enable();
    return 0;
}

bool patching_is_running(void)
{
    return is_patching;
}

/* A patch is removed after this number of reviews without a recorded launch; the number doubles each time that the
 * patch must be restored. */
#define MIN_REVIEWS 2
#define MAX_REVIEWS 64
/* A patch is also removed after one review without a recorded launch, if this number of launches in a row used
 * templates. Restoring the patch later costs about as much as the patch has cost in these launches. */
#define LAUNCHES_BEFORE_REMOVAL 128
/* The number of reviews before the next removal is halved after REVIEWS_PER_DECAY times as many reviews without
 * the patch. */
#define REVIEWS_PER_DECAY 4
/* Value of reviews_before_removal of a module whose patch is never removed. */
#define NEVER_REMOVED UINT32_MAX
#define REVIEW_INTERVAL_NS 1000000
/* Number of driver calls of a thread after which the time since the last review is checked. */
#define CALLS_PER_TIME_CHECK 64
/* Without a wait of the host, modules are reviewed at this interval. */
#define REVIEW_INTERVAL_WITHOUT_WAIT_NS 200000000
/* Patches of a program that does not wait are removed after a wait of the recorder for all work of the context. The wait
 * has a time limit, because the work may itself wait for the host. The interval between two waits doubles. */
#define DRAIN_LIMIT_NS 20000000
#define MIN_DRAIN_INTERVAL_NS 2000000000
#define MAX_DRAIN_INTERVAL_NS 60000000000
/* All patches are restored after this time, so that templates are verified; the time doubles after each
 * verification. */
#define FIRST_VERIFICATION_NS 5000000000
#define MAX_VERIFICATION_NS 300000000000

typedef struct {
    CUmodule handle; /* NULL: no module has this id, or it was unloaded */
    enum { WITHOUT_PATCH, WITH_PATCH, REMOVING_PATCH, SWITCH_FAILED } state;
    bool must_restore; /* the patch is restored at the next entry of a driver call */
    uint32_t recorded_launch_count, template_launch_count; /* numbers of launches since the last review */
    uint32_t launches_without_recording; /* number of launches with templates since the last recorded launch */
    uint32_t reviews_without_recording;  /* number of reviews in a row with launches, none of which was recorded */
    uint32_t reviews_before_removal;     /* value of reviews_without_recording at which the patch is removed */
} patched_module;

static patched_module *modules; /* by module id */
static size_t module_count, module_capacity;
static bool review_is_requested, restoring_is_requested; /* read and written with atomic operations */
/* Number of modules whose patch is removed; written with the recorder lock held, read with atomic operations. */
static uint32_t removed_patch_count;
/* These variables are protected by the patching lock. */
static int64_t last_review_ns, next_verification_ns, verification_interval_ns;
static int64_t next_drain_ns, drain_interval_ns;
static CUevent drain_event; /* an event of the context ``drain_context`` */
static CUcontext drain_context;

/* --- patched modules ------------------------------------------------------------------------------------- */

/* Add a module to which the patch was applied, by its id. Return false if no memory is left. The recorder lock is
 * held. */
static bool module_add(uint32_t id, CUmodule module)
{
    patched_module *new_modules = array_reserve(modules, &module_capacity, id + 1u, sizeof *modules, 256);
    if (!new_modules)
        return false;
    modules = new_modules;
    for (; module_count <= id; module_count++)
        modules[module_count] = (patched_module){0};
    modules[id] = (patched_module){.handle = module, .state = WITH_PATCH, .reviews_before_removal = MIN_REVIEWS};
    return true;
}

/* Forget a module that is about to be unloaded. The recorder lock is held. */
static void module_forget(uint32_t id)
{
    if (id >= module_count || !modules[id].handle)
        return;
    if (modules[id].state == WITHOUT_PATCH)
        __atomic_add_fetch(&removed_patch_count, -1u, __ATOMIC_RELAXED);
    modules[id].handle = NULL;
}

bool module_has_patch(uint32_t id)
{
    return id < module_count && modules[id].handle &&modules[id].state == WITH_PATCH;
}

bool modules_include_unpatched(void)
{
    return __atomic_load_n(&removed_patch_count, __ATOMIC_RELAXED) > 0;
}

void module_count_launch(uint32_t id, bool must_be_recorded)
{
    if (id >= module_count)
        return;
    if (must_be_recorded) {
        modules[id].recorded_launch_count++;
        modules[id].launches_without_recording = 0;
    } else {
        modules[id].template_launch_count++;
        modules[id].launches_without_recording++;
    }
}

/* Set ``module`` to the handle of the module with this id, or to NULL if the module has another state. Return false
 * if the id is higher than all module ids. Takes the recorder lock. */
static bool copy_handle(uint32_t id, int state, CUmodule *module)
{
    pthread_mutex_lock(&recorder_lock);
    const bool exists = id < module_count;
    *module = exists && (int)modules[id].state == state ? modules[id].handle : NULL;
    pthread_mutex_unlock(&recorder_lock);
    return exists;
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
    int device = context_device(context_id(context));
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

/* --- patching ------------------------------------------------------------------------------------- */

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
    this_thread.in_recorder_call = is_patching = true;
    const bool is_locked = acquire_lock_within(LOAD_WAIT_LIMIT_NS);
    bool is_patched = is_locked && load_patch(data->context) &&
                      !machine_code_has_function(data->pCubin, data->cubinSize, is_nccl_kernel) &&
                      patch_module(data->module);
    uint32_t module_id = is_locked ? ++last_module : 0;
    if (is_locked)
        pthread_mutex_unlock(&patching_lock);
    this_thread.in_recorder_call = was_in_recorder_call;
    is_patching = false;
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

static bool patching_lock_try(void)
{
    return !pthread_mutex_trylock(&patching_lock);
}

static bool patching_lock_acquire(void)
{
    return acquire_lock_within(LOCK_WAIT_LIMIT_NS);
}

static void patching_lock_release(void)
{
    pthread_mutex_unlock(&patching_lock);
}

/* Patch or unpatch a module. The callbacks of the driver calls that this makes are ignored. */
static bool set_patch(CUmodule module, bool apply)
{
    const bool was_in_recorder_call = this_thread.in_recorder_call;
    this_thread.in_recorder_call = is_patching = true;
    const bool is_switched = apply ? patch_module(module) : !sanitizer.unpatch_module(module);
    this_thread.in_recorder_call = was_in_recorder_call;
    is_patching = false;
    return is_switched;
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

/* --- removing and restoring patches --------------------------------------------------------------- */

/* Apply the patch to a module, or remove the patch, and set the module's state. The patching lock is held, the recorder
 * lock is not. */
static void switch_patch(uint32_t id, CUmodule module, bool apply)
{
    const bool is_switched = set_patch(module, apply);
    pthread_mutex_lock(&recorder_lock);
    if (!is_switched)
        record_gap(apply ? "module whose instrumentation could not be restored"
                         : "module whose instrumentation could not be removed");
    if (modules[id].handle == module) {
        modules[id].state = !is_switched ? SWITCH_FAILED : apply ? WITH_PATCH : WITHOUT_PATCH;
        if (is_switched)
            __atomic_add_fetch(&removed_patch_count, apply ? -1u : 1u, __ATOMIC_RELAXED);
    }
    pthread_mutex_unlock(&recorder_lock);
}

/* --- restoring ----------------------------------------------------------------------------------- */

bool module_restore_patch(uint32_t id)
{
    CUmodule module = NULL;
    if (!patching_lock_acquire())
        return false;
    if (copy_handle(id, WITHOUT_PATCH, &module) && module)
        switch_patch(id, module, true);
    patching_lock_release();
    pthread_mutex_lock(&recorder_lock);
    const bool is_restored = module_has_patch(id);
    if (id < module_count) {
        modules[id].reviews_without_recording = modules[id].launches_without_recording = 0;
        if (modules[id].reviews_before_removal < MAX_REVIEWS)
            modules[id].reviews_before_removal *= 2;
    }
    pthread_mutex_unlock(&recorder_lock);
    return is_restored;
}

/* Return whether restoring the patch of a module was requested, and reset the request. Takes the recorder lock. */
static bool take_request(uint32_t id)
{
    pthread_mutex_lock(&recorder_lock);
    const bool must_restore = modules[id].must_restore;
    modules[id].must_restore = false;
    pthread_mutex_unlock(&recorder_lock);
    return must_restore;
}

static void restore_requested_patches(void)
{
    CUmodule module;
    for (uint32_t id = 1; copy_handle(id, WITHOUT_PATCH, &module); id++)
        if (take_request(id))
            module_restore_patch(id);
}

/* Restore the patch of all modules. The patching lock is held, the recorder lock is not. */
static void restore_all_patches(void)
{
    CUmodule module;
    for (uint32_t id = 1; removed_patch_count && copy_handle(id, WITHOUT_PATCH, &module); id++)
        if (module) {
            switch_patch(id, module, true);
            /* The patch is removed again after few reviews, unless a launch must be recorded. */
            modules[id].reviews_without_recording = modules[id].reviews_before_removal - MIN_REVIEWS;
        }
}

void modules_restore_all_patches(void)
{
    if (!modules_include_unpatched() || !patching_lock_acquire())
        return;
    restore_all_patches();
    patching_lock_release();
}

/* --- reviews ------------------------------------------------------------------------------------- */

void module_request_restoring(uint32_t id)
{
    if (id < module_count)
        modules[id].must_restore = true;
    __atomic_store_n(&restoring_is_requested, true, __ATOMIC_RELAXED);
}

void modules_request_review(void)
{
    __atomic_store_n(&review_is_requested, true, __ATOMIC_RELAXED);
}

/* Return whether the reviews show that the patch of a module is not needed. The recorder lock is held. */
static bool is_patch_unneeded(const patched_module *module)
{
    return module->handle &&module->state == WITH_PATCH && !module->recorded_launch_count &&
           (module->reviews_without_recording >= module->reviews_before_removal ||
            (module->reviews_without_recording && module->launches_without_recording >= LAUNCHES_BEFORE_REMOVAL));
}

/* Count a review of a module. Return whether the reviews show that its patch is not needed. The recorder lock is held. */
static bool review_module(patched_module *module)
{
    if (module->recorded_launch_count)
        module->reviews_without_recording = 0;
    else if (module->template_launch_count)
        module->reviews_without_recording++;
    if (module->state == WITHOUT_PATCH && module->reviews_before_removal > MIN_REVIEWS &&
        module->reviews_without_recording >= REVIEWS_PER_DECAY * module->reviews_before_removal) {
        module->reviews_before_removal /= 2;
        module->reviews_without_recording = 0;
    }
    module->recorded_launch_count = module->template_launch_count = 0;
    return is_patch_unneeded(module);
}

/* Review all modules, and return the number of those whose patch is not needed. Takes the recorder lock. */
static size_t review_modules(void)
{
    size_t unneeded_count = 0;
    pthread_mutex_lock(&recorder_lock);
    for (size_t id = 1; id < module_count; id++)
        unneeded_count += review_module(modules + id);
    pthread_mutex_unlock(&recorder_lock);
    return unneeded_count;
}

/* Begin the removal of a module's patch, and return true, if the patch is not needed, and no other thread is enqueueing
 * a launch that the patch records. Later launches are not recorded by the patch. Takes the recorder lock. */
static bool begin_removal(uint32_t id)
{
    pthread_mutex_lock(&recorder_lock);
    patched_module *module = modules + id;
    const bool begins_removal = is_patch_unneeded(module) && !pool_count_entering_launches();
    if (begins_removal)
        module->state = REMOVING_PATCH;
    pthread_mutex_unlock(&recorder_lock);
    return begins_removal;
}

/* Apply the patch again if it could not be removed, so that launches of the module are recorded as before. The patch
 * is never removed again. Takes the recorder lock. */
static void keep_patch_that_was_not_removed(uint32_t id)
{
    CUmodule module;
    if (!copy_handle(id, SWITCH_FAILED, &module) || !module || !set_patch(module, true))
        return;
    pthread_mutex_lock(&recorder_lock);
    if (modules[id].handle == module) {
        modules[id].state = WITH_PATCH;
        modules[id].reviews_before_removal = NEVER_REMOVED;
    }
    pthread_mutex_unlock(&recorder_lock);
}

/* Remove the patches that the reviews show to be unneeded. The patching lock is held, the recorder lock is not. */
static void remove_unneeded_patches(void)
{
    CUmodule module;
    for (uint32_t id = 1; copy_handle(id, WITH_PATCH, &module); id++)
        if (module && begin_removal(id)) {
            switch_patch(id, module, false);
            keep_patch_that_was_not_removed(id);
        }
}

static void set_next_verification(int64_t now_ns, bool was_verified)
{
    verification_interval_ns = was_verified ? 2 * verification_interval_ns : FIRST_VERIFICATION_NS;
    if (verification_interval_ns > MAX_VERIFICATION_NS)
        verification_interval_ns = MAX_VERIFICATION_NS;
    next_verification_ns = now_ns + verification_interval_ns;
}

/* Return whether the device is idle, and no launch of another thread is about to be enqueued. */
static bool device_is_idle(void)
{
    pthread_mutex_lock(&recorder_lock);
    const bool is_idle = order_host_waited_for_all_work() && !pool_count_entering_launches();
    pthread_mutex_unlock(&recorder_lock);
    return is_idle;
}

/* Wait until all work of the context is complete, for a short time. Return false if it is not complete. Calls CUDA. */
static bool wait_for_context(const driver_functions *driver, CUcontext context)
{
    const int64_t deadline_ns = monotonic_ns() + DRAIN_LIMIT_NS;
    const bool has_event =
        drain_context == context || (!drain_context && !driver->cuEventCreate(&drain_event, EVENT_DISABLE_TIMING));
    if (!has_event)
        return false;
    drain_context = context;
    bool is_complete = false;
    if (!driver->cuCtxRecordEvent(context, drain_event))
        while (!(is_complete = !driver->cuEventQuery(drain_event)) && monotonic_ns() < deadline_ns)
            sleep_briefly();
    return is_complete;
}

/* Wait for all work of the context if the last such wait was long enough ago. Return whether all work on all devices is
 * complete. Takes the recorder lock. Calls CUDA. */
static bool drain_context_if_due(CUcontext context, int64_t now_ns)
{
    const driver_functions *driver = driver_api();
    if (now_ns < next_drain_ns || !context || !driver || !driver->cuCtxRecordEvent)
        return false;
    pthread_mutex_lock(&recorder_lock);
    const bool is_only_context =
        order_host_waited_for_other_contexts(context_id(context)) && !pool_count_entering_launches();
    pthread_mutex_unlock(&recorder_lock);
    if (!is_only_context)
        return false;
    drain_interval_ns = drain_interval_ns ? 2 * drain_interval_ns : MIN_DRAIN_INTERVAL_NS;
    if (drain_interval_ns > MAX_DRAIN_INTERVAL_NS)
        drain_interval_ns = MAX_DRAIN_INTERVAL_NS;
    next_drain_ns = now_ns + drain_interval_ns;
    launch_begin_delay(); /* other threads may see that the work is complete */
    const bool was_in_recorder_call = this_thread.in_recorder_call;
    this_thread.in_recorder_call = true;
    const bool is_complete = wait_for_context(driver, context);
    this_thread.in_recorder_call = was_in_recorder_call;
    return is_complete;
}

/* Review all modules. ``is_idle`` is whether the device is idle; if it is not, the recorder waits for the device before
 * it removes a patch. The patching lock is held, the recorder lock is not. */
static void review_all(CUcontext context, bool is_idle, int64_t now_ns)
{
    const bool must_verify = removed_patch_count && now_ns >= next_verification_ns;
    __atomic_store_n(&last_review_ns, now_ns, __ATOMIC_RELAXED);
    if (must_verify)
        restore_all_patches();
    else if (review_modules() && (is_idle || drain_context_if_due(context, now_ns)))
        remove_unneeded_patches();
    if (must_verify || !next_verification_ns)
        set_next_verification(now_ns, must_verify);
}

void modules_review(CUcontext context)
{
    if (__atomic_exchange_n(&restoring_is_requested, false, __ATOMIC_RELAXED))
        restore_requested_patches();
    const bool has_waited = __atomic_load_n(&review_is_requested, __ATOMIC_RELAXED);
    if (!has_waited && this_thread.call_number % CALLS_PER_TIME_CHECK)
        return;
    __atomic_store_n(&review_is_requested, false, __ATOMIC_RELAXED);
    const int64_t elapsed_ns = monotonic_ns() - __atomic_load_n(&last_review_ns, __ATOMIC_RELAXED);
    if (elapsed_ns < REVIEW_INTERVAL_NS || order_is_capturing())
        return;
    const bool is_idle = has_waited && device_is_idle();
    if ((is_idle || elapsed_ns >= REVIEW_INTERVAL_WITHOUT_WAIT_NS) && patching_lock_try()) {
        review_all(context, is_idle, monotonic_ns());
        patching_lock_release();
    }
}

void patching_clear(void)
{
    patching_lock = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    is_patching = false;
    context_count = 0;
    multicast_used = false;
    module_count = 0;
    removed_patch_count = 0;
    drain_context = NULL;
    hash_table_clear(&module_ids);
    hash_table_clear(&unreported_reasons);
}
