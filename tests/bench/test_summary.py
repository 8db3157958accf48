from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import pytest
from bench.workloads import Copy, PreparedCopy
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.case import Method, Rule
from cudakit.bench.pipeline import measure_case, round_methods
from cudakit.bench.stats import ci_over_rounds, median_ci, without_round_offsets
from cudakit.bench.summary import Measurement
from cudakit.bench.timer import Timer
from cudakit.gpu.api import Gpu
from cudakit.gpu.sim import Sim

RULE = Rule(min_samples=30, min_time_s=0.0, timeout_s=60.0)
METHOD = Method("isolated", "hot", rounds=3, rule=RULE)


@pytest.fixture
def timer() -> Iterator[Timer]:
    with closing(Sim()) as gpu, closing(Timer(gpu)) as timer:
        yield timer


def run(timer: Timer, *copies: Copy, method: Method = METHOD) -> tuple[Measurement, ...]:
    return measure_case(timer, copies, method, skip_settling=False)


# --- measurement in rounds


def test_round_allocates_and_frees_own_buffers(timer: Timer) -> None:
    copy, free = Copy(), timer.gpu.memory_info().free_bytes

    (measured,) = run(timer, copy)

    assert [prepared.closed for prepared in copy.prepared] == [1, 1, 1]
    assert timer.gpu.memory_info().free_bytes == free
    assert measured.method.rounds == 3
    assert measured.samples.rounds == (10, 10, 10)
    assert len(measured.samples.times_s) == 30
    assert measured.method.rule == RULE


def test_single_round_records_no_round_sizes(timer: Timer) -> None:
    (measured,) = run(timer, Copy(), method=replace(METHOD, rounds=1))

    assert measured.samples.rounds == ()


def test_interleaved_workloads_share_rounds(timer: Timer) -> None:
    copy, larger_copy = Copy(), Copy(size_bytes=1 << 17)

    measured = run(timer, copy, larger_copy)

    assert [item.samples.rounds for item in measured] == [(10, 10, 10)] * 2
    assert measured[0].axes != measured[1].axes


def test_simulated_device_has_one_round(timer: Timer) -> None:
    (measured,) = measure_case(timer, [Copy()], METHOD)

    assert measured.method.rounds == 1


@dataclass
class WrongFrom(Copy):
    """A copy that is correct in its first rounds only."""

    round: int = 2

    def prepare(self, gpu: Gpu, seed: int) -> PreparedCopy:
        if len(self.prepared) == self.round:
            self.spoiled = (0, 5)
        return super().prepare(gpu, seed)


def test_wrong_value_in_one_round_withholds_figure_of_all_rounds(timer: Timer) -> None:
    copy = WrongFrom()

    (measured,) = run(timer, copy, method=replace(METHOD, rounds=5))

    assert not measured.verification.passed
    assert measured.stop_reason == "wrong"
    assert measured.samples.times_s == ()
    assert len(copy.prepared) == 3  # No round is measured after the wrong one.


@dataclass
class InterruptedIn(Copy):
    """A copy that is interrupted at the start of a round, or after a number of executions in that round."""

    round: int = 1
    runs: int = 0

    def prepare(self, gpu: Gpu, seed: int) -> PreparedCopy:
        remaining = self.runs
        if len(self.prepared) == self.round and not remaining:
            raise KeyboardInterrupt
        if len(self.prepared) == self.round:

            def count_down() -> None:
                nonlocal remaining
                remaining -= 1
                if remaining == 0:
                    raise KeyboardInterrupt

            self.before_each = count_down
        return super().prepare(gpu, seed)


def test_interrupt_between_rounds_keeps_complete_rounds(timer: Timer) -> None:
    (measured,) = run(timer, InterruptedIn())

    assert measured.was_interrupted
    assert len(measured.samples.times_s) == 10


def test_interrupt_within_round_keeps_its_samples(timer: Timer) -> None:
    (measured,) = run(timer, InterruptedIn(runs=12))

    complete_round, interrupted_round = measured.samples.rounds
    assert measured.was_interrupted
    assert complete_round == 10
    assert 0 < interrupted_round < 10


def test_interrupt_before_first_sample_propagates(timer: Timer) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(timer, InterruptedIn(round=0))


@given(st.integers(1, 9), st.integers(1, 100), st.floats(0, 20), st.floats(0.1, 60))
def test_rounds_share_samples_and_time(
    rounds: int, samples: int, time_s: float, timeout_s: float
) -> None:
    rule = Rule(min_samples=samples, min_time_s=time_s, timeout_s=timeout_s)
    methods_of_rounds = [*round_methods(replace(METHOD, rounds=rounds, rule=rule))]

    assert len(methods_of_rounds) == rounds
    assert sum(round_method.rule.min_samples for round_method in methods_of_rounds) >= samples
    assert sum(round_method.rule.min_time_s for round_method in methods_of_rounds) == pytest.approx(
        time_s
    )
    assert sum(round_method.rule.timeout_s for round_method in methods_of_rounds) == pytest.approx(
        timeout_s
    )


# --- CI of the median over rounds


def runs(*, count: int, between: float, within: float, seed: int) -> list[np.ndarray]:
    """Return runs of 5 rounds of 40 samples with differences between rounds."""
    random = np.random.default_rng(seed)
    return [
        (
            1 + between * random.standard_normal((5, 1)) + within * random.standard_normal((5, 40))
        ).ravel()
        for _ in range(count)
    ]


@pytest.mark.parametrize(("between", "within"), [(0.003, 0.0001), (0.001, 0.003), (0.0, 0.003)])
def test_intervals_of_two_runs_overlap_in_nine_of_ten_pairs(between: float, within: float) -> None:
    samples_of_runs = runs(count=800, between=between, within=within, seed=3)
    middles = [float(np.median(times)) for times in samples_of_runs]
    half_widths = [
        (high - low) / 2
        for low, high in (ci_over_rounds(times, (40,) * 5) for times in samples_of_runs)
    ]
    overlap = [
        abs(middles[i] - middles[i + 1]) <= (half_widths[i] ** 2 + half_widths[i + 1] ** 2) ** 0.5
        for i in range(0, len(samples_of_runs), 2)
    ]

    assert np.mean(overlap) > 0.9


def test_interval_without_rounds_misses_differences_between_addresses() -> None:
    samples_of_runs = runs(count=200, between=0.003, within=0.0001, seed=4)
    covered = [low <= 1 <= high for low, high in map(median_ci, samples_of_runs)]

    assert (
        np.mean(covered) < 0.7
    )  # A CI of one round is too narrow: cases therefore have several rounds.


def test_ci_over_rounds_without_rounds_is_median_ci() -> None:
    (times,) = runs(count=1, between=0.0, within=0.01, seed=5)

    assert ci_over_rounds(times) == ci_over_rounds(times, (200,))
    assert ci_over_rounds(times) == pytest.approx(median_ci(times), rel=0.01)


@given(st.lists(st.floats(0.5, 2), min_size=2, max_size=60), st.data())
def test_ci_over_rounds_is_no_narrower_than_ci_without_round_offsets(
    times: list[float], data: st.DataObject
) -> None:
    first = data.draw(st.integers(1, len(times) - 1))
    rounds = (first, len(times) - first)
    low, high = ci_over_rounds(times, rounds)
    inner_low, inner_high = median_ci(without_round_offsets(times, rounds))

    assert 0 <= low <= max(inner_low, 0)
    assert high >= inner_high
