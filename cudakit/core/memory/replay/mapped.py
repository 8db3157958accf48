"""Expandable segments: the ranges of addresses that were mapped, and when.

Walked backwards like everything else: the final state is complete, so undoing the later mappings tells
what was mapped at any moment before.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from cudakit.core.memory.replay.lifetimes import BEFORE
from cudakit.core.memory.replay.reserved import Reserved, final_segments
from cudakit.core.memory.snapshot import DeviceTrace, SegmentKind
from cudakit.torch_rules.actions import Action

# The pages of expandable segments (c10/cuda/CUDACachingAllocator.cpp: kSmallBuffer, kLargeBuffer). A
# request of the small pool never lacks more than one page.
_SMALL_PAGE = 2 << 20
_LARGE_PAGE = 20 << 20

_ADDRESSES = 1 << 64
_UNSAID = -1  # the pool of an event that does not name it


@dataclass(frozen=True, slots=True)
class _Range:
    """One life of a range of addresses; the fields are those of Reserved."""

    address: int
    size: int
    stream: int
    pool: int
    kind: int
    begin: int
    end: int

    @property
    def stop(self) -> int:
        return self.address + self.size

    def within(self, start: int, stop: int) -> _Range:
        """Cut to what lies in a range."""
        start, stop = max(start, self.address), min(stop, self.stop)
        return replace(self, address=start, size=stop - start)


def mapped_ranges(trace: DeviceTrace) -> tuple[Reserved, int]:
    """Give every range that was mapped its life, and count the mappings that contradict each other.

    The pool is -1 where neither an event nor the final state names it.
    """
    events, n = trace.events, len(trace.events)
    walk = _BackwardWalk(_final_ranges(trace))
    is_map = events.action == Action.SEGMENT_MAP
    changes = np.flatnonzero(is_map | (events.action == Action.SEGMENT_UNMAP))[::-1]
    for event, maps, address, size, stream, pool in zip(
        changes.tolist(),
        is_map[changes].tolist(),
        events.address[changes].tolist(),
        events.size[changes].tolist(),
        events.stream[changes].tolist(),
        events.pool[changes].tolist(),
        strict=True,
    ):
        if maps:
            kind = SegmentKind.SMALL if size == _SMALL_PAGE else SegmentKind.LARGE
            walk.undo_map(_range(address, size, stream, pool, kind, event, n))
        else:
            kind = SegmentKind.SMALL if size < _LARGE_PAGE else SegmentKind.UNKNOWN
            walk.undo_unmap(_range(address, size, stream, pool, kind, BEFORE, event))
    return _reserved(walk.lives()), walk.contradictions


def mapped_at(trace: DeviceTrace, moment: int) -> Reserved:
    """Give the expandable segments of a moment: runs of mapped ranges, as torch reports them."""
    return runs_at(mapped_ranges(trace)[0], moment)


def runs_at(ranges: Reserved, moment: int) -> Reserved:
    """Join the ranges mapped at a moment to runs."""
    ranges = ranges.take((ranges.begin < moment) & (moment <= ranges.end))
    ranges = ranges.take(np.argsort(ranges.address, kind="stable"))
    if not len(ranges):
        return ranges
    stop = ranges.address + ranges.size.astype(np.uint64)
    starts = np.flatnonzero(np.append(True, ~_joins(ranges, stop)))
    last = np.append(starts[1:], len(ranges)) - 1
    runs = ranges.take(starts)
    return replace(
        runs,
        size=(stop[last] - runs.address).astype(np.int64),
        # What one range of a run knows holds for all: unsaid is the lowest pool and the highest kind.
        pool=np.maximum(np.maximum.reduceat(ranges.pool, starts), 0),
        kind=np.minimum.reduceat(ranges.kind, starts),
    )


def _joins(ranges: Reserved, stop: np.typing.NDArray[np.uint64]) -> np.typing.NDArray[np.bool_]:
    """Say of each range but the first whether it continues the one before it."""
    pool, kind = ranges.pool, ranges.kind
    joins: np.typing.NDArray[np.bool_] = (
        (ranges.address[1:] == stop[:-1])
        & (ranges.stream[1:] == ranges.stream[:-1])
        & ((pool[1:] == pool[:-1]) | (pool[1:] == _UNSAID) | (pool[:-1] == _UNSAID))
        & (
            (kind[1:] == kind[:-1])
            | (kind[1:] == SegmentKind.UNKNOWN)
            | (kind[:-1] == SegmentKind.UNKNOWN)
        )
    )
    return joins


def _final_ranges(trace: DeviceTrace) -> Iterator[_Range]:
    final = final_segments(trace)
    final = final.take(final.expandable & (final.size > 0))
    columns = (getattr(final, name).tolist() for name in _Range.__slots__)
    return (_range(*row) for row in zip(*columns, strict=True))


def _range(address: int, size: int, *more: int) -> _Range:
    # A damaged file may name a range that leaves the address space.
    return _Range(address, min(size, _ADDRESSES - address), *more)


def _reserved(ranges: Iterable[_Range]) -> Reserved:
    rows = list(ranges)
    return Reserved(
        address=np.array([row.address for row in rows], np.uint64),
        size=np.array([row.size for row in rows], np.int64),
        stream=np.array([row.stream for row in rows], np.int32),
        pool=np.array([row.pool for row in rows], np.int32),
        kind=np.array([row.kind for row in rows], np.uint8),
        expandable=np.ones(len(rows), np.bool_),
        begin=np.array([row.begin for row in rows], np.int64),
        end=np.array([row.end for row in rows], np.int64),
    )


class _BackwardWalk:
    """The ranges mapped at the moment that a walk backwards has come to, and the lives behind it."""

    def __init__(self, final: Iterable[_Range]) -> None:
        self.contradictions = 0
        self._begun: list[_Range] = []
        self._mapped: list[_Range] = []  # by address, without overlap
        self._starts: list[int] = []
        for piece in final:
            self.undo_unmap(piece)

    def undo_map(self, mapping: _Range) -> None:
        """Let what lies in a range begin with its mapping."""
        inside = self._take(mapping.address, mapping.stop)
        self.contradictions += sum(piece.size for piece in inside) != mapping.size
        for piece in inside:
            known = piece.kind != SegmentKind.UNKNOWN
            self._begun.append(
                replace(
                    piece,
                    pool=piece.pool if piece.pool != _UNSAID else mapping.pool,
                    kind=piece.kind if known else mapping.kind,
                    begin=mapping.begin,
                )
            )

    def undo_unmap(self, mapped: _Range) -> None:
        """Map a range that is unmapped later. What is there already must have begun since."""
        there = self._take(mapped.address, mapped.stop)
        self.contradictions += bool(there)
        self._begun += [replace(piece, begin=mapped.end) for piece in there]
        if mapped.size:
            self._put(mapped)

    def lives(self) -> list[_Range]:
        """Give every life met; what is still mapped began before the trace."""
        return [*self._begun, *self._mapped]

    def _take(self, start: int, stop: int) -> list[_Range]:
        """Remove what lies in a range; pieces that reach beyond it are cut."""
        if stop <= start:
            return []
        first = max(bisect_right(self._starts, start) - 1, 0)
        last = bisect_left(self._starts, stop)
        met = [piece for piece in self._mapped[first:last] if piece.stop > start]
        first = last - len(met)
        del self._mapped[first:last], self._starts[first:last]
        for piece in met:
            if piece.address < start:
                self._put(piece.within(piece.address, start))
            if piece.stop > stop:
                self._put(piece.within(stop, piece.stop))
        return [piece.within(start, stop) for piece in met]

    def _put(self, piece: _Range) -> None:
        index = bisect_left(self._starts, piece.address)
        self._starts.insert(index, piece.address)
        self._mapped.insert(index, piece)
