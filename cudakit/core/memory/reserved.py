"""Memory reserved from the device: the lives of segments, and the ranges mapped at a moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.lifetimes import BEGIN, COMPLETE, NO_STEP, Lifetimes, Rows, cut, order
from cudakit.core.memory.snapshot import Action, DeviceTrace, SegmentKind

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
    ended = Reserved(
        address=rows.address[lives.first],
        size=size,
        stream=events.stream[source],
        pool=pool.astype(np.int32),
        kind=np.where(size == _SMALL_SEGMENT, SegmentKind.SMALL, SegmentKind.LARGE).astype(
            np.uint8
        ),
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
    at_end = np.isin(rows.address[lives.first], trace.segments.address)
    differ = lives.newest & (at_end != (lives.complete < 0))
    return int(np.count_nonzero(twice) + np.count_nonzero(differ))


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
        begin=np.full(len(segments), -1, np.int64),
        end=np.full(len(segments), n, np.int64),
    )


def mapped_at(trace: DeviceTrace, moment: int) -> Reserved:
    """Give the expandable ranges mapped at a moment: those of the end, with later changes undone.

    Neighbouring ranges of one stream and pool are one piece, as torch reports them.
    """
    changes = _later_mappings(trace, moment)
    final = final_segments(trace)
    final = final.take(final.expandable)
    if not len(final) and not len(changes):
        return final
    edges = _edges(trace, changes, final)
    cells = _Cells(edges)
    for address, size, stream, pool, kind in zip(
        final.address.tolist(),
        final.size.tolist(),
        final.stream.tolist(),
        final.pool.tolist(),
        final.kind.tolist(),
        strict=True,
    ):
        cells.map(address, size, (stream, pool, kind))
    events = trace.events
    for event in changes[::-1].tolist():
        address, size = int(events.address[event]), int(events.size[event])
        if events.action[event] == Action.SEGMENT_MAP:
            cells.unmap(address, size)
        else:
            pool = max(int(events.pool[event]), 0)
            cells.map(address, size, (int(events.stream[event]), pool, SegmentKind.UNKNOWN))
    return cells.pieces(len(events))


def _segment_rows(trace: DeviceTrace) -> Rows:
    events = trace.events
    step = np.full(len(events), NO_STEP, np.uint8)
    step[events.action == Action.SEGMENT_ALLOC] = BEGIN
    step[events.action == Action.SEGMENT_FREE] = COMPLETE
    event = np.flatnonzero(step != NO_STEP)
    return order(event, events.address[event], step[event], events.size[event])


def _final_segments(trace: DeviceTrace, rows: Rows, lives: Lifetimes) -> _Ints:
    """Find the segment of the final state that each life is; -1 for what has ended."""
    address = trace.segments.address
    final = np.full(len(lives.first), -1, np.int64)
    if len(address):
        wanted = rows.address[lives.first]
        place = np.minimum(np.searchsorted(address, wanted), len(address) - 1)
        alive = lives.newest & (lives.complete < 0) & (address[place] == wanted)
        final[alive] = place[alive]
    return final


def _later_mappings(trace: DeviceTrace, moment: int) -> npt.NDArray[np.intp]:
    action = trace.events.action[moment:]
    mapping = (action == Action.SEGMENT_MAP) | (action == Action.SEGMENT_UNMAP)
    return np.flatnonzero(mapping) + moment


def _edges(
    trace: DeviceTrace, changes: npt.NDArray[np.intp], final: Reserved
) -> npt.NDArray[np.uint64]:
    starts = np.concatenate((trace.events.address[changes], final.address))
    sizes = np.concatenate((trace.events.size[changes], final.size)).astype(np.uint64)
    return np.unique(np.concatenate((starts, starts + sizes)))


class _Cells:
    """The address space cut wherever a mapping ever began or ended; a cell is mapped or not."""

    def __init__(self, edges: npt.NDArray[np.uint64]) -> None:
        self._edges = edges
        self._owner = np.zeros(max(len(edges) - 1, 0), np.int32)  # 0: not mapped
        self._owners: dict[tuple[int, int, int], int] = {}

    def map(self, address: int, size: int, owner: tuple[int, int, int]) -> None:
        """Map a range for a (stream, pool, kind)."""
        self._owner[self._range(address, size)] = self._owners.setdefault(
            owner, len(self._owners) + 1
        )

    def unmap(self, address: int, size: int) -> None:
        """Unmap a range."""
        self._owner[self._range(address, size)] = 0

    def _range(self, address: int, size: int) -> slice:
        bounds = np.array([address, address + size], np.uint64)
        first, last = np.searchsorted(self._edges, bounds).tolist()
        return slice(first, last)

    def pieces(self, n_events: int) -> Reserved:
        """Join neighbouring cells of one owner."""
        change = np.flatnonzero(np.diff(self._owner, prepend=0, append=0))
        owner = self._owner[change[:-1]] if len(change) else self._owner[:0]
        mapped = np.flatnonzero(owner)
        start, end = self._edges[change[mapped]], self._edges[change[mapped + 1]]
        keys = list(self._owners)
        owners = np.array([keys[i - 1] for i in owner[mapped].tolist()], np.int64).reshape(-1, 3)
        return Reserved(
            address=start,
            size=(end - start).astype(np.int64),
            stream=owners[:, 0].astype(np.int32),
            pool=owners[:, 1].astype(np.int32),
            kind=owners[:, 2].astype(np.uint8),
            expandable=np.ones(len(start), np.bool_),
            begin=np.full(len(start), -1, np.int64),
            end=np.full(len(start), n_events, np.int64),
        )


def _join(first: Reserved, second: Reserved) -> Reserved:
    both = Reserved(
        *(
            np.concatenate((getattr(first, name), getattr(second, name)))
            for name in Reserved.__slots__
        )
    )
    return both.take(np.argsort(both.address, kind="stable"))
