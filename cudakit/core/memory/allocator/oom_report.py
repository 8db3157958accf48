"""What was true when memory ran out."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from cudakit.core.memory.allocator.block import Segment
from cudakit.core.memory.allocator.cache import Cache, Request
from cudakit.core.memory.allocator.pools import PoolId
from cudakit.core.memory.allocator.stacks import Frames, Stacks
from cudakit.gpu.api import MemoryInfo

_MOST_PINS = 3


@dataclass(frozen=True, slots=True)
class Silo:
    """Memory that serves the requests of one pool, one kind and one stream only."""

    pool: PoolId
    small: bool
    stream: int
    reserved_bytes: int
    free_bytes: int
    largest_free_bytes: int


@dataclass(frozen=True, slots=True)
class Pin:
    """A block in use that keeps a segment, most of which is free, from being given back."""

    address: int
    size_bytes: int
    requested_bytes: int
    segment_bytes: int
    segment_free_bytes: int
    frames: Frames  # of its allocation; empty where no stacks are recorded


@dataclass(frozen=True, slots=True)
class OomReport:
    """A request that failed, and what there was of memory."""

    device: int
    requested_bytes: int
    block_bytes: int  # rounded
    segment_bytes: int  # what the device was asked for
    stream: int
    pool: PoolId
    small: bool
    device_free_bytes: int
    device_total_bytes: int
    limit_bytes: int | None  # the most that may be reserved
    allocated_bytes: int
    reserved_bytes: int
    private_free_bytes: int  # cached in private pools
    pending_bytes: int  # freed, but used by other streams
    max_split_size_bytes: int | None
    expandable_segments: bool
    silos: tuple[Silo, ...]  # the one with most free bytes first
    pins: tuple[Pin, ...]  # the one that costs most first

    @property
    def elsewhere_bytes(self) -> int:
        """Bytes of the device that this allocator does not hold: contexts, other processes."""
        used = self.device_total_bytes - self.device_free_bytes
        return max(used - self.reserved_bytes, 0)

    @property
    def own(self) -> Silo:
        """Where the request was looked for."""
        key = self.pool, self.small, self.stream
        for silo in self.silos:
            if (silo.pool, silo.small, silo.stream) == key:
                return silo
        return Silo(*key, 0, 0, 0)


def report_of(cache: Cache, request: Request, device: int, info: MemoryInfo) -> OomReport:
    """Look at all that the cache holds."""
    total = cache.statistics.total
    silos = _silos(cache)
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
        limit_bytes=cache.limit_bytes if cache.limited else None,
        allocated_bytes=total("allocated_bytes"),
        reserved_bytes=total("reserved_bytes"),
        private_free_bytes=sum(s.free_bytes for s in silos if s.pool != cache.default.id),
        pending_bytes=total("pending_bytes"),
        max_split_size_bytes=cache.settings.max_split_size_bytes,
        expandable_segments=cache.settings.expandable_segments,
        silos=silos,
        pins=_pins(cache),
    )


def _silos(cache: Cache) -> tuple[Silo, ...]:
    sizes: defaultdict[tuple[PoolId, bool, int], list[int]] = defaultdict(list)
    reserved: defaultdict[tuple[PoolId, bool, int], int] = defaultdict(int)
    for segment in cache.segments.values():
        key = segment.pool.id, segment.pool.small, segment.stream
        reserved[key] += segment.size
        sizes[key] += [block.size for block in segment.blocks() if block.free]
    found = [
        Silo(*key, size, sum(sizes[key]), max(sizes[key], default=0))
        for key, size in reserved.items()
    ]
    return tuple(sorted(found, key=lambda silo: -silo.free_bytes))


def _pins(cache: Cache) -> tuple[Pin, ...]:
    """Find the segments with most free bytes for each byte in use, and the smallest block in use of each."""
    partly = [s for s in cache.segments.values() if 0 < _free_bytes(s) < s.size]
    partly.sort(key=lambda segment: (segment.size - _free_bytes(segment)) / _free_bytes(segment))
    stacks = Stacks()
    return tuple(_pin(segment, stacks) for segment in partly[:_MOST_PINS])


def _pin(segment: Segment, stacks: Stacks) -> Pin:
    block = min((b for b in segment.blocks() if not b.free), key=lambda block: block.size)
    free = _free_bytes(segment)
    frames = stacks.frames(block.stack)
    return Pin(block.ptr, block.size, block.requested, segment.size, free, frames)


def _free_bytes(segment: Segment) -> int:
    return sum(block.size for block in segment.blocks() if block.free)
