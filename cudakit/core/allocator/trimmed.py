"""A limit to what is cached, which PyTorch has not: it keeps what was ever reserved until memory is out."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from cudakit.core.allocator.block import Segment
from cudakit.core.allocator.cache import Cache
from cudakit.core.allocator.observed import Observed
from cudakit.core.allocator.pools import DEFAULT_POOL
from cudakit.errors import CudaError, UsageError
from cudakit.torch_rules.settings import Recorded


class Trimmed(Observed):
    """The allocator of one device, which may keep a cache of a certain size only."""

    _cache_limit: int | None = None

    def set_cache_limit(self, limit_bytes: int | None) -> None:
        """Keep at most so many free bytes from now on, as far as they are whole segments; None: all.

        What is beyond is given back right after the free that made it so, of segments the smallest that is
        large enough, or the largest. In captures nothing is; private pools and expandable segments stay as
        they are. To give memory back waits for the device. Raises UsageError for a negative limit.
        """
        if limit_bytes is not None and limit_bytes < 0:
            raise UsageError(
                f"a limit of {limit_bytes} bytes cannot be", hint="0 is no cache, None no limit"
            )
        with self._inside():
            self._cache_limit = limit_bytes
            if limit_bytes is None:
                self._unwatch(self._trim)
            else:
                self._watch(self._trim)

    def _trim(self) -> None:
        limit = self._cache_limit
        if limit is None or _cached(self._cache) <= limit or self._uses.captures:
            return
        if self._guard.try_enter():  # else whoever is inside does it when he leaves
            try:
                with suppress(CudaError):  # it stays cached, and the next free tries again
                    trim(self._cache, limit)
            finally:
                self._guard.leave()
                self._drain()

    def _own_settings(self) -> Mapping[str, Recorded]:
        limit = -1 if self._cache_limit is None else self._cache_limit
        return {**super()._own_settings(), "cudakit_cache_limit": limit}


def trim(cache: Cache, limit_bytes: int) -> None:
    """Give whole segments back until no more is cached than may be. Raises CudaError."""
    whole = sorted(filter(_is_free, cache.segments.values()), key=lambda segment: segment.size)
    while whole and (excess := _cached(cache) - limit_bytes) > 0:
        enough = (index for index, segment in enumerate(whole) if segment.size >= excess)
        cache.release(whole.pop(next(enough, len(whole) - 1)).first, None)


def _cached(cache: Cache) -> int:
    total = cache.statistics.total
    return total("reserved_bytes") - total("active_bytes")


def _is_free(segment: Segment) -> bool:
    first = segment.first
    plain = type(segment) is Segment and segment.pool.id == DEFAULT_POOL
    return plain and first.free and first.size == segment.size
