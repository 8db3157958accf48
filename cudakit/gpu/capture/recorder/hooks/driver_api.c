#define _GNU_SOURCE
#include "hooks/driver_api.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdbool.h>

static driver_queries queries;
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
    DRIVER_QUERIES(X)
#undef X
}

const driver_queries *driver(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, load_queries);
    return complete ? &queries : NULL;
}
