"""What an error says in one line when memory has run out: PyTorch's sentences, in their order.

Source: c10/cuda/CUDACachingAllocator.cpp (DeviceCachingAllocator::malloc, reportProcessMemoryInfo,
format_size).
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from cudakit.core.allocator.oom_report import OomReport
from cudakit.units import Unavailable

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
_MOST_PROCESSES = 4


def torch_size(size_bytes: int) -> str:
    """Write a size as PyTorch does in its errors."""
    for unit, least in _UNITS:
        if size_bytes > least:
            return f"{size_bytes / least:.2f} {unit}"
    return f"{size_bytes} bytes"


def message_of(report: OomReport) -> str:
    """Say what was asked and who holds the memory."""
    return " ".join(_sentences(report))


def process_bytes(report: OomReport) -> dict[int, int]:
    """Return how much each process uses of the device, by its number, the most first; empty if not known."""
    if isinstance(report.processes, Unavailable):
        return {}
    found: dict[int, int] = {}
    for process in report.processes:
        if not isinstance(process.used_bytes, Unavailable):
            # One that computes and draws is listed for both.
            found[process.pid] = max(found.get(process.pid, 0), process.used_bytes)
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))


def _sentences(r: OomReport) -> Iterator[str]:
    yield f"Tried to allocate {torch_size(r.segment_bytes)}."
    yield (
        f"GPU {r.device} has a total capacity of {torch_size(r.device_total_bytes)} of which"
        f" {torch_size(r.device_free_bytes)} is free."
    )
    yield from _in_use(r)
    if r.limit_bytes is not None:
        yield f"{torch_size(r.limit_bytes)} allowed;"
    yield "Of the allocated memory"
    yield f"{torch_size(r.allocated_bytes + r.private_free_bytes)} is allocated by this allocator,"
    if r.private_free_bytes:
        yield f"with {torch_size(r.private_free_bytes)} allocated in private pools (e.g., CUDA Graphs),"
    if r.pending_bytes:
        yield f"{torch_size(r.pending_bytes)} was freed but is in use by other streams,"
    yield f"and {torch_size(r.unallocated_bytes)} is reserved by this allocator but unallocated."


def _in_use(report: OomReport) -> Iterator[str]:
    """Say how much each process uses; of this one only what NVML or the driver says of it."""
    processes = process_bytes(report)
    own = processes.pop(os.getpid(), None)
    for pid, used in list(processes.items())[:_MOST_PROCESSES]:
        yield f"Process {pid} has {torch_size(used)} memory in use."
    if len(processes) > _MOST_PROCESSES:
        yield f"{len(processes) - _MOST_PROCESSES} more processes use less each."
    if own is not None:
        yield (
            "Including memory outside of this allocator, this process has"
            f" {torch_size(own)} memory in use."
        )
    else:  # NVML numbers processes as the host does, and a container does not
        yield f"{torch_size(report.elsewhere_bytes)} is in use outside of this allocator."
