"""The simulated GPU with a memory call that fails."""

from __future__ import annotations

from typing import Any

from cudakit.errors import CudaError
from cudakit.gpu.api import Backing, HandleKind, Ptr, ShareableHandle, Stream
from cudakit.gpu.sim import Sim


class FailingGpu(Sim):
    """A simulated GPU; ``fail_at`` is the number of the call that fails, counted from 1."""

    def __init__(self, capacity_bytes: int, model: str = "h200", **options: Any) -> None:
        super().__init__(model, capacity_bytes=capacity_bytes, **options)
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
        """Make the nth next call of a method fail."""
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

    def create(self, size_bytes: int, handle: HandleKind | None = None) -> Backing:
        self._count("create")
        return super().create(size_bytes, handle)

    def backing_at(self, ptr: Ptr) -> Backing:
        self._count("backing_at")
        return super().backing_at(ptr)

    def release(self, backing: Backing) -> None:
        self._count("release")
        super().release(backing)

    def map(self, ptr: Ptr, backing: Backing, size_bytes: int) -> None:
        self._count("map")
        super().map(ptr, backing, size_bytes)

    def unmap(self, ptr: Ptr, size_bytes: int) -> None:
        self._count("unmap")
        super().unmap(ptr, size_bytes)

    def enable_peer(self, ordinal: int) -> None:
        self._count("enable_peer")
        super().enable_peer(ordinal)

    def set_access(self, ptr: Ptr, size_bytes: int, ordinal: int, *, allowed: bool = True) -> None:
        self._count("set_access")
        super().set_access(ptr, size_bytes, ordinal, allowed=allowed)

    def ipc_handle(self, ptr: Ptr) -> bytes:
        self._count("ipc_handle")
        return super().ipc_handle(ptr)

    def ipc_open(self, handle: bytes) -> Ptr:
        self._count("ipc_open")
        return super().ipc_open(handle)

    def ipc_close(self, ptr: Ptr) -> None:
        self._count("ipc_close")
        super().ipc_close(ptr)

    def handle_kinds(self) -> tuple[HandleKind, ...]:
        self._count("handle_kinds")
        return super().handle_kinds()

    def export(self, backing: Backing) -> ShareableHandle:
        self._count("export")
        return super().export(backing)

    def revoke(self, exported: ShareableHandle) -> None:
        self._count("revoke")
        super().revoke(exported)

    def import_backing(self, exported: ShareableHandle) -> Backing:
        self._count("import_backing")
        return super().import_backing(exported)

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
            raise CudaError(999, "CUDA_ERROR_UNKNOWN", "requested by the test")
