"""``cudakit.kernel``: parameters of CUDA C++ kernels, checked arguments, and compilation."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gpu.test_compile import needs_nvrtc

import cudakit
from cudakit.arrays.cuda_kernel import kernel_source
from cudakit.gpu.api.arrays import Launch
from cudakit.gpu.compile import compile_cuda
from cudakit.gpu.sim import Sim

AXPY = """
// __global__ void not_a_kernel(int x) in a comment
template <typename T, class Index>
__global__ void __launch_bounds__(256) axpy(
    T* y, const T* __restrict__ x, T a, Index n, const Index* unused) {
    const Index i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += a * x[i];
}
"""
FILL = """extern "C" __global__ void fill(unsigned char *out, unsigned value, const size_t n) {
    out[n] = value;
}"""


def axpy(launch: Launch, y: int, x: int, a: Any, n: Any, unused: int) -> None:  # noqa: ARG001
    launch.update(y, a.dtype, n)[:] += a * launch.read(x, a.dtype, n)


def fill(launch: Launch, out: int, value: np.uint32, n: np.uint64) -> None:
    launch.write(out, np.uint8, n)[:] = value


SIM = Sim(host_kernels={"axpy": axpy, "fill": fill})


def array(*values: Any, dtype: str = "float32") -> cudakit.DeviceArray:
    return cudakit.to_device(np.array(values, dtype), SIM)


def failed_call(source: str, *arguments: Any, **options: Any) -> str:
    """Return the message of the UsageError that a call raises."""
    with pytest.raises(cudakit.UsageError) as caught:
        cudakit.kernel(source)(*arguments, **{"grid": 1, "block": 32, **options})
    return caught.value.message


def test_parameters_are_read_from_the_source() -> None:
    source = kernel_source(FILL)

    assert [
        (p.name, p.type_name, p.is_pointer, p.is_const, p.dtype) for p in source.parameters
    ] == [
        ("out", "unsigned char", True, False, "uint8"),
        ("value", "unsigned", False, False, "uint32"),
        ("n", "size_t", False, False, "uint64"),
    ]
    assert kernel_source(AXPY).template_types == ("T", "Index")


def test_template_kernel_is_launched_for_the_dtypes_of_its_arrays() -> None:
    kernel = cudakit.kernel(AXPY)
    for dtype in ("float32", "float64", "int64"):
        y, x = array(1, 2, dtype=dtype), array(10, 20, dtype=dtype)
        kernel(y, x, 2, 2, array(1, dtype="int32"), grid=(1, 1), block=32)
        assert y.copy_to_host().tolist() == [21, 42]


def test_numbers_have_the_types_of_the_parameters() -> None:
    out = array(*range(4), dtype="uint8")

    cudakit.kernel(FILL)(out, value=7, n=np.uint64(4), grid=1, block=1)

    assert out.copy_to_host().tolist() == [7, 7, 7, 7]


def test_arguments_that_do_not_fit_are_reported() -> None:
    y, index = array(1), array(1, dtype="int32")

    assert "T is float32 and float64" in failed_call(
        AXPY, y, array(1, dtype="float64"), 1, 1, index
    )
    assert "cannot be float16" in failed_call(AXPY, *[array(1, dtype="float16")] * 2, 1, 1, index)
    assert "Index is unknown" in failed_call(AXPY, y, y, 1, 1, 0)
    assert "a is a float, not a pointer" in failed_call(
        AXPY.replace("T", "float"), y, y, y, 1, index
    )
    assert "out points to uint8, and the array is float32" in failed_call(FILL, y, 1, 1)
    assert "-1 does not fit into value" in failed_call(FILL, array(1, dtype="uint8"), -1, 1)
    assert "1.5 does not fit into value" in failed_call(FILL, array(1, dtype="uint8"), 1.5, 1)
    assert "value is a uint32" in failed_call(FILL, array(1, dtype="uint8"), np.float32(1), 1)
    assert "missing arguments: n" in failed_call(FILL, array(1, dtype="uint8"), 1)
    assert "out is a pointer" in failed_call(FILL, 1.5, array(1), 1)
    assert "grid is (1, 2, 3, 4)" in failed_call(
        FILL, array(1, dtype="uint8"), 1, 1, grid=(1, 2, 3, 4)
    )
    assert "all arguments are numbers" in failed_call(FILL, 0, 1, 1)


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("", None, "the source has 0 kernels"),
        (FILL + AXPY, None, "the source has 2 kernels: fill, axpy"),
        (FILL, "missing", "no kernel missing; its kernels are: fill"),
        ("template <int N> __global__ void f(int* x) {}", None, "'int N' is not a type"),
    ],
)
def test_source_without_the_kernel_is_reported(source: str, name: str | None, message: str) -> None:
    with pytest.raises(cudakit.UsageError, match=message):
        cudakit.kernel(source, name)


@needs_nvrtc
def test_template_compiles_with_the_line_numbers_of_the_source() -> None:
    source = kernel_source(AXPY)
    types = {"T": "float64", "Index": "int32"}

    assert compile_cuda(source.with_types(types), (9, 0)).startswith(b"\x7fELF")
    with pytest.raises(cudakit.CudaError) as caught:
        compile_cuda(source.with_types(types).replace("y[i] +=", "z[i] +="), (9, 0))
    assert 'kernels.cu(7): error: identifier "z" is undefined' in caught.value.message
    assert "if (i < n) z[i] += a * x[i];" in caught.value.message


@pytest.mark.parametrize("program", ["normalize.py", "histogram.py"])
def test_example_program_runs_on_the_simulated_device(program: str) -> None:
    path = Path(__file__).parents[2] / "examples" / "kernels" / program
    done = subprocess.run([sys.executable, "-P", path, "sim"], capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
