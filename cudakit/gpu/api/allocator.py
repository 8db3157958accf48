"""What hands out memory of a device, as the plugs into other libraries take it."""

from __future__ import annotations

from typing import Any, Protocol

from cudakit.gpu.api import IpcHandle, MemoryInfo, Ptr


class Allocator(Protocol):
    """Memory in the order of streams, which are the driver's handles; 0 is the default stream.

    A free on another stream than the allocation's is a use by it until then. No bytes are the address 0.
    Where there is no memory, what ``alloc`` raises is both a CudaError and a MemoryError.
    """

    @property
    def device(self) -> int:
        """CUDA's number of the device."""
        ...

    def alloc(self, size_bytes: int, stream: int = 0) -> Ptr: ...
    def free(self, ptr: int, stream: int | None = None) -> None: ...
    def memory_info(self) -> MemoryInfo: ...
    def ipc_handle(self, ptr: int) -> IpcHandle: ...
    def statistics(self) -> dict[str, int]: ...
    def snapshot(self) -> dict[str, Any]: ...
