/* Kernel arguments: the parameter offsets at which a pointer may be stored, and the arguments that are pointers. */
#ifndef CK_KERNELS_H
#define CK_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "hooks/sanitizer_api.h"
#include "model/allocations.h"
#include "write/record.h"

#define MAX_ACCESSES 512 /* maximum per launch; a fused optimizer step has a few hundred tensors */

struct kernel_layout;

/* The memory that the pointers among the arguments of a launch reach. */
typedef struct {
    uint64_t pointer_hash;                 /* hash of the pointers and their positions */
    allocation *allocations[MAX_ACCESSES]; /* valid while the lock is held */
    size_t allocation_count;
    bool is_complete; /* all arguments are known, and all reached allocations are listed */
} launch_reach;

/* Return the parameter layout of a kernel, or NULL. The driver is queried once per kernel. Calls CUDA: the lock is not
 * held. */
const struct kernel_layout *kernels_layout(CUfunction function);

/* Return the name of a kernel, or NULL. Calls CUDA: the lock is not held. */
const char *kernels_name(CUfunction function);

/* Find the kernel arguments that point into live allocations. The lock is held.
 *
 * Writes one ACCESS record per pointer to ``accesses``, based on ``launch_record``, and returns the count.
 * ``parameters`` is the array passed to cuLaunchKernel, ``extra`` its packed form; one of them is NULL. ``reach``, which
 * may be NULL, is set to the memory that the pointers reach.
 */
size_t kernels_find_pointers(const struct kernel_layout *layout, void **parameters, void **extra,
                             const record *launch_record, record *accesses, size_t limit, launch_reach *reach);

/* Return a hash of all arguments of a launch, or 0 if they are unknown. */
uint64_t kernels_hash_arguments(const struct kernel_layout *layout, void **parameters, void **extra);

/* Read ``count`` consecutive 8-byte words of the parameters. ``first_word`` counts the words of all parameters.
 * Return 1 on success, 0 if the words belong to several parameters (``words`` is then zeroed), -1 if there are no such
 * words. */
int kernels_read_words(const struct kernel_layout *layout, void **parameters, void **extra, size_t first_word,
                       unsigned long long *words, size_t count);

/* Return the string id of the name of a kernel. The lock is held. */
uint32_t kernels_name_id(CUfunction function, const char *name);

/* Remove all function handles: a module was unloaded, so the driver may reuse them. The lock is held. */
void kernels_clear(void);

#endif
