"""The model with private pools and captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from allocator.expandable_model import DEFAULT, ModelBlock, ModelSegment, PoolId
from allocator.model import Model


@dataclass(eq=False)
class ModelPool:
    """A private pool."""

    id: PoolId
    no_split: bool = False
    lends_blocks: bool = False
    holders: int = 1


def reserved_by(pool: PoolId) -> str:
    """Return the name of the statistic of a private pool's reserved bytes."""
    return f"reserved_bytes_by_private_pools.{pool[0]}_{pool[1]}"


class PoolModel(Model):
    def __init__(self, *args: Any, **limits: Any) -> None:
        super().__init__(*args, **limits)
        self.pools: dict[PoolId, ModelPool] = {}
        self.issued = [0, 0]
        self.routes: list[PoolId] = []
        self.captures = 0
        self.deferred: list[tuple[ModelSegment, ModelBlock]] = []

    # Operations

    def alloc(self, requested: int, stream: int) -> int:
        with self._in(self.routes[-1] if self.routes else DEFAULT):
            return super().alloc(requested, stream)

    def use(self, address: int, stream: int) -> None:
        segment, block = self.find_block(address)
        if self.captures and stream != segment.stream and stream not in block.uses:
            block.captured.append(stream)
        super().use(address, stream)

    def empty_cache(self) -> None:
        if self.captures:
            return
        with self._in(DEFAULT):
            self._record_deferred()
            super().empty_cache()
        for pool in list(self.pools.values()):
            if not pool.holders:
                self._give_pool_back(pool)

    def new_pool(self, no_split: bool, lends_blocks: bool) -> PoolId:
        self.issued[1] += 1
        pool = ModelPool((0, self.issued[1]), no_split, lends_blocks)
        self._add(pool)
        return pool.id

    def enter(self, pool: PoolId) -> None:
        self.pools[pool].holders += 1
        self.routes.append(pool)

    def leave(self) -> None:
        self.pools[self.routes.pop()].holders -= 1

    def close_pool(self, pool: PoolId) -> None:
        pool_state = self.pools[pool]
        pool_state.holders -= 1
        if pool_state.holders or self.captures:
            return
        self.numbers["num_sync_all_streams"] += 1
        self._record_deferred()
        for stream, queue in self.queues.items():
            for queued in list(queue):
                event, segment, block = queued
                if segment.pool == pool:
                    completed_event = self.device.reached.get(stream, 0)
                    self.device.reached[stream] = max(completed_event, event)
                    queue.remove(queued)
                    self._reached(segment, block)
        self._give_pool_back(pool_state)

    def begin_capture(self) -> PoolId:
        self.issued[0] += 1
        pool = ModelPool((self.issued[0], 0))
        self._add(pool)
        self.routes.append(pool.id)
        self.captures += 1
        return pool.id

    def end_capture(self) -> None:
        self.captures -= 1
        self.routes.pop()

    def release_graph(self, pool: PoolId) -> None:
        self.pools[pool].holders -= 1

    # Implementation

    def _add(self, pool: ModelPool) -> None:
        self.pools[pool.id] = pool
        for kind in ("all", "small_pool", "large_pool"):
            self._zero(f"{reserved_by(pool.id)}.{kind}")

    def _change(self, metric: str, kind: str, amount: int) -> None:
        super()._change(metric, kind, amount)
        if metric == "reserved_bytes" and self.pool != DEFAULT:
            super()._change(reserved_by(self.pool), kind, amount)

    @contextmanager
    def _in(self, pool: PoolId) -> Iterator[None]:
        outer_pool, self.pool = self.pool, pool
        try:
            yield
        finally:
            self.pool = outer_pool

    def _wait(self, segment: ModelSegment, block: ModelBlock) -> None:
        if block.uses and self.captures:
            self.deferred.append((segment, block))
            return
        block.captured = []
        super()._wait(segment, block)

    def _process(self) -> None:
        if not self.captures:
            self._record_deferred()
            super()._process()

    def _record_deferred(self) -> None:
        deferred, self.deferred = self.deferred, []
        for segment, block in deferred:
            block.uses = [stream for stream in block.uses if stream not in block.captured]
            self._wait(segment, block)

    def _give_pool_back(self, pool: ModelPool) -> None:
        with self._in(pool.id):
            self._give_back((True, False))
        if all(segment.pool != pool.id or not segment.mapped for segment in self.segments):
            del self.pools[pool.id]

    def _splits(self, segment: ModelSegment, size: int, rest_bytes: int) -> bool:
        if segment.pool != DEFAULT and self.pools[segment.pool].no_split:
            return False
        is_lent = segment.pool != self.pool
        uses_expandable, self.uses_expandable = (
            self.uses_expandable,
            self.uses_expandable and not is_lent,
        )
        splits = super()._splits(segment, size, rest_bytes)
        self.uses_expandable = uses_expandable
        return splits

    def _borrow(
        self, size: int, small: bool, stream: int
    ) -> tuple[ModelSegment, ModelBlock] | None:
        for pool in self.pools.values() if self.pool == DEFAULT else ():
            if pool.lends_blocks and pool.holders:
                with self._in(pool.id):
                    location = self._find_plain(size, small, stream)
                if location:
                    return location
        return None

    def _find_plain(
        self, size: int, small: bool, stream: int
    ) -> tuple[ModelSegment, ModelBlock] | None:
        uses_expandable, self.uses_expandable = self.uses_expandable, False
        location = self._find(size, small, stream)
        self.uses_expandable = uses_expandable
        return location

    def _retry(self, size: int, small: bool, stream: int) -> tuple[ModelSegment, ModelBlock] | None:
        return None if self.captures else super()._retry(size, small, stream)

    def _collect(self) -> None:
        with self._in(DEFAULT):
            super()._collect()
