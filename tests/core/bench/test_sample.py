from __future__ import annotations

from cudakit.core.bench.measurement import Reading
from cudakit.core.bench.sample import ThrottlingFilter

USUAL, LOW = Reading(1.0, 1.9e9), Reading(1.4, 1.3e9)


def warm() -> ThrottlingFilter:
    return ThrottlingFilter([USUAL] * 10)


def test_a_reading_at_a_low_clock_is_no_sample_and_is_kept_all_the_same() -> None:
    readings = warm()

    assert [readings.add(reading) for reading in (USUAL, LOW, USUAL)] == [True, False, True]
    assert readings.kept == [USUAL, USUAL]
    assert readings.discarded == [LOW]


def test_a_clock_that_is_a_little_lower_counts() -> None:
    assert warm().add(Reading(1.1, 1.5e9))


def test_a_clock_that_stays_low_becomes_the_usual_one() -> None:
    readings = warm()

    taken = [readings.add(LOW) for _ in range(20)]

    assert taken == [False] * 10 + [True] * 10
    assert readings.gave_up


def test_a_rare_low_clock_is_never_taken_for_the_usual_one() -> None:
    readings = warm()

    for _ in range(50):
        assert readings.add(USUAL)
        assert not readings.add(LOW)


def test_without_a_clock_or_without_a_usual_one_everything_counts() -> None:
    assert warm().add(Reading(1.0))
    assert all(ThrottlingFilter().add(reading) for reading in (LOW, USUAL))


def test_what_the_blocker_did_not_hold_is_no_sample() -> None:
    late = Reading(1.0, 1.9e9, valid=False)
    readings = warm()

    assert not readings.add(late)
    assert readings.discarded == [late]
