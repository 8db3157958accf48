"""The memory of a simulated device and its host: allocations, copies and fills."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from cudakit.gpu.api import MemoryInfo, Ptr, Stream
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import check_size, pop_allocation
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.peers import SimPeers
from cudakit.gpu.sim.queues import Queue
from cudakit.gpu.sim.schedule import Engine, Job, Outcome
from cudakit.gpu.sim.space import Bytes, Heap, Region, new_bytes
from cudakit.gpu.sim.streams import SimStreams
from cudakit.trace import events as trace_events
from cudakit.trace.events import Access
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    Direction,
    HostMemory,
    MemoryKind,
    NodeType,
)
from cudakit.units import format_bytes

# Direction of a copy by (source is host memory, target is host memory).
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


# Copies of at most this size from pageable memory to the device are staged: the call returns before they
# complete (CUDA Runtime API, "API synchronization behavior").
_STAGED_BYTES = 64 << 10


class _Route(NamedTuple):
    """Direction, host memory kind, copy engine and duration of a copy."""

    direction: Direction
    host: HostMemory
    engine: Engine | None
    duration_ns: int

    def is_staged(self, size_bytes: int) -> bool:
        """Return whether the call reads the source before it returns."""
        is_to_device = self.direction is Direction.HOST_TO_DEVICE
        return is_to_device and self.host is HostMemory.PAGEABLE and size_bytes <= _STAGED_BYTES

    def blocks_caller(self, size_bytes: int) -> bool:
        """Return whether the call blocks until the copy completes."""
        return self.host is HostMemory.PAGEABLE and not self.is_staged(size_bytes)


class SimMemory:
    """Device and host allocations, copies and fills. Pageable allocations are not traced."""

    def __init__(self, context: Context, streams: SimStreams, heap: Heap, peers: SimPeers) -> None:
        self.context = context
        self.device_allocations: dict[int, Region] = {}
        # Function that is called with the address of each freed allocation.
        self.on_free: Callable[[int], None] = _ignore_free
        self._streams, self._heap, self._peers = streams, heap, peers
        self._host_allocations: dict[int, Region] = {}
        self._registered_ptrs: set[int] = set()
        # Memory of other libraries that ``pin`` registered.
        self._pinned_arrays: dict[int, Region] = {}

    @driver_call
    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(self._heap.free_bytes, self._heap.capacity_bytes)

    @driver_call
    def malloc(self, size_bytes: int, stream: Stream | None = None) -> Ptr:
        check_size(size_bytes)
        queue = self._allocation_queue(stream)
        self._heap.count_allocation(size_bytes)
        region = self._heap.add(new_bytes(size_bytes), is_live=queue is None)
        self.device_allocations[region.begin] = region
        if queue is None:
            self.context.emit(trace_events.Alloc(region.begin, size_bytes))
        else:
            self._streams.enqueue(queue, Job(NodeType.ALLOC, lambda: self._make_live(region)))
            kind = AllocationKind.STREAM_ORDERED
            self.context.emit(trace_events.Alloc(region.begin, size_bytes, kind, queue.number))
        return Ptr(region.begin)

    @driver_call
    def free(self, ptr: Ptr, stream: Stream | None = None) -> None:
        queue = self._allocation_queue(stream)
        region = pop_allocation(
            self.device_allocations, ptr, f"no allocation of {self.context.name}"
        )
        size_bytes = len(region.data)
        if queue is None:
            self.context.wait_for_all()
            self._release(region)
            self.context.emit(trace_events.Free(ptr, size_bytes))
        else:
            self._streams.enqueue(queue, Job(NodeType.FREE, lambda: self._release(region)))
            self.context.emit(
                trace_events.Free(ptr, size_bytes, AllocationKind.STREAM_ORDERED, queue.number)
            )

    @driver_call
    def host_malloc(self, size_bytes: int, *, pinned: bool = True) -> Ptr:
        check_size(size_bytes)
        self._streams.reject_in_capture()
        try:
            region = self._heap.add(
                new_bytes(size_bytes), host=HostMemory.PINNED if pinned else HostMemory.PAGEABLE
            )
        except (OSError, OverflowError):
            error_text = f"{format_bytes(size_bytes)} of host memory requested, less is available"
            raise cuda_error(Status.OUT_OF_MEMORY, detail=error_text) from None
        self._host_allocations[region.begin] = region
        if pinned:
            self.context.emit(trace_events.Alloc(region.begin, size_bytes, AllocationKind.PINNED))
        return Ptr(region.begin)

    @driver_call
    def host_free(self, ptr: Ptr) -> None:
        self._streams.reject_in_capture()
        if ptr in self._registered_ptrs:
            raise cuda_error(
                Status.INVALID_VALUE,
                detail=f"the memory at {ptr:#x} is registered: unregister it first",
            )
        region = pop_allocation(self._host_allocations, ptr, "no host allocation")
        self.context.wait_for_all()
        self._heap.space.remove(region)
        if region.host is HostMemory.PINNED:
            self.context.emit(trace_events.Free(ptr, len(region.data), AllocationKind.PINNED))

    @driver_call
    def host_register(self, ptr: Ptr, *, thread_count: int = 1) -> None:  # noqa: ARG002
        region = self._host_allocations.get(ptr)
        if region is None or region.host is not HostMemory.PAGEABLE:
            raise cuda_error(
                Status.INVALID_VALUE, detail=f"no pageable host allocation begins at {ptr:#x}"
            )
        self._streams.reject_in_capture()
        region.host = HostMemory.PINNED
        self._registered_ptrs.add(region.begin)
        self.context.emit(trace_events.Alloc(region.begin, len(region.data), AllocationKind.PINNED))

    @driver_call
    def host_unregister(self, ptr: Ptr) -> None:
        if ptr not in self._registered_ptrs:
            raise cuda_error(
                Status.INVALID_VALUE, detail=f"no registered host allocation begins at {ptr:#x}"
            )
        self._streams.reject_in_capture()
        self.context.wait_for_all()
        region = self._host_allocations[ptr]
        region.host = HostMemory.PAGEABLE
        self._registered_ptrs.discard(ptr)
        self.context.emit(trace_events.Free(ptr, len(region.data), AllocationKind.PINNED))

    @driver_call
    def pin(self, memory: Bytes, *, read_only: bool = False) -> Ptr:  # noqa: ARG002
        check_size(memory.nbytes)
        self._streams.reject_in_capture()
        if any(np.may_share_memory(memory, region.data) for region in self._pinned_arrays.values()):
            error_text = f"{format_bytes(memory.nbytes)} at host address {memory.ctypes.data:#x}"
            raise cuda_error(Status.HOST_MEMORY_ALREADY_REGISTERED, detail=error_text)
        region = self._heap.add(memory, host=HostMemory.PINNED)
        self._pinned_arrays[region.begin] = region
        self.context.emit(trace_events.Alloc(region.begin, memory.nbytes, AllocationKind.PINNED))
        return Ptr(region.begin)

    @driver_call
    def unpin(self, ptr: Ptr) -> None:
        self._streams.reject_in_capture()
        region = pop_allocation(self._pinned_arrays, ptr, "no pinned memory of another library")
        self.context.wait_for_all()
        self._heap.space.remove(region)
        self.context.emit(trace_events.Free(ptr, len(region.data), AllocationKind.PINNED))

    @driver_call
    def host_view(self, ptr: Ptr, size_bytes: int) -> memoryview:
        region = self._host_allocations.get(ptr)
        if region is None or not 0 <= size_bytes <= len(region.data):
            raise cuda_error(
                Status.INVALID_VALUE,
                detail=f"{size_bytes} bytes at {ptr:#x} are not allocated host memory",
            )
        return region.data[:size_bytes].data

    @driver_call
    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        queue = self._streams.checked_queue(stream)
        copy_text = f"{format_bytes(size_bytes)} from {src:#x} to {dst:#x}"
        target_regions = self._heap.check_allocated(dst, size_bytes, copy_text)
        source_regions = self._heap.check_allocated(src, size_bytes, copy_text)
        if size_bytes == 0:
            return
        route = self._copy_route(target_regions[0], source_regions[0], size_bytes)
        if route.host is HostMemory.PAGEABLE:
            queue = self._streams.uncaptured_queue(stream)
        task = self._streams.submit(queue, self._copy_job(route, dst, src, size_bytes))
        if task is None:
            return
        body = trace_events.Copy(
            queue.number, dst, src, size_bytes, direction=route.direction, host=route.host
        )
        self.context.emit(body)
        if route.blocks_caller(size_bytes):
            self.context.wait_for((task,))

    @driver_call
    def fill(self, ptr: Ptr, value: int, size_bytes: int, stream: Stream) -> None:
        if not 0 <= value <= 255:
            raise cuda_error(
                Status.INVALID_VALUE, detail=f"fill value {value} is not a byte (0 to 255)"
            )
        queue = self._streams.checked_queue(stream)
        regions = self._heap.check_allocated(
            ptr, size_bytes, f"{format_bytes(size_bytes)} at {ptr:#x}"
        )
        if any(region.host is HostMemory.PAGEABLE for region in regions):
            raise cuda_error(Status.INVALID_VALUE, detail=f"{ptr:#x} is pageable host memory")
        if size_bytes == 0:
            return
        fill_job = Job(
            NodeType.FILL,
            lambda: self._fill_bytes(ptr, value, size_bytes),
            accesses=(_make_access(ptr, size_bytes, AccessMode.WRITE),),
            activity=trace_events.FillRun(0, 0, 0, size_bytes),
        )
        if self._streams.submit(queue, fill_job):
            self.context.emit(trace_events.Fill(queue.number, ptr, size_bytes))

    def close(self) -> None:
        """Remove all allocations."""
        self.device_allocations.clear()
        self._host_allocations.clear()
        self._registered_ptrs.clear()
        self._pinned_arrays.clear()

    def _allocation_queue(self, stream: Stream | None) -> Queue | None:
        if stream is None:
            self._streams.reject_in_capture()
            return None
        queue = self._streams.checked_queue(stream)
        if queue.capture:
            raise cuda_error(
                Status.NOT_SUPPORTED, detail="simulated graphs cannot contain allocations or frees"
            )
        return queue

    def _make_live(self, region: Region) -> Outcome:
        region.is_live = True
        return Outcome()

    def _release(self, region: Region) -> Outcome:
        self.on_free(region.begin)
        region.is_live = False
        self._heap.space.remove(region)
        self._heap.count_free(len(region.data))
        return Outcome()

    def _copy_route(self, target: Region, source: Region, size_bytes: int) -> _Route:
        direction = _DIRECTIONS[bool(source.host), bool(target.host)]
        host_kind, costs = max(target.host, source.host), self.context.costs
        if host_kind:
            duration_of = (
                costs.host_link_ns if host_kind is HostMemory.PINNED else costs.pageable_ns
            )
            return _Route(direction, host_kind, _ENGINES.get(direction), duration_of(size_bytes))
        if target.peer == source.peer:
            return _Route(direction, host_kind, None, costs.device_memory_ns(2 * size_bytes))
        is_to_peer = source.peer is None
        peer = target.peer if is_to_peer else source.peer
        nvlink_count = 0 if peer is None else self._peers.nvlinks(peer)
        engine = Engine.TO_PEER if is_to_peer else Engine.FROM_PEER
        return _Route(direction, host_kind, engine, costs.to_peer_ns(size_bytes, nvlink_count))

    def _copy_job(self, route: _Route, dst: int, src: int, size_bytes: int) -> Job:
        staged_bytes = (
            self._read_bytes(src, size_bytes).copy() if route.is_staged(size_bytes) else None
        )

        def run_copy() -> Outcome:
            content = self._read_bytes(src, size_bytes) if staged_bytes is None else staged_bytes
            self._heap.copy_span(dst, size_bytes, "a copy writes").scatter(content)
            return Outcome(route.duration_ns)

        accesses = (
            _make_access(src, size_bytes, AccessMode.READ),
            _make_access(dst, size_bytes, AccessMode.WRITE),
        )
        return Job(
            NodeType.COPY,
            run_copy,
            engine=route.engine,
            accesses=accesses,
            activity=_copy_activity(route, size_bytes),
        )

    def _read_bytes(self, ptr: int, size_bytes: int) -> Bytes:
        return self._heap.copy_span(ptr, size_bytes, "a copy reads").gather()

    def _fill_bytes(self, ptr: int, value: int, size_bytes: int) -> Outcome:
        for region_bytes in self._heap.copy_span(ptr, size_bytes, "a fill writes").parts:
            region_bytes[:] = value
        return Outcome(self.context.costs.device_memory_ns(size_bytes))


def _ignore_free(ptr: int) -> None:
    """Ignore a freed allocation: the default of ``on_free``."""


def _copy_activity(route: _Route, size_bytes: int) -> trace_events.CopyRun:
    """Return the profile event of a copy."""
    host_kind = MemoryKind.PINNED if route.host is HostMemory.PINNED else MemoryKind.PAGEABLE
    is_from_host = route.direction in (Direction.HOST_TO_DEVICE, Direction.HOST_TO_HOST)
    is_to_host = route.direction in (Direction.DEVICE_TO_HOST, Direction.HOST_TO_HOST)
    return trace_events.CopyRun(
        0,
        0,
        0,
        size_bytes,
        direction=route.direction,
        source_memory=host_kind if is_from_host else MemoryKind.DEVICE,
        destination_memory=host_kind if is_to_host else MemoryKind.DEVICE,
    )


def _make_access(ptr: int, size_bytes: int, mode: AccessMode) -> Access:
    return Access(ptr, ptr + size_bytes, mode)
