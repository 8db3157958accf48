"""Free blocks by powers of two, as PyTorch keeps them. Source: aten/src/ATen/core/CachingHostAllocator.h."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from cudakit.core.allocator.pinned.blocks import HostBlock, HostSegment, Kind
from cudakit.torch_rules.settings import Settings
from cudakit.torch_rules.sizes import UNLIMITED

# Of what is not rounded to a power of two (CachingHostAllocator.cpp of PyTorch 2.13, kHostAlignment).
ALIGNMENT = 512


class Buckets:
    """Blocks of a power of two, the one freed last first; none is ever divided.

    What is larger than ``pinned_max_round_threshold_mb`` or ``pinned_max_cached_size_mb`` is a multiple of
    512 bytes instead (allocate), and any block of the same power of two that is large enough serves it
    (get_free_block, as of PyTorch's pull request 192722).
    """

    divides = False

    def __init__(self) -> None:
        self._buckets: defaultdict[int, list[HostBlock]] = defaultdict(list)
        self._most_rounded = UNLIMITED
        self._reserve: HostSegment | None = None
        self._reserve_used = 0

    def configure(self, settings: Settings) -> None:
        limits = settings.pinned_max_round_threshold_bytes, settings.pinned_max_cached_size_bytes
        self._most_rounded = min((n for n in limits if n is not None), default=UNLIMITED)

    def rounded(self, size_bytes: int) -> int:
        if size_bytes > self._most_rounded:
            return -(-size_bytes // ALIGNMENT) * ALIGNMENT
        return 1 << bucket_of(size_bytes)

    def segment(self, size: int) -> tuple[int, Kind]:
        return size, "large"

    def take(self, size: int) -> HostBlock | None:
        row = self._buckets[bucket_of(size)]
        for index in range(len(row) - 1, -1, -1):
            if row[index].size >= size:
                block = row.pop(index)
                block.free = False
                return block
        return None

    def set_aside(self, segment: HostSegment | None) -> None:
        self._reserve, self._reserve_used = segment, 0

    def carve(self, size: int) -> HostBlock | None:
        """Make a block of what was never used of the reserve, which is not used a second time."""
        reserve, begin = self._reserve, self._reserve_used
        if reserve is None or begin + size > reserve.size:
            return None
        self._reserve_used = begin + -(-size // ALIGNMENT) * ALIGNMENT
        ptr = reserve.ptr + begin
        return HostBlock(ptr, size, HostSegment(ptr, size, "reserve"))

    def cut(self, block: HostBlock, size: int) -> None:
        pass

    def put(self, block: HostBlock) -> HostBlock:
        block.free = True
        self._buckets[bucket_of(block.size)].append(block)
        return block

    def discard(self, block: HostBlock) -> None:
        block.free = False
        self._buckets[bucket_of(block.size)].remove(block)

    def __iter__(self) -> Iterator[HostBlock]:
        for number in sorted(self._buckets):
            yield from self._buckets[number]


def bucket_of(size: int) -> int:
    """Return the exponent of the least power of two that is not below a size."""
    return (size - 1).bit_length()
