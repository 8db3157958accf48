"""The protocols of a device, which the real and the simulated device both implement.

Functions annotate a device with the narrow protocols whose methods they call; ``open_gpu`` returns a ``Gpu``,
which has all of them. Work is enqueued on streams and executes later, in the order defined by the CUDA C++
Programming Guide, "Asynchronous Concurrent Execution". Each method names the driver function that it maps to
(CUDA Driver API). Every failed call raises CudaError with the name of the driver's error. Sizes are in bytes.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeAlias

from cudakit.gpu.api.facts import DeviceFacts, Telemetry
from cudakit.gpu.api.values import (
    HANDLE_BYTES,
    LEGACY,
    PER_THREAD,
    Argument,
    Backing,
    DescriptorHandle,
    Dim3,
    Event,
    FabricHandle,
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
    ShareableHandle,
    Stream,
)

if TYPE_CHECKING:
    import numpy as np  # slow to import, and not needed by commands that launch no kernel
    import numpy.typing as npt

    from cudakit.gpu.api.collectives import CollectiveLibrary, CollectiveLibraryName
    from cudakit.gpu.api.gemm import (  # imports numpy
        ArrayLibraryName,
        Blas,
        Library,
        OperationLibrary,
    )


__all__ = [
    "HANDLE_BYTES",
    "LEGACY",
    "PER_THREAD",
    "Argument",
    "Backing",
    "ComputeDevice",
    "DescriptorHandle",
    "DeviceInfo",
    "Dim3",
    "Event",
    "FabricHandle",
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
    "ShareableHandle",
    "Stream",
    "Streams",
    "VirtualMemory",
]


class DeviceInfo(Protocol):
    """Facts and telemetry of the device (CUDA Driver API, "Device Management"; NVML)."""

    @property
    def simulated(self) -> bool:
        """Whether the device is simulated; its times are then estimates, not measurements."""

    def facts(self) -> DeviceFacts:
        """Return the constant facts of the device: name, attributes, sizes."""

    def telemetry(self, names: Collection[str] = ()) -> Telemetry:
        """Read clocks, power, temperature and memory use from NVML, or only the fields ``names``.

        A real device takes milliseconds for all fields, tens of microseconds for one.
        """


class Memory(Protocol):
    """Device and host memory, copies and fills (CUDA Driver API, "Memory Management").

    Copies and fills are asynchronous, except copies from or to pageable host memory ("API synchronization
    behavior"). Zero-byte copies and fills have no effect.
    """

    def memory_info(self) -> MemoryInfo:
        """Return free and total bytes of the device (cuMemGetInfo)."""

    def malloc(self, size_bytes: int, stream: Stream | None = None) -> Ptr:
        """Allocate device memory: cuMemAlloc, or in stream order cuMemAllocAsync.

        Raises CUDA_ERROR_INVALID_VALUE unless ``size_bytes`` is positive, and CUDA_ERROR_OUT_OF_MEMORY with
        the requested and the free size.
        """

    def free(self, ptr: Ptr, stream: Stream | None = None) -> None:
        """Free an allocation of ``malloc``: cuMemFree, which waits for all work, or cuMemFreeAsync."""

    def host_malloc(self, size_bytes: int, *, pinned: bool = True) -> Ptr:
        """Allocate host memory: pinned (cuMemHostAlloc, portable), or pageable (mmap)."""

    def host_free(self, ptr: Ptr) -> None:
        """Free an allocation of ``host_malloc`` after all device work (cuMemFreeHost).

        Raises CUDA_ERROR_INVALID_VALUE if the memory is registered.
        """

    def host_register(self, ptr: Ptr, *, thread_count: int = 1) -> None:
        """Pin a pageable allocation (cuMemHostRegister), whose pages ``thread_count`` threads populate."""

    def host_unregister(self, ptr: Ptr) -> None:
        """Unpin a registered allocation after all device work (cuMemHostUnregister)."""

    def pin(self, memory: npt.NDArray[np.uint8], *, read_only: bool = False) -> Ptr:
        """Pin host memory that another library allocated, and return its address (cuMemHostRegister).

        The memory must stay allocated until ``unpin``. With ``read_only`` the device must not write to it.
        Raises CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED if a part of the memory is already pinned.
        """

    def unpin(self, ptr: Ptr) -> None:
        """Unpin memory of ``pin`` after all device work (cuMemHostUnregister)."""

    def host_view(self, ptr: Ptr, size_bytes: int) -> memoryview:
        """Return the first bytes of a host allocation; the view is invalid after ``host_free``."""

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        """Enqueue a copy between device, peer and host memory (cuMemcpyAsync)."""

    def fill(self, ptr: Ptr, value: int, size_bytes: int, stream: Stream) -> None:
        """Enqueue a fill with a byte value from 0 to 255 (cuMemsetD8Async)."""


class Peers(Protocol):
    """Memory of peer devices (CUDA Driver API, "Peer Context Memory Access").

    ``ordinal`` is the CUDA device index of the peer.
    """

    def can_access_peer(self, ordinal: int) -> bool:
        """Return whether kernels of this device can access memory of a peer (cuDeviceCanAccessPeer)."""

    def peer_malloc(self, ordinal: int, size_bytes: int) -> Ptr:
        """Allocate memory on a peer (cuMemAlloc there), for copies in the streams of this device.

        Copies are direct if the devices have peer access, and staged through the host otherwise.
        """

    def peer_free(self, ordinal: int, ptr: Ptr) -> None:
        """Free an allocation of ``peer_malloc`` after all work of this device (cuMemFree)."""

    def enable_peer(self, ordinal: int) -> None:
        """Give a peer access to all ``malloc`` memory, permanently (cuCtxEnablePeerAccess).

        Raises CUDA_ERROR_PEER_ACCESS_UNSUPPORTED. Does not apply to mapped memory: see ``set_access``.
        """


class VirtualMemory(Protocol):
    """Address reservations and physical memory (CUDA Driver API, "Virtual Memory Management").

    A Backing is one reference to physical memory, which exists while it has references or mappings. Sizes and
    addresses are multiples of ``granularity``.
    """

    def granularity(self) -> int:
        """Return the minimum page size in bytes (cuMemGetAllocationGranularity)."""

    def reserve(self, size_bytes: int) -> Ptr:
        """Reserve an address range (cuMemAddressReserve)."""

    def unreserve(self, ptr: Ptr, size_bytes: int) -> None:
        """Free a complete reservation of addresses, which has no mappings (cuMemAddressFree)."""

    def create(self, size_bytes: int, handle_kind: HandleKind | None = None) -> Backing:
        """Allocate physical memory, exportable by one kind of handle or by none (cuMemCreate)."""

    def backing_at(self, ptr: Ptr) -> Backing:
        """Return a new reference to the memory mapped at an address (cuMemRetainAllocationHandle)."""

    def release(self, backing: Backing) -> None:
        """Release a reference to physical memory (cuMemRelease)."""

    def map(self, ptr: Ptr, backing: Backing, size_bytes: int) -> None:
        """Map physical memory into a reservation, accessible to this device only (cuMemMap)."""

    def unmap(self, ptr: Ptr, size_bytes: int) -> None:
        """Remove the mappings in a range (cuMemUnmap). Raises CUDA_ERROR_INVALID_VALUE if one is split."""

    def set_access(self, ptr: Ptr, size_bytes: int, ordinal: int, *, allowed: bool = True) -> None:
        """Allow or deny a device to read and write whole mappings (cuMemSetAccess)."""

    def has_access(self, ptr: Ptr, ordinal: int) -> bool:
        """Return whether a device may read and write the mapping at an address (cuMemGetAccess)."""


class Ipc(Protocol):
    """Memory sharing between processes (CUDA Driver API, cuIpc* and "Virtual Memory Management").

    A handle can be opened or imported only while the process that exported it runs.
    """

    @property
    def process(self) -> ProcessId:
        """The id of this process, which differs in the child of a fork."""

    def ipc_handle(self, ptr: Ptr) -> bytes:
        """Return the handle of a ``malloc`` allocation (cuIpcGetMemHandle), which is always the same."""

    def ipc_open(self, handle: bytes) -> Ptr:
        """Map another process's allocation (cuIpcOpenMemHandle); repeated calls return the same address."""

    def ipc_close(self, ptr: Ptr) -> None:
        """Undo one ``ipc_open`` (cuIpcCloseMemHandle). The memory is unmapped when all of them are undone."""

    def handle_kinds(self) -> tuple[HandleKind, ...]:
        """Return the kinds of shareable handles that the device supports, preferred ones first."""

    def export(self, backing: Backing) -> ShareableHandle:
        """Export physical memory, which stays allocated until ``revoke`` (cuMemExportToShareableHandle).

        Raises Unsupported if the memory was created without a kind of handle.
        """

    def revoke(self, handle: ShareableHandle) -> None:
        """Undo an ``export`` of this process. A second call has no effect."""

    def import_backing(self, handle: ShareableHandle) -> Backing:
        """Return a reference to another process's memory (cuMemImportFromShareableHandle)."""


class Streams(Protocol):
    """Streams and events (CUDA Driver API, "Stream Management", "Event Management").

    Ids are never reused; the id of a destroyed object raises CUDA_ERROR_INVALID_HANDLE.
    """

    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        """Create a stream (cuStreamCreateWithPriority); a blocking one synchronizes with LEGACY.

        Streams with a lower ``priority`` run first; the value is clamped to the range of the device.
        """

    def priority(self, stream: Stream) -> int:
        """Return the priority of a stream (cuStreamGetPriority)."""

    def destroy_stream(self, stream: Stream) -> None:
        """Destroy a stream; its enqueued work still completes (cuStreamDestroy)."""

    def query_stream(self, stream: Stream) -> bool:
        """Return whether all work of a stream has completed (cuStreamQuery)."""

    def sync_stream(self, stream: Stream) -> None:
        """Wait for all work of a stream (cuStreamSynchronize)."""

    def sync(self) -> None:
        """Wait for all work of the device's context (cuCtxSynchronize)."""

    def event(self, *, timing: bool = True) -> Event:
        """Create an event (cuEventCreate)."""

    def destroy_event(self, event: Event) -> None:
        """Destroy an event; waits that are already enqueued stay valid (cuEventDestroy)."""

    def record(self, event: Event, stream: Stream) -> None:
        """Record the current work of a stream in an event (cuEventRecord)."""

    def wait(self, stream: Stream, event: Event) -> None:
        """Make later work of a stream wait for the last record of an event (cuStreamWaitEvent)."""

    def query_event(self, event: Event) -> bool:
        """Return whether the recorded work has completed, or nothing was recorded (cuEventQuery)."""

    def sync_event(self, event: Event) -> None:
        """Wait for the work that an event has recorded (cuEventSynchronize)."""

    def elapsed(self, begin: Event, end: Event) -> float:
        """Return the seconds between two completed events with timing (cuEventElapsedTime)."""

    def relaxed(self) -> AbstractContextManager[None]:
        """Allow this thread to allocate during a stream capture (cuThreadExchangeStreamCaptureMode)."""


class Kernels(Protocol):
    """Kernels from CUDA C++ (NVRTC; CUDA Driver API, "Module Management", "Execution Control")."""

    def compile(self, source: str) -> bytes:
        """Compile CUDA C++ for this device; return the image for ``load`` (nvrtcCompileProgram)."""

    def load(self, image: bytes) -> Module:
        """Load a cubin, fatbin or PTX image (cuModuleLoadData)."""

    def unload(self, module: Module) -> None:
        """Unload a module and its kernels (cuModuleUnload)."""

    def kernel(self, module: Module, name: str) -> Kernel:
        """Return a kernel by its mangled name, or its plain name if ``extern "C"`` (cuModuleGetFunction)."""

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
        """Enqueue a kernel launch (cuLaunchKernel).

        Raises CUDA_ERROR_INVALID_VALUE if the number or sizes of ``args`` do not match the kernel.
        """


class Graphs(Protocol):
    """Stream capture and graphs (CUDA Driver API, "Stream Management", "Graph Management").

    Captured work does not run. Captures are thread-local: their rules restrict only the capturing thread.
    """

    def capture_begin(self, stream: Stream) -> None:
        """Begin to capture a stream into a graph (cuStreamBeginCapture)."""

    def capture_end(self, stream: Stream) -> Graph:
        """End a capture in the stream that began it (cuStreamEndCapture).

        Raises CUDA_ERROR_STREAM_CAPTURE_INVALIDATED or CUDA_ERROR_STREAM_CAPTURE_UNJOINED.
        """

    def instantiate(self, graph: Graph) -> GraphExec:
        """Return an executable of a graph (cuGraphInstantiate)."""

    def graph_update(self, executable: GraphExec, graph: Graph) -> None:
        """Apply the parameters of a graph with the same topology to an executable (cuGraphExecUpdate).

        Raises CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, with the executable unchanged, if the topology differs.
        """

    def graph_upload(self, executable: GraphExec, stream: Stream) -> None:
        """Enqueue the upload of an executable to the device (cuGraphUpload)."""

    def graph_launch(self, graph: GraphExec, stream: Stream) -> None:
        """Enqueue a launch of an executable; its launches never overlap (cuGraphLaunch)."""

    def destroy_graph(self, graph: Graph) -> None:
        """Destroy a graph; its executables stay valid (cuGraphDestroy)."""

    def destroy_graph_exec(self, graph: GraphExec) -> None:
        """Destroy an executable (cuGraphExecDestroy)."""

    def count_nodes(self, graph: Graph) -> int:
        """Return the number of nodes of a graph, excluding those of child graphs (cuGraphGetNodes)."""

    def capture_id(self, stream: Stream) -> int | None:
        """Return the unique id of a stream's valid capture, or None (cuStreamGetCaptureInfo)."""

    def capture_dependencies(self, stream: Stream) -> tuple[GraphNode, ...]:
        """Return the dependencies of the next captured node (cuStreamGetCaptureInfo)."""

    def dependencies(self, node: GraphNode) -> tuple[GraphNode, ...]:
        """Return the dependencies of a node of an existing graph (cuGraphNodeGetDependencies)."""


class ComputeDevice(Memory, Streams, Kernels, Protocol):
    """A device that runs kernels and copies memory, as most measurements need."""


class Gpu(DeviceInfo, Memory, Peers, VirtualMemory, Ipc, Streams, Kernels, Graphs, Protocol):
    """A device with all protocols, open until ``close``."""

    def blas(self, library: Library = "cublaslt") -> Blas:
        """Open a GEMM library. Raises MissingDependency if it is not installed."""

    def collectives(self, library: CollectiveLibraryName = "nccl") -> CollectiveLibrary:
        """Open a library of collective operations. Raises MissingDependency if it is not installed."""

    def array_library(self, name: ArrayLibraryName) -> OperationLibrary:
        """Open torch or CuPy for operations on arrays. Raises MissingDependency if it is not installed."""

    def storage(self) -> Storage:
        """Open a library for transfers between files and device memory. Raises MissingDependency."""

    def close(self) -> None:
        """Wait for all work and release all resources. A second call has no effect."""


# --- transfers between files and device memory -----------------------------------------------------

# How a library moves the data. direct: from the drive to device memory (GPUDirect Storage); compatibility:
# through host memory, as cuFile does without its kernel driver or for file systems that do not support it.
StoragePath: TypeAlias = Literal["direct", "compatibility", "unknown"]


class StorageFile(Protocol):
    """An open file. Any thread may transfer; offsets and sizes are multiples of 4096 bytes.

    ``buffer`` is the address of device memory; if the memory is registered, the address at which it was
    registered.
    """

    def read(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Read bytes of the file to device memory, and wait. Raises StorageError if that fails."""

    def write(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Write device memory to the file, and wait. Raises StorageError if that fails."""

    def close(self) -> None:
        """Close the file. A second call does nothing."""


class Storage(Protocol):
    """A library that transfers between files and device memory."""

    @property
    def version(self) -> str:
        """Version of the library."""

    def open(self, path: Path, *, writable: bool, direct: bool) -> StorageFile:
        """Open a file; ``direct`` opens it with O_DIRECT. Raises Unsupported if the library refuses that."""

    def register(self, buffer: Ptr, size_bytes: int) -> bool:
        """Register device memory until ``close`` for direct transfers; return whether that worked."""

    def path_used(self) -> StoragePath:
        """Return how the transfers so far were performed."""

    def close(self) -> None:
        """Release the library. A second call does nothing."""


# --- an allocator, as the adapters in cudakit.arrays.plugs connect it to other libraries -------------


class Allocator(Protocol):
    """A stream-ordered allocator. Streams are driver handles; 0 is the default stream.

    If memory is freed on another stream than it was allocated on, it is reused only after the work of both
    streams.
    """

    @property
    def device(self) -> int:
        """The CUDA device index."""

    def alloc(self, size_bytes: int, stream: int = 0) -> Ptr:
        """Allocate memory for use on a stream; 0 bytes return address 0.

        If no memory is left, raises an error that is both a CudaError and a MemoryError.
        """

    def free(self, ptr: int, stream: int | None = None) -> None:
        """Free memory after the enqueued work of a stream; None is the stream of its allocation."""

    def memory_info(self) -> MemoryInfo:
        """Return the free and total bytes of the device."""

    def ipc_handle(self, ptr: int) -> IpcHandle:
        """Return a handle with which another process can open an allocation."""

    def statistics(self) -> dict[str, int]:
        """Return the allocator's counters, by the names of ``torch.cuda.memory_stats``."""

    def snapshot(self) -> dict[str, Any]:
        """Return segments, blocks and trace in the format of ``torch.cuda.memory._snapshot``."""
