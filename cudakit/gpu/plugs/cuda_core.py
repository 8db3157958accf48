"""An allocator as a memory resource of cuda.core."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cudakit.errors import CudakitError, MissingDependency
from cudakit.gpu.api.allocator import Allocator

try:
    from cuda.core import Buffer, MemoryResource  # type: ignore[import-untyped]
except ImportError as error:
    raise MissingDependency(
        "cuda-core", purpose="a memory resource of cuda.core", requirement="cuda-core>=1,<2"
    ) from error

if TYPE_CHECKING:
    from cuda.core import Stream


class AllocatorResource(MemoryResource):  # type: ignore[misc]  # its stubs are not marked as such
    """Memory of an allocator as Buffers of cuda.core; ``Device.memory_resource`` takes it.

    A Buffer gives its memory back on the stream that it is closed on: where that is not the one it was
    allocated on, the memory is reused once that stream has come so far.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._device = allocator.device

    @property
    def allocator(self) -> Any:
        """The allocator behind it: statistics, history, snapshots, settings."""
        return self._allocator

    def allocate(self, size: int, *, stream: Stream) -> Buffer:
        """Allocate a Buffer of so many bytes for use in the order of a stream. Raises OutOfMemory."""
        ptr = self._allocator.alloc(size, stream.__cuda_stream__()[1])
        try:
            return Buffer.from_handle(ptr, size, self, stream=stream)
        except BaseException:
            self._allocator.free(ptr)
            raise

    def deallocate(self, ptr: Any, size: int, *, stream: Stream) -> None:  # noqa: ARG002
        """Give memory back. Never raises: what is not allocated is counted among the invalid frees."""
        try:  # noqa: SIM105  suppress() takes longer than all of the rest
            self._allocator.free(ptr, stream.__cuda_stream__()[1])
        except CudakitError:
            pass

    @property
    def device_id(self) -> int:
        return self._device

    @property
    def is_device_accessible(self) -> bool:
        return True

    @property
    def is_host_accessible(self) -> bool:
        return False

    @property
    def is_managed(self) -> bool:
        return False

    # What people look for first, so that it need not be asked of the allocator.

    def statistics(self) -> dict[str, int]:
        """Return the numbers of torch.cuda.memory_stats."""
        return self._allocator.statistics()

    def snapshot(self) -> dict[str, Any]:
        """Return what is held and the trace, in PyTorch's format."""
        return self._allocator.snapshot()
