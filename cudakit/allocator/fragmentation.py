"""Fragmentation of the reserved memory, and the report of a request that failed.

Internal fragmentation is the size of blocks minus their requested bytes. External fragmentation is one minus
the share of the largest free block in all free bytes. A free block serves requests of one stream only, the
stream of its segment. For requests of all other streams it is stranded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cudakit.allocator.blocks import Block, Request
from cudakit.allocator.engine import Engine
from cudakit.allocator.history import Stacks
from cudakit.allocator.segments import Segment
from cudakit.gpu.api import MemoryInfo
from cudakit.torch_rules.oom_facts import DEFAULT_POOL, OomReport, Pin, PoolId, StreamPool

_MAX_PINS = 3  # Maximum number of blocks that a report names because they keep segments from being released.
# The report prefers segments with enough free bytes: the size of the segment that the request would need,
# divided by this number.
_MIN_FREE_DIVISOR = 64


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """Memory that only one stream can reuse, in bytes."""

    stream: int
    stranded_bytes: int  # Free bytes that only this stream can reuse.
    releasable_bytes: int  # Stranded bytes in whole segments and pages, which empty_cache releases.
    largest_hole_bytes: int
    pending_bytes: int  # Bytes of freed blocks of this stream that other streams still use.
    awaited_bytes: int  # Bytes of freed blocks of other streams that wait for this stream.


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """The fragmentation of the reserved memory: in bytes, and as shares from 0 to 1."""

    reserved_bytes: int
    allocated_bytes: int
    pending_bytes: int  # Bytes of freed blocks that other streams still use.
    requested_bytes: int  # Bytes of allocated and pending blocks before rounding.
    free_bytes: int
    largest_hole_bytes: int
    releasable_bytes: int  # Free bytes in whole segments and pages, which empty_cache releases.
    stream_pools: tuple[StreamPool, ...]  # Sorted by free bytes, the most first.
    streams: tuple[StreamMemory, ...]  # Sorted by stranded and awaited bytes, the most first.

    @property
    def internal_bytes(self) -> int:
        """Bytes of the blocks in use minus their requested bytes."""
        return self.allocated_bytes + self.pending_bytes - self.requested_bytes

    @property
    def internal(self) -> float:
        """The internal fragmentation as a share of the bytes in use; 0 if there are none."""
        return self.internal_bytes / ((self.allocated_bytes + self.pending_bytes) or 1)

    @property
    def external(self) -> float:
        """One minus the share of the largest free block in all free bytes; 0 if nothing is free."""
        return 1 - self.largest_hole_bytes / self.free_bytes if self.free_bytes else 0.0


def fragmentation_of(
    segments: Iterable[Segment], awaited_blocks: Iterable[tuple[int, Block]]
) -> Fragmentation:
    """Return the fragmentation; ``awaited_blocks`` has each stream with a freed block that waits for it."""
    segment_blocks = [(segment, segment.blocks()) for segment in segments]
    used_blocks = [block for _, blocks in segment_blocks for block in blocks if not block.is_free]
    stream_pools = stream_pools_of(segment_blocks)
    return Fragmentation(
        reserved_bytes=sum(segment.size for segment, _ in segment_blocks),
        allocated_bytes=sum(block.size for block in used_blocks if block.is_allocated),
        pending_bytes=sum(block.size for block in used_blocks if not block.is_allocated),
        requested_bytes=sum(block.requested for block in used_blocks),
        free_bytes=sum(pool.free_bytes for pool in stream_pools),
        largest_hole_bytes=max((pool.largest_free_bytes for pool in stream_pools), default=0),
        releasable_bytes=sum(pool.releasable_bytes for pool in stream_pools),
        stream_pools=stream_pools,
        streams=_sorted_stream_memory(stream_pools, awaited_bytes(awaited_blocks)),
    )


def awaited_bytes(awaited_blocks: Iterable[tuple[int, Block]]) -> dict[int, int]:
    """Return for each stream the bytes of the freed blocks that wait for it."""
    bytes_by_stream: dict[int, int] = {}
    for stream, block in awaited_blocks:
        bytes_by_stream[stream] = bytes_by_stream.get(stream, 0) + block.size
    return bytes_by_stream


def stream_pools_of(
    segment_blocks: Iterable[tuple[Segment, list[Block]]],
) -> tuple[StreamPool, ...]:
    """Sum up the segments of each pool and stream.

    A request can be served only by segments of its own pool and stream.
    """
    stream_pools: dict[tuple[PoolId, bool, int], list[StreamPool]] = {}
    for segment, blocks in segment_blocks:
        key = segment.pool.id, segment.pool.is_small, segment.stream
        free_blocks = [block for block in blocks if block.is_free]
        free_sizes = [block.size for block in free_blocks]
        releasable_bytes = (
            sum(map(segment.releasable_bytes, free_blocks)) if key[0] == DEFAULT_POOL else 0
        )
        pending_bytes = sum(
            block.size for block in blocks if not block.is_free and not block.is_allocated
        )
        stream_pools.setdefault(key, []).append(
            StreamPool(
                *key,
                segment.size,
                sum(free_sizes),
                max(free_sizes, default=0),
                releasable_bytes,
                pending_bytes,
            )
        )
    summed_pools = map(_sum_stream_pools, stream_pools.values())
    return tuple(sorted(summed_pools, key=lambda pool: -pool.free_bytes))


def _sum_stream_pools(stream_pools: list[StreamPool]) -> StreamPool:
    first_pool = stream_pools[0]
    return StreamPool(
        first_pool.pool,
        first_pool.is_small,
        first_pool.stream,
        reserved_bytes=sum(stream_pool.reserved_bytes for stream_pool in stream_pools),
        free_bytes=sum(stream_pool.free_bytes for stream_pool in stream_pools),
        largest_free_bytes=max(stream_pool.largest_free_bytes for stream_pool in stream_pools),
        releasable_bytes=sum(stream_pool.releasable_bytes for stream_pool in stream_pools),
        pending_bytes=sum(stream_pool.pending_bytes for stream_pool in stream_pools),
    )


def _sorted_stream_memory(
    stream_pools: Iterable[StreamPool], bytes_by_stream: Mapping[int, int]
) -> tuple[StreamMemory, ...]:
    pools_by_stream: dict[int, list[StreamPool]] = {stream: [] for stream in bytes_by_stream}
    for pool in stream_pools:
        pools_by_stream.setdefault(pool.stream, []).append(pool)
    stream_memory = _stream_memory(pools_by_stream, bytes_by_stream)
    return tuple(
        sorted(
            stream_memory,
            key=lambda memory: (-memory.stranded_bytes - memory.awaited_bytes, memory.stream),
        )
    )


def _stream_memory(
    pools_by_stream: Mapping[int, list[StreamPool]], awaited_by_stream: Mapping[int, int]
) -> Iterator[StreamMemory]:
    for stream, stream_pools in pools_by_stream.items():
        yield StreamMemory(
            stream,
            stranded_bytes=sum(pool.free_bytes for pool in stream_pools),
            releasable_bytes=sum(pool.releasable_bytes for pool in stream_pools),
            largest_hole_bytes=max((pool.largest_free_bytes for pool in stream_pools), default=0),
            pending_bytes=sum(pool.pending_bytes for pool in stream_pools),
            awaited_bytes=awaited_by_stream.get(stream, 0),
        )


def report_of(
    engine: Engine,
    request: Request,
    device: int,
    memory_info: MemoryInfo,
    *,
    awaited_blocks: Iterable[tuple[int, Block]] = (),
    is_capturing: bool = False,
    is_rejected: bool = False,
) -> OomReport:
    """Return the report of a request that failed."""
    current_total = engine.stats.current_total
    stream_pools = stream_pools_of(
        (segment, segment.blocks()) for segment in engine.segments.values()
    )
    return OomReport(
        device=device,
        requested_bytes=request.requested_bytes,
        block_bytes=request.size,
        segment_bytes=request.segment_bytes,
        stream=request.stream,
        pool=request.pool.id,
        is_small=request.pool.is_small,
        device_free_bytes=memory_info.free_bytes,
        device_total_bytes=memory_info.total_bytes,
        limit_bytes=engine.limit_bytes if engine.is_limited else None,
        allocated_bytes=current_total("allocated_bytes"),
        reserved_bytes=current_total("reserved_bytes"),
        private_free_bytes=sum(
            pool.free_bytes for pool in stream_pools if pool.pool != engine.default_pools.id
        ),
        pending_bytes=current_total("pending_bytes"),
        max_split_size_bytes=engine.settings.max_split_size_bytes,
        expandable_segments=engine.settings.expandable_segments,
        stream_pools=stream_pools,
        pins=_pins(engine.segments.values(), request.segment_bytes // _MIN_FREE_DIVISOR),
        bytes_by_awaited_stream=tuple(
            sorted(awaited_bytes(awaited_blocks).items(), key=lambda pair: -pair[1])
        ),
        is_capturing=is_capturing,
        is_rejected=is_rejected,
        range_bytes=_reservation_bytes(engine, request, memory_info.total_bytes),
        reserve_class=engine.reserve_class_by_stream.get(request.stream, ""),
    )


def _reservation_bytes(engine: Engine, request: Request, total_bytes: int) -> int | None:
    """Return the size of an expandable segment for a request; None if the request uses plain segments."""
    if engine.expandable_segments is None or not engine.uses_expandable_segments(request.pool):
        return None
    pool, stream = request.pool, request.stream
    return engine.expandable_segments.reservation_bytes(engine.settings, pool, stream, total_bytes)


def _pins(segments: Iterable[Segment], min_free_bytes: int) -> tuple[Pin, ...]:
    """Return the smallest block in use of each of the segments with the most free bytes per byte in use."""
    segments_with_free_bytes = [(_free_bytes(segment), segment) for segment in segments]
    partly_free_segments = [
        (segment_free_bytes, segment)
        for segment_free_bytes, segment in segments_with_free_bytes
        if 0 < segment_free_bytes < segment.size
    ]
    candidates = [
        pair for pair in partly_free_segments if pair[0] >= min_free_bytes
    ] or partly_free_segments
    candidates.sort(key=lambda pair: (pair[1].size - pair[0]) / pair[0])
    stacks = Stacks()
    return tuple(
        _pin(segment, segment_free_bytes, stacks)
        for segment_free_bytes, segment in candidates[:_MAX_PINS]
    )


def _pin(segment: Segment, free_bytes: int, stacks: Stacks) -> Pin:
    block = min(
        (candidate for candidate in segment.blocks() if not candidate.is_free),
        key=lambda block: block.size,
    )
    frames = stacks.frames(block.stack)
    return Pin(block.ptr, block.size, block.requested, segment.size, free_bytes, frames)


def _free_bytes(segment: Segment) -> int:
    return sum(block.size for block in segment.blocks() if block.is_free)
