"""One simulated device, composed of its components."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from cudakit.errors import CudaError, Unsupported, UsageError
from cudakit.gpu.api import HandleKind
from cudakit.gpu.api.collectives import CollectiveLibrary, CollectiveLibraryName
from cudakit.gpu.api.facts import DeviceFacts, Telemetry
from cudakit.gpu.api.gemm import Blas, Library
from cudakit.gpu.api.host_kernels import HostKernel
from cudakit.gpu.api.operations import ArrayLibraryName, OperationLibrary
from cudakit.gpu.api.storage import Storage
from cudakit.gpu.device import Device
from cudakit.gpu.machine import DEFAULT_MODEL
from cudakit.gpu.sim.context import Context, driver_call
from cudakit.gpu.sim.graphs import SimGraphs
from cudakit.gpu.sim.ipc import IpcRegistry, SimIpc
from cudakit.gpu.sim.kernels import SimKernels
from cudakit.gpu.sim.memory import SimMemory
from cudakit.gpu.sim.peers import SimPeers
from cudakit.gpu.sim.recorder import Sink
from cudakit.gpu.sim.space import Heap
from cudakit.gpu.sim.streams import SimStreams
from cudakit.gpu.sim.virtual import SimVirtualMemory


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
        from cudakit.gpu.sim.storage import SimStorage

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
