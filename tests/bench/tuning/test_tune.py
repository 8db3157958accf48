""""""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from bench.tuning.faulty import Faults, FaultySim

from cudakit.bench.case import Method
from cudakit.bench.gemm import GemmSpec, GemmWorkload
from cudakit.bench.timer import Timer
from cudakit.bench.tuning.search import Limits
from cudakit.bench.tuning.tune import AlgorithmTrials, Candidates, candidates, tune, tuning_machine
from cudakit.bench.tuning.tuned import Tuned, TunedGemm
from cudakit.errors import InputError, Unsupported, UsageError
from cudakit.gpu.api.facts import RunContext
from cudakit.gpu.api.gemm import Algorithm, Gemm, GemmPlan, GemmSettings, Library, never_over
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


METHOD = Method("isolated", "hot", interleaved=("other algorithms",))


@pytest.fixture
def faulty_sim() -> Iterator[FaultySim]:
    with closing(FaultySim()) as device:
        yield device


@contextmanager
def trials_of(
    faulty_sim: FaultySim, gemm: Gemm = GAINS, **changes: Any
) -> Iterator[AlgorithmTrials]:
    workload = GemmWorkload(gemm, GemmSettings(), "cublaslt", "uniform")
    with closing(Timer(faulty_sim)) as timer:
        algorithms = recommended(faulty_sim, gemm)
        algorithm_trials = AlgorithmTrials(
            timer, workload, replace(METHOD, **changes), algorithms, seed=0
        )
        with closing(algorithm_trials) as trials:
            yield trials


def recommended(faulty_sim: FaultySim, gemm: Gemm = GAINS) -> list[Algorithm]:
    with closing(faulty_sim.blas()) as blas:
        return list(blas.heuristics(gemm, GemmSettings(), 100))


def tune_gemm(faulty_sim: FaultySim, gemm: Gemm = GAINS) -> TunedGemm:
    (tuned_gemm,) = tune(spec(gemm), faulty_sim, QUICK).gemms
    return tuned_gemm


def test_candidates_share_operands_and_each_is_verified(faulty_sim: FaultySim) -> None:
    faulty_sim.faults = Faults(wrong=lambda algorithm: algorithm.id == 4 and algorithm.tile == 15)
    with trials_of(faulty_sim) as trials:
        expected = [not faulty_sim.faults.wrong(algorithm) for algorithm in recommended(faulty_sim)]
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


def test_reallocate_captures_graph_again(faulty_sim: FaultySim) -> None:
    with trials_of(faulty_sim, mode="graph", sample_s=0.0) as trials:
        trials.measure([0])
        trials.reallocate()
        trials.measure([0])

        assert trials.verify(0)


def test_times_of_last_rounds(faulty_sim: FaultySim) -> None:
    with trials_of(faulty_sim) as trials:
        assert trials.prepare(1)
        for order in ([0, 1], [1, 0], [0]):
            trials.measure(order)

        assert len(trials.times_s(0, 0)) == 3
        assert len(trials.times_s(0, 2)) == 2
        assert len(trials.times_s(1, 2)) == 1


def test_values_of_round_have_one_unit(faulty_sim: FaultySim) -> None:
    with trials_of(faulty_sim) as trials:
        assert trials.prepare(1)
        values = trials.measure([1, 0])
        times = [trials.times_s(number, 1)[0] for number in (1, 0)]

        assert values[0] / values[1] == pytest.approx(times[0] / times[1], rel=1e-3)


def test_unsupported_or_failing_candidate_is_skipped(faulty_sim: FaultySim) -> None:
    fastest = tune_gemm(faulty_sim).winner
    faulty_sim.faults = Faults(
        unsupported=lambda algorithm: algorithm == fastest,
        failing=lambda algorithm: algorithm.tile == 24,
    )
    tuned_gemm = tune_gemm(faulty_sim)

    assert tuned_gemm.winner != fastest
    assert tuned_gemm.winner.tile != 24
    assert tuned_gemm.tried < tuned_gemm.candidates
    with trials_of(faulty_sim) as trials:
        refused = recommended(faulty_sim).index(fastest)
        assert not trials.prepare(refused)
        assert trials.errors == {refused: "refused"}


def test_far_slower_candidate_is_not_measured(faulty_sim: FaultySim) -> None:
    fastest = tune_gemm(faulty_sim).winner
    faulty_sim.faults = Faults(runs={fastest: 20})
    with trials_of(faulty_sim) as trials:
        assert not trials.prepare(recommended(faulty_sim).index(fastest))


def test_fast_algorithm_with_wrong_values_does_not_win(faulty_sim: FaultySim) -> None:
    fastest = tune_gemm(faulty_sim).winner
    faulty_sim.faults = Faults(wrong=lambda algorithm: algorithm == fastest)
    tuned_gemm = tune_gemm(faulty_sim)

    assert tuned_gemm.wrong == (fastest,)
    assert tuned_gemm.winner != fastest
    assert tuned_gemm.verification.passed


def test_wrong_default_is_not_tuned(faulty_sim: FaultySim) -> None:
    default = recommended(faulty_sim)[0]
    faulty_sim.faults = Faults(wrong=lambda algorithm: algorithm == default)
    tuning = tune(spec(GAINS), faulty_sim, QUICK)

    assert tuning.gemms == ()
    assert tuning.untuned[0].wrong
    assert "wrong values" in tuning.untuned[0].reason


def test_trials_without_default_raise_unsupported(faulty_sim: FaultySim) -> None:
    faulty_sim.faults = Faults(unsupported=lambda _: True)
    free_bytes = faulty_sim.memory_info().free_bytes
    with pytest.raises(Unsupported, match="refused"):
        tune(spec(EQUAL), faulty_sim, QUICK)

    assert faulty_sim.memory_info().free_bytes == free_bytes


def test_warm_up_ends_at_time_limit(faulty_sim: FaultySim) -> None:
    fractions: list[float] = []
    with trials_of(faulty_sim, warmup_s=10.0) as trials:
        trials.warm_up(lambda: len(fractions) == 3, fractions.append)

    assert len(fractions) == 3
    assert max(fractions) <= 1


GEMM = Gemm(dtype="bf16", m=64, n=64, k=64)


@dataclass
class ListingBlas:
    """A library that lists algorithms and computes nothing."""

    recommended: Sequence[Algorithm]
    offered: Sequence[Algorithm]
    library: Library = "cublaslt"
    version: str = "13.1.0"
    listed: int = 0

    def heuristics(self, gemm: Gemm, settings: GemmSettings, count: int) -> Sequence[Algorithm]:  # noqa: ARG002
        return self.recommended[:count]

    def algorithms(
        self,
        gemm: Gemm,  # noqa: ARG002
        settings: GemmSettings,  # noqa: ARG002
        is_over: Callable[[], bool] = never_over,
    ) -> Iterator[Algorithm]:
        for algorithm in self.offered:
            if is_over():
                return
            self.listed += 1
            yield algorithm

    def prepare(
        self, gemm: Gemm, settings: GemmSettings, algorithm: Algorithm | None = None
    ) -> GemmPlan:
        raise AssertionError((gemm, settings, algorithm))

    def close(self) -> None: ...


ALL = tuple(Algorithm(id=number) for number in range(200))


def candidates_of(blas: ListingBlas, seed: int = 0) -> Candidates:
    return candidates(blas, GEMM, GemmSettings(), seed=seed)


def test_recommended_candidates_come_first_in_order() -> None:
    recommended = ALL[50:40:-1]
    listed = candidates_of(ListingBlas(recommended, ALL)).algorithms

    assert listed[: len(recommended)] == recommended
    assert sorted(listed, key=lambda algorithm: algorithm.id) == list(ALL)


def test_seed_determines_order_of_candidates() -> None:
    first, repeated, other_seed = (
        candidates_of(ListingBlas(ALL[:1], ALL), seed).algorithms for seed in (1, 1, 2)
    )

    assert first == repeated
    assert first != other_seed
    assert first != ALL


def test_duplicate_algorithm_is_one_candidate() -> None:
    duplicates = [Algorithm(id=7, workspace_bytes=size) for size in (0, 1024)]
    other_algorithm = Algorithm(id=7, tile=20)
    listed = candidates_of(
        ListingBlas(
            [duplicates[0], other_algorithm, duplicates[0]],
            [*duplicates, other_algorithm, other_algorithm],
        )
    ).algorithms

    assert listed == (duplicates[0], other_algorithm)


def test_listing_ends_at_time_limit() -> None:
    blas = ListingBlas(ALL[:2], ALL)
    shortened = candidates(blas, GEMM, GemmSettings(), seed=0, is_over=lambda: blas.listed >= 10)

    assert (shortened.complete, blas.listed) == (False, 10)
    assert len(shortened.algorithms) == 10
    assert candidates_of(blas).complete


def test_gemm_without_algorithm_is_unsupported() -> None:
    with pytest.raises(Unsupported, match="no algorithm"):
        candidates_of(ListingBlas([], ALL))
