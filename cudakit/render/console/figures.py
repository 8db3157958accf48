"""Numbers of a chart as values and as tables."""

from __future__ import annotations

import math

import numpy as np

from cudakit.document import (
    Array,
    Bytes,
    Chart,
    Column,
    Count,
    Ratio,
    Seconds,
    Table,
    Text,
    Value,
)
from cudakit.render.console.words import words
from cudakit.units import Unavailable

_MOST_ROWS = 16


def x_value(chart: Chart, x: float) -> Value:
    """Give a position of the x axis its unit."""
    return _value(chart.x_unit, x)


def y_value(chart: Chart, y: float) -> Value:
    """Give a height its unit."""
    return _value(chart.y_unit, y)


def as_table(chart: Chart) -> Table:
    """Turn a bar chart or a matrix into a table, the largest bars where there are too many."""
    return _matrix_table(chart) if chart.kind == "matrix" else _bar_table(chart)


def _matrix_table(chart: Chart) -> Table:
    """One row a series, one column an x: as a matrix of devices is read."""
    names = (Column(chart.x_label, "text"), *(_number(_label(chart, x)) for x in chart.x.tolist()))
    rows = [
        (Text(series.name), *(y_value(chart, y) for y in series.y.tolist()))
        for series in chart.series
    ]
    return Table(names, tuple(rows))


def _bar_table(chart: Chart) -> Table:
    """One row an x; a single series gets bars, relative to the highest."""
    shown = _largest(chart)
    columns = [_number(chart.x_label), *(_number(series.name) for series in chart.series)]
    rows = [
        [x_value(chart, float(chart.x[i])), *(y_value(chart, float(s.y[i])) for s in chart.series)]
        for i in shown
    ]
    if len(chart.series) == 1:
        heights = _finite(chart.series[0].y)
        highest = float(np.abs(heights).max()) or 1.0
        columns.append(Column("of highest", "bar"))
        for row, i in zip(rows, shown, strict=True):
            row.append(Ratio(float(heights[i]) / highest))
    left_out = len(chart.x) - len(shown)
    caption = f"{left_out:,} lower bars are left out." if left_out else ""
    return Table(tuple(columns), tuple(map(tuple, rows)), caption)


def _largest(chart: Chart) -> list[int]:
    heights = np.max([_finite(series.y) for series in chart.series], axis=0)
    return sorted(np.argsort(-heights, kind="stable")[:_MOST_ROWS].tolist())


def _finite(y: Array) -> Array:
    return np.nan_to_num(np.asarray(y, np.float64), nan=0, posinf=0, neginf=0)


def _number(name: str) -> Column:
    return Column(name, "number")


def _label(chart: Chart, x: float) -> str:
    return words(x_value(chart, x))


def _value(unit: str, amount: float) -> Value:
    if not math.isfinite(amount):
        return Unavailable("not a number")
    match unit:
        case "bytes":
            return Bytes(round(amount))
        case "seconds":
            return Seconds(amount)
        case "ratio":
            return Ratio(amount)
        case _:
            return Count(round(amount))
