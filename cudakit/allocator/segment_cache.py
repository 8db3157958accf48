"""Allocation of segments from the device, and release of cached segments to the device.

The methods alloc_block, release_block, release_cached_blocks, release_available_cached_blocks and
garbage_collect_cached_blocks follow those of the same name in PyTorch's c10/cuda/CUDACachingAllocator.cpp.
The caller holds the allocator's guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

from cudakit.allocator.blocks import Block, BlockPool, RawStack, Request
from cudakit.allocator.engine import Engine
from cudakit.allocator.history import SEGMENT_ALLOC, SEGMENT_FREE
from cudakit.allocator.private_pools import PrivatePool
from cudakit.allocator.segments import Segment, is_whole_segment
from cudakit.allocator.upstream import OUT_OF_MEMORY
from cudakit.errors import CudaError
from cudakit.torch_rules.sizes import UNLIMITED


class SegmentCache:
    """Allocates the segments of an allocator's engine, and releases them. Its ``malloc`` calls the driver."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.malloc: Callable[[int, int], int] = engine.upstream.malloc

    def alloc_block(self, request: Request) -> Block | None:
        """Allocate a segment on the device, and return its block; None if memory or the limit is exhausted.

        The block is in no list of free blocks. Raises CudaError for every other failure of the driver.
        """
        engine, segment_bytes, pool = self._engine, request.segment_bytes, request.pool
        if engine.reserved_bytes + segment_bytes > engine.limit_bytes:
            return None
        if engine.expandable_segments is not None and engine.uses_expandable_segments(pool):
            return engine.expandable_segments.alloc_block(engine, request)
        source = engine.private_pools.segment_source(pool.id)
        malloc = self.malloc if source is None else source.malloc
        engine.reserved_bytes += segment_bytes
        try:
            ptr = malloc(segment_bytes, request.stream)
        except BaseException as error:
            engine.reserved_bytes -= segment_bytes
            if isinstance(error, CudaError) and error.code == OUT_OF_MEMORY:
                return None
            raise
        block = pool.free_blocks(request.stream).new_block(ptr, segment_bytes)
        engine.segments[ptr] = Segment(block, request.stack)
        engine.stats.num_device_alloc += 1
        pool.stats.count_segments(1)
        engine.count_reserved(pool, segment_bytes)
        if segment_bytes >= engine.max_split_bytes:
            engine.stats.oversize_segments.increase()
        if engine.history is not None:
            engine.history.record(
                SEGMENT_ALLOC, ptr, segment_bytes, request.stream, request.stack, pool.id
            )
        return block

    def release_block(self, block: Block, stack: RawStack | None) -> None:
        """Release a free block that is a whole segment to the device. On CudaError the block stays cached."""
        engine, pool, segment_bytes = self._engine, block.pool, block.size
        (engine.private_pools.segment_source(pool.id) or engine.upstream).free(block.ptr)
        block.free_blocks.remove(block)
        segment = engine.segments.pop(block.ptr)
        engine.reserved_bytes -= segment_bytes
        engine.stats.num_device_free += 1
        pool.stats.count_segments(-1)
        engine.count_reserved(pool, -segment_bytes)
        if segment_bytes >= engine.max_split_bytes:
            engine.stats.oversize_segments.decrease()
        if engine.history is not None:
            event_stack = stack or segment.stack
            engine.history.record(
                SEGMENT_FREE, block.ptr, segment_bytes, block.stream, event_stack, pool.id
            )

    def release_cached_blocks(self, stack: RawStack | None) -> None:
        """Release all cached segments, except those of private pools that are held.

        If the driver raises CudaError, the remaining segments stay cached.
        """
        for pool in self._engine.default_pools:
            self._release_blocks(pool, stack)
        for private_pool in self._engine.private_pools:
            self.release_private_pool(private_pool, stack)

    def release_private_pool(self, pool: PrivatePool, stack: RawStack | None) -> None:
        """Release the cached segments of a private pool without holders; drop a pool without segments."""
        if pool.holder_count:
            return
        for block_pool in pool:
            self._release_blocks(block_pool, stack)
        if all(segment.pool.id != pool.id for segment in self._engine.segments.values()):
            self._engine.private_pools.drop_pool(pool)

    def release_available_cached_blocks(self, request: Request) -> bool:
        """Release oversize segments until a request fits; return whether the released bytes suffice.

        Releases the smallest segment that suffices alone, else several segments, the largest first. Does
        nothing if max_split_size is not set.
        """
        max_split_bytes = self._engine.max_split_bytes
        if max_split_bytes == UNLIMITED:
            return False
        needed_bytes = max(request.size, max_split_bytes)
        blocks = list(request.pool.by_stream.get(request.stream) or ())
        candidates = [
            block
            for block in blocks
            if is_whole_segment(block) or block.expandable_segment is not None
        ]
        large_enough_block = next(
            (block for block in candidates if block.size >= needed_bytes), None
        )
        if large_enough_block is not None and large_enough_block.expandable_segment is None:
            self.release_block(large_enough_block, request.stack)
            return True
        released_bytes = 0
        smaller_blocks = [
            block for block in blocks if block.size < needed_bytes and is_whole_segment(block)
        ]
        for block in takewhile(
            lambda block: block.size >= max_split_bytes, reversed(smaller_blocks)
        ):
            if released_bytes >= needed_bytes:
                break
            released_bytes += block.size
            self.release_block(block, request.stack)
        return released_bytes >= needed_bytes

    def garbage_collect_cached_blocks(self, stack: RawStack | None) -> None:
        """Release old segments of the large pool, until the reserved bytes are below the threshold.

        Each pass releases the segments whose age is at least the mean age of the remaining segments.
        """
        engine = self._engine
        threshold_bytes = int(engine.settings.garbage_collection_threshold * engine.limit_bytes)
        pool = engine.default_pools.large
        candidates = [block for block in pool if is_whole_segment(block)]
        excess_bytes = engine.reserved_bytes - threshold_bytes
        while candidates and excess_bytes > 0:
            mean_age = sum(map(pool.age, candidates)) / len(candidates)
            # The selection of a pass is complete before its first release, as in PyTorch.
            old_blocks = [block for block in candidates if pool.age(block) >= mean_age]
            candidates = [block for block in candidates if pool.age(block) < mean_age]
            excess_bytes -= sum(block.size for block in old_blocks)
            self._release_all(old_blocks, stack)

    def _release_blocks(self, pool: BlockPool, stack: RawStack | None) -> None:
        """Release every unused segment of a pool, and every unused page of its expandable segments."""
        self._release_all([block for block in pool if is_whole_segment(block)], stack)
        if self._engine.expandable_segments is not None:
            self._engine.expandable_segments.release_blocks(self._engine, pool, stack)

    def _release_all(self, blocks: Iterable[Block], stack: RawStack | None) -> None:
        for block in blocks:
            self.release_block(block, stack)
