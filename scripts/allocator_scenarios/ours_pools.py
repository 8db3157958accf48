"""The private pools and captures of our allocator."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from allocator_scenarios.work import Work
from cudakit.core.memory.allocator.caching import CachingAllocator
from cudakit.core.memory.allocator.checkpoint import PoolState
from cudakit.core.memory.allocator.mempool import GraphMemory, MemPool
from cudakit.core.memory.allocator.upstream import Upstream


class Calls:
    """Gives segments, and counts how often it is asked."""

    def __init__(self, upstream: Upstream) -> None:
        self._upstream = upstream
        self.made = self.freed = 0

    def malloc(self, size_bytes: int, stream: int) -> int:
        self.made += 1
        return self._upstream.malloc(size_bytes, stream)

    def free(self, ptr: int) -> None:
        self.freed += 1
        self._upstream.free(ptr)


class OursPools:
    """Pools and graphs by number."""

    allocator: CachingAllocator
    _upstream: Upstream
    _work: Work

    def adopt(self, live: Collection[int], stale: Collection[int]) -> None:
        """Know what is live in a pool that was restored, and what is so no more."""
        raise NotImplementedError

    def forget_pools(self) -> None:
        """Begin without any."""
        self.capturing = False
        self._pools: dict[int, MemPool] = {}
        self._calls: dict[int, Calls] = {}
        self._graphs: dict[int, GraphMemory] = {}
        self._names: dict[tuple[int, int], str] = {}
        self._made = 0

    def make_pool(
        self, *, own: bool = False, use_on_oom: bool = False, no_split: bool = False
    ) -> int:
        calls = Calls(self._upstream) if own else None
        pool = MemPool(self.allocator, upstream=calls, use_on_oom=use_on_oom, no_split=no_split)
        number = self._numbered(pool.id)
        self._pools[number] = pool
        if calls:
            self._calls[number] = calls
        return number

    def pool_facts(self, pool: int) -> tuple[tuple[int, int], int]:
        return self._pools[pool].id, self._pools[pool].uses

    def own_calls(self, pool: int) -> tuple[int, int]:
        return self._calls[pool].made, self._calls[pool].freed

    @contextmanager
    def inside(self, pool: int) -> Iterator[None]:
        with self.allocator.use_pool(self._pools[pool]):
            yield

    def drop_pool(self, pool: int) -> None:
        self._pools.pop(pool).close()

    def pool_snapshot(self, pool: int) -> list[dict[str, Any]]:
        return self._pools[pool].snapshot()

    @contextmanager
    def capture(self, stream: str, graph: int | None = None) -> Iterator[int]:
        shared = self._graphs[graph].id if graph is not None else None
        captured = self._work.begin_capture(stream)
        self.capturing = True
        try:
            with self.allocator.capture(
                shared, self._work.numbers[stream], graph=captured
            ) as memory:
                number = self._numbered(memory.id)
                self._graphs[number] = memory
                yield number
        finally:
            self._work.end_capture(stream)
            self.capturing = False

    def drop_graph(self, graph: int) -> None:
        self._graphs.pop(graph).close()

    def save_pool(self, graph: int) -> PoolState:
        return self.allocator.checkpoint(self._graphs[graph])

    def restore_pool(
        self,
        graph: int,  # noqa: ARG002  # which the state names too
        state: PoolState,
        stale: Collection[int],
    ) -> Collection[int]:
        restored = self.allocator.restore(state)
        self.allocator.snapshot()  # PyTorch's is asked what is live by one, which is in the trace
        self.adopt(restored.created, stale)
        return restored.created

    def live_set_is(self, graph: int, live: Collection[int]) -> bool:
        return self.allocator.holds_exactly(self._graphs[graph], live)

    def drop_all(self) -> None:
        """Let every pool and every graph go."""
        for held in (*self._pools.values(), *self._graphs.values()):
            held.close()

    def pool_names(self) -> dict[tuple[int, int], str]:
        return self._names

    def _numbered(self, pool: tuple[int, int]) -> int:
        self._made += 1
        self._names.setdefault(pool, f"pool {len(self._names) + 1}")
        return self._made
