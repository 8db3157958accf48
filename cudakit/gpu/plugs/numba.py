"""An allocator in Numba, by its External Memory Management interface (numba-cuda's documentation, "EMM")."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from ctypes import c_void_p, memmove, string_at
from functools import cached_property, partial
from typing import Any

from cudakit.errors import MissingDependency
from cudakit.gpu.api import HANDLE_BYTES, LEGACY
from cudakit.gpu.api.allocator import Allocator
from cudakit.gpu.plugs.callbacks import Devices

# The stream that Numba's memory is allocated on: no program uses it, so each free is a use by another stream.
# Numba does not tell which stream it allocates for, nor which streams used the memory.
UNUSED_STREAM = -1

_INTERFACE = 1


def memory_manager(source: Callable[[int], Allocator], *, default_stream_only: bool) -> type:
    """Return a class for numba.cuda.set_memory_manager that asks ``source`` for the allocator of a device.

    Raises MissingDependency without Numba.
    """
    try:
        from numba import cuda  # type: ignore[import-not-found,unused-ignore]
    except ImportError as error:
        raise MissingDependency(
            "numba-cuda", purpose="a memory manager for Numba", requirement="numba-cuda[cu13]"
        ) from error
    return manager_of(cuda, source, default_stream_only=default_stream_only)


def among(allocators: Iterable[Allocator]) -> Callable[[int], Allocator]:
    """Return a source of these allocators. Raises UsageError for a device without one."""
    return Devices(allocators).__getitem__


def manager_of(cuda: Any, source: Callable[[int], Allocator], *, default_stream_only: bool) -> type:
    """Make the class from the module ``numba.cuda``."""
    at_alloc, at_free = (0, None) if default_stream_only else (UNUSED_STREAM, LEGACY)

    class MemoryManager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc,unused-ignore]
        """Memory of one context from a cudakit allocator, which is its ``allocator``."""

        @property
        def interface_version(self) -> int:
            return _INTERFACE

        @cached_property
        def allocator(self) -> Allocator:
            # Lazy: Numba makes a manager without a context, to query its version.
            return source(self.context.device.id)

        def initialize(self) -> None:
            pass

        def memalloc(self, size: int) -> Any:
            allocator = self.allocator
            ptr = allocator.alloc(size, at_alloc)
            # The allocator looks up its free at the call: it is replaced when the interpreter ends.
            finalizer = partial(_free, allocator, ptr, at_free)
            context = weakref.proxy(self.context)
            return cuda.MemoryPointer(context, c_void_p(ptr), size, finalizer=finalizer)

        def get_memory_info(self) -> Any:
            info = self.allocator.memory_info()
            return cuda.MemoryInfo(free=info.free_bytes, total=info.total_bytes)

        def get_ipc_handle(self, memory: Any) -> Any:
            """Return what Numba opens elsewhere: a handle of the segment, and the offset of the memory.

            Raises Unsupported in an expandable segment: Numba opens memory by cuIpcOpenMemHandle alone.
            """
            found = self.allocator.ipc_handle(memory.device_pointer_value or 0)
            source = self.context.device.get_device_identity()
            return handle_class(cuda)(
                memory, _driver_handle(found.data), memory.size, source, found.offset_bytes
            )

    return MemoryManager


def handle_class(cuda: Any) -> type:
    """Return Numba's class of handles, in a version that can be pickled.

    Numba's own reads the bytes of the handle (``reserved``), which some versions of CUDA's bindings lack.
    """

    class IpcHandle(cuda.IpcHandle):  # type: ignore[misc,unused-ignore]
        """A handle that is unpickled as a handle."""

        def __reduce__(self) -> Any:
            data = string_at(self.handle.getPtr(), HANDLE_BYTES)
            return opened_elsewhere, (data, self.size, self.source_info, self.offset)

    return IpcHandle


def opened_elsewhere(data: bytes, size_bytes: int, source: Any, offset_bytes: int) -> Any:
    """Make Numba's handle from what another process sent, without an allocator of cudakit."""
    from numba import cuda

    return handle_class(cuda)(None, _driver_handle(data), size_bytes, source, offset_bytes)


def _driver_handle(data: bytes) -> Any:
    from cuda.bindings.driver import CUipcMemHandle  # type: ignore[import-untyped]

    handle = CUipcMemHandle()
    memmove(handle.getPtr(), data, HANDLE_BYTES)
    return handle


def _free(allocator: Allocator, ptr: int, stream: int | None) -> None:
    allocator.free(ptr, stream)
