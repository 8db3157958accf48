"""The parts of blocks that the allocator did not split off, which no file records.

Splitting follows c10/cuda/CUDACachingAllocator.cpp (``should_split``) of torch 2.11.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay.allocations import Allocations
from cudakit.core.memory.replay.lifetimes import BEFORE
from cudakit.core.memory.replay.segments import SegmentLives
from cudakit.core.memory.snapshot import Snapshot, take
from cudakit.torch_rules.settings import recorded_max_split
from cudakit.torch_rules.sizes import MOST_SMALL

_Ints = npt.NDArray[np.int64]


def with_unsplit_sizes(
    snapshot: Snapshot, segments: SegmentLives, allocations: Allocations
) -> Allocations:
    """Replace derived sizes of large blocks by those that the allocator's splitting leaves."""
    if snapshot.settings.get("expandable_segments") is True:
        return allocations  # then the allocator splits wherever it can (``should_split``)
    large = np.flatnonzero((allocations.size > MOST_SMALL) & _inside(allocations.address, segments))
    if allocations.size_known[large].all():
        return allocations
    blocks = take(allocations, large)
    grown = _unsplit(blocks, segments, max_split=recorded_max_split(snapshot.settings))
    size = allocations.size.copy()
    size[large] = np.where(blocks.size_known, blocks.size, grown)
    return replace(allocations, size=size)


def _inside(address: npt.NDArray[np.uint64], segments: SegmentLives) -> npt.NDArray[np.bool_]:
    """Return which addresses were ever in a segment that was allocated in one piece."""
    if not len(segments):
        return np.zeros(len(address), np.bool_)
    # The furthest end of all segments that start at or below: segments of different times overlap.
    reach = np.maximum.accumulate(segments.address + segments.size.astype(np.uint64))
    place = np.searchsorted(segments.address, address, side="right") - 1
    return (place >= 0) & (address < reach[np.maximum(place, 0)])


def _unsplit(blocks: Allocations, segments: SegmentLives, *, max_split: int) -> _Ints:
    """Add to large blocks the remainders that the allocator did not split off.

    A free block of the large pool is split only when more than 1 MiB would remain, and neighbouring free
    blocks are always merged; so space of up to 1 MiB between a new block and the next one in use, or the end
    of the segment, belongs to the new block. From ``max_split`` bytes on nothing is ever split.
    ``blocks`` are the blocks of the large pool with their rounded sizes, and ``segments`` their segments.
    Returns the size of each block. A block from before the trace keeps its rounded size if no other block
    shows its end.
    """
    boundaries: list[int] = []  # ascending addresses up to which a block before them may reach
    size = blocks.size.tolist()
    address = blocks.address.tolist()
    ends = (segments.address + segments.size.astype(np.uint64)).tolist()
    n_blocks = len(blocks)
    for item, begins in _changes(blocks, segments):
        boundary = address[item] if item < n_blocks else ends[item - n_blocks]
        place = bisect_left(boundaries, boundary)
        if not begins:
            if place < len(boundaries) and boundaries[place] == boundary:
                del boundaries[place]
            continue
        if item < n_blocks:
            own_end = boundary + size[item]
            after = bisect_left(boundaries, own_end, place)
            if after < len(boundaries):
                gap = boundaries[after] - own_end
                if 0 < gap <= MOST_SMALL or size[item] >= max_split:
                    size[item] += gap
        boundaries.insert(place, boundary)
    return _with_ends_shown_later(blocks, np.array(size, np.int64))


def _with_ends_shown_later(blocks: Allocations, size: _Ints) -> _Ints:
    """Extend blocks from before the trace to the next block that was allocated closely after them."""
    by_address = np.argsort(blocks.address, kind="stable")
    address, begin = blocks.address[by_address], blocks.begin[by_address]
    for block in np.flatnonzero(blocks.begin == BEFORE).tolist():
        stop = int(blocks.address[block]) + int(size[block])
        window = np.array([stop, stop + MOST_SMALL + 1], np.uint64)
        first, last = np.searchsorted(address, window).tolist()
        later = np.flatnonzero(begin[first:last] < blocks.end[block])
        if len(later):
            size[block] += int(address[first + later[0]]) - stop
    return size


def _changes(blocks: Allocations, segments: SegmentLives) -> Iterator[tuple[int, bool]]:
    """Yield begins and ends in order of time: the item (segments after blocks), and whether it begins."""
    begin = np.concatenate((blocks.begin, segments.begin))
    end = np.concatenate((blocks.end, segments.end))
    n = len(begin)
    # Twice the event index, so that at one event departures come before arrivals, and segments,
    # which have smaller keys below, before the blocks in them.
    when = np.concatenate((2 * begin + 1, 2 * end))
    is_block = np.arange(n) < len(blocks)
    order = np.lexsort((np.concatenate((is_block, is_block)), when))
    return zip((order % n).tolist(), (order < n).tolist(), strict=True)
