"""The check of a GEMM accepts errors that rounding explains, and no larger ones."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.gemm_check import (
    epilogue,
    roundoff,
    stratified_sample,
    tolerance_of,
)
from cudakit.gpu.api.arrays import BF16, ELEMENTS, FP16, FP32, Element, decode, encode
from cudakit.gpu.api.gemm import DATA_TYPES, Gemm, GemmSettings

EDGE = 24
PLAIN = GemmSettings(reduced_precision=False)


def factors(k: int, element: Element, seed: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    random = np.random.default_rng(seed)
    a, b = random.uniform(-1, 1, (2, EDGE, k))
    return decode(encode(a, element), element), decode(encode(b, element), element).T


def sum_with_rounding(a: npt.NDArray[Any], b: npt.NDArray[Any], dtype: Any) -> Any:
    """Return a * b with every addition rounded to ``dtype``, one term after the other."""
    sums = np.zeros((EDGE, EDGE), dtype)
    for term in range(a.shape[1]):
        sums += np.outer(a[:, term], b[term]).astype(dtype)
    return sums.astype(np.float64)


def truncate(values: npt.NDArray[np.float64], bits: int) -> npt.NDArray[np.float64]:
    """Truncate values to a number of mantissa bits."""
    fraction, exponent = np.frexp(values)
    return np.ldexp(np.trunc(np.ldexp(fraction, bits)), exponent - bits)


def sum_with_truncation(a: npt.NDArray[Any], b: npt.NDArray[Any], step: int, bits: int) -> Any:
    """Return a * b summed like in a tensor core: ``step`` terms at a time, then truncation to ``bits``."""
    sums = np.zeros((EDGE, EDGE))
    for first in range(0, a.shape[1], step):
        terms = slice(first, first + step)
        sums = truncate(sums + a[:, terms] @ b[terms], bits)
    return sums


def relative_error(computed: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    return float(np.linalg.norm(computed - expected) / np.linalg.norm(expected))


def tolerance(dtype: str, k: int, settings: GemmSettings = PLAIN, **options: Any) -> float:
    gemm = Gemm(dtype=dtype, m=EDGE, n=EDGE, k=k, **options)
    tolerance = tolerance_of(gemm, settings, has_zero_mean=True)
    return tolerance.result + tolerance.sums


@pytest.mark.parametrize("k", [1, 16, 300, 4096])
@pytest.mark.parametrize(
    ("dtype", "element", "sums", "options"),
    [
        ("fp32", FP32, np.float32, {}),
        ("fp16", FP16, np.float16, {"accumulate": "fp16"}),
        ("bf16", BF16, np.float32, {"output": "fp32"}),
    ],
)
def test_sums_with_rounded_additions_are_within_tolerance(
    dtype: str, element: Element, sums: Any, options: dict[str, str], k: int
) -> None:
    a, b = factors(k, element)

    assert relative_error(sum_with_rounding(a, b, sums), a @ b) < tolerance(dtype, k, **options)


@pytest.mark.parametrize("k", [16, 300, 4096, 65536])
def test_sums_truncated_by_tensor_core_are_within_tolerance(k: int) -> None:
    a, b = factors(k, BF16)

    error = relative_error(sum_with_truncation(a, b, 16, 24), a @ b)

    assert error < tolerance("bf16", k, output="fp32")


@pytest.mark.parametrize("k", [128, 4096])
def test_fast_accumulation_widens_fp8_tolerance(k: int) -> None:
    a, b = factors(k, ELEMENTS["fp8_e4m3"])
    error = relative_error(sum_with_truncation(a, b, 32, 14), a @ b)

    fast = tolerance("fp8_e4m3", k, GemmSettings(fast_accumulate=True), output="fp32")
    assert error < fast
    assert fast < 0.05


def test_tf32_instead_of_fp32_exceeds_tolerance() -> None:
    for k in (64, 1024, 16384):
        a, b = factors(k, FP32)
        error = relative_error(truncate(a, 11) @ truncate(b, 11), a @ b)

        assert tolerance("fp32", k) < error < tolerance("tf32", k)


def test_bf16_instead_of_fp16_exceeds_tolerance() -> None:
    a, b = factors(1024, FP16)
    product = decode(encode(a, BF16), BF16) @ decode(encode(b, BF16), BF16)

    assert relative_error(product, a @ b) > tolerance("fp16", 1024)


def test_sums_in_fp16_instead_of_fp32_exceed_tolerance() -> None:
    a, b = factors(4096, FP16)
    error = relative_error(sum_with_rounding(a, b, np.float16), a @ b)

    assert error > tolerance("fp16", 4096, output="fp32")


def test_tolerance_covers_output_rounding_only() -> None:
    for dtype, kind in DATA_TYPES.items():
        for output in kind.outputs:
            if output.is_integer:
                assert tolerance(dtype, 1) == 0
                continue
            limit = tolerance(dtype, 1, output=output.name)
            values = np.random.default_rng(0).normal(size=5000)
            error = relative_error(decode(encode(values, output), output), values)
            assert error < limit or output.name == "fp64"
            assert limit < max(4 * roundoff(output), 0.01)


def test_tolerance_of_equal_terms_is_larger() -> None:
    gemm = Gemm(dtype="fp16", m=8, n=8, k=1024, accumulate="fp16")
    ones = np.zeros((), np.float16)
    for _ in range(4096):
        ones += np.float16(1)

    assert ones < 4096
    random, alike = (
        tolerance_of(gemm, PLAIN, has_zero_mean=is_random) for is_random in (True, False)
    )
    assert alike.sums > 10 * random.sums


@given(st.integers(1, 10**6), st.integers(1, 80), st.integers(0, 2**32))
def test_stratified_sample_has_one_in_each_part_and_both_ends(
    count: int, max_lines: int, seed: int
) -> None:
    lines = stratified_sample(count, max_lines, np.random.default_rng(seed))

    assert len(lines) == min(count, max_lines)
    assert lines[-1] == count - 1
    assert lines[0] == 0 or len(lines) == 1
    assert all(low < high for low, high in pairwise(lines))
    max_gap = max((high - low for low, high in pairwise(lines)), default=0)
    assert max_gap <= 2 * (count / len(lines) + 1)


def test_epilogue_adds_bias_before_activation() -> None:
    sums = np.array([[[[-2.0, 1.0], [0.5, 600.0]]]])
    bias = np.array([1.0, -1.0]).reshape(1, 1, 2, 1)

    def apply(name: Any, **options: Any) -> list[float]:
        gemm = Gemm(dtype="fp8_e4m3", m=2, n=2, k=1, epilogue=name, **options)
        added = bias if gemm.has_bias else np.zeros((1, 1, 1, 1))
        return [round(float(value), 3) for value in epilogue(gemm, sums, added).reshape(-1)]

    assert apply("none") == [-2.0, 1.0, 0.5, 600.0]
    assert apply("bias") == [-1.0, 2.0, -0.5, 599.0]
    assert apply("relu") == [0.0, 1.0, 0.5, 600.0]
    assert apply("relu-bias") == [0.0, 2.0, 0.0, 599.0]
    assert apply("gelu") == [-0.045, 0.841, 0.346, 600.0]
    assert apply("none", output="fp8_e4m3") == [-2.0, 1.0, 0.5, 448.0]
