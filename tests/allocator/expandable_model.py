"""The blocks and segments of the model of the allocator, and the model of expandable segments."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import takewhile
from typing import TypeAlias

from allocator.device import MIB
from allocator.virtual_device import VirtualDevice

from cudakit.errors import CudaError

FREE, LIVE, PENDING = "inactive", "active_allocated", "active_pending_free"
GAP = "unmapped"
PoolId: TypeAlias = tuple[int, int]
DEFAULT: PoolId = (0, 0)


@dataclass(eq=False)
class ModelBlock:
    address: int
    size: int
    state: str = FREE
    requested: int = 0
    uses: list[int] = field(default_factory=list)
    captured: list[int] = field(
        default_factory=list
    )  # Streams that used the block only in a capture.
    waits: int = 0
    freed_at: int = 0


@dataclass(eq=False)
class ModelSegment:
    address: int
    size: int
    stream: int
    small: bool
    blocks: list[ModelBlock]
    page: int = 0  # The page size of an expandable segment, 0 for other segments.
    pool: PoolId = DEFAULT

    @property
    def kind(self) -> str:
        return "small_pool" if self.small else "large_pool"

    @property
    def mapped(self) -> int:
        return sum(block.size for block in self.blocks if block.state != GAP)


class ExpandableModel:
    """Expandable segments, whose address ranges consist of blocks and unmapped gaps."""

    device: VirtualDevice
    segments: list[ModelSegment]
    pool: PoolId  # The pool of the current operation.
    numbers: dict[str, int]

    def _expand(
        self, size: int, small: bool, stream: int
    ) -> tuple[ModelSegment, ModelBlock] | None:
        location = self._place(size, small, stream) or self._reserve_segment(size, small, stream)
        if location is None:
            return None
        segment, block = location
        while block.state == GAP or block.size < size:
            next_block = segment.blocks[segment.blocks.index(block) + (block.state != GAP)]
            missing_bytes = size if block.state == GAP else size - block.size
            try:
                block = self._map(segment, next_block, min(missing_bytes, next_block.size))
            except CudaError:
                return None
        return segment, block

    def _place(self, size: int, small: bool, stream: int) -> tuple[ModelSegment, ModelBlock] | None:
        matching_segments = [
            segment
            for segment in self.segments
            if segment.page
            and (segment.small, segment.stream, segment.pool) == (small, stream, self.pool)
        ]
        for segment in sorted(matching_segments, key=lambda segment: segment.address):
            for index, block in enumerate(segment.blocks):
                if block.state == GAP:
                    first = index - (index > 0 and segment.blocks[index - 1].state == FREE)
                    run = takewhile(lambda p: p.state in (FREE, GAP), segment.blocks[first:])
                    if sum(p.size for p in run) >= size:
                        return segment, segment.blocks[first]
        return None

    def _reserve_segment(
        self, size: int, small: bool, stream: int
    ) -> tuple[ModelSegment, ModelBlock] | None:
        page = 2 * MIB if small else 20 * MIB
        range_bytes = -(-self.device.capacity * 9 // 8 // page) * page
        if size > range_bytes:
            return None
        address = self.device.pages.reserve(range_bytes)
        gap = ModelBlock(address, range_bytes, GAP)
        self.segments.append(
            ModelSegment(address, range_bytes, stream, small, [gap], page, self.pool)
        )
        return self.segments[-1], gap

    def _map(self, segment: ModelSegment, gap: ModelBlock, missing_bytes: int) -> ModelBlock:
        count = -(-missing_bytes // segment.page)
        size = count * segment.page
        self.device.pages.map(gap.address, segment.page, count)
        self.numbers["num_device_alloc"] += 1
        self._change("reserved_bytes", segment.kind, size)
        block = ModelBlock(gap.address, size, FREE, gap.requested)
        rest_gap = ModelBlock(gap.address + size, gap.size - size, GAP)
        index = segment.blocks.index(gap)
        segment.blocks[index : index + 1] = [block, rest_gap] if rest_gap.size else [block]
        self._join(segment, block)
        return block

    def _unmap_all(self, small: bool) -> None:
        for segment, block in self._free_blocks(small):
            begin = -(-(block.address - segment.address) // (segment.page or 1)) * segment.page
            end = (
                (block.address - segment.address + block.size) // (segment.page or 1) * segment.page
            )
            if segment.page and begin < end:
                self._unmap(segment, block, segment.address + begin, segment.address + end)
        for segment in [segment for segment in self.segments if not segment.mapped]:
            if segment.small == small and segment.pool == self.pool:
                self.device.pages.unreserve(segment.address, segment.size)
                self.segments.remove(segment)

    def _unmap(self, segment: ModelSegment, block: ModelBlock, begin: int, end: int) -> None:
        self.device.pages.sync_stream(segment.stream)
        self.device.pages.unmap(begin, end - begin)
        self.numbers["num_device_free"] += 1
        self._change("reserved_bytes", segment.kind, begin - end)
        gap = ModelBlock(begin, end - begin, GAP, block.requested)
        block_below = ModelBlock(block.address, begin - block.address)
        block_above = ModelBlock(end, block.address + block.size - end)
        index = segment.blocks.index(block)
        segment.blocks[index : index + 1] = [p for p in (block_below, gap, block_above) if p.size]
        self._join(segment, gap)

    def _join(self, segment: ModelSegment, block: ModelBlock) -> None:
        """Merge a block with the adjacent blocks of the same state."""
        index = segment.blocks.index(block)
        for adjacent in [
            segment.blocks[i] for i in (index - 1, index + 1) if 0 <= i < len(segment.blocks)
        ]:
            if adjacent.state == block.state:
                block.address = min(block.address, adjacent.address)
                block.size += adjacent.size
                segment.blocks.remove(adjacent)

    def _free_blocks(self, small: bool) -> list[tuple[ModelSegment, ModelBlock]]:
        raise NotImplementedError

    def _change(self, metric: str, kind: str, amount: int) -> None:
        raise NotImplementedError
