"""Long random runs equal a model with linear searches."""

from __future__ import annotations

from typing import Any

from allocator.device import MIB
from allocator.pinned import invariants
from allocator.pinned.host import Host
from allocator.pinned.model import Full, Model
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

from cudakit.allocator.pinned import CachingHostAllocator, OutOfPinnedMemory
from cudakit.torch_rules.settings import Settings

STREAMS = (0, 11, 12)
CAPACITY = 128 * MIB
SIZES = strategies.one_of(
    strategies.sampled_from((1, 512, 513, MIB, MIB + 1, 2 * MIB, 3 * MIB, 4 * MIB)),
    strategies.integers(1, 4096),
    strategies.integers(1, 40 * MIB),
)


class AgainstModel(RuleBasedStateMachine):
    live: Bundle[int] = Bundle("live")

    @initialize(max_cached=strategies.sampled_from([None, 0, 3 * MIB]))
    def begin(self, max_cached: int | None) -> None:
        self.host, model_host = Host(CAPACITY), Host(CAPACITY)
        self.pool = CachingHostAllocator(
            self.host, Settings(pinned_max_cached_size_bytes=max_cached)
        )
        self.model = Model(model_host, most_cached=max_cached)

    @rule(target=live, size=SIZES)
    def alloc(self, size: int) -> Any:
        try:
            expected = self.model.alloc(size)
        except Full:
            expected = 0
        try:
            ptr = int(self.pool.alloc(size))
        except OutOfPinnedMemory:
            ptr = 0
        assert ptr == expected
        return ptr or multiple()

    @rule(ptr=live, stream=strategies.sampled_from(STREAMS))
    def use(self, ptr: int, stream: int) -> None:
        self.pool.record_use(ptr, stream)
        self.model.use(ptr, stream)

    @rule(ptr=consumes(live))
    def free(self, ptr: int) -> None:
        self.pool.free(ptr)
        self.model.free(ptr)

    @rule(stream=strategies.sampled_from(STREAMS))
    def finish(self, stream: int) -> None:
        self.host.finish(stream)
        self.model.host.finish(stream)

    @rule()
    def empty_cache(self) -> None:
        self.pool.empty_cache()
        self.model.empty_cache()

    @invariant()
    def agrees(self) -> None:
        if not hasattr(self, "pool"):
            return
        segments = self.pool.snapshot()["host_segments"]
        layout = [(s["address"], s["size"], bool(s["active"])) for s in segments]
        assert layout == self.model.layout()
        assert self.host.held == self.model.host.held
        invariants.check(self.pool, self.host)

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for ptr in list(self.model.live):
            self.pool.free(ptr)
        self.pool.close()
        assert self.host.held == {}
        assert self.host.device.events == {}


AgainstModel.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestAgainstModel = AgainstModel.TestCase
