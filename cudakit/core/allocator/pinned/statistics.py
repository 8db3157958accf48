"""Statistics of pinned memory: the numbers of torch.cuda.host_memory_stats, by the same names.

Source: PyTorch's CachingHostAllocator.h (HostStats, getStats) and torch/csrc/cuda/Module.cpp. Times are in
microseconds.
"""

from __future__ import annotations

from collections import defaultdict


class Amount:
    """A value, its highest since the last reset of peaks, and what was added and taken away."""

    __slots__ = ("added", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.added = self.freed = 0

    def increase(self, by: int) -> None:
        self.current += by
        self.added += by
        self.peak = max(self.peak, self.current)

    def decrease(self, by: int) -> None:
        self.current -= by
        self.freed += by

    def reset_peak(self) -> None:
        self.peak = self.current

    def reset_sum(self) -> None:
        self.added = self.freed = 0


class Duration:
    """How long calls took (DurationStat)."""

    __slots__ = ("count", "max", "min", "total")

    def __init__(self) -> None:
        self.total = self.max = self.min = self.count = 0

    def add(self, elapsed_us: int) -> None:
        self.min = min(self.min, elapsed_us) if self.min else elapsed_us
        self.max = max(self.max, elapsed_us)
        self.total += elapsed_us
        self.count += 1

    def reset_peak(self) -> None:
        self.min = self.max = 0

    def reset_sum(self) -> None:
        self.total = self.count = 0

    def read(self, name: str) -> dict[str, int]:
        average = self.total // self.count if self.count else 0
        values = {"total": self.total, "max": self.max, "min": self.min, "count": self.count}
        return {f"{name}.{part}": n for part, n in {**values, "avg": average}.items()}


class HostStatistics:
    """All that is counted of pinned memory.

    What is in use is counted for each power of two, and its peak is the sum of their peaks, which is at least
    the true one: so PyTorch does it. ``num_rescues`` and ``num_free_failures`` are not PyTorch's.
    """

    def __init__(self) -> None:
        self.allocations, self.allocated_bytes = Amount(), Amount()
        self.active: defaultdict[int, tuple[Amount, Amount]] = defaultdict(
            lambda: (Amount(), Amount())
        )
        self.alloc_time, self.free_time = Duration(), Duration()
        self.num_rescues = 0  # requests served by what was given back or waited for only
        self.num_free_failures = 0  # memory that the driver did not take back, which is kept
        self.num_invalid_frees = 0

    def used(self, bucket: int, size: int) -> None:
        """Count a block that was handed out."""
        count, total = self.active[bucket]
        count.increase(1)
        total.increase(size)

    def unused(self, bucket: int, size: int) -> None:
        """Count a block that nobody uses any more."""
        count, total = self.active[bucket]
        count.decrease(1)
        total.decrease(size)

    def obtained(self, size: int) -> None:
        """Count what was made for a request that no free block served."""
        self.allocations.increase(1)
        self.allocated_bytes.increase(size)

    def given_back(self, size: int) -> None:
        """Count what is kept no longer."""
        self.allocations.decrease(1)
        self.allocated_bytes.decrease(size)

    def read(self) -> dict[str, int]:
        """Return the 28 numbers by name, in alphabetical order."""
        counts, totals = zip(*self.active.values(), strict=True) if self.active else ((), ())
        found = {"num_host_alloc": self.allocations.added, "num_host_free": self.allocations.freed}
        found |= self.alloc_time.read("host_alloc_time") | self.free_time.read("host_free_time")
        found |= _read("allocations", (self.allocations,))
        found |= _read("allocated_bytes", (self.allocated_bytes,))
        found |= _read("active_requests", counts) | _read("active_bytes", totals)
        return dict(sorted(found.items()))

    def reset_peaks(self) -> None:
        """Let every peak be the value now (torch.cuda.reset_peak_host_memory_stats)."""
        for each in self._all():
            each.reset_peak()

    def reset_sums(self) -> None:
        """Begin to add up anew (torch.cuda.reset_accumulated_host_memory_stats)."""
        for each in self._all():
            each.reset_sum()

    def _all(self) -> list[Amount | Duration]:
        active = [amount for pair in self.active.values() for amount in pair]
        return [
            self.allocations,
            self.allocated_bytes,
            *active,
            self.alloc_time,
            self.free_time,
        ]


def _read(name: str, amounts: tuple[Amount, ...]) -> dict[str, int]:
    return {
        f"{name}.current": sum(amount.current for amount in amounts),
        f"{name}.peak": sum(amount.peak for amount in amounts),
        f"{name}.allocated": sum(amount.added for amount in amounts),
        f"{name}.freed": sum(amount.freed for amount in amounts),
    }
