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
class Tenancy:
    """Who holds which addresses from one moment until another; arrays of one length.

    A tenant is a segment, or a block inside one. ``begin`` and ``end`` are event indices.
    """

    address: npt.NDArray[np.uint64]
    size: _Ints
    begin: _Ints
    end: _Ints

    def __len__(self) -> int:
        return len(self.address)


def unsplit(blocks: Tenancy, segments: Tenancy, *, max_split: int) -> _Ints:
    """Add to large blocks the remainders that the allocator did not split off.

    A free block of the large pool is split only when more than 1 MiB would remain, and neighbouring free
    blocks are always merged; so space up to 1 MiB between a new block and the next one in use, or the end
    of the segment, belongs to the new block. From ``max_split`` bytes on nothing is ever split.
    ``blocks`` holds blocks of the large pool with their rounded sizes, whoever lives at any time, and
    ``segments`` the segments that they lie in. Returns the size of each block; one that began before the
    trace keeps its rounded size where nothing shows how far it reached.
    """
    fences: list[int] = []  # addresses, ascending, where what follows a block cannot be its own
    size = blocks.size.tolist()
    address = blocks.address.tolist()
    ends = (segments.address + segments.size.astype(np.uint64)).tolist()
    n_blocks = len(blocks)
    for item, arrives in _changes(blocks, segments):
        fence = address[item] if item < n_blocks else ends[item - n_blocks]
        place = bisect_left(fences, fence)
        if not arrives:
            if place < len(fences) and fences[place] == fence:
                del fences[place]
            continue
        if item < n_blocks:
            own_end = fence + size[item]
            after = bisect_left(fences, own_end, place)
            if after < len(fences):
                gap = fences[after] - own_end
                if 0 < gap <= MOST_SMALL or size[item] >= max_split:
                    size[item] += gap
        fences.insert(place, fence)
    return _with_ends_shown_later(blocks, np.array(size, np.int64))


def _with_ends_shown_later(blocks: Tenancy, size: _Ints) -> _Ints:
    """Let blocks from before the trace reach to whatever came to lie closely behind them in their life."""
    by_address = np.argsort(blocks.address, kind="stable")
    address, begin = blocks.address[by_address], blocks.begin[by_address]
    for block in np.flatnonzero(blocks.begin == BEFORE).tolist():
        stop = int(blocks.address[block]) + int(size[block])
        window = np.array([stop, stop + MOST_SMALL + 1], np.uint64)
        first, last = np.searchsorted(address, window).tolist()
        met = np.flatnonzero(begin[first:last] < blocks.end[block])
        if len(met):
            size[block] += int(address[first + met[0]]) - stop
    return size


def _changes(blocks: Tenancy, segments: Tenancy) -> Iterator[tuple[int, bool]]:
    """Give arrivals and departures in order of time: the item (segments behind blocks) and which."""
    begin = np.concatenate((blocks.begin, segments.begin))
    end = np.concatenate((blocks.end, segments.end))
    n = len(begin)
    # Twice the event index, so that at one event departures come before arrivals, and segments,
    # which have smaller keys below, before the blocks in them.
    when = np.concatenate((2 * begin + 1, 2 * end))
    is_block = np.arange(n) < len(blocks)
    order = np.lexsort((np.concatenate((is_block, is_block)), when))
    return zip((order % n).tolist(), (order < n).tolist(), strict=True)
