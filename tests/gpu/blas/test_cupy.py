"""GEMMs that CuPy cannot compute, or only with copies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cudakit.errors import Unsupported
from cudakit.gpu.api.gemm import Gemm, GemmSettings
from cudakit.gpu.blas.cupy import _check_supported

GEMM = Gemm(dtype="fp16", m=8, n=8, k=8)
USUAL = GemmSettings()


@pytest.mark.parametrize(
    ("gemm", "reason"),
    [
        (Gemm(dtype="fp8_e4m3", m=16, n=16, k=16), "does not support fp8_e4m3"),
        (Gemm(dtype="int8", m=16, n=16, k=16), "does not support int8"),
        (replace(GEMM, epilogue="bias"), "no epilogues"),
        (replace(GEMM, output="fp32"), "output fp32"),
        (replace(GEMM, accumulate="fp16"), "no fp16 accumulator"),
        (replace(GEMM, padding=8), "copies padded matrices"),
        (replace(GEMM, batch=2), "copies batches of layout tn"),
        (Gemm(dtype="tf32", m=8, n=8, k=8, batch=2, layout="nn"), "not support tf32 for batches"),
    ],
)
def test_cupy_rejects_gemm_that_needs_copies(gemm: Gemm, reason: str) -> None:
    with pytest.raises(Unsupported, match=f"CuPy .*{reason}"):
        _check_supported(gemm, USUAL)


def test_cupy_has_no_switch_for_reduced_precision() -> None:
    with pytest.raises(Unsupported, match="cannot disable"):
        _check_supported(GEMM, GemmSettings(reduced_precision=False))
    _check_supported(GEMM, USUAL)
    _check_supported(Gemm(dtype="fp64", m=8, n=8, k=8), GemmSettings(reduced_precision=False))


@pytest.mark.parametrize("dtype", ["fp64", "fp32", "tf32", "fp16", "bf16"])
def test_cupy_supports_its_dtypes(dtype: str) -> None:
    for layout in ("nn", "nt", "tn", "tt"):
        _check_supported(Gemm(dtype=dtype, m=8, n=8, k=8, layout=layout), USUAL)
