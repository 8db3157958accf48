"""Benchmark of memory bandwidth: kernels that read, write, copy, scale or add arrays in device memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from cudakit.arrays.bandwidth import SENTINEL, WIDTH_BYTES, Bandwidth
from cudakit.arrays.compare import Compare
from cudakit.arrays.fill import Fill
from cudakit.bench.case import Case, Verification, allocate, worst_verification
from cudakit.bench.checks import (
    POISON,
    Buffers,
    Check,
    check_copy,
    check_linear,
    check_read,
    check_write,
)
from cudakit.bench.l2_cache import IN_CACHE, can_be_cold, l2_size_bytes
from cudakit.bench.method import Axis, Cache, Mode
from cudakit.bench.roofline import Work
from cudakit.bench.spec import (
    Spec,
    cache_option,
    check_method,
    check_names,
    check_sizes,
    mode_option,
    option,
    sizes_option,
)
from cudakit.gpu.api import LEGACY, ComputeDevice, DeviceInfo, Gpu, Ptr, Stream
from cudakit.gpu.api.arrays import FP32

OPERATIONS = ("read", "write", "copy", "scale", "triad")
# Arbitrary values for the write and scale kernels. The factor is no power of two, so results are rounded.
_WRITTEN_WORD = 0x5EED1E55
_FACTOR = float(np.float32(1.7))

# Default buffer sizes as shares of the L2 cache, and a size that exceeds the cache by far.
_L2_SHARES = (1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1, 2, 4)
_LARGE_BYTES = 1 << 30
_ROUND_BYTES = 1 << 16  # Default sizes are multiples of this size.
# Default sizes of simulated devices are smaller, because their kernels run on the CPU.
_SIMULATED_SIZES_BYTES = (16 << 10, 128 << 10, 1 << 20)


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpec(Spec):
    """Measure the bandwidth of kernels that read and write device memory.

    The rate counts all bytes read and written. The default sizes range from 1/16 of the L2 cache to 1 GiB,
    and with --gpu sim from 16 KiB to 1 MiB. With a hot L2 cache (the default), the rate drops where the
    buffers exceed the cache. With --cache rotate, buffers of all but the smallest sizes leave the cache
    before they are used again; a warning is printed if some do not.

    \b
    cudakit bench memory
    cudakit bench memory --operations copy,triad --sizes 1MiB..1GiB -o memory.html
    """

    bench: ClassVar[str] = "memory"

    operations: tuple[str, ...] = option(
        "--operations",
        "Kernels: read, write, copy, scale, triad.  [default: all]",
        default=OPERATIONS,
        choices=OPERATIONS,
    )
    # Sizes of each buffer. None: sizes around that of the L2 cache.
    sizes_bytes: tuple[int, ...] | None = sizes_option("Bytes of each buffer")
    mode: Mode = mode_option("batch", default="batch")
    # With hot data, the size from which the rate drops shows the capacity of the L2 cache.
    cache: Cache = cache_option("hot", default="hot")

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_names("operation", self.operations, OPERATIONS)
        check_sizes(self.sizes_bytes, WIDTH_BYTES)
        check_method(self.mode, self.cache)

    def cases(self, gpu: DeviceInfo) -> tuple[Case, ...]:
        """Return one case per operation and size."""
        l2_bytes = l2_size_bytes(gpu.facts().fields)
        sizes_bytes = self.sizes_bytes or _default_sizes(l2_bytes, simulated=gpu.simulated)
        return tuple(
            _case(self, operation, size_bytes, l2_bytes)
            for operation in self.operations
            for size_bytes in sizes_bytes
        )


def _default_sizes(l2_bytes: int, *, simulated: bool) -> tuple[int, ...]:
    if simulated:
        return _SIMULATED_SIZES_BYTES
    l2_sizes = (
        max(int(l2_share * l2_bytes) // _ROUND_BYTES, 1) * _ROUND_BYTES for l2_share in _L2_SHARES
    )
    return (*dict.fromkeys(l2_sizes), max(_LARGE_BYTES, 16 * l2_bytes))


def _case(spec: MemorySpec, name: str, size_bytes: int, l2_bytes: int) -> Case:
    operation = _OPERATIONS[name]
    bytes_moved = operation.buffer_count * size_bytes
    is_cold_case = can_be_cold(spec.cache, l2_bytes=l2_bytes, footprint_bytes=bytes_moved)
    return Case(
        Memory(name, size_bytes),
        spec.method(spec.mode, spec.cache, fill="uniform"),
        Work(bytes_moved=bytes_moved) if is_cold_case else IN_CACHE,
        size_bytes,
        operation.buffer_count,
    )


@dataclass(frozen=True, slots=True)
class _Operation:
    source_count: int
    target_count: int
    run: Callable[[Bandwidth, Buffers, int, Stream], None]
    check: Check

    @property
    def buffer_count(self) -> int:
        """Number of buffers that the operation reads or writes."""
        return self.source_count + self.target_count


def _read(kernels: Bandwidth, buffers: Buffers, size_bytes: int, stream: Stream) -> None:
    kernels.read(buffers.target, buffers.sources[0], size_bytes, stream)


def _write(kernels: Bandwidth, buffers: Buffers, size_bytes: int, stream: Stream) -> None:
    kernels.write(buffers.target, _WRITTEN_WORD, size_bytes, stream)


def _copy(kernels: Bandwidth, buffers: Buffers, size_bytes: int, stream: Stream) -> None:
    kernels.copy(buffers.target, buffers.sources[0], size_bytes, stream)


def _scale(kernels: Bandwidth, buffers: Buffers, size_bytes: int, stream: Stream) -> None:
    kernels.scale(buffers.target, buffers.sources[0], _FACTOR, size_bytes, stream)


def _triad(kernels: Bandwidth, buffers: Buffers, size_bytes: int, stream: Stream) -> None:
    kernels.triad(
        buffers.target, buffers.sources[0], buffers.sources[1], _FACTOR, size_bytes, stream
    )


_OPERATIONS: Mapping[str, _Operation] = {
    "read": _Operation(1, 0, _read, check_read),
    "write": _Operation(0, 1, _write, check_write(_WRITTEN_WORD)),
    "copy": _Operation(1, 1, _copy, check_copy),
    "scale": _Operation(1, 1, _scale, check_linear((_FACTOR,))),
    "triad": _Operation(2, 1, _triad, check_linear((1.0, _FACTOR))),
}


@dataclass(frozen=True, slots=True)
class Memory:
    """A workload that runs a bandwidth kernel on buffers of one size."""

    operation: str
    size_bytes: int
    name: str = "memory"

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {"operation": self.operation, "size_bytes": self.size_bytes}

    def prepare(self, gpu: Gpu, seed: int) -> PreparedMemory:
        return PreparedMemory(gpu, _OPERATIONS[self.operation], self.size_bytes, seed)


class PreparedMemory:
    """A bandwidth kernel, its buffers, and the kernels that fill and verify them."""

    operations = 0

    def __init__(
        self, gpu: ComputeDevice, operation: _Operation, size_bytes: int, seed: int
    ) -> None:
        self._gpu, self._operation, self._size_bytes, self._seed = gpu, operation, size_bytes, seed
        self.footprint_bytes = self.bytes_moved = operation.buffer_count * size_bytes
        self._sets: list[Buffers] = []
        with ExitStack() as cleanup:
            self._kernels = cleanup.enter_context(closing(Bandwidth(gpu)))
            self._compare = cleanup.enter_context(closing(Compare(gpu)))
            self._cleanup = cleanup
            self.rotate(1)
            self._cleanup = cleanup.pop_all()

    def rotate(self, set_count: int) -> None:
        with closing(Fill(self._gpu)) as fill:
            while len(self._sets) < set_count:
                self._sets.append(self._make_buffers(fill, len(self._sets)))
            self._gpu.sync()

    def enqueue(self, stream: Stream, set_index: int) -> None:
        buffers = self._sets[set_index % len(self._sets)]
        self._operation.run(self._kernels, buffers, self._size_bytes, stream)

    def verify(self) -> Verification:
        check = self._operation.check
        verification = worst_verification(
            check(self._compare, buffers, self._size_bytes, self._seed) for buffers in self._sets
        )
        for buffers in self._sets:
            self._poison(buffers.target)
        self._gpu.sync()
        return verification

    def close(self) -> None:
        self._cleanup.close()

    def _make_buffers(self, fill: Fill, set_index: int) -> Buffers:
        gpu, cleanup = self._gpu, self._cleanup
        target = allocate(gpu, cleanup, self._target_bytes)
        sources = tuple(
            allocate(gpu, cleanup, self._size_bytes) for _ in range(self._operation.source_count)
        )
        for i, source in enumerate(sources):
            sequence = set_index * max(self._operation.source_count, 1) + i
            float_count = self._size_bytes // FP32.size_bytes
            fill.uniform(source, float_count, FP32, LEGACY, seed=self._seed, sequence=sequence)
        if not self._operation.target_count:
            self._write_sentinel(sources[0])
        self._poison(target)
        return Buffers(target, sources)

    @property
    def _target_bytes(self) -> int:
        """Size of the target buffer. The read kernel writes only one value: whether it found the sentinel."""
        return self._size_bytes if self._operation.target_count else WIDTH_BYTES

    def _write_sentinel(self, source: Ptr) -> None:
        """Write SENTINEL, which the read kernel searches, to the end of a buffer."""
        gpu, sentinel_ptr = self._gpu, Ptr(source + self._size_bytes - WIDTH_BYTES)
        staging_buffer = gpu.host_malloc(WIDTH_BYTES)
        try:
            sentinel_words = gpu.host_view(staging_buffer, WIDTH_BYTES)
            sentinel_words[:] = np.array([SENTINEL, 0, 0, 0], np.uint32).tobytes()
            gpu.copy(sentinel_ptr, staging_buffer, WIDTH_BYTES, LEGACY)
            gpu.sync()
        finally:
            gpu.host_free(staging_buffer)

    def _poison(self, target: Ptr) -> None:
        self._gpu.fill(target, POISON, self._target_bytes, LEGACY)
