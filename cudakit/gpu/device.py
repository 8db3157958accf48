"""A device as one object: every call of its parts, under the part's own name for it.

Code takes a device, or the narrow protocols of it that it calls, as one argument; the parts implement one
protocol each. The calls are documented in ``cudakit.gpu.api``.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from cudakit.gpu.api import (
    Argument,
    Backing,
    Dim3,
    Event,
    Exported,
    Graph,
    GraphExec,
    GraphNode,
    Graphs,
    HandleKind,
    Ipc,
    Kernel,
    Kernels,
    Memory,
    MemoryInfo,
    Module,
    Peers,
    ProcessId,
    Ptr,
    Stream,
    Streams,
    VirtualMemory,
)


class DeviceContext(Protocol):
    """The context that the parts of a device share."""

    @property
    def name(self) -> str:
        """The name of the device in messages."""

    @property
    def ordinal(self) -> int:
        """CUDA's number of the device."""

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""


class Device:
    """The parts of a device, and their calls."""

    context: DeviceContext
    memory: Memory
    peers: Peers
    virtual: VirtualMemory
    ipc: Ipc
    streams: Streams
    kernels: Kernels
    graphs: Graphs

    @property
    def name(self) -> str:
        """The name of this device in messages."""
        return self.context.name

    @property
    def ordinal(self) -> int:
        """CUDA's number of this device."""
        return self.context.ordinal

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.context.closed

    def memory_info(self) -> MemoryInfo:
        return self.memory.memory_info()

    def malloc(self, size_bytes: int, stream: Stream | None = None) -> Ptr:
        return self.memory.malloc(size_bytes, stream)

    def free(self, ptr: Ptr, stream: Stream | None = None) -> None:
        self.memory.free(ptr, stream)

    def host_malloc(self, size_bytes: int, *, pinned: bool = True) -> Ptr:
        return self.memory.host_malloc(size_bytes, pinned=pinned)

    def host_free(self, ptr: Ptr) -> None:
        self.memory.host_free(ptr)

    def host_register(self, ptr: Ptr, *, threads: int = 1) -> None:
        self.memory.host_register(ptr, threads=threads)

    def host_unregister(self, ptr: Ptr) -> None:
        self.memory.host_unregister(ptr)

    def host_view(self, ptr: Ptr, size_bytes: int) -> memoryview:
        return self.memory.host_view(ptr, size_bytes)

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        self.memory.copy(dst, src, size_bytes, stream)

    def fill(self, ptr: Ptr, value: int, size_bytes: int, stream: Stream) -> None:
        self.memory.fill(ptr, value, size_bytes, stream)

    def can_access_peer(self, ordinal: int) -> bool:
        return self.peers.can_access_peer(ordinal)

    def peer_malloc(self, ordinal: int, size_bytes: int) -> Ptr:
        return self.peers.peer_malloc(ordinal, size_bytes)

    def peer_free(self, ordinal: int, ptr: Ptr) -> None:
        self.peers.peer_free(ordinal, ptr)

    def enable_peer(self, ordinal: int) -> None:
        self.peers.enable_peer(ordinal)

    def granularity(self) -> int:
        return self.virtual.granularity()

    def reserve(self, size_bytes: int) -> Ptr:
        return self.virtual.reserve(size_bytes)

    def unreserve(self, ptr: Ptr, size_bytes: int) -> None:
        self.virtual.unreserve(ptr, size_bytes)

    def create(self, size_bytes: int, handle: HandleKind | None = None) -> Backing:
        return self.virtual.create(size_bytes, handle)

    def backing_at(self, ptr: Ptr) -> Backing:
        return self.virtual.backing_at(ptr)

    def release(self, backing: Backing) -> None:
        self.virtual.release(backing)

    def map(self, ptr: Ptr, backing: Backing, size_bytes: int) -> None:
        self.virtual.map(ptr, backing, size_bytes)

    def unmap(self, ptr: Ptr, size_bytes: int) -> None:
        self.virtual.unmap(ptr, size_bytes)

    def set_access(self, ptr: Ptr, size_bytes: int, ordinal: int, *, allowed: bool = True) -> None:
        self.virtual.set_access(ptr, size_bytes, ordinal, allowed=allowed)

    def has_access(self, ptr: Ptr, ordinal: int) -> bool:
        return self.virtual.has_access(ptr, ordinal)

    @property
    def process(self) -> ProcessId:
        return self.ipc.process

    def ipc_handle(self, ptr: Ptr) -> bytes:
        return self.ipc.ipc_handle(ptr)

    def ipc_open(self, handle: bytes) -> Ptr:
        return self.ipc.ipc_open(handle)

    def ipc_close(self, ptr: Ptr) -> None:
        self.ipc.ipc_close(ptr)

    def handle_kinds(self) -> tuple[HandleKind, ...]:
        return self.ipc.handle_kinds()

    def export(self, backing: Backing) -> Exported:
        return self.ipc.export(backing)

    def withdraw(self, exported: Exported) -> None:
        self.ipc.withdraw(exported)

    def import_backing(self, exported: Exported) -> Backing:
        return self.ipc.import_backing(exported)

    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        return self.streams.stream(blocking=blocking, priority=priority)

    def priority(self, stream: Stream) -> int:
        return self.streams.priority(stream)

    def destroy_stream(self, stream: Stream) -> None:
        self.streams.destroy_stream(stream)

    def query_stream(self, stream: Stream) -> bool:
        return self.streams.query_stream(stream)

    def sync_stream(self, stream: Stream) -> None:
        self.streams.sync_stream(stream)

    def sync(self) -> None:
        self.streams.sync()

    def event(self, *, timing: bool = True) -> Event:
        return self.streams.event(timing=timing)

    def destroy_event(self, event: Event) -> None:
        self.streams.destroy_event(event)

    def record(self, event: Event, stream: Stream) -> None:
        self.streams.record(event, stream)

    def wait(self, stream: Stream, event: Event) -> None:
        self.streams.wait(stream, event)

    def query_event(self, event: Event) -> bool:
        return self.streams.query_event(event)

    def sync_event(self, event: Event) -> None:
        self.streams.sync_event(event)

    def elapsed(self, begin: Event, end: Event) -> float:
        return self.streams.elapsed(begin, end)

    def relaxed(self) -> AbstractContextManager[None]:
        return self.streams.relaxed()

    def compile(self, source: str) -> bytes:
        return self.kernels.compile(source)

    def load(self, image: bytes) -> Module:
        return self.kernels.load(image)

    def unload(self, module: Module) -> None:
        self.kernels.unload(module)

    def kernel(self, module: Module, name: str) -> Kernel:
        return self.kernels.kernel(module, name)

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
        self.kernels.launch(kernel, grid, block, args, stream, shared_bytes=shared_bytes)

    def capture_begin(self, stream: Stream) -> None:
        self.graphs.capture_begin(stream)

    def capture_end(self, stream: Stream) -> Graph:
        return self.graphs.capture_end(stream)

    def instantiate(self, graph: Graph) -> GraphExec:
        return self.graphs.instantiate(graph)

    def graph_update(self, executable: GraphExec, graph: Graph) -> None:
        self.graphs.graph_update(executable, graph)

    def graph_upload(self, executable: GraphExec, stream: Stream) -> None:
        self.graphs.graph_upload(executable, stream)

    def graph_launch(self, graph: GraphExec, stream: Stream) -> None:
        self.graphs.graph_launch(graph, stream)

    def destroy_graph(self, graph: Graph) -> None:
        self.graphs.destroy_graph(graph)

    def destroy_graph_exec(self, graph: GraphExec) -> None:
        self.graphs.destroy_graph_exec(graph)

    def count_nodes(self, graph: Graph) -> int:
        return self.graphs.count_nodes(graph)

    def capture_id(self, stream: Stream) -> int | None:
        return self.graphs.capture_id(stream)

    def capture_ends(self, stream: Stream) -> tuple[GraphNode, ...]:
        return self.graphs.capture_ends(stream)

    def dependencies(self, node: GraphNode) -> tuple[GraphNode, ...]:
        return self.graphs.dependencies(node)
