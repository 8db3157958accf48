"""The upstream of pinned memory, and the statistics of torch.cuda.host_memory_stats.

Source: PyTorch's CachingHostAllocator.h (HostStats, getStats) and torch/csrc/cuda/Module.cpp. Times are in
microseconds.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter_ns
from typing import Protocol, runtime_checkable

from cudakit.allocator.pinned.pools import bin_of
from cudakit.allocator.pool_stats import Stat
from cudakit.allocator.upstream import EventSource, GpuEvents
from cudakit.errors import CudaError, Unsupported
from cudakit.gpu.api import Memory, Ptr, Streams
from cudakit.torch_rules.settings import Settings


class HostUpstream(EventSource, Protocol):
    """The source of pinned memory. Every failure is a CudaError; out of memory has code 2."""

    def malloc(self, size_bytes: int) -> int: ...
    def free(self, ptr: int) -> None: ...


@runtime_checkable
class RegisteringUpstream(Protocol):
    """An upstream that can also pin memory after its allocation, which locks the driver for less time."""

    def malloc_registered(self, size_bytes: int, thread_count: int) -> int: ...


class HostMemoryDevice(Memory, Streams, Protocol):
    """The protocols of a device for which host memory is pinned."""


class GpuHostUpstream(GpuEvents):
    """Host memory that a device can access (cuMemHostAlloc, cuMemHostRegister), during captures too.

    Memory is freed with the function that matches its allocation, even if the settings changed, as in PyTorch
    (aten/src/ATen/cuda/CachingHostAllocator.cpp, free_block).
    """

    def __init__(self, gpu: HostMemoryDevice) -> None:
        super().__init__(gpu)
        self._gpu = gpu
        self._allocated_addresses: set[int] = set()
        self._registered_addresses: set[int] = set()

    def malloc(self, size_bytes: int) -> int:
        with self._gpu.relaxed():
            ptr = self._gpu.host_malloc(size_bytes, pinned=True)
        self._allocated_addresses.add(ptr)
        return ptr

    def malloc_registered(self, size_bytes: int, thread_count: int) -> int:
        with self._gpu.relaxed():
            ptr = self._gpu.host_malloc(size_bytes, pinned=False)
            try:
                self._gpu.host_register(ptr, thread_count=thread_count)
            except BaseException:
                self._gpu.host_free(ptr)
                raise
        self._registered_addresses.add(ptr)
        self._allocated_addresses.add(ptr)
        return ptr

    def free(self, ptr: int) -> None:
        if ptr in self._registered_addresses:
            self._gpu.host_unregister(Ptr(ptr))
            self._registered_addresses.discard(ptr)
        self._allocated_addresses.discard(ptr)
        try:
            self._gpu.host_free(Ptr(ptr))
        except CudaError:
            self._allocated_addresses.add(ptr)
            raise

    def release_all(self) -> None:
        """Free all memory that this object allocated, in use or not; see GpuUpstream.release_all."""
        with suppress(CudaError), self._gpu.relaxed():
            for ptr in list(self._allocated_addresses):
                with suppress(CudaError):
                    self.free(ptr)
            self.destroy_events()


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
        average_us = self.total // self.count if self.count else 0
        values_by_name = {
            "total": self.total,
            "max": self.max,
            "min": self.min,
            "count": self.count,
        }
        return {
            f"{name}.{key}": value for key, value in {**values_by_name, "avg": average_us}.items()
        }


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

    def count_alloc(self, size: int) -> None:
        """Count an allocated block."""
        block_count, total_bytes = self.active_by_bin[bin_of(size)]
        block_count.increase(1)
        total_bytes.increase(size)

    def count_free(self, size: int) -> None:
        """Count a block that is not used any more."""
        block_count, total_bytes = self.active_by_bin[bin_of(size)]
        block_count.decrease(1)
        total_bytes.decrease(size)

    def count_obtained(self, size: int) -> None:
        """Count memory that was taken from the driver, because no free block served a request."""
        self.allocations.increase(1)
        self.allocated_bytes.increase(size)

    def count_released(self, size: int) -> None:
        """Count memory that was returned to the driver."""
        self.allocations.decrease(1)
        self.allocated_bytes.decrease(size)

    def read(self) -> dict[str, int]:
        """Return the 28 numbers by name, in alphabetical order."""
        request_counts, size_totals = (
            zip(*self.active_by_bin.values(), strict=True) if self.active_by_bin else ((), ())
        )
        numbers_by_name = {
            "num_host_alloc": self.allocations.allocated,
            "num_host_free": self.allocations.freed,
        }
        numbers_by_name |= self.alloc_time.read("host_alloc_time") | self.free_time.read(
            "host_free_time"
        )
        numbers_by_name |= _read_sums("allocations", (self.allocations,))
        numbers_by_name |= _read_sums("allocated_bytes", (self.allocated_bytes,))
        numbers_by_name |= _read_sums("active_requests", request_counts) | _read_sums(
            "active_bytes", size_totals
        )
        return dict(sorted(numbers_by_name.items()))

    def reset_peaks(self) -> None:
        """Set every peak to the current value (torch.cuda.reset_peak_host_memory_stats)."""
        for stat in self._all_statistics():
            stat.reset_peak()

    def reset_sums(self) -> None:
        """Set every sum to 0 (torch.cuda.reset_accumulated_host_memory_stats)."""
        for stat in self._all_statistics():
            stat.reset_sums()

    def _all_statistics(self) -> list[Stat | DurationStats]:
        active_stats = [stat for stat_pair in self.active_by_bin.values() for stat in stat_pair]
        durations = [self.alloc_time, self.free_time]
        return [self.allocations, self.allocated_bytes, *active_stats, *durations]


def _read_sums(name: str, stats: tuple[Stat, ...]) -> dict[str, int]:
    return {
        f"{name}.current": sum(stat.current for stat in stats),
        f"{name}.peak": sum(stat.peak for stat in stats),
        f"{name}.allocated": sum(stat.allocated for stat in stats),
        f"{name}.freed": sum(stat.freed for stat in stats),
    }


class TimedSource:
    """The engine's source of segments: calls the upstream as the settings require, and times the calls."""

    def __init__(self, upstream: HostUpstream, stats: HostStats) -> None:
        self._upstream = upstream
        self._stats = stats
        self._malloc: Callable[[int], int] = upstream.malloc

    def configure(self, settings: Settings) -> None:
        """Replace the settings. Raises Unsupported for a setting that the upstream does not support."""
        self._malloc = self._upstream.malloc
        if settings.pinned_use_cuda_host_register:
            self._malloc = self._registering_malloc(settings.pinned_num_register_threads)

    def malloc(self, size_bytes: int, stream: int = 0) -> int:  # noqa: ARG002
        """Take memory from the driver. Raises CudaError."""
        begin_ns = perf_counter_ns()
        ptr = self._malloc(size_bytes)
        self._stats.alloc_time.add((perf_counter_ns() - begin_ns) // 1000)
        return ptr

    def free(self, ptr: int) -> None:
        """Return memory to the driver. Raises CudaError."""
        begin_ns = perf_counter_ns()
        try:
            self._upstream.free(ptr)
        except CudaError:
            self._stats.num_free_failures += 1
            raise
        self._stats.free_time.add((perf_counter_ns() - begin_ns) // 1000)

    def _registering_malloc(self, threads: int) -> Callable[[int], int]:
        upstream = self._upstream
        if not isinstance(upstream, RegisteringUpstream):
            raise Unsupported(
                "this upstream cannot register host memory",
                hint="omit pinned_use_cuda_host_register",
            )
        return lambda size_bytes: upstream.malloc_registered(size_bytes, threads)
