"""Totals of a moment, the peak, and the curves reduced for charts."""

from __future__ import annotations

import numpy as np

from cudakit.memory.analyze.steps import last_mark_at, open_ranges_at
from cudakit.memory.replay import Replay
from cudakit.memory.replay.allocations import Curves
from cudakit.memory.replay.layout import Layout, live_at
from cudakit.memory.replay.lifetimes import BEFORE_TRACE
from cudakit.memory.result import Peak, State, Timeline
from cudakit.memory.snapshot import DeviceTrace, Ints, Snapshot

# Maximum number of spans of a curve: a chart has fewer pixels.
_MAX_SPANS = 2000


def state_at(trace_replay: Replay, layout: Layout, moment: int) -> State:
    """Return the totals of a moment; ``layout`` is the layout at this moment."""
    curves = trace_replay.curves
    active_bytes, allocated_bytes = int(curves.active[moment]), int(curves.allocated[moment])
    return State(
        allocated_bytes=allocated_bytes,
        requested_bytes=int(curves.requested[moment]),
        active_bytes=active_bytes,
        reserved_bytes=int(curves.reserved[moment]),
        pending_free_bytes=active_bytes - allocated_bytes,
        segments=len(layout.segments),
        blocks=len(layout.block_size),
        allocated_is_derived=not bool(trace_replay.allocations.size_known[layout.allocation].all()),
    )


def time_of(snapshot: Snapshot, trace: DeviceTrace, event_index: int) -> int | None:
    """Return the time of an event in Unix microseconds; None if the file records no times."""
    if event_index == BEFORE_TRACE or not snapshot.has_times or event_index >= len(trace.events):
        return None
    return int(trace.events.time_us[event_index])


def peak_of(snapshot: Snapshot, trace: DeviceTrace, trace_replay: Replay) -> Peak:
    """Return the first moment with the most requested memory, and the maximum of each curve."""
    curves, moment = trace_replay.curves, trace_replay.peak_moment()
    live_allocations = live_at(trace_replay.allocations, moment)
    return Peak(
        event=moment - 1,
        time_us=time_of(snapshot, trace, moment - 1),
        requested_bytes=int(curves.requested[moment]),
        allocated_bytes=int(curves.allocated[moment]),
        active_bytes=int(curves.active[moment]),
        reserved_bytes=int(curves.reserved[moment]),
        allocated_is_derived=not bool(trace_replay.allocations.size_known[live_allocations].all()),
        highest_allocated_bytes=int(curves.allocated.max()),
        highest_active_bytes=int(curves.active.max()),
        highest_reserved_bytes=int(curves.reserved.max()),
        ranges=open_ranges_at(snapshot, trace, moment - 1),
        last_mark=last_mark_at(snapshot, trace, moment - 1),
    )


def timeline(snapshot: Snapshot, trace: DeviceTrace, curves: Curves) -> Timeline:
    """Return the maximum of each curve in spans of equally many events."""
    moment_count = len(curves.reserved)
    span_count = min(moment_count, _MAX_SPANS)
    # The last moment has its own span, so that the curves end with the final values.
    span_starts = np.unique(
        np.append((np.arange(span_count) * moment_count) // span_count, moment_count - 1)
    )
    span_events = span_starts - 1
    times = None
    if snapshot.has_times and len(trace.events):
        times = tuple(trace.events.time_us[np.maximum(span_events, 0)].tolist())
    return Timeline(
        event=tuple(span_events.tolist()),
        time_us=times,
        requested_bytes=_span_maxima(curves.requested, span_starts),
        allocated_bytes=_span_maxima(curves.allocated, span_starts),
        reserved_bytes=_span_maxima(curves.reserved, span_starts),
    )


def _span_maxima(curve: Ints, span_starts: Ints) -> tuple[int, ...]:
    return tuple(np.maximum.reduceat(curve, span_starts).tolist())
