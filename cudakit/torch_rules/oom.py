"""The report of a failed request, its error message, and its remedies. Sizes are in bytes.

A request is tried as in c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator::malloc): a free block of
its pool, size class and stream; a new segment; a new segment once cached segments are released.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Protocol, TypeAlias

from cudakit.torch_rules.settings import SEGMENT_STEP
from cudakit.units import MIB, Unavailable, format_bytes, format_ratio

PoolId: TypeAlias = tuple[int, int]
DEFAULT_POOL: PoolId = (0, 0)
Frames: TypeAlias = "list[dict[str, str | int]]"

_NOT_QUERIED = Unavailable("not queried")


@dataclass(frozen=True, slots=True)
class Fit:
    """The single changes that would have let a failed request succeed."""

    without_cache: bool  # whether the request fits once empty segments are released
    # whether the free bytes of the request's pool and stream suffice as one block
    without_holes: bool
    in_another_pool: bool  # whether a free block of another pool or stream is large enough
    after_pending_frees: bool  # whether the request fits once pending frees complete


def fit_of(
    *,
    block_bytes: int,
    segment_bytes: int,
    usable_bytes: int,
    releasable_bytes: int,
    own_free_bytes: int,
    largest_other_bytes: int,
    largest_later_bytes: int,
) -> Fit:
    """Return the single changes that would have let a failed request succeed.

    A block of ``block_bytes`` was requested, which needed a new segment of ``segment_bytes``. The device had
    ``usable_bytes`` left. ``releasable_bytes`` are cached in empty segments; ``own_free_bytes`` are free in
    the pool, size class and stream of the request. ``largest_other_bytes`` is the largest free block of other
    pools and streams, ``largest_later_bytes`` the largest one of the request's own pool once pending frees
    are complete.
    """
    return Fit(
        without_cache=usable_bytes + releasable_bytes >= segment_bytes,
        without_holes=own_free_bytes + usable_bytes >= block_bytes,
        in_another_pool=largest_other_bytes >= block_bytes,
        after_pending_frees=largest_later_bytes >= block_bytes,
    )


@dataclass(frozen=True, slots=True)
class StreamPool:
    """The memory for requests of one pool, one size class and one stream; no other request can use it."""

    pool: PoolId
    is_small: bool
    stream: int
    reserved_bytes: int
    free_bytes: int
    largest_free_bytes: int
    # Bytes in whole segments and pages of the default pool, which empty_cache releases.
    releasable_bytes: int = 0
    pending_bytes: int = 0  # Bytes that were freed but are used by other streams.


@dataclass(frozen=True, slots=True)
class Pin:
    """A block in use that keeps a mostly free segment from being released."""

    address: int
    size_bytes: int
    requested_bytes: int
    segment_bytes: int
    segment_free_bytes: int
    frames: Frames  # Call stack of the block's allocation; empty if not recorded.


class Process(Protocol):
    """A process that uses the device."""

    @property
    def pid(self) -> int: ...
    @property
    def used_bytes(self) -> int | Unavailable: ...


@dataclass(frozen=True, slots=True)
class OomReport:
    """A request that failed, and the memory at that moment."""

    device: int
    requested_bytes: int
    block_bytes: int  # Size of the block: the request after rounding.
    segment_bytes: int  # Size of the segment that was requested from the device.
    stream: int
    pool: PoolId
    is_small: bool
    device_free_bytes: int
    device_total_bytes: int
    limit_bytes: int | None  # Maximum of reserved bytes; None: no limit.
    allocated_bytes: int
    reserved_bytes: int
    private_free_bytes: int  # Free bytes in private pools.
    pending_bytes: int  # Bytes that were freed but are used by other streams.
    max_split_size_bytes: int | None
    expandable_segments: bool
    stream_pools: tuple[StreamPool, ...]  # Sorted by free bytes, the most first.
    pins: tuple[Pin, ...]  # Sorted by free bytes of the segment, the most first.
    # Pairs of a stream and the bytes of freed blocks that wait for it.
    bytes_by_awaited_stream: tuple[tuple[int, int], ...] = ()
    is_capturing: bool = False  # Whether a capture prevented waiting and releasing memory.
    is_rejected: bool = False  # Whether throw_on_cudamalloc_oom rejected the request.
    # The bytes of the address range of an expandable segment; None: segments are not expandable.
    range_bytes: int | None = None
    reserve_class: str = ""  # Class of the stream, which selects the size of the address range.
    processes: Sequence[Process] | Unavailable = _NOT_QUERIED  # Processes that use the device.

    @property
    def elsewhere_bytes(self) -> int:
        """Bytes of the device that are used outside of this allocator: contexts, other processes."""
        device_used_bytes = self.device_total_bytes - self.device_free_bytes
        return max(device_used_bytes - self.reserved_bytes, 0)

    @property
    def unallocated_bytes(self) -> int:
        """Bytes that are reserved and free in the default pool."""
        unallocated_bytes = self.reserved_bytes - self.allocated_bytes - self.private_free_bytes
        return max(unallocated_bytes - self.pending_bytes, 0)

    @property
    def is_limited(self) -> bool:
        """Whether the limit rejected the request although the device had enough memory."""
        return self.limit_bytes is not None and self.device_free_bytes >= self.segment_bytes

    @property
    def own_pool(self) -> StreamPool:
        """The stream pool that can serve the request."""
        key = self.pool, self.is_small, self.stream
        for stream_pool in self.stream_pools:
            if (stream_pool.pool, stream_pool.is_small, stream_pool.stream) == key:
                return stream_pool
        return StreamPool(*key, 0, 0, 0)

    @property
    def best_other_pool(self) -> StreamPool | None:
        """The stream pool with the largest free block, except ``own_pool``."""
        others = [pool for pool in self.stream_pools if pool != self.own_pool]
        return max(others, key=lambda pool: pool.largest_free_bytes, default=None)

    def fit(self) -> Fit:
        """Return the single changes that would have let the request succeed without new segments."""
        own_pool, other_pool = self.own_pool, self.best_other_pool
        return fit_of(
            block_bytes=self.block_bytes,
            segment_bytes=self.segment_bytes,
            usable_bytes=0,
            releasable_bytes=sum(pool.releasable_bytes for pool in self.stream_pools),
            own_free_bytes=own_pool.free_bytes,
            largest_other_bytes=other_pool.largest_free_bytes if other_pool else 0,
            # Pending frees are complete now: a large enough block became free after the last search.
            largest_later_bytes=own_pool.largest_free_bytes,
        )

    def used_by_process(self) -> dict[int, int]:
        """Return the device memory of each process, most bytes first; empty if unknown."""
        if isinstance(self.processes, Unavailable):
            return {}
        bytes_by_process: dict[int, int] = {}
        for process in self.processes:
            if not isinstance(process.used_bytes, Unavailable):
                # A process with a compute and a graphics context is listed twice.
                bytes_by_process[process.pid] = max(
                    bytes_by_process.get(process.pid, 0), process.used_bytes
                )
        return dict(sorted(bytes_by_process.items(), key=lambda pair: -pair[1]))


# --- The error of a failed request: PyTorch's sentences in one line, then details of 80 columns ----
#
# Source of the sentences: c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator::malloc,
# reportProcessMemoryInfo, format_size).

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_MAX_PROCESSES = 4
_LINE_WIDTH = 80
_MAX_STREAM_POOLS = 6
_ROW_FORMAT = "{:>10} {:>10} {:>13} {:>10}  {}"


def torch_size(size_bytes: int) -> str:
    """Write a size as PyTorch does in its errors."""
    for unit, factor in _UNITS:
        if size_bytes > factor:
            return f"{size_bytes / factor:.2f} {unit}"
    return f"{size_bytes} bytes"


def message_of(report: OomReport) -> str:
    """Return PyTorch's sentences about the request and the memory in use, as one line."""
    return " ".join(_sentences(report))


def _sentences(report: OomReport) -> Iterator[str]:
    yield f"Tried to allocate {torch_size(report.segment_bytes)}."
    yield (
        f"GPU {report.device} has a total capacity of {torch_size(report.device_total_bytes)} of which"
        f" {torch_size(report.device_free_bytes)} is free."
    )
    # The memory of this process is known from NVML if possible, else from the driver.
    used_bytes_by_pid = report.used_by_process()
    own_bytes = used_bytes_by_pid.pop(os.getpid(), None)
    for pid, used_bytes in list(used_bytes_by_pid.items())[:_MAX_PROCESSES]:
        yield f"Process {pid} has {torch_size(used_bytes)} memory in use."
    if len(used_bytes_by_pid) > _MAX_PROCESSES:
        yield f"{len(used_bytes_by_pid) - _MAX_PROCESSES} more processes use less each."
    if own_bytes is not None:
        yield (
            "Including memory outside of this allocator, this process has"
            f" {torch_size(own_bytes)} memory in use."
        )
    else:  # in a container NVML has the process ids of the host
        yield f"{torch_size(report.elsewhere_bytes)} is in use outside of this allocator."
    if report.limit_bytes is not None:
        yield f"{torch_size(report.limit_bytes)} allowed;"
    yield "Of the allocated memory"
    yield f"{torch_size(report.allocated_bytes + report.private_free_bytes)} is allocated by this allocator,"
    if report.private_free_bytes:
        yield f"with {torch_size(report.private_free_bytes)} allocated in private pools (e.g., CUDA Graphs),"
    if report.pending_bytes:
        yield f"{torch_size(report.pending_bytes)} was freed but is in use by other streams,"
    yield f"and {torch_size(report.unallocated_bytes)} is reserved by this allocator but unallocated."


def details(report: OomReport) -> str:
    """Describe the request, the reserved memory, the blocks that keep memory reserved, and the remedies."""
    lines = [
        f"Requested: {format_bytes(report.requested_bytes)} {describe_stream_pool(report.own_pool)}"
    ]
    lines += _stream_pool_lines(report)
    if report.pins:
        lines.append("Blocks in use in mostly free segments, which they keep reserved:")
    for pin in report.pins:
        lines += _pin_lines(pin)
    lines.append("Possible remedies:")
    for remedy in remedies(report):
        lines += wrap(remedy, _LINE_WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines)


def _stream_pool_lines(report: OomReport) -> Iterator[str]:
    if report.stream_pools:
        yield _ROW_FORMAT.format("Reserved", "Free", "Largest free", "Pending", "Serves")
    for pool in report.stream_pools[:_MAX_STREAM_POOLS]:
        size_class = "small" if pool.is_small else "large"
        pool_text = "" if pool.pool == DEFAULT_POOL else f", pool {pool.pool[0]},{pool.pool[1]}"
        yield _sum_line((pool,), f"{size_class}, stream {pool.stream:#x}{pool_text}")
    if omitted_pools := report.stream_pools[_MAX_STREAM_POOLS:]:
        yield _sum_line(omitted_pools, f"{len(omitted_pools)} more")


def _sum_line(stream_pools: tuple[StreamPool, ...], served_requests_text: str) -> str:
    sizes = (
        sum(pool.reserved_bytes for pool in stream_pools),
        sum(pool.free_bytes for pool in stream_pools),
        max(pool.largest_free_bytes for pool in stream_pools),
        sum(pool.pending_bytes for pool in stream_pools),
    )
    return _ROW_FORMAT.format(*map(format_bytes, sizes), served_requests_text)


def _pin_lines(pin: Pin) -> Iterator[str]:
    share_text = format_ratio(min(pin.segment_free_bytes / pin.segment_bytes, 0.999))  # never 100%
    yield (
        f"  {format_bytes(pin.size_bytes)} at {pin.address:#x} keeps a segment of"
        f" {format_bytes(pin.segment_bytes)}, {share_text} free"
    )
    if pin.frames:
        frame = pin.frames[0]
        yield f"    {frame['filename']}:{frame['line']} ({frame['name']})"


# --- Remedies for a failed request of the caching allocator, most certain first --------------------


def hint_of(report: OomReport) -> str:
    """Return the remedies in one line."""
    return "; ".join(remedies(report))


def remedies(report: OomReport) -> tuple[str, ...]:
    """Return the remedies, most certain first; never empty."""
    if report.segment_bytes > report.device_total_bytes:
        return ("request less: the device has less memory",)
    specific_remedies = (
        *_address_remedies(report),
        *_timing_remedies(report),
        *_limit_remedies(report),
        *_free_block_remedies(report),
        *_other_memory_remedies(report),
    )
    if specific_remedies:
        return specific_remedies
    has_stacks = any(pin.frames for pin in report.pins)
    calls_text = (
        "save_on_out_of_memory()" if has_stacks else "record_history() and save_on_out_of_memory()"
    )
    return (
        f"free memory, or request less: {calls_text} and then `cudakit memviz` show what uses it",
    )


def describe_stream_pool(stream_pool: StreamPool) -> str:
    """Describe a stream pool: size class, private pool and stream."""
    size_class = "small" if stream_pool.is_small else "large"
    pool_text = (
        ""
        if stream_pool.pool == DEFAULT_POOL
        else f" of private pool {stream_pool.pool[0]},{stream_pool.pool[1]}"
    )
    return f"in the {size_class} blocks{pool_text} on stream {stream_pool.stream:#x}"


def _timing_remedies(report: OomReport) -> Iterator[str]:
    cached_bytes = sum(stream_pool.releasable_bytes for stream_pool in report.stream_pools)
    if report.is_capturing and (cached_bytes or report.pending_bytes):
        yield (
            f"during a capture {format_bytes(cached_bytes + report.pending_bytes)} of cached or pending"
            " memory cannot be released: run the code once before the capture, then call empty_cache()"
        )
    if report.is_rejected and cached_bytes:
        yield (
            f"without throw_on_cudamalloc_oom:True {format_bytes(cached_bytes)} of cached memory would have"
            " been released first"
        )
    for stream, waiting_bytes in report.bytes_by_awaited_stream:
        if waiting_bytes >= report.block_bytes:
            yield (
                f"{format_bytes(waiting_bytes)} was freed but waits for stream {stream:#x}: synchronize that"
                " stream before the request, or free its memory earlier"
            )


def _address_remedies(report: OomReport) -> Iterator[str]:
    if report.range_bytes is None or report.block_bytes <= report.range_bytes:
        return
    setting_name = "expandable_segments_reserve"
    class_text = f" of class {report.reserve_class}" if report.reserve_class else ""
    if report.reserve_class:
        setting_name += f"_by_class, or {setting_name}"
    yield (
        f"an expandable segment{class_text} reserves {format_bytes(report.range_bytes)} of addresses, and a"
        f" request cannot be larger: raise {setting_name}"
    )


def _limit_remedies(report: OomReport) -> Iterator[str]:
    needed_bytes = report.reserved_bytes + report.segment_bytes
    if report.is_limited and report.limit_bytes is not None:
        memory_share = math.ceil(100 * needed_bytes / report.device_total_bytes) / 100
        yield (
            f"raise the memory fraction to {min(memory_share, 1.0):.2f}: the device has free memory, but"
            f" the limit is {format_bytes(report.limit_bytes)}"
        )
    min_segment_bytes = -(-report.block_bytes // SEGMENT_STEP) * SEGMENT_STEP
    usable_bytes = report.device_free_bytes
    if report.limit_bytes is not None:
        usable_bytes = min(usable_bytes, report.limit_bytes - report.reserved_bytes)
    if not report.is_small and min_segment_bytes <= usable_bytes < report.segment_bytes:
        segment_mb = max(min_segment_bytes // MIB, 12)
        yield (
            f"the request fits, but a segment of {format_bytes(report.segment_bytes)} does not:"
            f" set large_segment_size_mb:{segment_mb}"
        )


def _free_block_remedies(report: OomReport) -> Iterator[str]:
    fit, own_pool = report.fit(), report.own_pool
    largest_text = format_bytes(own_pool.largest_free_bytes)
    if fit.after_pending_frees and report.max_split_size_bytes is None:
        yield f"a free block of {largest_text} came too late: create the allocator with search_again=True"
    elif fit.after_pending_frees:
        yield (
            f"a free block of {largest_text} was not used: raise max_split_size_mb, above which blocks do not"
            " serve smaller requests"
        )
    elif fit.without_holes:
        action = "free the blocks between them"
        if not report.expandable_segments:
            action = f"set expandable_segments:True, or {action}"
        free_text = format_bytes(own_pool.free_bytes)
        yield f"{free_text} is free, but the largest free block is {largest_text}: {action}"
    if fit.in_another_pool and (other_pool := report.best_other_pool):
        yield (
            f"a block of {format_bytes(other_pool.largest_free_bytes)} is cached "
            f"{describe_stream_pool(other_pool)}:"
            " allocate there, or use one stream"
        )


def _other_memory_remedies(report: OomReport) -> Iterator[str]:
    if report.private_free_bytes >= report.block_bytes and report.pool == DEFAULT_POOL:
        yield (
            f"{format_bytes(report.private_free_bytes)} is cached in private pools: close graphs that are not"
            " needed any more, or let graphs share a pool"
        )
    bytes_by_pid = report.used_by_process()
    bytes_by_pid.pop(os.getpid(), None)
    if bytes_by_pid and max(bytes_by_pid.values()) >= report.segment_bytes:
        pid = max(bytes_by_pid, key=lambda pid: bytes_by_pid[pid])
        yield f"end process {pid}, which uses {format_bytes(bytes_by_pid[pid])}"
    elif not bytes_by_pid and report.elsewhere_bytes >= report.segment_bytes:
        yield (
            f"{format_bytes(report.elsewhere_bytes)} is in use outside of this allocator: `cudakit devices`"
            " shows the processes"
        )
