"""The caching allocator of one device: one class whose methods are implemented in the other modules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

from cudakit.allocator.fast_path import Alloc, Free
from cudakit.allocator.fragmentation import Fragmentation, fragmentation_of
from cudakit.allocator.history import Level, gather_stack
from cudakit.allocator.ipc import OpenedMemory, SharedMemory
from cudakit.allocator.limits import Limits
from cudakit.allocator.oom import OomChain, SlowPath
from cudakit.allocator.pool_calls import Checkpoints, PoolRouting, pool_id_of
from cudakit.allocator.private_pools import GraphMemory, HeldPool
from cudakit.allocator.recording import Recording
from cudakit.allocator.sharing import Sharing
from cudakit.allocator.state import AllocatorState, InvalidFree, InvalidPointer, delegated
from cudakit.allocator.upstream import (
    CaptureGraph,
    Upstream,
    stream_number,
)
from cudakit.torch_rules.oom_facts import PoolId
from cudakit.torch_rules.settings import RecordedValue, Settings
from cudakit.torch_rules.sizes import UNLIMITED


class CachingAllocator:
    """Allocates memory of one device in stream order, and caches freed memory.

    The same operations give the same blocks, statistics and snapshots as in PyTorch's allocator. Streams are
    handles; 0 is the default stream. Any thread may call any method, and finalizers may call ``free``.

    With ``search_again`` the free blocks are searched once more before a request fails, unlike in PyTorch.

    ``native`` selects the implementation in C (True) or in Python (False); None selects C if it was compiled.
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
        native: bool | None = None,
    ) -> None:
        settings = settings or Settings()
        self._state = state = AllocatorState(upstream, settings, device=device, native=native)
        self._routing = PoolRouting(state)
        self._checkpoints = Checkpoints(state, self._routing)
        self._recording = Recording(state, self._cudakit_settings)
        self._limits = Limits(state)
        self._sharing = Sharing(state)
        self._oom = OomChain(state, self.snapshot, search_again=search_again)
        state.create_fast_path(SlowPath(self, state, self._oom))
        self.alloc, self.free = state.fast_path.alloc, state.fast_path.free
        self.configure(settings)

    # Methods that allocate and free memory.

    def record_use(self, ptr: int, stream: int) -> None:
        """Record that another stream uses an allocation: its free then waits for the work of that stream.

        PyTorch calls this operation record_stream. Raises InvalidPointer if nothing is allocated at ``ptr``.
        """
        state = self._state
        with state.locked():
            block = state.live_blocks.get(ptr)
            if block is None:
                raise InvalidPointer(
                    f"nothing is allocated at {ptr:#x}: {state.describe_invalid_pointer(ptr)}"
                )
            state.pending_frees.add_use(block, stream_number(stream))

    def process_events(self) -> None:
        """Complete the pending frees whose streams have finished. Each request does this, too."""
        with self._state.locked():
            self._state.pending_frees.process_events()

    def empty_cache(self, pool: HeldPool | PoolId | None = None) -> None:
        """Wait for pending frees, and release every unused segment to the device.

        Private pools are included if no graph, MemPool or ``with`` block holds them. With ``pool`` only that
        pool is released. Does nothing during a capture. Raises CudaError if the driver refuses, PoolError
        for an unknown pool.
        """
        stack = gather_stack() if self._state.history.level >= Level.ALL else None
        with self._routing.with_pools() as pools:
            if self._state.captures.capture_count:
                return
            if pool is None:
                self._state.empty_cache(stack)
            elif pools.exists(pool_id_of(pool)):
                self._state.empty_pool(pools.find_pool(pool_id_of(pool)), stack)

    def close(self) -> None:
        """Release cached memory and destroy unused events. Live allocations stay."""
        self.empty_cache()
        with self._state.locked():
            self._state.pending_frees.close()

    # Methods for the settings.

    @property
    def settings(self) -> Settings:
        """The current settings."""
        return self._state.engine.settings

    def configure(self, settings: Settings) -> None:
        """Replace the settings; live allocations stay."""
        state, limit_bytes = self._state, UNLIMITED
        if settings.memory_fraction < 1:
            limit_bytes = int(settings.memory_fraction * state.upstream.memory_info().total_bytes)
        with state.locked():
            state.engine.configure(settings, limit_bytes)
            releases_lock = settings.release_lock_on_cudamalloc
            state.cache.malloc = self._malloc_unlocked if releases_lock else state.upstream.malloc
            state.set_slow("settings", is_on=not state.engine.is_simple)

    def set_memory_fraction(self, fraction: float) -> None:
        """Limit the reserved bytes to a fraction of the device's memory; 1.0 is no limit.

        Raises TypeError for anything but a float, ValueError outside of 0 to 1
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
        """Release old segments once reserved bytes exceed this fraction of the limit; 0.0 turns that off.

        This has an effect only with a memory fraction below 1. Raises SettingRefused for anything but a float
        from 0.0 to below 1.0 (garbage_collection_threshold).
        """
        self.configure(replace(self.settings, garbage_collection_threshold=threshold))

    def enable_caching(self, *, enabled: bool) -> None:
        """Turn caching on or off. Without caching, each alloc or free is a driver call, and is not counted.

        Without caching, a request in a capture raises UsageError.
        """
        self._state.set_slow("uncached", is_on=not enabled)

    def _cudakit_settings(self) -> Mapping[str, RecordedValue]:
        """Return the settings that PyTorch does not have."""
        limit = self._limits.cache_limit_bytes
        return {
            "cudakit_cache_limit": -1 if limit is None else limit,
            "cudakit_search_again": self._oom.search_again,
        }

    on_shortage = delegated(OomChain.on_shortage, "_oom")

    # Methods for private pools: context managers, and the functions of PyTorch's C++ API.

    checkpoint = delegated(Checkpoints.checkpoint, "_checkpoints")
    restore = delegated(Checkpoints.restore, "_checkpoints")
    holds_exactly = delegated(Checkpoints.holds_exactly, "_checkpoints")
    use_pool = delegated(PoolRouting.use_pool, "_routing")

    @contextmanager
    def capture(
        self,
        pool: HeldPool | PoolId | None = None,
        stream: int | None = None,
        *,
        graph: CaptureGraph | None = None,
    ) -> Iterator[GraphMemory]:
        """Serve the requests of a graph capture from a private pool, and yield its holder, a GraphMemory.

        Leave the ``with`` block after the end of the capture: until then no event is queried and nothing is
        released. Close the GraphMemory when the graph is destroyed; if the body raises, it is closed already.
        Graphs may share a ``pool``; None creates one. ``stream`` is a captured stream, and selects all
        streams of its capture; None selects all requests of this thread. With the setting
        graph_capture_record_stream_reuse, blocks are reused within the capture if the graph built so far
        proves that they are unused. ``graph`` provides this graph; by default the device does. Raises
        PoolError if another ``with`` block uses the pool.
        """
        with self._routing.capture(self, pool, stream, graph) as graph_memory:
            yield graph_memory

    graph_pool_handle = delegated(PoolRouting.graph_pool_handle, "_routing")
    begin_allocate_to_pool = delegated(PoolRouting.begin_allocate_to_pool, "_routing")
    end_allocate_to_pool = delegated(PoolRouting.end_allocate_to_pool, "_routing")
    release_pool = delegated(PoolRouting.release_pool, "_routing")
    begin_capture = delegated(PoolRouting.begin_capture, "_routing")
    end_capture = delegated(PoolRouting.end_capture, "_routing")
    create_pool = delegated(PoolRouting.create_pool, "_routing")
    empty_pool = delegated(PoolRouting.empty_pool, "_routing")
    abandon_pool = delegated(PoolRouting.abandon_pool, "_routing")
    pool_uses = delegated(PoolRouting.pool_uses, "_routing")
    private_pools = delegated(PoolRouting.private_pools, "_routing")

    # Methods that limit memory.

    set_cache_limit = delegated(Limits.set_cache_limit, "_limits")
    set_reserve_class = delegated(Limits.set_reserve_class, "_limits")
    reserve_class = delegated(Limits.reserve_class, "_limits")
    address_space = delegated(Limits.address_space, "_limits")

    # Methods that share memory with other devices and processes.

    enable_peer_access = delegated(Sharing.enable_peer_access, "_sharing")

    @property
    def peer_accessible_by(self) -> tuple[int, ...]:
        """The devices that ``enable_peer_access`` enabled; cuda.core has a property with this name."""
        return self._sharing.peers()

    share = delegated(Sharing.share, "_sharing")
    ipc_handle = delegated(Sharing.ipc_handle, "_sharing")

    def open_shared(self, shared: SharedMemory) -> OpenedMemory:
        """Open memory that another process shares. Each segment is opened once per process.

        The allocator's device must be the device that has the memory (its ordinal may differ between
        processes), or, for pages with fabric handles, any device of the fabric. Raises UsageError for memory
        of this process or of another device, EnvironmentUnusable if that process has ended or its file
        descriptors cannot be duplicated, CudaError if the driver refuses.
        """
        return self._sharing.open_shared(shared, self)

    # Methods that register observers of failed requests.

    monitor = delegated(Limits.monitor, "_limits")
    on_out_of_memory = delegated(OomChain.on_out_of_memory, "_oom")
    on_rejection = delegated(OomChain.on_rejection, "_oom")
    save_on_out_of_memory = delegated(OomChain.save_on_out_of_memory, "_oom")
    ask_processes = delegated(OomChain.ask_processes, "_oom")

    # Methods for the history of events and for snapshots.

    record_history = delegated(Recording.record_history, "_recording")
    set_metadata = delegated(Recording.set_metadata, "_recording")
    annotate = delegated(Recording.annotate, "_recording")
    annotated = delegated(Recording.annotated, "_recording")
    include_pinned = delegated(Recording.include_pinned, "_recording")
    snapshot = delegated(Recording.snapshot, "_recording")
    save_snapshot = delegated(Recording.save_snapshot, "_recording")

    # Methods for statistics.

    def statistics(self) -> dict[str, int]:
        """Return the 122 numbers of torch.cuda.memory_stats, and the reserved bytes of each private pool.

        The keys of the reserved bytes of the pool with the id (a, b) are
        ``reserved_bytes_by_private_pools.<a>_<b>.<pool>.<metric>``, as in PyTorch 2.15. Once a pool is
        dropped, its ``current`` is 0, and its other numbers stay.
        """
        with self._state.locked():
            return self._state.engine.stats.read()

    def counters(self) -> dict[str, int]:
        """Return the counters that PyTorch does not have."""
        stats = self._state.engine.stats
        with self._state.locked():
            return {
                "num_invalid_frees": stats.num_invalid_frees,
                "num_oom_rejections": stats.num_oom_rejections,
                "num_sync_rescues": stats.num_sync_rescues,
            }

    def fragmentation(self) -> Fragmentation:
        """Return the fragmentation of the reserved memory, and the free memory that each stream can reuse."""
        with self._state.locked():
            segments = self._state.engine.segments.values()
            return fragmentation_of(segments, self._state.pending_frees.awaited_streams())

    def invalid_frees(self) -> tuple[InvalidFree, ...]:
        """Return the latest invalid frees, oldest first."""
        return tuple(self._state.invalid_frees)

    def reset_peaks(self) -> None:
        """Set the peak of every statistic to its current value."""
        with self._state.locked():
            self._state.engine.stats.reset_peaks()

    def reset_sums(self) -> None:
        """Set the sums of allocated and freed bytes and counts to 0."""
        with self._state.locked():
            self._state.engine.stats.reset_sums()

    def _malloc_unlocked(self, size_bytes: int, stream: int) -> int:
        with self._state.guard.unlocked():
            return self._state.upstream.malloc(size_bytes, stream)
