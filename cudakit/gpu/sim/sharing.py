"""Memory that several simulated processes of one machine use; each Sim is the device of one.

CUDA Driver API, Memory Management (cuIpc*) and Virtual Memory Management (shareable handles).
"""

from __future__ import annotations

import threading
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from typing import Any

from cudakit.errors import Unsupported
from cudakit.gpu import file_descriptors
from cudakit.gpu.api import Backing, Ptr
from cudakit.gpu.api.sharing import (
    HANDLE_BYTES,
    Descriptor,
    Exported,
    Fabric,
    HandleKind,
    ProcessId,
)
from cudakit.gpu.explain import Status, cuda_error
from cudakit.gpu.sim.context import driver_call
from cudakit.gpu.sim.memory import forget
from cudakit.gpu.sim.space import Region
from cudakit.gpu.sim.tasks import Outcome
from cudakit.gpu.sim.virtual import Physical, VirtualMemory
from cudakit.trace.events import Alloc, Free

_FIRST_PID = 1000
_ALIGNMENT_BYTES = 512


@dataclass(slots=True, eq=False)
class _Handle:
    """An allocation that has a handle, and where other processes have opened it."""

    process: ProcessId
    ordinal: int
    region: Region
    mirrors: list[Region] = field(default_factory=list)


class Machine:
    """What the processes of one simulated machine have let each other open."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.alive: set[ProcessId] = set()
        self.handles: dict[bytes, _Handle] = {}
        self.descriptors: dict[Descriptor, Physical] = {}
        self.fabric: dict[bytes, Physical] = {}
        self.numbers = count(1)

    def start(self) -> ProcessId:
        """Begin one more process."""
        with self.lock:
            number = next(self.numbers)
            process = ProcessId(_FIRST_PID + number, number)
            self.alive.add(process)
            return process


class Sharing(VirtualMemory):
    """What one simulated process lets others open, and what it has opened of theirs."""

    def __init__(
        self,
        *args: Any,
        beside: Sharing | None = None,
        handle_kinds: tuple[HandleKind, ...] = ("descriptor",),
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._machine: Machine = beside._machine if beside else Machine()
        self._process = self._machine.start()
        self._handle_kinds = handle_kinds
        self._handles: dict[int, bytes] = {}  # the handles of own allocations
        self._opened: dict[int, tuple[bytes, Region]] = {}
        self._times: Counter[int] = Counter()  # how often each is open

    @property
    def process(self) -> ProcessId:
        """Return who the simulated process is."""
        return self._process

    @driver_call
    def ipc_handle(self, ptr: Ptr) -> bytes:
        self.refuse_in_capture()
        region = self._allocated.get(ptr)
        if region is None or not region.live:
            seen = f"no allocation of {self.name} begins at {ptr:#x}"
            raise cuda_error(Status.INVALID_VALUE, seen=seen)
        if ptr not in self._handles:
            with self._machine.lock:
                handle = _sixty_four_bytes("ipc", next(self._machine.numbers))
                self._machine.handles[handle] = _Handle(self._process, self.ordinal, region)
            self._handles[ptr] = handle
        return self._handles[ptr]

    @driver_call
    def ipc_open(self, handle: bytes) -> Ptr:
        self.refuse_in_capture()
        known = self._machine.handles.get(handle)
        if known is None:
            seen = "memory of another process; it may have given it back, or ended"
            raise cuda_error(Status.INVALID_VALUE, seen=seen)
        if known.process == self._process:
            raise cuda_error(Status.INVALID_CONTEXT, seen="the memory is of this process itself")
        for begin, (opened, _) in self._opened.items():
            if opened == handle:
                self._times[begin] += 1
                return Ptr(begin)
        return self._open(handle, known)

    @driver_call
    def ipc_close(self, ptr: Ptr) -> None:
        self.refuse_in_capture()
        regions = {begin: region for begin, (_, region) in self._opened.items()}
        region = forget(regions, ptr, "nothing that is open")
        self.wait_for_all()
        self._times[ptr] -= 1
        if not self._times[ptr]:
            handle, _ = self._opened.pop(ptr)
            self._forget_mirror(handle, region)
            self.space.remove(region)
            self.emit(Free(ptr, len(region.data)))

    @driver_call
    def handle_kinds(self) -> tuple[HandleKind, ...]:
        return self._handle_kinds

    @driver_call
    def export(self, backing: Backing) -> Exported:
        physical = self.physical(backing)
        with self._machine.lock:
            number = next(self._machine.numbers)
            if physical.handle == "fabric":
                fabric = Fabric(_sixty_four_bytes("fabric", number))
                self._machine.fabric[fabric.data] = physical
                return fabric
            if physical.handle is None:
                raise Unsupported(
                    "this memory was created without a handle, and other processes cannot open it"
                )
            exported = Descriptor(self._process, number, number)
            self._machine.descriptors[exported] = physical
        physical.hold()
        return exported

    @driver_call
    def withdraw(self, exported: Exported) -> None:
        if isinstance(exported, Descriptor):
            self._withdraw(exported)

    @driver_call
    def import_backing(self, exported: Exported) -> Backing:
        if isinstance(exported, Fabric):
            there = self._machine.fabric.get(exported.data)
            if there is None or not there.references:
                raise cuda_error(Status.INVALID_VALUE, seen="memory that was given back")
            return self.backing_of(there)
        if exported.process not in self._machine.alive:
            raise file_descriptors.ended(exported.process)
        physical = self._machine.descriptors.get(exported)
        if physical is None:
            raise file_descriptors.withdrawn(exported)
        return self.backing_of(physical)

    def close(self) -> None:
        super().close()
        self._machine.alive.discard(self._process)
        for ptr in [*self._handles]:
            self._disown(ptr)
        for exported in [*self._machine.descriptors]:
            if exported.process == self._process:
                self._withdraw(exported)
        for handle, region in self._opened.values():
            self._forget_mirror(handle, region)
        self._opened.clear()

    def _end(self, region: Region) -> Outcome:
        self._disown(region.begin)
        return super()._end(region)

    def _disown(self, ptr: int) -> None:
        """Let nobody use an allocation that is no more, also not where it is open."""
        handle = self._handles.pop(ptr, None)
        if handle is not None:
            known = self._machine.handles.pop(handle)
            for mirror in known.mirrors:
                mirror.live = False

    def _open(self, handle: bytes, known: _Handle) -> Ptr:
        size_bytes = len(known.region.data)
        begin = self.space.take(size_bytes, _ALIGNMENT_BYTES)
        peer = None if known.ordinal == self.ordinal else known.ordinal
        region = Region(begin, known.region.data, peer=peer)
        known.mirrors.append(region)
        self.space.add(region)
        self._opened[begin] = handle, region
        self._times[begin] = 1
        self.emit(Alloc(begin, size_bytes))
        return Ptr(begin)

    def _forget_mirror(self, handle: bytes, region: Region) -> None:
        known = self._machine.handles.get(handle)
        if known is not None:
            known.mirrors.remove(region)

    def _withdraw(self, exported: Descriptor) -> None:
        physical = self._machine.descriptors.pop(exported, None)
        if physical is not None:
            self._let_go(physical)


def _sixty_four_bytes(kind: str, number: int) -> bytes:
    return f"simulated {kind} handle {number}".encode().ljust(HANDLE_BYTES, b"\0")
