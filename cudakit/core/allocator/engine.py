"""The engine: best fit, splitting, merging, and segments of one device.

Follows PyTorch's c10/cuda/CUDACachingAllocator.cpp, in plain Python and with its names: get_free_block,
alloc_block, alloc_found_block, free_block, release_block, release_cached_blocks,
release_available_cached_blocks, garbage_collect_cached_blocks. The caller holds the allocator's guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import takewhile

from cudakit.core.allocator.blocks import (
    PLAIN_TYPES,
    Block,
    BlockPool,
    BlockTypes,
    Pools,
    RawStack,
    Request,
    SegmentSource,
)
from cudakit.core.allocator.expandable import ExpandableSegments, best_fit, checked_paged
from cudakit.core.allocator.history import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    History,
)
from cudakit.core.allocator.pool_stats import DeviceStats
from cudakit.core.allocator.private_pools import PrivatePool, PrivatePools
from cudakit.core.allocator.segments import Segment, Segments, is_whole_segment
from cudakit.core.allocator.upstream import OUT_OF_MEMORY
from cudakit.errors import CudaError, Unsupported
from cudakit.torch_rules.oom_facts import DEFAULT_POOL
from cudakit.torch_rules.settings import Settings
from cudakit.torch_rules.sizes import MIB, SMALLEST_BLOCK, UNLIMITED


class Engine:
    """The blocks, pools and segments of one device.

    ``malloc`` takes a segment from the device. ``trace`` is the history while events are recorded.
    """

    __slots__ = (
        "collects_garbage",
        "default",
        "divisions",
        "expandable",
        "limit_bytes",
        "malloc",
        "max_split_bytes",
        "private",
        "reserved_bytes",
        "segments",
        "settings",
        "stats",
        "stream_classes",
        "trace",
        "upstream",
    )

    def __init__(
        self, upstream: SegmentSource, settings: Settings, types: BlockTypes = PLAIN_TYPES
    ) -> None:
        self.upstream = upstream
        self.malloc: Callable[[int, int], int] = upstream.malloc
        self.stats = DeviceStats(settings.max_split_size_bytes or UNLIMITED, types.counters)
        self.default = Pools(DEFAULT_POOL, self.stats.small, self.stats.large, types.free_blocks)
        self.private = PrivatePools(self.stats, types.free_blocks)
        self.segments = Segments()
        self.reserved_bytes = 0  # including a driver call under way
        self.trace: History | None = None
        self.expandable: ExpandableSegments | None = None  # once the setting was on
        self.stream_classes: dict[int, str] = {}  # for expandable_segments_reserve_by_class
        self.configure(settings, UNLIMITED)

    def configure(self, settings: Settings, limit_bytes: int) -> None:
        """Replace the settings; ``limit_bytes`` is the maximum of reserved bytes.

        Raises Unsupported for a setting that this allocator does not have.
        """
        if settings.backend != "native":
            raise Unsupported(
                "this allocator has no backend:cudaMallocAsync: that is the driver's own pool, without"
                " blocks or snapshots",
                hint="leave it out, or take that pool: DeviceMemoryResource of cuda.core,"
                ' torch_pool("async")',
            )
        if settings.expandable_segments:
            paged = checked_paged(self.upstream, settings.large_segment_size_bytes)
            self.expandable = self.expandable or ExpandableSegments(
                paged, self.segments, self.stream_classes
            )
        self.settings = settings
        self.limit_bytes = limit_bytes
        self.max_split_bytes = settings.max_split_size_bytes or UNLIMITED
        divisions = settings.roundup_power2_divisions
        self.divisions = divisions if max(divisions) > 1 else ()
        self.collects_garbage = self.is_limited and settings.garbage_collection_threshold > 0

    @property
    def is_limited(self) -> bool:
        """Whether there is a limit below the memory of the device."""
        return self.limit_bytes < UNLIMITED

    @property
    def is_simple(self) -> bool:
        """Whether rounding, search and split follow the defaults, which the fast path implements."""
        return not (
            self.divisions
            or self.collects_garbage
            or self.expandable is not None
            or self.max_split_bytes < UNLIMITED
        )

    def expands(self, pool: BlockPool) -> bool:
        """Return whether new memory of a pool is mapped into expandable segments.

        False for a pool with an allocator of its own (is_expandable_segments_active).
        """
        return self.settings.expandable_segments and self.private.source(pool.id) is None

    # Blocks.

    def get_free_block(
        self, pool: BlockPool, size: int, stream: int, *, expands: bool
    ) -> Block | None:
        """Remove and return the best fit of a pool; None without one, or if it is too large.

        Without ``expands`` blocks of expandable segments are skipped.
        """
        if self.collects_garbage and pool.id == self.default.id:
            pool.stats.blocks.searches += 1
        free = pool.by_stream.get(stream)
        if free is None:
            return None
        limit = self.max_split_bytes
        if size >= limit:
            limit = size + self.settings.slack_bytes
        if self.expandable is None:
            return free.take(size, limit)
        block = best_fit(free, size, expands=expands)
        if block is None or block.size >= limit:
            return None
        free.remove(block)
        return block

    def should_split(self, block: Block, size: int, *, expands: bool) -> bool:
        """Return whether the rest of a block is kept free."""
        pool, rest = block.free_blocks.pool, block.size - size
        if pool.no_split:
            return False
        if pool.small or expands:
            return rest >= SMALLEST_BLOCK
        return size < self.max_split_bytes and rest > MIB

    def alloc_found_block(
        self, block: Block, size: int, requested: int, stack: RawStack | None, *, split: bool
    ) -> None:
        """Allocate a block that is in no list: its first ``size`` bytes with ``split``, else all of it."""
        free, after = block.free_blocks, block.next
        counters = free.counters
        was_split = after is not None or block.prev is not None
        if split:
            rest_bytes = block.size - size
            rest = free.new_block(block.ptr + size, rest_bytes, block.expandable_segment)
            # The rest keeps the requested bytes of the last request, as inactive blocks of PyTorch do.
            rest.requested = block.requested
            rest.segment_stack = block.segment_stack
            block.segment_stack = None
            rest.prev = block
            rest.next = after
            if after is not None:
                after.prev = rest
            block.next = rest
            block.size = size
            free.add(rest)
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
        block.allocated = True
        block.requested = requested
        block.stack = stack
        counters.count_alloc(size, requested)
        if self.stats.has_pending:
            free.stats.raise_active_peaks()
        if size >= self.max_split_bytes:
            self.stats.oversize_allocations.increase()
        if self.trace is not None:
            self.trace.record_block(ALLOC, block, stack)

    def free(self, block: Block, stack: RawStack | None) -> Block | None:
        """Free an allocated block; return the merged free block, or None if other streams use it."""
        block.allocated = False
        if self.trace is not None:
            self.trace.record_block(FREE_REQUESTED, block, stack)
        if block.size >= self.max_split_bytes:
            self.stats.oversize_allocations.decrease()
        free = block.free_blocks
        if block.stream_uses:
            free.stats.count_pending(block.size)
            return None
        free.counters.count_free(block.size, block.requested)
        return self.free_block(block, stack)

    def complete_free(self, block: Block, stack: RawStack | None) -> Block:
        """Free a pending block that other streams do not use any more; return the free block it is in."""
        block.free_blocks.stats.count_completed(block.size, block.requested)
        return self.free_block(block, stack)

    def free_block(self, block: Block, stack: RawStack | None) -> Block:
        """Add an unused block to the free blocks, merged with its free neighbours; return the result.

        The caller counts it.
        """
        if self.trace is not None:
            self.trace.record_block(FREE_COMPLETED, block, stack)
        free = block.free_blocks
        block.stack = None
        merged = merged_bytes = 0  # free neighbours
        before, after = block.prev, block.next
        if after is not None and after.free:
            free.remove(after)
            merged, merged_bytes = 1, after.size
            block.size += after.size
            block.next = after = after.next
            if after is not None:
                after.prev = block
        if before is not None and before.free:
            free.remove(before)
            merged, merged_bytes = merged + 1, merged_bytes + before.size
            before.requested = block.requested
            before.size += block.size
            before.next = after
            if after is not None:
                after.prev = before
            block = before
            before = block.prev
        free.add(block)
        if block.expandable_segment is None:
            if before is not None or after is not None:
                free.counters.count_split(1 - merged, block.size - merged_bytes)
            elif merged:
                free.counters.inactive_split -= merged
                free.counters.inactive_split_bytes -= merged_bytes
        return block

    # Segments.

    def alloc_block(self, request: Request) -> Block | None:
        """Take a segment from the device; None beyond the limit, and if the device is out of memory.

        The block is in no list. Raises CudaError for every other failure of the driver.
        """
        size, pool = request.segment_bytes, request.pool
        if self.reserved_bytes + size > self.limit_bytes:
            return None
        if self.expandable is not None and self.expands(pool):
            return self.expandable.alloc_block(self, request)
        source = self.private.source(pool.id)
        malloc = self.malloc if source is None else source.malloc
        self.reserved_bytes += size
        try:
            ptr = malloc(size, request.stream)
        except BaseException as error:
            self.reserved_bytes -= size
            if isinstance(error, CudaError) and error.code == OUT_OF_MEMORY:
                return None
            raise
        block = pool.free_blocks(request.stream).new_block(ptr, size)
        self.segments[ptr] = Segment(block, request.stack)
        self.stats.num_device_alloc += 1
        pool.stats.count_segments(1)
        self._count_reserved(pool, size)
        if size >= self.max_split_bytes:
            self.stats.oversize_segments.increase()
        if self.trace is not None:
            self.trace.record(SEGMENT_ALLOC, ptr, size, request.stream, request.stack, pool.id)
        return block

    def release_block(self, block: Block, stack: RawStack | None) -> None:
        """Return a free block that is a whole segment to the device. Raises CudaError, and keeps it."""
        pool, size = block.pool, block.size
        (self.private.source(pool.id) or self.upstream).free(block.ptr)
        block.free_blocks.remove(block)
        segment = self.segments.pop(block.ptr)
        self.reserved_bytes -= size
        self.stats.num_device_free += 1
        pool.stats.count_segments(-1)
        self._count_reserved(pool, -size)
        if size >= self.max_split_bytes:
            self.stats.oversize_segments.decrease()
        if self.trace is not None:
            seen = stack or segment.stack
            self.trace.record(SEGMENT_FREE, block.ptr, size, block.stream, seen, pool.id)

    def count_mapped(self, pool: BlockPool, size: int) -> None:
        """Count memory mapped into an expandable segment, or with a negative size unmapped memory."""
        self.reserved_bytes += size
        if size > 0:
            self.stats.num_device_alloc += 1
        else:
            self.stats.num_device_free += 1
        self._count_reserved(pool, size)

    def _count_reserved(self, pool: BlockPool, size: int) -> None:
        pool.stats.count_reserved(size)
        for stat in pool.reserved:
            if size > 0:
                stat.increase(size)
            else:
                stat.decrease(-size)

    # Cached memory.

    def release_cached_blocks(self, stack: RawStack | None) -> None:
        """Release all cached segments, except those of private pools that are held.

        If the driver raises CudaError, the remaining segments stay cached.
        """
        for pool in self.default:
            self._release_blocks(pool, stack)
        for private in self.private:
            self.release_private_pool(private, stack)

    def release_private_pool(self, pool: PrivatePool, stack: RawStack | None) -> None:
        """Release the cached segments of a pool that is not held; forget a pool without segments."""
        if pool.uses:
            return
        for kind in pool:
            self._release_blocks(kind, stack)
        if all(segment.pool.id != pool.id for segment in self.segments.values()):
            self.private.forget(pool)

    def release_available_cached_blocks(self, request: Request) -> bool:
        """Release oversize segments until a request fits; return whether they suffice.

        Releases the smallest one that suffices alone, else several, the largest first. Does nothing without
        a max_split_size.
        """
        limit = self.max_split_bytes
        if limit == UNLIMITED:
            return False
        needed = max(request.size, limit)
        blocks = list(request.pool.by_stream.get(request.stream) or ())
        candidates = [b for b in blocks if is_whole_segment(b) or b.expandable_segment is not None]
        enough = next((block for block in candidates if block.size >= needed), None)
        if enough is not None and enough.expandable_segment is None:
            self.release_block(enough, request.stack)
            return True
        released = 0
        smaller = [block for block in blocks if block.size < needed and is_whole_segment(block)]
        for block in takewhile(lambda block: block.size >= limit, reversed(smaller)):
            if released >= needed:
                break
            released += block.size
            self.release_block(block, request.stack)
        return released >= needed

    def garbage_collect_cached_blocks(self, stack: RawStack | None) -> None:
        """Release old segments of the large pool, until the reserved bytes are below the threshold.

        Each pass releases the segments of at least the mean age of those that remain.
        """
        threshold = int(self.settings.garbage_collection_threshold * self.limit_bytes)
        pool = self.default.large
        left = [block for block in pool if is_whole_segment(block)]
        target = self.reserved_bytes - threshold
        while left and target > 0:
            mean = sum(map(pool.age, left)) / len(left)
            # The selection of a pass is complete before its first release, as in PyTorch.
            old = [block for block in left if pool.age(block) >= mean]
            left = [block for block in left if pool.age(block) < mean]
            target -= sum(block.size for block in old)
            self._release_all(old, stack)

    def _release_blocks(self, pool: BlockPool, stack: RawStack | None) -> None:
        """Release every unused segment of a pool, and every unused page of expandable ones."""
        self._release_all([block for block in pool if is_whole_segment(block)], stack)
        if self.expandable is not None:
            self.expandable.release_blocks(self, pool, stack)

    def _release_all(self, blocks: Iterable[Block], stack: RawStack | None) -> None:
        for block in blocks:
            self.release_block(block, stack)
