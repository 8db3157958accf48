"""Who hands out memory: anyone that allocates and frees, and the ways that the driver has."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Protocol

from cudakit.gpu.api import Backing, Gpu, Ptr, Stream


class Allocator(Protocol):
    """Hands out memory in the order of a stream."""

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr: ...
    def free(self, ptr: Ptr, stream: Stream) -> None: ...


class Driver:
    """Memory of the device, at once (cuMemAlloc)."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr:  # noqa: ARG002
        return self._gpu.malloc(size_bytes)

    def free(self, ptr: Ptr, stream: Stream) -> None:  # noqa: ARG002
        self._gpu.free(ptr)


class StreamOrdered:
    """Memory of the device from the driver's pool (cuMemAllocAsync).

    The pool keeps nothing over a synchronization, unless told to (CUDA Driver API,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD).
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr:
        return self._gpu.malloc(size_bytes, stream)

    def free(self, ptr: Ptr, stream: Stream) -> None:
        self._gpu.free(ptr, stream)


class Pinned:
    """Memory of the host that the device can reach (cuMemHostAlloc)."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr:  # noqa: ARG002
        return self._gpu.host_malloc(size_bytes)

    def free(self, ptr: Ptr, stream: Stream) -> None:  # noqa: ARG002
        self._gpu.host_free(ptr)


class Virtual:
    """Addresses reserved, and memory of the device created and mapped there (cuMemCreate, cuMemMap).

    Sizes are rounded up to what can be mapped.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
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


_OF_DRIVER: MappingProxyType[str, Callable[[Gpu], Allocator]] = MappingProxyType(
    {"driver": Driver, "stream-ordered": StreamOrdered, "pinned": Pinned, "virtual": Virtual}
)
DRIVER_ALLOCATORS = tuple(_OF_DRIVER)


def driver_allocator(name: str, gpu: Gpu) -> Allocator:
    """Return one of the driver's allocators of a device, by its name."""
    return _OF_DRIVER[name](gpu)
