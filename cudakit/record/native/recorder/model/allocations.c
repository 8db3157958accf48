#include "model/allocations.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "recorder.h"
#include "write/record.h"

#define LAST_INDICES 1024

static allocation *allocations; /* sorted by address, without overlaps */
static size_t allocation_count, allocation_capacity;
static uint64_t device_bytes;
static uint32_t change_count; /* number of changes of ``allocations`` */

/* Return the index of the first allocation that ends after an address. */
static size_t find_first_ending_after(uint64_t address)
{
    size_t low = 0, high = allocation_count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (allocations[middle].hi <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Return the size in bytes of the device memory of an allocation: 0 for pinned host memory. */
static uint64_t device_bytes_of(const allocation *item)
{
    return item->memory_kind == ALLOCATION_PINNED ? 0 : item->hi - item->lo;
}

static void remove_index_range(size_t index, size_t removed_count)
{
    if (!removed_count)
        return; /* ``allocations`` may still be NULL */
    change_count++;
    for (size_t i = index; i < index + removed_count; i++) {
        device_bytes -= device_bytes_of(allocations + i);
        history_free(allocations[i].history);
    }
    memmove(allocations + index, allocations + index + removed_count,
            (allocation_count - index - removed_count) * sizeof *allocations);
    allocation_count -= removed_count;
}

int allocations_add(uint64_t address, uint64_t size_bytes, uint8_t memory_kind)
{
    uint64_t end = address + size_bytes;
    size_t index = find_first_ending_after(address), overlap_count = 0;
    while (index + overlap_count < allocation_count && allocations[index + overlap_count].lo < end)
        overlap_count++;
    remove_index_range(index, overlap_count);
    allocation *new_allocations =
        array_reserve(allocations, &allocation_capacity, allocation_count + 1, sizeof *allocations, 1024);
    if (!new_allocations)
        return -1;
    allocations = new_allocations;
    memmove(allocations + index + 1, allocations + index, (allocation_count - index) * sizeof *allocations);
    allocations[index] = (allocation){.lo = address, .hi = end, .memory_kind = memory_kind};
    allocation_count++;
    change_count++;
    device_bytes += device_bytes_of(allocations + index);
    return 0;
}

int allocations_remove(uint64_t address, allocation *removed)
{
    size_t index = find_first_ending_after(address);
    if (index == allocation_count || allocations[index].lo != address)
        return 0;
    *removed = allocations[index];
    removed->history = NULL; /* remove_index_range() frees the history */
    remove_index_range(index, 1);
    return 1;
}

allocation *allocations_find(uint64_t address)
{
    /* The index of the allocation that was found last in each 2 MiB of memory. It may be outdated. */
    static uint32_t last_indices[LAST_INDICES];
    if (!allocation_count || address < allocations[0].lo || address >= allocations[allocation_count - 1].hi)
        return NULL; /* fast path: most parameter words are not pointers */
    uint32_t *last_index = last_indices + (address >> 21) % LAST_INDICES;
    if (*last_index < allocation_count &&
        allocations[*last_index].lo <= address &&address < allocations[*last_index].hi)
        return allocations + *last_index;
    const size_t index = find_first_ending_after(address);
    *last_index = (uint32_t)index;
    return allocations[index].lo <= address ? allocations + index : NULL;
}

/* Return an access that stands for all operations on an allocation so far: the last one is assumed to write all
 * bytes. */
static byte_access access_of_earlier_work(const allocation *accessed)
{
    return (byte_access){.operation = accessed->last_work, .is_write = true, .is_assumed = true};
}

void allocation_begin_work(allocation *accessed, stream_operation operation)
{
    if (!operation.slot)
        accessed->is_contested = true;
    if (accessed->history && history_is_obsolete(accessed->history)) {
        history_free(accessed->history);
        accessed->history = NULL;
    }
    if (accessed->history && !order_happens_before(accessed->last_work, operation))
        history_note_unordered(accessed->history);
    if (accessed->history || accessed->is_contested || !accessed->last_work.slot ||
        order_happens_before(accessed->last_work, operation))
        return;
    accessed->history = history_create(accessed->lo, accessed->hi, access_of_earlier_work(accessed));
    accessed->is_contested = !accessed->history;
}

bool allocations_are_ordered(uint64_t lo, uint64_t hi, byte_access access)
{
    bool are_ordered = true;
    for (size_t i = find_first_ending_after(lo); are_ordered && i < allocation_count && allocations[i].lo < hi;
         i++)
        are_ordered = !allocations[i].is_contested &&
                      (!allocations[i].history || history_is_ordered(allocations[i].history, lo, hi, access));
    return are_ordered;
}

bool allocations_have_contested_bytes(uint64_t lo, uint64_t hi)
{
    bool is_contested = false;
    for (size_t i = find_first_ending_after(lo); !is_contested && i < allocation_count && allocations[i].lo < hi;
         i++)
        is_contested = allocations[i].is_contested ||
                       (allocations[i].history && history_has_contested_bytes(allocations[i].history, lo, hi));
    return is_contested;
}

void allocations_mark_accessed(uint64_t lo, uint64_t hi)
{
    const allocation *first = allocations_find(lo);
    for (size_t i = first ? (size_t)(first - allocations) : find_first_ending_after(lo);
         i < allocation_count && allocations[i].lo < hi; i++)
        allocations[i].is_accessed = true;
}

void allocations_add_tracked_access(uint64_t lo, uint64_t hi, byte_access access)
{
    const allocation *first = allocations_find(lo);
    for (size_t i = first ? (size_t)(first - allocations) : find_first_ending_after(lo);
         i < allocation_count && allocations[i].lo < hi; i++)
        if (allocations[i].history)
            allocation_add_access(allocations + i, lo, hi, access);
}

void allocation_add_access(allocation *accessed, uint64_t lo, uint64_t hi, byte_access access)
{
    if (accessed->history)
        history_add(accessed->history, lo, hi, access);
    accessed->last_work = access.operation;
}

void allocations_add_work(uint64_t address, stream_operation operation)
{
    allocation *accessed = allocations_find(address);
    if (!accessed)
        return;
    allocation_begin_work(accessed, operation);
    allocation_add_access(accessed, accessed->lo, accessed->hi,
                          (byte_access){.operation = operation, .is_write = true, .is_assumed = true});
}

void allocations_add_access(uint64_t lo, uint64_t hi, bool is_write, stream_operation operation)
{
    for (size_t i = find_first_ending_after(lo); i < allocation_count && allocations[i].lo < hi; i++) {
        allocation_begin_work(allocations + i, operation);
        allocation_add_access(allocations + i, lo, hi,
                              (byte_access){.operation = operation, .is_write = is_write});
    }
}

void allocations_mark_contested(uint64_t begin, uint64_t end)
{
    for (size_t i = find_first_ending_after(begin); i < allocation_count && allocations[i].lo < end; i++)
        allocations[i].is_contested = true;
}

uint64_t allocations_device_bytes(void)
{
    return device_bytes;
}

uint32_t allocations_change_count(void)
{
    return change_count;
}

void allocations_clear(void)
{
    for (size_t i = 0; i < allocation_count; i++)
        history_free(allocations[i].history);
    free(allocations);
    allocations = NULL;
    allocation_count = allocation_capacity = 0;
    device_bytes = 0;
    change_count++;
}
