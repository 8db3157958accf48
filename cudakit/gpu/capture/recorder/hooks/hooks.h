/* The subscription to callbacks of the Sanitizer API, and the handlers of these callbacks. */
#ifndef CK_HOOKS_H
#define CK_HOOKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hooks/sanitizer_api.h"

/* Load the library of the Sanitizer API and start recording. On failure return false and write the reason to
 * ``error``. */
bool subscription_begin(const char *library, char *error, size_t error_bytes);

/* Stop recording. Also runs at process exit: after the program, and before the driver's exit handlers. */
void subscription_end(void);

/* Handle a callback of the Sanitizer API. */
void on_callback(void *unused, int domain, uint32_t cbid, const void *data);

/* Handle the entry or exit of a driver call. */
void on_driver_call(uint32_t cbid, const Sanitizer_CallbackData *data);

/* Handle the creation or destruction of memory, contexts, streams and modules. */
void on_resource(uint32_t cbid, const void *data);

/* Enqueue a marker before a host function of the program: a host function of the recorder, which records that the
 * stream has reached this point. Called at the entry of the program's call. Calls CUDA: the lock is not held. */
void host_calls_enqueue_marker(CUcontext context, CUstream stream);

#endif
