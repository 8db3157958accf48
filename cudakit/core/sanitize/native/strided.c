#include "strided.h"

#include <string.h>

/* The same value as in strided.py: maximum number of rows that are compared one by one. */
enum { MAX_COMPARED_ROWS = 1 << 20 };

bool strided_from_access(struct strided_range *strided, uint64_t lo, uint64_t hi, int64_t stride, uint64_t count)
{
    uint64_t distance = stride < 0 ? -(uint64_t)stride : (uint64_t)stride, last_row;
    if (count <= 1 || __builtin_mul_overflow(count - 1, distance, &last_row) || last_row >= hi - lo)
        return false;
    uint64_t width = hi - lo - last_row;
    *strided = (struct strided_range){.lo = lo, .hi = hi, .width = width, .stride = distance, .count = count};
    return width < distance;
}

bool strided_shared_with_range(const struct strided_range *strided, struct range range, struct range *shared_range)
{
    uint64_t row_index = 0, first_end = strided->lo + strided->width;
    if (range.lo >= first_end)
        row_index = (range.lo - first_end) / strided->stride + 1;
    if (row_index >= strided->count)
        return false;
    uint64_t row_address = strided->lo + row_index * strided->stride;
    if (row_address >= range.hi)
        return false;
    *shared_range = (struct range){Py_MAX(row_address, range.lo), Py_MIN(row_address + strided->width, range.hi)};
    return true;
}

static uint64_t greatest_common_divisor(uint64_t first, uint64_t second)
{
    while (second) {
        uint64_t remainder = first % second;
        first = second;
        second = remainder;
    }
    return first;
}

/* Return whether no two rows would overlap even if both ranges had infinitely many rows. */
static bool can_never_overlap(const struct strided_range *first, const struct strided_range *second)
{
    uint64_t common_stride = greatest_common_divisor(first->stride, second->stride);
    uint64_t distance = second->lo - first->lo; /* modulo 2^64 */
    uint64_t offset = second->lo >= first->lo ? distance % common_stride
                                              : (common_stride - -distance % common_stride) % common_stride;
    return first->width <= offset && second->width <= common_stride - offset;
}

bool strided_shared_with(const struct strided_range *strided, const struct strided_range *stored,
                         struct range *shared_range)
{
    if (strided->hi <= stored->lo || stored->hi <= strided->lo || can_never_overlap(strided, stored))
        return false;
    const struct strided_range *shorter_range = stored->count < strided->count ? stored : strided;
    const struct strided_range *longer_range = shorter_range == strided ? stored : strided;
    if (shorter_range->count > MAX_COMPARED_ROWS)
        return false;
    for (uint64_t i = 0; i < shorter_range->count; i++) {
        uint64_t row_address = shorter_range->lo + i * shorter_range->stride;
        if (strided_shared_with_range(
                longer_range, (struct range){row_address, row_address + shorter_range->width}, shared_range))
            return true;
    }
    return false;
}

/* ---- states of strided ranges ----------------------------------------------------------------------------- */

static bool are_equal_ranges(const struct strided_range *first, const struct strided_range *second)
{
    return first->lo == second->lo && first->width == second->width && first->stride == second->stride &&
           first->count == second->count;
}

static void update_bounds(struct strided_states *strided)
{
    strided->bounds = (struct range){UINT64_MAX, 0};
    for (size_t i = 0; i < strided->range_count; i++) {
        strided->bounds.lo = Py_MIN(strided->bounds.lo, strided->ranges[i].lo);
        strided->bounds.hi = Py_MAX(strided->bounds.hi, strided->ranges[i].hi);
    }
}

void strided_remove(struct strided_states *strided, size_t index)
{
    size_t later_count = --strided->range_count - index;
    memmove(&strided->ranges[index], &strided->ranges[index + 1], later_count * sizeof *strided->ranges);
    memmove(&strided->states[index], &strided->states[index + 1], later_count * sizeof *strided->states);
    update_bounds(strided);
}

struct state *strided_get_or_create(struct strided_states *states, const struct strided_range *strided)
{
    for (size_t i = 0; i < states->range_count; i++)
        if (are_equal_ranges(&states->ranges[i], strided))
            return &states->states[i];
    if (states->range_count == MAX_STRIDED_STATES) {
        state_clear(&states->states[0]);
        strided_remove(states, 0);
    }
    states->ranges[states->range_count] = *strided;
    states->states[states->range_count++] = (struct state){.lo = strided->lo, .hi = strided->hi};
    update_bounds(states);
    return &states->states[states->range_count - 1];
}

void strided_clear(struct strided_states *strided, uint64_t lo, uint64_t hi)
{
    if (hi <= strided->bounds.lo || strided->bounds.hi <= lo)
        return;
    for (size_t i = strided->range_count; i-- > 0;)
        if (lo <= strided->ranges[i].lo && strided->ranges[i].hi <= hi) {
            state_clear(&strided->states[i]);
            strided_remove(strided, i);
        }
}
