"""The DiffResult as a Document."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from cudakit.memory.report import page
from cudakit.memory.report.rows import (
    device_name,
    limited_table,
    per_device,
    stack_value,
    table,
)
from cudakit.memory.result import DeviceDiff, DiffResult, DiffRow, MomentDiff
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
        (
            device_name(device),
            (
                _answer_note(device),
                _totals_table(device),
                page.difference(device),
                *_moment_sections(device, top),
            ),
        )
        for device in result.devices
    )
    return Document(f"GPU memory: {result.before.name} → {result.after.name}", device_nodes)


def _answer_note(device: DeviceDiff) -> Note:
    change_text = "; ".join(
        f"{_change_text(moment)} at the {moment_name}"
        for moment_name, moment in (("peak", device.peak), ("end", device.end))
    )
    level: Literal["ok", "warn"] = (
        "warn" if any(map(_has_grown, (device.peak, device.end))) else "ok"
    )
    increase_text = _largest_increase_text(device.peak)
    return Note(level, f"Requested memory: {change_text}.{increase_text}")


def _largest_increase_text(moment: MomentDiff) -> str:
    """Return a sentence on the call site whose memory grew most at the peak; "" if none grew."""
    change_by_site: defaultdict[str, int] = defaultdict(int)
    for row in (*moment.grown, *moment.appeared, *moment.shrunk, *moment.vanished):
        if row.stack:
            change_by_site[site_name(row.stack[row.site])] += row.change_bytes
    largest_site = max(change_by_site, key=lambda site: change_by_site[site], default="")
    change_bytes = change_by_site[largest_site]
    if change_bytes <= 0:
        return ""
    return f" Largest increase of a call site at the peak: {largest_site}, {format_bytes(change_bytes)}."


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
    table_rows = [
        (
            f"{amount_name} at {moment_name}",
            *(
                getattr(moment_of_side.state, f"{amount_name}_bytes")
                for moment_of_side in moments_of_sides
            ),
        )
        for moment_name, moments_of_sides in (
            ("peak", (device.peak.before, device.peak.after)),
            ("end", (device.end.before, device.end.after)),
        )
        for amount_name in ("requested", "reserved")
    ]
    return table(
        (
            ("", "text", lambda row: Text(row[0])),
            ("before", "number", lambda row: Bytes(row[1])),
            ("after", "number", lambda row: Bytes(row[2])),
            ("change", "number", lambda row: Change(row[2] - row[1])),
            ("growth", "number", lambda row: _growth_value(row[1], row[2])),
        ),
        table_rows,
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


def _moment_sections(device: DeviceDiff, top: int) -> Iterator[Section]:
    for moment_name, moment in (("peak", device.peak), ("end", device.end)):
        nodes = tuple(_change_tables(moment, top))
        unchanged_note = Note("ok", "No call stack changed.")
        yield Section(f"Changes at the {moment_name}", nodes or (unchanged_note,))


_ROWS_CAPTION = (
    "Sizes: those of the blocks, which the allocator rounds up. A row combines call stacks with the same"
    " files and functions, whose lines may differ; it names the lines of the largest."
)


def _change_tables(moment: MomentDiff, top: int) -> Iterator[Node]:
    change_kinds = [
        change_kind
        for change_kind in ("grown", "appeared", "shrunk", "vanished")
        if getattr(moment, change_kind)
    ]
    for change_kind in change_kinds:
        diff_rows: tuple[DiffRow, ...] = getattr(moment, change_kind)
        if diff_rows:
            yield limited_table(
                (
                    (change_kind, "number", lambda row: Change(row.change_bytes)),
                    ("before", "number", lambda row: Bytes(row.before_bytes)),
                    ("after", "number", lambda row: Bytes(row.after_bytes)),
                    ("blocks after", "number", lambda row: Count(row.after_count)),
                    ("call stack", "stack", lambda row: stack_value(row.stack, row.site)),
                ),
                diff_rows,
                top,
                caption=_ROWS_CAPTION if change_kind == change_kinds[-1] else "",
            )
