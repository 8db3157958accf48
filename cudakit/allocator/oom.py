"""Out of memory: the error and the report of a request that failed, and the fragmentation of the memory.

Internal fragmentation is the size of blocks minus their requested bytes. External fragmentation is one minus
the share of the largest free block in all free bytes. A free block serves requests of one stream only, the
stream of its segment. For requests of all other streams it is stranded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from cudakit.allocator.blocks import Block, Request, Segment
from cudakit.allocator.engine import Engine
from cudakit.allocator.history import Stacks
from cudakit.allocator.upstream import OUT_OF_MEMORY
from cudakit.errors import CudaError
from cudakit.gpu.api import MemoryInfo
from cudakit.gpu.api.facts import Process
from cudakit.torch_rules.oom import (
    DEFAULT_POOL,
    OomReport,
    Pin,
    PoolId,
    StreamPool,
    details,
    hint_of,
    message_of,
)
from cudakit.units import Unavailable

Observer: TypeAlias = Callable[[OomReport], object]
ProcessQuery: TypeAlias = Callable[[], "tuple[Process, ...] | Unavailable"]

_MAX_PINS = 3  # Maximum number of blocks that a report names because they keep segments from being released.
# The report prefers segments with enough free bytes: the size of the segment that the request would need,
# divided by this number.
_MIN_FREE_DIVISOR = 64


class OutOfMemory(CudaError, MemoryError):
    """No memory is left for a request. ``report`` is None if the request was refused at once.

    The error is also a MemoryError, which CuPy, Numba and RMM handle. ``message`` is one line that begins
    like PyTorch's message. The string of the error adds a table of the memory, and remedies.
    """

    def __init__(
        self, explanation: str, *, hint: str = "", report: OomReport | None = None
    ) -> None:
        super().__init__(OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", explanation, hint=hint)
        self.message = f"CUDA out of memory. {explanation}"
        self.args = (self.message,)
        self.report = report

    def __str__(self) -> str:
        return f"{self.message}\n{details(self.report)}" if self.report else self.message


def out_of_memory_error(report: OomReport, observers: Iterable[Observer]) -> OutOfMemory:
    """Call observers with a report, and return its error, with a note for each observer that failed."""
    notes: list[str] = []
    for observer in observers:
        try:
            observer(report)
        except Exception as error:  # noqa: BLE001  It must not hide the out-of-memory error.
            observer_name = getattr(observer, "__qualname__", repr(observer))
            notes.append(f"the observer {observer_name} failed: {type(error).__name__}: {error}")
    out_of_memory = OutOfMemory(message_of(report), hint=hint_of(report), report=report)
    for note in notes:
        out_of_memory.add_note(note)
    return out_of_memory


def query_or_reason(query_processes: ProcessQuery) -> tuple[Process, ...] | Unavailable:
    """Return the processes of the device, or the reason why they are unknown."""
    try:
        return query_processes()
    except Exception as error:  # noqa: BLE001  # The report is useful without the processes.
        return Unavailable(str(error) or type(error).__name__)


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
    current_total, expandable_segments = engine.stats.current_total, engine.expandable_segments
    range_bytes = None
    if expandable_segments is not None and engine.uses_expandable_segments(request.pool):
        range_bytes = expandable_segments.reservation_bytes(
            engine.settings, request.pool, request.stream
        )
    stream_pools = _stream_pools(engine.segments.values())
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
            pool.free_bytes for pool in stream_pools if pool.pool != DEFAULT_POOL
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
        range_bytes=range_bytes,
        reserve_class=engine.reserve_class_by_stream.get(request.stream, ""),
    )


def _pins(segments: Iterable[Segment], min_free_bytes: int) -> tuple[Pin, ...]:
    """Return the smallest block in use of each of the segments with the most free bytes per byte in use."""
    partly_free_segments = []
    for segment in segments:
        free_bytes = sum(block.size for block in segment.blocks() if block.is_free)
        if 0 < free_bytes < segment.size:
            partly_free_segments.append((free_bytes, segment))
    candidates = [
        pair for pair in partly_free_segments if pair[0] >= min_free_bytes
    ] or partly_free_segments
    candidates.sort(key=lambda pair: (pair[1].size - pair[0]) / pair[0])
    stacks, pins = Stacks(), []
    for free_bytes, segment in candidates[:_MAX_PINS]:
        used_blocks = [block for block in segment.blocks() if not block.is_free]
        block = min(used_blocks, key=lambda block: block.size)
        frames = stacks.frames(block.stack)
        pins.append(Pin(block.ptr, block.size, block.requested, segment.size, free_bytes, frames))
    return tuple(pins)


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
    segments = list(segments)
    used_blocks = [block for segment in segments for block in segment.blocks() if not block.is_free]
    stream_pools = _stream_pools(segments)
    return Fragmentation(
        reserved_bytes=sum(segment.size for segment in segments),
        allocated_bytes=sum(block.size for block in used_blocks if block.is_allocated),
        pending_bytes=sum(block.size for block in used_blocks if not block.is_allocated),
        requested_bytes=sum(block.requested for block in used_blocks),
        free_bytes=sum(pool.free_bytes for pool in stream_pools),
        largest_hole_bytes=max((pool.largest_free_bytes for pool in stream_pools), default=0),
        releasable_bytes=sum(pool.releasable_bytes for pool in stream_pools),
        stream_pools=stream_pools,
        streams=_stream_memory(stream_pools, awaited_bytes(awaited_blocks)),
    )


def awaited_bytes(awaited_blocks: Iterable[tuple[int, Block]]) -> dict[int, int]:
    """Return for each stream the bytes of the freed blocks that wait for it."""
    bytes_by_stream: dict[int, int] = {}
    for stream, block in awaited_blocks:
        bytes_by_stream[stream] = bytes_by_stream.get(stream, 0) + block.size
    return bytes_by_stream


def _stream_pools(segments: Iterable[Segment]) -> tuple[StreamPool, ...]:
    """Sum up the segments of each pool and stream, which serve only requests of this pool and stream."""
    segments_by_key: dict[tuple[PoolId, bool, int], list[Segment]] = {}
    for segment in segments:
        key = segment.pool.id, segment.pool.is_small, segment.stream
        segments_by_key.setdefault(key, []).append(segment)
    stream_pools = []
    for key, key_segments in segments_by_key.items():
        blocks = [(segment, block) for segment in key_segments for block in segment.blocks()]
        free_blocks = [(segment, block) for segment, block in blocks if block.is_free]
        stream_pools.append(
            StreamPool(
                *key,
                reserved_bytes=sum(segment.size for segment in key_segments),
                free_bytes=sum(block.size for _, block in free_blocks),
                largest_free_bytes=max((block.size for _, block in free_blocks), default=0),
                releasable_bytes=sum(
                    segment.releasable_bytes(block)
                    for segment, block in free_blocks
                    if key[0] == DEFAULT_POOL
                ),
                pending_bytes=sum(
                    block.size
                    for _, block in blocks
                    if not block.is_free and not block.is_allocated
                ),
            )
        )
    return tuple(sorted(stream_pools, key=lambda pool: -pool.free_bytes))


def _stream_memory(
    stream_pools: Iterable[StreamPool], awaited_by_stream: dict[int, int]
) -> tuple[StreamMemory, ...]:
    pools_by_stream: dict[int, list[StreamPool]] = {stream: [] for stream in awaited_by_stream}
    for pool in stream_pools:
        pools_by_stream.setdefault(pool.stream, []).append(pool)
    stream_memory = (
        StreamMemory(
            stream,
            stranded_bytes=sum(pool.free_bytes for pool in pools),
            releasable_bytes=sum(pool.releasable_bytes for pool in pools),
            largest_hole_bytes=max((pool.largest_free_bytes for pool in pools), default=0),
            pending_bytes=sum(pool.pending_bytes for pool in pools),
            awaited_bytes=awaited_by_stream.get(stream, 0),
        )
        for stream, pools in pools_by_stream.items()
    )
    return tuple(
        sorted(
            stream_memory,
            key=lambda memory: (-memory.stranded_bytes - memory.awaited_bytes, memory.stream),
        )
    )
