"""Allocations, launches, copies and fills: what they access, and what the host waits for.

CUDA Runtime API and CUDA Driver API, "API synchronization behavior" and "Stream Ordered Memory Allocator".
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from cudakit.core.sanitize.clocks import EXACT, NEVER, READ, WRITE, Call, Touch
from cudakit.core.sanitize.ordering import Order, Stream
from cudakit.core.sanitize.races import Allocation, Coverage
from cudakit.core.sanitize.record_batch import AccessRow
from cudakit.core.sanitize.shadow_memory import Shadow
from cudakit.trace.kinds import Direction, HostMemory, How, Layer


class Allocations:
    """Allocations of one layer, which share no bytes."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._allocations: list[Allocation] = []

    def add(self, allocation: Allocation) -> None:
        """Add an allocation; it replaces what was in its bytes."""
        begin = self._first_in(allocation.address)
        end = bisect_left(self._addresses, allocation.address + allocation.size_bytes, lo=begin)
        self._addresses[begin:end] = [allocation.address]
        self._allocations[begin:end] = [allocation]

    def remove(self, address: int) -> Allocation | None:
        """Forget and return the allocation that begins at an address."""
        index = bisect_left(self._addresses, address)
        if index == len(self._addresses) or self._addresses[index] != address:
            return None
        del self._addresses[index]
        return self._allocations.pop(index)

    def at(self, address: int) -> Allocation | None:
        """Return the allocation that an address is in."""
        index = bisect_right(self._addresses, address) - 1
        if index < 0:
            return None
        found = self._allocations[index]
        return found if address < found.address + found.size_bytes else None

    def _first_in(self, address: int) -> int:
        """Return the place of the first allocation that ends behind an address."""
        index = bisect_right(self._addresses, address)
        return index - 1 if self.at(address) is not None else index


class Memory:
    """The allocations of the driver, and those that pools make of them.

    A pool orders nothing, and what it hands out again keeps its past. With a stream, getting and giving
    memory count as writes: all that uses it must come after the one and before the other (CUDA Driver
    API, "Stream Ordered Memory Allocator").
    """

    def __init__(self, order: Order, shadow: Shadow) -> None:
        self.driver = Allocations()
        self.pools = Allocations()
        self._order = order
        self._shadow = shadow

    def alloc(self, call: Call, address: int, size_bytes: int, how: int, layer: int) -> None:
        allocation = Allocation(address, size_bytes, How(how), call.site, call.seq)
        if layer == Layer.POOL:
            self.pools.add(allocation)
            return
        self.driver.add(allocation)
        if how == How.STREAM_ORDERED:
            self._begin(call, address, address + size_bytes)
        else:
            self._shadow.clear(address, address + size_bytes)

    def free(self, call: Call, address: int, size_bytes: int, how: int, layer: int) -> None:
        if layer == Layer.POOL:
            self.pools.remove(address)
            return
        known = self.driver.at(address)
        hi = address + (size_bytes or (known.size_bytes if known else 0))
        if how == How.STREAM_ORDERED:
            self._end(call, address, hi)
            return
        if how in (How.SYNC, How.PINNED, How.MANAGED):
            self._order.host_waits_for_context(call)
        self.driver.remove(address)
        self._shadow.clear(address, hi)

    def _begin(self, call: Call, lo: int, hi: int) -> None:
        """Let a stream have memory; the driver has ordered it after the free of whoever had it before."""
        stream = self._order.enqueue(call)
        if stream is None or lo >= hi:
            return
        for release in self._shadow.freed_before(lo, hi):
            stream.acquire(release, None)
        self._shadow.clear(lo, hi)
        touch = Touch(stream.slot, stream.tick, call, lo, hi, WRITE, EXACT)
        self._shadow.touch(touch, stream.past)

    def _end(self, call: Call, lo: int, hi: int) -> None:
        """Let a stream give memory back: nothing may use it after, in whatever order."""
        stream = self._order.enqueue(call)
        if stream is None or lo >= hi:
            return
        touch = Touch(stream.slot, stream.tick, call, lo, hi, WRITE, EXACT)
        self._shadow.touch(touch, stream.past)
        touch.tick = NEVER
        call.release = stream.release()


class HostSide(NamedTuple):
    """What the host does in a copy."""

    waits_before: bool = False  # for all that is in the stream
    reads_source: bool = False  # before the call returns, instead of the stream
    writes_destination: bool = False
    waits_after: bool = False


_NOTHING: Final = HostSide()
_ALL: Final = HostSide(True, True, True, False)
_WAITS: Final = HostSide(waits_after=True)


def host_side(direction: int, memory: int, *, asynchronous: bool, strict: bool) -> HostSide:
    """Say what the host does in a copy.

    An asynchronous copy to pageable memory "might be synchronous", and in fact is staged by the host: only
    when ``strict`` nothing is made of that.
    """
    if direction == Direction.DEVICE_TO_DEVICE:
        return _NOTHING
    if direction == Direction.HOST_TO_HOST:
        return _ALL
    pageable = memory == HostMemory.PAGEABLE
    if direction == Direction.HOST_TO_DEVICE and pageable:
        # What reaches the device is on its way when the call returns: it was read, and staged.
        return HostSide(waits_before=not asynchronous, reads_source=True)
    if not asynchronous or (pageable and not strict):
        return _WAITS
    return _NOTHING


def fill_is_waited_for(how: How | None, *, asynchronous: bool) -> bool:
    """Say whether the host waits for a fill: for one of the host's or of managed memory."""
    return not asynchronous and how in (How.PINNED, How.MANAGED)


class Work:
    """The work of streams outside of graphs."""

    def __init__(
        self,
        order: Order,
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
        """Take a launch and its accesses; return what takes more of them, if there are."""
        self._call = call
        self._stream = stream = self._order.enqueue(call)
        if stream is None:  # it is captured
            deque(rows, maxlen=0)
        else:
            self._shadow.add_all(rows, call, stream)
        return self.accesses

    def accesses(self, rows: Iterable[AccessRow]) -> None:
        """Take more accesses of the last launch."""
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
        side = host_side(direction, host, asynchronous=asynchronous, strict=self._strict)
        if side.waits_before:
            self._order.host_waits_for(self._order.stream(call), call)
        read, written = (
            (source, size_bytes, rows, source_pitch_bytes, READ),
            (destination, size_bytes, rows, destination_pitch_bytes, WRITE),
        )
        self._touch(call, *read, by_host=side.reads_source)
        self._touch(call, *written, by_host=side.writes_destination)
        if side.waits_after:
            self._order.host_waits_for(self._order.stream(call), call)

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
        self._touch(call, address, size_bytes, rows, pitch_bytes, WRITE, by_host=False)
        owner = self._memory.at(address)
        if fill_is_waited_for(owner.how if owner else None, asynchronous=asynchronous):
            self._order.host_waits_for(self._order.stream(call), call)

    def _touch(
        self, call: Call, lo: int, width: int, rows: int, pitch: int, mode: int, *, by_host: bool
    ) -> None:
        """Touch rows of memory in the stream of a call, or at once."""
        actor = self._order.host if by_host else self._order.enqueue(call)
        if actor is None or width * rows <= 0:
            return
        if by_host:
            self._order.host_moves_on()
            call = replace(call, stream=0)
        hi = lo + (rows - 1) * pitch + width
        if rows == 1 or pitch in (0, width):
            hi, rows = lo + width * rows, 1
        touch = Touch(actor.slot, actor.tick, call, lo, hi, mode, EXACT)
        self._shadow.add(touch, actor.past, pitch, rows)
