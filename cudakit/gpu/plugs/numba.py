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
from cudakit.gpu.plugs.devices import Devices

# The stream that Numba's memory is allocated on: none of anybody's, so that each free is seen as a use by
# another stream. Numba does not say which stream it allocates for, nor which ones used the memory.
NOBODYS = -1

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
    """Return a source that has these allocators. Raises UsageError for a device that has none of them."""
    return Devices(allocators).__getitem__


def manager_of(cuda: Any, source: Callable[[int], Allocator], *, default_stream_only: bool) -> type:
    """Make the class from what ``numba.cuda`` has."""
    at_alloc, at_free = (0, None) if default_stream_only else (NOBODYS, LEGACY)

    class MemoryManager(cuda.HostOnlyCUDAMemoryManager):  # type: ignore[misc,unused-ignore]
        """Memory of one context from a cudakit allocator, which is its ``allocator``."""

        @property
        def interface_version(self) -> int:
            return _INTERFACE

        @cached_property
        def allocator(self) -> Allocator:
            # Not before it is used: Numba makes a manager without a context, to ask for its version.
            return source(self.context.device.id)

        def initialize(self) -> None:
            pass

        def memalloc(self, size: int) -> Any:
            allocator = self.allocator
            ptr = allocator.alloc(size, at_alloc)
            # The name is looked up when it is called: it changes as the interpreter ends.
            finalizer = partial(_free, allocator, ptr, at_free)
            context = weakref.proxy(self.context)
            return cuda.MemoryPointer(context, c_void_p(ptr), size, finalizer=finalizer)

        def get_memory_info(self) -> Any:
            info = self.allocator.memory_info()
            return cuda.MemoryInfo(free=info.free_bytes, total=info.total_bytes)

        def get_ipc_handle(self, memory: Any) -> Any:
            """Return what Numba opens elsewhere: a handle of the segment, and where the memory is in it.

            Raises Unsupported in an expandable segment: Numba opens memory by cuIpcOpenMemHandle alone.
            """
            found = self.allocator.ipc_handle(memory.device_pointer_value or 0)
            source = self.context.device.get_device_identity()
            return handle_class(cuda)(
                memory, _driver_handle(found.data), memory.size, source, found.offset_bytes
            )

    return MemoryManager


def handle_class(cuda: Any) -> type:
    """Return Numba's class of handles, as one that can be pickled.

    Numba's own asks the handle for its bytes (``reserved``), which the bindings of CUDA do not show in every
    version.
    """

    class IpcHandle(cuda.IpcHandle):  # type: ignore[misc,unused-ignore]
        """A handle of Numba's, which is one again where it is unpickled."""

        def __reduce__(self) -> Any:
            data = string_at(self.handle.getPtr(), HANDLE_BYTES)
            return opened_elsewhere, (data, self.size, self.source_info, self.offset)

    return IpcHandle


def opened_elsewhere(data: bytes, size_bytes: int, source: Any, offset_bytes: int) -> Any:
    """Make Numba's handle of what another process sent. It needs no allocator of cudakit."""
    from numba import cuda

    return handle_class(cuda)(None, _driver_handle(data), size_bytes, source, offset_bytes)


def _driver_handle(data: bytes) -> Any:
    from cuda.bindings.driver import CUipcMemHandle  # type: ignore[import-untyped]

    handle = CUipcMemHandle()
    memmove(handle.getPtr(), data, HANDLE_BYTES)
    return handle


def _free(allocator: Allocator, ptr: int, stream: int | None) -> None:
    allocator.free(ptr, stream)
