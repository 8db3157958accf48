"""The layout of memory at a moment: segments, their blocks in use, and their free blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cudakit.memory.replay.allocations import Allocations
from cudakit.memory.replay.segments import SegmentHistory, SegmentLifetimes
from cudakit.memory.snapshot import Addresses, Ints, Mask, SegmentKind
from cudakit.torch_rules.sizes import MAX_SMALL_BYTES


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
