"""The facts of a failed request, gathered from all that the engine holds."""

from __future__ import annotations

from collections.abc import Iterable

from cudakit.core.allocator.blocks import Block, Segment
from cudakit.core.allocator.engine import Engine
from cudakit.core.allocator.fragmentation import awaited_bytes, silos_of
from cudakit.core.allocator.history import Stacks
from cudakit.core.allocator.pools import Request
from cudakit.gpu.api import MemoryInfo
from cudakit.torch_rules.oom_facts import OomReport, Pin

_MOST_PINS = 3
# The part of the request that must be free in a segment for it to be named before others.
_WORTH_NAMING = 64


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
    """Look at all that the engine holds."""
    total = engine.stats.total
    silos = silos_of((segment, segment.blocks()) for segment in engine.segments.values())
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
        private_free_bytes=sum(s.free_bytes for s in silos if s.pool != engine.default.id),
        pending_bytes=total("pending_bytes"),
        max_split_size_bytes=engine.settings.max_split_size_bytes,
        expandable_segments=engine.settings.expandable_segments,
        silos=silos,
        pins=_pins(engine.segments.values(), request.segment_bytes // _WORTH_NAMING),
        awaited=tuple(sorted(awaited_bytes(awaited).items(), key=lambda pair: -pair[1])),
        capturing=capturing,
        rejected=rejected,
        most_addresses=_most_addresses(engine, request, info.total_bytes),
        reserve_class=engine.stream_classes.get(request.stream, ""),
    )


def _most_addresses(engine: Engine, request: Request, total_bytes: int) -> int | None:
    if engine.expandable is None or not engine.expands(request.pool):
        return None
    pool, stream = request.pool, request.stream
    return engine.expandable.reserve_bytes(engine.settings, pool, stream, total_bytes)


def _pins(segments: Iterable[Segment], least_bytes: int) -> tuple[Pin, ...]:
    """Find the segments with most free bytes for each byte in use, and the smallest block in use of each."""
    free_in = [(_free_bytes(segment), segment) for segment in segments]
    partly = [(free, s) for free, s in free_in if 0 < free < s.size]
    worth = [(free, s) for free, s in partly if free >= least_bytes] or partly
    worth.sort(key=lambda pair: (pair[1].size - pair[0]) / pair[0])
    stacks = Stacks()
    return tuple(_pin(segment, free, stacks) for free, segment in worth[:_MOST_PINS])


def _pin(segment: Segment, free_bytes: int, stacks: Stacks) -> Pin:
    block = min((b for b in segment.blocks() if not b.free), key=lambda block: block.size)
    frames = stacks.frames(block.stack)
    return Pin(block.ptr, block.size, block.requested, segment.size, free_bytes, frames)


def _free_bytes(segment: Segment) -> int:
    return sum(block.size for block in segment.blocks() if block.free)
