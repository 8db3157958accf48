"""Virtual memory of a simulated device (CUDA Driver API, "Virtual Memory Management")."""

from __future__ import annotations

import secrets
import threading
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count

from cudakit.errors import CudaError, Unsupported
from cudakit.gpu.api import (
    HANDLE_BYTES,
    Backing,
    DescriptorHandle,
    FabricHandle,
    HandleKind,
    ProcessId,
    Ptr,
    ShareableHandle,
)
from cudakit.gpu.device import Handles, closed_error, ended_error, pop_allocation
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.memory import Bytes, Heap, Region, SimMemory, SimPeers, new_bytes
from cudakit.gpu.sim.streams import SimStreams
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
        if size_bytes > len(physical_memory.data) or not (
            any(
                begin <= ptr and ptr + size_bytes <= begin + size
                for begin, size in self._reserved_sizes.items()
            )
        ):
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


# --- Memory sharing between simulated processes ----------------------------------------------------
#
# CUDA Driver API, "Memory Management" (cuIpc*) and "Virtual Memory Management" (shareable handles).

_FIRST_PID = 1000


@dataclass(slots=True, eq=False)
class _ExportedAllocation:
    """An exported allocation and its mappings in other processes."""

    process: ProcessId
    ordinal: int
    region: Region
    mappings: list[Region] = field(default_factory=list)


class IpcRegistry:
    """The processes of one simulated machine, and the handles that they exported.

    ``machine_id`` is a random number that distinguishes processes and handles from those of other simulated
    machines.
    """

    def __init__(self) -> None:
        self.machine_id = secrets.randbits(48)
        self.lock = threading.Lock()
        self.alive_processes: set[ProcessId] = set()
        self.handles: dict[bytes, _ExportedAllocation] = {}
        self.descriptors: dict[DescriptorHandle, PhysicalMemory] = {}
        self.memory_by_fabric_handle: dict[bytes, PhysicalMemory] = {}
        self.handle_numbers = count(1)

    def start_process(self) -> ProcessId:
        """Register a new process; return its id."""
        with self.lock:
            number = next(self.handle_numbers)
            process = ProcessId(_FIRST_PID + number, self.machine_id + number)
            self.alive_processes.add(process)
            return process

    def make_handle(self, kind: str, number: int) -> bytes:
        """Return a handle of HANDLE_BYTES bytes that contains its kind and number."""
        handle_text = f"simulated {kind} handle {self.machine_id:x}.{number}"
        return handle_text.encode().ljust(HANDLE_BYTES, b"\0")


class SimIpc:
    """Exported allocations of one simulated process, and mapped allocations of other processes."""

    def __init__(
        self,
        context: Context,
        streams: SimStreams,
        heap: Heap,
        memory: SimMemory,
        virtual: SimVirtualMemory,
        registry: IpcRegistry,
        handle_kinds: tuple[HandleKind, ...],
    ) -> None:
        self.context = context
        self.registry = registry
        self.open_mappings: dict[int, tuple[bytes, Region]] = {}
        self._streams, self._heap, self._memory, self._virtual = streams, heap, memory, virtual
        self._process = registry.start_process()
        self._handle_kinds = handle_kinds
        self._handles: dict[int, bytes] = {}  # handle of each exported allocation, by address
        self._open_counts: Counter[int] = Counter()  # number of ``ipc_open`` calls by address
        memory.on_free = self._invalidate_handle

    @property
    def process(self) -> ProcessId:
        """The id of the simulated process."""
        return self._process

    @driver_call
    def ipc_handle(self, ptr: Ptr) -> bytes:
        self._streams.reject_in_capture()
        region = self._memory.device_allocations.get(ptr)
        if region is None or not region.is_live:
            error_text = f"no allocation of {self.context.name} begins at {ptr:#x}"
            raise cuda_error(Status.INVALID_VALUE, detail=error_text)
        if ptr not in self._handles:
            with self.registry.lock:
                handle = self.registry.make_handle("ipc", next(self.registry.handle_numbers))
                self.registry.handles[handle] = _ExportedAllocation(
                    self._process, self.context.ordinal, region
                )
            self._handles[ptr] = handle
        return self._handles[ptr]

    @driver_call
    def ipc_open(self, handle: bytes) -> Ptr:
        self._streams.reject_in_capture()
        allocation = self.registry.handles.get(handle)
        if allocation is None:
            error_detail = (
                "unknown handle; the exporting process may have freed the memory or ended, and simulated"
                " devices of another Python process cannot be opened"
            )
            raise cuda_error(Status.INVALID_VALUE, detail=error_detail)
        if allocation.process == self._process:
            raise cuda_error(
                Status.INVALID_CONTEXT, detail="this process exported the memory itself"
            )
        for mapping_begin, (open_handle, _) in self.open_mappings.items():
            if open_handle == handle:
                self._open_counts[mapping_begin] += 1
                return Ptr(mapping_begin)
        peer = None if allocation.ordinal == self.context.ordinal else allocation.ordinal
        region = self._heap.add(allocation.region.data, peer=peer)
        allocation.mappings.append(region)
        self.open_mappings[region.begin] = handle, region
        self._open_counts[region.begin] = 1
        self.context.emit(Alloc(region.begin, len(region.data)))
        return Ptr(region.begin)

    @driver_call
    def ipc_close(self, ptr: Ptr) -> None:
        self._streams.reject_in_capture()
        region_by_begin = {begin: region for begin, (_, region) in self.open_mappings.items()}
        region = pop_allocation(region_by_begin, ptr, "no open mapping")
        self.context.wait_for_all()
        self._open_counts[ptr] -= 1
        if not self._open_counts[ptr]:
            handle, _ = self.open_mappings.pop(ptr)
            self._remove_mapping(handle, region)
            self._heap.space.remove(region)
            self.context.emit(Free(ptr, len(region.data)))

    @driver_call
    def handle_kinds(self) -> tuple[HandleKind, ...]:
        return self._handle_kinds

    @driver_call
    def export(self, backing: Backing) -> ShareableHandle:
        physical_memory = self._virtual.backings[backing]
        with self.registry.lock:
            handle_number = next(self.registry.handle_numbers)
            if physical_memory.handle == "fabric":
                fabric_handle = FabricHandle(self.registry.make_handle("fabric", handle_number))
                self.registry.memory_by_fabric_handle[fabric_handle.data] = physical_memory
                return fabric_handle
            if physical_memory.handle is None:
                raise Unsupported(
                    "the memory was created without a shareable handle and cannot be exported"
                )
            exported_handle = DescriptorHandle(self._process, handle_number, handle_number)
            self.registry.descriptors[exported_handle] = physical_memory
        physical_memory.retain()
        return exported_handle

    @driver_call
    def revoke(self, handle: ShareableHandle) -> None:
        self._revoke(handle)

    @driver_call
    def import_backing(self, handle: ShareableHandle) -> Backing:
        if isinstance(handle, FabricHandle):
            physical_memory = self.registry.memory_by_fabric_handle.get(handle.data)
            if physical_memory is None or not physical_memory.reference_count:
                raise cuda_error(
                    Status.INVALID_VALUE, detail="the exporting process has freed the memory"
                )
            return self._virtual.backing_of(physical_memory)
        if handle.process not in self.registry.alive_processes:
            raise ended_error(handle.process)
        physical_memory = self.registry.descriptors.get(handle)
        if physical_memory is None:
            raise closed_error(handle)
        return self._virtual.backing_of(physical_memory)

    def close(self) -> None:
        """End the simulated process, and invalidate its IPC handles and exports."""
        self.registry.alive_processes.discard(self._process)
        for ptr in [*self._handles]:
            self._invalidate_handle(ptr)
        for exported_handle in [*self.registry.descriptors]:
            if exported_handle.process == self._process:
                self._revoke(exported_handle)
        for handle, region in self.open_mappings.values():
            self._remove_mapping(handle, region)
        self.open_mappings.clear()

    def _invalidate_handle(self, ptr: int) -> None:
        """Invalidate the handle and the mappings of a freed allocation."""
        handle = self._handles.pop(ptr, None)
        if handle is not None:
            allocation = self.registry.handles.pop(handle)
            for mapping in allocation.mappings:
                mapping.is_live = False

    def _remove_mapping(self, handle: bytes, region: Region) -> None:
        allocation = self.registry.handles.get(handle)
        if allocation is not None:
            allocation.mappings.remove(region)

    def _revoke(self, exported_handle: ShareableHandle) -> None:
        if isinstance(exported_handle, DescriptorHandle):
            physical_memory = self.registry.descriptors.pop(exported_handle, None)
            if physical_memory is not None:
                physical_memory.release()
