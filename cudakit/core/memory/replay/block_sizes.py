"""The parts of blocks that the allocator did not split off, which no file records.

Splitting follows c10/cuda/CUDACachingAllocator.cpp (``should_split``) of torch 2.11.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay.lifetimes import BEFORE
from cudakit.torch_rules.sizes import MOST_SMALL

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Occupied:
    """Ranges of addresses in use from one event until another; arrays of one length.

    Each is a segment, or a block inside one. ``begin`` and ``end`` are event indices.
    """

    address: npt.NDArray[np.uint64]
    size: _Ints
    begin: _Ints
    end: _Ints

    def __len__(self) -> int:
        return len(self.address)


def unsplit(blocks: Occupied, segments: Occupied, *, max_split: int) -> _Ints:
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


def _with_ends_shown_later(blocks: Occupied, size: _Ints) -> _Ints:
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


def _changes(blocks: Occupied, segments: Occupied) -> Iterator[tuple[int, bool]]:
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
