"""Analyze Snapshots: compute all figures of a report."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from cudakit.errors import UsageError
from cudakit.memory.history import Curves, History, live_at, reconstruct, state_at
from cudakit.memory.holders import (
    churn_by_stack,
    facets,
    fragmentation,
    holders_by_line,
    holders_by_stack,
    segment_groups,
)
from cudakit.memory.lifetimes import Contradictions
from cudakit.memory.result import (
    DIFF_SCHEMA,
    SCHEMA,
    DeviceDiff,
    DeviceMemory,
    DiffResult,
    DiffRow,
    Health,
    Holder,
    MemoryResult,
    Moment,
    MomentDiff,
    Oom,
    Peak,
    Timeline,
    file_facts,
)
from cudakit.memory.selection import (
    MemorySpec,
    device_number,
    filter_trace,
    require_trace,
    select_devices,
)
from cudakit.memory.snapshot import (
    BEFORE_TRACE,
    Action,
    DeviceTrace,
    Snapshot,
    StackTable,
    time_of,
)
from cudakit.memory.steps import find_leaks, last_mark_at, open_ranges_at, step_history, steps_of
from cudakit.memory.verdict import find_ooms
from cudakit.memory.whatif.replay import NewAllocator
from cudakit.stacks import Frame

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
    pairs = select_devices(snapshots, spec)
    failed_traces = [id(trace) for _, trace in pairs if _has_oom(trace)]
    if spec.at == "oom":
        require_trace(pairs)
        if not failed_traces:
            raise UsageError(
                "no allocation failed in the selected traces",
                hint="show the peak or the end of the trace",
            )
    stacks = {id(snapshot): StackTable(snapshot) for snapshot in snapshots}
    devices = []
    for snapshot, trace in pairs:
        is_replayed = id(trace) in failed_traces[:_MAX_REPLAYED_DEVICES]
        replay_allocator = new_allocator if is_replayed else None
        devices.append(_analyze_device(stacks[id(snapshot)], trace, spec, replay_allocator))
    return MemoryResult(SCHEMA, tuple(map(file_facts, snapshots)), tuple(devices))


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
    history = reconstruct(snapshot, trace)
    steps = step_history(snapshot, trace, history)
    ooms: tuple[Oom, ...] = ()
    if _has_oom(full_trace):
        # The explanation covers all memory of the device, even with a filter.
        full_history, full_steps = history, steps
        if trace is not full_trace:
            full_history = reconstruct(snapshot, full_trace)
            full_steps = step_history(snapshot, full_trace, full_history)
        ooms = find_ooms(full_trace, stacks, full_history, full_steps, new_allocator)
    allocations, n_events = history.allocations, history.n_events
    moment_name, event = _chosen_event(snapshot, trace, history, spec.at)
    layout, layout_at_end = history.layout_at(event + 1), history.layout_at(n_events)
    live = live_at(allocations, event + 1)
    return DeviceMemory(
        file=snapshot.source,
        device=device_number(trace),
        events=n_events,
        exact=history.inconsistencies.total == 0 and not trace.warnings,
        inconsistencies=history.inconsistencies.total,
        end=state_at(history, layout_at_end, n_events),
        peak=peak_of(snapshot, trace, history),
        at=Moment(
            moment_name,
            event,
            time_of(snapshot, trace, event),
            state_at(history, layout, event + 1),
        ),
        health=health(snapshot, trace, history),
        ooms=ooms,
        holders=holders_by_stack(stacks, allocations, live),
        lines=holders_by_line(stacks, allocations, live),
        facets=facets(snapshot, trace, allocations, live),
        segments=segment_groups(snapshot, layout),
        fragmentation=fragmentation(stacks, allocations, layout),
        churn=churn_by_stack(snapshot, trace, stacks, allocations),
        steps=steps_of(steps, snapshot, trace, stacks, history),
        leaks=find_leaks(stacks, allocations, steps.bounds, n_events),
        timeline=timeline(snapshot, trace, history.curves),
        layout=layout_at_end,
        snapshot=snapshot,
        trace=trace,
        history=history,
    )


def _chosen_event(
    snapshot: Snapshot, trace: DeviceTrace, history: History, moment: str | int
) -> tuple[str, int]:
    n_events = history.n_events
    if moment == "end":
        return "end", n_events - 1
    if moment == "peak":
        return "peak", history.peak_moment() - 1
    if moment == "oom":
        ooms = np.flatnonzero(trace.events.action == Action.OOM)
        # Of several ranks, often only one runs out of memory; the others are shown at their end.
        return ("oom", int(ooms[-1])) if len(ooms) else ("end", n_events - 1)
    event_index = int(moment)
    if event_index >= 0:
        require_trace([(snapshot, trace)])
    if not -1 <= event_index < n_events:
        raise UsageError(
            f"{snapshot.source}: no event {event_index} in the trace",
            hint=f"events of the trace: 0 to {n_events - 1}",
        )
    return "event", event_index


# --- Totals of a moment, the peak, and the curves reduced for charts -------------------------------

# Maximum number of spans of a curve: a chart has fewer pixels.
_MAX_SPANS = 2000


def peak_of(snapshot: Snapshot, trace: DeviceTrace, history: History) -> Peak:
    """Return the first moment with the most requested memory, and the maximum of each curve."""
    curves, moment = history.curves, history.peak_moment()
    live_allocations = live_at(history.allocations, moment)
    return Peak(
        event=moment - 1,
        time_us=time_of(snapshot, trace, moment - 1),
        requested_bytes=int(curves.requested[moment]),
        allocated_bytes=int(curves.allocated[moment]),
        active_bytes=int(curves.active[moment]),
        reserved_bytes=int(curves.reserved[moment]),
        allocated_is_derived=not bool(history.allocations.size_known[live_allocations].all()),
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
    requested, allocated, reserved = (
        tuple(np.maximum.reduceat(curve, span_starts).tolist())
        for curve in (curves.requested, curves.allocated, curves.reserved)
    )
    return Timeline(tuple(span_events.tolist()), times, requested, allocated, reserved)


# --- The completeness and consistency of a trace, and advice on recording --------------------------

# Users choose round numbers for max_entries; a trace of such a length has probably overflowed.
_ROUND_LENGTHS = frozenset(factor * 10**power for factor in (1, 2, 5) for power in range(3, 9))
_MAX_SHARE_WITHOUT_STACK = 0.1


def health(snapshot: Snapshot, trace: DeviceTrace, history: History) -> Health:
    """Return the health of one device's trace."""
    allocations = history.allocations
    # An allocation from before the trace that was freed during the trace has no stack.
    can_have_stack = (allocations.begin != BEFORE_TRACE) | (allocations.live_block >= 0)
    allocation_stacks = allocations.stack[can_have_stack]
    share_without_stack = float(np.mean(allocation_stacks == 0)) if len(allocation_stacks) else 0.0
    overflowed = trace.overflowed
    if overflowed is None and history.begins_complete:
        overflowed = False
    elif overflowed is None and len(trace.events) in _ROUND_LENGTHS:
        overflowed = True
    return Health(
        contradictions=history.inconsistencies,
        begins_complete=history.begins_complete,
        overflowed=overflowed,
        without_stack=share_without_stack,
        has_times=snapshot.has_times,
        warnings=trace.warnings,
        advice=tuple(
            _recording_advice(
                snapshot, trace, history.inconsistencies, share_without_stack, overflowed
            )
        ),
    )


def _recording_advice(
    snapshot: Snapshot,
    trace: DeviceTrace,
    contradictions: Contradictions,
    share_without_stack: float,
    overflowed: bool | None,
) -> Iterator[str]:
    calls = snapshot.calls
    if not len(trace.events):
        yield (
            "The file has no trace, so only the state at the end is known: call"
            f" {calls.record_trace} before the first allocation."
        )
        return
    if overflowed:
        yield "Old events were dropped from the trace: record with a larger max_entries."
    # Kinds of events that the program must have caused, but that never occur in the trace.
    recorded_actions = set(np.unique(trace.events.action).tolist())
    for action, lost_count in (
        (Action.ALLOC, contradictions.lost_allocations),
        (Action.FREE_REQUESTED, contradictions.lost_requests),
        (Action.FREE_COMPLETED, contradictions.lost_frees),
    ):
        is_recorded_as_free = action != Action.ALLOC and Action.FREE in recorded_actions
        if lost_count and action not in recorded_actions and not is_recorded_as_free:
            yield (
                f"The trace lacks all {action.name.lower()} events, so figures before the end may be wrong:"
                f" record again, and call {calls.record_trace} without skip_actions."
            )
    if share_without_stack == 1:
        yield f"No allocation has a call stack: record with {calls.record_stacks}."
    elif share_without_stack > _MAX_SHARE_WITHOUT_STACK:
        yield (
            f"{share_without_stack:.0%} of the allocations have no call stack, for example those of the"
            f" backward pass, which runs in C++ threads: record with {calls.record_stacks}."
        )
    if not snapshot.has_times:
        yield "The file has no times (PyTorch before 2.2): events are shown in order only."


# --- Compare two snapshots by call stack: memory that grew, shrank, appeared and vanished ----------

_INSTALL_PREFIX = re.compile(r"^.*/(?:site-packages|dist-packages|python3[.\d]*)/")


@dataclass(frozen=True, slots=True)
class _Holdings:
    moment: Moment
    holders: tuple[Holder, ...]


# The number of a device, and its memory at the peak and at the end of its trace.
_DeviceMoments: TypeAlias = tuple[int | None, _Holdings, _Holdings]


def diff(earlier_snapshot: Snapshot, later_snapshot: Snapshot, spec: MemorySpec) -> DiffResult:
    """Compare two snapshots at their peaks and at their ends.

    Devices are paired by index; if each file has one device (two ranks), these two are paired. Raises
    UsageError if no devices can be paired.
    """
    before, after = (_device_moments(side, spec) for side in (earlier_snapshot, later_snapshot))
    if len(before) == len(after) == 1:
        pairs = [(before[0], after[0])]
    else:
        before_by_device = {moments[0]: moments for moments in before}
        pairs = [
            (before_by_device[moments[0]], moments)
            for moments in after
            if moments[0] in before_by_device
        ]
    if not pairs:
        raise UsageError(
            "the two snapshots have no common device",
            hint="compare snapshots of the same process at two times, or of the same rank in two runs",
        )
    return DiffResult(
        DIFF_SCHEMA,
        file_facts(earlier_snapshot),
        file_facts(later_snapshot),
        tuple(
            DeviceDiff(
                device=device,
                before_device=before_device,
                peak=_moment_diff(peak_before, peak_after),
                end=_moment_diff(end_before, end_after),
            )
            for (before_device, peak_before, end_before), (device, peak_after, end_after) in pairs
        ),
    )


def _device_moments(snapshot: Snapshot, spec: MemorySpec) -> list[_DeviceMoments]:
    devices: list[_DeviceMoments] = []
    for _, full_trace in select_devices([snapshot], spec):
        trace = filter_trace(snapshot, full_trace, stream=spec.stream, pool=spec.pool)
        history, stacks = reconstruct(snapshot, trace), StackTable(snapshot)
        peak, end = (
            _Holdings(
                Moment(
                    name,
                    moment - 1,
                    time_of(snapshot, trace, moment - 1),
                    state_at(history, history.layout_at(moment), moment),
                ),
                holders_by_stack(stacks, history.allocations, live_at(history.allocations, moment)),
            )
            for name, moment in (("peak", history.peak_moment()), ("end", history.n_events))
        )
        devices.append((device_number(trace), peak, end))
    return devices


def _moment_diff(before: _Holdings, after: _Holdings) -> MomentDiff:
    rows = sorted(_diff_rows(before.holders, after.holders), key=lambda row: -abs(row.change_bytes))
    before_bytes = before.moment.state.requested_bytes
    return MomentDiff(
        before=before.moment,
        after=after.moment,
        growth=after.moment.state.requested_bytes / before_bytes - 1 if before_bytes else None,
        grown=tuple(row for row in rows if row.change_bytes > 0 and row.before_count),
        shrunk=tuple(row for row in rows if row.change_bytes < 0 and row.after_count),
        appeared=tuple(row for row in rows if not row.before_count),
        vanished=tuple(row for row in rows if not row.after_count),
    )


def _diff_rows(
    earlier_holders: tuple[Holder, ...], later_holders: tuple[Holder, ...]
) -> Iterator[DiffRow]:
    sides_by_stack: defaultdict[object, tuple[list[Holder], list[Holder]]] = defaultdict(
        lambda: ([], [])
    )
    for side, holders in enumerate((earlier_holders, later_holders)):
        for holder in holders:
            sides_by_stack[tuple(map(_frame_key, holder.stack))][side].append(holder)
    for before, after in sides_by_stack.values():
        largest_holder = (after or before)[0]
        before_bytes, after_bytes = (sum(each.bytes for each in side) for side in (before, after))
        yield DiffRow(
            change_bytes=after_bytes - before_bytes,
            before_bytes=before_bytes,
            after_bytes=after_bytes,
            before_count=sum(holder.count for holder in before),
            after_count=sum(holder.count for holder in after),
            stack=largest_holder.stack,
            site=largest_holder.site,
        )


def _frame_key(frame: Frame) -> tuple[str, str]:
    """Return file and function: edits elsewhere in the file change line numbers."""
    name, n_prefixes = _INSTALL_PREFIX.subn("", frame.filename)
    # Two checkouts of a program have different roots: the last two parts of the path identify a file.
    return (name if n_prefixes else "/".join(name.split("/")[-2:])), frame.name
