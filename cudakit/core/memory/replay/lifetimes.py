"""Events cut into lifetimes at each address, and matched with the blocks of the final state."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.snapshot import Blocks, BlockState, Events
from cudakit.torch_rules.actions import Action

_Ints = npt.NDArray[np.int64]

# The order in which the events of one lifetime come.
BEGIN, REQUEST, COMPLETE = 0, 1, 2
NO_STEP = 255

BEFORE = -1  # as an event index: before the first recorded event


@dataclass(frozen=True, slots=True)
class Rows:
    """Steps of lifetimes, ordered by address and within an address by time."""

    event: _Ints
    address: npt.NDArray[np.uint64]
    step: npt.NDArray[np.uint8]
    size: _Ints


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Rows cut into lifetimes; a step that was not recorded is -1."""

    first: _Ints  # row
    last: _Ints  # row
    begin: _Ints  # event
    request: _Ints  # event
    complete: _Ints  # event
    newest: npt.NDArray[np.bool_]  # the last lifetime at its address
    oldest: npt.NDArray[np.bool_]  # the first lifetime at its address


def order(
    event: _Ints,
    address: npt.NDArray[np.uint64],
    step: npt.NDArray[np.uint8],
    size: _Ints,
) -> Rows:
    """Order steps, given in order of time, by address."""
    by_address = _stable_by_address(address)
    return Rows(event[by_address], address[by_address], step[by_address], size[by_address])


def cut(rows: Rows) -> Lifetimes:
    """Start a lifetime at each step that cannot follow the one before it at the same address."""
    n = len(rows.event)
    new_address = np.ones(n, np.bool_)
    new_address[1:] = rows.address[1:] != rows.address[:-1]
    starts = new_address.copy()
    starts[1:] |= rows.step[1:] <= rows.step[:-1]
    first = np.flatnonzero(starts)
    last = np.append(first[1:], n)[: len(first)] - 1
    lifetime = np.cumsum(starts) - 1
    oldest = new_address[first]
    return Lifetimes(
        first=first,
        last=last,
        begin=_events(rows, lifetime, BEGIN, len(first)),
        request=_events(rows, lifetime, REQUEST, len(first)),
        complete=_events(rows, lifetime, COMPLETE, len(first)),
        newest=np.append(oldest[1:], True)[: len(first)],
        oldest=oldest,
    )


def _events(rows: Rows, lifetime: _Ints, step: int, n: int) -> _Ints:
    """Return the event of one step in each lifetime; -1 if it was not recorded."""
    event = np.full(n, -1, np.int64)
    here = rows.step == step
    event[lifetime[here]] = rows.event[here]
    return event


def _stable_by_address(address: npt.NDArray[np.uint64]) -> npt.NDArray[np.intp]:
    if not len(address):
        return np.zeros(0, np.intp)
    # Device addresses share their upper bits: when what differs fits 32 bits (blocks are multiples of
    # 512 bytes), the sort works on half the width.
    low, high = address.min(), address.max()
    offset = address - low
    if int(high - low) < 1 << 41 and not (offset & np.uint64(511)).any():
        return np.argsort((offset >> np.uint64(9)).astype(np.uint32), kind="stable")
    return np.argsort(address, kind="stable")


# Of the kinds:
# lost_allocations: freed, or live at the end, without having been allocated
# lost_frees: allocated where something was live, or gone without a free
# lost_requests: a free completed that nobody had requested
# sizes: events of one allocation that disagree about its size
# segments: allocated or freed twice, or not at the end what their last event says
# over_reserved: moments with more in use than reserved
@dataclass(frozen=True, slots=True)
class Contradictions:
    """How often the trace and the final state contradict each other, by kind."""

    lost_allocations: int = 0
    lost_frees: int = 0
    lost_requests: int = 0
    sizes: int = 0
    segments: int = 0
    over_reserved: int = 0

    @property
    def total(self) -> int:
        """The number of contradictions of every kind."""
        return sum(getattr(self, field.name) for field in fields(self))


def allocation_rows(events: Events) -> Rows:
    """Order the events of allocations by address."""
    is_free = events.action == Action.FREE
    step = np.full(len(events), NO_STEP, np.uint8)
    step[events.action == Action.ALLOC] = BEGIN
    step[(events.action == Action.FREE_REQUESTED) | is_free] = REQUEST
    step[events.action == Action.FREE_COMPLETED] = COMPLETE
    event = np.flatnonzero(step != NO_STEP)
    step = step[event]
    if is_free.any():  # one event that is both steps
        twice = np.repeat(np.arange(len(event)), 1 + is_free[event])
        second = np.append(False, twice[1:] == twice[:-1])
        event, step = event[twice], np.where(second, np.uint8(COMPLETE), step[twice])
    return order(event, events.address[event], step, events.size[event])


@dataclass(frozen=True, slots=True)
class Matched:
    """Lifetimes matched with the blocks that are live at the end."""

    address: npt.NDArray[np.uint64]
    requested: _Ints
    begin: _Ints
    free_requested: _Ints
    end: _Ints
    source: _Ints
    block: _Ints
    counts: Contradictions


def match(rows: Rows, runs: Lifetimes, blocks: Blocks, n: int) -> Matched:
    """Match the lifetimes of n events with the blocks of the final state."""
    address = rows.address[runs.first]
    live = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    live = live[np.argsort(blocks.address[live], kind="stable")]
    block, open_run = _live_block_of_runs(address, runs, blocks, live)
    unfinished = runs.complete < 0
    vanished = runs.newest & unfinished & (block < 0)
    overrun = ~runs.newest & unfinished
    begin, unborn = _begins(rows, runs)
    end = np.where(unfinished, n, runs.complete)
    end[overrun] = rows.event[runs.last[overrun] + 1]
    end[vanished] = max(n - 1, 0)
    request, unrequested = _requests(runs, blocks, block, end, n)
    requested = rows.size[runs.first]
    # A live block that no open run explains was allocated before the trace, unless its address has a
    # history in the trace: then its allocation was lost.
    fresh = np.setdiff1d(live, block[open_run])
    fresh_begin, relived = _begins_of_unexplained(address, runs, blocks, fresh)
    known = block >= 0
    disagree = np.count_nonzero(requested[known] != blocks.requested[block[known]])
    disagree += _size_disagreements(rows)
    fresh_pending = blocks.state[fresh] == BlockState.PENDING_FREE
    return Matched(
        address=np.concatenate((address, blocks.address[fresh])),
        requested=np.concatenate((requested, blocks.requested[fresh])),
        begin=np.concatenate((begin, fresh_begin)),
        free_requested=np.concatenate((request, np.where(fresh_pending, fresh_begin, n))),
        end=np.concatenate((end, np.full(len(fresh), n))),
        source=np.concatenate((rows.event[runs.first], np.full(len(fresh), -1))),
        block=np.concatenate((block, fresh)),
        counts=Contradictions(
            lost_allocations=unborn + relived,
            lost_frees=int(np.count_nonzero(vanished | overrun)),
            lost_requests=unrequested,
            sizes=int(disagree),
        ),
    )


def _live_block_of_runs(
    address: npt.NDArray[np.uint64], runs: Lifetimes, blocks: Blocks, live: npt.NDArray[np.intp]
) -> tuple[_Ints, npt.NDArray[np.bool_]]:
    """Return the final block of each run, and which runs have one."""
    block = np.full(len(address), -1, np.int64)
    if not len(live):
        return block, np.zeros(len(address), np.bool_)
    place = np.minimum(np.searchsorted(blocks.address[live], address), len(live) - 1)
    is_open = runs.newest & (runs.complete < 0) & (blocks.address[live][place] == address)
    block[is_open] = live[place[is_open]]
    return block, is_open


def _begins(rows: Rows, runs: Lifetimes) -> tuple[_Ints, int]:
    """Return the event at which each run begins, and how many have no recorded allocation."""
    lost = (runs.begin < 0) & ~runs.oldest
    begin = runs.begin.copy()  # -1 is BEFORE
    # It was allocated at some time after the address was last freed: the earliest is assumed.
    begin[lost] = rows.event[runs.first[lost] - 1]
    return begin, int(np.count_nonzero(lost))


def _requests(
    runs: Lifetimes, blocks: Blocks, block: _Ints, end: _Ints, n: int
) -> tuple[_Ints, int]:
    """Return when the free of each run was requested, and how many completed without a request."""
    missing = runs.request < 0
    # The oldest run of an address may have been requested before the trace began.
    before = missing & (runs.begin < 0) & runs.oldest & (runs.complete >= 0)
    never = missing & (runs.complete < 0)
    request = np.where(missing, np.where(before, BEFORE, end), runs.request)
    known = block >= 0
    state = np.full(len(block), BlockState.INACTIVE, np.uint8)
    state[known] = blocks.state[block[known]]
    pending = never & (state == BlockState.PENDING_FREE)
    revived = ~missing & (state == BlockState.ALLOCATED)
    request[never] = end[never]
    request[pending] = n - 1
    request[revived] = n
    lost = (missing & ~before & ~never) | pending | revived
    return request, int(np.count_nonzero(lost))


def _begins_of_unexplained(
    address: npt.NDArray[np.uint64], runs: Lifetimes, blocks: Blocks, fresh: npt.NDArray[np.intp]
) -> tuple[_Ints, int]:
    begin = np.full(len(fresh), BEFORE, np.int64)
    newest = np.flatnonzero(runs.newest)
    if not len(newest) or not len(fresh):
        return begin, 0
    wanted = blocks.address[fresh]
    place = np.minimum(np.searchsorted(address[newest], wanted), len(newest) - 1)
    relived = address[newest][place] == wanted
    begin[relived] = runs.complete[newest[place[relived]]]
    return begin, int(np.count_nonzero(relived))


def _size_disagreements(rows: Rows) -> int:
    same = (rows.address[1:] == rows.address[:-1]) & (rows.step[1:] > rows.step[:-1])
    return int(np.count_nonzero(same & (rows.size[1:] != rows.size[:-1])))
