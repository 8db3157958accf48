"""The caching allocator of one device: one class, composed of the other modules' parts."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from cudakit.core.allocator.blocks import Block
from cudakit.core.allocator.fast_path import Alloc, Free
from cudakit.core.allocator.fragmentation import Fragmentation, fragmentation_of
from cudakit.core.allocator.history import Level, gather
from cudakit.core.allocator.ipc import OpenedMemory, SharedMemory
from cudakit.core.allocator.limits import Limits
from cudakit.core.allocator.oom import OomChain, OutOfMemory
from cudakit.core.allocator.pool_calls import Checkpoints, PoolRouting, id_of
from cudakit.core.allocator.pool_stats import PoolId
from cudakit.core.allocator.private_pools import GraphMemory, HeldPool
from cudakit.core.allocator.recording import Recording
from cudakit.core.allocator.sharing import Sharing
from cudakit.core.allocator.state import AllocatorState, InvalidFree, InvalidPointer, PartMethod
from cudakit.core.allocator.upstream import (
    OUT_OF_MEMORY,
    CaptureGraph,
    Upstream,
    stream_number,
)
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.settings import Recorded, Settings
from cudakit.torch_rules.sizes import MOST_SMALL, TOO_MANY_BYTES, UNLIMITED, rounded


class CachingAllocator:
    """Hands out memory of one device in the order of streams, and keeps what is freed for the next request.

    The same operations give the same blocks, statistics and snapshots as PyTorch's allocator. Streams are
    handles; 0 is the default stream. May be used from any thread, and ``free`` from finalizers too.

    ``search_again`` looks for a free block once more before memory is said to be out, which PyTorch does not.

    ``native`` chooses the types and calls in C, or those in Python; None: those in C if they were compiled.

    ``front_cache`` is for the calls in Python: it keeps up to so many freed blocks of each size and stream
    ready for a request of exactly as many bytes, which is much faster then. Statistics stay right, but blocks
    have other addresses than PyTorch's, and those that are kept are not merged: that shows in
    ``inactive_split``, and may show in what is reserved. It rests while history is recorded, monitors watch
    or blocks wait for other streams, and is flushed before a snapshot, before statistics are read, and before
    memory is taken from the device. The calls in C are faster without it, and have PyTorch's addresses.
    Raises InputError for a number below 0.
    """

    alloc: Alloc
    free: Free

    def __init__(
        self,
        upstream: Upstream,
        settings: Settings | None = None,
        *,
        device: int = 0,
        search_again: bool = True,
        front_cache: int = 0,
        native: bool | None = None,
    ) -> None:
        chosen = settings or Settings()
        self._state = state = AllocatorState(
            upstream, chosen, self, device=device, front_cache=front_cache, native=native
        )
        self._routing = PoolRouting(state)
        self._checkpoints = Checkpoints(state, self._routing)
        self._recording = Recording(state, self._own_settings)
        self._limits = Limits(state)
        self._sharing = Sharing(state)
        self._oom = OomChain(state, self.snapshot, search_again=search_again)
        self.alloc, self.free = state.fast_path.alloc, state.fast_path.free
        self.configure(chosen)

    # Memory.

    def record_use(self, ptr: int, stream: int) -> None:
        """Say that another stream uses an allocation: it is reused when that stream is done with it.

        That is PyTorch's record_stream: what counts is all work of the stream up to the free. Raises
        InvalidPointer where nothing is allocated.
        """
        state = self._state
        with state.inside(flushes=False):
            block = state.live.get(ptr)
            if block is None:
                raise InvalidPointer(f"nothing is allocated at {ptr:#x}: {state.reason_for(ptr)}")
            state.pending.add_use(block, stream_number(stream))

    def process_events(self) -> None:
        """Complete the frees whose other streams are done, as the next request does."""
        with self._state.inside():
            self._state.pending.process()

    def empty_cache(self, pool: HeldPool | PoolId | None = None) -> None:
        """Wait for what is freed but in use, and give back every segment of which nothing is used.

        Of private pools those only that nobody holds any more; with ``pool`` that one only. Does nothing
        during a capture. Raises CudaError where the driver refuses, PoolError for a pool that never was.
        """
        stack = gather() if self._state.history.level >= Level.ALL else None
        with self._routing.with_pools(flushes=True) as pools:
            if self._state.captures.count:
                return
            if pool is None:
                self._state.empty_cache(stack)
            elif pools.is_known(id_of(pool)):
                self._state.empty_pool(pools.find(id_of(pool)), stack)

    def close(self) -> None:
        """Give back what is cached, and events. What is still allocated stays so."""
        self.empty_cache()
        with self._state.inside():
            self._state.pending.close()

    # Settings.

    @property
    def settings(self) -> Settings:
        """The settings that are followed."""
        return self._state.engine.settings

    def configure(self, settings: Settings) -> None:
        """Follow other settings from now on."""
        state, limit = self._state, UNLIMITED
        if settings.memory_fraction < 1:
            limit = int(settings.memory_fraction * state.upstream.memory_info().total_bytes)
        with state.inside():
            state.engine.configure(settings, limit)
            unlocks = settings.release_lock_on_cudamalloc
            state.engine.malloc = self._malloc_unlocked if unlocks else state.upstream.malloc
            state.set_slow("settings", on=not state.engine.is_simple)

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
        self._state.set_slow("uncached", on=not enabled)

    def _own_settings(self) -> Mapping[str, Recorded]:
        """Return the settings that PyTorch does not have."""
        limit = self._limits.cache_limit_bytes
        return {
            "cudakit_cache_limit": -1 if limit is None else limit,
            "cudakit_search_again": self._oom.search_again,
        }

    # Statistics.

    def statistics(self) -> dict[str, int]:
        """Return the 122 numbers of torch.cuda.memory_stats, and what each private pool has reserved.

        That is ``reserved_bytes_by_private_pools.<a>_<b>.<pool>.<metric>`` for the pool of id (a, b), as in
        PyTorch 2.15; of a pool that is gone ``current`` is 0, and the rest stays.
        """
        with self._state.inside():
            return self._state.engine.stats.read()

    def counters(self) -> dict[str, int]:
        """Return what PyTorch does not count."""
        stats = self._state.engine.stats
        with self._state.inside():
            return {
                "num_invalid_frees": stats.num_invalid_frees,
                "num_oom_rejections": stats.num_oom_rejections,
                "num_sync_rescues": stats.num_sync_rescues,
            }

    def fragmentation(self) -> Fragmentation:
        """Say how much of what is reserved is of use to nobody, and to whom the rest is."""
        with self._state.inside():
            segments = self._state.engine.segments.values()
            return fragmentation_of(segments, self._state.pending.awaited())

    def invalid_frees(self) -> tuple[InvalidFree, ...]:
        """Return the latest frees that were refused, oldest first."""
        return tuple(self._state.invalid_frees)

    def reset_peaks(self) -> None:
        """Let every peak be the value now."""
        with self._state.inside():
            self._state.engine.stats.reset_peaks()

    def reset_sums(self) -> None:
        """Begin to add up anew what was allocated and freed."""
        with self._state.inside():
            self._state.engine.stats.reset_sums()

    # History and snapshots.

    record_history = PartMethod(Recording.record_history, "_recording")
    set_metadata = PartMethod(Recording.set_metadata, "_recording")
    annotate = PartMethod(Recording.annotate, "_recording")
    annotated = PartMethod(Recording.annotated, "_recording")
    include_pinned = PartMethod(Recording.include_pinned, "_recording")
    snapshot = PartMethod(Recording.snapshot, "_recording")
    save_snapshot = PartMethod(Recording.save_snapshot, "_recording")

    # Limits, and shortage of memory.

    monitor = PartMethod(Limits.monitor, "_limits")
    set_cache_limit = PartMethod(Limits.set_cache_limit, "_limits")
    set_reserve_class = PartMethod(Limits.set_reserve_class, "_limits")
    reserve_class = PartMethod(Limits.reserve_class, "_limits")
    address_space = PartMethod(Limits.address_space, "_limits")
    on_shortage = PartMethod(OomChain.on_shortage, "_oom")
    on_out_of_memory = PartMethod(OomChain.on_out_of_memory, "_oom")
    on_rejection = PartMethod(OomChain.on_rejection, "_oom")
    save_on_out_of_memory = PartMethod(OomChain.save_on_out_of_memory, "_oom")
    ask_processes = PartMethod(OomChain.ask_processes, "_oom")

    # Private pools: with contexts that always end what they began, and one by one as in PyTorch's C++ API.

    @contextmanager
    def capture(
        self,
        pool: HeldPool | PoolId | None = None,
        stream: int | None = None,
        *,
        graph: CaptureGraph | None = None,
    ) -> Iterator[GraphMemory]:
        """Let what is captured within have memory of a pool, and return what holds it for the graph.

        To be left when the capture has ended: until then no event is asked, and nothing given back. Where it
        fails, the pool is let go of too; else it is held until the GraphMemory is closed, which is to be done
        when the graph is no more. ``pool`` is shared with the graphs that have it already; None is a new
        one. ``stream`` is one that is captured, and what is meant are the requests on all streams of the same
        capture while it goes on; None is all of this thread. With the setting
        graph_capture_record_stream_reuse the graph so far tells what is free again within the capture. It is
        asked of the device, unless there is another ``graph``. Raises PoolError where requests go to that
        pool already.
        """
        with self._routing.capture(self, pool, stream, graph) as memory:
            yield memory

    use_pool = PartMethod(PoolRouting.use_pool, "_routing")
    graph_pool_handle = PartMethod(PoolRouting.graph_pool_handle, "_routing")
    begin_allocate_to_pool = PartMethod(PoolRouting.begin_allocate_to_pool, "_routing")
    end_allocate_to_pool = PartMethod(PoolRouting.end_allocate_to_pool, "_routing")
    release_pool = PartMethod(PoolRouting.release_pool, "_routing")
    begin_capture = PartMethod(PoolRouting.begin_capture, "_routing")
    end_capture = PartMethod(PoolRouting.end_capture, "_routing")
    create_pool = PartMethod(PoolRouting.create_pool, "_routing")
    empty_pool = PartMethod(PoolRouting.empty_pool, "_routing")
    abandon_pool = PartMethod(PoolRouting.abandon_pool, "_routing")
    pool_uses = PartMethod(PoolRouting.pool_uses, "_routing")
    private_pools = PartMethod(PoolRouting.private_pools, "_routing")
    checkpoint = PartMethod(Checkpoints.checkpoint, "_checkpoints")
    restore = PartMethod(Checkpoints.restore, "_checkpoints")
    holds_exactly = PartMethod(Checkpoints.holds_exactly, "_checkpoints")

    # Other devices and processes.

    share = PartMethod(Sharing.share, "_sharing")
    ipc_handle = PartMethod(Sharing.ipc_handle, "_sharing")
    enable_peer_access = PartMethod(Sharing.enable_peer_access, "_sharing")

    def open_shared(self, shared: SharedMemory) -> OpenedMemory:
        """Open memory that another process shares. Each segment is opened once, whoever asks for it.

        It is open on this device, which is the one that has the memory, whichever number that has here, or,
        of pages with fabric handles, any of the fabric. Raises UsageError for memory of this process or of
        another device, EnvironmentUnusable where that process has ended or its file descriptors cannot be
        taken, CudaError where the driver refuses.
        """
        return self._sharing.open_shared(shared, self)

    @property
    def peer_accessible_by(self) -> tuple[int, ...]:
        """The other devices that may use the memory, as cuda.core calls it: those that were enabled here."""
        return self._sharing.peers()

    # The slow path of alloc and free.

    def slow_alloc(self, size_bytes: int, stream: int) -> Ptr:
        """Allocate, whatever is set, recorded or pending; see Alloc."""
        state = self._state
        size_bytes = _checked_size(size_bytes)
        if size_bytes == 0:
            return Ptr(0)
        stream = stream_number(stream)
        if state.is_slow("uncached"):
            return self._alloc_uncached(size_bytes, stream)
        level = state.history.level
        stack = gather(1 + state.fast_path.python_frames) if level else None
        with state.guard.inside():
            if state.pending:
                state.pending.process(stack, stream)
            block = state.front.take(size_bytes, stream) if state.front.active else None
            if block is None:
                block = self._alloc_block(size_bytes, stream, stack)
            state.live[block.ptr] = block
        return block.ptr

    def _alloc_block(self, size_bytes: int, stream: int, stack: Any) -> Block:
        engine = self._state.engine
        size = rounded(size_bytes, engine.divisions)
        pools = engine.private.route(stream) or engine.default
        pool = pools.small if size <= MOST_SMALL else pools.large
        expands = engine.expands(pool)
        block = engine.get_free_block(pool, size, stream, expands=expands) or self._oom.obtain(
            pool, size, size_bytes, stream, stack
        )
        # A lent block is split as if no segment were expandable, as in PyTorch.
        expands = engine.expands(pool) and block.pool is pool
        split = engine.should_split(block, size, expands=expands)
        engine.alloc_found_block(block, size, size_bytes, stack, split=split)
        return block

    def slow_free(self, ptr: int, block: Block | None, stream: int | None) -> None:
        """Free, whatever is set, recorded or pending; see Free."""
        state = self._state
        stack = None
        if block is None:
            self._free_unknown(ptr)
            return
        if state.history.level >= Level.ALL:
            stack = gather(1 + state.fast_path.python_frames)
        if not state.guard.try_enter():
            state.guard.queue((block, stack, stream))
            return
        try:
            state.free_live(block, stack, stream)
        finally:
            state.guard.exit()

    def _free_unknown(self, ptr: int) -> None:
        state = self._state
        if ptr == 0:
            return
        if state.uncached.pop(ptr, None) is not None:
            state.upstream.free(ptr)
            return
        frames = state.fast_path.python_frames
        stack = gather(2 + frames) if state.history.level else None
        raise state.refuse_free(ptr, stack)

    def _alloc_uncached(self, size_bytes: int, stream: int) -> Ptr:
        state = self._state
        with state.inside(flushes=False):
            if state.captures.count and state.engine.private.route(stream) is not None:
                raise UsageError(
                    f"nothing is cached, and stream {stream:#x} is captured: no graph would keep the memory",
                    hint="enable_caching(enabled=True) before the capture",
                )
        try:
            ptr = state.upstream.malloc(size_bytes, stream)
        except CudaError as error:
            if error.code != OUT_OF_MEMORY:
                raise
            raise OutOfMemory(f"Not cached: {error.message}", hint=error.hint) from error
        state.uncached[ptr] = size_bytes
        return Ptr(ptr)

    def _malloc_unlocked(self, size_bytes: int, stream: int) -> int:
        with self._state.guard.outside():
            return self._state.upstream.malloc(size_bytes, stream)


def _checked_size(size_bytes: int) -> int:
    size_bytes = int(operator.index(size_bytes))
    if size_bytes < 0:
        raise ValueError(f"a size is not negative: {size_bytes}")
    if size_bytes >= TOO_MANY_BYTES:
        raise OutOfMemory("Tried to allocate more than 1EB memory.", hint="ask for less")
    return size_bytes
