"""The memory of a simulated device and its host: allocations, copies and fills."""

from __future__ import annotations

import mmap
from bisect import bisect_right, insort
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.gpu.api import MemoryInfo, Ptr, Stream
from cudakit.gpu.device import check_size, pop_allocation
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.machine import model_record
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.schedule import Engine, Job, Outcome
from cudakit.gpu.sim.streams import Queue, SimStreams
from cudakit.trace import events as trace_events
from cudakit.trace.events import Access, Alloc, Free
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    Direction,
    HostMemory,
    MemoryKind,
    NodeType,
)
from cudakit.units import Unavailable, format_bytes

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
        self.on_free: Callable[[int], None] = lambda _: None
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

        def run_fill() -> Outcome:
            for part in self._heap.copy_span(ptr, size_bytes, "a fill writes").parts:
                part[:] = value
            return Outcome(self.context.costs.device_memory_ns(size_bytes))

        fill_job = Job(
            NodeType.FILL,
            run_fill,
            accesses=(Access(ptr, ptr + size_bytes, AccessMode.WRITE),),
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
            is_pinned = host_kind is HostMemory.PINNED
            rate = costs.link_bytes_per_s if is_pinned else costs.pageable_bytes_per_s
            duration_ns = costs.duration_ns(size_bytes, rate)
            return _Route(direction, host_kind, _ENGINES.get(direction), duration_ns)
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
            Access(src, src + size_bytes, AccessMode.READ),
            Access(dst, dst + size_bytes, AccessMode.WRITE),
        )
        host_kind = MemoryKind.PINNED if route.host is HostMemory.PINNED else MemoryKind.PAGEABLE
        is_from_host = route.direction in (Direction.HOST_TO_DEVICE, Direction.HOST_TO_HOST)
        is_to_host = route.direction in (Direction.DEVICE_TO_HOST, Direction.HOST_TO_HOST)
        return Job(
            NodeType.COPY,
            run_copy,
            engine=route.engine,
            accesses=accesses,
            activity=(
                trace_events.CopyRun(
                    0,
                    0,
                    0,
                    size_bytes,
                    direction=route.direction,
                    source_memory=host_kind if is_from_host else MemoryKind.DEVICE,
                    destination_memory=host_kind if is_to_host else MemoryKind.DEVICE,
                )
            ),
        )

    def _read_bytes(self, ptr: int, size_bytes: int) -> Bytes:
        return self._heap.copy_span(ptr, size_bytes, "a copy reads").gather()


# --- The address space of a simulated device: allocated regions, their content, and the bytes in use ---

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
            free_text = (
                f"{format_bytes(self.free_bytes)} of {format_bytes(self.capacity_bytes)} free"
            )
            raise cuda_error(
                Status.OUT_OF_MEMORY,
                detail=f"{format_bytes(size_bytes)} requested, {free_text} on {self._context.name}",
            )
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
            raise cuda_error(
                Status.ILLEGAL_ADDRESS,
                detail=f"{accessor}: {size_bytes} bytes at {ptr:#x} are pageable host memory, or memory of "
                "a device without peer access",
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


# --- Memory of the peer devices of a simulated machine, and the NVLinks to them --------------------


class SimPeers:
    """Allocations on peer devices, for copies in the streams of this device."""

    def __init__(self, context: Context, streams: SimStreams, heap: Heap) -> None:
        self.context = context
        self._streams, self._heap = streams, heap
        self._peer_allocations: dict[int, Region] = {}
        self._used_bytes: Counter[int] = Counter()
        self.enabled_peers: set[int] = set()  # peers with access to memory of this device

    @driver_call
    def can_access_peer(self, ordinal: int) -> bool:
        """Return whether kernels of this device can access memory of a peer."""
        self.context.facts_of(ordinal)
        return (self.context.ordinal, ordinal) in self.context.cuda_view.peer_access

    @driver_call
    def enable_peer(self, ordinal: int) -> None:
        if ordinal == self.context.ordinal:
            raise cuda_error(
                Status.INVALID_DEVICE, detail=f"device {ordinal} is not a peer of itself"
            )
        self.check_access_from(ordinal)
        self.enabled_peers.add(ordinal)

    def check_access_from(self, ordinal: int) -> None:
        """Raise CUDA_ERROR_PEER_ACCESS_UNSUPPORTED unless a device can access this one's memory."""
        self.context.facts_of(ordinal)
        if (
            ordinal != self.context.ordinal
            and (ordinal, self.context.ordinal) not in self.context.cuda_view.peer_access
        ):
            raise cuda_error(
                Status.PEER_ACCESS_UNSUPPORTED,
                detail=f"access from device {ordinal} to memory of device {self.context.ordinal}",
            )

    @driver_call
    def peer_malloc(self, ordinal: int, size_bytes: int) -> Ptr:
        check_size(size_bytes)
        self._streams.reject_in_capture()
        if ordinal == self.context.ordinal:
            raise cuda_error(
                Status.INVALID_DEVICE, detail=f"device {ordinal} is not a peer of itself"
            )
        usable_bytes = self.context.facts_of(ordinal).fields.get("usable_memory_bytes")
        capacity_bytes = usable_bytes if isinstance(usable_bytes, int) else DEFAULT_CAPACITY_BYTES
        free_bytes = capacity_bytes - self._used_bytes[ordinal]
        if rounded_size(size_bytes) > free_bytes:
            free_text = f"{format_bytes(free_bytes)} of {format_bytes(capacity_bytes)} free"
            raise cuda_error(
                Status.OUT_OF_MEMORY,
                detail=f"{format_bytes(size_bytes)} requested, {free_text} on device {ordinal}",
            )
        self._used_bytes[ordinal] += rounded_size(size_bytes)
        region = self._heap.add(new_bytes(size_bytes), peer=ordinal)
        self._peer_allocations[region.begin] = region
        self.context.emit(Alloc(region.begin, size_bytes), device=ordinal)
        return Ptr(region.begin)

    @driver_call
    def peer_free(self, ordinal: int, ptr: Ptr) -> None:
        self._streams.reject_in_capture()
        peer_allocations = {
            address: allocation
            for address, allocation in self._peer_allocations.items()
            if allocation.peer == ordinal
        }
        region = pop_allocation(peer_allocations, ptr, f"no allocation of device {ordinal}")
        self.context.wait_for_all()
        del self._peer_allocations[ptr]
        self._heap.space.remove(region)
        self._used_bytes[ordinal] -= rounded_size(len(region.data))
        self.context.emit(Free(ptr, len(region.data)), device=ordinal)

    def nvlinks(self, ordinal: int) -> int:
        """Return the number of NVLinks to a peer; 0 if the path is PCIe or the host."""
        if (self.context.ordinal, ordinal) not in self.context.cuda_view.peer_access:
            return 0
        nvml_view = model_record(self.context.model).nvml
        if isinstance(nvml_view, Unavailable):
            return 0
        uuids = {
            self.context.facts_of(device_ordinal).uuid
            for device_ordinal in (self.context.ordinal, ordinal)
        }
        device_indices = {device.index for device in nvml_view.devices if device.uuid in uuids}
        link_counts = [
            link.nvlinks for link in nvml_view.links if {link.first, link.second} == device_indices
        ]
        return next((link_count for link_count in link_counts if isinstance(link_count, int)), 0)

    def close(self) -> None:
        """Remove all allocations."""
        self._peer_allocations.clear()
