from __future__ import annotations

from core.allocator.device import MIB, Device
from core.allocator.watching import current
from hypothesis import given, strategies

from cudakit.core.allocator.caching import CachingAllocator
from cudakit.core.allocator.ledger import (
    ABOVE_PEAK,
    ALL,
    LARGE,
    METRICS,
    SMALL,
    Ledger,
    unit,
)

KINDS = (SMALL, LARGE, ALL)
BLOCKS = strategies.tuples(
    strategies.sampled_from((SMALL, LARGE)),
    strategies.integers(1, 1 << 59),
    strategies.integers(1, 1 << 59),
)
STEPS = strategies.lists(
    strategies.one_of(BLOCKS, strategies.sampled_from(["free", "peaks", "sums"])), max_size=40
)


class Counters:
    """Every number of the ledger, one by one."""

    def __init__(self) -> None:
        self.current, self.peak, self.added, self.freed = (
            dict.fromkeys([(kind, metric) for kind in KINDS for metric in range(3)], 0)
            for _ in range(4)
        )

    def change(self, block: tuple[int, int, int], sign: int) -> None:
        for kind in (block[0], ALL):
            for metric, amount in enumerate((1, *block[1:])):
                at = kind, metric
                self.current[at] += sign * amount
                self.peak[at] = max(self.peak[at], self.current[at])
                (self.added if sign > 0 else self.freed)[at] += amount

    def reset_sums(self) -> None:
        self.added, self.freed = dict.fromkeys(self.added, 0), dict.fromkeys(self.freed, 0)


@given(STEPS)
def test_a_ledger_counts_as_single_counters_do(steps: list[tuple[int, int, int] | str]) -> None:
    ledger, counters = Ledger(), Counters()
    live: list[tuple[int, int, int]] = []
    for step in steps:
        match step:
            case "free":
                if live:
                    block = live.pop(0)
                    ledger.used -= weight(*block)
                    counters.change(block, -1)
            case "peaks":
                ledger.reset_peaks()
                counters.peak = dict(counters.current)
            case "sums":
                ledger.reset_sums()
                counters.reset_sums()
            case (int(), int(), int()) as block:
                live.append(block)
                add(ledger, block)
                counters.change(block, 1)
        for at in counters.current:
            expected = tuple(
                one[at] for one in (counters.current, counters.peak, counters.added, counters.freed)
            )
            assert ledger.copy().read(*at) == expected


def test_what_tabs_count_is_added_as_well() -> None:
    ledger, block = Ledger(), (SMALL, 512, 500)
    add(ledger, block)
    tab = ledger.tab(weight(*block))
    assert tab is not None
    assert tab is ledger.tab(weight(*block))
    tab.times += 3  # each of them freed, all but one

    assert ledger.copy().read(SMALL, 1) == (512, 512, 4 * 512, 3 * 512)
    assert ledger.copy().read(ALL, 0) == (1, 1, 4, 3)
    ledger.reset_sums()
    assert ledger.copy().read(SMALL, 1) == (512, 512, 0, 0)
    tab.times += 1
    assert ledger.copy().read(SMALL, 2) == (500, 500, 500, 500)
    assert ledger.copy().read(LARGE, 2) == (0, 0, 0, 0)


def weight(kind: int, size: int, requested: int) -> int:
    return sum(
        amount * unit(kind, metric)
        for metric, amount in zip(range(len(METRICS)), (1, size, requested), strict=True)
    )


def add(ledger: Ledger, block: tuple[int, int, int]) -> None:
    ledger.used += weight(*block)
    ledger.added += weight(*block)
    if ledger.used & ABOVE_PEAK:
        ledger.raise_peaks()


def test_a_block_that_serves_equal_requests_with_other_sizes_is_weighed_anew(
    device: Device,
) -> None:
    allocator = CachingAllocator(device)
    allocator.free(allocator.alloc(40 * MIB))
    low, high = allocator.alloc(20 * MIB), allocator.alloc(20 * MIB)
    allocator.free(low)

    assert allocator.alloc(19 * MIB) == low
    assert current(allocator, "allocated_bytes") == 40 * MIB
    allocator.free(low)
    allocator.free(high)
    assert allocator.alloc(19 * MIB) == low
    assert current(allocator, "allocated_bytes") == 19 * MIB


def test_a_block_that_serves_other_requests_of_its_size_is_weighed_anew(device: Device) -> None:
    allocator = CachingAllocator(device)
    for size in (700, 800):
        ptr = allocator.alloc(size)
        assert current(allocator, "requested_bytes") == size
        allocator.free(ptr)
