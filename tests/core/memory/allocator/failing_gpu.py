"""The simulated GPU, one call of whose virtual memory fails when a test says so."""

from __future__ import annotations

from typing import Any

from cudakit.errors import CudaError
from cudakit.gpu.api import Backing, Ptr, Stream
from cudakit.gpu.sim import Sim


class FailingGpu(Sim):
    """A Sim; ``fail_at`` is the number of the call that fails, counted from 1."""

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__(capacity_bytes=capacity_bytes)
        self.calls: list[str] = []
        self.fail_at = 0
        self.failed = False
        self.reserved: set[int] = set()
        self._chosen: tuple[str, int] = ("", 0)

    @property
    def used(self) -> int:
        info = super().memory_info()
        return info.total_bytes - info.free_bytes

    def fail(self, name: str, nth: int) -> None:
        """Let the nth call of a name fail from now on."""
        self._chosen = name, self.calls.count(name) + nth

    def memory_info(self) -> Any:
        self._count("memory_info")
        return super().memory_info()

    def reserve(self, size_bytes: int) -> Ptr:
        self._count("reserve")
        ptr = super().reserve(size_bytes)
        self.reserved.add(ptr)
        return ptr

    def unreserve(self, ptr: Ptr, size_bytes: int) -> None:
        self._count("unreserve")
        super().unreserve(ptr, size_bytes)
        self.reserved.remove(ptr)

    def create(self, size_bytes: int) -> Backing:
        self._count("create")
        return super().create(size_bytes)

    def release(self, backing: Backing) -> None:
        self._count("release")
        super().release(backing)

    def map(self, ptr: Ptr, backing: Backing, size_bytes: int) -> None:
        self._count("map")
        super().map(ptr, backing, size_bytes)

    def unmap(self, ptr: Ptr, size_bytes: int) -> None:
        self._count("unmap")
        super().unmap(ptr, size_bytes)

    def sync_stream(self, stream: Stream) -> None:
        self._count("sync_stream")
        super().sync_stream(stream)

    def sync(self) -> None:
        self._count("sync")
        super().sync()

    def _count(self, name: str) -> None:
        self.calls.append(name)
        if len(self.calls) == self.fail_at or self._chosen == (name, self.calls.count(name)):
            self.failed = True
            raise CudaError(999, "CUDA_ERROR_UNKNOWN", "as the test wants it")
