"""A memory manager for Numba that allocates from an allocator (numba-cuda's documentation, "EMM")."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from ctypes import c_void_p, memmove, string_at
from functools import cached_property, partial
from typing import Any

from cudakit.arrays.plugs.callbacks import AllocatorByDevice
from cudakit.errors import MissingDependency
from cudakit.gpu.api import HANDLE_BYTES, LEGACY
from cudakit.gpu.api.allocator import Allocator

# The stream that Numba's memory is allocated on: Numba reports neither the stream of an allocation nor the
# streams that use it. No program uses this stream, so memory that is freed on the default stream is reused
# only after an event on that stream.
UNUSED_STREAM = -1

_INTERFACE_VERSION = 1


def memory_manager(
    find_allocator: Callable[[int], Allocator], *, default_stream_only: bool
) -> type:
    """Return a class for numba.cuda.set_memory_manager. ``find_allocator`` returns the allocator of a device.

    Raises MissingDependency without Numba.
    """
    try:
        from numba import cuda  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency(
            "numba-cuda", purpose="a memory manager for Numba", requirement="numba-cuda[cu13]"
        ) from error
    return manager_of(cuda, find_allocator, default_stream_only=default_stream_only)


def allocator_finder(allocators: Iterable[Allocator]) -> Callable[[int], Allocator]:
    """Return a function from a device index to its allocator; it raises UsageError for other indices."""
    return AllocatorByDevice(allocators).__getitem__


def manager_of(
    cuda: Any, find_allocator: Callable[[int], Allocator], *, default_stream_only: bool
) -> type:
    """Return the memory manager class, given the module ``numba.cuda``."""
    alloc_stream, free_stream = (0, None) if default_stream_only else (UNUSED_STREAM, LEGACY)

    class MemoryManager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc,unused-ignore]
        """Allocates the memory of one context from ``allocator``."""

        @property
        def interface_version(self) -> int:
            return _INTERFACE_VERSION

        @cached_property
        def allocator(self) -> Allocator:
            # The allocator is looked up at its first use, because Numba queries the interface version from a
            # manager without a context.
            return find_allocator(self.context.device.id)

        def initialize(self) -> None:
            pass

        def memalloc(self, size: int) -> Any:
            allocator = self.allocator
            ptr = allocator.alloc(size, alloc_stream)
            finalizer = partial(allocator.free, ptr, free_stream)
            context = weakref.proxy(self.context)
            return cuda.MemoryPointer(context, c_void_p(ptr), size, finalizer=finalizer)

        def get_memory_info(self) -> Any:
            memory_info = self.allocator.memory_info()
            return cuda.MemoryInfo(free=memory_info.free_bytes, total=memory_info.total_bytes)

        def get_ipc_handle(self, memory: Any) -> Any:
            """Return Numba's IPC handle: the handle of the segment and the offset of the memory in it.

            Raises Unsupported for an expandable segment: Numba can only use cuIpcOpenMemHandle.
            """
            handle = self.allocator.ipc_handle(memory.device_pointer_value or 0)
            identity = self.context.device.get_device_identity()
            return handle_class(cuda)(
                memory, _driver_handle(handle.data), memory.size, identity, handle.offset_bytes
            )

    return MemoryManager


def handle_class(cuda: Any) -> type:
    """Return a subclass of Numba's IPC handle that can be pickled.

    Numba's own class reads the attribute ``reserved`` of the handle, which some versions of cuda-bindings
    lack.
    """

    class IpcHandle(cuda.IpcHandle):  # type: ignore[misc,unused-ignore]
        """An IPC handle that is pickled as bytes."""

        def __reduce__(self) -> Any:
            data = string_at(self.handle.getPtr(), HANDLE_BYTES)
            return unpickle_handle, (data, self.size, self.source_info, self.offset)

    return IpcHandle


def unpickle_handle(data: bytes, size_bytes: int, source_info: Any, offset_bytes: int) -> Any:
    """Return Numba's IPC handle from the bytes that another process has pickled; needs no allocator."""
    from numba import cuda

    return handle_class(cuda)(None, _driver_handle(data), size_bytes, source_info, offset_bytes)


def _driver_handle(data: bytes) -> Any:
    from cuda.bindings.driver import CUipcMemHandle  # type: ignore[import-untyped]

    handle = CUipcMemHandle()
    memmove(handle.getPtr(), data, HANDLE_BYTES)
    return handle
