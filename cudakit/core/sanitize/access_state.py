"""Access states: for some bytes, the earlier accesses that a later access may race with.

A state has the last write, the latest reads since then and the latest atomics since then. A read that happens
before another read is dropped, because every access that races with it also races with the other. That leaves
at most one per stream, so a state stays small and no race is lost. States are kept for ranges of bytes and
for the pointer arguments of kernels.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

from cudakit.core.sanitize.clocks import ATOMIC, NEVER, WRITE, Clock, MemoryAccess, are_equivalent

Accesses: TypeAlias = tuple[MemoryAccess, ...]

# An access, and the later access of its first report. An access that is ordered after the later one is not
# reported again: the fix of the first report would order it after both.
ReportedPair: TypeAlias = tuple[MemoryAccess, MemoryAccess]


class AccessState:
    """The accesses to some bytes. Collections are tuples, so copies can share them."""

    __slots__ = ("already_reported", "approximate", "atomics", "merged", "reads", "write")

    def __init__(self) -> None:
        self.write: MemoryAccess | None = None
        self.reads: Accesses = ()
        self.atomics: Accesses = ()
        self.already_reported: tuple[ReportedPair, ...] = ()
        # Whether the state is of several merged segments: each of its accesses is to some of the bytes.
        self.merged = False
        # Whether the state is of a part of a merged segment: an access may be to other parts only.
        self.approximate = False

    def add_if_ordered(self, access: MemoryAccess, past: Clock) -> bool:
        """Store an access that races with none. Return False, storing nothing, if it may race.

        Does the work of ``unordered`` and ``store`` in one call, because nearly every access ends here.
        """
        write, reads = self.write, self.reads
        if self.atomics or self.merged or access.mode & ATOMIC:
            return False
        if access.mode & WRITE:
            if reads:
                for read in reads:
                    if read.tick > past[read.slot]:
                        return False
            elif write is not None and write.tick > past[write.slot]:
                return False
            self.write = access
            self.reads = self.already_reported = ()
            self.merged = self.approximate = False
            return True
        if write is not None and write.tick > past[write.slot]:
            return False
        if len(reads) > 1:
            self.reads = replace_ordered(reads, past, access)
        elif not reads or reads[0].tick <= past[reads[0].slot]:
            self.reads = (access,)
        else:
            self.reads = (reads[0], access)
        return True

    def unordered(self, mode: int, past: Clock) -> Sequence[MemoryAccess]:
        """List the stored accesses that conflict with an access of a mode and do not happen before it.

        Reads and atomics are ordered after the last write, or were reported. So if any of them conflicts, the
        write needs no check, except in a merged state, whose accesses may be to different bytes.
        """
        if mode & ATOMIC:
            others = self.reads
        elif mode & WRITE:
            others = self.reads + self.atomics if self.atomics else self.reads
        else:
            others = self.atomics
        conflicting = [other for other in others if other.tick > past[other.slot]] if others else []
        if not others or self.merged:
            write = self.write
            if write is not None and write.tick > past[write.slot]:
                conflicting.append(write)
        return conflicting

    def store(self, access: MemoryAccess, past: Clock) -> None:
        """Store an access, replacing those that it is ordered after."""
        write, mode = self.write, access.mode
        if write is not None and write.tick == NEVER:
            return  # one use after the free was reported, or will be: further ones add nothing
        if mode & ATOMIC:
            self.atomics = replace_ordered(self.atomics, past, access)
        elif mode & WRITE:
            self.write = access
            self.reads = self.atomics = self.already_reported = ()
            self.merged = self.approximate = False
        else:
            self.reads = replace_ordered(self.reads, past, access)

    def copy_from(self, other: AccessState) -> None:
        """Become a copy of another state."""
        self.write, self.reads, self.atomics = other.write, other.reads, other.atomics
        self.already_reported = other.already_reported
        self.merged, self.approximate = other.merged, other.approximate

    def is_equivalent(self, other: AccessState) -> bool:
        """Return whether two states give the same conflicts and the same reports."""
        return (
            are_equivalent(self.write, other.write)
            and _are_all_equivalent(self.reads, other.reads)
            and _are_all_equivalent(self.atomics, other.atomics)
            and not self.already_reported
            and not other.already_reported
            and (self.merged, self.approximate) == (other.merged, other.approximate)
        )


def replace_ordered(accesses: Accesses, past: Clock, new: MemoryAccess) -> Accesses:
    """Return the accesses and a new one, without those that happen before it."""
    if not accesses or (len(accesses) == 1 and accesses[0].tick <= past[accesses[0].slot]):
        return (new,)
    return (*[access for access in accesses if access.tick > past[access.slot]], new)


def _are_all_equivalent(accesses: Accesses, other_accesses: Accesses) -> bool:
    return len(accesses) == len(other_accesses) and all(
        map(are_equivalent, accesses, other_accesses)
    )


class Segment(AccessState):
    """A range of bytes, from ``lo`` up to ``hi``, with the same accesses."""

    __slots__ = ("hi", "lo")

    def __init__(self, lo: int, hi: int) -> None:
        super().__init__()
        self.lo = lo
        self.hi = hi


class Segments:
    """The accessed bytes as disjoint segments, in order of addresses."""

    def __init__(self) -> None:
        # A sentinel before all addresses, so that each address has a segment at or before it.
        self._all = [Segment(-1, -1)]
        self._los = [-1]
        self.by_start: dict[int, Segment] = {}  # for fast lookups

    def __len__(self) -> int:
        return len(self._all) - 1

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._all[1:])

    def at(self, lo: int) -> Segment:
        """Return the last segment that begins at or before an address, and may end before it."""
        return self._all[bisect_right(self._los, lo) - 1]

    def overlapping(self, lo: int, hi: int) -> list[Segment]:
        """List the segments that have bytes in a range."""
        begin = bisect_right(self._los, lo) - 1
        if self._all[begin].hi <= lo:
            begin += 1
        return self._all[begin : bisect_left(self._los, hi, lo=begin)]

    def split(self, lo: int, hi: int) -> list[Segment]:
        """Return segments that cover exactly a range: split at its ends, and added in the gaps."""
        self._split_at(lo)
        self._split_at(hi)
        begin, end = bisect_left(self._los, lo), bisect_left(self._los, hi)
        covering = list(_fill_gaps(self._all[begin:end], lo, hi))
        if len(covering) != end - begin:
            self._replace(begin, end, covering)
        return covering

    def merge(self, lo: int, hi: int) -> None:
        """Merge adjacent equivalent segments in a range and at its ends."""
        begin = max(bisect_left(self._los, lo) - 1, 1)
        end = bisect_right(self._los, hi)
        segments = self._all[begin:end]
        merged = segments[:1]
        for segment, next_ in pairwise(segments):
            if segment.hi == next_.lo and merged[-1].is_equivalent(next_):
                merged[-1].hi = next_.hi
            else:
                merged.append(next_)
        if len(merged) != len(segments):
            self._replace(begin, end, merged)

    def clear(self, lo: int, hi: int) -> None:
        """Remove all accesses to a range."""
        if self.overlapping(lo, hi):
            self._split_at(lo)
            self._split_at(hi)
            self._replace(bisect_left(self._los, lo), bisect_left(self._los, hi), [])

    def rebuild(self, change: Callable[[list[Segment]], list[Segment]]) -> None:
        """Replace all segments by the result of a function."""
        self._replace(1, len(self._all), change(self._all[1:]))

    def _split_at(self, address: int) -> None:
        index = bisect_left(self._los, address) - 1
        left = self._all[index]
        if left.hi > address:
            left.approximate |= left.merged
            right = Segment(address, left.hi)
            right.copy_from(left)
            left.hi = address
            self._replace(index + 1, index + 1, [right])

    def _replace(self, begin: int, end: int, segments: list[Segment]) -> None:
        for segment in self._all[begin:end]:
            del self.by_start[segment.lo]
        self._all[begin:end] = segments
        self._los[begin:end] = [segment.lo for segment in segments]
        for segment in segments:
            self.by_start[segment.lo] = segment


def _fill_gaps(segments: list[Segment], lo: int, hi: int) -> Iterator[Segment]:
    """Yield the segments of a range, with new ones in the gaps between them."""
    for segment in segments:
        if lo < segment.lo:
            yield Segment(lo, segment.lo)
        yield segment
        lo = segment.hi
    if lo < hi:
        yield Segment(lo, hi)


# Pointers stored at most; above that, the least recently used half is removed.
MOST_POINTERS = 1 << 16


class Pointer:
    """The kernels that got one pointer as an argument; none of them happens before another.

    How many bytes a kernel accesses through the pointer is unknown, since pools divide large allocations.
    Therefore the pointer counts as one address.
    """

    __slots__ = ("address", "already_reported", "readers", "writers")

    merged = approximate = False

    def __init__(self, address: int) -> None:
        self.address = address
        self.writers: Accesses = ()
        self.readers: Accesses = ()
        self.already_reported: tuple[ReportedPair, ...] = ()

    def add_if_ordered(self, access: MemoryAccess, past: Clock) -> bool:
        """Store a writer that all stored kernels happen before. Otherwise return False, storing nothing."""
        writers = self.writers
        if self.readers or len(writers) > 1:
            return False
        if writers and writers[0].tick > past[writers[0].slot]:
            return False
        if not access.mode & WRITE:
            return False
        self.writers = (access,)
        return True

    def unordered(self, mode: int, past: Clock) -> Sequence[MemoryAccess]:
        """List the kernels that may conflict with an access of a mode and do not happen before it."""
        accesses = self.writers + self.readers if mode & WRITE else self.writers
        return [access for access in accesses if access.tick > past[access.slot]]

    def store(self, access: MemoryAccess, past: Clock) -> None:
        """Store a kernel, replacing those that happen before it."""
        if access.mode & WRITE:
            self.writers = replace_ordered(self.writers, past, access)
            self.readers = tuple(read for read in self.readers if read.tick > past[read.slot])
        else:
            self.readers = replace_ordered(self.readers, past, access)

    def clear(self) -> None:
        """Remove all kernels: an access that conflicts with one also conflicts with the later exact write."""
        self.writers = self.readers = self.already_reported = ()

    @property
    def last_seq(self) -> int:
        """The last call with the pointer among its arguments."""
        return max((access.call.seq for access in self.writers + self.readers), default=0)


class Pointers:
    """The pointer arguments of all kernels."""

    def __init__(self) -> None:
        self.known: dict[int, Pointer] = {}
        self._addresses: list[int] = []

    def at(self, address: int) -> Pointer:
        """Return the state of one pointer, new if necessary."""
        pointer = self.known.get(address)
        if pointer is None:
            if len(self.known) >= MOST_POINTERS:
                self._remove_half()
            pointer = self.known[address] = Pointer(address)
            insort(self._addresses, address)
        return pointer

    def overlapping(self, lo: int, hi: int) -> list[Pointer]:
        """List the pointers into a range."""
        begin = bisect_left(self._addresses, lo)
        if begin == len(self._addresses) or self._addresses[begin] >= hi:
            return []
        end = bisect_left(self._addresses, hi, lo=begin)
        return [self.known[address] for address in self._addresses[begin:end]]

    def clear(self, lo: int, hi: int) -> None:
        """Remove the pointers into a range."""
        if self.overlapping(lo, hi):
            self.keep(lambda pointer: not lo <= pointer.address < hi)

    def keep(self, is_kept: Callable[[Pointer], bool]) -> None:
        """Remove all pointers for which a function returns False."""
        for pointer in [pointer for pointer in self.known.values() if not is_kept(pointer)]:
            del self.known[pointer.address]
        self._addresses = sorted(self.known)

    def _remove_half(self) -> None:
        seqs = sorted(pointer.last_seq for pointer in self.known.values())
        middle = seqs[len(seqs) // 2]
        self.keep(lambda pointer: pointer.last_seq > middle)
