#define _GNU_SOURCE
#include "vendor/driver_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>

static driver_functions functions;
static bool has_all_functions;

static void load_functions(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!library)
        return;
    has_all_functions = true;
#define X(name, parameters) \
    *(void **)&functions.name = dlsym(library, #name); \
    has_all_functions = has_all_functions && functions.name;
    CALLED_FUNCTIONS(X)
#undef X
#define X(name, parameters) *(void **)&functions.name = dlsym(library, #name);
    OPTIONAL_FUNCTIONS(X)
#undef X
}

const driver_functions *driver_api(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load_functions);
    return has_all_functions ? &functions : NULL;
}
