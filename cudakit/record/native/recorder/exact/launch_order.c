#include "exact/launch_order.h"

#include "write/record.h"

/* Return a range of the footprint with the addresses that it has in this launch. */
static footprint_range range_of_launch(const launch_memory *memory, const footprint_range *range)
{
    const uint64_t base = range->pointer_index == NO_POINTER ? 0 : memory->pointers[range->pointer_index];
    return (footprint_range){base + range->begin, base + range->end, NO_POINTER, range->is_write};
}

/* Return whether the launch is ordered after all earlier accesses to the bytes of its footprint. */
static bool footprint_is_ordered(const launch_memory *memory)
{
    bool is_ordered = true;
    for (size_t i = 0; is_ordered && memory->footprint.ranges && i < memory->footprint.range_count; i++) {
        const footprint_range range = range_of_launch(memory, memory->footprint.ranges + i);
        const byte_access access = {.operation = memory->operation, .is_write = range.is_write};
        is_ordered = allocations_are_ordered(range.begin, range.end, access);
    }
    return is_ordered;
}

bool launch_has_contested_bytes(const launch_memory *memory)
{
    bool is_contested = false;
    for (size_t i = 0; !is_contested && i < memory->footprint.range_count; i++) {
        const footprint_range range = range_of_launch(memory, memory->footprint.ranges + i);
        is_contested = allocations_have_contested_bytes(range.begin, range.end);
    }
    return is_contested;
}

/* Mark the allocations that the launch may access: all that it reaches. An exception are allocations that only
 * entries of a large table point into, because behind the used entries of a table is often old memory of the
 * stack: these are marked only if they have bytes of the footprint. */
static void mark_accessed_allocations(const launch_memory *memory)
{
    bool has_unused_entries = false;
    for (size_t i = 0; i < memory->allocation_count; i++) {
        const bool is_certain = !memory->certainties || memory->certainties[i] < PRECISION_UNCERTAIN;
        memory->allocations[i]->is_accessed =
            is_certain || !memory->footprint.ranges || memory->footprint.is_assumed;
        has_unused_entries = has_unused_entries || !memory->allocations[i]->is_accessed;
    }
    for (size_t i = 0; has_unused_entries && i < memory->footprint.range_count; i++) {
        const footprint_range range = range_of_launch(memory, memory->footprint.ranges + i);
        allocations_mark_accessed(range.begin, range.end);
    }
}

bool launch_may_share_memory(const launch_memory *memory, uint32_t stream)
{
    bool may_share = false;
    mark_accessed_allocations(memory);
    for (size_t i = 0; !may_share && i < memory->allocation_count; i++) {
        const allocation *accessed = memory->allocations[i];
        may_share = accessed->is_accessed &&
                    (accessed->history || accessed->is_contested ||
                     (accessed->last_work.slot && !order_happens_before_next(accessed->last_work, stream)));
    }
    return may_share;
}

memory_order launch_begin_work(const launch_memory *memory)
{
    bool is_contested = !memory->operation.slot, is_shared = false;
    mark_accessed_allocations(memory);
    for (size_t i = 0; i < memory->allocation_count; i++) {
        if (!memory->allocations[i]->is_accessed)
            continue;
        allocation_begin_work(memory->allocations[i], memory->operation);
        is_contested = is_contested || memory->allocations[i]->is_contested;
        is_shared = is_shared || memory->allocations[i]->history;
    }
    if (is_contested)
        return MEMORY_CONTESTED;
    if (is_shared && (!memory->footprint.ranges || !footprint_is_ordered(memory)))
        return MEMORY_UNORDERED;
    return is_shared ? MEMORY_SHARED : MEMORY_ORDERED;
}

void launch_add_accesses(const launch_memory *memory)
{
    for (size_t i = 0; i < memory->allocation_count; i++) {
        allocation *accessed = memory->allocations[i];
        if (!accessed->is_accessed)
            continue;
        if (!accessed->history || !memory->footprint.ranges)
            allocation_add_access(
                accessed, accessed->lo, accessed->hi,
                (byte_access){.operation = memory->operation, .is_write = true, .is_assumed = true});
    }
    for (size_t i = 0; memory->footprint.ranges && i < memory->footprint.range_count; i++) {
        const footprint_range range = range_of_launch(memory, memory->footprint.ranges + i);
        allocations_add_tracked_access(range.begin, range.end,
                                       (byte_access){.operation = memory->operation,
                                                     .is_write = range.is_write,
                                                     .is_assumed = memory->footprint.is_assumed});
    }
}
