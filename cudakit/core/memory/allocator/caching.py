"""The caching allocator of one device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from operator import index

from cudakit.core.memory.allocator import oom, release
from cudakit.core.memory.allocator.block import Block, Trail
from cudakit.core.memory.allocator.cache import Request
from cudakit.core.memory.allocator.entrance import add_use
from cudakit.core.memory.allocator.invalid import InvalidPointer, reason_for
from cudakit.core.memory.allocator.observed import Observed
from cudakit.core.memory.allocator.oom import OutOfMemory
from cudakit.core.memory.allocator.oom_report import OomReport, report_of
from cudakit.core.memory.allocator.pools import Pool
from cudakit.core.memory.allocator.settings import Settings
from cudakit.core.memory.allocator.sizes import (
    MOST_SMALL,
    TOO_MANY_BYTES,
    UNLIMITED,
    rounded,
    segment_size,
)
from cudakit.core.memory.allocator.tracing import OOM, Level, gather
from cudakit.core.memory.allocator.upstream import Upstream, stream_number
from cudakit.gpu.api import PER_THREAD, Ptr


class CachingAllocator(Observed):
    """Hands out memory of one device in the order of streams, and keeps what is freed for the next request.

    The same operations give the same blocks, statistics and snapshots as PyTorch's allocator. Streams are
    handles; 0 is the default stream. May be used from any thread, and ``free`` from finalizers too.

    ``search_again`` looks for a free block once more before memory is said to be out, which PyTorch does not.
    """

    def __init__(
        self,
        upstream: Upstream,
        settings: Settings | None = None,
        *,
        device: int = 0,
        search_again: bool = True,
    ) -> None:
        super().__init__(upstream, settings or Settings(), device)
        self._search_again = search_again
        self._uncached: dict[int, int] = {}
        self._caches = True
        self._observers: list[Callable[[OomReport], object]] = []
        self._helpers: list[Callable[[], bool]] = []
        self.configure(self._cache.settings)

    # Memory.

    def alloc(self, size_bytes: int, stream: int = 0) -> Ptr:
        """Allocate for use in the order of a stream. No bytes are the address 0.

        Raises OutOfMemory, ValueError for a negative size, CudaError for whatever else the driver refuses.
        """
        if type(size_bytes) is not int or not 0 < size_bytes < TOO_MANY_BYTES:
            size_bytes = _checked_size(size_bytes)
            if size_bytes == 0:
                return Ptr(0)
        if 0 < stream <= PER_THREAD:
            stream = stream_number(stream)
        if not self._caches:
            return self._alloc_uncached(size_bytes, stream)
        stack = gather() if self._level else None
        cache, guard = self._cache, self._guard
        guard.lock.acquire()
        if guard.busy:
            guard.refuse()
        guard.busy = True
        try:
            if self._late:
                self._take_late()
            if self._uses.waiting and not self._captures:
                self._uses.process(stack)
            divisions = cache.divisions
            size = rounded(size_bytes, divisions) if divisions else size_bytes + 511 & -512
            pool = cache.default.small if size <= MOST_SMALL else cache.default.large
            block = cache.find(pool, size, stream)
            if block is None:
                block = self._obtain(pool, size, size_bytes, stream, stack)
            cache.hand_out(block, size, size_bytes, stack)
            self._live[block.ptr] = block
        finally:
            guard.busy = False
            guard.lock.release()
            if self._late:
                self._drain()
        return block.ptr

    def free(self, ptr: int, stream: int | None = None) -> None:
        """Free an allocation; another stream than its own is one that uses it until now.

        From within the allocator, or while another thread is there, it is freed a moment later. Raises
        InvalidPointer where nothing is allocated, CudaError where the use of other streams cannot be
        recorded; the memory is then kept until they are known to be done.
        """
        block = self._live.pop(ptr, None)
        if block is None:
            self._free_unusual(ptr)
            return
        stack = gather() if self._level >= Level.ALL else None
        guard = self._guard
        if guard.busy or not guard.lock.acquire(False):
            self._late.append((block, stack, stream))
            self._drain()
            return
        guard.busy = True
        try:
            self._give_up(block, stack, stream)
        finally:
            guard.busy = False
            guard.lock.release()
            if self._late:
                self._drain()

    def record_use(self, ptr: int, stream: int) -> None:
        """Say that another stream uses an allocation: it is reused when that stream is done with it.

        That is PyTorch's record_stream: what counts is all work of the stream up to the free. Raises
        InvalidPointer where nothing is allocated.
        """
        with self._inside():
            block = self._live.get(ptr)
            if block is None:
                raise InvalidPointer(
                    f"nothing is allocated at {ptr:#x}: {reason_for(self._cache, ptr)}"
                )
            add_use(block, stream)

    def empty_cache(self) -> None:
        """Wait for what is freed but in use, and give back every segment of which nothing is used.

        Does nothing during a capture. Raises CudaError where the driver refuses.
        """
        stack = gather() if self._level >= Level.ALL else None
        with self._inside():
            if not self._captures:
                release.empty_cache(self._cache, self._uses, stack)

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

    def enable_caching(self, *, enabled: bool) -> None:
        """Cache what is freed, or ask the driver each time and count nothing."""
        self._caches = enabled

    def begin_capture(self) -> None:
        """Say that a capture begins: until its end nothing looks at events or is given back."""
        with self._inside():
            self._captures += 1

    def end_capture(self) -> None:
        """Say that a capture has ended."""
        with self._inside():
            self._captures -= 1

    def on_shortage(self, helper: Callable[[], bool]) -> None:
        """Let a function free memory when no free block serves a request; it returns whether it did."""
        self._helpers.append(helper)

    def on_out_of_memory(self, observer: Callable[[OomReport], object]) -> None:
        """Tell a function of every request that fails, before the error is raised."""
        self._observers.append(observer)

    # Inside: the guard is held.

    def _obtain(
        self, pool: Pool, size: int, requested: int, stream: int, stack: Trail | None
    ) -> Block:
        cache = self._cache
        if self._helped():
            block = cache.find(pool, size, stream)
            if block is not None:
                return block
        segment_bytes = segment_size(size, cache.settings.large_segment_size_bytes)
        request = Request(size, requested, segment_bytes, stream, pool, stack)
        rejected = oom.is_rejected(cache, request)
        if not rejected:
            again, capturing = self._search_again, bool(self._captures)
            block = oom.obtain(cache, self._uses, request, capturing=capturing, search_again=again)
            if block is not None:
                return block
        report = self._report(request, rejected=rejected)
        self._tell(report)
        raise oom.out_of_memory(report)

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
        return report_of(cache, request, self._device, info)

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

    def _malloc_unlocked(self, size_bytes: int, stream: int) -> int:
        self._guard.leave()
        try:
            return self._upstream.malloc(size_bytes, stream)
        finally:
            self._guard.enter()

    def _tell(self, report: OomReport) -> None:
        if not self._observers:
            return
        self._guard.leave()
        try:
            for observer in self._observers:
                observer(report)
        finally:
            self._guard.enter()

    def _alloc_uncached(self, size_bytes: int, stream: int) -> Ptr:
        ptr = self._upstream.malloc(size_bytes, stream)
        self._uncached[ptr] = size_bytes
        return Ptr(ptr)

    def _free_unusual(self, ptr: int) -> None:
        if ptr == 0:
            return
        if self._uncached.pop(ptr, None) is not None:
            self._upstream.free(ptr)
            return
        raise self._refuse_free(ptr, gather(2) if self._level else None)


def _checked_size(size_bytes: int) -> int:
    size_bytes = int(index(size_bytes))
    if size_bytes < 0:
        raise ValueError(f"a size is not negative: {size_bytes}")
    if size_bytes >= TOO_MANY_BYTES:
        raise OutOfMemory("Tried to allocate more than 1EB memory.", hint="ask for less")
    return size_bytes
