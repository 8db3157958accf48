"""Totals of one moment."""

from __future__ import annotations

from cudakit.core.memory.replay import Replay
from cudakit.core.memory.replay.layout import Layout
from cudakit.core.memory.replay.lifetimes import BEFORE
from cudakit.core.memory.result import State
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot


def state_at(replayed: Replay, layout: Layout, moment: int) -> State:
    """Read the curves at a moment; the layout of the same moment gives the numbers of pieces."""
    curves = replayed.curves
    active, allocated = int(curves.active[moment]), int(curves.allocated[moment])
    return State(
        allocated_bytes=allocated,
        requested_bytes=int(curves.requested[moment]),
        active_bytes=active,
        reserved_bytes=int(curves.reserved[moment]),
        pending_free_bytes=active - allocated,
        segments=len(layout.segments),
        blocks=len(layout.block_size),
        allocated_is_derived=not bool(replayed.allocations.size_known[layout.allocation].all()),
    )


def time_of(snapshot: Snapshot, trace: DeviceTrace, event: int) -> int | None:
    """Read the time of an event, Unix microseconds; None where the file has none."""
    if event == BEFORE or not snapshot.has_times or event >= len(trace.events):
        return None
    return int(trace.events.time_us[event])
