"""Interval arithmetic is compared with sets of instants."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from cudakit.profile.intervals import IntervalSet, gaps, intersection, union

_INTERVALS = st.lists(
    st.tuples(st.integers(-5, 40), st.integers(-5, 40)).map(lambda pair: tuple(sorted(pair))),
    max_size=12,
)


def _set(pairs: list[tuple[int, int]]) -> IntervalSet:
    array = np.array(pairs, np.int64).reshape(-1, 2)
    return union(array[:, 0], array[:, 1])


def _instants(intervals: IntervalSet) -> set[int]:
    pairs = zip(intervals.start_ns.tolist(), intervals.end_ns.tolist(), strict=True)
    return {instant for start, end in pairs for instant in range(start, end)}


def _brute_force(pairs: list[tuple[int, int]]) -> set[int]:
    return {instant for start, end in pairs for instant in range(start, end)}


def _assert_normal(intervals: IntervalSet) -> None:
    """Check that the intervals are not empty, are sorted, and do not touch."""
    assert (intervals.end_ns > intervals.start_ns).all()
    assert (intervals.start_ns[1:] > intervals.end_ns[:-1]).all()


@given(_INTERVALS)
def test_union_contains_the_instants_of_all_intervals(pairs: list[tuple[int, int]]) -> None:
    result = _set(pairs)
    _assert_normal(result)
    assert _instants(result) == _brute_force(pairs)
    assert result.total_ns == len(_brute_force(pairs))


@given(_INTERVALS, _INTERVALS)
def test_intersection_contains_the_common_instants(
    first: list[tuple[int, int]], second: list[tuple[int, int]]
) -> None:
    result = intersection(_set(first), _set(second))
    _assert_normal(result)
    assert _instants(result) == _brute_force(first) & _brute_force(second)


@given(_INTERVALS, st.integers(-10, 45), st.integers(0, 50))
def test_gaps_and_busy_time_divide_a_window(
    pairs: list[tuple[int, int]], start: int, length: int
) -> None:
    busy = _set(pairs)
    idle = gaps(busy, start, start + length)
    _assert_normal(idle)
    assert _instants(idle) == set(range(start, start + length)) - _brute_force(pairs)
    assert idle.total_ns + busy.part_between(start, start + length).total_ns == length


@given(_INTERVALS, _INTERVALS)
def test_covered_within_counts_the_instants_of_each_interval(
    pairs: list[tuple[int, int]], windows: list[tuple[int, int]]
) -> None:
    array = np.array(windows, np.int64).reshape(-1, 2)
    covered = _set(pairs).covered_within(array[:, 0], array[:, 1])
    instants = _brute_force(pairs)
    assert covered.tolist() == [len(instants & set(range(*window))) for window in windows]
