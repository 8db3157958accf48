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
        """Return the layout at a moment."""
        return layout_at(self.segments, self.allocations, moment)


def reconstruct(snapshot: Snapshot, trace: DeviceTrace) -> History:
    """Reconstruct the history of a device from its trace and final state."""
    segments = segment_history(trace)
    lifetime_steps = allocation_lifetime_steps(trace.events)
    matched_lifetimes = match_final_blocks(
        lifetime_steps, split_into_lifetimes(lifetime_steps), trace.blocks, len(trace.events)
    )
    allocations = allocations_of(snapshot, trace, segments, matched_lifetimes)
    allocations = with_unsplit_sizes(snapshot, segments.plain_segments, allocations)
    curves = curves_of(segments, allocations)
    return History(
        segments=segments,
        allocations=allocations,
        curves=curves,
        inconsistencies=replace(
            matched_lifetimes.counts,
            segments=segments.contradictions,
            over_reserved=int(np.count_nonzero(curves.active > curves.reserved)),
        ),
        begins_complete=bool(
            curves.reserved[0] == 0 and not (allocations.begin == BEFORE_TRACE).any()
        ),
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
    live_allocations = np.flatnonzero((allocations.begin < moment) & (moment <= allocations.end))
    return live_allocations[np.argsort(allocations.address[live_allocations], kind="stable")]


def layout_at(history: SegmentHistory, allocations: Allocations, moment: int) -> Layout:
    """Return the layout at a moment, without allocations outside segments (in inexact traces)."""
    segments = history.at(moment)
    live_allocations = live_at(allocations, moment)
    addresses, sizes = allocations.address[live_allocations], allocations.size[live_allocations]
    segment_indices, offsets, is_inside = _positions_in_segments(segments, addresses, sizes)
    live_allocations, segment_indices, offsets, sizes = (
        live_allocations[is_inside],
        segment_indices[is_inside],
        offsets[is_inside],
        sizes[is_inside],
    )
    segments = _with_kinds(segments, segment_indices, sizes)
    free_block_segment, free_block_offset, free_block_size = _free_blocks(
        segments, segment_indices, offsets, sizes
    )
    return Layout(
        segments=segments,
        allocation=live_allocations,
        block_segment=segment_indices,
        block_offset=offsets,
        block_size=sizes,
        block_requested=allocations.requested[live_allocations],
        block_pending=allocations.free_request[live_allocations] < moment,
        free_block_segment=free_block_segment,
        free_block_offset=free_block_offset,
        free_block_size=free_block_size,
    )


def _positions_in_segments(
    segments: SegmentLifetimes, address: Addresses, size: Ints
) -> tuple[Ints, Ints, Mask]:
    """Return the segment of each block, its offset in bytes, and whether it lies inside the segment."""
    if not len(segments):
        zero_offsets = np.zeros(len(address), np.int64)
        return zero_offsets, zero_offsets, np.zeros(len(address), np.bool_)
    segment = np.maximum(np.searchsorted(segments.address, address, side="right") - 1, 0)
    # Offsets are unsigned: an address below the first segment wraps to a large offset.
    offset = address - segments.address[segment]
    last_offset = segments.size[segment] - size
    is_inside = (last_offset >= 0) & (offset <= np.maximum(last_offset, 0).astype(np.uint64))
    return segment, offset.astype(np.int64), is_inside


def _with_kinds(segments: SegmentLifetimes, segment: Ints, size: Ints) -> SegmentLifetimes:
    """Set unknown kinds of expandable segments according to the sizes of their blocks."""
    kinds = segments.kind.copy()
    is_unknown = segments.expandable[segment] & (kinds[segment] == SegmentKind.UNKNOWN)
    is_small = size[is_unknown] <= MAX_SMALL_BYTES
    kinds[segment[is_unknown]] = np.where(is_small, SegmentKind.SMALL, SegmentKind.LARGE)
    return replace(segments, kind=kinds)


def _free_blocks(
    segments: SegmentLifetimes, segment: Ints, offset: Ints, size: Ints
) -> tuple[Ints, Ints, Ints]:
    """Return the free blocks: the gaps before each block, and after the last block of each segment."""
    n_segments = len(segments)
    segment_index = np.arange(n_segments, dtype=np.int64)
    # Each segment gets an empty block at its end, so that every gap is followed by a block.
    all_segments = np.concatenate((segment, segment_index))
    all_offsets = np.concatenate((offset, segments.size))
    all_ends = np.concatenate((offset + size, segments.size))
    offset_order = np.lexsort((all_offsets, all_segments))
    all_segments, all_offsets = all_segments[offset_order], all_offsets[offset_order]
    previous_end = np.zeros(len(offset_order), np.int64)
    previous_end[1:] = np.where(
        all_segments[1:] == all_segments[:-1], all_ends[offset_order][:-1], 0
    )
    gap_bytes = all_offsets - previous_end
    is_free = gap_bytes > 0
    return all_segments[is_free], previous_end[is_free], gap_bytes[is_free]


def _sum_by(segment_index: Ints, size_bytes: Ints, n_segments: int) -> Ints:
    return np.bincount(segment_index, weights=size_bytes, minlength=n_segments).astype(np.int64)


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
