"""The steps of a recorded program, as an allocator sees them: requests, frees and releases."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay.allocations import Allocations
from cudakit.core.memory.replay.lifetimes import BEFORE
from cudakit.core.memory.snapshot import Events
from cudakit.core.memory.whatif.recording import Recording
from cudakit.core.memory.whatif.releases import Release, releases_of

AT_ONCE = -1


class Step(IntEnum):
    """A call of the allocator; its number is that of an allocation, a request, or a pool."""

    ALLOC = 0
    FREE = 1
    COMPLETE_FREE = 2  # the other streams are done with the freed block
    FAILED_ALLOC = 3
    RELEASE_POOL = 4
    EMPTY_POOL = 5
    EMPTY_CACHE = 6


# The event, the step, and its number.
NumberedStep: TypeAlias = tuple[int, Step, int]
# Bytes, number of the stream, index of the pool.
Request: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Program:
    """What is allocated before the trace begins, and the steps after that, in order."""

    requests: tuple[Request, ...]  # of the allocations, then of the failed requests
    lanes: tuple[int, ...]  # by allocation: the stream that its free waits for; AT_ONCE: none
    held: tuple[int, ...]  # allocations from before the trace, by address
    freed_before: tuple[int, ...]  # those of them whose free was pending when the trace began
    steps: tuple[NumberedStep, ...]
    releases: tuple[Release, ...]
    peak_event: int  # after which most was requested
    own_stacks: bool  # frees have stacks of their own: who released memory is known


NOTHING = Program((), (), (), (), (), (), -1, own_stacks=False)


def program_of(recording: Recording, *, collects: bool) -> Program:
    """Return the steps that led to a recording; ``collects`` is that of ``releases_of``."""
    found, events = recording.history.allocations, recording.trace.events
    n = len(events)
    lanes = _lanes(found, events)
    waits_end = _waits_end(found, lanes, n)
    own_stacks = _have_own_stacks(found, events)
    releases = releases_of(
        events, recording.history.curves, waits_end, collects=collects, own_stacks=own_stacks
    )
    failed = recording.failed_requests()
    placed = [
        *_life_steps(found, lanes, releases, n),
        *((event, 0, Step.FAILED_ALLOC, len(found) + i) for i, event in enumerate(failed)),
        *_release_steps(found, releases),
    ]
    placed.sort()
    before = np.flatnonzero(found.begin == BEFORE)
    return Program(
        requests=(
            *_requests(found.requested, found.stream, found.pool),
            *_requests(
                events.size[failed], events.stream[failed], np.maximum(events.pool[failed], 0)
            ),
        ),
        lanes=lanes,
        held=tuple(before[np.argsort(found.address[before], kind="stable")].tolist()),
        freed_before=tuple(before[found.free_requested[before] == BEFORE].tolist()),
        steps=tuple((event, step, number) for event, _, step, number in placed),
        releases=releases,
        peak_event=recording.history.peak_moment() - 1,
        own_stacks=own_stacks,
    )


def _requests(
    sizes: npt.NDArray[np.int64], streams: npt.NDArray[np.int32], pools: npt.NDArray[np.int32]
) -> Iterator[Request]:
    return zip(sizes.tolist(), streams.tolist(), pools.tolist(), strict=True)


def _lanes(found: Allocations, events: Events) -> tuple[int, ...]:
    """Assign every free that waited to a lane, in which earlier frees complete earlier.

    No trace records which streams a free waited for. The smallest number of ordered lanes stands for them.
    """
    lanes = np.full(len(found), AT_ONCE)
    waited = _waited(found, events)
    order = np.lexsort((found.end[waited], found.free_requested[waited]))
    last_ends: list[int] = []  # of the lanes, rising
    numbers: list[int] = []  # of the lanes in that order
    for index in waited[order].tolist():
        end = int(found.end[index])
        place = bisect_right(last_ends, end) - 1
        number = numbers.pop(place) if place >= 0 else len(numbers)
        if place >= 0:
            del last_ends[place]
        where = bisect_right(last_ends, end)
        last_ends.insert(where, end)
        numbers.insert(where, number)
        lanes[index] = number
    return tuple(lanes.tolist())


def _waited(found: Allocations, events: Events) -> npt.NDArray[np.intp]:
    """Return the frees that did not complete in the same call."""
    n = len(events)
    freed = np.flatnonzero(found.free_requested < n)
    request, end = found.free_requested[freed], found.end[freed]
    longer = (end - request > 1) | (end == n)
    # A free that the next request completed has the stack of that request.
    stacks = events.stack[np.clip(request, 0, n - 1)], events.stack[np.clip(end, 0, n - 1)]
    waited: npt.NDArray[np.intp] = freed[longer | (stacks[0] != stacks[1]) | (request == BEFORE)]
    return waited


def _have_own_stacks(found: Allocations, events: Events) -> bool:
    known = (found.begin != BEFORE) & (found.free_requested < len(events))
    allocated, freed = found.begin[known], found.free_requested[known]
    return bool((events.stack[allocated] != events.stack[freed]).any())


def _waits_end(found: Allocations, lanes: tuple[int, ...], n: int) -> npt.NDArray[np.bool_]:
    marked = np.zeros(n, np.bool_)
    marked[found.end[(np.array(lanes, np.int64) != AT_ONCE) & (found.end < n)]] = True
    return marked


def _life_steps(
    found: Allocations, lanes: tuple[int, ...], releases: tuple[Release, ...], n: int
) -> Iterator[tuple[int, int, Step, int]]:
    # A request that waits for pending frees found no block before: they complete after it.
    later = {
        event: release.request
        for release in releases
        if release.request is not None
        for event in range(release.first, release.after)
    }
    ends = found.end.tolist()
    for index, (begin, freed) in enumerate(
        zip(found.begin.tolist(), found.free_requested.tolist(), strict=True)
    ):
        if begin != BEFORE:
            yield begin, 0, Step.ALLOC, index
        if BEFORE < freed < n:
            yield freed, 1 if begin == freed else 0, Step.FREE, index
        if lanes[index] != AT_ONCE and ends[index] < n:
            end = ends[index]
            yield later.get(end, end), 1 if end in later else 0, Step.COMPLETE_FREE, index


def _release_steps(
    found: Allocations, releases: tuple[Release, ...]
) -> Iterator[tuple[int, int, Step, int]]:
    for release in releases:
        # A pool without later requests may release its memory from now on.
        gone = [
            pool
            for pool in sorted(release.pools - {0})
            if not (found.begin[found.pool == pool] > release.first).any()
        ]
        last = release.after - 1
        for pool in gone:
            yield last, 2, Step.RELEASE_POOL, pool
        if release.request is not None or not release.gives_back:
            continue
        if 0 in release.pools or not gone:
            yield last, 3, Step.EMPTY_CACHE, 0
        else:
            for pool in gone:
                yield last, 3, Step.EMPTY_POOL, pool
