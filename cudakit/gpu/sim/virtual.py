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
    released_sizes: deque[int]  # ``Heap.released_sizes`` of the owning device
    reference_count: int = 0
    # The memory may be shared by devices in several threads.
    lock: threading.Lock = field(default_factory=threading.Lock)

    def retain(self) -> None:
        with self.lock:
            self.reference_count += 1

    def release(self) -> None:
        with self.lock:
            self.reference_count -= 1
            if not self.reference_count:
                self.released_sizes.append(len(self.data))


class SimVirtualMemory:
    """Reservations, physical memory and mappings of one device."""

    def __init__(self, context: Context, heap: Heap, peers: SimPeers) -> None:
        self.context = context
        self.backings: Handles[PhysicalMemory] = Handles("backing")
        self.mapped_memory: dict[int, tuple[Region, PhysicalMemory]] = {}
        # Ordinals of the other devices that may access each mapping, by address.
        self.peer_access: dict[int, set[int]] = {}
        self._heap, self._peers = heap, peers
        self._reserved_sizes: dict[int, int] = {}

    @driver_call
    def granularity(self) -> int:
        return _GRANULARITY_BYTES

    @driver_call
    def reserve(self, size_bytes: int) -> Ptr:
        _check_size(size_bytes)
        begin = self._heap.space.reserve(size_bytes, _GRANULARITY_BYTES)
        self._reserved_sizes[begin] = size_bytes
        return Ptr(begin)

    @driver_call
    def unreserve(self, ptr: Ptr, size_bytes: int) -> None:
        if self._reserved_sizes.get(ptr) != size_bytes or not self._heap.space.is_empty(
            ptr, size_bytes
        ):
            raise _range_error(
                ptr, size_bytes, "not a whole reservation, or memory is mapped there"
            )
        del self._reserved_sizes[ptr]

    @driver_call
    def create(self, size_bytes: int, handle_kind: HandleKind | None = None) -> Backing:
        _check_size(size_bytes)
        self._heap.count_allocation(size_bytes)
        data = new_bytes(size_bytes)
        return self.backing_of(
            PhysicalMemory(data, self.context.ordinal, handle_kind, self._heap.released_sizes)
        )

    @driver_call
    def backing_at(self, ptr: Ptr) -> Backing:
        return self.backing_of(self.mapped_memory[self._mapping_at(ptr)][1])

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
        self.mapped_memory[ptr] = (region, physical_memory)
        self.peer_access[ptr] = set()
        physical_memory.retain()
        self.context.emit(Alloc(ptr, size_bytes, AllocationKind.VIRTUAL))

    @driver_call
    def unmap(self, ptr: Ptr, size_bytes: int) -> None:
        mapping_addresses = list(self._mappings(ptr, size_bytes))
        for region, physical_memory in mapping_addresses:
            self._heap.space.remove(region)
            del self.mapped_memory[region.begin], self.peer_access[region.begin]
            physical_memory.release()
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
        physical_memories = (physical_memory for _, physical_memory in self.mapped_memory.values())
        for physical_memory in [*physical_memories, *self.backings.clear()]:
            physical_memory.release()
        self.mapped_memory.clear()

    def backing_of(self, physical_memory: PhysicalMemory) -> Backing:
        """Return a new reference to physical memory."""
        physical_memory.retain()
        return Backing(self.backings.add(physical_memory))

    def _mapping_at(self, ptr: int) -> int:
        """Return the first address of the mapping that contains an address.

        Raises CUDA_ERROR_INVALID_VALUE if nothing is mapped at the address.
        """
        region = self._heap.space.region_at(ptr)
        if region is None or region.begin not in self.mapped_memory:
            raise cuda_error(Status.INVALID_VALUE, detail=f"nothing is mapped at {ptr:#x}")
        return region.begin

    def _is_reserved(self, ptr: int, size_bytes: int) -> bool:
        return any(
            begin <= ptr and ptr + size_bytes <= begin + size
            for begin, size in self._reserved_sizes.items()
        )

    def _mappings(self, ptr: int, size_bytes: int) -> Iterator[tuple[Region, PhysicalMemory]]:
        """Yield the mappings in a range. Raises CUDA_ERROR_INVALID_VALUE if the range splits a mapping."""
        address, end = ptr, ptr + size_bytes
        while address < end:
            if address not in self.mapped_memory or self.mapped_memory[address][0].end > end:
                raise _range_error(ptr, size_bytes, "not mapped, or part of a larger mapping")
            yield self.mapped_memory[address]
            address = self.mapped_memory[address][0].end


def _check_size(size_bytes: int) -> None:
    if size_bytes <= 0 or size_bytes % _GRANULARITY_BYTES:
        raise cuda_error(
            Status.INVALID_VALUE,
            detail=f"{size_bytes} bytes requested; sizes are positive multiples of {_GRANULARITY_BYTES}",
        )


def _range_error(ptr: int, size_bytes: int, reason: str) -> CudaError:
    return cuda_error(Status.INVALID_VALUE, detail=f"{size_bytes} bytes at {ptr:#x}: {reason}")
