"""The state of the L2 cache when an execution begins: cold or hot."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from cudakit.core.bench.method import Cache
from cudakit.gpu.api import Memory, Ptr, Stream
from cudakit.gpu.api.facts import Field

# NVIDIA CUTLASS, "GEMM performance measurement guidelines": the rotated buffers exceed twice the cache.
_TIMES_CACHE = 2
# Each set is an allocation, and a node of a graph that rotates them.
MOST_SETS = 1000
_SHARE_OF_FREE = 0.9
# Assumed if the device does not report a size. Larger than that of most devices, so that cold is cold.
_UNKNOWN_L2_BYTES = 128 << 20


def l2_size_bytes(fields: Mapping[str, Field]) -> int:
    """Return the size of the L2 cache from the facts of a device."""
    known = fields.get("l2_cache_size_bytes")
    return known if isinstance(known, int) and known > 0 else _UNKNOWN_L2_BYTES


def buffer_sets(cache: Cache, *, l2_bytes: int, footprint_bytes: int, free_bytes: int) -> int:
    """Return the number of buffer sets to rotate, given one that exists and the free memory for others.

    ``rotate`` takes enough sets to overwrite twice the cache before a set is reused; fewer if they would
    not fit, or would exceed MOST_SETS.
    """
    if cache != "rotate" or footprint_bytes <= 0:
        return 1
    wanted = max(2, ceil(_TIMES_CACHE * l2_bytes / footprint_bytes) + 1)
    fitting = 1 + int(_SHARE_OF_FREE * free_bytes) // footprint_bytes
    return min(wanted, fitting, MOST_SETS)


def is_cold(sets: int, *, l2_bytes: int, footprint_bytes: int) -> bool:
    """Return whether twice the cache is overwritten before a buffer set is reused."""
    return max(sets - 1, int(sets == 1)) * footprint_bytes >= _TIMES_CACHE * l2_bytes


class Flush:
    """Overwrites the L2 cache."""

    def __init__(self, gpu: Memory, l2_bytes: int) -> None:
        self._gpu = gpu
        self._size_bytes = _TIMES_CACHE * l2_bytes
        self._memory: Ptr | None = None

    def __call__(self, stream: Stream) -> None:
        """Enqueue a write of twice the size of the cache."""
        if self._memory is None:
            self._memory = self._gpu.malloc(self._size_bytes)
        self._gpu.fill(self._memory, 0, self._size_bytes, stream)

    def close(self) -> None:
        """Free the memory."""
        if self._memory is not None:
            self._gpu.free(self._memory)
            self._memory = None
