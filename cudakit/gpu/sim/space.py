"""The address space of a simulated device: which bytes there are, and what stands in them."""

from __future__ import annotations

import mmap
from bisect import bisect_right, insort
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.trace.kinds import HostMemory

Bytes: TypeAlias = npt.NDArray[np.uint8]

# Addresses look like a device's, and the first ones, where null pointers with offsets lead, are not given.
_FIRST = 0x7F00_0000_0000
_GAP_BYTES = 512
# Larger memory comes from the operating system page by page, when it is touched.
_LAZY_BYTES = 1 << 20
_MAP_NORESERVE = 0x4000  # Linux; a device has more memory than the host may have
_FRESH = 0xC5  # what small memory holds before anything is written there


@dataclass(slots=True, eq=False)
class Region:
    """A range of addresses with memory behind it."""

    begin: int
    data: Bytes
    live: bool = True  # whether its turn has come, and not passed, in the order of its stream
    host: HostMemory = HostMemory.NONE  # which kind of memory of the host it is
    peer: int | None = None  # the number of the other device whose memory it is

    @property
    def end(self) -> int:
        """The first address beyond it."""
        return self.begin + len(self.data)


class Space:
    """All regions, by address. No address is given out twice, so what was freed stays recognisable."""

    def __init__(self) -> None:
        self._next = _FIRST
        self._begins: list[int] = []
        self._regions: dict[int, Region] = {}

    def take(self, size_bytes: int, alignment_bytes: int) -> int:
        """Give out addresses that nobody had."""
        begin = round_up(self._next, alignment_bytes)
        self._next = begin + size_bytes + _GAP_BYTES
        return begin

    def add(self, region: Region) -> None:
        insort(self._begins, region.begin)
        self._regions[region.begin] = region

    def remove(self, region: Region) -> None:
        del self._regions[region.begin]
        del self._begins[bisect_right(self._begins, region.begin) - 1]

    def at(self, address: int) -> Region | None:
        """Return the region that an address is in."""
        index = bisect_right(self._begins, address) - 1
        if index < 0:
            return None
        region = self._regions[self._begins[index]]
        return region if address < region.end else None

    def within(self, begin: int, size_bytes: int) -> list[Region] | None:
        """Return the regions that a range lies in, end to end; None where there is a hole."""
        found: list[Region] = []
        place = begin
        while place < begin + size_bytes:
            region = self.at(place)
            if region is None:
                return None
            found.append(region)
            place = region.end
        return found

    def is_empty(self, begin: int, size_bytes: int) -> bool:
        """Say whether no region overlaps a range."""
        index = bisect_right(self._begins, begin + size_bytes - 1) - 1
        return index < 0 or self._regions[self._begins[index]].end <= begin


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a range, which may lie in several regions."""

    pieces: tuple[Bytes, ...]

    def gather(self) -> Bytes:
        """Return the bytes: the memory itself where it is in one piece, else a copy."""
        return self.pieces[0] if len(self.pieces) == 1 else np.concatenate(self.pieces)

    def scatter(self, content: Bytes) -> None:
        """Put bytes back."""
        at = 0
        for piece in self.pieces:
            piece[:] = content[at : at + len(piece)]
            at += len(piece)


def span(regions: list[Region], begin: int, size_bytes: int) -> Span:
    """Cut a range out of the regions that it lies in."""
    end = begin + size_bytes
    return Span(
        tuple(
            region.data[max(begin - region.begin, 0) : min(end, region.end) - region.begin]
            for region in regions
        )
    )


def memory(size_bytes: int) -> Bytes:
    """Make memory; where it is large, none of it is used before it is touched."""
    if size_bytes < _LAZY_BYTES:
        return np.full(size_bytes, _FRESH, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), np.uint8)


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple
