"""Strided accesses: rows of bytes at equal distances, and the bytes that two strided accesses share.

A bounding range would make interleaved columns race, and one range per row would be too many ranges.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import gcd
from typing import TypeAlias

import numpy as np

from cudakit.core.sanitize.access_state import AccessState

Range: TypeAlias = tuple[int, int]  # from, up to

# Above this count, rows are not compared one by one with rows at another distance.
_MOST_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class Rows:
    """``count`` rows of ``width`` bytes, one every ``stride`` bytes from ``lo`` on."""

    lo: int
    width: int
    stride: int
    count: int

    @property
    def hi(self) -> int:
        """The end of the last row."""
        return self.lo + (self.count - 1) * self.stride + self.width

    def ranges(self) -> Iterator[Range]:
        """Yield the range of each row."""
        for lo in range(self.lo, self.lo + self.count * self.stride, self.stride):
            yield lo, lo + self.width

    def shared_with_range(self, lo: int, hi: int) -> Range | None:
        """Return the bytes that the first overlapping row shares with a range, or None."""
        index = max(0, (lo - self.lo - self.width) // self.stride + 1)
        row = self.lo + index * self.stride
        if index >= self.count or row >= hi:
            return None
        return max(row, lo), min(row + self.width, hi)

    def shared_with(self, other: Rows) -> Range | None:
        """Return the bytes that the first overlapping row shares with other rows, or None."""
        if self.hi <= other.lo or other.hi <= self.lo or self._never_overlap(other):
            return None
        few, many = sorted((self, other), key=lambda rows: rows.count)
        row = few._first_row_overlapping(many)
        return None if row is None else many.shared_with_range(row, row + few.width)

    def _never_overlap(self, other: Rows) -> bool:
        """Return whether the rows stay apart at any number of strides."""
        step = gcd(self.stride, other.stride)
        ahead = (other.lo - self.lo) % step
        return self.width <= ahead and other.width <= step - ahead

    def _first_row_overlapping(self, other: Rows) -> int | None:
        """Return the start of the first row that shares bytes with other rows, or None."""
        if self.count > _MOST_ROWS:
            return None
        rows = self.lo + np.arange(self.count, dtype=np.int64) * self.stride
        index = np.maximum(0, (rows - other.lo - other.width) // other.stride + 1)
        shared = (index < other.count) & (other.lo + index * other.stride < rows + self.width)
        return int(rows[np.argmax(shared)]) if shared.any() else None


def rows_of(lo: int, hi: int, stride: int, count: int) -> Rows:
    """Return the rows of an access of ``count`` elements, the last of which ends at ``hi``."""
    stride = abs(stride)
    width = hi - lo - (count - 1) * stride
    if count <= 1 or width >= stride or width <= 0:
        return Rows(lo, hi - lo, hi - lo, 1)
    return Rows(lo, width, stride, count)


# Sets of rows stored at most; above that the oldest set is removed, and races with it are missed.
MOST_SETS = 256


class Strided:
    """The access states of strided rows."""

    def __init__(self) -> None:
        self.states: dict[Rows, AccessState] = {}

    def state(self, rows: Rows) -> AccessState:
        """Return the state of some rows, new if necessary."""
        state = self.states.get(rows)
        if state is None:
            if len(self.states) >= MOST_SETS:
                del self.states[next(iter(self.states))]
            state = self.states[rows] = AccessState()
        return state

    def sharing_range(self, lo: int, hi: int) -> Iterator[tuple[AccessState, Range]]:
        """Yield the states that have bytes in a range, and those bytes."""
        for rows, state in self.states.items():
            if rows.lo < hi and lo < rows.hi and (shared := rows.shared_with_range(lo, hi)):
                yield state, shared

    def sharing_rows(self, rows: Rows) -> Iterator[tuple[AccessState, Range]]:
        """Yield the states of other rows that share bytes with these."""
        for others, state in self.states.items():
            if others != rows and (shared := rows.shared_with(others)):
                yield state, shared

    def clear(self, lo: int, hi: int) -> None:
        """Remove the rows that lie completely in a range."""
        self.keep(lambda rows, _: rows.lo < lo or hi < rows.hi)

    def keep(self, is_kept: Callable[[Rows, AccessState], bool]) -> None:
        """Remove all rows for which a function returns False."""
        for rows in [rows for rows, state in self.states.items() if not is_kept(rows, state)]:
            del self.states[rows]
