"""The segments of a device with their lives: what was reserved at every moment, computed once for a trace."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay.lifetimes import (
    BEFORE,
    BEGIN,
    COMPLETE,
    NO_STEP,
    Lifetimes,
    Rows,
    cut,
    order,
)
from cudakit.core.memory.replay.mapped_ranges import UNKNOWN_POOL, MappedRange, mapped_ranges
from cudakit.core.memory.snapshot import DeviceTrace, SegmentKind, Segments, concatenated, take
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.sizes import SMALL_SEGMENT

_Ints = npt.NDArray[np.int64]
_Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class SegmentLives:
    """Pieces of reserved memory in address order; every array has one item each.

    ``begin`` and ``end`` are event indices, as in ``replay.Allocations``.
    """

    address: npt.NDArray[np.uint64]
    size: _Ints
    stream: npt.NDArray[np.int32]
    pool: npt.NDArray[np.int32]
    kind: npt.NDArray[np.uint8]
    expandable: npt.NDArray[np.bool_]
    begin: _Ints
    end: _Ints

    def __len__(self) -> int:
        return len(self.address)

    def at(self, moment: int) -> SegmentLives:
        """Select the pieces that were reserved at a moment."""
        return take(self, (self.begin < moment) & (moment <= self.end))


@dataclass(frozen=True, slots=True)
class SegmentHistory:
    """Everything that a trace says of reserved memory."""

    final: Segments  # the state at the end
    final_begin: _Ints  # by final segment: the event that allocated it; BEFORE for expandable ones
    whole: SegmentLives  # allocated in one piece
    mapped: SegmentLives  # mapped ranges of expandable segments; pool -1 where it is unknown
    reserved: _Ints  # bytes at every moment: n + 1 items
    contradictions: int  # events of segments that disagree with each other or with the final state

    def at(self, moment: int) -> SegmentLives:
        """Return the segments of a moment, by address, as torch reports them."""
        return _joined(self.whole.at(moment), self.runs_at(moment))

    def runs_at(self, moment: int) -> SegmentLives:
        """Return the expandable segments of a moment: runs of mapped ranges."""
        return _runs(self.mapped.at(moment))

    def pool_at(self, address: npt.NDArray[np.uint64], event: _Ints) -> npt.NDArray[np.int32]:
        """Return the pool of the segment that holds each address at an event.

        The pool of a segment that is gone at the end is unknown and counts as the default pool.
        """
        final = self.final
        if not len(final):
            return np.zeros(len(address), np.int32)
        place = np.maximum(np.searchsorted(final.address, address, side="right") - 1, 0)
        inside = (
            (address >= final.address[place])
            & (address - final.address[place] < final.size[place].astype(np.uint64))
            & (event >= self.final_begin[place])
        )
        return np.where(inside, final.pool[place], 0).astype(np.int32)


def segment_history(trace: DeviceTrace) -> SegmentHistory:
    """Walk back through the events of segments, once for each kind of segment."""
    rows = _segment_rows(trace)
    lives = cut(rows)
    final = _final_segment_of(trace.segments, rows, lives)
    final_begin = np.full(len(trace.segments), BEFORE, np.int64)
    final_begin[final[final >= 0]] = lives.begin[final >= 0]
    ranges, contradictions = mapped_ranges(trace)
    return SegmentHistory(
        final=trace.segments,
        final_begin=final_begin,
        whole=_whole_segments(trace, rows, lives, final),
        mapped=_lives_of(ranges),
        reserved=_reserved_curve(trace),
        contradictions=contradictions + _contradictions(trace.segments, rows, lives, final),
    )


def _segment_rows(trace: DeviceTrace) -> Rows:
    events = trace.events
    step = np.full(len(events), NO_STEP, np.uint8)
    step[events.action == Action.SEGMENT_ALLOC] = BEGIN
    step[events.action == Action.SEGMENT_FREE] = COMPLETE
    event = np.flatnonzero(step != NO_STEP)
    return order(event, events.address[event], step[event], events.size[event])


def _final_segment_of(segments: Segments, rows: Rows, lives: Lifetimes) -> _Ints:
    """Return the segment of the final state that each life is; -1 if it has ended."""
    whole = np.flatnonzero(~segments.expandable)
    address = segments.address[whole]
    final = np.full(len(lives.first), -1, np.int64)
    if len(whole):
        wanted = rows.address[lives.first]
        place = np.minimum(np.searchsorted(address, wanted), len(whole) - 1)
        alive = lives.newest & (lives.complete < 0) & (address[place] == wanted)
        final[alive] = whole[place[alive]]
    return final


def _whole_segments(trace: DeviceTrace, rows: Rows, lives: Lifetimes, final: _Ints) -> SegmentLives:
    """Return the life of every segment that was allocated in one piece."""
    events, segments, n = trace.events, trace.segments, len(trace.events)
    source = rows.event[lives.first]
    size = rows.size[lives.first]
    kept = final >= 0
    pool = np.where(events.pool[source] >= 0, events.pool[source], 0)
    pool[kept] = segments.pool[final[kept]]
    # Only the small pool has segments of this size.
    kind = np.where(size == SMALL_SEGMENT, SegmentKind.SMALL, SegmentKind.LARGE)
    kind[kept] = segments.kind[final[kept]]
    from_events = SegmentLives(
        address=rows.address[lives.first],
        size=size,
        stream=events.stream[source],
        pool=pool.astype(np.int32),
        kind=kind.astype(np.uint8),
        expandable=np.zeros(len(size), np.bool_),
        begin=lives.begin,
        end=np.where(lives.complete >= 0, lives.complete, n),
    )
    without_events = np.setdiff1d(np.flatnonzero(~segments.expandable), final)
    return _joined(from_events, take(_final_lives(segments, n), without_events))


def _final_lives(segments: Segments, n: int) -> SegmentLives:
    """Return the segments of the final state as if reserved since before the trace."""
    return SegmentLives(
        address=segments.address,
        size=segments.size,
        stream=segments.stream,
        pool=segments.pool,
        kind=segments.kind,
        expandable=segments.expandable,
        begin=np.full(len(segments), BEFORE, np.int64),
        end=np.full(len(segments), n, np.int64),
    )


def _contradictions(segments: Segments, rows: Rows, lives: Lifetimes, final: _Ints) -> int:
    """Count segments allocated or freed twice, or not there at the end as their last event says."""
    twice = ((lives.begin < 0) & ~lives.oldest) | ((lives.complete < 0) & ~lives.newest)
    at_end = np.isin(rows.address[lives.first], segments.address[~segments.expandable])
    differ = lives.newest & (at_end != (lives.complete < 0))
    resized = (lives.begin >= 0) & (lives.complete >= 0)
    resized &= rows.size[lives.first] != rows.size[lives.last]
    kept = final >= 0
    resized[kept] = rows.size[lives.first[kept]] != segments.size[final[kept]]
    return int(sum(np.count_nonzero(found) for found in (twice, differ, resized)))


def _reserved_curve(trace: DeviceTrace) -> _Ints:
    """Return the reserved bytes at every moment, anchored at the final state."""
    action, size = trace.events.action, trace.events.size
    grows = (action == Action.SEGMENT_ALLOC) | (action == Action.SEGMENT_MAP)
    shrinks = (action == Action.SEGMENT_FREE) | (action == Action.SEGMENT_UNMAP)
    n = len(action)
    reserved = np.zeros(n + 1, np.int64)
    np.cumsum(np.where(grows, size, 0) - np.where(shrinks, size, 0), out=reserved[1:])
    reserved += int(trace.segments.size.sum()) - reserved[n]
    return reserved


def _lives_of(ranges: list[MappedRange]) -> SegmentLives:
    return SegmentLives(
        address=np.array([found.address for found in ranges], np.uint64),
        size=np.array([found.size for found in ranges], np.int64),
        stream=np.array([found.stream for found in ranges], np.int32),
        pool=np.array([found.pool for found in ranges], np.int32),
        kind=np.array([found.kind for found in ranges], np.uint8),
        expandable=np.ones(len(ranges), np.bool_),
        begin=np.array([found.begin for found in ranges], np.int64),
        end=np.array([found.end for found in ranges], np.int64),
    )


def _runs(ranges: SegmentLives) -> SegmentLives:
    """Join adjacent ranges into runs."""
    ranges = take(ranges, np.argsort(ranges.address, kind="stable"))
    if not len(ranges):
        return ranges
    stop = ranges.address + ranges.size.astype(np.uint64)
    starts = np.flatnonzero(np.append(True, ~_continues(ranges, stop)))
    last = np.append(starts[1:], len(ranges)) - 1
    runs = take(ranges, starts)
    return replace(
        runs,
        size=(stop[last] - runs.address).astype(np.int64),
        # What is known of one range holds for its run: unknown is the lowest pool and the highest kind.
        pool=np.maximum(np.maximum.reduceat(ranges.pool, starts), 0),
        kind=np.minimum.reduceat(ranges.kind, starts),
    )


def _continues(ranges: SegmentLives, stop: npt.NDArray[np.uint64]) -> _Mask:
    """Return for each range but the first whether it continues the one before it."""
    pool, kind = ranges.pool, ranges.kind
    same_pool = pool[1:] == pool[:-1]
    same_pool |= (pool[1:] == UNKNOWN_POOL) | (pool[:-1] == UNKNOWN_POOL)
    same_kind = kind[1:] == kind[:-1]
    same_kind |= (kind[1:] == SegmentKind.UNKNOWN) | (kind[:-1] == SegmentKind.UNKNOWN)
    adjacent = (ranges.address[1:] == stop[:-1]) & (ranges.stream[1:] == ranges.stream[:-1])
    continues: _Mask = adjacent & same_pool & same_kind
    return continues


def _joined(first: SegmentLives, second: SegmentLives) -> SegmentLives:
    both = concatenated(first, second)
    return take(both, np.argsort(both.address, kind="stable"))
