"""The cache: segments, the blocks they are divided into, and what may be done to them.

Nothing here locks, waits for a stream or knows what to do without memory. Whatever a call of the driver
raises, the cache is as it was before the call. Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp
(get_free_block, alloc_block, alloc_found_block, free_block, try_merge_blocks, release_block).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

from cudakit.core.allocator.block import Block, Segment, Segments, Trail
from cudakit.core.allocator.expandable import Expandable, virtual_memory
from cudakit.core.allocator.ledger import ABOVE_PEAK
from cudakit.core.allocator.pools import DEFAULT_POOL, MOST_IN_PART, Pool, Pools
from cudakit.core.allocator.private import PrivatePools
from cudakit.core.allocator.statistics import Statistics
from cudakit.core.allocator.tracing import (
    ALLOC,
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    Recorder,
)
from cudakit.core.allocator.upstream import Upstream
from cudakit.errors import CudaError, Unsupported
from cudakit.torch_rules import sizes
from cudakit.torch_rules.settings import Settings

# CUDA_ERROR_OUT_OF_MEMORY (CUDA Driver API, CUresult).
OUT_OF_MEMORY = 2


@dataclass(frozen=True, slots=True)
class Request:
    """What no free block could serve."""

    size: int  # of the block
    requested: int
    segment_bytes: int
    stream: int
    pool: Pool
    stack: Trail | None


class Cache:
    """What one device's allocator holds.

    ``malloc`` is how it asks the device for a segment; ``recorder`` is None while nothing is recorded.
    ``simple`` says that a search is nothing more than the best fit and the limit to splitting.
    ``expands`` says that new memory is mapped into segments that grow; ``unsplit_bytes`` is the size from
    which on blocks are not split.

    What every allocation goes through stands in ``hand_out`` and ``put_back`` themselves, though it would be
    easier to read in smaller functions: a call costs as much as a whole addition to the ledger.
    """

    __slots__ = (
        "_spare",
        "collects",
        "default",
        "divisions",
        "expandable",
        "expands",
        "limit_bytes",
        "malloc",
        "max_split_bytes",
        "peaked",
        "private",
        "recorder",
        "reserved_bytes",
        "segments",
        "settings",
        "simple",
        "statistics",
        "unsplit_bytes",
        "upstream",
    )

    def __init__(self, upstream: Upstream, settings: Settings) -> None:
        self.upstream = upstream
        self.malloc: Callable[[int, int], int] = upstream.malloc
        self.statistics = Statistics(settings.max_split_size_bytes or sizes.UNLIMITED)
        self.peaked: Callable[[], None] = self.statistics.ledger.raise_peaks
        self.default = Pools(DEFAULT_POOL, self.statistics.small, self.statistics.large)
        self.private = PrivatePools(self.statistics)
        self.segments = Segments()
        self.reserved_bytes = 0  # what is being asked for included
        self.recorder: Recorder | None = None
        self.expandable: Expandable | None = None  # segments that grow, where there are any
        self._spare: Block | None = None  # merged away: the next piece that is split off
        self.configure(settings, sizes.UNLIMITED)

    def configure(self, settings: Settings, limit_bytes: int) -> None:
        """Follow other settings from now on; ``limit_bytes`` is the most that may be reserved.

        Raises Unsupported for a setting that this allocator has not yet.
        """
        _refuse_missing(settings)
        self.expands = self._expands(settings)
        self.settings = settings
        self.limit_bytes = limit_bytes
        self.max_split_bytes = settings.max_split_size_bytes or sizes.UNLIMITED
        self.unsplit_bytes = sizes.UNLIMITED if self.expands else self.max_split_bytes
        divisions = settings.roundup_power2_divisions
        self.divisions = divisions if max(divisions) > 1 else ()
        self.collects = self.limited and settings.garbage_collection_threshold > 0
        self.simple = not self.collects and not self.expands

    def _expands(self, settings: Settings) -> bool:
        """Begin with expandable segments, or add no more to those there are; return whether they are on."""
        if settings.expandable_segments:
            pages = virtual_memory(self.upstream, settings.large_segment_size_bytes)
            self.expandable = self.expandable or Expandable(self, pages)
        elif self.expandable is not None:
            self.expandable.rest()
        return settings.expandable_segments

    @property
    def limited(self) -> bool:
        """Whether there is a limit below what the device has."""
        return self.limit_bytes < sizes.UNLIMITED

    def find(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Take the best fit out of a pool, or nothing where that one block is not to be used."""
        if self.expandable is None or not self._grows(pool):
            return self.find_plain(pool, size, stream)
        if self.collects:
            pool.searches += 1
        return self.expandable.find(pool, size, stream, self._limit_for(size))

    def find_plain(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Do that where no block of a segment that grows will do."""
        if self.collects:
            pool.searches += 1
        row = pool.rows.get(stream)
        return None if row is None else row.take(size, self._limit_for(size))

    def find_lent(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Take one that a private pool lends, which is split as if no segment grew (try_mempool_fallback)."""
        block = self.find_plain(pool, size, stream)
        if block is not None and self.expandable is not None:
            self.expandable.rest()
            self.unsplit_bytes = self.max_split_bytes
        return block

    def _limit_for(self, size: int) -> int:
        """Return what a block must be smaller than to serve a request."""
        limit = self.max_split_bytes
        return limit if size < limit else size + self.settings.slack_bytes

    def hand_out(self, block: Block, size: int, requested: int, stack: Trail | None) -> None:  # noqa: C901, PLR0915
        """Hand out a block that is in no pool, the low part of it where it is larger than need be."""
        row = block.row
        pool = row.pool
        tally = pool.tally
        after = block.next
        whole = after is None and block.previous is None
        rest_bytes = block.size - size
        if rest_bytes > pool.slack_bytes and size < self.unsplit_bytes and pool.splits:
            rest = self._spare
            if rest is None:
                rest = Block(block.ptr + size, rest_bytes, row)
            else:
                self._spare = None
                rest.ptr = block.ptr + size  # type: ignore[assignment]  # as in Block
                rest.size = rest_bytes
                rest.row = row
            rest.requested = block.requested  # what it last was, as PyTorch's inactive blocks have
            rest.origin = block.origin
            block.origin = None
            rest.previous = block
            rest.next = after
            if after is not None:
                after.previous = rest
            block.next = rest
            block.size = size
            part = row.part
            if part is None or len(part) >= MOST_IN_PART:
                row.add(rest)
            else:
                if not part or part[-1][0] < rest_bytes:
                    part.append((rest_bytes, rest.ptr, rest))
                else:
                    insort(part, (rest_bytes, rest.ptr, rest))
                rest.free = True
                rest.age_base = pool.searches
            if whole:
                tally.pieces_changed(1, rest_bytes)
            else:
                tally.inactive_split_bytes -= size
        else:
            size = block.size
            if not whole:
                tally.inactive_split -= 1
                tally.inactive_split_bytes -= size
        block.allocated = True
        block.requested = requested
        block.stack = stack
        block.bin = None

        if size == block.weighed_size and requested == block.weighed_request:
            weight = block.weight
        else:
            weight = tally.block_unit + size * tally.byte_unit + requested * tally.request_unit
            block.weight, block.weighed_size, block.weighed_request = weight, size, requested
        ledger = tally.ledger
        ledger.used = used = ledger.used + weight
        ledger.added += weight
        if used & ABOVE_PEAK:
            self.peaked()
        if ledger.pending:
            tally.raise_active()

        if size >= self.max_split_bytes:
            self.statistics.oversize_allocations.increase()
        if self.recorder is not None:
            self.recorder.record(ALLOC, block.ptr, requested, row.stream, stack, pool.id)

    def put_back(self, block: Block, stack: Trail | None) -> None:  # noqa: C901, PLR0915
        """Take a block back that nobody uses, and merge it with its free neighbours. The caller counts it."""
        row = block.row
        size, requested = block.size, block.requested
        if self.recorder is not None:
            seen = stack or block.stack
            self.recorder.record(
                FREE_COMPLETED, block.ptr, requested, row.stream, seen, row.pool.id
            )
        block.stack = None
        pieces = piece_bytes = 0
        largest = False  # of its part, whatever it is merged with
        before, after = block.previous, block.next
        part = row.part
        if after is not None and after.free:
            pieces, piece_bytes = -1, -after.size
            if part is None:
                row.discard(after)
            else:
                if part[-1][2] is after:
                    part.pop()
                    largest = True
                else:
                    del part[bisect_left(part, (after.size, after.ptr))]
                after.free = False
            size += after.size
            block.next = follower = after.next
            if follower is not None:
                follower.previous = block
            self._spare = after
            after = follower
        if before is not None and before.free:
            pieces, piece_bytes = pieces - 1, piece_bytes - before.size
            if part is None:
                row.discard(before)
            elif part[-1][2] is before:
                part.pop()
                largest = True
            else:
                del part[bisect_left(part, (before.size, before.ptr))]
            before.requested = requested
            size += before.size
            before.next = after
            if after is not None:
                after.previous = before
            self._spare = block
            block = before
            before = block.previous
        block.size = size
        if part is None or len(part) >= MOST_IN_PART:
            row.add(block)
        else:
            if largest or not part:
                part.append((size, block.ptr, block))
            else:
                insort(part, (size, block.ptr, block))
            block.free = True
            block.age_base = row.pool.searches
        if before is not None or after is not None:
            row.pool.tally.pieces_changed(pieces + 1, piece_bytes + size)
        elif pieces:
            tally = row.pool.tally
            tally.inactive_split += pieces
            tally.inactive_split_bytes += piece_bytes

    def new_segment(self, request: Request) -> Block | None:
        """Take a segment from the device; None where that is beyond the limit or the device has no more.

        Raises CudaError for all else that the driver refuses. The block is in no pool.
        """
        size = request.segment_bytes
        if self.reserved_bytes + size > self.limit_bytes:
            return None
        source = self.private.source(request.pool.id)
        if self.expandable is not None and self._grows(request.pool):
            return self.expandable.obtain(request)
        self.reserved_bytes += size
        try:
            malloc = self.malloc if source is None else source.malloc
            ptr = malloc(size, request.stream)
        except BaseException as error:
            self.reserved_bytes -= size
            if isinstance(error, CudaError) and error.code == OUT_OF_MEMORY:
                return None
            raise
        self._grows(request.pool)  # others may have been here while the driver was asked
        block = Block(ptr, size, request.pool.row(request.stream))
        self.segments[ptr] = Segment(block, request.stack)
        self._count_segment(block)
        if self.recorder is not None:
            pool = request.pool.id
            self.recorder.record(SEGMENT_ALLOC, ptr, size, block.stream, request.stack, pool)
        return block

    def _grows(self, pool: Pool) -> bool:
        """Say whether new memory of a pool is mapped, and let the limit to splitting count if it is not.

        That of another upstream never is (is_expandable_segments_active).
        """
        grows = self.expands and self.private.source(pool.id) is None
        self.unsplit_bytes = sizes.UNLIMITED if grows else self.max_split_bytes
        return grows

    def _count_segment(self, block: Block) -> None:
        self.statistics.num_device_alloc += 1
        block.pool.tally.reserved(block.size)
        for metric in block.pool.reserved:
            metric.increase(block.size)
        if block.size >= self.max_split_bytes:
            self.statistics.oversize_segments.increase()

    def release(self, block: Block, stack: Trail | None) -> None:
        """Give a free block that is a whole segment back to the device. Raises CudaError, and keeps it."""
        (self.private.source(block.pool.id) or self.upstream).free(block.ptr)
        block.row.discard(block)
        segment = self.segments.pop(block.ptr)
        self.reserved_bytes -= block.size
        self.statistics.num_device_free += 1
        block.pool.tally.released(block.size)
        for metric in block.pool.reserved:
            metric.decrease(block.size)
        if block.size >= self.max_split_bytes:
            self.statistics.oversize_segments.decrease()
        if self.recorder is not None:
            seen, pool = stack or segment.stack, block.pool.id
            self.recorder.record(SEGMENT_FREE, block.ptr, block.size, block.stream, seen, pool)


def _refuse_missing(settings: Settings) -> None:
    missing = {
        "backend:cudaMallocAsync": settings.backend != "native",
    }
    for name in filter(missing.get, missing):
        raise Unsupported(
            f"this allocator has no {name}: that is the driver's own pool, without blocks or snapshots",
            hint='leave it out, or take that pool: DeviceMemoryResource of cuda.core, torch_pool("async")',
        )
