"""The model with private pools and captures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from core.allocator.growth import DEFAULT, Area, Piece, PoolId
from core.allocator.model import Model


@dataclass(eq=False)
class Own:
    """A private pool."""

    id: PoolId
    no_split: bool = False
    lends: bool = False
    holders: int = 1


def reserved_by(pool: PoolId) -> str:
    """Return the name of the statistic of a private pool's reserved bytes."""
    return f"reserved_bytes_by_private_pools.{pool[0]}_{pool[1]}"


class PoolModel(Model):
    def __init__(self, *args: Any, **limits: Any) -> None:
        super().__init__(*args, **limits)
        self.pools: dict[PoolId, Own] = {}
        self.issued = [0, 0]
        self.routes: list[PoolId] = []
        self.captures = 0
        self.deferred: list[tuple[Area, Piece]] = []

    # Operations.

    def alloc(self, requested: int, stream: int) -> int:
        with self._in(self.routes[-1] if self.routes else DEFAULT):
            return super().alloc(requested, stream)

    def use(self, address: int, stream: int) -> None:
        area, piece = self._at(address)
        if self.captures and stream != area.stream and stream not in piece.uses:
            piece.captured.append(stream)
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

    def new_pool(self, no_split: bool, lends: bool) -> PoolId:
        self.issued[1] += 1
        pool = Own((0, self.issued[1]), no_split, lends)
        self._add(pool)
        return pool.id

    def enter(self, pool: PoolId) -> None:
        self.pools[pool].holders += 1
        self.routes.append(pool)

    def leave(self) -> None:
        self.pools[self.routes.pop()].holders -= 1

    def close_pool(self, pool: PoolId) -> None:
        own = self.pools[pool]
        own.holders -= 1
        if own.holders or self.captures:
            return
        self.numbers["num_sync_all_streams"] += 1
        self._record_deferred()
        for stream, queue in self.queues.items():
            for entry in list(queue):
                place, area, piece = entry
                if area.pool == pool:
                    reached = self.device.reached.get(stream, 0)
                    self.device.reached[stream] = max(reached, place)
                    queue.remove(entry)
                    self._reached(area, piece)
        self._give_pool_back(own)

    def begin_capture(self) -> PoolId:
        self.issued[0] += 1
        pool = Own((self.issued[0], 0))
        self._add(pool)
        self.routes.append(pool.id)
        self.captures += 1
        return pool.id

    def end_capture(self) -> None:
        self.captures -= 1
        self.routes.pop()

    def release_graph(self, pool: PoolId) -> None:
        self.pools[pool].holders -= 1

    # How.

    def _add(self, pool: Own) -> None:
        self.pools[pool.id] = pool
        for kind in ("all", "small_pool", "large_pool"):
            self._zero(f"{reserved_by(pool.id)}.{kind}")

    def _change(self, metric: str, kind: str, amount: int) -> None:
        super()._change(metric, kind, amount)
        if metric == "reserved_bytes" and self.pool != DEFAULT:
            super()._change(reserved_by(self.pool), kind, amount)

    @contextmanager
    def _in(self, pool: PoolId) -> Iterator[None]:
        before, self.pool = self.pool, pool
        try:
            yield
        finally:
            self.pool = before

    def _wait(self, area: Area, piece: Piece) -> None:
        if piece.uses and self.captures:
            self.deferred.append((area, piece))
            return
        piece.captured = []
        super()._wait(area, piece)

    def _process(self) -> None:
        if not self.captures:
            self._record_deferred()
            super()._process()

    def _record_deferred(self) -> None:
        deferred, self.deferred = self.deferred, []
        for area, piece in deferred:
            piece.uses = [stream for stream in piece.uses if stream not in piece.captured]
            self._wait(area, piece)

    def _give_pool_back(self, pool: Own) -> None:
        with self._in(pool.id):
            self._give_back((True, False))
        if all(area.pool != pool.id or not area.mapped for area in self.areas):
            del self.pools[pool.id]

    def _splits(self, area: Area, size: int, rest: int) -> bool:
        if area.pool != DEFAULT and self.pools[area.pool].no_split:
            return False
        lent = area.pool != self.pool
        expands, self.expands = self.expands, self.expands and not lent
        splits = super()._splits(area, size, rest)
        self.expands = expands
        return splits

    def _borrow(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        for pool in self.pools.values() if self.pool == DEFAULT else ():
            if pool.lends and pool.holders:
                with self._in(pool.id):
                    found = self._find_plain(size, small, stream)
                if found:
                    return found
        return None

    def _find_plain(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        expands, self.expands = self.expands, False
        found = self._find(size, small, stream)
        self.expands = expands
        return found

    def _retry(self, size: int, small: bool, stream: int) -> tuple[Area, Piece] | None:
        return None if self.captures else super()._retry(size, small, stream)

    def _collect(self) -> None:
        with self._in(DEFAULT):
            super()._collect()
