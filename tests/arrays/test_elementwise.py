"""Element-wise kernels: values against numpy on the simulated device, and CUDA C++ through NVRTC."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from arrays.test_sources import CAPABILITIES
from gpu.test_compile import needs_nvrtc
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import cudakit
from cudakit.arrays.elementwise import ElementwiseProgram
from cudakit.arrays.operations import CASTS, COMPLEX, FLOAT, INTEGER, OPERATIONS, dtype_of
from cudakit.gpu.api import Ptr
from cudakit.gpu.api.arrays import ArrayView, contiguous_strides
from cudakit.gpu.compile import CompileCache, compile_cuda
from cudakit.gpu.sim import Sim

SIM = Sim()
LESS_COMMON_DTYPES = ("bool", "uint64", "bfloat16", "float64")


def view(dtype: str, shape: tuple[int, ...] = (1024,), address: int = 1 << 20) -> ArrayView:
    return ArrayView(
        Ptr(address), dtype, shape, contiguous_strides(shape, dtype_of(dtype).size_bytes)
    )


def planned_source(text: str, **inputs: Any) -> str:
    """Return the source of the kernel that is planned for inputs and new outputs."""
    program = ElementwiseProgram(text)
    outputs = {
        name: view(result.dtype, result.shape, address=(index + 2) << 30)
        for index, (name, result) in enumerate(program.result_types(inputs).items())
    }
    return program.plan(inputs, outputs).source


def computed(text: str, *arrays: Any) -> Any:
    """Return the result of an expression for numpy arrays, on the simulated device."""
    on_device = [cudakit.to_device(a, SIM) if isinstance(a, np.ndarray) else a for a in arrays]
    return cudakit.elementwise(text)(*on_device).copy_to_host()


# --- values ----------------------------------------------------------------------------------------

SHAPES = hnp.mutually_broadcastable_shapes(num_shapes=2, max_dims=4, max_side=5, min_side=0)
NUMPY_TYPES = st.sampled_from(
    [np.float32, np.float64, np.int8, np.uint8, np.int32, np.int64, np.complex64]
)


def arrays_of(dtype: Any, shape: tuple[int, ...]) -> st.SearchStrategy[Any]:
    return hnp.arrays(
        dtype,
        shape,
        elements={"min_value": 0, "max_value": 9}
        if np.dtype(dtype).kind in "iu"
        else {"max_magnitude": 9, "allow_nan": False, "allow_infinity": False}
        if np.dtype(dtype).kind == "c"
        else {"min_value": -9, "max_value": 9, "allow_subnormal": False},
    )


@settings(max_examples=60, deadline=None)
@given(st.data(), SHAPES, NUMPY_TYPES)
def test_arithmetic_of_broadcast_arrays_has_values_of_numpy(
    data: st.DataObject, shapes: hnp.BroadcastableShapes, dtype: Any
) -> None:
    x, y = (data.draw(arrays_of(dtype, shape)) for shape in shapes.input_shapes)
    result = computed("z = x * 2 + y - x * y", x, y)

    expected = x * 2 + y - x * y
    assert result.dtype == expected.dtype
    assert result.shape == shapes.result_shape
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-4)


@settings(max_examples=60, deadline=None)
@given(st.data(), hnp.array_shapes(max_dims=4, max_side=6))
def test_expression_of_strided_views_has_values_of_numpy(
    data: st.DataObject, shape: tuple[int, ...]
) -> None:
    base = data.draw(arrays_of(np.float32, shape))
    index = data.draw(hnp.basic_indices(shape, allow_ellipsis=False))
    # An ellipsis makes the result of integer indices a view, too.
    view_index = (*(index if isinstance(index, tuple) else (index,)), ...)
    axes = data.draw(st.permutations(range(base[view_index].ndim)))
    on_device = cudakit.to_device(base, SIM)
    host_view = base[view_index].transpose(axes)
    offset = host_view.__array_interface__["data"][0] - base.__array_interface__["data"][0]
    strided = ArrayView(
        Ptr(on_device.ptr + (offset if host_view.size else 0)),
        "float32",
        host_view.shape,
        host_view.strides,
    )
    result = cudakit.elementwise("z = 2 * x + 1")(Borrowed(on_device, strided)).copy_to_host()

    np.testing.assert_array_equal(result, 2 * host_view + 1)


class Borrowed(cudakit.DeviceArray):
    """A strided view of the memory of another array."""

    def __init__(self, owner: cudakit.DeviceArray, strided: ArrayView) -> None:
        super().__init__(owner.gpu, strided.dtype, (0,))
        self.owner, self.view = owner, strided


@pytest.mark.parametrize("name", sorted(OPERATIONS))
def test_operation_has_values_of_numpy_for_every_dtype(name: str) -> None:
    operation = OPERATIONS[name]
    arguments = ", ".join("abc"[: operation.arity])
    for dtype in ("float16", "float32", "float64", "int16", "int64", "bool", "complex64"):
        if dtype_of(dtype).category not in operation.categories:
            continue
        operands = [
            np.array([1, 2, 1, 3]).astype(dtype),
            np.array([2, 1, 1, 2]).astype(dtype),
            np.array([3, 1, 2, 2]).astype(dtype),
        ]
        operands = operands[: operation.arity]
        result = computed(f"z = {name}({arguments})", *operands)
        compute = [operand.astype(dtype_of(dtype).compute) for operand in operands]
        if name in ("divide", *FLOAT_RESULT) and dtype_of(dtype).category <= INTEGER:
            compute = [operand.astype(np.float32) for operand in compute]
        with np.errstate(all="ignore"):
            expected = operation.numpy_function(*compute)
        np.testing.assert_allclose(result, np.asarray(expected).astype(result.dtype), rtol=2e-3)


FLOAT_RESULT = {
    name for name, operation in OPERATIONS.items() if operation.categories <= {FLOAT, COMPLEX}
}


def test_python_operators_are_those_of_numpy() -> None:
    x, y = np.array([7, -7, 8, 1]), np.array([2, 2, -3, 5])

    np.testing.assert_array_equal(computed("z = x // y", x, y), x // y)
    np.testing.assert_array_equal(computed("z = x % y", x, y), x % y)
    np.testing.assert_array_equal(computed("z = x ** 2 - -y", x, y), x**2 + y)
    np.testing.assert_array_equal(computed("z = (x & y) | ~x ^ y", x, y), (x & y) | ~x ^ y)
    np.testing.assert_array_equal(computed("z = x << 2 >> 1", x), x << 2 >> 1)
    np.testing.assert_array_equal(
        computed("z = -1 < x <= 7 and not y == 5 or x != x", x, y), [True, False, False, False]
    )
    np.testing.assert_array_equal(computed("z = x if x > 0 else y", x, y), np.where(x > 0, x, y))


@pytest.mark.parametrize(
    ("first", "second", "result"),
    [
        ("float16", "float16", "float16"),
        ("float16", "bfloat16", "float32"),
        ("float16", "int64", "float16"),
        ("float32", "float64", "float64"),
        ("int8", "uint8", "int16"),
        ("bool", "int8", "int8"),
        ("complex64", "float64", "complex128"),
        ("bfloat16", "complex64", "complex64"),
        ("float32", 1, "float32"),
        ("float16", 1.5, "float16"),
        ("int32", 1.5, "float32"),
        ("int8", 1, "int8"),
        ("bool", 1, "int64"),
        ("float32", 1j, "complex64"),
        ("float64", 1j, "complex128"),
    ],
)
def test_sum_has_the_promoted_dtype(first: str, second: Any, result: str) -> None:
    other = view(second) if isinstance(second, str) else second
    types = ElementwiseProgram("z = x + y").result_types({"x": view(first), "y": other})

    assert types["z"].dtype == result
    assert types["z"].shape == (1024,)


def test_float16_is_computed_in_float32_and_rounded_once() -> None:
    x = np.array([1000.0], np.float16)

    np.testing.assert_array_equal(computed("z = (x * x) / 1000", x), [1000.0])
    assert np.isinf(computed("z = float16(x * x) / 1000", x)).all()


def test_bfloat16_values_round_to_nearest_even() -> None:
    x = np.array([1.0, 1.00390625, 3.0, np.nan], np.float32)

    rounded = computed("z = bfloat16(x)", x)

    np.testing.assert_array_equal(rounded, [1.0, 1.0, 3.0, np.nan])


# --- calls -----------------------------------------------------------------------------------------


def test_expression_with_several_outputs_returns_a_tuple() -> None:
    x = cudakit.to_device(np.arange(5.0), SIM)
    total, is_large = cudakit.elementwise("s = x + 1; big = s > 3")(x)

    np.testing.assert_array_equal(total.copy_to_host(), np.arange(5.0) + 1)
    np.testing.assert_array_equal(is_large.copy_to_host(), np.arange(5.0) + 1 > 3)


def test_names_that_are_not_outputs_are_not_stored() -> None:
    function = cudakit.elementwise("t = x * x\nz = t + t * t", outputs=["z"])

    result = function(cudakit.to_device([3.0], SIM))

    assert function.outputs == ("z",)
    assert result.copy_to_host().tolist() == [90.0]


def test_assigned_input_is_updated_in_place() -> None:
    x, y = (cudakit.to_device(np.ones(7), SIM) for _ in range(2))

    assert cudakit.elementwise("x += 2 * y")(x, y) is x
    np.testing.assert_array_equal(x.copy_to_host(), np.full(7, 3.0))


def test_output_array_may_be_an_input() -> None:
    x = cudakit.to_device(np.arange(4.0), SIM)

    assert cudakit.elementwise("z = x * x")(x, out=x) is x
    assert x.copy_to_host().tolist() == [0.0, 1.0, 4.0, 9.0]


def test_arguments_are_accepted_by_name() -> None:
    x = cudakit.to_device([1.0, 2.0], SIM)

    assert cudakit.elementwise("z = x - a")(a=1, x=x).copy_to_host().tolist() == [0.0, 1.0]


def test_numpy_scalar_has_its_dtype() -> None:
    x = cudakit.to_device(np.ones(2, np.float32), SIM)

    assert cudakit.elementwise("z = x + a")(x, np.float64(1)).dtype == "float64"
    assert cudakit.elementwise("z = x + a")(x, 1.0).dtype == "float32"


def test_array_without_elements_launches_nothing() -> None:
    x = cudakit.to_device(np.ones((0, 3)), SIM)

    assert cudakit.elementwise("z = x + 1")(x).copy_to_host().shape == (0, 3)


def test_scalar_arrays_give_a_scalar_array() -> None:
    x = cudakit.to_device(np.float32(2), SIM)

    result = cudakit.elementwise("z = x * x")(x).copy_to_host()

    assert result.shape == ()
    assert result == 4


def test_simulated_array_hides_the_interfaces_of_device_memory() -> None:
    x = cudakit.to_device([1.0], SIM)

    assert not hasattr(x, "__cuda_array_interface__")
    with pytest.raises(AttributeError, match="simulated"):
        x.__dlpack_device__()


def test_tuned_block_size_is_stored_in_the_kernel_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAKIT_CACHE_DIR", str(tmp_path))
    x, y = cudakit.to_device(np.arange(1000.0), SIM), cudakit.to_device(np.ones(1000), SIM)

    for _ in range(2):
        assert cudakit.elementwise("y += x; z = y * 2", tune=True)(y, x).__class__ is tuple

    images, unusable = CompileCache(tmp_path / "kernels").images()
    assert [image.label.compiler for image in images] == ["measured block size"]
    assert unusable == 0
    np.testing.assert_array_equal(y.copy_to_host(), 1 + 2 * np.arange(1000.0))


# --- errors ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "the expression is empty"),
        ("z = x +", "invalid syntax"),
        ("z = frobnicate(x)", "unknown function frobnicate"),
        ("z = exp(x, x)", "exp takes 1 arguments, got 2"),
        ("z = x[0]", "this syntax is not supported"),
        ("z, w = x, x", "only assignments to a name"),
        ("for i in x: pass", "only assignments to a name"),
        ("exp = x", "exp is the name of a function"),
        ("z = x in y", "only the comparisons"),
        ("z = 'text'", "this syntax is not supported"),
        ("z = 99999999999999999999", "does not fit into 64 bits"),
        (f"z = {'-' * 200}x", "levels deep"),
        ("z = x\0", "cannot be parsed|null bytes"),
    ],
)
def test_bad_expression_is_reported(text: str, message: str) -> None:
    with pytest.raises(cudakit.UsageError, match=message):
        cudakit.elementwise(text)


def test_error_marks_the_position_in_the_source_line() -> None:
    with pytest.raises(cudakit.UsageError) as caught:
        cudakit.elementwise("y = x + 1\nz = y * foo(x)")

    assert caught.value.message == (
        "unknown function foo\n  line 2: z = y * foo(x)\n                  ^"
    )


def test_operand_type_error_marks_the_operation() -> None:
    x = cudakit.to_device([1.0], SIM)

    with pytest.raises(
        cudakit.UsageError, match="bitwise_and does not support operands of type float64"
    ) as caught:
        cudakit.elementwise("z = 1 + (x & x)")(x)
    assert caught.value.message.splitlines()[1:] == [
        "  line 1: z = 1 + (x & x)",
        "                   ^",
    ]


def call(text: str, *arguments: Any, **options: Any) -> str:
    """Return the message and hint of the error that a call raises."""
    with pytest.raises(cudakit.UsageError) as caught:
        cudakit.elementwise(text)(*arguments, **options)
    return f"{caught.value.message} {caught.value.hint}"


def test_arguments_that_do_not_fit_are_reported() -> None:
    x = cudakit.to_device(np.ones(4), SIM)
    y = cudakit.to_device(np.ones(3), SIM)

    assert "do not broadcast: x [4], y [3]" in call("z = x + y", x, y)
    assert "missing arguments: y" in call("z = x + y", x)
    assert "3 arguments are given" in call("z = x + y", x, x, x)
    assert "no argument w" in call("z = x", x, w=x)
    assert "x is given twice" in call("z = x", x, x=x)
    assert "x is not a device array, but numpy.ndarray" in call("z = x", np.ones(3))
    assert "cudakit.to_device" in call("z = x", np.ones(3))
    assert "all arguments are numbers" in call("z = x", 3)
    assert "does not fit into 64 bits" in call("z = x + a", x, 1 << 63)
    assert "not a stream" in call("z = x", x, stream="default")
    assert "x, which is a number" in call("x += y", 1, x)


def test_output_that_does_not_fit_is_reported_and_unchanged() -> None:
    x = cudakit.to_device(np.ones(4), SIM)
    integers = cudakit.to_device(np.full(4, 7), SIM)

    assert "shape [3], the result [4]" in call("z = x", x, out=cudakit.to_device(np.ones(3), SIM))
    assert "z is float64, and its array is int64" in call("z = x", x, out=integers)
    assert "out has 2 arrays" in call("z = x", x, out=(x, x))
    read_only = Borrowed(
        integers, ArrayView(integers.view.ptr, "int64", (4,), (8,), read_only=True)
    )
    assert "z is read-only" in call("z = 1 + x", integers, out=read_only)
    repeated = Borrowed(integers, ArrayView(integers.view.ptr, "int64", (4,), (0,)))
    assert "z is broadcast" in call("z = 1 + x", integers, out=repeated)
    shifted = Borrowed(integers, ArrayView(Ptr(integers.ptr + 8), "int64", (3,), (8,)))
    first = Borrowed(integers, ArrayView(integers.view.ptr, "int64", (3,), (8,)))
    assert "z overlaps x" in call("z = 1 + x", first, out=shifted)
    misaligned = Borrowed(integers, ArrayView(Ptr(integers.ptr + 4), "int64", (3,), (8,)))
    assert "x is misaligned" in call("z = 1 + x", misaligned)
    np.testing.assert_array_equal(integers.copy_to_host(), np.full(4, 7))


def test_launch_of_too_many_elements_is_reported() -> None:
    program = ElementwiseProgram("z = x")
    huge = ArrayView(Ptr(1 << 20), "float64", (1 << 41,), (8,))
    result = ArrayView(Ptr(1 << 50), "float64", (1 << 41,), (8,))

    with pytest.raises(cudakit.UsageError, match="2199023255552 elements are more than one launch"):
        program.plan({"x": huge}, {"z": result}, threads=64)


def test_result_that_does_not_fit_in_memory_is_reported_and_leaves_the_device_usable() -> None:
    row, column = (cudakit.to_device(np.ones(shape), SIM) for shape in ((1 << 20,), (1 << 20, 1)))

    with pytest.raises(cudakit.CudaError, match="OUT_OF_MEMORY"):
        cudakit.elementwise("z = x + y")(row, column)

    assert cudakit.reduction("sum(x)")(row).copy_to_host() == 1 << 20


def test_captured_call_uses_arrays_of_the_default_stream() -> None:
    sim = Sim()
    x, out = (cudakit.to_device(np.full(4, value), sim) for value in (1.0, 0.0))
    add_one, stream = cudakit.elementwise("z = x + 1"), sim.stream()
    sim.capture_begin(stream)
    add_one(x, out=out, stream=stream)
    with pytest.raises(cudakit.UsageError, match="cannot be allocated while the stream is"):
        add_one(x, stream=stream)
    executable = sim.instantiate(sim.capture_end(stream))

    assert out.copy_to_host(stream).tolist() == [0.0] * 4
    sim.graph_launch(executable, stream)
    assert out.copy_to_host(stream).tolist() == [2.0] * 4


def test_arrays_of_two_devices_are_refused() -> None:
    x, y = cudakit.to_device([1.0], Sim()), cudakit.to_device([1.0], Sim())

    assert "x is on sim:h200, y on sim:h200" in call("z = x + y", x, y)


def test_unsupported_dtype_is_refused() -> None:
    with pytest.raises(cudakit.UsageError, match="not supported"):
        cudakit.to_device(np.array(["text"]), SIM)


def test_largest_array_has_64_bit_indices() -> None:
    source = planned_source("z = x + 1", x=view("int8", ((1 << 31) + 1,)))

    assert "typedef u64 Index" in source
    assert "typedef u32 Index" in planned_source("z = x + 1", x=view("int8"))


@pytest.mark.parametrize(
    ("dtype", "address", "width"),
    [("float32", 0, 4), ("float32", 4, 1), ("float16", 8, 4), ("int8", 0, 16), ("float64", 8, 1)],
)
def test_vector_width_follows_dtype_and_alignment(dtype: str, address: int, width: int) -> None:
    source = planned_source("z = x + x", x=view(dtype, address=(1 << 20) + address))

    assert f"WIDTH = {width}, " in source


def test_thread_computes_several_elements_only_in_large_misaligned_arrays() -> None:
    small, large = (view("float32", (count,), address=(1 << 20) + 4) for count in (1000, 1 << 20))

    assert "WIDTH = 1, VECTORS = 1, " in planned_source("z = x + x", x=small)
    assert "WIDTH = 1, VECTORS = 4, " in planned_source("z = x + x", x=large)


# --- CUDA C++ --------------------------------------------------------------------------------------


@needs_nvrtc
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_fused_expression_compiles_for_every_generation(capability: tuple[int, int]) -> None:
    source = planned_source(
        "z = x * a + y; w = z > 1 and not isnan(z)", x=view("float16"), a=2.0, y=view("bfloat16")
    )

    assert compile_cuda(source, capability).startswith(b"\x7fELF")


@needs_nvrtc
@pytest.mark.parametrize(
    "dtype",
    [
        "int8",
        "float32",
        "complex64",
        *(pytest.param(dtype, marks=pytest.mark.thorough) for dtype in LESS_COMMON_DTYPES),
    ],
)
def test_every_operation_compiles_for_every_dtype(dtype: str) -> None:
    lines = []
    for name, operation in {**OPERATIONS, **CASTS}.items():
        is_complex = dtype_of(dtype).category == COMPLEX
        if dtype_of(dtype).category in operation.categories or name in FLOAT_RESULT:
            if is_complex and (
                COMPLEX not in operation.categories or (name in CASTS and "complex" not in name)
            ):
                continue
            lines.append(f"z_{name} = {name}({', '.join(['x', 'x', 'x'][: operation.arity])})")

    assert compile_cuda(planned_source("\n".join(lines), x=view(dtype)), (9, 0))


@needs_nvrtc
def test_strided_and_broadcast_layouts_compile() -> None:
    transposed = ArrayView(Ptr(1 << 20), "float32", (64, 32), (4, 256))
    misaligned = view("bfloat16", (1 << 20,), address=(1 << 20) + 2)
    row, number = view("float32", (32,)), view("float64", ())

    source = planned_source("z = x + y * n", x=transposed, y=row, n=number)

    assert compile_cuda(source, (9, 0))
    assert compile_cuda(planned_source("z = x + 1", x=misaligned), (9, 0))
