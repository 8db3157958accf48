"""Find the cause of each failed allocation from the memory that was free at that moment."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.analyze.call_sites import StackTable
from cudakit.core.memory.analyze.moments import state_at, time_of
from cudakit.core.memory.replay import Replay
from cudakit.core.memory.replay.layout import Layout
from cudakit.core.memory.result import Oom, State
from cudakit.core.memory.snapshot import DeviceTrace, Mask, SegmentKind, Snapshot
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.oom_verdict import FailedRequest, verdict_of
from cudakit.torch_rules.sizes import MAX_SMALL_BYTES

# A program that retries can fail thousands of times, and computing the layout of each failure is slow.
MAX_OOMS = 100


def find_ooms(
    snapshot: Snapshot, trace: DeviceTrace, stacks: StackTable, replayed: Replay
) -> tuple[Oom, ...]:
    """Return the failed allocations of a trace; of more than MAX_OOMS, the first and the latest."""
    events = np.flatnonzero(trace.events.action == Action.OOM)
    if len(events) > MAX_OOMS:
        events = np.concatenate((events[:1], events[1 - MAX_OOMS :]))
    return tuple(
        _explain(snapshot, trace, stacks, replayed, replayed.layout_at(event), event)
        for event in events.tolist()
    )


def _explain(
    snapshot: Snapshot,
    trace: DeviceTrace,
    stacks: StackTable,
    replayed: Replay,
    layout: Layout,
    event: int,
) -> Oom:
    state = state_at(replayed, layout, event)
    failed = _failed_request(snapshot, trace, layout, state, event)
    verdict = verdict_of(failed)
    stack = int(trace.events.stack[event])
    return Oom(
        event=event,
        time_us=time_of(snapshot, trace, event),
        size_bytes=failed.size,
        device_free_bytes=failed.device_free,
        state=state,
        largest_hole_bytes=int(layout.free_size.max(initial=0)),
        free_bytes=failed.free,
        short_bytes=failed.short,
        fit=failed.fit,
        limited=failed.limited,
        verdict=verdict.code,
        sentence=verdict.sentence,
        remedies=verdict.remedies,
        stack=stacks.frames(stack),
        site=stacks.site(stack),
    )


def _failed_request(
    snapshot: Snapshot, trace: DeviceTrace, layout: Layout, state: State, event: int
) -> FailedRequest:
    """Return a failed request and the memory at that moment."""
    events, segments = trace.events, layout.segments
    usable = _usable_segments(trace, layout, event)
    is_usable = usable[layout.free_segment]
    empty = layout.used_by_segment() == 0
    return FailedRequest(
        size=int(events.size[event]),
        device_free=int(events.address[event]),
        reserved=state.reserved_bytes,
        active=state.active_bytes,
        free=int(layout.free_size.sum()),
        own_free=int(layout.free_size[is_usable].sum()),
        own_largest=_largest(layout.free_size[is_usable]),
        later_largest=_largest_after_pending(layout, usable),
        other_largest=_largest(layout.free_size[~is_usable]),
        releasable=int(segments.size[empty].sum()),
        releasable_private=int(segments.size[empty & (segments.pool != 0)].sum()),
        pending=int(layout.block_size[layout.block_pending].sum()),
        expandable=bool(segments.expandable.any()),
        split_limited=snapshot.settings.get("max_split_size", -1) not in (-1, None),
        calls=snapshot.calls,
    )


def _usable_segments(trace: DeviceTrace, layout: Layout, event: int) -> Mask:
    """Return a mask of the segments that can serve the request: its stream, pool and size class."""
    events, segments = trace.events, layout.segments
    size, pool = int(events.size[event]), int(events.pool[event])
    kind = SegmentKind.SMALL if size <= MAX_SMALL_BYTES else SegmentKind.LARGE
    fits_kind = (segments.kind == kind) | (segments.kind == SegmentKind.UNKNOWN)
    usable: Mask = fits_kind & (segments.stream == events.stream[event])
    is_private: Mask = segments.pool != 0
    if pool >= 0:
        usable &= segments.pool == pool
        return usable
    # Before torch 2.12 events do not name the pool. If a free block of the default pool is large enough, the
    # request was made in a private pool.
    in_default_pool = usable & ~is_private
    default_fits = _largest(layout.free_size[in_default_pool[layout.free_segment]]) >= size
    return usable & is_private if default_fits and is_private.any() else in_default_pool


def _largest_after_pending(layout: Layout, usable: Mask) -> int:
    """Return the largest free block after all pending frees, merged with adjacent free blocks.

    Includes blocks that were already free, because PyTorch does not search them again after it has waited for
    pending frees (pytorch issue 189504).
    """
    blocks = layout.block_pending & usable[layout.block_segment]
    is_free = usable[layout.free_segment]
    segment = np.concatenate((layout.block_segment[blocks], layout.free_segment[is_free]))
    offset = np.concatenate((layout.block_offset[blocks], layout.free_offset[is_free]))
    length = np.concatenate((layout.block_size[blocks], layout.free_size[is_free]))
    order = np.lexsort((offset, segment))
    segment, offset, length = segment[order], offset[order], length[order]
    is_adjacent = np.zeros(len(order), np.bool_)
    is_adjacent[1:] = (segment[1:] == segment[:-1]) & (offset[1:] == (offset + length)[:-1])
    return _largest(np.bincount(np.cumsum(~is_adjacent), weights=length))


def _largest(sizes: npt.NDArray[np.generic]) -> int:
    return int(sizes.max(initial=0)) if len(sizes) else 0
