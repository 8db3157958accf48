"""Find work that may race with an earlier launch which was not recorded, because a template has its accesses.

A template is right as long as its kernel accesses the same bytes in each launch. A kernel that chooses
addresses by the content of memory, such as a gather, may access other bytes in one launch. Its accesses begin
at its pointer arguments, so they are between a pointer and the end of the allocation. The recorder orders a
launch with all earlier work on these allocations before it uses a template. So only work that is enqueued
later, and that is not ordered after the launch, may race with such an access. This module finds that work.
A launch that could not be recorded, but is not ordered after earlier work, is also compared with that work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.sanitize.conflicts import Conflict, ConflictChecker, GraphAccesses
from cudakit.sanitize.ordering import (
    ASSUMED,
    ATOMIC,
    EXACT,
    WRITE,
    Call,
    Clock,
    MemoryAccess,
    Release,
)
from cudakit.sanitize.races import Allocation, Confidence
from cudakit.sanitize.records import AccessRows
from cudakit.sanitize.shadow import AllocationAt, ClockPosition, Shadow, strided_range
from cudakit.trace.kinds import EventKind
from cudakit.trace.trace_file import RECORD, view


class PossibleAccess(NamedTuple):
    """An access that a launch may have made: to any bytes from a pointer to the end of its allocation."""

    pointer: int
    mode: int  # value of an AccessMode
    is_unordered: bool = False  # whether the launch may not be ordered after earlier work


# The possible accesses of launches that were not recorded, by the number of the call.
PossibleAccesses: TypeAlias = Mapping[int, Sequence[PossibleAccess]]


@dataclass(slots=True, eq=False)
class _PossibleRange:
    """The bytes that a launch may have accessed."""

    lo: int
    hi: int
    mode: int
    slot: int  # slot of the launch's stream
    tick: int  # tick of the launch on the timeline of its stream
    call: Call


class UnrecordedLaunches:
    """The last launches that were not recorded, by the slot of their stream and the bytes they may access."""

    def __init__(self, on_conflict: Callable[[Conflict], None]) -> None:
        self._on_conflict = on_conflict
        self._ranges_by_slot: dict[int, dict[tuple[int, int], _PossibleRange]] = {}
        self._last_tick_by_slot: dict[int, int] = {}  # tick of the last launch of each slot

    def __len__(self) -> int:
        """Return the number of ranges that are stored."""
        return sum(map(len, self._ranges_by_slot.values()))

    def add(
        self,
        call: Call,
        slot: int,
        tick: int,
        accesses: Sequence[PossibleAccess],
        allocation_at: AllocationAt,
    ) -> None:
        """Add a launch. ``allocation_at`` returns the allocation or pool block that contains an address."""
        ranges = self._ranges_by_slot.setdefault(slot, {})
        for pointer, mode, _ in accesses:
            if allocation := allocation_at(pointer):
                hi = allocation.address + allocation.size_bytes
                ranges[pointer, mode] = _PossibleRange(pointer, hi, mode, slot, tick, call)
                self._last_tick_by_slot[slot] = tick

    def check_earlier_work(
        self,
        call: Call,
        position: ClockPosition,
        accesses: Sequence[PossibleAccess],
        allocation_at: AllocationAt,
        shadow: Shadow,
    ) -> None:
        """Check the possible accesses of a launch that may not be ordered after earlier work.

        ``shadow`` has the accesses of earlier work.
        """
        for pointer, mode, is_unordered in accesses:
            if not is_unordered or not (allocation := allocation_at(pointer)):
                continue
            hi = allocation.address + allocation.size_bytes
            possible = MemoryAccess(position.slot, position.tick, call, pointer, hi, mode, ASSUMED)
            for earlier in shadow.find_unordered(pointer, hi, mode, position.clock):
                if earlier.precision < ASSUMED and earlier.call.seq != call.seq:
                    lo, end = max(pointer, earlier.lo), min(hi, earlier.hi)
                    conflict = Conflict(earlier, possible, lo, end, Confidence.POSSIBLE, False)
                    self._on_conflict(conflict)

    def has_unordered(self, clock: Clock) -> bool:
        """Return whether a launch may not happen before work with this clock."""
        return any(tick > clock[slot] for slot, tick in self._last_tick_by_slot.items())

    def check_rows(self, rows: AccessRows, call: Call, position: ClockPosition) -> None:
        """Check the accesses of a launch."""
        unordered_ranges = self._unordered_ranges(position.clock)
        if not unordered_ranges:
            return
        records = np.frombuffer(rows, RECORD)
        accesses = view(records[records["kind"] == EventKind.ACCESS], EventKind.ACCESS)
        accesses = accesses[(accesses["precision"] < ASSUMED) & (accesses["lo"] < accesses["hi"])]
        for possible_range in unordered_ranges:
            if (row := _first_conflict(accesses, possible_range)) is not None:
                lo, hi, mode = int(row["lo"]), int(row["hi"]), int(row["mode"])
                access = MemoryAccess(position.slot, position.tick, call, lo, hi, mode, EXACT)
                self._report(possible_range, access)

    def check(self, access: MemoryAccess, clock: Clock, stride: int, element_count: int) -> None:
        """Check one access."""
        unordered_ranges = self._unordered_ranges(clock)
        if not unordered_ranges or access.precision >= ASSUMED or access.lo >= access.hi:
            return
        strided_set = strided_range(access.lo, access.hi, stride, element_count)
        for possible_range in unordered_ranges:
            if _modes_conflict(
                access.mode, possible_range.mode
            ) and strided_set.overlap_with_bounds(possible_range.lo, possible_range.hi):
                self._report(possible_range, access)

    def clear(self, lo: int, hi: int) -> None:
        """Forget the launches that may access the bytes from ``lo`` up to ``hi``, which were freed."""
        for ranges in self._ranges_by_slot.values():
            for range_key in [range_key for range_key in ranges if lo <= range_key[0] < hi]:
                del ranges[range_key]

    def prune(self, past_clock: Clock) -> None:
        """Forget the launches that all future work happens after."""
        for slot, ranges in self._ranges_by_slot.items():
            self._ranges_by_slot[slot] = {
                range_key: possible_range
                for range_key, possible_range in ranges.items()
                if possible_range.tick > past_clock[slot]
            }
        self._ranges_by_slot = {
            slot: ranges for slot, ranges in self._ranges_by_slot.items() if ranges
        }
        self._last_tick_by_slot = {
            slot: self._last_tick_by_slot[slot] for slot in self._ranges_by_slot
        }

    def _unordered_ranges(self, clock: Clock) -> list[_PossibleRange]:
        """Return the ranges of launches that do not happen before work with this clock."""
        if not self._last_tick_by_slot:
            return []
        slots = [slot for slot, tick in self._last_tick_by_slot.items() if tick > clock[slot]]
        return [
            possible_range
            for slot in slots
            for possible_range in self._ranges_by_slot[slot].values()
            if possible_range.tick > clock[slot]
        ]

    def _report(self, possible_range: _PossibleRange, access: MemoryAccess) -> None:
        launch_access = MemoryAccess(
            possible_range.slot,
            possible_range.tick,
            possible_range.call,
            possible_range.lo,
            possible_range.hi,
            possible_range.mode,
            ASSUMED,
        )
        lo, hi = max(possible_range.lo, access.lo), min(possible_range.hi, access.hi)
        self._on_conflict(Conflict(launch_access, access, lo, hi, Confidence.POSSIBLE, False))


def _modes_conflict(mode: int, other_mode: int) -> bool:
    """Return whether two accesses to the same bytes conflict: not two reads, and not two atomic accesses."""
    return bool((mode | other_mode) & WRITE) and not mode & other_mode & ATOMIC


def _first_conflict(
    accesses: npt.NDArray[np.void], possible_range: _PossibleRange
) -> np.void | None:
    """Return the first of several accesses that shares bytes with a possible one, or None."""
    overlaps = (accesses["lo"] < possible_range.hi) & (accesses["hi"] > possible_range.lo)
    for row in accesses[overlaps]:
        strided_set = strided_range(
            int(row["lo"]), int(row["hi"]), int(row["stride_bytes"]), int(row["count"])
        )
        if _modes_conflict(
            int(row["mode"]), possible_range.mode
        ) and strided_set.overlap_with_bounds(possible_range.lo, possible_range.hi):
            conflict: np.void = row
            return conflict
    return None


class CheckedShadow:
    """A shadow memory that also checks each access against launches that were not recorded."""

    def __init__(self, shadow: Shadow, unrecorded_launches: UnrecordedLaunches) -> None:
        self._shadow = shadow
        self._unrecorded_launches = unrecorded_launches

    @property
    def checker(self) -> ConflictChecker:
        return self._shadow.checker

    @property
    def range_state_count(self) -> int:
        return self._shadow.range_state_count

    @property
    def pointer_state_count(self) -> int:
        return self._shadow.pointer_state_count

    @property
    def strided_state_count(self) -> int:
        return self._shadow.strided_state_count

    def add(
        self, access: MemoryAccess, clock: Clock, stride: int = 0, element_count: int = 0
    ) -> None:
        self._unrecorded_launches.check(access, clock, stride, element_count)
        self._shadow.add(access, clock, stride, element_count)

    def add_all(self, rows: AccessRows, call: Call, position: ClockPosition) -> None:
        self._unrecorded_launches.check_rows(rows, call, position)
        self._shadow.add_all(rows, call, position)

    def add_graph_launch(
        self, accesses: GraphAccesses, launch: Call, position: ClockPosition
    ) -> None:
        if self._unrecorded_launches.has_unordered(position.clock):
            for call, rows in accesses.calls_in_launch(launch):
                self._unrecorded_launches.check_rows(rows, call, position)
        self._shadow.add_graph_launch(accesses, launch, position)

    def add_free(self, access: MemoryAccess, clock: Clock) -> None:
        self._unrecorded_launches.check(access, clock, 0, 0)
        self._shadow.add_free(access, clock)

    def free_releases(self, lo: int, hi: int) -> list[Release]:
        return self._shadow.free_releases(lo, hi)

    def find_unordered(self, lo: int, hi: int, mode: int, clock: Clock) -> list[MemoryAccess]:
        return self._shadow.find_unordered(lo, hi, mode, clock)

    def clear(self, lo: int, hi: int) -> None:
        self._unrecorded_launches.clear(lo, hi)
        self._shadow.clear(lo, hi)

    def prune(self, past_clock: Clock) -> None:
        self._shadow.prune(past_clock)

    def coarsen(self, allocation_at: Callable[[int], Allocation | None], max_states: int) -> None:
        self._shadow.coarsen(allocation_at, max_states)
