"""Statistics with the names and meanings of torch.cuda.memory_stats.

A statistic has a current value, its peak since the last reset of peaks, and the sums of increases
(``allocated``) and decreases (``freed``) since the last reset of sums. Sources: PyTorch's
c10/core/CachingDeviceAllocator.h, torch/cuda/memory.py and torch/csrc/cuda/Module.cpp. Reserved bytes of each
private pool: PyTorch 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from cudakit.torch_rules.oom_facts import PoolId
from cudakit.torch_rules.sizes import UNLIMITED

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
COUNTED_NAMES = (*BLOCK_COUNTERS, "segment", "reserved_bytes")
# Statistics of active blocks are sums of two counters: allocated blocks, and pending blocks, which were freed
# while other streams use them.
_ACTIVE_SUMS = {
    "active": ("allocation", "pending"),
    "active_bytes": ("allocated_bytes", "pending_bytes"),
}


class Stat:
    """One statistic. The statistics that change with each alloc and free are in BlockCounters instead."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def increase(self, amount: int = 1) -> None:
        """Increase the current value."""
        self.current += amount
        self.allocated += amount
        self.peak = max(self.peak, self.current)

    def decrease(self, amount: int = 1) -> None:
        """Decrease the current value."""
        self.current -= amount
        self.freed += amount

    def reset_peak(self) -> None:
        """Set the peak to the current value."""
        self.peak = self.current

    def reset_sums(self) -> None:
        """Set the sums to 0."""
        self.allocated = self.freed = 0

    def read(self, name: str) -> Iterator[_NamedValue]:
        """Return the four values of the statistic with their names."""
        return _named_values(name, self.current, self.peak, self.allocated, self.freed)


class BlockCounters:
    """Counters of the blocks of the small or the large pools, as plain integers.

    ``_sum`` attributes are sums of increases; the sum of decreases follows from the sum of increases, the
    current value, and the value at the last reset of sums. ``other_pools`` are the counters of the
    other kind of pools. Totals of both kinds are computed when they are read, but their peaks are
    recorded in ``all_pools``, of which nothing else is used. ``searches`` is the number of searches of the
    default pool, from which garbage collection computes the age of a block.
    """

    __slots__ = (
        *(f"{name}{suffix}" for name in BLOCK_COUNTERS for suffix in ("", "_sum", "_peak")),
        "other_pools",
        "searches",
        "all_pools",
    )

    other_pools: BlockCounters
    all_pools: BlockCounters

    def __init__(self) -> None:
        self.allocation = self.allocation_sum = self.allocation_peak = 0
        self.allocated_bytes = self.allocated_bytes_sum = self.allocated_bytes_peak = 0
        self.requested_bytes = self.requested_bytes_sum = self.requested_bytes_peak = 0
        self.inactive_split = self.inactive_split_sum = self.inactive_split_peak = 0
        self.inactive_split_bytes = self.inactive_split_bytes_sum = 0
        self.inactive_split_bytes_peak = 0
        self.searches = 0

    def count_alloc(self, size: int, requested_bytes: int) -> None:
        """Count an allocated block."""
        all_pools, other_pools = self.all_pools, self.other_pools
        self.allocation = allocation_count = self.allocation + 1
        self.allocated_bytes = allocated_bytes = self.allocated_bytes + size
        self.requested_bytes = requested_total = self.requested_bytes + requested_bytes
        self.allocation_sum += 1
        self.allocated_bytes_sum += size
        self.requested_bytes_sum += requested_bytes
        if allocation_count > self.allocation_peak:
            self.allocation_peak = allocation_count
        if allocated_bytes > self.allocated_bytes_peak:
            self.allocated_bytes_peak = allocated_bytes
        if requested_total > self.requested_bytes_peak:
            self.requested_bytes_peak = requested_total
        allocation_count += other_pools.allocation
        if allocation_count > all_pools.allocation_peak:
            all_pools.allocation_peak = allocation_count
        allocated_bytes += other_pools.allocated_bytes
        if allocated_bytes > all_pools.allocated_bytes_peak:
            all_pools.allocated_bytes_peak = allocated_bytes
        requested_total += other_pools.requested_bytes
        if requested_total > all_pools.requested_bytes_peak:
            all_pools.requested_bytes_peak = requested_total

    def count_free(self, size: int, requested_bytes: int) -> None:
        """Count a block that was freed and that no stream uses any more."""
        self.allocation -= 1
        self.allocated_bytes -= size
        self.requested_bytes -= requested_bytes

    def count_split(self, count_change: int, size_change: int) -> None:
        """Count a change of the number and the size of free blocks in split segments."""
        self.inactive_split = split_count = self.inactive_split + count_change
        self.inactive_split_bytes = split_bytes = self.inactive_split_bytes + size_change
        if count_change > 0:
            self.inactive_split_sum += count_change
            if split_count > self.inactive_split_peak:
                self.inactive_split_peak = split_count
            split_count += self.other_pools.inactive_split
            if split_count > self.all_pools.inactive_split_peak:
                self.all_pools.inactive_split_peak = split_count
        if size_change > 0:
            self.inactive_split_bytes_sum += size_change
            if split_bytes > self.inactive_split_bytes_peak:
                self.inactive_split_bytes_peak = split_bytes
            split_bytes += self.other_pools.inactive_split_bytes
            if split_bytes > self.all_pools.inactive_split_bytes_peak:
                self.all_pools.inactive_split_bytes_peak = split_bytes


class Peaks:
    """The peaks of the small or the large pools, or of all pools, including the peaks of ``block_counters``.

    While no block is pending, the active blocks are the allocated blocks. So ``active_peak`` is only updated
    while blocks are pending; the true peak is the larger one of ``active_peak`` and ``allocation_peak``.
    """

    __slots__ = (
        "active_bytes_peak",
        "active_peak",
        "block_counters",
        "reserved_bytes_peak",
        "segment_peak",
    )

    def __init__(self, block_counters: BlockCounters) -> None:
        self.block_counters = block_counters
        self.segment_peak = self.reserved_bytes_peak = 0
        self.active_peak = self.active_bytes_peak = 0

    def peak(self, name: str) -> int:
        """Return the peak of a statistic."""
        peak_value: int = getattr(
            self.block_counters if name in BLOCK_COUNTERS else self, f"{name}_peak"
        )
        return peak_value

    def set_peak(self, name: str, peak_value: int) -> None:
        """Set the peak of a statistic."""
        setattr(self.block_counters if name in BLOCK_COUNTERS else self, f"{name}_peak", peak_value)


class PoolStats(Peaks):
    """Counters of the small or the large pools.

    ``pending`` counts blocks that were freed while other streams use them.
    """

    __slots__ = (
        "all_pools",
        "other_pools",
        "pending",
        "pending_bytes",
        "reserved_bytes",
        "reserved_bytes_sum",
        "segment",
        "segment_sum",
        "values_at_reset",
    )

    def __init__(self, blocks: BlockCounters, total_peaks: Peaks) -> None:
        super().__init__(blocks)
        self.all_pools = total_peaks
        # Statistics of the large pools in those of the small pools, and the reverse; ``pair_with`` sets this
        # attribute.
        self.other_pools = self
        blocks.all_pools, blocks.other_pools = total_peaks.block_counters, blocks
        self.segment = self.segment_sum = 0
        self.reserved_bytes = self.reserved_bytes_sum = 0
        self.pending = self.pending_bytes = 0
        self.values_at_reset = dict.fromkeys((*COUNTED_NAMES, "pending", "pending_bytes"), 0)

    def pair_with(self, other_pools: PoolStats) -> None:
        """Connect the statistics of the small and the large pools with each other."""
        self.other_pools, other_pools.other_pools = other_pools, self
        self.block_counters.other_pools, other_pools.block_counters.other_pools = (
            other_pools.block_counters,
            self.block_counters,
        )

    def current(self, name: str) -> int:
        """Return the current value of a statistic."""
        current_value: int = getattr(self.block_counters if name in BLOCK_COUNTERS else self, name)
        return current_value

    def sum_of_increases(self, name: str) -> int:
        """Return the sum of increases of a statistic since the last reset of sums."""
        increase_sum: int = getattr(
            self.block_counters if name in BLOCK_COUNTERS else self, f"{name}_sum"
        )
        return increase_sum

    @property
    def active(self) -> int:
        """Number of blocks that are allocated or pending."""
        return self.block_counters.allocation + self.pending

    @property
    def active_bytes(self) -> int:
        """Bytes of blocks that are allocated or pending."""
        return self.block_counters.allocated_bytes + self.pending_bytes

    def raise_active_peaks(self) -> None:
        """Raise the peaks of active blocks to the current values; needed while blocks are pending."""
        self._raise_peaks(*_ACTIVE_SUMS)

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
        for name in (*COUNTED_NAMES, *_ACTIVE_SUMS):
            self.set_peak(name, self.current(name))
            self.all_pools.set_peak(name, self.current(name) + self.other_pools.current(name))

    def reset_sums(self) -> None:
        """Set all sums to 0."""
        for name in COUNTED_NAMES:
            setattr(self.block_counters if name in BLOCK_COUNTERS else self, f"{name}_sum", 0)
        self.values_at_reset = {name: self.current(name) for name in self.values_at_reset}

    def _raise_peaks(self, *names: str) -> None:
        for name in names:
            current_value = self.current(name)
            self.set_peak(name, max(self.peak(name), current_value))
            value_of_all_pools = current_value + self.other_pools.current(name)
            self.all_pools.set_peak(name, max(self.all_pools.peak(name), value_of_all_pools))


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
        self.small.pair_with(self.large)
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

    @property
    def has_pending(self) -> bool:
        """Whether blocks were freed while other streams use them."""
        return bool(self.small.pending or self.large.pending)

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
            numbers_by_name |= _read_counted_values(kind, peaks, pools)
            numbers_by_name |= _read_active_values(kind, peaks, pools)
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
        """Set every sum to 0 (torch.cuda.reset_accumulated_memory_stats)."""
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


def _read_counted_values(
    kind: str, peaks: Peaks, pools: Sequence[PoolStats]
) -> Iterator[_NamedValue]:
    for name in COUNTED_NAMES:
        current_value = sum(pool.current(name) for pool in pools)
        increases = sum(pool.sum_of_increases(name) for pool in pools)
        sum_at_reset = sum(pool.values_at_reset[name] for pool in pools)
        peak = peaks.peak(name)
        yield from _named_values(
            f"{name}.{kind}",
            current_value,
            peak,
            increases,
            sum_at_reset + increases - current_value,
        )


def _read_active_values(
    kind: str, peaks: Peaks, pools: Sequence[PoolStats]
) -> Iterator[_NamedValue]:
    for name, (allocated_name, pending_name) in _ACTIVE_SUMS.items():
        current_value = sum(pool.current(name) for pool in pools)
        increases = sum(pool.sum_of_increases(allocated_name) for pool in pools)
        sum_at_reset = sum(
            pool.values_at_reset[counter_name]
            for pool in pools
            for counter_name in (allocated_name, pending_name)
        )
        peak = max(peaks.peak(name), peaks.peak(allocated_name))
        yield from _named_values(
            f"{name}.{kind}",
            current_value,
            peak,
            increases,
            sum_at_reset + increases - current_value,
        )


def _named_values(
    name: str, current: int, peak: int, increases: int, decreases: int
) -> Iterator[_NamedValue]:
    yield f"{name}.current", current
    yield f"{name}.peak", peak
    yield f"{name}.allocated", increases
    yield f"{name}.freed", decreases
