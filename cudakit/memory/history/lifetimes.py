"""Group events into lifetimes by address, and match the lifetimes with the blocks of the final state.

A lifetime is an allocation, the request to free it, and the completion of the free. Any of these steps can be
missing from the trace.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from cudakit.memory.snapshot import (
    BEFORE_TRACE,
    Action,
    Addresses,
    Blocks,
    BlockState,
    Codes,
    Events,
    Ints,
    Mask,
)

# The kinds of steps of a lifetime, in their order.
BEGIN, REQUEST, COMPLETE = 0, 1, 2
NO_STEP = 255


@dataclass(frozen=True, slots=True)
class LifetimeSteps:
    """Begins, free requests and ends of lifetimes, sorted by address, then by time."""

    event: Ints  # index of the event in the trace
    address: Addresses
    step: Codes  # kind of the step: BEGIN, REQUEST or COMPLETE
    size: Ints  # size in bytes of the allocation


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """Lifetimes, by address; ``begin``, ``request`` and ``complete`` are events, or -1 if not recorded."""

    first: Ints  # index of each lifetime's first step in LifetimeSteps
    last: Ints  # index of each lifetime's last step
    address: Addresses
    begin: Ints
    request: Ints
    complete: Ints
    is_newest: Mask  # whether the lifetime is the last one at its address
    is_oldest: Mask  # whether the lifetime is the first one at its address


def sorted_by_address(
    events: Ints, addresses: Addresses, steps: Codes, sizes: Ints
) -> LifetimeSteps:
    """Sort steps of lifetimes, which are in order of time, by address; keep the order of time per address."""
    order = _address_order(addresses)
    return LifetimeSteps(events[order], addresses[order], steps[order], sizes[order])


def _address_order(addresses: Addresses) -> npt.NDArray[np.intp]:
    if len(addresses):
        # Addresses of a device share their upper bits, and blocks are multiples of 512 bytes. If the
        # remaining bits fit in 32 bits, sorting is faster.
        offsets = addresses - addresses.min()
        if int(offsets.max()) < 1 << 41 and not (offsets & np.uint64(511)).any():
            return np.argsort((offsets >> np.uint64(9)).astype(np.uint32), kind="stable")
    return np.argsort(addresses, kind="stable")


def split_into_lifetimes(steps: LifetimeSteps) -> Lifetimes:
    """Group events into lifetimes. A step that cannot follow the previous step starts a new lifetime."""
    step_count = len(steps.event)
    is_new_address = np.ones(step_count, np.bool_)
    is_new_address[1:] = steps.address[1:] != steps.address[:-1]
    is_first_step = is_new_address.copy()
    is_first_step[1:] |= steps.step[1:] <= steps.step[:-1]
    first = np.flatnonzero(is_first_step)
    lifetime_of_step = np.cumsum(is_first_step) - 1
    # The event of each kind of step in each lifetime; -1: not recorded.
    events = np.full((3, len(first)), -1, np.int64)
    events[steps.step, lifetime_of_step] = steps.event
    is_oldest = is_new_address[first]
    return Lifetimes(
        first=first,
        last=np.append(first[1:], step_count)[: len(first)] - 1,
        address=steps.address[first],
        begin=events[BEGIN],
        request=events[REQUEST],
        complete=events[COMPLETE],
        is_newest=np.append(is_oldest[1:], True)[: len(first)],
        is_oldest=is_oldest,
    )


def final_index(lifetimes: Lifetimes, final_addresses: Addresses) -> Ints:
    """Return the index of each lifetime in the ascending addresses of the final state; -1 if it has ended."""
    index = index_of(lifetimes.address, final_addresses)
    return np.where(lifetimes.is_newest & (lifetimes.complete < 0), index, -1)


def index_of(addresses: Addresses, sorted_addresses: Addresses) -> Ints:
    """Return the index of each address in an ascending array; -1 if the array lacks it."""
    if not len(sorted_addresses):
        return np.full(len(addresses), -1, np.int64)
    nearest = np.minimum(np.searchsorted(sorted_addresses, addresses), len(sorted_addresses) - 1)
    return np.where(sorted_addresses[nearest] == addresses, nearest, -1)


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
    step_codes = np.full(len(events), NO_STEP, np.uint8)
    step_codes[events.action == Action.ALLOC] = BEGIN
    step_codes[(events.action == Action.FREE_REQUESTED) | is_free] = REQUEST
    step_codes[events.action == Action.FREE_COMPLETED] = COMPLETE
    rows = np.flatnonzero(step_codes != NO_STEP)
    codes = step_codes[rows]
    if is_free.any():
        repeats = np.repeat(np.arange(len(rows)), 1 + is_free[rows])
        is_repeat = np.append(False, repeats[1:] == repeats[:-1])
        rows, codes = rows[repeats], np.where(is_repeat, np.uint8(COMPLETE), codes[repeats])
    return sorted_by_address(rows, events.address[rows], codes, events.size[rows])


@dataclass(frozen=True, slots=True)
class MatchedLifetimes:
    """Lifetimes, matched with the blocks of the final state.

    ``begin``, ``free_request`` and ``end`` are indices of events: -1 is before the trace, the number of
    events is after the trace.
    """

    address: Addresses
    requested: Ints  # requested bytes
    begin: Ints
    free_request: Ints
    end: Ints
    source: Ints  # event of the first recorded step; -1: none
    block: Ints  # index of the block in the final state; -1: freed before
    counts: Contradictions


def match_final_blocks(
    steps: LifetimeSteps, lifetimes: Lifetimes, blocks: Blocks, n_events: int
) -> MatchedLifetimes:
    """Match the lifetimes of a trace of n events with the blocks of the final state."""
    live_blocks = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    live_blocks = live_blocks[np.argsort(blocks.address[live_blocks], kind="stable")]
    index = final_index(lifetimes, blocks.address[live_blocks])
    has_block = index >= 0
    matched_blocks = live_blocks[index[has_block]]
    block = np.full(len(index), -1, np.int64)
    block[has_block] = matched_blocks
    is_unfinished = lifetimes.complete < 0
    is_missing_at_end = lifetimes.is_newest & is_unfinished & ~has_block
    is_overwritten = ~lifetimes.is_newest & is_unfinished
    has_lost_alloc = (lifetimes.begin < 0) & ~lifetimes.is_oldest
    begins = lifetimes.begin.copy()  # -1 is BEFORE_TRACE
    # The allocation came after the last free of the address; the earliest possible event is assumed.
    begins[has_lost_alloc] = steps.event[lifetimes.first[has_lost_alloc] - 1]
    ends = np.where(is_unfinished, n_events, lifetimes.complete)
    ends[is_overwritten] = steps.event[lifetimes.last[is_overwritten] + 1]
    ends[is_missing_at_end] = max(n_events - 1, 0)
    states = np.full(len(block), BlockState.INACTIVE, np.uint8)
    states[has_block] = blocks.state[matched_blocks]
    requests, lost_request_count = _request_events(lifetimes, states, ends, n_events)
    # A live block without a lifetime was allocated before the trace. If its address has earlier lifetimes in
    # the trace, its allocation was lost instead.
    unmatched = np.setdiff1d(live_blocks, matched_blocks)
    newest = np.flatnonzero(lifetimes.is_newest)
    earlier = index_of(blocks.address[unmatched], lifetimes.address[newest])
    is_reallocated = earlier >= 0
    unmatched_begins = np.full(len(unmatched), BEFORE_TRACE, np.int64)
    unmatched_begins[is_reallocated] = lifetimes.complete[newest[earlier[is_reallocated]]]
    is_pending = blocks.state[unmatched] == BlockState.PENDING_FREE
    sizes = steps.size[lifetimes.first]
    is_same_lifetime = (steps.address[1:] == steps.address[:-1]) & (
        steps.step[1:] > steps.step[:-1]
    )
    size_mismatch_count = np.count_nonzero(sizes[has_block] != blocks.requested[matched_blocks])
    size_mismatch_count += np.count_nonzero(is_same_lifetime & (steps.size[1:] != steps.size[:-1]))
    return MatchedLifetimes(
        address=np.concatenate((lifetimes.address, blocks.address[unmatched])),
        requested=np.concatenate((sizes, blocks.requested[unmatched])),
        begin=np.concatenate((begins, unmatched_begins)),
        free_request=np.concatenate((requests, np.where(is_pending, unmatched_begins, n_events))),
        end=np.concatenate((ends, np.full(len(unmatched), n_events))),
        source=np.concatenate((steps.event[lifetimes.first], np.full(len(unmatched), -1))),
        block=np.concatenate((block, unmatched)),
        counts=Contradictions(
            lost_allocations=int(
                np.count_nonzero(has_lost_alloc) + np.count_nonzero(is_reallocated)
            ),
            lost_frees=int(np.count_nonzero(is_missing_at_end | is_overwritten)),
            lost_requests=lost_request_count,
            sizes=int(size_mismatch_count),
        ),
    )


def _request_events(
    lifetimes: Lifetimes, states: Codes, ends: Ints, n_events: int
) -> tuple[Ints, int]:
    """Return the event of each free request, and the number of missing requests.

    ``states`` are those of the final blocks; INACTIVE without one.
    """
    is_missing = lifetimes.request < 0
    # The first free of an address may have been requested before the trace.
    is_before_trace = (
        is_missing & (lifetimes.begin < 0) & lifetimes.is_oldest & (lifetimes.complete >= 0)
    )
    is_incomplete = is_missing & (lifetimes.complete < 0)
    is_pending = is_incomplete & (states == BlockState.PENDING_FREE)
    is_allocated_again = ~is_missing & (states == BlockState.ALLOCATED)
    requests = np.where(
        is_missing, np.where(is_before_trace, BEFORE_TRACE, ends), lifetimes.request
    )
    requests[is_pending] = n_events - 1
    requests[is_allocated_again] = n_events
    is_lost = (is_missing & ~is_before_trace & ~is_incomplete) | is_pending | is_allocated_again
    return requests, int(np.count_nonzero(is_lost))
