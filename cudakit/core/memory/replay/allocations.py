"""All allocations with their lifetimes, sizes and call stacks, and the memory curves."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cudakit.core.memory.replay.lifetimes import MatchedLifetimes
from cudakit.core.memory.replay.segments import SegmentHistory
from cudakit.core.memory.snapshot import Addresses, DeviceTrace, Ids, Ints, Mask, Snapshot
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.settings import recorded_divisions
from cudakit.torch_rules.sizes import rounded_array


@dataclass(frozen=True, slots=True)
class Allocations:
    """All allocations of a trace and its final state; every array has one item per allocation.

    ``begin``, ``free_requested`` and ``end`` are event indices. BEFORE_TRACE is before the trace; n, the
    number of events, is after it.
    """

    address: Addresses
    requested: Ints  # bytes
    size: Ints  # bytes of the block; computed by rules if ``size_known`` is False
    size_known: Mask
    begin: Ints
    free_requested: Ints
    end: Ints
    stream: Ids
    pool: Ids
    stack: Ids
    source: Ints  # event that recorded stream and stack; -1: recorded by the final block
    live_block: Ints  # index into the final Blocks; -1: freed

    def __len__(self) -> int:
        return len(self.address)


def allocations_of(
    snapshot: Snapshot, trace: DeviceTrace, segments: SegmentHistory, matched: MatchedLifetimes
) -> Allocations:
    """Return the allocation of each lifetime; sizes of freed blocks are the rounded requests."""
    events, blocks = trace.events, trace.blocks
    has_event = matched.source >= 0
    live = matched.block >= 0
    source = matched.source[has_event]
    block = matched.block[live]
    stream = np.zeros(len(matched.address), np.int32)
    stack = np.zeros(len(matched.address), np.int32)
    stream[live] = trace.segments.stream[blocks.segment[block]]
    stream[has_event] = events.stream[source]
    # For an allocation from before the trace, the trace has only the free, with another stack.
    is_allocation = events.action[source] == Action.ALLOC
    stack[has_event] = np.where(is_allocation, events.stack[source], 0)
    # With context="state" only the final blocks have stacks.
    final_stack = blocks.stack[block]
    stack[live] = np.where((stack[live] == 0) | (final_stack != 0), final_stack, stack[live])
    requested = matched.requested.copy()
    requested[live] = blocks.requested[block]
    size = rounded_array(requested, recorded_divisions(snapshot.settings))
    size[live] = blocks.size[block]
    return Allocations(
        address=matched.address,
        requested=requested,
        size=size,
        size_known=live,
        begin=matched.begin,
        free_requested=matched.free_requested,
        end=matched.end,
        stream=stream,
        pool=_pools(trace, segments, matched),
        stack=stack,
        source=matched.source,
        live_block=matched.block,
    )


def _pools(trace: DeviceTrace, segments: SegmentHistory, matched: MatchedLifetimes) -> Ids:
    """Return the pool of each allocation: recorded by its event (torch 2.12), else by its segment."""
    recorded = matched.source >= 0
    event = np.where(recorded, matched.source, len(trace.events))
    pool = segments.pool_at(matched.address, event)
    recorded_pool = trace.events.pool[matched.source[recorded]]
    pool[np.flatnonzero(recorded)[recorded_pool >= 0]] = recorded_pool[recorded_pool >= 0]
    return pool


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes at every moment: arrays of n + 1 items, defined as in ``torch.cuda.memory_stats``."""

    requested: Ints  # requested bytes, in use and pending free
    allocated: Ints  # block sizes, until the free is requested
    active: Ints  # block sizes, in use and pending free
    reserved: Ints  # segments


def curves_of(segments: SegmentHistory, allocations: Allocations) -> Curves:
    """Return the curves of all allocations and segments."""
    n = len(segments.reserved) - 1
    begin, request, end = allocations.begin, allocations.free_requested, allocations.end
    return Curves(
        requested=_sum_of_intervals(n, begin, end, allocations.requested),
        allocated=_sum_of_intervals(n, begin, request, allocations.size),
        active=_sum_of_intervals(n, begin, end, allocations.size),
        reserved=segments.reserved,
    )


def _sum_of_intervals(n: int, begin: Ints, end: Ints, amount: Ints) -> Ints:
    """Return the sum of the amounts whose interval contains each moment.

    An interval includes the moments from after event ``begin`` to before event ``end``.
    """
    change = np.bincount(begin + 1, weights=amount, minlength=n + 2)
    change -= np.bincount(end + 1, weights=amount, minlength=n + 2)
    # Sums of bytes stay below 2**53, where float64 is exact.
    return np.cumsum(change[: n + 1]).astype(np.int64)
