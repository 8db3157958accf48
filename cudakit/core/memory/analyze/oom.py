"""Why an allocation failed: what was free, where, and what would have made it fit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.analyze.call_sites import Stacks
from cudakit.core.memory.analyze.moments import state_at, time_of
from cudakit.core.memory.replay import Replay
from cudakit.core.memory.replay.layout import Layout
from cudakit.core.memory.result import Oom, State
from cudakit.core.memory.snapshot import DeviceTrace, SegmentKind, Snapshot
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.oom_facts import Request, is_limited
from cudakit.torch_rules.oom_verdict import FailedRequest, verdict_of
from cudakit.torch_rules.sizes import MOST_SMALL, segment_size

_Mask = npt.NDArray[np.bool_]

# A program that catches the error and tries again can fail thousands of times; each takes a layout.
MOST_OOMS = 100


def find_ooms(
    snapshot: Snapshot, trace: DeviceTrace, stacks: Stacks, replayed: Replay
) -> tuple[Oom, ...]:
    """Explain every failed allocation of a trace; of more than MOST_OOMS the first and the latest."""
    events = np.flatnonzero(trace.events.action == Action.OOM)
    if len(events) > MOST_OOMS:
        events = np.concatenate((events[:1], events[1 - MOST_OOMS :]))
    return tuple(
        _explain(snapshot, trace, stacks, replayed, replayed.layout_at(event), event)
        for event in events.tolist()
    )


def _explain(
    snapshot: Snapshot,
    trace: DeviceTrace,
    stacks: Stacks,
    replayed: Replay,
    layout: Layout,
    event: int,
) -> Oom:
    state = state_at(replayed, layout, event)
    failed = failed_request(snapshot, trace, layout, state, event)
    found = verdict_of(failed)
    stack = int(trace.events.stack[event])
    return Oom(
        event=event,
        time_us=time_of(snapshot, trace, event),
        size_bytes=failed.size,
        device_free_bytes=failed.device_free,
        state=state,
        largest_hole_bytes=int(layout.hole_size.max(initial=0)),
        free_bytes=failed.free,
        short_bytes=failed.short,
        fit=failed.fit,
        limited=failed.limited,
        verdict=found.code,
        sentence=found.sentence,
        remedies=found.remedies,
        stack=stacks.frames(stack),
        site=stacks.site(stack),
    )


def failed_request(
    snapshot: Snapshot, trace: DeviceTrace, layout: Layout, state: State, event: int
) -> FailedRequest:
    """Return what a failed request met, and what would have served it."""
    events, segments = trace.events, layout.segments
    size, device_free = int(events.size[event]), int(events.address[event])
    needed = segment_size(size)
    own = _own_segments(trace, layout, event)
    hole_is_own = own[layout.hole_segment]
    empty = layout.used_by_segment() == 0
    limited = is_limited(device_free, needed)
    # Under a limit of the process, free memory of the device is of no use.
    usable = 0 if limited else device_free
    own_free = int(layout.hole_size[hole_is_own].sum())
    releasable = int(segments.size[empty].sum())
    request = Request(
        block_bytes=size,
        segment_bytes=needed,
        usable_bytes=usable,
        releasable_bytes=releasable,
        own_free_bytes=own_free,
        largest_other_bytes=_largest(layout.hole_size[~hole_is_own]),
        largest_later_bytes=_largest_after_pending(layout, own),
    )
    free = int(layout.hole_size.sum())
    return FailedRequest(
        size=size,
        needed=needed,
        device_free=device_free,
        reserved=state.reserved_bytes,
        active=state.active_bytes,
        free=free,
        own_free=own_free,
        own_largest=_largest(layout.hole_size[hole_is_own]),
        releasable=releasable,
        releasable_private=int(segments.size[empty & (segments.pool != 0)].sum()),
        pending=int(layout.block_size[layout.block_pending].sum()),
        short=max(size - free - usable, 0),
        limited=limited,
        expandable=bool(segments.expandable.any()),
        split_limited=snapshot.settings.get("max_split_size", -1) not in (-1, None),
        fit=request.fit(),
    )


def _own_segments(trace: DeviceTrace, layout: Layout, event: int) -> _Mask:
    """Say which segments could have served the request: its stream, its pool, its kind."""
    events, segments = trace.events, layout.segments
    size, pool = int(events.size[event]), int(events.pool[event])
    kind = SegmentKind.SMALL if size <= MOST_SMALL else SegmentKind.LARGE
    fits_kind = (segments.kind == kind) | (segments.kind == SegmentKind.UNKNOWN)
    reachable: _Mask = fits_kind & (segments.stream == events.stream[event])
    private: _Mask = segments.pool != 0
    if pool >= 0:
        reachable &= segments.pool == pool
        return reachable
    # Before torch 2.12 nothing names the pool. What a hole of the default pool would have served was
    # asked of a private one, if there is any.
    default = reachable & ~private
    served = _largest(layout.hole_size[default[layout.hole_segment]]) >= size
    return reachable & private if served and private.any() else default


def _largest_after_pending(layout: Layout, own: _Mask) -> int:
    """Return the largest hole once the blocks pending free beside it are free too.

    Even a hole without such blocks counts: before it gives up, torch waits for pending frees and releases
    segments, but does not search again among what stays (pytorch issue 189504).
    """
    blocks = layout.block_pending & own[layout.block_segment]
    holes = own[layout.hole_segment]
    segment = np.concatenate((layout.block_segment[blocks], layout.hole_segment[holes]))
    offset = np.concatenate((layout.block_offset[blocks], layout.hole_offset[holes]))
    length = np.concatenate((layout.block_size[blocks], layout.hole_size[holes]))
    order = np.lexsort((offset, segment))
    segment, offset, length = segment[order], offset[order], length[order]
    joins = np.zeros(len(order), np.bool_)
    joins[1:] = (segment[1:] == segment[:-1]) & (offset[1:] == (offset + length)[:-1])
    return _largest(np.bincount(np.cumsum(~joins), weights=length))


def _largest(sizes: npt.NDArray[np.generic]) -> int:
    return int(sizes.max(initial=0)) if len(sizes) else 0
