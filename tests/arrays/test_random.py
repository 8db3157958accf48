"""Random numbers in numpy: equal to the CUDA source on the CPU, and with the right distributions."""

from __future__ import annotations

import ctypes
from collections import Counter as Counts
from itertools import permutations
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from arrays import host_compiler
from hypothesis import given
from hypothesis import strategies as st

from cudakit.arrays.random import (
    FLOATS,
    INTEGERS,
    STORED_COUNTER_SOURCE,
    Draw,
    bits_draw,
    fill_on_host,
    integers_draw,
    normal_draw,
    permutation_draw,
    uniform_draw,
)
from cudakit.arrays.random_values import Counter
from cudakit.errors import UsageError
from cudakit.gpu.api.arrays import BF16, decode

START = Counter(position=2**32 - 100, sequence=3, seed=0x0123456789ABCDEF)
needs_compiler = pytest.mark.skipif(host_compiler.COMPILER is None, reason="needs g++")


def drawn(draw: Draw, start: Counter = START) -> npt.NDArray[Any]:
    """Return the elements of a draw in their storage dtype."""
    elements = np.empty(draw.count, draw.storage)
    fill_on_host(elements, draw, start)
    return elements


def decoded(draw: Draw, start: Counter = START) -> npt.NDArray[np.float64]:
    """Return the elements of a draw of floating-point values."""
    elements = drawn(draw, start)
    return decode(elements, BF16) if draw.storage == "uint16" else elements.astype(np.float64)


def every_draw(count: int) -> list[Draw]:
    """Return draws that together run every kernel."""
    return [
        bits_draw(count),
        *(
            uniform_draw(count, dtype, *bounds)
            for dtype in FLOATS
            for bounds in ((0, 1), (-3, 7.5))
        ),
        *(normal_draw(count, dtype, *scale) for dtype in FLOATS for scale in ((0, 1), (-2, 0.3))),
        *(integers_draw(count, dtype, 0, 100) for dtype in INTEGERS),
        integers_draw(count, "int32", -(2**31), 2**31),
        integers_draw(count, "uint32", 5, 5 + 3 * 2**30),
        integers_draw(count, "int64", -(2**63), 2**63),
        integers_draw(count, "int64", -5, 3 * 2**61),
        integers_draw(count, "uint64", 0, 2**33 + 1),
        *(permutation_draw(min(count, 100), dtype) for dtype in INTEGERS),
        permutation_draw(count, "int64"),
    ]


# --- equality with the CUDA source


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    return host_compiler.compile_random_kernels(Path(tmp_path_factory.mktemp("random")))


@needs_compiler
@pytest.mark.parametrize("count", [1, 7, 1000, 70_000])
def test_cuda_source_on_cpu_equals_numpy_bit_by_bit(library: ctypes.CDLL, count: int) -> None:
    for draw in every_draw(count):
        assert np.array_equal(host_compiler.fill(library, draw, START), drawn(draw)), draw


@needs_compiler
@pytest.mark.parametrize("offset", [1, 2, 3])
def test_misaligned_destination_gets_the_same_numbers(library: ctypes.CDLL, offset: int) -> None:
    for draw in every_draw(1001):
        misaligned = host_compiler.fill(library, draw, START, offset=offset)
        assert np.array_equal(misaligned, drawn(draw)), draw


@needs_compiler
def test_normal_transform_equals_numpy_for_a_million_values(library: ctypes.CDLL) -> None:
    for dtype in ("float32", "float64"):
        draw = normal_draw(1_000_000, dtype, 0, 1)
        assert host_compiler.fill(library, draw, START).tobytes() == drawn(draw).tobytes()


@needs_compiler
def test_kernels_with_a_stored_counter_equal_numpy_and_advance_it(tmp_path: Path) -> None:
    library = host_compiler.compile_random_kernels(tmp_path, STORED_COUNTER_SOURCE)
    stored_words = (ctypes.c_uint64 * 4)()
    address = ctypes.addressof(stored_words)

    for draw in every_draw(1000):
        library.cudakit_random_store_counter(ctypes.c_void_p(address), *map(ctypes.c_uint64, START))
        assert tuple(stored_words)[:3] == START
        numbers = host_compiler.fill(library, draw, Counter(0, 0, 0), stored_counter=address)
        assert np.array_equal(numbers, drawn(draw)), draw
        assert tuple(stored_words)[:3] == (START.position + draw.blocks, *START[1:])


# --- distributions


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (-1000.0, -992.0), (1.0, 1.0 + 2**-7)])
def test_uniform_values_lie_in_half_open_interval(dtype: str, low: float, high: float) -> None:
    values = decoded(uniform_draw(100_000, dtype, low, high))

    assert values.min() >= low
    assert values.max() < high


@pytest.mark.parametrize("dtype", FLOATS)
def test_uniform_values_have_uniform_distribution(dtype: str) -> None:
    values = decoded(uniform_draw(200_000, dtype, 0, 1))

    assert chi_square(np.histogram(values, 64, (0, 1))[0]) < 130  # 63 degrees of freedom, p < 1e-6


@pytest.mark.parametrize(
    ("dtype", "step"), [("float32", 2**-24), ("float16", 2**-11), ("bfloat16", 2**-8)]
)
def test_uniform_values_are_multiples_of_their_step(dtype: str, step: float) -> None:
    values = decoded(uniform_draw(100_000, dtype, 0, 1)) / step

    assert np.array_equal(values, np.rint(values))


@pytest.mark.parametrize("dtype", FLOATS)
def test_normal_values_have_normal_distribution(dtype: str) -> None:
    values = decoded(normal_draw(200_000, dtype, 2.0, 3.0)) / 3 - 2 / 3

    assert abs(values.mean()) < 0.02
    assert abs(values.std() - 1) < 0.02
    for bound, probability in ((0.5, 0.38292), (1, 0.68269), (2, 0.95450), (3, 0.99730)):
        assert np.mean(np.abs(values) < bound) == pytest.approx(probability, abs=0.006)


def test_normal_values_are_accurate() -> None:
    """The transform in fp32 and fp64 differs little from that of numpy in long double."""
    for dtype, bound in (("float32", 1e-6), ("float64", 2e-15)):
        draw = normal_draw(400_000, dtype, 0, 1)
        assert np.abs(drawn(draw) - exact_normal(draw)).max() < bound


def exact_normal(draw: Draw) -> npt.NDArray[Any]:
    """Return the transform of Box and Muller in long double, from the fractions that the kernel uses."""
    is_fp64, extended = draw.kernel.endswith("64"), np.longdouble
    words = drawn(bits_draw(8 * draw.count if is_fp64 else 4 * draw.count))
    if is_fp64:
        halves = words.view(np.uint32).astype(np.uint64).reshape(-1, 2)
        pairs = (halves[:, 0] ^ halves[:, 1] << np.uint64(21)).reshape(-1, 2)
        fraction = pairs[:, 0] * 2.0**-53 + 2.0**-54
    else:
        pairs = words.view(np.uint32).reshape(-1, 2)
        fraction = pairs[:, 0].astype(np.float32) * np.float32(2**-32) + np.float32(2**-33)
    turns = (pairs[:, 1].astype(extended) + extended(0.5)) * extended(2) ** (
        -53 if is_fp64 else -32
    )
    radius = np.sqrt(-2 * np.log(fraction.astype(extended)))
    angle = 2 * extended("3.14159265358979323846264338327950288") * turns
    return np.stack([radius * np.sin(angle), radius * np.cos(angle)], axis=1).reshape(-1)


@pytest.mark.parametrize("span", [2, 3, 7, 100, 3 * 2**30, 2**32, 2**33 + 1, 3 * 2**61, 2**63 - 1])
def test_integers_have_uniform_distribution(span: int) -> None:
    values = drawn(integers_draw(120_000, "uint64", 9, 9 + span)) - np.uint64(9)

    assert int(values.max()) < span
    bin_count = span if span <= 100 else 60
    bins = (values.astype(object) * bin_count // span).astype(int)
    # At most 99 degrees of freedom, p < 1e-6.
    assert chi_square(np.bincount(bins, minlength=bin_count)) < 180


def test_rejected_integers_are_drawn_again() -> None:
    """Without rejection, a third of the numbers would be twice as likely as the others."""
    span = 3 * 2**30
    values = drawn(integers_draw(90_000, "uint32", 0, span))

    assert chi_square(np.bincount(values % 3, minlength=3)) < 28
    assert chi_square(np.bincount(values // 2**30, minlength=3)) < 28


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_permutation_is_equally_likely(size: int) -> None:
    samples = 40 * len(list(permutations(range(size))))
    counts = Counts(tuple(permuted(size, number)) for number in range(samples))

    observed = np.array([counts[order] for order in permutations(range(size))])
    # 119 degrees of freedom at most, p < 1e-6.
    assert chi_square(observed) < {2: 24, 3: 37, 4: 70, 5: 205}[size]


@pytest.mark.parametrize("size", [256, 300, 1024])
def test_positions_of_permutations_are_uniform(size: int) -> None:
    orders = np.array([permuted(size, number) for number in range(400)])

    eighths = orders[:, : size // 8] * 8 // size
    assert chi_square(np.bincount(eighths.reshape(-1), minlength=8)) < 42
    fixed_points = (orders == np.arange(size)).sum(axis=1)  # Poisson with mean 1
    assert abs(fixed_points.mean() - 1) < 0.3
    assert abs(fixed_points.var() - 1) < 0.5
    assert abs(np.mean([is_odd(order) for order in orders]) - 0.5) < 0.13


@given(st.integers(0, 3000), st.integers(0, 2**48 - 1))
def test_permutation_contains_every_number_once(size: int, position: int) -> None:
    order = drawn(permutation_draw(size, "int32"), Counter(position, 1, 2))

    assert np.array_equal(np.sort(order), np.arange(size))


def permuted(size: int, number: int) -> npt.NDArray[Any]:
    return drawn(permutation_draw(size, "int64"), Counter(5 * number, 0, 99))


def is_odd(order: npt.NDArray[Any]) -> bool:
    """Return whether a permutation is odd: its size minus its number of cycles is odd."""
    unvisited, cycles = set(range(len(order))), 0
    while unvisited:
        cycles += 1
        number = unvisited.pop()
        while (number := int(order[number])) in unvisited:
            unvisited.remove(number)
    return (len(order) - cycles) % 2 == 1


def chi_square(observed: npt.NDArray[Any]) -> float:
    """Return the chi-square statistic of counts that are expected to be equal."""
    expected = observed.sum() / len(observed)
    return float(((observed - expected) ** 2 / expected).sum())


# --- arguments


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [
        ("float32", 1, 1),
        ("float32", 2, 1),
        ("float32", 0, float("inf")),
        ("float32", float("nan"), 1),
        ("float32", -3e38, 3e38),
        ("float16", 0, 70000),
        ("float16", 1, 1.0001),
        ("bfloat16", 1, 1.001),
        ("bfloat16", 0, 1e39),
        ("float64", -1.7e308, 1.7e308),
        ("int32", 0, 1),
    ],
)
def test_invalid_uniform_bounds_are_rejected(dtype: str, low: float, high: float) -> None:
    with pytest.raises(UsageError, match=dtype):
        uniform_draw(10, dtype, low, high)


@pytest.mark.parametrize(
    ("dtype", "low", "high"),
    [("int8", 0, 129), ("int8", -129, 0), ("uint32", -1, 5), ("int64", 3, 3)],
)
def test_invalid_integer_bounds_are_rejected(dtype: str, low: int, high: int) -> None:
    with pytest.raises(UsageError, match=f"{dtype} holds"):
        integers_draw(10, dtype, low, high)


def test_invalid_normal_scale_and_permutation_size_are_rejected() -> None:
    with pytest.raises(UsageError, match="deviation -1"):
        normal_draw(10, "float32", 0, -1)
    with pytest.raises(UsageError, match="257 numbers does not fit in uint8"):
        permutation_draw(257, "uint8")
    assert permutation_draw(256, "uint8").count == 256
