"""The torch function for each GEMM, and its result on the CPU."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.errors import Unsupported
from cudakit.gpu.api.gemm import DATA_TYPES, LAYOUTS, Gemm, GemmSettings
from cudakit.gpu.blas import type_names
from cudakit.gpu.blas.frameworks import (
    TensorSet,
    View,
    _check_supported,
    _torch_settings,
    attribute_setting,
    choose_call,
    run_with,
    views,
)

GEMM = Gemm(dtype="fp64", m=5, n=3, k=4)
USUAL = GemmSettings()


@pytest.fixture(scope="module")
def torch() -> Any:
    return pytest.importorskip("torch", reason="torch is not installed")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("epilogue", "batch"),
    [("none", 1), ("bias", 1), ("relu-bias", 1), ("gelu-bias", 1), ("none", 3), ("bias", 3)],
)
@pytest.mark.parametrize("padding", [0, 2])
def test_torch_writes_result_in_place(
    torch: Any, layout: str, epilogue: str, batch: int, padding: int
) -> None:
    gemm = replace(GEMM, layout=layout, epilogue=epilogue, batch=batch, padding=padding)
    gemm_views, random = views(gemm), np.random.default_rng(7)
    a, b = random.normal(size=gemm.a.elements), random.normal(size=gemm.b.elements)
    bias, d = random.normal(size=gemm.m), np.full(gemm.d.elements, np.nan)
    left, right, result = (
        _tensor(torch, memory, view)
        for memory, view in ((b, gemm_views.left), (a, gemm_views.right), (d, gemm_views.result))
    )
    added = torch.from_numpy(bias) if gemm.has_bias else None
    choose_call(torch, gemm, USUAL, "cpu").run(TensorSet(left, right, result, added))
    expected = left @ right + (added if gemm.has_bias else 0)
    if "-" in epilogue:
        activation = torch.nn.functional
        expected = (
            activation.relu(expected)
            if epilogue.startswith("relu")
            else activation.gelu(expected, approximate="tanh")
        )
    # On the CPU torch computes GELU with erf.
    assert torch.allclose(result, expected, atol=2e-3 if epilogue == "gelu-bias" else 1e-12)
    assert np.isnan(d).sum() == batch * gemm.n * padding


def test_torch_multiplies_integers(torch: Any) -> None:
    gemm = Gemm(dtype="int8", m=16, n=24, k=32)
    random = np.random.default_rng(7)
    left, right = (
        torch.from_numpy(random.integers(-9, 9, shape, np.int8)) for shape in ((24, 32), (32, 16))
    )
    result = torch.zeros((24, 16), dtype=torch.int32)
    choose_call(torch, gemm, USUAL, "cpu").run(TensorSet(left, right, result, None))
    assert torch.equal(result, left.int() @ right.int())


@pytest.mark.parametrize(
    ("dtype", "settings", "accumulate", "expected_settings"),
    [
        ("tf32", USUAL, "", {"fp32_precision": "tf32"}),
        ("fp32", USUAL, "", {"fp32_precision": "ieee"}),
        (
            "fp16",
            GemmSettings(reduced_precision=False),
            "fp16",
            {"allow_fp16_reduced_precision_reduction": False, "allow_fp16_accumulation": True},
        ),
        ("bf16", USUAL, "", {"allow_bf16_reduced_precision_reduction": True}),
        ("fp64", USUAL, "", {}),
    ],
)
def test_torch_settings_apply_during_enqueue_only(
    torch: Any,
    dtype: str,
    settings: GemmSettings,
    accumulate: str,
    expected_settings: dict[str, Any],
) -> None:
    gemm = Gemm(dtype=dtype, m=8, n=8, k=8, accumulate=accumulate)
    matmul = torch.backends.cuda.matmul
    settings_before = {name: getattr(matmul, name) for name in expected_settings}
    during: dict[str, Any] = {}
    settings_required = _torch_settings(torch, gemm, settings)
    run_with(
        tuple(settings_required.values()),
        lambda: during.update({name: getattr(matmul, name) for name in expected_settings}),
    )
    assert during == expected_settings
    assert {name: getattr(matmul, name) for name in expected_settings} == settings_before


def test_torch_determinism_needs_fixed_workspace(
    torch: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    settings = GemmSettings(deterministic=True)
    with pytest.raises(Unsupported, match="CUBLAS_WORKSPACE_CONFIG"):
        _torch_settings(torch, GEMM, settings)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    setting = _torch_settings(torch, GEMM, settings)["use_deterministic_algorithms"]
    gemm_views: list[bool] = []
    run_with([setting], lambda: gemm_views.append(torch.are_deterministic_algorithms_enabled()))
    assert gemm_views == [True]
    assert not torch.are_deterministic_algorithms_enabled()


def test_setting_is_restored_after_failure() -> None:
    class Holder:
        value = 1

    def fail() -> None:
        assert Holder.value == 2
        raise RuntimeError

    with pytest.raises(RuntimeError):
        run_with([attribute_setting(Holder, "value", 2)], fail)
    assert Holder.value == 1


@pytest.mark.parametrize(
    ("gemm", "reason"),
    [
        (replace(GEMM, epilogue="relu"), "together with a bias"),
        (replace(GEMM, epilogue="gelu-bias", batch=2), "into a batch"),
        (Gemm(dtype="fp8_e4m3", m=16, n=16, k=16, layout="nn"), "only layout tn"),
        (
            Gemm(dtype="fp8_e4m3", m=16, n=16, k=16, epilogue="relu-bias"),
            "only batch 1 and epilogue none",
        ),
        (Gemm(dtype="fp8_e4m3", m=16, n=16, k=24), "multiples of 16"),
        (Gemm(dtype="fp8_e4m3", m=16, n=16, k=16, epilogue="bias", output="fp32"), "no bias"),
        (Gemm(dtype="int8", m=16, n=16, k=16), "n of at least 17"),
        (
            Gemm(dtype="int8", m=16, n=32, k=16, padding=8),
            "only epilogue none, batch 1 and padding 0",
        ),
        (Gemm(dtype="bf16", m=8, n=8, k=8, output="fp32", epilogue="bias"), "bf16 to fp32"),
    ],
)
def test_torch_refuses_unsupported_gemm(gemm: Gemm, reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        choose_call(object(), gemm, USUAL, "cpu")


def _tensor(torch: Any, memory: np.ndarray, view: View) -> Any:
    octets = torch.from_numpy(memory.view(np.uint8))
    return octets.view(torch.float64).as_strided(view.shape, view.strides)


# --- GEMMs that CuPy cannot compute, or only with copies -------------------------------------------

GEMM16 = Gemm(dtype="fp16", m=8, n=8, k=8)


@pytest.mark.parametrize(
    ("gemm", "reason"),
    [
        (Gemm(dtype="fp8_e4m3", m=16, n=16, k=16), "does not support fp8_e4m3"),
        (Gemm(dtype="int8", m=16, n=16, k=16), "does not support int8"),
        (replace(GEMM16, epilogue="bias"), "no epilogues"),
        (replace(GEMM16, output="fp32"), "output fp32"),
        (replace(GEMM16, accumulate="fp16"), "no fp16 accumulator"),
        (replace(GEMM16, padding=8), "copies padded matrices"),
        (replace(GEMM16, batch=2), "copies batches of layout tn"),
        (Gemm(dtype="tf32", m=8, n=8, k=8, batch=2, layout="nn"), "not support tf32 for batches"),
    ],
)
def test_cupy_rejects_gemm_that_needs_copies(gemm: Gemm, reason: str) -> None:
    with pytest.raises(Unsupported, match=f"CuPy .*{reason}"):
        _check_supported(gemm, USUAL)


def test_cupy_has_no_switch_for_reduced_precision() -> None:
    with pytest.raises(Unsupported, match="cannot disable"):
        _check_supported(GEMM16, GemmSettings(reduced_precision=False))
    _check_supported(GEMM16, USUAL)
    _check_supported(Gemm(dtype="fp64", m=8, n=8, k=8), GemmSettings(reduced_precision=False))


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "tf32", "fp16", "bf16"])
def test_cupy_supports_its_dtypes(dtype: str) -> None:
    for layout in ("nn", "nt", "tn", "tt"):
        _check_supported(Gemm(dtype=dtype, m=8, n=8, k=8, layout=layout), USUAL)


# --- cuBLAS type names, and row-major views of operands --------------------------------------------

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
