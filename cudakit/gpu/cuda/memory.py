"""Memory of the device, and what is copied and filled there and elsewhere."""

from __future__ import annotations

from cudakit.errors import CudaError
from cudakit.gpu.api import MemoryInfo, Ptr, Stream
from cudakit.gpu.cuda.driver import cu
from cudakit.gpu.cuda.host_memory import HostMemory
from cudakit.gpu.cuda.peers import Peers
from cudakit.gpu.cuda.sizes import check_size, forget
from cudakit.gpu.explain import Status, cuda_error
from cudakit.units import format_bytes


class Memory(HostMemory, Peers):
    """Allocations of one device, at once or in the order of a stream."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._allocated: dict[Ptr, int] = {}

    def memory_info(self) -> MemoryInfo:
        free_bytes, total_bytes = self.call(cu.cuMemGetInfo)
        return MemoryInfo(free_bytes=free_bytes, total_bytes=total_bytes)

    def malloc(self, size_bytes: int, stream: Stream | None = None) -> Ptr:
        check_size(size_bytes)
        how = (cu.cuMemAlloc,) if stream is None else (cu.cuMemAllocAsync, self.handle(stream))
        function, *order = how
        address = self.call(function, size_bytes, *order, seen=lambda: self.shortage(size_bytes))
        ptr = Ptr(int(address))
        self._allocated[ptr] = size_bytes
        return ptr

    def free(self, ptr: Ptr, stream: Stream | None = None) -> None:
        order = () if stream is None else (self.handle(stream),)
        # Forgotten before it is freed: another thread may get the same address at once.
        size_bytes = forget(self._allocated, ptr, f"no allocation of {self.name}")
        try:
            self.call(cu.cuMemFreeAsync if order else cu.cuMemFree, ptr, *order)
        except CudaError:
            self._allocated[ptr] = size_bytes
            raise

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
        self._allocated.clear()
        super().close()
