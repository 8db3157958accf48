"""Checkpoints: how a private pool is divided into blocks, and the restoration of this division.

A replayed graph writes its outputs to the addresses of its capture, even if other blocks were allocated there
after the capture. So a checkpoint records how a pool is divided into blocks, and can restore this division.
The caller holds the allocator's guard. Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (Note
[Checkpointing PrivatePoolState], getCheckpointState, setCheckpointPoolState, setSegmentStateToCheckpoint).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cudakit.allocator.blocks import Block, RawStack, Segment
from cudakit.allocator.engine import Engine
from cudakit.allocator.pools import PoolError
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.oom import PoolId


@dataclass(frozen=True, slots=True)
class BlockState:
    """The state of a block at a checkpoint."""

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

    freed: tuple[int, ...]  # Addresses of the freed allocations.
    created: tuple[int, ...]  # Addresses of the created allocations.


def checkpoint_of(engine: Engine, pool: PoolId) -> PoolState:
    """Return how a pool is divided into blocks. Raises PoolError if other streams still use a freed block."""
    segments = engine.segments.of_pool(pool)
    for segment in segments:
        _check_unused(segment, allow_stream_uses=True)
    return PoolState(
        pool,
        tuple(
            tuple(
                BlockState(int(block.ptr), block.size, block.is_allocated)
                for block in segment.blocks()
            )
            for segment in segments
        ),
    )


def restore(
    engine: Engine,
    live_blocks: dict[int, Block],
    free_live_block: Callable[[Block, RawStack | None], None],
    state: PoolState,
    stack: RawStack | None,
) -> Restored:
    """Divide a pool as at a checkpoint, all of whose allocations are freed first.

    Raises PoolError, and changes nothing, if segments were released, other streams use the pool's blocks, or
    another thread is freeing one of them.
    """
    segments = engine.segments.of_pool(state.pool)
    for segment in segments:
        _check_unused(segment, allow_stream_uses=False)
    sizes = {int(segment.ptr): segment.size for segment in segments}
    for block_states in state.segments:
        address = block_states[0].address
        if sizes.get(address, 0) < sum(block_state.size_bytes for block_state in block_states):
            raise PoolError(
                f"the segment at {address:#x} of private pool {state.pool} was released",
                hint="hold the pool from the checkpoint until the restore",
            )
    old_blocks = engine.segments.allocated_blocks(state.pool)
    for index, block in enumerate(old_blocks):
        if live_blocks.pop(block.ptr, None) is None:
            live_blocks.update((block.ptr, block) for block in old_blocks[:index])
            raise PoolError(
                f"the block at {block.ptr:#x} is being freed by another thread",
                hint="do not use the pool in other threads during the restore",
            )
    freed_addresses = tuple(int(block.ptr) for block in old_blocks)
    for block in old_blocks:
        free_live_block(block, stack)
    created_addresses: list[int] = []
    for block_states in state.segments:
        # Divide the free segment into the blocks of the checkpoint, all allocated. Split as at the
        # checkpoint, even if the settings were changed afterwards.
        rest_block = engine.segments[Ptr(block_states[0].address)].first_block
        new_blocks: list[Block] = []
        for block_state in block_states:
            size = block_state.size_bytes
            rest_block.free_blocks.remove(rest_block)
            engine.alloc_found_block(rest_block, size, size, stack, splits=rest_block.size > size)
            new_blocks.append(rest_block)
            rest_block = rest_block.next or rest_block
        for block, block_state in zip(new_blocks, block_states, strict=True):
            if block_state.allocated:
                live_blocks[block.ptr] = block
                created_addresses.append(block_state.address)
            else:
                free_live_block(block, stack)
    return Restored(freed_addresses, tuple(created_addresses))


def _check_unused(segment: Segment, *, allow_stream_uses: bool) -> None:
    """Raise PoolError if other streams still use a freed block.

    Unless ``allow_stream_uses``, raise PoolError for an allocated block that other streams use, too.
    """
    for block in segment.blocks():
        is_pending = not block.is_free and not block.is_allocated
        if is_pending or (block.stream_uses and not allow_stream_uses):
            raise PoolError(
                f"other streams use the block at {block.ptr:#x} of private pool {segment.pool.id}",
                hint="synchronize them, then call empty_cache()",
            )
