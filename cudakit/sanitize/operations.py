"""Add the accesses of allocations, launches, copies and fills, and apply the waits that they imply.

Rules: CUDA Runtime API and CUDA Driver API, "API synchronization behavior" and "Stream Ordered Memory
Allocator".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from dataclasses import replace
from typing import Final, NamedTuple

from cudakit.sanitize.clocks import EXACT, READ, WRITE, Call, MemoryAccess
from cudakit.sanitize.ordering import Stream, StreamOrder
from cudakit.sanitize.races import Allocation, Coverage
from cudakit.sanitize.record_batch import AccessRows
from cudakit.sanitize.shadow_memory import Shadow
from cudakit.trace.kinds import AllocationKind, AllocationLayer, Direction, HostMemory
from cudakit.trace.layout import ADDRESS_END


class Allocations:
    """The allocations of the driver, or the blocks of pools. They do not overlap each other."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._allocations: list[Allocation] = []

    def add(self, allocation: Allocation) -> None:
        """Add an allocation, and remove the allocations that overlap it."""
        begin = self._first_ending_after(allocation.address)
        end = bisect_left(self._addresses, allocation.address + allocation.size_bytes, lo=begin)
        self._addresses[begin:end] = [allocation.address]
        self._allocations[begin:end] = [allocation]

    def remove(self, address: int) -> Allocation | None:
        """Remove and return the allocation that starts at an address, or return None."""
        index = bisect_left(self._addresses, address)
        if index == len(self._addresses) or self._addresses[index] != address:
            return None
        del self._addresses[index]
        return self._allocations.pop(index)

    def find(self, address: int) -> Allocation | None:
        """Return the allocation that contains an address, or None."""
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        allocation = self._allocations[index]
        return allocation if address < allocation.address + allocation.size_bytes else None

    def _first_ending_after(self, address: int) -> int:
        """Return the index of the first allocation that ends after an address."""
        index = bisect_right(self._addresses, address)
        return index - 1 if self.find(address) is not None else index


class AllocationEvents:
    """Handles allocations and frees by the driver, and by pools that divide memory of the driver.

    A pool synchronizes nothing, so the shadow memory of a reused block keeps its earlier accesses. A
    stream-ordered allocation or free counts as a write, because each use of the memory must be ordered after
    the allocation and before the free (CUDA Driver API, "Stream Ordered Memory Allocator").
    """

    def __init__(self, stream_order: StreamOrder, shadow: Shadow) -> None:
        self.driver_allocations = Allocations()
        self.pool_blocks = Allocations()
        self._stream_order = stream_order
        self._shadow = shadow

    def innermost_at(self, address: int) -> Allocation | None:
        """Return the block of a pool that contains an address, else the driver's allocation, or None."""
        return self.pool_blocks.find(address) or self.driver_allocations.find(address)

    def add_allocation(
        self, call: Call, address: int, size_bytes: int, kind: int, layer: int
    ) -> None:
        """Add an allocation, and remove earlier accesses to its memory unless a pool reuses the memory."""
        allocation = Allocation(address, size_bytes, AllocationKind(kind), call.site, call.seq)
        if layer == AllocationLayer.POOL:
            self.pool_blocks.add(allocation)
            return
        self.driver_allocations.add(allocation)
        if kind == AllocationKind.STREAM_ORDERED:
            self._alloc_in_stream(call, address, min(address + size_bytes, ADDRESS_END))
        else:
            self._shadow.clear(address, min(address + size_bytes, ADDRESS_END))

    def add_free(self, call: Call, address: int, size_bytes: int, kind: int, layer: int) -> None:
        """Remove an allocation. ``size_bytes`` may be 0 for an allocation that was recorded."""
        if layer == AllocationLayer.POOL:
            self.pool_blocks.remove(address)
            return
        allocation = self.driver_allocations.find(address)
        hi = address + (size_bytes or (allocation.size_bytes if allocation else 0))
        hi = min(hi, ADDRESS_END)
        if kind == AllocationKind.STREAM_ORDERED:
            self._free_in_stream(call, address, hi)
            return
        if kind in (AllocationKind.SYNC, AllocationKind.PINNED, AllocationKind.MANAGED):
            self._stream_order.sync_context(call)
        self.driver_allocations.remove(address)
        self._shadow.clear(address, hi)

    def _alloc_in_stream(self, call: Call, lo: int, hi: int) -> None:
        """Add a stream-ordered allocation. The driver orders it after the free of the same memory."""
        stream = self._stream_order.enqueue(call)
        if stream is None or lo >= hi:
            return
        for release in self._shadow.free_releases(lo, hi):
            stream.acquire(release, None)
        self._shadow.clear(lo, hi)
        access = MemoryAccess(stream.slot, stream.tick, call, lo, hi, WRITE, EXACT)
        self._shadow.add(access, stream.clock)

    def _free_in_stream(self, call: Call, lo: int, hi: int) -> None:
        """Add a stream-ordered free. Every later access to the memory is a race, even if it is ordered."""
        stream = self._stream_order.enqueue(call)
        if stream is None or lo >= hi:
            return
        access = MemoryAccess(stream.slot, stream.tick, call, lo, hi, WRITE, EXACT)
        self._shadow.add_free(access, stream.clock)
        call.release = stream.release()


class HostRole(NamedTuple):
    """The part of a copy that the host performs before the call returns."""

    waits_before: bool = False  # whether the host first waits for all work in the stream
    # whether the source is read by the host, and not in the order of the stream
    reads_source: bool = False
    # whether the destination is written by the host, and not in the order of the stream
    writes_destination: bool = False
    waits_after: bool = (
        False  # whether the host waits for the stream and the copy before the call returns
    )


_NO_HOST_ROLE: Final = HostRole()
_HOST_COPIES: Final = HostRole(waits_before=True, reads_source=True, writes_destination=True)
_HOST_WAITS_AFTER: Final = HostRole(waits_after=True)


def host_role(
    direction: int, host_memory_kind: int, *, asynchronous: bool, strict: bool
) -> HostRole:
    """Return the part of a copy that the host performs before the call returns.

    CUDA documents that an asynchronous copy to pageable memory "might be synchronous". In practice, the host
    waits for it. With ``strict``, the host does not wait.
    """
    if direction == Direction.DEVICE_TO_DEVICE:
        return _NO_HOST_ROLE
    if direction == Direction.HOST_TO_HOST:
        return _HOST_COPIES
    is_pageable = host_memory_kind == HostMemory.PAGEABLE
    if direction == Direction.HOST_TO_DEVICE and is_pageable:
        # The host has copied the source to a staging buffer; the transfer to the device may still be running.
        return HostRole(waits_before=not asynchronous, reads_source=True)
    if not asynchronous or (is_pageable and not strict):
        return _HOST_WAITS_AFTER
    return _NO_HOST_ROLE


def host_waits_for_fill(kind: AllocationKind | None, *, asynchronous: bool) -> bool:
    """Return whether the host waits for a fill of memory that was this kind of allocation."""
    return not asynchronous and kind in (AllocationKind.PINNED, AllocationKind.MANAGED)


class StreamWork:
    """Handles launches, copies and fills outside of graphs."""

    def __init__(
        self,
        stream_order: StreamOrder,
        shadow: Shadow,
        driver_allocations: Allocations,
        coverage: Coverage,
        *,
        strict: bool,
    ) -> None:
        self._stream_order = stream_order
        self._shadow = shadow
        self._driver_allocations = driver_allocations
        self._coverage = coverage
        self._strict = strict
        self._last_launch: Call | None = None
        self._last_stream: Stream | None = (
            None  # stream of the last launch; None if it was captured
        )

    def add_launch(self, call: Call, rows: AccessRows | None) -> Callable[[AccessRows], None]:
        """Add a launch and its accesses; return the function that adds further accesses of it."""
        self._last_launch = call
        self._last_stream = stream = self._stream_order.enqueue(call)
        if stream is not None and rows is not None:
            self._shadow.add_all(rows, call, stream)
        return self.add_accesses

    def add_accesses(self, rows: AccessRows) -> None:
        """Add further accesses of the last launch."""
        if self._last_launch is not None and self._last_stream is not None:
            self._shadow.add_all(rows, self._last_launch, self._last_stream)

    def add_copy(
        self,
        call: Call,
        destination: int,
        source: int,
        size_bytes: int,
        rows: int,
        destination_pitch_bytes: int,
        source_pitch_bytes: int,
        direction: int,
        host_memory: int,
        asynchronous: bool,
    ) -> None:
        """Add the read and the write of a copy, before and after which the host may wait."""
        self._coverage.copies += 1
        if self._stream_order.stream(call).graph:
            return
        role = host_role(direction, host_memory, asynchronous=asynchronous, strict=self._strict)
        if role.waits_before:
            self._stream_order.sync_stream(call)
        source_rows = source, size_bytes, rows, source_pitch_bytes
        destination_rows = destination, size_bytes, rows, destination_pitch_bytes
        self._add_access(call, *source_rows, READ, is_by_host=role.reads_source)
        self._add_access(call, *destination_rows, WRITE, is_by_host=role.writes_destination)
        if role.waits_after:
            self._stream_order.sync_stream(call)

    def add_fill(
        self,
        call: Call,
        address: int,
        size_bytes: int,
        rows: int,
        pitch_bytes: int,
        asynchronous: bool,
    ) -> None:
        """Add the write of a fill, and apply the wait of the host."""
        self._coverage.fills += 1
        self._add_access(call, address, size_bytes, rows, pitch_bytes, WRITE, is_by_host=False)
        allocation = self._driver_allocations.find(address)
        kind = allocation.kind if allocation else None
        if host_waits_for_fill(kind, asynchronous=asynchronous):
            self._stream_order.sync_stream(call)

    def _add_access(
        self, call: Call, lo: int, width: int, rows: int, pitch: int, mode: int, *, is_by_host: bool
    ) -> None:
        """Add an access to rows of ``width`` bytes, by the host or in the call's stream."""
        timeline = self._stream_order.host if is_by_host else self._stream_order.enqueue(call)
        if timeline is None or width * rows <= 0:
            return
        if is_by_host:
            self._stream_order.advance_host()
            call = replace(call, stream=0)
        hi = lo + (rows - 1) * pitch + width
        if rows == 1 or pitch in (0, width):
            hi, rows, pitch = lo + width * rows, 1, 0
        if hi > ADDRESS_END:
            return  # no memory has such addresses, so the trace is damaged
        access = MemoryAccess(timeline.slot, timeline.tick, call, lo, hi, mode, EXACT)
        self._shadow.add(access, timeline.clock, pitch, rows)
