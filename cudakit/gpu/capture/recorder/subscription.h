/* Being told by the Sanitizer API: loading it, subscribing, and ending that in time. */
#ifndef CK_SUBSCRIPTION_H
#define CK_SUBSCRIPTION_H

#include <stdbool.h>
#include <stddef.h>

/* Load the library and begin to record; on failure return false and say why. */
bool subscription_begin(const char *library, char *why, size_t why_bytes);

/* End it. Done by itself when the process exits, after the program and before the driver's own handlers. */
void subscription_end(void);

#endif
