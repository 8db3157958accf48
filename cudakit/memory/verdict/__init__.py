"""Explain each failed allocation: its causes, the root cause first, and the remedies that help.

``failure`` collects the state of memory at a failed request. ``causes`` has a function for each cause, and
defines the order of causes. ``trials`` replays the events before the request with other settings.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from cudakit.errors import one_of
from cudakit.memory.growth import StepHistory
from cudakit.memory.history import History, state_at
from cudakit.memory.result import Cause, Oom, ReplayedRemedy
from cudakit.memory.snapshot import POOL_NAMES, Action, DeviceTrace, StackTable, time_of
from cudakit.memory.steps import last_mark_at, open_ranges_at
from cudakit.memory.verdict.causes import causes_of, limit_remedy
from cudakit.memory.verdict.failure import Failure, failure_at, obstacle_of
from cudakit.memory.verdict.trials import replay_changes, replayed_limit_bytes
from cudakit.memory.whatif.replay import NewAllocator
from cudakit.units import format_bytes, format_count

# Maximum number of analyzed failures: a program that retries can fail thousands of times, and the layout of
# each failure takes long to compute.
MAX_OOMS = 100
# Number of the latest failed allocations whose earlier events are analyzed, which is slow.
MAX_WITH_HISTORY = 5


def find_ooms(
    trace: DeviceTrace,
    stacks: StackTable,
    history: History,
    steps: StepHistory,
    new_allocator: NewAllocator | None,
) -> tuple[Oom, ...]:
    """Return the failed allocations of a trace; of more than MAX_OOMS, the first and the latest.

    Only the latest MAX_WITH_HISTORY failures have causes that need the earlier events. If ``new_allocator``
    is given and the last failure is a request to PyTorch, the remedies of this failure are replayed.
    """
    events = np.flatnonzero(trace.events.action == Action.OOM)
    if len(events) > MAX_OOMS:
        events = np.concatenate((events[:1], events[1 - MAX_OOMS :]))
    pools = stacks.snapshot.pools
    ooms = []
    for event in events.tolist():
        failure = failure_at(event, trace=trace, history=history, steps=steps, stacks=stacks)
        replays: tuple[ReplayedRemedy, ...] = ()
        is_of_pytorch = pools[max(int(trace.events.pool[event]), 0)] not in POOL_NAMES
        if new_allocator is not None and event == events[-1] and is_of_pytorch:
            replays = replay_changes(failure, new_allocator)
        causes = causes_of(failure, with_history=event in events[-MAX_WITH_HISTORY:])
        limit_bytes = replayed_limit_bytes(failure, replays)
        if limit_bytes is not None:
            causes = tuple(
                replace(cause, remedy=limit_remedy(failure, limit_bytes))
                if cause.id == "process_limit"
                else cause
                for cause in causes
            )
        ooms.append(_explained_oom(failure, causes, replays))
    return tuple(ooms)


def _explained_oom(
    failure: Failure, causes: tuple[Cause, ...], replays: tuple[ReplayedRemedy, ...]
) -> Oom:
    request, snapshot, trace = failure.request, failure.stacks.snapshot, failure.trace
    verdict = obstacle_of(request).code
    replays = _with_recommendations(causes[0], verdict, replays)
    return Oom(
        event=failure.event,
        time_us=time_of(snapshot, trace, failure.event),
        size_bytes=request.size_bytes,
        device_free_bytes=request.device_free_bytes,
        state=state_at(failure.history, failure.layout, failure.event),
        largest_hole_bytes=int(failure.layout.free_block_size.max(initial=0)),
        free_bytes=request.free_bytes,
        short_bytes=request.short_bytes,
        fit=request.fit,
        limited=request.is_limited,
        verdict=verdict,
        sentence=f"Allocating {format_bytes(request.size_bytes)} failed: {causes[0].sentence}.",
        remedies=_remedies(causes, replays, request.calls.settings_variable),
        **failure.call_site,
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
    because the later requests of the program are unknown. No setting is recommended if the free memory
    belongs to another stream or pool, because no setting moves memory between streams or pools.
    """
    may_recommend_setting = verdict != "pool"
    recommended = []
    for replay in replays:
        helps = replay.helps and replay.cause == first_cause.id
        if helps and replay.settings is not None:
            helps, may_recommend_setting = may_recommend_setting, False
        recommended.append(replace(replay, recommended=helps))
    return tuple(recommended)


def _remedies(
    causes: tuple[Cause, ...], replays: tuple[ReplayedRemedy, ...], settings_variable: str
) -> tuple[str, ...]:
    """Return the remedies: those that a replay confirmed first, then the remedy of each cause."""
    confirmed_remedies, first_remedy = [], causes[0].remedy
    for replay in replays:
        if not replay.recommended:
            continue
        peak_text = format_bytes(replay.peak_reserved_bytes)
        result_text = f" (replayed: the request fits, peak reserved {peak_text})"
        if replay.cause != "fragmentation":
            first_remedy += result_text
        elif replay.settings is not None:
            confirmed_remedies.append(f"set {settings_variable}={replay.settings}{result_text}")
        else:
            confirmed_remedies.append(f"change the program: {replay.change}{result_text}")
    return (*confirmed_remedies, first_remedy, *(cause.remedy for cause in causes[1:]))


def replays_sentence(oom: Oom) -> str:
    """Return the result of the replays in one sentence; "" if nothing was replayed."""
    replays = [replay for replay in oom.replays if replay.settings is not None]
    if not replays:
        return ""
    helpful_changes = [replay.change for replay in replays if replay.helps]
    if not helpful_changes:
        return (
            f"No allocator setting helps: {format_count(len(replays))} were replayed, and the request"
            " fails with each."
        )
    benefit_text = f"{one_of(helpful_changes)} would have let this request succeed, but"
    if oom.causes[0].id != "fragmentation":
        return f"{benefit_text} would only delay the failure."
    if any(replay.recommended for replay in replays):
        return ""
    return f"{benefit_text} no setting moves free memory to another stream or pool."
