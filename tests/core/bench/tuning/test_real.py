"""Tuning on a real device ends in time, and its algorithms can be used."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from cudakit.core.bench.method import Rule
from cudakit.core.bench.pipeline import run
from cudakit.core.bench.spec import GemmSpec
from cudakit.core.bench.tuning.search import Limits
from cudakit.core.bench.tuning.tune import tune, tuning_machine
from cudakit.gpu.api import Gpu
from cudakit.gpu.api.gemm import Gemm
from cudakit.gpu.api.run_context import RunContext
from cudakit.gpu.open import open_gpu

pytestmark = pytest.mark.gpu

# Of the last shape heuristics are often not the best: few rows and a long sum.
GEMMS = (
    Gemm(dtype="bf16", m=2048, n=2048, k=2048),
    Gemm(dtype="fp32", m=512, n=512, k=512, layout="nn"),
    Gemm(dtype="bf16", m=128, n=256, k=8192),
)
LIMITS = Limits(time_s=8.0)
# After the time limit: the current round, the verification, and the release of memory.
MORE_S = 5.0


@pytest.fixture
def gpu() -> Iterator[Gpu]:
    pytest.importorskip("nvmath")
    with closing(open_gpu("cuda")) as device:
        yield device


@pytest.mark.parametrize("gemm", GEMMS)
def test_real_tuning_measures_many_candidates_in_time(gpu: Gpu, gemm: Gemm) -> None:
    begin_s = time.perf_counter()
    found = tune(GemmSpec(gemms=(gemm,), warmup_s=0.5), gpu, LIMITS)

    assert time.perf_counter() - begin_s < LIMITS.time_s + MORE_S
    (product,) = found.gemms
    assert product.verification.passed
    assert product.candidates > 10
    assert product.tried > 10
    assert product.wrong == ()


def test_tuned_gemm_is_not_slower_than_default(gpu: Gpu) -> None:
    gemm = GEMMS[-1]
    spec = GemmSpec(gemms=(gemm,), warmup_s=0.5, rule=Rule(timeout_s=4.0))
    found = tune(spec, gpu, LIMITS)
    machine = tuning_machine(gpu, RunContext())
    algorithms = found.algorithms_for(machine, spec.settings)
    with_it = GemmSpec(gemms=(gemm,), warmup_s=0.5, rule=spec.rule, algorithms=algorithms)
    default, used = (run(each, gpu).results[0] for each in (spec, with_it))

    assert used.verified
    assert isinstance(default.median_s, float)
    assert isinstance(used.median_s, float)
    assert isinstance(used.ci95_s, tuple)
    assert isinstance(default.ci95_s, tuple)
    assert used.ci95_s[0] <= default.ci95_s[1]
