"""Memory that comes and goes."""

from __future__ import annotations

from cudakit.core.sanitize.allocations import Allocations
from cudakit.core.sanitize.calls import EXACT, WRITE, Call, Touch
from cudakit.core.sanitize.clocks import NEVER
from cudakit.core.sanitize.races import Allocation
from cudakit.core.sanitize.shadow import Shadow
from cudakit.core.sanitize.streams import Order
from cudakit.trace.kinds import How, Layer


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
