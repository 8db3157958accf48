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
    matched: MatchedLifetimes,
) -> Allocations:
    """Return the allocation of each lifetime; sizes of freed blocks are the rounded requests."""
    events, blocks = trace.events, trace.blocks
    has_event, has_block = matched.source >= 0, matched.block >= 0
    source, block = matched.source[has_event], matched.block[has_block]
    streams, stacks = np.zeros((2, len(matched.address)), np.int32)
    streams[has_block] = trace.segments.stream[blocks.segment[block]]
    streams[has_event] = events.stream[source]
    # For an allocation from before the trace, the trace has only the free and the call stack of the free.
    is_allocation = events.action[source] == Action.ALLOC
    stacks[has_event] = np.where(is_allocation, events.stack[source], 0)
    # With context="state" only the final blocks have stacks.
    final_stacks = blocks.stack[block]
    stacks[has_block] = np.where(final_stacks != 0, final_stacks, stacks[has_block])
    requested = matched.requested.copy()
    requested[has_block] = blocks.requested[block]
    sizes = rounded_array(requested, recorded_divisions(snapshot.settings))
    sizes[has_block] = blocks.size[block]
    # The pool is recorded by the event (torch 2.12), else by the segment.
    pools = segments.pool_at(
        matched.address, np.where(has_event, matched.source, len(trace.events))
    )
    recorded_pools = events.pool[source]
    pools[has_event] = np.where(recorded_pools >= 0, recorded_pools, pools[has_event])
    return Allocations(
        address=matched.address,
        requested=requested,
        size=sizes,
        size_known=has_block,
        begin=matched.begin,
        free_request=matched.free_request,
        end=matched.end,
        stream=streams,
        pool=pools,
        stack=stacks,
        source=matched.source,
        live_block=matched.block,
    )


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
    begin, request, end = allocations.begin, allocations.free_request, allocations.end
    return Curves(
        requested=_sum_of_intervals(n_events, begin, end, allocations.requested),
        allocated=_sum_of_intervals(n_events, begin, request, allocations.size),
        active=_sum_of_intervals(n_events, begin, end, allocations.size),
        reserved=segments.reserved,
    )


def _sum_of_intervals(n_events: int, begin: Ints, end: Ints, sizes: Ints) -> Ints:
    """Return the sum of the sizes whose interval contains each moment.

    An interval includes the moments from after event ``begin`` to before event ``end``.
    """
    changes = np.bincount(begin + 1, weights=sizes, minlength=n_events + 2)
    changes -= np.bincount(end + 1, weights=sizes, minlength=n_events + 2)
    # Sums of bytes stay below 2**53, where float64 is exact.
    return np.cumsum(changes[: n_events + 1]).astype(np.int64)


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
    is_large = (
        (allocations.size > MAX_SMALL_BYTES)
        & _in_segments(allocations.address, segments)
        & ~np.isin(allocations.pool, other_pools)
    )
    large = take(allocations, is_large)
    if large.size_known.all():
        return allocations
    unsplit_sizes = _unsplit_sizes(
        large, segments, max_split_bytes=recorded_max_split(snapshot.settings)
    )
    sizes = allocations.size.copy()
    sizes[is_large] = np.where(large.size_known, large.size, unsplit_sizes)
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
    sizes, addresses = blocks.size.tolist(), blocks.address.tolist()
    segment_ends = (segments.address + segments.size.astype(np.uint64)).tolist()
    for item, is_begin in _begins_and_ends(blocks, segments):
        is_block = item < len(blocks)
        boundary = addresses[item] if is_block else segment_ends[item - len(blocks)]
        index = bisect_left(boundaries, boundary)
        if not is_begin:
            if index < len(boundaries) and boundaries[index] == boundary:
                del boundaries[index]
            continue
        if is_block:
            block_end = boundary + sizes[item]
            next_index = bisect_left(boundaries, block_end, index)
            if next_index < len(boundaries):
                gap_bytes = boundaries[next_index] - block_end
                if 0 < gap_bytes <= MAX_SMALL_BYTES or sizes[item] >= max_split_bytes:
                    sizes[item] += gap_bytes
        boundaries.insert(index, boundary)
    return _extend_blocks_before_trace(blocks, np.array(sizes, np.int64))


def _extend_blocks_before_trace(blocks: Allocations, sizes: Ints) -> Ints:
    """Extend each block from before the trace to a block allocated later, up to 1 MiB behind its end."""
    order = np.argsort(blocks.address, kind="stable")
    addresses, begins = blocks.address[order], blocks.begin[order]
    for block in np.flatnonzero(blocks.begin == BEFORE_TRACE).tolist():
        end_address = int(blocks.address[block]) + int(sizes[block])
        window = np.array([end_address, end_address + MAX_SMALL_BYTES + 1], np.uint64)
        first, end = np.searchsorted(addresses, window).tolist()
        later = np.flatnonzero(begins[first:end] < blocks.end[block])
        if len(later):
            sizes[block] += int(addresses[first + later[0]]) - end_address
    return sizes


def _begins_and_ends(blocks: Allocations, segments: SegmentLifetimes) -> Iterator[tuple[int, bool]]:
    """Yield the begins and ends of blocks and segments by time, as pairs (index, is_begin).

    Indices of segments follow those of blocks.
    """
    begins = np.concatenate((blocks.begin, segments.begin))
    ends = np.concatenate((blocks.end, segments.end))
    # Keys are twice the event index, plus 1 for begins: at one event, ends come before begins. For equal
    # keys, segments come before blocks.
    keys = np.concatenate((2 * begins + 1, 2 * ends))
    is_block = np.arange(len(begins)) < len(blocks)
    order = np.lexsort((np.concatenate((is_block, is_block)), keys))
    return zip((order % len(begins)).tolist(), (order < len(begins)).tolist(), strict=True)
