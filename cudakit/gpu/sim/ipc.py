"""Memory sharing between simulated processes.

CUDA Driver API, "Memory Management" (cuIpc*) and "Virtual Memory Management" (shareable handles).
"""

from __future__ import annotations

import secrets
import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import count

from cudakit.errors import Unsupported
from cudakit.gpu import file_descriptors
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
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import pop_allocation
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.memory import SimMemory
from cudakit.gpu.sim.space import Heap, Region
from cudakit.gpu.sim.streams import SimStreams
from cudakit.gpu.sim.virtual import PhysicalMemory, SimVirtualMemory
from cudakit.trace.events import Alloc, Free

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
        return self._open(handle, allocation)

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
            raise file_descriptors.ended_error(handle.process)
        physical_memory = self.registry.descriptors.get(handle)
        if physical_memory is None:
            raise file_descriptors.closed_error(handle)
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

    def _open(self, handle: bytes, allocation: _ExportedAllocation) -> Ptr:
        peer = None if allocation.ordinal == self.context.ordinal else allocation.ordinal
        region = self._heap.add(allocation.region.data, peer=peer)
        allocation.mappings.append(region)
        self.open_mappings[region.begin] = handle, region
        self._open_counts[region.begin] = 1
        self.context.emit(Alloc(region.begin, len(region.data)))
        return Ptr(region.begin)

    def _remove_mapping(self, handle: bytes, region: Region) -> None:
        allocation = self.registry.handles.get(handle)
        if allocation is not None:
            allocation.mappings.remove(region)

    def _revoke(self, exported_handle: ShareableHandle) -> None:
        if isinstance(exported_handle, DescriptorHandle):
            physical_memory = self.registry.descriptors.pop(exported_handle, None)
            if physical_memory is not None:
                physical_memory.release()
