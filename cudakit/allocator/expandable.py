"""Expandable segments: how free blocks are chosen, and memory is mapped and released page by page.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (get_free_block, find_expandable_block,
try_allocate_expandable_block, map_block, release_blocks, unmap_block).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import cast

from cudakit.allocator.blocks import (
    Block,
    BlockPool,
    ExpandableSegment,
    FreeBlocks,
    RawStack,
    Request,
    Segment,
    StreamSegments,
    expandable_size,
)
from cudakit.allocator.upstream import OUT_OF_MEMORY, PagedUpstream
from cudakit.errors import CudaError, Unsupported
from cudakit.torch_rules.setting_keys import FULL_RESERVE, Reserve
from cudakit.torch_rules.settings import SMALL_SEGMENT, Settings
from cudakit.units import format_bytes


@dataclass(frozen=True, slots=True)
class AddressSpace:
    """The addresses that expandable segments reserve, including addresses without memory."""

    segments: int  # Number of reserved ranges.
    reserved_bytes: int


class ExpandableSegments:
    """The expandable segments of an engine.

    ``registry`` has the segments by address; mapped ranges are added to it. ``reserve_class_by_stream`` has
    the class of each stream in the setting expandable_segments_reserve_by_class. ``record_mapped`` records
    that a number of bytes at an address was mapped, or, if the number is negative, unmapped; its other
    arguments are a block of the same pool and stream, and the stack. If a driver call raises, pages that are
    mapped already stay mapped.
    """

    def __init__(
        self,
        upstream: PagedUpstream,
        registry: dict[int, Segment],
        reserve_class_by_stream: Mapping[int, str],
        record_mapped: Callable[[int, int, Block, RawStack | None], None],
    ) -> None:
        self._upstream = upstream
        self._pages = upstream.pages
        self._registry = registry
        self._reserve_class_by_stream = reserve_class_by_stream
        self._record_mapped = record_mapped
        # Segments by pool and stream.
        self._stream_segments: dict[tuple[BlockPool, int], StreamSegments] = {}

    @property
    def segments(self) -> list[ExpandableSegment]:
        """The expandable segments, each a reserved range of addresses."""
        return [
            segment
            for stream_segments in self._stream_segments.values()
            for segment in stream_segments.segments
        ]

    @property
    def mapped_ranges(self) -> list[tuple[int, int]]:
        """The address and the size of each mapped range."""
        return [(range_.ptr, range_.size) for segment in self.segments for range_ in segment.ranges]

    def alloc_block(self, settings: Settings, request: Request) -> Block | None:
        """Map the missing pages of a request at the lowest address where it fits; None if no memory is left.

        The returned block is in no list of free blocks. Raises CudaError for every other failure of the
        driver.
        """
        stream_segments = self._stream_segments.get((request.pool, request.stream))
        block = stream_segments.find_start_block(request.size) if stream_segments else None
        block = block or self._reserve_addresses(settings, request)
        if block is not None and not block.is_mapped:
            block = self._map_pages(block, min(request.size, block.size), request.stack)
        while block is not None and block.size < request.size:
            rest_block = block.next
            assert rest_block is not None  # noqa: S101  because find_start_block found enough addresses
            missing_bytes = min(request.size - block.size, rest_block.size)
            block = self._map_pages(rest_block, missing_bytes, request.stack)
        if block is not None:
            block.free_blocks.remove(block)
        return block

    def _reserve_addresses(self, settings: Settings, request: Request) -> Block | None:
        """Reserve addresses for a request, and return their block; None if no addresses are left.

        Also returns None if the request is larger than an address range.
        """
        pool, stream = request.pool, request.stream
        range_bytes = self.reservation_bytes(settings, pool, stream)
        if request.size > range_bytes:
            return None
        try:
            ptr = self._pages.reserve(range_bytes)
        except CudaError as error:
            _raise_unless_out_of_memory(error)
            return None
        stream_segments = self._stream_segments.get((pool, stream))
        if stream_segments is None:
            stream_segments = StreamSegments(pool.free_blocks(stream))
            self._stream_segments[pool, stream] = stream_segments
        page_bytes = _page_bytes(settings, pool)
        return ExpandableSegment(
            ptr, range_bytes, page_bytes, stream_segments, self._registry
        ).first_block

    def reservation_bytes(self, settings: Settings, pool: BlockPool, stream: int) -> int:
        """Return the size of a new address range."""
        reserve = dict(settings.expandable_segments_reserve_by_class).get(
            self._reserve_class_by_stream.get(stream, ""),
            settings.expandable_segments_reserve or Reserve(value=FULL_RESERVE),
        )
        page_bytes = _page_bytes(settings, pool)
        total_bytes = self._upstream.memory_info().total_bytes
        return -(-reserve.size_bytes(total_bytes) // page_bytes) * page_bytes

    def _map_pages(
        self, unmapped_block: Block, needed_bytes: int, stack: RawStack | None
    ) -> Block | None:
        """Map the first pages of an unmapped block, and return a free block; None if no memory is left."""
        segment = cast("ExpandableSegment", unmapped_block.expandable_segment)
        ptr, page_bytes = unmapped_block.ptr, segment.page_bytes
        page_count = -(-needed_bytes // page_bytes)
        try:
            self._pages.map(ptr, page_bytes, page_count)
        except CudaError as error:
            _raise_unless_out_of_memory(error)
            return None
        if ptr == segment.ptr and segment.stack is None:
            segment.stack = stack
        block = segment.map(unmapped_block, page_count * page_bytes)
        self._record_mapped(ptr, page_count * page_bytes, block, stack)
        return block

    def release_blocks(self, pool: BlockPool, stack: RawStack | None) -> None:
        """Release every unused page of a pool, and then every segment without mapped pages.

        Waits for the streams of the pages. On CudaError the remaining pages stay mapped.
        """
        stream_groups = sorted(
            (stream, stream_segments)
            for (group_pool, stream), stream_segments in self._stream_segments.items()
            if group_pool is pool
        )
        for _, stream_segments in stream_groups:
            for block in list(stream_segments.free_blocks):
                segment = block.expandable_segment
                if segment is None:
                    continue
                begin, end = segment.pages_within(block)
                if begin == end:
                    continue
                # Neither cuMemUnmap nor cuMemRelease waits for work that uses the memory.
                self._pages.sync_stream(block.stream)
                self._pages.unmap(begin, end - begin)
                event_stack = stack or (segment.stack if block.ptr == segment.ptr else None)
                segment.unmap(block, begin, end)
                self._record_mapped(begin, begin - end, block, event_stack)
        for stream, stream_segments in stream_groups:
            for segment in [segment for segment in stream_segments.segments if not segment.ranges]:
                self._pages.unreserve(segment.ptr, segment.size)
                segment.remove_from_stream()
            if not stream_segments.segments:
                del self._stream_segments[pool, stream]


def require_paged(upstream: object, large_page_bytes: int) -> PagedUpstream:
    """Return ``upstream`` unchanged; type checkers then know that it has virtual memory.

    Raises Unsupported if the upstream has no virtual memory, or no pages of the sizes of small and large
    segments; CudaError if the driver refuses.
    """
    if not isinstance(upstream, PagedUpstream):
        raise Unsupported(
            "expandable segments need virtual memory, which this upstream does not have",
            hint="set expandable_segments:False, or take the memory of a Gpu",
        )
    granularity = upstream.pages.granularity()
    for page_bytes in (SMALL_SEGMENT, large_page_bytes):
        if page_bytes % granularity:
            raise Unsupported(
                f"expandable segments cannot have pages of {format_bytes(page_bytes)} on this device",
                hint=f"large_segment_size_mb: a multiple of {format_bytes(granularity)}",
            )
    return upstream


def best_fit(free_blocks: FreeBlocks, size: int, *, uses_expandable: bool) -> Block | None:
    """Return the best fit among all free blocks; without ``uses_expandable``, among blocks of plain segments.

    Blocks are tried by size and address. An expandable block is skipped if the next block can grow to a
    smaller size, as in PyTorch.
    """
    candidates = iter(free_blocks.blocks_from_size(size))
    if not uses_expandable:
        return next((block for block in candidates if block.expandable_segment is None), None)
    best_block = next(candidates, None)
    for block in candidates if best_block is not None else ():
        assert best_block is not None  # noqa: S101
        if best_block.expandable_segment is None or expandable_size(block) >= expandable_size(
            best_block
        ):
            break
        best_block = block
    return best_block


def _page_bytes(settings: Settings, pool: BlockPool) -> int:
    return SMALL_SEGMENT if pool.is_small else settings.large_segment_size_bytes


def _raise_unless_out_of_memory(error: CudaError) -> None:
    if error.code != OUT_OF_MEMORY:
        raise error
