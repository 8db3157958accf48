"""The base class of devices, which delegates each method to the component that implements its protocol.

The protocols of ``cudakit.gpu.api`` document the methods.
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
    """The context that the components of a device share."""

    @property
    def name(self) -> str:
        """The device name in messages, such as "cuda:0"."""

    @property
    def ordinal(self) -> int:
        """The CUDA device index."""

    @property
    def closed(self) -> bool:
        """Whether the device was closed."""


class _Delegate(Generic[_P, _R]):
    """A descriptor for a method of a component; caches the bound method on the device at first use."""

    def __init__(self, method: Callable[Concatenate[Any, _P], _R]) -> None:
        protocol, self._name = method.__qualname__.split(".")
        self._component = _COMPONENTS[protocol]
        self.__doc__ = method.__doc__

    def __get__(self, device: Device, owner: type[Device]) -> Callable[_P, _R]:
        bound: Callable[_P, _R] = getattr(getattr(device, self._component), self._name)
        # If a subclass overrides the method and calls super(), a cached attribute would hide the override.
        if getattr_static(owner, self._name) is self:
            device.__dict__[self._name] = bound
        return bound


_COMPONENTS = {
    "Memory": "memory",
    "Peers": "peers",
    "VirtualMemory": "virtual",
    "Ipc": "ipc",
    "Streams": "streams",
    "Kernels": "kernels",
    "Graphs": "graphs",
}


class Device:
    """A device, whose methods are those of its components."""

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
        """The device name in messages, such as "cuda:0"."""
        return self.context.name

    @property
    def ordinal(self) -> int:
        """The CUDA device index."""
        return self.context.ordinal

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called."""
        return self.context.closed

    @property
    def process(self) -> ProcessId:
        """The id of this process, which differs in the child of a fork."""
        return self.ipc.process

    memory_info = _Delegate(Memory.memory_info)
    malloc = _Delegate(Memory.malloc)
    free = _Delegate(Memory.free)
    host_malloc = _Delegate(Memory.host_malloc)
    host_free = _Delegate(Memory.host_free)
    host_register = _Delegate(Memory.host_register)
    host_unregister = _Delegate(Memory.host_unregister)
    pin = _Delegate(Memory.pin)
    unpin = _Delegate(Memory.unpin)
    host_view = _Delegate(Memory.host_view)
    copy = _Delegate(Memory.copy)
    fill = _Delegate(Memory.fill)

    can_access_peer = _Delegate(Peers.can_access_peer)
    peer_malloc = _Delegate(Peers.peer_malloc)
    peer_free = _Delegate(Peers.peer_free)
    enable_peer = _Delegate(Peers.enable_peer)

    granularity = _Delegate(VirtualMemory.granularity)
    reserve = _Delegate(VirtualMemory.reserve)
    unreserve = _Delegate(VirtualMemory.unreserve)
    create = _Delegate(VirtualMemory.create)
    backing_at = _Delegate(VirtualMemory.backing_at)
    release = _Delegate(VirtualMemory.release)
    map = _Delegate(VirtualMemory.map)
    unmap = _Delegate(VirtualMemory.unmap)
    set_access = _Delegate(VirtualMemory.set_access)
    has_access = _Delegate(VirtualMemory.has_access)

    ipc_handle = _Delegate(Ipc.ipc_handle)
    ipc_open = _Delegate(Ipc.ipc_open)
    ipc_close = _Delegate(Ipc.ipc_close)
    handle_kinds = _Delegate(Ipc.handle_kinds)
    export = _Delegate(Ipc.export)
    revoke = _Delegate(Ipc.revoke)
    import_backing = _Delegate(Ipc.import_backing)

    stream = _Delegate(Streams.stream)
    priority = _Delegate(Streams.priority)
    destroy_stream = _Delegate(Streams.destroy_stream)
    query_stream = _Delegate(Streams.query_stream)
    sync_stream = _Delegate(Streams.sync_stream)
    sync = _Delegate(Streams.sync)
    event = _Delegate(Streams.event)
    destroy_event = _Delegate(Streams.destroy_event)
    record = _Delegate(Streams.record)
    wait = _Delegate(Streams.wait)
    query_event = _Delegate(Streams.query_event)
    sync_event = _Delegate(Streams.sync_event)
    elapsed = _Delegate(Streams.elapsed)
    relaxed = _Delegate(Streams.relaxed)

    compile = _Delegate(Kernels.compile)
    load = _Delegate(Kernels.load)
    unload = _Delegate(Kernels.unload)
    kernel = _Delegate(Kernels.kernel)
    launch = _Delegate(Kernels.launch)

    capture_begin = _Delegate(Graphs.capture_begin)
    capture_end = _Delegate(Graphs.capture_end)
    instantiate = _Delegate(Graphs.instantiate)
    graph_update = _Delegate(Graphs.graph_update)
    graph_upload = _Delegate(Graphs.graph_upload)
    graph_launch = _Delegate(Graphs.graph_launch)
    destroy_graph = _Delegate(Graphs.destroy_graph)
    destroy_graph_exec = _Delegate(Graphs.destroy_graph_exec)
    count_nodes = _Delegate(Graphs.count_nodes)
    capture_id = _Delegate(Graphs.capture_id)
    capture_dependencies = _Delegate(Graphs.capture_dependencies)
    dependencies = _Delegate(Graphs.dependencies)
