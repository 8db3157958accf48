"""The methods of an allocator for private pools: routing of requests, captures, and checkpoints.

A replayed graph writes its outputs to the addresses of its capture, even if other blocks were allocated there
after the capture. So a checkpoint records how a pool is divided into blocks, and can restore this division.
Source: PyTorch's c10/cuda/CUDACachingAllocator.cpp (beginAllocateToPool, endAllocateToPool, releasePool; Note
[Checkpointing PrivatePoolState], getCheckpointState, setCheckpointPoolState, setSegmentStateToCheckpoint).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cudakit.allocator.blocks import Block, RawStack, SegmentSource
from cudakit.allocator.engine import Engine
from cudakit.allocator.history import gather_stack
from cudakit.allocator.private_pools import (
    GraphMemory,
    HeldPool,
    PoolError,
    PoolOwner,
    PrivatePools,
)
from cudakit.allocator.segments import Segment
from cudakit.allocator.state import AllocatorState
from cudakit.allocator.streams import (
    CapturedGraph,
    StreamFilter,
    calling_thread_filter,
    capture_filter,
)
from cudakit.allocator.upstream import CapturableUpstream, CaptureGraph, stream_number
from cudakit.errors import CudaError
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.oom_facts import PoolId


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """The use and the memory of a private pool."""

    id: PoolId
    uses: int  # Number of holders; if it is 0, the cached memory can be released.
    segments: int  # Number of segments.
    reserved_bytes: int
    allocated_bytes: int


class PoolRouting:
    """The methods of an allocator for private pools and captures."""

    def __init__(self, state: AllocatorState) -> None:
        self._state = state
        self._pools = state.engine.private_pools

    @contextmanager
    def use_pool(self, pool: HeldPool | PoolId) -> Iterator[None]:
        """Serve the requests of this thread from a pool; of nested ``with`` blocks, the innermost applies.

        Events are queried and memory is released as usual, unlike in PyTorch 2.11 (PyTorch issue 159674).
        Raises PoolError if another ``with`` block uses the pool.
        """
        pool_id = _id_of_open_pool(pool)
        self.begin_allocate_to_pool(pool_id, calling_thread_filter())
        try:
            yield
        finally:
            self._stop_using(pool_id)

    @contextmanager
    def capture(
        self,
        owner: PoolOwner,
        pool: HeldPool | PoolId | None,
        stream: int | None,
        graph: CaptureGraph | None,
    ) -> Iterator[GraphMemory]:
        """Implement ``CachingAllocator.capture``; the yielded GraphMemory keeps ``owner`` alive."""
        allocator_stream = None if stream is None else stream_number(stream)
        upstream = self._state.upstream
        if graph is None and isinstance(upstream, CapturableUpstream):
            graph = upstream.graph
        reuses_blocks = self._state.engine.settings.graph_capture_record_stream_reuse
        captured_graph = CapturedGraph(graph) if graph and reuses_blocks else None
        with self.with_pools() as pools:
            pool_id = pools.issue_id(for_graph=True) if pool is None else _id_of_open_pool(pool)
            pools.begin_route(pool_id, capture_filter(allocator_stream, graph))
            self._begin_capture(captured_graph)
        graph_memory = GraphMemory(owner, pool_id)
        is_complete = False
        try:
            yield graph_memory
            is_complete = True
        finally:
            self._stop_capture(pool_id, captured_graph)
            if not is_complete:
                graph_memory.close()

    # Functions of PyTorch's C++ API.

    def graph_pool_handle(self) -> PoolId:
        """Return the id of a pool that graphs may share (torch.cuda.graph_pool_handle)."""
        with self.with_pools() as pools:
            return pools.issue_id(for_graph=False)

    def begin_allocate_to_pool(self, pool_id: PoolId, takes: StreamFilter) -> None:
        """Route the requests that ``takes`` accepts to a pool, and hold the pool; create it if necessary.

        If several pools accept a request, the pool whose routing began last serves it. ``takes`` is called
        with the number of a stream, in the requesting thread, while the allocator is locked. Raises PoolError
        if requests are routed to this pool already, if the pool has no holder any more, and for an id that
        was never issued.
        """
        with self.with_pools() as pools:
            pools.begin_route(pool_id, takes)

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Stop routing requests to a pool, which is held until ``release_pool``. Raises PoolError."""
        with self.with_pools() as pools:
            pools.end_route(pool_id)

    def release_pool(self, pool_id: PoolId, *, must_be_unrouted: bool = False) -> None:
        """Remove a holder of a pool. Without holders, ``empty_cache`` releases the pool's cached memory.

        Raises PoolError if the pool has no holder, or if this is its only holder and requests are still
        routed to the pool. With ``must_be_unrouted``, raises PoolError whenever requests are routed to the
        pool.
        """
        with self.with_pools() as pools:
            pools.release_holder(pool_id, must_be_unrouted=must_be_unrouted)

    def begin_capture(self) -> None:
        """Begin a capture: until its end no event is queried and nothing is released."""
        with self._state.locked():
            self._begin_capture(None)

    def end_capture(self) -> None:
        """End a capture. Raises PoolError if no capture was begun."""
        with self._state.locked():
            self._end_capture(None)

    def create_pool(
        self,
        *,
        source: SegmentSource | None = None,
        use_on_oom: bool = False,
        splits: bool = True,
    ) -> PoolId:
        """Create a pool for MemPool, with one holder, and return its id."""
        with self.with_pools() as pools:
            pool_id = pools.issue_id(for_graph=False)
            pools.create_pool(pool_id, source=source, use_on_oom=use_on_oom, no_split=not splits)
            return pool_id

    def empty_pool(self, pool_id: PoolId) -> None:
        """Release the cached memory of a pool without holders, except during a capture. Raises CudaError."""
        with self.with_pools() as pools:
            if pools.exists(pool_id):
                self._empty_pool(pool_id)

    def abandon_pool(self, pool_id: PoolId, releases_cache: bool) -> None:
        """Remove a holder of a pool, now or at the next call. Finalizers call this. Raises no exception."""
        self._pools.abandoned_pools.append((pool_id, releases_cache))
        guard = self._state.guard
        if guard.try_enter():
            try:
                self._release_abandoned()
            finally:
                guard.leave()
                guard.drain_queue()

    def pool_uses(self, pool_id: PoolId) -> int:
        """Return the number of holders of a pool. Raises PoolError for an id that was never issued."""
        with self.with_pools() as pools:
            return pools.find_pool(pool_id).holder_count if pools.exists(pool_id) else 0

    def private_pools(self) -> tuple[PoolUsage, ...]:
        """List the private pools, oldest first."""
        with self.with_pools() as pools:
            return tuple(self._pool_usage(pool.id, pool.holder_count) for pool in pools)

    @contextmanager
    def with_pools(self) -> Iterator[PrivatePools]:
        """Hold the guard in a ``with`` block, and first release the pools that finalizers abandoned."""
        with self._state.locked():
            self._release_abandoned()
            try:
                yield self._pools
            finally:
                self._state.set_slow("routed", is_on=bool(self._pools.routes))

    def _begin_capture(self, graph: CapturedGraph | None) -> None:
        captures = self._state.captures
        captures.capture_count += 1
        if graph is not None:
            captures.graphs.append(graph)

    def _end_capture(self, graph: CapturedGraph | None) -> None:
        captures = self._state.captures
        if not captures.capture_count:
            raise PoolError("no capture was begun", hint="call begin_capture() first")
        captures.capture_count -= 1
        if graph is not None:
            captures.graphs.remove(graph)

    def _stop_capture(self, pool_id: PoolId, graph: CapturedGraph | None) -> None:
        with self.with_pools() as pools:
            try:
                pools.end_route(pool_id)
            finally:
                self._end_capture(graph)

    def _stop_using(self, pool_id: PoolId) -> None:
        with self.with_pools() as pools:
            pools.end_route(pool_id)
            pools.release_holder(pool_id)

    def _release_abandoned(self) -> None:
        pools = self._pools
        while pools.abandoned_pools:
            pool_id, releases_cache = pools.abandoned_pools.popleft()
            with suppress(CudaError, PoolError):  # Memory that cannot be released stays cached.
                pools.release_holder(pool_id)
                if releases_cache:
                    self._empty_pool(pool_id)

    def _empty_pool(self, pool_id: PoolId) -> None:
        if not self._state.captures.capture_count:
            self._state.empty_pool(self._pools.find_pool(pool_id), None)

    def _pool_usage(self, pool_id: PoolId, holder_count: int) -> PoolUsage:
        segments = [
            segment
            for segment in self._state.engine.segments.values()
            if segment.pool.id == pool_id
        ]
        live_blocks = [
            block for segment in segments for block in segment.blocks() if block.is_allocated
        ]
        return PoolUsage(
            pool_id,
            holder_count,
            len(segments),
            sum(segment.size for segment in segments),
            sum(block.size for block in live_blocks),
        )


def pool_id_of(pool: HeldPool | PoolId) -> PoolId:
    """Return the id of a pool."""
    return pool.id if isinstance(pool, HeldPool) else pool


def _id_of_open_pool(pool: HeldPool | PoolId) -> PoolId:
    """Return the id of a pool. Raises PoolError if the pool is closed."""
    if isinstance(pool, HeldPool) and pool.closed:
        raise PoolError(f"private pool {pool.id} is closed", hint="create a new one")
    return pool_id_of(pool)


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


class Checkpoints:
    """The methods of an allocator for checkpoints of private pools."""

    def __init__(self, state: AllocatorState, routing: PoolRouting) -> None:
        self._state = state
        self._routing = routing

    def checkpoint(self, pool: HeldPool | PoolId) -> PoolState:
        """Return a checkpoint: how a private pool is divided into blocks (_cuda_getCheckpointState).

        Raises PoolError if the pool has no holder, or if other streams still use a freed block of the pool.
        """
        with self._routing.with_pools() as pools:
            self._state.pending_frees.record_deferred_events()
            pool_id = pools.find_held_pool(pool_id_of(pool)).id
            segments = segments_of(self._state.engine, pool_id)
            return PoolState(pool_id, tuple(map(_block_states, segments)))

    def restore(self, state: PoolState) -> Restored:
        """Divide a private pool as at a checkpoint; return the freed and the created allocations.

        All allocations of the pool are freed. Then the allocations of the checkpoint are created, at the same
        addresses and with the sizes of their blocks. Segments that were added after the checkpoint stay free.
        Events in the trace have the ``internal_metadata`` "restore". Raises PoolError, and changes nothing,
        if the pool has no holder, segments were released, or other streams use its blocks (torch's
        _cuda_setCheckpointPoolState).
        """
        allocator, engine = self._state, self._state.engine
        stack = gather_stack(2) if allocator.history.level else None
        with self._routing.with_pools() as pools, allocator.history.tag_events("restore"):
            allocator.pending_frees.record_deferred_events(stack)
            pool_id = pools.find_held_pool(state.pool).id
            _check_restorable(engine, pool_id, state)
            claimed_blocks = self._remove_live_blocks(_live_blocks(engine, pool_id))
            freed_addresses = tuple(int(block.ptr) for block in claimed_blocks)
            for block in claimed_blocks:
                allocator.free_live_block(block, stack)
            created_addresses: list[int] = []
            for block_states in state.segments:
                new_blocks = _divide_segment(engine, block_states, stack)
                for block, block_state in zip(new_blocks, block_states, strict=True):
                    if block_state.allocated:
                        allocator.live_blocks[block.ptr] = block
                        created_addresses.append(block_state.address)
                    else:
                        allocator.free_live_block(block, stack)
            return Restored(freed_addresses, tuple(created_addresses))

    def holds_exactly(self, pool: HeldPool | PoolId, live: Collection[int]) -> bool:
        """Return whether exactly the addresses in ``live`` are allocated in a private pool.

        Raises PoolError if the pool does not exist (torch's _cuda_checkPoolLiveAllocations).
        """
        with self._routing.with_pools() as pools:
            live_blocks = _live_blocks(self._state.engine, pools.find_pool(pool_id_of(pool)).id)
            return {int(block.ptr) for block in live_blocks} == set(live)

    def _remove_live_blocks(self, blocks: list[Block]) -> list[Block]:
        """Remove blocks from the live blocks. Raises PoolError if another thread is freeing one of them."""
        live_blocks = self._state.live_blocks
        for block_index, block in enumerate(blocks):
            if live_blocks.pop(block.ptr, None) is None:
                live_blocks.update((block.ptr, block) for block in blocks[:block_index])
                raise PoolError(
                    f"the block at {block.ptr:#x} is being freed by another thread",
                    hint="do not use the pool in other threads during the restore",
                )
        return blocks


def segments_of(engine: Engine, pool: PoolId) -> list[Segment]:
    """List the segments of a pool by address."""
    pool_segments = [segment for segment in engine.segments.values() if segment.pool.id == pool]
    return sorted(pool_segments, key=lambda segment: segment.ptr)


def _live_blocks(engine: Engine, pool: PoolId) -> list[Block]:
    segments = segments_of(engine, pool)
    return [block for segment in segments for block in segment.blocks() if block.is_allocated]


def _check_restorable(engine: Engine, pool: PoolId, checkpoint: PoolState) -> None:
    """Raise PoolError if segments of a pool were released, or other streams use its blocks."""
    segments = segments_of(engine, pool)
    for segment in segments:
        _check_unused(segment, allow_stream_uses=False)
    segment_sizes = {int(segment.ptr): segment.size for segment in segments}
    for block_states in checkpoint.segments:
        if segment_sizes.get(block_states[0].address, 0) < sum(
            block_state.size_bytes for block_state in block_states
        ):
            raise PoolError(
                f"the segment at {block_states[0].address:#x} of private pool {pool} was released",
                hint="hold the pool from the checkpoint until the restore",
            )


def _divide_segment(
    engine: Engine, block_states: tuple[BlockState, ...], stack: RawStack | None
) -> list[Block]:
    """Divide a free segment into the blocks of a checkpoint, and return them, all allocated."""
    rest_block = engine.segments[Ptr(block_states[0].address)].first_block
    new_blocks: list[Block] = []
    for block_state in block_states:
        rest_block = new_blocks[-1].next or rest_block if new_blocks else rest_block
        rest_block.free_blocks.remove(rest_block)
        # Split as at the checkpoint, even if the settings were changed afterwards.
        should_split, block_bytes = rest_block.size > block_state.size_bytes, block_state.size_bytes
        engine.alloc_found_block(rest_block, block_bytes, block_bytes, stack, splits=should_split)
        new_blocks.append(rest_block)
    return new_blocks


def _block_states(segment: Segment) -> tuple[BlockState, ...]:
    """Return the states of a segment's blocks. Raises PoolError if a freed block is still in use."""
    _check_unused(segment, allow_stream_uses=True)
    return tuple(
        BlockState(int(block.ptr), block.size, block.is_allocated) for block in segment.blocks()
    )


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
