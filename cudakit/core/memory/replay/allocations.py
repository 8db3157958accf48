"""Every allocation with its interval, size and call stack, and what all of them held at every moment."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay.lifetimes import Matched
from cudakit.core.memory.replay.segments import SegmentHistory
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot
from cudakit.torch_rules.actions import Action
from cudakit.torch_rules.settings import recorded_divisions
from cudakit.torch_rules.sizes import rounded_array

_Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Allocations:
    """Every allocation that a trace or a final state knows of; every array has one item each.

    ``begin``, ``free_requested`` and ``end`` are event indices: BEFORE the trace, or n (the number of
    events) for what has not happened when the snapshot is taken.
    """

    address: npt.NDArray[np.uint64]
    requested: _Ints  # bytes, as asked for
    size: _Ints  # bytes of the block; derived where ``size_known`` is False
    size_known: npt.NDArray[np.bool_]
    begin: _Ints
    free_requested: _Ints
    end: _Ints
    stream: npt.NDArray[np.int32]
    pool: npt.NDArray[np.int32]
    stack: npt.NDArray[np.int32]
    source: _Ints  # the event that gave stream and stack; -1: the final block did
    live_block: _Ints  # index into the final Blocks, -1 for what has ended

    def __len__(self) -> int:
        return len(self.address)


def allocations_of(
    snapshot: Snapshot, trace: DeviceTrace, segments: SegmentHistory, matched: Matched
) -> Allocations:
    """Return each matched lifetime with its stream, pool, call stack and size as the request is rounded."""
    events, blocks = trace.events, trace.blocks
    from_event = matched.source >= 0
    live = matched.block >= 0
    source = matched.source[from_event]
    block = matched.block[live]
    stream = np.zeros(len(matched.address), np.int32)
    stack = np.zeros(len(matched.address), np.int32)
    stream[live] = trace.segments.stream[blocks.segment[block]]
    stream[from_event] = events.stream[source]
    # Of an allocation from before the trace only the free is recorded, whose stack is another one.
    is_allocation = events.action[source] == Action.ALLOC
    stack[from_event] = np.where(is_allocation, events.stack[source], 0)
    # Traces recorded with context="state" have stacks on the live blocks only.
    better = blocks.stack[block]
    stack[live] = np.where((stack[live] == 0) | (better != 0), better, stack[live])
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


def _pools(trace: DeviceTrace, segments: SegmentHistory, matched: Matched) -> npt.NDArray[np.int32]:
    """Return the pool of each allocation: as its event says (torch 2.12), else that of its segment."""
    recorded = matched.source >= 0
    event = np.where(recorded, matched.source, len(trace.events))
    pool = segments.pool_at(matched.address, event)
    recorded_pool = trace.events.pool[matched.source[recorded]]
    pool[np.flatnonzero(recorded)[recorded_pool >= 0]] = recorded_pool[recorded_pool >= 0]
    return pool


@dataclass(frozen=True, slots=True)
class Curves:
    """Bytes at every moment: arrays of n + 1 items, named as in torch.cuda.memory_stats()."""

    requested: _Ints  # as asked for, in use and pending free
    allocated: _Ints  # block sizes, until the free is requested
    active: _Ints  # block sizes, in use and pending free
    reserved: _Ints  # segments


def curves_of(segments: SegmentHistory, allocations: Allocations) -> Curves:
    """Sum at every moment what the allocations held, beside what was reserved."""
    n = len(segments.reserved) - 1
    begin, request, end = allocations.begin, allocations.free_requested, allocations.end
    return Curves(
        requested=_running(n, begin, end, allocations.requested),
        allocated=_running(n, begin, request, allocations.size),
        active=_running(n, begin, end, allocations.size),
        reserved=segments.reserved,
    )


def _running(n: int, begin: _Ints, end: _Ints, amount: _Ints) -> _Ints:
    """Sum amounts over their intervals: held from the moment after ``begin`` to that before ``end``."""
    change = np.bincount(begin + 1, weights=amount, minlength=n + 2)
    change -= np.bincount(end + 1, weights=amount, minlength=n + 2)
    # Sums of bytes stay below 2**53, where float64 is exact.
    return np.cumsum(change[: n + 1]).astype(np.int64)
