"""Memory of the device and pinned memory of the host, and what is copied and filled there."""

from __future__ import annotations

import ctypes

from cudakit.errors import CudaError
from cudakit.gpu.api import MemoryInfo, Ptr, Stream
from cudakit.gpu.cuda.driver import cu
from cudakit.gpu.cuda.streams import Streams
from cudakit.gpu.explain import Status, cuda_error
from cudakit.units import format_bytes


class Memory(Streams):
    """Allocations of one device, at once or in the order of a stream."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._allocated: dict[Ptr, int] = {}
        self._pinned: dict[Ptr, int] = {}

    def memory_info(self) -> MemoryInfo:
        free_bytes, total_bytes = self.call(cu.cuMemGetInfo)
        return MemoryInfo(free_bytes=free_bytes, total_bytes=total_bytes)

    def malloc(self, size_bytes: int, stream: Stream | None = None) -> Ptr:
        _check_size(size_bytes)
        how = (cu.cuMemAlloc,) if stream is None else (cu.cuMemAllocAsync, self.handle(stream))
        function, *order = how
        address = self.call(function, size_bytes, *order, seen=lambda: self.shortage(size_bytes))
        ptr = Ptr(int(address))
        self._allocated[ptr] = size_bytes
        return ptr

    def free(self, ptr: Ptr, stream: Stream | None = None) -> None:
        order = () if stream is None else (self.handle(stream),)
        # Forgotten before it is freed: another thread may get the same address at once.
        size_bytes = _forget(self._allocated, ptr, f"no allocation of {self.name}")
        try:
            self.call(cu.cuMemFreeAsync if order else cu.cuMemFree, ptr, *order)
        except CudaError:
            self._allocated[ptr] = size_bytes
            raise

    def host_malloc(self, size_bytes: int) -> Ptr:
        _check_size(size_bytes)
        ptr = Ptr(
            self.call(
                cu.cuMemHostAlloc,
                size_bytes,
                cu.CU_MEMHOSTALLOC_PORTABLE,
                seen=lambda: f"{format_bytes(size_bytes)} of pinned host memory asked",
            )
        )
        self._pinned[ptr] = size_bytes
        return ptr

    def host_free(self, ptr: Ptr) -> None:
        size_bytes = _forget(self._pinned, ptr, "no pinned memory of this process")
        try:
            self.call(cu.cuMemFreeHost, ptr)
        except CudaError:
            self._pinned[ptr] = size_bytes
            raise

    def host_view(self, ptr: Ptr, size_bytes: int) -> memoryview:
        """Show pinned memory as bytes; the view must not be used after ``host_free``."""
        if size_bytes > self._pinned.get(ptr, 0):
            raise cuda_error(
                Status.INVALID_VALUE,
                seen=f"{size_bytes} bytes at {ptr:#x} are not pinned memory of this process",
            )
        return memoryview((ctypes.c_ubyte * size_bytes).from_address(ptr)).cast("B")

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        self.call(
            cu.cuMemcpyAsync,
            dst,
            src,
            size_bytes,
            self.handle(stream),
            seen=lambda: f"{format_bytes(size_bytes)} from {src:#x} to {dst:#x}",
        )

    def fill(self, ptr: Ptr, value: int, size_bytes: int, stream: Stream) -> None:
        if not 0 <= value <= 255:
            raise cuda_error(Status.INVALID_VALUE, seen=f"{value} is no value of a byte")
        self.call(
            cu.cuMemsetD8Async,
            ptr,
            value,
            size_bytes,
            self.handle(stream),
            seen=lambda: f"{format_bytes(size_bytes)} at {ptr:#x}",
        )

    def shortage(self, size_bytes: int) -> str:
        """Say how much was asked and how much there is."""
        asked = f"{format_bytes(size_bytes)} asked"
        try:
            info = self.memory_info()
        except CudaError:
            return f"{asked} on {self.name}"
        free, total = format_bytes(info.free_bytes), format_bytes(info.total_bytes)
        return f"{asked}, {free} of {total} free on {self.name}"

    def close(self) -> None:
        for ptr in self._allocated:
            self.ask(cu.cuMemFree, ptr)
        for ptr in self._pinned:
            self.ask(cu.cuMemFreeHost, ptr)
        self._allocated.clear()
        self._pinned.clear()
        super().close()


def _check_size(size_bytes: int) -> None:
    if size_bytes <= 0:
        raise cuda_error(Status.INVALID_VALUE, seen=f"{size_bytes} bytes asked")


def _forget(sizes: dict[Ptr, int], ptr: Ptr, what: str) -> int:
    try:
        return sizes.pop(ptr)
    except KeyError:
        raise cuda_error(
            Status.INVALID_VALUE, seen=f"{what} begins at {ptr:#x}; it may have been freed before"
        ) from None
