"""Which cell has which bytes: disjoint ranges, in the order of their addresses."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from itertools import pairwise

from cudakit.core.sanitize.cells import Cell


class Segment(Cell):
    """The accesses to the bytes from ``lo`` up to ``hi``, which are alike for all of them."""

    __slots__ = ("hi", "lo")

    def __init__(self, lo: int, hi: int) -> None:
        super().__init__()
        self.lo = lo
        self.hi = hi


class Segments:
    """All bytes that were accessed."""

    def __init__(self) -> None:
        # The first one is before all addresses, so that there is always one at or before a place.
        self._all = [Segment(-1, -1)]
        self._los = [-1]
        self.beginning_at: dict[int, Segment] = {}  # for who has many to look up

    def __len__(self) -> int:
        return len(self._all) - 1

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all[1:])

    def at(self, lo: int) -> Segment:
        """Return the last segment that begins at or before an address, and may end before it."""
        return self._all[bisect_right(self._los, lo) - 1]

    def within(self, lo: int, hi: int) -> list[Segment]:
        """List the segments that have bytes in a range."""
        begin = bisect_right(self._los, lo) - 1
        if self._all[begin].hi <= lo:
            begin += 1
        return self._all[begin : bisect_left(self._los, hi, lo=begin)]

    def cut(self, lo: int, hi: int) -> list[Segment]:
        """Return segments that are together exactly a range: cut at its ends, and made where none was."""
        self._cut_at(lo)
        self._cut_at(hi)
        begin, end = bisect_left(self._los, lo), bisect_left(self._los, hi)
        tiles = list(_filled(self._all[begin:end], lo, hi))
        if len(tiles) != end - begin:
            self._replace(begin, end, tiles)
        return tiles

    def join(self, lo: int, hi: int) -> None:
        """Make one segment of those around and in a range that are alike and touch each other."""
        begin = max(bisect_left(self._los, lo) - 1, 1)
        end = bisect_right(self._los, hi)
        some = self._all[begin:end]
        joined = some[:1]
        for one, next_ in pairwise(some):
            if one.hi == next_.lo and joined[-1].is_like(next_):
                joined[-1].hi = next_.hi
            else:
                joined.append(next_)
        if len(joined) != len(some):
            self._replace(begin, end, joined)

    def clear(self, lo: int, hi: int) -> None:
        """Forget all accesses to a range."""
        if self.within(lo, hi):
            self._cut_at(lo)
            self._cut_at(hi)
            self._replace(bisect_left(self._los, lo), bisect_left(self._los, hi), [])

    def rebuild(self, change: Callable[[list[Segment]], list[Segment]]) -> None:
        """Replace all segments by what is made of them."""
        self._replace(1, len(self._all), change(self._all[1:]))

    def _cut_at(self, place: int) -> None:
        index = bisect_left(self._los, place) - 1
        left = self._all[index]
        if left.hi > place:
            right = Segment(place, left.hi)
            right.take_from(left)
            left.hi = place
            self._replace(index + 1, index + 1, [right])

    def _replace(self, begin: int, end: int, segments: list[Segment]) -> None:
        for segment in self._all[begin:end]:
            del self.beginning_at[segment.lo]
        self._all[begin:end] = segments
        self._los[begin:end] = [segment.lo for segment in segments]
        for segment in segments:
            self.beginning_at[segment.lo] = segment


def _filled(segments: list[Segment], lo: int, hi: int) -> Iterator[Segment]:
    for segment in segments:
        if lo < segment.lo:
            yield Segment(lo, segment.lo)
        yield segment
        lo = segment.hi
    if lo < hi:
        yield Segment(lo, hi)
