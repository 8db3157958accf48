"""The base class of devices, which delegates each method to the component that implements its protocol.

The protocols of ``cudakit.gpu.api`` document the methods.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Callable, MutableMapping, Sequence
from inspect import getattr_static
from itertools import count
from pathlib import Path
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

import numpy as np

from cudakit.errors import CudakitError, EnvironmentUnusable, Unsupported
from cudakit.gpu.api import (
    Argument,
    DescriptorHandle,
    Graphs,
    Ipc,
    Kernels,
    Memory,
    Peers,
    ProcessId,
    Streams,
    VirtualMemory,
)
from cudakit.gpu.driver_errors import Status, cuda_error

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


# --- Checks of ids, sizes and kernel arguments, for the real and the simulated device --------------

_T = TypeVar("_T")
_Ptr = TypeVar("_Ptr", bound=int)

_POINTER_BYTES = 8


class Handles(Generic[_T]):
    """Objects of one kind, by id. Ids are never reused."""

    def __init__(self, kind: str, *, first: int = 1) -> None:
        self._kind = kind
        self._ids = count(first)  # atomic, so that threads need no lock
        self._objects: dict[int, _T] = {}

    def __len__(self) -> int:
        return len(self._objects)

    def add(self, new_object: _T) -> int:
        """Store an object, and return its id."""
        id_ = next(self._ids)
        self._objects[id_] = new_object
        return id_

    def make(self, factory: Callable[[int], _T]) -> _T:
        """Create, store and return an object that is constructed with its id."""
        id_ = next(self._ids)
        new_object = self._objects[id_] = factory(id_)
        return new_object

    def __getitem__(self, id_: int) -> _T:
        try:
            return self._objects[id_]
        except KeyError:
            raise self._unknown_id_error(id_) from None

    def remove(self, id_: int) -> _T:
        """Remove and return an object. Raises CUDA_ERROR_INVALID_HANDLE for an unknown id."""
        try:
            return self._objects.pop(id_)
        except KeyError:
            raise self._unknown_id_error(id_) from None

    def discard(self, predicate: Callable[[_T], bool]) -> None:
        """Remove the objects for which a predicate is true."""
        for id_ in [
            id_ for id_, stored_object in self._objects.items() if predicate(stored_object)
        ]:
            self._objects.pop(id_, None)

    def clear(self) -> list[_T]:
        """Remove and return all objects, the newest first."""
        objects = [*reversed(self._objects.values())]
        self._objects.clear()
        return objects

    def _unknown_id_error(self, id_: int) -> Exception:
        return cuda_error(
            Status.INVALID_HANDLE,
            detail=f"{self._kind} {id_} does not exist on this device, or was destroyed",
        )


def check_size(size_bytes: int) -> None:
    """Raise CUDA_ERROR_INVALID_VALUE unless the size of an allocation is positive."""
    if size_bytes <= 0:
        raise cuda_error(
            Status.INVALID_VALUE, detail=f"{size_bytes} bytes requested; the size must be positive"
        )


def pop_allocation(allocations: MutableMapping[_Ptr, _T], ptr: _Ptr, detail: str) -> _T:
    """Remove and return an allocation. Raises CUDA_ERROR_INVALID_VALUE if none begins at ``ptr``."""
    try:
        return allocations.pop(ptr)
    except KeyError:
        raise cuda_error(
            Status.INVALID_VALUE, detail=f"{detail} begins at {ptr:#x}; it may already be freed"
        ) from None


def check_arguments(name: str, sizes: tuple[int, ...] | None, args: Sequence[Argument]) -> None:
    """Raise CUDA_ERROR_INVALID_VALUE unless arguments have the sizes of the kernel's parameters.

    The driver copies the declared size of each parameter, not the size of the argument. ``sizes`` are the
    parameter sizes in bytes; None if they are unknown.
    """
    argument_sizes = tuple([_argument_bytes(arg) for arg in args])
    if sizes is not None and argument_sizes != sizes:
        raise cuda_error(
            Status.INVALID_VALUE,
            detail=f"{name} takes arguments of {sizes} bytes, got {argument_sizes}",
        )


def _argument_bytes(arg: Argument) -> int:
    if isinstance(arg, np.generic):
        return arg.itemsize
    if isinstance(arg, int):
        return _POINTER_BYTES
    raise TypeError(
        f"kernel argument {arg!r} has no fixed size: pass an address (Ptr) or a numpy scalar"
    )


# --- Duplication of file descriptors from other processes, to import their physical memory ---------
#
# Uses pidfd_open(2) and pidfd_getfd(2), as PyTorch does for expandable segments
# (c10/cuda/CUDACachingAllocator.cpp, ExpandableSegment::fromShared).

# Number of the system call pidfd_getfd, the same on all architectures of CUDA
# (include/uapi/asm-generic/unistd.h).
_PIDFD_GETFD = 438
# Index of starttime, field 22 of /proc/PID/stat, among the fields after the process name, field 2
# (proc_pid_stat(5)).
_START_TIME = 22 - 3


def this_process() -> ProcessId:
    """Return the id of this process."""
    return ProcessId(os.getpid(), _start_time(os.getpid()) or 0)


def duplicate(
    descriptor: DescriptorHandle, *, pidfd_getfd: Callable[[int, int], int] | None = None
) -> int:
    """Return a duplicate of another process's file descriptor, which the caller must close.

    ``pidfd_getfd`` replaces the system call. Raises EnvironmentUnusable if the process has ended, has closed
    the descriptor, or denies access; Unsupported if the system lacks pidfd_open.
    """
    process, copy_descriptor = descriptor.process, pidfd_getfd or _pidfd_getfd
    if not hasattr(os, "pidfd_open"):
        raise Unsupported(
            "this system cannot pass file descriptors between processes (no pidfd_open)",
            hint="share memory without expandable segments: expandable_segments:False",
        )
    try:
        pidfd = os.pidfd_open(process.pid)
        try:
            # The open pidfd prevents reuse of the pid.
            if _start_time(process.pid) != process.started:
                raise ended_error(process)
            return copy_descriptor(pidfd, descriptor.number)
        finally:
            os.close(pidfd)
    except OSError as error:
        raise _copy_error(descriptor, error) from error


def ended_error(process: ProcessId) -> CudakitError:
    """Return the error for a process that has ended."""
    return EnvironmentUnusable(
        f"process {process.pid}, which shared the memory, has ended or is not visible",
        hint="open the memory while that process runs; containers must share a PID namespace (--pid)",
    )


def closed_error(descriptor: DescriptorHandle) -> CudakitError:
    """Return the error for a descriptor that its process has closed."""
    return EnvironmentUnusable(
        f"process {descriptor.process.pid} has freed the memory that it shared as file descriptor "
        f"{descriptor.number}",
        hint="keep the memory allocated until all other processes have opened it",
    )


def _copy_error(descriptor: DescriptorHandle, error: OSError) -> CudakitError:
    process = descriptor.process
    if error.errno == errno.ESRCH:
        return ended_error(process)
    if error.errno == errno.EBADF:
        return closed_error(descriptor)
    source = f"file descriptor {descriptor.number} of process {process.pid}"
    return EnvironmentUnusable(
        f"process {os.getpid()} cannot copy {source}: {os.strerror(error.errno or 0)}",
        hint=_errno_hint(error.errno),
    )


def _errno_hint(error_number: int | None) -> str:
    """Return a hint for an errno of pidfd_getfd(2), which needs permission to attach by ptrace."""
    alternative = "share memory without expandable segments: expandable_segments:False"
    if error_number in (errno.EPERM, errno.EACCES):
        return (
            "run both processes as the same user, in a container with --cap-add=SYS_PTRACE, and set "
            f"kernel.yama.ptrace_scope to 0; or {alternative}"
        )
    if error_number == errno.ENOSYS:
        return (
            f"pidfd_getfd needs Linux 5.6, and a container that permits the call; or {alternative}"
        )
    return f"allow more open files (ulimit -n); or {alternative}"


def _start_time(pid: int) -> int | None:
    """Return the start time of a process in clock ticks since boot; None if it is not visible."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return int(stat.rpartition(")")[2].split()[_START_TIME])


def _pidfd_getfd(pidfd: int, number: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    duplicate_descriptor: int = libc.syscall(_PIDFD_GETFD, pidfd, number, 0)
    if duplicate_descriptor < 0:
        error_number = ctypes.get_errno()
        raise OSError(error_number, os.strerror(error_number))
    return duplicate_descriptor
