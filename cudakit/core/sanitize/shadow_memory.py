"""Shadow memory: for each accessed byte range, the last accesses that a later access may race with.

Host and device addresses are treated alike. Exact accesses are stored in ``RangeStates`` and, if they are
strided, in ``StridedStates``; the pointer arguments of kernels in ``PointerStates``, as single addresses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import Final, Protocol

from cudakit.core.sanitize.access_state import (
    Accesses,
    AccessState,
    PointerState,
    PointerStates,
    RangeState,
    RangeStates,
)
from cudakit.core.sanitize.clocks import (
    ASSUMED,
    MERGED,
    NEVER,
    UNCERTAIN,
    WRITE,
    Call,
    Clock,
    MemoryAccess,
    Release,
)
from cudakit.core.sanitize.conflicts import ConflictChecker
from cudakit.core.sanitize.races import Allocation
from cudakit.core.sanitize.record_batch import AccessRow
from cudakit.core.sanitize.strided import StridedRange, StridedStates, strided_range

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


class Shadow:
    """The shadow memory of one process.

    ``find_possible`` also finds races through pointers that may be stale, and through pointers to lower
    addresses of the same allocation, from which a kernel may reach the bytes. Such races are only possible.
    """

    def __init__(self, checker: ConflictChecker, *, find_possible: bool = False) -> None:
        self.checker = checker
        self.range_states = RangeStates()
        self.strided_states = StridedStates()
        self.pointer_states = PointerStates()
        self._finds_possible = find_possible
        self._strided_by_range = self.strided_states.by_range
        self._pointers_by_address = self.pointer_states.by_address

    def add(self, access: MemoryAccess, clock: Clock, stride: int = 0, count: int = 0) -> None:
        """Check an access for races, and store it. If ``count`` is greater than 1, the access is strided."""
        if access.precision == UNCERTAIN and not self._finds_possible:
            return
        if access.precision >= ASSUMED:
            self.add_pointer(access, clock)
        elif count > 1:
            self.add_strided(access, clock, strided_range(access.lo, access.hi, stride, count))
        elif access.lo < access.hi:
            self.add_range(access, clock)

    def add_all(self, rows: Iterable[AccessRow], call: Call, position: ClockPosition) -> None:
        """Check and store the accesses of a launch.

        Inlines the two most frequent cases: an access to exactly one stored range, and a stored pointer, if
        no state of another type has these addresses.
        """
        slot, tick, clock = position.slot, position.tick, position.clock
        states_by_start, pointers_by_address = self.range_states.by_start, self._pointers_by_address
        strided_by_range, finds_possible = self._strided_by_range, self._finds_possible
        for lo, hi, mode, precision, stride, count, _ in rows:
            access = MemoryAccess(slot, tick, call, lo, hi, mode, precision)
            if strided_by_range or count > 1 or finds_possible or precision == UNCERTAIN:
                self.add(access, clock, stride, count)
            elif precision == ASSUMED:
                pointer = pointers_by_address.get(lo)
                is_outside_ranges = (
                    not states_by_start or self.range_states.last_beginning_at_or_below(lo).hi <= lo
                )
                if pointer and is_outside_ranges and pointer.add_if_ordered(access, clock):
                    continue
                self.add_pointer(access, clock)
            else:
                state = states_by_start.get(lo)
                if (
                    state
                    and state.hi == hi
                    and not pointers_by_address
                    and state.add_if_ordered(access, clock)
                ):
                    continue
                self.add(access, clock)

    def add_range(self, access: MemoryAccess, clock: Clock) -> None:
        """Check and store an access to a contiguous range."""
        self._add_range(access, clock)
        if self.checker.pending:
            self.checker.report()

    def add_strided(self, access: MemoryAccess, clock: Clock, strided: StridedRange) -> None:
        """Check and store a strided access."""
        if strided.count <= _MAX_SEPARATE_ROWS:
            for lo, hi in strided.row_ranges():
                self._add_range(_part_of_access(access, lo, hi), clock)
            self.checker.report()
            return
        check, mode = self.checker.check, access.mode
        for state in self.range_states.overlapping(strided.lo, strided.hi):
            if shared_bytes := strided.bytes_shared_with_range(state.lo, state.hi):
                conflicting = state.unordered_accesses(mode, clock)
                exact = not state.merged and all(
                    earlier.precision != MERGED for earlier in conflicting
                )
                check(state, conflicting, access, clock, shared_bytes, certainly_overlap=exact)
        for strided_state, shared_bytes in self.strided_states.overlapping_strided(strided):
            unordered = strided_state.unordered_accesses(mode, clock)
            check(strided_state, unordered, access, clock, shared_bytes)
        for pointer in self.pointer_states.overlapping(strided.lo, strided.hi):
            if shared_bytes := strided.bytes_shared_with_range(
                pointer.address, pointer.address + 1
            ):
                check(pointer, pointer.unordered_accesses(mode, clock), access, clock, shared_bytes)
        equal_state = self.strided_states.state(strided)
        unordered = equal_state.unordered_accesses(mode, clock)
        check(equal_state, unordered, access, clock, (strided.lo, strided.hi))
        equal_state.store(access, clock)
        self.checker.report()

    def add_pointer(self, access: MemoryAccess, clock: Clock) -> None:
        """Check and store a pointer argument of a kernel."""
        lo = access.lo
        pointer = self._pointers_by_address.get(lo) or self.pointer_states.get_or_create(lo)
        if not pointer.add_if_ordered(access, clock):
            conflicting = pointer.unordered_accesses(access.mode, clock)
            self.checker.check(pointer, conflicting, access, clock, (lo, lo + 1))
            pointer.store(access, clock)
        state = self.range_states.last_beginning_at_or_below(lo)
        if state.hi > lo and (conflicting := state.unordered_accesses(access.mode, clock)):
            shared_bytes = (lo, min(state.hi, access.hi))
            exact = not state.merged
            self.checker.check(
                state, conflicting, access, clock, shared_bytes, certainly_overlap=exact
            )
        if self._strided_by_range:
            for strided_state, shared_bytes in self.strided_states.overlapping(lo, lo + 1):
                unordered = strided_state.unordered_accesses(access.mode, clock)
                self.checker.check(strided_state, unordered, access, clock, shared_bytes)
        if self._finds_possible:
            self._check_ranges_above(access, clock)
        if self.checker.pending:
            self.checker.report()

    def freed_before(self, lo: int, hi: int) -> list[Release]:
        """List the releases of the stream-ordered frees of bytes from ``lo`` up to ``hi``."""
        writes = (state.write for state in self.range_states.overlapping(lo, hi))
        releases = (write.call.release for write in writes if write and write.tick == NEVER)
        return [release for release in releases if release is not None]

    def clear(self, lo: int, hi: int) -> None:
        """Remove all accesses to the bytes from ``lo`` up to ``hi``."""
        self.range_states.clear(lo, hi)
        self.strided_states.clear(lo, hi)
        self.pointer_states.clear(lo, hi)

    def _add_range(self, access: MemoryAccess, clock: Clock) -> None:
        state = self.range_states.by_start.get(access.lo)
        if state is None or state.hi != access.hi or not state.add_if_ordered(access, clock):
            self._add_to_range_states(access, clock)
        if self._strided_by_range:
            self._check_strided(access, clock)
        if self._pointers_by_address or self._finds_possible:
            self._check_pointers(access, clock)

    def _add_to_range_states(self, access: MemoryAccess, clock: Clock) -> None:
        """Check and store an access to several stored ranges, and merge the states that become equivalent."""
        for state in self.range_states.split(access.lo, access.hi):
            if conflicting := state.unordered_accesses(access.mode, clock):
                shared_bytes = (state.lo, state.hi)
                exact = not state.approximate
                self.checker.check(
                    state, conflicting, access, clock, shared_bytes, certainly_overlap=exact
                )
            state.store(access, clock)
        self.range_states.merge(access.lo, access.hi)

    def _check_strided(self, access: MemoryAccess, clock: Clock) -> None:
        exact = access.precision != MERGED
        for state, shared_bytes in self.strided_states.overlapping(access.lo, access.hi):
            conflicting = state.unordered_accesses(access.mode, clock)
            self.checker.check(
                state, conflicting, access, clock, shared_bytes, certainly_overlap=exact
            )
        if access.mode & WRITE:
            self.strided_states.clear(access.lo, access.hi)

    def _check_pointers(self, access: MemoryAccess, clock: Clock) -> None:
        for pointer in self.pointer_states.overlapping(access.lo, access.hi):
            if conflicting := pointer.unordered_accesses(access.mode, clock):
                self.checker.check(
                    pointer, conflicting, access, clock, (pointer.address, access.hi)
                )
            if access.mode & WRITE:
                pointer.clear()
        if self._finds_possible:
            self._check_pointers_below(access, clock)

    def _check_pointers_below(self, access: MemoryAccess, clock: Clock) -> None:
        for pointer in self.pointer_states.overlapping(0, access.lo):
            conflicting = [
                assumed
                for assumed in pointer.unordered_accesses(access.mode, clock)
                if assumed.hi > access.lo
            ]
            self.checker.check(
                pointer, conflicting, access, clock, (access.lo, access.hi), certainly_overlap=False
            )

    def _check_ranges_above(self, access: MemoryAccess, clock: Clock) -> None:
        for state in self.range_states.overlapping(access.lo + 1, access.hi):
            if state.lo > access.lo:
                conflicting = state.unordered_accesses(access.mode, clock)
                self.checker.check(
                    state, conflicting, access, clock, (state.lo, state.hi), certainly_overlap=False
                )


def _part_of_access(access: MemoryAccess, lo: int, hi: int) -> MemoryAccess:
    return MemoryAccess(
        access.slot, access.tick, access.call, lo, hi, access.mode, access.precision
    )


# Maximum number of range states of one allocation. Above it, they are merged to half of this number.
MAX_RANGE_STATES: Final = 1 << 15

# A function that returns whether all work enqueued from now on happens after a tick of a slot.
PrecedesFutureWork = Callable[[int, int], bool]


def prune(shadow: Shadow, precedes_future_work: PrecedesFutureWork) -> None:
    """Remove the accesses that all future work happens after."""
    shadow.range_states.rebuild(
        lambda states: [state for state in states if _prune_state(state, precedes_future_work)]
    )
    shadow.strided_states.remove_unless(lambda _, state: _prune_state(state, precedes_future_work))
    shadow.pointer_states.remove_unless(
        lambda pointer: _prune_pointer(pointer, precedes_future_work)
    )


def coarsen(shadow: Shadow, allocation_at: Callable[[int], Allocation | None]) -> None:
    """Merge adjacent range states of each allocation that has too many of them.

    A race with a later access to a part of a merged range is only possible. Outside of recorded allocations,
    the oldest states are removed instead.
    """

    def merge_states(states: list[RangeState]) -> list[RangeState]:
        result: list[RangeState] = []
        for allocation, group in groupby(states, key=lambda state: allocation_at(state.lo)):
            members = list(group)
            if len(members) > MAX_RANGE_STATES:
                members = list(_merge_adjacent(members)) if allocation else _most_recent(members)
            result += members
        return result

    shadow.range_states.rebuild(merge_states)


def _prune_state(state: AccessState, precedes_future_work: PrecedesFutureWork) -> bool:
    """Remove the accesses that all future work happens after. Return whether any access is left."""
    if state.write is not None and precedes_future_work(state.write.slot, state.write.tick):
        state.write = None
    state.reads = _without_past_accesses(state.reads, precedes_future_work)
    state.atomics = _without_past_accesses(state.atomics, precedes_future_work)
    stored_ids = {id(access) for access in (state.write, *state.reads, *state.atomics)}
    state.already_reported = tuple(
        pair for pair in state.already_reported if id(pair[0]) in stored_ids
    )
    return stored_ids != {id(None)}


def _prune_pointer(pointer: PointerState, precedes_future_work: PrecedesFutureWork) -> bool:
    """Remove the kernels that all future work happens after. Return whether any kernel is left."""
    pointer.writers = _without_past_accesses(pointer.writers, precedes_future_work)
    pointer.readers = _without_past_accesses(pointer.readers, precedes_future_work)
    stored_ids = {id(access) for access in pointer.writers + pointer.readers}
    pointer.already_reported = tuple(
        pair for pair in pointer.already_reported if id(pair[0]) in stored_ids
    )
    return bool(stored_ids)


def _without_past_accesses(
    accesses: Accesses, precedes_future_work: PrecedesFutureWork
) -> Accesses:
    return tuple(
        access for access in accesses if not precedes_future_work(access.slot, access.tick)
    )


def _merge_adjacent(states: list[RangeState]) -> Iterator[RangeState]:
    """Merge adjacent states to half of ``MAX_RANGE_STATES``. Drop the states of freed memory."""
    states_in_use = (state for state in states if state.write is None or state.write.tick != NEVER)
    count = -(-len(states) * 2 // MAX_RANGE_STATES)
    while adjacent := list(islice(states_in_use, count)):
        merged_state = RangeState(adjacent[0].lo, adjacent[-1].hi)
        writes = [state.write for state in adjacent if state.write]
        merged_state.write = max(writes, key=lambda write: write.call.seq, default=None)
        merged_state.reads = _last_access_per_stream(
            [access for state in adjacent for access in state.reads]
        )
        merged_state.atomics = _last_access_per_stream(
            [access for state in adjacent for access in state.atomics]
        )
        merged_state.already_reported = tuple(
            pair for state in adjacent for pair in state.already_reported
        )
        merged_state.merged = True
        merged_state.approximate = any(state.approximate for state in adjacent)
        yield merged_state


def _last_access_per_stream(accesses: list[MemoryAccess]) -> Accesses:
    """Return the last access of each stream."""
    in_order = sorted(accesses, key=lambda access: access.tick)
    return tuple({(access.slot, access.call.node): access for access in in_order}.values())


def _most_recent(states: list[RangeState]) -> list[RangeState]:
    """Return the most recently accessed states: half of ``MAX_RANGE_STATES``."""
    seqs = sorted(_last_seq(state) for state in states)
    oldest_seq = seqs[-MAX_RANGE_STATES // 2]
    return [state for state in states if _last_seq(state) >= oldest_seq][-MAX_RANGE_STATES:]


def _last_seq(state: RangeState) -> int:
    accesses = (state.write, *state.reads, *state.atomics)
    return max((access.call.seq for access in accesses if access), default=0)
