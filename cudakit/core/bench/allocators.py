"""Who hands out memory: anyone that allocates and frees, and the ways that the driver has."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Protocol, TypeAlias

from cudakit.gpu.api import Backing, Gpu, Ptr, Stream


class Allocator(Protocol):
    """Hands out memory in the order of a stream."""

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr: ...
    def free(self, ptr: Ptr, stream: Stream) -> None: ...
    def close(self) -> None:
        """Give back what is kept for later."""
        ...


# Opens an allocator on a device.
Opener: TypeAlias = Callable[[Gpu], Allocator]


class _OfGpu:
    """An allocator that keeps nothing."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def close(self) -> None:
        """There is nothing to give back."""


class Driver(_OfGpu):
    """Memory of the device, at once (cuMemAlloc)."""

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr:  # noqa: ARG002
        return self._gpu.malloc(size_bytes)

    def free(self, ptr: Ptr, stream: Stream) -> None:  # noqa: ARG002
        self._gpu.free(ptr)


class StreamOrdered(_OfGpu):
    """Memory of the device from the driver's pool (cuMemAllocAsync).

    The pool keeps nothing over a synchronization, unless told to (CUDA Driver API,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD).
    """

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr:
        return self._gpu.malloc(size_bytes, stream)

    def free(self, ptr: Ptr, stream: Stream) -> None:
        self._gpu.free(ptr, stream)


class Pinned(_OfGpu):
    """Memory of the host that the device can reach (cuMemHostAlloc)."""

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr:  # noqa: ARG002
        return self._gpu.host_malloc(size_bytes)

    def free(self, ptr: Ptr, stream: Stream) -> None:  # noqa: ARG002
        self._gpu.host_free(ptr)


class Virtual(_OfGpu):
    """Addresses reserved, and memory of the device created and mapped there (cuMemCreate, cuMemMap).

    Sizes are rounded up to what can be mapped.
    """

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self._granularity = gpu.granularity()
        self._live: dict[Ptr, tuple[Backing, int]] = {}

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr:  # noqa: ARG002
        gpu, whole = self._gpu, -(-size_bytes // self._granularity) * self._granularity
        ptr = gpu.reserve(whole)
        try:
            backing = gpu.create(whole)
        except BaseException:
            gpu.unreserve(ptr, whole)
            raise
        gpu.map(ptr, backing, whole)
        self._live[ptr] = backing, whole
        return ptr

    def free(self, ptr: Ptr, stream: Stream) -> None:  # noqa: ARG002
        backing, whole = self._live.pop(ptr)
        self._gpu.unmap(ptr, whole)
        self._gpu.release(backing)
        self._gpu.unreserve(ptr, whole)


_OF_DRIVER: MappingProxyType[str, Opener] = MappingProxyType(
    {"driver": Driver, "stream-ordered": StreamOrdered, "pinned": Pinned, "virtual": Virtual}
)
DRIVER_ALLOCATORS = tuple(_OF_DRIVER)


def driver_allocator(name: str, gpu: Gpu) -> Allocator:
    """Return one of the driver's allocators of a device, by its name."""
    return _OF_DRIVER[name](gpu)
