"""Shadow memory: for each accessed byte, the last accesses that a later access may race with.

Host and device addresses are treated alike. Exact accesses are stored as ranges of bytes or, if they are
strided, as rows of bytes; the pointer arguments of kernels as single addresses. There are two implementations
with equal results: ``NativeShadow`` in C (``native/shadow_memory``), and ``PythonShadow`` for logs that are
read, and simulated devices that are used, where the package was installed without a compiler.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice, pairwise
from math import gcd
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Final, Generic, TypeAlias, TypeVar

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
    ClockPosition,
    MemoryAccess,
    Release,
)
from cudakit.sanitize.races import Allocation
from cudakit.sanitize.records import AccessRows, access_fields

if TYPE_CHECKING:
    from cudakit.sanitize._shadow_memory import NativeShadow

# A function that returns the allocation that contains an address, or None.
AllocationAt: TypeAlias = Callable[[int], Allocation | None]
Accesses: TypeAlias = tuple[MemoryAccess, ...]
Range: TypeAlias = tuple[int, int]  # the first address, and the first address after the range
Shadow: TypeAlias = "PythonShadow | NativeShadow"

# Maximum number of range states of one allocation, in an engine without another limit.
MAX_RANGE_STATES: Final = 1 << 17
# Above these limits, the least recently used half of the pointers, or the older half of the strided states,
# is removed, and races with them are missed.
MAX_POINTER_STATES = 1 << 16
MAX_STRIDED_STATES = 1 << 16
# Maximum number of rows for which each row of a strided access is stored as a range.
_MAX_SEPARATE_ROWS = 16
# Maximum number of rows that are compared one by one with the rows of another stride.
_MAX_COMPARED_ROWS = 1 << 20


def new_shadow(
    checker: ConflictChecker, *, find_possible_races: bool = False, native: bool | None = None
) -> Shadow:
    """Return an empty shadow memory, which passes the conflicts of each access to ``checker``.

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
    """The shadow memory of one process, in Python."""

    def __init__(self, checker: ConflictChecker, *, find_possible_races: bool = False) -> None:
        self.checker = checker
        self._ranges = SortedStates(AccessState)
        self._strided = StridedStates()
        self._pointers = SortedStates(PointerState)
        self._finds_possible = find_possible_races

    @property
    def range_state_count(self) -> int:
        return len(self._ranges.states)

    @property
    def pointer_state_count(self) -> int:
        return len(self._pointers.states)

    @property
    def strided_state_count(self) -> int:
        return len(self._strided.state_by_range)

    def add(
        self, access: MemoryAccess, clock: Clock, stride: int = 0, element_count: int = 0
    ) -> None:
        """Check an access for races, and store it. An access with several elements is strided."""
        if access.precision == UNCERTAIN and not self._finds_possible:
            return
        if access.precision >= ASSUMED:
            self._add_pointer(access, clock)
        elif element_count > 1:
            rows = strided_range(access.lo, access.hi, stride, element_count)
            if rows.row_count <= _MAX_SEPARATE_ROWS:
                for lo, hi in rows.row_ranges():
                    self._add_range(replace(access, lo=lo, hi=hi), clock)
            else:
                self._add_strided(access, clock, rows)
        elif access.lo < access.hi:
            self._add_range(access, clock)
        self.checker.report()

    def add_all(self, rows: AccessRows, call: Call, position: ClockPosition) -> None:
        """Check and store the accesses of a launch."""
        for lo, hi, mode, precision, stride, element_count in access_fields(rows):
            access = MemoryAccess(position.slot, position.tick, call, lo, hi, mode, precision)
            self.add(access, position.clock, stride, element_count)

    def add_graph_launch(
        self, accesses: GraphAccesses, launch: Call, position: ClockPosition
    ) -> None:
        """Check and store the accesses of a graph launch, whose nodes ``checker.node_order`` orders."""
        for call, rows in accesses.calls_in_launch(launch):
            self.add_all(rows, call, position)

    def add_free(self, access: MemoryAccess, clock: Clock) -> None:
        """Check and store a stream-ordered free. Each later access to the bytes is a race."""
        self.add(access, clock)
        access.tick = NEVER

    def free_releases(self, lo: int, hi: int) -> list[Release]:
        """List the releases of the stream-ordered frees of bytes from ``lo`` up to ``hi``."""
        writes = (state.last_write for state in self._ranges.find_overlapping(lo, hi))
        releases = (write.call.release for write in writes if write and write.tick == NEVER)
        return [release for release in releases if release is not None]

    def find_unordered(self, lo: int, hi: int, mode: int, clock: Clock) -> list[MemoryAccess]:
        """List the stored accesses to the bytes from ``lo`` up to ``hi`` that race with an access.

        The access has this mode, and its operation this clock. Pointer arguments of kernels are ignored.
        """
        strided_states = (state for state, _ in self._strided.find_overlapping(lo, hi))
        states = [*self._ranges.find_overlapping(lo, hi), *strided_states]
        return [access for state in states for access in state.unordered_accesses(mode, clock)]

    def clear(self, lo: int, hi: int) -> None:
        """Remove all accesses to the bytes from ``lo`` up to ``hi``."""
        if lo < hi:
            self._ranges.clear(lo, hi)
            self._strided.clear(lo, hi)
            self._pointers.clear(lo, hi)

    def prune(self, past_clock: Clock) -> None:
        """Remove the accesses that all future work happens after: those up to the ticks of ``past_clock``."""
        self._ranges.prune(past_clock)
        self._pointers.prune(past_clock)
        self._strided.remove(
            [
                strided
                for strided, state in self._strided.state_by_range.items()
                if not state.prune(past_clock)
            ]
        )

    def coarsen(self, allocation_at: AllocationAt, max_states: int) -> None:
        """Merge range states of each allocation that has more than ``max_states``, to half of this number.

        A race with a later access to a part of a merged range is only possible. Outside of recorded
        allocations, the oldest states are removed instead.
        """
        states: list[AccessState] = []
        for allocation, group in groupby(
            self._ranges.states, lambda state: allocation_at(state.lo)
        ):
            group_states = list(group)
            if len(group_states) > max_states:
                reduce = _merge_adjacent if allocation else _most_recent
                group_states = list(reduce(group_states, max_states))
            states += group_states
        self._ranges.states = states

    def _check(
        self,
        state: State,
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

    def _add_range(self, access: MemoryAccess, clock: Clock) -> None:
        """Check and store an access to a contiguous range, and merge the states that become equivalent."""
        lo, hi = access.lo, access.hi
        for state in self._ranges.split_to_cover(lo, hi):
            is_exact = not state.is_approximate
            self._check(state, access, clock, (state.lo, state.hi), certainly_overlap=is_exact)
            state.store(access, clock)
        _merge_equivalent(self._ranges.states, lo, hi)
        is_exact = access.precision != MERGED
        for state, common_range in self._strided.find_overlapping(lo, hi):
            self._check(state, access, clock, common_range, certainly_overlap=is_exact)
        if access.mode & WRITE:
            self._strided.clear(lo, hi)
        for pointer in self._pointers.find_overlapping(lo, hi):
            self._check(pointer, access, clock, (pointer.lo, hi))
            if access.mode & WRITE:  # the write conflicts with the same later accesses
                pointer.writers = pointer.readers = pointer.reported_pairs = ()
        if not self._finds_possible:
            return
        for pointer in self._pointers.find_overlapping(0, lo):
            # The kernel may reach the range from a pointer below it.
            reaching_accesses = [
                assumed_access
                for assumed_access in pointer.unordered_accesses(access.mode, clock)
                if assumed_access.hi > lo
            ]
            pointer.reported_pairs = self.checker.check(
                pointer.reported_pairs, reaching_accesses, access, clock, (lo, hi), False, False
            )

    def _add_strided(self, access: MemoryAccess, clock: Clock, rows: StridedRange) -> None:
        access.accessed_bytes = rows.row_count * rows.row_bytes
        for state in self._ranges.find_overlapping(rows.lo, rows.hi):
            if common_range := rows.overlap_with_bounds(state.lo, state.hi):
                is_exact = not state.is_merged and all(
                    earlier_access.precision != MERGED
                    for earlier_access in state.unordered_accesses(access.mode, clock)
                )
                self._check(state, access, clock, common_range, certainly_overlap=is_exact)
        for state, common_range in self._strided.find_overlapping_strided(rows):
            self._check(state, access, clock, common_range)
        for pointer in self._pointers.find_overlapping(rows.lo, rows.hi):
            if common_range := rows.overlap_with_bounds(pointer.lo, pointer.hi):
                self._check(pointer, access, clock, common_range)
        equal_state = self._strided.get_or_create(rows)
        self._check(equal_state, access, clock, (rows.lo, rows.hi))
        equal_state.store(access, clock)

    def _add_pointer(self, access: MemoryAccess, clock: Clock) -> None:
        """Check and store a pointer argument of a kernel."""
        lo = access.lo
        pointers = self._pointers.states
        if len(pointers) >= MAX_POINTER_STATES and not self._pointers.find_overlapping(lo, lo + 1):
            median_seq = sorted(pointer.last_seq for pointer in pointers)[len(pointers) // 2]
            pointers[:] = [pointer for pointer in pointers if pointer.last_seq > median_seq]
        (pointer,) = self._pointers.split_to_cover(lo, lo + 1)
        self._check(pointer, access, clock, (lo, lo + 1))
        pointer.store(access, clock)
        for state in self._ranges.find_overlapping(lo, lo + 1):
            common_range = (lo, min(state.hi, access.hi))
            self._check(state, access, clock, common_range, certainly_overlap=not state.is_merged)
        for state, common_range in self._strided.find_overlapping(lo, lo + 1):
            self._check(state, access, clock, common_range)
        if not self._finds_possible:
            return
        for state in self._ranges.find_overlapping(lo + 1, access.hi):
            if state.lo > lo:  # the kernel may reach the range from its pointer
                self._check(state, access, clock, (state.lo, state.hi), certainly_overlap=False)


class AccessState:
    """The last write of the bytes from ``lo`` up to ``hi``, and the latest reads and atomics since it.

    A read that happens before another read is dropped, because every access that races with the earlier read
    also races with the later one. So a state has at most one read per stream: it stays small, and no race is
    lost. The collections are tuples, so that copies of a state can share them.
    """

    def __init__(self, lo: int, hi: int) -> None:
        self.lo = lo
        self.hi = hi
        self.last_write: MemoryAccess | None = None
        self.reads: Accesses = ()
        self.atomics: Accesses = ()
        self.reported_pairs: ReportedPairs = ()
        # Whether this state was merged from several states, so that each access is to some of the bytes only.
        self.is_merged = False
        # Whether it was split off a merged state, so that an access may be to none of the bytes.
        self.is_approximate = False

    @property
    def accesses(self) -> Accesses:
        write = (self.last_write,) if self.last_write else ()
        return (*write, *self.reads, *self.atomics)

    def unordered_accesses(self, mode: int, clock: Clock) -> Sequence[MemoryAccess]:
        """List the stored accesses that conflict with an access of this mode and do not happen before it.

        Reads and atomics are ordered after the last write, or were reported. So if there is a conflicting
        read or atomic, the write needs no check, except in a merged state, whose accesses may be to different
        bytes.
        """
        if mode & ATOMIC:
            candidates = self.reads
        elif mode & WRITE:
            candidates = self.reads + self.atomics
        else:
            candidates = self.atomics
        if self.last_write and (not candidates or self.is_merged):
            candidates = (*candidates, self.last_write)
        return _unordered(candidates, clock)

    def store(self, access: MemoryAccess, clock: Clock) -> None:
        """Store an access, and remove the accesses of the same kind that happen before it."""
        if self.last_write and self.last_write.tick == NEVER:
            return  # the memory was freed, and one use after a free is enough to report
        if access.mode & ATOMIC:
            self.atomics = (*_unordered(self.atomics, clock), access)
        elif access.mode & WRITE:
            self.last_write = access
            self.reads = self.atomics = self.reported_pairs = ()
            self.is_merged = self.is_approximate = False
        else:
            self.reads = (*_unordered(self.reads, clock), access)

    def prune(self, past_clock: Clock) -> bool:
        """Remove the accesses that all future work happens after. Return whether any access is left."""
        if self.last_write and self.last_write.tick <= past_clock[self.last_write.slot]:
            self.last_write = None
        self.reads = _unordered(self.reads, past_clock)
        self.atomics = _unordered(self.atomics, past_clock)
        self.reported_pairs = _pairs_of(self.reported_pairs, self.accesses)
        return bool(self.accesses)

    def is_equivalent(self, other: AccessState) -> bool:
        """Return whether two states conflict with the same accesses, and are reported in the same way."""
        if self.reported_pairs or other.reported_pairs:
            return False
        return (
            self.is_merged == other.is_merged
            and self.is_approximate == other.is_approximate
            and len(self.reads) == len(other.reads)
            and len(self.atomics) == len(other.atomics)
            and _are_equivalent(self.last_write, other.last_write)
            and all(map(_are_equivalent, self.reads, other.reads))
            and all(map(_are_equivalent, self.atomics, other.atomics))
        )


class PointerState:
    """The kernels that got one pointer as an argument, without those that happen before another of them.

    The number of bytes that a kernel accesses through the pointer is unknown, because pools divide large
    allocations. Therefore the access counts as an access to one address.
    """

    is_merged = is_approximate = False

    def __init__(self, lo: int, hi: int) -> None:
        self.lo = lo
        self.hi = hi
        self.writers: Accesses = ()
        self.readers: Accesses = ()
        self.reported_pairs: ReportedPairs = ()

    def unordered_accesses(self, mode: int, clock: Clock) -> Sequence[MemoryAccess]:
        """List the stored kernels that may race with an access of this mode whose clock is ``clock``."""
        return _unordered(self.writers + self.readers if mode & WRITE else self.writers, clock)

    def store(self, access: MemoryAccess, clock: Clock) -> None:
        """Store a kernel, and remove the kernels that happen before it."""
        if access.mode & WRITE:
            self.writers = (*_unordered(self.writers, clock), access)
            self.readers = _unordered(self.readers, clock)
        else:
            self.readers = (*_unordered(self.readers, clock), access)

    def prune(self, past_clock: Clock) -> bool:
        """Remove the kernels that all future work happens after. Return whether any kernel is left."""
        self.writers = _unordered(self.writers, past_clock)
        self.readers = _unordered(self.readers, past_clock)
        self.reported_pairs = _pairs_of(self.reported_pairs, self.writers + self.readers)
        return bool(self.writers or self.readers)

    @property
    def last_seq(self) -> int:
        """The number of the last call with the pointer among its arguments; 0 if there is none."""
        return max((access.call.seq for access in self.writers + self.readers), default=0)


def _unordered(accesses: Accesses, clock: Clock) -> Accesses:
    return tuple([access for access in accesses if access.tick > clock[access.slot]])


def _pairs_of(reported_pairs: ReportedPairs, accesses: Accesses) -> ReportedPairs:
    """Return the reported pairs whose earlier access is one of these."""
    ids = set(map(id, accesses))
    return tuple(pair for pair in reported_pairs if id(pair[0]) in ids)


def _are_equivalent(access: MemoryAccess | None, other: MemoryAccess | None) -> bool:
    """Return whether two accesses race with the same accesses, and are reported in the same way.

    ``native/shadow_memory/access.c`` has the same rule.
    """
    if access is other:
        return True
    if access is None or other is None or access.tick != other.tick or access.slot != other.slot:
        return False
    # After a free, the next allocation of the memory is ordered after this very free.
    call, other_call = access.call, other.call
    return (
        access.tick != NEVER
        and (access.mode, access.precision) == (other.mode, other.precision)
        and (call.kind, call.name, call.site, call.program_call, call.node)
        == (
            other_call.kind,
            other_call.name,
            other_call.site,
            other_call.program_call,
            other_call.node,
        )
    )


State = TypeVar("State", AccessState, PointerState)
_begin, _end = attrgetter("lo"), attrgetter("hi")


class SortedStates(Generic[State]):
    """States of disjoint ranges, in order of their addresses."""

    def __init__(self, new_state: type[State]) -> None:
        self.states: list[State] = []
        self._new_state: type[State] = new_state

    def find_overlapping(self, lo: int, hi: int) -> list[State]:
        """List the states that have bytes from ``lo`` up to ``hi``."""
        begin = bisect_right(self.states, lo, key=_end)
        return self.states[begin : bisect_left(self.states, hi, lo=begin, key=_begin)]

    def split_to_cover(self, lo: int, hi: int) -> list[State]:
        """Return states that cover exactly the bytes from ``lo`` up to ``hi``.

        Splits existing ranges at both ends, and adds new states in the gaps.
        """
        self._split_at(lo)
        self._split_at(hi)
        begin, end = (bisect_left(self.states, address, key=_begin) for address in (lo, hi))
        covering: list[State] = []
        for state in self.states[begin:end]:
            if lo < state.lo:
                covering.append(self._new_state(lo, state.lo))
            covering.append(state)
            lo = state.hi
        if lo < hi:
            covering.append(self._new_state(lo, hi))
        self.states[begin:end] = covering
        return covering

    def clear(self, lo: int, hi: int) -> None:
        """Remove all accesses to the bytes from ``lo`` up to ``hi``."""
        self._split_at(lo)
        self._split_at(hi)
        begin, end = (bisect_left(self.states, address, key=_begin) for address in (lo, hi))
        del self.states[begin:end]

    def prune(self, past_clock: Clock) -> None:
        """Remove the accesses that all future work happens after."""
        self.states = [state for state in self.states if state.prune(past_clock)]

    def _split_at(self, address: int) -> None:
        """Split the range that has an address inside; do nothing if there is no such range."""
        index = bisect_right(self.states, address, key=_end)
        if index < len(self.states) and self.states[index].lo < address:
            left_state = self.states[index]
            if left_state.is_merged:
                left_state.is_approximate = True
            right_state = self._new_state(address, left_state.hi)
            right_state.__dict__.update(left_state.__dict__, lo=address)
            left_state.hi = address
            self.states.insert(index + 1, right_state)


def _merge_equivalent(states: list[AccessState], lo: int, hi: int) -> None:
    """Merge adjacent equivalent states, from the one before ``lo`` to the one after ``hi``."""
    begin = max(bisect_left(states, lo, key=_begin) - 1, 0)
    end = bisect_right(states, hi, key=_begin)
    merged_states = states[begin : begin + 1]
    for state, next_state in pairwise(states[begin:end]):
        if state.hi == next_state.lo and merged_states[-1].is_equivalent(next_state):
            merged_states[-1].hi = next_state.hi
        else:
            merged_states.append(next_state)
    states[begin:end] = merged_states


def _merge_adjacent(states: list[AccessState], max_states: int) -> Iterator[AccessState]:
    """Merge adjacent states to half of ``max_states``. Drop the states of freed memory."""
    states_in_use = (
        state for state in states if state.last_write is None or state.last_write.tick != NEVER
    )
    group_size = -(-len(states) * 2 // max_states)
    while adjacent_states := list(islice(states_in_use, group_size)):
        merged_state = AccessState(adjacent_states[0].lo, adjacent_states[-1].hi)
        writes = [state.last_write for state in adjacent_states if state.last_write]
        merged_state.last_write = max(writes, key=lambda write: write.call.seq, default=None)
        for name in ("reads", "atomics"):
            accesses = [access for state in adjacent_states for access in getattr(state, name)]
            # The last access of each stream and graph node.
            last_accesses = {
                (access.slot, access.call.node): access
                for access in sorted(accesses, key=attrgetter("tick"))
            }
            setattr(merged_state, name, tuple(last_accesses.values()))
        merged_state.reported_pairs = tuple(
            pair for state in adjacent_states for pair in state.reported_pairs
        )
        merged_state.is_merged = True
        merged_state.is_approximate = any(state.is_approximate for state in adjacent_states)
        yield merged_state


def _most_recent(states: list[AccessState], max_states: int) -> list[AccessState]:
    """Return the most recently accessed states: half of ``max_states``."""
    seqs = [max((access.call.seq for access in state.accesses), default=0) for state in states]
    oldest_seq = sorted(seqs)[-max_states // 2]
    recent_states = [state for state, seq in zip(states, seqs, strict=True) if seq >= oldest_seq]
    return recent_states[-max_states:]


# --- Strided accesses: rows of bytes at equal distances --------------------------------------------
#
# They are not stored as ranges: one range from the first to the last row would make interleaved columns race,
# and one range per row would be too many ranges.


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

    def overlap_with(self, other: StridedRange) -> Range | None:
        """Return the first bytes that are in rows of both strided ranges, or None."""
        # Whether no two rows would overlap even if both ranges had infinitely many rows.
        common_stride = gcd(self.stride, other.stride)
        offset = (other.lo - self.lo) % common_stride
        never_overlap = self.row_bytes <= offset and other.row_bytes <= common_stride - offset
        shorter, longer = sorted((self, other), key=lambda strided: strided.row_count)
        if (
            self.hi <= other.lo
            or other.hi <= self.lo
            or never_overlap
            or shorter.row_count > _MAX_COMPARED_ROWS
        ):
            return None
        starts = shorter.lo + np.arange(shorter.row_count, dtype=np.int64) * shorter.stride
        index = np.maximum(0, (starts - longer.lo - longer.row_bytes) // longer.stride + 1)
        is_overlapping = (index < longer.row_count) & (
            longer.lo + index * longer.stride < starts + shorter.row_bytes
        )
        if not is_overlapping.any():
            return None
        start = int(starts[np.argmax(is_overlapping)])
        return longer.overlap_with_bounds(start, start + shorter.row_bytes)


def strided_range(lo: int, hi: int, stride: int, count: int) -> StridedRange:
    """Return the rows of a strided access: ``count`` elements, of which the last ends at ``hi``."""
    stride = abs(stride)
    width = hi - lo - (count - 1) * stride
    if count <= 1 or width >= stride or width <= 0:
        return StridedRange(lo, hi - lo, hi - lo, 1)
    return StridedRange(lo, width, stride, count)


class StridedStates:
    """The access states of strided ranges."""

    def __init__(self) -> None:
        self.state_by_range: dict[StridedRange, AccessState] = {}  # the oldest first
        # First address, number in order of creation, and range, in order of the addresses.
        self._sorted_ranges: list[tuple[int, int, StridedRange]] = []
        self._longest_bytes = 0  # maximum length of the ranges so far
        self._created_count = 0

    def get_or_create(self, strided: StridedRange) -> AccessState:
        """Return the state of a strided range; create it if there is none."""
        state = self.state_by_range.get(strided)
        if state is None:
            if len(self.state_by_range) >= MAX_STRIDED_STATES:
                self.remove(list(self.state_by_range)[: len(self.state_by_range) // 2])
            state = self.state_by_range[strided] = AccessState(strided.lo, strided.hi)
            insort(self._sorted_ranges, (strided.lo, self._created_count, strided))
            self._created_count += 1
            self._longest_bytes = max(self._longest_bytes, strided.hi - strided.lo)
        return state

    def find_overlapping(self, lo: int, hi: int) -> Iterator[tuple[AccessState, Range]]:
        """Yield each state that has bytes from ``lo`` up to ``hi``, and the first of those bytes."""
        for strided in self._ranges_between(lo, hi):
            if common_range := strided.overlap_with_bounds(lo, hi):
                yield self.state_by_range[strided], common_range

    def find_overlapping_strided(
        self, strided: StridedRange
    ) -> Iterator[tuple[AccessState, Range]]:
        """Yield each state of another strided range that overlaps this one, and the first common bytes."""
        for stored in self._ranges_between(strided.lo, strided.hi):
            if stored != strided and (common_range := strided.overlap_with(stored)):
                yield self.state_by_range[stored], common_range

    def clear(self, lo: int, hi: int) -> None:
        """Remove the strided ranges that lie completely between two addresses."""
        self.remove(
            strided
            for strided in self._ranges_between(lo, hi)
            if lo <= strided.lo and strided.hi <= hi
        )

    def remove(self, ranges: Iterable[StridedRange]) -> None:
        """Remove strided ranges."""
        if removed := set(ranges):
            for strided in removed:
                del self.state_by_range[strided]
            self._sorted_ranges = [item for item in self._sorted_ranges if item[2] not in removed]

    def _ranges_between(self, lo: int, hi: int) -> list[StridedRange]:
        """List the ranges that begin below ``hi`` and end above ``lo``, the oldest first."""
        if not (items := self._sorted_ranges):
            return []
        begin = bisect_left(items, lo - self._longest_bytes, key=itemgetter(0))
        end = bisect_left(items, hi, key=itemgetter(0))
        found = (item for item in items[begin:end] if item[2].hi > lo)
        return [strided for _, _, strided in sorted(found, key=itemgetter(1))]
