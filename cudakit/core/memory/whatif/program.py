"""The recorded program as calls of an allocator: requests, frees and releases."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.filter import pytorch_trace
from cudakit.core.memory.replay import Replay, replay
from cudakit.core.memory.replay.allocations import Allocations
from cudakit.core.memory.replay.lifetimes import BEFORE_TRACE
from cudakit.core.memory.snapshot import DeviceTrace, Events, Ids, Ints, Mask, Snapshot
from cudakit.core.memory.whatif.releases import Release, releases_of
from cudakit.torch_rules.actions import Action

NO_WAIT = -1


@dataclass(frozen=True, slots=True)
class Recording:
    """One device of a snapshot; settings are those at the time of the snapshot."""

    snapshot: Snapshot
    trace: DeviceTrace
    history: Replay

    def has(self, action: Action) -> bool:
        """Return whether an action occurs in the trace."""
        return bool((self.trace.events.action == action).any())

    def count(self, *actions: Action) -> int:
        """Return the number of events with one of these actions."""
        return int(np.isin(self.trace.events.action, actions).sum())

    def failed_requests(self) -> list[int]:
        """Return the events of failed allocations."""
        return np.flatnonzero(self.trace.events.action == Action.OOM).tolist()

    def segment_addresses(self) -> Iterator[tuple[int, int]]:
        """Yield the addresses and sizes of the segments in the order of their allocation."""
        segments = self.history.segments.plain
        order = np.argsort(segments.begin, kind="stable")
        return zip(segments.address[order].tolist(), segments.size[order].tolist(), strict=True)


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


# Event index, step, and the index of its allocation, request or pool.
NumberedStep: TypeAlias = tuple[int, Step, int]
# Bytes, stream number, pool index.
Request: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Program:
    """The allocations from before the trace, and the steps of the trace."""

    requests: tuple[Request, ...]  # requests of all allocations, then failed requests
    # The stand-in stream that the free of each allocation waits for, or NO_WAIT.
    wait_streams: tuple[int, ...]
    held: tuple[int, ...]  # allocations from before the trace, by address
    pending_before: tuple[int, ...]  # the allocations in ``held`` that were pending free
    steps: tuple[NumberedStep, ...]
    releases: tuple[Release, ...]
    peak_event: int  # the event before the peak
    frees_have_stacks: bool  # frees have their own call stacks


EMPTY_PROGRAM = Program((), (), (), (), (), (), -1, frees_have_stacks=False)


def program_of(recording: Recording, *, garbage_collects: bool) -> Program:
    """Return the program of a recording; ``garbage_collects`` as in ``releases_of``."""
    allocations, events = recording.history.allocations, recording.trace.events
    n = len(events)
    wait_streams = _wait_streams(allocations, events)
    completes_pending = _completes_pending(allocations, wait_streams, n)
    frees_have_stacks = _frees_have_stacks(allocations, events)
    releases = releases_of(
        events,
        recording.history.curves,
        completes_pending,
        garbage_collects=garbage_collects,
        frees_have_stacks=frees_have_stacks,
    )
    failed = recording.failed_requests()
    # The second number orders the steps of one event.
    ordered = [
        *_lifetime_steps(allocations, wait_streams, releases, n),
        *((event, 0, Step.FAILED_ALLOC, len(allocations) + i) for i, event in enumerate(failed)),
        *_release_steps(allocations, releases),
    ]
    ordered.sort()
    before = np.flatnonzero(allocations.begin == BEFORE_TRACE)
    return Program(
        requests=(
            *_requests(allocations.requested, allocations.stream, allocations.pool),
            *_requests(
                events.size[failed], events.stream[failed], np.maximum(events.pool[failed], 0)
            ),
        ),
        wait_streams=wait_streams,
        held=tuple(before[np.argsort(allocations.address[before], kind="stable")].tolist()),
        pending_before=tuple(before[allocations.free_requested[before] == BEFORE_TRACE].tolist()),
        steps=tuple((event, step, number) for event, _, step, number in ordered),
        releases=releases,
        peak_event=recording.history.peak_moment() - 1,
        frees_have_stacks=frees_have_stacks,
    )


def _requests(sizes: Ints, streams: Ids, pools: Ids) -> Iterator[Request]:
    return zip(sizes.tolist(), streams.tolist(), pools.tolist(), strict=True)


def _wait_streams(allocations: Allocations, events: Events) -> tuple[int, ...]:
    """Assign every free that waited to a stand-in stream, on which earlier frees complete earlier.

    A trace does not record which streams a free waited for. They are replaced by the smallest number of
    streams that explains the recorded completions.
    """
    wait_streams = np.full(len(allocations), NO_WAIT)
    waited = _waited_frees(allocations, events)
    order = np.lexsort((allocations.end[waited], allocations.free_requested[waited]))
    last_ends: list[int] = []  # the latest completion of each stream, ascending
    numbers: list[int] = []  # stream numbers in the same order
    for index in waited[order].tolist():
        end = int(allocations.end[index])
        position = bisect_right(last_ends, end) - 1
        number = numbers.pop(position) if position >= 0 else len(numbers)
        if position >= 0:
            del last_ends[position]
        position = bisect_right(last_ends, end)
        last_ends.insert(position, end)
        numbers.insert(position, number)
        wait_streams[index] = number
    return tuple(wait_streams.tolist())


def _waited_frees(allocations: Allocations, events: Events) -> npt.NDArray[np.intp]:
    """Return the allocations whose free did not complete in the same call."""
    n = len(events)
    freed = np.flatnonzero(allocations.free_requested < n)
    request, end = allocations.free_requested[freed], allocations.end[freed]
    completed_later = (end - request > 1) | (end == n)
    # If the next request completed the free, the completion has the stack of that request.
    stacks = events.stack[np.clip(request, 0, n - 1)], events.stack[np.clip(end, 0, n - 1)]
    waited: npt.NDArray[np.intp] = freed[
        completed_later | (stacks[0] != stacks[1]) | (request == BEFORE_TRACE)
    ]
    return waited


def _frees_have_stacks(allocations: Allocations, events: Events) -> bool:
    in_trace = (allocations.begin != BEFORE_TRACE) & (allocations.free_requested < len(events))
    allocated, freed = allocations.begin[in_trace], allocations.free_requested[in_trace]
    return bool((events.stack[allocated] != events.stack[freed]).any())


def _completes_pending(allocations: Allocations, wait_streams: tuple[int, ...], n: int) -> Mask:
    mask = np.zeros(n, np.bool_)
    waited = np.array(wait_streams, np.int64) != NO_WAIT
    mask[allocations.end[waited & (allocations.end < n)]] = True
    return mask


def _lifetime_steps(
    allocations: Allocations, wait_streams: tuple[int, ...], releases: tuple[Release, ...], n: int
) -> Iterator[tuple[int, int, Step, int]]:
    # A request that waited for pending frees found no free block before: complete these frees after it.
    later = {
        event: release.request
        for release in releases
        if release.request is not None
        for event in range(release.first, release.after)
    }
    ends = allocations.end.tolist()
    for index, (begin, freed) in enumerate(
        zip(allocations.begin.tolist(), allocations.free_requested.tolist(), strict=True)
    ):
        if begin != BEFORE_TRACE:
            yield begin, 0, Step.ALLOC, index
        if BEFORE_TRACE < freed < n:
            yield freed, 1 if begin == freed else 0, Step.FREE, index
        if wait_streams[index] != NO_WAIT and ends[index] < n:
            end = ends[index]
            yield later.get(end, end), 1 if end in later else 0, Step.COMPLETE_FREE, index


def _release_steps(
    allocations: Allocations, releases: tuple[Release, ...]
) -> Iterator[tuple[int, int, Step, int]]:
    for release in releases:
        # A pool without later requests may be released from now on.
        unused_pools = [
            pool
            for pool in sorted(release.pools - {0})
            if not (allocations.begin[allocations.pool == pool] > release.first).any()
        ]
        last = release.after - 1
        for pool in unused_pools:
            yield last, 2, Step.RELEASE_POOL, pool
        if release.request is not None or not release.releases_segments:
            continue
        if 0 in release.pools or not unused_pools:
            yield last, 3, Step.EMPTY_CACHE, 0
        else:
            for pool in unused_pools:
                yield last, 3, Step.EMPTY_POOL, pool
