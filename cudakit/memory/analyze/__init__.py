"""Analyze Snapshots: compute all figures of a report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.errors import SnapshotError, UsageError
from cudakit.memory.analyze.call_sites import StackTable
from cudakit.memory.analyze.fragmentation import fragmentation, segment_groups
from cudakit.memory.analyze.health import health
from cudakit.memory.analyze.holders import (
    churn_by_stack,
    facets,
    holders_by_line,
    holders_by_stack,
)
from cudakit.memory.analyze.leaks import find_leaks
from cudakit.memory.analyze.moments import peak_of, state_at, time_of, timeline
from cudakit.memory.analyze.step_peaks import StepHistory, step_history, steps_of
from cudakit.memory.filter import filter_trace
from cudakit.memory.replay import Replay, replay
from cudakit.memory.replay.layout import live_at
from cudakit.memory.result import SCHEMA, DeviceMemory, MemoryResult, Moment, Oom, file_facts
from cudakit.memory.snapshot import HOST, DeviceTrace, Snapshot
from cudakit.memory.verdict import find_ooms
from cudakit.memory.whatif.replay import NewAllocator
from cudakit.torch_rules.actions import Action


@dataclass(frozen=True, slots=True)
class MemorySpec:
    """The moment to analyze, and the device, stream and pool to select."""

    at: str | int = "peak"  # "peak", "end", "oom", or the index of an event
    device: int | None = None  # device index; HOST is pinned host memory
    stream: int | None = None  # stream number; 0 is the default stream
    pool: tuple[int, int] | None = None


# Maximum number of devices whose remedies are replayed: the replays of one device can take seconds.
_MAX_REPLAYED_DEVICES = 8


def analyze(
    snapshots: Sequence[Snapshot], spec: MemorySpec, new_allocator: NewAllocator | None = None
) -> MemoryResult:
    """Return the result for one or more snapshots.

    With ``new_allocator``, remedies of failed allocations are replayed before they are recommended, for the
    first 8 devices with a failed allocation. Raises UsageError if no snapshot has the device, stream,
    pool or event.
    """
    selected_pairs = select_devices(snapshots, spec)
    if spec.at == "oom":
        _require_trace(selected_pairs)
    if spec.at == "oom" and not any(_has_oom(trace) for _, trace in selected_pairs):
        raise UsageError(
            "no allocation failed in the selected traces",
            hint="show the peak or the end of the trace",
        )
    failed_device_ids = [id(trace) for _, trace in selected_pairs if _has_oom(trace)]
    replayed_device_ids = failed_device_ids[:_MAX_REPLAYED_DEVICES]
    stacks = {id(snapshot): StackTable(snapshot) for snapshot in snapshots}
    return MemoryResult(
        schema=SCHEMA,
        files=tuple(map(file_facts, snapshots)),
        devices=tuple(
            _analyze_device(
                stacks[id(snapshot)],
                trace,
                spec,
                new_allocator if id(trace) in replayed_device_ids else None,
            )
            for snapshot, trace in selected_pairs
        ),
    )


def select_devices(
    snapshots: Sequence[Snapshot], spec: MemorySpec
) -> list[tuple[Snapshot, DeviceTrace]]:
    """Return the devices that a MemorySpec selects. Raises UsageError if there are none."""
    snapshot_trace_pairs = [
        (snapshot, trace) for snapshot in snapshots for trace in snapshot.devices
    ]
    selected_pairs = [
        snapshot_trace_pair
        for snapshot_trace_pair in snapshot_trace_pairs
        if spec.device is None or snapshot_trace_pair[1].device == spec.device
    ]
    if not selected_pairs:
        indices = sorted({trace.device for _, trace in snapshot_trace_pairs})
        available_devices_text = ", ".join(
            "host" if device == HOST else str(device) for device in indices
        )
        selected_name = "pinned host memory" if spec.device == HOST else f"device {spec.device}"
        raise UsageError(
            f"no {selected_name} in the snapshots"
            if len(snapshots) > 1
            else f"{snapshots[0].source}: no {selected_name} in the snapshot",
            hint=f"devices: {available_devices_text}",
        )
    return selected_pairs


def _require_trace(snapshot_trace_pairs: Sequence[tuple[Snapshot, DeviceTrace]]) -> None:
    """Raise SnapshotError if none of the traces has an event."""
    if not any(len(trace.events) for _, trace in snapshot_trace_pairs):
        snapshot = snapshot_trace_pairs[0][0]
        raise SnapshotError(
            f"{snapshot.source}: the file has no trace; only its end is known",
            hint=f"show the end, or record a trace: cudakit run --memory, or {snapshot.calls.record_trace}",
        )


def device_number(trace: DeviceTrace) -> int | None:
    """Return the device index for results; None: pinned host memory."""
    return None if trace.device == HOST else trace.device


def _has_oom(trace: DeviceTrace) -> bool:
    return bool((trace.events.action == Action.OOM).any())


def _analyze_device(
    stacks: StackTable,
    full_trace: DeviceTrace,
    spec: MemorySpec,
    new_allocator: NewAllocator | None,
) -> DeviceMemory:
    snapshot = stacks.snapshot
    trace = filter_trace(snapshot, full_trace, stream=spec.stream, pool=spec.pool)
    trace_replay = replay(snapshot, trace)
    allocations, n_events = trace_replay.allocations, trace_replay.n_events
    moment_name, event_index = _chosen_event(snapshot, trace, trace_replay, spec.at)
    layout_at_event, layout_at_end = (
        trace_replay.layout_at(event_index + 1),
        trace_replay.layout_at(n_events),
    )
    live_allocations = live_at(allocations, event_index + 1)
    steps = step_history(snapshot, trace, trace_replay)
    return DeviceMemory(
        file=snapshot.source,
        device=device_number(trace),
        events=n_events,
        exact=trace_replay.inconsistencies.total == 0 and not trace.warnings,
        inconsistencies=trace_replay.inconsistencies.total,
        end=state_at(trace_replay, layout_at_end, n_events),
        peak=peak_of(snapshot, trace, trace_replay),
        at=Moment(
            moment_name,
            event_index,
            time_of(snapshot, trace, event_index),
            state_at(trace_replay, layout_at_event, event_index + 1),
        ),
        health=health(snapshot, trace, trace_replay),
        ooms=_explain_ooms(
            snapshot,
            full_trace,
            stacks,
            (trace_replay, steps) if trace is full_trace else None,
            new_allocator,
        ),
        holders=holders_by_stack(stacks, allocations, live_allocations),
        lines=holders_by_line(stacks, allocations, live_allocations),
        facets=facets(snapshot, trace, allocations, live_allocations),
        segments=segment_groups(snapshot, layout_at_event),
        fragmentation=fragmentation(stacks, allocations, layout_at_event),
        churn=churn_by_stack(snapshot, trace, stacks, allocations),
        steps=steps_of(steps, snapshot, trace, stacks, trace_replay),
        leaks=find_leaks(stacks, allocations, steps.bounds, n_events),
        timeline=timeline(snapshot, trace, trace_replay.curves),
        layout=layout_at_end,
        snapshot=snapshot,
        trace=trace,
        replay=trace_replay,
    )


def _explain_ooms(
    snapshot: Snapshot,
    full_trace: DeviceTrace,
    stacks: StackTable,
    replay_and_steps: tuple[Replay, StepHistory] | None,
    new_allocator: NewAllocator | None,
) -> tuple[Oom, ...]:
    """Explain each failed allocation. The explanation covers all memory of the device, even with a filter.

    ``replay_and_steps`` has the replay and the step history of the full trace; None if they were not
    computed.
    """
    if not _has_oom(full_trace):
        return ()
    if replay_and_steps is None:
        trace_replay = replay(snapshot, full_trace)
        replay_and_steps = trace_replay, step_history(snapshot, full_trace, trace_replay)
    return find_ooms(snapshot, full_trace, stacks, *replay_and_steps, new_allocator)


def _chosen_event(
    snapshot: Snapshot, trace: DeviceTrace, trace_replay: Replay, moment: str | int
) -> tuple[str, int]:
    n_events = trace_replay.n_events
    if moment == "end":
        return "end", n_events - 1
    if moment == "peak":
        return "peak", trace_replay.peak_moment() - 1
    if moment == "oom":
        ooms = np.flatnonzero(trace.events.action == Action.OOM)
        # Of several ranks, often only one runs out of memory; the others are shown at their end.
        return ("oom", int(ooms[-1])) if len(ooms) else ("end", n_events - 1)
    event_index = int(moment)
    if event_index >= 0:
        _require_trace([(snapshot, trace)])
    if not -1 <= event_index < n_events:
        raise UsageError(
            f"{snapshot.source}: no event {event_index} in the trace",
            hint=f"events of the trace: 0 to {n_events - 1}",
        )
    return "event", event_index
