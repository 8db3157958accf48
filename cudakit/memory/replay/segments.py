"""The lifetimes of all segments of a device, and the reserved memory at every moment."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from cudakit.memory.replay.lifetimes import (
    BEFORE_TRACE,
    BEGIN,
    COMPLETE,
    NO_STEP,
    Lifetimes,
    LifetimeSteps,
    sorted_by_address,
    split_into_lifetimes,
)
from cudakit.memory.replay.mapped_ranges import UNKNOWN_POOL, MappedRange, mapped_ranges
from cudakit.memory.snapshot import (
    Addresses,
    Codes,
    DeviceTrace,
    Ids,
    Ints,
    Mask,
    SegmentKind,
    Segments,
    concatenate_arrays,
    take,
)
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.sizes import SMALL_SEGMENT


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
    segments = concatenate_arrays(plain_segments, expandable_segments)
    return take(segments, np.argsort(segments.address, kind="stable"))
