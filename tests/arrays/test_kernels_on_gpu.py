"""Kernels compiled at run time on a real GPU: values against torch, streams, layouts and errors."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cudakit
from cudakit.gpu.compile import CompileCache
from cudakit.gpu.device_array import DeviceArray

pytestmark = pytest.mark.gpu

FLOATS = ("float16", "bfloat16", "float32", "float64")
SIZES = (1, 3, 255, 1000, 10_007, 1 << 20)


@pytest.fixture
def torch() -> Iterator[Any]:
    """Return torch, and check after the test that the context has no sticky error."""
    torch = pytest.importorskip("torch")
    yield torch
    torch.cuda.synchronize()
    assert torch.ones(3, device="cuda").sum().item() == 3


def random(torch: Any, dtype: str, *shape: int) -> Any:
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.rand(shape, device="cuda") > 0.5
    if "int" in dtype:
        return torch.randint(0, 9, shape, device="cuda", dtype=torch.int64).to(kind)
    return torch.randn(shape, device="cuda", dtype=torch.float64).to(kind)


@pytest.mark.parametrize("dtype", [*FLOATS, "int8", "uint8", "int16", "int32", "int64"])
def test_arithmetic_equals_torch_for_every_dtype_and_size(torch: Any, dtype: str) -> None:
    function = cudakit.elementwise("z = x * 2 + y")
    for size in SIZES:
        x, y = random(torch, dtype, size), random(torch, dtype, size)
        wide = torch.float64 if dtype == "float64" else torch.float32
        expected = (x.to(wide) * 2 + y.to(wide)).to(x.dtype) if dtype in FLOATS else x * 2 + y
        result = function(x, y)
        assert type(result) is torch.Tensor
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_arithmetic_equals_torch(torch: Any, dtype: str) -> None:
    x, y = (torch.randn(1000, device="cuda", dtype=getattr(torch, dtype)) for _ in range(2))

    torch.testing.assert_close(cudakit.elementwise("z = x * y / (x + 2j)")(x, y), x * y / (x + 2j))
    torch.testing.assert_close(cudakit.elementwise("z = abs(x)")(x), x.abs())


@pytest.mark.parametrize(
    "name",
    [
        "exp",
        "log",
        "sqrt",
        "rsqrt",
        "sin",
        "tanh",
        "erf",
        "floor",
        "round",
        "sign",
        "log1p",
        "expm1",
    ],
)
@pytest.mark.parametrize("dtype", FLOATS)
def test_function_equals_torch(torch: Any, name: str, dtype: str) -> None:
    x = random(torch, dtype, 10_001).abs() + 0.25
    wide = x.to(torch.float64 if dtype == "float64" else torch.float32)

    result = cudakit.elementwise(f"z = {name}(x)")(x)

    torch.testing.assert_close(result, getattr(torch, name)(wide).to(x.dtype))


def test_integer_division_and_remainder_equal_torch(torch: Any) -> None:
    x = torch.randint(-1000, 1000, (10_000,), device="cuda")
    y = torch.randint(1, 50, (10_000,), device="cuda") * torch.where(x % 3 == 0, -1, 1)

    quotient, remainder = cudakit.elementwise("q = x // y; r = x % y")(x, y)

    torch.testing.assert_close(quotient, torch.div(x, y, rounding_mode="floor"))
    torch.testing.assert_close(remainder, torch.remainder(x, y))
    zero = cudakit.elementwise("q = x // y")(x, torch.zeros_like(x))
    assert not zero.any()


def test_strided_transposed_and_broadcast_arrays_equal_torch(torch: Any) -> None:
    x = torch.randn(64, 48, 33, device="cuda")
    row, column = torch.randn(33, device="cuda"), torch.randn(48, 1, device="cuda")
    function = cudakit.elementwise("z = x * r + c")
    for strided in (
        x,
        x[::2],
        x[:, ::3],
        x[..., 1:].expand(64, 48, 32),
        x.transpose(0, 2).transpose(0, 2),
    ):
        height, width = strided.shape[-2:]
        torch.testing.assert_close(
            function(strided, row[:width], column[:height]),
            strided * row[:width] + column[:height],
        )
    transposed = x.transpose(0, 1)
    torch.testing.assert_close(cudakit.elementwise("z = x + 1")(transposed), transposed + 1)


@pytest.mark.parametrize("offset", range(1, 9))
@pytest.mark.parametrize("dtype", ["int8", "float16", "float32"])
def test_every_alignment_gives_the_values_of_torch(torch: Any, dtype: str, offset: int) -> None:
    x, y = random(torch, dtype, 5000)[offset:], random(torch, dtype, 5000)[: 5000 - offset]

    torch.testing.assert_close(cudakit.elementwise("z = x + y")(x, y), x + y)
    target = torch.zeros(5001, device="cuda", dtype=x.dtype)
    cudakit.elementwise("z = x + y")(x, y, out=target[1 : 5001 - offset])
    torch.testing.assert_close(target[1 : 5001 - offset], x + y)
    assert target[0] == 0
    assert not target[5001 - offset :].any()


def test_update_in_place_and_several_outputs(torch: Any) -> None:
    x, y = torch.ones(1000, device="cuda"), torch.full((1000,), 3.0, device="cuda")

    assert cudakit.elementwise("x += 2 * y")(x, y) is x
    total, is_large = cudakit.elementwise("s = x + y; b = s > 5")(x, y)

    assert x.eq(7).all()
    assert total.eq(10).all()
    assert is_large.all()
    assert is_large.dtype == torch.bool


def test_launch_on_a_stream_follows_the_work_of_that_stream(torch: Any) -> None:
    stream = torch.cuda.Stream()
    x = torch.zeros(1 << 24, device="cuda")
    torch.cuda.synchronize()
    function = cudakit.elementwise("z = x + 1")
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.fill_(41)
        by_current_stream = function(x)
    by_argument = function(x, stream=stream)
    by_handle = function(x, stream=stream.cuda_stream)
    stream.synchronize()
    for result in (by_current_stream, by_argument, by_handle):
        assert result.eq(42).all()


def test_repeated_calls_give_the_values_of_the_first_one(torch: Any) -> None:
    function = cudakit.elementwise("z = x * a + y")
    update, several = cudakit.elementwise("x += y"), cudakit.elementwise("p = x + y; q = x > y")
    for count in range(1, 6):
        x, y = torch.randn(300, 70, device="cuda"), torch.randn(70, device="cuda")
        torch.testing.assert_close(function(x, count / 2, y), x * (count / 2) + y)
        out = torch.empty_like(x)
        assert function(x, count / 2, y, out=out) is out
        torch.testing.assert_close(out, x * (count / 2) + y)
        p, q = several(x, y)
        torch.testing.assert_close(p, x + y)
        assert q.equal(x > y)
        expected = x + y
        assert update(x, y) is x
        torch.testing.assert_close(x, expected)
        add_up = cudakit.reduction("sum(x)", axis=1)
        for _ in range(3):
            torch.testing.assert_close(add_up(x), x.sum(1))


def test_repeated_calls_follow_the_current_stream(torch: Any) -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    x = torch.zeros(1 << 22, device="cuda")
    function, total = cudakit.elementwise("z = x + 1"), cudakit.reduction("sum(x)")
    function(x), total(x)
    torch.cuda.synchronize()
    for count, stream in enumerate(streams * 3, start=1):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(2_000_000)
            x.fill_(count)
            result, sum_ = function(x), total(x)
            again = torch.empty_like(x)
            function(x, out=again, stream=stream)
        stream.synchronize()
        assert result.eq(count + 1).all()
        assert again.eq(count + 1).all()
        assert sum_.item() == count * (1 << 22)


def test_repeated_bad_calls_are_still_reported(torch: Any) -> None:
    function = cudakit.elementwise("z = x + 1")
    x = torch.ones(100, device="cuda")
    for _ in range(3):
        function(x, out=torch.empty_like(x))
    memory = torch.ones(150, device="cuda")
    with pytest.raises(cudakit.UsageError, match="overlaps"):
        function(memory[:100], out=memory[16:116])
    with pytest.raises(cudakit.UsageError, match="read-only"):
        function(x, out=torch.ones(100, device="cuda", requires_grad=True))
    with pytest.raises(cudakit.CudakitError):
        function(x, out=torch.empty_like(x), stream="text")
    assert memory.eq(1).all()


def test_calls_of_several_threads_give_their_own_results(torch: Any) -> None:
    function = cudakit.elementwise("z = x * 2")

    def work(value: int) -> bool:
        with torch.cuda.stream(torch.cuda.Stream()):
            arrays = [torch.full((1000 + n % 7,), float(value), device="cuda") for n in range(50)]
            results = [function(array) for array in arrays]
            torch.cuda.current_stream().synchronize()
        return all(result.eq(2 * value).all().item() for result in results)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))


def test_kernel_of_cuda_source_computes_and_reports_errors(torch: Any) -> None:
    source = """
    template <typename T> __global__ void scale(T* y, const T* x, T a, int n) {
        const int i = blockIdx.x * blockDim.x + threadIdx.x;
        if (i < n) y[i] = a * x[i];
    }"""
    kernel = cudakit.kernel(source)
    for dtype in ("float32", "float64", "int32"):
        x = random(torch, dtype, 1000)
        y = torch.empty_like(x)
        kernel(y, x, 3, 1000, grid=4, block=256)
        torch.testing.assert_close(y, 3 * x)
    with pytest.raises(cudakit.CudaError, match="identifier"):
        cudakit.kernel(source.replace("y[i] =", "w[i] ="))(y, x, 3, 1000, grid=4, block=256)
    with pytest.raises(cudakit.CudaError, match="INVALID_VALUE"):
        kernel(y, x, 3, 1000, grid=4, block=2048)
    with pytest.raises(cudakit.UsageError, match="template parameter T is int32 and float64"):
        kernel(y, x.double(), 3, 1000, grid=4, block=256)


def test_tuned_kernel_computes_the_same(
    torch: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDAKIT_CACHE_DIR", str(tmp_path))
    x, y = torch.ones(1 << 20, device="cuda"), torch.full((1 << 20,), 2.0, device="cuda")

    z = cudakit.elementwise("x += y; z = exp(x)", outputs=["x", "z"], tune=True)(x, y)[1]

    assert x.eq(3).all()
    torch.testing.assert_close(z, torch.exp(x))
    images, _ = CompileCache(tmp_path / "kernels").images()
    assert "measured block size" in {image.label.compiler for image in images}


def test_kernel_is_captured_in_a_graph(torch: Any) -> None:
    x, y, total = (torch.zeros(1 << 20, device="cuda") for _ in range(3))
    result = torch.zeros((), device="cuda")
    add, add_up = cudakit.elementwise("z = x + 1"), cudakit.reduction("sum(x)")
    add(x, out=y), add_up(y, out=result)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        add(x, out=y)
        add_up(y, out=result)
        total = add(y)
    for value in (1, 5):
        x.fill_(value)
        graph.replay()
        torch.cuda.synchronize()
        assert y.eq(value + 1).all()
        assert total.eq(value + 2).all()
        assert result.item() == (value + 1) * (1 << 20)


def test_arrays_of_more_than_2_31_elements_are_computed(torch: Any) -> None:
    count = (1 << 31) + 1001
    x = torch.ones(count, dtype=torch.int8, device="cuda")
    x[-1] = 100

    assert cudakit.elementwise("x += 1")(x) is x

    assert x[-1].item() == 101
    assert x[0].item() == 2
    assert x[1 << 31].item() == 2
    assert cudakit.reduction("sum(x)")(x).item() == 2 * (count - 1) + 101
    assert cudakit.reduction("max(x)")(x).item() == 101
    odd = x[1::2]
    assert cudakit.reduction("sum(x)")(odd).item() == odd.sum(dtype=torch.int64).item()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((10_000,), None), ((1 << 20,), None), ((1_000_003,), None), ((7,), None), ((300, 70), 0),
        ((300, 70), 1), ((4096, 4096), 0), ((4096, 4096), 1), ((3, 100_000), 1), ((100_000, 3), 1),
        ((100_000, 3), 0), ((8, 70, 9), 1), ((8, 70, 9), (0, 2)), ((5, 0), 1),
    ],
)  # fmt: skip
def test_sum_and_max_equal_torch(torch: Any, shape: Any, axis: Any, dtype: str) -> None:
    x = random(torch, dtype, *shape)
    dims = tuple(range(x.ndim)) if axis is None else axis

    total = cudakit.reduction("sum(x)", axis=axis)(x)

    assert total.dtype == x.dtype
    exact = x.to(torch.float64).sum(dim=dims)
    scale = max(x.to(torch.float64).abs().sum(dim=dims).max().item(), 1) if x.numel() else 1
    rounding = {"float16": 1e-3, "bfloat16": 8e-3, "float32": 1e-6, "float64": 1e-14}[dtype]
    assert (total.to(torch.float64) - exact).abs().max().item() <= rounding * scale
    if x.numel():
        torch.testing.assert_close(cudakit.reduction("max(x)", axis=axis)(x), x.amax(dim=dims))


def test_reduction_gives_the_same_bits_in_every_run(torch: Any) -> None:
    x = torch.randn(3_000_017, device="cuda")
    add_up = cudakit.reduction("sum(x * x)")

    results = {add_up(x).item() for _ in range(50)}

    assert len(results) == 1


def test_reductions_on_two_streams_do_not_share_scratch_memory(torch: Any) -> None:
    x, y = torch.ones(1 << 22, device="cuda"), torch.full((1 << 22,), 2.0, device="cuda")
    add_up, streams = cudakit.reduction("sum(x)"), [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    results = [
        (value, add_up(array, stream=stream))
        for _ in range(50)
        for value, array, stream in ((1, x, streams[0]), (2, y, streams[1]))
    ]
    torch.cuda.synchronize()
    assert all(result.item() == value * (1 << 22) for value, result in results)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(
    "shape", [(10_000,), (1000, 64), (1000, 10_000), (3, 100_003), (50, 7), (2, 40_000)]
)
def test_softmax_equals_torch(torch: Any, shape: tuple[int, ...], dtype: str) -> None:
    x = random(torch, dtype, *shape)
    result, repeated_result = torch.empty_like(x), torch.empty_like(x)

    cudakit.softmax(x, out=result)
    cudakit.softmax(x, out=repeated_result)  # launched without Python code

    torch.testing.assert_close(result, torch.softmax(x, -1))
    assert torch.equal(result, repeated_result)
    assert torch.equal(cudakit.softmax(x), result)
    assert torch.equal(cudakit.softmax(x, out=x), result)


# --- other libraries -------------------------------------------------------------------------------


def test_cupy_arrays_give_cupy_arrays() -> None:
    cupy = pytest.importorskip("cupy")
    x = cupy.arange(1000, dtype="float32")

    result = cudakit.elementwise("z = x * 2")(x)

    assert type(result) is cupy.ndarray
    np.testing.assert_array_equal(result.get(), np.arange(1000) * 2)
    assert cudakit.reduction("sum(x)")(x).get() == 499_500
    np.testing.assert_array_equal(
        cudakit.elementwise("z = x + 1")(x[::-2]).get(), np.arange(999, 0, -2) + 1
    )


def test_repeated_calls_of_cupy_follow_its_current_stream_and_device() -> None:
    cupy = pytest.importorskip("cupy")
    add, total = cudakit.elementwise("z = x + y"), cudakit.reduction("sum(x)")
    x, y, out = cupy.arange(1 << 20, dtype="int64"), cupy.ones(1 << 20, "int64"), None
    for count in range(1, 5):
        result = add(x, y)
        assert isinstance(result, cupy.ndarray)
        assert cupy.array_equal(result, cupy.arange(1, (1 << 20) + 1))
        out = cupy.empty_like(x) if out is None else out
        assert add(x, result, out=out) is out
        assert int(total(out)) == (1 << 20) * ((1 << 20) - 1) + (1 << 20)
        y *= 1
        assert count == int(add(cupy.full(3, count - 1), cupy.ones(3, "int64"))[0])
    with cupy.cuda.Stream(non_blocking=True) as stream:
        source = cupy.zeros(1 << 24, "int64")
        for _ in range(20):
            source += 1  # work that the kernel must follow
        result = add(source, source)
        stream.synchronize()
    assert bool((result == 40).all())
    strided, transposed = x[::2], x[:12].reshape(3, 4).T
    for _ in range(3):
        assert cupy.array_equal(add(strided, strided), 2 * strided)
        assert cupy.array_equal(add(transposed, transposed), 2 * transposed)


def test_repeated_calls_with_arrays_of_cudakit_follow_their_streams(torch: Any) -> None:
    add = cudakit.elementwise("z = x + y")
    x = cudakit.to_device(np.arange(1 << 20, dtype=np.float32))
    total = x
    for _ in range(5):
        total = add(total, x)
    assert (total.copy_to_host() == 6 * np.arange(1 << 20, dtype=np.float32)).all()
    stream = torch.cuda.Stream()
    with cudakit.stream(stream):
        delayed = add(x, x)
        for _ in range(5):
            delayed = add(delayed, delayed, out=delayed)
        assert delayed.stream == stream.cuda_stream
    both = add(delayed, total)  # on the default stream, after the work of the other one
    expected = (64 + 6) * np.arange(1 << 20, dtype=np.float32)
    assert np.allclose(both.copy_to_host(), expected)
    tensor = torch.ones(1 << 20, device="cuda")
    for _ in range(3):
        result = add(tensor, x)
        assert isinstance(result, torch.Tensor)
        assert float(result[-1]) == 1 << 20


def test_numba_and_jax_arrays_are_accepted() -> None:
    numba_cuda = pytest.importorskip("numba.cuda")
    x = numba_cuda.to_device(np.arange(10.0))

    result = cudakit.elementwise("z = x * 2")(x)

    assert isinstance(result, DeviceArray)
    np.testing.assert_array_equal(result.copy_to_host(), np.arange(10.0) * 2)
    if "jax" in sys.modules:
        with pytest.raises(cudakit.UsageError, match="read-only"):
            cudakit.elementwise("x += 1")(sys.modules["jax"].numpy.ones(3))


def test_own_arrays_are_shared_with_torch_and_cupy(torch: Any) -> None:
    x = cudakit.to_device(np.arange(12.0).reshape(3, 4))
    shared = torch.from_dlpack(x)

    assert shared.data_ptr() == x.ptr
    assert shared.shape == (3, 4)
    cudakit.elementwise("x += 1")(x)
    torch.testing.assert_close(
        shared.cpu(), torch.arange(12.0, dtype=torch.float64).reshape(3, 4) + 1
    )
    as_tensor = torch.as_tensor(x, device="cuda")
    assert as_tensor.data_ptr() == x.ptr
    del x, as_tensor
    assert shared.sum().item() == 78


def test_own_arrays_on_two_streams_are_ordered(torch: Any) -> None:
    streams = [torch.cuda.Stream() for _ in range(2)]
    x = cudakit.to_device(np.zeros(1 << 22), stream=streams[0])
    with torch.cuda.stream(streams[0]):
        torch.cuda._sleep(20_000_000)
    y = cudakit.elementwise("z = x + 1")(x, stream=streams[0])
    z = cudakit.elementwise("z = x + 1")(y, stream=streams[1])

    assert (z.copy_to_host() == 2).all()


def test_freed_arrays_return_their_memory() -> None:
    function = cudakit.elementwise("z = x + 1")
    x = cudakit.to_device(np.zeros(1 << 20))
    for _ in range(2000):  # 16 GB in total
        function(x)
    cudakit.synchronize()


# --- errors ----------------------------------------------------------------------------------------


def test_bad_calls_change_nothing_and_leave_no_sticky_error(torch: Any) -> None:
    x = torch.ones(1000, device="cuda")
    add = cudakit.elementwise("z = x + y")
    bad_calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], str]] = [
        (add, (x, torch.ones(3, device="cuda")), {}, "do not broadcast"),
        (add, (x, torch.ones(1000)), {}, "torch tensor on cpu"),
        (add, (x, np.ones(1000)), {}, "host memory"),
        (add, (x, "text"), {}, "not a device array"),
        (add, (x, x), {"out": x[:999]}, "shape"),
        (add, (x[1:], x[1:]), {"out": x[:-1]}, "overlaps"),
        (
            add,
            (x, x),
            {"out": torch.ones(1000, device="cuda", dtype=torch.int32)},
            "its array is int32",
        ),
        (add, (x, x), {"out": torch.ones(1, device="cuda").expand(1000)}, "broadcast"),
        (add, (x, x), {"out": torch.ones(1000, device="cuda", requires_grad=True)}, "read-only"),
        (add, (x, x), {"stream": "text"}, "not a CUDA stream"),
        (
            add,
            (x, torch.ones(1000, device="cuda", dtype=torch.complex64).conj()),
            {},
            "pending conjugation",
        ),
    ]
    for function, arguments, options, message in bad_calls:
        with pytest.raises(cudakit.UsageError, match=message):
            function(*arguments, **options)
    assert x.eq(1).all()
    assert add(x, x).eq(2).all()


def test_arrays_of_two_devices_are_refused(torch: Any) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    x, y = torch.ones(10, device="cuda:0"), torch.ones(10, device="cuda:1")

    with pytest.raises(cudakit.UsageError, match="x is on cuda:0, y on cuda:1"):
        cudakit.elementwise("z = x + y")(x, y)
    on_second = cudakit.elementwise("z = x + 1")(y)
    assert on_second.device.index == 1
    assert on_second.eq(2).all()
    with pytest.raises(cudakit.CudakitError):
        cudakit.elementwise("z = x + 1")(y, out=torch.empty_like(y), stream=torch.cuda.Stream(0))
    assert cudakit.elementwise("z = x + 1")(x).eq(2).all()
    add_one = cudakit.elementwise("z = x + 1")
    for _ in range(3):
        for array in (x, y):
            assert add_one(array).device == array.device
            assert add_one(array).eq(2).all()


def test_shortage_of_memory_is_reported(torch: Any) -> None:  # noqa: ARG001
    row, column = (
        cudakit.to_device(np.ones(shape, np.int8)) for shape in ((1 << 20,), (1 << 20, 1))
    )

    with pytest.raises(cudakit.CudaError, match="OUT_OF_MEMORY"):
        cudakit.elementwise("z = x + y")(row, column)
    assert cudakit.reduction("sum(x)")(row).copy_to_host() == 1 << 20
