"""The sizes of large blocks, which files record for the final state only.

A block is larger than its rounded request if the allocator did not split the remainder off. The rules are
those of c10/cuda/CUDACachingAllocator.cpp (``should_split``) in torch 2.11.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from cudakit.memory.record.pools import POOL_NAMES
from cudakit.memory.replay.allocations import Allocations
from cudakit.memory.replay.lifetimes import BEFORE_TRACE
from cudakit.memory.replay.segments import SegmentLifetimes
from cudakit.memory.snapshot import Addresses, Ints, Mask, Snapshot, take
from cudakit.torch_rules.settings import recorded_max_split
from cudakit.torch_rules.sizes import MAX_SMALL_BYTES


def with_unsplit_sizes(
    snapshot: Snapshot, segments: SegmentLifetimes, allocations: Allocations
) -> Allocations:
    """Return allocations whose large blocks include the remainders that were not split off."""
    if snapshot.settings.get("expandable_segments") is True:
        return allocations  # the allocator then splits every remainder (``should_split``)
    other_pools = [pool_id for pool_id, pool in enumerate(snapshot.pools) if pool in POOL_NAMES]
    large_block_indices = np.flatnonzero(
        (allocations.size > MAX_SMALL_BYTES)
        & _in_segments(allocations.address, segments)
        & ~np.isin(allocations.pool, other_pools)
    )
    if allocations.size_known[large_block_indices].all():
        return allocations
    large_blocks = take(allocations, large_block_indices)
    unsplit_sizes = _unsplit_sizes(
        large_blocks, segments, max_split_bytes=recorded_max_split(snapshot.settings)
    )
    sizes = allocations.size.copy()
    sizes[large_block_indices] = np.where(large_blocks.size_known, large_blocks.size, unsplit_sizes)
    return replace(allocations, size=sizes)


def _in_segments(address: Addresses, segments: SegmentLifetimes) -> Mask:
    """Return a mask: whether each address was ever in one of the segments."""
    if not len(segments):
        return np.zeros(len(address), np.bool_)
    # Segments of different times can overlap: an earlier one may end higher.
    highest_end = np.maximum.accumulate(segments.address + segments.size.astype(np.uint64))
    index = np.searchsorted(segments.address, address, side="right") - 1
    return (index >= 0) & (address < highest_end[np.maximum(index, 0)])


def _unsplit_sizes(
    blocks: Allocations, segments: SegmentLifetimes, *, max_split_bytes: int
) -> Ints:
    """Return the sizes of large blocks, including remainders that were not split off.

    The allocator splits a free block of the large pool only if more than 1 MiB remains, and always merges
    adjacent free blocks. So a gap of up to 1 MiB between a new block and the next block in use, or the end of
    the segment, belongs to the new block. Blocks of at least ``max_split_bytes`` are never split. A block
    from before the trace keeps its rounded size if no other block shows its end.
    """
    # Start addresses of blocks in use, and end addresses of segments, ascending.
    boundaries: list[int] = []
    sizes = blocks.size.tolist()
    addresses = blocks.address.tolist()
    segment_ends = (segments.address + segments.size.astype(np.uint64)).tolist()
    n_blocks = len(blocks)
    for item_index, is_begin in _begins_and_ends(blocks, segments):
        boundary = (
            addresses[item_index] if item_index < n_blocks else segment_ends[item_index - n_blocks]
        )
        index = bisect_left(boundaries, boundary)
        if not is_begin:
            if index < len(boundaries) and boundaries[index] == boundary:
                del boundaries[index]
            continue
        if item_index < n_blocks:
            block_end = boundary + sizes[item_index]
            next_index = bisect_left(boundaries, block_end, index)
            if next_index < len(boundaries):
                gap_bytes = boundaries[next_index] - block_end
                if 0 < gap_bytes <= MAX_SMALL_BYTES or sizes[item_index] >= max_split_bytes:
                    sizes[item_index] += gap_bytes
        boundaries.insert(index, boundary)
    return _extend_blocks_before_trace(blocks, np.array(sizes, np.int64))


def _extend_blocks_before_trace(blocks: Allocations, sizes: Ints) -> Ints:
    """Extend each block from before the trace to a block allocated later, up to 1 MiB behind its end."""
    address_order = np.argsort(blocks.address, kind="stable")
    address, begin_event = blocks.address[address_order], blocks.begin[address_order]
    for block_index in np.flatnonzero(blocks.begin == BEFORE_TRACE).tolist():
        end_address = int(blocks.address[block_index]) + int(sizes[block_index])
        window = np.array([end_address, end_address + MAX_SMALL_BYTES + 1], np.uint64)
        first_index, end_index = np.searchsorted(address, window).tolist()
        later_blocks = np.flatnonzero(begin_event[first_index:end_index] < blocks.end[block_index])
        if len(later_blocks):
            sizes[block_index] += int(address[first_index + later_blocks[0]]) - end_address
    return sizes


def _begins_and_ends(blocks: Allocations, segments: SegmentLifetimes) -> Iterator[tuple[int, bool]]:
    """Yield the begins and ends of blocks and segments by time, as pairs (index, is_begin).

    Indices of segments follow those of blocks.
    """
    begin_events = np.concatenate((blocks.begin, segments.begin))
    end_events = np.concatenate((blocks.end, segments.end))
    lifetime_count = len(begin_events)
    # Keys are twice the event index, plus 1 for begins: at one event, ends come before begins. For equal
    # keys, segments come before blocks.
    sort_keys = np.concatenate((2 * begin_events + 1, 2 * end_events))
    is_block = np.arange(lifetime_count) < len(blocks)
    event_order = np.lexsort((np.concatenate((is_block, is_block)), sort_keys))
    return zip(
        (event_order % lifetime_count).tolist(),
        (event_order < lifetime_count).tolist(),
        strict=True,
    )
