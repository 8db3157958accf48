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

/* Start recording NVTX ranges without a subscription, to a spool that is open. Does nothing if already recording. */
void tracing_begin(void);

/* Start or stop recording the calls of NVTX. */
void nvtx_enable(bool enable);

/* Make NVTX load this library in the process and its children. Return NULL, or the path of another library that the user
 * has chosen and that is loaded instead. Call it before the program uses NVTX. */
const char *nvtx_inject(void);

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
