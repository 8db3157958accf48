"""Memory released to the driver in a trace: by the program, or by a request that found no memory.

An allocator empties its cache on request, and when the driver has no more memory. Both leave the same
events. The first is a step of the program, which a replay repeats; the second is the decision of the
allocator that replays. Stacks distinguish them: what a request releases has the stack of the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay.allocations import Curves
from cudakit.core.memory.snapshot import Events
from cudakit.torch_rules.actions import Action

_Mask = npt.NDArray[np.bool_]

_RELEASES = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_GROWTH = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_ANSWERS = (Action.ALLOC, Action.OOM)


@dataclass(frozen=True, slots=True)
class Release:
    """Consecutive events that released memory, or completed frees for a request that still failed."""

    first: int  # event
    after: int  # the event behind the last one
    request: int | None  # the event that ends the request that caused it; None: the program itself
    pools: frozenset[int]  # whose segments, as far as the events say
    gives_back: bool


def releases_of(
    events: Events, curves: Curves, waits_end: _Mask, *, collects: bool, own_stacks: bool
) -> tuple[Release, ...]:
    """Return the releases of a trace; ``waits_end`` marks the events that completed a pending free.

    ``collects``: requests release old segments even while memory is left (garbage collection).
    ``own_stacks``: frees have stacks of their own. Otherwise they have the stack of the allocation, which may
    equal that of the next request by chance: that request is not the cause if what it took fitted before.
    """
    giving = np.isin(events.action, _RELEASES)
    sure = own_stacks or collects
    known_to_fit = 0 if sure else int(curves.reserved.max())
    found: list[Release] = []
    for first, after in _stretches(giving | waits_end):
        request = _request_behind(events, after)
        own = after
        if request is not None:
            own = _of_request(events, curves, giving, (first, after, request), known_to_fit)
            if own < after:
                found.append(_release(events, giving, own, after, request))
        if giving[first:own].any():
            found.append(_release(events, giving, first, own, None))
    return tuple(found)


def _stretches(chosen: _Mask) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _request_behind(events: Events, after: int) -> int | None:
    """Return the event that ends the request for which memory may have been released."""
    for event in range(after, len(events)):
        if events.action[event] in _ANSWERS:
            return event
        if events.action[event] not in _GROWTH:
            return None
    return None


def _of_request(
    events: Events,
    curves: Curves,
    giving: _Mask,
    stretch: tuple[int, int, int],
    known_to_fit: int,
) -> int:
    """Return where the part released by a request begins; ``after`` if none.

    ``stretch`` is the first event, the event after the last one, and the event that ends the request.
    """
    first, after, request = stretch
    failed = events.action[request] == Action.OOM
    given = np.flatnonzero(giving[first:after]) + first
    if not len(given):
        return first if failed else after
    stack = events.stack[request]
    private = events.pool[given] > 0
    strange = given[(events.stack[given] != stack) | _before_default(private)]
    begin = int(strange[-1]) + 1 if len(strange) else first
    if failed or begin == after:
        return begin
    taken = int(curves.reserved[request] - curves.reserved[after])
    fitted = taken > 0 and int(curves.reserved[begin]) + taken <= known_to_fit
    # The end of a MemPool is no call of its own: its segments have the stacks of their allocations.
    of_pool = bool(private[given >= begin].all())
    nobody = stack == 0 and known_to_fit > 0
    return after if nobody or fitted or of_pool else begin


def _before_default(private: _Mask) -> _Mask:
    """Mark what private pools released before the default one: a request uses the reverse order."""
    default_follows = np.logical_or.accumulate(~private[::-1])[::-1]
    marked: _Mask = private & default_follows
    return marked


def _release(events: Events, giving: _Mask, first: int, after: int, request: int | None) -> Release:
    given = np.flatnonzero(giving[first:after]) + first
    pools = np.maximum(events.pool[given], 0)  # of segments that are gone, older files do not say
    return Release(first, after, request, frozenset(pools.tolist()), bool(len(given)))
