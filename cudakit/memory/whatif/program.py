"""The recorded program as calls of an allocator: requests, frees and releases."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from operator import itemgetter
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.memory.history import Allocations, Curves, History, reconstruct
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
    take,
)
from cudakit.torch_rules.settings import (
    Settings,
    flag_of_device,
    recorded_settings,
    rounded,
    segment_size,
    with_changes,
)

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
    ended_later = (wait_streams != NO_WAIT) & (allocations.end < n_events)
    completes_pending = np.zeros(n_events, np.bool_)
    completes_pending[allocations.end[ended_later]] = True
    in_trace = take(
        allocations, (allocations.begin != BEFORE_TRACE) & (allocations.free_request < n_events)
    )
    frees_have_stacks = bool(
        (events.stack[in_trace.begin] != events.stack[in_trace.free_request]).any()
    )
    releases = releases_of(
        events,
        recording.history.curves,
        completes_pending,
        garbage_collects=garbage_collects,
        frees_have_stacks=frees_have_stacks,
    )
    failed = recording.failed_requests()
    # The second number of each tuple orders the steps of one event.
    ordered_steps = sorted(
        [
            *_lifetime_steps(allocations, wait_streams.tolist(), releases, n_events),
            *(
                (event, 0, Step.FAILED_ALLOC, len(allocations) + index)
                for index, event in enumerate(failed)
            ),
            *_release_steps(allocations, releases),
        ]
    )
    failed_pools = np.maximum(events.pool[failed], 0)
    before = np.flatnonzero(allocations.begin == BEFORE_TRACE)
    pending_before = before[allocations.free_request[before] == BEFORE_TRACE]
    return Program(
        requests=(
            *_requests(allocations.requested, allocations.stream, allocations.pool),
            *_requests(events.size[failed], events.stream[failed], failed_pools),
        ),
        wait_streams=tuple(wait_streams.tolist()),
        allocations_before=tuple(
            before[np.argsort(allocations.address[before], kind="stable")].tolist()
        ),
        pending_frees_before=tuple(pending_before.tolist()),
        steps=tuple((event, step, target) for event, _, step, target in ordered_steps),
        releases=releases,
        peak_event=recording.history.peak_moment() - 1,
        frees_have_stacks=frees_have_stacks,
    )


def _requests(sizes: Ints, streams: Ids, pools: Ids) -> Iterator[Request]:
    return zip(sizes.tolist(), streams.tolist(), pools.tolist(), strict=True)


def _wait_streams(allocations: Allocations, events: Events) -> Ints:
    """Return the stream that each free waits for in the replay, or NO_WAIT.

    A trace does not record which streams a free waited for. The replay uses the smallest number of streams
    that explains the recorded completions: on one stream, frees complete in the order of their requests.
    """
    wait_streams = np.full(len(allocations), NO_WAIT)
    waited = _waited_frees(allocations, events)
    waited = waited[np.lexsort((allocations.end[waited], allocations.free_request[waited]))]
    # The latest completion of each stream and the number of the stream, by completion.
    streams: list[tuple[int, int]] = []
    for allocation, end_event in zip(
        waited.tolist(), allocations.end[waited].tolist(), strict=True
    ):
        position = bisect_right(streams, end_event, key=itemgetter(0)) - 1
        stream = streams.pop(position)[1] if position >= 0 else len(streams)
        insort(streams, (end_event, stream), key=itemgetter(0))
        wait_streams[allocation] = stream
    return wait_streams


def _waited_frees(allocations: Allocations, events: Events) -> npt.NDArray[np.intp]:
    """Return the allocations whose free did not complete in the same call."""
    n_events = len(events)
    freed = np.flatnonzero(allocations.free_request < n_events)
    requests, ends = allocations.free_request[freed], allocations.end[freed]
    is_completed_later = (ends - requests > 1) | (ends == n_events)
    # If the next request completed the free, the completion has the stack of that request.
    request_stacks = events.stack[np.clip(requests, 0, n_events - 1)]
    end_stacks = events.stack[np.clip(ends, 0, n_events - 1)]
    waited: npt.NDArray[np.intp] = freed[
        is_completed_later | (request_stacks != end_stacks) | (requests == BEFORE_TRACE)
    ]
    return waited


def _lifetime_steps(
    allocations: Allocations, wait_streams: list[int], releases: tuple[Release, ...], n_events: int
) -> Iterator[tuple[int, int, Step, int]]:
    # In the recording, these requests found no free block and then waited for pending frees. So the replay
    # completes these frees right after the request.
    request_by_event = {
        event: release.request
        for release in releases
        if release.request is not None
        for event in range(release.first_event, release.end_event)
    }
    columns = (allocations.begin, allocations.free_request, allocations.end)
    lifetimes = zip(*(column.tolist() for column in columns), wait_streams, strict=True)
    for index, (begin, free, end, wait_stream) in enumerate(lifetimes):
        if begin != BEFORE_TRACE:
            yield begin, 0, Step.ALLOC, index
        if BEFORE_TRACE < free < n_events:
            yield free, 1 if begin == free else 0, Step.FREE, index
        if wait_stream != NO_WAIT and end < n_events:
            request = request_by_event.get(end)
            yield (
                end if request is None else request,
                request is not None,
                Step.COMPLETE_FREE,
                index,
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
    edges = np.flatnonzero(
        np.diff(np.concatenate(([False], is_release | completes_pending, [False])))
    )
    releases: list[Release] = []
    for first, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        request = _request_after(events, end)
        first_of_request = end
        if request is not None:
            first_of_request = _first_of_request(
                events, curves, is_release, (first, end, request), bytes_known_to_fit
            )
        if first_of_request < end:
            releases.append(_release(events, is_release, first_of_request, end, request))
        if is_release[first:first_of_request].any():
            releases.append(_release(events, is_release, first, first_of_request, None))
    return tuple(releases)


def _request_after(events: Events, end_event: int) -> int | None:
    """Return the ALLOC or OOM event of the request that may have caused a release; None: no request."""
    for event in range(end_event, len(events)):
        if events.action[event] in _REQUEST_ACTIONS:
            return event
        if events.action[event] not in _GROWTH_ACTIONS:
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
    # A request releases the default pool first, so a private pool before the default pool is not its release.
    is_before_default = is_private & np.logical_or.accumulate(~is_private[::-1])[::-1]
    by_program = release_events[(events.stack[release_events] != request_stack) | is_before_default]
    first_of_request = int(by_program[-1]) + 1 if len(by_program) else first_event
    if has_failed or first_of_request == end_event:
        return first_of_request
    new_bytes = int(curves.reserved[request] - curves.reserved[end_event])
    reserved_before = int(curves.reserved[first_of_request])
    has_fitted_before = new_bytes > 0 and reserved_before + new_bytes <= bytes_known_to_fit
    # Segments of a deleted MemPool have the stacks of their allocations, because no call released them.
    is_of_deleted_pool = bool(is_private[release_events >= first_of_request].all())
    is_unknown_stack = request_stack == 0 and bytes_known_to_fit > 0
    is_by_program = is_unknown_stack or has_fitted_before or is_of_deleted_pool
    return end_event if is_by_program else first_of_request


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
    recorded = recording.snapshot.settings
    settings = recorded_settings(recorded)
    has_maps = recording.has_action(Action.SEGMENT_MAP)
    if has_maps != recording.has_action(Action.SEGMENT_ALLOC):
        was_expandable: bool | None = has_maps
    else:
        device = recording.trace.device
        was_expandable = flag_of_device(recorded.get("expandable_segments"), device)
    if was_expandable is not None:
        settings = with_changes(settings, {"expandable_segments": was_expandable})
    return with_changes(settings, {"memory_fraction": 1.0, "backend": "native"})


def has_both_kinds(recording: Recording) -> bool:
    """Return whether the trace allocates both expandable and plain segments."""
    return recording.has_action(Action.SEGMENT_MAP) and recording.has_action(Action.SEGMENT_ALLOC)


def limit_of(recording: Recording, program: Program, settings: Settings) -> Limit | None:
    """Return the memory limit of a recording; None if memory never ran out.

    If the device was full, the limit is the reserved plus the free memory when a request failed. A file does
    not record a limit of the process; the highest reserved memory was allowed.
    """
    reserved, events = recording.history.curves.reserved, recording.trace.events
    failed_requests = recording.failed_requests()
    if not failed_requests and all(release.request is None for release in program.releases):
        return None
    device_limits = []
    for event in failed_requests:
        block_bytes = rounded(int(events.size[event]), settings.roundup_power2_divisions)
        free_bytes = int(events.address[event])
        if free_bytes < segment_size(block_bytes, settings.large_segment_size_bytes):
            device_limits.append(int(reserved[event]) + free_bytes)
    highest_reserved_bytes = int(reserved.max())
    if device_limits and min(device_limits) > highest_reserved_bytes:
        return Limit(min(device_limits), "device full")
    return Limit(highest_reserved_bytes, "reserved")


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
    if settings.garbage_collection_threshold or settings.max_split_size_bytes:
        return None
    segment_releases = [release for release in program.releases if release.releases_segments]
    if segment_releases and not program.frees_have_stacks:
        return None
    requests = {release.request for release in segment_releases if release.request is not None}
    return len(requests.union(recording.failed_requests()))
