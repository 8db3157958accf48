"""The steps of a recorded program, as an allocator sees them: what it asks for, frees and gives back."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay import Allocations, Replay
from cudakit.core.memory.replay.lifetimes import BEFORE
from cudakit.core.memory.snapshot import Action, DeviceTrace, Events
from cudakit.core.memory.whatif.releases import Release, releases_of

AT_ONCE = -1


class Act(IntEnum):
    """What a step does; its number is that of an allocation, a request, or a pool."""

    ALLOC = 0
    FREE = 1
    COMPLETE = 2  # the other streams are done with what was freed
    ASK = 3  # for what could not be had
    LET_GO = 4  # of a private pool
    EMPTY_POOL = 5
    EMPTY_CACHE = 6


# Event, and act with its number.
Step: TypeAlias = tuple[int, Act, int]
# Bytes, number of the stream, index of the pool.
Request: TypeAlias = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Program:
    """What is put in before the trace begins, and the steps from there on, in order."""

    requests: tuple[Request, ...]  # of the allocations, then of what failed
    lanes: tuple[int, ...]  # of each allocation: which of the streams it waits for; AT_ONCE: none
    held: tuple[int, ...]  # allocations from before the trace, by address
    freed_before: tuple[int, ...]  # of them, what only other streams use any more
    steps: tuple[Step, ...]
    releases: tuple[Release, ...]
    peak_event: int  # after which most was requested
    own_stacks: bool  # frees have stacks of their own: who gave memory back is known


NOTHING = Program((), (), (), (), (), (), -1, own_stacks=False)


def program_of(trace: DeviceTrace, replayed: Replay, *, collects: bool) -> Program:
    """Turn a trace into the steps that led to it; ``collects`` is that of ``releases_of``."""
    found = replayed.allocations
    n = replayed.n_events
    lanes = _lanes(found, trace.events)
    waits_end = _waits_end(found, lanes, n)
    own_stacks = _have_own_stacks(found, trace.events)
    releases = releases_of(
        trace, replayed.curves, waits_end, collects=collects, own_stacks=own_stacks
    )
    failed = np.flatnonzero(trace.events.action == Action.OOM)
    placed = [
        *_life_steps(found, lanes, releases, n),
        *((int(event), 0, Act.ASK, len(found) + i) for i, event in enumerate(failed)),
        *_release_steps(found, releases),
    ]
    placed.sort()
    before = np.flatnonzero(found.begin == BEFORE)
    pools = np.maximum(trace.events.pool[failed], 0)
    return Program(
        requests=(
            *zip(found.requested.tolist(), found.stream.tolist(), found.pool.tolist(), strict=True),
            *zip(
                trace.events.size[failed].tolist(),
                trace.events.stream[failed].tolist(),
                pools.tolist(),
                strict=True,
            ),
        ),
        lanes=lanes,
        held=tuple(before[np.argsort(found.address[before], kind="stable")].tolist()),
        freed_before=tuple(before[found.free_requested[before] == BEFORE].tolist()),
        steps=tuple((event, act, number) for event, _, act, number in placed),
        releases=releases,
        peak_event=int(replayed.curves.requested.argmax()) - 1,
        own_stacks=own_stacks,
    )


def _lanes(found: Allocations, events: Events) -> tuple[int, ...]:
    """Give every free that waited a lane in which those before it are done before it.

    Which streams it waited for is in no trace. So few lanes that each keeps its order do the same.
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
    """Find the frees that did not complete at once, in the same call."""
    n = len(events)
    freed = np.flatnonzero(found.free_requested < n)
    request, end = found.free_requested[freed], found.end[freed]
    longer = (end - request > 1) | (end == n)
    # What the next request completed has its stack.
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
) -> Iterator[tuple[int, int, Act, int]]:
    # A request that waits for pending frees has not found a block by then: they are done after it.
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
            yield begin, 0, Act.ALLOC, index
        if BEFORE < freed < n:
            yield freed, 1 if begin == freed else 0, Act.FREE, index
        if lanes[index] != AT_ONCE and ends[index] < n:
            end = ends[index]
            yield later.get(end, end), 1 if end in later else 0, Act.COMPLETE, index


def _release_steps(
    found: Allocations, releases: tuple[Release, ...]
) -> Iterator[tuple[int, int, Act, int]]:
    for release in releases:
        # A pool that has no requests any more may give its memory back from now on.
        gone = [
            pool
            for pool in sorted(release.pools - {0})
            if not (found.begin[found.pool == pool] > release.first).any()
        ]
        last = release.after - 1
        for pool in gone:
            yield last, 2, Act.LET_GO, pool
        if release.request is not None or not release.gives_back:
            continue
        if 0 in release.pools or not gone:
            yield last, 3, Act.EMPTY_CACHE, 0
        else:
            for pool in gone:
                yield last, 3, Act.EMPTY_POOL, pool
