/* Removes the device patch from CUDA modules while templates have the accesses of their launches, and restores it.
 *
 * A kernel of a patched module calls the patch for each access, even if its launch is not recorded: a kernel that is
 * limited by memory then takes ten times as long. The removal of a patch waits for the device, so patches are
 * removed at the first driver call after the host has waited for all work anyway. In a program that never does so,
 * the recorder itself waits, at long intervals. A patch is restored, which takes about 0.4 ms, before the first
 * launch that must be recorded. */
#ifndef CK_MODULE_SWITCH_H
#define CK_MODULE_SWITCH_H

#include <stdbool.h>
#include <stdint.h>

#include "hooks/sanitizer_api.h"

/* Add a module to which the patch was applied, by its id. Return false if no memory is left. The recorder lock is
 * held. */
bool module_add(uint32_t id, CUmodule module);

/* Forget a module that is about to be unloaded. The recorder lock is held. */
void module_forget(uint32_t id);

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

/* Forget all modules, in the child of a fork. */
void modules_clear(void);

#endif
