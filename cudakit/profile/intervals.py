"""Arithmetic on sets of time intervals, in whole nanoseconds.

An interval has a start and an end, and does not contain its end. ``IntervalSet`` holds sorted intervals that
neither overlap nor touch, so that every operation is a few searches in sorted arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

# Arrays of a trace's times, of other integers such as row numbers, and of booleans. Their dtypes vary.
Times: TypeAlias = npt.NDArray[Any]
Ints: TypeAlias = npt.NDArray[Any]
Mask: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class IntervalSet:
    """A set of instants: sorted intervals that neither overlap nor touch."""

    start_ns: Times
    end_ns: Times
    _lengths: Times = field(
        init=False
    )  # total length of the intervals before each interval, and of all intervals

    def __post_init__(self) -> None:
        lengths = np.zeros(len(self.start_ns) + 1, np.int64)
        np.cumsum(self.end_ns - self.start_ns, out=lengths[1:])
        object.__setattr__(self, "_lengths", lengths)

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def total_ns(self) -> int:
        """The length of all intervals together."""
        return int(self._lengths[-1])

    def covered_until(self, time_ns: Times) -> Times:
        """Return, for each time, the length of the set before that time."""
        if not len(self):
            return np.zeros(len(time_ns), np.int64)
        index = np.searchsorted(self.start_ns, time_ns, side="right")
        # The interval that begins before the time may end after it.
        excess_ns = np.where(index > 0, np.maximum(self.end_ns[index - 1] - time_ns, 0), 0)
        result: Times = self._lengths[index] - excess_ns
        return result

    def covered_within(self, start_ns: Times, end_ns: Times) -> Times:
        """Return the length of the set within each interval."""
        result: Times = self.covered_until(end_ns) - self.covered_until(start_ns)
        return result

    def part_between(self, start_ns: int, end_ns: int) -> IntervalSet:
        """Return the part of the set between two times."""
        start = np.clip(self.start_ns, start_ns, end_ns)
        end = np.clip(self.end_ns, start_ns, end_ns)
        is_inside = end > start
        return IntervalSet(start[is_inside], end[is_inside])


EMPTY = IntervalSet(np.empty(0, np.int64), np.empty(0, np.int64))


def union(start_ns: Times, end_ns: Times) -> IntervalSet:
    """Return the union of any intervals; empty intervals have no effect."""
    is_nonempty = end_ns > start_ns
    start, end = start_ns[is_nonempty], end_ns[is_nonempty]
    if not len(start):
        return EMPTY
    start_order = np.argsort(start, kind="stable")
    start, end = start[start_order], end[start_order]
    latest_end = np.maximum.accumulate(end)
    begins_group = np.concatenate([[True], start[1:] > latest_end[:-1]])
    group_begins = np.flatnonzero(begins_group)
    group_ends = np.append(group_begins[1:], len(start)) - 1
    return IntervalSet(start[group_begins], latest_end[group_ends])


def intersection(first_set: IntervalSet, second_set: IntervalSet) -> IntervalSet:
    """Return the instants that both sets contain."""
    if not len(first_set) or not len(second_set):
        return EMPTY
    # Every instant at which the number of covering sets changes, with the change.
    change_times = np.concatenate(
        [first_set.start_ns, first_set.end_ns, second_set.start_ns, second_set.end_ns]
    )
    change = np.repeat(
        [1, -1, 1, -1], [len(first_set), len(first_set), len(second_set), len(second_set)]
    )
    time_order = np.lexsort((change, change_times))
    change_times, depth = change_times[time_order], np.cumsum(change[time_order])
    is_common = depth[:-1] == 2
    return union(change_times[:-1][is_common], change_times[1:][is_common])


def gaps(busy_intervals: IntervalSet, start_ns: int, end_ns: int) -> IntervalSet:
    """Return the intervals between two times that a set does not contain."""
    busy_inside = busy_intervals.part_between(start_ns, end_ns)
    start = np.concatenate([[start_ns], busy_inside.end_ns])
    end = np.concatenate([busy_inside.start_ns, [end_ns]])
    is_nonempty = end > start
    return IntervalSet(start[is_nonempty], end[is_nonempty])
