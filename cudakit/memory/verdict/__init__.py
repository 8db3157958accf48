"""Explain each failed allocation: its causes, the root cause first, and the remedies that help.

``failure`` collects the state of memory at a failed request. ``program_causes`` and ``device_causes`` have a
function for each cause, and ``causes`` defines the order of causes. ``trials`` replays the events before the
request with other settings.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cudakit.errors import one_of
from cudakit.memory.call_sites import StackTable
from cudakit.memory.growth import StepHistory
from cudakit.memory.history import History, state_at
from cudakit.memory.result import Cause, Oom, ReplayedRemedy
from cudakit.memory.snapshot import POOL_NAMES, DeviceTrace, Snapshot, time_of
from cudakit.memory.steps import last_mark_at, open_ranges_at
from cudakit.memory.verdict.causes import causes_of, limit_remedy
from cudakit.memory.verdict.failure import Failure, failure_at
from cudakit.memory.verdict.trials import replay_changes, replayed_limit_bytes
from cudakit.memory.whatif.replay import NewAllocator
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.oom_verdict import AllocatorCalls, verdict_of
from cudakit.units import format_bytes, format_count

# Maximum number of analyzed failures: a program that retries can fail thousands of times, and the layout of
# each failure takes long to compute.
MAX_OOMS = 100
# Number of the latest failed allocations whose earlier events are analyzed, which is slow.
MAX_WITH_HISTORY = 5


def find_ooms(
    snapshot: Snapshot,
    trace: DeviceTrace,
    stacks: StackTable,
    trace_replay: History,
    steps: StepHistory,
    new_allocator: NewAllocator | None,
) -> tuple[Oom, ...]:
    """Return the failed allocations of a trace; of more than MAX_OOMS, the first and the latest.

    Only the latest MAX_WITH_HISTORY failures have causes that need the earlier events. If ``new_allocator``
    is given and the last failure is a request to PyTorch, the remedies of this failure are replayed.
    """
    oom_events = np.flatnonzero(trace.events.action == Action.OOM)
    if len(oom_events) > MAX_OOMS:
        oom_events = np.concatenate((oom_events[:1], oom_events[1 - MAX_OOMS :]))
    ooms = []
    for event_index in oom_events.tolist():
        failure = failure_at(
            event_index,
            snapshot=snapshot,
            trace=trace,
            trace_replay=trace_replay,
            steps=steps,
            stacks=stacks,
        )
        replays: tuple[ReplayedRemedy, ...] = ()
        is_pytorch_pool = (
            snapshot.pools[max(int(trace.events.pool[event_index]), 0)] not in POOL_NAMES
        )
        if new_allocator is not None and event_index == oom_events[-1] and is_pytorch_pool:
            replays = replay_changes(failure, snapshot, trace, new_allocator)
        causes = causes_of(failure, with_history=event_index in oom_events[-MAX_WITH_HISTORY:])
        limit_bytes = replayed_limit_bytes(failure, replays)
        if limit_bytes is not None:
            causes = tuple(
                replace(cause, remedy=limit_remedy(failure, limit_bytes))
                if cause.id == "process_limit"
                else cause
                for cause in causes
            )
        ooms.append(_explained_oom(failure, causes, snapshot, trace, replays))
    return tuple(ooms)


def _explained_oom(
    failure: Failure,
    causes: tuple[Cause, ...],
    snapshot: Snapshot,
    trace: DeviceTrace,
    replays: tuple[ReplayedRemedy, ...],
) -> Oom:
    request = failure.request
    verdict = verdict_of(request).code
    replays = _with_recommendations(causes[0], verdict, replays)
    return Oom(
        event=failure.event,
        time_us=time_of(snapshot, trace, failure.event),
        size_bytes=request.size_bytes,
        device_free_bytes=request.device_free_bytes,
        state=state_at(failure.trace_replay, failure.layout, failure.event),
        largest_hole_bytes=int(failure.layout.free_block_size.max(initial=0)),
        free_bytes=request.free_bytes,
        short_bytes=request.short_bytes,
        fit=request.fit,
        limited=request.is_limited,
        verdict=verdict,
        sentence=f"Allocating {format_bytes(request.size_bytes)} failed: {causes[0].sentence}.",
        remedies=_remedies(causes, replays, request.calls),
        stack=failure.stacks.frames(failure.stack),
        site=failure.stacks.site_index(failure.stack),
        stream=failure.stream,
        pool=failure.pool,
        ranges=open_ranges_at(snapshot, trace, failure.event),
        last_mark=last_mark_at(snapshot, trace, failure.event),
        device_total_bytes=failure.device_total_bytes,
        causes=causes,
        replays=replays,
    )


def _with_recommendations(
    first_cause: Cause, verdict: str, replays: tuple[ReplayedRemedy, ...]
) -> tuple[ReplayedRemedy, ...]:
    """Recommend the changes that help and that remove the first cause.

    All other changes only delay the failure. Of several settings, the first that helps is recommended,
    because the later requests of the program are unknown. Returns no setting if the free memory belongs to
    another stream or pool, because no setting moves memory between streams or pools.
    """
    helpful_replays = [
        remedy_replay
        for remedy_replay in replays
        if remedy_replay.helps and remedy_replay.cause == first_cause.id
    ]
    setting_replays = [
        remedy_replay for remedy_replay in helpful_replays if remedy_replay.settings is not None
    ]
    if verdict == "pool":
        setting_replays = []
    recommended_replays = [
        *setting_replays[:1],
        *(remedy_replay for remedy_replay in helpful_replays if remedy_replay.settings is None),
    ]
    return tuple(
        replace(
            remedy_replay,
            recommended=any(
                remedy_replay is recommended_replay for recommended_replay in recommended_replays
            ),
        )
        for remedy_replay in replays
    )


def _remedies(
    causes: tuple[Cause, ...], replays: tuple[ReplayedRemedy, ...], calls: AllocatorCalls
) -> tuple[str, ...]:
    """Return the remedies: those that a replay confirmed first, then the remedy of each cause."""
    confirmed_remedies, first_remedy = [], causes[0].remedy
    for remedy_replay in replays:
        if not remedy_replay.recommended:
            continue
        replay_sentence = (
            " (replayed: the request fits, peak reserved"
            f" {format_bytes(remedy_replay.peak_reserved_bytes)})"
        )
        if remedy_replay.cause != "fragmentation":
            first_remedy += replay_sentence
        elif remedy_replay.settings is not None:
            confirmed_remedies.append(
                f"set {calls.settings_variable}={remedy_replay.settings}{replay_sentence}"
            )
        else:
            confirmed_remedies.append(
                f"change the program: {remedy_replay.change}{replay_sentence}"
            )
    return (*confirmed_remedies, first_remedy, *(cause.remedy for cause in causes[1:]))


def replays_sentence(oom: Oom) -> str:
    """Return the result of the replays in one sentence; "" if nothing was replayed."""
    setting_replays = [
        remedy_replay for remedy_replay in oom.replays if remedy_replay.settings is not None
    ]
    if not setting_replays:
        return ""
    helpful_changes = [
        remedy_replay.change for remedy_replay in setting_replays if remedy_replay.helps
    ]
    if not helpful_changes:
        return (
            f"No allocator setting helps: {format_count(len(setting_replays))} were replayed, and the request"
            " fails with each."
        )
    if oom.causes[0].id == "fragmentation":
        if any(remedy_replay.recommended for remedy_replay in setting_replays):
            return ""
        return (
            f"{one_of(helpful_changes)} would have let this request succeed, but no setting moves"
            " free memory to another stream or pool."
        )
    return f"{one_of(helpful_changes)} would have let this request succeed, but would only delay the failure."
