/* Reads the machine code of a module: which instructions the Sanitizer API does not report, and which functions it has. */
#ifndef CK_MACHINE_CODE_H
#define CK_MACHINE_CODE_H

#include <stdbool.h>
#include <stddef.h>

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
