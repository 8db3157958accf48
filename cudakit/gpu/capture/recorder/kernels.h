/* The arguments of kernels: where in their parameters a pointer can be, and which of them are. */
#ifndef CK_KERNELS_H
#define CK_KERNELS_H

#include <stddef.h>
#include <stdint.h>

#include "record.h"
#include "sanitizer_api.h"

#define MAX_ACCESSES 512 /* of one launch; a fused optimizer step names some hundred tensors */

struct kernel_layout;

/* Ask the driver, once for each kernel, how its parameters lie. Calls CUDA: the lock is not held. */
const struct kernel_layout *kernels_layout(CUfunction function);

/* Read the name of a kernel. Calls CUDA: the lock is not held. */
const char *kernels_name(CUfunction function);

/* Find the pointers among the arguments that lie in live allocations; the lock is held.
 *
 * Writes one ACCESS for each into ``accesses``, like the record given, and returns how many.
 * ``parameters`` is the array of cuLaunchKernel, ``extra`` its packed form; one of them is NULL.
 */
size_t kernels_scan(const struct kernel_layout *layout, void **parameters, void **extra,
                    const record *like, record *accesses, size_t limit);

/* Read ``count`` words of 8 bytes that lie one behind the other in a parameter, from the ``place``th of all on.
 * Returns 1; 0, and zeros, where they are not in one parameter; -1 where there is no such place. */
int kernels_words(const struct kernel_layout *layout, void **parameters, void **extra, size_t place,
                  unsigned long long *into, size_t count);

/* Number the name of a kernel that is being launched; the lock is held. */
uint32_t kernels_number_of_name(CUfunction function, const char *name);

/* Forget what is known of handles: a module was unloaded, and they can come again. The lock is held. */
void kernels_clear(void);

#endif
