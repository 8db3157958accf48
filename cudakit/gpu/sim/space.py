"""The memory of a simulated device: its address space, the bytes behind it, and how much is in use."""

from __future__ import annotations

import mmap
from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.sim.context import Context
from cudakit.trace.kinds import HostMemory
from cudakit.units import format_bytes

Bytes: TypeAlias = npt.NDArray[np.uint8]

# Addresses look like a device's; low ones, where null pointers with offsets lead, are never allocated.
_FIRST = 0x7F00_0000_0000
_GAP_BYTES = 512
# Larger memory is mapped by the operating system, page by page as it is touched.
_LAZY_BYTES = 1 << 20
_MAP_NORESERVE = 0x4000  # Linux; a device has more memory than the host may have
_FRESH = 0xC5  # the initial bytes of small memory
# What sizes are rounded up to, and addresses are multiples of.
_ALIGNMENT_BYTES = 512
# Of a device whose model does not say.
DEFAULT_CAPACITY_BYTES = 1 << 30


@dataclass(slots=True, eq=False)
class Region:
    """A range of addresses with memory behind it."""

    begin: int
    data: Bytes
    live: bool = True  # between allocation and free in stream order
    host: HostMemory = HostMemory.NONE  # the kind of host memory
    peer: int | None = None  # the ordinal of the other device that owns it

    @property
    def end(self) -> int:
        """The first address behind the region."""
        return self.begin + len(self.data)


class Space:
    """All regions by address. No address is used twice, so that freed memory stays recognisable."""

    def __init__(self) -> None:
        self._next = _FIRST
        self._begins: list[int] = []
        self._regions: dict[int, Region] = {}

    def take(self, size_bytes: int, alignment_bytes: int) -> int:
        """Return new addresses."""
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
        """Return the adjacent regions that a range lies in; None if there is a gap."""
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
        """Return whether no region overlaps a range."""
        index = bisect_right(self._begins, begin + size_bytes - 1) - 1
        return index < 0 or self._regions[self._begins[index]].end <= begin


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a range, which may lie in several regions."""

    pieces: tuple[Bytes, ...]

    def gather(self) -> Bytes:
        """Return the bytes: the memory itself if it is in one piece, else a copy."""
        return self.pieces[0] if len(self.pieces) == 1 else np.concatenate(self.pieces)

    def scatter(self, content: Bytes) -> None:
        """Write bytes back."""
        at = 0
        for piece in self.pieces:
            piece[:] = content[at : at + len(piece)]
            at += len(piece)


def span(regions: list[Region], begin: int, size_bytes: int) -> Span:
    """Return a range of the regions that it lies in."""
    end = begin + size_bytes
    return Span(
        tuple(
            region.data[max(begin - region.begin, 0) : min(end, region.end) - region.begin]
            for region in regions
        )
    )


def memory(size_bytes: int) -> Bytes:
    """Create memory; large memory takes up pages of the host only as it is touched."""
    if size_bytes < _LAZY_BYTES:
        return np.full(size_bytes, _FRESH, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), np.uint8)


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


class Heap:
    """All memory that a device can address, and how much of its own is in use."""

    def __init__(self, context: Context, capacity_bytes: int | None) -> None:
        self.space = Space()
        self.capacity_bytes = (
            context.limit("usable_memory_bytes", DEFAULT_CAPACITY_BYTES)
            if capacity_bytes is None
            else capacity_bytes
        )
        self.released: deque[int] = deque()  # sizes of physical memory that other processes let go
        self._context = context
        self._used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """The bytes of the device that are not in use."""
        while self.released:
            self.credit(self.released.popleft())
        return self.capacity_bytes - self._used_bytes

    def charge(self, size_bytes: int) -> None:
        """Take memory of the device into use. Raises CUDA_ERROR_OUT_OF_MEMORY."""
        if rounded(size_bytes) > self.free_bytes:
            self._context.wait_for_all()  # stream-ordered frees may give enough back
        if rounded(size_bytes) > self.free_bytes:
            free, total = format_bytes(self.free_bytes), format_bytes(self.capacity_bytes)
            seen = f"{format_bytes(size_bytes)} requested, {free} of {total} free on {self._context.name}"
            raise cuda_error(Status.OUT_OF_MEMORY, seen=seen)
        self._used_bytes += rounded(size_bytes)

    def credit(self, size_bytes: int) -> None:
        """Return memory of the device from use."""
        self._used_bytes -= rounded(size_bytes)

    def add(
        self,
        data: Bytes,
        *,
        live: bool = True,
        host: HostMemory = HostMemory.NONE,
        peer: int | None = None,
    ) -> Region:
        """Give memory of any kind new addresses."""
        region = Region(self.space.take(len(data), _ALIGNMENT_BYTES), data, live, host, peer)
        self.space.add(region)
        return region

    def span(self, ptr: int, size_bytes: int, what: str) -> Span:
        """Return a range for a kernel that runs now. Raises CUDA_ERROR_ILLEGAL_ADDRESS."""
        regions = self._live(ptr, size_bytes, what)
        if not all(map(self._is_reached, regions)):
            whose = "pageable host memory, or memory of a device without peer access"
            raise cuda_error(
                Status.ILLEGAL_ADDRESS, seen=f"{what}: {size_bytes} bytes at {ptr:#x} are {whose}"
            )
        return span(regions, ptr, size_bytes)

    def copied(self, ptr: int, size_bytes: int, what: str) -> Span:
        """Return a range for a copy or fill that runs now. Raises as ``span``."""
        return span(self._live(ptr, size_bytes, what), ptr, size_bytes)

    def known(self, ptr: int, size_bytes: int, seen: str) -> list[Region]:
        """Return the regions of a range given to a call, live or not. Raises CUDA_ERROR_INVALID_VALUE."""
        regions = self.space.within(ptr, max(size_bytes, 1))
        if size_bytes < 0 or regions is None:
            raise cuda_error(
                Status.INVALID_VALUE, seen=f"{seen}: not all of the range is allocated"
            )
        return regions

    def _live(self, ptr: int, size_bytes: int, what: str) -> list[Region]:
        regions = self.space.within(ptr, size_bytes)
        if regions is None or not all(region.live for region in regions):
            raise cuda_error(
                Status.ILLEGAL_ADDRESS,
                seen=f"{what}: {size_bytes} bytes at {ptr:#x} are not allocated at this point",
            )
        return regions

    def _is_reached(self, region: Region) -> bool:
        """Return whether kernels can use a region."""
        context = self._context
        if region.peer is not None:
            return (context.ordinal, region.peer) in context.view.peer_access
        pageable = region.host is HostMemory.PAGEABLE
        return not pageable or context.facts.fields.get("pageable_memory_access") is True


def rounded(size_bytes: int) -> int:
    """Return the bytes that an allocation takes up."""
    return round_up(size_bytes, _ALIGNMENT_BYTES)
