"""Memory reserved from the device: the lives of the segments that were allocated in one piece."""

from __future__ import annotations

from dataclasses import dataclass

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
from cudakit.core.memory.snapshot import DeviceTrace, SegmentKind
from cudakit.torch_rules.actions import Action

_Ints = npt.NDArray[np.int64]

# kSmallBuffer (c10/cuda/CUDACachingAllocator.cpp): only the small pool has segments of this size.
_SMALL_SEGMENT = 2 << 20


@dataclass(frozen=True, slots=True)
class Reserved:
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

    def take(self, index: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Reserved:
        """Select pieces."""
        return Reserved(
            self.address[index],
            self.size[index],
            self.stream[index],
            self.pool[index],
            self.kind[index],
            self.expandable[index],
            self.begin[index],
            self.end[index],
        )


def whole_segments(trace: DeviceTrace) -> Reserved:
    """Give every segment of a trace that was allocated in one piece its life."""
    events = trace.events
    rows = _segment_rows(trace)
    lives = cut(rows)
    n = len(events)
    final = _final_segments(trace, rows, lives)
    source = rows.event[lives.first]
    size = rows.size[lives.first]
    pool = np.where(events.pool[source] >= 0, events.pool[source], 0)
    pool[final >= 0] = trace.segments.pool[final[final >= 0]]
    kind = np.where(size == _SMALL_SEGMENT, SegmentKind.SMALL, SegmentKind.LARGE)
    kind[final >= 0] = trace.segments.kind[final[final >= 0]]
    ended = Reserved(
        address=rows.address[lives.first],
        size=size,
        stream=events.stream[source],
        pool=pool.astype(np.int32),
        kind=kind.astype(np.uint8),
        expandable=np.zeros(len(size), np.bool_),
        begin=lives.begin,
        end=np.where(lives.complete >= 0, lives.complete, n),
    )
    kept = final_segments(trace)
    return _join(ended, kept.take(np.setdiff1d(np.flatnonzero(~kept.expandable), final)))


def segment_contradictions(trace: DeviceTrace) -> int:
    """Count segments allocated or freed twice, or not there at the end as their last event says."""
    rows = _segment_rows(trace)
    lives = cut(rows)
    twice = ((lives.begin < 0) & ~lives.oldest) | ((lives.complete < 0) & ~lives.newest)
    final = final_segments(trace)
    at_end = np.isin(rows.address[lives.first], final.address[~final.expandable])
    differ = lives.newest & (at_end != (lives.complete < 0))
    resized = (lives.begin >= 0) & (lives.complete >= 0)
    resized &= rows.size[lives.first] != rows.size[lives.last]
    place = _final_segments(trace, rows, lives)
    kept = place >= 0
    resized[kept] = rows.size[lives.first[kept]] != final.size[place[kept]]
    return int(sum(np.count_nonzero(found) for found in (twice, differ, resized)))


def final_segments(trace: DeviceTrace) -> Reserved:
    """Give the segments of the final state as if reserved since before the trace."""
    segments, n = trace.segments, len(trace.events)
    return Reserved(
        address=segments.address,
        size=segments.size,
        stream=segments.stream,
        pool=segments.pool,
        kind=segments.kind,
        expandable=segments.expandable,
        begin=np.full(len(segments), BEFORE, np.int64),
        end=np.full(len(segments), n, np.int64),
    )


def final_begins(trace: DeviceTrace) -> _Ints:
    """Find the event that allocated each segment of the final state; BEFORE for older and expandable ones."""
    rows = _segment_rows(trace)
    lives = cut(rows)
    final = _final_segments(trace, rows, lives)
    begin = np.full(len(trace.segments), BEFORE, np.int64)
    begin[final[final >= 0]] = lives.begin[final >= 0]
    return begin


def _segment_rows(trace: DeviceTrace) -> Rows:
    events = trace.events
    step = np.full(len(events), NO_STEP, np.uint8)
    step[events.action == Action.SEGMENT_ALLOC] = BEGIN
    step[events.action == Action.SEGMENT_FREE] = COMPLETE
    event = np.flatnonzero(step != NO_STEP)
    return order(event, events.address[event], step[event], events.size[event])


def _final_segments(trace: DeviceTrace, rows: Rows, lives: Lifetimes) -> _Ints:
    """Find the segment of the final state that each life is; -1 for what has ended."""
    whole = np.flatnonzero(~trace.segments.expandable)
    address = trace.segments.address[whole]
    final = np.full(len(lives.first), -1, np.int64)
    if len(whole):
        wanted = rows.address[lives.first]
        place = np.minimum(np.searchsorted(address, wanted), len(whole) - 1)
        alive = lives.newest & (lives.complete < 0) & (address[place] == wanted)
        final[alive] = whole[place[alive]]
    return final


def _join(first: Reserved, second: Reserved) -> Reserved:
    both = Reserved(
        *(
            np.concatenate((getattr(first, name), getattr(second, name)))
            for name in Reserved.__slots__
        )
    )
    return both.take(np.argsort(both.address, kind="stable"))
