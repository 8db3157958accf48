from __future__ import annotations

from cudakit.core.bench.selection import Selection
from cudakit.core.bench.timer import Reading

USUAL, LOW = Reading(1.0, 1.9e9), Reading(1.4, 1.3e9)


def warm() -> Selection:
    selection = Selection()
    for _ in range(10):
        selection.look(USUAL)
    return selection


def test_a_reading_at_a_low_clock_is_no_sample_and_is_kept_all_the_same() -> None:
    selection = warm()

    assert [selection.add(reading) for reading in (USUAL, LOW, USUAL)] == [True, False, True]
    assert selection.kept == [USUAL, USUAL]
    assert selection.discarded == [LOW]


def test_a_clock_that_is_a_little_lower_counts() -> None:
    assert warm().add(Reading(1.1, 1.5e9))


def test_a_clock_that_stays_low_becomes_the_usual_one() -> None:
    selection = warm()

    taken = [selection.add(LOW) for _ in range(20)]

    assert taken == [False] * 10 + [True] * 10
    assert selection.gave_up


def test_a_rare_low_clock_is_never_taken_for_the_usual_one() -> None:
    selection = warm()

    for _ in range(50):
        assert selection.add(USUAL)
        assert not selection.add(LOW)


def test_without_a_clock_or_without_a_usual_one_everything_counts() -> None:
    assert warm().add(Reading(1.0))
    assert all(Selection().add(reading) for reading in (LOW, USUAL))


def test_what_the_blocker_did_not_hold_is_no_sample() -> None:
    late = Reading(1.0, 1.9e9, valid=False)
    selection = warm()

    assert not selection.add(late)
    assert selection.discarded == [late]
