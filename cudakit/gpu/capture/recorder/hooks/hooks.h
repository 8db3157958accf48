/* Callbacks from CUDA: the subscription to the Sanitizer API, and the handlers it calls. */
#ifndef CK_HOOKS_H
#define CK_HOOKS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "hooks/sanitizer_api.h"

/* Load the library and start recording; on failure return false and write the reason to ``why``. */
bool subscription_begin(const char *library, char *error, size_t error_bytes);

/* Stop recording. Also runs at process exit: after the program, before the driver's own exit handlers. */
void subscription_end(void);

/* Handle a callback of the Sanitizer API. */
void on_callback(void *unused, int domain, uint32_t cbid, const void *data);

/* Handle the entry or exit of a driver call. */
void on_driver_call(uint32_t cbid, const Sanitizer_CallbackData *data);

/* Handle the creation or destruction of memory, contexts, streams and modules. */
void on_resource(uint32_t cbid, const void *data);

/* At the entry of a call that enqueues a host function: enqueue a function of our own before it, which records
 * that the stream reached this point. Calls CUDA: the lock is not held. */
void host_calls_enqueue_marker(CUcontext context, CUstream stream);

#endif
