"""The DiffResult as a Document."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.memory.present.rows import device_name, limited, stack_value, table
from cudakit.core.memory.result import DeviceDiff, DiffResult, DiffRow, MomentDiff
from cudakit.document import (
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
from cudakit.units import Unavailable


def report(result: DiffResult, *, top: int = 10) -> Document:
    """Lay out what changed; tables show ``top`` rows, 0 shows all."""
    nodes: list[Node] = []
    for device in result.devices:
        sections: tuple[Node, ...] = (_totals(device), *_moments(device, top))
        several = len(result.devices) > 1
        nodes += [Section(device_name(device), sections)] if several else sections
    return Document(f"GPU memory: {result.before.name} → {result.after.name}", tuple(nodes))


def _totals(device: DeviceDiff) -> Table:
    rows = [
        (f"{what} at {name}", *(getattr(side.state, f"{what}_bytes") for side in sides))
        for name, sides in (
            ("peak", (device.peak.before, device.peak.after)),
            ("end", (device.end.before, device.end.after)),
        )
        for what in ("requested", "reserved")
    ]
    return table(
        (
            ("", "text", lambda row: Text(row[0])),
            ("before", "number", lambda row: Bytes(row[1])),
            ("after", "number", lambda row: Bytes(row[2])),
            ("change", "number", lambda row: Change(row[2] - row[1])),
            ("growth", "number", lambda row: _growth(row[1], row[2])),
        ),
        rows,
    )


def _growth(before: int, after: int) -> Value:
    return Ratio(after / before - 1) if before else Unavailable("nothing was held before")


def _moments(device: DeviceDiff, top: int) -> Iterator[Section]:
    for name, moment in (("peak", device.peak), ("end", device.end)):
        nodes = tuple(_changes(moment, top))
        same = Note("ok", "every call stack holds what it held before")
        yield Section(f"Changes at the {name}", nodes or (same,))


def _changes(moment: MomentDiff, top: int) -> Iterator[Node]:
    for word in ("grown", "appeared", "shrunk", "vanished"):
        rows: tuple[DiffRow, ...] = getattr(moment, word)
        if rows:
            yield limited(
                (
                    (word, "number", lambda row: Change(row.change_bytes)),
                    ("before", "number", lambda row: Bytes(row.before_bytes)),
                    ("after", "number", lambda row: Bytes(row.after_bytes)),
                    ("blocks", "number", lambda row: Count(row.after_count)),
                    ("call stack", "stack", lambda row: stack_value(row.stack, row.site)),
                ),
                rows,
                top,
            )
