"""Shadow memory: for all bytes that calls accessed, what a later access may race with.

Addresses of the host are addresses like others. What is known exactly is kept for ranges (``segments``) and
for rows at equal distances (``strided``); what kernels were given, as points (``pointers``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from itertools import groupby, islice
from typing import Final, Protocol

from cudakit.core.sanitize.access_state import Cell, Pointer, Pointers, Segment, Segments, Touches
from cudakit.core.sanitize.clocks import (
    ASSUMED,
    NEVER,
    UNCERTAIN,
    WRITE,
    Call,
    Clock,
    Release,
    Touch,
)
from cudakit.core.sanitize.conflicts import Judge
from cudakit.core.sanitize.races import Allocation
from cudakit.core.sanitize.record_batch import AccessRow
from cudakit.core.sanitize.strided import Rows, Strided, rows_of

# Up to so many rows are looked at one by one.
_FEW_ROWS = 16


class Actor(Protocol):
    """A timeline, or a place in it."""

    @property
    def slot(self) -> int:
        """Its place in clocks."""

    @property
    def tick(self) -> int:
        """What its next operation is known by."""

    @property
    def past(self) -> Clock:
        """What its next operation comes after."""


class Shadow:
    """The shadow of the memory of one process.

    ``shows_near``: also tell of kernels whose pointer lies before the bytes, in the same allocation, and
    of pointers that are uncertain.
    """

    def __init__(self, judge: Judge, *, shows_near: bool = False) -> None:
        self.judge = judge
        self.segments = Segments()
        self.strided = Strided()
        self.pointers = Pointers()
        self._shows_near = shows_near
        self._rows = self.strided.cells
        self._points = self.pointers.known

    def add(self, touch: Touch, past: Clock, stride: int = 0, count: int = 0) -> None:
        """Look at an access, with a stride or without, however well it is known, and keep it."""
        if touch.known == UNCERTAIN and not self._shows_near:
            return
        if touch.known >= ASSUMED:
            self.point(touch, past)
        elif count > 1:
            self.touch_rows(touch, past, rows_of(touch.lo, touch.hi, stride, count))
        elif touch.lo < touch.hi:
            self.touch(touch, past)

    def add_all(self, rows: Iterable[AccessRow], call: Call, actor: Actor) -> None:
        """Look at the accesses of a launch, and keep them.

        The two that nearly all accesses are, and that nothing else is near to, are dealt with here: an
        access to just the bytes of one segment, and a pointer that was there before.
        """
        slot, tick, past = actor.slot, actor.tick, actor.past
        segments, pointers = self.segments.beginning_at, self.pointers.known
        strided, shows_near = self.strided.cells, self._shows_near
        for lo, hi, mode, known, stride, count, _ in rows:
            touch = Touch(slot, tick, call, lo, hi, mode, known)
            if strided or count > 1 or shows_near or known == UNCERTAIN:
                self.add(touch, past, stride, count)
            elif known == ASSUMED:
                pointer = pointers.get(lo)
                is_beside = not segments or self.segments.at(lo).hi <= lo
                if pointer and is_beside and pointer.takes(touch, past):
                    continue
                self.point(touch, past)
            else:
                segment = segments.get(lo)
                if segment and segment.hi == hi and not pointers and segment.takes(touch, past):
                    continue
                self.add(touch, past)

    def touch(self, touch: Touch, past: Clock) -> None:
        """Look at an access to all bytes of a range, and keep it."""
        self._touch_range(touch, past)
        if self.judge.open:
            self.judge.close()

    def touch_rows(self, touch: Touch, past: Clock, rows: Rows) -> None:
        """Look at an access to rows, and keep it."""
        if rows.count <= _FEW_ROWS:
            for lo, hi in rows.ranges():
                self._touch_range(_part(touch, lo, hi), past)
            self.judge.close()
            return
        weigh, mode = self.judge.weigh, touch.mode
        for segment in self.segments.within(rows.lo, rows.hi):
            if shared := rows.shared_with_range(segment.lo, segment.hi):
                weigh(segment, segment.unordered(mode, past), touch, past, shared)
        for cell, shared in self.strided.sharing_rows(rows):
            weigh(cell, cell.unordered(mode, past), touch, past, shared)
        for pointer in self.pointers.within(rows.lo, rows.hi):
            if shared := rows.shared_with_range(pointer.address, pointer.address + 1):
                weigh(pointer, pointer.unordered(mode, past), touch, past, shared)
        own = self.strided.cell(rows)
        weigh(own, own.unordered(mode, past), touch, past, (rows.lo, rows.hi))
        own.store(touch, past)
        self.judge.close()

    def point(self, touch: Touch, past: Clock) -> None:
        """Look at a pointer that a kernel was given, and keep it."""
        lo = touch.lo
        pointer = self._points.get(lo) or self.pointers.at(lo)
        if not pointer.takes(touch, past):
            found = pointer.unordered(touch.mode, past)
            self.judge.weigh(pointer, found, touch, past, (lo, lo + 1))
            pointer.store(touch, past)
        segment = self.segments.at(lo)
        if segment.hi > lo and (found := segment.unordered(touch.mode, past)):
            self.judge.weigh(segment, found, touch, past, (lo, min(segment.hi, touch.hi)))
        if self._rows:
            for cell, shared in self.strided.sharing_range(lo, lo + 1):
                self.judge.weigh(cell, cell.unordered(touch.mode, past), touch, past, shared)
        if self._shows_near:
            self._against_ranges_behind(touch, past)
        if self.judge.open:
            self.judge.close()

    def freed_before(self, lo: int, hi: int) -> list[Release]:
        """List after which frees, in the order of streams, memory of a range can be had again."""
        writes = (segment.write for segment in self.segments.within(lo, hi))
        releases = (write.call.release for write in writes if write and write.tick == NEVER)
        return [release for release in releases if release is not None]

    def clear(self, lo: int, hi: int) -> None:
        """Forget all accesses to a range."""
        self.segments.clear(lo, hi)
        self.strided.clear(lo, hi)
        self.pointers.clear(lo, hi)

    def _touch_range(self, touch: Touch, past: Clock) -> None:
        segment = self.segments.beginning_at.get(touch.lo)
        if segment is None or segment.hi != touch.hi or not segment.takes(touch, past):
            self._touch_tiles(touch, past)
        if self._rows:
            self._against_strided(touch, past)
        if self._points or self._shows_near:
            self._against_pointers(touch, past)

    def _touch_tiles(self, touch: Touch, past: Clock) -> None:
        """Look at an access to bytes that are not alike, and join those that become alike by it."""
        for tile in self.segments.cut(touch.lo, touch.hi):
            if found := tile.unordered(touch.mode, past):
                self.judge.weigh(tile, found, touch, past, (tile.lo, tile.hi))
            tile.store(touch, past)
        self.segments.join(touch.lo, touch.hi)

    def _against_strided(self, touch: Touch, past: Clock) -> None:
        for cell, shared in self.strided.sharing_range(touch.lo, touch.hi):
            self.judge.weigh(cell, cell.unordered(touch.mode, past), touch, past, shared)
        if touch.mode & WRITE:
            self.strided.clear(touch.lo, touch.hi)

    def _against_pointers(self, touch: Touch, past: Clock) -> None:
        for pointer in self.pointers.within(touch.lo, touch.hi):
            if found := pointer.unordered(touch.mode, past):
                self.judge.weigh(pointer, found, touch, past, (pointer.address, touch.hi))
            if touch.mode & WRITE:
                pointer.clear()
        if self._shows_near:
            self._against_pointers_before(touch, past)

    def _against_pointers_before(self, touch: Touch, past: Clock) -> None:
        for pointer in self.pointers.within(0, touch.lo):
            found = [one for one in pointer.unordered(touch.mode, past) if one.hi > touch.lo]
            self.judge.weigh(pointer, found, touch, past, (touch.lo, touch.hi), near=True)

    def _against_ranges_behind(self, touch: Touch, past: Clock) -> None:
        for segment in self.segments.within(touch.lo + 1, touch.hi):
            if segment.lo > touch.lo:
                found = segment.unordered(touch.mode, past)
                self.judge.weigh(segment, found, touch, past, (segment.lo, segment.hi), near=True)


def _part(touch: Touch, lo: int, hi: int) -> Touch:
    return Touch(touch.slot, touch.tick, touch.call, lo, hi, touch.mode, touch.known)


# Beyond so many segments, those of one allocation are made half as many.
MOST_SEGMENTS: Final = 4096

# Whether all that is enqueued from now on comes after a tick of a slot.
IsKnown = Callable[[int, int], bool]


def prune(shadow: Shadow, is_known: IsKnown) -> None:
    """Forget the accesses that everything from now on comes after."""
    shadow.segments.rebuild(lambda all_: [one for one in all_ if _clean_cell(one, is_known)])
    shadow.strided.keep(lambda _, cell: _clean_cell(cell, is_known))
    shadow.pointers.keep(lambda pointer: _clean_pointer(pointer, is_known))


def coarsen(shadow: Shadow, allocation_at: Callable[[int], Allocation | None]) -> None:
    """Join segments of the allocations that have too many; what is found there is approximate.

    Where nothing is known to be allocated, the oldest ones are forgotten instead.
    """

    def change(segments: list[Segment]) -> list[Segment]:
        changed: list[Segment] = []
        for owner, group in groupby(segments, key=lambda one: allocation_at(one.lo)):
            some = list(group)
            if len(some) > MOST_SEGMENTS:
                some = list(_joined(some)) if owner else _youngest(some)
            changed += some
        return changed

    shadow.segments.rebuild(change)


def _clean_cell(cell: Cell, is_known: IsKnown) -> bool:
    """Forget what is known in a cell; say whether anything is left."""
    if cell.write is not None and is_known(cell.write.slot, cell.write.tick):
        cell.write = None
    cell.reads = _unknown(cell.reads, is_known)
    cell.atomics = _unknown(cell.atomics, is_known)
    left = {id(touch) for touch in (cell.write, *cell.reads, *cell.atomics)}
    cell.pardons = tuple(pardon for pardon in cell.pardons if id(pardon[0]) in left)
    return left != {id(None)}


def _clean_pointer(pointer: Pointer, is_known: IsKnown) -> bool:
    pointer.writers = _unknown(pointer.writers, is_known)
    pointer.readers = _unknown(pointer.readers, is_known)
    left = {id(touch) for touch in pointer.writers + pointer.readers}
    pointer.pardons = tuple(pardon for pardon in pointer.pardons if id(pardon[0]) in left)
    return bool(left)


def _unknown(touches: Touches, is_known: IsKnown) -> Touches:
    return tuple(touch for touch in touches if not is_known(touch.slot, touch.tick))


def _joined(segments: list[Segment]) -> Iterator[Segment]:
    """Join neighbours, to half of what is the most. What was freed is left out: it is alike with nothing."""
    some = iter([one for one in segments if one.write is None or one.write.tick != NEVER])
    count = -(-len(segments) * 2 // MOST_SEGMENTS)
    while neighbours := list(islice(some, count)):
        joined = Segment(neighbours[0].lo, neighbours[-1].hi)
        writes = [one.write for one in neighbours if one.write]
        joined.write = max(writes, key=lambda write: write.call.seq, default=None)
        joined.reads = _last_of_each([touch for one in neighbours for touch in one.reads])
        joined.atomics = _last_of_each([touch for one in neighbours for touch in one.atomics])
        joined.pardons = tuple(pardon for one in neighbours for pardon in one.pardons)
        joined.approximate = True
        yield joined


def _last_of_each(touches: list[Touch]) -> Touches:
    """Keep the last touch of each stream."""
    in_order = sorted(touches, key=lambda touch: touch.tick)
    return tuple({(touch.slot, touch.call.node): touch for touch in in_order}.values())


def _youngest(segments: list[Segment]) -> list[Segment]:
    seqs = sorted(_last_seq(one) for one in segments)
    middle = seqs[-MOST_SEGMENTS // 2]
    return [one for one in segments if _last_seq(one) >= middle][-MOST_SEGMENTS:]


def _last_seq(segment: Segment) -> int:
    touches = (segment.write, *segment.reads, *segment.atomics)
    return max((touch.call.seq for touch in touches if touch), default=0)
