#include "decode/footprint.h"

#include <stdlib.h>

/* Number of ranges at which joining stops. One range for reads and one for writes of each pointer remain in any case. */
#define SIMPLE_RANGE_COUNT 32

static int compare_ranges(const void *left, const void *right)
{
    const footprint_range *a = left, *b = right;
    if (a->is_write != b->is_write)
        return a->is_write ? 1 : -1;
    if (a->pointer_index != b->pointer_index)
        return a->pointer_index < b->pointer_index ? -1 : 1;
    return a->begin < b->begin ? -1 : a->begin > b->begin;
}

/* Ranges that are less than this number of bytes apart are joined when they are added. */
#define MIN_GAP_BYTES 256
/* Ranges of addresses that are further apart are not joined, because other allocations may be between the ranges. */
#define MAX_ADDRESS_GAP_BYTES 512

/* Join sorted ranges of the same pointer that are at most ``gap_bytes`` apart. */
static void join_ranges(footprint *accesses, uint64_t gap_bytes)
{
    size_t kept_count = 0;
    for (size_t i = 0; i < accesses->range_count; i++) {
        const footprint_range range = accesses->ranges[i];
        footprint_range *last = kept_count ? accesses->ranges + kept_count - 1 : NULL;
        const uint64_t gap_limit = range.pointer_index == NO_POINTER && gap_bytes > MAX_ADDRESS_GAP_BYTES
                                       ? MAX_ADDRESS_GAP_BYTES
                                       : gap_bytes;
        if (last && last->is_write == range.is_write && last->pointer_index == range.pointer_index &&
            range.begin <= last->end + gap_limit)
            last->end = range.end > last->end ? range.end : last->end;
        else
            accesses->ranges[kept_count++] = range;
    }
    accesses->range_count = kept_count;
}

/* Join ranges until at most ``range_count`` remain, or no more ranges can be joined. */
static void simplify_to(footprint *accesses, size_t range_count)
{
    qsort(accesses->ranges, accesses->range_count, sizeof *accesses->ranges, compare_ranges);
    join_ranges(accesses, 0);
    for (uint64_t gap_bytes = 256; accesses->range_count > range_count && gap_bytes <= UINT64_C(1) << 48;
         gap_bytes *= 4) {
        join_ranges(accesses, gap_bytes);
        accesses->has_gaps = true;
    }
}

/* Return the last added range if a new range begins in it or shortly behind it, so that both become one range; else NULL.
 * Most launches access bytes in ascending order. */
static footprint_range *extended_range(footprint *accesses, footprint_range range)
{
    footprint_range *last = accesses->range_count ? accesses->ranges + accesses->range_count - 1 : NULL;
    const bool is_extended = last && last->is_write == range.is_write &&
                             last->pointer_index == range.pointer_index && range.begin >= last->begin &&
                             range.begin <= last->end + MIN_GAP_BYTES;
    return is_extended ? last : NULL;
}

void footprint_add(footprint *accesses, footprint_range range)
{
    footprint_range *last = extended_range(accesses, range);
    if (last) {
        last->end = range.end > last->end ? range.end : last->end;
        return;
    }
    if (accesses->range_count == FOOTPRINT_CAPACITY)
        simplify_to(accesses, FOOTPRINT_CAPACITY / 2);
    if (accesses->range_count == FOOTPRINT_CAPACITY) { /* the ranges are too far apart to be joined */
        accesses->is_incomplete = true;
        return;
    }
    accesses->ranges[accesses->range_count++] = range;
}

bool footprint_is_contiguous(const footprint *accesses)
{
    bool is_contiguous = !accesses->has_gaps;
    for (size_t i = 0; is_contiguous && i < accesses->range_count; i++)
        is_contiguous = accesses->ranges[i].pointer_index != NO_POINTER && !accesses->ranges[i].begin;
    return is_contiguous;
}

void footprint_simplify(footprint *accesses)
{
    simplify_to(accesses, SIMPLE_RANGE_COUNT);
}
