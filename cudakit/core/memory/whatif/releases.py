"""Memory given back in a trace: by the program, or by a request that found none.

An allocator empties its cache when it is told to, and when the driver has no more. Both leave the same
events. The first is a step of the program, which a replay takes; the second is up to the allocator that
replays. They are told apart by stacks: what a request gives back has the stack of the request.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay import Curves
from cudakit.core.memory.snapshot import Action, DeviceTrace, Events

_Mask = npt.NDArray[np.bool_]

_RELEASES = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_GROWTH = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_ANSWERS = (Action.ALLOC, Action.OOM)


@dataclass(frozen=True, slots=True)
class Release:
    """A stretch of events by which memory was given back, or for which it was waited in vain."""

    first: int  # event
    after: int  # the event behind the last one
    request: int | None  # the event that ends the request behind it; None: the program's own
    pools: frozenset[int]  # whose segments, as far as the events say
    gives_back: bool


def releases_of(
    trace: DeviceTrace, curves: Curves, waits_end: _Mask, *, collects: bool, own_stacks: bool
) -> tuple[Release, ...]:
    """Find what was given back; ``waits_end`` marks the events by which a pending free completed.

    ``collects`` says that requests give back what is old, also while there is room. ``own_stacks`` says that
    frees have stacks of their own. Else they have those of the allocations, which may by chance be that of
    the next request: then it is not taken for the reason where what it took had fitted before.
    """
    events = trace.events
    giving = np.isin(events.action, _RELEASES)
    sure = own_stacks or collects
    known_to_fit = 0 if sure else int(curves.reserved.max())
    found: list[Release] = []
    for first, after in _stretches(giving | waits_end):
        request = _request_behind(events, after)
        own = after
        if request is not None:
            own = _of_request(trace, curves, giving, _Stretch(first, after, request), known_to_fit)
            if own < after:
                found.append(_release(events, giving, own, after, request))
        if giving[first:own].any():
            found.append(_release(events, giving, first, own, None))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class _Stretch:
    first: int
    after: int
    request: int


def _stretches(chosen: _Mask) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], chosen, [False]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _request_behind(events: Events, after: int) -> int | None:
    """Find the event that ends the request for which memory may have been given back."""
    for event in range(after, len(events)):
        if events.action[event] in _ANSWERS:
            return event
        if events.action[event] not in _GROWTH:
            return None
    return None


def _of_request(
    trace: DeviceTrace, curves: Curves, giving: _Mask, stretch: _Stretch, known_to_fit: int
) -> int:
    """Find where in a stretch the part begins that a request gave back; its end where there is none."""
    events, first, after = trace.events, stretch.first, stretch.after
    failed = events.action[stretch.request] == Action.OOM
    given = np.flatnonzero(giving[first:after]) + first
    if not len(given):
        return first if failed else after
    stack = events.stack[stretch.request]
    private = events.pool[given] > 0
    strange = given[(events.stack[given] != stack) | _before_default(private)]
    begin = int(strange[-1]) + 1 if len(strange) else first
    if failed or begin == after:
        return begin
    taken = int(curves.reserved[stretch.request] - curves.reserved[after])
    fitted = taken > 0 and int(curves.reserved[begin]) + taken <= known_to_fit
    # The end of a MemPool is no call of its own: its segments have the stacks of their allocations.
    of_pool = bool(private[given >= begin].all())
    nobody = stack == 0 and known_to_fit > 0
    return after if nobody or fitted or of_pool else begin


def _before_default(private: _Mask) -> _Mask:
    """Mark what private pools gave back before the default one: a request goes the other way round."""
    default_follows = np.logical_or.accumulate(~private[::-1])[::-1]
    marked: _Mask = private & default_follows
    return marked


def _release(events: Events, giving: _Mask, first: int, after: int, request: int | None) -> Release:
    given = np.flatnonzero(giving[first:after]) + first
    pools = np.maximum(events.pool[given], 0)  # of segments that are gone, older files do not say
    return Release(first, after, request, frozenset(pools.tolist()), bool(len(given)))
