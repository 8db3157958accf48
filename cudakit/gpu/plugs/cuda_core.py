"""An allocator as a memory resource of cuda.core."""

from __future__ import annotations

from typing import Any

from cudakit.errors import MissingDependency
from cudakit.gpu.api.allocator import Allocator

try:
    from cuda.core import MemoryResource  # type: ignore[import-untyped]
except ImportError as error:
    raise MissingDependency(
        "cuda-core", purpose="a memory resource of cuda.core", requirement="cuda-core>=1,<2"
    ) from error

try:
    from cudakit.gpu.plugs._buffers import Calls
except ImportError:  # it was not built
    from cudakit.gpu.plugs.buffers import Calls


class AllocatorResource(MemoryResource, Calls):  # type: ignore[misc]  # its stubs are not marked as such
    """Memory of an allocator as Buffers of cuda.core; ``Device.memory_resource`` takes it.

    A Buffer gives its memory back on the stream that it is closed on: where that is not the one it was
    allocated on, the memory is reused once that stream has come so far.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._alloc, self._free = allocator.alloc, allocator.free
        self._device = allocator.device

    @property
    def allocator(self) -> Any:
        """The allocator behind it: statistics, history, snapshots, settings."""
        return self._allocator

    # Before the abstract methods of MemoryResource.
    allocate = Calls.allocate
    deallocate = Calls.deallocate

    # Read for each Buffer: class attributes are faster than properties.
    is_device_accessible = True
    is_host_accessible = False
    is_managed = False

    @property
    def device_id(self) -> int:
        return self._device

    # The most used calls of the allocator.

    def statistics(self) -> dict[str, int]:
        """Return the numbers of torch.cuda.memory_stats."""
        return self._allocator.statistics()

    def snapshot(self) -> dict[str, Any]:
        """Return what is held and the trace, in PyTorch's format."""
        return self._allocator.snapshot()
