#include "model/allocations.h"

#include <stdlib.h>
#include <string.h>

#include "containers.h"
#include "write/record.h"

static allocation *sorted; /* by address; they do not overlap */
static size_t count, capacity;
static uint64_t device_bytes;

/* Return the index of the first allocation that ends after an address. */
static size_t first_ending_after(uint64_t address)
{
    size_t low = 0, high = count;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (sorted[middle].hi <= address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static uint64_t device_share(const allocation *entry)
{
    return entry->how == HOW_PINNED ? 0 : entry->hi - entry->lo;
}

static void remove_range(size_t at, size_t removed_count)
{
    if (!removed_count)
        return; /* ``sorted`` may still be NULL */
    for (size_t i = at; i < at + removed_count; i++)
        device_bytes -= device_share(sorted + i);
    memmove(sorted + at, sorted + at + removed_count, (count - at - removed_count) * sizeof *sorted);
    count -= removed_count;
}

int allocations_add(uint64_t address, uint64_t size_bytes, uint8_t how)
{
    uint64_t end = address + size_bytes;
    size_t at = first_ending_after(address), stale = 0;
    while (at + stale < count && sorted[at + stale].lo < end)
        stale++;
    remove_range(at, stale);
    allocation *larger = array_reserve(sorted, &capacity, count + 1, sizeof *sorted, 1024);
    if (!larger)
        return -1;
    sorted = larger;
    memmove(sorted + at + 1, sorted + at, (count - at) * sizeof *sorted);
    sorted[at] = (allocation){address, end, how};
    count++;
    device_bytes += device_share(sorted + at);
    return 0;
}

int allocations_remove(uint64_t address, allocation *removed)
{
    size_t at = first_ending_after(address);
    if (at == count || sorted[at].lo != address)
        return 0;
    *removed = sorted[at];
    remove_range(at, 1);
    return 1;
}

const allocation *allocations_find(uint64_t address)
{
    if (!count || address < sorted[0].lo || address >= sorted[count - 1].hi)
        return NULL; /* fast path: most parameter words are not pointers */
    const allocation *found = sorted + first_ending_after(address);
    return found->lo <= address ? found : NULL;
}

uint64_t allocations_device_bytes(void)
{
    return device_bytes;
}

void allocations_clear(void)
{
    free(sorted);
    sorted = NULL;
    count = capacity = 0;
    device_bytes = 0;
}
