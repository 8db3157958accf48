"""Every allocation with its interval, its size, and what is known of who made it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from cudakit.core.memory.replay import block_sizes
from cudakit.core.memory.replay.matching import Matched
from cudakit.core.memory.replay.reserved import (
    Reserved,
    final_begins,
    whole_segments,
)
from cudakit.core.memory.snapshot import DeviceTrace, Snapshot
from cudakit.torch_rules.actions import Action

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


def allocations_of(snapshot: Snapshot, trace: DeviceTrace, matched: Matched) -> Allocations:
    """Say of each matched lifetime how large it was, on which stream, in which pool and by whom."""
    events, blocks = trace.events, trace.blocks
    from_event = matched.source >= 0
    live = matched.block >= 0
    source = matched.source[from_event]
    block = matched.block[live]
    stream = np.zeros(len(matched.address), np.int32)
    stack = np.zeros(len(matched.address), np.int32)
    stream[live] = trace.segments.stream[blocks.segment[block]]
    stream[from_event] = events.stream[source]
    # Of what was allocated before the trace, only the free is recorded: its stack is somebody else's.
    is_allocation = events.action[source] == Action.ALLOC
    stack[from_event] = np.where(is_allocation, events.stack[source], 0)
    # Traces recorded with context="state" have stacks on the live blocks only.
    better = blocks.stack[block]
    stack[live] = np.where((stack[live] == 0) | (better != 0), better, stack[live])
    requested = matched.requested.copy()
    requested[live] = blocks.requested[block]
    size = block_sizes.rounded(requested, snapshot.settings)
    size[live] = blocks.size[block]
    allocations = Allocations(
        address=matched.address,
        requested=requested,
        size=size,
        size_known=live,
        begin=matched.begin,
        free_requested=matched.free_requested,
        end=matched.end,
        stream=stream,
        pool=_pools(trace, matched),
        stack=stack,
        source=matched.source,
        live_block=matched.block,
    )
    return _with_unsplit_sizes(snapshot, trace, allocations)


def _with_unsplit_sizes(
    snapshot: Snapshot, trace: DeviceTrace, allocations: Allocations
) -> Allocations:
    """Replace derived sizes of large blocks by those that the allocator's splitting leaves."""
    if snapshot.settings.get("expandable_segments") is True:
        return allocations  # then the allocator splits wherever it can (``should_split``)
    segments = whole_segments(trace)
    large = np.flatnonzero(
        (allocations.size > block_sizes.SMALL_REQUEST) & _inside(allocations.address, segments)
    )
    if allocations.size_known[large].all():
        return allocations
    grown = block_sizes.unsplit(
        block_sizes.Tenancy(
            allocations.address[large],
            allocations.size[large],
            allocations.begin[large],
            allocations.end[large],
        ),
        block_sizes.Tenancy(segments.address, segments.size, segments.begin, segments.end),
        max_split=block_sizes.max_split(snapshot.settings),
    )
    size = allocations.size.copy()
    size[large] = np.where(allocations.size_known[large], size[large], grown)
    return replace(allocations, size=size)


def _inside(address: npt.NDArray[np.uint64], segments: Reserved) -> npt.NDArray[np.bool_]:
    """Say which addresses ever lay in a segment that was allocated in one piece."""
    if not len(segments):
        return np.zeros(len(address), np.bool_)
    # The furthest end of all segments that start at or below: segments of different times overlap.
    reach = np.maximum.accumulate(segments.address + segments.size.astype(np.uint64))
    place = np.searchsorted(segments.address, address, side="right") - 1
    return (place >= 0) & (address < reach[np.maximum(place, 0)])


def _pools(trace: DeviceTrace, matched: Matched) -> npt.NDArray[np.int32]:
    """Find the pool of each allocation: as its event says (torch 2.12), else that of its segment."""
    recorded = matched.source >= 0
    event = np.where(recorded, matched.source, len(trace.events))
    pool = pool_at(trace, matched.address, event)
    said = trace.events.pool[matched.source[recorded]]
    pool[np.flatnonzero(recorded)[said >= 0]] = said[said >= 0]
    return pool


def pool_at(
    trace: DeviceTrace, address: npt.NDArray[np.uint64], event: _Ints
) -> npt.NDArray[np.int32]:
    """Find the pool of the segment that holds each address at an event.

    Of segments that are gone at the end nothing tells the pool: they count as the default pool's.
    """
    segments = trace.segments
    if not len(segments):
        return np.zeros(len(address), np.int32)
    place = np.maximum(np.searchsorted(segments.address, address, side="right") - 1, 0)
    inside = (
        (address >= segments.address[place])
        & (address - segments.address[place] < segments.size[place].astype(np.uint64))
        & (event >= final_begins(trace)[place])
    )
    return np.where(inside, segments.pool[place], 0).astype(np.int32)
