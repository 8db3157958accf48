from __future__ import annotations

from contextlib import closing
from typing import Any

import contract.host_kernels  # noqa: F401 gives the simulated device its kernels
import numpy as np
import pytest
from contract.kernels import SOURCE
from contract.products import Problem, run
from contract.workbench import Workbench
from hypothesis import given, settings
from hypothesis import strategies as st

from cudakit.gpu.api.elements import (
    BF16,
    FP8_E4M3,
    FP8_E5M2,
    FP16,
    FP32,
    INT32,
    Element,
    decode,
    encode,
)
from cudakit.gpu.api.gemm import DATA_TYPES, EPILOGUES, LAYOUTS, Gemm, GemmSettings
from cudakit.gpu.sim import Sim
from cudakit.gpu.sim.numpy_gemm import ResultCache, multiply, round_to

INF, NAN = float("inf"), float("nan")


@st.composite
def gemms(draw: st.DrawFn) -> Gemm:
    """Draw a small GEMM that the simulated library supports."""
    dtype = draw(st.sampled_from([*DATA_TYPES]))
    kind, fp8 = DATA_TYPES[dtype], dtype.startswith("fp8")
    multiple = 16 if fp8 else 4 if dtype == "int8" else 1
    accumulate = draw(st.sampled_from(kind.accumulators))
    outputs = [element.name for element in kind.outputs]
    return Gemm(
        dtype=dtype,
        m=multiple * draw(st.integers(1, 40 // multiple)),
        n=draw(st.integers(1, 20)) * (multiple if dtype == "int8" else 1),
        k=multiple * draw(st.integers(1, 40 // multiple)),
        layout="tn" if fp8 else draw(st.sampled_from(LAYOUTS)),
        batch=draw(st.integers(1, 3)),
        padding=multiple * draw(st.integers(0, 3)),
        epilogue="none" if dtype == "int8" else draw(st.sampled_from(EPILOGUES)),
        output="fp16" if accumulate == "fp16" else draw(st.sampled_from(outputs)),
        accumulate=accumulate,
    )


@settings(max_examples=100, deadline=None)
@given(gemms(), st.integers(0, 99))
def test_gemm_matches_definition(gemm: Gemm, seed: int) -> None:
    problem = Problem(gemm, seed)
    with closing(Sim()) as sim:
        bench = Workbench(sim, sim.compile(SOURCE))
        plan = sim.blas().prepare(gemm, GemmSettings())
        problem.check(run(bench, plan, problem))


def dot(
    dtype: str, a: list[float], b: list[float], bias: float | None = None, **options: Any
) -> float:
    """Multiply a row by a column."""
    gemm = Gemm(dtype=dtype, m=1, n=1, k=len(a), layout="tn", **options)
    row, column = encode([a], gemm.a.element), encode([b], gemm.b.element)
    added = None if bias is None else encode([bias], gemm.bias)
    return float(decode(multiply(gemm, row, column, added), gemm.d.element)[0, 0])


def test_sum_is_rounded_once() -> None:
    tiny = 2.0**-25

    assert dot("fp32", [1.0, tiny, tiny, tiny, tiny], [1.0] * 5) == 1 + 2**-23
    assert dot("fp16", [1.0, 2.0**-12, 2.0**-12], [1.0] * 3, output="fp32") == 1 + 2**-11


def test_sum_is_rounded_to_accumulator_first() -> None:
    row, column = [2048.0, 1.0], [1.0, 1.0]

    assert dot("fp16", row, column, bias=1.0, epilogue="bias") == 2050
    assert dot("fp16", row, column, bias=1.0, epilogue="bias", accumulate="fp16") == 2048


@pytest.mark.parametrize(
    ("value", "rounded"),
    [
        (1 + 2**-11, 1.0),  # a tie is rounded to even
        (1 + 3 * 2**-11, 1 + 2**-9),
        (1 + 2**-11 + 2**-20, 1 + 2**-10),
        (-(1 + 2**-11 + 2**-20), -(1 + 2**-10)),
        (3.0, 3.0),
    ],
)
def test_tf32_factors_have_10_bits(value: float, rounded: float) -> None:
    assert dot("tf32", [value], [1.0]) == dot("tf32", [1.0], [value]) == rounded
    assert dot("fp32", [value], [1.0]) == value


def test_int8_sums_are_exact_and_wrap_around() -> None:
    assert dot("int8", [-128.0] * 131_071, [-128.0] * 131_071) == 131_071 * 2**14
    assert dot("int8", [-128.0] * 131_072, [-128.0] * 131_072) == -(2.0**31)


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16", "bf16", "fp8_e4m3", "fp8_e5m2"])
def test_nan_is_preserved(dtype: str) -> None:
    element = DATA_TYPES[dtype].a
    gemm = Gemm(dtype=dtype, m=1, n=1, k=1)
    for output in (gemm.output, DATA_TYPES[dtype].outputs[-1].name):
        gemm = Gemm(dtype=dtype, m=1, n=1, k=1, output=output)
        row = (
            np.full((1, 1), 0xFF, np.uint8)
            .repeat(element.size_bytes, 1)
            .view(element.storage_dtype)
        )
        column = encode([[1.0]], gemm.b.element)
        assert np.isnan(decode(multiply(gemm, row, column), gemm.d.element)[0, 0])


@pytest.mark.parametrize(
    ("element", "value", "rounded"),
    [
        (FP16, 65519.0, 65504.0),
        (FP16, -65520.0, -INF),
        (BF16, 3.4e38, INF),
        (FP32, 1e39, INF),
        (FP8_E4M3, 1e6, 448.0),
        (FP8_E4M3, -INF, -448.0),
        (FP8_E5M2, INF, 57344.0),
        (BF16, 1 + 2**-8, 1.0),
        (BF16, 1 + 3 * 2**-8, 1 + 2**-6),
        (INT32, 2.0**31, -(2.0**31)),
    ],
)
def test_overflow_gives_infinity_or_largest_value(
    element: Element, value: float, rounded: float
) -> None:
    with np.errstate(over="ignore"):
        assert decode(round_to(np.array([value]), element), element)[0] == rounded


@given(st.lists(st.floats(-4e4, 4e4, width=32), min_size=1), st.sampled_from([BF16, FP16, FP32]))
def test_rounding_matches_kernels(values: list[float], element: Element) -> None:
    exact = np.array(values)

    assert round_to(exact, element).tolist() == encode(exact, element).tolist()


def test_gelu_is_tanh_form() -> None:
    values = {-3.0: -0.00363739, -1.0: -0.15880801, 0.0: 0.0, 0.5: 0.34571401, 2.0: 1.95459769}
    for value, expected in values.items():
        assert dot("fp64", [value], [1.0], epilogue="gelu") == pytest.approx(expected, abs=1e-8)


def test_gemm_results_are_cached_within_size_limit() -> None:
    gemm = Gemm(dtype="fp32", m=4, n=4, k=4)
    first, second = (np.full((4, 4), value, np.float32) for value in (1, 2))
    large_cache, small_cache = ResultCache(1 << 10), ResultCache(gemm.d.size_bytes)
    for products in (large_cache, small_cache):
        product = products.multiply(gemm, first, first)
        assert products.multiply(gemm, first.copy(), first.copy()) is product
        assert products.multiply(gemm, first, second).tolist() == [[8.0] * 4] * 4
        assert (products.multiply(gemm, first, first) is product) == (products is large_cache)


def test_cached_gemm_result_depends_on_gemm() -> None:
    products, bits = ResultCache(), np.arange(16, dtype=np.float32).reshape(4, 4)
    layout_nn = products.multiply(Gemm(dtype="fp32", m=4, n=4, k=4, layout="nn"), bits, bits)
    transposed = products.multiply(Gemm(dtype="fp32", m=4, n=4, k=4, layout="tn"), bits, bits)

    assert layout_nn.tolist() == (bits @ bits).tolist()
    assert transposed.tolist() == (bits @ bits.T).tolist()
