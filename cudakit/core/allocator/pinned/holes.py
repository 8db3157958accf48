"""Free blocks that are divided and merged, so that no byte is kept by what does not use it."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import TypeAlias

from cudakit.core.allocator.pinned.blocks import HostBlock, HostSegment, Kind
from cudakit.torch_rules.settings import Settings
from cudakit.torch_rules.sizes import (
    MIB,
    MOST_SMALL,
    SEGMENT_STEP,
    SMALL_SEGMENT,
    SMALLEST_BLOCK,
)

_Row: TypeAlias = list[tuple[int, int, HostBlock]]  # by size and address


class Holes:
    """Blocks of the size that was asked for, cut from the smallest hole that is large enough.

    Requests of at most 1 MiB have segments of their own, so that none keeps a large one from being reused
    (PyTorch's issue 95823: 10 KiB that keep 4 GiB). The rules are those for memory of the device; the
    thresholds of rounding mean nothing here.
    """

    divides = True

    def __init__(self) -> None:
        self._rows: dict[Kind, _Row] = {"small": [], "large": [], "reserve": []}

    def configure(self, settings: Settings) -> None:
        pass

    def rounded(self, size_bytes: int) -> int:
        return -(-size_bytes // SMALLEST_BLOCK) * SMALLEST_BLOCK

    def segment(self, size: int) -> tuple[int, Kind]:
        if size <= MOST_SMALL:
            return SMALL_SEGMENT, "small"
        return -(-size // SEGMENT_STEP) * SEGMENT_STEP, "large"

    def take(self, size: int) -> HostBlock | None:
        own: Kind = "small" if size <= MOST_SMALL else "large"
        for row in (self._rows[own], self._rows["reserve"]):
            index = bisect_left(row, (size,))
            if index < len(row):
                block = row.pop(index)[2]
                block.free = False
                return block
        return None

    def set_aside(self, segment: HostSegment | None) -> None:
        if segment is not None:
            self.put(HostBlock(segment.ptr, segment.size, segment))

    def carve(self, size: int) -> None:  # noqa: ARG002
        return None

    def cut(self, block: HostBlock, size: int) -> None:
        rest_bytes = block.size - size
        if rest_bytes <= (MIB if block.segment.kind == "large" else 0):
            return
        rest = HostBlock(block.ptr + size, rest_bytes, block.segment)
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next = rest
        block.size = size
        self.put(rest)

    def put(self, block: HostBlock) -> HostBlock:
        if block.next is not None and block.next.free:
            self.discard(block.next)
            _merge(block, block.next)
        if block.previous is not None and block.previous.free:
            before = block.previous
            self.discard(before)
            _merge(before, block)
            block = before
        block.free = True
        insort(self._rows[block.segment.kind], (block.size, block.ptr, block))
        return block

    def discard(self, block: HostBlock) -> None:
        block.free = False
        row = self._rows[block.segment.kind]
        del row[bisect_left(row, (block.size, block.ptr))]

    def __iter__(self) -> Iterator[HostBlock]:
        for row in self._rows.values():
            for _, _, block in row:
                yield block


def _merge(block: HostBlock, after: HostBlock) -> None:
    block.size += after.size
    block.next = after.next
    if after.next is not None:
        after.next.previous = block
