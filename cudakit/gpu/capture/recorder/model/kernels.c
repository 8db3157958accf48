#include "model/kernels.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "hooks/driver_api.h"
#include "model/allocations.h"
#include "recorder.h"
#include "write/spool.h"

#define MAX_PARAMETER_BYTES 32764 /* CUDA Programming Guide, "Function parameters" */
#define MAX_LAYOUTS 65536

/* A larger parameter is treated as a table with unused entries, such as the tensor lists of torch's foreach
 * kernels (ATen/native/cuda/MultiTensorApply.cuh): behind its valid entries lies stale stack memory. The
 * descriptors of a single reduction or GEMM are smaller. */
#define TABLE_BYTES 2048

/* Keys of cuLaunchKernel's ``extra``. */
#define EXTRA_END NULL
#define EXTRA_BUFFER ((void *)1)

typedef struct {
    uint16_t parameter_info;
    uint16_t within; /* byte offset in the parameter */
    uint16_t packed; /* byte offset in the packed parameter buffer */
    uint8_t known;   /* KNOWN_* of a pointer at this offset */
} word;

struct kernel_layout {
    size_t words;
    word word[];
};

static struct kernel_layout *layouts[MAX_LAYOUTS]; /* never freed: a launch may still read one */
static uint32_t last_layout;
static table by_function, names;

static uint64_t key(const void *handle)
{
    return (uint64_t)(uintptr_t)handle;
}

/* --- parameter layout ------------------------------------------------------------------------- */

/* Query the offset and size of a parameter. The handle may be a CUfunction or a CUkernel. */
static int parameter_info(const driver_functions *driver, CUfunction function, size_t i, size_t *offset,
                          size_t *size)
{
    return driver->cuFuncGetParamInfo(function, i, offset, size) == 0 ||
           driver->cuKernelGetParamInfo(function, i, offset, size) == 0;
}

/* Pointers are aligned to 8 bytes, also inside structures. */
static size_t pointer_words(uint16_t number, size_t offset, size_t size, word *into)
{
    size_t count = 0;
    for (size_t at = (offset + 7) & ~(size_t)7; at + 8 <= offset + size; at += 8) {
        if (into)
            into[count] = (word){number, (uint16_t)(at - offset), (uint16_t)at,
                                 size > TABLE_BYTES ? KNOWN_UNCERTAIN : KNOWN_ASSUMED};
        count++;
    }
    return count;
}

static struct kernel_layout *query_layout(const driver_functions *driver, CUfunction function)
{
    size_t words = 0, offset, size;
    uint16_t parameters = 0;
    while (parameters < MAX_PARAMETER_BYTES && parameter_info(driver, function, parameters, &offset, &size) &&
           offset + size <= MAX_PARAMETER_BYTES)
        words += pointer_words(parameters++, offset, size, NULL);
    struct kernel_layout *layout = malloc(sizeof *layout + words * sizeof(word));
    if (!layout)
        return NULL;
    layout->words = 0;
    for (uint16_t i = 0; i < parameters && parameter_info(driver, function, i, &offset, &size); i++)
        layout->words += pointer_words(i, offset, size, layout->word + layout->words);
    return layout;
}

const struct kernel_layout *kernels_layout(CUfunction function)
{
    pthread_mutex_lock(&recorder_lock);
    uint32_t number = function ? table_get(&by_function, key(function)) : 0;
    pthread_mutex_unlock(&recorder_lock);
    if (number)
        return layouts[number];
    const driver_functions *driver = driver_api();
    if (!driver || !function)
        return NULL;
    this_thread.in_own_call = true;
    struct kernel_layout *layout = query_layout(driver, function);
    this_thread.in_own_call = false;
    pthread_mutex_lock(&recorder_lock);
    if (layout && last_layout + 1 < MAX_LAYOUTS) {
        layouts[++last_layout] = layout;
        table_put(&by_function, key(function), last_layout);
    } else {
        free(layout);
        layout = NULL;
    }
    pthread_mutex_unlock(&recorder_lock);
    return layout;
}

const char *kernels_name(CUfunction function)
{
    const driver_functions *driver = driver_api();
    const char *name = NULL;
    if (!driver || !function)
        return NULL;
    this_thread.in_own_call = true;
    if (driver->cuFuncGetName(&name, function) && driver->cuKernelGetName(&name, function))
        name = NULL;
    this_thread.in_own_call = false;
    return name;
}

/* --- pointers --------------------------------------------------------------------------------- */

static const char *packed_buffer(void **extra)
{
    for (int i = 0; extra && i < 8 && extra[i] != EXTRA_END; i += 2)
        if (extra[i] == EXTRA_BUFFER)
            return extra[i + 1];
    return NULL;
}

static record *find(uint64_t pointer, record *accesses, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (accesses[i].access.lo == pointer)
            return accesses + i;
    return NULL;
}

int kernels_read_words(const struct kernel_layout *layout, void **parameters, void **extra, size_t place,
                       unsigned long long *into, size_t count)
{
    const char *buffer = parameters ? NULL : packed_buffer(extra);
    if (!layout || (!parameters && !buffer) || place + count > layout->words)
        return -1;
    const word *first = layout->word + place, *last = first + count - 1;
    memset(into, 0, count * sizeof *into);
    if (last->parameter_info != first->parameter_info || last->within != first->within + 8 * (count - 1))
        return 0;
    memcpy(into, buffer ? buffer + first->packed : (const char *)parameters[first->parameter_info] + first->within,
           count * sizeof *into);
    return 1;
}

size_t kernels_find_pointers(const struct kernel_layout *layout, void **parameters, void **extra,
                             const record *launch_record, record *accesses, size_t limit)
{
    const char *buffer = parameters ? NULL : packed_buffer(extra);
    size_t count = 0;
    if (!layout || (!parameters && !buffer))
        return 0;
    for (size_t i = 0; i < layout->words && count < limit; i++) {
        const word *place = layout->word + i;
        const char *at =
            buffer ? buffer + place->packed : (const char *)parameters[place->parameter_info] + place->within;
        uint64_t value;
        memcpy(&value, at, sizeof value);
        const allocation *target = allocations_find(value);
        record *same = target ? find(value, accesses, count) : NULL;
        if (same && place->known < same->access.known)
            same->access.known = place->known;
        if (!target || same)
            continue;
        record *access = accesses + count++;
        *access = *launch_record;
        access->kind = KIND_ACCESS;
        memset(access->own, 0, sizeof access->own);
        access->access.lo = value;
        access->access.hi = target->hi;
        access->access.mode = MODE_READ | MODE_WRITE;
        access->access.known = place->known;
    }
    return count;
}

uint32_t kernels_name_id(CUfunction function, const char *name)
{
    uint32_t number = function ? table_get(&names, key(function)) : 0;
    if (!number) {
        number = spool_text(name);
        if (function && number)
            table_put(&names, key(function), number);
    }
    return number;
}

void kernels_clear(void)
{
    table_clear(&by_function);
    table_clear(&names);
}
