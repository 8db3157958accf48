"""Tuning on a real device ends in time, and its algorithms can be used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from cudakit.bench.case import Rule
from cudakit.bench.gemm import GemmSpec
from cudakit.bench.pipeline import run
from cudakit.bench.tuning.search import Limits
from cudakit.bench.tuning.tune import tune, tuning_machine
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.facts import RunContext
from cudakit.gpu.api.gemm import Gemm
from cudakit.gpu.open import open_gpu

pytestmark = pytest.mark.gpu

# For the last shape, with few rows and a long sum, the default algorithm is often not the fastest.
GEMMS = (
    Gemm(dtype="bf16", m=2048, n=2048, k=2048),
    Gemm(dtype="fp32", m=512, n=512, k=512, layout="nn"),
    Gemm(dtype="bf16", m=128, n=256, k=8192),
)
LIMITS = Limits(time_s=8.0)
# Maximum time after the limit, for the current round, the verification, and the release of memory.
MAX_OVERTIME_S = 5.0


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    pytest.importorskip("nvmath")
    with closing(open_gpu("cuda")) as device:
        yield device


@pytest.mark.parametrize("gemm", GEMMS)
def test_real_tuning_measures_many_candidates_in_time(gpu: Gpu, gemm: Gemm) -> None:
    begin_s = time.perf_counter()
    tuning = tune(GemmSpec(gemms=(gemm,), warmup_s=0.5), gpu, LIMITS)

    assert time.perf_counter() - begin_s < LIMITS.time_s + MAX_OVERTIME_S
    (tuned_gemm,) = tuning.gemms
    assert tuned_gemm.verification.passed
    assert tuned_gemm.candidates > 10
    assert tuned_gemm.tried > 10
    assert tuned_gemm.wrong == ()


def test_tuned_gemm_is_not_slower_than_default(gpu: Gpu) -> None:
    gemm = GEMMS[-1]
    spec = GemmSpec(gemms=(gemm,), warmup_s=0.5, rule=Rule(timeout_s=4.0))
    tuning = tune(spec, gpu, LIMITS)
    machine = tuning_machine(gpu, RunContext())
    algorithms = tuning.algorithms_for(machine, spec.settings)
    tuned_spec = GemmSpec(gemms=(gemm,), warmup_s=0.5, rule=spec.rule, algorithms=algorithms)
    default_case, tuned_case = (
        run(measured_spec, gpu).results[0] for measured_spec in (spec, tuned_spec)
    )

    assert tuned_case.verified
    assert isinstance(default_case.median_s, float)
    assert isinstance(tuned_case.median_s, float)
    assert isinstance(tuned_case.ci95_s, tuple)
    assert isinstance(default_case.ci95_s, tuple)
    assert tuned_case.ci95_s[0] <= default_case.ci95_s[1]
