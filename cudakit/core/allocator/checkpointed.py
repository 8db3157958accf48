"""Checkpoints of an allocator's private pools."""

from __future__ import annotations

from collections.abc import Collection

from cudakit.core.allocator import checkpoint
from cudakit.core.allocator.block import Block
from cudakit.core.allocator.checkpoint import PoolState, Restored
from cudakit.core.allocator.mempool import HeldPool
from cudakit.core.allocator.pooled import Pooled, id_of
from cudakit.core.allocator.pools import PoolId
from cudakit.core.allocator.private import PoolError
from cudakit.core.allocator.tracing import gather


class Checkpointed(Pooled):
    """The allocator of one device, whose private pools can be as they were."""

    def checkpoint(self, pool: HeldPool | PoolId) -> PoolState:
        """Return how a private pool is divided, to ``restore`` it (torch's _cuda_getCheckpointState).

        Raises PoolError where nobody holds the pool, or a block of it that was freed is still in use.
        """
        with self._with_pools() as pools:
            self._uses.settle()
            return checkpoint.take(self._cache, pools.live(id_of(pool)).id)

    def restore(self, state: PoolState) -> Restored:
        """Make a private pool what it was, and say which allocations are no more and which are there again.

        What is allocated in the pool is freed, at the addresses that were allocated there are allocations
        again, of the size of their blocks; segments that came later stay, free. The trace has all that, as
        ``internal_metadata`` "restore" says of it. Raises PoolError, and changes nothing, where nobody holds
        the pool, segments of it are gone, or other streams use blocks of it (torch's
        _cuda_setCheckpointPoolState).
        """
        stack = gather() if self._level else None
        with self._with_pools() as pools, self._recorder.tagged("restore"):
            self._uses.settle(stack)
            checkpoint.check(self._cache, PoolState(pools.live(state.pool).id, state.segments))
            freed = self._claim(checkpoint.live_blocks(self._cache, state.pool))
            addresses = tuple(int(block.ptr) for block in freed)
            for block in freed:
                self._give_up(block, stack, None)
            created: list[int] = []
            for blocks in state.segments:
                found = checkpoint.divide(self._cache, blocks, stack)
                for block, was in zip(found, blocks, strict=True):
                    if was.allocated:
                        self._live[block.ptr] = block
                        created.append(was.address)
                    else:
                        self._give_up(block, stack, None)
            return Restored(addresses, tuple(created))

    def holds_exactly(self, pool: HeldPool | PoolId, live: Collection[int]) -> bool:
        """Say whether these addresses, and no others, are allocated in a private pool.

        Raises PoolError where there is no such pool (torch's _cuda_checkPoolLiveAllocations).
        """
        with self._with_pools() as pools:
            found = checkpoint.live_blocks(self._cache, pools.find(id_of(pool)).id)
            return {int(block.ptr) for block in found} == set(live)

    def _claim(self, blocks: list[Block]) -> list[Block]:
        """Take live blocks, so that nobody else frees them. Raises PoolError where somebody just does."""
        for number, block in enumerate(blocks):
            if self._live.pop(block.ptr, None) is None:
                self._live.update((block.ptr, block) for block in blocks[:number])
                raise PoolError(
                    f"the block at {block.ptr:#x} is being freed by another thread",
                    hint="let no other thread use the pool meanwhile",
                )
        return blocks
