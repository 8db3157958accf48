"""The engine: best fit, splitting and merging of the blocks of one device.

The methods get_free_block, should_split, alloc_found_block and free_block follow those of the same name in
PyTorch's c10/cuda/CUDACachingAllocator.cpp. The caller holds the allocator's guard.
"""

from __future__ import annotations

from cudakit.allocator.blocks import (
    PLAIN_TYPES,
    Block,
    BlockPool,
    BlockTypes,
    Pools,
    RawStack,
    SegmentSource,
)
from cudakit.allocator.expandable import ExpandableSegments, best_fit, require_paged
from cudakit.allocator.history import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    History,
)
from cudakit.allocator.pool_stats import DeviceStats
from cudakit.allocator.private_pools import PrivatePools
from cudakit.allocator.segments import Segments
from cudakit.errors import Unsupported
from cudakit.torch_rules.oom_facts import DEFAULT_POOL
from cudakit.torch_rules.settings import Settings
from cudakit.torch_rules.sizes import MIB, SMALLEST_BLOCK, UNLIMITED


class Engine:
    """The blocks, pools and segments of one device. ``history`` is the history of events, or None."""

    __slots__ = (
        "collects_garbage",
        "default_pools",
        "divisions",
        "expandable_segments",
        "history",
        "limit_bytes",
        "max_split_bytes",
        "private_pools",
        "reserve_class_by_stream",
        "reserved_bytes",
        "segments",
        "settings",
        "stats",
        "upstream",
    )

    def __init__(
        self, upstream: SegmentSource, settings: Settings, types: BlockTypes = PLAIN_TYPES
    ) -> None:
        self.upstream = upstream
        self.stats = DeviceStats(settings.max_split_size_bytes or UNLIMITED, types.counters_type)
        self.default_pools = Pools(
            DEFAULT_POOL, self.stats.small, self.stats.large, types.free_blocks_type
        )
        self.private_pools = PrivatePools(self.stats, types.free_blocks_type)
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
                paged_upstream, self.segments, self.reserve_class_by_stream
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

    def uses_expandable_segments(self, pool: BlockPool) -> bool:
        """Return whether new memory of a pool is mapped into expandable segments.

        Pools with their own source of segments use plain segments (PyTorch's is_expandable_segments_active).
        """
        return (
            self.settings.expandable_segments and self.private_pools.segment_source(pool.id) is None
        )

    def get_free_block(
        self, pool: BlockPool, size: int, stream: int, *, uses_expandable: bool
    ) -> Block | None:
        """Remove and return the best fit of a pool; None if no block fits, or if the best fit is too large.

        Without ``uses_expandable``, blocks of expandable segments are skipped.
        """
        if self.collects_garbage and pool.id == self.default_pools.id:
            pool.stats.block_counters.searches += 1
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

    def should_split(self, block: Block, size: int, *, uses_expandable: bool) -> bool:
        """Return whether a block is split, so that its rest stays free."""
        pool, rest_bytes = block.free_blocks.pool, block.size - size
        if pool.no_split:
            return False
        if pool.is_small or uses_expandable:
            return rest_bytes >= SMALLEST_BLOCK
        return size < self.max_split_bytes and rest_bytes > MIB

    def alloc_found_block(
        self, block: Block, size: int, requested_bytes: int, stack: RawStack | None, *, splits: bool
    ) -> None:
        """Allocate a block that is in no free list; with ``splits``, only its first ``size`` bytes."""
        free_blocks, next_block = block.free_blocks, block.next
        counters = free_blocks.counters
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
                if was_split:
                    counters.inactive_split_bytes -= size
                else:
                    counters.count_split(1, rest_bytes)
        else:
            size = block.size
            if was_split and block.expandable_segment is None:
                counters.inactive_split -= 1
                counters.inactive_split_bytes -= size
        block.is_allocated = True
        block.requested = requested_bytes
        block.stack = stack
        counters.count_alloc(size, requested_bytes)
        if self.stats.has_pending:
            free_blocks.stats.raise_active_peaks()
        if size >= self.max_split_bytes:
            self.stats.oversize_allocations.increase()
        if self.history is not None:
            self.history.record_block(ALLOC, block, stack)

    def free(self, block: Block, stack: RawStack | None) -> Block | None:
        """Free an allocated block; return the merged free block, or None if other streams still use it."""
        block.is_allocated = False
        if self.history is not None:
            self.history.record_block(FREE_REQUESTED, block, stack)
        if block.size >= self.max_split_bytes:
            self.stats.oversize_allocations.decrease()
        free_blocks = block.free_blocks
        if block.stream_uses:
            free_blocks.stats.count_pending(block.size)
            return None
        free_blocks.counters.count_free(block.size, block.requested)
        return self.free_block(block, stack)

    def complete_free(self, block: Block, stack: RawStack | None) -> Block:
        """Free a pending block that no stream uses any more, and return the merged free block."""
        block.free_blocks.stats.count_completed(block.size, block.requested)
        return self.free_block(block, stack)

    def free_block(self, block: Block, stack: RawStack | None) -> Block:
        """Merge an unused block with adjacent free blocks, add it to the free blocks, and return it.

        The caller updates the counters of allocated blocks.
        """
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
                free_blocks.counters.count_split(1 - merged_count, block.size - merged_bytes)
            elif merged_count:
                free_blocks.counters.inactive_split -= merged_count
                free_blocks.counters.inactive_split_bytes -= merged_bytes
        return block

    def count_mapped(self, pool: BlockPool, size: int) -> None:
        """Count memory that was mapped into an expandable segment; a negative size counts unmapped memory."""
        self.reserved_bytes += size
        if size > 0:
            self.stats.num_device_alloc += 1
        else:
            self.stats.num_device_free += 1
        self.count_reserved(pool, size)

    def count_reserved(self, pool: BlockPool, size: int) -> None:
        """Count memory that was taken from the device for a pool; a negative size counts returned memory."""
        pool.stats.count_reserved(size)
        for reserved_stat in pool.reserved_stats:
            if size > 0:
                reserved_stat.increase(size)
            else:
                reserved_stat.decrease(-size)
