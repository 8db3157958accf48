/* What machine code accesses without the Sanitizer API being able to say so. */
#ifndef CK_MACHINE_CODE_H
#define CK_MACHINE_CODE_H

#include <stddef.h>

/* One of the kinds that are found: what it writes can be known by other means. */
#define MACHINE_CODE_TENSOR_STORES "stores by tensor maps"

/* Look for instructions that read or write global memory and have no Sanitizer_InstructionId, or one that
 * reports nothing, in a cubin of compute capability 7.0 or newer. ``found`` is told each function that
 * has some, once for each kind; one that is no kernel is taken to be called by all.
 *
 * Returns how often ``found`` was told, or -1 where the cubin cannot be read: then nothing is known of it.
 *
 * Not found out: reads of constant memory, and that an address is of a multicast object. */
int machine_code_unseen(const void *cubin, size_t bytes,
                        void (*found)(void *to, const char *function, const char *what), void *to);

#endif
