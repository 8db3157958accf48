"""Access states: for some bytes, the earlier accesses that a later access may race with.

A state has the last write, and the latest reads and atomics since that write. A read that happens before
another read is dropped, because every access that races with the earlier read also races with the later one.
So a state has at most one read per stream: it stays small, and no race is lost. There are states for ranges
of bytes and for the pointer arguments of kernels.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice, pairwise
from math import gcd
from operator import itemgetter
from typing import Final, Protocol, TypeAlias

import numpy as np

from cudakit.sanitize.conflicts import ConflictChecker, GraphAccesses, ReportedPairs
from cudakit.sanitize.ordering import (
    ASSUMED,
    ATOMIC,
    MERGED,
    NEVER,
    UNCERTAIN,
    WRITE,
    Call,
    Clock,
    MemoryAccess,
    Release,
    are_equivalent,
)
from cudakit.sanitize.races import Allocation
from cudakit.sanitize.records import AccessRows, access_fields

Accesses: TypeAlias = tuple[MemoryAccess, ...]


class AccessState:
    """The accesses to some bytes. The collections are tuples, so that copies of a state can share them."""

    __slots__ = (
        "atomics",
        "is_approximate",
        "is_merged",
        "last_write",
        "reads",
        "reported_pairs",
    )

    def __init__(self) -> None:
        self.last_write: MemoryAccess | None = None
        self.reads: Accesses = ()
        self.atomics: Accesses = ()
        self.reported_pairs: ReportedPairs = ()
        # Whether this state was merged from several states, so that each access is to some of the
        # bytes only.
        self.is_merged = False
        # Whether this state was split off a merged state, so that an access may be to none of the
        # bytes.
        self.is_approximate = False

    def unordered_accesses(self, mode: int, clock: Clock) -> Sequence[MemoryAccess]:
        """List the stored accesses that conflict with an access of this mode and do not happen before it.

        Reads and atomics are ordered after the last write, or were reported. So if there is a conflicting
        read or atomic, the write needs no check, except in a merged state, whose accesses may be to different
        bytes.
        """
        if mode & ATOMIC:
            candidates = self.reads
        elif mode & WRITE:
            candidates = self.reads + self.atomics if self.atomics else self.reads
        else:
            candidates = self.atomics
        conflicting_accesses = [access for access in candidates if access.tick > clock[access.slot]]
        if not candidates or self.is_merged:
            write = self.last_write
            if write is not None and write.tick > clock[write.slot]:
                conflicting_accesses.append(write)
        return conflicting_accesses

    def store(self, access: MemoryAccess, clock: Clock) -> None:
        """Store an access, and remove the accesses of the same kind that happen before it."""
        write, mode = self.last_write, access.mode
        if write is not None and write.tick == NEVER:
            return  # the memory was freed, and one use after a free is enough to report
        if mode & ATOMIC:
            self.atomics = replace_ordered(self.atomics, clock, access)
        elif mode & WRITE:
            self.last_write = access
            self.reads = self.atomics = self.reported_pairs = ()
            self.is_merged = self.is_approximate = False
        else:
            self.reads = replace_ordered(self.reads, clock, access)

    def copy_from(self, source_state: AccessState) -> None:
        """Become a copy of another state."""
        self.last_write, self.reads, self.atomics = (
            source_state.last_write,
            source_state.reads,
            source_state.atomics,
        )
        self.reported_pairs = source_state.reported_pairs
        self.is_merged, self.is_approximate = source_state.is_merged, source_state.is_approximate

    def is_equivalent(self, other_state: AccessState) -> bool:
        """Return whether two states conflict with the same accesses, and are reported in the same way."""
        return (
            are_equivalent(self.last_write, other_state.last_write)
            and _are_all_equivalent(self.reads, other_state.reads)
            and _are_all_equivalent(self.atomics, other_state.atomics)
            and not self.reported_pairs
            and not other_state.reported_pairs
            and (self.is_merged, self.is_approximate)
            == (other_state.is_merged, other_state.is_approximate)
        )


def replace_ordered(accesses: Accesses, clock: Clock, new_access: MemoryAccess) -> Accesses:
    """Return the accesses and a new access, without the accesses that happen before the new one."""
    if not accesses or (len(accesses) == 1 and accesses[0].tick <= clock[accesses[0].slot]):
        return (new_access,)
    return (*[access for access in accesses if access.tick > clock[access.slot]], new_access)


def _are_all_equivalent(accesses: Accesses, other_accesses: Accesses) -> bool:
    return len(accesses) == len(other_accesses) and all(
        map(are_equivalent, accesses, other_accesses)
    )


class RangeState(AccessState):
    """The state of the bytes from ``lo`` up to ``hi``, all of which have the same accesses."""

    __slots__ = ("hi", "lo")

    def __init__(self, lo: int, hi: int) -> None:
        super().__init__()
        self.lo = lo
        self.hi = hi


class RangeStates:
    """The states of all accessed bytes: disjoint ranges, in order of their addresses."""

    def __init__(self) -> None:
        # A sentinel below all addresses, so that each address has a range that begins at or below it.
        self._states = [RangeState(-1, -1)]
        self._starts = [-1]

    def __len__(self) -> int:
        return len(self._states) - 1

    def __iter__(self) -> Iterator[RangeState]:
        return iter(self._states[1:])

    def last_beginning_at_or_below(self, address: int) -> RangeState:
        """Return the last range that begins at or below an address. The range may end below the address."""
        return self._states[bisect_right(self._starts, address) - 1]

    def find_overlapping(self, lo: int, hi: int) -> list[RangeState]:
        """List the states that have bytes between two addresses."""
        begin = bisect_right(self._starts, lo) - 1
        if self._states[begin].hi <= lo:
            begin += 1
        return self._states[begin : bisect_left(self._starts, hi, lo=begin)]

    def split_to_cover(self, lo: int, hi: int) -> list[RangeState]:
        """Return states that cover exactly the bytes from ``lo`` up to ``hi``.

        Splits existing ranges at both ends, and adds new states in the gaps.
        """
        self._split_at(lo)
        self._split_at(hi)
        begin, end = bisect_left(self._starts, lo), bisect_left(self._starts, hi)
        covering_states = list(_fill_gaps(self._states[begin:end], lo, hi))
        if len(covering_states) != end - begin:
            self._replace(begin, end, covering_states)
        return covering_states

    def merge_equivalent(self, lo: int, hi: int) -> None:
        """Merge adjacent equivalent states, from the one before ``lo`` to the one after ``hi``."""
        begin = max(bisect_left(self._starts, lo) - 1, 1)
        end = bisect_right(self._starts, hi)
        states = self._states[begin:end]
        merged_states = states[:1]
        for state, next_state in pairwise(states):
            if state.hi == next_state.lo and merged_states[-1].is_equivalent(next_state):
                merged_states[-1].hi = next_state.hi
            else:
                merged_states.append(next_state)
        if len(merged_states) != len(states):
            self._replace(begin, end, merged_states)

    def clear(self, lo: int, hi: int) -> None:
        """Remove all accesses to the bytes from ``lo`` up to ``hi``."""
        if self.find_overlapping(lo, hi):
            self._split_at(lo)
            self._split_at(hi)
            self._replace(bisect_left(self._starts, lo), bisect_left(self._starts, hi), [])

    def rebuild(self, transform: Callable[[list[RangeState]], list[RangeState]]) -> None:
        """Replace all states by those that a function returns for them."""
        self._replace(1, len(self._states), transform(self._states[1:]))

    def _split_at(self, address: int) -> None:
        """Split the range that has an address inside; do nothing if there is no such range."""
        index = bisect_left(self._starts, address) - 1
        left_state = self._states[index]
        if left_state.hi > address:
            left_state.is_approximate |= left_state.is_merged
            right_state = RangeState(address, left_state.hi)
            right_state.copy_from(left_state)
            left_state.hi = address
            self._replace(index + 1, index + 1, [right_state])

    def _replace(self, begin: int, end: int, new_states: list[RangeState]) -> None:
        """Replace the states from one index up to another."""
        self._states[begin:end] = new_states
        self._starts[begin:end] = [state.lo for state in new_states]


def _fill_gaps(states: list[RangeState], lo: int, hi: int) -> Iterator[RangeState]:
    """Yield the states between two addresses, with new states in the gaps."""
    for state in states:
        if lo < state.lo:
            yield RangeState(lo, state.lo)
        yield state
        lo = state.hi
    if lo < hi:
        yield RangeState(lo, hi)


# Maximum number of stored pointers. Above it, the least recently used half is removed.
MAX_POINTER_STATES = 1 << 16


class PointerState:
    """The kernels that got one pointer as an argument, without those that happen before another of them.

    The number of bytes that a kernel accesses through the pointer is unknown, because pools divide large
    allocations. Therefore the access counts as an access to one address.
    """

    __slots__ = ("address", "readers", "reported_pairs", "writers")

    is_merged = False

    def __init__(self, address: int) -> None:
        self.address = address
        self.writers: Accesses = ()
        self.readers: Accesses = ()
        self.reported_pairs: ReportedPairs = ()

    def unordered_accesses(self, mode: int, clock: Clock) -> Sequence[MemoryAccess]:
        """List the stored kernels that may race with an access of this mode whose clock is ``clock``."""
        accesses = self.writers + self.readers if mode & WRITE else self.writers
        return [access for access in accesses if access.tick > clock[access.slot]]

    def store(self, access: MemoryAccess, clock: Clock) -> None:
        """Store a kernel, and remove the kernels that happen before it."""
        if access.mode & WRITE:
            self.writers = replace_ordered(self.writers, clock, access)
            self.readers = tuple(read for read in self.readers if read.tick > clock[read.slot])
        else:
            self.readers = replace_ordered(self.readers, clock, access)

    def clear(self) -> None:
        """Remove all kernels. Call it after an exact write, which conflicts with the same later accesses."""
        self.writers = self.readers = self.reported_pairs = ()

    @property
    def last_seq(self) -> int:
        """The number of the last call with the pointer among its arguments; 0 if there is none."""
        return max((access.call.seq for access in self.writers + self.readers), default=0)


class PointerStates:
    """The pointer arguments of all kernels."""

    def __init__(self) -> None:
        self.states_by_address: dict[int, PointerState] = {}
        self._addresses: list[int] = []

    def __len__(self) -> int:
        return len(self.states_by_address)

    def get_or_create(self, address: int) -> PointerState:
        """Return the state of a pointer; create it if there is none."""
        pointer = self.states_by_address.get(address)
        if pointer is None:
            if len(self.states_by_address) >= MAX_POINTER_STATES:
                self._remove_half()
            pointer = self.states_by_address[address] = PointerState(address)
            insort(self._addresses, address)
        return pointer

    def find_overlapping(self, lo: int, hi: int) -> list[PointerState]:
        """List the pointers to bytes from ``lo`` up to ``hi``."""
        begin = bisect_left(self._addresses, lo)
        if begin == len(self._addresses) or self._addresses[begin] >= hi:
            return []
        end = bisect_left(self._addresses, hi, lo=begin)
        return [self.states_by_address[address] for address in self._addresses[begin:end]]

    def clear(self, lo: int, hi: int) -> None:
        """Remove the pointers to bytes from ``lo`` up to ``hi``."""
        if self.find_overlapping(lo, hi):
            self.remove_unless(lambda pointer: not lo <= pointer.address < hi)

    def remove_unless(self, predicate: Callable[[PointerState], bool]) -> None:
        """Remove all pointers for which the predicate is False."""
        for pointer_state in [
            state for state in self.states_by_address.values() if not predicate(state)
        ]:
            del self.states_by_address[pointer_state.address]
        self._addresses = sorted(self.states_by_address)

    def _remove_half(self) -> None:
        """Remove the least recently used half of the pointers."""
        seqs = sorted(pointer_state.last_seq for pointer_state in self.states_by_address.values())
        median_seq = seqs[len(seqs) // 2]
        self.remove_unless(lambda pointer_state: pointer_state.last_seq > median_seq)


# --- Strided accesses: rows of bytes at equal distances, and the bytes that two strided accesses share ---
#
# Strided accesses are not stored as ranges: one range from the first to the last row would make interleaved
# columns race, and one range per row would be too many ranges.

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


# --- Shadow memory: for each accessed byte range, the last accesses that a later access may race with ---
#
# Host and device addresses are treated alike. Exact accesses are stored in ``RangeStates`` and, if they are
# strided, in ``StridedStates``; the pointer arguments of kernels in ``PointerStates``, as single addresses.
#
# There are two implementations of ``Shadow`` with equal results: ``PythonShadow``, and ``NativeShadow`` in C
# (``native/``), which is more than ten times as fast.

# Maximum number of rows for which each row of a strided access is stored as a range.
_MAX_SEPARATE_ROWS = 16


class ClockPosition(Protocol):
    """The position of an operation on a timeline."""

    @property
    def slot(self) -> int:
        """The index of the timeline in clocks."""

    @property
    def tick(self) -> int:
        """The tick of the next operation."""

    @property
    def clock(self) -> Clock:
        """The clock of the next operation."""


class Shadow(Protocol):
    """The shadow memory of one process. It passes the conflicts of each access to ``checker``."""

    @property
    def checker(self) -> ConflictChecker: ...
    @property
    def range_state_count(self) -> int: ...
    @property
    def pointer_state_count(self) -> int: ...
    @property
    def strided_state_count(self) -> int: ...
    def add(
        self, access: MemoryAccess, clock: Clock, stride: int = 0, element_count: int = 0
    ) -> None:
        """Check an access for races, and store it. An access with several elements is strided."""

    def add_all(self, rows: AccessRows, call: Call, position: ClockPosition) -> None:
        """Check and store the accesses of a launch."""

    def add_graph_launch(
        self, accesses: GraphAccesses, launch: Call, position: ClockPosition
    ) -> None:
        """Check and store the accesses of a graph launch, whose nodes ``checker.node_order`` orders."""

    def add_free(self, access: MemoryAccess, clock: Clock) -> None:
        """Check and store a stream-ordered free. Each later access to the bytes is a race."""

    def free_releases(self, lo: int, hi: int) -> list[Release]:
        """List the releases of the stream-ordered frees of bytes from ``lo`` up to ``hi``."""

    def find_unordered(self, lo: int, hi: int, mode: int, clock: Clock) -> list[MemoryAccess]:
        """List the stored accesses to the bytes from ``lo`` up to ``hi`` that race with an access.

        The access has this mode, and its operation this clock. Pointer arguments of kernels are ignored.
        """

    def clear(self, lo: int, hi: int) -> None:
        """Remove all accesses to the bytes from ``lo`` up to ``hi``."""

    def prune(self, past_clock: Clock) -> None:
        """Remove the accesses that all future work happens after: those up to the ticks of ``past_clock``."""

    def coarsen(self, allocation_at: AllocationAt, max_states: int) -> None:
        """Merge range states of each allocation that has more than ``max_states``, to half of this number.

        A race with a later access to a part of a merged range is only possible. Outside of recorded
        allocations, the oldest states are removed instead.
        """


def new_shadow(
    checker: ConflictChecker, *, find_possible_races: bool = False, native: bool | None = None
) -> Shadow:
    """Return an empty shadow memory.

    ``find_possible_races`` also finds races through pointers that may be stale, and through pointers to lower
    addresses of the same allocation, from which a kernel may reach the bytes. Such races are only possible.
    If ``native`` is None, the compiled implementation is used if it is installed. Raises ImportError if
    ``native`` is true and it is not installed.
    """
    if native is not False:
        try:
            from cudakit.sanitize._shadow_memory import NativeShadow
        except ImportError:
            if native:
                raise
        else:
            return NativeShadow(checker, find_possible_races)
    return PythonShadow(checker, find_possible_races=find_possible_races)


class PythonShadow:
    """Shadow memory in Python: the reference for the C implementation, and its replacement."""

    def __init__(self, checker: ConflictChecker, *, find_possible_races: bool = False) -> None:
        self.checker = checker
        self._range_states = RangeStates()
        self._strided_states = StridedStates()
        self._pointer_states = PointerStates()
        self._finds_possible = find_possible_races

    @property
    def range_state_count(self) -> int:
        return len(self._range_states)

    @property
    def pointer_state_count(self) -> int:
        return len(self._pointer_states)

    @property
    def strided_state_count(self) -> int:
        return len(self._strided_states)

    def add(
        self, access: MemoryAccess, clock: Clock, stride: int = 0, element_count: int = 0
    ) -> None:
        if access.precision == UNCERTAIN and not self._finds_possible:
            return
        if access.precision >= ASSUMED:
            self._add_pointer(access, clock)
        elif element_count > 1:
            self._add_strided(
                access, clock, strided_range(access.lo, access.hi, stride, element_count)
            )
        elif access.lo < access.hi:
            self._add_range(access, clock)
        self.checker.report()

    def add_all(self, rows: AccessRows, call: Call, position: ClockPosition) -> None:
        slot, tick, clock = position.slot, position.tick, position.clock
        for lo, hi, mode, precision, stride, element_count in access_fields(rows):
            access = MemoryAccess(slot, tick, call, lo, hi, mode, precision)
            self.add(access, clock, stride, element_count)

    def add_graph_launch(
        self, accesses: GraphAccesses, launch: Call, position: ClockPosition
    ) -> None:
        for call, rows in accesses.calls_in_launch(launch):
            self.add_all(rows, call, position)

    def add_free(self, access: MemoryAccess, clock: Clock) -> None:
        self.add(access, clock)
        access.tick = NEVER

    def free_releases(self, lo: int, hi: int) -> list[Release]:
        writes = (state.last_write for state in self._range_states.find_overlapping(lo, hi))
        releases = (write.call.release for write in writes if write and write.tick == NEVER)
        return [release for release in releases if release is not None]

    def find_unordered(self, lo: int, hi: int, mode: int, clock: Clock) -> list[MemoryAccess]:
        range_states = self._range_states.find_overlapping(lo, hi)
        strided_states = self._strided_states.find_overlapping(lo, hi)
        states: list[AccessState] = [*range_states, *(state for state, _ in strided_states)]
        return [access for state in states for access in state.unordered_accesses(mode, clock)]

    def clear(self, lo: int, hi: int) -> None:
        if lo < hi:
            self._range_states.clear(lo, hi)
            self._strided_states.clear(lo, hi)
            self._pointer_states.clear(lo, hi)

    def prune(self, past_clock: Clock) -> None:
        self._range_states.rebuild(
            lambda states: [state for state in states if _prune_state(state, past_clock)]
        )
        self._strided_states.remove_unless(lambda _, state: _prune_state(state, past_clock))
        self._pointer_states.remove_unless(lambda pointer: _prune_pointer(pointer, past_clock))

    def coarsen(self, allocation_at: AllocationAt, max_states: int) -> None:
        def merge_states(states: list[RangeState]) -> list[RangeState]:
            merged_states: list[RangeState] = []
            for allocation, group in groupby(states, key=lambda state: allocation_at(state.lo)):
                group_states = list(group)
                if len(group_states) > max_states:
                    merge_members = _merge_adjacent_states if allocation else _most_recent_states
                    group_states = list(merge_members(group_states, max_states))
                merged_states += group_states
            return merged_states

        self._range_states.rebuild(merge_states)

    def _check(
        self,
        state: AccessState | PointerState,
        access: MemoryAccess,
        clock: Clock,
        common_range: Range,
        *,
        certainly_overlap: bool = True,
    ) -> None:
        """Check an access against a state that has the bytes of ``common_range`` in common with it."""
        if unordered_accesses := state.unordered_accesses(access.mode, clock):
            state.reported_pairs = self.checker.check(
                state.reported_pairs,
                unordered_accesses,
                access,
                clock,
                common_range,
                certainly_overlap,
                state.is_merged,
            )

    def _add_strided(self, access: MemoryAccess, clock: Clock, strided_range: StridedRange) -> None:
        """Check and store a strided access."""
        if strided_range.row_count <= _MAX_SEPARATE_ROWS:
            for lo, hi in strided_range.row_ranges():
                self._add_range(_part_of_access(access, lo, hi), clock)
            return
        access.accessed_bytes = strided_range.row_count * strided_range.row_bytes
        for state in self._range_states.find_overlapping(strided_range.lo, strided_range.hi):
            if common_range := strided_range.overlap_with_bounds(state.lo, state.hi):
                is_exact = not state.is_merged and all(
                    earlier_access.precision != MERGED
                    for earlier_access in state.unordered_accesses(access.mode, clock)
                )
                self._check(state, access, clock, common_range, certainly_overlap=is_exact)
        for strided_state, common_range in self._strided_states.find_overlapping_strided(
            strided_range
        ):
            self._check(strided_state, access, clock, common_range)
        for pointer_state in self._pointer_states.find_overlapping(
            strided_range.lo, strided_range.hi
        ):
            address = pointer_state.address
            if common_range := strided_range.overlap_with_bounds(address, address + 1):
                self._check(pointer_state, access, clock, common_range)
        equal_state = self._strided_states.get_or_create(strided_range)
        self._check(equal_state, access, clock, (strided_range.lo, strided_range.hi))
        equal_state.store(access, clock)

    def _add_pointer(self, access: MemoryAccess, clock: Clock) -> None:
        """Check and store a pointer argument of a kernel."""
        lo = access.lo
        pointer_state = self._pointer_states.get_or_create(lo)
        self._check(pointer_state, access, clock, (lo, lo + 1))
        pointer_state.store(access, clock)
        state = self._range_states.last_beginning_at_or_below(lo)
        if state.hi > lo:
            common_range = (lo, min(state.hi, access.hi))
            self._check(state, access, clock, common_range, certainly_overlap=not state.is_merged)
        for strided_state, common_range in self._strided_states.find_overlapping(lo, lo + 1):
            self._check(strided_state, access, clock, common_range)
        if self._finds_possible:
            self._check_ranges_above(access, clock)

    def _add_range(self, access: MemoryAccess, clock: Clock) -> None:
        """Check and store an access to a contiguous range, and merge the states that become equivalent."""
        for state in self._range_states.split_to_cover(access.lo, access.hi):
            common_range = (state.lo, state.hi)
            self._check(
                state, access, clock, common_range, certainly_overlap=not state.is_approximate
            )
            state.store(access, clock)
        self._range_states.merge_equivalent(access.lo, access.hi)
        self._check_strided(access, clock)
        self._check_pointers(access, clock)

    def _check_strided(self, access: MemoryAccess, clock: Clock) -> None:
        is_exact = access.precision != MERGED
        for state, common_range in self._strided_states.find_overlapping(access.lo, access.hi):
            self._check(state, access, clock, common_range, certainly_overlap=is_exact)
        if access.mode & WRITE:
            self._strided_states.clear(access.lo, access.hi)

    def _check_pointers(self, access: MemoryAccess, clock: Clock) -> None:
        for pointer_state in self._pointer_states.find_overlapping(access.lo, access.hi):
            self._check(pointer_state, access, clock, (pointer_state.address, access.hi))
            if access.mode & WRITE:
                pointer_state.clear()
        if self._finds_possible:
            self._check_pointers_below(access, clock)

    def _check_pointers_below(self, access: MemoryAccess, clock: Clock) -> None:
        """Check an access to a range against the pointers from which a kernel may reach the range."""
        for pointer_state in self._pointer_states.find_overlapping(0, access.lo):
            reaching_accesses = [
                assumed_access
                for assumed_access in pointer_state.unordered_accesses(access.mode, clock)
                if assumed_access.hi > access.lo
            ]
            pointer_state.reported_pairs = self.checker.check(
                pointer_state.reported_pairs,
                reaching_accesses,
                access,
                clock,
                (access.lo, access.hi),
                False,
                False,
            )

    def _check_ranges_above(self, access: MemoryAccess, clock: Clock) -> None:
        """Check a pointer against the ranges above it, which a kernel may reach from it."""
        for state in self._range_states.find_overlapping(access.lo + 1, access.hi):
            if state.lo > access.lo:
                common_range = (state.lo, state.hi)
                self._check(state, access, clock, common_range, certainly_overlap=False)


def _part_of_access(access: MemoryAccess, lo: int, hi: int) -> MemoryAccess:
    return MemoryAccess(
        access.slot, access.tick, access.call, lo, hi, access.mode, access.precision
    )


# Maximum number of range states of one allocation, in an engine without another limit.
MAX_RANGE_STATES: Final = 1 << 17

# A function that returns the allocation that contains an address, or None.
AllocationAt: TypeAlias = Callable[[int], Allocation | None]


def _prune_state(state: AccessState, past_clock: Clock) -> bool:
    """Remove the accesses that all future work happens after. Return whether any access is left."""
    if state.last_write is not None and state.last_write.tick <= past_clock[state.last_write.slot]:
        state.last_write = None
    state.reads = _without_past_accesses(state.reads, past_clock)
    state.atomics = _without_past_accesses(state.atomics, past_clock)
    stored_ids = {id(access) for access in (state.last_write, *state.reads, *state.atomics)}
    state.reported_pairs = tuple(pair for pair in state.reported_pairs if id(pair[0]) in stored_ids)
    return stored_ids != {id(None)}


def _prune_pointer(pointer_state: PointerState, past_clock: Clock) -> bool:
    """Remove the kernels that all future work happens after. Return whether any kernel is left."""
    pointer_state.writers = _without_past_accesses(pointer_state.writers, past_clock)
    pointer_state.readers = _without_past_accesses(pointer_state.readers, past_clock)
    stored_ids = {id(access) for access in pointer_state.writers + pointer_state.readers}
    pointer_state.reported_pairs = tuple(
        pair for pair in pointer_state.reported_pairs if id(pair[0]) in stored_ids
    )
    return bool(stored_ids)


def _without_past_accesses(accesses: Accesses, past_clock: Clock) -> Accesses:
    return tuple(access for access in accesses if access.tick > past_clock[access.slot])


def _merge_adjacent_states(states: list[RangeState], max_states: int) -> Iterator[RangeState]:
    """Merge adjacent states to half of ``max_states``. Drop the states of freed memory."""
    states_in_use = (
        state for state in states if state.last_write is None or state.last_write.tick != NEVER
    )
    group_size = -(-len(states) * 2 // max_states)
    while adjacent_states := list(islice(states_in_use, group_size)):
        merged_state = RangeState(adjacent_states[0].lo, adjacent_states[-1].hi)
        writes = [state.last_write for state in adjacent_states if state.last_write]
        merged_state.last_write = max(writes, key=lambda write: write.call.seq, default=None)
        merged_state.reads = _last_access_per_stream(
            [access for state in adjacent_states for access in state.reads]
        )
        merged_state.atomics = _last_access_per_stream(
            [access for state in adjacent_states for access in state.atomics]
        )
        merged_state.reported_pairs = tuple(
            pair for state in adjacent_states for pair in state.reported_pairs
        )
        merged_state.is_merged = True
        merged_state.is_approximate = any(state.is_approximate for state in adjacent_states)
        yield merged_state


def _last_access_per_stream(accesses: list[MemoryAccess]) -> Accesses:
    """Return the last access of each stream."""
    accesses_by_tick = sorted(accesses, key=lambda access: access.tick)
    return tuple({(access.slot, access.call.node): access for access in accesses_by_tick}.values())


def _most_recent_states(states: list[RangeState], max_states: int) -> list[RangeState]:
    """Return the most recently accessed states: half of ``max_states``."""
    seqs = sorted(_last_seq(state) for state in states)
    oldest_seq = seqs[-max_states // 2]
    return [state for state in states if _last_seq(state) >= oldest_seq][-max_states:]


def _last_seq(state: RangeState) -> int:
    accesses = (state.last_write, *state.reads, *state.atomics)
    return max((access.call.seq for access in accesses if access), default=0)
