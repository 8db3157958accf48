"""The address space of a simulated device: allocated regions, their content, and the bytes in use."""

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

# Low addresses stay unallocated, so that null pointers with an offset are detected.
_FIRST_ADDRESS = 0x7F00_0000_0000
_GAP_BYTES = 512
# Memory of this size or more is mapped lazily by the operating system.
_MIN_LAZY_BYTES = 1 << 20
_MAP_NORESERVE = 0x4000  # Linux; the simulated device may have more memory than the host
_INITIAL_BYTE = 0xC5  # content of new small allocations, to reveal reads of uninitialized memory
# Granularity of the sizes and addresses of allocations.
_ALIGNMENT_BYTES = 512
# The capacity of models without usable_memory_bytes.
DEFAULT_CAPACITY_BYTES = 1 << 30


@dataclass(slots=True, eq=False)
class Region:
    """An address range and its bytes."""

    begin: int
    data: Bytes
    is_live: bool = True  # whether the region is allocated at this point of the execution
    host: HostMemory = HostMemory.NONE  # the kind of host memory
    peer: int | None = None  # ordinal of the peer that owns the memory; None for this device

    @property
    def end(self) -> int:
        """The first address after the region."""
        return self.begin + len(self.data)


class Space:
    """The regions of a device, by address. Addresses are never reused, to detect use after free."""

    def __init__(self) -> None:
        self._next_address = _FIRST_ADDRESS
        self._region_begins: list[int] = []
        self._regions: dict[int, Region] = {}

    def reserve(self, size_bytes: int, alignment_bytes: int) -> int:
        """Reserve an unused address range; return its begin."""
        begin = round_up(self._next_address, alignment_bytes)
        self._next_address = begin + size_bytes + _GAP_BYTES
        return begin

    def add(self, region: Region) -> None:
        insort(self._region_begins, region.begin)
        self._regions[region.begin] = region

    def remove(self, region: Region) -> None:
        del self._regions[region.begin]
        del self._region_begins[bisect_right(self._region_begins, region.begin) - 1]

    def region_at(self, address: int) -> Region | None:
        """Return the region that contains an address, or None."""
        index = bisect_right(self._region_begins, address) - 1
        if index < 0:
            return None
        region = self._regions[self._region_begins[index]]
        return region if address < region.end else None

    def regions_covering(self, begin: int, size_bytes: int) -> list[Region] | None:
        """Return the adjacent regions that cover a range; None if there is a gap."""
        regions: list[Region] = []
        address = begin
        while address < begin + size_bytes:
            region = self.region_at(address)
            if region is None:
                return None
            regions.append(region)
            address = region.end
        return regions

    def is_empty(self, begin: int, size_bytes: int) -> bool:
        """Return whether no region overlaps a range."""
        index = bisect_right(self._region_begins, begin + size_bytes - 1) - 1
        return index < 0 or self._regions[self._region_begins[index]].end <= begin


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of an address range, which may extend over several regions."""

    parts: tuple[Bytes, ...]

    def gather(self) -> Bytes:
        """Return the bytes: a view if they lie in one region, else a copy."""
        return self.parts[0] if len(self.parts) == 1 else np.concatenate(self.parts)

    def scatter(self, content: Bytes) -> None:
        """Write bytes to the regions."""
        offset = 0
        for region_bytes in self.parts:
            region_bytes[:] = content[offset : offset + len(region_bytes)]
            offset += len(region_bytes)


def span(regions: list[Region], begin: int, size_bytes: int) -> Span:
    """Return the bytes of a range from the regions that cover it."""
    end = begin + size_bytes
    return Span(
        tuple(
            region.data[max(begin - region.begin, 0) : min(end, region.end) - region.begin]
            for region in regions
        )
    )


def new_bytes(size_bytes: int) -> Bytes:
    """Return new bytes; large ones use host memory only when written."""
    if size_bytes < _MIN_LAZY_BYTES:
        return np.full(size_bytes, _INITIAL_BYTE, np.uint8)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    return np.frombuffer(mmap.mmap(-1, size_bytes, flags=flags), np.uint8)


def round_up(value: int, multiple: int) -> int:
    """Round up to a multiple."""
    return -(-value // multiple) * multiple


class Heap:
    """The memory that a device can address, and the bytes of device memory in use."""

    def __init__(self, context: Context, capacity_bytes: int | None) -> None:
        self.space = Space()
        self.capacity_bytes = (
            context.integer_fact("usable_memory_bytes", DEFAULT_CAPACITY_BYTES)
            if capacity_bytes is None
            else capacity_bytes
        )
        self.released_sizes: deque[int] = (
            deque()
        )  # bytes of each allocation that other devices released
        self._context = context
        self._used_bytes = 0

    @property
    def free_bytes(self) -> int:
        """The bytes of the device's memory that are not in use."""
        while self.released_sizes:
            self.count_free(self.released_sizes.popleft())
        return self.capacity_bytes - self._used_bytes

    def count_allocation(self, size_bytes: int) -> None:
        """Count device memory as used. Raises CUDA_ERROR_OUT_OF_MEMORY if too little is free."""
        if rounded_size(size_bytes) > self.free_bytes:
            self._context.wait_for_all()  # completes stream-ordered frees
        if rounded_size(size_bytes) > self.free_bytes:
            free_text, total_text = format_bytes(self.free_bytes), format_bytes(self.capacity_bytes)
            free_memory_text = f"{free_text} of {total_text} free on {self._context.name}"
            error_text = f"{format_bytes(size_bytes)} requested, {free_memory_text}"
            raise cuda_error(Status.OUT_OF_MEMORY, detail=error_text)
        self._used_bytes += rounded_size(size_bytes)

    def count_free(self, size_bytes: int) -> None:
        """Count device memory as free again."""
        self._used_bytes -= rounded_size(size_bytes)

    def add(
        self,
        data: Bytes,
        *,
        is_live: bool = True,
        host: HostMemory = HostMemory.NONE,
        peer: int | None = None,
    ) -> Region:
        """Add a region for bytes of any memory kind at a new address."""
        region = Region(self.space.reserve(len(data), _ALIGNMENT_BYTES), data, is_live, host, peer)
        self.space.add(region)
        return region

    def span(self, ptr: int, size_bytes: int, accessor: str) -> Span:
        """Return the bytes that a kernel accesses.

        Raises CUDA_ERROR_ILLEGAL_ADDRESS if a byte is freed, or not accessible to the kernel.
        """
        regions = self._live_regions(ptr, size_bytes, accessor)
        if not all(map(self._is_accessible, regions)):
            inaccessible_kinds_text = (
                "pageable host memory, or memory of a device without peer access"
            )
            raise cuda_error(
                Status.ILLEGAL_ADDRESS,
                detail=f"{accessor}: {size_bytes} bytes at {ptr:#x} are {inaccessible_kinds_text}",
            )
        return span(regions, ptr, size_bytes)

    def copy_span(self, ptr: int, size_bytes: int, accessor: str) -> Span:
        """Return the bytes that a copy or memset accesses.

        Raises CUDA_ERROR_ILLEGAL_ADDRESS if a byte is freed, or was never allocated.
        """
        return span(self._live_regions(ptr, size_bytes, accessor), ptr, size_bytes)

    def check_allocated(self, ptr: int, size_bytes: int, detail: str) -> list[Region]:
        """Return the regions of a range at enqueue time. Raises CUDA_ERROR_INVALID_VALUE for a gap."""
        regions = self.space.regions_covering(ptr, max(size_bytes, 1))
        if size_bytes < 0 or regions is None:
            raise cuda_error(
                Status.INVALID_VALUE, detail=f"{detail}: not all of the range is allocated"
            )
        return regions

    def _live_regions(self, ptr: int, size_bytes: int, accessor: str) -> list[Region]:
        regions = self.space.regions_covering(ptr, size_bytes)
        if regions is None or not all(region.is_live for region in regions):
            raise cuda_error(
                Status.ILLEGAL_ADDRESS,
                detail=f"{accessor}: {size_bytes} bytes at {ptr:#x} are not allocated at this point",
            )
        return regions

    def _is_accessible(self, region: Region) -> bool:
        """Return whether kernels of this device can access a region."""
        context = self._context
        if region.peer is not None:
            return (context.ordinal, region.peer) in context.cuda_view.peer_access
        is_pageable = region.host is HostMemory.PAGEABLE
        return not is_pageable or context.facts.fields.get("pageable_memory_access") is True


def rounded_size(size_bytes: int) -> int:
    """Return the number of bytes that an allocation occupies."""
    return round_up(size_bytes, _ALIGNMENT_BYTES)
