/* Handles the callbacks of CUPTI.
 *
 * The calls of the CUDA driver that enqueue work, wait for work or allocate memory have one record each, with the Python
 * call stack. Calls of the runtime are recorded as the driver calls that they make. The nodes of graphs get the call
 * sites at which they were captured. */
#ifndef CK_PROFILE_CALLBACKS_H
#define CK_PROFILE_CALLBACKS_H

#include <stdbool.h>
#include <stdint.h>

#include "vendor/cupti_api.h"

/* Find the callback ids of the recorded functions, and those of the functions that start and stop profilers. */
void api_calls_find(void);

/* Enable or disable the callbacks of the recorded functions. Return 0, or the result code of the first failure. Calls
 * CUPTI: the recorder lock is not held. */
int api_calls_enable(CUpti_SubscriberHandle subscriber, bool enable);

/* Enable the callbacks of cudaProfilerStart and cudaProfilerStop. Return 0, or a result code. */
int api_calls_enable_control(CUpti_SubscriberHandle subscriber);

/* Forget the text ids of names in the child of a fork, which has its own trace. */
void api_calls_forked(void);

/* What the program asks of the profile by the function that it calls. */
typedef enum { PROFILER_UNCHANGED, PROFILER_START, PROFILER_STOP } profiler_control;

/* Handle a callback of the runtime or the driver. ``generation`` changes whenever callbacks are enabled; calls are recorded
 * if ``is_open``. */
profiler_control api_calls_on_callback(int domain, uint32_t cbid, const CUpti_CallbackData *data,
                                       uint32_t generation, bool is_open);

/* Enable the callbacks of contexts, modules and graph nodes. Return 0, or the result code of the first failure. */
int resources_enable(CUpti_SubscriberHandle subscriber, bool enable);

/* Handle a callback about a context, module or graph node. */
void resources_on_callback(uint32_t cbid, const CUpti_ResourceData *data);

/* Forget the nodes of the parent in the child of a fork. */
void resources_forked(void);

#endif
