/* Being told by the Sanitizer API: loading it, subscribing, and ending that in time. */
#ifndef CK_SUBSCRIPTION_H
#define CK_SUBSCRIPTION_H

#include <stdbool.h>
#include <stddef.h>

/* Load the library and begin to record; on failure return false and say why. */
bool subscription_begin(const char *library, char *why, size_t why_bytes);

/* End it: before the interpreter goes, or the process dies at its exit. */
void subscription_end(void);

#endif
