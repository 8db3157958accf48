/* The device patch: applied to every module that is loaded, so that kernels report their accesses. */
#ifndef CK_PATCHING_H
#define CK_PATCHING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hooks/sanitizer_api.h"

/* Add the patch image for a compute capability, such as 90. The image is copied; -1 if out of memory. */
int patching_add_image(int capability, const void *image, size_t bytes);

/* Whether there is any patch image. */
bool patching_is_enabled(void);

/* A module was loaded: patch it. Calls CUDA: the lock is not held. */
void patching_module_loaded(const Sanitizer_ResourceModuleData *module);

/* A module or context is about to be destroyed. The lock is held. */
void patching_module_unloading(CUmodule module);
void patching_context_destroying(CUcontext context);

/* Whether the patch is loaded into a context, so that its launches need user data. The lock is held. */
bool patching_is_active(CUcontext context);

/* The accesses of a kernel that the Sanitizer API does not report. */
typedef struct {
    const char *reason;   /* an access that cannot be recovered; NULL: none */
    uint8_t tensor_modes; /* MODE_* of stores and reductions by tensor maps, which are known from the arguments */
} unreported_accesses;

/* This process has used a multicast object. */
void patching_multicast_used(void);

/* Return which accesses of a kernel are not reported. The lock is held. */
unreported_accesses patching_unreported(CUmodule module, const char *function);

/* Forget all contexts and modules: after a fork they belong to the parent. */
void patching_clear(void);

/* --- machine code -------------------------------------------------------------------------------- */

/* The reason for all kernels of a module that is not patched. */
#define MACHINE_CODE_NOT_PATCHED "machine code that could not be parsed or patched"

/* Instructions that work on multicast objects only (multimem). NCCL's kernels contain them even if they are never
 * executed, so they count only in processes that use multicast objects. */
#define MACHINE_CODE_MULTIMEM "multimem instructions"

/* Kinds of unreported accesses whose addresses are known from kernel arguments instead. */
#define MACHINE_CODE_TENSOR_STORES "tensor-map stores"
#define MACHINE_CODE_TENSOR_REDUCTIONS "tensor-map reductions"

/* Find instructions that access global memory but have no Sanitizer_InstructionId, or one whose callback never
 * comes, in a cubin of compute capability 7.0 or newer. Calls ``found`` once per function and kind; instructions
 * of a function that is not a kernel count for all functions.
 *
 * Returns the number of calls of ``found``, or -1 if the cubin cannot be parsed.
 *
 * Not detected: reads of constant memory, and addresses of multicast objects. */
int machine_code_find_unreported(const void *cubin, size_t bytes,
                                 void (*report)(void *context, const char *function, const char *kind),
                                 void *context);

#endif
