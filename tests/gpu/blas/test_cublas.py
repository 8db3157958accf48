"""Calls of cuBLAS, recorded by fake bindings."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import pytest
from gpu.blas.fake_cublas import Device, FakeCublas, Places, vendor

from cudakit.errors import CudaError, Unsupported
from cudakit.gpu.api import LEGACY, Ptr, Stream
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings
from cudakit.gpu.blas.cublas import Cublas
from cudakit.units import Unavailable

GEMM = Gemm(dtype="bf16", m=64, n=32, k=16, layout="nt")
USUAL = GemmSettings()


@pytest.fixture
def device() -> Iterator[Device]:
    with closing(Device()) as device:
        yield device


def test_single_gemm_calls_gemm_ex(device: Device) -> None:
    cublas = FakeCublas()
    Cublas(device, vendor(cublas=cublas)).prepare(GEMM, USUAL).enqueue(Places(), LEGACY)
    ((name, arguments, _),) = cublas.calls
    handle, transa, transb, m, n, k, _, a, _, lda, b, _, ldb, _, d, _, ldd, compute, algo = (
        arguments
    )
    assert name == "gemm_ex"
    assert (handle, transa, transb, m, n, k) == (7, 0, 1, 64, 32, 16)
    assert (a, lda, b, ldb, d, ldd) == (0x100, 64, 0x200, 32, 0x300, 64)
    assert (compute, algo) == (cublas.ComputeType.COMPUTE_32F, -1)


def test_batch_passes_strides_and_count(device: Device) -> None:
    cublas = FakeCublas()
    gemm = replace(GEMM, batch=5, padding=8)
    Cublas(device, vendor(cublas=cublas)).prepare(gemm, USUAL).enqueue(Places(), LEGACY)
    ((name, arguments, _),) = cublas.calls
    assert name == "gemm_strided_batched_ex"
    assert arguments[9:11] == (72, 72 * 16)
    assert arguments[13:15] == (40, 40 * 16)
    assert arguments[18:21] == (72, 72 * 32, 5)


def test_sizes_above_32_bits_use_64_bit_function(device: Device) -> None:
    cublas = FakeCublas()
    gemm = replace(GEMM, m=2**31)
    Cublas(device, vendor(cublas=cublas)).prepare(gemm, USUAL).enqueue(Places(), LEGACY)
    assert cublas.calls[0][0] == "gemm_ex_64"


def test_every_gemm_sets_own_workspace_and_mode(device: Device) -> None:
    cublas = FakeCublas()
    blas = Cublas(device, vendor(cublas=cublas))
    exact = blas.prepare(GEMM, GemmSettings(reduced_precision=False, workspace_bytes=4096))
    usual = blas.prepare(GEMM, replace(USUAL, workspace_bytes=8192))
    other = Stream(device.stream())
    for product, stream in ((exact, LEGACY), (usual, LEGACY), (usual, other), (exact, other)):
        product.enqueue(Places(), stream)
    states = [state for _, _, state in cublas.calls]
    assert [state["math"] for state in states] == [16, 0, 0, 16]
    assert [state["workspace"][1] for state in states] == [4096, 8192, 8192, 4096]
    assert [state["stream"] - 0x1000 for state in states] == [LEGACY, LEGACY, other, other]
    assert {state["atomics"] for state in states} == {cublas.AtomicsMode.NOT_ALLOWED}


def test_unchanged_cublas_state_is_not_set_again(device: Device) -> None:
    cublas = FakeCublas()
    product = Cublas(device, vendor(cublas=cublas)).prepare(GEMM, USUAL)
    product.enqueue(Places(), LEGACY)
    cublas.state["marked"] = True
    cublas.state["stream"] = "untouched"
    product.enqueue(Places(), LEGACY)
    assert cublas.state["stream"] == "untouched"


def test_reallocated_workspace_at_same_address_is_set_again(
    device: Device,
) -> None:
    cublas = FakeCublas()
    blas = Cublas(device, vendor(cublas=cublas))
    blas.set_state(1, Ptr(0x2000), 4096, 0)
    blas.prepare(GEMM, USUAL).close()
    cublas.state.clear()
    blas.set_state(1, Ptr(0x2000), 4096, 0)
    assert cublas.state == {"stream": 1, "workspace": (0x2000, 4096), "math": 0}


@pytest.mark.parametrize(
    ("gemm", "reason"),
    [
        (Gemm(dtype="fp8_e4m3", m=16, n=16, k=16), "does not support fp8"),
        (replace(GEMM, epilogue="bias"), "no epilogues"),
        (Gemm(dtype="int8", m=16, n=16, k=15), "multiples of 4"),
        (Gemm(dtype="fp16", m=8, n=8, k=8, accumulate="fp16", output="fp32"), "needs output fp16"),
    ],
    ids=["fp8", "epilogue", "int8", "fp16 sums"],
)
def test_unsupported_gemm_is_refused_before_call(device: Device, gemm: Gemm, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        Cublas(device, vendor()).prepare(gemm, USUAL)


def test_cublas_lists_and_takes_no_algorithms(device: Device) -> None:
    blas = Cublas(device, vendor())
    for request in (
        lambda: blas.heuristics(GEMM, USUAL, 1),
        lambda: blas.algorithms(GEMM, USUAL),
        lambda: blas.prepare(GEMM, USUAL, Algorithm(id=1)),
    ):
        with pytest.raises(Unsupported, match="chooses its algorithm internally"):
            request()
    assert isinstance(blas.prepare(GEMM, USUAL).algorithm, Unavailable)


def test_closed_library_is_refused(device: Device) -> None:
    cublas = FakeCublas()
    blas = Cublas(device, vendor(cublas=cublas))
    product = blas.prepare(GEMM, USUAL)
    product.close()
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        product.enqueue(Places(), LEGACY)
    blas.close()
    assert cublas.state["destroyed"] == 7
    with pytest.raises(CudaError, match="CUDA_ERROR_INVALID_HANDLE"):
        blas.prepare(GEMM, USUAL)
