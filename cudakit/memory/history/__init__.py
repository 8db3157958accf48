"""Reconstruct the lifetimes of all allocations and segments, and the memory at every moment.

The final state of a snapshot is complete, but its trace can lack earlier events. So the reconstruction goes
back from the final state, and assumes nothing about the state before the trace.

Moment 0 is before the first recorded event, moment ``i + 1`` is after event ``i``, and moment ``n`` is the
end.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cudakit.memory.history.allocations import (
    Allocations,
    Curves,
    allocations_of,
    curves_of,
    with_unsplit_sizes,
)
from cudakit.memory.history.lifetimes import (
    Contradictions,
    allocation_lifetime_steps,
    match_final_blocks,
    split_into_lifetimes,
)
from cudakit.memory.history.segments import SegmentHistory, SegmentLifetimes, segment_history
from cudakit.memory.snapshot import (
    BEFORE_TRACE,
    Addresses,
    DeviceTrace,
    Ints,
    Mask,
    SegmentKind,
    Snapshot,
)
from cudakit.torch_rules.sizes import MAX_SMALL_BYTES


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
