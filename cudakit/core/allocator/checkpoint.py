"""Checkpoints of a private pool: its division into blocks, recorded and restored.

A graph that is replayed writes its outputs to the addresses of its capture, whatever was allocated there
since. Source: c10/cuda/CUDACachingAllocator.cpp (Note [Checkpointing PrivatePoolState], getCheckpointState,
setCheckpointPoolState, setSegmentStateToCheckpoint).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from cudakit.core.allocator.blocks import Block, RawStack, Segment
from cudakit.core.allocator.engine import Engine
from cudakit.core.allocator.history import gather
from cudakit.core.allocator.mem_pool import HeldPool
from cudakit.core.allocator.pool_routing import PoolRouting, id_of
from cudakit.core.allocator.pool_stats import PoolId
from cudakit.core.allocator.private_pools import PoolError
from cudakit.core.allocator.state import AllocatorState
from cudakit.gpu.api import Ptr


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
    """The addresses of the allocations that a restore freed, and of those that it created."""

    freed: tuple[int, ...]
    created: tuple[int, ...]


class Checkpoints:
    """The calls of an allocator for checkpoints of private pools."""

    def __init__(self, state: AllocatorState, routing: PoolRouting) -> None:
        self._state = state
        self._routing = routing

    def checkpoint(self, pool: HeldPool | PoolId) -> PoolState:
        """Return how a private pool is divided, to ``restore`` it (torch's _cuda_getCheckpointState).

        Raises PoolError where nobody holds the pool, or a block of it that was freed is still in use.
        """
        with self._routing.with_pools() as pools:
            self._state.pending.settle()
            pool_id = pools.live(id_of(pool)).id
            segments = segments_of(self._state.engine, pool_id)
            return PoolState(pool_id, tuple(map(_division_of, segments)))

    def restore(self, checkpoint: PoolState) -> Restored:
        """Make a private pool what it was, and say which allocations are no more and which are there again.

        What is allocated in the pool is freed, at the addresses that were allocated there are allocations
        again, of the size of their blocks; segments that came later stay, free. The trace has all that, as
        ``internal_metadata`` "restore" says of it. Raises PoolError, and changes nothing, where nobody holds
        the pool, segments of it are gone, or other streams use blocks of it (torch's
        _cuda_setCheckpointPoolState).
        """
        state, engine = self._state, self._state.engine
        stack = gather() if state.history.level else None
        with self._routing.with_pools() as pools, state.history.tagged("restore"):
            state.pending.settle(stack)
            pool_id = pools.live(checkpoint.pool).id
            _check(engine, pool_id, checkpoint)
            freed = self._claim(_live_blocks(engine, pool_id))
            addresses = tuple(int(block.ptr) for block in freed)
            for block in freed:
                state.free_live(block, stack)
            created: list[int] = []
            for blocks in checkpoint.segments:
                found = _divide(engine, blocks, stack)
                for block, was in zip(found, blocks, strict=True):
                    if was.allocated:
                        state.live[block.ptr] = block
                        created.append(was.address)
                    else:
                        state.free_live(block, stack)
            return Restored(addresses, tuple(created))

    def holds_exactly(self, pool: HeldPool | PoolId, live: Collection[int]) -> bool:
        """Say whether these addresses, and no others, are allocated in a private pool.

        Raises PoolError where there is no such pool (torch's _cuda_checkPoolLiveAllocations).
        """
        with self._routing.with_pools() as pools:
            found = _live_blocks(self._state.engine, pools.find(id_of(pool)).id)
            return {int(block.ptr) for block in found} == set(live)

    def _claim(self, blocks: list[Block]) -> list[Block]:
        """Take live blocks, so that nobody else frees them. Raises PoolError if another thread just does."""
        live = self._state.live
        for number, block in enumerate(blocks):
            if live.pop(block.ptr, None) is None:
                live.update((block.ptr, block) for block in blocks[:number])
                raise PoolError(
                    f"the block at {block.ptr:#x} is being freed by another thread",
                    hint="let no other thread use the pool meanwhile",
                )
        return blocks


def segments_of(engine: Engine, pool: PoolId) -> list[Segment]:
    """List the segments of a pool by address."""
    found = [segment for segment in engine.segments.values() if segment.pool.id == pool]
    return sorted(found, key=lambda segment: segment.ptr)


def _live_blocks(engine: Engine, pool: PoolId) -> list[Block]:
    segments = segments_of(engine, pool)
    return [block for segment in segments for block in segment.blocks() if block.allocated]


def _check(engine: Engine, pool: PoolId, checkpoint: PoolState) -> None:
    """Raise PoolError if a pool cannot be restored: segments are gone, or other streams use blocks."""
    segments = segments_of(engine, pool)
    for segment in segments:
        _check_unused(segment, settled=False)
    sizes = {int(segment.ptr): segment.size for segment in segments}
    for blocks in checkpoint.segments:
        if sizes.get(blocks[0].address, 0) < sum(block.size_bytes for block in blocks):
            raise PoolError(
                f"the segment at {blocks[0].address:#x} of private pool {pool} is not there any more",
                hint="hold the pool from the checkpoint until the return to it",
            )


def _divide(engine: Engine, blocks: tuple[BlockState, ...], stack: RawStack | None) -> list[Block]:
    """Divide a free segment as it was; all its blocks are allocated then."""
    left = engine.segments[Ptr(blocks[0].address)].first
    found: list[Block] = []
    for was in blocks:
        left = found[-1].next or left if found else left
        left.free_blocks.remove(left)
        # The rules may have been others at the checkpoint: split wherever it says so.
        split, size = left.size > was.size_bytes, was.size_bytes
        engine.alloc_found_block(left, size, size, stack, split=split)
        found.append(left)
    return found


def _division_of(segment: Segment) -> tuple[BlockState, ...]:
    """Return the blocks of a segment. Raises PoolError if a freed block is still in use."""
    _check_unused(segment, settled=True)
    return tuple(
        BlockState(int(block.ptr), block.size, block.allocated) for block in segment.blocks()
    )


def _check_unused(segment: Segment, *, settled: bool) -> None:
    """Raise PoolError if other streams use a freed block, or (not ``settled``) a live one."""
    for block in segment.blocks():
        freed = not block.free and not block.allocated
        if freed or (block.stream_uses and not settled):
            raise PoolError(
                f"other streams use the block at {block.ptr:#x} of private pool {segment.pool.id}",
                hint="wait for them, and allocate something or empty the cache",
            )
