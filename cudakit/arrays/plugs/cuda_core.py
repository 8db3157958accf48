"""A memory resource of cuda.core that uses an allocator."""

from __future__ import annotations

from typing import Any

from cudakit.errors import MissingDependency
from cudakit.gpu.api import Allocator

try:
    from cuda.core import MemoryResource  # type: ignore[import-untyped]
except ImportError as error:
    raise MissingDependency(
        "cuda-core", purpose="a memory resource of cuda.core", requirement="cuda-core>=1,<2"
    ) from error

try:
    from cudakit.arrays.plugs._buffers import Calls
except ImportError:  # the C extension was not built
    from cudakit.arrays.plugs.buffers import Calls


class AllocatorResource(MemoryResource, Calls):  # type: ignore[misc]  # mypy sees an untyped base class
    """Creates Buffers of cuda.core from an allocator's memory; to be set as ``Device.memory_resource``.

    A Buffer is freed on the stream on which it is closed. If this is not the stream of its
    allocation, the memory is reused only after the earlier work on the closing stream.
    """

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._alloc, self._free = allocator.alloc, allocator.free
        self._device = allocator.device

    @property
    def allocator(self) -> Any:
        """The allocator, for statistics, history, snapshots and settings."""
        return self._allocator

    # Replace the abstract methods of MemoryResource.
    allocate = Calls.allocate
    deallocate = Calls.deallocate

    # These are class attributes: they are read for each Buffer, and properties are slower.
    is_device_accessible = True  # Whether kernels can access the memory: True.
    is_host_accessible = False  # Whether the host can access the memory: False.
    is_managed = False  # Whether the memory is managed: False.

    @property
    def device_id(self) -> int:
        return self._device

    def statistics(self) -> dict[str, int]:
        """Return the statistics of the allocator, with the keys of torch.cuda.memory_stats."""
        return self._allocator.statistics()

    def snapshot(self) -> dict[str, Any]:
        """Return the segments and the trace in PyTorch's format."""
        return self._allocator.snapshot()
