"""Group events into lifetimes of allocations, matched with the final blocks, and of segments.

A lifetime is an allocation, the request to free it, and the completion of the free. Any of these steps can be
missing from the trace.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from cudakit.memory.snapshot import (
    BEFORE_TRACE,
    Action,
    Addresses,
    Blocks,
    BlockState,
    Codes,
    DeviceTrace,
    Events,
    Ids,
    Ints,
    Mask,
    SegmentKind,
    Segments,
    concatenate,
    take,
)
from cudakit.torch_rules.settings import LARGE_SEGMENT, SMALL_SEGMENT

# The kinds of steps of a lifetime, in their order.
BEGIN, REQUEST, COMPLETE = 0, 1, 2
NO_STEP = 255


@dataclass(frozen=True, slots=True)
class LifetimeSteps:
    """Begins, free requests and ends of lifetimes, sorted by address, then by time."""

    event: Ints  # index of the event in the trace
    address: Addresses
    step: Codes  # kind of the step: BEGIN, REQUEST or COMPLETE
    size: Ints  # size in bytes of the allocation


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Lifetimes, by address; ``begin``, ``request`` and ``complete`` are events, or -1 if not recorded."""

    first: Ints  # index of each lifetime's first step in LifetimeSteps
    last: Ints  # index of each lifetime's last step
    address: Addresses
    begin: Ints
    request: Ints
    complete: Ints
    is_newest: Mask  # whether the lifetime is the last one at its address
    is_oldest: Mask  # whether the lifetime is the first one at its address


def sorted_by_address(
    events: Ints, addresses: Addresses, steps: Codes, sizes: Ints
) -> LifetimeSteps:
    """Sort steps of lifetimes, which are in order of time, by address; keep the order of time per address."""
    order = _address_order(addresses)
    return LifetimeSteps(events[order], addresses[order], steps[order], sizes[order])


def _address_order(addresses: Addresses) -> npt.NDArray[np.intp]:
    if len(addresses):
        # Addresses of a device share their upper bits, and blocks are multiples of 512 bytes. If the
        # remaining bits fit in 32 bits, sorting is faster.
        offsets = addresses - addresses.min()
        if int(offsets.max()) < 1 << 41 and not (offsets & np.uint64(511)).any():
            return np.argsort((offsets >> np.uint64(9)).astype(np.uint32), kind="stable")
    return np.argsort(addresses, kind="stable")


def split_into_lifetimes(steps: LifetimeSteps) -> Lifetimes:
    """Group events into lifetimes. A step that cannot follow the previous step starts a new lifetime."""
    step_count = len(steps.event)
    is_new_address = np.ones(step_count, np.bool_)
    is_new_address[1:] = steps.address[1:] != steps.address[:-1]
    is_first_step = is_new_address.copy()
    is_first_step[1:] |= steps.step[1:] <= steps.step[:-1]
    first = np.flatnonzero(is_first_step)
    lifetime_of_step = np.cumsum(is_first_step) - 1
    # The event of each kind of step in each lifetime; -1: not recorded.
    events = np.full((3, len(first)), -1, np.int64)
    events[steps.step, lifetime_of_step] = steps.event
    is_oldest = is_new_address[first]
    return Lifetimes(
        first=first,
        last=np.append(first[1:], step_count)[: len(first)] - 1,
        address=steps.address[first],
        begin=events[BEGIN],
        request=events[REQUEST],
        complete=events[COMPLETE],
        is_newest=np.append(is_oldest[1:], True)[: len(first)],
        is_oldest=is_oldest,
    )


def final_index(lifetimes: Lifetimes, final_addresses: Addresses) -> Ints:
    """Return the index of each lifetime in the ascending addresses of the final state; -1 if it has ended."""
    index = index_of(lifetimes.address, final_addresses)
    return np.where(lifetimes.is_newest & (lifetimes.complete < 0), index, -1)


def index_of(addresses: Addresses, sorted_addresses: Addresses) -> Ints:
    """Return the index of each address in an ascending array; -1 if the array lacks it."""
    if not len(sorted_addresses):
        return np.full(len(addresses), -1, np.int64)
    nearest = np.minimum(np.searchsorted(sorted_addresses, addresses), len(sorted_addresses) - 1)
    return np.where(sorted_addresses[nearest] == addresses, nearest, -1)


@dataclass(frozen=True, slots=True)
class Contradictions:
    """The number of contradictions between trace and final state, by kind."""

    # Number of allocations that are freed, or live at the end, without an alloc event.
    lost_allocations: int = 0
    # Number of blocks without a free event whose address is allocated again, or free at the end.
    lost_frees: int = 0
    lost_requests: int = 0  # number of frees that completed without a request
    sizes: int = 0  # number of allocations whose events have different sizes
    # number of segments that are allocated or freed twice, or differ from the final state
    segments: int = 0
    over_reserved: int = 0  # number of moments with more active than reserved memory

    @property
    def total(self) -> int:
        """The number of contradictions of all kinds."""
        return sum(getattr(self, field.name) for field in fields(self))


def allocation_lifetime_steps(events: Events) -> LifetimeSteps:
    """Return the alloc and free events of a trace as steps of lifetimes, sorted by address.

    A FREE event is two steps: the request to free and the completion of the free.
    """
    is_free = events.action == Action.FREE
    step_codes = np.full(len(events), NO_STEP, np.uint8)
    step_codes[events.action == Action.ALLOC] = BEGIN
    step_codes[(events.action == Action.FREE_REQUESTED) | is_free] = REQUEST
    step_codes[events.action == Action.FREE_COMPLETED] = COMPLETE
    rows = np.flatnonzero(step_codes != NO_STEP)
    codes = step_codes[rows]
    if is_free.any():
        repeats = np.repeat(np.arange(len(rows)), 1 + is_free[rows])
        is_repeat = np.append(False, repeats[1:] == repeats[:-1])
        rows, codes = rows[repeats], np.where(is_repeat, np.uint8(COMPLETE), codes[repeats])
    return sorted_by_address(rows, events.address[rows], codes, events.size[rows])


@dataclass(frozen=True, slots=True)
class MatchedLifetimes:
    """Lifetimes, matched with the blocks of the final state.

    ``begin``, ``free_request`` and ``end`` are indices of events: -1 is before the trace, the number of
    events is after the trace.
    """

    address: Addresses
    requested: Ints  # requested bytes
    begin: Ints
    free_request: Ints
    end: Ints
    source: Ints  # event of the first recorded step; -1: none
    block: Ints  # index of the block in the final state; -1: freed before
    counts: Contradictions


def match_final_blocks(
    steps: LifetimeSteps, lifetimes: Lifetimes, blocks: Blocks, n_events: int
) -> MatchedLifetimes:
    """Match the lifetimes of a trace of n events with the blocks of the final state."""
    live_blocks = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    live_blocks = live_blocks[np.argsort(blocks.address[live_blocks], kind="stable")]
    index = final_index(lifetimes, blocks.address[live_blocks])
    has_block = index >= 0
    matched_blocks = live_blocks[index[has_block]]
    block = np.full(len(index), -1, np.int64)
    block[has_block] = matched_blocks
    is_unfinished = lifetimes.complete < 0
    is_missing_at_end = lifetimes.is_newest & is_unfinished & ~has_block
    is_overwritten = ~lifetimes.is_newest & is_unfinished
    has_lost_alloc = (lifetimes.begin < 0) & ~lifetimes.is_oldest
    begins = lifetimes.begin.copy()  # -1 is BEFORE_TRACE
    # The allocation came after the last free of the address; the earliest possible event is assumed.
    begins[has_lost_alloc] = steps.event[lifetimes.first[has_lost_alloc] - 1]
    ends = np.where(is_unfinished, n_events, lifetimes.complete)
    ends[is_overwritten] = steps.event[lifetimes.last[is_overwritten] + 1]
    ends[is_missing_at_end] = max(n_events - 1, 0)
    states = np.full(len(block), BlockState.INACTIVE, np.uint8)
    states[has_block] = blocks.state[matched_blocks]
    requests, lost_request_count = _request_events(lifetimes, states, ends, n_events)
    # A live block without a lifetime was allocated before the trace. If its address has earlier lifetimes in
    # the trace, its allocation was lost instead.
    unmatched = np.setdiff1d(live_blocks, matched_blocks)
    newest = np.flatnonzero(lifetimes.is_newest)
    earlier = index_of(blocks.address[unmatched], lifetimes.address[newest])
    is_reallocated = earlier >= 0
    unmatched_begins = np.full(len(unmatched), BEFORE_TRACE, np.int64)
    unmatched_begins[is_reallocated] = lifetimes.complete[newest[earlier[is_reallocated]]]
    is_pending = blocks.state[unmatched] == BlockState.PENDING_FREE
    sizes = steps.size[lifetimes.first]
    is_same_lifetime = (steps.address[1:] == steps.address[:-1]) & (
        steps.step[1:] > steps.step[:-1]
    )
    size_mismatch_count = np.count_nonzero(sizes[has_block] != blocks.requested[matched_blocks])
    size_mismatch_count += np.count_nonzero(is_same_lifetime & (steps.size[1:] != steps.size[:-1]))
    return MatchedLifetimes(
        address=np.concatenate((lifetimes.address, blocks.address[unmatched])),
        requested=np.concatenate((sizes, blocks.requested[unmatched])),
        begin=np.concatenate((begins, unmatched_begins)),
        free_request=np.concatenate((requests, np.where(is_pending, unmatched_begins, n_events))),
        end=np.concatenate((ends, np.full(len(unmatched), n_events))),
        source=np.concatenate((steps.event[lifetimes.first], np.full(len(unmatched), -1))),
        block=np.concatenate((block, unmatched)),
        counts=Contradictions(
            lost_allocations=int(
                np.count_nonzero(has_lost_alloc) + np.count_nonzero(is_reallocated)
            ),
            lost_frees=int(np.count_nonzero(is_missing_at_end | is_overwritten)),
            lost_requests=lost_request_count,
            sizes=int(size_mismatch_count),
        ),
    )


def _request_events(
    lifetimes: Lifetimes, states: Codes, ends: Ints, n_events: int
) -> tuple[Ints, int]:
    """Return the event of each free request, and the number of missing requests.

    ``states`` are those of the final blocks; INACTIVE without one.
    """
    is_missing = lifetimes.request < 0
    # The first free of an address may have been requested before the trace.
    is_before_trace = (
        is_missing & (lifetimes.begin < 0) & lifetimes.is_oldest & (lifetimes.complete >= 0)
    )
    is_incomplete = is_missing & (lifetimes.complete < 0)
    is_pending = is_incomplete & (states == BlockState.PENDING_FREE)
    is_allocated_again = ~is_missing & (states == BlockState.ALLOCATED)
    requests = np.where(
        is_missing, np.where(is_before_trace, BEFORE_TRACE, ends), lifetimes.request
    )
    requests[is_pending] = n_events - 1
    requests[is_allocated_again] = n_events
    is_lost = (is_missing & ~is_before_trace & ~is_incomplete) | is_pending | is_allocated_again
    return requests, int(np.count_nonzero(is_lost))


# --- The lifetimes of all segments of a device, and the reserved memory at every moment ------------


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
        final = self.final_segments
        if not len(final):
            return np.zeros(len(addresses), np.int32)
        index = np.maximum(np.searchsorted(final.address, addresses, side="right") - 1, 0)
        begin_addresses = final.address[index]
        is_inside = (
            (addresses >= begin_addresses)
            & (addresses - begin_addresses < final.size[index].astype(np.uint64))
            & (events >= self.final_begin[index])
        )
        return np.where(is_inside, final.pool[index], 0).astype(np.int32)


def segment_history(trace: DeviceTrace) -> SegmentHistory:
    """Return the lifetimes of all segments of a trace."""
    events, segments = trace.events, trace.segments
    codes = np.full(len(events), NO_STEP, np.uint8)
    codes[events.action == Action.SEGMENT_ALLOC] = BEGIN
    codes[events.action == Action.SEGMENT_FREE] = COMPLETE
    rows = np.flatnonzero(codes != NO_STEP)
    steps = sorted_by_address(rows, events.address[rows], codes[rows], events.size[rows])
    lifetimes = split_into_lifetimes(steps)
    # The final segment of each lifetime; -1 if the segment was released.
    plain = np.flatnonzero(~segments.expandable)
    final = final_index(lifetimes, segments.address[plain])
    lasts = final >= 0
    final[lasts] = plain[final[lasts]]
    final_begin = np.full(len(segments), BEFORE_TRACE, np.int64)
    final_begin[final[lasts]] = lifetimes.begin[lasts]
    ranges, contradiction_count = mapped_ranges(trace)
    return SegmentHistory(
        final_segments=segments,
        final_begin=final_begin,
        plain_segments=_plain_segments(trace, steps, lifetimes, final),
        mapped_ranges=_lifetimes_of(ranges),
        reserved=_reserved_curve(trace),
        contradictions=contradiction_count
        + _contradiction_count(segments, steps, lifetimes, final),
    )


def _plain_segments(
    trace: DeviceTrace, steps: LifetimeSteps, lifetimes: Lifetimes, final: Ints
) -> SegmentLifetimes:
    events, segments, n_events = trace.events, trace.segments, len(trace.events)
    source = steps.event[lifetimes.first]
    sizes = steps.size[lifetimes.first]
    lasts = final >= 0
    pools = np.maximum(events.pool[source], 0)
    pools[lasts] = segments.pool[final[lasts]]
    # Only the small pool has segments of this size.
    kinds = np.where(sizes == SMALL_SEGMENT, SegmentKind.SMALL, SegmentKind.LARGE).astype(np.uint8)
    kinds[lasts] = segments.kind[final[lasts]]
    traced = SegmentLifetimes(
        address=lifetimes.address,
        size=sizes,
        stream=events.stream[source],
        pool=pools,
        kind=kinds,
        expandable=np.zeros(len(sizes), np.bool_),
        begin=lifetimes.begin,
        end=np.where(lifetimes.complete >= 0, lifetimes.complete, n_events),
    )
    # Segments without an event last from before the trace to its end.
    rest = take(segments, np.setdiff1d(np.flatnonzero(~segments.expandable), final))
    untraced = SegmentLifetimes(
        address=rest.address,
        size=rest.size,
        stream=rest.stream,
        pool=rest.pool,
        kind=rest.kind,
        expandable=rest.expandable,
        begin=np.full(len(rest), BEFORE_TRACE, np.int64),
        end=np.full(len(rest), n_events, np.int64),
    )
    return _merged_by_address(traced, untraced)


def _contradiction_count(
    segments: Segments, steps: LifetimeSteps, lifetimes: Lifetimes, final: Ints
) -> int:
    """Count segments that are allocated or freed twice, or that differ from the final state."""
    is_repeated = ((lifetimes.begin < 0) & ~lifetimes.is_oldest) | (
        (lifetimes.complete < 0) & ~lifetimes.is_newest
    )
    exists_at_end = np.isin(lifetimes.address, segments.address[~segments.expandable])
    differs_at_end = lifetimes.is_newest & (exists_at_end != (lifetimes.complete < 0))
    first_sizes, last_sizes = steps.size[lifetimes.first], steps.size[lifetimes.last]
    is_resized = (lifetimes.begin >= 0) & (lifetimes.complete >= 0) & (first_sizes != last_sizes)
    lasts = final >= 0
    is_resized[lasts] = first_sizes[lasts] != segments.size[final[lasts]]
    return sum(map(int, map(np.count_nonzero, (is_repeated, differs_at_end, is_resized))))


def _reserved_curve(trace: DeviceTrace) -> Ints:
    actions, sizes = trace.events.action, trace.events.size
    changes = np.where(np.isin(actions, (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)), sizes, 0)
    changes -= np.where(np.isin(actions, (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)), sizes, 0)
    reserved_bytes: Ints = np.append(0, np.cumsum(changes))
    reserved_bytes += int(trace.segments.size.sum()) - reserved_bytes[-1]
    return reserved_bytes


def _lifetimes_of(ranges: list[MappedRange]) -> SegmentLifetimes:
    address, size, stream, pool, kind, begin, end = (
        zip(*ranges, strict=True) if ranges else [()] * 7
    )
    return SegmentLifetimes(
        address=np.array(address, np.uint64),
        size=np.array(size, np.int64),
        stream=np.array(stream, np.int32),
        pool=np.array(pool, np.int32),
        kind=np.array(kind, np.uint8),
        expandable=np.ones(len(ranges), np.bool_),
        begin=np.array(begin, np.int64),
        end=np.array(end, np.int64),
    )


def _join_ranges(ranges: SegmentLifetimes) -> SegmentLifetimes:
    ranges = take(ranges, np.argsort(ranges.address, kind="stable"))
    if not len(ranges):
        return ranges
    ends = ranges.address + ranges.size.astype(np.uint64)
    is_adjacent = (ranges.address[1:] == ends[:-1]) & (ranges.stream[1:] == ranges.stream[:-1])
    continues = is_adjacent & _agree(ranges.pool, UNKNOWN_POOL)
    continues &= _agree(ranges.kind, SegmentKind.UNKNOWN)
    first = np.flatnonzero(np.append(True, ~continues))
    last = np.append(first[1:], len(ranges)) - 1
    joined = take(ranges, first)
    return replace(
        joined,
        size=(ends[last] - joined.address).astype(np.int64),
        # A pool or kind that is known for one of the joined ranges applies to the whole joined range. The
        # code of an unknown pool is lower than all other codes; the code of an unknown kind is higher than
        # all others.
        pool=np.maximum(np.maximum.reduceat(ranges.pool, first), 0),
        kind=np.minimum.reduceat(ranges.kind, first),
    )


def _agree(codes: Ids | Codes, unknown: int) -> Mask:
    """Return for each item but the first whether it can be equal to the previous one."""
    before, after = codes[:-1], codes[1:]
    agrees: Mask = (before == after) | (before == unknown) | (after == unknown)
    return agrees


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


class MappedRange(NamedTuple):
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
        begin_address = max(begin_address, self.address)
        return self._replace(
            address=begin_address, size=min(end_address, self.end_address) - begin_address
        )


def mapped_ranges(trace: DeviceTrace) -> tuple[list[MappedRange], int]:
    """Return the lifetimes of all mapped ranges, and the number of contradicting events.

    The pool is UNKNOWN_POOL if neither an event nor the final state names it.
    """
    events, n_events = trace.events, len(trace.events)
    walk = _BackwardWalk()
    final = take(trace.segments, trace.segments.expandable & (trace.segments.size > 0))
    columns = (final.address, final.size, final.stream, final.pool, final.kind)
    for row in zip(*(column.tolist() for column in columns), strict=True):
        walk.undo_unmap(_mapped_range(*row, BEFORE_TRACE, n_events))
    is_map = events.action == Action.SEGMENT_MAP
    changes = np.flatnonzero(is_map | (events.action == Action.SEGMENT_UNMAP))[::-1]
    columns = (
        changes,
        is_map[changes],
        *(column[changes] for column in (events.address, events.size, events.stream, events.pool)),
    )
    for event, is_mapping, address, size, stream, pool in zip(
        *(column.tolist() for column in columns), strict=True
    ):
        if is_mapping:
            kind = SegmentKind.SMALL if size == _SMALL_PAGE_BYTES else SegmentKind.LARGE
            walk.undo_map(_mapped_range(address, size, stream, pool, kind, event, n_events))
        else:
            kind = SegmentKind.SMALL if size < _LARGE_PAGE_BYTES else SegmentKind.UNKNOWN
            walk.undo_unmap(_mapped_range(address, size, stream, pool, kind, BEFORE_TRACE, event))
    # Ranges that are still mapped began before the trace.
    return [*walk.ended_ranges, *walk.mapped_ranges], walk.contradiction_count


def _mapped_range(address: int, size: int, *attributes: int) -> MappedRange:
    # In a damaged file a range may extend beyond the address space.
    return MappedRange(address, min(size, _ADDRESS_SPACE_BYTES - address), *attributes)


class _BackwardWalk:
    """The mapped ranges at the current moment of the backward walk, and the lifetimes found so far."""

    def __init__(self) -> None:
        self.contradiction_count = 0
        self.ended_ranges: list[MappedRange] = []
        self.mapped_ranges: list[MappedRange] = []  # sorted by address, without overlap

    def undo_map(self, mapping: MappedRange) -> None:
        """Undo a mapping: the lifetimes of its parts began with this event."""
        parts = self._remove_parts(mapping.address, mapping.end_address)
        self.contradiction_count += sum(part.size for part in parts) != mapping.size
        self.ended_ranges += [
            part._replace(
                pool=mapping.pool if part.pool == UNKNOWN_POOL else part.pool,
                kind=mapping.kind if part.kind == SegmentKind.UNKNOWN else part.kind,
                begin=mapping.begin,
            )
            for part in parts
        ]

    def undo_unmap(self, unmapped: MappedRange) -> None:
        """Undo an unmapping. Parts that are mapped already must have begun after this event."""
        parts = self._remove_parts(unmapped.address, unmapped.end_address)
        self.contradiction_count += bool(parts)
        self.ended_ranges += [part._replace(begin=unmapped.end) for part in parts]
        if unmapped.size:
            insort(self.mapped_ranges, unmapped)

    def _remove_parts(self, begin_address: int, end_address: int) -> list[MappedRange]:
        if end_address <= begin_address:
            return []
        first = max(bisect_right(self.mapped_ranges, begin_address, key=_address) - 1, 0)
        end = bisect_left(self.mapped_ranges, end_address, key=_address)
        overlapping = [
            each for each in self.mapped_ranges[first:end] if each.end_address > begin_address
        ]
        del self.mapped_ranges[end - len(overlapping) : end]
        for each in overlapping:
            if each.address < begin_address:
                insort(self.mapped_ranges, each.within(each.address, begin_address))
            if each.end_address > end_address:
                insort(self.mapped_ranges, each.within(end_address, each.end_address))
        return [each.within(begin_address, end_address) for each in overlapping]


_address = itemgetter(0)
