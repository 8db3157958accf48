from __future__ import annotations

import pytest

from cudakit.core.bench.measurement import Reading
from cudakit.core.bench.warm_up import SteadyState, drift


def after(settling: SteadyState, readings: list[Reading], step_s: float = 0.01) -> float:
    """Add readings until it stops, the last one over and over; say when."""
    elapsed_s = 0.0
    for number in range(100_000):
        elapsed_s += step_s
        if settling.add(readings[min(number, len(readings) - 1)], elapsed_s):
            return elapsed_s
    raise AssertionError("it never stopped")


def test_a_steady_device_is_settled_when_the_least_time_is_over() -> None:
    settling = SteadyState(0.25)

    assert after(settling, [Reading(1e-3, 1.9e9)]) == pytest.approx(0.25, abs=0.02)
    assert settling.settled


def test_a_device_that_warms_up_takes_longer() -> None:
    falling = [Reading(1e-3 * (1 + max(0, 50 - n) / 50), 1.9e9) for n in range(100)]
    settling = SteadyState(0.25)

    assert after(settling, falling) > 0.7
    assert settling.settled


def test_a_clock_that_moves_is_not_settled_though_times_are() -> None:
    falling = [Reading(1e-3, 1.9e9 - 1e7 * min(n, 60)) for n in range(100)]
    settling = SteadyState(0.25)

    assert after(settling, falling) > 0.7
    assert settling.settled


def test_what_never_settles_ends_at_the_cap() -> None:
    rising = [Reading(1e-3 * 1.05**n) for n in range(1000)]
    settling = SteadyState(0.25)

    assert after(settling, rising) == pytest.approx(3.0, abs=0.02)
    assert not settling.settled
    assert len(settling.readings) == pytest.approx(300, abs=1)


def test_the_cap_is_twice_what_was_asked_where_that_is_more() -> None:
    rising = [Reading(1e-3 * 1.05**n) for n in range(2000)]

    assert after(SteadyState(4), rising) == pytest.approx(8.0, abs=0.02)


def test_few_long_runs_end_it_without_enough_of_them_to_tell() -> None:
    settling = SteadyState(0.25)

    assert after(settling, [Reading(2.0)], step_s=2.0) == 4.0
    assert not settling.settled


def test_nothing_asked_is_one_reading() -> None:
    settling = SteadyState(0.0)

    assert settling.add(Reading(1e-3), 0.001)
    assert settling.settled


def test_drift_is_between_the_medians_of_the_halves() -> None:
    assert drift([]) == drift([5.0]) == 0.0
    assert drift([1.0, 1.0, 9.0, 1.1, 1.1, 0.0]) == pytest.approx(0.1)
    assert drift([0.0, 1.0]) == 0.0
