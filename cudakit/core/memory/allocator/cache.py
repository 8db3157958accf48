"""The cache: segments, the blocks they are divided into, and what may be done to them.

Nothing here locks, waits for a stream or knows what to do without memory. Whatever a call of the driver
raises, the cache is as it was before the call. Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp
(get_free_block, alloc_block, alloc_found_block, free_block, try_merge_blocks, release_block).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from cudakit.core.memory.allocator import sizes
from cudakit.core.memory.allocator.block import Block, Segment, Trail
from cudakit.core.memory.allocator.pools import DEFAULT_POOL, Pool, PoolId, Pools
from cudakit.core.memory.allocator.settings import Settings
from cudakit.core.memory.allocator.statistics import Statistics
from cudakit.core.memory.allocator.tracing import (
    ALLOC,
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    Recorder,
)
from cudakit.core.memory.allocator.upstream import Upstream
from cudakit.errors import CudaError, Unsupported

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
    """

    def __init__(self, upstream: Upstream, settings: Settings) -> None:
        self.upstream = upstream
        self.malloc: Callable[[int, int], int] = upstream.malloc
        self.statistics = Statistics(settings.max_split_size_bytes or sizes.UNLIMITED)
        self.default = Pools(DEFAULT_POOL, self.statistics.small, self.statistics.large)
        self.private: dict[PoolId, Pools] = {}
        self.segments: dict[int, Segment] = {}
        self.reserved_bytes = 0  # what is being asked for included
        self.recorder: Recorder | None = None
        self.configure(settings, sizes.UNLIMITED)

    def configure(self, settings: Settings, limit_bytes: int) -> None:
        """Follow other settings from now on; ``limit_bytes`` is the most that may be reserved.

        Raises Unsupported for a setting that this allocator has not yet.
        """
        _refuse_missing(settings)
        self.settings = settings
        self.limit_bytes = limit_bytes
        self.max_split_bytes = settings.max_split_size_bytes or sizes.UNLIMITED
        divisions = settings.roundup_power2_divisions
        self.divisions = divisions if max(divisions) > 1 else ()
        self.collects = self.limited and settings.garbage_collection_threshold > 0

    @property
    def limited(self) -> bool:
        """Whether there is a limit below what the device has."""
        return self.limit_bytes < sizes.UNLIMITED

    def find(self, pool: Pool, size: int, stream: int) -> Block | None:
        """Take the best fit out of a pool, or nothing where that one block is not to be used."""
        if self.collects:
            pool.searches += 1
        row = pool.rows.get(stream)
        if row is None:
            return None
        limit = self.max_split_bytes
        return row.take(size, limit if size < limit else size + self.settings.slack_bytes)

    def hand_out(self, block: Block, size: int, requested: int, stack: Trail | None) -> None:
        """Hand out a block that is in no pool, the low part of it where it is larger than need be."""
        pool = block.row.pool
        had_neighbours = block.previous is not None or block.next is not None
        rest_bytes = block.size - size
        if rest_bytes > pool.slack_bytes and size < self.max_split_bytes:
            self._split(block, size, rest_bytes)
            pieces, piece_bytes = (0, -size) if had_neighbours else (1, rest_bytes)
        elif had_neighbours:
            size = block.size
            pieces, piece_bytes = -1, -size
        else:
            size = block.size
            pieces = piece_bytes = 0
        block.allocated = True
        block.requested = requested
        block.stack = stack
        pool.tally.handed_out(size, requested)
        if piece_bytes:
            pool.tally.pieces_changed(pieces, piece_bytes)
        if size >= self.max_split_bytes:
            self.statistics.oversize_allocations.increase()
        if self.recorder is not None:
            self.recorder.record(ALLOC, block.ptr, requested, block.stream, stack, pool.id)

    def _split(self, block: Block, size: int, rest_bytes: int) -> None:
        rest = Block(block.ptr + size, rest_bytes, block.row)
        rest.requested = (
            block.requested
        )  # an inactive block keeps what it last was, as PyTorch's do
        rest.previous = block
        rest.next = after = block.next
        if after is not None:
            after.previous = rest
        block.next = rest
        block.size = size
        rest.row.add(rest)

    def put_back(self, block: Block, stack: Trail | None, *, was_postponed: bool) -> None:
        """Take a block back that nobody uses, and merge it with its free neighbours."""
        pool, size, requested = block.row.pool, block.size, block.requested
        if self.recorder is not None:
            seen = stack or block.stack
            self.recorder.record(FREE_COMPLETED, block.ptr, requested, block.stream, seen, pool.id)
        block.stack = None
        pieces = piece_bytes = 0
        before, after = block.previous, block.next
        if after is not None and after.free:
            pieces, piece_bytes = -1, -after.size
            after.row.discard(after)
            _merge(block, after)
        if before is not None and before.free:
            pieces, piece_bytes = pieces - 1, piece_bytes - before.size
            before.row.discard(before)
            before.requested = requested
            _merge(before, block)
            block = before
        if block.previous is not None or block.next is not None:
            pieces, piece_bytes = pieces + 1, piece_bytes + block.size
        block.row.add(block)
        if was_postponed:
            pool.tally.completed(size, requested)
        else:
            pool.tally.freed(size, requested)
        if piece_bytes:
            pool.tally.pieces_changed(pieces, piece_bytes)

    def new_segment(self, request: Request) -> Block | None:
        """Take a segment from the device; None where that is beyond the limit or the device has no more.

        Raises CudaError for all else that the driver refuses. The block is in no pool.
        """
        size = request.segment_bytes
        if self.reserved_bytes + size > self.limit_bytes:
            return None
        self.reserved_bytes += size
        try:
            ptr = self.malloc(size, request.stream)
        except BaseException as error:
            self.reserved_bytes -= size
            if isinstance(error, CudaError) and error.code == OUT_OF_MEMORY:
                return None
            raise
        block = Block(ptr, size, request.pool.row(request.stream))
        self.segments[ptr] = Segment(block, request.stack)
        self._count_segment(block)
        if self.recorder is not None:
            pool = request.pool.id
            self.recorder.record(SEGMENT_ALLOC, ptr, size, block.stream, request.stack, pool)
        return block

    def _count_segment(self, block: Block) -> None:
        self.statistics.num_device_alloc += 1
        block.pool.tally.reserved(block.size)
        if block.size >= self.max_split_bytes:
            self.statistics.oversize_segments.increase()

    def release(self, block: Block, stack: Trail | None) -> None:
        """Give a free block that is a whole segment back to the device. Raises CudaError, and keeps it."""
        self.upstream.free(block.ptr)
        block.row.discard(block)
        segment = self.segments.pop(block.ptr)
        self.reserved_bytes -= block.size
        self.statistics.num_device_free += 1
        block.pool.tally.released(block.size)
        if block.size >= self.max_split_bytes:
            self.statistics.oversize_segments.decrease()
        if self.recorder is not None:
            seen, pool = stack or segment.stack, block.pool.id
            self.recorder.record(SEGMENT_FREE, block.ptr, block.size, block.stream, seen, pool)


def _refuse_missing(settings: Settings) -> None:
    missing = {
        "backend:cudaMallocAsync": settings.backend != "native",
        "expandable_segments:True": settings.expandable_segments,
        "graph_capture_record_stream_reuse:True": settings.graph_capture_record_stream_reuse,
    }
    for name in filter(missing.get, missing):
        raise Unsupported(f"this allocator has no {name}", hint="leave it out")


def _merge(block: Block, after: Block) -> None:
    """Let a block take in the one behind it."""
    block.size += after.size
    block.next = follower = after.next
    if follower is not None:
        follower.previous = block
