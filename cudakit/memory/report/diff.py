"""The DiffResult as a Document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from cudakit.memory.report import page
from cudakit.memory.report.rows import (
    device_name,
    limited_table,
    per_device,
    stack_value,
    table,
)
from cudakit.memory.result import DeviceDiff, DiffResult, MomentDiff
from cudakit.memory.snapshot import site_name
from cudakit.report.document import (
    Bytes,
    Change,
    Count,
    Document,
    Node,
    Note,
    Ratio,
    Section,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, format_bytes, format_ratio

# Maximum ratio of after to before for which growth is a percentage (1,000%). Beyond it, growth is a factor.
_MAX_PERCENT_RATIO = 11


def report(result: DiffResult, *, top: int = 10) -> Document:
    """Return the report; tables show ``top`` rows, 0 shows all."""
    device_nodes = per_device(
        (device_name(device), _device_nodes(device, top)) for device in result.devices
    )
    return Document(f"GPU memory: {result.before.name} → {result.after.name}", device_nodes)


def _device_nodes(device: DeviceDiff, top: int) -> Iterator[Node]:
    moments = {"peak": device.peak, "end": device.end}
    texts = [f"{_change_text(moment)} at the {name}" for name, moment in moments.items()]
    yield Note(
        "warn" if any(map(_has_grown, moments.values())) else "ok",
        f"Requested memory: {'; '.join(texts)}.{_largest_increase_text(device.peak)}",
    )
    yield _totals_table(device)
    yield page.difference(device)
    for name, moment in moments.items():
        tables = tuple(_change_tables(moment, top))
        yield Section(f"Changes at the {name}", tables or (Note("ok", "No call stack changed."),))


def _largest_increase_text(moment: MomentDiff) -> str:
    """Return a sentence on the call site whose memory grew most at the peak; "" if none grew."""
    change_by_site: defaultdict[str, int] = defaultdict(int)
    for row in (*moment.grown, *moment.appeared, *moment.shrunk, *moment.vanished):
        if row.stack:
            change_by_site[site_name(row.stack[row.site])] += row.change_bytes
    site = max(change_by_site, key=lambda site: change_by_site[site], default="")
    if change_by_site[site] <= 0:
        return ""
    size_text = format_bytes(change_by_site[site])
    return f" Largest increase of a call site at the peak: {site}, {size_text}."


def _has_grown(moment: MomentDiff) -> bool:
    return moment.after.state.requested_bytes > moment.before.state.requested_bytes


def _change_text(moment: MomentDiff) -> str:
    bytes_before = moment.before.state.requested_bytes
    bytes_after = moment.after.state.requested_bytes
    if bytes_before == bytes_after:
        return f"unchanged ({format_bytes(bytes_after)})"
    direction = "more" if bytes_after > bytes_before else "less"
    size_text = format_bytes(abs(bytes_after - bytes_before))
    if not bytes_before:
        return f"{size_text} {direction}"
    if bytes_after / bytes_before > _MAX_PERCENT_RATIO:
        return f"{size_text} {direction} ({_factor_text(bytes_before, bytes_after)} as much)"
    return f"{size_text} ({format_ratio(abs(bytes_after / bytes_before - 1))}) {direction}"


def _factor_text(bytes_before: int, bytes_after: int) -> str:
    return f"{round(bytes_after / bytes_before):,} times"


def _totals_table(device: DeviceDiff) -> Table:
    rows = [
        (f"{amount} at {name}", *(getattr(side.state, f"{amount}_bytes") for side in sides))
        for name, sides in (
            ("peak", (device.peak.before, device.peak.after)),
            ("end", (device.end.before, device.end.after)),
        )
        for amount in ("requested", "reserved")
    ]
    return table(
        (
            ("", "text", lambda row: Text(row[0])),
            ("before", "number", lambda row: Bytes(row[1])),
            ("after", "number", lambda row: Bytes(row[2])),
            ("change", "number", lambda row: Change(row[2] - row[1])),
            ("growth", "number", lambda row: _growth_value(row[1], row[2])),
        ),
        rows,
        " ".join(
            f"The snapshot {side} has no trace: its peak is unknown, and its end is compared."
            for side, moment in (("before", device.end.before), ("after", device.end.after))
            if moment.event < 0
        ),
    )


def _growth_value(bytes_before: int, bytes_after: int) -> Value:
    if not bytes_before:
        return Unavailable("no memory was in use before")
    if bytes_after / bytes_before > _MAX_PERCENT_RATIO:
        return Text(_factor_text(bytes_before, bytes_after))
    return Ratio(bytes_after / bytes_before - 1)


_ROWS_CAPTION = (
    "Sizes: those of the blocks, which the allocator rounds up. A row combines call stacks with the same"
    " files and functions, whose lines may differ; it names the lines of the largest."
)


def _change_tables(moment: MomentDiff, top: int) -> Iterator[Node]:
    rows_by_kind = {
        kind: rows
        for kind in ("grown", "appeared", "shrunk", "vanished")
        if (rows := getattr(moment, kind))
    }
    for kind, rows in rows_by_kind.items():
        yield limited_table(
            (
                (kind, "number", lambda row: Change(row.change_bytes)),
                ("before", "number", lambda row: Bytes(row.before_bytes)),
                ("after", "number", lambda row: Bytes(row.after_bytes)),
                ("blocks after", "number", lambda row: Count(row.after_count)),
                ("call stack", "stack", lambda row: stack_value(row.stack, row.site)),
            ),
            rows,
            top,
            caption=_ROWS_CAPTION if kind == [*rows_by_kind][-1] else "",
        )
