"""The methods of an allocator for private pools: routing of requests, captures, and checkpoints.

A replayed graph writes its outputs to the addresses of its capture, even if other memory was allocated there
since. So a checkpoint records how the pool is divided into blocks, and can restore this division. Source:
PyTorch's c10/cuda/CUDACachingAllocator.cpp (beginAllocateToPool, endAllocateToPool, releasePool; Note
[Checkpointing PrivatePoolState], getCheckpointState, setCheckpointPoolState, setSegmentStateToCheckpoint).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cudakit.core.allocator.blocks import Block, RawStack, SegmentSource
from cudakit.core.allocator.engine import Engine
from cudakit.core.allocator.history import gather
from cudakit.core.allocator.private_pools import (
    GraphMemory,
    HeldPool,
    PoolError,
    PoolOwner,
    PrivatePools,
)
from cudakit.core.allocator.segments import Segment
from cudakit.core.allocator.state import AllocatorState
from cudakit.core.allocator.streams import CapturedGraph, StreamFilter, of_capture, of_this_thread
from cudakit.core.allocator.upstream import Captured, CaptureGraph, stream_number
from cudakit.errors import CudaError
from cudakit.gpu.api import Ptr
from cudakit.torch_rules.oom_facts import PoolId


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """The use and the memory of a private pool."""

    id: PoolId
    uses: int  # number of holders; with 0 its cached memory can be released
    segments: int
    reserved_bytes: int
    allocated_bytes: int


class PoolRouting:
    """The methods of an allocator for private pools and captures."""

    def __init__(self, state: AllocatorState) -> None:
        self._state = state
        self._pools = state.engine.private

    @contextmanager
    def use_pool(self, pool: HeldPool | PoolId) -> Iterator[None]:
        """Serve the requests of this thread from a pool; of nested contexts the innermost applies.

        Events are queried and memory is released as usual, unlike in PyTorch 2.11 (its issue 159674). Raises
        PoolError if the pool is in use by another context.
        """
        pool_id = _open_id(pool)
        self.begin_allocate_to_pool(pool_id, of_this_thread())
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
        """See ``CachingAllocator.capture``; the GraphMemory keeps ``owner`` alive."""
        number = None if stream is None else stream_number(stream)
        upstream = self._state.upstream
        if graph is None and isinstance(upstream, Captured):
            graph = upstream.graph
        reuses = self._state.engine.settings.graph_capture_record_stream_reuse
        captured_graph = CapturedGraph(graph) if graph and reuses else None
        with self.with_pools() as pools:
            pool_id = pools.issue(graph=True) if pool is None else _open_id(pool)
            pools.begin(pool_id, of_capture(number, graph))
            self._begin_capture(captured_graph)
        memory = GraphMemory(owner, pool_id)
        captured = False
        try:
            yield memory
            captured = True
        finally:
            self._stop_capture(pool_id, captured_graph)
            if not captured:
                memory.close()

    # The functions of PyTorch's C++ API.

    def graph_pool_handle(self) -> PoolId:
        """Return the id of a pool that graphs may share (torch.cuda.graph_pool_handle)."""
        with self.with_pools() as pools:
            return pools.issue(graph=False)

    def begin_allocate_to_pool(self, pool_id: PoolId, takes: StreamFilter) -> None:
        """Route the requests that ``takes`` accepts to a pool and hold it; create it if necessary.

        If several pools accept a request, the last begun serves it. ``takes`` is called with the number of a
        stream, in the requesting thread, while the allocator is locked. Raises PoolError if requests are
        routed there already, if the pool has no holder any more, and for an id that was never issued.
        """
        with self.with_pools() as pools:
            pools.begin(pool_id, takes)

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Stop routing requests to a pool; it is held until ``release_pool``. Raises PoolError."""
        with self.with_pools() as pools:
            pools.end(pool_id)

    def release_pool(self, pool_id: PoolId, *, unrouted: bool = False) -> None:
        """Release one hold of a pool. Without holders, ``empty_cache`` releases its cached memory.

        Raises PoolError if the pool has no holder, and if requests are still routed to it and this is its
        only holder; with ``unrouted``, if requests are routed to it at all.
        """
        with self.with_pools() as pools:
            pools.release_holder(pool_id, unrouted=unrouted)

    def begin_capture(self) -> None:
        """Begin a capture: until its end no event is queried and nothing is released."""
        with self._state.inside():
            self._begin_capture(None)

    def end_capture(self) -> None:
        """End a capture. Raises PoolError if none was begun."""
        with self._state.inside():
            self._end_capture(None)

    def create_pool(
        self,
        *,
        source: SegmentSource | None = None,
        use_on_oom: bool = False,
        splits: bool = True,
    ) -> PoolId:
        """Create a user's pool with one holder, and return its id. MemPool is the public interface."""
        with self.with_pools() as pools:
            pool_id = pools.issue(graph=False)
            pools.create(pool_id, source=source, use_on_oom=use_on_oom, no_split=not splits)
            return pool_id

    def empty_pool(self, pool_id: PoolId) -> None:
        """Release the cached memory of a pool without holders, except during a capture. Raises CudaError."""
        with self.with_pools() as pools:
            if pools.is_known(pool_id):
                self._empty_pool(pool_id)

    def abandon_pool(self, pool_id: PoolId, empties: bool) -> None:
        """Release one hold of a pool from a finalizer, now or at the next call. Raises nothing."""
        self._pools.abandoned.append((pool_id, empties))
        guard = self._state.guard
        if guard.try_enter():
            try:
                self._release_abandoned()
            finally:
                guard.leave()
                guard.drain()

    def pool_uses(self, pool_id: PoolId) -> int:
        """Return the number of holders of a pool. Raises PoolError for an id that was never issued."""
        with self.with_pools() as pools:
            return pools.find(pool_id).uses if pools.is_known(pool_id) else 0

    def private_pools(self) -> tuple[PoolUsage, ...]:
        """List the private pools, oldest first."""
        with self.with_pools() as pools:
            return tuple(self._usage(pool.id, pool.uses) for pool in pools)

    @contextmanager
    def with_pools(self) -> Iterator[PrivatePools]:
        """Hold the guard, and first release the pools that finalizers abandoned."""
        with self._state.inside():
            self._release_abandoned()
            try:
                yield self._pools
            finally:
                self._state.set_slow("routed", on=bool(self._pools.routes))

    def _begin_capture(self, graph: CapturedGraph | None) -> None:
        captures = self._state.captures
        captures.count += 1
        if graph is not None:
            captures.graphs.append(graph)

    def _end_capture(self, graph: CapturedGraph | None) -> None:
        captures = self._state.captures
        if not captures.count:
            raise PoolError("no capture was begun", hint="call begin_capture() first")
        captures.count -= 1
        if graph is not None:
            captures.graphs.remove(graph)

    def _stop_capture(self, pool_id: PoolId, graph: CapturedGraph | None) -> None:
        with self.with_pools() as pools:
            try:
                pools.end(pool_id)
            finally:
                self._end_capture(graph)

    def _stop_using(self, pool_id: PoolId) -> None:
        with self.with_pools() as pools:
            pools.end(pool_id)
            pools.release_holder(pool_id)

    def _release_abandoned(self) -> None:
        pools = self._pools
        while pools.abandoned:
            pool_id, empties = pools.abandoned.popleft()
            with suppress(CudaError, PoolError):  # memory that was not released stays cached
                pools.release_holder(pool_id)
                if empties:
                    self._empty_pool(pool_id)

    def _empty_pool(self, pool_id: PoolId) -> None:
        if not self._state.captures.count:
            self._state.empty_pool(self._pools.find(pool_id), None)

    def _usage(self, pool_id: PoolId, uses: int) -> PoolUsage:
        segments = [s for s in self._state.engine.segments.values() if s.pool.id == pool_id]
        live = [block for segment in segments for block in segment.blocks() if block.allocated]
        return PoolUsage(
            pool_id,
            uses,
            len(segments),
            sum(segment.size for segment in segments),
            sum(block.size for block in live),
        )


def id_of(pool: HeldPool | PoolId) -> PoolId:
    """Return the id of a pool."""
    return pool.id if isinstance(pool, HeldPool) else pool


def _open_id(pool: HeldPool | PoolId) -> PoolId:
    """Return the id of a pool. Raises PoolError if it is closed."""
    if isinstance(pool, HeldPool) and pool.closed:
        raise PoolError(f"private pool {pool.id} is closed", hint="create a new one")
    return id_of(pool)


@dataclass(frozen=True, slots=True)
class BlockState:
    """A block of a checkpoint."""

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

    freed: tuple[int, ...]
    created: tuple[int, ...]


class Checkpoints:
    """The methods of an allocator for checkpoints of private pools."""

    def __init__(self, state: AllocatorState, routing: PoolRouting) -> None:
        self._state = state
        self._routing = routing

    def checkpoint(self, pool: HeldPool | PoolId) -> PoolState:
        """Return how a private pool is divided into blocks (torch's _cuda_getCheckpointState).

        Raises PoolError if the pool has no holder, or other streams still use a freed block of it.
        """
        with self._routing.with_pools() as pools:
            self._state.pending.settle()
            pool_id = pools.live(id_of(pool)).id
            segments = segments_of(self._state.engine, pool_id)
            return PoolState(pool_id, tuple(map(_division_of, segments)))

    def restore(self, state: PoolState) -> Restored:
        """Divide a private pool as at a checkpoint; return the freed and the created allocations.

        All allocations of the pool are freed. Then those of the checkpoint are created, at the same addresses
        and with the sizes of their blocks. Later segments stay, free. Events in the trace have the
        ``internal_metadata`` "restore". Raises PoolError, and changes nothing, if the pool has no holder,
        segments were released, or other streams use its blocks (torch's _cuda_setCheckpointPoolState).
        """
        own, engine = self._state, self._state.engine
        stack = gather(2) if own.history.level else None
        with self._routing.with_pools() as pools, own.history.tagged("restore"):
            own.pending.settle(stack)
            pool_id = pools.live(state.pool).id
            _check(engine, pool_id, state)
            freed = self._claim(_live_blocks(engine, pool_id))
            addresses = tuple(int(block.ptr) for block in freed)
            for block in freed:
                own.free_live(block, stack)
            created: list[int] = []
            for blocks in state.segments:
                divided = _divide(engine, blocks, stack)
                for block, recorded in zip(divided, blocks, strict=True):
                    if recorded.allocated:
                        own.live[block.ptr] = block
                        created.append(recorded.address)
                    else:
                        own.free_live(block, stack)
            return Restored(addresses, tuple(created))

    def holds_exactly(self, pool: HeldPool | PoolId, live: Collection[int]) -> bool:
        """Return whether exactly these addresses are allocated in a private pool.

        Raises PoolError if there is no such pool (torch's _cuda_checkPoolLiveAllocations).
        """
        with self._routing.with_pools() as pools:
            live_blocks = _live_blocks(self._state.engine, pools.find(id_of(pool)).id)
            return {int(block.ptr) for block in live_blocks} == set(live)

    def _claim(self, blocks: list[Block]) -> list[Block]:
        """Remove blocks from the live ones. Raises PoolError if another thread is freeing one of them."""
        live = self._state.live
        for number, block in enumerate(blocks):
            if live.pop(block.ptr, None) is None:
                live.update((block.ptr, block) for block in blocks[:number])
                raise PoolError(
                    f"the block at {block.ptr:#x} is being freed by another thread",
                    hint="do not use the pool in other threads during the restore",
                )
        return blocks


def segments_of(engine: Engine, pool: PoolId) -> list[Segment]:
    """List the segments of a pool by address."""
    of_pool = [segment for segment in engine.segments.values() if segment.pool.id == pool]
    return sorted(of_pool, key=lambda segment: segment.ptr)


def _live_blocks(engine: Engine, pool: PoolId) -> list[Block]:
    segments = segments_of(engine, pool)
    return [block for segment in segments for block in segment.blocks() if block.allocated]


def _check(engine: Engine, pool: PoolId, checkpoint: PoolState) -> None:
    """Raise PoolError if segments of a pool were released, or other streams use its blocks."""
    segments = segments_of(engine, pool)
    for segment in segments:
        _check_unused(segment, settled=False)
    sizes = {int(segment.ptr): segment.size for segment in segments}
    for blocks in checkpoint.segments:
        if sizes.get(blocks[0].address, 0) < sum(block.size_bytes for block in blocks):
            raise PoolError(
                f"the segment at {blocks[0].address:#x} of private pool {pool} was released",
                hint="hold the pool from the checkpoint until the restore",
            )


def _divide(engine: Engine, blocks: tuple[BlockState, ...], stack: RawStack | None) -> list[Block]:
    """Divide a free segment into the blocks of a checkpoint, and return them, all allocated."""
    rest = engine.segments[Ptr(blocks[0].address)].first
    pieces: list[Block] = []
    for recorded in blocks:
        rest = pieces[-1].next or rest if pieces else rest
        rest.free_blocks.remove(rest)
        # Split as at the checkpoint, even if the settings have changed since.
        split, size = rest.size > recorded.size_bytes, recorded.size_bytes
        engine.alloc_found_block(rest, size, size, stack, split=split)
        pieces.append(rest)
    return pieces


def _division_of(segment: Segment) -> tuple[BlockState, ...]:
    """Return the blocks of a segment. Raises PoolError if a freed block is still in use."""
    _check_unused(segment, settled=True)
    return tuple(
        BlockState(int(block.ptr), block.size, block.allocated) for block in segment.blocks()
    )


def _check_unused(segment: Segment, *, settled: bool) -> None:
    """Raise PoolError if other streams use a freed block, or (not ``settled``) a live one."""
    for block in segment.blocks():
        freed = not block.free and not block.allocated
        if freed or (block.stream_uses and not settled):
            raise PoolError(
                f"other streams use the block at {block.ptr:#x} of private pool {segment.pool.id}",
                hint="synchronize them, then call empty_cache()",
            )
