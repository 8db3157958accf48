"""Shadow memory: for each accessed byte range, the last accesses that a later access may race with.

Host and device addresses are treated alike. Exact accesses are stored in ``RangeStates`` and, if they are
strided, in ``StridedStates``; the pointer arguments of kernels in ``PointerStates``, as single addresses.

There are two implementations of ``Shadow`` with equal results: ``PythonShadow``, and ``NativeShadow`` in C
(``native/``), which is more than ten times as fast.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import Final, Protocol, TypeAlias

from cudakit.sanitize.access_state import (
    Accesses,
    AccessState,
    PointerState,
    PointerStates,
    RangeState,
    RangeStates,
)
from cudakit.sanitize.clocks import (
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
from cudakit.sanitize.conflicts import ConflictChecker
from cudakit.sanitize.graph_accesses import GraphAccesses
from cudakit.sanitize.races import Allocation
from cudakit.sanitize.record_batch import AccessRows, access_fields
from cudakit.sanitize.strided import Range, StridedRange, StridedStates, strided_range

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
