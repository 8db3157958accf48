"""The lifetimes of the mapped ranges of expandable segments.

The trace is walked backwards from the final state, which is complete: undoing all later events gives the
ranges that were mapped at an earlier moment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from cudakit.memory.replay.lifetimes import BEFORE_TRACE
from cudakit.memory.snapshot import DeviceTrace, SegmentKind
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.sizes import LARGE_SEGMENT, SMALL_SEGMENT

# Expandable segments are mapped in pages of these sizes (c10/cuda/CUDACachingAllocator.cpp). A request of the
# small pool maps at most one page.
_SMALL_PAGE_BYTES = SMALL_SEGMENT
_LARGE_PAGE_BYTES = LARGE_SEGMENT

_ADDRESS_SPACE_BYTES = 1 << 64
UNKNOWN_POOL = -1  # pool of a range whose event does not record a pool


@dataclass(frozen=True, slots=True)
class MappedRange:
    """One lifetime of a mapped range, with the fields of SegmentLifetimes."""

    address: int
    size: int
    stream: int
    pool: int
    kind: int
    begin: int
    end: int

    @property
    def end_address(self) -> int:
        """The address after the last byte of the range."""
        return self.address + self.size

    def within(self, begin_address: int, end_address: int) -> MappedRange:
        """Return the part of the range between two addresses."""
        begin_address, end_address = (
            max(begin_address, self.address),
            min(end_address, self.end_address),
        )
        return replace(self, address=begin_address, size=end_address - begin_address)


def mapped_ranges(trace: DeviceTrace) -> tuple[list[MappedRange], int]:
    """Return the lifetimes of all mapped ranges, and the number of contradicting events.

    The pool is UNKNOWN_POOL if neither an event nor the final state names it.
    """
    events, n_events = trace.events, len(trace.events)
    backward_walk = _BackwardWalk(_final_ranges(trace))
    is_map = events.action == Action.SEGMENT_MAP
    change_events = np.flatnonzero(is_map | (events.action == Action.SEGMENT_UNMAP))[::-1]
    for event_index, is_mapping, address, size_bytes, stream, pool in zip(
        change_events.tolist(),
        is_map[change_events].tolist(),
        events.address[change_events].tolist(),
        events.size[change_events].tolist(),
        events.stream[change_events].tolist(),
        events.pool[change_events].tolist(),
        strict=True,
    ):
        if is_mapping:
            kind = SegmentKind.SMALL if size_bytes == _SMALL_PAGE_BYTES else SegmentKind.LARGE
            backward_walk.undo_map(
                _mapped_range(address, size_bytes, stream, pool, kind, event_index, n_events)
            )
        else:
            kind = SegmentKind.SMALL if size_bytes < _LARGE_PAGE_BYTES else SegmentKind.UNKNOWN
            backward_walk.undo_unmap(
                _mapped_range(address, size_bytes, stream, pool, kind, BEFORE_TRACE, event_index)
            )
    return backward_walk.lifetimes(), backward_walk.contradiction_count


def _final_ranges(trace: DeviceTrace) -> Iterator[MappedRange]:
    segments, n_events = trace.segments, len(trace.events)
    is_expandable = segments.expandable & (segments.size > 0)
    column_names = ("address", "size", "stream", "pool", "kind")
    columns = (getattr(segments, name)[is_expandable].tolist() for name in column_names)
    return (_mapped_range(*row, BEFORE_TRACE, n_events) for row in zip(*columns, strict=True))


def _mapped_range(address: int, size: int, *attributes: int) -> MappedRange:
    # In a damaged file a range may extend beyond the address space.
    return MappedRange(address, min(size, _ADDRESS_SPACE_BYTES - address), *attributes)


class _BackwardWalk:
    """The mapped ranges at the current moment of the backward walk, and the lifetimes found so far."""

    def __init__(self, final_ranges: Iterable[MappedRange]) -> None:
        self.contradiction_count = 0
        self._ended_ranges: list[MappedRange] = []
        self._mapped_ranges: list[MappedRange] = []  # sorted by address, without overlap
        self._start_addresses: list[int] = []
        for final_range in final_ranges:
            self.undo_unmap(final_range)

    def undo_map(self, mapped_range: MappedRange) -> None:
        """Undo a mapping: the lifetimes of its parts began with this event."""
        mapped_parts = self._remove_parts(mapped_range.address, mapped_range.end_address)
        self.contradiction_count += (
            sum(mapped_part.size for mapped_part in mapped_parts) != mapped_range.size
        )
        for mapped_part in mapped_parts:
            has_kind = mapped_part.kind != SegmentKind.UNKNOWN
            self._ended_ranges.append(
                replace(
                    mapped_part,
                    pool=mapped_part.pool
                    if mapped_part.pool != UNKNOWN_POOL
                    else mapped_range.pool,
                    kind=mapped_part.kind if has_kind else mapped_range.kind,
                    begin=mapped_range.begin,
                )
            )

    def undo_unmap(self, unmapped_range: MappedRange) -> None:
        """Undo an unmapping. Parts that are mapped already must have begun after this event."""
        overlapping_parts = self._remove_parts(unmapped_range.address, unmapped_range.end_address)
        self.contradiction_count += bool(overlapping_parts)
        self._ended_ranges += [
            replace(mapped_part, begin=unmapped_range.end) for mapped_part in overlapping_parts
        ]
        if unmapped_range.size:
            self._insert_range(unmapped_range)

    def lifetimes(self) -> list[MappedRange]:
        """Return all lifetimes; ranges that are still mapped began before the trace."""
        return [*self._ended_ranges, *self._mapped_ranges]

    def _remove_parts(self, begin_address: int, end_address: int) -> list[MappedRange]:
        """Remove and return the mapped parts of an address range; split mapped ranges at its ends."""
        if end_address <= begin_address:
            return []
        first_index = max(bisect_right(self._start_addresses, begin_address) - 1, 0)
        end_index = bisect_left(self._start_addresses, end_address)
        overlapping_ranges = [
            mapped_range
            for mapped_range in self._mapped_ranges[first_index:end_index]
            if mapped_range.end_address > begin_address
        ]
        first_index = end_index - len(overlapping_ranges)
        del self._mapped_ranges[first_index:end_index], self._start_addresses[first_index:end_index]
        for mapped_range in overlapping_ranges:
            if mapped_range.address < begin_address:
                self._insert_range(mapped_range.within(mapped_range.address, begin_address))
            if mapped_range.end_address > end_address:
                self._insert_range(mapped_range.within(end_address, mapped_range.end_address))
        return [
            mapped_range.within(begin_address, end_address) for mapped_range in overlapping_ranges
        ]

    def _insert_range(self, mapped_range: MappedRange) -> None:
        index = bisect_left(self._start_addresses, mapped_range.address)
        self._start_addresses.insert(index, mapped_range.address)
        self._mapped_ranges.insert(index, mapped_range)
