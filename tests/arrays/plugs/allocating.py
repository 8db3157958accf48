"""A fake allocator that records its calls."""

from __future__ import annotations

from typing import Any

from cudakit.errors import CudakitError
from cudakit.gpu.api import HANDLE_BYTES, IpcHandle, MemoryInfo, Ptr

BASE = 0x7F00_0000_0000


class Allocating:
    """Returns increasing addresses; ``freed`` are the freed addresses, with the stream of each free."""

    def __init__(self, device: int = 0) -> None:
        self.device = device
        self.allocated: list[tuple[int, int]] = []
        self.freed: list[tuple[int, int | None]] = []
        self.live: set[int] = set()
        self.refuses: CudakitError | None = None

    def alloc(self, size_bytes: int, stream: int = 0) -> Ptr:
        if self.refuses:
            raise self.refuses
        self.allocated.append((size_bytes, stream))
        if size_bytes == 0:
            return Ptr(0)
        ptr = Ptr(BASE + 512 * len(self.allocated))
        self.live.add(ptr)
        return ptr

    def free(self, ptr: int, stream: int | None = None) -> None:
        if ptr and ptr not in self.live:
            raise CudakitError(f"nothing is allocated at {ptr:#x}")
        self.live.discard(ptr)
        self.freed.append((ptr, stream))

    def memory_info(self) -> MemoryInfo:
        return MemoryInfo(1 << 30, 2 << 30)

    def ipc_handle(self, ptr: int) -> IpcHandle:
        if self.refuses:
            raise self.refuses
        return IpcHandle(b"a handle".ljust(HANDLE_BYTES), ptr - BASE)

    def statistics(self) -> dict[str, int]:
        return {"allocation.all.current": len(self.live)}

    def snapshot(self) -> dict[str, Any]:
        return {"segments": []}
