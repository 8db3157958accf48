"""The recorded program as calls of an allocator: requests, frees and releases."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.memory.history import History, reconstruct
from cudakit.memory.history.allocations import Allocations, Curves
from cudakit.memory.result import Limit, MemoryTotals, Outcome
from cudakit.memory.selection import pytorch_trace
from cudakit.memory.snapshot import (
    BEFORE_TRACE,
    Action,
    DeviceTrace,
    Events,
    Ids,
    Ints,
    Mask,
    Snapshot,
)
from cudakit.torch_rules.settings import Settings, flag_of_device, recorded_settings, with_changes
from cudakit.torch_rules.sizes import rounded, segment_size

NO_WAIT = -1


@dataclass(frozen=True, slots=True)
class Recording:
    """One device of a snapshot; settings are those at the time of the snapshot."""

    snapshot: Snapshot
    trace: DeviceTrace
    history: History

    def has_action(self, action: Action) -> bool:
        """Return whether an action occurs in the trace."""
        return bool((self.trace.events.action == action).any())

    def count_actions(self, *actions: Action) -> int:
        """Return the number of events with one of these actions."""
        return int(np.isin(self.trace.events.action, actions).sum())

    def failed_requests(self) -> list[int]:
        """Return the events of failed allocations."""
        return np.flatnonzero(self.trace.events.action == Action.OOM).tolist()

    @property
    def searches_again(self) -> bool:
        """Whether cudakit's allocator recorded this, with its option ``search_again``."""
        return self.snapshot.settings.get("cudakit_search_again") is True

    def segment_addresses(self) -> Iterator[tuple[int, int]]:
        """Yield the addresses and sizes of the segments in the order of their allocation."""
        segments = self.history.segments.plain_segments
        order = np.argsort(segments.begin, kind="stable")
        return zip(segments.address[order].tolist(), segments.size[order].tolist(), strict=True)


def recording_of(snapshot: Snapshot, trace: DeviceTrace) -> Recording:
    """Return the recording of PyTorch's memory of a device of a snapshot."""
    trace = pytorch_trace(snapshot, trace)
    return Recording(snapshot, trace, reconstruct(snapshot, trace))


class Step(IntEnum):
    """A call of the allocator."""

    ALLOC = 0
    FREE = 1
    COMPLETE_FREE = 2  # other streams have finished with the freed block
    FAILED_ALLOC = 3
    RELEASE_POOL = 4
    EMPTY_POOL = 5
    EMPTY_CACHE = 6


# A step with its event index, and the index of its allocation, request or pool.
NumberedStep: TypeAlias = tuple[int, Step, int]
# A request: bytes, stream number, pool index.
Request: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Program:
    """The allocations from before the trace, and the steps of the trace."""

    requests: tuple[Request, ...]  # requests of all allocations, then failed requests
    # For each allocation, the number of the stream that its free waits for in the replay, or NO_WAIT. The
    # trace does not record which streams a free waited for.
    wait_streams: tuple[int, ...]
    allocations_before: tuple[int, ...]  # allocations from before the trace, by address
    pending_frees_before: tuple[
        int, ...
    ]  # the allocations in ``allocations_before`` that were pending free
    steps: tuple[NumberedStep, ...]
    releases: tuple[Release, ...]
    peak_event: int  # index of the last event before the peak
    frees_have_stacks: bool  # whether frees have their own call stacks


EMPTY_PROGRAM = Program((), (), (), (), (), (), -1, frees_have_stacks=False)


def program_of(recording: Recording, *, garbage_collects: bool) -> Program:
    """Return the program of a recording; ``garbage_collects`` as in ``releases_of``."""
    allocations, events = recording.history.allocations, recording.trace.events
    n_events = len(events)
    wait_streams = _wait_streams(allocations, events)
    completes_pending = _completes_pending(allocations, wait_streams, n_events)
    frees_have_stacks = _frees_have_stacks(allocations, events)
    releases = releases_of(
        events,
        recording.history.curves,
        completes_pending,
        garbage_collects=garbage_collects,
        frees_have_stacks=frees_have_stacks,
    )
    failed_requests = recording.failed_requests()
    # The second number of each tuple orders the steps of one event.
    ordered_steps = [
        *_lifetime_steps(allocations, wait_streams, releases, n_events),
        *(
            (event_index, 0, Step.FAILED_ALLOC, len(allocations) + index)
            for index, event_index in enumerate(failed_requests)
        ),
        *_release_steps(allocations, releases),
    ]
    ordered_steps.sort()
    allocations_before = np.flatnonzero(allocations.begin == BEFORE_TRACE)
    return Program(
        requests=(
            *_requests(allocations.requested, allocations.stream, allocations.pool),
            *_requests(
                events.size[failed_requests],
                events.stream[failed_requests],
                np.maximum(events.pool[failed_requests], 0),
            ),
        ),
        wait_streams=wait_streams,
        allocations_before=tuple(
            allocations_before[
                np.argsort(allocations.address[allocations_before], kind="stable")
            ].tolist()
        ),
        pending_frees_before=tuple(
            allocations_before[
                allocations.free_request[allocations_before] == BEFORE_TRACE
            ].tolist()
        ),
        steps=tuple(
            (event_index, step, target_index)
            for event_index, _, step, target_index in ordered_steps
        ),
        releases=releases,
        peak_event=recording.history.peak_moment() - 1,
        frees_have_stacks=frees_have_stacks,
    )


def _requests(sizes: Ints, streams: Ids, pools: Ids) -> Iterator[Request]:
    return zip(sizes.tolist(), streams.tolist(), pools.tolist(), strict=True)


def _wait_streams(allocations: Allocations, events: Events) -> tuple[int, ...]:
    """Return the stream that each free waits for in the replay, or NO_WAIT.

    A trace does not record which streams a free waited for. The replay uses the smallest number of streams
    that explains the recorded completions: on one stream, frees complete in the order of their requests.
    """
    wait_streams = np.full(len(allocations), NO_WAIT)
    waited_frees = _waited_frees(allocations, events)
    request_order = np.lexsort(
        (allocations.end[waited_frees], allocations.free_request[waited_frees])
    )
    last_completions: list[int] = []  # the latest completion of each stream, ascending
    stream_numbers: list[int] = []  # stream numbers in the same order
    for allocation_index in waited_frees[request_order].tolist():
        end_event = int(allocations.end[allocation_index])
        insert_position = bisect_right(last_completions, end_event) - 1
        stream_number = (
            stream_numbers.pop(insert_position) if insert_position >= 0 else len(stream_numbers)
        )
        if insert_position >= 0:
            del last_completions[insert_position]
        insert_position = bisect_right(last_completions, end_event)
        last_completions.insert(insert_position, end_event)
        stream_numbers.insert(insert_position, stream_number)
        wait_streams[allocation_index] = stream_number
    return tuple(wait_streams.tolist())


def _waited_frees(allocations: Allocations, events: Events) -> npt.NDArray[np.intp]:
    """Return the allocations whose free did not complete in the same call."""
    n_events = len(events)
    freed_allocations = np.flatnonzero(allocations.free_request < n_events)
    request_events, end_events = (
        allocations.free_request[freed_allocations],
        allocations.end[freed_allocations],
    )
    is_completed_later = (end_events - request_events > 1) | (end_events == n_events)
    # If the next request completed the free, the completion has the stack of that request.
    stacks = (
        events.stack[np.clip(request_events, 0, n_events - 1)],
        events.stack[np.clip(end_events, 0, n_events - 1)],
    )
    waited_frees: npt.NDArray[np.intp] = freed_allocations[
        is_completed_later | (stacks[0] != stacks[1]) | (request_events == BEFORE_TRACE)
    ]
    return waited_frees


def _frees_have_stacks(allocations: Allocations, events: Events) -> bool:
    is_in_trace = (allocations.begin != BEFORE_TRACE) & (allocations.free_request < len(events))
    alloc_events, free_events = (
        allocations.begin[is_in_trace],
        allocations.free_request[is_in_trace],
    )
    return bool((events.stack[alloc_events] != events.stack[free_events]).any())


def _completes_pending(
    allocations: Allocations, wait_streams: tuple[int, ...], n_events: int
) -> Mask:
    is_completion = np.zeros(n_events, np.bool_)
    has_waited = np.array(wait_streams, np.int64) != NO_WAIT
    is_completion[allocations.end[has_waited & (allocations.end < n_events)]] = True
    return is_completion


def _lifetime_steps(
    allocations: Allocations,
    wait_streams: tuple[int, ...],
    releases: tuple[Release, ...],
    n_events: int,
) -> Iterator[tuple[int, int, Step, int]]:
    # In the recording, these requests found no free block and then waited for pending frees. So the replay
    # completes these frees right after the request.
    request_by_event = {
        event_index: release.request
        for release in releases
        if release.request is not None
        for event_index in range(release.first_event, release.end_event)
    }
    end_events = allocations.end.tolist()
    for allocation_index, (begin_event, free_event) in enumerate(
        zip(allocations.begin.tolist(), allocations.free_request.tolist(), strict=True)
    ):
        if begin_event != BEFORE_TRACE:
            yield begin_event, 0, Step.ALLOC, allocation_index
        if BEFORE_TRACE < free_event < n_events:
            yield free_event, 1 if begin_event == free_event else 0, Step.FREE, allocation_index
        if wait_streams[allocation_index] != NO_WAIT and end_events[allocation_index] < n_events:
            end_event = end_events[allocation_index]
            yield (
                request_by_event.get(end_event, end_event),
                1 if end_event in request_by_event else 0,
                Step.COMPLETE_FREE,
                allocation_index,
            )


def _release_steps(
    allocations: Allocations, releases: tuple[Release, ...]
) -> Iterator[tuple[int, int, Step, int]]:
    for release in releases:
        # A pool without later requests may be released from now on.
        unused_pools = [
            pool
            for pool in sorted(release.pools - {0})
            if not (allocations.begin[allocations.pool == pool] > release.first_event).any()
        ]
        last_event = release.end_event - 1
        for pool in unused_pools:
            yield last_event, 2, Step.RELEASE_POOL, pool
        if release.request is not None or not release.releases_segments:
            continue
        if 0 in release.pools or not unused_pools:
            yield last_event, 3, Step.EMPTY_CACHE, 0
        else:
            for pool in unused_pools:
                yield last_event, 3, Step.EMPTY_POOL, pool


# --- releases to the driver, by a call of the program or by a request that found no memory ---------
#
# Both kinds of release leave the same events; call stacks distinguish them, because a release by a request
# has the stack of the request. A replay repeats releases by the program, such as ``empty_cache``; requests
# release memory again by themselves.

_RELEASE_ACTIONS = (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
_GROWTH_ACTIONS = (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP)
_REQUEST_ACTIONS = (Action.ALLOC, Action.OOM)


@dataclass(frozen=True, slots=True)
class Release:
    """Consecutive events that released memory, or completed pending frees, for one cause."""

    first_event: int  # index of the first event
    end_event: int  # index of the event after the last one
    # The ALLOC or OOM event of the request that released memory; None: a call of the program.
    request: int | None
    pools: frozenset[int]  # pools of the released segments, if recorded
    releases_segments: bool  # whether segments were released; False if only pending frees completed


def releases_of(
    events: Events,
    curves: Curves,
    completes_pending: Mask,
    *,
    garbage_collects: bool,
    frees_have_stacks: bool,
) -> tuple[Release, ...]:
    """Return the releases of a trace; ``completes_pending`` marks the events that completed a pending free.

    ``garbage_collects``: requests also release old segments while memory is left. ``frees_have_stacks``:
    frees have their own call stacks. Otherwise they have the stack of the allocation, which can equal the
    stack of the next request by chance; that request is not the cause if as much memory had been reserved
    before.
    """
    is_release = np.isin(events.action, _RELEASE_ACTIONS)
    cause_is_known = frees_have_stacks or garbage_collects
    bytes_known_to_fit = 0 if cause_is_known else int(curves.reserved.max())
    releases: list[Release] = []
    for first_event, end_event in _ranges_of(is_release | completes_pending):
        request = _request_after(events, end_event)
        first_request_event = end_event
        if request is not None:
            first_request_event = _first_of_request(
                events, curves, is_release, (first_event, end_event, request), bytes_known_to_fit
            )
            if first_request_event < end_event:
                releases.append(
                    _release(events, is_release, first_request_event, end_event, request)
                )
        if is_release[first_event:first_request_event].any():
            releases.append(_release(events, is_release, first_event, first_request_event, None))
    return tuple(releases)


def _ranges_of(mask: Mask) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False]))))
    yield from zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True)


def _request_after(events: Events, end_event: int) -> int | None:
    """Return the ALLOC or OOM event of the request that may have caused a release; None: no request."""
    for event_index in range(end_event, len(events)):
        if events.action[event_index] in _REQUEST_ACTIONS:
            return event_index
        if events.action[event_index] not in _GROWTH_ACTIONS:
            return None
    return None


def _first_of_request(
    events: Events,
    curves: Curves,
    is_release: Mask,
    release_and_request: tuple[int, int, int],
    bytes_known_to_fit: int,
) -> int:
    """Return the first event in which the request released memory; ``end_event`` if there is none.

    ``release_and_request`` is the first event, the event after the last one, and the event of the request.
    """
    first_event, end_event, request = release_and_request
    has_failed = events.action[request] == Action.OOM
    release_events = np.flatnonzero(is_release[first_event:end_event]) + first_event
    if not len(release_events):
        return first_event if has_failed else end_event
    request_stack = events.stack[request]
    is_private = events.pool[release_events] > 0
    releases_by_program = release_events[
        (events.stack[release_events] != request_stack) | _is_before_default(is_private)
    ]
    first_request_event = (
        int(releases_by_program[-1]) + 1 if len(releases_by_program) else first_event
    )
    if has_failed or first_request_event == end_event:
        return first_request_event
    new_bytes = int(curves.reserved[request] - curves.reserved[end_event])
    has_fitted_before = (
        new_bytes > 0
        and int(curves.reserved[first_request_event]) + new_bytes <= bytes_known_to_fit
    )
    # Segments of a deleted MemPool have the stacks of their allocations, because no call released them.
    is_of_deleted_pool = bool(is_private[release_events >= first_request_event].all())
    is_unknown_stack = request_stack == 0 and bytes_known_to_fit > 0
    return (
        end_event
        if is_unknown_stack or has_fitted_before or is_of_deleted_pool
        else first_request_event
    )


def _is_before_default(is_private: Mask) -> Mask:
    """Mark releases of private pools that a release of the default pool follows.

    A request never releases in this order: it releases the default pool first.
    """
    is_followed_by_default = np.logical_or.accumulate(~is_private[::-1])[::-1]
    mask: Mask = is_private & is_followed_by_default
    return mask


def _release(
    events: Events, is_release: Mask, first_event: int, end_event: int, request: int | None
) -> Release:
    release_events = np.flatnonzero(is_release[first_event:end_event]) + first_event
    pool_ids = np.maximum(events.pool[release_events], 0)  # -1: older files do not record the pool
    return Release(
        first_event, end_event, request, frozenset(pool_ids.tolist()), bool(len(release_events))
    )


# --- The settings, the memory limit and the figures of a recording ---------------------------------


def settings_of(recording: Recording) -> Settings:
    """Return the recorded settings; the trace shows whether segments were expandable."""
    settings = recorded_settings(recording.snapshot.settings)
    was_expandable = _was_expandable(recording)
    if was_expandable is not None:
        settings = with_changes(settings, {"expandable_segments": was_expandable})
    return with_changes(settings, {"memory_fraction": 1.0, "backend": "native"})


def has_both_kinds(recording: Recording) -> bool:
    """Return whether the trace allocates both expandable and plain segments."""
    return recording.has_action(Action.SEGMENT_MAP) and recording.has_action(Action.SEGMENT_ALLOC)


def _was_expandable(recording: Recording) -> bool | None:
    has_maps = recording.has_action(Action.SEGMENT_MAP)
    if has_maps != recording.has_action(Action.SEGMENT_ALLOC):
        return has_maps
    return flag_of_device(
        recording.snapshot.settings.get("expandable_segments"), recording.trace.device
    )


def limit_of(recording: Recording, program: Program, settings: Settings) -> Limit | None:
    """Return the memory limit of a recording; None if memory never ran out.

    If the device was full, the limit is the reserved plus the free memory when a request failed. A file does
    not record a limit of the process; the highest reserved memory was allowed.
    """
    reserved_curve, events = recording.history.curves.reserved, recording.trace.events
    highest_reserved_bytes = int(reserved_curve.max())
    failed_requests = recording.failed_requests()
    releases_for_requests = [release for release in program.releases if release.request is not None]
    if not failed_requests and not releases_for_requests:
        return None
    device_limits = [
        int(reserved_curve[event_index]) + int(events.address[event_index])
        for event_index in failed_requests
        if int(events.address[event_index]) < _needed_bytes(int(events.size[event_index]), settings)
    ]
    if device_limits and min(device_limits) > highest_reserved_bytes:
        return Limit(min(device_limits), "device full")
    return Limit(highest_reserved_bytes, "reserved")


def _needed_bytes(request_bytes: int, settings: Settings) -> int:
    block_bytes = rounded(request_bytes, settings.roundup_power2_divisions)
    return segment_size(block_bytes, settings.large_segment_size_bytes)


def outcome_of(recording: Recording, program: Program, settings: Settings) -> Outcome:
    """Return the figures of the recording."""
    curves, moment = recording.history.curves, program.peak_event + 1
    free_bytes = int(curves.reserved[moment] - curves.active[moment])
    curve_names = ("reserved", "allocated", "requested", "active")
    return Outcome(
        name="recorded",
        settings=settings.as_text(),
        limit_bytes=None,
        peak=MemoryTotals(*(int(getattr(curves, name).max()) for name in curve_names)),
        end=MemoryTotals(*(int(getattr(curves, name)[-1]) for name in curve_names)),
        fragmentation_bytes=free_bytes,
        fragmentation=free_bytes / max(int(curves.reserved[moment]), 1),
        device_allocations=recording.count_actions(Action.SEGMENT_ALLOC, Action.SEGMENT_MAP),
        device_frees=recording.count_actions(Action.SEGMENT_FREE, Action.SEGMENT_UNMAP),
        retries=_retry_count(recording, program, settings),
        ooms=recording.count_actions(Action.OOM),
        shortage=None,
    )


def _retry_count(recording: Recording, program: Program, settings: Settings) -> int | None:
    """Return the number of requests that emptied the cache; None if unknown."""
    if settings.garbage_collection_threshold or settings.max_split_size_bytes:
        return None
    segment_releases = [release for release in program.releases if release.releases_segments]
    if segment_releases and not program.frees_have_stacks:
        return None
    requests = {release.request for release in segment_releases if release.request is not None}
    return len(requests.union(recording.failed_requests()))
