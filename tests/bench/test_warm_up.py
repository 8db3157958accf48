from __future__ import annotations

import pytest

from cudakit.bench.measurement import Reading
from cudakit.bench.warm_up import SteadyState, drift


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
    steady_state = SteadyState(0.25)

    assert warm_up_until_end(steady_state, [Reading(1e-3, 1.9e9)]) == pytest.approx(0.25, abs=0.02)
    assert steady_state.is_settled


def test_warming_device_settles_later() -> None:
    falling = [Reading(1e-3 * (1 + max(0, 50 - n) / 50), 1.9e9) for n in range(100)]
    steady_state = SteadyState(0.25)

    assert warm_up_until_end(steady_state, falling) > 0.7
    assert steady_state.is_settled


def test_falling_clock_delays_settling() -> None:
    falling = [Reading(1e-3, 1.9e9 - 1e7 * min(n, 60)) for n in range(100)]
    steady_state = SteadyState(0.25)

    assert warm_up_until_end(steady_state, falling) > 0.7
    assert steady_state.is_settled


def test_warm_up_without_settling_ends_at_limit() -> None:
    rising = [Reading(1e-3 * 1.05**n) for n in range(1000)]
    steady_state = SteadyState(0.25)

    assert warm_up_until_end(steady_state, rising) == pytest.approx(3.0, abs=0.02)
    assert not steady_state.is_settled
    assert len(steady_state.readings) == pytest.approx(300, abs=1)


def test_warm_up_limit_is_twice_minimum_time() -> None:
    rising = [Reading(1e-3 * 1.05**n) for n in range(2000)]

    assert warm_up_until_end(SteadyState(4), rising) == pytest.approx(8.0, abs=0.02)


def test_warm_up_of_few_long_runs_ends_unsettled() -> None:
    steady_state = SteadyState(0.25)

    assert warm_up_until_end(steady_state, [Reading(2.0)], step_s=2.0) == 4.0
    assert not steady_state.is_settled


def test_warm_up_of_zero_takes_one_reading() -> None:
    steady_state = SteadyState(0.0)

    assert steady_state.add(Reading(1e-3), 0.001)
    assert steady_state.is_settled


def test_drift_compares_medians_of_halves() -> None:
    assert drift([]) == drift([5.0]) == 0.0
    assert drift([1.0, 1.0, 9.0, 1.1, 1.1, 0.0]) == pytest.approx(0.1)
    assert drift([0.0, 1.0]) == 0.0
