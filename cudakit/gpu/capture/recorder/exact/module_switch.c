#include "exact/module_switch.h"

#include <string.h>

#include "containers.h"
#include "exact/arena_pool.h"
#include "exact/patching.h"
#include "model/graphs.h"
#include "model/stream_order.h"
#include "recorder.h"

/* A patch is removed after this number of reviews without a recorded launch; each time that it had to be restored, the
 * number doubles. */
#define MIN_REVIEWS 2
#define MAX_REVIEWS 1024
#define REVIEW_INTERVAL_NS 1000000
/* All patches are restored after this time, and then after twice as long each time, so that templates are verified. */
#define FIRST_VERIFICATION_NS 5000000000
#define MAX_VERIFICATION_NS 300000000000

typedef struct {
    CUmodule handle; /* NULL: no module has this id, or it was unloaded */
    enum { WITHOUT_PATCH, WITH_PATCH, REMOVING_PATCH, SWITCH_FAILED } state;
    uint32_t recorded_launches, template_launches; /* launches since the last review */
    uint32_t reviews_without_recording; /* reviews in a row that found launches, none of which was recorded */
    uint32_t needed_reviews;            /* such reviews after which the patch is removed */
} patched_module;

static patched_module *modules; /* by module id */
static size_t module_count, module_capacity;
static bool review_is_requested; /* read and written with atomic operations */
/* These variables are protected by the patching lock. */
static uint32_t removed_count; /* patches that are removed now; read with atomic operations */
static int64_t reviewed_ns, verification_ns, verification_interval_ns;

/* --- modules ------------------------------------------------------------------------------------- */

bool modules_add(uint32_t id, CUmodule module)
{
    patched_module *new_modules = array_reserve(modules, &module_capacity, id + 1u, sizeof *modules, 256);
    if (!new_modules)
        return false;
    modules = new_modules;
    for (; module_count <= id; module_count++)
        modules[module_count] = (patched_module){0};
    modules[id] = (patched_module){.handle = module, .state = WITH_PATCH, .needed_reviews = MIN_REVIEWS};
    return true;
}

void modules_remove(uint32_t id)
{
    if (id < module_count)
        modules[id].handle = NULL;
}

bool modules_have_patch(uint32_t id)
{
    return id < module_count && modules[id].handle &&modules[id].state == WITH_PATCH;
}

bool modules_lack_patches(void)
{
    return __atomic_load_n(&removed_count, __ATOMIC_RELAXED) > 0;
}

void modules_count_launch(uint32_t id, bool must_be_recorded)
{
    if (id >= module_count)
        return;
    if (must_be_recorded)
        modules[id].recorded_launches++;
    else
        modules[id].template_launches++;
}

/* Copy the handle of a module that has this state, or NULL. Return false if ids end before ``id``. Takes the lock. */
static bool copy_handle(uint32_t id, int state, CUmodule *module)
{
    pthread_mutex_lock(&recorder_lock);
    const bool exists = id < module_count;
    *module = exists && (int)modules[id].state == state ? modules[id].handle : NULL;
    pthread_mutex_unlock(&recorder_lock);
    return exists;
}

/* Apply the patch to a module, or remove it, and set its state. The patching lock is held, the lock is not. */
static void switch_module(uint32_t id, CUmodule module, bool apply)
{
    const bool is_switched = apply ? patching_apply(module) : patching_remove(module);
    pthread_mutex_lock(&recorder_lock);
    if (!is_switched)
        record_gap(apply ? "module whose instrumentation could not be restored"
                         : "module whose instrumentation could not be removed");
    if (modules[id].handle == module)
        modules[id].state = !is_switched ? SWITCH_FAILED : apply ? WITH_PATCH : WITHOUT_PATCH;
    pthread_mutex_unlock(&recorder_lock);
    if (is_switched)
        __atomic_add_fetch(&removed_count, apply ? -1u : 1u, __ATOMIC_RELAXED);
}

/* --- restoring ----------------------------------------------------------------------------------- */

bool modules_restore(uint32_t id)
{
    CUmodule module = NULL;
    if (!patching_lock_acquire())
        return false;
    if (copy_handle(id, WITHOUT_PATCH, &module) && module)
        switch_module(id, module, true);
    patching_lock_release();
    pthread_mutex_lock(&recorder_lock);
    const bool is_restored = modules_have_patch(id);
    if (id < module_count) {
        modules[id].reviews_without_recording = 0;
        if (modules[id].needed_reviews < MAX_REVIEWS)
            modules[id].needed_reviews *= 2;
    }
    pthread_mutex_unlock(&recorder_lock);
    return is_restored;
}

/* Restore the patch of all modules. The patching lock is held, the lock is not. */
static void restore_all(void)
{
    CUmodule module;
    for (uint32_t id = 1; removed_count && copy_handle(id, WITHOUT_PATCH, &module); id++)
        if (module) {
            switch_module(id, module, true);
            modules[id].reviews_without_recording = 0;
        }
}

void modules_restore_all(void)
{
    if (!modules_lack_patches() || !patching_lock_acquire())
        return;
    restore_all();
    patching_lock_release();
}

/* --- reviews ------------------------------------------------------------------------------------- */

void modules_request_review(void)
{
    __atomic_store_n(&review_is_requested, true, __ATOMIC_RELAXED);
}

/* Begin the removal of a module's patch if the reviews show that it is not needed, and no launch that is recorded by it
 * may still be on its way to its stream. From then on, launches of other threads are not recorded by it. Takes the
 * lock. */
static bool begin_removal(uint32_t id)
{
    pthread_mutex_lock(&recorder_lock);
    patched_module *module = modules + id;
    if (module->recorded_launches)
        module->reviews_without_recording = 0;
    else if (module->template_launches)
        module->reviews_without_recording++;
    module->recorded_launches = module->template_launches = 0;
    const bool begins = module->handle &&module->state == WITH_PATCH &&
                        module->reviews_without_recording >= module->needed_reviews && !pool_launches_entering();
    if (begins)
        module->state = REMOVING_PATCH;
    pthread_mutex_unlock(&recorder_lock);
    return begins;
}

static void remove_patches(void)
{
    CUmodule module;
    for (uint32_t id = 1; copy_handle(id, WITH_PATCH, &module); id++)
        if (module && begin_removal(id))
            switch_module(id, module, false);
}

static void set_next_verification(int64_t now_ns, bool was_verified)
{
    verification_interval_ns = was_verified ? 2 * verification_interval_ns : FIRST_VERIFICATION_NS;
    if (verification_interval_ns > MAX_VERIFICATION_NS)
        verification_interval_ns = MAX_VERIFICATION_NS;
    verification_ns = now_ns + verification_interval_ns;
}

/* Return whether the device is idle, and no launch of another thread is about to be enqueued. */
static bool device_is_idle(void)
{
    pthread_mutex_lock(&recorder_lock);
    const bool is_idle = order_host_waited_for_all() && !pool_launches_entering();
    pthread_mutex_unlock(&recorder_lock);
    return is_idle;
}

void modules_review(void)
{
    if (!__atomic_load_n(&review_is_requested, __ATOMIC_RELAXED))
        return;
    __atomic_store_n(&review_is_requested, false, __ATOMIC_RELAXED);
    if (graphs_is_capturing() || !device_is_idle() || !patching_lock_try())
        return;
    const int64_t now_ns = monotonic_ns();
    if (now_ns - reviewed_ns >= REVIEW_INTERVAL_NS) {
        const bool must_verify = removed_count && now_ns >= verification_ns;
        reviewed_ns = now_ns;
        if (must_verify)
            restore_all();
        else
            remove_patches();
        if (must_verify || !verification_ns)
            set_next_verification(now_ns, must_verify);
    }
    patching_lock_release();
}

void modules_clear(void)
{
    module_count = 0;
    removed_count = 0;
}
