"""Analyze Snapshots: compute all figures of a report."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from cudakit.errors import UsageError
from cudakit.memory.call_sites import StackTable
from cudakit.memory.growth import StepHistory, find_leaks, step_history, steps_of
from cudakit.memory.history import History, live_at, reconstruct, state_at
from cudakit.memory.history.allocations import Curves
from cudakit.memory.history.lifetimes import Contradictions
from cudakit.memory.holders import (
    churn_by_stack,
    facets,
    fragmentation,
    holders_by_line,
    holders_by_stack,
    segment_groups,
)
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
from cudakit.memory.snapshot import BEFORE_TRACE, DeviceTrace, Ints, Snapshot, time_of
from cudakit.memory.steps import last_mark_at, open_ranges_at
from cudakit.memory.verdict import find_ooms
from cudakit.memory.whatif.replay import NewAllocator
from cudakit.stacks import Frame
from cudakit.torch_rules.actions import Action

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
        require_trace(selected_pairs)
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
    trace_replay = reconstruct(snapshot, trace)
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
    replay_and_steps: tuple[History, StepHistory] | None,
    new_allocator: NewAllocator | None,
) -> tuple[Oom, ...]:
    """Explain each failed allocation. The explanation covers all memory of the device, even with a filter.

    ``replay_and_steps`` has the replay and the step history of the full trace; None if they were not
    computed.
    """
    if not _has_oom(full_trace):
        return ()
    if replay_and_steps is None:
        trace_replay = reconstruct(snapshot, full_trace)
        replay_and_steps = trace_replay, step_history(snapshot, full_trace, trace_replay)
    return find_ooms(snapshot, full_trace, stacks, *replay_and_steps, new_allocator)


def _chosen_event(
    snapshot: Snapshot, trace: DeviceTrace, trace_replay: History, moment: str | int
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


def peak_of(snapshot: Snapshot, trace: DeviceTrace, trace_replay: History) -> Peak:
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


# --- The completeness and consistency of a trace, and advice on recording --------------------------

# Users choose round numbers for max_entries; a trace of such a length has probably overflowed.
_ROUND_LENGTHS = frozenset(factor * 10**power for factor in (1, 2, 5) for power in range(3, 9))
_MAX_SHARE_WITHOUT_STACK = 0.1


def health(snapshot: Snapshot, trace: DeviceTrace, trace_replay: History) -> Health:
    """Return the health of one device's trace."""
    contradictions, allocations = trace_replay.inconsistencies, trace_replay.allocations
    # An allocation from before the trace that was freed during the trace has no stack.
    can_have_stack = (allocations.begin != BEFORE_TRACE) | (allocations.live_block >= 0)
    allocation_stacks = allocations.stack[can_have_stack]
    share_without_stack = float(np.mean(allocation_stacks == 0)) if len(allocation_stacks) else 0.0
    has_overflowed = _has_overflowed(trace, trace_replay)
    return Health(
        contradictions=contradictions,
        begins_complete=trace_replay.begins_complete,
        overflowed=has_overflowed,
        without_stack=share_without_stack,
        has_times=snapshot.has_times,
        warnings=trace.warnings,
        advice=tuple(
            _recording_advice(snapshot, trace, contradictions, share_without_stack, has_overflowed)
        ),
    )


def _has_overflowed(trace: DeviceTrace, trace_replay: History) -> bool | None:
    if trace.overflowed is not None:
        return trace.overflowed
    if trace_replay.begins_complete:
        return False
    return True if len(trace.events) in _ROUND_LENGTHS else None


def _recording_advice(
    snapshot: Snapshot,
    trace: DeviceTrace,
    contradictions: Contradictions,
    share_without_stack: float,
    has_overflowed: bool | None,
) -> Iterator[str]:
    calls = snapshot.calls
    if not len(trace.events):
        yield (
            "The file has no trace, so only the state at the end is known: call"
            f" {calls.record_trace} before the first allocation."
        )
        return
    if has_overflowed:
        yield "Old events were dropped from the trace: record with a larger max_entries."
    for action in _skipped_actions(trace, contradictions):
        yield (
            f"The trace lacks all {action} events, so figures before the end may be wrong: record again,"
            f" and call {calls.record_trace} without skip_actions."
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


def _skipped_actions(trace: DeviceTrace, contradictions: Contradictions) -> Iterator[str]:
    """Yield the kinds of events that the program must have caused, but that never occur in the trace."""
    recorded_actions = set(np.unique(trace.events.action).tolist())
    for action, lost_count in (
        (Action.ALLOC, contradictions.lost_allocations),
        (Action.FREE_REQUESTED, contradictions.lost_requests),
        (Action.FREE_COMPLETED, contradictions.lost_frees),
    ):
        is_recorded_as_free = action != Action.ALLOC and Action.FREE in recorded_actions
        if lost_count and action not in recorded_actions and not is_recorded_as_free:
            yield action.name.lower()


# --- Compare two snapshots by call stack: memory that grew, shrank, appeared and vanished ----------

_INSTALL_PREFIX = re.compile(r"^.*/(?:site-packages|dist-packages|python3[.\d]*)/")

# Frames are matched by file and function, because edits elsewhere in the file change line numbers.
_FrameKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Holdings:
    """Live memory by call stack at one moment."""

    moment: Moment
    holders: tuple[Holder, ...]


@dataclass(frozen=True, slots=True)
class _DeviceMoments:
    """The live memory of one device at its peak and at the end of its trace."""

    device: int | None
    holdings_at_peak: _Holdings
    holdings_at_end: _Holdings


def diff(earlier_snapshot: Snapshot, later_snapshot: Snapshot, spec: MemorySpec) -> DiffResult:
    """Compare two snapshots at their peaks and at their ends.

    Devices are paired by index; if each file has one device (two ranks), these two are paired. Raises
    UsageError if no devices can be paired.
    """
    moments_by_side = [
        _device_moments(snapshot, spec) for snapshot in (earlier_snapshot, later_snapshot)
    ]
    devices = tuple(
        DeviceDiff(
            device=device_after.device,
            before_device=device_before.device,
            peak=_moment_diff(device_before.holdings_at_peak, device_after.holdings_at_peak),
            end=_moment_diff(device_before.holdings_at_end, device_after.holdings_at_end),
        )
        for device_before, device_after in _pair_devices(*moments_by_side)
    )
    if not devices:
        raise UsageError(
            "the two snapshots have no common device",
            hint="compare snapshots of the same process at two times, or of the same rank in two runs",
        )
    return DiffResult(
        DIFF_SCHEMA, file_facts(earlier_snapshot), file_facts(later_snapshot), devices
    )


def _device_moments(snapshot: Snapshot, spec: MemorySpec) -> list[_DeviceMoments]:
    devices = []
    for _, full_trace in select_devices([snapshot], spec):
        trace = filter_trace(snapshot, full_trace, stream=spec.stream, pool=spec.pool)
        trace_replay = reconstruct(snapshot, trace)
        stacks = StackTable(snapshot)
        holdings_at_peak = _holdings_at(
            stacks, trace, trace_replay, "peak", trace_replay.peak_moment() - 1
        )
        holdings_at_end = _holdings_at(
            stacks, trace, trace_replay, "end", trace_replay.n_events - 1
        )
        devices.append(_DeviceMoments(device_number(trace), holdings_at_peak, holdings_at_end))
    return devices


def _holdings_at(
    stacks: StackTable, trace: DeviceTrace, trace_replay: History, name: str, event_index: int
) -> _Holdings:
    live_allocations = live_at(trace_replay.allocations, event_index + 1)
    state = state_at(trace_replay, trace_replay.layout_at(event_index + 1), event_index + 1)
    return _Holdings(
        Moment(name, event_index, time_of(stacks.snapshot, trace, event_index), state),
        holders_by_stack(stacks, trace_replay.allocations, live_allocations),
    )


def _pair_devices(
    moments_before: list[_DeviceMoments], moments_after: list[_DeviceMoments]
) -> Iterator[tuple[_DeviceMoments, _DeviceMoments]]:
    if len(moments_before) == len(moments_after) == 1:
        yield moments_before[0], moments_after[0]
        return
    before_by_device = {device.device: device for device in moments_before}
    for device in moments_after:
        if device.device in before_by_device:
            yield before_by_device[device.device], device


def _moment_diff(holdings_before: _Holdings, holdings_after: _Holdings) -> MomentDiff:
    diff_rows = sorted(
        _diff_rows(holdings_before.holders, holdings_after.holders),
        key=lambda row: -abs(row.change_bytes),
    )
    before_bytes, after_bytes = (
        holdings.moment.state.requested_bytes for holdings in (holdings_before, holdings_after)
    )
    return MomentDiff(
        before=holdings_before.moment,
        after=holdings_after.moment,
        growth=after_bytes / before_bytes - 1 if before_bytes else None,
        grown=tuple(row for row in diff_rows if row.change_bytes > 0 and row.before_count),
        shrunk=tuple(row for row in diff_rows if row.change_bytes < 0 and row.after_count),
        appeared=tuple(row for row in diff_rows if not row.before_count),
        vanished=tuple(row for row in diff_rows if not row.after_count),
    )


def _frame_key(frame: Frame) -> _FrameKey:
    name, n_prefixes = _INSTALL_PREFIX.subn("", frame.filename)
    # Two checkouts of a program have different roots: the last two parts of the path identify a file.
    return (name if n_prefixes else "/".join(name.split("/")[-2:])), frame.name


def _diff_rows(
    earlier_holders: tuple[Holder, ...], later_holders: tuple[Holder, ...]
) -> Iterator[DiffRow]:
    holders_by_stack: defaultdict[tuple[_FrameKey, ...], tuple[list[Holder], list[Holder]]] = (
        defaultdict(lambda: ([], []))
    )
    for index, holders_of_side in enumerate((earlier_holders, later_holders)):
        for holder in holders_of_side:
            holders_by_stack[tuple(map(_frame_key, holder.stack))][index].append(holder)
    for holders_before, holders_after in holders_by_stack.values():
        largest_holder = (holders_after or holders_before)[0]
        before_bytes, after_bytes = (
            sum(holder.bytes for holder in holders) for holders in (holders_before, holders_after)
        )
        yield DiffRow(
            change_bytes=after_bytes - before_bytes,
            before_bytes=before_bytes,
            after_bytes=after_bytes,
            before_count=sum(holder.count for holder in holders_before),
            after_count=sum(holder.count for holder in holders_after),
            stack=largest_holder.stack,
            site=largest_holder.site,
        )
