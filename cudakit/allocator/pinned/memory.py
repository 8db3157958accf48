"""The blocks of pinned memory: the engine of device memory, with PyTorch's rules for pinned memory.

Source: PyTorch's aten/src/ATen/core/CachingHostAllocator.h.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

from cudakit.allocator.blocks import Block, RawStack, Request
from cudakit.allocator.engine import Engine
from cudakit.allocator.history import SEGMENT_ALLOC
from cudakit.allocator.pinned.pools import (
    NO_STREAM,
    BestFitSizes,
    Holders,
    HostPool,
    HostPools,
    Pow2Sizes,
    Reserve,
)
from cudakit.allocator.pinned.upstream import HostStats, HostUpstream, TimedSource
from cudakit.allocator.segment_cache import SegmentCache
from cudakit.allocator.segments import is_whole_segment
from cudakit.allocator.streams import Captures, PendingFrees
from cudakit.allocator.upstream import OUT_OF_MEMORY
from cudakit.errors import CudaError
from cudakit.gpu.api import Event
from cudakit.torch_rules.oom_facts import PoolId
from cudakit.torch_rules.settings import Settings
from cudakit.units import format_bytes


class OutOfPinnedMemory(CudaError, MemoryError):
    """The driver has no pinned memory for a request, even after all cached memory was released."""


class HostMemory:
    """The pools, the engine and the reserve of pinned memory. The caller holds the allocator's guard.

    With ``splits``, the best fit is used, with splits and merges, instead of PyTorch's bins of powers of two.
    """

    def __init__(self, upstream: HostUpstream, holders: Holders, *, splits: bool) -> None:
        self._upstream = upstream
        self._splits = splits
        self.settings = Settings()
        self.stats = HostStats()
        self._timed_source = TimedSource(upstream, self.stats)
        self.engine = Engine(self._timed_source, Settings())
        self._cache = SegmentCache(self.engine)
        self._block_sizes = BestFitSizes() if splits else Pow2Sizes()
        self.captures = Captures()
        self._unused_events: list[Event] = []
        self.pools = HostPools(self._make_pool, holders)
        self.default_pool = self.pools.default_pool
        self._reserve: Reserve | None = None
        self.live_blocks: dict[int, Block] = {}
        self._captured_blocks: set[Block] = (
            set()
        )  # Blocks allocated in a capture, whose graph may run at any time.

    def configure(self, settings: Settings) -> None:
        """Replace the settings. Raises Unsupported for a setting that the upstream does not support."""
        self._timed_source.configure(settings)
        self._block_sizes.configure(settings)
        self.settings = settings

    def _make_pool(self, pool_id: PoolId) -> HostPool:
        pending_frees = PendingFrees(
            self._upstream,
            self._complete_free,
            self.captures,
            in_order=True,
            unused_events=self._unused_events,
        )
        return HostPool(pool_id, pending_frees, splits=self._splits)

    # Methods that allocate and free blocks.

    def alloc(
        self, size_bytes: int, stream: int | None, stack: RawStack | None, *, retries: bool
    ) -> Block:
        """Allocate a block. Raises OutOfPinnedMemory, CudaError."""
        pool = self.pools.pool_of_request(stream)
        if pool.is_private or not self.settings.pinned_use_background_threads:
            pool.pending_frees.process_events()
        block_bytes = self._block_sizes.round_size(size_bytes)
        block = self._get_free_block(pool, block_bytes)
        if block is None:
            block = self._obtain_block(pool, block_bytes, stack, retries=retries)
        should_split = self.engine.should_split(block, block_bytes, uses_expandable=False)
        self.engine.alloc_found_block(block, block_bytes, size_bytes, stack, splits=should_split)
        self.stats.count_alloc(block.size)
        # A request without a stream may belong to a capture, even if another thread began this capture.
        if self.captures.capture_count and (stream is None or pool.is_private):
            self._captured_blocks.add(block)
        self.live_blocks[block.ptr] = block
        return block

    def free(self, block: Block, stack: RawStack | None) -> None:
        """Free an allocated block, at once or when the streams that use it are done. Raises CudaError."""
        pool = self.pools.pool_of_block(block)
        if not block.stream_uses:
            self.stats.count_free(block.size)
            self._captured_blocks.discard(block)
            self._release_if_too_large(self.engine.free(block, stack))
            return
        self.engine.free(block, stack)
        if block in self._captured_blocks and self.pools.is_held(pool):
            pool.kept_for_graphs.append(block)
        else:
            pool.pending_frees.add_block(block)

    def forget_graphs(self) -> None:
        """Free the blocks that are kept for graphs."""
        for pool in self.pools:
            while pool.kept_for_graphs:
                block = pool.kept_for_graphs.pop()
                block.stream_uses = None
                self._complete_free(block, None)

    def awaited_streams(self) -> Iterator[tuple[int, Block]]:
        """Iterate over the streams that freed blocks wait for, each with its block."""
        for pool in self.pools:
            yield from pool.pending_frees.awaited_streams()

    def counters(self) -> dict[str, int]:
        """Return counters that PyTorch does not have."""
        stats = self.stats
        waiting_sizes = {block.ptr: block.size for _, block in self.awaited_streams()}
        return {
            "num_free_failures": stats.num_free_failures,
            "num_invalid_frees": stats.num_invalid_frees,
            "num_rescues": stats.num_rescues,
            "captured_bytes": sum(
                block.size for pool in self.pools for block in pool.kept_for_graphs
            ),
            "free_bytes": sum(block.size for pool in self.pools for block in pool.free_blocks()),
            "waiting_bytes": sum(waiting_sizes.values()),
        }

    # Methods for cached memory.

    def release_cached(self, stack: RawStack | None, *, waits_for_streams: bool = False) -> int:
        """Release all cached blocks except blocks of held private pools; return the released bytes.

        With ``waits_for_streams``, wait for the pending frees of private pools without holders. Raises
        CudaError for the first block that the driver refuses to free.
        """
        released_bytes = self._release_cached_blocks(self.default_pool, stack)
        for pool in self.pools.pools_without_holders():
            released_bytes += self._release_private_pool(
                pool, stack, waits_for_streams=waits_for_streams
            )
        return released_bytes

    def close(self) -> None:
        """Wait for pending frees, and release all blocks that are neither allocated nor kept for graphs."""
        self.default_pool.pending_frees.synchronize()
        self.release_cached(None, waits_for_streams=True)
        self._release_reserve()
        self.default_pool.pending_frees.close()

    def _get_free_block(self, pool: HostPool, block_bytes: int) -> Block | None:
        """Remove and return a free block of a pool, or else of the reserve; None if there is none."""
        for block_pool in dict.fromkeys((pool.pool_for_size(block_bytes), pool.reserve)):
            block = self.engine.get_free_block(
                block_pool, block_bytes, NO_STREAM, uses_expandable=False
            )
            if block is not None:
                return block
        return None

    def _obtain_block(
        self, pool: HostPool, block_bytes: int, stack: RawStack | None, *, retries: bool
    ) -> Block:
        """Return a block for a request that no free block serves."""
        if (
            self.settings.pinned_use_background_threads
            and not self.captures.capture_count
            and pool.pending_frees
        ):
            pool.pending_frees.process_events()  # The background thread may not have processed all frees yet.
            if (block := self._get_free_block(pool, block_bytes)) is not None:
                return block
        reserve_bytes = self.settings.pinned_reserve_segment_size_bytes
        if reserve_bytes and self._reserve is None:
            self._take_reserve(reserve_bytes)
            if (block := self._get_free_block(pool, block_bytes)) is not None:
                return block
        block = self._alloc_block(pool, block_bytes, stack)
        if block is None and retries and not self.captures.capture_count:
            block = self._retry_after_release(pool, block_bytes, stack)
        if block is None:
            raise self._out_of_memory_error(self._block_sizes.segment_bytes(block_bytes))
        return block

    def _alloc_block(
        self, pool: HostPool, block_bytes: int, stack: RawStack | None
    ) -> Block | None:
        """Take a block from the reserve or from the driver; None if no memory is left. Raises CudaError."""
        block_pool = pool.pool_for_size(block_bytes)
        ptr = self._reserve.carve(block_bytes) if self._reserve and not self._splits else None
        block: Block | None
        if ptr is not None:
            block = block_pool.free_blocks(NO_STREAM).new_block(ptr, block_bytes)
            if self.engine.history is not None:
                self.engine.history.record(
                    SEGMENT_ALLOC, ptr, block_bytes, NO_STREAM, stack, pool.id
                )
        else:
            segment_bytes = self._block_sizes.segment_bytes(block_bytes)
            request = Request(block_bytes, block_bytes, segment_bytes, NO_STREAM, block_pool, stack)
            block = self._cache.alloc_block(request)
        if block is not None:
            self.stats.count_obtained(block.size)
        return block

    def _retry_after_release(
        self, pool: HostPool, block_bytes: int, stack: RawStack | None
    ) -> Block | None:
        """Retry a failed allocation after pending frees, then after a release of cached memory."""
        for source_pool in dict.fromkeys((pool, self.default_pool)):
            source_pool.pending_frees.synchronize()
        block = self._get_free_block(pool, block_bytes)
        if block is None and self.release_cached(stack, waits_for_streams=True):
            block = self._alloc_block(pool, block_bytes, stack)
        self.stats.num_rescues += block is not None
        return block

    def _complete_free(self, block: Block, stack: RawStack | None) -> None:
        """Free a block that no stream uses any more."""
        self.stats.count_free(block.size)
        self._captured_blocks.discard(block)
        self._release_if_too_large(self.engine.complete_free(block, stack))

    def _release_if_too_large(self, block: Block | None) -> None:
        """Release a free block that is larger than the settings allow to cache."""
        if block is None or not self._is_releasable(block):
            return
        limit_bytes = self.settings.pinned_max_cached_size_bytes
        is_too_large = limit_bytes is not None and block.size > limit_bytes
        if is_too_large and not self.pools.pool_of_block(block).is_private:
            with suppress(CudaError):  # The block stays cached, and empty_cache tries again.
                self._release_block(block, None)

    def _is_releasable(self, block: Block) -> bool:
        return is_whole_segment(block) and not self._is_reserved(block)

    def _is_reserved(self, block: Block) -> bool:
        return self._reserve is not None and self._reserve.contains(block)

    def _release_block(self, block: Block, stack: RawStack | None) -> None:
        self._cache.release_block(block, stack)
        self.stats.count_released(block.size)

    def _release_cached_blocks(self, pool: HostPool, stack: RawStack | None) -> int:
        """Release all cached blocks of a pool; return their bytes. Raises CudaError at the first failure."""
        released_bytes = 0
        for block in [block for block in pool.free_blocks() if self._is_releasable(block)]:
            self._release_block(block, stack)
            released_bytes += block.size
        return released_bytes

    def _release_private_pool(
        self, pool: HostPool, stack: RawStack | None, *, waits_for_streams: bool = False
    ) -> int:
        """Release the cached blocks of a private pool without holders; drop the pool with its last block.

        Returns the number of bytes. Raises CudaError if the driver refuses.
        """
        while pool.kept_for_graphs:  # No graph uses these blocks any more, but streams may.
            with suppress(CudaError):
                pool.pending_frees.add_block(pool.kept_for_graphs.pop())
        if waits_for_streams:
            pool.pending_frees.synchronize()
        else:
            pool.pending_frees.process_events()
        released_bytes = self._release_cached_blocks(pool, stack)
        for block in [block for block in pool.free_blocks() if self._is_reserved(block)]:
            block.free_blocks.remove(block)
            block.free_blocks = self.default_pool.reserve.free_blocks(NO_STREAM)
            block.free_blocks.add(block)
        if not pool.is_in_use:
            self.pools.drop_pool(pool)
        return released_bytes

    def _take_reserve(self, size_bytes: int) -> None:
        """Take the reserve from the driver. Raises OutOfPinnedMemory, CudaError."""
        try:
            ptr = self._timed_source.malloc(size_bytes)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise self._out_of_memory_error(size_bytes, is_reserve=True) from None
        self._reserve = Reserve(ptr, size_bytes)
        if self._splits:  # Otherwise each block is counted when it is carved from the reserve.
            free_blocks = self.default_pool.reserve.free_blocks(NO_STREAM)
            free_blocks.add(free_blocks.new_block(ptr, size_bytes))
            self.stats.count_obtained(size_bytes)

    def _release_reserve(self) -> None:
        """Return the reserve to the driver, unless a block of it is in use. Raises CudaError."""
        used_blocks = [*self.live_blocks.values(), *self.default_pool.kept_for_graphs]
        used_blocks += [block for pool in self.pools if pool.is_private for block in pool]
        if self._reserve is None or any(map(self._is_reserved, used_blocks)):
            return
        self._timed_source.free(self._reserve.ptr)
        for block in [
            candidate
            for candidate in self.default_pool.free_blocks()
            if self._is_reserved(candidate)
        ]:
            block.free_blocks.remove(block)
            self.stats.count_released(block.size)
        self._reserve = None

    def _out_of_memory_error(
        self, size_bytes: int, *, is_reserve: bool = False
    ) -> OutOfPinnedMemory:
        counters, pool_bytes = self.counters(), self.stats.allocated_bytes.current
        purpose = " as the reserve (pinned_reserve_segment_size_mb)" if is_reserve else ""
        sentences = [
            f"tried to allocate {format_bytes(size_bytes)} of pinned memory{purpose}; this pool holds"
            f" {format_bytes(pool_bytes)}, of which {format_bytes(counters['free_bytes'])} is free"
        ]
        if waiting_bytes := counters["waiting_bytes"]:
            sentences.append(f"{format_bytes(waiting_bytes)} was freed but is in use by streams")
        if captured_bytes := counters["captured_bytes"]:
            sentences.append(f"{format_bytes(captured_bytes)} was freed but may be used by graphs")
        return OutOfPinnedMemory(
            OUT_OF_MEMORY,
            "CUDA_ERROR_OUT_OF_MEMORY",
            "; ".join(sentences),
            hint="pinned memory is memory of the host that cannot be swapped out: free some, or copy in"
            " pieces",
        )
