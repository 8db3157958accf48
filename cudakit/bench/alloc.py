"""Benchmark of memory allocation: the time to allocate and free memory, by allocator and size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from typing import ClassVar, Protocol, TypeAlias

from cudakit.arrays.bandwidth import WIDTH_BYTES, Bandwidth
from cudakit.arrays.compare import Compare
from cudakit.bench.case import Case, PreparedLatency, Verification, exact_verification
from cudakit.bench.labels import Axis
from cudakit.bench.spec import Spec, check_names, check_sizes, option, sizes_option
from cudakit.bench.words import Words
from cudakit.errors import InputError
from cudakit.gpu.api import LEGACY, Backing, DeviceInfo, Gpu, Ptr, Stream

# The ways to allocate memory with the driver API.
DRIVER_ALLOCATORS = ("driver", "stream-ordered", "pinned", "virtual")

_SIZES_BYTES = (512, 64 << 10, 1 << 20, 32 << 20, 1 << 30)
_SIMULATED_SIZES_BYTES = (512, 64 << 10, 1 << 20)
_WRITTEN_WORD = 0x0DDBA11  # Arbitrary value that is written to allocated memory and read back.
_WORD_BYTES = 4


class Allocator(Protocol):
    """Allocates and frees memory in stream order."""

    def alloc(self, size_bytes: int, stream: Stream) -> Ptr: ...
    def free(self, ptr: Ptr, stream: Stream) -> None: ...
    def close(self) -> None: ...


AllocatorFactory: TypeAlias = Callable[[Gpu], Allocator]


@dataclass(frozen=True, slots=True, kw_only=True)
class AllocSpec(Spec):
    """Measure the time to allocate and free memory.

    The time of a case is that of one allocation and its free. The default sizes are 512 B to 1 GiB, and with
    --gpu sim 512 B to 1 MiB. The allocators:

    \b
    driver          cuMemAlloc
    stream-ordered  cuMemAllocAsync
    pinned          cuMemHostAlloc
    virtual         cuMemCreate and cuMemMap
    caching         the allocator of cudakit, which reuses freed blocks

    \b
    cudakit bench alloc
    cudakit bench alloc --allocators driver,stream-ordered --sizes 4KiB..1GiB
    """

    bench: ClassVar[str] = "alloc"

    allocators: tuple[str, ...] | None = option(  # None: all allocators.
        "--allocators",
        "Allocators: driver, stream-ordered, pinned, virtual, caching.  [default: all]",
        choices=(*DRIVER_ALLOCATORS, "caching"),
    )
    # Factories of allocators that are not the driver's, by name.
    other_allocators: Mapping[str, AllocatorFactory] = field(default_factory=dict)
    sizes_bytes: tuple[int, ...] | None = sizes_option("Bytes of each allocation")

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        if self.allocators is not None:
            check_names("allocator", self.allocators, (*DRIVER_ALLOCATORS, *self.other_allocators))
        if duplicate_names := sorted(set(self.other_allocators) & set(DRIVER_ALLOCATORS)):
            raise InputError(f"{duplicate_names[0]!r} is already the name of a driver allocator")
        check_sizes(self.sizes_bytes, 1)

    def cases(self, gpu: DeviceInfo) -> tuple[Case, ...]:
        """Return a case per allocator and size."""
        default_sizes = _SIMULATED_SIZES_BYTES if gpu.simulated else _SIZES_BYTES
        factories = {**_DRIVER_ALLOCATORS, **self.other_allocators}
        return tuple(
            _case(self, Alloc(name, size_bytes, factories[name]))
            for name in self.allocators or factories
            for size_bytes in self.sizes_bytes or default_sizes
        )


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
    def axes(self) -> Mapping[str, Axis]:
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
        reference = "the words written"
        return exact_verification(wrong_count, word_count, reference, "words read back differ")


class _DriverCalls:
    """An allocator that calls the driver each time."""

    def __init__(
        self, alloc: Callable[[int, Stream], Ptr], free: Callable[[Ptr, Stream], None]
    ) -> None:
        self.alloc, self.free = alloc, free

    def close(self) -> None:
        pass


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
        pass


_DRIVER_ALLOCATORS: Mapping[str, AllocatorFactory] = {
    # cuMemAlloc
    "driver": lambda gpu: _DriverCalls(
        lambda size_bytes, _: gpu.malloc(size_bytes), lambda ptr, _: gpu.free(ptr)
    ),
    # cuMemAllocAsync, from the driver's pool, which by default releases its memory at a synchronization
    # (CUDA Driver API, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD).
    "stream-ordered": lambda gpu: _DriverCalls(gpu.malloc, gpu.free),
    # cuMemHostAlloc
    "pinned": lambda gpu: _DriverCalls(
        lambda size_bytes, _: gpu.host_malloc(size_bytes), lambda ptr, _: gpu.host_free(ptr)
    ),
    "virtual": _VirtualMemory,
}


AllocSpec.words = Words(
    timing=lambda case: (
        "host time of one allocation and its free" if case.method.mode == "call" else ""
    )
)
