"""The torch function for each GEMM, and its result on the CPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cudakit.errors import Unsupported
from cudakit.gpu.api.gemm import LAYOUTS, Gemm, GemmSettings
from cudakit.gpu.blas.frameworks import View, attribute_setting, run_with, views
from cudakit.gpu.blas.torch import _framework_settings
from cudakit.gpu.blas.torch_calls import TensorSet, choose_call

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
    settings_required = _framework_settings(torch, gemm, settings)
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
        _framework_settings(torch, GEMM, settings)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    setting = _framework_settings(torch, GEMM, settings)["use_deterministic_algorithms"]
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
