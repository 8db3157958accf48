"""The layout of memory at a moment: segments, the blocks in use in them, and the holes between.

At the end this is the state in the snapshot; at any other moment it follows from the replay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay.allocations import Allocations
from cudakit.core.memory.replay.segments import SegmentHistory, SegmentLives
from cudakit.core.memory.snapshot import SegmentKind
from cudakit.torch_rules.sizes import MOST_SMALL

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Layout:
    """Segments in address order, and by ``*_segment`` index the blocks and holes that tile them."""

    segments: SegmentLives
    allocation: _Ints  # of each block in use: index into Allocations
    block_segment: _Ints
    block_offset: _Ints  # bytes from the segment's start
    block_size: _Ints
    block_requested: _Ints
    block_pending: npt.NDArray[np.bool_]  # freed, still used by another stream
    hole_segment: _Ints
    hole_offset: _Ints
    hole_size: _Ints

    def free_by_segment(self) -> _Ints:
        """Sum the holes of each segment, bytes."""
        return _sum_by(self.hole_segment, self.hole_size, len(self.segments))

    def used_by_segment(self) -> _Ints:
        """Sum the blocks in use or pending free of each segment, bytes."""
        return _sum_by(self.block_segment, self.block_size, len(self.segments))


def live_at(allocations: Allocations, moment: int) -> _Ints:
    """List the allocations in use or pending free at a moment, by address."""
    live = np.flatnonzero((allocations.begin < moment) & (moment <= allocations.end))
    return live[np.argsort(allocations.address[live], kind="stable")]


def layout_at(history: SegmentHistory, allocations: Allocations, moment: int) -> Layout:
    """Lay out a device's memory at one moment. Allocations in no segment, in inexact traces, are left out."""
    segments = history.at(moment)
    live = live_at(allocations, moment)
    address, size = allocations.address[live], allocations.size[live]
    segment, offset, inside = _places(segments, address, size)
    live, segment, offset, size = live[inside], segment[inside], offset[inside], size[inside]
    segments = _with_kinds(segments, segment, size)
    hole_segment, hole_offset, hole_size = _holes(segments, segment, offset, size)
    return Layout(
        segments=segments,
        allocation=live,
        block_segment=segment,
        block_offset=offset,
        block_size=size,
        block_requested=allocations.requested[live],
        block_pending=allocations.free_requested[live] < moment,
        hole_segment=hole_segment,
        hole_offset=hole_offset,
        hole_size=hole_size,
    )


def _places(
    segments: SegmentLives, address: npt.NDArray[np.uint64], size: _Ints
) -> tuple[_Ints, _Ints, npt.NDArray[np.bool_]]:
    """Return the segment of each block, its offset there in bytes, and whether it fits in."""
    if not len(segments):
        nowhere = np.zeros(len(address), np.int64)
        return nowhere, nowhere, np.zeros(len(address), np.bool_)
    segment = np.maximum(np.searchsorted(segments.address, address, side="right") - 1, 0)
    # Unsigned: an address below the first segment wraps to a huge offset.
    offset = address - segments.address[segment]
    room = segments.size[segment] - size
    inside = (room >= 0) & (offset <= np.maximum(room, 0).astype(np.uint64))
    return segment, offset.astype(np.int64), inside


def _with_kinds(segments: SegmentLives, segment: _Ints, size: _Ints) -> SegmentLives:
    """Set the unknown kinds of expandable segments from the sizes of their blocks."""
    kind = segments.kind.copy()
    unknown = segments.expandable[segment] & (kind[segment] == SegmentKind.UNKNOWN)
    small = size[unknown] <= MOST_SMALL
    kind[segment[unknown]] = np.where(small, SegmentKind.SMALL, SegmentKind.LARGE)
    return replace(segments, kind=kind)


def _holes(
    segments: SegmentLives, segment: _Ints, offset: _Ints, size: _Ints
) -> tuple[_Ints, _Ints, _Ints]:
    """Return the gaps: before each block, and after the last one of each segment."""
    n = len(segments)
    edge = np.arange(n, dtype=np.int64)
    # A block of no length at the end of every segment, so that every gap is one before a block.
    all_segments = np.concatenate((segment, edge))
    all_offsets = np.concatenate((offset, segments.size))
    all_ends = np.concatenate((offset + size, segments.size))
    order = np.lexsort((all_offsets, all_segments))
    all_segments, all_offsets = all_segments[order], all_offsets[order]
    previous_end = np.zeros(len(order), np.int64)
    previous_end[1:] = np.where(all_segments[1:] == all_segments[:-1], all_ends[order][:-1], 0)
    gap = all_offsets - previous_end
    real = gap > 0
    return all_segments[real], previous_end[real], gap[real]


def _sum_by(index: _Ints, amount: _Ints, n: int) -> _Ints:
    return np.bincount(index, weights=amount, minlength=n).astype(np.int64)
