/* Records the calls of the CUDA driver that enqueue work, wait for work or allocate memory: one record for each call,
 * with the Python call stack. Calls of the runtime are recorded as the driver calls that they make. */
#ifndef CK_PROFILE_API_CALLS_H
#define CK_PROFILE_API_CALLS_H

#include <stdbool.h>
#include <stdint.h>

#include "profile/cupti_api.h"

/* Find the callback ids of the recorded functions, and those of the functions that start and stop profilers. */
void api_calls_find(void);

/* Enable or disable the callbacks of the recorded functions. Return 0, or the result code of the first failure. Calls
 * CUPTI: the recorder lock is not held. */
int api_calls_enable(CUpti_SubscriberHandle subscriber, bool enable);

/* Enable the callbacks of cudaProfilerStart and cudaProfilerStop. Return 0, or a result code. */
int api_calls_enable_control(CUpti_SubscriberHandle subscriber);

/* Forget the text ids of names in the child of a fork, which has its own trace. */
void api_calls_forked(void);

/* Handle a callback of the runtime or the driver. */
void api_calls_on_callback(int domain, uint32_t cbid, const CUpti_CallbackData *data);

#endif
