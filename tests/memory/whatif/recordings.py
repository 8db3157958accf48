"""Programs that run on cudakit's allocator, with their snapshots and statistics."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from allocator.device import MIB
from allocator.test_machine import SIZES, STREAMS
from allocator.virtual_device import VirtualDevice
from hypothesis import strategies as st

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.oom import OutOfMemory
from cudakit.allocator.pools import MemPool
from cudakit.memory import load
from cudakit.memory.load import pickled
from cudakit.memory.snapshot import Snapshot
from cudakit.torch_rules.settings import Settings

GIB = 1024 * MIB


@dataclass
class Program:
    """A new allocator with recording on, and calls of it."""

    settings: Settings = field(default_factory=Settings)
    capacity: int = 256 * MIB

    def __post_init__(self) -> None:
        self.device = VirtualDevice(self.capacity)
        self.allocator = DeviceCachingAllocator(self.device, self.settings, search_again=False)
        self.allocator.record_history()
        self.live: list[int] = []
        self.pools: list[MemPool] = []

    def alloc(self, size: int, stream: int = 0, pool: int = 0) -> int:
        with ExitStack() as stack:
            if pool and self.pools:
                stack.enter_context(self.allocator.use_pool(self.pools[pool % len(self.pools)]))
            try:
                ptr = int(self.allocator.alloc(size, stream))
            except OutOfMemory:
                return 0
        self.live.append(ptr)
        return ptr

    def free(self, which: int = -1) -> None:
        if self.live:
            self.allocator.free(self.live.pop(which % len(self.live)))

    def use(self, which: int, stream: int) -> None:
        if self.live:
            self.allocator.record_use(self.live[which % len(self.live)], stream)

    def new_pool(self) -> None:
        self.pools.append(MemPool(self.allocator))

    def close_pool(self) -> None:
        if self.pools:
            self.pools.pop().close()

    def statistics(self) -> dict[str, int]:
        known = self.allocator.statistics()
        names = ("reserved", "allocated", "requested", "active")
        found = {
            f"{part} {name}": known[f"{name}_bytes.all.{part}"]
            for part in ("peak", "current")
            for name in names
        }
        return found | {
            name: known[f"num_{name}"]
            for name in ("device_alloc", "device_free", "alloc_retries", "ooms")
        }

    def snapshot(self) -> Snapshot:
        return read(self.allocator.snapshot())


def read(snapshot: dict[str, Any]) -> Snapshot:
    content = pickle.dumps(snapshot)
    return load.build(
        pickled.read(content), source="program.pkl", file_format="pickle", size_bytes=len(content)
    )


# The calls of a program, weighted by repetition.
VERBS = (*["alloc"] * 6, *["free"] * 5, "empty_cache")
OF_STREAMS = (*["use"] * 2, *["finish"])
OF_POOLS = ("new_pool", *["alloc_in_pool"] * 4, "close_pool")


@st.composite
def programs(
    draw: Callable[[st.SearchStrategy[Any]], Any],
    *,
    settings: st.SearchStrategy[Settings],
    capacity: int = 256 * MIB,
    streams: bool = True,
    pools: bool = False,
) -> Program:
    """Run a program of random steps."""
    program = Program(draw(settings), capacity)
    verbs = VERBS + OF_STREAMS * streams + OF_POOLS * pools
    step = st.tuples(st.sampled_from(verbs), SIZES, st.sampled_from(STREAMS), st.integers(0, 99))
    for verb, size, stream, which in draw(
        st.integers(0, 40).flatmap(lambda n: st.lists(step, min_size=n, max_size=n))
    ):
        run(program, verb, size, stream, which)
    return program


def run(program: Program, verb: str, size: int, stream: int, which: int) -> None:
    match verb:
        case "alloc":
            program.alloc(size, stream)
        case "alloc_in_pool":
            program.alloc(size, stream, 1 + which)
        case "free":
            program.free(which)
        case "use":
            program.use(which, stream)
        case "finish":
            program.device.finish(stream)
        case "empty_cache":
            program.allocator.empty_cache()
        case "new_pool":
            program.new_pool()
        case "close_pool":
            program.close_pool()
