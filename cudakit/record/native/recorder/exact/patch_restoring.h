/* Restores the device patch of a module at the entry of a launch that must be recorded.
 *
 * The launch callback must not do this: the driver may hold a lock there that sanitizerPatchModule() waits for. At the
 * entry, the module and the name of the kernel are not known yet. So they are stored when the kernel launches, by the
 * function that the program passes to cuLaunchKernel. */
#ifndef CK_PATCH_RESTORING_H
#define CK_PATCH_RESTORING_H

#include <stdbool.h>
#include <stdint.h>

#include "vendor/sanitizer_api.h"
#include "write/record.h"

/* Store the kernel that this thread launches. The recorder lock is held. */
void patch_restoring_add_kernel(const record *launch_record, const Sanitizer_LaunchData *launch);

/* Before a launch of this thread, restore the patch of the kernel's module if it was removed and no template applies to
 * the launch. If the kernel is unknown, restore the patch of all modules. Return whether the launch may be recorded. Called
 * at the entry of the driver call. Calls CUDA: the recorder lock is not held. */
bool patch_restoring_enter_launch(CUcontext context, CUstream stream, const uint32_t grid[3],
                                  const uint32_t block[3]);

/* Forget all streams, because a stream is destroyed. The recorder lock is held. */
void patch_restoring_forget_streams(void);

/* Forget all kernels, because a module is unloaded. The recorder lock is held. */
void patch_restoring_clear(void);

#endif
