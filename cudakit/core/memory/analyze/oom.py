"""Why an allocation failed: what was free, where, and what would have made it fit."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.analyze import verdict
from cudakit.core.memory.analyze.sites import Stacks
from cudakit.core.memory.analyze.state import state_at, time_of
from cudakit.core.memory.replay import Replay
from cudakit.core.memory.replay.block_sizes import SMALL_REQUEST, segment_size
from cudakit.core.memory.replay.layout import Layout, Layouts
from cudakit.core.memory.result import Fit, Oom
from cudakit.core.memory.snapshot import DeviceTrace, SegmentKind, Snapshot
from cudakit.torch_rules.actions import Action

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
    layouts = Layouts(trace, replayed.allocations)
    return tuple(
        _explain(snapshot, trace, stacks, replayed, layouts.at(event), event)
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
    room = measure(trace, layout, event)
    state = state_at(replayed, layout, event)
    found = verdict.judge(room, state, snapshot.settings)
    stack = int(trace.events.stack[event])
    return Oom(
        event=event,
        time_us=time_of(snapshot, trace, event),
        size_bytes=room.size,
        device_free_bytes=room.device_free,
        state=state,
        largest_hole_bytes=int(layout.hole_size.max(initial=0)),
        free_bytes=room.free,
        short_bytes=room.short,
        fit=room.fit,
        limited=room.limited,
        verdict=found.code,
        sentence=found.sentence,
        remedies=found.remedies,
        stack=stacks.frames(stack),
        site=stacks.site(stack),
    )


def measure(trace: DeviceTrace, layout: Layout, event: int) -> verdict.Room:
    """Measure the room that a failed request had, and would have had."""
    events, segments = trace.events, layout.segments
    size, device_free = int(events.size[event]), int(events.address[event])
    needed = segment_size(size)
    own = _own_segments(trace, layout, event)
    hole_is_own = own[layout.hole_segment]
    empty = layout.used_by_segment() == 0
    releasable = int(segments.size[empty].sum())
    limited = device_free >= needed
    # Under a limit of the process the room on the device is of no use: what counts is what is reserved.
    usable = 0 if limited else device_free
    own_free = int(layout.hole_size[hole_is_own].sum())
    fit = Fit(
        without_cache=usable + releasable >= needed,
        without_holes=own_free + usable >= size,
        in_another_pool=_largest(layout.hole_size[~hole_is_own]) >= size,
        after_pending_frees=_fits_after_pending(layout, own, size),
    )
    free = int(layout.hole_size.sum())
    return verdict.Room(
        size=size,
        needed=needed,
        device_free=device_free,
        free=free,
        own_free=own_free,
        own_largest_hole=_largest(layout.hole_size[hole_is_own]),
        releasable=releasable,
        releasable_private=int(segments.size[empty & (segments.pool != 0)].sum()),
        pending=int(layout.block_size[layout.block_pending].sum()),
        short=max(size - free - usable, 0),
        limited=limited,
        expandable=bool(segments.expandable.any()),
        fit=fit,
    )


def _own_segments(trace: DeviceTrace, layout: Layout, event: int) -> _Mask:
    """Say which segments could have served the request: its stream, its pool, its kind."""
    events, segments = trace.events, layout.segments
    size, pool = int(events.size[event]), int(events.pool[event])
    kind = SegmentKind.SMALL if size <= SMALL_REQUEST else SegmentKind.LARGE
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


def _fits_after_pending(layout: Layout, own: _Mask, size: int) -> bool:
    """Say whether a hole, together with blocks pending free beside it, would have been large enough.

    A hole may be so by itself: before it gives up, torch waits for pending frees and returns segments, but
    does not search again among what stays (pytorch issue 189504).
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
    return _largest(np.bincount(np.cumsum(~joins), weights=length)) >= size


def _largest(sizes: npt.NDArray[np.generic]) -> int:
    return int(sizes.max(initial=0)) if len(sizes) else 0
