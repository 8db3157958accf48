"""The error of a failed request: PyTorch's sentences in one line, then details in lines of 80 columns.

Source of the sentences: c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator::malloc,
reportProcessMemoryInfo, format_size).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from textwrap import wrap

from cudakit.torch_rules.oom_facts import DEFAULT_POOL, OomReport, Pin, StreamPool
from cudakit.torch_rules.oom_remedies import describe_stream_pool, remedies
from cudakit.units import format_bytes, format_ratio

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
    yield from _memory_use_texts(report)
    if report.limit_bytes is not None:
        yield f"{torch_size(report.limit_bytes)} allowed;"
    yield "Of the allocated memory"
    yield f"{torch_size(report.allocated_bytes + report.private_free_bytes)} is allocated by this allocator,"
    if report.private_free_bytes:
        yield f"with {torch_size(report.private_free_bytes)} allocated in private pools (e.g., CUDA Graphs),"
    if report.pending_bytes:
        yield f"{torch_size(report.pending_bytes)} was freed but is in use by other streams,"
    yield f"and {torch_size(report.unallocated_bytes)} is reserved by this allocator but unallocated."


def _memory_use_texts(report: OomReport) -> Iterator[str]:
    """Yield the memory use of each process; of this process from NVML if possible, else from the driver."""
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
    if not report.stream_pools:
        return
    yield _ROW_FORMAT.format("Reserved", "Free", "Largest free", "Pending", "Serves")
    for stream_pool in report.stream_pools[:_MAX_STREAM_POOLS]:
        yield _sum_line((stream_pool,), _requests_served(stream_pool))
    if omitted_pools := report.stream_pools[_MAX_STREAM_POOLS:]:
        yield _sum_line(omitted_pools, f"{len(omitted_pools)} more")


def _sum_line(stream_pools: tuple[StreamPool, ...], served_requests_text: str) -> str:
    return _ROW_FORMAT.format(
        format_bytes(sum(stream_pool.reserved_bytes for stream_pool in stream_pools)),
        format_bytes(sum(stream_pool.free_bytes for stream_pool in stream_pools)),
        format_bytes(max(stream_pool.largest_free_bytes for stream_pool in stream_pools)),
        format_bytes(sum(stream_pool.pending_bytes for stream_pool in stream_pools)),
        served_requests_text,
    )


def _requests_served(stream_pool: StreamPool) -> str:
    pool_text = (
        ""
        if stream_pool.pool == DEFAULT_POOL
        else f", pool {stream_pool.pool[0]},{stream_pool.pool[1]}"
    )
    return (
        f"{'small' if stream_pool.is_small else 'large'}, stream {stream_pool.stream:#x}{pool_text}"
    )


def _pin_lines(pin: Pin) -> Iterator[str]:
    share_text = format_ratio(min(pin.segment_free_bytes / pin.segment_bytes, 0.999))  # never 100%
    yield (
        f"  {format_bytes(pin.size_bytes)} at {pin.address:#x} keeps a segment of"
        f" {format_bytes(pin.segment_bytes)}, {share_text} free"
    )
    if pin.frames:
        frame = pin.frames[0]
        yield f"    {frame['filename']}:{frame['line']} ({frame['name']})"
