"""The size of the block that a request got, where no file records it.

Rounding and splitting follow c10/cuda/CUDACachingAllocator.cpp (``round_size``, ``should_split``) of torch
2.11; constants are those of the same file.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay.lifetimes import BEFORE

_Ints = npt.NDArray[np.int64]

MIN_BLOCK = 512  # kMinBlockSize
SMALL_REQUEST = 1 << 20  # kSmallSize: larger rounded sizes come from the large pool
_SMALL_SEGMENT = 2 << 20  # kSmallBuffer
_LARGE_SEGMENT = 20 << 20  # kLargeBuffer
_LARGE_REQUEST = 10 << 20  # kMinLargeAlloc: from here on a request gets a segment of its own
_ROUND_LARGE = 2 << 20  # kRoundLarge
_UNLIMITED = (1 << 63) - 1
_FIRST_DIVISION_LOG2 = 20  # the first roundup_power2_divisions slot is that of 1 MiB


def rounded(requested: _Ints, settings: Mapping[str, Any]) -> _Ints:
    """Round requests to block sizes: a multiple of 512 bytes, or a division of a power of two."""
    plain = np.maximum(-(-requested // MIN_BLOCK) * MIN_BLOCK, MIN_BLOCK)
    table = _divisions(settings)
    if not any(table):
        return plain
    log2 = np.floor(np.log2(np.maximum(requested, 1))).astype(np.int64)
    slot = np.clip(log2 - _FIRST_DIVISION_LOG2, 0, len(table) - 1)
    divisions = np.array(table, np.int64)[slot]
    divided = (divisions > 1) & (requested > MIN_BLOCK * divisions)
    return np.where(divided, _next_division(requested, log2, divisions), plain)


def segment_size(size: int) -> int:
    """Say how much the allocator reserves to serve one rounded request (``get_allocation_size``), bytes."""
    if size <= SMALL_REQUEST:
        return _SMALL_SEGMENT
    if size < _LARGE_REQUEST:
        return _LARGE_SEGMENT
    return -(-size // _ROUND_LARGE) * _ROUND_LARGE


def max_split(settings: Mapping[str, Any]) -> int:
    """Read the size from which blocks are never split; a file that sets none says -1 or a huge number."""
    found = settings.get("max_split_size")
    return found if isinstance(found, int) and found > 0 else _UNLIMITED


def _divisions(settings: Mapping[str, Any]) -> list[int]:
    """Read the divisions of each power of two from 1 MiB on; 0 is plain rounding."""
    found = settings.get("roundup_power2_divisions")
    if not isinstance(found, Mapping):
        return []
    slots = sorted((int(key), n) for key, n in found.items() if str(key).isdecimal())
    return [n if isinstance(n, int) and 0 <= n <= 1 << 20 else 0 for _, n in slots]


def _next_division(requested: _Ints, log2: _Ints, divisions: _Ints) -> _Ints:
    floor = np.int64(1) << np.minimum(log2, 60)
    step = np.maximum(floor // np.maximum(divisions, 1), 1)
    return np.where(requested == floor, requested, -(-requested // step) * step)


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
                if 0 < gap <= SMALL_REQUEST or size[item] >= max_split:
                    size[item] += gap
        fences.insert(place, fence)
    return _with_ends_shown_later(blocks, np.array(size, np.int64))


def _with_ends_shown_later(blocks: Tenancy, size: _Ints) -> _Ints:
    """Let blocks from before the trace reach to whatever came to lie closely behind them in their life."""
    by_address = np.argsort(blocks.address, kind="stable")
    address, begin = blocks.address[by_address], blocks.begin[by_address]
    for block in np.flatnonzero(blocks.begin == BEFORE).tolist():
        stop = int(blocks.address[block]) + int(size[block])
        window = np.array([stop, stop + SMALL_REQUEST + 1], np.uint64)
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
