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
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.sanitize.conflicts import Conflict, GraphAccesses
from cudakit.sanitize.ordering import (
    ASSUMED,
    ATOMIC,
    EXACT,
    WRITE,
    Call,
    Clock,
    ClockPosition,
    MemoryAccess,
)
from cudakit.sanitize.races import Confidence
from cudakit.sanitize.records import AccessRows
from cudakit.sanitize.shadow import AllocationAt, Shadow, strided_range
from cudakit.trace.kinds import EventKind
from cudakit.trace.trace_file import RECORD, view


class PossibleAccess(NamedTuple):
    """An access that a launch may have made: to any bytes from a pointer to the end of its allocation."""

    pointer: int
    mode: int  # value of an AccessMode
    is_unordered: bool = False  # whether the launch may not be ordered after earlier work


# The possible accesses of launches that were not recorded, by the number of the call.
PossibleAccesses: TypeAlias = Mapping[int, Sequence[PossibleAccess]]


class CheckedShadow:
    """A shadow memory that also checks each access against launches that were not recorded.

    Only the last of these launches are kept, by the slot of their stream and the bytes they may access.
    """

    def __init__(self, stored: Shadow, on_conflict: Callable[[Conflict], None]) -> None:
        self.stored = stored
        self._on_conflict = on_conflict
        # By pointer and mode: an access that the last launch may have made to the bytes behind the pointer.
        self._possible_by_slot: dict[int, dict[tuple[int, int], MemoryAccess]] = {}
        self._last_tick_by_slot: dict[int, int] = {}  # tick of the last launch of each slot

    @property
    def possible_count(self) -> int:
        """The number of possible accesses that are kept."""
        return sum(map(len, self._possible_by_slot.values()))

    def add(
        self, access: MemoryAccess, clock: Clock, stride: int = 0, element_count: int = 0
    ) -> None:
        """Check an access for races, and store it. An access with several elements is strided."""
        self._check(access, clock, stride, element_count)
        self.stored.add(access, clock, stride, element_count)

    def add_free(self, access: MemoryAccess, clock: Clock) -> None:
        """Check and store a stream-ordered free. Each later access to the bytes is a race."""
        self._check(access, clock)
        self.stored.add_free(access, clock)

    def add_all(self, rows: AccessRows, call: Call, position: ClockPosition) -> None:
        """Check and store the accesses of a launch."""
        self._check_rows(rows, call, position)
        self.stored.add_all(rows, call, position)

    def add_graph_launch(
        self, accesses: GraphAccesses, launch: Call, position: ClockPosition
    ) -> None:
        """Check and store the accesses of a graph launch."""
        if any(tick > position.clock[slot] for slot, tick in self._last_tick_by_slot.items()):
            for call, rows in accesses.calls_in_launch(launch):
                self._check_rows(rows, call, position)
        self.stored.checker.node_order = accesses.order
        self.stored.add_graph_launch(accesses, launch, position)

    def add_unrecorded(
        self,
        call: Call,
        position: ClockPosition,
        accesses: Sequence[PossibleAccess],
        allocation_at: AllocationAt,
    ) -> None:
        """Add a launch that was not recorded; check it first if it may not be ordered after earlier work.

        ``allocation_at`` returns the allocation or pool block that contains an address.
        """
        for pointer, mode, is_unordered in accesses:
            if not (allocation := allocation_at(pointer)):
                continue
            slot, hi = position.slot, allocation.address + allocation.size_bytes
            possible = MemoryAccess(slot, position.tick, call, pointer, hi, mode, ASSUMED)
            if is_unordered:
                for earlier in self.stored.find_unordered(pointer, hi, mode, position.clock):
                    if earlier.precision < ASSUMED and earlier.call.seq != call.seq:
                        self._report(earlier, possible)
            self._possible_by_slot.setdefault(slot, {})[pointer, mode] = possible
            self._last_tick_by_slot[slot] = position.tick

    def clear(self, lo: int, hi: int) -> None:
        """Remove all accesses to the bytes from ``lo`` up to ``hi``, which were freed."""
        for accesses in self._possible_by_slot.values():
            for key in [key for key in accesses if lo <= key[0] < hi]:
                del accesses[key]
        self.stored.clear(lo, hi)

    def prune(self, past_clock: Clock) -> None:
        """Remove the accesses that all future work happens after."""
        self.stored.prune(past_clock)
        remaining_by_slot = {
            slot: {
                key: access for key, access in accesses.items() if access.tick > past_clock[slot]
            }
            for slot, accesses in self._possible_by_slot.items()
        }
        self._possible_by_slot = {
            slot: accesses for slot, accesses in remaining_by_slot.items() if accesses
        }
        self._last_tick_by_slot = {
            slot: self._last_tick_by_slot[slot] for slot in self._possible_by_slot
        }

    def _check(
        self, access: MemoryAccess, clock: Clock, stride: int = 0, element_count: int = 0
    ) -> None:
        unordered = self._unordered(clock)
        if unordered and access.precision < ASSUMED and access.lo < access.hi:
            rows = strided_range(access.lo, access.hi, stride, element_count)
            for possible in unordered:
                if _modes_conflict(access.mode, possible.mode) and rows.overlap_with_bounds(
                    possible.lo, possible.hi
                ):
                    self._report(possible, access)

    def _check_rows(self, rows: AccessRows, call: Call, position: ClockPosition) -> None:
        unordered = self._unordered(position.clock)
        if not unordered:
            return
        records = np.frombuffer(rows, RECORD)
        accesses = view(records[records["kind"] == EventKind.ACCESS], EventKind.ACCESS)
        accesses = accesses[(accesses["precision"] < ASSUMED) & (accesses["lo"] < accesses["hi"])]
        for possible in unordered:
            if (row := _first_conflict(accesses, possible)) is not None:
                lo, hi, mode = int(row["lo"]), int(row["hi"]), int(row["mode"])
                access = MemoryAccess(position.slot, position.tick, call, lo, hi, mode, EXACT)
                self._report(possible, access)

    def _unordered(self, clock: Clock) -> list[MemoryAccess]:
        """List the possible accesses of launches that do not happen before work with this clock."""
        return [
            possible
            for slot, last_tick in self._last_tick_by_slot.items()
            if last_tick > clock[slot]
            for possible in self._possible_by_slot[slot].values()
            if possible.tick > clock[slot]
        ]

    def _report(self, previous: MemoryAccess, current: MemoryAccess) -> None:
        lo, hi = max(previous.lo, current.lo), min(previous.hi, current.hi)
        self._on_conflict(Conflict(previous, current, lo, hi, Confidence.POSSIBLE, False))


def _modes_conflict(mode: int, other_mode: int) -> bool:
    """Return whether two accesses to the same bytes conflict: not two reads, and not two atomic accesses."""
    return bool((mode | other_mode) & WRITE) and not mode & other_mode & ATOMIC


def _first_conflict(accesses: npt.NDArray[np.void], possible: MemoryAccess) -> np.void | None:
    """Return the first of several accesses that shares bytes with a possible one, or None."""
    row: np.void
    for row in accesses[(accesses["lo"] < possible.hi) & (accesses["hi"] > possible.lo)]:
        lo, hi, stride, count, mode = (
            int(row[name]) for name in ("lo", "hi", "stride_bytes", "count", "mode")
        )
        if _modes_conflict(mode, possible.mode) and strided_range(
            lo, hi, stride, count
        ).overlap_with_bounds(possible.lo, possible.hi):
            return row
    return None
