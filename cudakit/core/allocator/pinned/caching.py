"""The pool of pinned memory."""

from __future__ import annotations

import weakref
from contextlib import suppress
from operator import index

from cudakit.core.allocator.blocks import RawStack
from cudakit.core.allocator.history import ALLOC, History, Level, gather
from cudakit.core.allocator.pinned.background import Background
from cudakit.core.allocator.pinned.blocks import HostBlock
from cudakit.core.allocator.pinned.buckets import bucket_of
from cudakit.core.allocator.pinned.observed import HostObserved
from cudakit.core.allocator.pinned.pools import Holders, HostPool, NoHolders
from cudakit.core.allocator.pinned.refused import out_of_pinned_memory
from cudakit.core.allocator.pinned.upstream import HostUpstream
from cudakit.core.allocator.state import InvalidPointer
from cudakit.core.allocator.upstream import stream_number
from cudakit.errors import CudaError
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.settings import Settings
from cudakit.torch_rules.sizes import UNLIMITED


class CachingHostAllocator(HostObserved):
    """Hands out pinned memory of the host, and keeps what is freed for the next request.

    The same operations give the same blocks and statistics as PyTorch's pool. May be used from any thread,
    and ``free`` from finalizers too.

    ``splits`` divides and merges blocks instead of rounding to powers of two: no request wastes what another
    could use. ``retries`` gives back what is cached, and tries again, before memory is said to be out.
    PyTorch's pool does neither.

    ``holders`` are the private pools of the device's allocator: a request that would go to one of them there
    has memory here that is set apart for it, too, and is kept until nobody holds the pool any more.
    """

    def __init__(
        self,
        upstream: HostUpstream,
        settings: Settings | None = None,
        *,
        holders: Holders | None = None,
        splits: bool = False,
        retries: bool = True,
    ) -> None:
        super().__init__(upstream, holders or NoHolders(), splits=splits)
        self._retries = retries
        self._background = Background(self._look)
        self._stop = weakref.finalize(self, self._background.stop)
        self.configure(settings or Settings())

    # Memory.

    def alloc(self, size_bytes: int, stream: int | None = None) -> Ptr:
        """Allocate. No bytes are the address 0.

        ``stream`` says which private pool a request goes to, and whether it is of a capture; without, it is
        of the one that this thread is in.

        Raises OutOfPinnedMemory, ValueError for a negative size, CudaError for what else the driver refuses.
        """
        size_bytes = _checked_size(size_bytes)
        if size_bytes == 0:
            return Ptr(0)
        stack = gather() if self._level else None
        number = None if stream is None else stream_number(stream)
        with self._inside():
            pool = self._pools.of_request(number)
            if not self._captures and (pool.private or not self._in_background):
                pool.waiting.process()
            size = pool.store.rounded(size_bytes)
            block = pool.store.take(size) or self._obtain(pool, size, stack)
            pool.store.cut(block, size)
            block.pool = pool
            # Without a stream it may be of a capture that another thread began.
            block.captured = bool(self._captures) and (stream is None or pool.private)
            self._hand_out(block, size_bytes, stack)
            return Ptr(block.ptr)

    def free(self, ptr: int) -> None:
        """Free an allocation: it is reused when every stream that uses it has come so far.

        From within the allocator, or while another thread is there, it is freed a moment later. Raises
        InvalidPointer where nothing is allocated, CudaError where the use of streams cannot be recorded
        (unless ``pinned_free_catch_all`` is set); the memory is kept then until they are known to be done.
        """
        block = self._live.pop(ptr, None)
        if block is None:
            self._refuse_free(ptr)
            return
        stack = gather() if self._level >= Level.ALL else None
        if not self._guard.try_enter():
            self._guard.queue((block, stack))
            return
        try:
            self._give_up(block, stack)
        except CudaError:
            if not self._catches_all:
                raise
        finally:
            self._guard.exit()
            self._wake()

    def record_use(self, ptr: int, stream: int) -> None:
        """Say that a stream uses an allocation, such as in a copy: it is reused when that has done so.

        What counts is all work of the stream up to the free. Raises InvalidPointer where nothing is
        allocated.
        """
        with self._inside():
            block = self._live.get(ptr)
            if block is None:
                raise InvalidPointer(f"nothing pinned is allocated at {ptr:#x}")
            block.streams[stream_number(stream)] = None

    def empty_cache(self) -> None:
        """Give back all of which nothing is used, without waiting for any stream.

        Of private pools those only that nobody holds any more. Does nothing during a capture. Raises
        CudaError where the driver refuses; the rest stays cached.
        """
        stack = gather() if self._level >= Level.ALL else None
        with self._inside():
            if not self._captures:
                self._default.waiting.process()
                self._supply.give_back_all(self._default, self._tracer, stack)
                for pool in self._pools.left():
                    self._let_go(pool, stack)

    def close(self) -> None:
        """Wait for what is freed but in use, and give all back but what is allocated or a graph's."""
        self._stop()
        with self._inside():
            self._default.waiting.synchronize()
            self._supply.give_back_all(self._default, self._tracer)
            for pool in self._pools.left():
                self._let_go(pool, None, waits=True)
            self._supply.close(used=self._uses_reserve())
            while self._idle:
                self._upstream.destroy_event(self._idle.pop())

    # How it works.

    def configure(self, settings: Settings) -> None:
        """Follow other settings from now on. Raises Unsupported for one that this pool has not."""
        with self._inside():
            self._supply.configure(settings)
            self.settings = settings
            limit = settings.pinned_max_cached_size_bytes
            self._most_cached = UNLIMITED if limit is None else limit
            self._catches_all = settings.pinned_free_catch_all
            self._in_background = settings.pinned_use_background_threads
            for pool in self._pools:
                pool.store.configure(settings)
        self._wake()

    def begin_capture(self) -> None:
        """Say that a capture begins: until its end nothing looks at events or is given back.

        What is allocated until then and used by a stream is not reused after it is freed, since a graph may
        use it whenever it runs, until nobody holds its private pool any more or ``forget_graphs`` ends that.
        """
        with self._inside():
            self._captures += 1

    def end_capture(self) -> None:
        """Say that a capture has ended."""
        with self._inside():
            self._captures -= 1

    def forget_graphs(self) -> None:
        """Say that no graph runs any more that uses memory which was allocated while it was captured."""
        with self._inside():
            for pool in self._pools:
                while pool.kept:
                    block = pool.kept.pop()
                    block.streams.clear()
                    self._complete(block)

    # Inside: the guard is held.

    @property
    def _tracer(self) -> History | None:
        return self._recorder if self._records else None

    def _obtain(self, pool: HostPool, size: int, stack: RawStack | None) -> HostBlock:
        """Get a block that no free one is large enough for."""
        if self._in_background and not self._captures and pool.waiting:
            pool.waiting.process()  # what the thread has not come to
            if (block := pool.store.take(size)) is not None:
                return block
        reserve_bytes = self.settings.pinned_reserve_segment_size_bytes
        if reserve_bytes and self._supply.reserve is None:
            if not self._supply.set_aside(reserve_bytes):
                raise out_of_pinned_memory(
                    reserve_bytes, self._counters(), self._held, reserve=True
                )
            if (block := pool.store.take(size)) is not None:
                return block
        block = self._supply.obtain(size, pool, self._tracer, stack)
        if block is None and self._retries and not self._captures:
            block = self._rescue(pool, size, stack)
        if block is None:
            size_bytes, _ = pool.store.segment(size)
            raise out_of_pinned_memory(size_bytes, self._counters(), self._held)
        return block

    def _rescue(self, pool: HostPool, size: int, stack: RawStack | None) -> HostBlock | None:
        """Wait for what is in use, then give back what is cached."""
        for each in dict.fromkeys((pool, self._default)):
            each.waiting.synchronize()
        block = pool.store.take(size)
        if block is None:
            given = self._supply.give_back_all(self._default, self._tracer, stack)
            given += sum(self._let_go(left, stack, waits=True) for left in self._pools.left())
            if given:
                block = self._supply.obtain(size, pool, self._tracer, stack)
        self._statistics.num_rescues += block is not None
        return block

    def _let_go(self, pool: HostPool, stack: RawStack | None, *, waits: bool = False) -> int:
        """Give back what a private pool has that nobody holds, and forget it with its last block.

        Returns how many bytes. Raises CudaError where the driver refuses.
        """
        while pool.kept:  # no graph uses it any more, but streams may still
            with suppress(CudaError):
                pool.waiting.postpone(pool.kept.pop(), capturing=False)
        if waits:
            pool.waiting.synchronize()
        else:
            pool.waiting.process()
        given = self._supply.give_back_all(pool, self._tracer, stack)
        for block in [block for block in pool.store if block.segment.kind == "reserve"]:
            pool.store.discard(block)
            self._default.store.put(block)
        used = [*self._live.values(), *(block for block, _ in list(self._guard.late))]
        if not pool.waiting and all(block.pool is not pool for block in used):
            self._pools.forget(pool)
        return given

    def _hand_out(self, block: HostBlock, requested: int, stack: RawStack | None) -> None:
        block.allocated = True
        block.requested = requested
        block.stack = stack
        self._live[block.ptr] = block
        self._statistics.used(bucket_of(block.size), block.size)
        if self._records:
            self._recorder.record(ALLOC, block.ptr, requested, 0, stack, self._pool(block).id)

    @property
    def _held(self) -> int:
        return self._statistics.allocated_bytes.current

    def _uses_reserve(self) -> bool:
        used = [*self._live.values(), *self._default.kept]
        used += [block for pool in self._pools if pool.private for block in pool]
        return any(block.segment.kind == "reserve" for block in used)

    # Outside of the guard.

    def _look(self) -> bool:
        """Complete what streams have done with; return whether anything still waits. In another thread."""
        with suppress(CudaError), self._inside():  # who allocates hears of it
            if self._in_background and not self._captures:
                self._default.waiting.process()
        return self._in_background and bool(self._default.waiting)

    def _wake(self) -> None:
        if self._in_background and self._default.waiting:
            self._background.wake()

    def _refuse_free(self, ptr: int) -> None:
        if ptr == 0:
            return
        self._statistics.num_invalid_frees += 1
        if not self._catches_all:
            raise InvalidPointer(
                f"nothing pinned is allocated at {ptr:#x}",
                hint="free each allocation once, by the address that alloc returned",
            )


def _checked_size(size_bytes: int) -> int:
    size_bytes = int(index(size_bytes))
    if size_bytes < 0:
        raise ValueError(f"a size is not negative: {size_bytes}")
    return size_bytes
