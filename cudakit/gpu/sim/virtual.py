"""Virtual memory of a simulated device (CUDA Driver API, "Virtual Memory Management")."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

from cudakit.errors import CudaError
from cudakit.gpu.api import Backing, HandleKind, Ptr
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import Handles
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.peers import SimPeers
from cudakit.gpu.sim.space import Bytes, Heap, Region, new_bytes
from cudakit.trace.events import Alloc, Free
from cudakit.trace.kinds import AllocationKind

# cuMemGetAllocationGranularity reports this size on every device tested.
_GRANULARITY_BYTES = 2 << 20


@dataclass(slots=True, eq=False)
class PhysicalMemory:
    """Physical memory, which is freed when its last reference or mapping is released."""

    data: Bytes
    ordinal: int  # CUDA index of the owning device
    handle: HandleKind | None
    released: deque[int]  # ``Heap.released`` of the owning device
    references: int = 0
    # The memory may be shared by devices in several threads.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def retain(self) -> None:
        with self.lock:
            self.references += 1

    def release(self) -> None:
        with self.lock:
            self.references -= 1
            if not self.references:
                self.released.append(len(self.data))


class SimVirtualMemory:
    """Reservations, physical memory and mappings of one device."""

    def __init__(self, context: Context, heap: Heap, peers: SimPeers) -> None:
        self.context = context
        self.backings: Handles[PhysicalMemory] = Handles("backing")
        self.mapped: dict[int, tuple[Region, PhysicalMemory]] = {}
        # Ordinals of the other devices that may access each mapping, by address.
        self.peer_access: dict[int, set[int]] = {}
        self._heap, self._peers = heap, peers
        self._reserved: dict[int, int] = {}

    @driver_call
    def granularity(self) -> int:
        return _GRANULARITY_BYTES

    @driver_call
    def reserve(self, size_bytes: int) -> Ptr:
        _check_size(size_bytes)
        begin = self._heap.space.reserve(size_bytes, _GRANULARITY_BYTES)
        self._reserved[begin] = size_bytes
        return Ptr(begin)

    @driver_call
    def unreserve(self, ptr: Ptr, size_bytes: int) -> None:
        if self._reserved.get(ptr) != size_bytes or not self._heap.space.is_empty(ptr, size_bytes):
            raise _range_error(
                ptr, size_bytes, "not a whole reservation, or memory is mapped there"
            )
        del self._reserved[ptr]

    @driver_call
    def create(self, size_bytes: int, handle: HandleKind | None = None) -> Backing:
        _check_size(size_bytes)
        self._heap.count_allocation(size_bytes)
        data = new_bytes(size_bytes)
        return self.backing_of(
            PhysicalMemory(data, self.context.ordinal, handle, self._heap.released)
        )

    @driver_call
    def backing_at(self, ptr: Ptr) -> Backing:
        return self.backing_of(self.mapped[self._mapping_at(ptr)][1])

    @driver_call
    def release(self, backing: Backing) -> None:
        self.backings.remove(backing).release()

    @driver_call
    def map(self, ptr: Ptr, backing: Backing, size_bytes: int) -> None:
        physical_memory = self.backings[backing]
        _check_size(size_bytes)
        if size_bytes > len(physical_memory.data) or not self._is_reserved(ptr, size_bytes):
            raise _range_error(ptr, size_bytes, "larger than the physical memory, or not reserved")
        if ptr % _GRANULARITY_BYTES or not self._heap.space.is_empty(ptr, size_bytes):
            raise _range_error(ptr, size_bytes, "not aligned, or memory is mapped there already")
        peer = None if physical_memory.ordinal == self.context.ordinal else physical_memory.ordinal
        region = Region(ptr, physical_memory.data[:size_bytes], peer=peer)
        self._heap.space.add(region)
        self.mapped[ptr] = (region, physical_memory)
        self.peer_access[ptr] = set()
        physical_memory.retain()
        self.context.emit(Alloc(ptr, size_bytes, AllocationKind.VIRTUAL))

    @driver_call
    def unmap(self, ptr: Ptr, size_bytes: int) -> None:
        mapping_addresses = list(self._mappings(ptr, size_bytes))
        for region, physical in mapping_addresses:
            self._heap.space.remove(region)
            del self.mapped[region.begin], self.peer_access[region.begin]
            physical.release()
            self.context.emit(Free(region.begin, len(region.data), AllocationKind.VIRTUAL))

    @driver_call
    def set_access(self, ptr: Ptr, size_bytes: int, ordinal: int, *, allowed: bool = True) -> None:
        self._peers.check_access_from(ordinal)
        for region, _ in list(self._mappings(ptr, size_bytes)):
            if allowed:
                self.peer_access[region.begin].add(ordinal)
            else:
                self.peer_access[region.begin].discard(ordinal)

    @driver_call
    def has_access(self, ptr: Ptr, ordinal: int) -> bool:
        begin = self._mapping_at(ptr)
        return ordinal == self.context.ordinal or ordinal in self.peer_access[begin]

    def close(self) -> None:
        """Release all mappings and references."""
        physical_memories = (physical for _, physical in self.mapped.values())
        for physical in [*physical_memories, *self.backings.clear()]:
            physical.release()
        self.mapped.clear()

    def backing_of(self, physical: PhysicalMemory) -> Backing:
        """Return a new reference to physical memory."""
        physical.retain()
        return Backing(self.backings.add(physical))

    def _mapping_at(self, ptr: int) -> int:
        """Return the start of the mapping that contains an address. Raises CUDA_ERROR_INVALID_VALUE."""
        region = self._heap.space.region_at(ptr)
        if region is None or region.begin not in self.mapped:
            raise cuda_error(Status.INVALID_VALUE, detail=f"nothing is mapped at {ptr:#x}")
        return region.begin

    def _is_reserved(self, ptr: int, size_bytes: int) -> bool:
        return any(
            begin <= ptr and ptr + size_bytes <= begin + size
            for begin, size in self._reserved.items()
        )

    def _mappings(self, ptr: int, size_bytes: int) -> Iterator[tuple[Region, PhysicalMemory]]:
        """Yield the mappings in a range. Raises CUDA_ERROR_INVALID_VALUE if the range splits a mapping."""
        address, end = ptr, ptr + size_bytes
        while address < end:
            if address not in self.mapped or self.mapped[address][0].end > end:
                raise _range_error(ptr, size_bytes, "not mapped, or part of a larger mapping")
            yield self.mapped[address]
            address = self.mapped[address][0].end


def _check_size(size_bytes: int) -> None:
    if size_bytes <= 0 or size_bytes % _GRANULARITY_BYTES:
        raise cuda_error(
            Status.INVALID_VALUE,
            detail=f"{size_bytes} bytes requested; sizes are positive multiples of {_GRANULARITY_BYTES}",
        )


def _range_error(ptr: int, size_bytes: int, reason: str) -> CudaError:
    return cuda_error(Status.INVALID_VALUE, detail=f"{size_bytes} bytes at {ptr:#x}: {reason}")
