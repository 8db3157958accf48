"""Forgetting what no race can come of any more, so that the shadow stays small."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import groupby, islice
from typing import Final

from cudakit.core.sanitize.calls import Touch
from cudakit.core.sanitize.cells import Cell, Touches
from cudakit.core.sanitize.clocks import NEVER
from cudakit.core.sanitize.pointers import Pointer
from cudakit.core.sanitize.races import Allocation
from cudakit.core.sanitize.segments import Segment
from cudakit.core.sanitize.shadow import Shadow

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
