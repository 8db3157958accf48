"""Private pools of an allocator: made, held, routed to, captured into."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from cudakit.core.allocator import release
from cudakit.core.allocator.capture import of_capture, of_this_thread
from cudakit.core.allocator.mempool import GraphMemory, HeldPool
from cudakit.core.allocator.observed import Observed
from cudakit.core.allocator.pools import PoolId
from cudakit.core.allocator.private import PoolError, PrivatePools, SegmentSource, Takes
from cudakit.core.allocator.reuse import CaptureGraph, Proofs
from cudakit.core.allocator.upstream import Captured, stream_number
from cudakit.errors import CudaError


@dataclass(frozen=True, slots=True)
class PoolUsage:
    """A private pool, and what it has."""

    id: PoolId
    uses: int  # how many hold it; 0: what it caches may be given back
    segments: int
    reserved_bytes: int
    allocated_bytes: int


class Pooled(Observed):
    """The allocator of one device, with memory set apart for graphs and for who asks for it."""

    # With contexts that always end what they began.

    @contextmanager
    def use_pool(self, pool: HeldPool | PoolId) -> Iterator[None]:
        """Let the requests of this thread go to a pool; within another one, to this.

        Events are asked and memory is given back as ever: PyTorch 2.11 does neither meanwhile (its issue
        159674). Raises PoolError where requests go to that pool already.
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
        number = None if stream is None else stream_number(stream)
        if graph is None and isinstance(self._upstream, Captured):
            graph = self._upstream.graph
        reuses = self._cache.settings.graph_capture_record_stream_reuse
        proofs = Proofs(graph) if graph and reuses else None
        with self._with_pools() as pools:
            pool_id = pools.issue(graph=True) if pool is None else _open_id(pool)
            pools.begin(pool_id, of_capture(number, graph))
            self._begin_capture(proofs)
        memory = GraphMemory(self, pool_id)
        captured = False
        try:
            yield memory
            captured = True
        finally:
            self._stop_capture(pool_id, proofs)
            if not captured:
                memory.close()

    # One by one, as PyTorch's C++ interface has them.

    def graph_pool_handle(self) -> PoolId:
        """Return the id of a pool that graphs may share (torch.cuda.graph_pool_handle)."""
        with self._with_pools() as pools:
            return pools.issue(graph=False)

    def begin_allocate_to_pool(self, pool_id: PoolId, takes: Takes) -> None:
        """Let the requests for which ``takes`` says so go to a pool, and hold it; it is made if need be.

        The last begun that takes a request has it. ``takes`` is called with the number of a stream, in the
        thread that asks, with the allocator locked. Raises PoolError where requests go there already, where
        all who held the pool have let go, and for an id that was never issued.
        """
        with self._with_pools() as pools:
            pools.begin(pool_id, takes)

    def end_allocate_to_pool(self, pool_id: PoolId) -> None:
        """Let no more requests go to a pool; it is held until ``release_pool``. Raises PoolError."""
        with self._with_pools() as pools:
            pools.end(pool_id)

    def release_pool(self, pool_id: PoolId, *, unrouted: bool = False) -> None:
        """Let go of a pool; when all have, ``empty_cache`` gives back what it caches.

        Raises PoolError where nobody holds it, and while requests go there that nobody else holds it for, or
        any (``unrouted``).
        """
        with self._with_pools() as pools:
            pools.let_go(pool_id, unrouted=unrouted)

    def begin_capture(self) -> None:
        """Say that a capture begins: until its end nothing looks at events or is given back."""
        with self._inside():
            self._begin_capture(None)

    def end_capture(self) -> None:
        """Say that a capture has ended. Raises PoolError where none was begun."""
        with self._inside():
            self._end_capture(None)

    def create_pool(
        self,
        *,
        source: SegmentSource | None = None,
        use_on_oom: bool = False,
        splits: bool = True,
    ) -> PoolId:
        """Make a user's pool, held once. MemPool is what to use."""
        with self._with_pools() as pools:
            pool_id = pools.issue(graph=False)
            pools.create(pool_id, source=source, use_on_oom=use_on_oom, splits=splits)
            return pool_id

    def empty_pool(self, pool_id: PoolId) -> None:
        """Give back what a pool caches that nobody holds any more, unless in a capture. Raises CudaError."""
        with self._with_pools() as pools:
            if pools.is_known(pool_id):
                self._empty_pool(pool_id)

    def abandon_pool(self, pool_id: PoolId, empties: bool) -> None:
        """Let go of a pool from a finalizer, now or a moment later; nothing is raised."""
        self._cache.private.abandoned.append((pool_id, empties))
        if self._guard.try_enter():
            try:
                self._let_abandoned_go()
            finally:
                self._guard.leave()
                self._drain()

    def pool_uses(self, pool_id: PoolId) -> int:
        """Return how many hold a pool; 0 where it is gone. Raises PoolError for an id never issued."""
        with self._with_pools() as pools:
            return pools.find(pool_id).uses if pools.is_known(pool_id) else 0

    def private_pools(self) -> tuple[PoolUsage, ...]:
        """List the private pools, oldest first."""
        with self._with_pools() as pools:
            return tuple(self._usage(pool.id, pool.uses) for pool in pools)

    # Inside: the guard is held.

    @contextmanager
    def _with_pools(self, *, flushes: bool = False) -> Iterator[PrivatePools]:
        """Enter; the front cache has nothing of private pools, and need not be flushed for them."""
        with self._inside(flushes=flushes):
            self._let_abandoned_go()
            try:
                yield self._cache.private
            finally:
                self._let("routed", on=bool(self._routes))

    def _begin_capture(self, proofs: Proofs | None) -> None:
        self._uses.captures += 1
        if proofs is not None:
            self._uses.proofs.append(proofs)

    def _end_capture(self, proofs: Proofs | None) -> None:
        if not self._uses.captures:
            raise PoolError("no capture is under way", hint="begin_capture() comes first")
        self._uses.captures -= 1
        if proofs is not None:
            self._uses.proofs.remove(proofs)

    def _stop_capture(self, pool_id: PoolId, proofs: Proofs | None) -> None:
        with self._with_pools() as pools:
            try:
                pools.end(pool_id)
            finally:
                self._end_capture(proofs)

    def _stop_using(self, pool_id: PoolId) -> None:
        with self._with_pools() as pools:
            pools.end(pool_id)
            pools.let_go(pool_id)

    def _let_abandoned_go(self) -> None:
        pools = self._cache.private
        while pools.abandoned:
            pool_id, empties = pools.abandoned.popleft()
            with suppress(CudaError, PoolError):  # what was not given back is cached
                pools.let_go(pool_id)
                if empties:
                    self._empty_pool(pool_id)

    def _empty_pool(self, pool_id: PoolId) -> None:
        if not self._uses.captures:
            release.empty_pool(self._cache, self._uses, self._cache.private.find(pool_id), None)

    def _usage(self, pool_id: PoolId, uses: int) -> PoolUsage:
        segments = [s for s in self._cache.segments.values() if s.pool.id == pool_id]
        live = [block for segment in segments for block in segment.blocks() if block.allocated]
        return PoolUsage(
            pool_id,
            uses,
            len(segments),
            sum(segment.size for segment in segments),
            sum(block.size for block in live),
        )


def id_of(pool: HeldPool | PoolId) -> PoolId:
    """Return the id of a pool, which may be given as one."""
    return pool.id if isinstance(pool, HeldPool) else pool


def _open_id(pool: HeldPool | PoolId) -> PoolId:
    """Return the id of a pool. Raises PoolError for one that is closed."""
    if isinstance(pool, HeldPool) and pool.closed:
        raise PoolError(f"private pool {pool.id} is closed", hint="make a new one")
    return id_of(pool)
