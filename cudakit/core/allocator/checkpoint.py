"""Checkpoints of a private pool: how it was divided, and dividing it so again.

A graph that runs again makes its outputs anew where they were when it was captured, whatever the pool has
become since. Source: c10/cuda/CUDACachingAllocator.cpp (Note [Checkpointing PrivatePoolState],
getCheckpointState, setCheckpointPoolState, setSegmentStateToCheckpoint).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from cudakit.core.allocator.block import Block, Segment, Trail
from cudakit.core.allocator.cache import Cache
from cudakit.core.allocator.pools import Pool, PoolId
from cudakit.core.allocator.private import PoolError
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.sizes import UNLIMITED


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block of a checkpoint."""

    address: int
    size_bytes: int
    allocated: bool


@dataclass(frozen=True, slots=True)
class PoolState:
    """A checkpoint: the blocks of every segment of a pool, by address."""

    pool: PoolId
    segments: tuple[tuple[BlockState, ...], ...]


@dataclass(frozen=True, slots=True)
class Restored:
    """Which allocations a return to a checkpoint ended, and which it began; by address."""

    freed: tuple[int, ...]
    created: tuple[int, ...]


def take(cache: Cache, pool: PoolId) -> PoolState:
    """Return how a pool is divided. Raises PoolError where a freed block is still in use."""
    return PoolState(pool, tuple(_state(segment) for segment in segments_of(cache, pool)))


def segments_of(cache: Cache, pool: PoolId) -> list[Segment]:
    """List the segments of a pool by address."""
    found = [segment for segment in cache.segments.values() if segment.pool.id == pool]
    return sorted(found, key=lambda segment: segment.ptr)


def live_blocks(cache: Cache, pool: PoolId) -> list[Block]:
    """List what is allocated in a pool by address."""
    segments = segments_of(cache, pool)
    return [block for segment in segments for block in segment.blocks() if block.allocated]


def check(cache: Cache, state: PoolState) -> None:
    """Raise PoolError where a pool cannot be as it was: segments are gone, or other streams use blocks."""
    segments = segments_of(cache, state.pool)
    for segment in segments:
        _check_unused(segment, settled=False)
    sizes = {int(segment.ptr): segment.size for segment in segments}
    for blocks in state.segments:
        if sizes.get(blocks[0].address, 0) < sum(block.size_bytes for block in blocks):
            raise PoolError(
                f"the segment at {blocks[0].address:#x} of private pool {state.pool} is not there any more",
                hint="hold the pool from the checkpoint until the return to it",
            )


def divide(cache: Cache, blocks: tuple[BlockState, ...], stack: Trail | None) -> list[Block]:
    """Divide a segment, all of which is free, as it was; all of it is allocated then."""
    left = cache.segments[Ptr(blocks[0].address)].first
    found: list[Block] = []
    for state in blocks:
        left = found[-1].next or left if found else left
        left.row.discard(left)
        with _split_exactly(cache, left.pool):
            cache.hand_out(left, state.size_bytes, state.size_bytes, stack)
        found.append(left)
    return found


@contextmanager
def _split_exactly(cache: Cache, pool: Pool) -> Iterator[None]:
    """Let blocks be split where a checkpoint says so: the rules may have been others when it was made."""
    rules = pool.splits, pool.slack_bytes, cache.unsplit_bytes
    pool.splits, pool.slack_bytes, cache.unsplit_bytes = True, 0, UNLIMITED
    try:
        yield
    finally:
        pool.splits, pool.slack_bytes, cache.unsplit_bytes = rules


def _state(segment: Segment) -> tuple[BlockState, ...]:
    _check_unused(segment, settled=True)
    return tuple(
        BlockState(int(block.ptr), block.size, block.allocated) for block in segment.blocks()
    )


def _check_unused(segment: Segment, *, settled: bool) -> None:
    """Raise PoolError where other streams use a block, freed or (not ``settled``) to be freed."""
    for block in segment.blocks():
        freed = not block.free and not block.allocated
        if freed or (block.other_streams and not settled):
            raise PoolError(
                f"other streams use the block at {block.ptr:#x} of private pool {segment.pool.id}",
                hint="wait for them, and allocate something or empty the cache",
            )
