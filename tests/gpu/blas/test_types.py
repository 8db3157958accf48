"""cuBLAS type names, and row-major views of operands."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.gpu.api.gemm import DATA_TYPES, LAYOUTS, Gemm
from cudakit.gpu.blas.frameworks import View, views
from cudakit.gpu.blas.types import type_names

ALL = [
    Gemm(dtype=name, m=16, n=16, k=16, output=output.name, accumulate=accumulate)
    for name, kind in DATA_TYPES.items()
    for output, accumulate in product(kind.outputs, kind.accumulators)
]


@pytest.mark.parametrize(
    "gemm", ALL, ids=lambda gemm: f"{gemm.dtype}-{gemm.output}-{gemm.accumulate}"
)
def test_type_names_exist_in_bindings(gemm: Gemm) -> None:
    nvmath = pytest.importorskip("nvmath", reason="nvmath-python is not installed")
    cublas = pytest.importorskip("nvmath.bindings.cublas")
    names = type_names(gemm)
    assert cublas.ComputeType[names.compute_type]
    sizes = {0: 4, 1: 8, 2: 2, 14: 2, 28: 1, 29: 1, 3: 1, 10: 4}
    assert sizes[nvmath.CudaDataType[names.a]] == gemm.a.element.size_bytes
    assert sizes[nvmath.CudaDataType[names.d]] == gemm.d.element.size_bytes
    assert sizes[nvmath.CudaDataType[names.bias]] == gemm.bias.size_bytes


def test_bindings_have_every_used_attribute() -> None:
    lt = pytest.importorskip("nvmath.bindings.cublasLt", reason="nvmath-python is not installed")
    cublas = pytest.importorskip("nvmath.bindings.cublas")
    from gpu.blas.fake_cublas import FakeCublas, FakeLt

    pairs = [
        (getattr(fake_library, name), getattr(bindings, name))
        for fake_library, bindings in ((FakeLt, lt), (FakeCublas, cublas))
        for name in vars(fake_library)
        if name[0].isupper() and name not in ("ClusterShape", "MatmulInnerShape")
    ]
    assert len(pairs) == 11
    for fake_library, bindings in pairs:
        assert {member.name for member in fake_library} <= {member.name for member in bindings}


def test_bindings_have_every_used_function() -> None:
    lt = pytest.importorskip("nvmath.bindings.cublasLt", reason="nvmath-python is not installed")
    cublas = pytest.importorskip("nvmath.bindings.cublas")
    from gpu.blas.fake_cublas import FakeCublas, FakeLt

    for fake_library, bindings in ((FakeLt, lt), (FakeCublas, cublas)):
        missing_names = [
            name for name in vars(fake_library) if name[0] != "_" and not hasattr(bindings, name)
        ]
        assert missing_names == []
    for name in ("gemm_ex", "gemm_strided_batched_ex"):
        assert hasattr(cublas, name)
        assert hasattr(cublas, f"{name}_64")


def test_tf32_is_compute_type_of_fp32() -> None:
    tf32, fp32 = (type_names(Gemm(dtype=name, m=8, n=8, k=8)) for name in ("tf32", "fp32"))
    assert (tf32.a, tf32.d, tf32.scale_type) == (fp32.a, fp32.d, fp32.scale_type)
    assert tf32.compute_type == "COMPUTE_32F_FAST_TF32"
    assert fp32.compute_type == "COMPUTE_32F"


def test_c_of_fp8_output_has_bias_type() -> None:
    names = type_names(Gemm(dtype="fp8_e4m3", m=16, n=16, k=16, output="fp8_e4m3"))
    assert (names.c, names.d) == ("CUDA_R_16BF", "CUDA_R_8F_E4M3")
    assert type_names(Gemm(dtype="fp16", m=8, n=8, k=8)).c == "CUDA_R_16F"


sizes = st.integers(1, 6)


@given(
    m=sizes,
    n=sizes,
    k=sizes,
    batch=st.integers(1, 3),
    padding=st.integers(0, 3),
    layout=st.sampled_from(LAYOUTS),
)
def test_row_major_views_compute_column_major_gemm(
    m: int, n: int, k: int, batch: int, padding: int, layout: str
) -> None:
    gemm = Gemm(dtype="fp64", m=m, n=n, k=k, batch=batch, padding=padding, layout=layout)
    random = np.random.default_rng(m * n * k)
    a, b = (random.integers(-4, 4, matrix.elements).astype(float) for matrix in (gemm.a, gemm.b))
    d = np.full(gemm.d.elements, np.nan)
    gemm_views = views(gemm)
    array_over(d, gemm_views.result)[...] = array_over(b, gemm_views.left) @ array_over(
        a, gemm_views.right
    )
    for number in range(batch):
        expected = _operand(a, gemm.a, number, layout[0]) @ _operand(b, gemm.b, number, layout[1])
        columns = d.reshape(batch, n, m + padding)[number, :, :m]
        assert np.array_equal(columns, expected.T)
    assert np.isnan(d).sum() == batch * n * padding


def array_over(memory: np.ndarray, view: View) -> np.ndarray:
    assert memory.nbytes == view.size_bytes
    strides = tuple(8 * stride for stride in view.strides)
    return np.lib.stride_tricks.as_strided(memory, view.shape, strides)


def _operand(memory: np.ndarray, matrix: object, number: int, letter: str) -> np.ndarray:
    stored = memory.reshape(matrix.batch, matrix.columns, matrix.leading)[number, :, : matrix.rows]
    return stored if letter == "t" else stored.T
