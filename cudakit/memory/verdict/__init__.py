"""Explain each failed allocation: its causes, the root cause first, and the remedies that help.

``failure`` collects the state of memory at a failed request. ``causes`` has a function for each cause, and
defines the order of causes. Here the events before the request are replayed with other settings.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from cudakit.errors import CudakitError, one_of
from cudakit.memory.history import History, state_at
from cudakit.memory.result import Cause, Oom, ReplayedRemedy
from cudakit.memory.snapshot import (
    POOL_NAMES,
    Action,
    DeviceTrace,
    Events,
    StackTable,
    take,
    time_of,
)
from cudakit.memory.steps import StepHistory, last_mark_at, open_ranges_at
from cudakit.memory.verdict.causes import causes_of, is_shared, limit_remedy
from cudakit.memory.verdict.failure import Failure, failure_at, obstacle_of
from cudakit.memory.whatif.program import (
    NO_WAIT,
    Program,
    Recording,
    Step,
    limit_of,
    program_of,
    recording_of,
    settings_of,
)
from cudakit.memory.whatif.replay import (
    NewAllocator,
    ReplayedRequest,
    ReplayTooLong,
    replay_request,
)
from cudakit.torch_rules.settings import Settings, with_changes
from cudakit.units import MIB, format_bytes, format_count, round_up_bytes

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
        for replay in replays:
            if replay.cause == "process_limit" and replay.helps:
                # A limit of the highest reserved memory refuses no request of this replay.
                limit_bytes = replay.peak_reserved_bytes - failure.library_bytes
                remedy = limit_remedy(failure, limit_bytes)
                causes = tuple(
                    replace(cause, remedy=remedy) if cause.id == replay.cause else cause
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


# --- Replay the events before a failed allocation with changes that could let the request succeed ---
#
# The replay starts thousands of events before the failure: it allocates the memory in use at that moment
# again, and repeats every event until the failed request. First the recorded settings are replayed. The
# request must fail in this replay too; otherwise no change is replayed.

# A failed request takes as long as about 20 events, because the allocator releases its cache and retries.
_MAX_REPLAYED_FAILURES: Final = 1_000
# PyTorch rejects max_split_size_mb up to 20.
_MIN_SPLIT_MB: Final = 21
# Maximum number of replayed limits. The limit decides when the allocator releases its cache: a limit that is
# enough for the memory at the failure can be too small in a replay.
_MAX_REPLAYED_LIMITS: Final = 8


@dataclass(frozen=True, slots=True)
class ReplayLimits:
    """Limits that bound the time of replays. Only a malicious file reaches the last two limits."""

    # Numbers of replayed events before the failure, tried in this order until the failure recurs.
    event_counts: tuple[int, ...] = (20_000, 60_000)
    # Maximum number of blocks in use at the first event. Every replay allocates these blocks first.
    max_blocks_before: int = 20_000
    # Maximum number of free blocks that one replay examines; see ``replay_request``.
    max_searched_blocks: int = 2_000_000


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the settings, the limit or the program that is replayed."""

    text: str  # name of the change in the report
    settings_text: str | None  # value of PYTORCH_CUDA_ALLOC_CONF; None if no setting changes
    settings: Settings
    change_program: Callable[[Program], Program] = lambda program: program
    cause: str = "fragmentation"  # id of the cause that the change removes
    limit_bytes: int | None = None  # limit of reserved memory; None for the recorded limit


def replay_changes(
    failure: Failure, new_allocator: NewAllocator, limits: ReplayLimits = ReplayLimits()
) -> tuple[ReplayedRemedy, ...]:
    """Return the result of a replay for each change.

    The result is empty if the failure does not recur, or if a replay would take too long.
    """
    with suppress(ReplayTooLong):
        for event_count in limits.event_counts:
            trial = _trial(failure, event_count, new_allocator, limits)
            if len(trial.program.allocations_before) > limits.max_blocks_before:
                break
            if not trial.replay(Change("recorded settings", None, trial.settings)).succeeded:
                return tuple(
                    _replayed_limit(trial, change)
                    if change.cause == "process_limit"
                    else _replayed_remedy(trial, change)
                    for change in _changes_to_replay(trial)
                )
            if event_count >= failure.event:
                break
    return ()


@dataclass(frozen=True, slots=True)
class _Trial:
    """The events before a failure as a program, and what each replay of this program needs."""

    failure: Failure
    recording: Recording
    program: Program
    settings: Settings  # the recorded settings
    new_allocator: NewAllocator
    limits: ReplayLimits
    limit_bytes: int | None

    def replay(self, change: Change) -> ReplayedRequest:
        return replay_request(
            change.change_program(self.program),
            change.settings,
            self.new_allocator,
            limit_bytes=change.limit_bytes or self.limit_bytes,
            addresses=self.recording.segment_addresses(),
            search_again=self.recording.searches_again,
            max_searched_blocks=self.limits.max_searched_blocks,
        )


def _trial(
    failure: Failure, event_count: int, new_allocator: NewAllocator, limits: ReplayLimits
) -> _Trial:
    recording = _recording_before(failure, event_count)
    settings = settings_of(recording)
    program = program_of(recording, garbage_collects=settings.garbage_collection_threshold > 0)
    # The program ends with its last failed request.
    last_failed = max(
        index for index, (_, step, _) in enumerate(program.steps) if step == Step.FAILED_ALLOC
    )
    program = replace(program, steps=program.steps[: last_failed + 1])
    request = failure.request
    limit_bytes: int | None
    if not request.is_limited:
        limit_bytes = request.reserved_bytes + failure.library_bytes + request.device_free_bytes
    elif failure.device_total_bytes and failure.memory_fraction:
        limit_bytes = int(failure.memory_fraction * failure.device_total_bytes)
        limit_bytes += failure.library_bytes
    else:
        recorded_limit = limit_of(recording, program, settings)
        limit_bytes = None if recorded_limit is None else recorded_limit.bytes
    return _Trial(failure, recording, program, settings, new_allocator, limits, limit_bytes)


def _recording_before(failure: Failure, event_count: int) -> Recording:
    snapshot, trace = failure.stacks.snapshot, failure.trace
    earlier_failures = np.flatnonzero(trace.events.action[: failure.event] == Action.OOM)
    first_event = max(failure.event - event_count, 0)
    if len(earlier_failures) > _MAX_REPLAYED_FAILURES:
        first_event = max(first_event, int(earlier_failures[-_MAX_REPLAYED_FAILURES]))
    if first_event == 0:
        return Recording(snapshot, trace, failure.history)
    events: Events = take(trace.events, slice(first_event, None))
    return recording_of(snapshot, replace(trace, events=events))


def _replayed_remedy(trial: _Trial, change: Change) -> ReplayedRemedy:
    try:
        replayed = trial.replay(change)
    except CudakitError:  # the allocator lacks the setting
        replayed = ReplayedRequest(succeeded=False, peak_reserved_bytes=0)
    return ReplayedRemedy(
        change=change.text,
        cause=change.cause,
        settings=change.settings_text,
        helps=replayed.succeeded,
        recommended=False,
        peak_reserved_bytes=replayed.peak_reserved_bytes,
    )


def _replayed_limit(trial: _Trial, change: Change) -> ReplayedRemedy:
    """Return the first of several rising limits that suffices; the lowest limit if none does."""
    lowest = remedy = _replayed_remedy(trial, change)
    for _ in range(_MAX_REPLAYED_LIMITS - 1):
        if remedy.helps:
            return remedy
        process_bytes = (change.limit_bytes or 0) - trial.failure.library_bytes
        change = _limit_change(trial.failure, change.settings, process_bytes + 1)
        remedy = _replayed_remedy(trial, change)
    return remedy if remedy.helps else lowest


# --- The changes: more memory, then settings, then other streams and pools -------------------------


def _changes_to_replay(trial: _Trial) -> Iterator[Change]:
    failure, program, settings = trial.failure, trial.program, trial.settings
    request = failure.request
    if request.is_limited:
        needed_bytes = request.reserved_bytes + request.needed_bytes
        needed_bytes = max(needed_bytes, failure.highest_reserved_bytes)
        yield _limit_change(failure, settings, needed_bytes)
    elif is_shared(failure):
        yield Change(
            f"the {format_bytes(failure.outside_bytes)} outside this allocator",
            None,
            settings,
            cause="other_processes",
            limit_bytes=failure.available_bytes + failure.library_bytes,
        )
    for text, field, value in _setting_changes(request.size_bytes, settings):
        changed_settings = with_changes(settings, {field: value})
        if changed_settings != settings:
            yield Change(text, changed_settings.as_text(), changed_settings)
    if any(stream != NO_WAIT for stream in program.wait_streams):
        yield Change("frees that do not wait for other streams", None, settings, _without_waits)
    if any(stream != program.requests[0][1] for _, stream, _ in program.requests):
        yield Change("all requests on one stream", None, settings, _on_one_stream)
    # The pools of CUDA graphs and MemPools.
    private_pools = {
        index
        for index, pool in enumerate(trial.recording.snapshot.pools)
        if pool != (0, 0) and pool not in POOL_NAMES
    }
    if any(pool in private_pools for _, _, pool in program.requests):
        change_program = partial(_without_pools, pools=private_pools)
        yield Change("no private pools, default pool only", None, settings, change_program)


def _limit_change(failure: Failure, settings: Settings, needed_bytes: int) -> Change:
    """Return the change to the limit that is needed, rounded up to a size that the report can print."""
    limit_bytes = round_up_bytes(needed_bytes)
    return Change(
        f"a limit of {format_bytes(limit_bytes)}",
        None,
        settings,
        cause="process_limit",
        # The replay also allocates the memory of other libraries.
        limit_bytes=limit_bytes + failure.library_bytes,
    )


def _setting_changes(request_bytes: int, settings: Settings) -> Iterator[tuple[str, str, object]]:
    """Yield the text, the field and the value of each setting that could help."""
    if not settings.expandable_segments:
        yield "expandable_segments:True", "expandable_segments", True
    if settings.max_split_size_bytes is not None:
        yield "no max_split_size_mb", "max_split_size_bytes", None
    else:
        for megabytes in sorted({_MIN_SPLIT_MB, 128, max(request_bytes // MIB, _MIN_SPLIT_MB)}):
            yield f"max_split_size_mb:{megabytes}", "max_split_size_bytes", megabytes * MIB
    if not any(settings.roundup_power2_divisions):
        divisions = (4,) * len(settings.roundup_power2_divisions)
        yield "roundup_power2_divisions:4", "roundup_power2_divisions", divisions
    if not settings.garbage_collection_threshold:
        yield "garbage_collection_threshold:0.8", "garbage_collection_threshold", 0.8


def _without_waits(program: Program) -> Program:
    return replace(
        program,
        wait_streams=(NO_WAIT,) * len(program.wait_streams),
        steps=tuple(step for step in program.steps if step[1] != Step.COMPLETE_FREE),
    )


def _on_one_stream(program: Program) -> Program:
    return replace(
        program, requests=tuple((size_bytes, 0, pool) for size_bytes, _, pool in program.requests)
    )


def _without_pools(program: Program, *, pools: Container[int]) -> Program:
    return replace(
        program,
        requests=tuple(
            (size_bytes, stream, 0 if pool in pools else pool)
            for size_bytes, stream, pool in program.requests
        ),
        steps=tuple(
            step for step in program.steps if step[1] not in (Step.RELEASE_POOL, Step.EMPTY_POOL)
        ),
    )
