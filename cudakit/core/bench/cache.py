"""What the L2 cache holds when an execution begins: nothing of its data, or all that it can."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

from cudakit.core.bench.method import Cache
from cudakit.gpu.api import Gpu, Ptr, Stream
from cudakit.gpu.api.facts import Field

# NVIDIA CUTLASS, "GEMM performance measurement guidelines": the buffers in turn exceed twice the cache.
_TIMES_CACHE = 2
# Each is an allocation, and a node of a graph that takes them in turn.
MOST_SETS = 1000
_SHARE_OF_FREE = 0.9
# Where the device does not say. Larger than that of most devices, so that cold is cold.
_UNKNOWN_L2_BYTES = 128 << 20


def l2_size_bytes(fields: Mapping[str, Field]) -> int:
    """Return the size of the L2 cache by what is known of a device."""
    known = fields.get("l2_cache_size_bytes")
    return known if isinstance(known, int) and known > 0 else _UNKNOWN_L2_BYTES


def buffer_sets(cache: Cache, *, l2_bytes: int, footprint_bytes: int, free_bytes: int) -> int:
    """Say how many buffer sets to take in turn, of which there is one, and memory for others is free.

    With ``rotate`` enough to have twice the cache overwritten before a set comes back. Fewer, where they
    would not fit, or would be too many to handle.
    """
    if cache != "rotate" or footprint_bytes <= 0:
        return 1
    wanted = max(2, ceil(_TIMES_CACHE * l2_bytes / footprint_bytes) + 1)
    fitting = 1 + int(_SHARE_OF_FREE * free_bytes) // footprint_bytes
    return min(wanted, fitting, MOST_SETS)


def is_cold(sets: int, *, l2_bytes: int, footprint_bytes: int) -> bool:
    """Say whether a set that comes back finds twice the cache overwritten since."""
    return max(sets - 1, int(sets == 1)) * footprint_bytes >= _TIMES_CACHE * l2_bytes


class Flush:
    """Overwrites the cache."""

    def __init__(self, gpu: Gpu, l2_bytes: int) -> None:
        self._gpu = gpu
        self._size_bytes = _TIMES_CACHE * l2_bytes
        self._memory: Ptr | None = None

    def __call__(self, stream: Stream) -> None:
        """Enqueue a write of twice its size."""
        if self._memory is None:
            self._memory = self._gpu.malloc(self._size_bytes)
        self._gpu.fill(self._memory, 0, self._size_bytes, stream)

    def close(self) -> None:
        """Give the memory back."""
        if self._memory is not None:
            self._gpu.free(self._memory)
            self._memory = None
