"""Strided accesses: rows of bytes at equal distances, and the bytes that two strided accesses share.

Strided accesses are not stored as ranges: one range from the first to the last row would make interleaved
columns race, and one range per row would be too many ranges.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import gcd
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from cudakit.sanitize.access_state import AccessState

# The first address of a range, and the first address after it.
Range: TypeAlias = tuple[int, int]

# Maximum number of rows that are compared one by one with the rows of another stride.
_MAX_COMPARED_ROWS = 1 << 20


@dataclass(frozen=True, slots=True)
class StridedRange:
    """``row_count`` rows of ``row_bytes`` bytes each, which begin at ``lo``, ``lo + stride`` and so on."""

    lo: int
    row_bytes: int
    stride: int
    row_count: int

    @property
    def hi(self) -> int:
        """The end of the last row."""
        return self.lo + (self.row_count - 1) * self.stride + self.row_bytes

    def row_ranges(self) -> Iterator[Range]:
        """Yield the range of each row."""
        for lo in range(self.lo, self.lo + self.row_count * self.stride, self.stride):
            yield lo, lo + self.row_bytes

    def overlap_with_bounds(self, lo: int, hi: int) -> Range | None:
        """Return the bytes from ``lo`` up to ``hi`` in the first row that overlaps them, or None."""
        index = max(0, (lo - self.lo - self.row_bytes) // self.stride + 1)
        row_start = self.lo + index * self.stride
        if index >= self.row_count or row_start >= hi:
            return None
        return max(row_start, lo), min(row_start + self.row_bytes, hi)

    def overlap_with(self, other_range: StridedRange) -> Range | None:
        """Return the first bytes that are in rows of both strided ranges, or None."""
        if (
            self.hi <= other_range.lo
            or other_range.hi <= self.lo
            or self._cannot_overlap(other_range)
        ):
            return None
        shorter_range, longer_range = sorted(
            (self, other_range), key=lambda strided: strided.row_count
        )
        row_start = shorter_range._first_row_overlapping(longer_range)
        if row_start is None:
            return None
        return longer_range.overlap_with_bounds(row_start, row_start + shorter_range.row_bytes)

    def _cannot_overlap(self, other_range: StridedRange) -> bool:
        """Return whether no two rows would overlap even if both ranges had infinitely many rows."""
        common_stride = gcd(self.stride, other_range.stride)
        offset = (other_range.lo - self.lo) % common_stride
        return self.row_bytes <= offset and other_range.row_bytes <= common_stride - offset

    def _first_row_overlapping(self, other_range: StridedRange) -> int | None:
        """Return the start of the first row that overlaps a row of another strided range, or None."""
        if self.row_count > _MAX_COMPARED_ROWS:
            return None
        row_starts = self.lo + np.arange(self.row_count, dtype=np.int64) * self.stride
        index = np.maximum(
            0, (row_starts - other_range.lo - other_range.row_bytes) // other_range.stride + 1
        )
        is_overlapping = (index < other_range.row_count) & (
            other_range.lo + index * other_range.stride < row_starts + self.row_bytes
        )
        return int(row_starts[np.argmax(is_overlapping)]) if is_overlapping.any() else None


def strided_range(lo: int, hi: int, stride: int, count: int) -> StridedRange:
    """Return the rows of a strided access: ``count`` elements, of which the last ends at ``hi``."""
    stride = abs(stride)
    width = hi - lo - (count - 1) * stride
    if count <= 1 or width >= stride or width <= 0:
        return StridedRange(lo, hi - lo, hi - lo, 1)
    return StridedRange(lo, width, stride, count)


# Maximum number of strided states. Above it, the older half is removed, and races with the removed
# accesses are missed.
MAX_STRIDED_STATES = 1 << 16


class StridedStates:
    """The access states of strided ranges.

    Ranges of similar length in bytes, from 2^i to 2^(i+1) - 1, are sorted by address, so that a search by
    address looks at few ranges that do not overlap.
    """

    def __init__(self) -> None:
        self.states_by_range: dict[StridedRange, AccessState] = {}  # the oldest first
        # For each bit length of a length in bytes: first address, number in order of creation, and range.
        self._ranges_by_length_class: dict[int, list[tuple[int, int, StridedRange]]] = {}
        self._created_count = 0

    def __len__(self) -> int:
        return len(self.states_by_range)

    def get_or_create(self, strided_range: StridedRange) -> AccessState:
        """Return the state of a strided range; create it if there is none."""
        state = self.states_by_range.get(strided_range)
        if state is None:
            if len(self.states_by_range) >= MAX_STRIDED_STATES:
                ranges = list(self.states_by_range)
                self._remove(ranges[: len(ranges) // 2])
            state = self.states_by_range[strided_range] = AccessState()
            length_class = (strided_range.hi - strided_range.lo).bit_length()
            sorted_item = strided_range.lo, self._created_count, strided_range
            insort(self._ranges_by_length_class.setdefault(length_class, []), sorted_item)
            self._created_count += 1
        return state

    def find_overlapping(self, lo: int, hi: int) -> Iterator[tuple[AccessState, Range]]:
        """Yield each state that has bytes from ``lo`` up to ``hi``, and the first of those bytes."""
        for strided_range in self._ranges_between(lo, hi):
            if common_range := strided_range.overlap_with_bounds(lo, hi):
                yield self.states_by_range[strided_range], common_range

    def find_overlapping_strided(
        self, strided_range: StridedRange
    ) -> Iterator[tuple[AccessState, Range]]:
        """Yield each state of another strided range that overlaps this one, and the first common bytes."""
        for stored_range in self._ranges_between(strided_range.lo, strided_range.hi):
            if stored_range != strided_range and (
                common_range := strided_range.overlap_with(stored_range)
            ):
                yield self.states_by_range[stored_range], common_range

    def clear(self, lo: int, hi: int) -> None:
        """Remove the strided ranges that lie completely between two addresses."""
        self._remove(
            strided_range
            for strided_range in self._ranges_between(lo, hi)
            if lo <= strided_range.lo and strided_range.hi <= hi
        )

    def remove_unless(self, predicate: Callable[[StridedRange, AccessState], bool]) -> None:
        """Remove all strided ranges for which the predicate is False."""
        self._remove(
            [
                range_
                for range_, state in self.states_by_range.items()
                if not predicate(range_, state)
            ]
        )

    def _ranges_between(self, lo: int, hi: int) -> list[StridedRange]:
        """List the ranges that begin below ``hi`` and end above ``lo``, the oldest first."""
        numbered_ranges: list[tuple[int, StridedRange]] = []
        for length_class, sorted_items in self._ranges_by_length_class.items():
            begin = bisect_left(sorted_items, lo - (1 << length_class), key=itemgetter(0))
            end = bisect_left(sorted_items, hi, key=itemgetter(0))
            numbered_ranges += [
                (creation_number, strided_range)
                for _, creation_number, strided_range in sorted_items[begin:end]
                if strided_range.hi > lo
            ]
        return [strided_range for _, strided_range in sorted(numbered_ranges, key=itemgetter(0))]

    def _remove(self, ranges: Iterable[StridedRange]) -> None:
        removed_ranges = set(ranges)
        if not removed_ranges:
            return
        for strided_range in removed_ranges:
            del self.states_by_range[strided_range]
        for length_class, sorted_items in self._ranges_by_length_class.items():
            self._ranges_by_length_class[length_class] = [
                sorted_item for sorted_item in sorted_items if sorted_item[2] not in removed_ranges
            ]
