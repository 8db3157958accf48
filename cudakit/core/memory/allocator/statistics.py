"""Statistics: the numbers of torch.cuda.memory_stats, by the same names and with the same meaning.

A metric is its value now (``current``), the highest since the last reset of peaks (``peak``), and what was
added and taken away since the last reset of sums (``allocated`` and ``freed``). Source: PyTorch's
torch/cuda/memory.py and torch/csrc/cuda/Module.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

from cudakit.core.memory.allocator.sizes import UNLIMITED
from cudakit.core.memory.allocator.tally import ACTIVE, COUNTED, Peaks, Tally

_SCALARS = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)
_Part: TypeAlias = tuple[str, int]


class Metric:
    """A metric that few allocations touch."""

    __slots__ = ("added", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.added = self.freed = 0

    def increase(self) -> None:
        self.current += 1
        self.added += 1
        self.peak = max(self.peak, self.current)

    def decrease(self) -> None:
        self.current -= 1
        self.freed += 1


class Statistics:
    """All that is counted of one device.

    ``num_oom_rejections``, ``num_sync_rescues`` and ``num_invalid_frees`` are not among PyTorch's 122.
    """

    def __init__(self, max_split_bytes: int) -> None:
        self.peaks = Peaks()  # of all pools
        self.small, self.large = Tally(self.peaks), Tally(self.peaks)
        self.small.other, self.large.other = self.large, self.small
        self.oversize_allocations, self.oversize_segments = Metric(), Metric()
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

    def read(self) -> dict[str, int]:
        """Return the 122 numbers of torch.cuda.memory_stats (2.11), by name in alphabetical order."""
        limit = self.max_split_bytes
        found = {name: getattr(self, name) for name in _SCALARS}
        found["max_split_size"] = -1 if limit >= UNLIMITED else limit
        small, large = self.small, self.large
        found |= _read("all", self.peaks, small, large)
        found |= _read("small_pool", small, small)
        found |= _read("large_pool", large, large)
        for name in ("oversize_allocations", "oversize_segments"):
            metric: Metric = getattr(self, name)
            found |= _named(name, metric.current, metric.peak, metric.added, metric.freed)
        return dict(sorted(found.items()))

    def reset_peaks(self) -> None:
        """Let every peak be the value now (torch.cuda.reset_peak_memory_stats)."""
        for metric in (*COUNTED, *ACTIVE):
            name = f"{metric}_peak"
            setattr(self.peaks, name, self.total(metric))
            for tally in (self.small, self.large):
                setattr(tally, name, getattr(tally, metric))
        for oversize in (self.oversize_allocations, self.oversize_segments):
            oversize.peak = oversize.current

    def reset_sums(self) -> None:
        """Begin to add up anew (torch.cuda.reset_accumulated_memory_stats)."""
        for tally in (self.small, self.large):
            tally.reset_sums()
        for oversize in (self.oversize_allocations, self.oversize_segments):
            oversize.added = oversize.freed = 0
        for name in _SCALARS:
            setattr(self, name, 0)


def _read(kind: str, peaks: Peaks, *tallies: Tally) -> Iterator[_Part]:
    """Read every metric of the pools whose tallies are given."""

    def total(name: str) -> int:
        return sum(getattr(tally, name) for tally in tallies)

    def parts(metric: str, peak: int, added: int) -> Iterator[_Part]:
        current = total(metric)
        base = sum(tally.bases[metric] for tally in tallies)
        return _named(f"{metric}.{kind}", current, peak, added, base + added - current)

    for metric in COUNTED:
        yield from parts(metric, getattr(peaks, f"{metric}_peak"), total(f"{metric}_added"))
    for metric, allocated in ACTIVE.items():
        peak = max(getattr(peaks, f"{metric}_peak"), getattr(peaks, f"{allocated}_peak"))
        yield from parts(metric, peak, total(f"{allocated}_added"))


def _named(metric: str, current: int, peak: int, added: int, freed: int) -> Iterator[_Part]:
    yield f"{metric}.current", current
    yield f"{metric}.peak", peak
    yield f"{metric}.allocated", added
    yield f"{metric}.freed", freed
