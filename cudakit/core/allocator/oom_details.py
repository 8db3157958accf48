"""Where memory is when it has run out, and what would have helped, for lines of 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap

from cudakit.core.allocator.fragmentation import Silo
from cudakit.core.allocator.oom_remedies import place, remedies
from cudakit.core.allocator.oom_report import OomReport, Pin
from cudakit.core.allocator.pools import DEFAULT_POOL
from cudakit.units import format_bytes, format_ratio

_WIDTH = 80
_MOST_SILOS = 6
_ROW = "{:>10} {:>10} {:>13} {:>10}  {}"


def details(report: OomReport) -> str:
    """Describe the request, what is reserved and by what it is kept, and what would have helped."""
    lines = [f"Requested: {format_bytes(report.requested_bytes)} {place(report.own)}"]
    lines += _silo_lines(report)
    if report.pins:
        lines.append("Blocks that keep a segment, most of which is free:")
    for pin in report.pins:
        lines += _pin_lines(pin)
    lines.append("What would have helped:")
    for remedy in remedies(report):
        lines += wrap(remedy, _WIDTH, initial_indent="  - ", subsequent_indent="    ")
    return "\n".join(lines)


def _silo_lines(report: OomReport) -> Iterator[str]:
    if not report.silos:
        return
    yield _ROW.format("Reserved", "Free", "Largest hole", "Pending", "Serves")
    for silo in report.silos[:_MOST_SILOS]:
        yield _ROW.format(
            format_bytes(silo.reserved_bytes),
            format_bytes(silo.free_bytes),
            format_bytes(silo.largest_free_bytes),
            format_bytes(silo.pending_bytes),
            _served(silo),
        )
    if rest := report.silos[_MOST_SILOS:]:
        yield _ROW.format(
            format_bytes(sum(silo.reserved_bytes for silo in rest)),
            format_bytes(sum(silo.free_bytes for silo in rest)),
            format_bytes(max(silo.largest_free_bytes for silo in rest)),
            format_bytes(sum(silo.pending_bytes for silo in rest)),
            f"{len(rest)} more",
        )


def _served(silo: Silo) -> str:
    pool = "" if silo.pool == DEFAULT_POOL else f", pool {silo.pool[0]},{silo.pool[1]}"
    return f"{'small' if silo.small else 'large'}, stream {silo.stream:#x}{pool}"


def _pin_lines(pin: Pin) -> Iterator[str]:
    share = format_ratio(min(pin.segment_free_bytes / pin.segment_bytes, 0.999))  # it is not all
    yield (
        f"  {format_bytes(pin.size_bytes)} at {pin.address:#x} keep"
        f" {format_bytes(pin.segment_bytes)}, {share} of it free"
    )
    if pin.frames:
        first = pin.frames[0]
        yield f"    {first['filename']}:{first['line']} ({first['name']})"
