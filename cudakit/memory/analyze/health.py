"""The completeness and consistency of a trace, and advice on recording."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from cudakit.memory.replay import Replay
from cudakit.memory.replay.lifetimes import BEFORE_TRACE, Contradictions
from cudakit.memory.result import Health
from cudakit.memory.snapshot import DeviceTrace, Snapshot
from cudakit.torch_rules.actions import Action

# Users choose round numbers for max_entries; a trace of such a length has probably overflowed.
_ROUND_LENGTHS = frozenset(factor * 10**power for factor in (1, 2, 5) for power in range(3, 9))
_MAX_SHARE_WITHOUT_STACK = 0.1


def health(snapshot: Snapshot, trace: DeviceTrace, trace_replay: Replay) -> Health:
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


def _has_overflowed(trace: DeviceTrace, trace_replay: Replay) -> bool | None:
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
