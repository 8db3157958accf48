"""A simple, slow model of the allocator: linear searches, and a counter for each statistic.

The model behaves like PyTorch's allocator, and shares no code with cudakit's allocator.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from allocator.device import MIB
from allocator.expandable_model import (
    DEFAULT,
    FREE,
    GAP,
    LIVE,
    PENDING,
    ExpandableModel,
    ModelBlock,
    ModelSegment,
    PoolId,
)
from allocator.virtual_device import VirtualDevice

from cudakit.errors import CudaError

METRICS = (
    "allocation",
    "allocated_bytes",
    "segment",
    "reserved_bytes",
    "active",
    "active_bytes",
    "inactive_split",
    "inactive_split_bytes",
    "requested_bytes",
)
SCALARS = [
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
]


class Full(Exception):
    """Out of memory."""


class Model(ExpandableModel):
    def __init__(
        self,
        device: VirtualDevice,
        *,
        max_split: float = math.inf,
        limit: float = math.inf,
        gc_threshold: float = 0.0,
        uses_expandable: bool = False,
    ) -> None:
        self.device, self.max_split, self.limit = device, max_split, limit
        self.gc_threshold, self.uses_expandable = gc_threshold, uses_expandable
        self.segments: list[ModelSegment] = []
        self.queues: dict[int, list[tuple[int, ModelSegment, ModelBlock]]] = {}
        self.pool = DEFAULT
        self.searches: Counter[tuple[PoolId, bool]] = Counter()
        self.numbers = dict.fromkeys(SCALARS, 0)
        self.numbers["max_split_size"] = -1 if max_split == math.inf else int(max_split)
        for metric in METRICS:
            for kind in ("all", "small_pool", "large_pool"):
                self._zero(f"{metric}.{kind}")
        for metric in ("oversize_allocations", "oversize_segments"):
            self._zero(metric)

    # Operations

    def alloc(self, requested: int, stream: int) -> int:
        self._process()
        size = max(-(-requested // 512), 1) * 512
        small = size <= MIB
        candidates = self._find(size, small, stream) or self._obtain(size, small, stream)
        if candidates is None:
            self.numbers["num_ooms"] += 1
            raise Full
        segment, block = candidates
        was_split, rest_bytes = len(segment.blocks) > 1, block.size - size
        if self._splits(segment, size, rest_bytes):
            remainder = ModelBlock(block.address + size, rest_bytes, requested=block.requested)
            remainder.freed_at = self.searches[segment.pool, small]
            segment.blocks.insert(segment.blocks.index(block) + 1, remainder)
            block.size = size
            self._split_changed(segment, *((0, -size) if was_split else (1, rest_bytes)))
        elif was_split:
            self._split_changed(segment, -1, -block.size)
        block.state, block.requested = LIVE, requested
        for metric in ("allocation", "active"):
            self._change(metric, segment.kind, 1)
        for metric in ("allocated_bytes", "active_bytes"):
            self._change(metric, segment.kind, block.size)
        self._change("requested_bytes", segment.kind, requested)
        if block.size >= self.max_split:
            self._count("oversize_allocations", 1)
        return block.address

    def use(self, address: int, stream: int) -> None:
        segment, block = self.find_block(address)
        if stream != segment.stream and stream not in block.uses:
            block.uses.append(stream)

    def free(self, address: int) -> None:
        segment, block = self.find_block(address)
        block.state = PENDING
        self._change("allocation", segment.kind, -1)
        self._change("allocated_bytes", segment.kind, -block.size)
        if block.size >= self.max_split:
            self._count("oversize_allocations", -1)
        self._wait(segment, block)

    def empty_cache(self) -> None:
        self.numbers["num_sync_all_streams"] += 1
        for stream in list(self.queues):
            self.device.finish(stream)
        self._process()
        self._give_back((False, True))

    def reset_peaks(self) -> None:
        for name in self.numbers:
            if name.endswith(".peak"):
                self.numbers[name] = self.numbers[name.replace(".peak", ".current")]

    def reset_sums(self) -> None:
        for name in self.numbers:
            if name.endswith((".allocated", ".freed")) or name in SCALARS:
                self.numbers[name] = 0

    # State

    def layout(self) -> list[Any]:
        return [
            (
                blocks[0].address,
                segment.stream,
                segment.kind,
                segment.page > 0,
                segment.pool,
                [(p.address, p.size, p.state, p.requested) for p in blocks],
            )
            for segment in sorted(self.segments, key=lambda segment: segment.address)
            for gap, candidates in groupby(segment.blocks, key=lambda block: block.state == GAP)
            if not gap and (blocks := list(candidates))
        ]

    # Implementation

    def _wait(self, segment: ModelSegment, block: ModelBlock) -> None:
        for stream in block.uses:
            operation_count = self.device.recorded[stream] = self.device.recorded.get(stream, 0) + 1
            self.queues.setdefault(stream, []).append((operation_count, segment, block))
        block.waits = len(block.uses)
        block.uses = []
        if not block.waits:
            self._complete(segment, block)

    def _give_back(self, kinds: tuple[bool, bool]) -> None:
        for small in kinds:
            for segment in self._free_segments(small):
                self._release(segment)
            self._unmap_all(small)

    def _free_blocks(self, small: bool) -> list[tuple[ModelSegment, ModelBlock]]:
        candidates = [
            (segment, block)
            for segment in self.segments
            if segment.small == small and segment.pool == self.pool
            for block in segment.blocks
            if block.state == FREE
        ]
        return sorted(candidates, key=lambda at: (at[0].stream, at[1].size, at[1].address))

    def _free_segments(self, small: bool) -> list[ModelSegment]:
        return [
            segment
            for segment, _ in self._free_blocks(small)
            if not segment.page and len(segment.blocks) == 1
        ]

    def _find(self, size: int, small: bool, stream: int) -> tuple[ModelSegment, ModelBlock] | None:
        if self.gc_threshold and self.limit < math.inf:
            self.searches[self.pool, small] += 1
        candidates = [
            (segment, block)
            for segment, block in self._free_blocks(small)
            if segment.stream == stream
            and block.size >= size
            and (self.uses_expandable or not segment.page)
        ]
        while (
            len(candidates) > 1
            and candidates[0][0].page
            and self._extent(*candidates[1]) < self._extent(*candidates[0])
        ):
            del candidates[0]
        for segment, block in candidates[:1]:
            if size < self.max_split <= block.size:
                return None
            if size >= self.max_split and block.size >= size + 20 * MIB:
                return None
            return segment, block
        return None

    def _extent(self, segment: ModelSegment, block: ModelBlock) -> int:
        next_blocks = segment.blocks[segment.blocks.index(block) + 1 :][:1]
        return block.size + sum(adjacent.size for adjacent in next_blocks if adjacent.state == GAP)

    def _splits(self, segment: ModelSegment, size: int, rest: int) -> bool:
        if segment.small or self.uses_expandable:
            return rest >= 512
        return size < self.max_split and rest > MIB

    def _obtain(
        self, size: int, small: bool, stream: int
    ) -> tuple[ModelSegment, ModelBlock] | None:
        if self.gc_threshold and self.limit < math.inf:
            self._collect()
        return (
            self._reserve(size, small, stream)
            or self._borrow(size, small, stream)
            or (self._release_oversize(size, small, stream) and self._reserve(size, small, stream))
            or self._retry(size, small, stream)
            or None
        )

    def _borrow(
        self,
        size: int,  # noqa: ARG002
        small: bool,  # noqa: ARG002
        stream: int,  # noqa: ARG002
    ) -> tuple[ModelSegment, ModelBlock] | None:
        return None

    def _retry(self, size: int, small: bool, stream: int) -> tuple[ModelSegment, ModelBlock] | None:
        self.empty_cache()
        self.numbers["num_alloc_retries"] += 1
        return self._reserve(size, small, stream) or self._find(size, small, stream)

    def _reserve(
        self, size: int, small: bool, stream: int
    ) -> tuple[ModelSegment, ModelBlock] | None:
        if small:
            segment_bytes = 2 * MIB
        elif size < 10 * MIB:
            segment_bytes = 20 * MIB
        else:
            segment_bytes = -(-size // (2 * MIB)) * 2 * MIB
        if sum(segment.mapped for segment in self.segments) + segment_bytes > self.limit:
            return None
        if self.uses_expandable:
            return self._expand(size, small, stream)
        try:
            address = self.device.malloc(segment_bytes, stream)
        except CudaError:
            return None
        block = ModelBlock(address, segment_bytes)
        segment = ModelSegment(address, segment_bytes, stream, small, [block], pool=self.pool)
        self.segments.append(segment)
        self.numbers["num_device_alloc"] += 1
        self._change("segment", segment.kind, 1)
        self._change("reserved_bytes", segment.kind, segment_bytes)
        if segment_bytes >= self.max_split:
            self._count("oversize_segments", 1)
        return segment, block

    def _release(self, segment: ModelSegment) -> None:
        self.device.free(segment.address)
        self.segments.remove(segment)
        self.numbers["num_device_free"] += 1
        self._change("segment", segment.kind, -1)
        self._change("reserved_bytes", segment.kind, -segment.size)
        if segment.size >= self.max_split:
            self._count("oversize_segments", -1)

    def _release_oversize(self, size: int, small: bool, stream: int) -> bool:
        if self.max_split == math.inf:
            return False
        key = max(size, self.max_split)
        large = [
            (segment, block)
            for segment, block in self._free_blocks(small)
            if segment.stream == stream
            and block.size >= key
            and (segment.page or len(segment.blocks) == 1)
        ]
        if large and not large[0][0].page:
            self._release(large[0][0])
            return True
        released = 0
        oversize_segments = [
            segment for segment in self._free_segments(small) if segment.stream == stream
        ]
        for segment in [segment for segment in reversed(oversize_segments) if segment.size < key]:
            if segment.size >= self.max_split and released < key:
                self._release(segment)
                released += segment.size
        return released >= key

    def _collect(self) -> None:
        reserved = sum(segment.mapped for segment in self.segments)
        target = reserved - int(self.gc_threshold * self.limit)
        while target > 0 and (free_segments := self._free_segments(False)):
            ages = [
                self.searches[DEFAULT, False] - segment.blocks[0].freed_at
                for segment in free_segments
            ]
            mean = sum(ages) / len(ages)
            for segment, age in zip(free_segments, ages, strict=True):
                if age >= mean:
                    target -= segment.size
                    self._release(segment)

    def _process(self) -> None:
        for stream, queue in self.queues.items():
            while queue and queue[0][0] <= self.device.reached.get(stream, 0):
                _, segment, block = queue.pop(0)
                self._reached(segment, block)
        self.queues = {stream: queue for stream, queue in self.queues.items() if queue}

    def _reached(self, segment: ModelSegment, block: ModelBlock) -> None:
        block.waits -= 1
        if not block.waits:
            self._complete(segment, block)

    def _complete(self, segment: ModelSegment, block: ModelBlock) -> None:
        self._change("active", segment.kind, -1)
        self._change("active_bytes", segment.kind, -block.size)
        self._change("requested_bytes", segment.kind, -block.requested)
        index, count, size = segment.blocks.index(block), 0, 0
        for adjacent in self._adjacent(segment, index):
            count, size = count - 1, size - adjacent.size
            block.address = min(block.address, adjacent.address)
            block.size += adjacent.size
            segment.blocks.remove(adjacent)
        block.state, block.freed_at = FREE, self.searches[segment.pool, segment.small]
        if len(segment.blocks) > 1:
            count, size = count + 1, size + block.size
        self._split_changed(segment, count, size)

    def _split_changed(self, segment: ModelSegment, count: int, size: int) -> None:
        if not segment.page:
            self._change("inactive_split", segment.kind, count)
            self._change("inactive_split_bytes", segment.kind, size)

    def _adjacent(self, segment: ModelSegment, index: int) -> Iterator[ModelBlock]:
        adjacent_blocks = [
            segment.blocks[i] for i in (index - 1, index + 1) if 0 <= i < len(segment.blocks)
        ]
        return iter([block for block in adjacent_blocks if block.state == FREE])

    def find_block(self, address: int) -> tuple[ModelSegment, ModelBlock]:
        for segment in self.segments:
            for block in segment.blocks:
                if block.address == address and block.state == LIVE:
                    return segment, block
        raise KeyError(address)

    def _zero(self, metric: str) -> None:
        for value in ("current", "peak", "allocated", "freed"):
            self.numbers[f"{metric}.{value}"] = 0

    def _change(self, metric: str, kind: str, amount: int) -> None:
        self._count(f"{metric}.{kind}", amount)
        self._count(f"{metric}.all", amount)

    def _count(self, metric: str, amount: int) -> None:
        now = self.numbers[f"{metric}.current"] = self.numbers[f"{metric}.current"] + amount
        self.numbers[f"{metric}.peak"] = max(self.numbers[f"{metric}.peak"], now)
        self.numbers[f"{metric}.{'allocated' if amount > 0 else 'freed'}"] += abs(amount)
