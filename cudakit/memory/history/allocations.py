"""All allocations with their lifetimes, sizes and call stacks, and the memory curves."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cudakit.memory.history.lifetimes import MatchedLifetimes
from cudakit.memory.history.segments import SegmentHistory, SegmentLifetimes
from cudakit.memory.snapshot import (
    BEFORE_TRACE,
    POOL_NAMES,
    Action,
    Addresses,
    DeviceTrace,
    Ids,
    Ints,
    Mask,
    Snapshot,
    take,
)
from cudakit.torch_rules.settings import recorded_divisions, recorded_max_split
from cudakit.torch_rules.sizes import MAX_SMALL_BYTES, rounded_array


@dataclass(frozen=True, slots=True)
class Allocations:
    """All allocations of a trace and its final state; every array has one item per allocation.

    ``begin``, ``free_request`` and ``end`` are event indices. BEFORE_TRACE is before the trace; n, the
    number of events, is after it.
    """

    address: Addresses
    requested: Ints  # requested bytes
    size: Ints  # bytes of the block; computed by the allocator's rules if ``size_known`` is False
    size_known: Mask
    begin: Ints
    free_request: Ints
    end: Ints
    stream: Ids
    pool: Ids
    stack: Ids
    source: Ints  # event that recorded stream and stack; -1: recorded by the final block
    live_block: Ints  # index of the block in the final state; -1: freed before

    def __len__(self) -> int:
        return len(self.address)


def allocations_of(
    snapshot: Snapshot,
    trace: DeviceTrace,
    segments: SegmentHistory,
    matched_lifetimes: MatchedLifetimes,
) -> Allocations:
    """Return the allocation of each lifetime; sizes of freed blocks are the rounded requests."""
    events, blocks = trace.events, trace.blocks
    has_event = matched_lifetimes.source >= 0
    has_final_block = matched_lifetimes.block >= 0
    source_events = matched_lifetimes.source[has_event]
    final_blocks = matched_lifetimes.block[has_final_block]
    stream_ids = np.zeros(len(matched_lifetimes.address), np.int32)
    stack_ids = np.zeros(len(matched_lifetimes.address), np.int32)
    stream_ids[has_final_block] = trace.segments.stream[blocks.segment[final_blocks]]
    stream_ids[has_event] = events.stream[source_events]
    # For an allocation from before the trace, the trace has only the free and the call stack of the free.
    is_allocation = events.action[source_events] == Action.ALLOC
    stack_ids[has_event] = np.where(is_allocation, events.stack[source_events], 0)
    # With context="state" only the final blocks have stacks.
    final_stack_ids = blocks.stack[final_blocks]
    stack_ids[has_final_block] = np.where(
        (stack_ids[has_final_block] == 0) | (final_stack_ids != 0),
        final_stack_ids,
        stack_ids[has_final_block],
    )
    requested_bytes = matched_lifetimes.requested.copy()
    requested_bytes[has_final_block] = blocks.requested[final_blocks]
    block_bytes = rounded_array(requested_bytes, recorded_divisions(snapshot.settings))
    block_bytes[has_final_block] = blocks.size[final_blocks]
    return Allocations(
        address=matched_lifetimes.address,
        requested=requested_bytes,
        size=block_bytes,
        size_known=has_final_block,
        begin=matched_lifetimes.begin,
        free_request=matched_lifetimes.free_request,
        end=matched_lifetimes.end,
        stream=stream_ids,
        pool=_pools(trace, segments, matched_lifetimes),
        stack=stack_ids,
        source=matched_lifetimes.source,
        live_block=matched_lifetimes.block,
    )


def _pools(
    trace: DeviceTrace, segments: SegmentHistory, matched_lifetimes: MatchedLifetimes
) -> Ids:
    """Return the pool of each allocation: recorded by its event (torch 2.12), else by its segment."""
    has_event = matched_lifetimes.source >= 0
    events = np.where(has_event, matched_lifetimes.source, len(trace.events))
    pool_ids = segments.pool_at(matched_lifetimes.address, events)
    recorded_pool_ids = trace.events.pool[matched_lifetimes.source[has_event]]
    pool_ids[np.flatnonzero(has_event)[recorded_pool_ids >= 0]] = recorded_pool_ids[
        recorded_pool_ids >= 0
    ]
    return pool_ids


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes at every moment: arrays of n + 1 items, defined as in ``torch.cuda.memory_stats``."""

    requested: Ints  # requested bytes of blocks in use and pending free
    allocated: Ints  # sizes of blocks, until the free is requested
    active: Ints  # sizes of blocks in use and pending free
    reserved: Ints  # sizes of segments


def curves_of(segments: SegmentHistory, allocations: Allocations) -> Curves:
    """Return the curves of all allocations and segments."""
    n_events = len(segments.reserved) - 1
    begin_events, request_events, end_events = (
        allocations.begin,
        allocations.free_request,
        allocations.end,
    )
    return Curves(
        requested=_sum_of_intervals(n_events, begin_events, end_events, allocations.requested),
        allocated=_sum_of_intervals(n_events, begin_events, request_events, allocations.size),
        active=_sum_of_intervals(n_events, begin_events, end_events, allocations.size),
        reserved=segments.reserved,
    )


def _sum_of_intervals(
    n_events: int, begin_events: Ints, end_events: Ints, size_bytes: Ints
) -> Ints:
    """Return the sum of the amounts whose interval contains each moment.

    An interval includes the moments from after event ``begin_events`` to before event ``end_events``.
    """
    change_bytes = np.bincount(begin_events + 1, weights=size_bytes, minlength=n_events + 2)
    change_bytes -= np.bincount(end_events + 1, weights=size_bytes, minlength=n_events + 2)
    # Sums of bytes stay below 2**53, where float64 is exact.
    return np.cumsum(change_bytes[: n_events + 1]).astype(np.int64)


# --- The sizes of large blocks, which files record for the final state only ------------------------
#
# A block is larger than its rounded request if the allocator did not split the remainder off. The rules are
# those of c10/cuda/CUDACachingAllocator.cpp (``should_split``) in torch 2.11.


def with_unsplit_sizes(
    snapshot: Snapshot, segments: SegmentLifetimes, allocations: Allocations
) -> Allocations:
    """Return allocations whose large blocks include the remainders that were not split off."""
    if snapshot.settings.get("expandable_segments") is True:
        return allocations  # the allocator then splits every remainder (``should_split``)
    other_pools = [pool_id for pool_id, pool in enumerate(snapshot.pools) if pool in POOL_NAMES]
    large_block_indices = np.flatnonzero(
        (allocations.size > MAX_SMALL_BYTES)
        & _in_segments(allocations.address, segments)
        & ~np.isin(allocations.pool, other_pools)
    )
    if allocations.size_known[large_block_indices].all():
        return allocations
    large_blocks = take(allocations, large_block_indices)
    unsplit_sizes = _unsplit_sizes(
        large_blocks, segments, max_split_bytes=recorded_max_split(snapshot.settings)
    )
    sizes = allocations.size.copy()
    sizes[large_block_indices] = np.where(large_blocks.size_known, large_blocks.size, unsplit_sizes)
    return replace(allocations, size=sizes)


def _in_segments(address: Addresses, segments: SegmentLifetimes) -> Mask:
    """Return a mask: whether each address was ever in one of the segments."""
    if not len(segments):
        return np.zeros(len(address), np.bool_)
    # Segments of different times can overlap: an earlier one may end higher.
    highest_end = np.maximum.accumulate(segments.address + segments.size.astype(np.uint64))
    index = np.searchsorted(segments.address, address, side="right") - 1
    return (index >= 0) & (address < highest_end[np.maximum(index, 0)])


def _unsplit_sizes(
    blocks: Allocations, segments: SegmentLifetimes, *, max_split_bytes: int
) -> Ints:
    """Return the sizes of large blocks, including remainders that were not split off.

    The allocator splits a free block of the large pool only if more than 1 MiB remains, and always merges
    adjacent free blocks. So a gap of up to 1 MiB between a new block and the next block in use, or the end of
    the segment, belongs to the new block. Blocks of at least ``max_split_bytes`` are never split. A block
    from before the trace keeps its rounded size if no other block shows its end.
    """
    # Start addresses of blocks in use, and end addresses of segments, ascending.
    boundaries: list[int] = []
    sizes = blocks.size.tolist()
    addresses = blocks.address.tolist()
    segment_ends = (segments.address + segments.size.astype(np.uint64)).tolist()
    n_blocks = len(blocks)
    for item_index, is_begin in _begins_and_ends(blocks, segments):
        boundary = (
            addresses[item_index] if item_index < n_blocks else segment_ends[item_index - n_blocks]
        )
        index = bisect_left(boundaries, boundary)
        if not is_begin:
            if index < len(boundaries) and boundaries[index] == boundary:
                del boundaries[index]
            continue
        if item_index < n_blocks:
            block_end = boundary + sizes[item_index]
            next_index = bisect_left(boundaries, block_end, index)
            if next_index < len(boundaries):
                gap_bytes = boundaries[next_index] - block_end
                if 0 < gap_bytes <= MAX_SMALL_BYTES or sizes[item_index] >= max_split_bytes:
                    sizes[item_index] += gap_bytes
        boundaries.insert(index, boundary)
    return _extend_blocks_before_trace(blocks, np.array(sizes, np.int64))


def _extend_blocks_before_trace(blocks: Allocations, sizes: Ints) -> Ints:
    """Extend each block from before the trace to a block allocated later, up to 1 MiB behind its end."""
    address_order = np.argsort(blocks.address, kind="stable")
    address, begin_event = blocks.address[address_order], blocks.begin[address_order]
    for block_index in np.flatnonzero(blocks.begin == BEFORE_TRACE).tolist():
        end_address = int(blocks.address[block_index]) + int(sizes[block_index])
        window = np.array([end_address, end_address + MAX_SMALL_BYTES + 1], np.uint64)
        first_index, end_index = np.searchsorted(address, window).tolist()
        later_blocks = np.flatnonzero(begin_event[first_index:end_index] < blocks.end[block_index])
        if len(later_blocks):
            sizes[block_index] += int(address[first_index + later_blocks[0]]) - end_address
    return sizes


def _begins_and_ends(blocks: Allocations, segments: SegmentLifetimes) -> Iterator[tuple[int, bool]]:
    """Yield the begins and ends of blocks and segments by time, as pairs (index, is_begin).

    Indices of segments follow those of blocks.
    """
    begin_events = np.concatenate((blocks.begin, segments.begin))
    end_events = np.concatenate((blocks.end, segments.end))
    lifetime_count = len(begin_events)
    # Keys are twice the event index, plus 1 for begins: at one event, ends come before begins. For equal
    # keys, segments come before blocks.
    sort_keys = np.concatenate((2 * begin_events + 1, 2 * end_events))
    is_block = np.arange(lifetime_count) < len(blocks)
    event_order = np.lexsort((np.concatenate((is_block, is_block)), sort_keys))
    return zip(
        (event_order % lifetime_count).tolist(),
        (event_order < lifetime_count).tolist(),
        strict=True,
    )
