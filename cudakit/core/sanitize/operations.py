"""Handle allocations, launches, copies and fills: their accesses, and the waits of the host.

Rules: CUDA Runtime API and CUDA Driver API, "API synchronization behavior" and "Stream Ordered Memory
Allocator".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from cudakit.core.sanitize.clocks import EXACT, NEVER, READ, WRITE, Call, MemoryAccess
from cudakit.core.sanitize.ordering import Stream, StreamOrder
from cudakit.core.sanitize.races import Allocation, Coverage
from cudakit.core.sanitize.record_batch import AccessRow
from cudakit.core.sanitize.shadow_memory import Shadow
from cudakit.trace.kinds import AllocationKind, AllocationLayer, Direction, HostMemory


class Allocations:
    """The disjoint allocations of one layer, by address."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._allocations: list[Allocation] = []

    def add(self, allocation: Allocation) -> None:
        """Add an allocation; it replaces those that overlap it."""
        begin = self._first_in(allocation.address)
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

    def at(self, address: int) -> Allocation | None:
        """Return the allocation that contains an address, or None."""
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        allocation = self._allocations[index]
        return allocation if address < allocation.address + allocation.size_bytes else None

    def _first_in(self, address: int) -> int:
        """Return the index of the first allocation that ends after an address."""
        index = bisect_right(self._addresses, address)
        return index - 1 if self.at(address) is not None else index


class AllocationEvents:
    """Allocations and frees by the driver, and by pools in its memory.

    A pool orders nothing, so a block that it reuses keeps its earlier accesses. A stream-ordered allocation
    or free counts as a write, because each use must be ordered after the allocation and before the free (CUDA
    Driver API, "Stream Ordered Memory Allocator").
    """

    def __init__(self, order: StreamOrder, shadow: Shadow) -> None:
        self.driver = Allocations()
        self.pools = Allocations()
        self._order = order
        self._shadow = shadow

    def alloc(self, call: Call, address: int, size_bytes: int, how: int, layer: int) -> None:
        allocation = Allocation(address, size_bytes, AllocationKind(how), call.site, call.seq)
        if layer == AllocationLayer.POOL:
            self.pools.add(allocation)
            return
        self.driver.add(allocation)
        if how == AllocationKind.STREAM_ORDERED:
            self._alloc_in_stream(call, address, address + size_bytes)
        else:
            self._shadow.clear(address, address + size_bytes)

    def free(self, call: Call, address: int, size_bytes: int, how: int, layer: int) -> None:
        if layer == AllocationLayer.POOL:
            self.pools.remove(address)
            return
        known = self.driver.at(address)
        hi = address + (size_bytes or (known.size_bytes if known else 0))
        if how == AllocationKind.STREAM_ORDERED:
            self._free_in_stream(call, address, hi)
            return
        if how in (AllocationKind.SYNC, AllocationKind.PINNED, AllocationKind.MANAGED):
            self._order.sync_context(call)
        self.driver.remove(address)
        self._shadow.clear(address, hi)

    def _alloc_in_stream(self, call: Call, lo: int, hi: int) -> None:
        """Add a stream-ordered allocation; the driver orders it after the free of the same memory."""
        stream = self._order.enqueue(call)
        if stream is None or lo >= hi:
            return
        for release in self._shadow.freed_before(lo, hi):
            stream.acquire(release, None)
        self._shadow.clear(lo, hi)
        access = MemoryAccess(stream.slot, stream.tick, call, lo, hi, WRITE, EXACT)
        self._shadow.add_range(access, stream.past)

    def _free_in_stream(self, call: Call, lo: int, hi: int) -> None:
        """Add a stream-ordered free: every later access is a race, ordered or not."""
        stream = self._order.enqueue(call)
        if stream is None or lo >= hi:
            return
        access = MemoryAccess(stream.slot, stream.tick, call, lo, hi, WRITE, EXACT)
        self._shadow.add_range(access, stream.past)
        access.tick = NEVER
        call.release = stream.release()


class HostRole(NamedTuple):
    """The part of a copy that the host performs before the call returns."""

    waits_before: bool = False  # for all work in the stream
    reads_source: bool = False  # the host reads it, not the stream
    writes_destination: bool = False
    waits_after: bool = False  # for the stream, this copy included


_NO_ROLE: Final = HostRole()
_COPIES_ITSELF: Final = HostRole(True, True, True, False)
_WAITS_AFTER: Final = HostRole(waits_after=True)


def host_role(direction: int, memory: int, *, asynchronous: bool, strict: bool) -> HostRole:
    """Return the host's role in a copy.

    An asynchronous copy to pageable memory "might be synchronous"; in fact the host stages it and waits.
    ``strict`` does not rely on that.
    """
    if direction == Direction.DEVICE_TO_DEVICE:
        return _NO_ROLE
    if direction == Direction.HOST_TO_HOST:
        return _COPIES_ITSELF
    pageable = memory == HostMemory.PAGEABLE
    if direction == Direction.HOST_TO_DEVICE and pageable:
        # The host has staged the source when the call returns; the transfer may still be in flight.
        return HostRole(waits_before=not asynchronous, reads_source=True)
    if not asynchronous or (pageable and not strict):
        return _WAITS_AFTER
    return _NO_ROLE


def fill_is_waited_for(how: AllocationKind | None, *, asynchronous: bool) -> bool:
    """Return whether the host waits for a fill: of pinned or managed memory, unless asynchronous."""
    return not asynchronous and how in (AllocationKind.PINNED, AllocationKind.MANAGED)


class StreamWork:
    """Launches, copies and fills outside of graphs."""

    def __init__(
        self,
        order: StreamOrder,
        shadow: Shadow,
        memory: Allocations,
        coverage: Coverage,
        *,
        strict: bool,
    ) -> None:
        self._order = order
        self._shadow = shadow
        self._memory = memory
        self._coverage = coverage
        self._strict = strict
        self._call: Call | None = None
        self._stream: Stream | None = None

    def launch(
        self, call: Call, rows: Iterable[AccessRow]
    ) -> Callable[[Iterable[AccessRow]], None]:
        """Add a launch and its accesses; return the function that adds more of them."""
        self._call = call
        self._stream = stream = self._order.enqueue(call)
        if stream is None:  # it is captured
            deque(rows, maxlen=0)
        else:
            self._shadow.add_all(rows, call, stream)
        return self.accesses

    def accesses(self, rows: Iterable[AccessRow]) -> None:
        """Add more accesses of the last launch."""
        if self._call is None or self._stream is None:
            deque(rows, maxlen=0)
        else:
            self._shadow.add_all(rows, self._call, self._stream)

    def copy(
        self,
        call: Call,
        destination: int,
        source: int,
        size_bytes: int,
        rows: int,
        destination_pitch_bytes: int,
        source_pitch_bytes: int,
        direction: int,
        host: int,
        asynchronous: bool,
    ) -> None:
        self._coverage.copies += 1
        if self._order.stream(call).graph:
            return
        side = host_role(direction, host, asynchronous=asynchronous, strict=self._strict)
        if side.waits_before:
            self._order.sync_stream(self._order.stream(call), call)
        read, written = (
            (source, size_bytes, rows, source_pitch_bytes, READ),
            (destination, size_bytes, rows, destination_pitch_bytes, WRITE),
        )
        self._access(call, *read, by_host=side.reads_source)
        self._access(call, *written, by_host=side.writes_destination)
        if side.waits_after:
            self._order.sync_stream(self._order.stream(call), call)

    def fill(
        self,
        call: Call,
        address: int,
        size_bytes: int,
        rows: int,
        pitch_bytes: int,
        asynchronous: bool,
    ) -> None:
        self._coverage.fills += 1
        self._access(call, address, size_bytes, rows, pitch_bytes, WRITE, by_host=False)
        owner = self._memory.at(address)
        if fill_is_waited_for(owner.how if owner else None, asynchronous=asynchronous):
            self._order.sync_stream(self._order.stream(call), call)

    def _access(
        self, call: Call, lo: int, width: int, rows: int, pitch: int, mode: int, *, by_host: bool
    ) -> None:
        """Add an access to rows of memory, at the stream's or at the host's position."""
        position = self._order.host if by_host else self._order.enqueue(call)
        if position is None or width * rows <= 0:
            return
        if by_host:
            self._order.advance_host()
            call = replace(call, stream=0)
        hi = lo + (rows - 1) * pitch + width
        if rows == 1 or pitch in (0, width):
            hi, rows = lo + width * rows, 1
        access = MemoryAccess(position.slot, position.tick, call, lo, hi, mode, EXACT)
        self._shadow.add(access, position.past, pitch, rows)
