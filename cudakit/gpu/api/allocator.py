"""The allocator protocol that plugs for other libraries use."""

from __future__ import annotations

from typing import Any, Protocol

from cudakit.gpu.api import IpcHandle, MemoryInfo, Ptr


class Allocator(Protocol):
    """A stream-ordered allocator. Streams are driver handles; 0 is the default stream.

    A free on another stream than that of the allocation counts as a use of the memory on that stream. An
    allocation of 0 bytes returns address 0. Out of memory raises an error that is both a CudaError and a
    MemoryError.
    """

    @property
    def device(self) -> int:
        """The CUDA device index."""

    def alloc(self, size_bytes: int, stream: int = 0) -> Ptr: ...
    def free(self, ptr: int, stream: int | None = None) -> None: ...
    def memory_info(self) -> MemoryInfo: ...
    def ipc_handle(self, ptr: int) -> IpcHandle: ...
    def statistics(self) -> dict[str, int]: ...
    def snapshot(self) -> dict[str, Any]: ...
