"""The curves thinned for pictures, without losing a peak."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay.allocations import Curves
from cudakit.core.memory.result import Timeline
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot

_Ints = npt.NDArray[np.int64]

_MOST_SPANS = 2000


def timeline(snapshot: Snapshot, trace: DeviceTrace, curves: Curves) -> Timeline:
    """Cut the moments into spans of equal numbers of events, and keep the highest value of each."""
    moments = len(curves.reserved)
    spans = min(moments, _MOST_SPANS)
    # The last moment is a span of its own, so that the curves reach the end.
    first = np.unique(np.append((np.arange(spans) * moments) // spans, moments - 1))
    event = first - 1
    times = None
    if snapshot.has_times and len(trace.events):
        times = tuple(trace.events.time_us[np.maximum(event, 0)].tolist())
    return Timeline(
        event=tuple(event.tolist()),
        time_us=times,
        requested_bytes=_highest(curves.requested, first),
        allocated_bytes=_highest(curves.allocated, first),
        reserved_bytes=_highest(curves.reserved, first),
    )


def _highest(curve: _Ints, first: _Ints) -> tuple[int, ...]:
    return tuple(np.maximum.reduceat(curve, first).tolist())
