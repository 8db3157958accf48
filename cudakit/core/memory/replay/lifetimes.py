"""Group events into lifetimes by address, and match the lifetimes with the blocks of the final state.

A lifetime is an allocation, the request to free it, and the completion of the free. Any of these steps can be
missing from the trace.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.snapshot import Addresses, Blocks, BlockState, Codes, Events, Ints, Mask
from cudakit.torch_rules.actions import Action

# The kinds of steps of a lifetime, in their order.
BEGIN, REQUEST, COMPLETE = 0, 1, 2
NO_STEP = 255

BEFORE_TRACE = -1  # event index before the first recorded event


@dataclass(frozen=True, slots=True)
class LifetimeSteps:
    """Events of lifetimes, sorted by address, then by time."""

    event: Ints
    address: Addresses
    step: Codes
    size: Ints


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Lifetimes, by address; ``begin``, ``request`` and ``complete`` are events, or -1 if not recorded."""

    first: Ints  # index of each lifetime's first step in LifetimeSteps
    last: Ints  # index of each lifetime's last step
    begin: Ints
    request: Ints
    complete: Ints
    is_newest: Mask  # whether the lifetime is the last one at its address
    is_oldest: Mask  # whether the lifetime is the first one at its address


def sorted_by_address(event: Ints, address: Addresses, step: Codes, size: Ints) -> LifetimeSteps:
    """Sort steps of lifetimes, which are in order of time, by address; keep the order of time per address."""
    address_order = _address_order(address)
    return LifetimeSteps(
        event[address_order], address[address_order], step[address_order], size[address_order]
    )


def split_into_lifetimes(steps: LifetimeSteps) -> Lifetimes:
    """Group events into lifetimes. A step that cannot follow the previous step starts a new lifetime."""
    n_steps = len(steps.event)
    new_address = np.ones(n_steps, np.bool_)
    new_address[1:] = steps.address[1:] != steps.address[:-1]
    is_first_step = new_address.copy()
    is_first_step[1:] |= steps.step[1:] <= steps.step[:-1]
    first_step = np.flatnonzero(is_first_step)
    last_step = np.append(first_step[1:], n_steps)[: len(first_step)] - 1
    lifetime = np.cumsum(is_first_step) - 1
    is_oldest = new_address[first_step]
    return Lifetimes(
        first=first_step,
        last=last_step,
        begin=_events_of_step(steps, lifetime, BEGIN, len(first_step)),
        request=_events_of_step(steps, lifetime, REQUEST, len(first_step)),
        complete=_events_of_step(steps, lifetime, COMPLETE, len(first_step)),
        is_newest=np.append(is_oldest[1:], True)[: len(first_step)],
        is_oldest=is_oldest,
    )


def _events_of_step(steps: LifetimeSteps, lifetime: Ints, step: int, n_lifetimes: int) -> Ints:
    """Return the event of one kind of step in each lifetime; -1: not recorded."""
    event = np.full(n_lifetimes, -1, np.int64)
    is_step = steps.step == step
    event[lifetime[is_step]] = steps.event[is_step]
    return event


def _address_order(address: Addresses) -> npt.NDArray[np.intp]:
    if not len(address):
        return np.zeros(0, np.intp)
    # Addresses of a device share their upper bits, and blocks are multiples of 512 bytes. If the remaining
    # bits fit in 32 bits, sorting is faster.
    lowest_address, highest_address = address.min(), address.max()
    offset = address - lowest_address
    if int(highest_address - lowest_address) < 1 << 41 and not (offset & np.uint64(511)).any():
        return np.argsort((offset >> np.uint64(9)).astype(np.uint32), kind="stable")
    return np.argsort(address, kind="stable")


@dataclass(frozen=True, slots=True)
class Contradictions:
    """The number of contradictions between trace and final state, by kind."""

    # Number of allocations that are freed, or live at the end, without an alloc event.
    lost_allocations: int = 0
    # Number of blocks without a free event whose address is allocated again, or free at the end.
    lost_frees: int = 0
    lost_requests: int = 0  # number of frees that completed without a request
    sizes: int = 0  # number of allocations whose events have different sizes
    # number of segments that are allocated or freed twice, or differ from the final state
    segments: int = 0
    over_reserved: int = 0  # number of moments with more active than reserved memory

    @property
    def total(self) -> int:
        """The number of contradictions of all kinds."""
        return sum(getattr(self, field.name) for field in fields(self))


def allocation_lifetime_steps(events: Events) -> LifetimeSteps:
    """Return the alloc and free events of a trace as steps of lifetimes, sorted by address.

    A FREE event is two steps: the request to free and the completion of the free.
    """
    is_free = events.action == Action.FREE
    step = np.full(len(events), NO_STEP, np.uint8)
    step[events.action == Action.ALLOC] = BEGIN
    step[(events.action == Action.FREE_REQUESTED) | is_free] = REQUEST
    step[events.action == Action.FREE_COMPLETED] = COMPLETE
    event = np.flatnonzero(step != NO_STEP)
    step = step[event]
    if is_free.any():
        repeated_indices = np.repeat(np.arange(len(event)), 1 + is_free[event])
        is_repeat = np.append(False, repeated_indices[1:] == repeated_indices[:-1])
        event, step = (
            event[repeated_indices],
            np.where(is_repeat, np.uint8(COMPLETE), step[repeated_indices]),
        )
    return sorted_by_address(event, events.address[event], step, events.size[event])


@dataclass(frozen=True, slots=True)
class MatchedLifetimes:
    """Lifetimes, matched with the blocks of the final state.

    ``begin``, ``free_requested`` and ``end`` are indices of events: -1 before the trace, the number of events
    if not within it.
    """

    address: Addresses
    requested: Ints  # requested bytes
    begin: Ints
    free_requested: Ints
    end: Ints
    source: Ints  # event of the first recorded step; -1: none
    block: Ints  # index of the block in the final state; -1: freed before
    counts: Contradictions


def match_final_blocks(
    steps: LifetimeSteps, lifetimes: Lifetimes, blocks: Blocks, n_events: int
) -> MatchedLifetimes:
    """Match the lifetimes of a trace of n events with the blocks of the final state."""
    address = steps.address[lifetimes.first]
    live_blocks = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    live_blocks = live_blocks[np.argsort(blocks.address[live_blocks], kind="stable")]
    block, is_matched = _final_blocks(address, lifetimes, blocks, live_blocks)
    unfinished = lifetimes.complete < 0
    missing_at_end = lifetimes.is_newest & unfinished & (block < 0)
    is_overwritten = ~lifetimes.is_newest & unfinished
    begin, n_missing_allocs = _begins(steps, lifetimes)
    end = np.where(unfinished, n_events, lifetimes.complete)
    end[is_overwritten] = steps.event[lifetimes.last[is_overwritten] + 1]
    end[missing_at_end] = max(n_events - 1, 0)
    request, n_missing_requests = _request_events(lifetimes, blocks, block, end, n_events)
    requested = steps.size[lifetimes.first]
    # A live block without a lifetime was allocated before the trace. If its address has earlier lifetimes in
    # the trace, its allocation was lost instead.
    unmatched_blocks = np.setdiff1d(live_blocks, block[is_matched])
    unmatched_begin, reallocated = _begins_of_unmatched(
        address, lifetimes, blocks, unmatched_blocks
    )
    has_block = block >= 0
    size_mismatches = np.count_nonzero(requested[has_block] != blocks.requested[block[has_block]])
    size_mismatches += _size_disagreements(steps)
    unmatched_pending = blocks.state[unmatched_blocks] == BlockState.PENDING_FREE
    return MatchedLifetimes(
        address=np.concatenate((address, blocks.address[unmatched_blocks])),
        requested=np.concatenate((requested, blocks.requested[unmatched_blocks])),
        begin=np.concatenate((begin, unmatched_begin)),
        free_requested=np.concatenate(
            (request, np.where(unmatched_pending, unmatched_begin, n_events))
        ),
        end=np.concatenate((end, np.full(len(unmatched_blocks), n_events))),
        source=np.concatenate((steps.event[lifetimes.first], np.full(len(unmatched_blocks), -1))),
        block=np.concatenate((block, unmatched_blocks)),
        counts=Contradictions(
            lost_allocations=n_missing_allocs + reallocated,
            lost_frees=int(np.count_nonzero(missing_at_end | is_overwritten)),
            lost_requests=n_missing_requests,
            sizes=int(size_mismatches),
        ),
    )


def _final_blocks(
    address: Addresses, lifetimes: Lifetimes, blocks: Blocks, live_blocks: npt.NDArray[np.intp]
) -> tuple[Ints, Mask]:
    """Return the final block of each lifetime (-1: none), and a mask of the lifetimes that have one."""
    block = np.full(len(address), -1, np.int64)
    if not len(live_blocks):
        return block, np.zeros(len(address), np.bool_)
    index = np.minimum(np.searchsorted(blocks.address[live_blocks], address), len(live_blocks) - 1)
    is_matched = (
        lifetimes.is_newest
        & (lifetimes.complete < 0)
        & (blocks.address[live_blocks][index] == address)
    )
    block[is_matched] = live_blocks[index[is_matched]]
    return block, is_matched


def _begins(steps: LifetimeSteps, lifetimes: Lifetimes) -> tuple[Ints, int]:
    """Return the first event of each lifetime, and the number of lost allocations."""
    has_lost_alloc = (lifetimes.begin < 0) & ~lifetimes.is_oldest
    begin = lifetimes.begin.copy()  # -1 is BEFORE_TRACE
    # The allocation came after the last free of the address; the earliest possible event is assumed.
    begin[has_lost_alloc] = steps.event[lifetimes.first[has_lost_alloc] - 1]
    return begin, int(np.count_nonzero(has_lost_alloc))


def _request_events(
    lifetimes: Lifetimes, blocks: Blocks, block: Ints, end: Ints, n_events: int
) -> tuple[Ints, int]:
    """Return the event of each free request, and the number of missing requests."""
    is_missing = lifetimes.request < 0
    # The first free of an address may have been requested before the trace.
    before_trace = (
        is_missing & (lifetimes.begin < 0) & lifetimes.is_oldest & (lifetimes.complete >= 0)
    )
    not_completed = is_missing & (lifetimes.complete < 0)
    request = np.where(is_missing, np.where(before_trace, BEFORE_TRACE, end), lifetimes.request)
    has_block = block >= 0
    state = np.full(len(block), BlockState.INACTIVE, np.uint8)
    state[has_block] = blocks.state[block[has_block]]
    is_pending = not_completed & (state == BlockState.PENDING_FREE)
    allocated_again = ~is_missing & (state == BlockState.ALLOCATED)
    request[not_completed] = end[not_completed]
    request[is_pending] = n_events - 1
    request[allocated_again] = n_events
    has_lost_request = (is_missing & ~before_trace & ~not_completed) | is_pending | allocated_again
    return request, int(np.count_nonzero(has_lost_request))


def _begins_of_unmatched(
    address: Addresses, lifetimes: Lifetimes, blocks: Blocks, unmatched: npt.NDArray[np.intp]
) -> tuple[Ints, int]:
    begin = np.full(len(unmatched), BEFORE_TRACE, np.int64)
    newest_lifetimes = np.flatnonzero(lifetimes.is_newest)
    if not len(newest_lifetimes) or not len(unmatched):
        return begin, 0
    addresses = blocks.address[unmatched]
    index = np.minimum(
        np.searchsorted(address[newest_lifetimes], addresses), len(newest_lifetimes) - 1
    )
    reallocated = address[newest_lifetimes][index] == addresses
    begin[reallocated] = lifetimes.complete[newest_lifetimes[index[reallocated]]]
    return begin, int(np.count_nonzero(reallocated))


def _size_disagreements(steps: LifetimeSteps) -> int:
    same_lifetime = (steps.address[1:] == steps.address[:-1]) & (steps.step[1:] > steps.step[:-1])
    return int(np.count_nonzero(same_lifetime & (steps.size[1:] != steps.size[:-1])))
