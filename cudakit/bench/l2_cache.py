"""The L2 state at the start of an execution: cold or hot."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import ceil

from cudakit.bench.method import Cache
from cudakit.bench.roofline import Work
from cudakit.gpu.api import Memory, Ptr, Stream
from cudakit.gpu.api.facts import Field
from cudakit.units import Unavailable

# Rotated buffers are larger than twice the cache (NVIDIA CUTLASS, "GEMM performance measurement guidelines").
_CACHE_MULTIPLE = 2
# Maximum number of buffer sets: each set needs an allocation, and a node in a graph.
MAX_SETS = 1000
# Reason why a case has no peak.
IN_CACHE = Unavailable(
    "some or all data stays in the L2 cache, and datasheets state no L2 bandwidth"
)
_SHARE_OF_FREE = 0.9  # Maximum share of the free memory for buffer sets.
# Assumed cache size if the device reports none: larger than most L2 caches, so that rotation evicts all data.
_UNKNOWN_L2_BYTES = 128 << 20


def l2_size_bytes(fields: Mapping[str, Field]) -> int:
    """Return the size of the L2 cache of a device."""
    reported_bytes = fields.get("l2_cache_size_bytes")
    return (
        reported_bytes
        if isinstance(reported_bytes, int) and reported_bytes > 0
        else _UNKNOWN_L2_BYTES
    )


def buffer_sets(cache: Cache, *, l2_bytes: int, footprint_bytes: int, free_bytes: int) -> int:
    """Return the number of buffer sets for an L2 state; one set is already allocated.

    With ``rotate``, all other sets together are twice as large as the cache, so that a set is evicted before
    it is reused. The number is lower if the free memory or MAX_SETS does not allow that many sets.
    """
    if cache != "rotate" or footprint_bytes <= 0:
        return 1
    needed_sets = max(2, ceil(_CACHE_MULTIPLE * l2_bytes / footprint_bytes) + 1)
    fitting_sets = 1 + int(_SHARE_OF_FREE * free_bytes) // footprint_bytes
    return min(needed_sets, fitting_sets, MAX_SETS)


def is_cold(set_count: int, *, l2_bytes: int, footprint_bytes: int) -> bool:
    """Return whether twice the cache size is written between two uses of a buffer set."""
    return max(set_count - 1, int(set_count == 1)) * footprint_bytes >= _CACHE_MULTIPLE * l2_bytes


def can_be_cold(cache: Cache, *, l2_bytes: int, footprint_bytes: int) -> bool:
    """Return whether an execution finds none of its data in the cache, with enough free memory."""
    set_count = MAX_SETS if cache == "rotate" else 1
    return cache == "flush" or is_cold(
        set_count, l2_bytes=l2_bytes, footprint_bytes=footprint_bytes
    )


def work_of_peak(
    work: Work, cache: Cache, *, l2_bytes: int, footprint_bytes: int
) -> Work | Unavailable:
    """Return the part of the work whose peak is known: data that stays in L2 is no traffic of the memory."""
    if can_be_cold(cache, l2_bytes=l2_bytes, footprint_bytes=footprint_bytes):
        return work
    return replace(work, bytes_moved=0) if work.operations else IN_CACHE


class Flush:
    """Overwrites the L2 cache, so that it holds no data of a workload."""

    def __init__(self, gpu: Memory, l2_bytes: int) -> None:
        self._gpu = gpu
        self._size_bytes = _CACHE_MULTIPLE * l2_bytes
        self._memory: Ptr | None = None

    def __call__(self, stream: Stream) -> None:
        """Enqueue a write of twice the cache size."""
        if self._memory is None:
            self._memory = self._gpu.malloc(self._size_bytes)
        self._gpu.fill(self._memory, 0, self._size_bytes, stream)

    def close(self) -> None:
        """Free the memory that the flush writes."""
        if self._memory is not None:
            self._gpu.free(self._memory)
            self._memory = None
