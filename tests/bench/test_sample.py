from __future__ import annotations

from cudakit.bench.measurement import Reading
from cudakit.bench.sample import ThrottlingFilter

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
