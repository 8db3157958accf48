/* Applies the device patch to every module that is loaded, so that its kernels report their accesses; removes it while
 * templates have the accesses of their launches, and restores it. */
#ifndef CK_MODULES_H
#define CK_MODULES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "vendor/sanitizer_api.h"

/* Add the patch image for a compute capability, such as 90. The image is copied. Return 0, or -1 if no memory is
 * left. */
int patching_add_image(int capability, const void *image, size_t image_bytes);

/* Patch a module that was loaded. Calls CUDA: the recorder lock is not held. */
void patching_module_loaded(const Sanitizer_ResourceModuleData *module);

/* Return whether the calling thread patches a module, or removes a patch, now. */
bool patching_is_running(void);

/* Forget a module or context that is about to be destroyed. The recorder lock is held. */
void patching_module_unloading(CUmodule module);
void patching_context_destroying(CUcontext context);

/* Return whether the patch is loaded into a context, so that launches in it need user data. The recorder lock is
 * held. */
bool patching_is_active(CUcontext context);

/* The accesses of a kernel that the Sanitizer API does not report. */
typedef struct {
    const char *reason; /* kind of an access that cannot be recorded; NULL if there is none */
    uint8_t
        tensor_modes; /* MODE_* of stores and reductions through tensor maps, which are among the kernel arguments */
} unreported_accesses;

/* Return the id of a module to which the patch was applied, or 0. An id is never reused. The recorder lock is held. */
uint32_t patching_module_id(CUmodule module);

/* Record that this process has used a multicast object. */
void patching_record_multicast_use(void);

/* Return the kinds of accesses that the Sanitizer API does not report for a kernel. The recorder lock is held. */
unreported_accesses patching_unreported_accesses(CUmodule module, const char *function);

/* Forget all contexts and modules in the child of a fork: they belong to the parent. */
void patching_clear(void);

/* --- removal of patches -------------------------------------------------------------------------- */

/* Removes the device patch from CUDA modules while templates have the accesses of their launches, and restores it.
 *
 * A kernel of a patched module calls the patch for each access, even if its launch is not recorded: a kernel that is
 * limited by memory then takes ten times as long. The removal of a patch waits for the device, so patches are
 * removed at the first driver call after the host has waited for all work anyway. In a program that never does so,
 * the recorder itself waits, at long intervals. A patch is restored, which takes about 0.4 ms, before the first
 * launch that must be recorded. */
/* Return whether the patch of a module is applied. The recorder lock is held. */
bool module_has_patch(uint32_t id);

/* Count a launch of a kernel of a module: the launch must be recorded, or a template has its accesses. The recorder
 * lock is held. */
void module_count_launch(uint32_t id, bool must_be_recorded);

/* Return whether the patch of any module is removed. */
bool modules_include_unpatched(void);

/* Restore the patch of a module, before a launch that must be recorded. Return false if that is not possible; another
 * thread that patches modules may be waiting for this thread. Calls CUDA: the recorder lock is not held. */
bool module_restore_patch(uint32_t id);

/* Restore the patch of all modules. Calls CUDA: the recorder lock is not held. */
void modules_restore_all_patches(void);

/* Restore the patch of a module at the next entry of a driver call. The recorder lock is held. */
void module_request_restoring(uint32_t id);

/* Request a call of modules_review(), because the host has waited for work. */
void modules_request_review(void);

/* If a review is requested and the device is idle, remove the patch of modules that need no patch; at long
 * intervals, restore all patches instead, so that templates are verified. If the program never waits, first wait
 * for the current context for a short time, at long intervals. Called at the entry of a driver call. Calls CUDA:
 * the recorder lock is not held. */
void modules_review(CUcontext context);

#endif
