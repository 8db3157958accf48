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

/* Keys in cuLaunchKernel's ``extra`` array: CU_LAUNCH_PARAM_END and CU_LAUNCH_PARAM_BUFFER_POINTER. */
#define EXTRA_END NULL
#define EXTRA_BUFFER ((void *)1)

typedef struct {
    uint16_t parameter_index;
    uint16_t offset_in_parameter; /* byte offset in the parameter */
    uint16_t offset_in_buffer;    /* byte offset in the packed parameter buffer */
    uint8_t certainty;            /* PRECISION_* value for a pointer at this offset */
} parameter_word;

typedef struct {
    uint16_t offset, size; /* in the packed parameter buffer, in bytes */
} parameter_span;

struct kernel_layout {
    size_t word_count, parameter_count;
    parameter_span *spans; /* the parameters */
    parameter_word words[];
};

static struct kernel_layout
    *layouts[MAX_LAYOUTS]; /* entries are never freed, because a launch may still read them */
static uint32_t last_layout;
static hash_table layout_numbers, name_ids;

static uint64_t handle_key(const void *handle)
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

/* Append the words of a parameter that may hold a pointer: pointers are aligned to 8 bytes, also inside structs.
 * ``words`` NULL: only count them. */
static size_t append_pointer_words(uint16_t parameter_index, size_t offset, size_t size, parameter_word *words)
{
    size_t count = 0;
    for (size_t word_offset = (offset + 7) & ~(size_t)7; word_offset + 8 <= offset + size; word_offset += 8) {
        if (words)
            words[count] =
                (parameter_word){parameter_index, (uint16_t)(word_offset - offset), (uint16_t)word_offset,
                                 size > TABLE_BYTES ? PRECISION_UNCERTAIN : PRECISION_ASSUMED};
        count++;
    }
    return count;
}

/* Query the parameters of a kernel from the driver. Return NULL if no memory is left. */
static struct kernel_layout *query_layout(const driver_functions *driver, CUfunction function)
{
    size_t word_count = 0, offset, size;
    uint16_t parameter_count = 0;
    while (parameter_count < MAX_PARAMETER_BYTES &&
           parameter_info(driver, function, parameter_count, &offset, &size) &&
           offset + size <= MAX_PARAMETER_BYTES)
        word_count += append_pointer_words(parameter_count++, offset, size, NULL);
    struct kernel_layout *layout = malloc(sizeof *layout + word_count * sizeof(parameter_word));
    parameter_span *spans = calloc(parameter_count + 1u, sizeof *spans);
    if (!layout || !spans) {
        free(layout);
        free(spans);
        return NULL;
    }
    *layout = (struct kernel_layout){.spans = spans};
    for (uint16_t i = 0; i < parameter_count && parameter_info(driver, function, i, &offset, &size); i++) {
        spans[layout->parameter_count++] = (parameter_span){(uint16_t)offset, (uint16_t)size};
        layout->word_count += append_pointer_words(i, offset, size, layout->words + layout->word_count);
    }
    return layout;
}

const struct kernel_layout *kernels_layout(CUfunction function)
{
    pthread_mutex_lock(&recorder_lock);
    uint32_t number = function ? hash_table_get(&layout_numbers, handle_key(function)) : 0;
    pthread_mutex_unlock(&recorder_lock);
    if (number)
        return layouts[number];
    const driver_functions *driver = driver_api();
    if (!driver || !function)
        return NULL;
    this_thread.in_recorder_call = true;
    struct kernel_layout *layout = query_layout(driver, function);
    this_thread.in_recorder_call = false;
    pthread_mutex_lock(&recorder_lock);
    if (layout && last_layout + 1 < MAX_LAYOUTS) {
        layouts[++last_layout] = layout;
        hash_table_put(&layout_numbers, handle_key(function), last_layout);
    } else if (layout) {
        free(layout->spans);
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
    this_thread.in_recorder_call = true;
    if (driver->cuFuncGetName(&name, function) && driver->cuKernelGetName(&name, function))
        name = NULL;
    this_thread.in_recorder_call = false;
    return name;
}

/* --- pointers --------------------------------------------------------------------------------- */

/* Return the packed parameters in cuLaunchKernel's ``extra`` array, or NULL. */
static const char *packed_buffer(void **extra)
{
    for (int i = 0; extra && i < 8 && extra[i] != EXTRA_END; i += 2)
        if (extra[i] == EXTRA_BUFFER)
            return extra[i + 1];
    return NULL;
}

static record *find_access(uint64_t pointer, record *accesses, size_t count)
{
    for (size_t i = 0; i < count; i++)
        if (accesses[i].access.lo == pointer)
            return accesses + i;
    return NULL;
}

int kernels_read_words(const struct kernel_layout *layout, void **parameters, void **extra, size_t first_word,
                       unsigned long long *words, size_t count)
{
    const char *buffer = parameters ? NULL : packed_buffer(extra);
    if (!layout || (!parameters && !buffer) || first_word + count > layout->word_count)
        return -1;
    const parameter_word *first = layout->words + first_word, *last = first + count - 1;
    memset(words, 0, count * sizeof *words);
    if (last->parameter_index != first->parameter_index ||
        last->offset_in_parameter != first->offset_in_parameter + 8 * (count - 1))
        return 0;
    memcpy(words,
           buffer ? buffer + first->offset_in_buffer
                  : (const char *)parameters[first->parameter_index] + first->offset_in_parameter,
           count * sizeof *words);
    return 1;
}

static uint64_t mix(uint64_t hash, uint64_t value)
{
    hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
    return hash ^ hash >> 32;
}

/* Add an argument that is a pointer: the word at index ``word``, and the pointer at index ``index``. */
static void add_pointer(launch_arguments *arguments, size_t word, size_t index, uint64_t pointer,
                        allocation *target)
{
    arguments->pattern_hash = mix(arguments->pattern_hash, word << 32 | index << 8 | (pointer & 255));
    if (index < arguments->pointer_count)
        return;
    arguments->pointers[arguments->pointer_count++] = pointer;
    arguments->pointer_hash = mix(arguments->pointer_hash, pointer);
    arguments->distance_hash = mix(arguments->distance_hash, pointer - arguments->pointers[0]);
    for (size_t i = arguments->allocation_count; i-- > 0;)
        if (arguments->allocations[i] == target)
            return;
    arguments->allocations[arguments->allocation_count++] = target;
}

static const char *parameter_bytes(const char *buffer, void **parameters, uint16_t parameter, uint16_t offset)
{
    return buffer ? buffer + offset : parameters[parameter];
}

/* Add the bytes of all parameters that are not part of a word. */
static void add_other_bytes(launch_arguments *arguments, const struct kernel_layout *layout, const char *buffer,
                            void **parameters)
{
    for (size_t i = 0; i < layout->parameter_count; i++) {
        const parameter_span span = layout->spans[i];
        const char *bytes = parameter_bytes(buffer, parameters, (uint16_t)i, span.offset);
        const size_t begin = (8u - span.offset % 8u) % 8u < span.size ? (8u - span.offset % 8u) % 8u : span.size;
        const size_t end = begin + (span.size - begin) / 8 * 8;
        uint64_t head = 0, tail = 0;
        memcpy(&head, bytes, begin);
        memcpy(&tail, bytes + end, span.size - end);
        arguments->scalar_hash = mix(mix(arguments->scalar_hash, head), tail);
    }
}

size_t kernels_find_pointers(const struct kernel_layout *layout, void **parameters, void **extra,
                             const record *launch_record, record *accesses, size_t limit,
                             launch_arguments *arguments)
{
    const char *buffer = parameters ? NULL : packed_buffer(extra);
    const bool are_known = layout && (parameters || buffer);
    size_t count = 0;
    if (arguments) { /* the arrays are not cleared, because they are large */
        arguments->pointer_count = arguments->allocation_count = 0;
        arguments->pointer_hash = arguments->distance_hash = arguments->pattern_hash = arguments->scalar_hash = 0;
        arguments->is_complete = are_known;
    }
    if (!are_known)
        return 0;
    for (size_t i = 0; i < layout->word_count && count < limit; i++) {
        const parameter_word *word = layout->words + i;
        const char *source = buffer ? buffer + word->offset_in_buffer
                                    : (const char *)parameters[word->parameter_index] + word->offset_in_parameter;
        uint64_t value;
        memcpy(&value, source, sizeof value);
        allocation *target = allocations_find(value);
        record *existing_access = target ? find_access(value, accesses, count) : NULL;
        if (target && arguments)
            add_pointer(arguments, i, existing_access ? (size_t)(existing_access - accesses) : count, value,
                        target);
        else if (arguments)
            arguments->scalar_hash = mix(mix(arguments->scalar_hash, i), value);
        if (existing_access && word->certainty < existing_access->access.precision)
            existing_access->access.precision = word->certainty;
        if (!target || existing_access)
            continue;
        record *access = accesses + count++;
        *access = *launch_record;
        access->kind = KIND_ACCESS;
        memset(access->kind_fields, 0, sizeof access->kind_fields);
        access->access.lo = value;
        access->access.hi = target->hi;
        access->access.mode = MODE_READ | MODE_WRITE;
        access->access.precision = word->certainty;
    }
    if (arguments && count == limit)
        arguments->is_complete = false;
    else if (arguments)
        add_other_bytes(arguments, layout, buffer, parameters);
    return count;
}

uint32_t kernels_name_id(CUfunction function, const char *name)
{
    uint32_t id = function ? hash_table_get(&name_ids, handle_key(function)) : 0;
    if (!id) {
        id = spool_text(name);
        if (function && id)
            hash_table_put(&name_ids, handle_key(function), id);
    }
    return id;
}

void kernels_clear(void)
{
    hash_table_clear(&layout_numbers);
    hash_table_clear(&name_ids);
}
