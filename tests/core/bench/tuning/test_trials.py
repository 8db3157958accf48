from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import Any

import pytest
from core.bench.tuning.faulty import Faults, FaultySim
from core.bench.tuning.test_tune import EQUAL, GAINS, QUICK, spec

from cudakit.core.bench.method import Method
from cudakit.core.bench.timer import Timer
from cudakit.core.bench.tuning.trials import AlgorithmTrials
from cudakit.core.bench.tuning.tune import tune
from cudakit.core.bench.tuning.tuned import TunedGemm
from cudakit.core.bench.workloads.gemm import GemmWorkload
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
        algorithms = listed(sim, gemm)
        made = AlgorithmTrials(timer, workload, replace(METHOD, **changes), algorithms, seed=0)
        with closing(made) as trials:
            yield trials


def listed(sim: FaultySim, gemm: Gemm = GAINS) -> list[Algorithm]:
    with closing(sim.blas()) as blas:
        return list(blas.heuristics(gemm, GemmSettings(), 100))


def tuned(sim: FaultySim, gemm: Gemm = GAINS) -> TunedGemm:
    (product,) = tune(spec(gemm), sim, QUICK).gemms
    return product


def test_candidates_share_operands_and_are_verified_each(sim: FaultySim) -> None:
    sim.faults = Faults(wrong=lambda each: each.id == 4 and each.tile == 15)
    with trials_of(sim) as trials:
        expected = [not sim.faults.wrong(each) for each in listed(sim)]
        entered = [number for number in range(1, len(expected)) if trials.prepare(number)]

        assert len(entered) > 3
        assert trials.verify(0)
        for number in (*entered, *reversed(entered)):
            assert trials.verify(number) is expected[number]


@pytest.mark.parametrize("cache", ["hot", "rotate"])
def test_buffers_are_renewed_in_between(cache: str) -> None:
    with (
        closing(FaultySim("jetson")) as small,  # a small L2 cache, and few buffer sets
        trials_of(small, Gemm(dtype="fp32", m=512, n=512, k=512), cache=cache) as trials,
    ):
        assert trials.verify(0)
        first = trials.measure([0])
        used = small.memory_info().free_bytes
        trials.reallocate()

        assert small.memory_info().free_bytes == used
        assert trials.measure([0]) == pytest.approx(first, rel=1e-2)
        assert trials.verify(0)
        assert (trials.method.buffer_sets > 1) is (cache == "rotate")


def test_reallocate_captures_graph_again(sim: FaultySim) -> None:
    with trials_of(sim, mode="graph", sample_s=0.0) as trials:
        trials.measure([0])
        trials.reallocate()
        trials.measure([0])

        assert trials.verify(0)


def test_times_are_those_of_the_last_rounds(sim: FaultySim) -> None:
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


def test_candidate_that_cannot_run_is_skipped(sim: FaultySim) -> None:
    best = tuned(sim).winner
    sim.faults = Faults(refused=lambda each: each == best, failing=lambda each: each.tile == 24)
    product = tuned(sim)

    assert product.winner != best
    assert product.winner.tile != 24
    assert product.tried < product.candidates
    with trials_of(sim) as trials:
        refused = listed(sim).index(best)
        assert not trials.prepare(refused)
        assert trials.errors == {refused: "refused"}


def test_far_slower_candidate_is_not_measured(sim: FaultySim) -> None:
    best = tuned(sim).winner
    sim.faults = Faults(runs={best: 20})
    with trials_of(sim) as trials:
        assert not trials.prepare(listed(sim).index(best))


def test_fast_algorithm_with_wrong_values_does_not_win(sim: FaultySim) -> None:
    best = tuned(sim).winner
    sim.faults = Faults(wrong=lambda each: each == best)
    product = tuned(sim)

    assert product.wrong == (best,)
    assert product.winner != best
    assert product.verification.passed


def test_wrong_default_is_not_tuned(sim: FaultySim) -> None:
    default = listed(sim)[0]
    sim.faults = Faults(wrong=lambda each: each == default)
    found = tune(spec(GAINS), sim, QUICK)

    assert found.gemms == ()
    assert found.untuned[0].wrong
    assert "wrong values" in found.untuned[0].reason


def test_trials_without_default_raise_unsupported(sim: FaultySim) -> None:
    sim.faults = Faults(refused=lambda _: True)
    before = sim.memory_info().free_bytes
    with pytest.raises(Unsupported, match="refused"):
        tune(spec(EQUAL), sim, QUICK)

    assert sim.memory_info().free_bytes == before


def test_warming_up_ends_when_its_time_is_over(sim: FaultySim) -> None:
    told: list[float] = []
    with trials_of(sim, warmup_s=10.0) as trials:
        trials.warm_up(lambda: len(told) == 3, told.append)

    assert len(told) == 3
    assert max(told) <= 1
