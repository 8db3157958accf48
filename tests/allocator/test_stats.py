"""The statistics of pools equal simple counters."""

from __future__ import annotations

from collections import defaultdict
from typing import TypeAlias

from allocator.device import MIB, Device
from allocator.summaries import current
from hypothesis import given, strategies

from cudakit.allocator.allocator import DeviceCachingAllocator
from cudakit.allocator.stats import DeviceStats, PoolStats

SIZES = strategies.integers(1, 1 << 59)
Block: TypeAlias = tuple[str, int, int]
BLOCKS = strategies.tuples(strategies.sampled_from(["small", "large"]), SIZES, SIZES)
STEPS = strategies.lists(
    strategies.one_of(
        BLOCKS, strategies.sampled_from(["free", "pend", "complete", "split", "peaks", "sums"])
    ),
    max_size=40,
)


class Counters:
    """All statistics, each as four numbers."""

    def __init__(self) -> None:
        self.numbers: defaultdict[str, int] = defaultdict(int)

    def change(self, metric: str, kind: str, amount: int) -> None:
        for pool in (f"{kind}_pool", "all"):
            name = f"{metric}.{pool}"
            self.numbers[f"{name}.current"] += amount
            now = self.numbers[f"{name}.current"]
            self.numbers[f"{name}.peak"] = max(self.numbers[f"{name}.peak"], now)
            self.numbers[f"{name}.{'allocated' if amount > 0 else 'freed'}"] += abs(amount)

    def reset(self, suffix: str) -> None:
        for name in list(self.numbers):
            metric, _, value_name = name.rpartition(".")
            if suffix == "peaks" and value_name == "peak":
                self.numbers[name] = self.numbers[f"{metric}.current"]
            elif suffix == "sums" and value_name in ("allocated", "freed"):
                self.numbers[name] = 0


class Subject:
    """The statistics and the simple counters."""

    def __init__(self) -> None:
        self.stats, self.counters = DeviceStats(1 << 62), Counters()
        self.live: list[Block] = []
        self.pending: list[Block] = []

    def of(self, block: Block) -> PoolStats:
        pool_stats: PoolStats = getattr(self.stats, block[0])
        return pool_stats

    def alloc(self, block: Block) -> None:
        kind, size, requested = block
        self.live.append(block)
        self.of(block).count_alloc(size, requested)
        for metric, amount in (
            ("allocation", 1),
            ("active", 1),
            ("allocated_bytes", size),
            ("active_bytes", size),
            ("requested_bytes", requested),
        ):
            self.counters.change(metric, kind, amount)

    def free(self, block: Block, *, pends: bool) -> None:
        kind, size, requested = block
        self.counters.change("allocation", kind, -1)
        self.counters.change("allocated_bytes", kind, -size)
        if pends:
            self.pending.append(block)
            self.of(block).count_pending(size)
        else:
            self.of(block).count_free(size, requested)
            self.end(block)

    def complete(self, block: Block) -> None:
        self.of(block).count_completed(block[1], block[2])
        self.end(block)

    def end(self, block: Block) -> None:
        kind, size, requested = block
        self.counters.change("active", kind, -1)
        self.counters.change("active_bytes", kind, -size)
        self.counters.change("requested_bytes", kind, -requested)

    def step(self, step: Block | str) -> None:
        match step:
            case "free" | "pend" if self.live:
                self.free(self.live.pop(0), pends=step == "pend")
            case "complete" if self.pending:
                self.complete(self.pending.pop(0))
            case "split":
                self.stats.small.count_split(1, 512)
                self.counters.change("inactive_split", "small", 1)
                self.counters.change("inactive_split_bytes", "small", 512)
            case "peaks":
                self.stats.reset_peaks()
                self.counters.reset("peaks")
            case "sums":
                self.stats.reset_sums()
                self.counters.reset("sums")
            case (_, int(), int()) as block:
                self.alloc(block)


@given(STEPS)
def test_pool_statistics_equal_single_counters(steps: list[Block | str]) -> None:
    subject = Subject()
    for step in steps:
        subject.step(step)
        statistics = subject.stats.read()
        for name, value in subject.counters.numbers.items():
            assert statistics[name] == value, name


def test_equal_request_served_by_another_size_is_counted_by_that_size(device: Device) -> None:
    allocator = DeviceCachingAllocator(device)
    allocator.free(allocator.alloc(40 * MIB))
    low, high = allocator.alloc(20 * MIB), allocator.alloc(20 * MIB)
    allocator.free(low)

    assert allocator.alloc(19 * MIB) == low
    assert current(allocator, "allocated_bytes") == 40 * MIB
    allocator.free(low)
    allocator.free(high)
    assert allocator.alloc(19 * MIB) == low
    assert current(allocator, "allocated_bytes") == 19 * MIB


def test_requested_bytes_follow_each_request_that_a_block_serves(device: Device) -> None:
    allocator = DeviceCachingAllocator(device)
    for size in (700, 800):
        ptr = allocator.alloc(size)
        assert current(allocator, "requested_bytes") == size
        allocator.free(ptr)
