"""Tests the kernels that cudakit launches, on every device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from arrays.test_philox import PUBLISHED
from contract.workbench import Workbench

from cudakit.arrays.bandwidth import SENTINEL, Bandwidth
from cudakit.arrays.compare import Compare
from cudakit.arrays.fill import Fill, normal_values, uniform_values
from cudakit.arrays.random_values import philox
from cudakit.arrays.spin import Spin
from cudakit.arrays.timestamp import STAMP_BYTES, Timestamp, clock_hz
from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, Gpu, Ptr
from cudakit.gpu.api.arrays import ELEMENTS, FP16, FP32, FP64, INT8, Element, decode, encode

every_element = pytest.mark.parametrize("element", ELEMENTS.values(), ids=ELEMENTS)
SEED = 0x0123456789ABCDEF


@pytest.fixture
def fill(gpu: Gpu) -> Iterator[Fill]:
    with closing(Fill(gpu)) as kernels:
        yield kernels


@pytest.fixture
def spin(gpu: Gpu) -> Iterator[Spin]:
    with closing(Spin(gpu)) as kernels:
        yield kernels


@pytest.fixture
def bandwidth(gpu: Gpu) -> Iterator[Bandwidth]:
    with closing(Bandwidth(gpu)) as kernels:
        yield kernels


@pytest.fixture
def compare(gpu: Gpu) -> Iterator[Compare]:
    with closing(Compare(gpu)) as kernels:
        yield kernels


def filled(
    bench: Workbench, element: Element, count: int, write: Callable[[Ptr], None]
) -> npt.NDArray[Any]:
    """Run a fill, check that it writes only its range, and return the bits."""
    size_bytes = count * element.size_bytes
    device_memory = bench.gpu.malloc(size_bytes + 16)
    bench.gpu.fill(device_memory, 0xEE, size_bytes + 16, LEGACY)
    write(device_memory)
    content = bench.read_bytes(device_memory, size_bytes + 16)
    bench.gpu.free(device_memory)
    assert content[size_bytes:] == b"\xee" * 16
    return np.frombuffer(content, element.storage_dtype, count)


# --- fill


@pytest.mark.parametrize("name", PUBLISHED)
def test_philox_matches_published_vectors(bench: Workbench, fill: Fill, name: str) -> None:
    position, sequence, seed, words = PUBLISHED[name]
    device_memory = bench.gpu.malloc(16)

    fill.bits(device_memory, 1, LEGACY, seed=seed, sequence=sequence, first=position)

    assert np.frombuffer(bench.read_bytes(device_memory, 16), np.uint32).tolist() == list(words)


def test_random_words_do_not_depend_on_grid(bench: Workbench, fill: Fill) -> None:
    count, first = 100_000, 2**32 - 50_000
    device_memory = bench.gpu.malloc(16 * count)

    fill.bits(device_memory, count, LEGACY, seed=SEED, sequence=3, first=first)

    words_of_blocks = np.frombuffer(bench.read_bytes(device_memory, 16 * count), np.uint32).reshape(
        count, 4
    )
    assert np.array_equal(words_of_blocks, philox(first, count, 3, SEED))


@every_element
def test_uniform_values_equal_numpy_bit_by_bit(
    bench: Workbench, fill: Fill, element: Element
) -> None:
    bits = filled(
        bench,
        element,
        10_001,
        lambda device_memory: fill.uniform(
            device_memory, 10_001, element, LEGACY, seed=SEED, sequence=5
        ),
    )

    scale = 127 if element is INT8 else 1
    assert np.array_equal(bits, encode(scale * uniform_values(10_001, element, 5, SEED), element))


@every_element
def test_uniform_values_have_uniform_distribution(
    bench: Workbench, fill: Fill, element: Element
) -> None:
    bits = filled(
        bench,
        element,
        50_000,
        lambda device_memory: fill.uniform(
            device_memory, 50_000, element, LEGACY, seed=SEED, scale=100
        ),
    )
    values = decode(bits, element)

    assert np.abs(values).max() <= 104  # 100 rounded to fp8
    fractions = np.histogram(values, bins=[-105, -50, 0, 50, 105])[0] / len(values)
    # Rounding to 8 bits moves values near the edges.
    assert np.abs(fractions - 0.25).max() < (0.03 if element.size_bytes == 1 else 0.01)
    assert abs(values.mean()) < 1


@pytest.mark.parametrize("element", [FP64, FP32, FP16, INT8], ids=lambda element: element.name)
def test_normal_values_have_normal_distribution(
    bench: Workbench, fill: Fill, element: Element
) -> None:
    bits = filled(
        bench,
        element,
        50_001,
        lambda device_memory: fill.normal(device_memory, 50_001, element, LEGACY, seed=SEED),
    )
    scale = 32 if element is INT8 else 1
    values = decode(bits, element) / scale

    exact = normal_values(50_001, element, 0, SEED)
    step = {FP64: 1e-13, FP32: 2**-21, FP16: 2**-8, INT8: 0.51 / 32}[element]
    if element is INT8:
        exact = np.clip(exact, -128 / 32, 127 / 32)
    assert np.abs(values - exact).max() <= step
    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.02
    assert abs(np.mean(np.abs(values) < 1) - 0.6827) < 0.01


@every_element
def test_integer_fill_covers_range(bench: Workbench, fill: Fill, element: Element) -> None:
    bits = filled(
        bench,
        element,
        1001,
        lambda device_memory: fill.integers(
            device_memory, 1001, element, LEGACY, low=-3, high=4, seed=SEED
        ),
    )
    values, counts = np.unique(decode(bits, element), return_counts=True)

    assert values.tolist() == [-3, -2, -1, 0, 1, 2, 3, 4]
    assert counts.min() > 80


@every_element
def test_constant_fill_writes_every_element(bench: Workbench, fill: Fill, element: Element) -> None:
    bits = filled(
        bench,
        element,
        777,
        lambda device_memory: fill.constant(device_memory, 777, element, LEGACY, value=-3),
    )

    assert set(decode(bits, element).tolist()) == {-3.0}


def test_seed_and_sequence_change_values(bench: Workbench, fill: Fill) -> None:
    def uniform_bytes(seed: int, sequence: int) -> bytes:
        return filled(
            bench,
            FP32,
            64,
            lambda device_memory: fill.uniform(
                device_memory, 64, FP32, LEGACY, seed=seed, sequence=sequence
            ),
        ).tobytes()

    assert uniform_bytes(1, 2) == uniform_bytes(1, 2)
    assert len({uniform_bytes(1, 2), uniform_bytes(2, 2), uniform_bytes(1, 3)}) == 3


def test_empty_fill_launches_nothing(bench: Workbench, fill: Fill) -> None:
    device_memory = bench.ints(7)

    fill.uniform(device_memory, 0, FP32, LEGACY, seed=1)
    fill.constant(device_memory, 0, FP32, LEGACY, value=1)

    assert bench.read(device_memory) == [7]


@pytest.mark.parametrize(("lowest", "highest"), [(1, 0), (0, 2**32)])
def test_invalid_fill_range_is_rejected(
    bench: Workbench, fill: Fill, lowest: int, highest: int
) -> None:
    with pytest.raises(UsageError, match=str(highest)):
        fill.integers(bench.ints(0), 1, FP32, LEGACY, low=lowest, high=highest, seed=1)


# --- spin


class Flags:
    """Allocate two words of pinned memory."""

    def __init__(self, gpu: Gpu) -> None:
        self.release_word = gpu.host_malloc(8)
        self.late_word = Ptr(self.release_word + 4)
        self.words = np.frombuffer(gpu.host_view(self.release_word, 8), np.uint32)
        self.words[:] = 0


def test_spin_kernel_blocks_stream_until_released(bench: Workbench, spin: Spin) -> None:
    stream, flags, value = bench.gpu.stream(blocking=False), Flags(bench.gpu), bench.ints(0)

    spin.until(flags.release_word, flags.late_word, 10_000_000_000, stream)
    bench.store(value, 1, stream)
    queries = [bench.gpu.query_stream(stream) for _ in range(100)]
    flags.words[0] = 1
    bench.gpu.sync_stream(stream)

    assert not any(queries)
    assert bench.read(value) == [1]
    assert flags.words[1] == 0


def test_spin_ends_at_once_if_already_released(bench: Workbench, spin: Spin) -> None:
    stream, flags = bench.gpu.stream(blocking=False), Flags(bench.gpu)
    flags.words[0] = 1

    spin.until(flags.release_word, flags.late_word, 10_000_000_000, stream)
    bench.gpu.sync_stream(stream)

    assert flags.words.tolist() == [1, 0]


def test_spin_ends_after_limit_without_host(bench: Workbench, spin: Spin) -> None:
    stream, flags = bench.gpu.stream(blocking=False), Flags(bench.gpu)
    begin = bench.recorded(stream)

    spin.until(flags.release_word, flags.late_word, 20_000_000, stream)
    end = bench.recorded(stream)
    bench.gpu.sync_stream(stream)

    assert flags.words.tolist() == [0, 1]
    assert 0.0199 < bench.gpu.elapsed(begin, end) < 0.1


def test_spin_lasts_requested_time(bench: Workbench, spin: Spin) -> None:
    stream = bench.gpu.stream()
    spin.for_(1000, stream)
    begin = bench.recorded(stream)
    spin.for_(3_000_000, stream)
    spin.empty(stream)
    end = bench.recorded(stream)
    bench.gpu.sync_stream(stream)

    assert 0.00299 < bench.gpu.elapsed(begin, end) < 0.01


# --- timestamp


def test_timestamps_measure_sm_clock(bench: Workbench, spin: Spin) -> None:
    gpu, stream = bench.gpu, bench.gpu.stream()
    fields = gpu.facts().fields
    count, most_khz = fields["multiprocessor_count"], fields["clock_rate_khz"]
    assert isinstance(count, int)
    assert isinstance(most_khz, int)
    size_bytes = count * STAMP_BYTES
    memory = gpu.host_malloc(2 * size_bytes)
    words = gpu.host_view(memory, 2 * size_bytes)
    words[:] = bytes(2 * size_bytes)

    with closing(Timestamp(gpu)) as timestamp:
        timestamp.stamp(memory, count, stream)
        spin.for_(2_000_000, stream)
        timestamp.stamp(Ptr(memory + size_bytes), count, stream)
        gpu.sync_stream(stream)

    timestamps = np.frombuffer(words, np.uint64).reshape(2, count, 2)
    assert (timestamps > 0).all()
    hz = clock_hz(words[:size_bytes].cast("Q"), words[size_bytes:].cast("Q"))
    assert hz is not None
    assert 1e8 < hz <= 1.02e3 * most_khz
    elapsed = (timestamps[1] - timestamps[0]).astype(float)
    assert hz == pytest.approx(np.median(1e9 * elapsed[:, 0] / elapsed[:, 1]), rel=0.01)


# --- bandwidth

SIZES = [16, 256 * 16, 256 * 16 + 48, 1_000_000]


@pytest.mark.parametrize("size_bytes", SIZES)
def test_copy_kernel_writes_only_its_range(
    bench: Workbench, bandwidth: Bandwidth, fill: Fill, size_bytes: int
) -> None:
    gpu = bench.gpu
    source, target = gpu.malloc(size_bytes), gpu.malloc(size_bytes + 16)
    fill.bits(source, size_bytes // 16, LEGACY, seed=SEED)
    gpu.fill(target, 0xEE, size_bytes + 16, LEGACY)

    bandwidth.copy(target, source, size_bytes, LEGACY)

    content = bench.read_bytes(target, size_bytes + 16)
    assert content == bench.read_bytes(source, size_bytes) + b"\xee" * 16


@pytest.mark.parametrize("size_bytes", SIZES)
def test_write_kernel_writes_every_word(
    bench: Workbench, bandwidth: Bandwidth, size_bytes: int
) -> None:
    target = bench.gpu.malloc(size_bytes + 16)
    bench.gpu.fill(target, 0xEE, size_bytes + 16, LEGACY)

    bandwidth.write(target, 0xDEADBEEF, size_bytes, LEGACY)

    words = np.frombuffer(bench.read_bytes(target, size_bytes + 16), np.uint32)
    assert set(words[:-4].tolist()) == {0xDEADBEEF}
    assert set(words[-4:].tolist()) == {0xEEEEEEEE}


@pytest.mark.parametrize("size_bytes", SIZES)
def test_read_kernel_reads_every_vector(
    bench: Workbench, bandwidth: Bandwidth, size_bytes: int
) -> None:
    gpu, sink = bench.gpu, bench.ints(5)
    source = gpu.malloc(size_bytes)
    gpu.fill(source, 0, size_bytes, LEGACY)

    bandwidth.read(sink, source, size_bytes, LEGACY)
    assert bench.read(sink) == [5]
    for vector in {0, size_bytes // 32, size_bytes // 16 - 1}:
        bench.write(source, np.zeros(size_bytes, np.uint8))
        bench.write(Ptr(source + 16 * vector), np.array([1, 2, 3, SENTINEL], np.uint32))
        bytes_before = bench.read_bytes(source, size_bytes)
        bench.write(sink, np.array([5], np.int32))
        bandwidth.read(sink, source, size_bytes, LEGACY)

        assert bench.read(sink) == [SENTINEL]
        assert bench.read_bytes(source, size_bytes) == bytes_before


@pytest.mark.parametrize("size_bytes", SIZES)
def test_scale_and_triad_compute_in_single_precision(
    bench: Workbench, bandwidth: Bandwidth, fill: Fill, size_bytes: int
) -> None:
    gpu, count = bench.gpu, size_bytes // 4
    device_memory, operand_b, operand_c = (
        gpu.malloc(size_bytes),
        gpu.malloc(size_bytes),
        gpu.malloc(size_bytes),
    )
    for sequence, ptr in enumerate((operand_b, operand_c)):
        fill.integers(ptr, count, FP32, LEGACY, low=-999, high=999, seed=SEED, sequence=sequence)
    first, second = (
        np.frombuffer(bench.read_bytes(ptr, size_bytes), np.float32)
        for ptr in (operand_b, operand_c)
    )

    bandwidth.scale(device_memory, operand_b, 2.5, size_bytes, LEGACY)
    scaled = np.frombuffer(bench.read_bytes(device_memory, size_bytes), np.float32)
    bandwidth.triad(device_memory, operand_b, operand_c, 2.5, size_bytes, LEGACY)
    summed = np.frombuffer(bench.read_bytes(device_memory, size_bytes), np.float32)

    assert np.array_equal(scaled, 2.5 * first)
    assert np.array_equal(summed, first + 2.5 * second)


def test_size_must_be_multiple_of_vector(bench: Workbench, bandwidth: Bandwidth) -> None:
    ptr = bench.ints(1, 2, 3, 4, 5)

    with pytest.raises(UsageError, match="not 20"):
        bandwidth.copy(ptr, ptr, 20, LEGACY)
    bandwidth.copy(ptr, ptr, 0, LEGACY)


# --- compare


def test_different_words_are_counted(bench: Workbench, compare: Compare, fill: Fill) -> None:
    gpu, size_bytes = bench.gpu, 4 * 100_000
    first_buffer, second_buffer = gpu.malloc(size_bytes), gpu.malloc(size_bytes)
    for ptr in (first_buffer, second_buffer):
        fill.bits(ptr, size_bytes // 16, LEGACY, seed=SEED)

    assert compare.count_different(first_buffer, second_buffer, size_bytes, LEGACY) == 0
    gpu.fill(Ptr(second_buffer + 1000), 0xFF, 40, LEGACY)
    gpu.fill(Ptr(second_buffer + size_bytes - 1), 0xAB, 1, LEGACY)
    assert compare.count_different(first_buffer, second_buffer, size_bytes, LEGACY) == 11


def test_mismatched_words_are_counted(bench: Workbench, compare: Compare) -> None:
    ptr = bench.ints(7, 7, 8, 7, -1)

    assert compare.count_not_equal(ptr, 7, 20, LEGACY) == 2
    assert compare.count_not_equal(ptr, 7, 8, LEGACY) == 0
    assert compare.count_not_equal(ptr, 7, 0, LEGACY) == 0
    with pytest.raises(UsageError, match="7 bytes"):
        compare.count_not_equal(ptr, 7, 7, LEGACY)


@every_element
def test_gathered_sample_has_requested_elements(
    bench: Workbench, compare: Compare, element: Element
) -> None:
    values = (np.arange(5000) % 13) - 6.0
    bits = encode(values, element)
    ptr = bench.gpu.malloc(bits.nbytes)
    bench.write(ptr, bits)
    indices = np.array([0, 4999, 17, 17, 2500], np.int64)

    assert compare.sample(ptr, element, indices, LEGACY).tolist() == values[indices].tolist()
    assert compare.sample(ptr, element, indices[:0], LEGACY).size == 0
