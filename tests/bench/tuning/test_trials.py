from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from bench.tuning.faulty import Faults, FaultySim
from bench.tuning.test_tune import EQUAL, GAINS, QUICK, spec

from cudakit.bench.case import Method
from cudakit.bench.gemm import GemmWorkload
from cudakit.bench.timer import Timer
from cudakit.bench.tuning.trials import AlgorithmTrials
from cudakit.bench.tuning.tune import tune
from cudakit.bench.tuning.tuned import TunedGemm
from cudakit.errors import Unsupported
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmSettings

METHOD = Method("isolated", "hot", interleaved=("other algorithms",))


@pytest.fixture
def sim() -> Iterator[FaultySim]:
    with closing(FaultySim()) as device:
        yield device


@contextmanager
def trials_of(sim: FaultySim, gemm: Gemm = GAINS, **changes: Any) -> Iterator[AlgorithmTrials]:
    workload = GemmWorkload(gemm, GemmSettings(), "cublaslt", "uniform")
    with closing(Timer(sim)) as timer:
        algorithms = recommended(sim, gemm)
        algorithm_trials = AlgorithmTrials(
            timer, workload, replace(METHOD, **changes), algorithms, seed=0
        )
        with closing(algorithm_trials) as trials:
            yield trials


def recommended(sim: FaultySim, gemm: Gemm = GAINS) -> list[Algorithm]:
    with closing(sim.blas()) as blas:
        return list(blas.heuristics(gemm, GemmSettings(), 100))


def tune_gemm(sim: FaultySim, gemm: Gemm = GAINS) -> TunedGemm:
    (tuned_gemm,) = tune(spec(gemm), sim, QUICK).gemms
    return tuned_gemm


def test_candidates_share_operands_and_each_is_verified(sim: FaultySim) -> None:
    sim.faults = Faults(wrong=lambda algorithm: algorithm.id == 4 and algorithm.tile == 15)
    with trials_of(sim) as trials:
        expected = [not sim.faults.wrong(algorithm) for algorithm in recommended(sim)]
        prepared = [number for number in range(1, len(expected)) if trials.prepare(number)]

        assert len(prepared) > 3
        assert trials.verify(0)
        for number in (*prepared, *reversed(prepared)):
            assert trials.verify(number) is expected[number]


@pytest.mark.parametrize("cache", ["hot", "rotate"])
def test_reallocated_buffers_keep_times_and_values(cache: str) -> None:
    with (
        closing(
            FaultySim("jetson")
        ) as jetson,  # This model has a small L2 cache, and needs few buffer sets.
        trials_of(jetson, Gemm(dtype="fp32", m=512, n=512, k=512), cache=cache) as trials,
    ):
        assert trials.verify(0)
        first = trials.measure([0])
        free_bytes = jetson.memory_info().free_bytes
        trials.reallocate()

        assert jetson.memory_info().free_bytes == free_bytes
        assert trials.measure([0]) == pytest.approx(first, rel=1e-2)
        assert trials.verify(0)
        assert (trials.method.buffer_sets > 1) is (cache == "rotate")


def test_reallocate_captures_graph_again(sim: FaultySim) -> None:
    with trials_of(sim, mode="graph", sample_s=0.0) as trials:
        trials.measure([0])
        trials.reallocate()
        trials.measure([0])

        assert trials.verify(0)


def test_times_of_last_rounds(sim: FaultySim) -> None:
    with trials_of(sim) as trials:
        assert trials.prepare(1)
        for order in ([0, 1], [1, 0], [0]):
            trials.measure(order)

        assert len(trials.times_s(0, 0)) == 3
        assert len(trials.times_s(0, 2)) == 2
        assert len(trials.times_s(1, 2)) == 1


def test_values_of_round_have_one_unit(sim: FaultySim) -> None:
    with trials_of(sim) as trials:
        assert trials.prepare(1)
        values = trials.measure([1, 0])
        times = [trials.times_s(number, 1)[0] for number in (1, 0)]

        assert values[0] / values[1] == pytest.approx(times[0] / times[1], rel=1e-3)


def test_unsupported_or_failing_candidate_is_skipped(sim: FaultySim) -> None:
    fastest = tune_gemm(sim).winner
    sim.faults = Faults(
        unsupported=lambda algorithm: algorithm == fastest,
        failing=lambda algorithm: algorithm.tile == 24,
    )
    tuned_gemm = tune_gemm(sim)

    assert tuned_gemm.winner != fastest
    assert tuned_gemm.winner.tile != 24
    assert tuned_gemm.tried < tuned_gemm.candidates
    with trials_of(sim) as trials:
        refused = recommended(sim).index(fastest)
        assert not trials.prepare(refused)
        assert trials.errors == {refused: "refused"}


def test_far_slower_candidate_is_not_measured(sim: FaultySim) -> None:
    fastest = tune_gemm(sim).winner
    sim.faults = Faults(runs={fastest: 20})
    with trials_of(sim) as trials:
        assert not trials.prepare(recommended(sim).index(fastest))


def test_fast_algorithm_with_wrong_values_does_not_win(sim: FaultySim) -> None:
    fastest = tune_gemm(sim).winner
    sim.faults = Faults(wrong=lambda algorithm: algorithm == fastest)
    tuned_gemm = tune_gemm(sim)

    assert tuned_gemm.wrong == (fastest,)
    assert tuned_gemm.winner != fastest
    assert tuned_gemm.verification.passed


def test_wrong_default_is_not_tuned(sim: FaultySim) -> None:
    default = recommended(sim)[0]
    sim.faults = Faults(wrong=lambda algorithm: algorithm == default)
    tuning = tune(spec(GAINS), sim, QUICK)

    assert tuning.gemms == ()
    assert tuning.untuned[0].wrong
    assert "wrong values" in tuning.untuned[0].reason


def test_trials_without_default_raise_unsupported(sim: FaultySim) -> None:
    sim.faults = Faults(unsupported=lambda _: True)
    free_bytes = sim.memory_info().free_bytes
    with pytest.raises(Unsupported, match="refused"):
        tune(spec(EQUAL), sim, QUICK)

    assert sim.memory_info().free_bytes == free_bytes


def test_warm_up_ends_at_time_limit(sim: FaultySim) -> None:
    fractions: list[float] = []
    with trials_of(sim, warmup_s=10.0) as trials:
        trials.warm_up(lambda: len(fractions) == 3, fractions.append)

    assert len(fractions) == 3
    assert max(fractions) <= 1
