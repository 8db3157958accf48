""""""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.case import Rule
from cudakit.bench.sampling import SteadyState, Stopping, ThrottlingFilter, drift
from cudakit.bench.stats import Samples, summarize
from cudakit.bench.timer import Reading


def warm_up_until_end(
    steady_state: SteadyState, readings: list[Reading], step_s: float = 0.01
) -> float:
    """Add readings, then the last one repeatedly, until the warm-up ends; return the elapsed seconds."""
    elapsed_s = 0.0
    for number in range(100_000):
        elapsed_s += step_s
        if steady_state.add(readings[min(number, len(readings) - 1)], elapsed_s):
            return elapsed_s
    raise AssertionError("the warm-up never ended")


def test_steady_device_settles_at_minimum_time() -> None:
    steady_state = SteadyState(0.25, 3.0)

    assert warm_up_until_end(steady_state, [Reading(1e-3, 1.9e9)]) == pytest.approx(0.25, abs=0.02)
    assert steady_state.is_settled


def test_warming_device_settles_later() -> None:
    falling = [Reading(1e-3 * (1 + max(0, 50 - n) / 50), 1.9e9) for n in range(100)]
    steady_state = SteadyState(0.25, 3.0)

    assert warm_up_until_end(steady_state, falling) > 0.7
    assert steady_state.is_settled


def test_falling_clock_delays_settling() -> None:
    falling = [Reading(1e-3, 1.9e9 - 1e7 * min(n, 60)) for n in range(100)]
    steady_state = SteadyState(0.25, 3.0)

    assert warm_up_until_end(steady_state, falling) > 0.7
    assert steady_state.is_settled


def test_warm_up_without_settling_ends_at_limit() -> None:
    rising = [Reading(1e-3 * 1.05**n) for n in range(1000)]
    steady_state = SteadyState(0.25, 3.0)

    assert warm_up_until_end(steady_state, rising) == pytest.approx(3.0, abs=0.02)
    assert not steady_state.is_settled
    assert len(steady_state.readings) == pytest.approx(300, abs=1)


def test_warm_up_ends_at_its_limit() -> None:
    rising = [Reading(1e-3 * 1.05**n) for n in range(2000)]

    assert warm_up_until_end(SteadyState(4, 8.0), rising) == pytest.approx(8.0, abs=0.02)


def test_warm_up_of_few_long_runs_ends_unsettled() -> None:
    steady_state = SteadyState(0.25, 3.0)

    assert warm_up_until_end(steady_state, [Reading(2.0)], step_s=2.0) == 4.0
    assert not steady_state.is_settled


def test_warm_up_of_zero_takes_one_reading() -> None:
    steady_state = SteadyState(0.0, 0.0)

    assert steady_state.add(Reading(1e-3), 0.001)
    assert steady_state.is_settled


def test_drift_compares_medians_of_halves() -> None:
    assert drift([]) == drift([5.0]) == 0.0
    assert drift([1.0, 1.0, 9.0, 1.1, 1.1, 0.0]) == pytest.approx(0.1)
    assert drift([0.0, 1.0]) == 0.0


NORMAL, LOW = Reading(1.0, 1.9e9), Reading(1.4, 1.3e9)


def warmed_up_filter() -> ThrottlingFilter:
    return ThrottlingFilter([NORMAL] * 10)


def test_reading_at_low_clock_is_discarded_and_recorded() -> None:
    throttling_filter = warmed_up_filter()

    assert [throttling_filter.add(reading) for reading in (NORMAL, LOW, NORMAL)] == [
        True,
        False,
        True,
    ]
    assert throttling_filter.kept_readings == [NORMAL, NORMAL]
    assert throttling_filter.discarded_readings == [LOW]


def test_reading_at_slightly_lower_clock_is_a_sample() -> None:
    assert warmed_up_filter().add(Reading(1.1, 1.5e9))


def test_persistent_low_clock_is_accepted() -> None:
    throttling_filter = warmed_up_filter()

    accepted = [throttling_filter.add(LOW) for _ in range(20)]

    assert accepted == [False] * 10 + [True] * 10
    assert throttling_filter.accepts_all_clocks


def test_rare_low_clock_stays_discarded() -> None:
    throttling_filter = warmed_up_filter()

    for _ in range(50):
        assert throttling_filter.add(NORMAL)
        assert not throttling_filter.add(LOW)


def test_reading_without_clock_is_a_sample() -> None:
    assert warmed_up_filter().add(Reading(1.0))
    assert all(ThrottlingFilter().add(reading) for reading in (LOW, NORMAL))


def test_reading_after_blocking_timeout_is_discarded() -> None:
    timed_out = Reading(1.0, 1.9e9, valid=False)
    throttling_filter = warmed_up_filter()

    assert not throttling_filter.add(timed_out)
    assert throttling_filter.discarded_readings == [timed_out]


def run(stopping: Stopping, times: Iterable[float]) -> list[float]:
    """Add samples without pauses between them, until sampling stops."""
    samples: list[float] = []
    elapsed_s = 0.0
    for time in times:
        samples.append(time)
        elapsed_s += time
        if stopping.add(time, elapsed_s):
            return samples
    raise AssertionError("sampling never stopped")


def noisy_times(noise: float, *, time_s: float = 1e-3, n: int = 100_000) -> list[float]:
    random = np.random.default_rng(11)
    times: list[float] = (time_s * (1 + noise * random.standard_normal(n))).clip(1e-9).tolist()
    return times


def test_steady_samples_stop_at_minimum_number_and_time() -> None:
    stopping = Stopping(Rule(min_samples=10, min_time_s=0.5))
    samples = run(stopping, [0.01] * 100)

    # The next check after the minimum time comes after at most a tenth more samples.
    assert 50 <= len(samples) <= 55
    assert stopping.reason == "precision"


def test_long_samples_stop_at_minimum_number() -> None:
    assert len(run(Stopping(Rule(min_samples=10)), [0.2] * 100)) == 10


def test_sampling_that_stops_for_precision_is_precise() -> None:
    stopping = Stopping(Rule(precision=0.01))
    samples = run(stopping, noisy_times(0.2))

    assert stopping.reason == "precision"
    assert stopping.converged
    assert summarize(Samples(tuple(samples))).noise < 0.01


def test_more_precision_takes_more_samples() -> None:
    counts = [
        len(run(Stopping(Rule(precision=precision, timeout_s=1e3)), noisy_times(0.2)))
        for precision in (0.03, 0.01, 0.003)
    ]

    assert counts == sorted(set(counts))


def test_timeout_stops_unconverged_sampling() -> None:
    stopping = Stopping(Rule(min_samples=10, timeout_s=1.0))
    samples = run(stopping, [0.3, 0.1, 0.5, 0.2, 0.4])

    assert sum(samples) >= 1.0 > sum(samples[:-1])
    assert (stopping.reason, stopping.converged) == ("timeout", False)


def test_precise_median_at_timeout_has_converged() -> None:
    stopping = Stopping(Rule(min_samples=2, min_time_s=0.5, timeout_s=0.9))

    run(stopping, [0.5] * 5)
    assert (stopping.reason, stopping.converged) == ("precision", True)


def test_time_between_samples_counts_towards_minimum_time() -> None:
    # The samples of 3 us start every 100 us: after 17 s the sum of their times would be half a second.
    stopping = Stopping(Rule(min_samples=10, min_time_s=0.5, timeout_s=15.0))
    elapsed = (1e-4 * n for n in range(1, 100_000))

    last_s = next(elapsed_s for elapsed_s in elapsed if stopping.add(3e-6, elapsed_s=elapsed_s))
    assert 0.5 <= last_s < 0.56
    assert stopping.reason == "precision"


def test_time_between_samples_counts_towards_timeout() -> None:
    stopping = Stopping(Rule(min_samples=10, timeout_s=5.0))
    alternating = (0.001, 0.003)

    assert not any(stopping.add(alternating[n % 2], elapsed_s=n) for n in range(1, 5))
    assert stopping.add(0.001, elapsed_s=5)
    assert stopping.reason == "timeout"


def test_stable_wide_spread_stops_early() -> None:
    stopping = Stopping(Rule(precision=1e-5, timeout_s=100.0))
    samples = run(stopping, noisy_times(0.05, n=99_000))

    assert stopping.reason == "stable"
    assert stopping.converged
    assert sum(samples) < 20


def test_growing_spread_is_not_stable() -> None:
    times = [1e-3 * (1 + 1e-4 * i * (-1) ** i) for i in range(9_000)]
    stopping = Stopping(Rule(precision=1e-9, timeout_s=8.0))

    run(stopping, times)
    assert stopping.reason == "timeout"


@given(st.lists(st.floats(1e-6, 1.0), min_size=400, max_size=400))
def test_stopping_respects_minimum_and_gives_reason(times: list[float]) -> None:
    rule = Rule(min_samples=10, min_time_s=0.5, timeout_s=2.0)
    stopping = Stopping(rule)
    samples: list[float] = []
    for time in times:
        samples.append(time)
        if stopping.add(time, sum(samples)):
            break
    if stopping.converged:
        assert len(samples) >= rule.min_samples
        assert sum(samples) >= rule.min_time_s - 1e-9
    elif stopping.reason:
        assert sum(samples) >= rule.timeout_s - 1e-9


def test_stopping_checks_do_not_follow_each_sample() -> None:
    # A check sorts all samples: a check after each sample would take minutes in total.
    stopping = Stopping(Rule(precision=0.0, min_time_s=1e9, timeout_s=1e9))

    assert not any(stopping.add(time, 0.0) for time in noisy_times(0.01, n=100_000))
