"""All allocations with their lifetimes, sizes and call stacks, and the memory curves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudakit.memory.replay.lifetimes import MatchedLifetimes
from cudakit.memory.replay.segments import SegmentHistory
from cudakit.memory.snapshot import Addresses, DeviceTrace, Ids, Ints, Mask, Snapshot
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.settings import recorded_divisions
from cudakit.torch_rules.sizes import rounded_array


@dataclass(frozen=True, slots=True)
class Allocations:
    """All allocations of a trace and its final state; every array has one item per allocation.

    ``begin``, ``free_request`` and ``end`` are event indices. BEFORE_TRACE is before the trace; n, the
    number of events, is after it.
    """

    address: Addresses
    requested: Ints  # requested bytes
    size: Ints  # bytes of the block; computed by the allocator's rules if ``size_known`` is False
    size_known: Mask
    begin: Ints
    free_request: Ints
    end: Ints
    stream: Ids
    pool: Ids
    stack: Ids
    source: Ints  # event that recorded stream and stack; -1: recorded by the final block
    live_block: Ints  # index of the block in the final state; -1: freed before

    def __len__(self) -> int:
        return len(self.address)


def allocations_of(
    snapshot: Snapshot,
    trace: DeviceTrace,
    segments: SegmentHistory,
    matched_lifetimes: MatchedLifetimes,
) -> Allocations:
    """Return the allocation of each lifetime; sizes of freed blocks are the rounded requests."""
    events, blocks = trace.events, trace.blocks
    has_event = matched_lifetimes.source >= 0
    has_final_block = matched_lifetimes.block >= 0
    source_events = matched_lifetimes.source[has_event]
    final_blocks = matched_lifetimes.block[has_final_block]
    stream_ids = np.zeros(len(matched_lifetimes.address), np.int32)
    stack_ids = np.zeros(len(matched_lifetimes.address), np.int32)
    stream_ids[has_final_block] = trace.segments.stream[blocks.segment[final_blocks]]
    stream_ids[has_event] = events.stream[source_events]
    # For an allocation from before the trace, the trace has only the free and the call stack of the free.
    is_allocation = events.action[source_events] == Action.ALLOC
    stack_ids[has_event] = np.where(is_allocation, events.stack[source_events], 0)
    # With context="state" only the final blocks have stacks.
    final_stack_ids = blocks.stack[final_blocks]
    stack_ids[has_final_block] = np.where(
        (stack_ids[has_final_block] == 0) | (final_stack_ids != 0),
        final_stack_ids,
        stack_ids[has_final_block],
    )
    requested_bytes = matched_lifetimes.requested.copy()
    requested_bytes[has_final_block] = blocks.requested[final_blocks]
    block_bytes = rounded_array(requested_bytes, recorded_divisions(snapshot.settings))
    block_bytes[has_final_block] = blocks.size[final_blocks]
    return Allocations(
        address=matched_lifetimes.address,
        requested=requested_bytes,
        size=block_bytes,
        size_known=has_final_block,
        begin=matched_lifetimes.begin,
        free_request=matched_lifetimes.free_request,
        end=matched_lifetimes.end,
        stream=stream_ids,
        pool=_pools(trace, segments, matched_lifetimes),
        stack=stack_ids,
        source=matched_lifetimes.source,
        live_block=matched_lifetimes.block,
    )


def _pools(
    trace: DeviceTrace, segments: SegmentHistory, matched_lifetimes: MatchedLifetimes
) -> Ids:
    """Return the pool of each allocation: recorded by its event (torch 2.12), else by its segment."""
    has_event = matched_lifetimes.source >= 0
    events = np.where(has_event, matched_lifetimes.source, len(trace.events))
    pool_ids = segments.pool_at(matched_lifetimes.address, events)
    recorded_pool_ids = trace.events.pool[matched_lifetimes.source[has_event]]
    pool_ids[np.flatnonzero(has_event)[recorded_pool_ids >= 0]] = recorded_pool_ids[
        recorded_pool_ids >= 0
    ]
    return pool_ids


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes at every moment: arrays of n + 1 items, defined as in ``torch.cuda.memory_stats``."""

    requested: Ints  # requested bytes of blocks in use and pending free
    allocated: Ints  # sizes of blocks, until the free is requested
    active: Ints  # sizes of blocks in use and pending free
    reserved: Ints  # sizes of segments


def curves_of(segments: SegmentHistory, allocations: Allocations) -> Curves:
    """Return the curves of all allocations and segments."""
    n_events = len(segments.reserved) - 1
    begin_events, request_events, end_events = (
        allocations.begin,
        allocations.free_request,
        allocations.end,
    )
    return Curves(
        requested=_sum_of_intervals(n_events, begin_events, end_events, allocations.requested),
        allocated=_sum_of_intervals(n_events, begin_events, request_events, allocations.size),
        active=_sum_of_intervals(n_events, begin_events, end_events, allocations.size),
        reserved=segments.reserved,
    )


def _sum_of_intervals(
    n_events: int, begin_events: Ints, end_events: Ints, size_bytes: Ints
) -> Ints:
    """Return the sum of the amounts whose interval contains each moment.

    An interval includes the moments from after event ``begin_events`` to before event ``end_events``.
    """
    change_bytes = np.bincount(begin_events + 1, weights=size_bytes, minlength=n_events + 2)
    change_bytes -= np.bincount(end_events + 1, weights=size_bytes, minlength=n_events + 2)
    # Sums of bytes stay below 2**53, where float64 is exact.
    return np.cumsum(change_bytes[: n_events + 1]).astype(np.int64)
