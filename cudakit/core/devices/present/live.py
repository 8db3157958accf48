"""The report of ``devices --watch`` on a terminal: bars, the history of a minute, and the keys."""

from __future__ import annotations

from collections.abc import Iterable

from cudakit.core.devices.present import report
from cudakit.core.devices.result import Device, DevicesResult
from cudakit.core.devices.select import short_label
from cudakit.core.devices.watch import (
    HISTORY_SECONDS,
    History,
    Sample,
    WatchView,
    arrange,
    averages,
)
from cudakit.document import Column, Document, Note, Ratio, Section, Table, Text, Value
from cudakit.units import Unavailable

_LEVELS = "▁▂▃▄▅▆▇█"
_EMPTY = "·"
# Columns that the rest of the table takes, and the smallest and largest length of a history.
_OTHER_COLUMNS = 52
_SHORTEST, _LONGEST = 8, 30


def live_report(
    result: DevicesResult, history: History, view: WatchView, *, width: int, keys: bool
) -> Document:
    """Return the report with bars and history; with ``keys`` also the line that explains the keys."""
    devices = arrange(result, view)
    page = report(devices, activity=True)
    title = f"Utilization and memory, last {HISTORY_SECONDS} s"
    nodes = [*page.nodes, Section(title, (_history_table(devices, history, width),))]
    if keys:
        nodes.append(Note("info", view.help))
    return Document(page.title, tuple(nodes))


def _history_table(result: DevicesResult, history: History, width: int) -> Table:
    count = min(max((width - _OTHER_COLUMNS) // 2, _SHORTEST), _LONGEST)
    columns = (
        Column("device"),
        Column("utilization", "bar"),
        Column("history"),
        Column("memory", "bar"),
        Column("history"),
    )
    rows = tuple(
        _row(device, history.of(device), now_ns=result.time_ns, count=count)
        for device in result.devices
    )
    return Table(columns, rows)


def _row(
    device: Device, samples: Iterable[Sample], *, now_ns: int, count: int
) -> tuple[Value, ...]:
    kept = list(samples)
    *_, last = kept or [Sample(now_ns, Unavailable("no sample"), Unavailable("no sample"))]
    use = averages(
        [(sample.time_ns, sample.utilization) for sample in kept], now_ns=now_ns, count=count
    )
    memory = averages(
        [(sample.time_ns, sample.memory) for sample in kept], now_ns=now_ns, count=count
    )
    return (
        Text(short_label(device)),
        _ratio(last.utilization),
        Text(sparkline(use)),
        _ratio(last.memory),
        Text(sparkline(memory)),
    )


def _ratio(share: float | Unavailable) -> Value:
    return share if isinstance(share, Unavailable) else Ratio(share)


def sparkline(shares: Iterable[float | None]) -> str:
    """Draw shares from 0 to 1 as one character each; a missing one is a dot."""
    top = len(_LEVELS) - 1
    return "".join(
        _EMPTY if share is None else _LEVELS[round(min(max(share, 0.0), 1.0) * top)]
        for share in shares
    )
