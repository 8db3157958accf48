#define _GNU_SOURCE
#include "vendor/sanitizer_api.h"

#include <dlfcn.h>
#include <stdio.h>

sanitizer_api sanitizer;

bool sanitizer_load(const char *path, char *error, size_t error_bytes)
{
    static const char *const NAMES[] = {
        "sanitizerSubscribe",
        "sanitizerUnsubscribe",
        "sanitizerEnableDomain",
        "sanitizerEnableCallback",
        "sanitizerGetStreamHandle",
        "sanitizerGetResultString",
        "sanitizerAddPatches",
        "sanitizerPatchInstructions",
        "sanitizerPatchModule",
        "sanitizerUnpatchModule",
        "sanitizerSetLaunchCallbackData",
        "sanitizerAlloc",
        "sanitizerFree",
        "sanitizerMemset",
        "sanitizerMemcpyDeviceToHost",
        "sanitizerMemcpyHostToDeviceAsync",
        "sanitizerStreamSynchronize",
    };
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        snprintf(error, error_bytes, "%s", dlerror());
        return false;
    }
    _Static_assert(sizeof sanitizer == sizeof NAMES, "a name for each function");
    for (size_t i = 0; i < sizeof NAMES / sizeof *NAMES; i++) {
        ((void **)&sanitizer)[i] = dlsym(library, NAMES[i]);
        if (!((void **)&sanitizer)[i]) {
            snprintf(error, error_bytes, "%s has no function %s", path, NAMES[i]);
            return false;
        }
    }
    return true;
}
