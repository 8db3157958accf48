"""The base class of devices: one object with the methods of all of its parts, under the same names.

Each part implements one protocol of ``cudakit.gpu.api``, which documents the methods. Functions take the
device as one argument, annotated with the protocols that they call.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import getattr_static
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from cudakit.gpu.api import (
    Graphs,
    Ipc,
    Kernels,
    Memory,
    Peers,
    ProcessId,
    Streams,
    VirtualMemory,
)

_P = ParamSpec("_P")
_R = TypeVar("_R")


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


class _Call(Generic[_P, _R]):
    """A descriptor that returns a method of a part, and stores it on the device at first use."""

    def __init__(self, method: Callable[Concatenate[Any, _P], _R]) -> None:
        protocol, self._name = method.__qualname__.split(".")
        self._part = _PARTS[protocol]
        self.__doc__ = method.__doc__

    def __get__(self, device: Device, owner: type[Device]) -> Callable[_P, _R]:
        bound: Callable[_P, _R] = getattr(getattr(device, self._part), self._name)
        # An instance attribute would hide the override of a subclass that calls this method by super().
        if getattr_static(owner, self._name) is self:
            device.__dict__[self._name] = bound
        return bound


_PARTS = {
    "Memory": "memory",
    "Peers": "peers",
    "VirtualMemory": "virtual",
    "Ipc": "ipc",
    "Streams": "streams",
    "Kernels": "kernels",
    "Graphs": "graphs",
}


class Device:
    """The parts of a device, and their methods."""

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

    @property
    def process(self) -> ProcessId:
        """This process; after a fork, the child."""
        return self.ipc.process

    memory_info = _Call(Memory.memory_info)
    malloc = _Call(Memory.malloc)
    free = _Call(Memory.free)
    host_malloc = _Call(Memory.host_malloc)
    host_free = _Call(Memory.host_free)
    host_register = _Call(Memory.host_register)
    host_unregister = _Call(Memory.host_unregister)
    host_view = _Call(Memory.host_view)
    copy = _Call(Memory.copy)
    fill = _Call(Memory.fill)

    can_access_peer = _Call(Peers.can_access_peer)
    peer_malloc = _Call(Peers.peer_malloc)
    peer_free = _Call(Peers.peer_free)
    enable_peer = _Call(Peers.enable_peer)

    granularity = _Call(VirtualMemory.granularity)
    reserve = _Call(VirtualMemory.reserve)
    unreserve = _Call(VirtualMemory.unreserve)
    create = _Call(VirtualMemory.create)
    backing_at = _Call(VirtualMemory.backing_at)
    release = _Call(VirtualMemory.release)
    map = _Call(VirtualMemory.map)
    unmap = _Call(VirtualMemory.unmap)
    set_access = _Call(VirtualMemory.set_access)
    has_access = _Call(VirtualMemory.has_access)

    ipc_handle = _Call(Ipc.ipc_handle)
    ipc_open = _Call(Ipc.ipc_open)
    ipc_close = _Call(Ipc.ipc_close)
    handle_kinds = _Call(Ipc.handle_kinds)
    export = _Call(Ipc.export)
    withdraw = _Call(Ipc.withdraw)
    import_backing = _Call(Ipc.import_backing)

    stream = _Call(Streams.stream)
    priority = _Call(Streams.priority)
    destroy_stream = _Call(Streams.destroy_stream)
    query_stream = _Call(Streams.query_stream)
    sync_stream = _Call(Streams.sync_stream)
    sync = _Call(Streams.sync)
    event = _Call(Streams.event)
    destroy_event = _Call(Streams.destroy_event)
    record = _Call(Streams.record)
    wait = _Call(Streams.wait)
    query_event = _Call(Streams.query_event)
    sync_event = _Call(Streams.sync_event)
    elapsed = _Call(Streams.elapsed)
    relaxed = _Call(Streams.relaxed)

    compile = _Call(Kernels.compile)
    load = _Call(Kernels.load)
    unload = _Call(Kernels.unload)
    kernel = _Call(Kernels.kernel)
    launch = _Call(Kernels.launch)

    capture_begin = _Call(Graphs.capture_begin)
    capture_end = _Call(Graphs.capture_end)
    instantiate = _Call(Graphs.instantiate)
    graph_update = _Call(Graphs.graph_update)
    graph_upload = _Call(Graphs.graph_upload)
    graph_launch = _Call(Graphs.graph_launch)
    destroy_graph = _Call(Graphs.destroy_graph)
    destroy_graph_exec = _Call(Graphs.destroy_graph_exec)
    count_nodes = _Call(Graphs.count_nodes)
    capture_id = _Call(Graphs.capture_id)
    capture_ends = _Call(Graphs.capture_ends)
    dependencies = _Call(Graphs.dependencies)
