"""Long random runs with private pools and captures equal the model."""

from __future__ import annotations

import random
from contextlib import AbstractContextManager
from typing import Any

import pytest
from allocator.pool_model import PoolModel
from allocator.test_machine import SIZES, STREAMS, Pair, some_size
from hypothesis import settings, strategies
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    multiple,
    rule,
)

from cudakit.allocator.pools import GraphMemory, MemPool, PoolError


class PoolPair(Pair):
    """The allocator, the model, and their open contexts."""

    model: PoolModel
    kind_of_model = PoolModel

    def __init__(
        self, *, limited: bool, max_split: int | None, gc: float, uses_expandable: bool = False
    ) -> None:
        super().__init__(
            limited=limited, max_split=max_split, gc=gc, uses_expandable=uses_expandable
        )
        self.contexts: list[tuple[AbstractContextManager[Any], MemPool | None]] = []
        self.graphs: list[GraphMemory] = []

    def new_pool(self, *, no_split: bool, lends_blocks: bool) -> MemPool:
        pool = MemPool(self.allocator, no_split=no_split, use_on_oom=lends_blocks)
        assert pool.id == self.model.new_pool(no_split, lends_blocks)
        return pool

    def enter(self, pool: MemPool) -> None:
        context = self.allocator.use_pool(pool)
        if pool.closed or pool.id in self.model.routes:
            with pytest.raises(PoolError):
                context.__enter__()
            return
        context.__enter__()
        self.contexts.append((context, pool))
        self.model.enter(pool.id)

    def capture(self) -> None:
        context = self.allocator.capture()
        memory = context.__enter__()
        self.contexts.append((context, None))
        self.graphs.append(memory)
        assert memory.id == self.model.begin_capture()

    def leave(self) -> None:
        if not self.contexts:
            return
        context, pool = self.contexts.pop()
        context.__exit__(None, None, None)
        if pool is None:
            self.model.end_capture()
        else:
            self.model.leave()

    def close(self, pool: MemPool) -> None:
        if pool.closed:
            return
        if pool.id in self.model.routes:
            with pytest.raises(PoolError):
                pool.close()
            return
        pool.close()
        self.model.close_pool(pool.id)

    def close_graph(self, number: int) -> None:
        closed_graphs = [graph for graph in self.graphs if graph.id not in self.model.routes]
        if closed_graphs:
            graph = closed_graphs[number % len(closed_graphs)]
            self.graphs.remove(graph)
            graph.close()
            self.model.release_graph(graph.id)

    def check(self) -> None:
        super().check()
        uses_by_pool = {pool.id: pool.uses for pool in self.allocator.private_pools()}
        assert uses_by_pool == {pool.id: pool.holders for pool in self.model.pools.values()}


class PoolsAgainstModel(RuleBasedStateMachine):
    live: Bundle[int] = Bundle("live")
    pools: Bundle[MemPool] = Bundle("pools")

    @initialize(
        limited=strategies.booleans(),
        max_split=strategies.sampled_from([None, 20, 40]),
        gc=strategies.sampled_from([0.0, 0.3]),
        uses_expandable=strategies.booleans(),
    )
    def begin(self, limited: bool, max_split: int | None, gc: float, uses_expandable: bool) -> None:
        self.pair = PoolPair(
            limited=limited, max_split=max_split, gc=gc, uses_expandable=uses_expandable
        )

    @rule(target=live, size=SIZES, stream=strategies.sampled_from(STREAMS))
    def alloc(self, size: int, stream: int) -> Any:
        return self.pair.alloc(size, stream) or multiple()

    @rule(ptr=live, stream=strategies.sampled_from(STREAMS))
    def use(self, ptr: int, stream: int) -> None:
        self.pair.use(ptr, stream)

    @rule(ptr=consumes(live))
    def free(self, ptr: int) -> None:
        self.pair.free(ptr)

    @rule(stream=strategies.sampled_from(STREAMS))
    def finish(self, stream: int) -> None:
        self.pair.finish(stream)

    @rule(operation=strategies.sampled_from(["empty_cache", "reset_peaks", "reset_sums"]))
    def without_arguments(self, operation: str) -> None:
        self.pair.call_both(operation)

    @rule(target=pools, no_split=strategies.booleans(), lends_blocks=strategies.booleans())
    def new_pool(self, no_split: bool, lends_blocks: bool) -> MemPool:
        return self.pair.new_pool(no_split=no_split, lends_blocks=lends_blocks)

    @rule(pool=pools)
    def enter(self, pool: MemPool) -> None:
        self.pair.enter(pool)

    @rule()
    def capture(self) -> None:
        self.pair.capture()

    @rule()
    def leave(self) -> None:
        self.pair.leave()

    @rule()
    def switch(self) -> None:
        self.pair.switch()

    @rule(pool=pools)
    def close(self, pool: MemPool) -> None:
        self.pair.close(pool)

    @rule(number=strategies.integers(0, 3))
    def close_graph(self, number: int) -> None:
        self.pair.close_graph(number)

    @invariant()
    def agrees(self) -> None:
        self.pair.check()


class Run:
    """Random operations on a pair, by name."""

    def __init__(self, pair: PoolPair, rng: random.Random) -> None:
        self.pair, self.rng = pair, rng
        self.live: list[int] = []
        self.pools: list[MemPool] = []

    def alloc(self) -> None:
        if ptr := self.pair.alloc(some_size(self.rng), self.rng.choice(STREAMS)):
            self.live.append(ptr)

    def free(self) -> None:
        if self.live:
            self.pair.free(self.live.pop(self.rng.randrange(len(self.live))))

    def use(self) -> None:
        if self.live:
            self.pair.use(self.rng.choice(self.live), self.rng.choice(STREAMS))

    def finish(self) -> None:
        self.pair.finish(self.rng.choice(STREAMS))

    def rare(self) -> None:
        self.pair.call_both(self.rng.choice(["empty_cache", "reset_peaks", "reset_sums"]))

    def new(self) -> None:
        no_split, lends_blocks = self.rng.random() < 0.2, self.rng.random() < 0.5
        self.pools.append(self.pair.new_pool(no_split=no_split, lends_blocks=lends_blocks))

    def enter(self) -> None:
        if self.pools:
            self.pair.enter(self.rng.choice(self.pools))

    def capture(self) -> None:
        self.pair.capture()

    def leave(self) -> None:
        self.pair.leave()

    def close(self) -> None:
        if self.pools:
            self.pair.close(self.rng.choice(self.pools))
        self.pair.close_graph(self.rng.randrange(4))

    def switch(self) -> None:
        self.pair.switch()


WEIGHTS = {
    Run.alloc: 8.0,
    Run.free: 7.0,
    Run.use: 2.0,
    Run.finish: 1.0,
    Run.rare: 0.3,
    Run.new: 0.2,
    Run.enter: 0.8,
    Run.capture: 0.4,
    Run.leave: 1.6,
    Run.close: 0.3,
}


# During captures no pool lends blocks, and no pool gets both plain and expandable segments.
RARELY_CAPTURED = {
    Run.alloc: 9.0,
    Run.use: 0.3,
    Run.rare: 0.05,
    Run.new: 0.6,
    Run.capture: 0.05,
    Run.close: 0.05,
    Run.switch: 0.5,
}


@pytest.mark.parametrize("uses_expandable", [False, True])
@pytest.mark.parametrize("max_split", [None, 40])
@pytest.mark.parametrize(("limited", "gc"), [(False, 0.0), (True, 0.0), (True, 0.3)])
def test_long_run_with_pools_equals_the_model(
    limited: bool, max_split: int | None, gc: float, uses_expandable: bool
) -> None:
    pair = PoolPair(limited=limited, max_split=max_split, gc=gc, uses_expandable=uses_expandable)
    run = Run(pair, random.Random(7))
    for operation in run.rng.choices(list(WEIGHTS), list(WEIGHTS.values()), k=700):
        operation(run)
        pair.check()
    given_back = [call for call in pair.device.calls if call in ("free", "unmap")]
    assert len(given_back) > 10


@pytest.mark.parametrize("seed", [8, 9, 22])
def test_long_run_with_expandable_pools_equals_the_model(
    seed: int,
) -> None:
    pair = PoolPair(limited=True, max_split=40 if seed % 2 else None, gc=0.0, uses_expandable=True)
    run = Run(pair, random.Random(seed))
    weights = WEIGHTS | RARELY_CAPTURED
    for operation in run.rng.choices(list(weights), list(weights.values()), k=700):
        operation(run)
        pair.check()


PoolsAgainstModel.TestCase.settings = settings(
    max_examples=40, stateful_step_count=50, deadline=None
)
TestPoolsAgainstModel = PoolsAgainstModel.TestCase
