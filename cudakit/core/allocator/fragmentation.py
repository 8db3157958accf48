"""Fragmentation of the reserved memory, and the facts of a request that failed.

Internal fragmentation is the bytes of blocks beyond those requested. External fragmentation is one minus the
share of the largest free block in all free bytes. Free memory serves one stream only, that of its segment:
for all others it is stranded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from cudakit.core.allocator.blocks import Block, Request
from cudakit.core.allocator.engine import Engine
from cudakit.core.allocator.history import Stacks
from cudakit.core.allocator.segments import Segment
from cudakit.gpu.api import MemoryInfo
from cudakit.torch_rules.oom_facts import DEFAULT_POOL, OomReport, Pin, PoolId, StreamPool

_MOST_PINS = 3
# Segments with at least this part of the request free are named first.
_WORTH_NAMING = 64


@dataclass(frozen=True, slots=True)
class StreamMemory:
    """Memory that only one stream can reuse, in bytes."""

    stream: int
    stranded_bytes: int  # free, and reused by this stream only
    releasable_bytes: int  # the part that empty_cache releases: whole segments and pages
    largest_hole_bytes: int
    pending_bytes: int  # freed blocks of this stream that other streams still use
    awaited_bytes: int  # freed blocks of other streams that wait for this one


@dataclass(frozen=True, slots=True)
class Fragmentation:
    """The reserved memory, and how fragmented it is; in bytes, and shares from 0 to 1."""

    reserved_bytes: int
    allocated_bytes: int
    pending_bytes: int  # freed, but still used by other streams
    requested_bytes: int  # of allocated and pending blocks, before rounding
    free_bytes: int
    largest_hole_bytes: int
    releasable_bytes: int  # free in whole segments and pages, which empty_cache releases
    stream_pools: tuple[StreamPool, ...]  # the one with most free bytes first
    streams: tuple[StreamMemory, ...]  # the one with most stranded bytes first

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
    segments: Iterable[Segment], awaited: Iterable[tuple[int, Block]]
) -> Fragmentation:
    """Return the fragmentation; ``awaited`` are the streams that freed blocks wait for, and those blocks."""
    segment_blocks = [(segment, segment.blocks()) for segment in segments]
    used = [block for _, blocks in segment_blocks for block in blocks if not block.free]
    stream_pools = stream_pools_of(segment_blocks)
    return Fragmentation(
        reserved_bytes=sum(segment.size for segment, _ in segment_blocks),
        allocated_bytes=sum(block.size for block in used if block.allocated),
        pending_bytes=sum(block.size for block in used if not block.allocated),
        requested_bytes=sum(block.requested for block in used),
        free_bytes=sum(pool.free_bytes for pool in stream_pools),
        largest_hole_bytes=max((pool.largest_free_bytes for pool in stream_pools), default=0),
        releasable_bytes=sum(pool.releasable_bytes for pool in stream_pools),
        stream_pools=stream_pools,
        streams=_streams(stream_pools, awaited_bytes(awaited)),
    )


def awaited_bytes(awaited: Iterable[tuple[int, Block]]) -> dict[int, int]:
    """Return for each stream the bytes of the freed blocks that wait for it."""
    bytes_by_stream: dict[int, int] = {}
    for stream, block in awaited:
        bytes_by_stream[stream] = bytes_by_stream.get(stream, 0) + block.size
    return bytes_by_stream


def stream_pools_of(held: Iterable[tuple[Segment, list[Block]]]) -> tuple[StreamPool, ...]:
    """Group segments by the requests that they serve."""
    by_key: dict[tuple[PoolId, bool, int], list[StreamPool]] = {}
    for segment, blocks in held:
        key = segment.pool.id, segment.pool.small, segment.stream
        free = [block for block in blocks if block.free]
        sizes = [block.size for block in free]
        whole = sum(map(segment.releasable_bytes, free)) if key[0] == DEFAULT_POOL else 0
        pending = sum(b.size for b in blocks if not b.free and not b.allocated)
        by_key.setdefault(key, []).append(
            StreamPool(*key, segment.size, sum(sizes), max(sizes, default=0), whole, pending)
        )
    summed = [_summed(parts) for parts in by_key.values()]
    return tuple(sorted(summed, key=lambda each: -each.free_bytes))


def _summed(parts: list[StreamPool]) -> StreamPool:
    first = parts[0]
    return StreamPool(
        first.pool,
        first.small,
        first.stream,
        reserved_bytes=sum(part.reserved_bytes for part in parts),
        free_bytes=sum(part.free_bytes for part in parts),
        largest_free_bytes=max(part.largest_free_bytes for part in parts),
        releasable_bytes=sum(part.releasable_bytes for part in parts),
        pending_bytes=sum(part.pending_bytes for part in parts),
    )


def _streams(
    stream_pools: Iterable[StreamPool], awaited: Mapping[int, int]
) -> tuple[StreamMemory, ...]:
    own: dict[int, list[StreamPool]] = {stream: [] for stream in awaited}
    for pool in stream_pools:
        own.setdefault(pool.stream, []).append(pool)
    memory_by_stream = _memory_of(own, awaited)
    return tuple(
        sorted(memory_by_stream, key=lambda m: (-m.stranded_bytes - m.awaited_bytes, m.stream))
    )


def _memory_of(
    own: Mapping[int, list[StreamPool]], awaited: Mapping[int, int]
) -> Iterator[StreamMemory]:
    for stream, stream_pools in own.items():
        yield StreamMemory(
            stream,
            stranded_bytes=sum(pool.free_bytes for pool in stream_pools),
            releasable_bytes=sum(pool.releasable_bytes for pool in stream_pools),
            largest_hole_bytes=max((pool.largest_free_bytes for pool in stream_pools), default=0),
            pending_bytes=sum(pool.pending_bytes for pool in stream_pools),
            awaited_bytes=awaited.get(stream, 0),
        )


def report_of(
    engine: Engine,
    request: Request,
    device: int,
    info: MemoryInfo,
    *,
    awaited: Iterable[tuple[int, Block]] = (),
    capturing: bool = False,
    rejected: bool = False,
) -> OomReport:
    """Return the facts of a request that failed."""
    total = engine.stats.total
    stream_pools = stream_pools_of(
        (segment, segment.blocks()) for segment in engine.segments.values()
    )
    return OomReport(
        device=device,
        requested_bytes=request.requested,
        block_bytes=request.size,
        segment_bytes=request.segment_bytes,
        stream=request.stream,
        pool=request.pool.id,
        small=request.pool.small,
        device_free_bytes=info.free_bytes,
        device_total_bytes=info.total_bytes,
        limit_bytes=engine.limit_bytes if engine.is_limited else None,
        allocated_bytes=total("allocated_bytes"),
        reserved_bytes=total("reserved_bytes"),
        private_free_bytes=sum(s.free_bytes for s in stream_pools if s.pool != engine.default.id),
        pending_bytes=total("pending_bytes"),
        max_split_size_bytes=engine.settings.max_split_size_bytes,
        expandable_segments=engine.settings.expandable_segments,
        stream_pools=stream_pools,
        pins=_pins(engine.segments.values(), request.segment_bytes // _WORTH_NAMING),
        awaited=tuple(sorted(awaited_bytes(awaited).items(), key=lambda pair: -pair[1])),
        capturing=capturing,
        rejected=rejected,
        range_bytes=_range_bytes(engine, request, info.total_bytes),
        reserve_class=engine.stream_classes.get(request.stream, ""),
    )


def _range_bytes(engine: Engine, request: Request, total_bytes: int) -> int | None:
    if engine.expandable is None or not engine.expands(request.pool):
        return None
    pool, stream = request.pool, request.stream
    return engine.expandable.reserve_bytes(engine.settings, pool, stream, total_bytes)


def _pins(segments: Iterable[Segment], least_bytes: int) -> tuple[Pin, ...]:
    """Return the smallest used block of the segments with most free bytes for each byte in use."""
    free_in = [(_free_bytes(segment), segment) for segment in segments]
    partly = [(free, s) for free, s in free_in if 0 < free < s.size]
    ranked = [(free, s) for free, s in partly if free >= least_bytes] or partly
    ranked.sort(key=lambda pair: (pair[1].size - pair[0]) / pair[0])
    stacks = Stacks()
    return tuple(_pin(segment, free, stacks) for free, segment in ranked[:_MOST_PINS])


def _pin(segment: Segment, free_bytes: int, stacks: Stacks) -> Pin:
    block = min((b for b in segment.blocks() if not b.free), key=lambda block: block.size)
    frames = stacks.frames(block.stack)
    return Pin(block.ptr, block.size, block.requested, segment.size, free_bytes, frames)


def _free_bytes(segment: Segment) -> int:
    return sum(block.size for block in segment.blocks() if block.free)
