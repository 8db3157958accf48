#include "decode/tensor_maps.h"

#include <string.h>

/* Field positions in the map, as 32-bit words, derived from the fields that the PTX instruction
 * tensormap.replace writes; recorded maps agree. */
enum {
    ADDRESS = 0,
    FORM = 2,
    STRIDES = 3, /* of dimensions 1 to 4, in units of 16 bytes, without their upper 4 bits */
    UPPER = 7,   /* upper bits of strides: 4 bits each */
    DIMS = 8,    /* minus one */
    STEPS = 13,  /* minus one: 3 bits each */
    BOX = 13,    /* minus one: a byte each, from the top byte of this word on */
    WORDS = 16,
};

#define BITS(word, shift, count) ((word) >> (shift) & ((1u << (count)) - 1))

/* Bits of the word FORM, from the lowest: format kind, rank minus one, element type, interleave; then the
 * shared memory swizzle, out-of-bounds fill, TF32 rounding and L2 promotion, which do not affect addresses;
 * the rest is always 0. */
#define FORMAT_KIND(form) BITS(form, 0, 4) /* 0 from the driver, 2 from cuBLAS */
#define RANK(form) (BITS(form, 4, 3) + 1)
#define TYPE(form) BITS(form, 7, 4)
#define INTERLEAVE(form) BITS(form, 11, 2)
#define UNKNOWN(form) BITS(form, 23, 9)

static const uint8_t BYTES_OF_TYPE[16] = {
    1, 2, 4, 4, 8, 8, /* integers: u8, u16, u32, s32, u64, s64 */
    2, 4, 4, 8, 2,    /* f16, f32 (and tf32), f32 and tf32 with denormals flushed to zero, f64, bf16 */
};

bool tensor_map_of(const ck_u64 content[CK_MAP_WORDS], tensor_map *map)
{
    uint32_t words[WORDS];
    memcpy(words, content, sizeof words);
    const uint32_t form = words[FORM];
    *map = (tensor_map){.address = content[ADDRESS], .rank = RANK(form), .interleave = INTERLEAVE(form)};
    map->strides[0] = BYTES_OF_TYPE[TYPE(form)];
    if (map->rank > MAX_RANK || !map->strides[0] || UNKNOWN(form) || FORMAT_KIND(form) & ~2u)
        return false;
    for (unsigned i = 0; i < map->rank; i++) {
        const unsigned box_bit = 24 + 8 * i;
        map->dims[i] = (uint64_t)words[DIMS + i] + 1;
        map->box[i] = BITS(words[BOX + box_bit / 32], box_bit % 32, 8) + 1;
        map->steps[i] = BITS(words[STEPS], 3 * i, 3) + 1;
    }
    for (unsigned i = 1; i < map->rank; i++) {
        const uint64_t upper = BITS(words[UPPER], 4 * (i - 1), 4);
        map->strides[i] = (upper << 32 | words[STRIDES + i - 1]) << 4;
    }
    return true;
}

/* --- boxes ---------------------------------------------------------------------------------------- */

/* Return the number of elements of a box inside the tensor in one dimension, and the coordinate of the
 * first. */
static uint32_t clip(const tensor_map *map, unsigned i, int64_t at, uint64_t *first)
{
    const int64_t step = map->steps[i], count = map->box[i] / step, end = (int64_t)map->dims[i];
    const int64_t from = at < 0 ? (-at + step - 1) / step : 0;
    int64_t to = at < end ? (end - at + step - 1) / step : 0;
    if (to > count)
        to = count;
    *first = (uint64_t)(at + from * step);
    return to > from ? (uint32_t)(to - from) : 0;
}

/* Upper limit of shared memory. */
#define MAX_SHARED_BYTES (1u << 18)

static bool is_certain(const tensor_map *map)
{
    bool sure = !map->interleave && map->steps[0] == 1;
    uint64_t bytes = map->strides[0] * map->box[0];
    for (unsigned i = 1; i < map->rank; i++) {
        sure = sure && map->box[i] % map->steps[i] == 0;
        bytes *= map->box[i] / map->steps[i];
    }
    return sure && bytes <= MAX_SHARED_BYTES;
}

/* Add count * stride to ``to``; false on overflow. */
static bool add_product(uint64_t *to, uint64_t count, uint64_t stride)
{
    uint64_t distance;
    return !__builtin_mul_overflow(count, stride, &distance) && !__builtin_add_overflow(*to, distance, to);
}

bool box_extent_of(const tensor_map *map, const int32_t at[MAX_RANK], box_extent *extent)
{
    *extent = (box_extent){.begin = map->address};
    if (!is_certain(map))
        return false;
    uint64_t end = map->address;
    for (unsigned i = 0; i < map->rank; i++) {
        uint64_t first;
        const uint32_t count = clip(map, i, at[i], &first);
        const uint64_t stride = map->strides[i] * map->steps[i];
        if (!count) {
            extent->bytes = 0;
            return true;
        }
        if (!add_product(&extent->begin, first, map->strides[i]) || !add_product(&end, first, map->strides[i]) ||
            !add_product(&end, i ? count - 1 : count, stride))
            return false;
        extent->strides[i] = stride;
        extent->counts[i] = count;
    }
    extent->bytes = extent->counts[0] * map->strides[0];
    return !((end - 1) >> CK_ADDRESS_BITS);
}
