"""Example results of tuning, which need no device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cudakit.bench.case import Method, Verification
from cudakit.bench.tuning.search import Limits
from cudakit.bench.tuning.tuned import Tuned, TunedGemm, TunedMachine
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings
from cudakit.units import Unavailable

GEMM = Gemm(dtype="bf16", m=8192, n=4096, k=1024)
DEFAULT = Algorithm(id=66, tile=20, stages=35, workspace_bytes=1024)
FASTER = Algorithm(
    id=66, tile=24, stages=36, split_k=2, reduction=2, swizzle=1, custom=3, inner=4, cluster=5
)
MACHINE = TunedMachine("NVIDIA H200", "9.0", "cublaslt", "13.1.0", "580.159.04", "0.1.0")
NO_GAIN = Unavailable("in the search, no other algorithm was faster than the default")


def tuned_gemm(**changes: Any) -> TunedGemm:
    """Return the result of a GEMM with a gain of 5 %."""
    example = TunedGemm(
        gemm=GEMM,
        shape="",
        settings=GemmSettings(),
        winner=FASTER,
        default=DEFAULT,
        significant=True,
        gain=0.05,
        gain_interval=(0.04, 0.06),
        default_s=100e-6,
        default_ci95_s=(99e-6, 101e-6),
        winner_s=95e-6,
        winner_ci95_s=(94e-6, 96e-6),
        verification=Verification(True, 2e-3, 1e-2, "fp64, 64 rows by 64 columns"),
        tried=900,
        candidates=1200,
        all_listed=True,
        wrong=(),
        rounds=48,
        stopped="complete",
        limits=Limits(),
        method=Method("batch", "rotate", executions=20, buffer_sets=3),
        seed=0,
    )
    return replace(example, **changes)


def untuned_gemm(**changes: Any) -> TunedGemm:
    """Return the result of a GEMM without a gain, for which the default algorithm is used."""
    no_gain: dict[str, Any] = {
        "winner": DEFAULT,
        "significant": False,
        "gain": NO_GAIN,
        "gain_interval": NO_GAIN,
        "winner_s": 100e-6,
        "winner_ci95_s": (99e-6, 101e-6),
    }
    return tuned_gemm(**{**no_gain, **changes})


def tuned(*products: TunedGemm, **changes: Any) -> Tuned:
    example = Tuned(
        simulated=False,
        time_ns=1_795_000_000_000_000_000,
        complete=True,
        machine=MACHINE,
        warnings=(),
        gemms=products,
    )
    return replace(example, **changes)
