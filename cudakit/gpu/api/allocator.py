"""The protocol of an allocator that the adapters in cudakit.arrays.plugs connect to other libraries."""

from __future__ import annotations

from typing import Any, Protocol

from cudakit.gpu.api import IpcHandle, MemoryInfo, Ptr


class Allocator(Protocol):
    """A stream-ordered allocator. Streams are driver handles; 0 is the default stream.

    If memory is freed on another stream than it was allocated on, it is reused only after the work of both
    streams.
    """

    @property
    def device(self) -> int:
        """The CUDA device index."""

    def alloc(self, size_bytes: int, stream: int = 0) -> Ptr:
        """Allocate memory for use on a stream; 0 bytes return address 0.

        If no memory is left, raises an error that is both a CudaError and a MemoryError.
        """

    def free(self, ptr: int, stream: int | None = None) -> None:
        """Free memory after the enqueued work of a stream; None is the stream of its allocation."""

    def memory_info(self) -> MemoryInfo:
        """Return the free and total bytes of the device."""

    def ipc_handle(self, ptr: int) -> IpcHandle:
        """Return a handle with which another process can open an allocation."""

    def statistics(self) -> dict[str, int]:
        """Return the allocator's counters, by the names of ``torch.cuda.memory_stats``."""

    def snapshot(self) -> dict[str, Any]:
        """Return segments, blocks and trace in the format of ``torch.cuda.memory._snapshot``."""
