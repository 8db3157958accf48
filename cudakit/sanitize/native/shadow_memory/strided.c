#include "strided.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

/* The same value as in shadow.py: maximum number of rows that are compared one by one. */
enum { MAX_COMPARED_ROWS = 1 << 20 };

bool strided_from_access(struct strided_range *strided_range, uint64_t lo, uint64_t hi, int64_t stride,
                         uint64_t count)
{
    uint64_t distance = stride < 0 ? -(uint64_t)stride : (uint64_t)stride, last_row;
    if (count <= 1 || __builtin_mul_overflow(count - 1, distance, &last_row) || last_row >= hi - lo)
        return false;
    uint64_t width = hi - lo - last_row;
    *strided_range =
        (struct strided_range){.lo = lo, .hi = hi, .width = width, .stride = distance, .count = count};
    return width < distance;
}

bool strided_shared_with_range(const struct strided_range *strided_range, struct range range,
                               struct range *common_range)
{
    uint64_t row_index = 0, first_end = strided_range->lo + strided_range->width;
    if (range.lo >= first_end)
        row_index = (range.lo - first_end) / strided_range->stride + 1;
    if (row_index >= strided_range->count)
        return false;
    uint64_t row_address = strided_range->lo + row_index * strided_range->stride;
    if (row_address >= range.hi)
        return false;
    *common_range =
        (struct range){Py_MAX(row_address, range.lo), Py_MIN(row_address + strided_range->width, range.hi)};
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
    uint64_t distance = second->lo - first->lo; /* the difference wraps modulo 2^64 */
    uint64_t offset = second->lo >= first->lo ? distance % common_stride
                                              : (common_stride - -distance % common_stride) % common_stride;
    return first->width <= offset && second->width <= common_stride - offset;
}

bool strided_shared_with(const struct strided_range *strided_range, const struct strided_range *stored_range,
                         struct range *common_range)
{
    if (strided_range->hi <= stored_range->lo || stored_range->hi <= strided_range->lo ||
        can_never_overlap(strided_range, stored_range))
        return false;
    const struct strided_range *shorter_range =
        stored_range->count < strided_range->count ? stored_range : strided_range;
    const struct strided_range *longer_range = shorter_range == strided_range ? stored_range : strided_range;
    if (shorter_range->count > MAX_COMPARED_ROWS)
        return false;
    for (uint64_t i = 0; i < shorter_range->count; i++) {
        uint64_t row_address = shorter_range->lo + i * shorter_range->stride;
        if (strided_shared_with_range(
                longer_range, (struct range){row_address, row_address + shorter_range->width}, common_range))
            return true;
    }
    return false;
}

/* ---- states of strided ranges ----------------------------------------------------------------------------- */

bool strided_are_equal(const struct strided_range *first, const struct strided_range *second)
{
    return first->lo == second->lo && first->width == second->width && first->stride == second->stride &&
           first->count == second->count;
}

/* Return the index of the list for ranges of this length in bytes, which is not 0. */
static unsigned list_index(const struct strided_range *range)
{
    return 63u - (unsigned)__builtin_clzll(range->hi - range->lo);
}

/* Return the position of the first item that begins at an address or above. */
static size_t lower_bound(const struct strided_list *list, uint64_t lo)
{
    size_t begin = 0, end = list->count;
    while (begin < end) {
        size_t middle = (begin + end) / 2;
        if (list->items[middle]->range.lo < lo)
            begin = middle + 1;
        else
            end = middle;
    }
    return begin;
}

/* Reserve memory for one more item. Return -1 with an exception if memory runs out. */
static int reserve_item(struct strided_list *list)
{
    if (list->count < list->capacity)
        return 0;
    size_t capacity = list->capacity ? 2 * list->capacity : 16;
    struct strided_state **items = PyMem_Realloc(list->items, capacity * sizeof *items);
    if (!items) {
        PyErr_NoMemory();
        return -1;
    }
    list->items = items;
    list->capacity = capacity;
    return 0;
}

static int compare_numbers(const void *left, const void *right)
{
    uint64_t first = (*(struct strided_state *const *)left)->number;
    uint64_t second = (*(struct strided_state *const *)right)->number;
    return (first > second) - (first < second);
}

const struct strided_list *strided_find_overlapping(struct strided_states *states, uint64_t lo, uint64_t hi)
{
    struct strided_list *overlapping_list = &states->overlapping_list;
    overlapping_list->count = 0;
    for (uint64_t bits = states->nonempty_lists; bits; bits &= bits - 1) {
        unsigned index = (unsigned)__builtin_ctzll(bits);
        struct strided_list *list = &states->lists[index];
        uint64_t longest = index < 63 ? ((uint64_t)2 << index) - 1 : UINT64_MAX;
        for (size_t i = lower_bound(list, lo > longest ? lo - longest : 0);
             i < list->count && list->items[i]->range.lo < hi; i++) {
            if (list->items[i]->range.hi <= lo)
                continue;
            if (reserve_item(overlapping_list))
                return NULL;
            overlapping_list->items[overlapping_list->count++] = list->items[i];
        }
    }
    if (overlapping_list->count > 1)
        qsort(overlapping_list->items, overlapping_list->count, sizeof *overlapping_list->items, compare_numbers);
    return overlapping_list;
}

/* Clear the state of a strided range if its number is lower than `number`, and return whether it stays. */
static int is_recent(struct state *state, const void *number)
{
    const struct strided_state *strided_state =
        (const struct strided_state *)((const char *)state - offsetof(struct strided_state, state));
    if (strided_state->number >= *(const uint64_t *)number)
        return 1;
    state_clear(state);
    return 0;
}

/* Remove the older half of the states. Return -1 with an exception if memory runs out. */
static int remove_older_half(struct strided_states *states)
{
    const struct strided_list *all = strided_find_overlapping(states, 0, UINT64_MAX);
    if (!all)
        return -1;
    uint64_t oldest_remaining_number = all->items[all->count / 2]->number;
    return strided_filter(states, is_recent, &oldest_remaining_number);
}

struct state *strided_get_or_create(struct strided_states *states, const struct strided_range *strided_range)
{
    unsigned index = list_index(strided_range);
    struct strided_list *list = &states->lists[index];
    for (size_t i = lower_bound(list, strided_range->lo);
         i < list->count && list->items[i]->range.lo == strided_range->lo; i++)
        if (strided_are_equal(&list->items[i]->range, strided_range))
            return &list->items[i]->state;
    if (states->state_count >= MAX_STRIDED_STATES && remove_older_half(states))
        return NULL;
    struct strided_state *new_state = reserve_item(list) ? NULL : PyMem_Calloc(1, sizeof *new_state);
    if (!new_state) {
        PyErr_NoMemory();
        return NULL;
    }
    new_state->range = *strided_range;
    new_state->state.lo = strided_range->lo;
    new_state->state.hi = strided_range->hi;
    new_state->number = states->created_count++;
    size_t position = lower_bound(list, strided_range->lo + 1);
    memmove(list->items + position + 1, list->items + position, (list->count - position) * sizeof *list->items);
    list->items[position] = new_state;
    list->count++;
    states->state_count++;
    states->nonempty_lists |= (uint64_t)1 << index;
    return &new_state->state;
}

/* Remove an item, whose state is cleared. */
static void remove_item(struct strided_states *states, const struct strided_state *item)
{
    unsigned index = list_index(&item->range);
    struct strided_list *list = &states->lists[index];
    size_t position = lower_bound(list, item->range.lo);
    while (list->items[position] != item)
        position++;
    list->count--;
    memmove(list->items + position, list->items + position + 1, (list->count - position) * sizeof *list->items);
    states->state_count--;
    if (!list->count)
        states->nonempty_lists &= ~((uint64_t)1 << index);
}

int strided_clear(struct strided_states *states, uint64_t lo, uint64_t hi)
{
    if (!states->state_count)
        return 0;
    const struct strided_list *overlapping_list = strided_find_overlapping(states, lo, hi);
    if (!overlapping_list)
        return -1;
    for (size_t i = 0; i < overlapping_list->count; i++) {
        struct strided_state *item = overlapping_list->items[i];
        if (item->range.lo < lo || hi < item->range.hi)
            continue;
        remove_item(states, item);
        state_clear(&item->state);
        PyMem_Free(item);
    }
    return 0;
}

int strided_filter(struct strided_states *states, int (*keep)(struct state *, const void *), const void *context)
{
    int result = 0;
    states->state_count = 0;
    states->nonempty_lists = 0;
    for (unsigned index = 0; index < 64; index++) {
        struct strided_list *list = &states->lists[index];
        size_t count = list->count;
        list->count = 0;
        for (size_t i = 0; i < count; i++) {
            int is_kept = result ? 1 : keep(&list->items[i]->state, context);
            if (is_kept < 0)
                result = -1;
            if (is_kept)
                list->items[list->count++] = list->items[i];
            else
                PyMem_Free(list->items[i]);
        }
        states->state_count += list->count;
        states->nonempty_lists |= (uint64_t)(list->count > 0) << index;
    }
    return result;
}

static int keep_none(struct state *state, const void *Py_UNUSED(context))
{
    state_clear(state);
    return 0;
}

void strided_release(struct strided_states *states)
{
    strided_filter(states, keep_none, NULL);
    for (unsigned index = 0; index < 64; index++)
        PyMem_Free(states->lists[index].items);
    PyMem_Free(states->overlapping_list.items);
    *states = (struct strided_states){0};
}
