/* What machine code accesses that the Sanitizer API does not tell. */
#ifndef CK_MACHINE_CODE_H
#define CK_MACHINE_CODE_H

#include <stddef.h>

#define MACHINE_CODE_TENSOR_STORES "a store through a tensor map"

int machine_code_unseen(const void *cubin, size_t bytes,
                        void (*found)(void *to, const char *function, const char *what), void *to);

#endif
