"""Statistics: the numbers of torch.cuda.memory_stats, by the same names and with the same meaning.

A metric is its value now (``current``), the highest since the last reset of peaks (``peak``), and what was
added and taken away since the last reset of sums (``allocated`` and ``freed``). Source: PyTorch's
torch/cuda/memory.py and torch/csrc/cuda/Module.cpp. What each private pool has reserved is of PyTorch 2.15.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from cudakit.core.allocator.ledger import ALL, LARGE, METRICS, SMALL, Ledger
from cudakit.core.allocator.metric import Metric
from cudakit.core.allocator.pools import PoolId
from cudakit.core.allocator.tally import ACTIVE, FLAT, PENDING, Peaks, Tally
from cudakit.torch_rules.sizes import UNLIMITED

_SCALARS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)
_KINDS = ("all", "small_pool", "large_pool")
_Part: TypeAlias = tuple[str, int]


class Statistics:
    """All that is counted of one device.

    ``num_oom_rejections``, ``num_sync_rescues`` and ``num_invalid_frees`` are not among PyTorch's 122.
    """

    def __init__(self, max_split_bytes: int) -> None:
        self.ledger = Ledger()
        self.peaks = Peaks()  # of all pools
        self.small = Tally(self.peaks, self.ledger, SMALL)
        self.large = Tally(self.peaks, self.ledger, LARGE)
        self.small.other, self.large.other = self.large, self.small
        self.oversize_allocations, self.oversize_segments = Metric(), Metric()
        # By the kind of block; of every pool that there ever was.
        self.private_reserved: dict[PoolId, dict[str, Metric]] = {}
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0
        self.max_split_bytes = max_split_bytes  # as it was at the beginning
        self.num_oom_rejections = 0  # requests refused before the driver was asked
        self.num_sync_rescues = 0  # requests served by what was free after a synchronization only
        self.num_invalid_frees = 0

    def total(self, metric: str) -> int:
        """Return the value of a metric in all pools."""
        value: int = getattr(self.small, metric) + getattr(self.large, metric)
        return value

    def reserved_by(self, pool: PoolId, *, small: bool) -> tuple[Metric, ...]:
        """Return what counts the bytes that blocks of a private pool reserve."""
        metrics = self.private_reserved.setdefault(pool, {kind: Metric() for kind in _KINDS})
        return metrics["all"], metrics["small_pool" if small else "large_pool"]

    def read(self) -> dict[str, int]:
        """Return the 122 numbers of torch.cuda.memory_stats (2.11), by name in alphabetical order.

        Besides, what each private pool has reserved (PyTorch 2.15): once it is gone 0, and its other numbers
        stay.
        """
        limit = self.max_split_bytes
        found = {name: getattr(self, name) for name in _SCALARS}
        found["max_split_size"] = -1 if limit >= UNLIMITED else limit
        small, large, book = self.small, self.large, self.ledger.copy()
        for kind, name, peaks, tallies in (
            (ALL, "all", self.peaks, (small, large)),
            (SMALL, "small_pool", small, (small,)),
            (LARGE, "large_pool", large, (large,)),
        ):
            found |= _flat(name, peaks, tallies)
            found |= _booked(name, kind, book, peaks, tallies)
        for name, metric in self._metrics():
            found |= _named(name, metric.current, metric.peak, metric.added, metric.freed)
        return dict(sorted(found.items()))

    def reset_peaks(self) -> None:
        """Let every peak be the value now (torch.cuda.reset_peak_memory_stats)."""
        self.ledger.reset_peaks()
        for flat in (*FLAT, *ACTIVE):
            name = f"{flat}_peak"
            setattr(self.peaks, name, self.total(flat))
            for tally in (self.small, self.large):
                setattr(tally, name, getattr(tally, flat))
        for _, metric in self._metrics():
            metric.reset_peak()

    def reset_sums(self) -> None:
        """Begin to add up anew (torch.cuda.reset_accumulated_memory_stats)."""
        self.ledger.reset_sums()
        for tally in (self.small, self.large):
            tally.reset_sums()
        for _, metric in self._metrics():
            metric.reset_sums()
        for name in (*_SCALARS, "num_oom_rejections"):
            setattr(self, name, 0)

    def _metrics(self) -> Iterator[tuple[str, Metric]]:
        """Go through what is counted by itself, and its names."""
        yield "oversize_allocations", self.oversize_allocations
        yield "oversize_segments", self.oversize_segments
        for (graph, user), kinds in self.private_reserved.items():
            for kind, metric in kinds.items():
                yield f"reserved_bytes_by_private_pools.{graph}_{user}.{kind}", metric


def _flat(name: str, peaks: Peaks, tallies: Sequence[Tally]) -> Iterator[_Part]:
    """Read the metrics that the tallies of some pools keep."""
    for metric in FLAT:
        current = sum(getattr(tally, metric) for tally in tallies)
        added = sum(getattr(tally, f"{metric}_added") for tally in tallies)
        base = sum(tally.bases[metric] for tally in tallies)
        peak = getattr(peaks, f"{metric}_peak")
        yield from _named(f"{metric}.{name}", current, peak, added, base + added - current)


def _booked(
    name: str, kind: int, book: Ledger, peaks: Peaks, tallies: Sequence[Tally]
) -> Iterator[_Part]:
    """Read the metrics of the ledger, and what is active."""
    numbers = {metric: book.read(kind, index) for index, metric in enumerate(METRICS)}
    for metric, (current, peak, added, freed) in numbers.items():
        yield from _named(f"{metric}.{name}", current, peak, added, freed)
    for metric, allocated in ACTIVE.items():
        current, peak, added, freed = numbers[allocated]
        pending = sum(getattr(tally, PENDING[metric]) for tally in tallies)
        base = sum(tally.bases[PENDING[metric]] for tally in tallies)
        peak = max(getattr(peaks, f"{metric}_peak"), peak)
        yield from _named(
            f"{metric}.{name}", current + pending, peak, added, freed + base - pending
        )


def _named(metric: str, current: int, peak: int, added: int, freed: int) -> Iterator[_Part]:
    yield f"{metric}.current", current
    yield f"{metric}.peak", peak
    yield f"{metric}.allocated", added
    yield f"{metric}.freed", freed
