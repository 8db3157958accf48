#define _GNU_SOURCE
#include "hooks/driver_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>

static driver_functions queries;
static bool complete;

static void load_queries(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!library)
        return;
    complete = true;
#define X(name, parameters) \
    *(void **)&queries.name = dlsym(library, #name); \
    complete = complete && queries.name;
    CALLED_FUNCTIONS(X)
#undef X
}

const driver_functions *driver_api(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load_queries);
    return complete ? &queries : NULL;
}
