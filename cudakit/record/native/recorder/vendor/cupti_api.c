#define _GNU_SOURCE
#include "vendor/cupti_api.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

/* cuptiGetVersion of CUDA 12.0. Kernel records of older libraries have other fields. */
#define OLDEST_VERSION 18

cupti_functions cupti;

/* Load the library and look up its functions. On failure return false and write the reason to ``error``. */
static bool load_library(const char *path, char *error, size_t error_bytes)
{
    /* If the program's framework has loaded a library with the same soname, the loader returns that library. */
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(error, error_bytes, "%s", dlerror());
        return false;
    }
#define X(field, function, parameters) \
    *(void **)&cupti.field = dlsym(library, #function); \
    if (!cupti.field) { \
        snprintf(error, error_bytes, "%s has no function %s", path, #function); \
        return false; \
    }
    CUPTI_FUNCTIONS(X)
#undef X
    *(void **)&cupti.subscribe_v2 = dlsym(library, "cuptiSubscribe_v2");
    uint32_t version = 0;
    if (cupti.get_version(&version) || version < OLDEST_VERSION) {
        snprintf(error, error_bytes, "%s is too old: version 12.0 of CUPTI or newer is required", path);
        return false;
    }
    return true;
}

/* Return the advice to the user for a failure of CUPTI. */
static const char *remedy_for_result(int result)
{
    switch (result) {
    case CUPTI_ERROR_NOT_INITIALIZED: return "; the CUDA driver is missing or older than the library";
    case CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED:
        return "; another profiler is attached to this process, and CUPTI allows only one";
    case CUPTI_ERROR_INSUFFICIENT_PRIVILEGES:
        return "; the administrator must allow profiling: "
               "https://developer.nvidia.com/ERR_NVGPUCTRPERM";
    case CUPTI_ERROR_VIRTUALIZED_DEVICE_NOT_SUPPORTED:
    case CUPTI_ERROR_VIRTUALIZED_DEVICE_INSUFFICIENT_PRIVILEGES:
        return "; this virtual GPU cannot be profiled unless its administrator enables profiling";
    case CUPTI_ERROR_CONFIDENTIAL_COMPUTING_NOT_SUPPORTED:
        return "; a GPU in confidential-computing mode cannot be profiled";
    case CUPTI_ERROR_NOT_SUPPORTED:
        return "; this system cannot be profiled, for example because of MPS with an older driver";
    default: return "";
    }
}

void library_describe_error(const char *failed_call, int result, char *error, size_t error_bytes)
{
    const char *description = NULL;
    cupti.result_string(result, &description);
    snprintf(error, error_bytes, "%s: %s (%d)%s", failed_call, description ? description : "unknown result",
             result, remedy_for_result(result));
}

/* Describe the failure of the subscription. If another tool is subscribed, subscribe once more by a newer
 * function, which returns the name of the tool. */
static void describe_failed_subscription(int result, CUpti_CallbackFunc callback, char *error, size_t error_bytes)
{
    char name[OLD_SUBSCRIBER_NAME_BYTES + 1] = "";
    CUpti_SubscriberParams parameters = {sizeof parameters, "cudakit", name, OLD_SUBSCRIBER_NAME_BYTES};
    CUpti_SubscriberHandle subscriber = NULL;
    if (result == CUPTI_ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED && cupti.subscribe_v2 &&
        !cupti.subscribe_v2(&subscriber, callback, NULL, &parameters))
        cupti.unsubscribe(subscriber);
    library_describe_error("cuptiSubscribe", result, error, error_bytes);
    const size_t length = strnlen(error, error_bytes);
    if (name[0])
        snprintf(error + length, error_bytes - length, " (the other profiler is %s)", name);
}

CUpti_SubscriberHandle library_subscribe(const char *path, CUpti_CallbackFunc callback, char *error,
                                         size_t error_bytes)
{
    CUpti_SubscriberHandle subscriber = NULL;
    if (!load_library(path, error, error_bytes))
        return NULL;
    const int result = cupti.subscribe(&subscriber, callback, NULL);
    if (!result && subscriber)
        return subscriber;
    describe_failed_subscription(result, callback, error, error_bytes);
    return NULL;
}
