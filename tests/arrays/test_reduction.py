"""Reductions and softmax: values against numpy on the simulated device, and CUDA C++ through NVRTC."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from arrays.test_elementwise import Borrowed, view
from arrays.test_sources import CAPABILITIES
from gpu.test_compile import needs_nvrtc
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cudakit
from cudakit.arrays.launch import LaunchPlan, PlannedKernels, arguments_of
from cudakit.arrays.reduction import REDUCERS, ReductionProgram
from cudakit.arrays.softmax import plan_softmax
from cudakit.gpu.api import LEGACY, Ptr
from cudakit.gpu.api.arrays import ArrayView
from cudakit.gpu.compile import compile_cuda
from cudakit.gpu.device_array import DeviceArray, array_over
from cudakit.gpu.sim import Sim

SIM = Sim()
NUMPY_FUNCTIONS = {name: getattr(np, name) for name in REDUCERS}


def reduced(text: str, *arrays: Any, **options: Any) -> Any:
    """Return the result of a reduction of numpy arrays, on the simulated device."""
    on_device = [cudakit.to_device(a, SIM) if isinstance(a, np.ndarray) else a for a in arrays]
    return cudakit.reduction(text, **options)(*on_device).copy_to_host()


def plan(text: str, values: ArrayView, axis: int | None = None) -> LaunchPlan:
    program = ReductionProgram(text, axis)
    result = program.result_type({"x": values})
    return program.plan({"x": values}, view(result.dtype, result.shape, address=1 << 40))


@settings(max_examples=80, deadline=None)
@given(st.data(), hnp.array_shapes(max_dims=4, max_side=9), st.sampled_from(sorted(REDUCERS)))
def test_reduction_over_any_axes_has_values_of_numpy(
    data: st.DataObject, shape: tuple[int, ...], name: str
) -> None:
    dtype = data.draw(st.sampled_from([np.float32, np.float64, np.int32, np.uint8]))
    x = data.draw(hnp.arrays(dtype, shape, elements={"min_value": 0, "max_value": 3}))
    if name == "prod":  # a product that overflows depends on the order: infinity times 0 is NaN
        x = np.minimum(x, 1).astype(dtype)
    axes = st.sets(st.integers(0, len(shape) - 1), min_size=1).map(tuple)
    axis = data.draw(st.one_of(st.none(), axes))
    keepdims = data.draw(st.booleans())

    result = reduced(
        f"{name}(x + 1 > 2)" if name in ("any", "all") else f"{name}(x)",
        x,
        axis=axis,
        keepdims=keepdims,
    )

    values = x + 1 > 2 if name in ("any", "all") else x
    expected = NUMPY_FUNCTIONS[name](values, axis=axis, keepdims=keepdims)
    assert result.shape == expected.shape
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "dtype", "result"),
    [
        ("sum", "int8", "int64"),
        ("sum", "uint8", "uint64"),
        ("sum", "float16", "float16"),
        ("sum", "bool", "int64"),
        ("mean", "int32", "float32"),
        ("max", "int8", "int8"),
        ("any", "float32", "bool"),
        ("prod", "complex64", "complex64"),
    ],
)
def test_result_has_the_dtype_of_the_accumulator(name: str, dtype: str, result: str) -> None:
    assert ReductionProgram(f"{name}(x)").result_type({"x": view(dtype)}).dtype == result


def test_two_arrays_and_a_number_are_reduced_in_one_expression() -> None:
    x, y = np.arange(6.0).reshape(2, 3), np.arange(3.0)

    result = reduced("sqrt(sum(x * y + a))", x, y, 1)

    np.testing.assert_allclose(result, np.sqrt((x * y + 1).sum()))


def test_extrema_keep_nan() -> None:
    x = np.array([1.0, np.nan, 3.0])

    assert np.isnan(reduced("max(x)", x))
    assert np.isnan(reduced("min(x)", x))


def test_reduction_of_no_elements_is_the_identity() -> None:
    x = np.ones((0, 3))

    np.testing.assert_array_equal(reduced("sum(x)", x, axis=0), np.zeros(3))
    np.testing.assert_array_equal(reduced("all(x)", x, axis=0), np.ones(3, bool))
    with pytest.raises(cudakit.UsageError, match="max of no elements"):
        reduced("max(x)", x, axis=0)


def test_strided_input_and_output_are_reduced() -> None:
    base = np.arange(24.0).reshape(4, 6)
    on_device, target = cudakit.to_device(base, SIM), cudakit.to_device(np.zeros(8), SIM)
    columns = Borrowed(on_device, ArrayView(on_device.view.ptr, "float64", (4, 3), (48, 16)))
    every_second = Borrowed(target, ArrayView(target.view.ptr, "float64", (4,), (16,)))

    cudakit.reduction("sum(x)", axis=1)(columns, out=every_second)

    np.testing.assert_array_equal(target.copy_to_host()[::2], base[:, ::2].sum(axis=1))


def test_long_reduction_is_split_over_blocks_with_scratch_memory() -> None:
    split = plan("sum(x)", view("float32", (1 << 20,)))

    assert split.blocks > 100
    assert split.scratch_bytes >= 4 * split.blocks
    assert plan("sum(x)", view("float32", (1000,))).scratch_bytes == 0


def test_launch_plan_does_not_depend_on_the_call() -> None:
    values = view("float32", (1 << 22,))

    assert plan("sum(x)", values) == plan("sum(x)", values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x + 1", "has no reduction"),
        ("z = sum(x)", "not a single expression"),
        ("sum(x) + x", "x is used outside of sum"),
        ("sum(x) * max(x)", "only one reduction"),
        ("sum(foo(x))", "unknown function foo"),
    ],
)
def test_bad_reduction_is_reported(text: str, message: str) -> None:
    with pytest.raises(cudakit.UsageError, match=message):
        cudakit.reduction(text)


def test_bad_arrays_of_a_reduction_are_reported() -> None:
    x = cudakit.to_device(np.ones((2, 3)), SIM)

    with pytest.raises(cudakit.UsageError, match="axis is 2, and the arrays have 2 dimensions"):
        cudakit.reduction("sum(x)", axis=2)(x)
    with pytest.raises(cudakit.UsageError, match=r"shape \[2, 3\], the result \[\]"):
        cudakit.reduction("sum(x)")(x, out=x)
    with pytest.raises(cudakit.UsageError, match="out overlaps x"):
        cudakit.reduction("max(x)", axis=(), keepdims=True)(x, out=x)
    with pytest.raises(cudakit.UsageError, match="result is float64, and out is int64"):
        cudakit.reduction("sum(x)", axis=1)(x, out=cudakit.to_device(np.ones(2, int), SIM))
    with pytest.raises(cudakit.UsageError, match="x is on sim:h200, y on sim:h200"):
        cudakit.reduction("sum(x * y)")(x, cudakit.to_device(np.ones((2, 3)), Sim()))
    result = cudakit.to_device(np.ones(2), SIM)
    read_only = array_over(SIM, replace(result.view, read_only=True))
    with pytest.raises(cudakit.UsageError, match="out is read-only"):
        cudakit.reduction("sum(x)", axis=1)(x, out=read_only)
    misaligned = array_over(SIM, replace(x.view, ptr=Ptr(x.ptr + 4), shape=(2, 2)))
    with pytest.raises(cudakit.UsageError, match="x is misaligned"):
        cudakit.reduction("sum(x)", axis=1)(misaligned)
    np.testing.assert_array_equal(result.copy_to_host(), np.ones(2))


# --- softmax ---------------------------------------------------------------------------------------


@settings(max_examples=30, deadline=None)
@given(
    hnp.arrays(
        np.float32,
        hnp.array_shapes(max_dims=2, max_side=40),
        elements=st.floats(-80, 80, width=32) | st.just(-np.inf),
    )
)
def test_softmax_of_rows_has_values_of_numpy(x: Any) -> None:
    values, output = cudakit.to_device(x, SIM), DeviceArray(SIM, "float32", x.shape)
    softmax = plan_softmax(values.view, output.view)
    PlannedKernels(SIM).launch(softmax, arguments_of(softmax, [values.ptr, output.ptr]), LEGACY)

    with np.errstate(all="ignore"):
        exponentials = np.exp(x.astype(np.float64) - x.max(axis=-1, keepdims=True))
        expected = exponentials / exponentials.sum(axis=-1, keepdims=True)
    np.testing.assert_allclose(output.copy_to_host(), expected, rtol=1e-5, atol=1e-7)


def test_softmax_of_other_arrays_is_refused() -> None:
    with pytest.raises(cudakit.UsageError, match="floating-point"):
        plan_softmax(view("int32"), view("int32"))
    with pytest.raises(cudakit.UsageError, match="same dtype and shape"):
        plan_softmax(view("float32", (4,)), view("float32"))
    with pytest.raises(cudakit.UsageError, match="last one contiguous"):
        transposed = ArrayView(Ptr(1 << 20), "float32", (4, 4), (4, 16))
        plan_softmax(transposed, transposed)


# --- CUDA C++ --------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_reduction_and_softmax_compile_for_every_generation(capability: tuple[int, int]) -> None:
    values = view("bfloat16", (512, 4096))

    assert compile_cuda(plan("sum(x)", values).source, capability).startswith(b"\x7fELF")
    softmax = plan_softmax(values, values).source
    assert compile_cuda(softmax, capability).startswith(b"\x7fELF")


@needs_nvrtc
@pytest.mark.parametrize("dtype", ["bool", "int8", "uint64", "float16", "float64", "complex64"])
def test_every_reduction_compiles_for_dtype(dtype: str) -> None:
    for name in REDUCERS:
        if dtype != "complex64" or name not in ("min", "max"):
            assert compile_cuda(plan(f"{name}(x)", view(dtype, (100, 1000)), axis=0).source, (9, 0))


@needs_nvrtc
@pytest.mark.parametrize(
    ("shape", "axis"),
    [((7,), None), ((1 << 20,), None), ((64, 100), 1), ((1000, 4), 1), ((8, 70, 9), 1)],
)
def test_every_division_into_threads_compiles(shape: tuple[int, ...], axis: int | None) -> None:
    assert compile_cuda(plan("mean(x)", view("float32", shape), axis=axis).source, (9, 0))
