"""The memory of a simulated device and its host: allocations, copies and fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cudakit.gpu.api import MemoryInfo, Ptr, Stream
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import check_size, pop_allocation
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.peers import SimPeers
from cudakit.gpu.sim.queues import Queue
from cudakit.gpu.sim.schedule import Engine, Job, Outcome
from cudakit.gpu.sim.space import Bytes, Heap, Region, memory
from cudakit.gpu.sim.streams import SimStreams
from cudakit.trace import events as facts
from cudakit.trace.events import Access
from cudakit.trace.kinds import Direction, HostMemory, How, Mode, Work
from cudakit.units import format_bytes

# By (source is host memory, target is host memory).
_DIRECTIONS = {
    (True, True): Direction.HOST_TO_HOST,
    (True, False): Direction.HOST_TO_DEVICE,
    (False, True): Direction.DEVICE_TO_HOST,
    (False, False): Direction.DEVICE_TO_DEVICE,
}
_ENGINES = {
    Direction.HOST_TO_DEVICE: Engine.HOST_TO_DEVICE,
    Direction.DEVICE_TO_HOST: Engine.DEVICE_TO_HOST,
}


# A copy of no more pageable memory is staged and returns at once (CUDA Runtime API, "API synchronization
# behavior", of cudaMemcpy).
_STAGED_BYTES = 64 << 10


class _Route(NamedTuple):
    """The kinds of memory that a copy goes between, its engine and its duration."""

    direction: Direction
    host: HostMemory
    engine: Engine | None
    cost_ns: int

    def is_staged(self, size_bytes: int) -> bool:
        """Return whether the source is read before the call returns, without waiting for the copy."""
        to_device = self.direction is Direction.HOST_TO_DEVICE
        return to_device and self.host is HostMemory.PAGEABLE and size_bytes <= _STAGED_BYTES

    def waits(self, size_bytes: int) -> bool:
        """Return whether the call waits for the copy."""
        return self.host is HostMemory.PAGEABLE and not self.is_staged(size_bytes)


class SimMemory:
    """Allocations of one device and of its host, copies and fills. The trace has no pageable allocations."""

    def __init__(self, context: Context, streams: SimStreams, heap: Heap, peers: SimPeers) -> None:
        self.context = context
        self.allocated: dict[int, Region] = {}
        self.on_free: Callable[[int], None] = _ignore  # is called when memory becomes free
        self._streams, self._heap, self._peers = streams, heap, peers
        self._of_host: dict[int, Region] = {}
        self._registered: set[int] = set()

    @driver_call
    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._heap.free_bytes, self._heap.capacity_bytes)

    @driver_call
    def malloc(self, size_bytes: int, stream: Stream | None = None) -> Ptr:
        check_size(size_bytes)
        queue = self._allocation_queue(stream)
        self._heap.charge(size_bytes)
        region = self._heap.add(memory(size_bytes), live=queue is None)
        self.allocated[region.begin] = region
        if queue is None:
            self.context.emit(facts.Alloc(region.begin, size_bytes))
        else:
            self._streams.enqueue(queue, Job(Work.ALLOC, lambda: self._begin(region)))
            how = How.STREAM_ORDERED
            self.context.emit(facts.Alloc(region.begin, size_bytes, how, queue.number))
        return Ptr(region.begin)

    @driver_call
    def free(self, ptr: Ptr, stream: Stream | None = None) -> None:
        queue = self._allocation_queue(stream)
        region = pop_allocation(self.allocated, ptr, f"no allocation of {self.context.name}")
        size_bytes = len(region.data)
        if queue is None:
            self.context.wait_for_all()
            self._end(region)
            self.context.emit(facts.Free(ptr, size_bytes))
        else:
            self._streams.enqueue(queue, Job(Work.FREE, lambda: self._end(region)))
            self.context.emit(facts.Free(ptr, size_bytes, How.STREAM_ORDERED, queue.number))

    @driver_call
    def host_malloc(self, size_bytes: int, *, pinned: bool = True) -> Ptr:
        check_size(size_bytes)
        self._streams.refuse_in_capture()
        try:
            region = self._heap.add(
                memory(size_bytes), host=HostMemory.PINNED if pinned else HostMemory.PAGEABLE
            )
        except (OSError, OverflowError):
            seen = f"{format_bytes(size_bytes)} of host memory requested, less is available"
            raise cuda_error(Status.OUT_OF_MEMORY, seen=seen) from None
        self._of_host[region.begin] = region
        if pinned:
            self.context.emit(facts.Alloc(region.begin, size_bytes, How.PINNED))
        return Ptr(region.begin)

    @driver_call
    def host_free(self, ptr: Ptr) -> None:
        self._streams.refuse_in_capture()
        if ptr in self._registered:
            raise cuda_error(
                Status.INVALID_VALUE,
                seen=f"the memory at {ptr:#x} is registered: unregister it first",
            )
        region = pop_allocation(self._of_host, ptr, "no host allocation")
        self.context.wait_for_all()
        self._heap.space.remove(region)
        if region.host is HostMemory.PINNED:
            self.context.emit(facts.Free(ptr, len(region.data), How.PINNED))

    @driver_call
    def host_register(self, ptr: Ptr, *, threads: int = 1) -> None:  # noqa: ARG002
        region = self._of_host.get(ptr)
        if region is None or region.host is not HostMemory.PAGEABLE:
            raise cuda_error(
                Status.INVALID_VALUE, seen=f"no pageable host allocation begins at {ptr:#x}"
            )
        self._streams.refuse_in_capture()
        region.host = HostMemory.PINNED
        self._registered.add(region.begin)
        self.context.emit(facts.Alloc(region.begin, len(region.data), How.PINNED))

    @driver_call
    def host_unregister(self, ptr: Ptr) -> None:
        if ptr not in self._registered:
            raise cuda_error(
                Status.INVALID_VALUE, seen=f"no registered host allocation begins at {ptr:#x}"
            )
        self._streams.refuse_in_capture()
        self.context.wait_for_all()
        region = self._of_host[ptr]
        region.host = HostMemory.PAGEABLE
        self._registered.discard(ptr)
        self.context.emit(facts.Free(ptr, len(region.data), How.PINNED))

    @driver_call
    def host_view(self, ptr: Ptr, size_bytes: int) -> memoryview:
        region = self._of_host.get(ptr)
        if region is None or not 0 <= size_bytes <= len(region.data):
            raise cuda_error(
                Status.INVALID_VALUE,
                seen=f"{size_bytes} bytes at {ptr:#x} are not allocated host memory",
            )
        return region.data[:size_bytes].data

    @driver_call
    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        queue = self._streams.queue(stream)
        seen = f"{format_bytes(size_bytes)} from {src:#x} to {dst:#x}"
        target = self._heap.known(dst, size_bytes, seen)
        source = self._heap.known(src, size_bytes, seen)
        if size_bytes == 0:
            return
        route = self._route(target[0], source[0], size_bytes)
        if route.host is HostMemory.PAGEABLE:
            queue = self._streams.uncaptured_queue(stream)
        task = self._streams.submit(queue, self._job(route, dst, src, size_bytes))
        if task is None:
            return
        fact = facts.Copy(
            queue.number, dst, src, size_bytes, direction=route.direction, host=route.host
        )
        self.context.emit(fact)
        if route.waits(size_bytes):
            self.context.wait_for((task,))

    @driver_call
    def fill(self, ptr: Ptr, value: int, size_bytes: int, stream: Stream) -> None:
        if not 0 <= value <= 255:
            raise cuda_error(
                Status.INVALID_VALUE, seen=f"fill value {value} is not a byte (0 to 255)"
            )
        queue = self._streams.queue(stream)
        regions = self._heap.known(ptr, size_bytes, f"{format_bytes(size_bytes)} at {ptr:#x}")
        if any(region.host is HostMemory.PAGEABLE for region in regions):
            raise cuda_error(Status.INVALID_VALUE, seen=f"{ptr:#x} is pageable host memory")
        if size_bytes == 0:
            return
        job = Job(
            Work.FILL,
            lambda: self._fill(ptr, value, size_bytes),
            accesses=(_access(ptr, size_bytes, Mode.WRITE),),
        )
        if self._streams.submit(queue, job):
            self.context.emit(facts.Fill(queue.number, ptr, size_bytes))

    def close(self) -> None:
        """Forget all allocations."""
        self.allocated.clear()
        self._of_host.clear()
        self._registered.clear()

    def _allocation_queue(self, stream: Stream | None) -> Queue | None:
        if stream is None:
            self._streams.refuse_in_capture()
            return None
        queue = self._streams.queue(stream)
        if queue.capture:
            raise cuda_error(
                Status.NOT_SUPPORTED, seen="simulated graphs cannot contain allocations or frees"
            )
        return queue

    def _begin(self, region: Region) -> Outcome:
        region.live = True
        return Outcome()

    def _end(self, region: Region) -> Outcome:
        self.on_free(region.begin)
        region.live = False
        self._heap.space.remove(region)
        self._heap.credit(len(region.data))
        return Outcome()

    def _route(self, target: Region, source: Region, size_bytes: int) -> _Route:
        direction = _DIRECTIONS[bool(source.host), bool(target.host)]
        host, costs = max(target.host, source.host), self.context.costs
        if host:
            cost_ns = costs.over_link_ns if host is HostMemory.PINNED else costs.pageable_ns
            return _Route(direction, host, _ENGINES.get(direction), cost_ns(size_bytes))
        if target.peer == source.peer:
            return _Route(direction, host, None, costs.in_memory_ns(2 * size_bytes))
        to_peer = source.peer is None
        peer = target.peer if to_peer else source.peer
        nvlinks = 0 if peer is None else self._peers.nvlinks(peer)
        engine = Engine.TO_PEER if to_peer else Engine.FROM_PEER
        return _Route(direction, host, engine, costs.to_peer_ns(size_bytes, nvlinks))

    def _job(self, route: _Route, dst: int, src: int, size_bytes: int) -> Job:
        staged = self._read(src, size_bytes).copy() if route.is_staged(size_bytes) else None

        def run() -> Outcome:
            content = self._read(src, size_bytes) if staged is None else staged
            self._heap.copied(dst, size_bytes, "a copy writes").scatter(content)
            return Outcome(route.cost_ns)

        accesses = (_access(src, size_bytes, Mode.READ), _access(dst, size_bytes, Mode.WRITE))
        return Job(Work.COPY, run, engine=route.engine, accesses=accesses)

    def _read(self, ptr: int, size_bytes: int) -> Bytes:
        return self._heap.copied(ptr, size_bytes, "a copy reads").gather()

    def _fill(self, ptr: int, value: int, size_bytes: int) -> Outcome:
        for piece in self._heap.copied(ptr, size_bytes, "a fill writes").pieces:
            piece[:] = value
        return Outcome(self.context.costs.in_memory_ns(size_bytes))


def _ignore(ptr: int) -> None:
    """Do nothing about an allocation that is freed."""


def _access(ptr: int, size_bytes: int, mode: Mode) -> Access:
    return Access(ptr, ptr + size_bytes, mode)
