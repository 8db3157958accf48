"""The recorded program as calls of an allocator: requests, frees and releases."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.memory.filter import pytorch_trace
from cudakit.memory.replay import Replay, replay
from cudakit.memory.replay.allocations import Allocations
from cudakit.memory.replay.lifetimes import BEFORE_TRACE
from cudakit.memory.snapshot import DeviceTrace, Events, Ids, Ints, Mask, Snapshot
from cudakit.memory.whatif.releases import Release, releases_of
from cudakit.torch_rules.actions import Action

NO_WAIT = -1


@dataclass(frozen=True, slots=True)
class Recording:
    """One device of a snapshot; settings are those at the time of the snapshot."""

    snapshot: Snapshot
    trace: DeviceTrace
    history: Replay

    def has_action(self, action: Action) -> bool:
        """Return whether an action occurs in the trace."""
        return bool((self.trace.events.action == action).any())

    def count_actions(self, *actions: Action) -> int:
        """Return the number of events with one of these actions."""
        return int(np.isin(self.trace.events.action, actions).sum())

    def failed_requests(self) -> list[int]:
        """Return the events of failed allocations."""
        return np.flatnonzero(self.trace.events.action == Action.OOM).tolist()

    def segment_addresses(self) -> Iterator[tuple[int, int]]:
        """Yield the addresses and sizes of the segments in the order of their allocation."""
        segments = self.history.segments.plain_segments
        begin_order = np.argsort(segments.begin, kind="stable")
        return zip(
            segments.address[begin_order].tolist(), segments.size[begin_order].tolist(), strict=True
        )


def recording_of(snapshot: Snapshot, trace: DeviceTrace) -> Recording:
    """Return the recording of PyTorch's memory of a device of a snapshot."""
    trace = pytorch_trace(snapshot, trace)
    return Recording(snapshot, trace, replay(snapshot, trace))


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
