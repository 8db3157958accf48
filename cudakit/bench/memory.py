"""Benchmark of memory bandwidth: kernels that read, write, copy, scale or add arrays in device memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.arrays.bandwidth import SENTINEL, WIDTH_BYTES, Bandwidth
from cudakit.arrays.compare import Compare
from cudakit.arrays.fill import Fill
from cudakit.bench.case import (
    POISON,
    Cache,
    Case,
    Mode,
    Verification,
    allocate,
    exact_verification,
    verification,
    worst_verification,
)
from cudakit.bench.labels import Axis
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
from cudakit.bench.timer import IN_CACHE, can_be_cold, l2_size_bytes
from cudakit.bench.words import Words
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
        f"Kernels: {', '.join(OPERATIONS)}.  [default: all]",
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
        default_sizes = _SIMULATED_SIZES_BYTES if gpu.simulated else _default_sizes(l2_bytes)
        return tuple(
            _case(self, operation, size_bytes, l2_bytes)
            for operation in self.operations
            for size_bytes in self.sizes_bytes or default_sizes
        )


def _default_sizes(l2_bytes: int) -> tuple[int, ...]:
    l2_sizes = (
        max(int(share * l2_bytes) // _ROUND_BYTES, 1) * _ROUND_BYTES for share in _L2_SHARES
    )
    return (*dict.fromkeys(l2_sizes), max(_LARGE_BYTES, 16 * l2_bytes))


def _case(spec: MemorySpec, name: str, size_bytes: int, l2_bytes: int) -> Case:
    buffer_count = _OPERATIONS[name].buffer_count
    bytes_moved = buffer_count * size_bytes
    is_cold = can_be_cold(spec.cache, l2_bytes=l2_bytes, footprint_bytes=bytes_moved)
    return Case(
        Memory(name, size_bytes),
        spec.method(spec.mode, spec.cache, fill="uniform"),
        Work(bytes_moved=bytes_moved) if is_cold else IN_CACHE,
        size_bytes,
        buffer_count,
    )


@dataclass(frozen=True, slots=True)
class _Buffers:
    """One buffer set: the buffer that is written, and the buffers that are read."""

    target: Ptr
    sources: tuple[Ptr, ...]


# Checks the target of a buffer set, given the size of the buffers and the seed; synchronizes the device.
_Check: TypeAlias = Callable[[Compare, _Buffers, int, int], Verification]


@dataclass(frozen=True, slots=True)
class _Operation:
    source_count: int
    writes_target: bool  # The read kernel writes only one value: whether it found the sentinel.
    kernel: Callable[..., None]  # Its arguments: target, sources, constants, size and stream.
    constants: tuple[int | float, ...]
    check: _Check

    @property
    def buffer_count(self) -> int:
        """Number of buffers of full size that the operation reads or writes."""
        return self.source_count + self.writes_target


# --- the check ----------------------------------------------------------------------------------------

_POISONED_WORD = 0xFFFFFFFF
_WORD_BYTES = 4
_MAX_SAMPLED_VALUES = 4096  # Maximum number of values to check with fp64.
# Tolerance: a fused multiply-add is rounded once, by at most half a unit in the last place of fp32.
_ROUNDING = 2.0**-24


def _check_read(compare: Compare, buffers: _Buffers, size_bytes: int, seed: int) -> Verification:  # noqa: ARG001
    missed = compare.count_not_equal(buffers.target, SENTINEL, _WORD_BYTES, LEGACY)
    detail = "the end of the buffer was not read" if missed else ""
    return verification(float(missed), 0.0, "a sentinel at the end", detail)


def _check_write(compare: Compare, buffers: _Buffers, size_bytes: int, seed: int) -> Verification:  # noqa: ARG001
    wrong = compare.count_not_equal(buffers.target, _WRITTEN_WORD, size_bytes, LEGACY)
    reference = "the word written, all words"
    return exact_verification(wrong, size_bytes // _WORD_BYTES, reference, "words are wrong")


def _check_copy(compare: Compare, buffers: _Buffers, size_bytes: int, seed: int) -> Verification:  # noqa: ARG001
    wrong = compare.count_different(buffers.target, buffers.sources[0], size_bytes, LEGACY)
    reference = "all words of the source"
    return exact_verification(wrong, size_bytes // _WORD_BYTES, reference, "words are wrong")


def _check_linear(factors: Sequence[float]) -> _Check:
    """Return a check of a linear combination: some values are compared with fp64, and none may be POISON."""

    def check(compare: Compare, buffers: _Buffers, size_bytes: int, seed: int) -> Verification:
        count = size_bytes // _WORD_BYTES
        random = np.random.default_rng(seed).integers(0, count, min(_MAX_SAMPLED_VALUES, count) - 2)
        indices: npt.NDArray[np.int64] = np.unique(np.concatenate(([0, count - 1], random)))
        computed, *sources = (
            compare.sample(ptr, FP32, indices, LEGACY) for ptr in (buffers.target, *buffers.sources)
        )
        expected = sum(factor * values for factor, values in zip(factors, sources, strict=True))
        unwritten = count - compare.count_not_equal(
            buffers.target, _POISONED_WORD, size_bytes, LEGACY
        )
        detail = f"{unwritten} of {count} values were never written" if unwritten else ""
        error = float(np.linalg.norm(computed - expected) / np.linalg.norm(expected))
        reference = f"an fp64 computation of {len(indices)} values"
        return verification(error, _ROUNDING, reference, detail)

    return check


_OPERATIONS: Mapping[str, _Operation] = {
    "read": _Operation(1, False, Bandwidth.read, (), _check_read),
    "write": _Operation(0, True, Bandwidth.write, (_WRITTEN_WORD,), _check_write),
    "copy": _Operation(1, True, Bandwidth.copy, (), _check_copy),
    "scale": _Operation(1, True, Bandwidth.scale, (_FACTOR,), _check_linear((_FACTOR,))),
    "triad": _Operation(2, True, Bandwidth.triad, (_FACTOR,), _check_linear((1.0, _FACTOR))),
}


# --- the workload -------------------------------------------------------------------------------------


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
        self._target_bytes = size_bytes if operation.writes_target else WIDTH_BYTES
        self._sets: list[_Buffers] = []
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
        buffers, operation = self._sets[set_index % len(self._sets)], self._operation
        operation.kernel(
            self._kernels,
            buffers.target,
            *buffers.sources,
            *operation.constants,
            self._size_bytes,
            stream,
        )

    def verify(self) -> Verification:
        worst = worst_verification(
            self._operation.check(self._compare, buffers, self._size_bytes, self._seed)
            for buffers in self._sets
        )
        for buffers in self._sets:
            self._poison(buffers.target)
        self._gpu.sync()
        return worst

    def close(self) -> None:
        self._cleanup.close()

    def _make_buffers(self, fill: Fill, set_index: int) -> _Buffers:
        gpu, cleanup, source_count = self._gpu, self._cleanup, self._operation.source_count
        target = allocate(gpu, cleanup, self._target_bytes)
        sources = tuple(allocate(gpu, cleanup, self._size_bytes) for _ in range(source_count))
        for i, source in enumerate(sources):
            sequence = set_index * source_count + i
            float_count = self._size_bytes // FP32.size_bytes
            fill.uniform(source, float_count, FP32, LEGACY, seed=self._seed, sequence=sequence)
        if not self._operation.writes_target:
            self._write_sentinel(sources[0])
        self._poison(target)
        return _Buffers(target, sources)

    def _write_sentinel(self, source: Ptr) -> None:
        """Write SENTINEL, which the read kernel searches, to the end of a buffer."""
        gpu, sentinel_ptr = self._gpu, Ptr(source + self._size_bytes - WIDTH_BYTES)
        staging_buffer = gpu.host_malloc(WIDTH_BYTES)
        try:
            words = np.array([SENTINEL, 0, 0, 0], np.uint32)
            gpu.host_view(staging_buffer, WIDTH_BYTES)[:] = words.tobytes()
            gpu.copy(sentinel_ptr, staging_buffer, WIDTH_BYTES, LEGACY)
            gpu.sync()
        finally:
            gpu.host_free(staging_buffer)

    def _poison(self, target: Ptr) -> None:
        self._gpu.fill(target, POISON, self._target_bytes, LEGACY)


MemorySpec.words = Words(rate=lambda _: "Rate: of all bytes read and written.")
