"""Benchmark of memory allocation: the time to allocate and free memory, by allocator and size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from types import MappingProxyType

from cudakit.arrays.bandwidth import WIDTH_BYTES, Bandwidth
from cudakit.arrays.compare import Compare
from cudakit.bench.case import Case, PreparedLatency, Verification
from cudakit.bench.spec import DRIVER_ALLOCATORS, Allocator, AllocatorFactory, AllocSpec
from cudakit.gpu.api import LEGACY, Backing, DeviceInfo, Gpu, Ptr, Stream

_SIZES_BYTES = (512, 64 << 10, 1 << 20, 32 << 20, 1 << 30)
_SIMULATED_SIZES_BYTES = (512, 64 << 10, 1 << 20)
_WRITTEN_WORD = 0x0DDBA11  # Arbitrary value that is written to allocated memory and read back.
_WORD_BYTES = 4


def alloc_cases(spec: AllocSpec, gpu: DeviceInfo) -> tuple[Case, ...]:
    """Return a case per allocator and size."""
    default_sizes = _SIMULATED_SIZES_BYTES if gpu.simulated else _SIZES_BYTES
    sizes_bytes = spec.sizes_bytes or default_sizes
    return tuple(
        _case(spec, Alloc(name, size_bytes, factory))
        for name, factory in _factories(spec).items()
        for size_bytes in sizes_bytes
    )


def _factories(spec: AllocSpec) -> dict[str, AllocatorFactory]:
    """Return the factories of the requested allocators by name."""
    factories = {**_DRIVER_ALLOCATORS, **spec.other_allocators}
    return {name: factories[name] for name in spec.allocators or factories}


def _case(spec: AllocSpec, workload: Alloc) -> Case:
    is_on_device = workload.allocator != "pinned"
    # Allocators that cache freed blocks keep two blocks: one for the stream of the samples, one for the
    # default stream, on which the results are checked.
    may_cache = workload.allocator not in DRIVER_ALLOCATORS
    return Case(
        workload,
        spec.method("call", "hot"),
        size_bytes=workload.size_bytes,
        buffers=int(is_on_device) + int(may_cache),
        host_bytes=0 if is_on_device else workload.size_bytes,
    )


@dataclass(frozen=True, slots=True)
class Alloc:
    """A workload that allocates and frees a block of memory with one allocator."""

    allocator: str
    size_bytes: int
    factory: AllocatorFactory
    name: str = "alloc"

    @property
    def axes(self) -> Mapping[str, str | int | float]:
        return {"allocator": self.allocator, "size_bytes": self.size_bytes}

    def prepare(self, gpu: Gpu, seed: int) -> PreparedAlloc:  # noqa: ARG002
        return PreparedAlloc(gpu, self.factory(gpu), self.size_bytes)


class PreparedAlloc(PreparedLatency):
    """An allocator, and the kernels that verify that the allocator's blocks are usable."""

    def __init__(self, gpu: Gpu, allocator: Allocator, size_bytes: int) -> None:
        super().__init__()
        self._gpu, self._allocator, self._size_bytes = gpu, allocator, size_bytes
        self.cleanup.callback(allocator.close)
        self._kernels = self.cleanup.enter_context(closing(Bandwidth(gpu)))
        self._compare = self.cleanup.enter_context(closing(Compare(gpu)))

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002
        self._allocator.free(self._allocator.alloc(self._size_bytes, stream), stream)

    def verify(self) -> Verification:
        """Allocate a block, write to it, and check the values that a kernel reads back."""
        size_bytes = self._size_bytes // WIDTH_BYTES * WIDTH_BYTES
        word_count = size_bytes // _WORD_BYTES
        ptr = self._allocator.alloc(self._size_bytes, LEGACY)
        try:
            self._kernels.write(ptr, _WRITTEN_WORD, size_bytes, LEGACY)
            wrong_count = self._compare.count_not_equal(ptr, _WRITTEN_WORD, size_bytes, LEGACY)
        finally:
            self._allocator.free(ptr, LEGACY)
            self._gpu.sync()
        detail = f"{wrong_count} of {word_count} words read back differ" if wrong_count else ""
        return Verification(
            not wrong_count, wrong_count / max(word_count, 1), 0.0, "the words written", detail
        )


class _DriverCalls:
    """An allocator that calls the driver each time."""

    def __init__(
        self, alloc: Callable[[int, Stream], Ptr], free: Callable[[Ptr, Stream], None]
    ) -> None:
        self.alloc, self.free = alloc, free

    def close(self) -> None:
        """Do nothing: no memory is cached."""


def _synchronous_allocator(gpu: Gpu) -> Allocator:
    """Return an allocator of device memory with cuMemAlloc."""
    return _DriverCalls(lambda size_bytes, _: gpu.malloc(size_bytes), lambda ptr, _: gpu.free(ptr))


def _stream_ordered_allocator(gpu: Gpu) -> Allocator:
    """Return an allocator of device memory from the driver's pool (cuMemAllocAsync).

    By default the pool releases its memory at a synchronization (CUDA Driver API,
    CU_MEMPOOL_ATTR_RELEASE_THRESHOLD).
    """
    return _DriverCalls(gpu.malloc, gpu.free)


def _pinned_allocator(gpu: Gpu) -> Allocator:
    """Return an allocator of pinned host memory (cuMemHostAlloc)."""
    return _DriverCalls(
        lambda size_bytes, _: gpu.host_malloc(size_bytes), lambda ptr, _: gpu.host_free(ptr)
    )


class _VirtualMemory:
    """Device memory that is created and mapped to a reserved address (cuMemCreate, cuMemMap).

    Sizes are rounded up to the mapping granularity.
    """

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._granularity = gpu.granularity()
        self._mapped_memory: dict[Ptr, tuple[Backing, int]] = {}

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr:  # noqa: ARG002
        gpu, mapped_bytes = self._gpu, -(-size_bytes // self._granularity) * self._granularity
        ptr = gpu.reserve(mapped_bytes)
        try:
            backing = gpu.create(mapped_bytes)
        except BaseException:
            gpu.unreserve(ptr, mapped_bytes)
            raise
        gpu.map(ptr, backing, mapped_bytes)
        self._mapped_memory[ptr] = backing, mapped_bytes
        return ptr

    def free(self, ptr: Ptr, stream: Stream) -> None:  # noqa: ARG002
        backing, mapped_bytes = self._mapped_memory.pop(ptr)
        self._gpu.unmap(ptr, mapped_bytes)
        self._gpu.release(backing)
        self._gpu.unreserve(ptr, mapped_bytes)

    def close(self) -> None:
        """Do nothing: no memory is cached."""


_DRIVER_ALLOCATORS: MappingProxyType[str, AllocatorFactory] = MappingProxyType(
    {
        "driver": _synchronous_allocator,
        "stream-ordered": _stream_ordered_allocator,
        "pinned": _pinned_allocator,
        "virtual": _VirtualMemory,
    }
)
