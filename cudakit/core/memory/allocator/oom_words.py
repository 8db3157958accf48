"""What an error says when memory has run out: PyTorch's sentence, and what would have helped."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.memory.allocator.oom_report import OomReport, Pin, Silo
from cudakit.units import format_bytes

_UNITS = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))


def torch_size(size_bytes: int) -> str:
    """Write a size as PyTorch does in its errors (format_size of c10/cuda/CUDACachingAllocator.cpp)."""
    for unit, least in _UNITS:
        if size_bytes > least:
            return f"{size_bytes / least:.2f} {unit}"
    return f"{size_bytes} bytes"


def message_of(report: OomReport) -> str:
    """Say what was asked and who holds the memory, in one line."""
    r = report
    free_elsewhere = r.reserved_bytes - r.allocated_bytes - r.private_free_bytes
    parts = [
        f"Tried to allocate {torch_size(r.segment_bytes)}. GPU {r.device} has a total capacity of"
        f" {torch_size(r.device_total_bytes)} of which {torch_size(r.device_free_bytes)} is free.",
        f"{torch_size(r.elsewhere_bytes)} is in use outside of this allocator.",
        f"{torch_size(r.limit_bytes)} allowed;" if r.limit_bytes is not None else "",
        f"Of the allocated memory {torch_size(r.allocated_bytes + r.private_free_bytes)} is allocated,"
        if r.private_free_bytes
        else f"Of the allocated memory {torch_size(r.allocated_bytes)} is allocated,",
        f"with {torch_size(r.private_free_bytes)} in private pools,"
        if r.private_free_bytes
        else "",
        f"{torch_size(r.pending_bytes)} was freed but is in use by other streams,"
        if r.pending_bytes
        else "",
        f"and {torch_size(max(free_elsewhere - r.pending_bytes, 0))} is reserved but unallocated.",
    ]
    return " ".join(filter(None, parts))


def hint_of(report: OomReport) -> str:
    """Say what would have helped, the most promising first."""
    return "; ".join(_remedies(report)) or "free memory, or ask for less"


def details(report: OomReport) -> str:
    """Describe where the reserved memory is and what holds it, a line each."""
    lines = [f"requested {format_bytes(report.requested_bytes)} {_place(report.own)}"]
    lines += [
        f"{format_bytes(silo.free_bytes)} of {format_bytes(silo.reserved_bytes)} free"
        f" {_place(silo)}, the largest hole {format_bytes(silo.largest_free_bytes)}"
        for silo in report.silos
    ]
    return "\n".join([*lines, *map(_pin_line, report.pins)])


def _remedies(report: OomReport) -> Iterator[str]:
    size, own = report.block_bytes, report.own
    if report.segment_bytes > report.device_total_bytes:
        yield "ask for less: that is more than the device has"
        return
    limit = report.limit_bytes
    if limit is not None and report.device_free_bytes >= report.segment_bytes:
        yield f"raise the memory fraction: the device has room, the limit of {format_bytes(limit)} has not"
    if own.largest_free_bytes >= size:
        yield (
            f"a free block of {format_bytes(own.largest_free_bytes)} was not used: raise"
            " max_split_size_mb, which keeps large blocks from smaller requests"
        )
    elif own.free_bytes >= size:
        yield (
            f"{format_bytes(own.free_bytes)} is free, but in pieces of at most"
            f" {format_bytes(own.largest_free_bytes)}: {_against_pieces(report)}"
        )
    if (other := _other_hole(report)) is not None:
        yield (
            f"{format_bytes(other.largest_free_bytes)} in one piece is cached {_place(other)}:"
            " allocate there, or share a stream"
        )
    if report.elsewhere_bytes >= report.segment_bytes:
        yield (
            f"{format_bytes(report.elsewhere_bytes)} is held outside of this allocator:"
            " `nvidia-smi` shows the processes"
        )


def _against_pieces(report: OomReport) -> str:
    if report.expandable_segments:
        return "free the blocks between them"
    return "free the blocks between them, or set expandable_segments:True"


def _other_hole(report: OomReport) -> Silo | None:
    """Find where else a free block would have been large enough."""
    holes = [s for s in report.silos if s != report.own]
    best = max(holes, key=lambda silo: silo.largest_free_bytes, default=None)
    return best if best and best.largest_free_bytes >= report.block_bytes else None


def _place(silo: Silo) -> str:
    kind = "small" if silo.small else "large"
    pool = "" if silo.pool == (0, 0) else f" of private pool {silo.pool[0]},{silo.pool[1]}"
    return f"in the {kind} blocks{pool} on stream {silo.stream:#x}"


def _pin_line(pin: Pin) -> str:
    where = ""
    if pin.frames:
        first = pin.frames[0]
        where = f", allocated at {first['filename']}:{first['line']} ({first['name']})"
    return (
        f"{format_bytes(pin.size_bytes)} at {pin.address:#x} keep a segment of"
        f" {format_bytes(pin.segment_bytes)}, {format_bytes(pin.segment_free_bytes)} of it free{where}"
    )
