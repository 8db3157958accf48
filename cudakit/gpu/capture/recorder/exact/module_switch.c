#include "exact/module_switch.h"

#include <string.h>

#include "containers.h"
#include "exact/arena_pool.h"
#include "exact/patching.h"
#include "model/graphs.h"
#include "model/stream_order.h"
#include "recorder.h"

/* A patch is removed after this number of reviews without a recorded launch; the number doubles each time that the
 * patch must be restored. */
#define MIN_REVIEWS 2
#define MAX_REVIEWS 1024
#define REVIEW_INTERVAL_NS 1000000
/* All patches are restored after this time, so that templates are verified; the time doubles after each
 * verification. */
#define FIRST_VERIFICATION_NS 5000000000
#define MAX_VERIFICATION_NS 300000000000

typedef struct {
    CUmodule handle; /* NULL: no module has this id, or it was unloaded */
    enum { WITHOUT_PATCH, WITH_PATCH, REMOVING_PATCH, SWITCH_FAILED } state;
    uint32_t recorded_launch_count, template_launch_count; /* numbers of launches since the last review */
    uint32_t reviews_without_recording; /* number of reviews in a row with launches, none of which was recorded */
    uint32_t reviews_before_removal;    /* value of reviews_without_recording at which the patch is removed */
} patched_module;

static patched_module *modules; /* by module id */
static size_t module_count, module_capacity;
static bool review_is_requested, restoring_is_requested; /* read and written with atomic operations */
/* Number of modules whose patch is removed; written with the recorder lock held, read with atomic operations. */
static uint32_t removed_patch_count;
/* These variables are protected by the patching lock. */
static int64_t last_review_ns, next_verification_ns, verification_interval_ns;

/* --- modules ------------------------------------------------------------------------------------- */

bool module_add(uint32_t id, CUmodule module)
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

void module_forget(uint32_t id)
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
    if (must_be_recorded)
        modules[id].recorded_launch_count++;
    else
        modules[id].template_launch_count++;
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

/* Apply the patch to a module, or remove the patch, and set the module's state. The patching lock is held, the recorder
 * lock is not. */
static void switch_patch(uint32_t id, CUmodule module, bool apply)
{
    const bool is_switched = apply ? patching_apply(module) : patching_remove(module);
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
        modules[id].reviews_without_recording = 0;
        if (modules[id].reviews_before_removal < MAX_REVIEWS)
            modules[id].reviews_before_removal *= 2;
    }
    pthread_mutex_unlock(&recorder_lock);
    return is_restored;
}

/* Restore the patch of all modules. The patching lock is held, the recorder lock is not. */
static void restore_all_patches(void)
{
    CUmodule module;
    for (uint32_t id = 1; removed_patch_count && copy_handle(id, WITHOUT_PATCH, &module); id++)
        if (module) {
            switch_patch(id, module, true);
            modules[id].reviews_without_recording = 0;
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

void modules_request_restoring(void)
{
    __atomic_store_n(&restoring_is_requested, true, __ATOMIC_RELAXED);
}

void modules_request_review(void)
{
    __atomic_store_n(&review_is_requested, true, __ATOMIC_RELAXED);
}

/* Begin the removal of a module's patch, and return true, if the reviews show that the patch is not needed, and no
 * other thread is enqueueing a launch that the patch records. Later launches are not recorded by the patch. Takes the
 * recorder lock. */
static bool begin_removal(uint32_t id)
{
    pthread_mutex_lock(&recorder_lock);
    patched_module *module = modules + id;
    if (module->recorded_launch_count)
        module->reviews_without_recording = 0;
    else if (module->template_launch_count)
        module->reviews_without_recording++;
    module->recorded_launch_count = module->template_launch_count = 0;
    const bool begins_removal = module->handle &&module->state == WITH_PATCH &&
                                module->reviews_without_recording >= module->reviews_before_removal &&
                                !pool_count_entering_launches();
    if (begins_removal)
        module->state = REMOVING_PATCH;
    pthread_mutex_unlock(&recorder_lock);
    return begins_removal;
}

static void remove_unneeded_patches(void)
{
    CUmodule module;
    for (uint32_t id = 1; copy_handle(id, WITH_PATCH, &module); id++)
        if (module && begin_removal(id))
            switch_patch(id, module, false);
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

void modules_review(void)
{
    if (__atomic_exchange_n(&restoring_is_requested, false, __ATOMIC_RELAXED))
        modules_restore_all_patches();
    if (!__atomic_load_n(&review_is_requested, __ATOMIC_RELAXED))
        return;
    __atomic_store_n(&review_is_requested, false, __ATOMIC_RELAXED);
    if (graphs_is_capturing() || !device_is_idle() || !patching_lock_try())
        return;
    const int64_t now_ns = monotonic_ns();
    if (now_ns - last_review_ns >= REVIEW_INTERVAL_NS) {
        const bool must_verify = removed_patch_count && now_ns >= next_verification_ns;
        last_review_ns = now_ns;
        if (must_verify)
            restore_all_patches();
        else
            remove_unneeded_patches();
        if (must_verify || !next_verification_ns)
            set_next_verification(now_ns, must_verify);
    }
    patching_lock_release();
}

void modules_clear(void)
{
    module_count = 0;
    removed_patch_count = 0;
}
