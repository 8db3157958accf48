"""The engine: best fit, splitting and merging of blocks, and the segments of one device.

The methods get_free_block, should_split, alloc_found_block, free_block, alloc_block, release_block,
release_cached_blocks, release_available_cached_blocks and garbage_collect_cached_blocks follow those of the
same name in PyTorch's c10/cuda/CUDACachingAllocator.cpp. The caller holds the allocator's guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

from cudakit.allocator.blocks import (
    Block,
    BlockPool,
    FreeBlocks,
    Pools,
    RawStack,
    Request,
    Segment,
    Segments,
    SegmentSource,
    is_whole_segment,
)
from cudakit.allocator.expandable import ExpandableSegments, best_fit, require_paged
from cudakit.allocator.history import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    History,
)
from cudakit.allocator.pools import PrivatePool, PrivatePools
from cudakit.allocator.stats import BlockCounters, DeviceStats
from cudakit.allocator.upstream import OUT_OF_MEMORY
from cudakit.errors import CudaError, Unsupported
from cudakit.torch_rules.oom import DEFAULT_POOL
from cudakit.torch_rules.settings import SMALLEST_BLOCK, UNLIMITED, Settings
from cudakit.units import MIB


class Engine:
    """The blocks, pools and segments of one device.

    ``history`` is the history of events, or None. ``malloc`` takes a segment from the device. The types of
    free blocks and counters are the plain Python types or the native ones.
    """

    def __init__(
        self,
        upstream: SegmentSource,
        settings: Settings,
        free_blocks_type: type[FreeBlocks] = FreeBlocks,
        counters_type: type[BlockCounters] = BlockCounters,
    ) -> None:
        self.upstream = upstream
        self.malloc: Callable[[int, int], int] = upstream.malloc
        self.stats = DeviceStats(settings.max_split_size_bytes or UNLIMITED, counters_type)
        self.default_pools = Pools(DEFAULT_POOL, self.stats, free_blocks_type)
        self.private_pools = PrivatePools(self.stats, free_blocks_type)
        self.segments = Segments()
        # Reserved bytes, including the segment that a driver call is about to return.
        self.reserved_bytes = 0
        self.history: History | None = None
        # Expandable segments; None until the setting is turned on.
        self.expandable_segments: ExpandableSegments | None = None
        # Class of each stream for the setting expandable_segments_reserve_by_class.
        self.reserve_class_by_stream: dict[int, str] = {}
        self.configure(settings, UNLIMITED)

    def configure(self, settings: Settings, limit_bytes: int) -> None:
        """Replace the settings; ``limit_bytes`` is the maximum of reserved bytes.

        Raises Unsupported for a setting that this allocator does not have.
        """
        if settings.backend != "native":
            raise Unsupported(
                "backend:cudaMallocAsync is not supported: with this backend, the driver's pool replaces the"
                " caching allocator",
                hint="remove the setting; for the driver's pool, use DeviceMemoryResource of cuda.core"
                ' or torch_pool("async") of cudakit',
            )
        if settings.expandable_segments:
            paged_upstream = require_paged(self.upstream, settings.large_segment_size_bytes)
            self.expandable_segments = self.expandable_segments or ExpandableSegments(
                paged_upstream, self.segments, self.reserve_class_by_stream, self._record_mapped
            )
        self.settings = settings
        self.limit_bytes = limit_bytes
        self.max_split_bytes = settings.max_split_size_bytes or UNLIMITED
        divisions = settings.roundup_power2_divisions
        self.divisions = divisions if max(divisions) > 1 else ()
        self.collects_garbage = self.is_limited and settings.garbage_collection_threshold > 0

    @property
    def is_limited(self) -> bool:
        """Whether reserved bytes are limited, by a memory fraction below 1."""
        return self.limit_bytes < UNLIMITED

    @property
    def is_simple(self) -> bool:
        """Whether the settings of rounding, search and split are those that the fast path implements."""
        return not (
            self.divisions
            or self.collects_garbage
            or self.expandable_segments is not None
            or self.max_split_bytes < UNLIMITED
        )

    # Blocks.

    def get_free_block(self, pool: BlockPool, size: int, stream: int) -> Block | None:
        """Remove and return the best fit of a pool; None if no block fits, or if the best fit is too large.

        Blocks of expandable segments are skipped if new memory of the pool is in plain segments.
        """
        if self.collects_garbage and pool.id == DEFAULT_POOL:
            pool.stats.block_counters.searches += 1
        return self._take(pool, size, stream, self.uses_expandable_segments(pool))

    def take_lent_block(self, request: Request) -> Block | None:
        """Take a free block of a private pool that lends its blocks (PyTorch's try_mempool_fallback).

        As in PyTorch, blocks of expandable segments are not lent, and the driver is not called.
        """
        if request.pool.id == DEFAULT_POOL:
            for pools in self.private_pools.lending_pools():
                pool = pools.small if request.pool.is_small else pools.large
                block = self._take(pool, request.size, request.stream, uses_expandable=False)
                if block is not None:
                    return block
        return None

    def _take(self, pool: BlockPool, size: int, stream: int, uses_expandable: bool) -> Block | None:
        free_blocks = pool.by_stream.get(stream)
        if free_blocks is None:
            return None
        size_limit = self.max_split_bytes
        if size >= size_limit:
            size_limit = size + self.settings.slack_bytes
        if self.expandable_segments is None:
            return free_blocks.take(size, size_limit)
        block = best_fit(free_blocks, size, uses_expandable=uses_expandable)
        if block is None or block.size >= size_limit:
            return None
        free_blocks.remove(block)
        return block

    def uses_expandable_segments(self, pool: BlockPool) -> bool:
        """Return whether new memory of a pool is mapped into expandable segments.

        Pools with their own source of segments use plain segments (PyTorch's is_expandable_segments_active).
        """
        return (
            self.settings.expandable_segments and self.private_pools.segment_source(pool.id) is None
        )

    def should_split(self, block: Block, size: int, pool: BlockPool) -> bool:
        """Return whether a block is split for a request for ``pool``, so that its rest stays free.

        A block that another pool lends is split as if no segment were expandable, as in PyTorch.
        """
        block_pool, rest_bytes = block.pool, block.size - size
        if block_pool.no_split:
            return False
        if block_pool.is_small or (block_pool is pool and self.uses_expandable_segments(pool)):
            return rest_bytes >= SMALLEST_BLOCK
        return size < self.max_split_bytes and rest_bytes > MIB

    def alloc_found_block(
        self, block: Block, size: int, requested_bytes: int, stack: RawStack | None, *, splits: bool
    ) -> None:
        """Allocate a block that is in no free list; with ``splits``, only its first ``size`` bytes."""
        free_blocks, next_block = block.free_blocks, block.next
        stats = free_blocks.pool.stats
        was_split = next_block is not None or block.prev is not None
        if splits:
            rest_bytes = block.size - size
            rest_block = free_blocks.new_block(
                block.ptr + size, rest_bytes, block.expandable_segment
            )
            # The free rest of the block keeps the requested bytes of the last request, as in PyTorch.
            rest_block.requested = block.requested
            rest_block.segment_stack = block.segment_stack
            block.segment_stack = None
            rest_block.prev = block
            rest_block.next = next_block
            if next_block is not None:
                next_block.prev = rest_block
            block.next = rest_block
            block.size = size
            free_blocks.add(rest_block)
            if block.expandable_segment is None:
                stats.count_split(*((0, -size) if was_split else (1, rest_bytes)))
        else:
            size = block.size
            if was_split and block.expandable_segment is None:
                stats.count_split(-1, -size)
        block.is_allocated = True
        block.requested = requested_bytes
        block.stack = stack
        stats.count_alloc(size, requested_bytes)
        if size >= self.max_split_bytes:
            self.stats.oversize_allocations.change(1)
        if self.history is not None:
            self.history.record_block(ALLOC, block, stack)

    def free(self, block: Block, stack: RawStack | None) -> Block | None:
        """Free an allocated block; return the merged free block, or None if other streams still use it."""
        block.is_allocated = False
        if self.history is not None:
            self.history.record_block(FREE_REQUESTED, block, stack)
        if block.size >= self.max_split_bytes:
            self.stats.oversize_allocations.change(-1)
        stats = block.pool.stats
        if block.stream_uses:
            stats.count_pending(block.size)
            return None
        stats.count_free(block.size, block.requested)
        return self._free_block(block, stack)

    def complete_free(self, block: Block, stack: RawStack | None) -> Block:
        """Free a pending block that no stream uses any more, and return the merged free block."""
        block.pool.stats.count_completed(block.size, block.requested)
        return self._free_block(block, stack)

    def _free_block(self, block: Block, stack: RawStack | None) -> Block:
        """Merge an unused block with adjacent free blocks, add it to the free blocks, and return it."""
        if self.history is not None:
            self.history.record_block(FREE_COMPLETED, block, stack)
        free_blocks = block.free_blocks
        block.stack = None
        merged_count = merged_bytes = 0  # Number and bytes of adjacent free blocks.
        previous_block, next_block = block.prev, block.next
        if next_block is not None and next_block.is_free:
            free_blocks.remove(next_block)
            merged_count, merged_bytes = 1, next_block.size
            block.size += next_block.size
            block.next = next_block = next_block.next
            if next_block is not None:
                next_block.prev = block
        if previous_block is not None and previous_block.is_free:
            free_blocks.remove(previous_block)
            merged_count, merged_bytes = merged_count + 1, merged_bytes + previous_block.size
            previous_block.requested = block.requested
            previous_block.size += block.size
            previous_block.next = next_block
            if next_block is not None:
                next_block.prev = previous_block
            block = previous_block
            previous_block = block.prev
        free_blocks.add(block)
        if block.expandable_segment is None:
            if previous_block is not None or next_block is not None:
                free_blocks.pool.stats.count_split(1 - merged_count, block.size - merged_bytes)
            elif merged_count:
                free_blocks.pool.stats.count_split(-merged_count, -merged_bytes)
        return block

    # Segments.

    def alloc_block(self, request: Request) -> Block | None:
        """Allocate a segment on the device, and return its block; None if memory or the limit is exhausted.

        The block is in no list of free blocks. Raises CudaError for every other failure of the driver.
        """
        segment_bytes, pool = request.segment_bytes, request.pool
        if self.reserved_bytes + segment_bytes > self.limit_bytes:
            return None
        if self.expandable_segments is not None and self.uses_expandable_segments(pool):
            return self.expandable_segments.alloc_block(self.settings, request)
        source = self.private_pools.segment_source(pool.id)
        malloc = self.malloc if source is None else source.malloc
        self.reserved_bytes += segment_bytes
        try:
            ptr = malloc(segment_bytes, request.stream)
        except BaseException as error:
            self.reserved_bytes -= segment_bytes
            if isinstance(error, CudaError) and error.code == OUT_OF_MEMORY:
                return None
            raise
        block = pool.free_blocks(request.stream).new_block(ptr, segment_bytes)
        self.segments[ptr] = Segment(block, request.stack)
        self.stats.num_device_alloc += 1
        pool.stats.count_segments(1)
        self._count_reserved(pool, segment_bytes)
        if segment_bytes >= self.max_split_bytes:
            self.stats.oversize_segments.change(1)
        if self.history is not None:
            self.history.record(
                SEGMENT_ALLOC, ptr, segment_bytes, request.stream, request.stack, pool.id
            )
        return block

    def release_block(self, block: Block, stack: RawStack | None) -> None:
        """Release a free block that is a whole segment to the device. On CudaError the block stays cached."""
        pool, segment_bytes = block.pool, block.size
        (self.private_pools.segment_source(pool.id) or self.upstream).free(block.ptr)
        block.free_blocks.remove(block)
        segment = self.segments.pop(block.ptr)
        self.reserved_bytes -= segment_bytes
        self.stats.num_device_free += 1
        pool.stats.count_segments(-1)
        self._count_reserved(pool, -segment_bytes)
        if segment_bytes >= self.max_split_bytes:
            self.stats.oversize_segments.change(-1)
        if self.history is not None:
            event_stack = stack or segment.stack
            self.history.record(
                SEGMENT_FREE, block.ptr, segment_bytes, block.stream, event_stack, pool.id
            )

    def release_cached_blocks(self, stack: RawStack | None) -> None:
        """Release all cached segments, except those of private pools that are held.

        If the driver raises CudaError, the remaining segments stay cached.
        """
        for pool in self.default_pools:
            self._release_blocks(pool, stack)
        for private_pool in self.private_pools:
            if not private_pool.holder_count:
                self.release_private_pool(private_pool, stack)

    def release_private_pool(self, pool: PrivatePool, stack: RawStack | None) -> None:
        """Release the cached segments of a private pool without holders; drop a pool without segments."""
        for block_pool in pool:
            self._release_blocks(block_pool, stack)
        if all(segment.pool.id != pool.id for segment in self.segments.values()):
            self.private_pools.drop_pool(pool)

    def _release_blocks(self, pool: BlockPool, stack: RawStack | None) -> None:
        """Release every unused segment of a pool, and every unused page of its expandable segments."""
        self._release_all([block for block in pool if is_whole_segment(block)], stack)
        if self.expandable_segments is not None:
            self.expandable_segments.release_blocks(pool, stack)

    def release_available_cached_blocks(self, request: Request) -> bool:
        """Release oversize segments until a request fits; return whether the released bytes suffice.

        Releases the smallest segment that suffices alone, else several segments, the largest first. Does
        nothing if max_split_size is not set.
        """
        if self.max_split_bytes == UNLIMITED:
            return False
        needed_bytes = max(request.size, self.max_split_bytes)
        blocks = list(request.pool.by_stream.get(request.stream) or ())
        large_enough_block = next(
            (
                block
                for block in blocks
                if block.size >= needed_bytes
                and (is_whole_segment(block) or block.expandable_segment is not None)
            ),
            None,
        )
        if large_enough_block is not None and large_enough_block.expandable_segment is None:
            self.release_block(large_enough_block, request.stack)
            return True
        released_bytes = 0
        smaller_blocks = [
            block for block in blocks if block.size < needed_bytes and is_whole_segment(block)
        ]
        for block in takewhile(
            lambda block: block.size >= self.max_split_bytes, reversed(smaller_blocks)
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
        threshold_bytes = int(self.settings.garbage_collection_threshold * self.limit_bytes)
        pool = self.default_pools.large
        candidates = [block for block in pool if is_whole_segment(block)]
        excess_bytes = self.reserved_bytes - threshold_bytes
        while candidates and excess_bytes > 0:
            mean_age = sum(map(pool.age, candidates)) / len(candidates)
            # The selection of a pass is complete before its first release, as in PyTorch.
            old_blocks = [block for block in candidates if pool.age(block) >= mean_age]
            candidates = [block for block in candidates if pool.age(block) < mean_age]
            excess_bytes -= sum(block.size for block in old_blocks)
            self._release_all(old_blocks, stack)

    def trim_cache(self, limit_bytes: int) -> None:
        """Release whole segments of the default pool until the cached bytes are within a limit.

        Releases the smallest segment that suffices alone, else the largest ones. Raises CudaError.
        """
        releasable_blocks = [
            segment.first_block
            for segment in self.segments.values()
            if segment.pool.id == DEFAULT_POOL
            and segment.first_block.is_free
            and is_whole_segment(segment.first_block)
        ]
        releasable_blocks.sort(key=lambda block: block.size)
        while releasable_blocks and (excess_bytes := self.cached_bytes - limit_bytes) > 0:
            large_enough_indices = (
                index for index, block in enumerate(releasable_blocks) if block.size >= excess_bytes
            )
            released_index = next(large_enough_indices, len(releasable_blocks) - 1)
            self.release_block(releasable_blocks.pop(released_index), None)

    @property
    def cached_bytes(self) -> int:
        """Bytes that are reserved and not in use."""
        return self.stats.current_total("reserved_bytes") - self.stats.current_total("active_bytes")

    def _release_all(self, blocks: Iterable[Block], stack: RawStack | None) -> None:
        for block in blocks:
            self.release_block(block, stack)

    def _record_mapped(self, ptr: int, size: int, block: Block, stack: RawStack | None) -> None:
        """Count and record memory that was mapped for the pool of a block; a negative size was unmapped."""
        self.reserved_bytes += size
        if size > 0:
            self.stats.num_device_alloc += 1
        else:
            self.stats.num_device_free += 1
        self._count_reserved(block.pool, size)
        if self.history is not None:
            action = SEGMENT_MAP if size > 0 else SEGMENT_UNMAP
            self.history.record(action, ptr, abs(size), block.stream, stack, block.pool.id)

    def _count_reserved(self, pool: BlockPool, size: int) -> None:
        """Count memory that was taken from the device for a pool; a negative size counts returned memory."""
        pool.stats.count_reserved(size)
        for reserved_stat in pool.reserved_stats:
            reserved_stat.change(size)
