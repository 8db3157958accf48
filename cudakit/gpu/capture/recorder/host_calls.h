/* Functions of the host that are put into streams: when they run. */
#ifndef CK_HOST_CALLS_H
#define CK_HOST_CALLS_H

#include "sanitizer_api.h"

/* At the entry of a call that puts a function of the host into a stream: put another one before it, which
 * writes down that the stream has come so far. Calls CUDA: the lock is not held. */
void host_calls_expect(CUcontext context, CUstream stream);

#endif
