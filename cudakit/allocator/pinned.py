"""The caching allocator of pinned (page-locked) host memory.

As in PyTorch, free blocks are in bins by power of two, and blocks are never split. A private pool has the id
of a private pool of the device, and the same holders: memory that is allocated while a graph is captured
belongs to the graph, because the graph reads it whenever it runs. Source: PyTorch's
aten/src/ATen/core/CachingHostAllocator.h (allocate, get_free_block, HostPrivatePool, begin_allocate_to_pool,
release_pool).
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from time import perf_counter_ns, sleep
from typing import Any

from cudakit.allocator.allocator import InvalidPointer, checked_size
from cudakit.allocator.blocks import Block, FreeBlocks, RawStack
from cudakit.allocator.guard import Guard
from cudakit.allocator.history import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    Context,
    History,
    Level,
    Recorded,
    gather_stack,
)
from cudakit.allocator.oom import awaited_bytes
from cudakit.allocator.pools import PrivatePools
from cudakit.allocator.snapshot import host_snapshot
from cudakit.allocator.stats import HostStats, bin_of
from cudakit.allocator.streams import Captures, PendingFrees
from cudakit.allocator.upstream import (
    OUT_OF_MEMORY,
    HostUpstream,
    stream_number,
)
from cudakit.errors import CudaError
from cudakit.gpu.api import Event, Ptr
from cudakit.torch_rules.oom import DEFAULT_POOL, PoolId
from cudakit.torch_rules.settings import UNLIMITED, Settings
from cudakit.units import format_bytes

# Sizes that are not rounded to a power of two are multiples of this size (CachingHostAllocator.cpp of PyTorch
# 2.13, kHostAlignment).
_ALIGNMENT = 512
# Host memory has no stream order; all free blocks of a pool are together.
_NO_STREAM = 0
# Interval of the background thread. PyTorch's thread polls every 0.1 ms, but each poll in Python takes the
# interpreter's lock.
_POLL_INTERVAL_S = 0.001


class BackgroundThread:
    """A thread that, when woken, repeats ``work`` until ``work`` returns False.

    ``work`` is a method; the thread does not keep the object of the method alive.
    """

    def __init__(self, work: Callable[[], bool]) -> None:
        self._work = weakref.WeakMethod(work)
        self._wake_event = threading.Event()
        self._is_stopped = False
        self._thread: threading.Thread | None = None

    def wake(self) -> None:
        """Wake the thread; the first call starts it."""
        if self._thread is None:
            thread_name = "cudakit pinned memory"
            self._thread = threading.Thread(target=self._run_loop, name=thread_name, daemon=True)
            self._thread.start()
        self._wake_event.set()

    def stop(self) -> None:
        """Stop the thread, and wait for its end."""
        self._is_stopped = True
        self._wake_event.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _run_loop(self) -> None:
        while True:
            self._wake_event.wait()
            self._wake_event.clear()  # Cleared before the work, so that no wake-up is lost.
            work = self._work()
            if self._is_stopped or work is None:
                return
            if work():
                self._wake_event.set()
            del work  # A reference would keep the object alive.
            sleep(_POLL_INTERVAL_S)


class OutOfPinnedMemory(CudaError, MemoryError):
    """The driver has no pinned memory for a request, even after all cached memory was released."""


class HostPool(FreeBlocks):
    """The blocks of one pool id that are not allocated: free blocks in bins by power of two, and others.

    In a bin, the block that was freed last is used first. The blocks in ``kept_for_graphs`` were freed, but a
    graph may use them whenever it runs. ``used_count`` is the number of blocks that are allocated, pending,
    or kept for graphs.
    """

    __slots__ = ("_bins", "kept_for_graphs", "pending_frees", "used_count")

    def __init__(self, pool_id: PoolId, pending_frees: PendingFrees) -> None:
        self.pool_id = pool_id
        self.stream = _NO_STREAM
        self.pending_frees = pending_frees
        self.kept_for_graphs: list[Block] = []
        self.used_count = 0
        self._bins: defaultdict[int, list[Block]] = defaultdict(list)

    @property
    def is_private(self) -> bool:
        return self.pool_id != DEFAULT_POOL

    def __bool__(self) -> bool:
        return any(self._bins.values())

    def __iter__(self) -> Iterator[Block]:
        for bin_index in sorted(self._bins):
            yield from self._bins[bin_index]

    def all_blocks(self) -> Iterator[Block]:
        """Iterate over all blocks; a block that waits for several streams is repeated."""
        yield from self.kept_for_graphs
        yield from self
        yield from (block for _, block in self.pending_frees.awaited_streams())

    def add(self, block: Block) -> None:
        """Insert a block, which becomes free."""
        block.is_free = True
        self._bins[bin_of(block.size)].append(block)

    def remove(self, block: Block) -> None:
        block.is_free = False
        self._bins[bin_of(block.size)].remove(block)

    def take(self, size: int, size_limit: int = UNLIMITED) -> Block | None:  # noqa: ARG002
        """Remove and return the block of the bin that was freed last and is large enough, or None.

        Blocks that are not rounded differ in size (PyTorch's pull request 192722).
        """
        blocks = self._bins[bin_of(size)]
        for index in range(len(blocks) - 1, -1, -1):
            if blocks[index].size >= size:
                block = blocks.pop(index)
                block.is_free = False
                return block
        return None


class Reserve:
    """Memory that is taken from the driver in advance and released at the end. Blocks are carved from it."""

    def __init__(self, ptr: int, size: int) -> None:
        self.ptr = ptr
        self.size = size
        self._carved_bytes = 0

    def contains(self, block: Block) -> bool:
        return self.ptr <= block.ptr < self.ptr + self.size

    def carve(self, size: int) -> int | None:
        """Return the address of unused memory in the reserve; None if too little is left."""
        begin_offset = self._carved_bytes
        if begin_offset + size > self.size:
            return None
        self._carved_bytes = begin_offset + -(-size // _ALIGNMENT) * _ALIGNMENT
        return self.ptr + begin_offset


class CachingHostAllocator:
    """Allocates pinned host memory, and caches freed memory.

    The same operations give the same blocks and statistics as in PyTorch's host allocator, with one
    exception: before a request fails, cached memory is released and the request is tried again. Any thread
    may use it, and ``free`` may be called by finalizers.

    ``holders`` are the private pools of the device's allocator. A request that the device's allocator would
    serve from a private pool is served from a private pool of pinned memory too. Its memory is
    kept while the device's pool has holders.
    """

    def __init__(
        self,
        upstream: HostUpstream,
        settings: Settings | None = None,
        *,
        holders: PrivatePools | None = None,
    ) -> None:
        self._upstream = upstream
        self._holders = holders
        self._guard = Guard(self._free_block)
        self._history = History()
        self._stats = HostStats()
        self._captures = Captures()
        self._unused_events: list[Event] = []
        self._default_pool = self._new_pool(DEFAULT_POOL)
        # The default pool, and private pools created by their first request.
        self._pools = {DEFAULT_POOL: self._default_pool}
        self._reserve: Reserve | None = None
        self._live_blocks: dict[int, Block] = {}
        # Blocks allocated in a capture, whose graph may run at any time.
        self._captured_blocks: set[Block] = set()
        self._background_thread = BackgroundThread(self._poll)
        self._stop_finalizer = weakref.finalize(self, self._background_thread.stop)
        self.configure(settings or Settings())

    def _new_pool(self, pool_id: PoolId) -> HostPool:
        pending_frees = PendingFrees(
            self._upstream,
            self._complete_free,
            self._captures,
            in_order=True,
            unused_events=self._unused_events,
        )
        return HostPool(pool_id, pending_frees)

    # Methods that allocate and free memory.

    def alloc(self, size_bytes: int, stream: int | None = None) -> Ptr:
        """Allocate bytes. A request of 0 bytes returns the address 0.

        ``stream`` determines the private pool of the request, and whether the request belongs to a capture.
        Without a stream, the innermost pool and any capture of this thread apply.

        Raises OutOfPinnedMemory, InvalidSize for a negative size, CudaError for every other failure of the
        driver.
        """
        size_bytes = checked_size(size_bytes)
        if size_bytes == 0:
            return Ptr(0)
        stack = gather_stack() if self._history.level else None
        allocator_stream = None if stream is None else stream_number(stream)
        with self._guard:
            pool_id = DEFAULT_POOL
            if self._holders:
                pool_id = self._holders.pool_id_of_request(allocator_stream)
            if pool_id not in self._pools:
                self._pools[pool_id] = self._new_pool(pool_id)
            pool = self._pools[pool_id]
            if pool.is_private or not self.settings.pinned_use_background_threads:
                pool.pending_frees.process_events()
            block_bytes = self._rounded(size_bytes)
            block = pool.take(block_bytes) or self._obtain_block(pool, block_bytes, stack)
            block.is_allocated = True
            block.requested = size_bytes
            block.stack = stack
            pool.used_count += 1
            self._stats.count_active(1, block.size)
            self._record(ALLOC, block, stack)
            # A request without a stream may belong to a capture, even if another thread began this capture.
            if self._captures.capture_count and (stream is None or pool.is_private):
                self._captured_blocks.add(block)
            self._live_blocks[block.ptr] = block
            return block.ptr

    def free(self, ptr: int) -> None:
        """Free an allocation. Its memory is reused when the streams that used it finish their present work.

        If another call of the allocator is running, the free is queued and performed after that call. Raises
        InvalidPointer if no allocation begins at ``ptr``, CudaError if an event cannot be recorded (unless
        ``pinned_free_catch_all`` is set); the memory then stays pending until the streams are done.
        """
        block = self._live_blocks.pop(ptr, None)
        if block is None:
            if ptr == 0:
                return
            self._stats.num_invalid_frees += 1
            if self.settings.pinned_free_catch_all:
                return
            raise InvalidPointer(
                f"nothing pinned is allocated at {ptr:#x}",
                hint="free each allocation once, by the address that alloc returned",
            )
        stack = gather_stack() if self._history.level >= Level.ALL else None
        if not self._guard.try_enter():
            self._guard.queue_free(block, stack)
            return
        try:
            self._free_block(block, stack)
        except CudaError:
            if not self.settings.pinned_free_catch_all:
                raise
        finally:
            self._guard.exit()
            self._wake_background_thread()

    def record_use(self, ptr: int, stream: int) -> None:
        """Record that a stream uses an allocation: after its free, its memory waits for the stream's work.

        Raises InvalidPointer if no allocation begins at ``ptr``.
        """
        with self._guard:
            block = self._live_blocks.get(ptr)
            if block is None:
                raise InvalidPointer(f"nothing pinned is allocated at {ptr:#x}")
            stream_uses = block.stream_uses = block.stream_uses or {}
            stream_uses[stream_number(stream)] = None

    def empty_cache(self) -> None:
        """Release all cached memory without waiting for any stream.

        Private pools are included if no graph, MemPool or context holds them. Does nothing during a capture.
        Raises CudaError if the driver refuses; the remaining memory stays cached.
        """
        stack = gather_stack() if self._history.level >= Level.ALL else None
        with self._guard:
            if not self._captures.capture_count:
                self._default_pool.pending_frees.process_events()
                self._release_cached(stack)

    def close(self) -> None:
        """Wait for pending frees, and release all memory that is neither allocated nor used by a graph."""
        self._stop_finalizer()
        with self._guard:
            self._default_pool.pending_frees.synchronize()
            self._release_cached(None, waits_for_streams=True)
            used_blocks = [*self._live_blocks.values(), *self._default_pool.kept_for_graphs]
            for pool in self._pools.values():
                if pool.is_private:
                    used_blocks += pool.all_blocks()
            if self._reserve is not None and not any(map(self._is_reserved, used_blocks)):
                self._return_memory(self._reserve.ptr)
                for block in list(filter(self._is_reserved, self._default_pool)):
                    self._default_pool.remove(block)
                    self._stats.count_memory(-1, block.size)
                self._reserve = None
            self._default_pool.pending_frees.close()

    # Methods for the settings and for captures.

    @property
    def settings(self) -> Settings:
        """The settings in effect."""
        return self._settings

    def configure(self, settings: Settings) -> None:
        """Replace the settings."""
        with self._guard:
            self._settings = settings
        self._wake_background_thread()

    def begin_capture(self) -> None:
        """Begin a capture: until its end no event is queried and nothing is released.

        A graph may use memory that was allocated in its capture whenever it runs. If a stream used such
        memory, the memory is not reused after its free until its private pool has no holder any more, or
        ``forget_graphs`` is called.
        """
        with self._guard:
            self._captures.begin()

    def end_capture(self) -> None:
        """End a capture."""
        with self._guard:
            self._captures.end()

    def forget_graphs(self) -> None:
        """Free the memory that is kept for graphs, which must not run any more."""
        with self._guard:
            for pool in list(self._pools.values()):
                while pool.kept_for_graphs:
                    block = pool.kept_for_graphs.pop()
                    block.stream_uses = None
                    self._complete_free(block, None)

    # Methods for statistics, history and snapshots.

    def statistics(self) -> dict[str, int]:
        """Return the 28 numbers of torch.cuda.host_memory_stats; times are in microseconds."""
        with self._guard:
            return self._stats.read()

    def counters(self) -> dict[str, int]:
        """Return counters that PyTorch does not have.

        The key "waiting_bytes" has the size of the freed blocks that streams still use.
        """
        with self._guard:
            return self._counters()

    def waiting(self) -> dict[int, int]:
        """Return for each stream the bytes of freed blocks that wait for it."""
        with self._guard:
            return awaited_bytes(self._awaited_streams())

    def reset_peaks(self) -> None:
        """Set every peak to the current value."""
        with self._guard:
            self._stats.reset_peaks()

    def reset_sums(self) -> None:
        """Set the sums of allocated and freed bytes and counts to 0."""
        with self._guard:
            self._stats.reset_sums()

    def record_history(
        self,
        history: Recorded | None = "all",
        *,
        context: Context | None = "all",
        max_entries: int = sys.maxsize,
        skip_actions: Collection[str] = (),
        clear: bool = False,
    ) -> None:
        """Start or stop the recording of history; see CachingAllocator.record_history.

        Raises UsageError for an invalid setting.
        """
        with self._guard:
            self._history.configure(
                history,
                context=context,
                max_entries=max_entries,
                skip_actions=skip_actions,
                clear=clear,
            )

    def snapshot(self) -> dict[str, Any]:
        """Return ``host_segments`` and ``host_traces`` in PyTorch's format, as builtin types."""
        with self._guard:
            blocks = {*self._live_blocks.values()}
            blocks.update(block for block, _ in list(self._guard.queued_frees))
            for pool in self._pools.values():
                blocks.update(pool.all_blocks())
            return host_snapshot(blocks, self._history)

    # The blocks. The caller holds the guard.

    def _is_held(self, pool: HostPool) -> bool:
        """Return whether a pool has holders: it may get requests, or a graph may use its memory."""
        return not pool.is_private or (
            self._holders is not None and self._holders.is_held(pool.pool_id)
        )

    def _rounded(self, size_bytes: int) -> int:
        """Round a request up to a power of two; above the limits of the settings, to 512 bytes.

        Source: CachingHostAllocatorImpl::allocate.
        """
        settings = self.settings
        limits = settings.pinned_max_round_threshold_bytes, settings.pinned_max_cached_size_bytes
        if any(limit is not None and size_bytes > limit for limit in limits):
            return -(-size_bytes // _ALIGNMENT) * _ALIGNMENT
        return 1 << bin_of(size_bytes)

    def _obtain_block(self, pool: HostPool, block_bytes: int, stack: RawStack | None) -> Block:
        """Return a block for a request that no free block serves. Raises OutOfPinnedMemory, CudaError."""
        is_capturing = self._captures.capture_count > 0
        block: Block | None
        if self.settings.pinned_use_background_threads and not is_capturing and pool.pending_frees:
            # The background thread may not have processed all frees yet.
            pool.pending_frees.process_events()
            if (block := pool.take(block_bytes)) is not None:
                return block
        reserve_bytes = self.settings.pinned_reserve_segment_size_bytes
        if reserve_bytes and self._reserve is None:
            ptr = self._malloc(reserve_bytes)
            if ptr is None:
                raise self._out_of_memory_error(
                    reserve_bytes, " as the reserve (pinned_reserve_segment_size_mb)"
                )
            self._reserve = Reserve(ptr, reserve_bytes)
        block = self._alloc_block(pool, block_bytes, stack)
        if block is None and not is_capturing:
            # Retry after pending frees, then after a release of cached memory.
            for awaited_pool in dict.fromkeys((pool, self._default_pool)):
                awaited_pool.pending_frees.synchronize()
            block = pool.take(block_bytes)
            if block is None and self._release_cached(stack, waits_for_streams=True):
                block = self._alloc_block(pool, block_bytes, stack)
            self._stats.num_rescues += block is not None
        if block is None:
            raise self._out_of_memory_error(block_bytes)
        return block

    def _alloc_block(
        self, pool: HostPool, block_bytes: int, stack: RawStack | None
    ) -> Block | None:
        """Take a block from the reserve or from the driver; None if no memory is left. Raises CudaError."""
        ptr = self._reserve.carve(block_bytes) if self._reserve else None
        is_carved = ptr is not None
        if ptr is None:
            ptr = self._malloc(block_bytes)
        if ptr is None:
            return None
        block = pool.new_block(ptr, block_bytes)
        block.segment_stack = None if is_carved else stack
        self._stats.count_memory(1, block_bytes)
        if self._history.is_enabled:
            self._history.record(SEGMENT_ALLOC, ptr, block_bytes, _NO_STREAM, stack, pool.pool_id)
        return block

    def _malloc(self, size_bytes: int) -> int | None:
        """Take memory from the driver as the settings require; None if none is left. Raises CudaError."""
        upstream, settings = self._upstream, self.settings
        begin_ns = perf_counter_ns()
        try:
            if settings.pinned_use_cuda_host_register:
                ptr = upstream.malloc_registered(size_bytes, settings.pinned_num_register_threads)
            else:
                ptr = upstream.malloc(size_bytes)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            return None
        self._stats.alloc_time.add((perf_counter_ns() - begin_ns) // 1000)
        return ptr

    def _free_block(self, block: Block, stack: RawStack | None) -> None:
        """Free an allocated block, at once or when the streams that use it are done. Raises CudaError."""
        pool = self._pool_of_block(block)
        block.is_allocated = False
        self._record(FREE_REQUESTED, block, stack)
        if not block.stream_uses:
            self._complete_free(block, stack)
        elif block in self._captured_blocks and self._is_held(pool):
            pool.kept_for_graphs.append(block)
        else:
            pool.pending_frees.add_block(block)

    def _complete_free(self, block: Block, stack: RawStack | None) -> None:
        """Cache a block that no stream uses any more, or release it if it is too large for the settings."""
        pool = self._pool_of_block(block)
        self._stats.count_active(-1, block.size)
        self._captured_blocks.discard(block)
        self._record(FREE_COMPLETED, block, stack)
        block.stack = None
        pool.used_count -= 1
        pool.add(block)
        limit_bytes = self.settings.pinned_max_cached_size_bytes
        is_too_large = limit_bytes is not None and block.size > limit_bytes
        if is_too_large and not pool.is_private and not self._is_reserved(block):
            with suppress(CudaError):  # The block stays cached, and empty_cache tries again.
                self._release_block(block, None)

    def _pool_of_block(self, block: Block) -> HostPool:
        return self._pools[block.free_blocks.pool_id]

    def _is_reserved(self, block: Block) -> bool:
        return self._reserve is not None and self._reserve.contains(block)

    def _record(self, action: str, block: Block, stack: RawStack | None) -> None:
        if self._history.is_enabled:
            self._history.record_block(action, block, stack)

    # Cached memory. The caller holds the guard.

    def _release_cached(self, stack: RawStack | None, *, waits_for_streams: bool = False) -> int:
        """Release all cached blocks except blocks of held private pools; return the released bytes.

        With ``waits_for_streams``, wait for the pending frees of private pools without holders. Such a pool
        is dropped with its last block. Raises CudaError for the first block that the driver refuses to free.
        """
        released_bytes = self._release_blocks(self._default_pool, stack)
        for pool in list(self._pools.values()):
            if self._is_held(pool):
                continue
            while pool.kept_for_graphs:  # No graph uses these blocks any more, but streams may.
                with suppress(CudaError):
                    pool.pending_frees.add_block(pool.kept_for_graphs.pop())
            if waits_for_streams:
                pool.pending_frees.synchronize()
            else:
                pool.pending_frees.process_events()
            released_bytes += self._release_blocks(pool, stack)
            for block in list(pool):  # The remaining blocks are parts of the reserve.
                pool.remove(block)
                block.free_blocks = self._default_pool
                self._default_pool.add(block)
            if not pool.used_count:
                del self._pools[pool.pool_id]
        return released_bytes

    def _release_blocks(self, pool: HostPool, stack: RawStack | None) -> int:
        """Release all free blocks of a pool; return their bytes. Raises CudaError at the first failure."""
        blocks = [block for block in pool if not self._is_reserved(block)]
        for block in blocks:
            self._release_block(block, stack)
        return sum(block.size for block in blocks)

    def _release_block(self, block: Block, stack: RawStack | None) -> None:
        pool = self._pool_of_block(block)
        self._return_memory(block.ptr)
        pool.remove(block)
        self._stats.count_memory(-1, block.size)
        if self._history.is_enabled:
            stack = stack or block.segment_stack
            self._history.record(
                SEGMENT_FREE, block.ptr, block.size, _NO_STREAM, stack, pool.pool_id
            )

    def _return_memory(self, ptr: int) -> None:
        begin_ns = perf_counter_ns()
        try:
            self._upstream.free(ptr)
        except CudaError:
            self._stats.num_free_failures += 1
            raise
        self._stats.free_time.add((perf_counter_ns() - begin_ns) // 1000)

    def _awaited_streams(self) -> Iterator[tuple[int, Block]]:
        """Iterate over the streams that freed blocks wait for, each with its block."""
        for pool in self._pools.values():
            yield from pool.pending_frees.awaited_streams()

    def _counters(self) -> dict[str, int]:
        pools, stats = self._pools.values(), self._stats
        waiting_sizes = {block.ptr: block.size for _, block in self._awaited_streams()}
        return {
            "num_free_failures": stats.num_free_failures,
            "num_invalid_frees": stats.num_invalid_frees,
            "num_rescues": stats.num_rescues,
            "captured_bytes": sum(block.size for pool in pools for block in pool.kept_for_graphs),
            "free_bytes": sum(block.size for pool in pools for block in pool),
            "waiting_bytes": sum(waiting_sizes.values()),
        }

    def _out_of_memory_error(self, size_bytes: int, purpose: str = "") -> OutOfPinnedMemory:
        counters, pool_bytes = self._counters(), self._stats.allocated_bytes.current
        sentences = [
            f"tried to allocate {format_bytes(size_bytes)} of pinned memory{purpose}; this pool holds"
            f" {format_bytes(pool_bytes)}, of which {format_bytes(counters['free_bytes'])} is free"
        ]
        if waiting_bytes := counters["waiting_bytes"]:
            sentences.append(f"{format_bytes(waiting_bytes)} was freed but is in use by streams")
        if captured_bytes := counters["captured_bytes"]:
            sentences.append(f"{format_bytes(captured_bytes)} was freed but may be used by graphs")
        return OutOfPinnedMemory(
            OUT_OF_MEMORY,
            "CUDA_ERROR_OUT_OF_MEMORY",
            "; ".join(sentences),
            hint="pinned memory is memory of the host that cannot be swapped out: free some, or copy in"
            " pieces",
        )

    # Methods that are called without the guard.

    def _poll(self) -> bool:
        """Process pending frees in the background thread; return whether pending frees remain."""
        pending_frees = self._default_pool.pending_frees
        with suppress(CudaError), self._guard:  # The next request raises the error again.
            if self.settings.pinned_use_background_threads and not self._captures.capture_count:
                pending_frees.process_events()
        return self.settings.pinned_use_background_threads and bool(pending_frees)

    def _wake_background_thread(self) -> None:
        pending_frees = self._default_pool.pending_frees
        if self.settings.pinned_use_background_threads and pending_frees:
            self._background_thread.wake()
