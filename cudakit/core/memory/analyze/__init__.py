"""From a Snapshot to the MemoryResult: every number that a report shows, and nothing of how."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.core.memory.analyze.churn import churn
from cudakit.core.memory.analyze.fragmentation import fragmentation, segment_groups
from cudakit.core.memory.analyze.health import health
from cudakit.core.memory.analyze.holders import facets, holders_by_line, holders_by_stack
from cudakit.core.memory.analyze.leaks import find_leaks
from cudakit.core.memory.analyze.oom import find_ooms
from cudakit.core.memory.analyze.sites import Stacks
from cudakit.core.memory.analyze.state import state_at, time_of
from cudakit.core.memory.analyze.timeline import timeline
from cudakit.core.memory.filter import filter_trace
from cudakit.core.memory.replay import Replay, replay
from cudakit.core.memory.replay.layout import live_at
from cudakit.core.memory.result import (
    SCHEMA,
    DeviceMemory,
    FileFacts,
    MemoryResult,
    Moment,
    Peak,
)
from cudakit.core.memory.snapshot import HOST, DeviceTrace, Snapshot
from cudakit.errors import UsageError
from cudakit.torch_rules.actions import Action


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """What to look at: the moment of the tables, and one device, stream or pool of several."""

    at: str | int = "peak"  # "peak", "end", "oom", or the index of an event
    device: int | None = None  # HOST is pinned host memory
    stream: int | None = None  # number by first appearance, 0 is the default stream
    pool: tuple[int, int] | None = None


def analyze(snapshots: Sequence[Snapshot], spec: MemorySpec) -> MemoryResult:
    """Answer a MemorySpec for one or more snapshots.

    Raises UsageError when no file has the device, the stream, the pool or the event asked for.
    """
    chosen = [
        (snapshot, trace)
        for snapshot in snapshots
        for trace in snapshot.devices
        if spec.device is None or trace.device == spec.device
    ]
    if not chosen:
        raise _no_such_device(snapshots, spec)
    if spec.at == "oom" and not any(_ran_out(trace) for _, trace in chosen):
        raise UsageError("no allocation failed in this trace", hint="use --at peak or --at end")
    return MemoryResult(
        schema=SCHEMA,
        files=tuple(FileFacts(s.source, s.format, s.size_bytes, s.settings) for s in snapshots),
        devices=tuple(analyze_device(snapshot, trace, spec) for snapshot, trace in chosen),
    )


def _no_such_device(snapshots: Sequence[Snapshot], spec: MemorySpec) -> UsageError:
    known = sorted({trace.device for snapshot in snapshots for trace in snapshot.devices})
    words = ", ".join("host" if device == HOST else str(device) for device in known)
    wanted = "host" if spec.device == HOST else spec.device
    return UsageError(f"no device {wanted} in the snapshot", hint=f"devices: {words}")


def _ran_out(trace: DeviceTrace) -> bool:
    return bool((trace.events.action == Action.OOM).any())


def analyze_device(snapshot: Snapshot, trace: DeviceTrace, spec: MemorySpec) -> DeviceMemory:
    """Answer a MemorySpec for one device."""
    whole, trace = trace, filter_trace(snapshot, trace, stream=spec.stream, pool=spec.pool)
    replayed = replay(snapshot, trace)
    # Why an allocation failed is a matter of all that the process held.
    whole_replayed = replayed if trace is whole else replay(snapshot, whole)
    allocations, n = replayed.allocations, replayed.n_events
    stacks = Stacks(snapshot)
    name, event = _event_of(trace, replayed, spec.at)
    then, end = replayed.layout_at(event + 1), replayed.layout_at(n)
    live = live_at(allocations, event + 1)
    steps, leaks = find_leaks(snapshot, trace, stacks, allocations)
    return DeviceMemory(
        file=snapshot.source,
        device=None if trace.device == HOST else trace.device,
        events=n,
        exact=replayed.inconsistencies.total == 0 and not trace.warnings,
        inconsistencies=replayed.inconsistencies.total,
        end=state_at(replayed, end, n),
        peak=_peak(snapshot, trace, replayed),
        at=Moment(
            name, event, time_of(snapshot, trace, event), state_at(replayed, then, event + 1)
        ),
        health=health(snapshot, trace, replayed),
        ooms=find_ooms(snapshot, whole, stacks, whole_replayed),
        holders=holders_by_stack(stacks, allocations, live),
        lines=holders_by_line(stacks, allocations, live),
        facets=facets(snapshot, trace, allocations, live),
        segments=segment_groups(snapshot, then),
        fragmentation=fragmentation(stacks, allocations, then),
        churn=churn(snapshot, trace, stacks, allocations),
        steps=steps,
        leaks=leaks,
        timeline=timeline(snapshot, trace, replayed.curves),
        layout=end,
        snapshot=snapshot,
        trace=trace,
        replay=replayed,
    )


def _event_of(trace: DeviceTrace, replayed: Replay, at: str | int) -> tuple[str, int]:
    n = replayed.n_events
    if at == "end":
        return "end", n - 1
    if at == "peak":
        return "peak", replayed.peak_moment() - 1
    if at == "oom":
        ooms = np.flatnonzero(trace.events.action == Action.OOM)
        # Of several ranks, often one only runs out: the others are shown at their end.
        return ("oom", int(ooms[-1])) if len(ooms) else ("end", n - 1)
    index = int(at)
    if not -1 <= index < n:
        raise UsageError(
            f"there is no event {index} on device {trace.device}",
            hint=f"events run from 0 to {n - 1}",
        )
    return "event", index


def _peak_moment(replayed: Replay) -> int:
    return int(replayed.curves.requested.argmax())


def _peak(snapshot: Snapshot, trace: DeviceTrace, replayed: Replay) -> Peak:
    curves, moment = replayed.curves, replayed.peak_moment()
    live = live_at(replayed.allocations, moment)
    return Peak(
        event=moment - 1,
        time_us=time_of(snapshot, trace, moment - 1),
        requested_bytes=int(curves.requested[moment]),
        allocated_bytes=int(curves.allocated[moment]),
        active_bytes=int(curves.active[moment]),
        reserved_bytes=int(curves.reserved[moment]),
        allocated_is_derived=not bool(replayed.allocations.size_known[live].all()),
        highest_allocated_bytes=int(curves.allocated.max()),
        highest_active_bytes=int(curves.active.max()),
        highest_reserved_bytes=int(curves.reserved.max()),
    )
