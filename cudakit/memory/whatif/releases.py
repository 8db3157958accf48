"""Memory that a trace releases to the driver: by a call of the program, or by a request that found no memory.

Both kinds of release leave the same events; call stacks distinguish them, because a release by a request has
the stack of the request. A replay repeats releases by the program, such as ``empty_cache``; requests release
memory again by themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from cudakit.memory.replay.allocations import Curves
from cudakit.memory.snapshot import Events, Mask
from cudakit.torch_rules.actions import Action

_RELEASE_ACTIONS = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_GROWTH_ACTIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_REQUEST_ACTIONS = (Action.ALLOC, Action.OOM)


@dataclass(frozen=True, slots=True)
class Release:
    """Consecutive events that released memory, or completed pending frees, for one cause."""

    first_event: int  # index of the first event
    end_event: int  # index of the event after the last one
    # The ALLOC or OOM event of the request that released memory; None: a call of the program.
    request: int | None
    pools: frozenset[int]  # pools of the released segments, if recorded
    releases_segments: bool  # whether segments were released; False if only pending frees completed


def releases_of(
    events: Events,
    curves: Curves,
    completes_pending: Mask,
    *,
    garbage_collects: bool,
    frees_have_stacks: bool,
) -> tuple[Release, ...]:
    """Return the releases of a trace; ``completes_pending`` marks the events that completed a pending free.

    ``garbage_collects``: requests also release old segments while memory is left. ``frees_have_stacks``:
    frees have their own call stacks. Otherwise they have the stack of the allocation, which can equal the
    stack of the next request by chance; that request is not the cause if as much memory had been reserved
    before.
    """
    is_release = np.isin(events.action, _RELEASE_ACTIONS)
    cause_is_known = frees_have_stacks or garbage_collects
    bytes_known_to_fit = 0 if cause_is_known else int(curves.reserved.max())
    releases: list[Release] = []
    for first_event, end_event in _ranges_of(is_release | completes_pending):
        request = _request_after(events, end_event)
        first_request_event = end_event
        if request is not None:
            first_request_event = _first_of_request(
                events, curves, is_release, (first_event, end_event, request), bytes_known_to_fit
            )
            if first_request_event < end_event:
                releases.append(
                    _release(events, is_release, first_request_event, end_event, request)
                )
        if is_release[first_event:first_request_event].any():
            releases.append(_release(events, is_release, first_event, first_request_event, None))
    return tuple(releases)


def _ranges_of(mask: Mask) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _request_after(events: Events, end_event: int) -> int | None:
    """Return the ALLOC or OOM event of the request that may have caused a release; None: no request."""
    for event_index in range(end_event, len(events)):
        if events.action[event_index] in _REQUEST_ACTIONS:
            return event_index
        if events.action[event_index] not in _GROWTH_ACTIONS:
            return None
    return None


def _first_of_request(
    events: Events,
    curves: Curves,
    is_release: Mask,
    release_and_request: tuple[int, int, int],
    bytes_known_to_fit: int,
) -> int:
    """Return the first event in which the request released memory; ``end_event`` if there is none.

    ``release_and_request`` is the first event, the event after the last one, and the event of the request.
    """
    first_event, end_event, request = release_and_request
    has_failed = events.action[request] == Action.OOM
    release_events = np.flatnonzero(is_release[first_event:end_event]) + first_event
    if not len(release_events):
        return first_event if has_failed else end_event
    request_stack = events.stack[request]
    is_private = events.pool[release_events] > 0
    releases_by_program = release_events[
        (events.stack[release_events] != request_stack) | _is_before_default(is_private)
    ]
    first_request_event = (
        int(releases_by_program[-1]) + 1 if len(releases_by_program) else first_event
    )
    if has_failed or first_request_event == end_event:
        return first_request_event
    new_bytes = int(curves.reserved[request] - curves.reserved[end_event])
    has_fitted_before = (
        new_bytes > 0
        and int(curves.reserved[first_request_event]) + new_bytes <= bytes_known_to_fit
    )
    # Segments of a deleted MemPool have the stacks of their allocations, because no call released them.
    is_of_deleted_pool = bool(is_private[release_events >= first_request_event].all())
    is_unknown_stack = request_stack == 0 and bytes_known_to_fit > 0
    return (
        end_event
        if is_unknown_stack or has_fitted_before or is_of_deleted_pool
        else first_request_event
    )


def _is_before_default(is_private: Mask) -> Mask:
    """Mark releases of private pools that a release of the default pool follows.

    A request never releases in this order: it releases the default pool first.
    """
    is_followed_by_default = np.logical_or.accumulate(~is_private[::-1])[::-1]
    mask: Mask = is_private & is_followed_by_default
    return mask


def _release(
    events: Events, is_release: Mask, first_event: int, end_event: int, request: int | None
) -> Release:
    release_events = np.flatnonzero(is_release[first_event:end_event]) + first_event
    pool_ids = np.maximum(events.pool[release_events], 0)  # -1: older files do not record the pool
    return Release(
        first_event, end_event, request, frozenset(pool_ids.tolist()), bool(len(release_events))
    )
