"""The DiffResult as a Document."""

from __future__ import annotations

from collections.abc import Iterator

from cudakit.core.memory.present.rows import left_out, stack_value
from cudakit.core.memory.result import DeviceDiff, DiffResult, DiffRow, MomentDiff
from cudakit.document import (
    Bytes,
    Change,
    Column,
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
        nodes += [Section(_name(device), sections)] if several else sections
    return Document(f"GPU memory: {result.before.name} → {result.after.name}", tuple(nodes))


def _name(device: DeviceDiff) -> str:
    return "pinned host memory" if device.device is None else f"cuda:{device.device}"


def _totals(device: DeviceDiff) -> Table:
    rows = []
    for name, moment in (("peak", device.peak), ("end", device.end)):
        before, after = moment.before.state, moment.after.state
        for what, old, new in (
            ("requested", before.requested_bytes, after.requested_bytes),
            ("reserved", before.reserved_bytes, after.reserved_bytes),
        ):
            row = (Text(f"{what} at {name}"), Bytes(old), Bytes(new), Change(new - old))
            rows.append((*row, _growth(old, new)))
    return Table(
        (
            Column("", "text"),
            Column("before", "number"),
            Column("after", "number"),
            Column("change", "number"),
            Column("growth", "number"),
        ),
        tuple(rows),
    )


def _growth(before: int, after: int) -> Value:
    return Ratio(after / before - 1) if before else Unavailable("nothing was held before")


def _moments(device: DeviceDiff, top: int) -> Iterator[Section]:
    for name, moment in (("peak", device.peak), ("end", device.end)):
        nodes = tuple(_changes(moment, top))
        same = Note("ok", "every call stack holds what it held before")
        yield Section(f"Changes at the {name}", nodes or (same,))


def _changes(moment: MomentDiff, top: int) -> Iterator[Node]:
    for word, rows in (
        ("grown", moment.grown),
        ("appeared", moment.appeared),
        ("shrunk", moment.shrunk),
        ("vanished", moment.vanished),
    ):
        if rows:
            yield _table(word, rows, top)


def _table(word: str, rows: tuple[DiffRow, ...], top: int) -> Table:
    shown = rows if top == 0 else rows[:top]
    return Table(
        columns=(
            Column(word, "number"),
            Column("before", "number"),
            Column("after", "number"),
            Column("blocks", "number"),
            Column("call stack", "stack"),
        ),
        rows=tuple(
            (
                Change(row.change_bytes),
                Bytes(row.before_bytes),
                Bytes(row.after_bytes),
                Count(row.after_count),
                stack_value(row.stack, row.site),
            )
            for row in shown
        ),
        caption=left_out(len(rows) - len(shown), "call stack", "call stacks"),
    )
