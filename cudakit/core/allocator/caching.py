"""The caching allocator of one device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from cudakit.core.allocator import oom, release
from cudakit.core.allocator.address_space import WithAddresses
from cudakit.core.allocator.block import Block, Trail
from cudakit.core.allocator.cache import OUT_OF_MEMORY, Request
from cudakit.core.allocator.checkpointed import Checkpointed
from cudakit.core.allocator.front_cache import FrontCache
from cudakit.core.allocator.hot_path import Alloc, Free, HotPath
from cudakit.core.allocator.invalid import InvalidPointer
from cudakit.core.allocator.mempool import HeldPool
from cudakit.core.allocator.oom_report import report_of
from cudakit.core.allocator.peers import WithPeers
from cudakit.core.allocator.pooled import id_of
from cudakit.core.allocator.pools import Pool, PoolId
from cudakit.core.allocator.sharing import Sharing
from cudakit.core.allocator.tracing import OOM, Level, gather
from cudakit.core.allocator.trimmed import Trimmed
from cudakit.core.allocator.upstream import Upstream, stream_number
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.oom_facts import OomReport
from cudakit.torch_rules.settings import Recorded, Settings
from cudakit.torch_rules.sizes import (
    UNLIMITED,
    segment_size,
)


class CachingAllocator(Checkpointed, Trimmed, WithAddresses, WithPeers, Sharing, HotPath):
    """Hands out memory of one device in the order of streams, and keeps what is freed for the next request.

    The same operations give the same blocks, statistics and snapshots as PyTorch's allocator. Streams are
    handles; 0 is the default stream. May be used from any thread, and ``free`` from finalizers too.

    ``search_again`` looks for a free block once more before memory is said to be out, which PyTorch does not.

    ``front_cache`` keeps up to so many freed blocks of each size and stream ready for a request of exactly as
    many bytes, which is much faster then. Statistics stay right, but blocks have other addresses than
    PyTorch's, and those that are kept are not merged: that shows in ``inactive_split``, and may show in what
    is reserved. It rests while history is recorded, monitors watch or blocks wait for other streams, and is
    flushed before a snapshot, before statistics are read, and before memory is taken from the device.
    Raises InputError for a number below 0, Unsupported where Python has no global lock.
    """

    def __init__(
        self,
        upstream: Upstream,
        settings: Settings | None = None,
        *,
        device: int = 0,
        search_again: bool = True,
        front_cache: int = 0,
    ) -> None:
        super().__init__(upstream, settings or Settings(), device)
        self._search_again = search_again
        self._uncached: dict[int, int] = {}
        self._helpers: list[Callable[[], bool]] = []
        self._front = FrontCache(self._cache, front_cache, self._unusual)
        self.alloc: Alloc
        self.free: Free
        self.alloc, self.free = self._make_calls()
        self.configure(self._cache.settings)

    # Memory.

    def record_use(self, ptr: int, stream: int) -> None:
        """Say that another stream uses an allocation: it is reused when that stream is done with it.

        That is PyTorch's record_stream: what counts is all work of the stream up to the free. Raises
        InvalidPointer where nothing is allocated.
        """
        with self._inside(flushes=False):
            block = self._live.get(ptr)
            if block is None:
                raise InvalidPointer(f"nothing is allocated at {ptr:#x}: {self._reason_for(ptr)}")
            self._uses.add(block, stream_number(stream))

    def empty_cache(self, pool: HeldPool | PoolId | None = None) -> None:
        """Wait for what is freed but in use, and give back every segment of which nothing is used.

        Of private pools those only that nobody holds any more; with ``pool`` that one only. Does nothing
        during a capture. Raises CudaError where the driver refuses, PoolError for a pool that never was.
        """
        stack = gather() if self._level >= Level.ALL else None
        with self._with_pools(flushes=True) as pools:
            if self._uses.captures:
                return
            if pool is None:
                release.empty_cache(self._cache, self._uses, stack)
            elif pools.is_known(id_of(pool)):
                release.empty_pool(self._cache, self._uses, pools.find(id_of(pool)), stack)

    def close(self) -> None:
        """Give back what is cached, and events. What is still allocated stays so."""
        self.empty_cache()
        with self._inside():
            self._uses.close()

    # How it works.

    @property
    def settings(self) -> Settings:
        """The settings that are followed."""
        return self._cache.settings

    def configure(self, settings: Settings) -> None:
        """Follow other settings from now on."""
        limit = UNLIMITED
        if settings.memory_fraction < 1:
            limit = int(settings.memory_fraction * self._upstream.memory_info().total_bytes)
        with self._inside():
            self._cache.configure(settings, limit)
            if self._cache.expandable is not None:
                self._cache.expandable.classes = self._reserve_classes
            unlocks = settings.release_lock_on_cudamalloc
            self._cache.malloc = self._malloc_unlocked if unlocks else self._upstream.malloc

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit what may be reserved to a share of the device's memory; 1.0 is no limit.

        Raises TypeError for what is no float, ValueError outside of 0 to 1
        (torch.cuda.set_per_process_memory_fraction).
        """
        if not isinstance(fraction, float):
            raise TypeError(
                f"a memory fraction is a float, not {type(fraction).__name__}: {fraction!r}"
            )
        if not 0 <= fraction <= 1:
            raise ValueError(f"a memory fraction lies from 0.0 to 1.0: {fraction!r}")
        self.configure(replace(self.settings, memory_fraction=fraction))

    def set_garbage_collection(self, threshold: float) -> None:
        """Give old segments back from a share of the limit on, before more is reserved; 0.0 is never.

        Does something only beside a memory fraction below 1. Raises SettingRefused for what is no float from
        0.0 to below 1.0 (garbage_collection_threshold).
        """
        self.configure(replace(self.settings, garbage_collection_threshold=threshold))

    def enable_caching(self, *, enabled: bool) -> None:
        """Cache what is freed, or ask the driver each time and count nothing.

        A request of a capture raises UsageError then.
        """
        self._caches = enabled
        self._let("uncached", on=not enabled)

    def on_shortage(self, helper: Callable[[], bool]) -> None:
        """Let a function free memory when no free block serves a request; it returns whether it did."""
        self._helpers.append(helper)

    # Inside: the guard is held.

    def _own_settings(self) -> Mapping[str, Recorded]:
        return {**super()._own_settings(), "cudakit_search_again": self._search_again}

    def _obtain(
        self, pool: Pool, size: int, requested: int, stream: int, stack: Trail | None
    ) -> Block:
        cache = self._cache
        if self._front.flush() or self._helped():
            block = cache.find(pool, size, stream)
            if block is not None:
                return block
        segment_bytes = segment_size(size, cache.settings.large_segment_size_bytes)
        request = Request(size, requested, segment_bytes, stream, pool, stack)
        if cache.collects:
            release.collect_garbage(cache, stack)
        rejected = oom.is_rejected(cache, request)
        if not rejected:
            again, capturing = self._search_again, bool(self._uses.captures)
            block = oom.obtain(cache, self._uses, request, capturing=capturing, search_again=again)
            if block is not None:
                return block
        raise self._out_of_memory(self._report(request, rejected=rejected))

    def _report(self, request: Request, *, rejected: bool) -> OomReport:
        cache = self._cache
        info = self._upstream.memory_info()
        if rejected:
            cache.statistics.num_oom_rejections += 1
        else:
            cache.statistics.num_ooms += 1
        if cache.recorder is not None:
            cache.recorder.record(
                OOM, info.free_bytes, request.size, request.stream, request.stack, request.pool.id
            )
        return report_of(
            cache,
            request,
            self._device,
            info,
            awaited=self._uses.awaited(),
            capturing=bool(self._uses.captures),
            rejected=rejected,
        )

    # Outside of the guard.

    def _helped(self) -> bool:
        if not self._helpers:
            return False
        self._guard.leave()
        try:
            freed = [helper() for helper in self._helpers]  # all of them, whatever the first says
            return any(freed)
        finally:
            self._guard.enter()
            self._take_late()
            self._front.flush()  # the helpers may have freed into it

    def _malloc_unlocked(self, size_bytes: int, stream: int) -> int:
        self._guard.leave()
        try:
            return self._upstream.malloc(size_bytes, stream)
        finally:
            self._guard.enter()

    def _alloc_uncached(self, size_bytes: int, stream: int) -> Ptr:
        if self._uses.captures:
            self._refuse_captured(stream)
        try:
            ptr = self._upstream.malloc(size_bytes, stream)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise oom.OutOfMemory(f"Not cached: {error.message}", hint=error.hint) from error
        self._uncached[ptr] = size_bytes
        return Ptr(ptr)

    def _refuse_captured(self, stream: int) -> None:
        """Raise UsageError for a request of a capture: no graph would keep memory that is not cached."""
        with self._inside(flushes=False):
            captured = self._uses.captures and self._route(stream) is not None
        if captured:
            raise UsageError(
                f"nothing is cached, and stream {stream:#x} is captured: no graph would keep the memory",
                hint="enable_caching(enabled=True) before the capture",
            )

    def _free_unusual(self, ptr: int) -> None:
        if ptr == 0:
            return
        if self._uncached.pop(ptr, None) is not None:
            self._upstream.free(ptr)
            return
        raise self._refuse_free(ptr, gather(2) if self._level else None)
