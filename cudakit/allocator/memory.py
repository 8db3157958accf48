"""The memory of one device: its blocks under a guard, its cache and settings, private pools and captures.

Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (beginAllocateToPool, endAllocateToPool, releasePool,
emptyCache) and torch/cuda/memory.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from types import ModuleType
from typing import Literal, TypeAlias

from cudakit.allocator.blocks import Block, FreeBlocks, RawStack, Segment, SegmentSource
from cudakit.allocator.engine import Engine
from cudakit.allocator.guard import Gate, Guard
from cudakit.allocator.history import Events, History, Level, gather_stack
from cudakit.allocator.pools import (
    GraphMemory,
    HeldPool,
    PoolError,
    PoolUsage,
    PrivatePools,
    id_of_open_pool,
    pool_id_of,
)
from cudakit.allocator.stats import BlockCounters
from cudakit.allocator.streams import (
    CapturedGraph,
    Captures,
    PendingFrees,
    StreamFilter,
    calling_thread_filter,
    capture_filter,
)
from cudakit.allocator.upstream import CapturableUpstream, CaptureGraph, Upstream, stream_number
from cudakit.errors import CudaError, Unsupported
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.oom import PoolId
from cudakit.torch_rules.settings import UNLIMITED, Settings

# Reasons why the native fast path is off.
SlowReason: TypeAlias = Literal[
    "uncached", "history", "watched", "routed", "pending", "settings", "retired"
]


def native_module() -> ModuleType | None:
    """Return the module of the native types; None if they were not compiled."""
    try:
        return import_module("cudakit.allocator._fast")
    except ImportError:
        return None


class DeviceMemory:
    """The blocks of one device, and everything that changes them besides requests.

    ``native`` selects the native types, or the plain types in Python, which have no fast path; None selects
    the native types if they were compiled.
    """

    def __init__(
        self, upstream: Upstream, settings: Settings, *, device: int, native: bool | None
    ) -> None:
        self._native_module = types = native_module() if native is not False else None
        if native and types is None:
            raise Unsupported("the native types of the allocator were not compiled")
        self._upstream = upstream
        self._device = device
        self._live_blocks: dict[int, Block] = {}  # The allocated blocks by address.
        self._guard = Guard(self._free_block, types.Gate() if types else Gate())
        self._slow_reasons: set[SlowReason] = set()
        self._history = History(types.Events if types else Events)
        self._engine = Engine(
            upstream,
            settings,
            types.FreeBlocks if types else FreeBlocks,
            types.BlockCounters if types else BlockCounters,
        )
        self._captures = Captures()
        self._pending_frees = PendingFrees(upstream, self._complete_free, self._captures)
        self.configure(settings)

    def _set_slow(self, reason: SlowReason, *, is_on: bool) -> None:
        """Add or remove a reason why the native fast path is off."""
        if is_on:
            self._slow_reasons.add(reason)
        else:
            self._slow_reasons.discard(reason)
        self._guard.gate.slow = bool(self._slow_reasons)

    def _free_block(self, block: Block, stack: RawStack | None, stream: int | None = None) -> None:
        """Free a block that is no longer a live block; ``stream`` may use it. The caller holds the guard."""
        if stream is not None:
            self._pending_frees.add_use(block, stream_number(stream))
        is_used = bool(block.stream_uses)
        self._engine.free(block, stack)
        if is_used:
            self._set_slow("pending", is_on=True)
            self._pending_frees.add_block(block)

    def _complete_free(self, block: Block, stack: RawStack | None) -> None:
        self._set_slow("pending", is_on=bool(self._pending_frees))
        self._engine.complete_free(block, stack)

    # Methods for pending frees and cached memory.

    def process_events(self) -> None:
        """Complete the pending frees whose streams have finished. Each request does this, too."""
        with self._guard:
            self._pending_frees.process_events()

    def empty_cache(self, pool: HeldPool | PoolId | None = None) -> None:
        """Wait for pending frees, and release every unused segment to the device.

        Private pools are included if no graph, MemPool or ``with`` block holds them. With ``pool`` only that
        pool is released. Does nothing during a capture. Raises CudaError if the driver refuses, PoolError
        for an unknown pool.
        """
        stack = gather_stack() if self._history.level >= Level.ALL else None
        with self._locked_pools() as pools:
            if self._captures.capture_count:
                return
            if pool is None:
                self._empty_cache(stack)
            elif pools.exists(pool_id_of(pool)):
                self._empty_pool(pool_id_of(pool), stack)

    def _empty_cache(self, stack: RawStack | None) -> None:
        self._engine.stats.num_sync_all_streams += 1
        self._pending_frees.synchronize(stack)
        self._engine.release_cached_blocks(stack)

    def _empty_pool(self, pool_id: PoolId, stack: RawStack | None = None) -> None:
        """Wait for pending frees of a private pool without holders, and release it. Raises CudaError."""
        pool = self._engine.private_pools.find_pool(pool_id)
        if not pool.holder_count and not self._captures.capture_count:
            self._engine.stats.num_sync_all_streams += 1
            self._pending_frees.synchronize(stack, pool=pool_id)
            self._engine.release_private_pool(pool, stack)

    def close(self) -> None:
        """Release cached memory and destroy unused events. Live allocations stay."""
        self.empty_cache()
        with self._guard:
            self._pending_frees.close()

    # Methods for the settings.

    @property
    def settings(self) -> Settings:
        """The current settings."""
        return self._engine.settings

    def configure(self, settings: Settings) -> None:
        """Replace the settings; live allocations stay."""
        limit_bytes = UNLIMITED
        if settings.memory_fraction < 1:
            limit_bytes = int(settings.memory_fraction * self._upstream.memory_info().total_bytes)
        with self._guard:
            self._engine.configure(settings, limit_bytes)
            releases_lock = settings.release_lock_on_cudamalloc
            self._engine.malloc = self._malloc_unlocked if releases_lock else self._upstream.malloc
            self._set_slow("settings", is_on=not self._engine.is_simple)

    def _malloc_unlocked(self, size_bytes: int, stream: int) -> int:
        with self._guard.unlocked():
            return self._upstream.malloc(size_bytes, stream)

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

    # Methods for private pools: context managers, and the functions of PyTorch's C++ API.

    @contextmanager
    def use_pool(self, pool: HeldPool | PoolId) -> Iterator[None]:
        """Serve the requests of this thread from a pool; of nested ``with`` blocks, the innermost applies.

        Events are queried and memory is released as usual, unlike in PyTorch 2.11 (PyTorch issue 159674).
        Raises PoolError if another ``with`` block uses the pool.
        """
        pool_id = id_of_open_pool(pool)
        self.begin_allocate_to_pool(pool_id, calling_thread_filter())
        try:
            yield
        finally:
            with self._locked_pools() as pools:
                pools.end_route(pool_id)
                pools.release_holder(pool_id)

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
        if graph is None and isinstance(self._upstream, CapturableUpstream):
            graph = self._upstream.graph
        reuses_blocks = self.settings.graph_capture_record_stream_reuse
        captured_graph = CapturedGraph(graph) if graph and reuses_blocks else None
        number = None if stream is None else stream_number(stream)
        with self._locked_pools() as pools:
            pool_id = pools.issue_id(for_graph=True) if pool is None else id_of_open_pool(pool)
            pools.begin_route(pool_id, capture_filter(number, graph))
            self._captures.begin(captured_graph)
        graph_memory = GraphMemory(self, pool_id)
        is_complete = False
        try:
            yield graph_memory
            is_complete = True
        finally:
            with self._locked_pools() as pools:
                try:
                    pools.end_route(pool_id)
                finally:
                    self._end_capture(captured_graph)
            if not is_complete:
                graph_memory.close()

    def graph_pool_handle(self) -> PoolId:
        """Return the id of a pool that graphs may share (torch.cuda.graph_pool_handle)."""
        with self._locked_pools() as pools:
            return pools.issue_id(for_graph=False)

    def begin_allocate_to_pool(self, pool_id: PoolId, takes: StreamFilter) -> None:
        """Route the requests that ``takes`` accepts to a pool, and hold the pool; create it if necessary.

        If several pools accept a request, the pool whose routing began last serves it. ``takes`` is called
        with the number of a stream, in the requesting thread, while the allocator is locked. Raises PoolError
        if requests are routed to this pool already, if the pool has no holder any more, and for an id that
        was never issued.
        """
        with self._locked_pools() as pools:
            pools.begin_route(pool_id, takes)

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Stop routing requests to a pool, which is held until ``release_pool``. Raises PoolError."""
        with self._locked_pools() as pools:
            pools.end_route(pool_id)

    def release_pool(self, pool_id: PoolId, *, must_be_unrouted: bool = False) -> None:
        """Remove a holder of a pool. Without holders, ``empty_cache`` releases the pool's cached memory.

        Raises PoolError if the pool has no holder, or if this is its only holder and requests are still
        routed to the pool. With ``must_be_unrouted``, raises PoolError whenever requests are routed to the
        pool.
        """
        with self._locked_pools() as pools:
            pools.release_holder(pool_id, must_be_unrouted=must_be_unrouted)

    def begin_capture(self) -> None:
        """Begin a capture: until its end no event is queried and nothing is released."""
        with self._guard:
            self._captures.begin()

    def end_capture(self) -> None:
        """End a capture. Raises PoolError if no capture was begun."""
        with self._guard:
            self._end_capture(None)

    def _end_capture(self, graph: CapturedGraph | None) -> None:
        if not self._captures.capture_count:
            raise PoolError("no capture was begun", hint="call begin_capture() first")
        self._captures.end(graph)

    def create_pool(
        self,
        *,
        source: SegmentSource | None = None,
        use_on_oom: bool = False,
        splits: bool = True,
    ) -> PoolId:
        """Create a pool for MemPool, with one holder, and return its id."""
        with self._locked_pools() as pools:
            pool_id = pools.issue_id(for_graph=False)
            pools.create_pool(pool_id, source=source, use_on_oom=use_on_oom, no_split=not splits)
            return pool_id

    def empty_pool(self, pool_id: PoolId) -> None:
        """Release the cached memory of a pool without holders, except during a capture. Raises CudaError."""
        with self._locked_pools() as pools:
            if pools.exists(pool_id):
                self._empty_pool(pool_id)

    def abandon_pool(self, pool_id: PoolId, releases_cache: bool) -> None:
        """Remove a holder of a pool, now or at the next call. Finalizers call this. Raises no exception."""
        self._engine.private_pools.abandoned_pools.append((pool_id, releases_cache))
        if self._guard.try_enter():
            try:
                self._release_abandoned()
            finally:
                self._guard.leave()
                self._guard.drain_queue()

    def pool_uses(self, pool_id: PoolId) -> int:
        """Return the number of holders of a pool. Raises PoolError for an id that was never issued."""
        with self._locked_pools() as pools:
            return pools.find_pool(pool_id).holder_count if pools.exists(pool_id) else 0

    def private_pools(self) -> tuple[PoolUsage, ...]:
        """List the private pools, oldest first."""
        with self._locked_pools() as pools:
            return tuple(
                PoolUsage(
                    pool.id,
                    pool.holder_count,
                    len(segments := self._engine.segments.of_pool(pool.id)),
                    sum(segment.size for segment in segments),
                    sum(block.size for block in self._engine.segments.allocated_blocks(pool.id)),
                )
                for pool in pools
            )

    def checkpoint(self, pool: HeldPool | PoolId) -> PoolState:
        """Return a checkpoint: how a private pool is divided into blocks (_cuda_getCheckpointState).

        Raises PoolError if the pool has no holder, or if other streams still use a freed block of the pool.
        """
        with self._locked_pools() as pools:
            self._pending_frees.record_deferred_events()
            return checkpoint_of(self._engine, pools.find_held_pool(pool_id_of(pool)).id)

    def restore(self, state: PoolState) -> Restored:
        """Divide a private pool as at a checkpoint; return the freed and the created allocations.

        All allocations of the pool are freed. Then the allocations of the checkpoint are created, at the same
        addresses and with the sizes of their blocks. Segments that were added after the checkpoint stay free.
        Events in the trace have the ``internal_metadata`` "restore". Raises PoolError, and changes nothing,
        if the pool has no holder, segments were released, or other streams use its blocks (torch's
        _cuda_setCheckpointPoolState).
        """
        stack = gather_stack() if self._history.level else None
        with self._locked_pools() as pools, self._history.tag_events("restore"):
            self._pending_frees.record_deferred_events(stack)
            pools.find_held_pool(state.pool)
            return restore(self._engine, self._live_blocks, self._free_block, state, stack)

    def holds_exactly(self, pool: HeldPool | PoolId, live: Collection[int]) -> bool:
        """Return whether exactly the addresses in ``live`` are allocated in a private pool.

        Raises PoolError if the pool does not exist (torch's _cuda_checkPoolLiveAllocations).
        """
        with self._locked_pools() as pools:
            blocks = self._engine.segments.allocated_blocks(pools.find_pool(pool_id_of(pool)).id)
            return {int(block.ptr) for block in blocks} == set(live)

    @contextmanager
    def _locked_pools(self) -> Iterator[PrivatePools]:
        """Hold the guard in a ``with`` block, and first release the pools that finalizers abandoned."""
        with self._guard:
            self._release_abandoned()
            try:
                yield self._engine.private_pools
            finally:
                self._set_slow("routed", is_on=bool(self._engine.private_pools.routes))

    def _release_abandoned(self) -> None:
        pools = self._engine.private_pools
        while pools.abandoned_pools:
            pool_id, releases_cache = pools.abandoned_pools.popleft()
            with suppress(CudaError, PoolError):  # Memory that cannot be released stays cached.
                pools.release_holder(pool_id)
                if releases_cache:
                    self._empty_pool(pool_id)


# --- Checkpoints: how a private pool is divided into blocks, and the restoration of this division ---
#
# A replayed graph writes its outputs to the addresses of its capture, even if other blocks were allocated
# there after the capture. So a checkpoint records how a pool is divided into blocks, and can restore this
# division. The caller holds the allocator's guard. Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (Note
# [Checkpointing PrivatePoolState], getCheckpointState, setCheckpointPoolState, setSegmentStateToCheckpoint).


@dataclass(frozen=True, slots=True)
class BlockState:
    """The state of a block at a checkpoint."""

    address: int
    size_bytes: int
    allocated: bool


@dataclass(frozen=True, slots=True)
class PoolState:
    """A checkpoint: the blocks of every segment of a pool, by address."""

    pool: PoolId
    segments: tuple[tuple[BlockState, ...], ...]


@dataclass(frozen=True, slots=True)
class Restored:
    """The addresses of the allocations that a restore freed, and of those that it created."""

    freed: tuple[int, ...]  # Addresses of the freed allocations.
    created: tuple[int, ...]  # Addresses of the created allocations.


def checkpoint_of(engine: Engine, pool: PoolId) -> PoolState:
    """Return how a pool is divided into blocks. Raises PoolError if other streams still use a freed block."""
    segments = engine.segments.of_pool(pool)
    for segment in segments:
        _check_unused(segment, allow_stream_uses=True)
    return PoolState(
        pool,
        tuple(
            tuple(
                BlockState(int(block.ptr), block.size, block.is_allocated)
                for block in segment.blocks()
            )
            for segment in segments
        ),
    )


def restore(
    engine: Engine,
    live_blocks: dict[int, Block],
    free_live_block: Callable[[Block, RawStack | None], None],
    state: PoolState,
    stack: RawStack | None,
) -> Restored:
    """Divide a pool as at a checkpoint, all of whose allocations are freed first.

    Raises PoolError, and changes nothing, if segments were released, other streams use the pool's blocks, or
    another thread is freeing one of them.
    """
    segments = engine.segments.of_pool(state.pool)
    for segment in segments:
        _check_unused(segment, allow_stream_uses=False)
    sizes = {int(segment.ptr): segment.size for segment in segments}
    for block_states in state.segments:
        address = block_states[0].address
        if sizes.get(address, 0) < sum(block_state.size_bytes for block_state in block_states):
            raise PoolError(
                f"the segment at {address:#x} of private pool {state.pool} was released",
                hint="hold the pool from the checkpoint until the restore",
            )
    old_blocks = engine.segments.allocated_blocks(state.pool)
    for index, block in enumerate(old_blocks):
        if live_blocks.pop(block.ptr, None) is None:
            live_blocks.update((block.ptr, block) for block in old_blocks[:index])
            raise PoolError(
                f"the block at {block.ptr:#x} is being freed by another thread",
                hint="do not use the pool in other threads during the restore",
            )
    freed_addresses = tuple(int(block.ptr) for block in old_blocks)
    for block in old_blocks:
        free_live_block(block, stack)
    created_addresses: list[int] = []
    for block_states in state.segments:
        # Divide the free segment into the blocks of the checkpoint, all allocated. Split as at the
        # checkpoint, even if the settings were changed afterwards.
        rest_block = engine.segments[Ptr(block_states[0].address)].first_block
        new_blocks: list[Block] = []
        for block_state in block_states:
            size = block_state.size_bytes
            rest_block.free_blocks.remove(rest_block)
            engine.alloc_found_block(rest_block, size, size, stack, splits=rest_block.size > size)
            new_blocks.append(rest_block)
            rest_block = rest_block.next or rest_block
        for block, block_state in zip(new_blocks, block_states, strict=True):
            if block_state.allocated:
                live_blocks[block.ptr] = block
                created_addresses.append(block_state.address)
            else:
                free_live_block(block, stack)
    return Restored(freed_addresses, tuple(created_addresses))


def _check_unused(segment: Segment, *, allow_stream_uses: bool) -> None:
    """Raise PoolError if other streams still use a freed block.

    Unless ``allow_stream_uses``, raise PoolError for an allocated block that other streams use, too.
    """
    for block in segment.blocks():
        is_pending = not block.is_free and not block.is_allocated
        if is_pending or (block.stream_uses and not allow_stream_uses):
            raise PoolError(
                f"other streams use the block at {block.ptr:#x} of private pool {segment.pool.id}",
                hint="synchronize them, then call empty_cache()",
            )
