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
    begin: Ints
    request: Ints
    complete: Ints
    is_newest: Mask  # whether the lifetime is the last one at its address
    is_oldest: Mask  # whether the lifetime is the first one at its address


def sorted_by_address(
    events: Ints, addresses: Addresses, steps: Codes, sizes: Ints
) -> LifetimeSteps:
    """Sort steps of lifetimes, which are in order of time, by address; keep the order of time per address."""
    address_order = _address_order(addresses)
    return LifetimeSteps(
        events[address_order], addresses[address_order], steps[address_order], sizes[address_order]
    )


def split_into_lifetimes(steps: LifetimeSteps) -> Lifetimes:
    """Group events into lifetimes. A step that cannot follow the previous step starts a new lifetime."""
    step_count = len(steps.event)
    is_new_address = np.ones(step_count, np.bool_)
    is_new_address[1:] = steps.address[1:] != steps.address[:-1]
    is_first_step = is_new_address.copy()
    is_first_step[1:] |= steps.step[1:] <= steps.step[:-1]
    first_steps = np.flatnonzero(is_first_step)
    last_steps = np.append(first_steps[1:], step_count)[: len(first_steps)] - 1
    lifetime_indices = np.cumsum(is_first_step) - 1
    is_oldest = is_new_address[first_steps]
    return Lifetimes(
        first=first_steps,
        last=last_steps,
        begin=_events_of_step(steps, lifetime_indices, BEGIN, len(first_steps)),
        request=_events_of_step(steps, lifetime_indices, REQUEST, len(first_steps)),
        complete=_events_of_step(steps, lifetime_indices, COMPLETE, len(first_steps)),
        is_newest=np.append(is_oldest[1:], True)[: len(first_steps)],
        is_oldest=is_oldest,
    )


def _events_of_step(
    steps: LifetimeSteps, lifetime_indices: Ints, step: int, n_lifetimes: int
) -> Ints:
    """Return the event of one kind of step in each lifetime; -1: not recorded."""
    events = np.full(n_lifetimes, -1, np.int64)
    is_step = steps.step == step
    events[lifetime_indices[is_step]] = steps.event[is_step]
    return events


def _address_order(addresses: Addresses) -> npt.NDArray[np.intp]:
    if not len(addresses):
        return np.zeros(0, np.intp)
    # Addresses of a device share their upper bits, and blocks are multiples of 512 bytes. If the remaining
    # bits fit in 32 bits, sorting is faster.
    lowest_address, highest_address = addresses.min(), addresses.max()
    offsets = addresses - lowest_address
    if int(highest_address - lowest_address) < 1 << 41 and not (offsets & np.uint64(511)).any():
        return np.argsort((offsets >> np.uint64(9)).astype(np.uint32), kind="stable")
    return np.argsort(addresses, kind="stable")


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
    step_events = np.flatnonzero(step_codes != NO_STEP)
    step_codes = step_codes[step_events]
    if is_free.any():
        repeated_indices = np.repeat(np.arange(len(step_events)), 1 + is_free[step_events])
        is_repeat = np.append(False, repeated_indices[1:] == repeated_indices[:-1])
        step_events, step_codes = (
            step_events[repeated_indices],
            np.where(is_repeat, np.uint8(COMPLETE), step_codes[repeated_indices]),
        )
    return sorted_by_address(
        step_events, events.address[step_events], step_codes, events.size[step_events]
    )


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
    addresses = steps.address[lifetimes.first]
    live_blocks = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    live_blocks = live_blocks[np.argsort(blocks.address[live_blocks], kind="stable")]
    block_indices, is_matched = _final_blocks(addresses, lifetimes, blocks, live_blocks)
    is_unfinished = lifetimes.complete < 0
    is_missing_at_end = lifetimes.is_newest & is_unfinished & (block_indices < 0)
    is_overwritten = ~lifetimes.is_newest & is_unfinished
    begin_events, lost_alloc_count = _begin_events(steps, lifetimes)
    end_events = np.where(is_unfinished, n_events, lifetimes.complete)
    end_events[is_overwritten] = steps.event[lifetimes.last[is_overwritten] + 1]
    end_events[is_missing_at_end] = max(n_events - 1, 0)
    request_events, lost_request_count = _request_events(
        lifetimes, blocks, block_indices, end_events, n_events
    )
    requested_bytes = steps.size[lifetimes.first]
    # A live block without a lifetime was allocated before the trace. If its address has earlier lifetimes in
    # the trace, its allocation was lost instead.
    unmatched_blocks = np.setdiff1d(live_blocks, block_indices[is_matched])
    unmatched_begin, lost_reallocation_count = _begins_of_unmatched(
        addresses, lifetimes, blocks, unmatched_blocks
    )
    has_block = block_indices >= 0
    mismatch_count = np.count_nonzero(
        requested_bytes[has_block] != blocks.requested[block_indices[has_block]]
    )
    mismatch_count += _size_disagreements(steps)
    is_unmatched_pending = blocks.state[unmatched_blocks] == BlockState.PENDING_FREE
    return MatchedLifetimes(
        address=np.concatenate((addresses, blocks.address[unmatched_blocks])),
        requested=np.concatenate((requested_bytes, blocks.requested[unmatched_blocks])),
        begin=np.concatenate((begin_events, unmatched_begin)),
        free_request=np.concatenate(
            (request_events, np.where(is_unmatched_pending, unmatched_begin, n_events))
        ),
        end=np.concatenate((end_events, np.full(len(unmatched_blocks), n_events))),
        source=np.concatenate((steps.event[lifetimes.first], np.full(len(unmatched_blocks), -1))),
        block=np.concatenate((block_indices, unmatched_blocks)),
        counts=Contradictions(
            lost_allocations=lost_alloc_count + lost_reallocation_count,
            lost_frees=int(np.count_nonzero(is_missing_at_end | is_overwritten)),
            lost_requests=lost_request_count,
            sizes=int(mismatch_count),
        ),
    )


def _final_blocks(
    addresses: Addresses, lifetimes: Lifetimes, blocks: Blocks, live_blocks: npt.NDArray[np.intp]
) -> tuple[Ints, Mask]:
    """Return the final block of each lifetime (-1: none), and a mask of the lifetimes that have one."""
    block_indices = np.full(len(addresses), -1, np.int64)
    if not len(live_blocks):
        return block_indices, np.zeros(len(addresses), np.bool_)
    nearest_indices = np.minimum(
        np.searchsorted(blocks.address[live_blocks], addresses), len(live_blocks) - 1
    )
    is_matched = (
        lifetimes.is_newest
        & (lifetimes.complete < 0)
        & (blocks.address[live_blocks][nearest_indices] == addresses)
    )
    block_indices[is_matched] = live_blocks[nearest_indices[is_matched]]
    return block_indices, is_matched


def _begin_events(steps: LifetimeSteps, lifetimes: Lifetimes) -> tuple[Ints, int]:
    """Return the first event of each lifetime, and the number of lost allocations."""
    has_lost_alloc = (lifetimes.begin < 0) & ~lifetimes.is_oldest
    begin_events = lifetimes.begin.copy()  # -1 is BEFORE_TRACE
    # The allocation came after the last free of the address; the earliest possible event is assumed.
    begin_events[has_lost_alloc] = steps.event[lifetimes.first[has_lost_alloc] - 1]
    return begin_events, int(np.count_nonzero(has_lost_alloc))


def _request_events(
    lifetimes: Lifetimes, blocks: Blocks, block_indices: Ints, end_events: Ints, n_events: int
) -> tuple[Ints, int]:
    """Return the event of each free request, and the number of missing requests."""
    is_missing = lifetimes.request < 0
    # The first free of an address may have been requested before the trace.
    is_before_trace = (
        is_missing & (lifetimes.begin < 0) & lifetimes.is_oldest & (lifetimes.complete >= 0)
    )
    is_incomplete = is_missing & (lifetimes.complete < 0)
    request_events = np.where(
        is_missing, np.where(is_before_trace, BEFORE_TRACE, end_events), lifetimes.request
    )
    has_block = block_indices >= 0
    block_states = np.full(len(block_indices), BlockState.INACTIVE, np.uint8)
    block_states[has_block] = blocks.state[block_indices[has_block]]
    is_pending = is_incomplete & (block_states == BlockState.PENDING_FREE)
    is_allocated_again = ~is_missing & (block_states == BlockState.ALLOCATED)
    request_events[is_incomplete] = end_events[is_incomplete]
    request_events[is_pending] = n_events - 1
    request_events[is_allocated_again] = n_events
    has_lost_request = (
        (is_missing & ~is_before_trace & ~is_incomplete) | is_pending | is_allocated_again
    )
    return request_events, int(np.count_nonzero(has_lost_request))


def _begins_of_unmatched(
    lifetime_addresses: Addresses,
    lifetimes: Lifetimes,
    blocks: Blocks,
    unmatched_blocks: npt.NDArray[np.intp],
) -> tuple[Ints, int]:
    begin_events = np.full(len(unmatched_blocks), BEFORE_TRACE, np.int64)
    newest_lifetimes = np.flatnonzero(lifetimes.is_newest)
    if not len(newest_lifetimes) or not len(unmatched_blocks):
        return begin_events, 0
    addresses = blocks.address[unmatched_blocks]
    nearest_indices = np.minimum(
        np.searchsorted(lifetime_addresses[newest_lifetimes], addresses), len(newest_lifetimes) - 1
    )
    is_reallocated = lifetime_addresses[newest_lifetimes][nearest_indices] == addresses
    begin_events[is_reallocated] = lifetimes.complete[
        newest_lifetimes[nearest_indices[is_reallocated]]
    ]
    return begin_events, int(np.count_nonzero(is_reallocated))


def _size_disagreements(steps: LifetimeSteps) -> int:
    is_same_lifetime = (steps.address[1:] == steps.address[:-1]) & (
        steps.step[1:] > steps.step[:-1]
    )
    return int(np.count_nonzero(is_same_lifetime & (steps.size[1:] != steps.size[:-1])))
