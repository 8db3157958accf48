"""Reconstruct the lifetimes of all allocations and segments, and the memory at every moment.

The final state of a snapshot is complete, but its trace can lack earlier events. So the reconstruction goes
back from the final state, and assumes nothing about the state before the trace.

Moment 0 is before the first recorded event, moment ``i + 1`` is after event ``i``, and moment ``n`` is the
end.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from cudakit.memory.lifetimes import (
    Contradictions,
    MatchedLifetimes,
    SegmentHistory,
    SegmentLifetimes,
    allocation_lifetime_steps,
    match_final_blocks,
    segment_history,
    split_into_lifetimes,
)
from cudakit.memory.snapshot import (
    BEFORE_TRACE,
    POOL_NAMES,
    Action,
    Addresses,
    DeviceTrace,
    Ids,
    Ints,
    Mask,
    SegmentKind,
    Snapshot,
    take,
)
from cudakit.torch_rules.settings import (
    MAX_SMALL_BYTES,
    recorded_divisions,
    recorded_max_split,
    rounded_array,
)


@dataclass(frozen=True, slots=True)
class History:
    """The reconstructed history of one device."""

    segments: SegmentHistory
    allocations: Allocations
    curves: Curves
    inconsistencies: Contradictions
    begins_complete: bool  # whether the trace starts with no memory reserved

    @property
    def n_events(self) -> int:
        """The number of events of the trace."""
        return len(self.curves.reserved) - 1

    def peak_moment(self) -> int:
        """Return the first moment with the most requested memory."""
        return int(self.curves.requested.argmax())

    def layout_at(self, moment: int) -> Layout:
        """Return the layout at a moment, without allocations outside segments (in inexact traces)."""
        return _layout_at(self.segments, self.allocations, moment)


def reconstruct(snapshot: Snapshot, trace: DeviceTrace) -> History:
    """Reconstruct the history of a device from its trace and final state."""
    segments = segment_history(trace)
    steps = allocation_lifetime_steps(trace.events)
    matched = match_final_blocks(
        steps, split_into_lifetimes(steps), trace.blocks, len(trace.events)
    )
    allocations = with_unsplit_sizes(
        snapshot, segments.plain_segments, allocations_of(snapshot, trace, segments, matched)
    )
    curves = curves_of(segments, allocations)
    has_no_earlier = not (allocations.begin == BEFORE_TRACE).any()
    return History(
        segments=segments,
        allocations=allocations,
        curves=curves,
        inconsistencies=replace(
            matched.counts,
            segments=segments.contradictions,
            over_reserved=int(np.count_nonzero(curves.active > curves.reserved)),
        ),
        begins_complete=bool(curves.reserved[0] == 0 and has_no_earlier),
    )


# --- The layout of memory at a moment: segments, their blocks in use, and their free blocks --------


@dataclass(frozen=True, slots=True)
class Layout:
    """Segments by address, with their blocks in use and their free blocks.

    Arrays named ``*_segment`` have indices of segments.
    """

    segments: SegmentLifetimes
    allocation: Ints  # index in Allocations of each block in use
    block_segment: Ints  # index of the segment of each block in use
    block_offset: Ints  # offset in bytes from the start of the segment
    block_size: Ints
    block_requested: Ints
    block_pending: Mask  # whether each block is pending free
    free_block_segment: Ints  # index of the segment of each free block
    free_block_offset: Ints  # offset in bytes from the start of the segment
    free_block_size: Ints

    def free_by_segment(self) -> Ints:
        """Return the free bytes of each segment."""
        return _sum_by(self.free_block_segment, self.free_block_size, len(self.segments))

    def used_by_segment(self) -> Ints:
        """Return the bytes in use or pending free of each segment."""
        return _sum_by(self.block_segment, self.block_size, len(self.segments))


def live_at(allocations: Allocations, moment: int) -> Ints:
    """Return the indices of allocations in use or pending free at a moment, by address."""
    live = np.flatnonzero((allocations.begin < moment) & (moment <= allocations.end))
    return live[np.argsort(allocations.address[live], kind="stable")]


def _layout_at(history: SegmentHistory, allocations: Allocations, moment: int) -> Layout:
    segments = history.at(moment)
    live = live_at(allocations, moment)
    sizes = allocations.size[live]
    segment, offset, is_inside = _places(segments, allocations.address[live], sizes)
    live, segment, offset, sizes = (array[is_inside] for array in (live, segment, offset, sizes))
    # Unknown kinds of expandable segments follow from the sizes of their blocks.
    kinds = segments.kind.copy()
    is_unknown = segments.expandable[segment] & (kinds[segment] == SegmentKind.UNKNOWN)
    is_small = sizes[is_unknown] <= MAX_SMALL_BYTES
    kinds[segment[is_unknown]] = np.where(is_small, SegmentKind.SMALL, SegmentKind.LARGE)
    free_segment, free_offset, free_size = _free_blocks(segments.size, segment, offset, sizes)
    return Layout(
        segments=replace(segments, kind=kinds),
        allocation=live,
        block_segment=segment,
        block_offset=offset,
        block_size=sizes,
        block_requested=allocations.requested[live],
        block_pending=allocations.free_request[live] < moment,
        free_block_segment=free_segment,
        free_block_offset=free_offset,
        free_block_size=free_size,
    )


def _places(segments: SegmentLifetimes, address: Addresses, size: Ints) -> tuple[Ints, Ints, Mask]:
    """Return the segment of each block, its offset in bytes, and whether it lies inside the segment."""
    if not len(segments):
        zeros = np.zeros(len(address), np.int64)
        return zeros, zeros, np.zeros(len(address), np.bool_)
    segment = np.maximum(np.searchsorted(segments.address, address, side="right") - 1, 0)
    # Offsets are unsigned: an address below the first segment wraps to a large offset.
    offset = address - segments.address[segment]
    last_offset = segments.size[segment] - size
    is_inside = (last_offset >= 0) & (offset <= np.maximum(last_offset, 0).astype(np.uint64))
    return segment, offset.astype(np.int64), is_inside


def _free_blocks(
    segment_sizes: Ints, segment: Ints, offset: Ints, size: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return the free blocks: the gaps before each block, and after the last block of each segment."""
    # Each segment gets an empty block at its end, so that every gap is followed by a block.
    segments = np.concatenate((segment, np.arange(len(segment_sizes))))
    offsets = np.concatenate((offset, segment_sizes))
    ends = np.concatenate((offset + size, segment_sizes))
    order = np.lexsort((offsets, segments))
    segments, offsets, ends = segments[order], offsets[order], ends[order]
    previous_end = np.zeros(len(order), np.int64)
    previous_end[1:] = np.where(segments[1:] == segments[:-1], ends[:-1], 0)
    gaps = offsets - previous_end
    is_free = gaps > 0
    return segments[is_free], previous_end[is_free], gaps[is_free]


def _sum_by(segment: Ints, sizes: Ints, n_segments: int) -> Ints:
    return np.bincount(segment, weights=sizes, minlength=n_segments).astype(np.int64)


@dataclass(frozen=True, slots=True)
class State:
    """The memory totals of one moment, as defined by ``torch.cuda.memory_stats``."""

    allocated_bytes: int  # total size of the allocated blocks, which the program has not freed
    requested_bytes: (
        int  # bytes that the program requested, for the blocks in use (allocated or pending free)
    )
    active_bytes: int  # total size of the blocks in use: allocated or pending free
    reserved_bytes: int  # total size of segments
    pending_free_bytes: int  # total size of freed blocks that a stream may still use
    segments: int  # number of segments
    blocks: int  # number of blocks in use (allocated or pending free)
    allocated_is_derived: bool  # whether some block sizes are computed by the allocator's rules


def state_at(history: History, layout: Layout, moment: int) -> State:
    """Return the totals of a moment; ``layout`` is the layout at this moment."""
    curves = history.curves
    active_bytes, allocated_bytes = int(curves.active[moment]), int(curves.allocated[moment])
    return State(
        allocated_bytes=allocated_bytes,
        requested_bytes=int(curves.requested[moment]),
        active_bytes=active_bytes,
        reserved_bytes=int(curves.reserved[moment]),
        pending_free_bytes=active_bytes - allocated_bytes,
        segments=len(layout.segments),
        blocks=len(layout.block_size),
        allocated_is_derived=not bool(history.allocations.size_known[layout.allocation].all()),
    )


# --- All allocations with their lifetimes, sizes and call stacks, and the memory curves ------------


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
