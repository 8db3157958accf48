"""The protocols of a device, which the real and the simulated device both implement.

A feature is annotated with the narrow protocols that it calls; ``Gpu``, which ``open_gpu`` returns, is all of
them. Work is enqueued on streams and runs later, in the order defined by the CUDA C++ Programming Guide,
"Asynchronous Concurrent Execution". Every call that fails raises a CudaError that names the driver's own
error.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from cudakit.gpu.api.facts import DeviceFacts, Telemetry
from cudakit.gpu.api.values import (
    HANDLE_BYTES,
    LEGACY,
    PER_THREAD,
    Argument,
    Backing,
    Descriptor,
    Dim3,
    Event,
    Exported,
    Fabric,
    Graph,
    GraphExec,
    GraphNode,
    HandleKind,
    IpcHandle,
    Kernel,
    MemoryInfo,
    Module,
    ProcessId,
    Ptr,
    Stream,
)

if TYPE_CHECKING:
    from cudakit.gpu.api.gemm import Blas, Library  # imports numpy

__all__ = [
    "HANDLE_BYTES",
    "LEGACY",
    "PER_THREAD",
    "Argument",
    "Backing",
    "ComputeDevice",
    "Descriptor",
    "DeviceInfo",
    "Dim3",
    "Event",
    "Exported",
    "Fabric",
    "Gpu",
    "Graph",
    "GraphExec",
    "GraphNode",
    "Graphs",
    "HandleKind",
    "Ipc",
    "IpcHandle",
    "Kernel",
    "Kernels",
    "Memory",
    "MemoryInfo",
    "Module",
    "Peers",
    "ProcessId",
    "Ptr",
    "Stream",
    "Streams",
    "VirtualMemory",
]


class DeviceInfo(Protocol):
    """What the device is and how it is doing (CUDA Driver API, "Device Management"; NVML)."""

    @property
    def simulated(self) -> bool:
        """Whether the device is simulated, so that no time on it is a measurement."""

    def facts(self) -> DeviceFacts:
        """Return the name, the attributes and the sizes of the device, which do not change."""

    def telemetry(self, names: Collection[str] = ()) -> Telemetry:
        """Read clocks, power, temperature and memory in use, or only the fields called ``names``.

        All fields take milliseconds on a real device, one field tens of microseconds.
        """


class Memory(Protocol):
    """Device and host memory, copies and fills (CUDA Driver API, "Memory Management").

    Copies and fills are asynchronous, except copies from or to pageable host memory ("API synchronization
    behavior"). Zero bytes are copied and filled without effect.
    """

    def memory_info(self) -> MemoryInfo:
        """Return free and total bytes of the device (cuMemGetInfo)."""

    def malloc(self, size_bytes: int, stream: Stream | None = None) -> Ptr:
        """Allocate device memory, at once (cuMemAlloc) or in stream order (cuMemAllocAsync).

        ``size_bytes`` must be positive. CUDA_ERROR_OUT_OF_MEMORY reports requested and free bytes.
        """

    def free(self, ptr: Ptr, stream: Stream | None = None) -> None:
        """Free what ``malloc`` returned; without a stream, wait for all work first (cuMemFree)."""

    def host_malloc(self, size_bytes: int, *, pinned: bool = True) -> Ptr:
        """Allocate host memory: pinned (cuMemHostAlloc, portable), or pageable pages of this process."""

    def host_free(self, ptr: Ptr) -> None:
        """Free what ``host_malloc`` returned, after all work of the device; it must not be registered."""

    def host_register(self, ptr: Ptr, *, threads: int = 1) -> None:
        """Pin pageable memory from ``host_malloc`` (cuMemHostRegister); ``threads`` populate its pages."""

    def host_unregister(self, ptr: Ptr) -> None:
        """Make registered memory pageable again, after all work of the device (cuMemHostUnregister)."""

    def host_view(self, ptr: Ptr, size_bytes: int) -> memoryview:
        """Return the first bytes of host memory as a view, which must not outlive ``host_free``."""

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        """Enqueue a copy between any two of device, peer and host memory (cuMemcpyAsync)."""

    def fill(self, ptr: Ptr, value: int, size_bytes: int, stream: Stream) -> None:
        """Enqueue a fill with a byte from 0 to 255 (cuMemsetD8Async)."""


class Peers(Protocol):
    """Memory of other devices of this machine (CUDA Driver API, "Peer Context Memory Access").

    ``ordinal`` is CUDA's number of the other device.
    """

    def can_access_peer(self, ordinal: int) -> bool:
        """Return whether kernels here can use the other device's memory (cuDeviceCanAccessPeer)."""

    def peer_malloc(self, ordinal: int, size_bytes: int) -> Ptr:
        """Allocate memory on the other device, for copies in the streams of this one.

        Copies are direct where the devices have peer access, else staged through the host.
        """

    def peer_free(self, ordinal: int, ptr: Ptr) -> None:
        """Free what ``peer_malloc`` returned, after all work of this device."""

    def enable_peer(self, ordinal: int) -> None:
        """Allow the other device to access all memory of ``malloc`` here, existing and later, permanently.

        Raises CUDA_ERROR_PEER_ACCESS_UNSUPPORTED. Mapped memory has access rights of its own.
        """


class VirtualMemory(Protocol):
    """Reserved addresses and the physical memory mapped there (CUDA Driver API, "Virtual Memory Management").

    A Backing is one reference to physical memory, which lives while it has references or mappings. Sizes and
    addresses are multiples of ``granularity``.
    """

    def granularity(self) -> int:
        """Return the least page size in bytes (cuMemGetAllocationGranularity, minimum)."""

    def reserve(self, size_bytes: int) -> Ptr:
        """Reserve a range of addresses (cuMemAddressReserve)."""

    def unreserve(self, ptr: Ptr, size_bytes: int) -> None:
        """Return a whole reservation in which nothing is mapped (cuMemAddressFree)."""

    def create(self, size_bytes: int, handle: HandleKind | None = None) -> Backing:
        """Allocate physical memory, exportable by handles of one kind or of none (cuMemCreate)."""

    def backing_at(self, ptr: Ptr) -> Backing:
        """Return one more reference to the memory mapped at ``ptr`` (cuMemRetainAllocationHandle)."""

    def release(self, backing: Backing) -> None:
        """Release one reference (cuMemRelease)."""

    def map(self, ptr: Ptr, backing: Backing, size_bytes: int) -> None:
        """Map the start of physical memory at a reserved address, for this device alone (cuMemMap)."""

    def unmap(self, ptr: Ptr, size_bytes: int) -> None:
        """Remove the mappings that make up a range, each as a whole (cuMemUnmap)."""

    def set_access(self, ptr: Ptr, size_bytes: int, ordinal: int, *, allowed: bool = True) -> None:
        """Allow or deny a device to read and write whole mappings (cuMemSetAccess)."""

    def has_access(self, ptr: Ptr, ordinal: int) -> bool:
        """Return whether a device may read and write the mapping at ``ptr`` (cuMemGetAccess)."""


class Ipc(Protocol):
    """Memory shared between processes (CUDA Driver API, cuIpc*, and shareable handles of virtual memory).

    The process that exported a handle must be alive when another one opens or imports it.
    """

    @property
    def process(self) -> ProcessId:
        """This process; after a fork, the child."""

    def ipc_handle(self, ptr: Ptr) -> bytes:
        """Return the handle of an allocation of ``malloc`` without a stream: always the same bytes."""

    def ipc_open(self, handle: bytes) -> Ptr:
        """Map another process's allocation (cuIpcOpenMemHandle); a second call returns the same address."""

    def ipc_close(self, ptr: Ptr) -> None:
        """Undo one ``ipc_open``; the last one unmaps the memory."""

    def handle_kinds(self) -> tuple[HandleKind, ...]:
        """Return the kinds of handles that this device exports physical memory by, the best first."""

    def export(self, backing: Backing) -> Exported:
        """Export physical memory that was created with a kind of handle; Unsupported without one.

        The memory lives until the export is withdrawn.
        """

    def withdraw(self, exported: Exported) -> None:
        """End an export of this process. A second time has no effect."""

    def import_backing(self, exported: Exported) -> Backing:
        """Return a reference to memory that another process exported."""


class Streams(Protocol):
    """Streams and events (CUDA Driver API, "Stream Management" and "Event Management").

    Ids are never reused; the id of a destroyed object raises CUDA_ERROR_INVALID_HANDLE.
    """

    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        """Create a stream; a blocking one synchronizes with LEGACY.

        ``priority`` is clamped to what the device has; a lower number runs first.
        """

    def priority(self, stream: Stream) -> int:
        """Return the priority that a stream has."""

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream; its work completes."""

    def query_stream(self, stream: Stream) -> bool:
        """Return whether all work of a stream is complete."""

    def sync_stream(self, stream: Stream) -> None:
        """Wait for all work of a stream."""

    def sync(self) -> None:
        """Wait for all work of the device's context (cuCtxSynchronize)."""

    def event(self, *, timing: bool = True) -> Event:
        """Create an event."""

    def destroy_event(self, event: Event) -> None:
        """Destroy an event; waits that were enqueued before keep waiting for the recorded work."""

    def record(self, event: Event, stream: Stream) -> None:
        """Record in an event all work that is in a stream now."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work of a stream wait for the last record of an event (cuStreamWaitEvent)."""

    def query_event(self, event: Event) -> bool:
        """Return whether the recorded work is complete; True for an event that was never recorded."""

    def sync_event(self, event: Event) -> None:
        """Wait for the recorded work."""

    def elapsed(self, begin: Event, end: Event) -> float:
        """Return the seconds between two completed events with timing (cuEventElapsedTime)."""

    def relaxed(self) -> AbstractContextManager[None]:
        """Allow this thread to allocate while streams are captured (CU_STREAM_CAPTURE_MODE_RELAXED)."""


class Kernels(Protocol):
    """Kernels from CUDA C++ source (NVRTC; CUDA Driver API, "Module Management", "Execution Control")."""

    def compile(self, source: str) -> bytes:
        """Compile CUDA C++ for this device; return the image for ``load``."""

    def load(self, image: bytes) -> Module:
        """Load a cubin, a fatbin or PTX (cuModuleLoadData)."""

    def unload(self, module: Module) -> None:
        """Unload a module, and with it its kernels."""

    def kernel(self, module: Module, name: str) -> Kernel:
        """Return a kernel by its mangled name; ``extern "C"`` keeps the plain one."""

    def launch(
        self,
        kernel: Kernel,
        grid: Dim3,
        block: Dim3,
        args: Sequence[Argument],
        stream: Stream,
        *,
        shared_bytes: int = 0,
    ) -> None:
        """Enqueue a launch. The number and the sizes of ``args`` are checked against the kernel."""


class Graphs(Protocol):
    """Stream capture and graphs (CUDA Driver API, "Stream Management" and "Graph Management").

    Captured work does not run. Captures are thread-local: only the capturing thread is held to their rules.
    """

    def capture_begin(self, stream: Stream) -> None:
        """Begin to capture a stream into a graph."""

    def capture_end(self, stream: Stream) -> Graph:
        """End the capture in its first stream; raises a CudaError if the capture was invalidated."""

    def instantiate(self, graph: Graph) -> GraphExec:
        """Return an executable of a graph (cuGraphInstantiate)."""

    def graph_update(self, executable: GraphExec, graph: Graph) -> None:
        """Give an executable the parameters of another graph with equal nodes and edges.

        Raises CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE for a different graph, and then changes nothing.
        """

    def graph_upload(self, executable: GraphExec, stream: Stream) -> None:
        """Enqueue the transfer of an executable to the device (cuGraphUpload)."""

    def graph_launch(self, graph: GraphExec, stream: Stream) -> None:
        """Enqueue a launch of an executable, which never overlaps itself."""

    def destroy_graph(self, graph: Graph) -> None:
        """Destroy a graph; its executables stay."""

    def destroy_graph_exec(self, graph: GraphExec) -> None:
        """Destroy an executable."""

    def count_nodes(self, graph: Graph) -> int:
        """Return the number of nodes of a graph, without those of child graphs."""

    def capture_id(self, stream: Stream) -> int | None:
        """Return the unique id of the capture that a stream is in; None without a valid one."""

    def capture_ends(self, stream: Stream) -> tuple[GraphNode, ...]:
        """Return the nodes that the stream's next captured node will depend on."""

    def dependencies(self, node: GraphNode) -> tuple[GraphNode, ...]:
        """Return the nodes that a node depends on, while its graph exists."""


class ComputeDevice(Memory, Streams, Kernels, Protocol):
    """A device on which kernels run and whose memory is copied: what most measurements need."""


class Gpu(DeviceInfo, Memory, Peers, VirtualMemory, Ipc, Streams, Kernels, Graphs, Protocol):
    """One device, with all of its protocols, until ``close``."""

    def blas(self, library: Library = "cublaslt") -> Blas:
        """Open a library that computes GEMMs. Raises MissingDependency if it is not installed."""

    def close(self) -> None:
        """Wait for all work and release every resource of this object. A second time has no effect."""
