#include "decode/tensor_maps.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"

/* Positions of the fields in a tensor map, in 32-bit words. They are derived from the fields that the PTX instruction
 * tensormap.replace writes, and agree with maps that the driver encoded. */
enum {
    ADDRESS = 0,
    FORMAT = 2,
    STRIDES = 3,           /* strides of dimensions 1 to 4, in units of 16 bytes, without their upper 4 bits */
    STRIDE_UPPER_BITS = 7, /* upper bits of the strides: 4 bits each */
    DIMS = 8,              /* sizes of the dimensions minus one */
    ELEMENT_STRIDES = 13,  /* element strides minus one: 3 bits each */
    BOX =
        13, /* box sizes minus one: a byte each, from the top byte of this word on; im2col: one size, of the channels */
    CORNERS = 14, /* im2col: lower corner in the lower half, upper corner in the upper half */
    PIXELS = 15,  /* im2col: number of pixels minus one, in the lower 10 bits */
    WORDS = 16,
};

#define BITS(word, shift, count) ((word) >> (shift) & ((1u << (count)) - 1))

/* Fields of the word FORMAT, from the lowest bit: format kind, rank minus one, element type, interleave. The next
 * fields do not affect addresses: swizzle, out-of-bounds fill, TF32 rounding, L2 promotion. The remaining bits are
 * always 0. */
#define FORMAT_KIND(form) BITS(form, 0, 4) /* bit 0: im2col; bit 1: set by cuBLAS and cuDNN, not by the driver */
#define RANK(form) (BITS(form, 4, 3) + 1)
#define TYPE(form) BITS(form, 7, 4)
#define INTERLEAVE(form) BITS(form, 11, 2)
#define UNKNOWN_BITS(form) BITS(form, 23, 9)

static const uint8_t BYTES_OF_TYPE[16] = {
    1, 2, 4, 4, 8, 8, /* integers: u8, u16, u32, s32, u64, s64 */
    2, 4, 4, 8, 2,    /* f16, f32 (and tf32), f32 and tf32 with denormals flushed to zero, f64, bf16 */
};

/* Decode the fields of an im2col map. Corner coordinates have 16, 8 or 5 signed bits, for 1, 2 or 3 spatial dimensions
 * (CUDA Driver API, cuTensorMapEncodeIm2col). */
static bool decode_im2col(const uint32_t words[WORDS], tensor_map *map)
{
    if (map->rank < 3 || words[PIXELS] >> 10)
        return false;
    const unsigned spatial_rank = map->rank - 2, bits = 16 / spatial_rank;
    map->is_im2col = true;
    map->pixels_per_load = words[PIXELS] + 1;
    for (unsigned i = 0; i < spatial_rank; i++) {
        const uint32_t lower_corner = BITS(words[CORNERS], i * bits, bits);
        const uint32_t upper_corner = BITS(words[CORNERS] >> 16, i * bits, bits);
        const uint32_t sign_bit = 1u << (bits - 1);
        map->lower_corner[i] = (int32_t)(lower_corner ^ sign_bit) - (int32_t)sign_bit;
        map->upper_corner[i] = (int32_t)(upper_corner ^ sign_bit) - (int32_t)sign_bit;
    }
    return true;
}

bool tensor_map_decode(const ck_u64 content[CK_MAP_WORDS], tensor_map *map)
{
    uint32_t words[WORDS];
    memcpy(words, content, sizeof words);
    const uint32_t format_word = words[FORMAT];
    *map = (tensor_map){
        .address = content[ADDRESS], .rank = RANK(format_word), .interleave = INTERLEAVE(format_word)};
    map->strides[0] = BYTES_OF_TYPE[TYPE(format_word)];
    if (map->rank > MAX_RANK || !map->strides[0] || UNKNOWN_BITS(format_word) || FORMAT_KIND(format_word) & ~3u)
        return false;
    for (unsigned i = 0; i < map->rank; i++) {
        const unsigned box_bit = 24 + 8 * i;
        map->dims[i] = (uint64_t)words[DIMS + i] + 1;
        map->box[i] = BITS(words[BOX + box_bit / 32], box_bit % 32, 8) + 1;
        map->element_strides[i] = BITS(words[ELEMENT_STRIDES], 3 * i, 3) + 1;
    }
    for (unsigned i = 1; i < map->rank; i++) {
        const uint64_t upper_bits = BITS(words[STRIDE_UPPER_BITS], 4 * (i - 1), 4);
        map->strides[i] = (upper_bits << 32 | words[STRIDES + i - 1]) << 4;
    }
    return !(FORMAT_KIND(format_word) & 1) || decode_im2col(words, map);
}

bool tensor_map_end(const tensor_map *map, uint64_t *end)
{
    bool is_valid = !__builtin_add_overflow(map->address, map->strides[0], end);
    for (unsigned i = 0; is_valid && i < map->rank; i++) {
        uint64_t extent;
        is_valid = !__builtin_mul_overflow(map->dims[i] - 1, map->strides[i], &extent) &&
                   !__builtin_add_overflow(*end, extent, end);
    }
    return is_valid;
}

/* --- boxes ---------------------------------------------------------------------------------------- */

/* Return the number of elements of a box that are moved in one dimension: the first, and every ``element_strides``th
 * after it. */
static uint32_t count_moved_elements(const tensor_map *map, unsigned i)
{
    return (map->box[i] + map->element_strides[i] - 1) / map->element_strides[i];
}

/* Return the number of moved elements of a box that are inside the tensor in one dimension, and set ``first`` to the
 * coordinate of the first one. */
static uint32_t clip_dimension(const tensor_map *map, unsigned i, int64_t coordinate, uint64_t *first)
{
    const int64_t element_stride = map->element_strides[i], element_count = count_moved_elements(map, i),
                  end = (int64_t)map->dims[i];
    const int64_t first_element = coordinate < 0 ? (-coordinate + element_stride - 1) / element_stride : 0;
    int64_t end_element = coordinate < end ? (end - coordinate + element_stride - 1) / element_stride : 0;
    if (end_element > element_count)
        end_element = element_count;
    *first = (uint64_t)(coordinate + first_element * element_stride);
    return end_element > first_element ? (uint32_t)(end_element - first_element) : 0;
}

/* Upper limit of the shared memory of a block. */
#define MAX_SHARED_BYTES (1u << 18)

/* Return whether the decoded fields determine exactly which memory a box covers. */
static bool is_box_certain(const tensor_map *map)
{
    uint64_t box_bytes = map->strides[0] * map->box[0];
    for (unsigned i = 1; i < map->rank; i++)
        box_bytes *= count_moved_elements(map, i);
    return !map->interleave && !map->is_im2col && map->element_strides[0] == 1 && box_bytes <= MAX_SHARED_BYTES;
}

/* Add count * stride to ``sum``; false on overflow. */
static bool add_product(uint64_t *sum, uint64_t count, uint64_t stride)
{
    uint64_t distance;
    return !__builtin_mul_overflow(count, stride, &distance) && !__builtin_add_overflow(*sum, distance, sum);
}

bool box_extent_compute(const tensor_map *map, const int32_t coordinates[MAX_RANK], box_extent *extent)
{
    *extent = (box_extent){.begin = map->address};
    if (!is_box_certain(map))
        return false;
    uint64_t end = map->address;
    for (unsigned i = 0; i < map->rank; i++) {
        uint64_t first_element;
        const uint32_t element_count = clip_dimension(map, i, coordinates[i], &first_element);
        const uint64_t stride = map->strides[i] * map->element_strides[i];
        if (!element_count) {
            extent->bytes = 0;
            return true;
        }
        if (!add_product(&extent->begin, first_element, map->strides[i]) ||
            !add_product(&end, first_element, map->strides[i]) ||
            !add_product(&end, i ? element_count - 1 : element_count, stride))
            return false;
        extent->strides[i] = stride;
        extent->element_counts[i] = element_count;
    }
    extent->bytes = extent->element_counts[0] * map->strides[0];
    return !((end - 1) >> CK_ADDRESS_BITS);
}

/* --- stores --------------------------------------------------------------------------------------- */

/* Maximum number of groups of rows of a tensor; a tensor with more groups is emitted as one range. */
#define MAX_ROWS 4096

static bool reserve_map(tma_store_set *set)
{
    tma_store *maps = array_reserve(set->maps, &set->map_capacity, set->map_count + 1, sizeof *maps, 64);
    if (maps)
        set->maps = maps;
    return maps;
}

bool tma_stores_add(tma_store_set *set, uint32_t launch, uint8_t mode, const ck_u64 content[CK_MAP_WORDS])
{
    if (!reserve_map(set))
        return false;
    tma_store *store = set->maps + set->map_count++;
    *store = (tma_store){.launch = launch, .mode = mode};
    memcpy(store->map_words, content, sizeof store->map_words);
    return true;
}

bool tma_stores_copy(tma_store_set *set, uint32_t launch, uint8_t mode, const tma_store *maps, size_t count)
{
    size_t old_map_count = set->map_count;
    for (size_t i = 0; i < count; i++)
        if (!tma_stores_add(set, launch, mode, maps[i].map_words)) {
            set->map_count = old_map_count;
            return false;
        }
    return count > 0;
}

/* --- maps through which launches load ------------------------------------------------------------- */

static uint64_t load_key(uint32_t launch, uint32_t map_slot)
{
    return (uint64_t)launch << 17 | (uint64_t)map_slot << 1 | 1;
}

static bool loads_through_map(const tma_store *store, const hash_table *loads, const ck_map *maps,
                              size_t map_count)
{
    for (size_t i = 0; i < map_count; i++)
        if (!memcmp(maps[i].content, store->map_words, sizeof store->map_words) &&
            hash_table_get(loads, load_key(store->launch, maps[i].slot)))
            return true;
    return false;
}

static int compare_launches(const void *left, const void *right)
{
    uint32_t a = ((const tma_store *)left)->launch, b = ((const tma_store *)right)->launch;
    return (a > b) - (a < b);
}

bool tma_stores_resolve(tma_store_set *set, const ck_map *maps, size_t map_count, const ck_box *boxes,
                        size_t box_count)
{
    hash_table load_keys = {0};
    for (size_t i = 0; set->map_count && i < box_count; i++)
        if (boxes[i].mode == CK_READ && hash_table_put(&load_keys, load_key(boxes[i].launch, boxes[i].map), 1)) {
            hash_table_clear(&load_keys);
            return false;
        }
    for (size_t i = 0; i < set->map_count; i++)
        set->maps[i].is_load = loads_through_map(set->maps + i, &load_keys, maps, map_count);
    hash_table_clear(&load_keys);
    if (set->map_count)
        qsort(set->maps, set->map_count, sizeof *set->maps, compare_launches);
    return true;
}

/* --- rows ------------------------------------------------------------------------------------- */

void tma_store_rows(const tma_store *store,
                    void (*emit_rows)(void *context, uint64_t lo, uint64_t bytes, uint64_t stride, uint64_t count),
                    void *context)
{
    tensor_map map;
    uint64_t end;
    if (!tensor_map_decode(store->map_words, &map) || !tensor_map_end(&map, &end))
        return;
    for (unsigned i = 1; i < map.rank; i++)
        if (!map.strides[i])
            map.dims[i] =
                1; /* cuBLAS adds dimensions of arbitrary size and stride 0, which do not change the address */
    unsigned row_dimension = 1;
    uint64_t bytes = map.dims[0] * map.strides[0], row_group_count = 1;
    while (row_dimension < map.rank && (map.strides[row_dimension] == bytes || map.dims[row_dimension] == 1))
        bytes *= map.dims[row_dimension++];
    for (unsigned i = row_dimension + 1; i < map.rank; i++)
        row_group_count *= map.dims[i];
    if (row_dimension == map.rank) {
        emit_rows(context, map.address, bytes, 0, 1);
        return;
    }
    if (row_group_count > MAX_ROWS || map.strides[row_dimension] < bytes) {
        emit_rows(context, map.address, end - map.address, 0, 1);
        return;
    }
    for (uint64_t i = 0; i < row_group_count; i++) {
        uint64_t lo = map.address, remainder = i;
        for (unsigned dimension = row_dimension + 1; dimension < map.rank; remainder /= map.dims[dimension++])
            lo += remainder % map.dims[dimension] * map.strides[dimension];
        emit_rows(context, lo, bytes, map.strides[row_dimension], map.dims[row_dimension]);
    }
}
