/* Applies the device patch to every module that is loaded, so that its kernels report their accesses. */
#ifndef CK_PATCHING_H
#define CK_PATCHING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hooks/sanitizer_api.h"

/* Add the patch image for a compute capability, such as 90. The image is copied. Return 0, or -1 if no memory is
 * left. */
int patching_add_image(int capability, const void *image, size_t image_bytes);

/* Return whether there is any patch image. */
bool patching_is_enabled(void);

/* Patch a module that was loaded. Calls CUDA: the recorder lock is not held. */
void patching_module_loaded(const Sanitizer_ResourceModuleData *module);

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

/* Acquire the patching lock, which serializes patching. patching_lock_acquire() returns false if another thread holds
 * it for longer than 20 ms, because that thread may wait for a lock of the driver that this thread holds;
 * patching_lock_try() does not wait. */
bool patching_lock_acquire(void);
bool patching_lock_try(void);
void patching_lock_release(void);

/* Apply the patch to a module, or remove it. Return false on failure. Calls CUDA: the caller holds the patching lock,
 * but not the recorder lock. */
bool patching_apply(CUmodule module);
bool patching_remove(CUmodule module);

/* Return the id of a module to which the patch was applied, or 0. An id is never reused. The recorder lock is held. */
uint32_t patching_module_id(CUmodule module);

/* Record that this process has used a multicast object. */
void patching_record_multicast_use(void);

/* Return the kinds of accesses that the Sanitizer API does not report for a kernel. The recorder lock is held. */
unreported_accesses patching_unreported_accesses(CUmodule module, const char *function);

/* Forget all contexts and modules in the child of a fork: they belong to the parent. */
void patching_clear(void);

/* --- machine code -------------------------------------------------------------------------------- */

/* Kind reported for all kernels of a module that is not patched. */
#define MACHINE_CODE_NOT_PATCHED "machine code that could not be parsed or patched"

/* Kind of instructions that access only multicast objects (multimem). NCCL's kernels contain such instructions even if
 * they are never executed, so they count only in processes that use multicast objects. */
#define MACHINE_CODE_MULTIMEM "multimem instructions"

/* Kinds of unreported accesses whose addresses are known from kernel arguments instead. */
#define MACHINE_CODE_TENSOR_STORES "tensor-map stores"
#define MACHINE_CODE_TENSOR_REDUCTIONS "tensor-map reductions"

/* Find the instructions of a cubin that access global memory, but have no Sanitizer_InstructionId, or an id whose
 * callback is never made. The cubin must be for compute capability 7.0 or newer. Calls ``report`` once per function
 * and kind. Instructions of a function that is not a kernel count for all functions, which may call it.
 *
 * Returns the number of calls of ``report``, or -1 if the cubin cannot be parsed.
 *
 * Not detected: reads of constant memory, and addresses of multicast objects. */
int machine_code_find_unreported(const void *cubin, size_t cubin_bytes,
                                 void (*report)(void *context, const char *function, const char *kind),
                                 void *context);

/* Return whether a cubin has a function with a name for which ``matches`` returns true. */
bool machine_code_has_function(const void *cubin, size_t cubin_bytes, bool (*matches)(const char *name));

#endif
