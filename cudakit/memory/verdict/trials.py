"""Replay the events before a failed allocation with changes that could let the request succeed.

The replay starts thousands of events before the failure: it allocates the memory in use at that moment again,
and repeats every event until the failed request. First the recorded settings are
replayed. The request must fail in this replay too; otherwise no change is replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from cudakit.errors import CudakitError
from cudakit.memory.result import ReplayedRemedy
from cudakit.memory.snapshot import POOL_NAMES, DeviceTrace, Events, Snapshot, take
from cudakit.memory.verdict.causes import is_shared
from cudakit.memory.verdict.failure import Failure
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
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.settings import Settings, with_changes
from cudakit.torch_rules.sizes import MIB
from cudakit.units import format_bytes, round_up_bytes

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
    failure: Failure,
    snapshot: Snapshot,
    trace: DeviceTrace,
    new_allocator: NewAllocator,
    limits: ReplayLimits = ReplayLimits(),
) -> tuple[ReplayedRemedy, ...]:
    """Return the result of a replay for each change.

    The result is empty if the failure does not recur, or if a replay would take too long.
    """
    with suppress(ReplayTooLong):
        return _replay_changes(failure, snapshot, trace, new_allocator, limits)
    return ()


def _replay_changes(
    failure: Failure,
    snapshot: Snapshot,
    trace: DeviceTrace,
    new_allocator: NewAllocator,
    limits: ReplayLimits,
) -> tuple[ReplayedRemedy, ...]:
    for event_count in limits.event_counts:
        recording = _recording_before(failure, snapshot, trace, event_count)
        settings = settings_of(recording)
        program = _until_failure(
            program_of(recording, garbage_collects=settings.garbage_collection_threshold > 0)
        )
        if len(program.allocations_before) > limits.max_blocks_before:
            break
        limit_bytes = _limit_bytes(failure, recording, program, settings)
        replay_change = partial(
            _replay_with_change, recording, program, new_allocator, limit_bytes, limits
        )
        if not replay_change(Change("recorded settings", None, settings)).succeeded:
            return tuple(
                _replayed_limit(failure, change, replay_change)
                if change.cause == "process_limit"
                else _replayed_remedy(change, replay_change)
                for change in _changes_to_replay(failure, snapshot, program, settings)
            )
        if event_count >= failure.event:
            break
    return ()


def _replay_with_change(
    recording: Recording,
    program: Program,
    new_allocator: NewAllocator,
    limit_bytes: int | None,
    limits: ReplayLimits,
    change: Change,
) -> ReplayedRequest:
    return replay_request(
        change.change_program(program),
        change.settings,
        new_allocator,
        limit_bytes=change.limit_bytes or limit_bytes,
        addresses=recording.segment_addresses(),
        search_again=recording.snapshot.settings.get("cudakit_search_again") is True,
        max_searched_blocks=limits.max_searched_blocks,
    )


def _replayed_remedy(
    change: Change, replay_change: Callable[[Change], ReplayedRequest]
) -> ReplayedRemedy:
    try:
        change_replay = replay_change(change)
    except CudakitError:  # the allocator lacks the setting
        change_replay = ReplayedRequest(succeeded=False, peak_reserved_bytes=0)
    return ReplayedRemedy(
        change=change.text,
        cause=change.cause,
        settings=change.settings_text,
        helps=change_replay.succeeded,
        recommended=False,
        peak_reserved_bytes=change_replay.peak_reserved_bytes,
    )


def _replayed_limit(
    failure: Failure, change: Change, replay_change: Callable[[Change], ReplayedRequest]
) -> ReplayedRemedy:
    """Return the first of several rising limits that suffices; the lowest limit if none does."""
    lowest_remedy = remedy_replay = _replayed_remedy(change, replay_change)
    for _ in range(_MAX_REPLAYED_LIMITS - 1):
        if remedy_replay.helps:
            return remedy_replay
        process_bytes = (change.limit_bytes or 0) - _library_bytes(failure)
        change = _limit_change(failure, change.settings, process_bytes + 1)
        remedy_replay = _replayed_remedy(change, replay_change)
    return remedy_replay if remedy_replay.helps else lowest_remedy


def _limit_change(failure: Failure, settings: Settings, needed_bytes: int) -> Change:
    """Return the change to the limit that is needed, rounded up to a size that the report can print."""
    limit_bytes = round_up_bytes(needed_bytes)
    return Change(
        f"a limit of {format_bytes(limit_bytes)}",
        None,
        settings,
        cause="process_limit",
        limit_bytes=limit_bytes + _library_bytes(failure),
    )


def _library_bytes(failure: Failure) -> int:
    """Return the memory of other libraries, which the replay also allocates."""
    return sum(reserved_bytes for _, reserved_bytes in failure.libraries)


def replayed_limit_bytes(failure: Failure, replays: Iterable[ReplayedRemedy]) -> int | None:
    """Return the limit of the process that let the request succeed in a replay; None without one."""
    for remedy_replay in replays:
        if remedy_replay.cause == "process_limit" and remedy_replay.helps:
            # A limit of the highest reserved memory refuses no request of this replay.
            return remedy_replay.peak_reserved_bytes - _library_bytes(failure)
    return None


def _recording_before(
    failure: Failure, snapshot: Snapshot, trace: DeviceTrace, event_count: int
) -> Recording:
    earlier_failures = np.flatnonzero(trace.events.action[: failure.event] == Action.OOM)
    first_event = max(failure.event - event_count, 0)
    if len(earlier_failures) > _MAX_REPLAYED_FAILURES:
        first_event = max(first_event, int(earlier_failures[-_MAX_REPLAYED_FAILURES]))
    if first_event == 0:
        return Recording(snapshot, trace, failure.trace_replay)
    events: Events = take(trace.events, np.arange(first_event, len(trace.events)))
    return recording_of(snapshot, replace(trace, events=events))


def _until_failure(program: Program) -> Program:
    """Return a program that ends with its last failed request."""
    failed_index = max(
        index for index, (_, step, _) in enumerate(program.steps) if step == Step.FAILED_ALLOC
    )
    return replace(program, steps=program.steps[: failed_index + 1])


def _limit_bytes(
    failure: Failure, recording: Recording, program: Program, settings: Settings
) -> int | None:
    library_bytes = _library_bytes(failure)
    if not failure.request.is_limited:
        return failure.request.reserved_bytes + library_bytes + failure.request.device_free_bytes
    if failure.device_total_bytes and failure.memory_fraction:
        return int(failure.memory_fraction * failure.device_total_bytes) + library_bytes
    recorded_limit = limit_of(recording, program, settings)
    return None if recorded_limit is None else recorded_limit.bytes


def _changes_to_replay(
    failure: Failure, snapshot: Snapshot, program: Program, settings: Settings
) -> Iterator[Change]:
    """Yield the changes to replay: more memory, then settings, then other streams and pools."""
    yield from _larger_limits(failure, settings)
    for change_text, setting_name, setting_value in _setting_changes(failure, settings):
        changed_settings = with_changes(settings, {setting_name: setting_value})
        if changed_settings != settings:
            yield Change(change_text, changed_settings.as_text(), changed_settings)
    if any(stream != NO_WAIT for stream in program.wait_streams):
        yield Change("frees that do not wait for other streams", None, settings, _without_waits)
    if any(stream != program.requests[0][1] for _, stream, _ in program.requests):
        yield Change("all requests on one stream", None, settings, _on_one_stream)
    private_pools = _private_pools(snapshot)
    if any(pool in private_pools for _, _, pool in program.requests):
        change_program = partial(_without_private_pools, private_pools=private_pools)
        yield Change("no private pools, default pool only", None, settings, change_program)


def _larger_limits(failure: Failure, settings: Settings) -> Iterator[Change]:
    request = failure.request
    if request.is_limited:
        highest_reserved_bytes = int(
            failure.trace_replay.curves.reserved[: failure.event + 1].max()
        )
        needed_limit = max(request.reserved_bytes + request.needed_bytes, highest_reserved_bytes)
        yield _limit_change(failure, settings, needed_limit)
    elif is_shared(failure):
        change_text = f"the {format_bytes(failure.outside_bytes)} outside this allocator"
        limit_bytes = failure.available_bytes + _library_bytes(failure)
        yield Change(change_text, None, settings, cause="other_processes", limit_bytes=limit_bytes)


def _setting_changes(failure: Failure, settings: Settings) -> Iterator[tuple[str, str, object]]:
    if not settings.expandable_segments:
        yield "expandable_segments:True", "expandable_segments", True
    split_mb = max(failure.request.size_bytes // MIB, _MIN_SPLIT_MB)
    if settings.max_split_size_bytes is not None:
        yield "no max_split_size_mb", "max_split_size_bytes", None
    else:
        for megabytes in sorted({_MIN_SPLIT_MB, 128, split_mb}):
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


def _private_pools(snapshot: Snapshot) -> frozenset[int]:
    """Return the indices of PyTorch's private pools: those of CUDA graphs and of MemPools."""
    return frozenset(
        index
        for index, pool in enumerate(snapshot.pools)
        if pool != (0, 0) and pool not in POOL_NAMES
    )


def _without_private_pools(program: Program, *, private_pools: frozenset[int]) -> Program:
    return replace(
        program,
        requests=tuple(
            (size_bytes, stream, 0 if pool in private_pools else pool)
            for size_bytes, stream, pool in program.requests
        ),
        steps=tuple(
            step for step in program.steps if step[1] not in (Step.RELEASE_POOL, Step.EMPTY_POOL)
        ),
    )
