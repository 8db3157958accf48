"""Memory that simulated processes share.

CUDA Driver API, Memory Management (cuIpc*) and Virtual Memory Management (shareable handles).
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
    Descriptor,
    Exported,
    Fabric,
    HandleKind,
    ProcessId,
    Ptr,
)
from cudakit.gpu.driver_errors import Status, cuda_error
from cudakit.gpu.handles import pop_allocation
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.memory import SimMemory
from cudakit.gpu.sim.space import Heap, Region
from cudakit.gpu.sim.streams import SimStreams
from cudakit.gpu.sim.virtual import Physical, SimVirtualMemory
from cudakit.trace.events import Alloc, Free

_FIRST_PID = 1000


@dataclass(slots=True, eq=False)
class _Handle:
    """An allocation with a handle, and its mirrors in other processes."""

    process: ProcessId
    ordinal: int
    region: Region
    mirrors: list[Region] = field(default_factory=list)


class Machine:
    """The state that the processes of one simulated machine share.

    ``boot`` keeps processes and handles of machines in other Python processes distinct from those of this
    one.
    """

    def __init__(self) -> None:
        self.boot = secrets.randbits(48)
        self.lock = threading.Lock()
        self.alive: set[ProcessId] = set()
        self.handles: dict[bytes, _Handle] = {}
        self.descriptors: dict[Descriptor, Physical] = {}
        self.fabric: dict[bytes, Physical] = {}
        self.numbers = count(1)

    def start(self) -> ProcessId:
        """Start a process, and return its id."""
        with self.lock:
            number = next(self.numbers)
            process = ProcessId(_FIRST_PID + number, self.boot + number)
            self.alive.add(process)
            return process

    def handle(self, kind: str, number: int) -> bytes:
        """Return the handle with this number, of HANDLE_BYTES bytes."""
        text = f"simulated {kind} handle {self.boot:x}.{number}"
        return text.encode().ljust(HANDLE_BYTES, b"\0")


class SimIpc:
    """The memory that one simulated process shares, and what it has opened of others."""

    def __init__(
        self,
        context: Context,
        streams: SimStreams,
        heap: Heap,
        memory: SimMemory,
        virtual: SimVirtualMemory,
        machine: Machine,
        handle_kinds: tuple[HandleKind, ...],
    ) -> None:
        self.context = context
        self.machine = machine
        self.opened: dict[int, tuple[bytes, Region]] = {}
        self._streams, self._heap, self._memory, self._virtual = streams, heap, memory, virtual
        self._process = machine.start()
        self._handle_kinds = handle_kinds
        self._handles: dict[int, bytes] = {}  # of own allocations
        self._times: Counter[int] = Counter()  # the number of times that each is open
        memory.on_free = self._disown

    @property
    def process(self) -> ProcessId:
        """The simulated process."""
        return self._process

    @driver_call
    def ipc_handle(self, ptr: Ptr) -> bytes:
        self._streams.refuse_in_capture()
        region = self._memory.allocated.get(ptr)
        if region is None or not region.live:
            seen = f"no allocation of {self.context.name} begins at {ptr:#x}"
            raise cuda_error(Status.INVALID_VALUE, seen=seen)
        if ptr not in self._handles:
            with self.machine.lock:
                handle = self.machine.handle("ipc", next(self.machine.numbers))
                self.machine.handles[handle] = _Handle(self._process, self.context.ordinal, region)
            self._handles[ptr] = handle
        return self._handles[ptr]

    @driver_call
    def ipc_open(self, handle: bytes) -> Ptr:
        self._streams.refuse_in_capture()
        known = self.machine.handles.get(handle)
        if known is None:
            seen = (
                "unknown handle; the exporting process may have freed the memory or ended, and simulated"
                " devices of another Python process cannot be opened"
            )
            raise cuda_error(Status.INVALID_VALUE, seen=seen)
        if known.process == self._process:
            raise cuda_error(Status.INVALID_CONTEXT, seen="this process exported the memory itself")
        for begin, (opened, _) in self.opened.items():
            if opened == handle:
                self._times[begin] += 1
                return Ptr(begin)
        return self._open(handle, known)

    @driver_call
    def ipc_close(self, ptr: Ptr) -> None:
        self._streams.refuse_in_capture()
        regions = {begin: region for begin, (_, region) in self.opened.items()}
        region = pop_allocation(regions, ptr, "no open mapping")
        self.context.wait_for_all()
        self._times[ptr] -= 1
        if not self._times[ptr]:
            handle, _ = self.opened.pop(ptr)
            self._forget_mirror(handle, region)
            self._heap.space.remove(region)
            self.context.emit(Free(ptr, len(region.data)))

    @driver_call
    def handle_kinds(self) -> tuple[HandleKind, ...]:
        return self._handle_kinds

    @driver_call
    def export(self, backing: Backing) -> Exported:
        physical = self._virtual.backings[backing]
        with self.machine.lock:
            number = next(self.machine.numbers)
            if physical.handle == "fabric":
                fabric = Fabric(self.machine.handle("fabric", number))
                self.machine.fabric[fabric.data] = physical
                return fabric
            if physical.handle is None:
                raise Unsupported(
                    "the memory was created without a shareable handle and cannot be exported"
                )
            exported = Descriptor(self._process, number, number)
            self.machine.descriptors[exported] = physical
        physical.hold()
        return exported

    @driver_call
    def withdraw(self, exported: Exported) -> None:
        self._withdraw(exported)

    @driver_call
    def import_backing(self, exported: Exported) -> Backing:
        if isinstance(exported, Fabric):
            there = self.machine.fabric.get(exported.data)
            if there is None or not there.references:
                raise cuda_error(
                    Status.INVALID_VALUE, seen="the exporting process has freed the memory"
                )
            return self._virtual.backing_of(there)
        if exported.process not in self.machine.alive:
            raise file_descriptors.ended(exported.process)
        physical = self.machine.descriptors.get(exported)
        if physical is None:
            raise file_descriptors.withdrawn(exported)
        return self._virtual.backing_of(physical)

    def close(self) -> None:
        """End this process: other ones can no longer use its memory."""
        self.machine.alive.discard(self._process)
        for ptr in [*self._handles]:
            self._disown(ptr)
        for exported in [*self.machine.descriptors]:
            if exported.process == self._process:
                self._withdraw(exported)
        for handle, region in self.opened.values():
            self._forget_mirror(handle, region)
        self.opened.clear()

    def _disown(self, ptr: int) -> None:
        """Invalidate the handle of a freed allocation, and its mirrors."""
        handle = self._handles.pop(ptr, None)
        if handle is not None:
            known = self.machine.handles.pop(handle)
            for mirror in known.mirrors:
                mirror.live = False

    def _open(self, handle: bytes, known: _Handle) -> Ptr:
        peer = None if known.ordinal == self.context.ordinal else known.ordinal
        region = self._heap.add(known.region.data, peer=peer)
        known.mirrors.append(region)
        self.opened[region.begin] = handle, region
        self._times[region.begin] = 1
        self.context.emit(Alloc(region.begin, len(region.data)))
        return Ptr(region.begin)

    def _forget_mirror(self, handle: bytes, region: Region) -> None:
        known = self.machine.handles.get(handle)
        if known is not None:
            known.mirrors.remove(region)

    def _withdraw(self, exported: Exported) -> None:
        if isinstance(exported, Descriptor):
            physical = self.machine.descriptors.pop(exported, None)
            if physical is not None:
                physical.release()
