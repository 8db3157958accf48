from __future__ import annotations

from cudakit.core.bench.measurement import Reading
from cudakit.core.bench.sample import ThrottlingFilter

USUAL, LOW = Reading(1.0, 1.9e9), Reading(1.4, 1.3e9)


def warm() -> ThrottlingFilter:
    return ThrottlingFilter([USUAL] * 10)


def test_reading_at_low_clock_is_discarded_and_recorded() -> None:
    readings = warm()

    assert [readings.add(reading) for reading in (USUAL, LOW, USUAL)] == [True, False, True]
    assert readings.kept == [USUAL, USUAL]
    assert readings.discarded == [LOW]


def test_reading_at_slightly_lower_clock_is_kept() -> None:
    assert warm().add(Reading(1.1, 1.5e9))


def test_persistent_low_clock_becomes_usual() -> None:
    readings = warm()

    taken = [readings.add(LOW) for _ in range(20)]

    assert taken == [False] * 10 + [True] * 10
    assert readings.gave_up


def test_rare_low_clock_stays_discarded() -> None:
    readings = warm()

    for _ in range(50):
        assert readings.add(USUAL)
        assert not readings.add(LOW)


def test_reading_without_known_clock_is_kept() -> None:
    assert warm().add(Reading(1.0))
    assert all(ThrottlingFilter().add(reading) for reading in (LOW, USUAL))


def test_reading_after_blocking_timeout_is_discarded() -> None:
    late = Reading(1.0, 1.9e9, valid=False)
    readings = warm()

    assert not readings.add(late)
    assert readings.discarded == [late]
