from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from cudakit.core.bench.spec import GemmSpec
from cudakit.core.bench.tuning.search import Limits
from cudakit.core.bench.tuning.tune import tune, tuning_machine
from cudakit.core.bench.tuning.tuned import Tuned
from cudakit.errors import InputError, Unsupported, UsageError
from cudakit.gpu.api.gemm import Gemm, GemmSettings
from cudakit.gpu.api.run_context import RunContext
from cudakit.gpu.sim import Sim

QUICK = Limits(iterations=20)
# The heuristics of the simulated library choose an algorithm for it that takes a third longer than the best.
GAINS = Gemm(dtype="fp32", m=256, n=768, k=256)
EQUAL = Gemm(dtype="bf16", m=64, n=64, k=64)


@pytest.fixture
def sim() -> Iterator[Sim]:
    with closing(Sim()) as device:
        yield device


def spec(*gemms: Gemm, **changes: Any) -> GemmSpec:
    return GemmSpec(gemms=gemms, **{"mode": "isolated", "cache": "hot", **changes})


def test_tune_finds_fastest_algorithm(sim: Sim) -> None:
    found = tune(spec(GAINS), sim, QUICK)

    (product,) = found.gemms
    with closing(sim.blas()) as blas:
        assert product.default == blas.heuristics(GAINS, GemmSettings(), 1)[0]
        everything = list(blas.algorithms(GAINS, GemmSettings()))
    assert product.significant
    assert product.winner in everything
    assert product.winner != product.default
    assert isinstance(product.gain, float)
    assert product.gain > 0.2
    assert isinstance(product.winner_s, float)
    assert isinstance(product.default_s, float)
    assert product.winner_s == pytest.approx(product.default_s * (1 - product.gain), rel=0.01)
    assert (product.candidates, product.all_listed) == (len(everything), True)
    assert product.verification.passed
    assert (found.simulated, found.complete, found.untuned) == (True, True, ())


@pytest.mark.parametrize("seed", range(3))
def test_tune_keeps_default_without_gain(sim: Sim, seed: int) -> None:
    (product,) = tune(spec(EQUAL, seed=seed), sim, QUICK).gemms

    assert (product.significant, product.winner, product.seed) == (False, product.default, seed)
    assert product.verification.passed


def test_tune_frees_all_memory(sim: Sim) -> None:
    before = sim.memory_info().free_bytes
    tune(spec(GAINS, EQUAL), sim, QUICK)

    assert sim.memory_info().free_bytes == before


def test_known_gemms_are_not_searched(sim: Sim) -> None:
    first = tune(spec(GAINS), sim, QUICK)
    stages: list[str] = []
    both = tune(spec(GAINS, EQUAL), sim, QUICK, lambda stage, _: stages.append(stage), known=first)
    other = tune(spec(EQUAL), sim, QUICK, known=first)

    assert both.gemms[0] == first.gemms[0]
    assert [product.gemm for product in both.gemms] == [GAINS, EQUAL]
    assert not any("m=256" in stage for stage in stages)
    assert {product.gemm for product in other.gemms} == {GAINS, EQUAL}


def test_gemm_with_other_settings_is_searched(sim: Sim) -> None:
    first = tune(spec(GAINS), sim, QUICK)
    settings = GemmSettings(deterministic=True)
    second = tune(spec(GAINS, settings=settings), sim, QUICK, known=first)

    assert [product.settings for product in second.gemms] == [GemmSettings(), settings]


def test_tuning_of_other_machine_is_rejected(sim: Sim) -> None:
    with closing(Sim("jetson")) as other:
        found = tune(spec(EQUAL), other, QUICK)

    with pytest.raises(InputError, match="GPU: tuned"):
        tune(spec(EQUAL), sim, QUICK, known=found)


def interrupted(sim: Sim, at: int, **options: Any) -> Tuned:
    left = at

    def progress(stage: str, fraction: float) -> None:  # noqa: ARG001
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt

    return tune(spec(EQUAL, GAINS), sim, QUICK, progress, **options)


def test_interrupted_tuning_is_continued_from_result(sim: Sim) -> None:
    found = interrupted(sim, 8)

    assert not found.complete
    assert [product.stopped for product in found.gemms] == ["complete", "interrupted"]
    assert not found.gemms[1].significant
    again = tune(spec(EQUAL, GAINS), sim, QUICK, known=found)
    assert [product.stopped for product in again.gemms] == ["complete", "complete"]
    assert again.gemms[1].significant


def test_unsupported_gemm_is_reported_with_reason(sim: Sim) -> None:
    odd = Gemm(dtype="fp8_e4m3", m=16, n=16, k=16, layout="nn")
    found = tune(spec(odd, EQUAL), sim, QUICK)

    assert [(one.gemm, one.wrong) for one in found.untuned] == [(odd, False)]
    assert [product.gemm for product in found.gemms] == [EQUAL]
    with pytest.raises(Unsupported):
        tune(spec(odd), sim, QUICK)


@pytest.mark.parametrize("changes", [{"library": "cublas"}, {"baselines": ("cublas",)}])
def test_tune_rejects_other_libraries_and_baselines(sim: Sim, changes: dict[str, Any]) -> None:
    with pytest.raises(UsageError, match="cublaslt"):
        tune(spec(EQUAL, **changes), sim, QUICK)


def test_gemm_larger_than_memory_is_rejected_before_tuning(sim: Sim) -> None:
    with pytest.raises(InputError, match="is free"):
        tune(spec(Gemm(dtype="fp64", m=1 << 18, n=1 << 18, k=1 << 18)), sim, QUICK)


def test_tuned_machine_is_recorded(sim: Sim) -> None:
    run_context = RunContext(versions={"driver": "580.1", "cudakit": "0.1.0"})
    machine = tuning_machine(sim, run_context)

    assert (machine.gpu, machine.compute_capability) == ("NVIDIA H200", "9.0")
    assert (machine.library, machine.library_version) == ("cublaslt", "simulated")
    assert (machine.driver, machine.cudakit) == ("580.1", "0.1.0")
    assert tune(spec(EQUAL), sim, QUICK, run_context=run_context).machine == machine


def test_disabled_blocking_kernel_is_warned(sim: Sim) -> None:
    run_context = RunContext(variables={"CUDA_LAUNCH_BLOCKING": "1"})
    found = tune(spec(EQUAL), sim, QUICK, run_context=run_context)

    assert "samples include launch gaps" in found.warnings[0]
    assert not found.gemms[0].method.blocker
