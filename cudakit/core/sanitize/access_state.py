"""The accesses to some bytes that a later access may race with: bounded, and still every race is found.

The state of some bytes is the last write, and of the reads since (and, apart, of the atomic operations) those
that no other one of them comes after: at most one for each stream, since one stream's work is ordered.
States are kept for ranges of bytes, and for the pointers that kernels were given.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from cudakit.core.sanitize.clocks import ATOMIC, NEVER, WRITE, Clock, Touch, are_alike

Touches: TypeAlias = tuple[Touch, ...]

# A touch that was reported against a later one, and that: what comes after the later one is not reported
# again, as it would come after both if the first report were mended.
Pardon: TypeAlias = tuple[Touch, Touch]


class Cell:
    """The accesses to some bytes. Its lists are tuples, so that a copy can share them."""

    __slots__ = ("approximate", "atomics", "pardons", "reads", "write")

    def __init__(self) -> None:
        self.write: Touch | None = None
        self.reads: Touches = ()
        self.atomics: Touches = ()
        self.pardons: tuple[Pardon, ...] = ()
        self.approximate = False

    def takes(self, touch: Touch, past: Clock) -> bool:
        """Keep an access that conflicts with nothing; False, and it is not kept, where it may.

        Says the same as ``unordered`` and ``store``, at once: nearly every access of a program ends here.
        """
        write, reads = self.write, self.reads
        if self.atomics or touch.mode & ATOMIC:
            return False
        if touch.mode & WRITE:
            if reads:
                for read in reads:
                    if read.tick > past[read.slot]:
                        return False
            elif write is not None and write.tick > past[write.slot]:
                return False
            self.write = touch
            self.reads = self.pardons = ()
            return True
        if write is not None and write.tick > past[write.slot]:
            return False
        if len(reads) > 1:
            self.reads = without(reads, past, touch)
        elif not reads or reads[0].tick <= past[reads[0].slot]:
            self.reads = (touch,)
        else:
            self.reads = (reads[0], touch)
        return True

    def unordered(self, mode: int, past: Clock) -> Sequence[Touch]:
        """List what an access of a mode conflicts with, and does not come after.

        What shares the bytes comes after the last write, or is reported: so the write needs no look then.
        """
        if mode & ATOMIC:
            others = self.reads
        elif mode & WRITE:
            others = self.reads + self.atomics if self.atomics else self.reads
        else:
            others = self.atomics
        if others:
            return [other for other in others if other.tick > past[other.slot]]
        write = self.write
        if write is not None and write.tick > past[write.slot]:
            return [write]
        return ()

    def store(self, touch: Touch, past: Clock) -> None:
        """Keep an access, and forget those that it comes after and stands for."""
        write, mode = self.write, touch.mode
        if write is not None and write.tick == NEVER:
            return  # of what is done to freed memory nothing else follows
        if mode & ATOMIC:
            self.atomics = without(self.atomics, past, touch)
        elif mode & WRITE:
            self.write = touch
            self.reads = self.atomics = self.pardons = ()
        else:
            self.reads = without(self.reads, past, touch)

    def take_from(self, other: Cell) -> None:
        """Become a copy of another cell."""
        self.write, self.reads, self.atomics = other.write, other.reads, other.atomics
        self.pardons, self.approximate = other.pardons, other.approximate

    def is_like(self, other: Cell) -> bool:
        """Say whether two cells would answer and be reported alike."""
        return (
            are_alike(self.write, other.write)
            and _are_all_alike(self.reads, other.reads)
            and _are_all_alike(self.atomics, other.atomics)
            and not self.pardons
            and not other.pardons
            and self.approximate == other.approximate
        )


def without(touches: Touches, past: Clock, new: Touch) -> Touches:
    """Replace what comes before a new touch by it."""
    if not touches or (len(touches) == 1 and touches[0].tick <= past[touches[0].slot]):
        return (new,)
    return (*[touch for touch in touches if touch.tick > past[touch.slot]], new)


def _are_all_alike(some: Touches, others: Touches) -> bool:
    return len(some) == len(others) and all(map(are_alike, some, others))


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


# So many pointers are remembered; beyond, the half that was used longest ago is forgotten.
MOST_POINTERS = 1 << 16


class Pointer:
    """The kernels that were given one pointer: those that may write there, and those that only read.

    Of each, only those that no other one of them comes after.
    """

    __slots__ = ("address", "pardons", "readers", "writers")

    approximate = False

    def __init__(self, address: int) -> None:
        self.address = address
        self.writers: Touches = ()
        self.readers: Touches = ()
        self.pardons: tuple[Pardon, ...] = ()

    def takes(self, touch: Touch, past: Clock) -> bool:
        """Keep a kernel where nothing unordered was given the pointer; else return False."""
        writers = self.writers
        if self.readers or len(writers) > 1:
            return False
        if writers and writers[0].tick > past[writers[0].slot]:
            return False
        if not touch.mode & WRITE:
            return False
        self.writers = (touch,)
        return True

    def unordered(self, mode: int, past: Clock) -> Sequence[Touch]:
        """List what an access of a mode may conflict with, and does not come after."""
        touches = self.writers + self.readers if mode & WRITE else self.writers
        return [touch for touch in touches if touch.tick > past[touch.slot]]

    def store(self, touch: Touch, past: Clock) -> None:
        """Keep a kernel, and forget those that it comes after and stands for."""
        if touch.mode & WRITE:
            self.writers = without(self.writers, past, touch)
            self.readers = tuple(read for read in self.readers if read.tick > past[read.slot])
        else:
            self.readers = without(self.readers, past, touch)

    def clear(self) -> None:
        """Forget all: what conflicts with any of it conflicts with a later write, which is exact."""
        self.writers = self.readers = self.pardons = ()

    @property
    def last_seq(self) -> int:
        """The last call that was given the pointer."""
        return max((touch.call.seq for touch in self.writers + self.readers), default=0)


class Pointers:
    """All pointers that kernels were given."""

    def __init__(self) -> None:
        self.known: dict[int, Pointer] = {}
        self._addresses: list[int] = []

    def at(self, address: int) -> Pointer:
        """Return what is known of one pointer."""
        found = self.known.get(address)
        if found is None:
            if len(self.known) >= MOST_POINTERS:
                self._forget_half()
            found = self.known[address] = Pointer(address)
            insort(self._addresses, address)
        return found

    def within(self, lo: int, hi: int) -> list[Pointer]:
        """List the pointers into a range."""
        begin = bisect_left(self._addresses, lo)
        if begin == len(self._addresses) or self._addresses[begin] >= hi:
            return []
        end = bisect_left(self._addresses, hi, lo=begin)
        return [self.known[address] for address in self._addresses[begin:end]]

    def clear(self, lo: int, hi: int) -> None:
        """Forget the pointers into a range."""
        if self.within(lo, hi):
            self.keep(lambda pointer: not lo <= pointer.address < hi)

    def keep(self, wanted: Callable[[Pointer], bool]) -> None:
        """Forget all pointers but those."""
        for pointer in [one for one in self.known.values() if not wanted(one)]:
            del self.known[pointer.address]
        self._addresses = sorted(self.known)

    def _forget_half(self) -> None:
        seqs = sorted(pointer.last_seq for pointer in self.known.values())
        middle = seqs[len(seqs) // 2]
        self.keep(lambda pointer: pointer.last_seq > middle)
