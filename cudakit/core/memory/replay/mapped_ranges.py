"""The lifetimes of the mapped ranges of expandable segments.

The trace is walked backwards from the final state, which is complete: undoing all later events gives the
ranges that were mapped at an earlier moment.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from cudakit.core.memory.replay.lifetimes import BEFORE_TRACE
from cudakit.core.memory.snapshot import DeviceTrace, SegmentKind
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.sizes import LARGE_SEGMENT, SMALL_SEGMENT

# Expandable segments are mapped in pages of these sizes (c10/cuda/CUDACachingAllocator.cpp). A request of the
# small pool maps at most one page.
_SMALL_PAGE = SMALL_SEGMENT
_LARGE_PAGE = LARGE_SEGMENT

_ADDRESS_SPACE = 1 << 64
UNKNOWN_POOL = -1  # pool of a range whose event does not record a pool


@dataclass(frozen=True, slots=True)
class MappedRange:
    """One lifetime of a mapped range; the fields are those of SegmentLifetimes."""

    address: int
    size: int
    stream: int
    pool: int
    kind: int
    begin: int
    end: int

    @property
    def stop(self) -> int:
        """The address after the last byte of the range."""
        return self.address + self.size

    def within(self, start: int, stop: int) -> MappedRange:
        """Return the part of the range between two addresses."""
        start, stop = max(start, self.address), min(stop, self.stop)
        return replace(self, address=start, size=stop - start)


def mapped_ranges(trace: DeviceTrace) -> tuple[list[MappedRange], int]:
    """Return the lifetimes of all mapped ranges, and the number of contradicting events.

    The pool is UNKNOWN_POOL if neither an event nor the final state names it.
    """
    events, n_events = trace.events, len(trace.events)
    backward_walk = _BackwardWalk(_final_ranges(trace))
    is_map = events.action == Action.SEGMENT_MAP
    changes = np.flatnonzero(is_map | (events.action == Action.SEGMENT_UNMAP))[::-1]
    for event, is_mapping, address, size, stream, pool in zip(
        changes.tolist(),
        is_map[changes].tolist(),
        events.address[changes].tolist(),
        events.size[changes].tolist(),
        events.stream[changes].tolist(),
        events.pool[changes].tolist(),
        strict=True,
    ):
        if is_mapping:
            kind = SegmentKind.SMALL if size == _SMALL_PAGE else SegmentKind.LARGE
            backward_walk.undo_map(
                _mapped_range(address, size, stream, pool, kind, event, n_events)
            )
        else:
            kind = SegmentKind.SMALL if size < _LARGE_PAGE else SegmentKind.UNKNOWN
            backward_walk.undo_unmap(
                _mapped_range(address, size, stream, pool, kind, BEFORE_TRACE, event)
            )
    return backward_walk.lifetimes(), backward_walk.contradictions


def _final_ranges(trace: DeviceTrace) -> Iterator[MappedRange]:
    segments, n_events = trace.segments, len(trace.events)
    is_expandable = segments.expandable & (segments.size > 0)
    names = ("address", "size", "stream", "pool", "kind")
    columns = (getattr(segments, name)[is_expandable].tolist() for name in names)
    return (_mapped_range(*row, BEFORE_TRACE, n_events) for row in zip(*columns, strict=True))


def _mapped_range(address: int, size: int, *attributes: int) -> MappedRange:
    # In a damaged file a range may extend beyond the address space.
    return MappedRange(address, min(size, _ADDRESS_SPACE - address), *attributes)


class _BackwardWalk:
    """The mapped ranges at the current moment of the backward walk, and the lifetimes found so far."""

    def __init__(self, final_ranges: Iterable[MappedRange]) -> None:
        self.contradictions = 0
        self._completed: list[MappedRange] = []
        self._mapped: list[MappedRange] = []  # sorted by address, without overlap
        self._starts: list[int] = []
        for final_range in final_ranges:
            self.undo_unmap(final_range)

    def undo_map(self, mapping: MappedRange) -> None:
        """Undo a mapping: the lifetimes of its parts began with this event."""
        mapped_parts = self._remove(mapping.address, mapping.stop)
        self.contradictions += sum(mapped_part.size for mapped_part in mapped_parts) != mapping.size
        for mapped_part in mapped_parts:
            has_kind = mapped_part.kind != SegmentKind.UNKNOWN
            self._completed.append(
                replace(
                    mapped_part,
                    pool=mapped_part.pool if mapped_part.pool != UNKNOWN_POOL else mapping.pool,
                    kind=mapped_part.kind if has_kind else mapping.kind,
                    begin=mapping.begin,
                )
            )

    def undo_unmap(self, mapped: MappedRange) -> None:
        """Undo an unmapping. Parts that are mapped already must have begun after this event."""
        overlapping = self._remove(mapped.address, mapped.stop)
        self.contradictions += bool(overlapping)
        self._completed += [replace(mapped_part, begin=mapped.end) for mapped_part in overlapping]
        if mapped.size:
            self._insert(mapped)

    def lifetimes(self) -> list[MappedRange]:
        """Return all lifetimes; ranges that are still mapped began before the trace."""
        return [*self._completed, *self._mapped]

    def _remove(self, start: int, stop: int) -> list[MappedRange]:
        """Remove and return the parts in a range, splitting ranges that extend beyond it."""
        if stop <= start:
            return []
        first_index = max(bisect_right(self._starts, start) - 1, 0)
        end_index = bisect_left(self._starts, stop)
        overlapping = [
            mapped_range
            for mapped_range in self._mapped[first_index:end_index]
            if mapped_range.stop > start
        ]
        first_index = end_index - len(overlapping)
        del self._mapped[first_index:end_index], self._starts[first_index:end_index]
        for mapped_range in overlapping:
            if mapped_range.address < start:
                self._insert(mapped_range.within(mapped_range.address, start))
            if mapped_range.stop > stop:
                self._insert(mapped_range.within(stop, mapped_range.stop))
        return [mapped_range.within(start, stop) for mapped_range in overlapping]

    def _insert(self, mapped_range: MappedRange) -> None:
        index = bisect_left(self._starts, mapped_range.address)
        self._starts.insert(index, mapped_range.address)
        self._mapped.insert(index, mapped_range)
