/* The library of CUPTI, and the subscription to its callbacks. */
#ifndef CK_PROFILE_LIBRARY_H
#define CK_PROFILE_LIBRARY_H

#include <stdbool.h>
#include <stddef.h>

#include "profile/cupti_api.h"

/* The functions of the loaded library; valid after library_subscribe(). */
extern cupti_functions cupti;

/* Load the library at ``path`` and subscribe ``on_callback``. On failure return NULL and write the reason and a remedy
 * to ``error``. */
CUpti_SubscriberHandle library_subscribe(const char *path, CUpti_CallbackFunc on_callback, char *error,
                                         size_t error_bytes);

/* Write the failed call, the description of its result and a remedy to ``error``. */
void library_describe_error(const char *failed_call, int result, char *error, size_t error_bytes);

#endif
