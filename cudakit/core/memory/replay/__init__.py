"""The trace walked backwards: when each allocation began and ended, and how much was held at every moment.

The state at the end of a snapshot is complete while its trace is only the last part of history, so
everything is anchored at the end and nothing is guessed about the beginning. Pure; knows no file.

Moments: moment 0 is before the first recorded event, moment ``i + 1`` is after event ``i``, moment ``n``
is the end.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay import block_sizes
from cudakit.core.memory.replay.lifetimes import (
    BEFORE,
    BEGIN,
    COMPLETE,
    NO_STEP,
    REQUEST,
    Lifetimes,
    Rows,
    cut,
    order,
)
from cudakit.core.memory.replay.mapped import mapped_ranges
from cudakit.core.memory.replay.reserved import (
    Reserved,
    final_begins,
    segment_contradictions,
    whole_segments,
)
from cudakit.core.memory.snapshot import Action, Blocks, BlockState, DeviceTrace, Events, Snapshot

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Allocations:
    """Every allocation that a trace or a final state knows of; every array has one item each.

    ``begin``, ``free_requested`` and ``end`` are event indices: BEFORE the trace, or n (the number of
    events) for what has not happened when the snapshot is taken.
    """

    address: npt.NDArray[np.uint64]
    requested: _Ints  # bytes, as asked for
    size: _Ints  # bytes of the block; derived where ``size_known`` is False
    size_known: npt.NDArray[np.bool_]
    begin: _Ints
    free_requested: _Ints
    end: _Ints
    stream: npt.NDArray[np.int32]
    pool: npt.NDArray[np.int32]
    stack: npt.NDArray[np.int32]
    source: _Ints  # the event that gave stream and stack; -1: the final block did
    live_block: _Ints  # index into the final Blocks, -1 for what has ended

    def __len__(self) -> int:
        return len(self.address)


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes at every moment: arrays of n + 1 items, named as in torch.cuda.memory_stats()."""

    requested: _Ints  # as asked for, in use and pending free
    allocated: _Ints  # block sizes, until the free is requested
    active: _Ints  # block sizes, in use and pending free
    reserved: _Ints  # segments


@dataclass(frozen=True, slots=True)
class Inconsistencies:
    """How often a trace and the state at its end contradict each other, by kind."""

    lost_allocations: int = 0  # freed, or live at the end, without having been allocated
    lost_frees: int = 0  # allocated where something was live, or gone without a free
    lost_requests: int = 0  # a free completed that nobody had requested
    sizes: int = 0  # events of one allocation that disagree about its size
    segments: int = 0  # allocated or freed twice, or not at the end what their last event says
    over_reserved: int = 0  # moments with more in use than reserved

    @property
    def total(self) -> int:
        """The number of contradictions of every kind."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, slots=True)
class Replay:
    """What a trace says when it is walked back from the state at its end."""

    allocations: Allocations
    curves: Curves
    inconsistencies: Inconsistencies
    begins_complete: bool  # the first event starts from nothing: no history is missing

    @property
    def n_events(self) -> int:
        """The number of events of the trace."""
        return len(self.curves.reserved) - 1


def replay(snapshot: Snapshot, trace: DeviceTrace) -> Replay:
    """Give every allocation of a device its interval, and every moment its totals."""
    rows = _rows(trace.events)
    runs = cut(rows)
    matched = _match_final_blocks(rows, runs, trace.blocks, len(trace.events))
    allocations = _allocations(snapshot, trace, matched)
    curves = _curves(trace, allocations)
    segments = segment_contradictions(trace) + mapped_ranges(trace)[1]
    over = int(np.count_nonzero(curves.active > curves.reserved))
    counts = matched.counts
    return Replay(
        allocations=allocations,
        curves=curves,
        inconsistencies=Inconsistencies(
            lost_allocations=counts.lost_allocations,
            lost_frees=counts.lost_frees,
            lost_requests=counts.lost_requests,
            sizes=counts.sizes,
            segments=segments,
            over_reserved=over,
        ),
        begins_complete=bool(curves.reserved[0] == 0 and not (allocations.begin == BEFORE).any()),
    )


def _rows(events: Events) -> Rows:
    is_free = events.action == Action.FREE
    step = np.full(len(events), NO_STEP, np.uint8)
    step[events.action == Action.ALLOC] = BEGIN
    step[(events.action == Action.FREE_REQUESTED) | is_free] = REQUEST
    step[events.action == Action.FREE_COMPLETED] = COMPLETE
    event = np.flatnonzero(step != NO_STEP)
    step = step[event]
    if is_free.any():  # one event that is both steps
        twice = np.repeat(np.arange(len(event)), 1 + is_free[event])
        second = np.append(False, twice[1:] == twice[:-1])
        event, step = event[twice], np.where(second, np.uint8(COMPLETE), step[twice])
    return order(event, events.address[event], step, events.size[event])


@dataclass(frozen=True, slots=True)
class _Matched:
    """Runs brought together with the blocks that are live at the end."""

    address: npt.NDArray[np.uint64]
    requested: _Ints
    begin: _Ints
    free_requested: _Ints
    end: _Ints
    source: _Ints
    block: _Ints
    counts: Inconsistencies


def _match_final_blocks(rows: Rows, runs: Lifetimes, blocks: Blocks, n: int) -> _Matched:
    address = rows.address[runs.first]
    live = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    live = live[np.argsort(blocks.address[live], kind="stable")]
    block, open_run = _live_block_of_runs(address, runs, blocks, live)
    unfinished = runs.complete < 0
    vanished = runs.newest & unfinished & (block < 0)
    overrun = ~runs.newest & unfinished
    begin, unborn = _begins(rows, runs)
    end = np.where(unfinished, n, runs.complete)
    end[overrun] = rows.event[runs.last[overrun] + 1]
    end[vanished] = max(n - 1, 0)
    request, unrequested = _requests(runs, blocks, block, end, n)
    requested = rows.size[runs.first]
    # A live block that no open run explains was allocated before the trace, unless its address has a
    # history in the trace: then its allocation was lost.
    fresh = np.setdiff1d(live, block[open_run])
    fresh_begin, relived = _begins_of_unexplained(address, runs, blocks, fresh)
    known = block >= 0
    disagree = np.count_nonzero(requested[known] != blocks.requested[block[known]])
    disagree += _size_disagreements(rows)
    fresh_pending = blocks.state[fresh] == BlockState.PENDING_FREE
    return _Matched(
        address=np.concatenate((address, blocks.address[fresh])),
        requested=np.concatenate((requested, blocks.requested[fresh])),
        begin=np.concatenate((begin, fresh_begin)),
        free_requested=np.concatenate((request, np.where(fresh_pending, fresh_begin, n))),
        end=np.concatenate((end, np.full(len(fresh), n))),
        source=np.concatenate((rows.event[runs.first], np.full(len(fresh), -1))),
        block=np.concatenate((block, fresh)),
        counts=Inconsistencies(
            lost_allocations=unborn + relived,
            lost_frees=int(np.count_nonzero(vanished | overrun)),
            lost_requests=unrequested,
            sizes=int(disagree),
        ),
    )


def _live_block_of_runs(
    address: npt.NDArray[np.uint64], runs: Lifetimes, blocks: Blocks, live: npt.NDArray[np.intp]
) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Find the final block that each run's allocation is, and the runs that have one."""
    block = np.full(len(address), -1, np.int64)
    if not len(live):
        return block, np.zeros(len(address), np.bool_)
    place = np.minimum(np.searchsorted(blocks.address[live], address), len(live) - 1)
    is_open = runs.newest & (runs.complete < 0) & (blocks.address[live][place] == address)
    block[is_open] = live[place[is_open]]
    return block, is_open


def _begins(rows: Rows, runs: Lifetimes) -> tuple[_Ints, int]:
    """Find the event that each run begins at, and how many began without a recorded allocation."""
    lost = (runs.begin < 0) & ~runs.oldest
    begin = runs.begin.copy()  # -1 is BEFORE
    # It was allocated at some moment since the address was last freed: the earliest is taken.
    begin[lost] = rows.event[runs.first[lost] - 1]
    return begin, int(np.count_nonzero(lost))


def _requests(
    runs: Lifetimes, blocks: Blocks, block: _Ints, end: _Ints, n: int
) -> tuple[_Ints, int]:
    """Find when each run's free was requested, and how many completed without a request."""
    missing = runs.request < 0
    # The oldest run of an address may have been requested before the trace began.
    before = missing & (runs.begin < 0) & runs.oldest & (runs.complete >= 0)
    never = missing & (runs.complete < 0)
    request = np.where(missing, np.where(before, BEFORE, end), runs.request)
    known = block >= 0
    state = np.full(len(block), BlockState.INACTIVE, np.uint8)
    state[known] = blocks.state[block[known]]
    pending = never & (state == BlockState.PENDING_FREE)
    revived = ~missing & (state == BlockState.ALLOCATED)
    request[never] = end[never]
    request[pending] = n - 1
    request[revived] = n
    lost = (missing & ~before & ~never) | pending | revived
    return request, int(np.count_nonzero(lost))


def _begins_of_unexplained(
    address: npt.NDArray[np.uint64], runs: Lifetimes, blocks: Blocks, fresh: npt.NDArray[np.intp]
) -> tuple[_Ints, int]:
    begin = np.full(len(fresh), BEFORE, np.int64)
    newest = np.flatnonzero(runs.newest)
    if not len(newest) or not len(fresh):
        return begin, 0
    wanted = blocks.address[fresh]
    place = np.minimum(np.searchsorted(address[newest], wanted), len(newest) - 1)
    relived = address[newest][place] == wanted
    begin[relived] = runs.complete[newest[place[relived]]]
    return begin, int(np.count_nonzero(relived))


def _size_disagreements(rows: Rows) -> int:
    same = (rows.address[1:] == rows.address[:-1]) & (rows.step[1:] > rows.step[:-1])
    return int(np.count_nonzero(same & (rows.size[1:] != rows.size[:-1])))


def _allocations(snapshot: Snapshot, trace: DeviceTrace, matched: _Matched) -> Allocations:
    events, blocks = trace.events, trace.blocks
    from_event = matched.source >= 0
    live = matched.block >= 0
    source = matched.source[from_event]
    block = matched.block[live]
    stream = np.zeros(len(matched.address), np.int32)
    stack = np.zeros(len(matched.address), np.int32)
    stream[live] = trace.segments.stream[blocks.segment[block]]
    stream[from_event] = events.stream[source]
    # Of what was allocated before the trace, only the free is recorded: its stack is somebody else's.
    is_allocation = events.action[source] == Action.ALLOC
    stack[from_event] = np.where(is_allocation, events.stack[source], 0)
    # Traces recorded with context="state" have stacks on the live blocks only.
    better = blocks.stack[block]
    stack[live] = np.where((stack[live] == 0) | (better != 0), better, stack[live])
    requested = matched.requested.copy()
    requested[live] = blocks.requested[block]
    size = block_sizes.rounded(requested, snapshot.settings)
    size[live] = blocks.size[block]
    allocations = Allocations(
        address=matched.address,
        requested=requested,
        size=size,
        size_known=live,
        begin=matched.begin,
        free_requested=matched.free_requested,
        end=matched.end,
        stream=stream,
        pool=_pools(trace, matched),
        stack=stack,
        source=matched.source,
        live_block=matched.block,
    )
    return _with_unsplit_sizes(snapshot, trace, allocations)


def _with_unsplit_sizes(
    snapshot: Snapshot, trace: DeviceTrace, allocations: Allocations
) -> Allocations:
    """Replace derived sizes of large blocks by those that the allocator's splitting leaves."""
    if snapshot.settings.get("expandable_segments") is True:
        return allocations  # then the allocator splits wherever it can (``should_split``)
    segments = whole_segments(trace)
    large = np.flatnonzero(
        (allocations.size > block_sizes.SMALL_REQUEST) & _inside(allocations.address, segments)
    )
    if allocations.size_known[large].all():
        return allocations
    grown = block_sizes.unsplit(
        block_sizes.Tenancy(
            allocations.address[large],
            allocations.size[large],
            allocations.begin[large],
            allocations.end[large],
        ),
        block_sizes.Tenancy(segments.address, segments.size, segments.begin, segments.end),
        max_split=block_sizes.max_split(snapshot.settings),
    )
    size = allocations.size.copy()
    size[large] = np.where(allocations.size_known[large], size[large], grown)
    return replace(allocations, size=size)


def _inside(address: npt.NDArray[np.uint64], segments: Reserved) -> npt.NDArray[np.bool_]:
    """Say which addresses ever lay in a segment that was allocated in one piece."""
    if not len(segments):
        return np.zeros(len(address), np.bool_)
    # The furthest end of all segments that start at or below: segments of different times overlap.
    reach = np.maximum.accumulate(segments.address + segments.size.astype(np.uint64))
    place = np.searchsorted(segments.address, address, side="right") - 1
    return (place >= 0) & (address < reach[np.maximum(place, 0)])


def _pools(trace: DeviceTrace, matched: _Matched) -> npt.NDArray[np.int32]:
    """Find the pool of each allocation: as its event says (torch 2.12), else that of its segment."""
    recorded = matched.source >= 0
    event = np.where(recorded, matched.source, len(trace.events))
    pool = pool_at(trace, matched.address, event)
    said = trace.events.pool[matched.source[recorded]]
    pool[np.flatnonzero(recorded)[said >= 0]] = said[said >= 0]
    return pool


def pool_at(
    trace: DeviceTrace, address: npt.NDArray[np.uint64], event: _Ints
) -> npt.NDArray[np.int32]:
    """Find the pool of the segment that holds each address at an event.

    Of segments that are gone at the end nothing tells the pool: they count as the default pool's.
    """
    segments = trace.segments
    if not len(segments):
        return np.zeros(len(address), np.int32)
    place = np.maximum(np.searchsorted(segments.address, address, side="right") - 1, 0)
    inside = (
        (address >= segments.address[place])
        & (address - segments.address[place] < segments.size[place].astype(np.uint64))
        & (event >= final_begins(trace)[place])
    )
    return np.where(inside, segments.pool[place], 0).astype(np.int32)


def _curves(trace: DeviceTrace, allocations: Allocations) -> Curves:
    n = len(trace.events)
    reserve = _signed_segment_sizes(trace.events)
    reserved_end = int(trace.segments.size.sum())
    reserved = np.empty(n + 1, np.int64)
    np.cumsum(reserve, out=reserved[1:])
    reserved[0] = 0
    reserved += reserved_end - (reserved[n] if n else 0)
    begin, request, end = allocations.begin, allocations.free_requested, allocations.end
    return Curves(
        requested=_running(n, begin, end, allocations.requested),
        allocated=_running(n, begin, request, allocations.size),
        active=_running(n, begin, end, allocations.size),
        reserved=reserved,
    )


def _running(n: int, begin: _Ints, end: _Ints, amount: _Ints) -> _Ints:
    """Sum amounts over their intervals: held from the moment after ``begin`` to that before ``end``."""
    change = np.bincount(begin + 1, weights=amount, minlength=n + 2)
    change -= np.bincount(end + 1, weights=amount, minlength=n + 2)
    # Sums of bytes stay below 2**53, where float64 is exact.
    return np.cumsum(change[: n + 1]).astype(np.int64)


def _signed_segment_sizes(events: Events) -> _Ints:
    grows = (events.action == Action.SEGMENT_ALLOC) | (events.action == Action.SEGMENT_MAP)
    shrinks = (events.action == Action.SEGMENT_FREE) | (events.action == Action.SEGMENT_UNMAP)
    return np.where(grows, events.size, 0) - np.where(shrinks, events.size, 0)
