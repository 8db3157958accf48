"""Long random runs equal a model with linear searches."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from typing import Any

import pytest
from allocator import invariants
from allocator.device import MIB
from allocator.model import Full, Model
from allocator.virtual_device import VirtualDevice
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

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.torch_rules.settings import Settings

STREAMS = (0, 11, 12)
EDGES = (1, 512, 513, MIB, MIB + 1, 9 * MIB, 10 * MIB - 512, 10 * MIB, 19 * MIB)
SIZES = strategies.one_of(
    strategies.sampled_from(EDGES),
    strategies.integers(1, 4096),
    strategies.integers(4, 12).map(lambda n: n * 5 * MIB),
    strategies.integers(1, 60 * MIB),
)
CAPACITY = 256 * MIB


class Pair:
    """The allocator and the model, each on its own device."""

    kind_of_model = Model

    def __init__(
        self, *, limited: bool, max_split: int | None, gc: float, uses_expandable: bool = False
    ) -> None:
        self.device, model_device = VirtualDevice(CAPACITY), VirtualDevice(CAPACITY)
        self.allocator = DeviceCachingAllocator(
            self.device,
            Settings(
                max_split_size_bytes=max_split and max_split * MIB,
                garbage_collection_threshold=gc,
                memory_fraction=0.75 if limited else 1.0,
                expandable_segments=uses_expandable,
            ),
        )
        self.model = self.kind_of_model(
            model_device,
            max_split=max_split * MIB if max_split else math.inf,
            limit=int(0.75 * CAPACITY) if limited else math.inf,
            gc_threshold=gc,
            uses_expandable=uses_expandable,
        )

    def alloc(self, size: int, stream: int) -> int:
        """Allocate in both; return 0 if out of memory."""
        try:
            expected = self.model.alloc(size, stream)
        except Full:
            expected = 0
        try:
            ptr = int(self.allocator.alloc(size, stream))
        except OutOfMemory:
            ptr = 0
        assert ptr == expected
        return ptr

    def use(self, ptr: int, stream: int) -> None:
        self.allocator.record_use(ptr, stream)
        self.model.use(ptr, stream)

    def free(self, ptr: int) -> None:
        self.allocator.free(ptr)
        self.model.free(ptr)

    def finish(self, stream: int) -> None:
        self.device.finish(stream)
        self.model.device.finish(stream)

    def switch(self) -> None:
        """Turn expandable segments on or off."""
        on = self.model.uses_expandable = not self.model.uses_expandable
        self.allocator.configure(replace(self.allocator.settings, expandable_segments=on))

    def call_both(self, operation: str) -> None:
        getattr(self.allocator, operation)()
        getattr(self.model, operation)()

    def check(self) -> None:
        segments, statistics = self.allocator.snapshot()["segments"], self.allocator.statistics()
        assert layout(segments) == self.model.layout()
        assert statistics == dict(sorted(self.model.numbers.items()))
        for attribute in ("held", "mapped", "reserved"):
            assert getattr(self.device, attribute) == getattr(self.model.device, attribute)
        invariants.check_state(statistics, segments)


class AgainstModel(RuleBasedStateMachine):
    live: Bundle[int] = Bundle("live")

    @initialize(
        limited=strategies.booleans(),
        max_split=strategies.sampled_from([None, 20, 40]),
        gc=strategies.sampled_from([0.0, 0.3, 0.8]),
        uses_expandable=strategies.booleans(),
    )
    def begin(self, limited: bool, max_split: int | None, gc: float, uses_expandable: bool) -> None:
        self.pair = Pair(
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

    @rule()
    def switch(self) -> None:
        self.pair.switch()

    @invariant()
    def agrees(self) -> None:
        self.pair.check()


@pytest.mark.parametrize("uses_expandable", [False, True])
@pytest.mark.parametrize("max_split", [None, 20, 40])
@pytest.mark.parametrize(("limited", "gc"), [(False, 0.0), (True, 0.0), (True, 0.3), (True, 0.8)])
def test_long_run_equals_the_model(
    limited: bool, max_split: int | None, gc: float, uses_expandable: bool
) -> None:
    pair = Pair(limited=limited, max_split=max_split, gc=gc, uses_expandable=uses_expandable)
    rng = random.Random(7)
    live: list[int] = []
    for _ in range(700):
        weights = (8, 7, 2, 1, 0.3, 0.1 if uses_expandable else 0)
        match rng.choices(("alloc", "free", "use", "finish", "rare", "switch"), weights)[0]:
            case "alloc":
                if ptr := pair.alloc(some_size(rng), rng.choice(STREAMS)):
                    live.append(ptr)
            case "free" if live:
                pair.free(live.pop(rng.randrange(len(live))))
            case "use" if live:
                pair.use(rng.choice(live), rng.choice(STREAMS))
            case "finish":
                pair.finish(rng.choice(STREAMS))
            case "rare":
                pair.call_both(rng.choice(["empty_cache", "reset_peaks", "reset_sums"]))
            case "switch":
                pair.switch()
        pair.check()
    assert pair.model.numbers["num_device_free"] > 10


def some_size(rng: random.Random) -> int:
    kind = rng.random()
    if kind < 0.2:
        return rng.choice(EDGES)
    if kind < 0.5:
        return rng.randint(1, 4096)
    if kind < 0.8:
        return rng.randint(4, 12) * 5 * MIB
    return rng.randint(1, 30 * MIB)


def layout(segments: list[dict[str, Any]]) -> list[Any]:
    return [
        (
            segment["address"],
            segment["stream"],
            invariants.KINDS[segment["segment_type"]],
            segment["is_expandable"],
            segment["segment_pool_id"],
            [
                (block["address"], block["size"], block["state"], block["requested_size"])
                for block in segment["blocks"]
            ],
        )
        for segment in segments
    ]


AgainstModel.TestCase.settings = settings(max_examples=40, stateful_step_count=50, deadline=None)
TestAgainstModel = AgainstModel.TestCase
