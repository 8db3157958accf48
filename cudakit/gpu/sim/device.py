"""One simulated device, composed of its components."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from cudakit.errors import CudaError, StorageError, Unsupported, UsageError
from cudakit.gpu.api import LEGACY, HandleKind, Memory, Ptr, Storage, StoragePath
from cudakit.gpu.api.arrays import HostKernel
from cudakit.gpu.api.collectives import CollectiveLibrary, CollectiveLibraryName
from cudakit.gpu.api.facts import DeviceFacts, Telemetry
from cudakit.gpu.api.gemm import ArrayLibraryName, Blas, Library, OperationLibrary
from cudakit.gpu.device import Device
from cudakit.gpu.machine import DEFAULT_MODEL
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.graphs import SimGraphs
from cudakit.gpu.sim.kernels import SimKernels
from cudakit.gpu.sim.memory import Heap, SimMemory, SimPeers
from cudakit.gpu.sim.recorder import Sink
from cudakit.gpu.sim.sharing import IpcRegistry, SimIpc, SimVirtualMemory
from cudakit.gpu.sim.streams import SimStreams


class Sim(Device):
    """Simulate a device of a recorded machine; any thread may call it.

    ``model`` names the machine, ``ordinal`` selects a device of it. With a ``seed``, ready tasks run in a
    reproducible random order; without one, each task runs as early as possible. ``sink`` receives the events
    of every call; without a sink, a traced program writes to the spool directory named by the environment.
    ``current_site`` returns the index of the current call stack (``trace_file.TraceWriter.stack``).
    ``capacity_bytes`` overrides the memory size; ``host_kernels`` are visible to this device only. Each
    device has a separate simulated process, on the machine of ``same_machine_as`` or on a new machine;
    ``handle_kinds`` are the kinds of shareable handles that it supports.
    """

    context: Context
    memory: SimMemory
    peers: SimPeers
    virtual: SimVirtualMemory
    ipc: SimIpc
    streams: SimStreams
    kernels: SimKernels
    graphs: SimGraphs

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        ordinal: int = 0,
        seed: int | None = None,
        sink: Sink | None = None,
        current_site: Callable[[], int] | None = None,
        capacity_bytes: int | None = None,
        host_kernels: Mapping[str, HostKernel] | None = None,
        same_machine_as: Sim | None = None,
        handle_kinds: tuple[HandleKind, ...] = ("descriptor",),
    ) -> None:
        context = Context(model, ordinal=ordinal, seed=seed, sink=sink, current_site=current_site)
        streams, heap = SimStreams(context), Heap(context, capacity_bytes)
        registry = same_machine_as.ipc.registry if same_machine_as else IpcRegistry()
        self.context, self.heap, self.streams = context, heap, streams
        self.graphs = SimGraphs(context, streams)
        self.kernels = SimKernels(context, streams, heap, host_kernels)
        self.peers = SimPeers(context, streams, heap)
        self.memory = SimMemory(context, streams, heap, self.peers)
        self.virtual = SimVirtualMemory(context, heap, self.peers)
        self.ipc = SimIpc(context, streams, heap, self.memory, self.virtual, registry, handle_kinds)
        self.clock, self.costs = context.clock, context.costs

    @property
    def simulated(self) -> bool:
        return True

    def facts(self) -> DeviceFacts:
        """Return the recorded facts of the device."""
        return self.context.facts

    @driver_call
    def telemetry(self, names: Collection[str] = ()) -> Telemetry:
        """Return the bytes of memory in use and free, at the virtual time."""
        free_bytes = self.heap.free_bytes
        fields = {
            "memory_free_bytes": free_bytes,
            "memory_used_bytes": self.heap.capacity_bytes - free_bytes,
        }
        selected_fields = {
            name: value for name, value in fields.items() if not names or name in names
        }
        return Telemetry(self.clock.now_ns, selected_fields)

    def blas(self, library: Library = "cublaslt") -> Blas:
        """Open a simulated BLAS library. Raises Unsupported unless it is cublas or cublaslt."""
        from cudakit.gpu.sim.blas import SimBlas

        return SimBlas(library, self.memory, self.kernels)

    def collectives(self, library: CollectiveLibraryName = "nccl") -> CollectiveLibrary:
        """Open the simulated NCCL. Raises Unsupported for torch."""
        from cudakit.gpu.sim.collectives import SimNccl, SimParts

        return SimNccl(library, SimParts(self.streams, self.kernels, self.peers))

    def array_library(self, name: ArrayLibraryName) -> OperationLibrary:
        """Raise Unsupported: torch and CuPy need a real GPU."""
        raise Unsupported(f"{name} needs a real GPU; this device is simulated")

    def storage(self) -> Storage:
        """Open simulated storage, which transfers through host memory."""
        return SimStorage(self.memory)

    def fail_next(self, call: str, error: CudaError) -> None:
        """Make the next call with this name raise ``error``; after a sticky error all calls fail.

        Further errors for the same name are raised in order. Raises UsageError for an unknown call.
        """
        components = (self, self.streams, self.graphs, self.kernels, self.peers)
        memory_components = (self.memory, self.virtual, self.ipc)
        if not any(
            hasattr(getattr(type(component), call, None), "__wrapped__")
            for component in (*components, *memory_components)
        ):
            raise UsageError(f"the simulated device has no call {call!r} that can fail")
        self.context.fail_next(call, error)

    def close(self) -> None:
        """Complete all work and reject later calls. A second call has no effect."""
        self.context.close()
        for component in (self.streams, self.graphs, self.kernels, self.peers, self.memory):
            component.close()
        self.virtual.close()
        self.ipc.close()


# --- Simulated storage: transfers of real files through host memory, as by cuFile in compatibility mode ---


class SimStorage:
    """Storage of a simulated device; ``memory`` is the memory of the device."""

    version = "simulated"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def open(self, path: Path, *, writable: bool, direct: bool) -> SimStorageFile:  # noqa: ARG002
        """Open a file, always without O_DIRECT."""
        return SimStorageFile(self._memory, path, writable=writable)

    def register(self, buffer: Ptr, size_bytes: int) -> bool:  # noqa: ARG002
        """Return False: simulated transfers go through host memory."""
        return False

    def path_used(self) -> StoragePath:
        """Return "compatibility": all data passes through host memory."""
        return "compatibility"

    def close(self) -> None:
        """Do nothing: simulated storage holds no resources."""


class SimStorageFile:
    """A file whose bytes are staged in host memory."""

    def __init__(self, memory: Memory, path: Path, *, writable: bool) -> None:
        self._memory = memory
        self._file = path.open("r+b" if writable else "rb", buffering=0)

    def read(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Read bytes of the file to device memory, and wait."""
        staging_ptr = self._memory.host_malloc(size_bytes, pinned=False)
        try:
            view = self._memory.host_view(staging_ptr, size_bytes)
            read_bytes = os.preadv(self._file.fileno(), [view], file_offset)
            view.release()
            _check_complete(read_bytes, size_bytes, file_offset)
            self._memory.copy(Ptr(buffer + buffer_offset), staging_ptr, size_bytes, LEGACY)
        finally:
            self._memory.host_free(staging_ptr)

    def write(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Write device memory to the file, and wait."""
        staging_ptr = self._memory.host_malloc(size_bytes, pinned=False)
        try:
            self._memory.copy(staging_ptr, Ptr(buffer + buffer_offset), size_bytes, LEGACY)
            view = self._memory.host_view(staging_ptr, size_bytes)
            written_bytes = os.pwritev(self._file.fileno(), [view], file_offset)
            view.release()
        finally:
            self._memory.host_free(staging_ptr)
        _check_complete(written_bytes, size_bytes, file_offset)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _check_complete(transferred_bytes: int, size_bytes: int, file_offset: int) -> None:
    if transferred_bytes != size_bytes:
        raise StorageError(
            f"the file has {transferred_bytes} of {size_bytes} bytes at offset {file_offset}"
        )
