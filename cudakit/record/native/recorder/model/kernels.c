#include "model/kernels.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "model/allocations.h"
#include "recorder.h"
#include "vendor/driver_api.h"
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
    uint16_t offset, size; /* offset and size in bytes, in the packed parameter buffer */
} parameter_span;

struct kernel_layout {
    size_t word_count, parameter_count;
    parameter_span *spans; /* offset and size of each parameter */
    parameter_word words[];
};

__thread entered_launch this_launch;

static struct kernel_layout
    *layouts[MAX_LAYOUTS]; /* entries are never freed, because a launch may still read them */
static uint32_t last_layout;
static hash_table layout_numbers, name_ids; /* index in ``layouts``, and id of the name, by function handle */
static hash_table layout_numbers_by_hash;   /* index in ``layouts``, by layout_hash() */

/* Names of functions, which the driver keeps until their module is unloaded */
static const char **driver_names;
static size_t driver_name_count, driver_name_capacity;
static hash_table driver_name_indices; /* index in ``driver_names`` plus 1, by function handle */

static uint64_t handle_key(const void *handle)
{
    return (uint64_t)(uintptr_t)handle;
}

/* --- parameter layout ------------------------------------------------------------------------- */

/* Query the offset and size of a parameter. The handle may be a CUfunction or a CUkernel. */
static int query_parameter(const driver_functions *driver, CUfunction function, size_t i, size_t *offset,
                           size_t *size)
{
    return driver->cuFuncGetParamInfo(function, i, offset, size) == 0 ||
           driver->cuKernelGetParamInfo(function, i, offset, size) == 0;
}

/* Append the words of a parameter that may hold a pointer: pointers are aligned to 8 bytes, also inside structs. If
 * ``words`` is NULL, only count the words. */
static size_t append_pointer_words(uint16_t parameter_index, size_t offset, size_t size, parameter_word *words)
{
    size_t word_count = 0;
    for (size_t word_offset = (offset + 7) & ~(size_t)7; word_offset + 8 <= offset + size; word_offset += 8) {
        if (words)
            words[word_count] =
                (parameter_word){parameter_index, (uint16_t)(word_offset - offset), (uint16_t)word_offset,
                                 size > TABLE_BYTES ? PRECISION_UNCERTAIN : PRECISION_ASSUMED};
        word_count++;
    }
    return word_count;
}

/* Query the parameters of a kernel from the driver. Return NULL if no memory is left. */
static struct kernel_layout *query_layout(const driver_functions *driver, CUfunction function)
{
    size_t word_count = 0, offset, size;
    uint16_t parameter_count = 0;
    while (parameter_count < MAX_PARAMETER_BYTES &&
           query_parameter(driver, function, parameter_count, &offset, &size) &&
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
    for (uint16_t i = 0; i < parameter_count && query_parameter(driver, function, i, &offset, &size); i++) {
        spans[layout->parameter_count++] = (parameter_span){(uint16_t)offset, (uint16_t)size};
        layout->word_count += append_pointer_words(i, offset, size, layout->words + layout->word_count);
    }
    return layout;
}

static void free_layout(struct kernel_layout *layout)
{
    if (layout)
        free(layout->spans);
    free(layout);
}

static uint64_t layout_hash(const struct kernel_layout *layout)
{
    uint64_t hash = 0xcbf29ce484222325ull; /* FNV-1a */
    for (size_t i = 0; i < layout->parameter_count; i++)
        hash = (hash ^ ((uint64_t)layout->spans[i].offset << 16 | layout->spans[i].size)) * 0x100000001b3ull;
    return hash | 1;
}

/* Return whether two layouts are equal. The words of a layout follow from its spans. */
static bool are_equal_layouts(const struct kernel_layout *left, const struct kernel_layout *right)
{
    return left->parameter_count == right->parameter_count &&
           !memcmp(left->spans, right->spans, left->parameter_count * sizeof *left->spans);
}

/* Add a layout, or find an equal one and free the new one. Return the index of the added or equal layout in
 * ``layouts``. If there is no space left, free the new layout and return 0. The recorder lock is held. */
static uint32_t add_layout(struct kernel_layout *layout)
{
    if (!layout)
        return 0;
    const uint64_t hash = layout_hash(layout);
    const uint32_t equal_number = hash_table_get(&layout_numbers_by_hash, hash);
    if (equal_number && are_equal_layouts(layouts[equal_number], layout)) {
        free_layout(layout);
        return equal_number;
    }
    if (last_layout + 1 >= MAX_LAYOUTS) {
        free_layout(layout);
        return 0;
    }
    layouts[++last_layout] = layout;
    if (!equal_number)
        hash_table_put(&layout_numbers_by_hash, hash, last_layout);
    return last_layout;
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
    number = add_layout(layout);
    if (number)
        hash_table_put(&layout_numbers, handle_key(function), number);
    pthread_mutex_unlock(&recorder_lock);
    return number ? layouts[number] : NULL;
}

/* Store the name of a function that the driver returned. The recorder lock is held. */
static void add_driver_name(CUfunction function, const char *name)
{
    const char **new_names =
        array_reserve(driver_names, &driver_name_capacity, driver_name_count + 1, sizeof *driver_names, 256);
    if (!new_names)
        return;
    driver_names = new_names;
    driver_names[driver_name_count] = name;
    if (!hash_table_put(&driver_name_indices, handle_key(function), (uint32_t)driver_name_count + 1))
        driver_name_count++;
}

const char *kernels_name(CUfunction function)
{
    const driver_functions *driver = driver_api();
    const char *name = NULL;
    if (!driver || !function)
        return NULL;
    pthread_mutex_lock(&recorder_lock);
    const uint32_t index_plus_one = hash_table_get(&driver_name_indices, handle_key(function));
    if (index_plus_one)
        name = driver_names[index_plus_one - 1];
    pthread_mutex_unlock(&recorder_lock);
    if (name)
        return name;
    this_thread.in_recorder_call = true;
    if (driver->cuFuncGetName(&name, function) && driver->cuKernelGetName(&name, function))
        name = NULL;
    this_thread.in_recorder_call = false;
    pthread_mutex_lock(&recorder_lock);
    if (name)
        add_driver_name(function, name);
    pthread_mutex_unlock(&recorder_lock);
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

/* A hash table of the pointers of the current launch: their indices plus 1. The table has more slots than pointers. */
#define POINTER_SLOTS 1024
static struct {
    uint32_t launch_number; /* number of the launch that filled the slot; the slots of other launches are free */
    uint32_t index;
} pointer_slots[POINTER_SLOTS]; /* protected by the recorder lock */
static uint32_t current_launch_number;

/* Return the index of a pointer among the pointers of the launch; a new pointer is added. */
static size_t pointer_index(launch_arguments *arguments, uint64_t pointer)
{
    size_t slot = (size_t)(pointer * 0x9E3779B97F4A7C15ull >> 40) % POINTER_SLOTS;
    for (; pointer_slots[slot].launch_number == current_launch_number; slot = (slot + 1) % POINTER_SLOTS)
        if (arguments->pointers[pointer_slots[slot].index] == pointer)
            return pointer_slots[slot].index;
    pointer_slots[slot].launch_number = current_launch_number;
    pointer_slots[slot].index = (uint32_t)arguments->pointer_count;
    arguments->pointers[arguments->pointer_count] = pointer;
    return arguments->pointer_count++;
}

/* Add an allocation that the launch reaches, unless it has been added. */
static void add_allocation(launch_arguments *arguments, allocation *reached, uint8_t certainty)
{
    if (reached->last_launch_number == current_launch_number) {
        uint8_t *lowest_certainty = arguments->allocation_certainties + reached->index_in_launch;
        *lowest_certainty = certainty < *lowest_certainty ? certainty : *lowest_certainty;
        return;
    }
    reached->last_launch_number = current_launch_number;
    reached->index_in_launch = (uint32_t)arguments->allocation_count;
    arguments->allocation_certainties[arguments->allocation_count] = certainty;
    arguments->allocations[arguments->allocation_count++] = reached;
}

/* Add an argument that is a pointer: the word at index ``word_index``. */
static void add_pointer(launch_arguments *arguments, size_t word_index, uint64_t pointer, uint8_t certainty,
                        allocation *reached)
{
    const size_t old_count = arguments->pointer_count, index = pointer_index(arguments, pointer);
    arguments->pattern_hash = mix_hash(arguments->pattern_hash, word_index << 32 | index << 8 | (pointer & 255));
    if (index < old_count) {
        if (certainty < arguments->certainties[index])
            arguments->certainties[index] = certainty;
        add_allocation(arguments, reached, certainty);
        return;
    }
    arguments->allocation_ends[index] = reached->hi;
    arguments->certainties[index] = certainty;
    arguments->pointer_hash = mix_hash(arguments->pointer_hash, pointer);
    arguments->distance_hash = mix_hash(arguments->distance_hash, pointer - arguments->pointers[0]);
    add_allocation(arguments, reached, certainty);
}

static const char *parameter_bytes(const char *buffer, void **parameters, uint16_t parameter, uint16_t offset)
{
    return buffer ? buffer + offset : parameters[parameter];
}

/* Return the hash of scalars with one more scalar. The hash omits the positions of the scalars, because they follow from
 * the positions of the pointers. This function uses fewer instructions than mix_hash(), because a fused kernel has
 * hundreds of scalars. */
static uint64_t mix_scalar(uint64_t hash, uint64_t value)
{
    return ((hash << 5 | hash >> 59) ^ value) * 0x9E3779B97F4A7C15ull;
}

/* Hash those bytes of the parameters that lie outside of aligned 8-byte words. */
static void add_other_bytes(launch_arguments *arguments, const struct kernel_layout *layout, const char *buffer,
                            void **parameters)
{
    for (size_t i = 0; i < layout->parameter_count; i++) {
        const parameter_span span = layout->spans[i];
        const char *bytes = parameter_bytes(buffer, parameters, (uint16_t)i, span.offset);
        const size_t words_begin =
            (8u - span.offset % 8u) % 8u < span.size ? (8u - span.offset % 8u) % 8u : span.size;
        const size_t words_end = words_begin + (span.size - words_begin) / 8 * 8;
        uint64_t bytes_before_words = 0, bytes_after_words = 0;
        memcpy(&bytes_before_words, bytes, words_begin);
        memcpy(&bytes_after_words, bytes + words_end, span.size - words_end);
        if (bytes_before_words | bytes_after_words)
            arguments->scalar_hash =
                mix_hash(mix_hash(arguments->scalar_hash ^ i, bytes_before_words), bytes_after_words);
    }
}

/* Begin the arguments of the next launch. The arrays are not cleared, because they are large. */
static void begin_arguments(launch_arguments *arguments)
{
    current_launch_number++;
    arguments->pointer_count = arguments->allocation_count = 0;
    arguments->pointer_hash = arguments->distance_hash = arguments->pattern_hash = arguments->scalar_hash = 0;
    arguments->is_complete = false;
}

void kernels_find_arguments(const struct kernel_layout *layout, void **parameters, void **extra,
                            launch_arguments *arguments)
{
    const char *buffer = parameters ? NULL : packed_buffer(extra);
    begin_arguments(arguments);
    if (!layout || (!parameters && !buffer))
        return;
    for (size_t i = 0; i < layout->word_count && arguments->pointer_count < MAX_ACCESSES; i++) {
        const parameter_word *word = layout->words + i;
        const char *source = buffer ? buffer + word->offset_in_buffer
                                    : (const char *)parameters[word->parameter_index] + word->offset_in_parameter;
        uint64_t value;
        memcpy(&value, source, sizeof value);
        allocation *reached_allocation = allocations_find(value);
        if (reached_allocation)
            add_pointer(arguments, i, value, word->certainty, reached_allocation);
        else
            arguments->scalar_hash = mix_scalar(arguments->scalar_hash, value);
    }
    arguments->is_complete = arguments->pointer_count < MAX_ACCESSES;
    if (arguments->is_complete)
        add_other_bytes(arguments, layout, buffer, parameters);
}

const launch_arguments *kernels_arguments_of_launch(void)
{
    static launch_arguments arguments;
    /* The launch whose arguments these are, and the allocations at that time. */
    static uint64_t call_number;
    static uint32_t thread, allocation_changes;
    const bool are_found = this_launch.layout && call_number == this_thread.call_number &&
                           thread == this_thread.id && allocation_changes == allocations_change_count();
    if (!are_found)
        kernels_find_arguments(this_launch.layout, this_launch.parameters, this_launch.extra, &arguments);
    call_number = this_thread.call_number;
    thread = this_thread.id;
    allocation_changes = allocations_change_count();
    return &arguments;
}

uint64_t kernels_hash_arguments(const launch_arguments *arguments)
{
    const uint64_t hash = mix_hash(arguments->pattern_hash, arguments->scalar_hash);
    return arguments->is_complete ? mix_hash(hash, arguments->pointer_hash) | 1 : 0;
}

/* Return a record of this kind with the common fields of the launch record. */
static record record_of_call(const record *launch_record, uint16_t kind)
{
    record rec = *launch_record;
    rec.kind = kind;
    memset(rec.kind_fields, 0, sizeof rec.kind_fields);
    return rec;
}

size_t kernels_write_accesses(const launch_arguments *arguments, const record *launch_record, record *accesses)
{
    for (size_t i = 0; i < arguments->pointer_count; i++) {
        accesses[i] = record_of_call(launch_record, KIND_ACCESS);
        accesses[i].access.lo = arguments->pointers[i];
        accesses[i].access.hi = arguments->allocation_ends[i];
        accesses[i].access.mode = MODE_READ | MODE_WRITE;
        accesses[i].access.precision = arguments->certainties[i];
    }
    return arguments->pointer_count;
}

size_t kernels_write_pointers(const uint64_t *pointers, size_t pointer_count, const record *launch_record,
                              record *pointer_records)
{
    const size_t record_count = (pointer_count + POINTERS_PER_RECORD - 1) / POINTERS_PER_RECORD;
    for (size_t i = 0; i < record_count; i++)
        pointer_records[i] = record_of_call(launch_record, KIND_TEMPLATE_POINTERS);
    for (size_t i = 0; i < pointer_count; i++)
        pointer_records[i / POINTERS_PER_RECORD].template_pointers.pointers[i % POINTERS_PER_RECORD] = pointers[i];
    return record_count;
}

/* --- tensor maps ---------------------------------------------------------------------------------- */

/* Read ``count`` consecutive 8-byte words of the parameters. ``first_word`` counts the words of all parameters.
 * Return 1 on success, 0 if the words belong to several parameters (``words`` is then zeroed), -1 if there are no such
 * words. */
static int read_words(const struct kernel_layout *layout, void **parameters, void **extra, size_t first_word,
                      unsigned long long *words, size_t count)
{
    const char *buffer = parameters ? NULL : packed_buffer(extra);
    if (!layout || (!parameters && !buffer) || first_word + count > layout->word_count)
        return -1;
    const parameter_word *first_parameter_word = layout->words + first_word,
                         *last_parameter_word = first_parameter_word + count - 1;
    memset(words, 0, count * sizeof *words);
    if (last_parameter_word->parameter_index != first_parameter_word->parameter_index ||
        last_parameter_word->offset_in_parameter != first_parameter_word->offset_in_parameter + 8 * (count - 1))
        return 0;
    memcpy(words,
           buffer ? buffer + first_parameter_word->offset_in_buffer
                  : (const char *)parameters[first_parameter_word->parameter_index] +
                        first_parameter_word->offset_in_parameter,
           count * sizeof *words);
    return 1;
}

/* Return whether parameter words are a tensor map. Words that only look like one are excluded: the tensor must be
 * inside a live allocation. The recorder lock is held. */
static bool is_tensor_map(const ck_u64 content[CK_MAP_WORDS])
{
    tensor_map map;
    uint64_t end;
    const allocation *container = content[0] % 16 ? NULL : allocations_find(content[0]);
    if (!container || !tensor_map_decode(content, &map) || map.rank < 2)
        return false;
    for (unsigned i = 1; i < map.rank; i++)
        if (map.dims[i] > 1 && map.strides[i] && map.strides[i] < map.strides[0])
            return false;
    return tensor_map_end(&map, &end) && end <= container->hi;
}

bool kernels_add_tensor_maps(tma_store_set *set, uint32_t launch, uint8_t mode, const struct kernel_layout *layout,
                             void **parameters, void **extra)
{
    ck_u64 map_words[CK_MAP_WORDS];
    size_t old_map_count = set->map_count;
    for (size_t i = 0; read_words(layout, parameters, extra, i, map_words, CK_MAP_WORDS) >= 0; i++)
        if (is_tensor_map(map_words) && !tma_stores_add(set, launch, mode, map_words)) {
            set->map_count = old_map_count;
            break;
        }
    return set->map_count > old_map_count;
}

/* --- names ---------------------------------------------------------------------------------------- */

uint32_t kernels_name_id(CUfunction function, const char *name)
{
    uint32_t name_id = function ? hash_table_get(&name_ids, handle_key(function)) : 0;
    if (!name_id) {
        name_id = spool_text(name);
        if (function && name_id)
            hash_table_put(&name_ids, handle_key(function), name_id);
    }
    return name_id;
}

void kernels_clear(void)
{
    hash_table_clear(&layout_numbers);
    hash_table_clear(&name_ids);
    hash_table_clear(&driver_name_indices);
    driver_name_count = 0;
}
