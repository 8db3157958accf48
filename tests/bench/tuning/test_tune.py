from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest

from cudakit.bench.gemm import GemmSpec
from cudakit.bench.tuning.search import Limits
from cudakit.bench.tuning.tune import tune, tuning_machine
from cudakit.bench.tuning.tuned import Tuned
from cudakit.errors import InputError, Unsupported, UsageError
from cudakit.gpu.api.facts import RunContext
from cudakit.gpu.api.gemm import Gemm, GemmSettings
from cudakit.gpu.sim import Sim
from cudakit.units import Unavailable

QUICK = Limits(iterations=20)
# For this GEMM, the default algorithm of the simulated library takes a third longer than the fastest.
GAINS = Gemm(dtype="fp32", m=256, n=768, k=256)
EQUAL = Gemm(dtype="bf16", m=64, n=64, k=64)


@pytest.fixture
def sim() -> Iterator[Sim]:
    with closing(Sim()) as device:
        yield device


def spec(*gemms: Gemm, **changes: Any) -> GemmSpec:
    return GemmSpec(gemms=gemms, **{"mode": "isolated", "cache": "hot", **changes})


def test_tune_finds_fastest_algorithm(sim: Sim) -> None:
    tuning = tune(spec(GAINS), sim, QUICK)

    (tuned_gemm,) = tuning.gemms
    with closing(sim.blas()) as blas:
        assert tuned_gemm.default == blas.heuristics(GAINS, GemmSettings(), 1)[0]
        algorithms = list(blas.algorithms(GAINS, GemmSettings()))
    assert tuned_gemm.significant
    assert tuned_gemm.winner in algorithms
    assert tuned_gemm.winner != tuned_gemm.default
    assert isinstance(tuned_gemm.gain, float)
    assert tuned_gemm.gain > 0.2
    assert isinstance(tuned_gemm.winner_s, float)
    assert isinstance(tuned_gemm.default_s, float)
    assert tuned_gemm.winner_s == pytest.approx(
        tuned_gemm.default_s * (1 - tuned_gemm.gain), rel=0.01
    )
    assert (tuned_gemm.candidates, tuned_gemm.all_listed) == (len(algorithms), True)
    assert tuned_gemm.verification.passed
    assert (tuning.simulated, tuning.complete, tuning.untuned) == (True, True, ())


@pytest.mark.parametrize("seed", range(3))
def test_tune_keeps_default_without_gain(sim: Sim, seed: int) -> None:
    (tuned_gemm,) = tune(spec(EQUAL, seed=seed), sim, QUICK).gemms

    assert (tuned_gemm.significant, tuned_gemm.winner, tuned_gemm.seed) == (
        False,
        tuned_gemm.default,
        seed,
    )
    assert tuned_gemm.verification.passed


def test_tune_frees_all_memory(sim: Sim) -> None:
    before = sim.memory_info().free_bytes
    tune(spec(GAINS, EQUAL), sim, QUICK)

    assert sim.memory_info().free_bytes == before


def test_gemms_with_earlier_result_are_not_searched(sim: Sim) -> None:
    first = tune(spec(GAINS), sim, QUICK)
    stages: list[str] = []
    second_tuning = tune(
        spec(GAINS, EQUAL), sim, QUICK, lambda stage, _: stages.append(stage), earlier_tuning=first
    )
    other_machine = tune(spec(EQUAL), sim, QUICK, earlier_tuning=first)

    assert second_tuning.gemms[0] == first.gemms[0]
    assert [tuned_gemm.gemm for tuned_gemm in second_tuning.gemms] == [GAINS, EQUAL]
    assert not any("m=256" in stage for stage in stages)
    assert {tuned_gemm.gemm for tuned_gemm in other_machine.gemms} == {GAINS, EQUAL}


def test_gemm_with_other_settings_is_searched(sim: Sim) -> None:
    first = tune(spec(GAINS), sim, QUICK)
    settings = GemmSettings(deterministic=True)
    second = tune(spec(GAINS, settings=settings), sim, QUICK, earlier_tuning=first)

    assert [tuned_gemm.settings for tuned_gemm in second.gemms] == [GemmSettings(), settings]


def test_tuning_of_other_machine_is_rejected(sim: Sim) -> None:
    with closing(Sim("jetson")) as other_machine:
        tuning = tune(spec(EQUAL), other_machine, QUICK)

    with pytest.raises(InputError, match="GPU: tuned"):
        tune(spec(EQUAL), sim, QUICK, earlier_tuning=tuning)


def interrupted(sim: Sim, calls: int, **options: Any) -> Tuned:
    calls_left = calls

    def progress(stage: str, fraction: float) -> None:  # noqa: ARG001
        nonlocal calls_left
        calls_left -= 1
        if not calls_left:
            raise KeyboardInterrupt

    return tune(spec(EQUAL, GAINS), sim, QUICK, progress, **options)


def test_interrupted_tuning_is_continued_from_result(sim: Sim) -> None:
    tuning = interrupted(sim, 8)

    assert not tuning.complete
    assert [tuned_gemm.stopped for tuned_gemm in tuning.gemms] == ["complete", "interrupted"]
    assert not tuning.gemms[1].significant
    assert tuning.gemms[1].gain == Unavailable("the search was interrupted")
    continued = tune(spec(EQUAL, GAINS), sim, QUICK, earlier_tuning=tuning)
    assert [tuned_gemm.stopped for tuned_gemm in continued.gemms] == ["complete", "complete"]
    assert continued.gemms[1].significant


def test_unsupported_gemm_is_reported_with_reason(sim: Sim) -> None:
    unsupported_gemm = Gemm(dtype="fp8_e4m3", m=16, n=16, k=16, layout="nn")
    tuning = tune(spec(unsupported_gemm, EQUAL), sim, QUICK)

    assert [(untuned.gemm, untuned.wrong) for untuned in tuning.untuned] == [
        (unsupported_gemm, False)
    ]
    assert [tuned_gemm.gemm for tuned_gemm in tuning.gemms] == [EQUAL]
    with pytest.raises(Unsupported):
        tune(spec(unsupported_gemm), sim, QUICK)


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
    tuning = tune(spec(EQUAL), sim, QUICK, run_context=run_context)

    assert "samples include launch gaps" in tuning.warnings[0]
    assert not tuning.gemms[0].method.blocker
