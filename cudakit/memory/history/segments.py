"""The lifetimes of all segments of a device, and the reserved memory at every moment."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from cudakit.memory.history.lifetimes import (
    BEGIN,
    COMPLETE,
    NO_STEP,
    Lifetimes,
    LifetimeSteps,
    sorted_by_address,
    split_into_lifetimes,
)
from cudakit.memory.snapshot import (
    BEFORE_TRACE,
    Action,
    Addresses,
    Codes,
    DeviceTrace,
    Ids,
    Ints,
    Mask,
    SegmentKind,
    Segments,
    concatenate,
    take,
)
from cudakit.torch_rules.sizes import LARGE_SEGMENT, SMALL_SEGMENT


@dataclass(frozen=True, slots=True)
class SegmentLifetimes:
    """Segments or mapped ranges of expandable segments, by address; every array has one item per range.

    ``begin`` and ``end`` are event indices, as in ``Allocations``.
    """

    address: Addresses
    size: Ints
    stream: Ids
    pool: Ids
    kind: Codes
    expandable: Mask
    begin: Ints
    end: Ints

    def __len__(self) -> int:
        return len(self.address)

    def at(self, moment: int) -> SegmentLifetimes:
        """Return the segments and ranges that were reserved at a moment."""
        return take(self, (self.begin < moment) & (moment <= self.end))


@dataclass(frozen=True, slots=True)
class SegmentHistory:
    """The reserved memory of a trace."""

    final_segments: Segments
    # The event that allocated each final segment; BEFORE_TRACE for expandable segments.
    final_begin: Ints
    plain_segments: SegmentLifetimes  # segments that are not expandable
    mapped_ranges: SegmentLifetimes  # mapped ranges of expandable segments; pool -1: unknown
    reserved: Ints  # bytes at every moment: n + 1 items
    contradictions: int  # number of contradicting segment events

    def at(self, moment: int) -> SegmentLifetimes:
        """Return the segments at a moment, by address, as PyTorch reports them."""
        return _merged_by_address(self.plain_segments.at(moment), self.expandable_at(moment))

    def expandable_at(self, moment: int) -> SegmentLifetimes:
        """Return the expandable segments at a moment: adjacent mapped ranges, joined."""
        return _join_ranges(self.mapped_ranges.at(moment))

    def pool_at(self, addresses: Addresses, events: Ints) -> Ids:
        """Return the pool of the segment that contains each address at an event.

        The pool of a segment that is not in the final state is unknown and counts as the default pool.
        """
        final_segments = self.final_segments
        if not len(final_segments):
            return np.zeros(len(addresses), np.int32)
        segment_indices = np.maximum(
            np.searchsorted(final_segments.address, addresses, side="right") - 1, 0
        )
        is_inside = (
            (addresses >= final_segments.address[segment_indices])
            & (
                addresses - final_segments.address[segment_indices]
                < final_segments.size[segment_indices].astype(np.uint64)
            )
            & (events >= self.final_begin[segment_indices])
        )
        return np.where(is_inside, final_segments.pool[segment_indices], 0).astype(np.int32)


def segment_history(trace: DeviceTrace) -> SegmentHistory:
    """Return the lifetimes of all segments of a trace."""
    steps = _segment_lifetime_steps(trace)
    lifetimes = split_into_lifetimes(steps)
    final_indices = _final_segment_of(trace.segments, steps, lifetimes)
    final_begin_events = np.full(len(trace.segments), BEFORE_TRACE, np.int64)
    final_begin_events[final_indices[final_indices >= 0]] = lifetimes.begin[final_indices >= 0]
    range_lifetimes, contradictions = mapped_ranges(trace)
    return SegmentHistory(
        final_segments=trace.segments,
        final_begin=final_begin_events,
        plain_segments=_plain_segments(trace, steps, lifetimes, final_indices),
        mapped_ranges=_lifetimes_of(range_lifetimes),
        reserved=_reserved_curve(trace),
        contradictions=contradictions
        + _contradiction_count(trace.segments, steps, lifetimes, final_indices),
    )


def _segment_lifetime_steps(trace: DeviceTrace) -> LifetimeSteps:
    events = trace.events
    step_codes = np.full(len(events), NO_STEP, np.uint8)
    step_codes[events.action == Action.SEGMENT_ALLOC] = BEGIN
    step_codes[events.action == Action.SEGMENT_FREE] = COMPLETE
    step_events = np.flatnonzero(step_codes != NO_STEP)
    return sorted_by_address(
        step_events, events.address[step_events], step_codes[step_events], events.size[step_events]
    )


def _final_segment_of(segments: Segments, steps: LifetimeSteps, lifetimes: Lifetimes) -> Ints:
    """Return the final segment of each lifetime; -1 if the segment was released."""
    plain_segments = np.flatnonzero(~segments.expandable)
    final_addresses = segments.address[plain_segments]
    final_indices = np.full(len(lifetimes.first), -1, np.int64)
    if len(plain_segments):
        addresses = steps.address[lifetimes.first]
        nearest_indices = np.minimum(
            np.searchsorted(final_addresses, addresses), len(plain_segments) - 1
        )
        is_alive = (
            lifetimes.is_newest
            & (lifetimes.complete < 0)
            & (final_addresses[nearest_indices] == addresses)
        )
        final_indices[is_alive] = plain_segments[nearest_indices[is_alive]]
    return final_indices


def _plain_segments(
    trace: DeviceTrace, steps: LifetimeSteps, lifetimes: Lifetimes, final_indices: Ints
) -> SegmentLifetimes:
    """Return the lifetimes of all segments that are not expandable."""
    events, segments, n_events = trace.events, trace.segments, len(trace.events)
    source_events = steps.event[lifetimes.first]
    sizes = steps.size[lifetimes.first]
    lasts_to_end = final_indices >= 0
    pool_ids = np.where(events.pool[source_events] >= 0, events.pool[source_events], 0)
    pool_ids[lasts_to_end] = segments.pool[final_indices[lasts_to_end]]
    # Only the small pool has segments of this size.
    kinds = np.where(sizes == SMALL_SEGMENT, SegmentKind.SMALL, SegmentKind.LARGE)
    kinds[lasts_to_end] = segments.kind[final_indices[lasts_to_end]]
    traced_segments = SegmentLifetimes(
        address=steps.address[lifetimes.first],
        size=sizes,
        stream=events.stream[source_events],
        pool=pool_ids.astype(np.int32),
        kind=kinds.astype(np.uint8),
        expandable=np.zeros(len(sizes), np.bool_),
        begin=lifetimes.begin,
        end=np.where(lifetimes.complete >= 0, lifetimes.complete, n_events),
    )
    untraced_segments = np.setdiff1d(np.flatnonzero(~segments.expandable), final_indices)
    return _merged_by_address(
        traced_segments, take(_final_lifetimes(segments, n_events), untraced_segments)
    )


def _final_lifetimes(segments: Segments, n_events: int) -> SegmentLifetimes:
    """Return the segments of the final state, with lifetimes from before the trace to its end."""
    return SegmentLifetimes(
        address=segments.address,
        size=segments.size,
        stream=segments.stream,
        pool=segments.pool,
        kind=segments.kind,
        expandable=segments.expandable,
        begin=np.full(len(segments), BEFORE_TRACE, np.int64),
        end=np.full(len(segments), n_events, np.int64),
    )


def _contradiction_count(
    segments: Segments, steps: LifetimeSteps, lifetimes: Lifetimes, final_indices: Ints
) -> int:
    """Count segments that are allocated or freed twice, or that differ from the final state."""
    is_repeated_allocation = ((lifetimes.begin < 0) & ~lifetimes.is_oldest) | (
        (lifetimes.complete < 0) & ~lifetimes.is_newest
    )
    exists_at_end = np.isin(steps.address[lifetimes.first], segments.address[~segments.expandable])
    differs_at_end = lifetimes.is_newest & (exists_at_end != (lifetimes.complete < 0))
    is_resized = (lifetimes.begin >= 0) & (lifetimes.complete >= 0)
    is_resized &= steps.size[lifetimes.first] != steps.size[lifetimes.last]
    lasts_to_end = final_indices >= 0
    is_resized[lasts_to_end] = (
        steps.size[lifetimes.first[lasts_to_end]] != segments.size[final_indices[lasts_to_end]]
    )
    return int(
        sum(np.count_nonzero(mask) for mask in (is_repeated_allocation, differs_at_end, is_resized))
    )


def _reserved_curve(trace: DeviceTrace) -> Ints:
    """Return the reserved bytes at every moment, computed back from the final state."""
    actions, sizes = trace.events.action, trace.events.size
    is_growth = (actions == Action.SEGMENT_ALLOC) | (actions == Action.SEGMENT_MAP)
    is_shrinkage = (actions == Action.SEGMENT_FREE) | (actions == Action.SEGMENT_UNMAP)
    n_events = len(actions)
    reserved_bytes = np.zeros(n_events + 1, np.int64)
    np.cumsum(
        np.where(is_growth, sizes, 0) - np.where(is_shrinkage, sizes, 0), out=reserved_bytes[1:]
    )
    reserved_bytes += int(trace.segments.size.sum()) - reserved_bytes[n_events]
    return reserved_bytes


def _lifetimes_of(ranges: list[MappedRange]) -> SegmentLifetimes:
    return SegmentLifetimes(
        address=np.array([mapped_range.address for mapped_range in ranges], np.uint64),
        size=np.array([mapped_range.size for mapped_range in ranges], np.int64),
        stream=np.array([mapped_range.stream for mapped_range in ranges], np.int32),
        pool=np.array([mapped_range.pool for mapped_range in ranges], np.int32),
        kind=np.array([mapped_range.kind for mapped_range in ranges], np.uint8),
        expandable=np.ones(len(ranges), np.bool_),
        begin=np.array([mapped_range.begin for mapped_range in ranges], np.int64),
        end=np.array([mapped_range.end for mapped_range in ranges], np.int64),
    )


def _join_ranges(ranges: SegmentLifetimes) -> SegmentLifetimes:
    """Join adjacent ranges of the same stream, pool and kind."""
    ranges = take(ranges, np.argsort(ranges.address, kind="stable"))
    if not len(ranges):
        return ranges
    end_addresses = ranges.address + ranges.size.astype(np.uint64)
    first_indices = np.flatnonzero(np.append(True, ~_continues_previous(ranges, end_addresses)))
    last_indices = np.append(first_indices[1:], len(ranges)) - 1
    joined_ranges = take(ranges, first_indices)
    return replace(
        joined_ranges,
        size=(end_addresses[last_indices] - joined_ranges.address).astype(np.int64),
        # A pool or kind that is known for one of the joined ranges applies to the whole joined range. The
        # code of an unknown pool is lower than all other codes; the code of an unknown kind is higher than
        # all others.
        pool=np.maximum(np.maximum.reduceat(ranges.pool, first_indices), 0),
        kind=np.minimum.reduceat(ranges.kind, first_indices),
    )


def _continues_previous(ranges: SegmentLifetimes, end_addresses: Addresses) -> Mask:
    """Return for each range but the first whether it is joined with the previous range."""
    pool_ids, kinds = ranges.pool, ranges.kind
    has_same_pool = pool_ids[1:] == pool_ids[:-1]
    has_same_pool |= (pool_ids[1:] == UNKNOWN_POOL) | (pool_ids[:-1] == UNKNOWN_POOL)
    has_same_kind = kinds[1:] == kinds[:-1]
    has_same_kind |= (kinds[1:] == SegmentKind.UNKNOWN) | (kinds[:-1] == SegmentKind.UNKNOWN)
    is_adjacent = (ranges.address[1:] == end_addresses[:-1]) & (
        ranges.stream[1:] == ranges.stream[:-1]
    )
    is_continuation: Mask = is_adjacent & has_same_pool & has_same_kind
    return is_continuation


def _merged_by_address(
    plain_segments: SegmentLifetimes, expandable_segments: SegmentLifetimes
) -> SegmentLifetimes:
    segments = concatenate(plain_segments, expandable_segments)
    return take(segments, np.argsort(segments.address, kind="stable"))


# --- The lifetimes of the mapped ranges of expandable segments -------------------------------------
#
# The trace is walked backwards from the final state, which is complete: undoing all later events gives the
# ranges that were mapped at an earlier moment.

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
