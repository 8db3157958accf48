"""The report of ``devices --watch`` on a terminal: bars, the history of a minute, and the keys."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from cudakit.devices.present import report, shows_utilization
from cudakit.devices.result import Device, DevicesResult
from cudakit.devices.select import short_label
from cudakit.devices.watch import (
    HISTORY_SECONDS,
    History,
    Sample,
    WatchView,
    arrange,
    averages,
)
from cudakit.report.document import Column, Document, Note, Ratio, Section, Table, Text, Value
from cudakit.units import Unavailable

_BAR_GLYPHS = "▁▂▃▄▅▆▇█"
_NO_VALUE_GLYPH = "·"
_UTILIZATION_CAPTION = "For devices with ~ above, SM is that share of time."
# Width of the table without the two histories, in characters of the terminal.
_WIDTH_WITHOUT_HISTORIES = 52
# Limits of the width of a history, in characters.
_MIN_HISTORY_WIDTH, _MAX_HISTORY_WIDTH = 8, 30


def live_report(
    result: DevicesResult, history: History, view: WatchView, *, width: int, with_keys: bool
) -> Document:
    """Return the report with bars and history; with ``with_keys`` also the line that explains the keys."""
    devices = arrange(result, view)
    if not view.shows_processes:
        devices = _without_processes(devices)
    devices_report = report(devices, with_activity=True)
    title = f"SM activity and memory, last {HISTORY_SECONDS} s"
    nodes = [*devices_report.nodes, Section(title, (_history_table(devices, history, width),))]
    if with_keys:
        nodes.append(Note("info", view.help))
    return Document(devices_report.title, tuple(nodes))


def _without_processes(result: DevicesResult) -> DevicesResult:
    """Remove the processes that were read only for the filter."""
    return replace(
        result, devices=tuple(replace(device, processes=None) for device in result.devices)
    )


def _history_table(result: DevicesResult, history: History, width: int) -> Table:
    history_width = (width - _WIDTH_WITHOUT_HISTORIES) // 2
    sample_count = min(max(history_width, _MIN_HISTORY_WIDTH), _MAX_HISTORY_WIDTH)
    columns = (
        Column("device"),
        Column("SM", "bar"),
        Column("history"),
        Column("memory", "bar"),
        Column("history"),
    )
    table_rows = tuple(
        _history_row(
            device, history.samples(device), now_ns=result.time_ns, sample_count=sample_count
        )
        for device in result.devices
    )
    caption = _UTILIZATION_CAPTION if any(map(shows_utilization, result.devices)) else ""
    return Table(columns, table_rows, caption=caption)


def _history_row(
    device: Device, samples: Sequence[Sample], *, now_ns: int, sample_count: int
) -> tuple[Value, ...]:
    no_sample = Sample(now_ns, Unavailable("no sample"), Unavailable("no sample"))
    last_sample = samples[-1] if samples else no_sample
    activity_shares = averages(
        [(sample.time_ns, sample.sm_activity) for sample in samples],
        now_ns=now_ns,
        interval_count=sample_count,
    )
    memory_shares = averages(
        [(sample.time_ns, sample.memory) for sample in samples],
        now_ns=now_ns,
        interval_count=sample_count,
    )
    return (
        Text(short_label(device)),
        _ratio_value(last_sample.sm_activity),
        Text(sparkline(activity_shares)),
        _ratio_value(last_sample.memory),
        Text(sparkline(memory_shares)),
    )


def _ratio_value(fraction: float | Unavailable) -> Value:
    return fraction if isinstance(fraction, Unavailable) else Ratio(fraction)


def sparkline(fractions: Iterable[float | None]) -> str:
    """Draw each fraction from 0 to 1 as a character; a missing fraction is a dot."""
    highest_level = len(_BAR_GLYPHS) - 1
    return "".join(
        _NO_VALUE_GLYPH
        if fraction is None
        else _BAR_GLYPHS[round(min(max(fraction, 0.0), 1.0) * highest_level)]
        for fraction in fractions
    )
