"""Statistics with the names and meanings of torch.cuda.memory_stats and host_memory_stats.

A statistic has a current value, its peak since the last reset of peaks, and the sums of increases
(``allocated``) and decreases (``freed``) since the last reset of sums. Sources: PyTorch's
c10/core/CachingDeviceAllocator.h, torch/cuda/memory.py and torch/csrc/cuda/Module.cpp. Reserved bytes of each
private pool: PyTorch 2.15. Pinned memory: PyTorch's CachingHostAllocator.h (HostStats, getStats) and
torch/csrc/cuda/Module.cpp; times are in microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TypeAlias

from cudakit.torch_rules.oom import PoolId
from cudakit.torch_rules.settings import UNLIMITED

_NamedValue: TypeAlias = tuple[str, int]

_SCALAR_NAMES = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)
_POOL_KINDS = ("all", "small_pool", "large_pool")
# Names of the counters in BlockCounters, each with a current value, a peak, and the sum of its increases.
BLOCK_COUNTERS = (
    "allocation",
    "allocated_bytes",
    "requested_bytes",
    "inactive_split",
    "inactive_split_bytes",
)
# Names of all counters of a kind of pools.
_COUNTED_NAMES = (*BLOCK_COUNTERS, "segment", "reserved_bytes")
# The counters whose sum is a statistic. Active blocks are the allocated blocks and the pending blocks, which
# were freed while other streams use them.
_COUNTERS_BY_STATISTIC: dict[str, tuple[str, ...]] = {name: (name,) for name in _COUNTED_NAMES} | {
    "active": ("allocation", "pending"),
    "active_bytes": ("allocated_bytes", "pending_bytes"),
}


class Stat:
    """One statistic. The statistics that change with each alloc and free are in BlockCounters instead."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        """Add a positive or negative amount to the current value."""
        self.current += amount
        if amount > 0:
            self.allocated += amount
            self.peak = max(self.peak, self.current)
        else:
            self.freed -= amount

    def reset_peak(self) -> None:
        self.peak = self.current

    def reset_sums(self) -> None:
        self.allocated = self.freed = 0

    def read(self, name: str) -> Iterator[_NamedValue]:
        """Return the four values of the statistic with their names."""
        return _named_values(name, self.current, self.peak, self.allocated, self.freed)


class BlockCounters:
    """Counters of the blocks of the small or the large pools, as plain integers.

    ``_sum`` attributes are sums of increases; the sum of decreases follows from the sum of increases, the
    current value, and the value at the last reset of sums. ``searches`` is the number of searches of the
    default pool, from which garbage collection computes the age of a block.
    """

    __slots__ = (
        *(f"{name}{suffix}" for name in BLOCK_COUNTERS for suffix in ("", "_sum", "_peak")),
        "searches",
    )

    def __init__(self) -> None:
        self.allocation = self.allocation_sum = self.allocation_peak = 0
        self.allocated_bytes = self.allocated_bytes_sum = self.allocated_bytes_peak = 0
        self.requested_bytes = self.requested_bytes_sum = self.requested_bytes_peak = 0
        self.inactive_split = self.inactive_split_sum = self.inactive_split_peak = 0
        self.inactive_split_bytes = self.inactive_split_bytes_sum = 0
        self.inactive_split_bytes_peak = 0
        self.searches = 0


class Peaks:
    """The peaks of the small or the large pools, or of all pools, including the peaks of ``block_counters``.

    While no block is pending, the active blocks are the allocated blocks. So ``active_peak`` is only updated
    while blocks are pending; the true peak is the larger one of ``active_peak`` and ``allocation_peak``.
    """

    def __init__(self, block_counters: BlockCounters) -> None:
        self.block_counters = block_counters
        self.segment_peak = self.reserved_bytes_peak = 0
        self.active_peak = self.active_bytes_peak = 0

    def peak(self, name: str) -> int:
        return self._read(name, f"{name}_peak")

    def set_peak(self, name: str, peak_value: int) -> None:
        setattr(self.block_counters if name in BLOCK_COUNTERS else self, f"{name}_peak", peak_value)

    def _read(self, name: str, attribute: str) -> int:
        value: int = getattr(self.block_counters if name in BLOCK_COUNTERS else self, attribute)
        return value


class PoolStats(Peaks):
    """Counters of the small or the large pools, and the methods that count.

    ``pending`` counts blocks that were freed while other streams use them. Totals of the small and the large
    pools are computed when they are read, but their peaks are recorded in ``all_pools``.
    """

    def __init__(self, blocks: BlockCounters, all_pools: Peaks) -> None:
        super().__init__(blocks)
        self.all_pools = all_pools
        # The statistics of the large pools in those of the small pools, and the reverse.
        self.other_pools = self
        self.segment = self.segment_sum = 0
        self.reserved_bytes = self.reserved_bytes_sum = 0
        self.pending = self.pending_bytes = 0
        self.values_at_reset = dict.fromkeys((*_COUNTED_NAMES, "pending", "pending_bytes"), 0)

    def current(self, name: str) -> int:
        return self._read(name, name)

    def sum_of_increases(self, name: str) -> int:
        """Return the sum of increases of a statistic since the last reset of sums."""
        return self._read(name, f"{name}_sum")

    @property
    def active(self) -> int:
        """Number of blocks that are allocated or pending."""
        return self.block_counters.allocation + self.pending

    @property
    def active_bytes(self) -> int:
        """Bytes of blocks that are allocated or pending."""
        return self.block_counters.allocated_bytes + self.pending_bytes

    def count_alloc(self, size: int, requested_bytes: int) -> None:
        counters, others = self.block_counters, self.other_pools.block_counters
        peaks = self.all_pools.block_counters
        counters.allocation = count = counters.allocation + 1
        counters.allocated_bytes = allocated = counters.allocated_bytes + size
        counters.requested_bytes = requested = counters.requested_bytes + requested_bytes
        counters.allocation_sum += 1
        counters.allocated_bytes_sum += size
        counters.requested_bytes_sum += requested_bytes
        # Comparisons, because each call of max() would take as long as three of them.
        if count > counters.allocation_peak:
            counters.allocation_peak = count
        if allocated > counters.allocated_bytes_peak:
            counters.allocated_bytes_peak = allocated
        if requested > counters.requested_bytes_peak:
            counters.requested_bytes_peak = requested
        count += others.allocation
        allocated += others.allocated_bytes
        requested += others.requested_bytes
        if count > peaks.allocation_peak:
            peaks.allocation_peak = count
        if allocated > peaks.allocated_bytes_peak:
            peaks.allocated_bytes_peak = allocated
        if requested > peaks.requested_bytes_peak:
            peaks.requested_bytes_peak = requested
        if self.pending or self.other_pools.pending:
            self._raise_peaks("active")
            self._raise_peaks("active_bytes")

    def count_free(self, size: int, requested_bytes: int) -> None:
        """Count a block that was freed and that no stream uses any more."""
        counters = self.block_counters
        counters.allocation -= 1
        counters.allocated_bytes -= size
        counters.requested_bytes -= requested_bytes

    def count_split(self, count_change: int, size_change: int) -> None:
        """Count a change of the number and the size of free blocks in split segments."""
        counters, others = self.block_counters, self.other_pools.block_counters
        peaks = self.all_pools.block_counters
        counters.inactive_split = count = counters.inactive_split + count_change
        counters.inactive_split_bytes = size = counters.inactive_split_bytes + size_change
        if count_change > 0:
            counters.inactive_split_sum += count_change
            if count > counters.inactive_split_peak:
                counters.inactive_split_peak = count
            count += others.inactive_split
            if count > peaks.inactive_split_peak:
                peaks.inactive_split_peak = count
        if size_change > 0:
            counters.inactive_split_bytes_sum += size_change
            if size > counters.inactive_split_bytes_peak:
                counters.inactive_split_bytes_peak = size
            size += others.inactive_split_bytes
            if size > peaks.inactive_split_bytes_peak:
                peaks.inactive_split_bytes_peak = size

    def count_pending(self, size: int) -> None:
        """Count a block that was freed while other streams use it."""
        self.block_counters.allocation -= 1
        self.block_counters.allocated_bytes -= size
        self.pending += 1
        self.pending_bytes += size

    def count_completed(self, size: int, requested_bytes: int) -> None:
        """Count a pending block that no stream uses any more."""
        self.block_counters.requested_bytes -= requested_bytes
        self.pending -= 1
        self.pending_bytes -= size

    def count_segments(self, count: int) -> None:
        """Count new segments; a negative number counts released segments."""
        self.segment += count
        self.segment_sum += max(count, 0)
        self._raise_peaks("segment")

    def count_reserved(self, size: int) -> None:
        """Count bytes taken from the device; a negative number counts released bytes."""
        self.reserved_bytes += size
        self.reserved_bytes_sum += max(size, 0)
        self._raise_peaks("reserved_bytes")

    def reset_peaks(self) -> None:
        """Set every peak to the current value, including the peaks of all pools."""
        for name in _COUNTERS_BY_STATISTIC:
            self.set_peak(name, self.current(name))
            self.all_pools.set_peak(name, self.current(name) + self.other_pools.current(name))

    def reset_sums(self) -> None:
        for name in _COUNTED_NAMES:
            setattr(self.block_counters if name in BLOCK_COUNTERS else self, f"{name}_sum", 0)
        self.values_at_reset = {name: self.current(name) for name in self.values_at_reset}

    def _raise_peaks(self, name: str) -> None:
        """Raise the peaks of a statistic that is an attribute of this object."""
        value, peak_name = getattr(self, name), f"{name}_peak"
        total = value + getattr(self.other_pools, name)
        if value > getattr(self, peak_name):
            setattr(self, peak_name, value)
        if total > getattr(self.all_pools, peak_name):
            setattr(self.all_pools, peak_name, total)


class DeviceStats:
    """All statistics of one device.

    ``num_oom_rejections``, ``num_sync_rescues`` and ``num_invalid_frees`` are not among PyTorch's 122
    numbers.
    """

    def __init__(
        self, max_split_bytes: int, new_counters: type[BlockCounters] = BlockCounters
    ) -> None:
        self.peaks = Peaks(new_counters())  # Peaks of all pools together.
        self.small = PoolStats(new_counters(), self.peaks)
        self.large = PoolStats(new_counters(), self.peaks)
        self.small.other_pools, self.large.other_pools = self.large, self.small
        self.oversize_allocations, self.oversize_segments = Stat(), Stat()
        # Reserved bytes by private pool, including dropped pools, and by kind of block.
        self.private_reserved_stats: dict[PoolId, dict[str, Stat]] = {}
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0
        self.max_split_bytes = max_split_bytes  # Initial value of max_split_size.
        self.num_oom_rejections = 0  # Number of requests refused before any driver call.
        # Number of requests served from memory that became free by a synchronization.
        self.num_sync_rescues = 0
        self.num_invalid_frees = 0

    def current_total(self, name: str) -> int:
        """Return the current value of a statistic in all pools."""
        return self.small.current(name) + self.large.current(name)

    def reserved_stats_of(self, pool: PoolId, *, is_small: bool) -> tuple[Stat, ...]:
        """Return the statistics of the bytes that a private pool reserves for small or large blocks."""
        stats_by_kind = self.private_reserved_stats.setdefault(
            pool, {kind: Stat() for kind in _POOL_KINDS}
        )
        return stats_by_kind["all"], stats_by_kind["small_pool" if is_small else "large_pool"]

    def read(self) -> dict[str, int]:
        """Return the 122 numbers of torch.cuda.memory_stats (2.11), by name in alphabetical order.

        The dict also has the reserved bytes of each private pool (PyTorch 2.15), which are 0 for a dropped
        pool.
        """
        max_split_bytes = self.max_split_bytes
        numbers_by_name = {name: getattr(self, name) for name in _SCALAR_NAMES}
        numbers_by_name["max_split_size"] = -1 if max_split_bytes >= UNLIMITED else max_split_bytes
        for kind, peaks, pools in (
            ("all", self.peaks, (self.small, self.large)),
            ("small_pool", self.small, (self.small,)),
            ("large_pool", self.large, (self.large,)),
        ):
            for name, counters in _COUNTERS_BY_STATISTIC.items():
                current_value = sum(pool.current(name) for pool in pools)
                increases = sum(pool.sum_of_increases(counters[0]) for pool in pools)
                at_reset = sum(pool.values_at_reset[part] for pool in pools for part in counters)
                numbers_by_name |= _named_values(
                    f"{name}.{kind}",
                    current_value,
                    max(peaks.peak(name), peaks.peak(counters[0])),
                    increases,
                    at_reset + increases - current_value,
                )
        for name, stat in self._stats():
            numbers_by_name |= stat.read(name)
        return dict(sorted(numbers_by_name.items()))

    def reset_peaks(self) -> None:
        """Set every peak to the current value (torch.cuda.reset_peak_memory_stats)."""
        for pool in (self.small, self.large):
            pool.reset_peaks()
        for _, stat in self._stats():
            stat.reset_peak()

    def reset_sums(self) -> None:
        for pool in (self.small, self.large):
            pool.reset_sums()
        for _, stat in self._stats():
            stat.reset_sums()
        for name in (*_SCALAR_NAMES, "num_oom_rejections"):
            setattr(self, name, 0)

    def _stats(self) -> Iterator[tuple[str, Stat]]:
        yield "oversize_allocations", self.oversize_allocations
        yield "oversize_segments", self.oversize_segments
        for (graph_number, user_number), stats_by_kind in self.private_reserved_stats.items():
            for kind, stat in stats_by_kind.items():
                yield f"reserved_bytes_by_private_pools.{graph_number}_{user_number}.{kind}", stat


def _named_values(
    name: str, current: int, peak: int, increases: int, decreases: int
) -> Iterator[_NamedValue]:
    yield f"{name}.current", current
    yield f"{name}.peak", peak
    yield f"{name}.allocated", increases
    yield f"{name}.freed", decreases


class DurationStats:
    """Statistics of the durations of calls (PyTorch's DurationStat)."""

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

    def reset_sums(self) -> None:
        self.total = self.count = 0

    def read(self, name: str) -> dict[str, int]:
        return {
            f"{name}.total": self.total,
            f"{name}.max": self.max,
            f"{name}.min": self.min,
            f"{name}.count": self.count,
            f"{name}.avg": self.total // self.count if self.count else 0,
        }


def bin_of(size: int) -> int:
    """Return the exponent of the smallest power of two that is not below a size."""
    return (size - 1).bit_length()


class HostStats:
    """All statistics of pinned memory.

    As in PyTorch, active blocks are counted for each power of two, and their peak is the sum of these peaks,
    which is at least the true peak. PyTorch has no ``num_rescues`` and ``num_free_failures``.
    """

    def __init__(self) -> None:
        self.allocations, self.allocated_bytes = Stat(), Stat()
        self.active_by_bin: defaultdict[int, tuple[Stat, Stat]] = defaultdict(
            lambda: (Stat(), Stat())
        )
        self.alloc_time, self.free_time = DurationStats(), DurationStats()
        self.num_rescues = 0  # Number of requests served only after waiting or releasing memory.
        # Number of frees that the driver refused; their memory stays cached.
        self.num_free_failures = 0
        self.num_invalid_frees = 0

    def count_active(self, number: int, size: int) -> None:
        """Count allocated blocks of a size; a negative number was freed, and no stream uses them."""
        block_count, total_bytes = self.active_by_bin[bin_of(size)]
        block_count.change(number)
        total_bytes.change(number * size)

    def count_memory(self, number: int, size: int) -> None:
        """Count memory that was taken from the driver; a negative number was returned."""
        self.allocations.change(number)
        self.allocated_bytes.change(number * size)

    def read(self) -> dict[str, int]:
        """Return the 28 numbers by name, in alphabetical order."""
        bins = self.active_by_bin.values()
        numbers_by_name = {
            "num_host_alloc": self.allocations.allocated,
            "num_host_free": self.allocations.freed,
            **self.alloc_time.read("host_alloc_time"),
            **self.free_time.read("host_free_time"),
            **dict(self.allocations.read("allocations")),
            **dict(self.allocated_bytes.read("allocated_bytes")),
        }
        for name, stats in (
            ("active_requests", [counts for counts, _ in bins]),
            ("active_bytes", [sizes for _, sizes in bins]),
        ):
            for metric in ("current", "peak", "allocated", "freed"):
                numbers_by_name[f"{name}.{metric}"] = sum(getattr(stat, metric) for stat in stats)
        return dict(sorted(numbers_by_name.items()))

    def reset_peaks(self) -> None:
        """Set every peak to the current value (torch.cuda.reset_peak_host_memory_stats)."""
        for stat in self._all_statistics():
            stat.reset_peak()

    def reset_sums(self) -> None:
        for stat in self._all_statistics():
            stat.reset_sums()

    def _all_statistics(self) -> list[Stat | DurationStats]:
        active_stats = [stat for stat_pair in self.active_by_bin.values() for stat in stat_pair]
        durations = [self.alloc_time, self.free_time]
        return [self.allocations, self.allocated_bytes, *active_stats, *durations]
