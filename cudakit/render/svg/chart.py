"""Render charts as plots of curves."""

from __future__ import annotations

import numpy as np

from cudakit.document import Array, Chart, Series
from cudakit.document.axis import Axis, rounded_axis, tight_axis
from cudakit.document.picture import Plot, PlotKey, series_class, shape, stretch_shapes
from cudakit.render.markup import Markup, element
from cudakit.render.svg.plot import plot
from cudakit.render.svg.thin import finite_or_nan, thin_curve
from cudakit.render.values import format_y

# A wide page has 1,200 pixel columns; the curve keeps the extremes of each. Coordinates are half pixels.
_COLUMNS = 1200
_WIDTH = 2 * _COLUMNS
_HEIGHT = 1000


def chart(node: Chart) -> Markup:
    """Return the series as curves over a common x axis. NaN interrupts a curve."""
    heights = [finite_or_nan(series.y) for series in node.series]
    x_range = _range(finite_or_nan(node.x))
    y_range = _range(np.concatenate(heights) if heights else node.x)
    if x_range is None or y_range is None:
        return element("p", f"{node.title or 'Chart'}: no data", class_="muted")
    x, y = tight_axis(*x_range, node.x_unit), rounded_axis(*y_range, node.y_unit)
    paths = [
        shape("path", class_=f"line {series_class(i)}", d=_curve(series, node, x, y))
        for i, series in enumerate(node.series)
    ]
    keys = [_key(series, node) for series in node.series]
    named = ", ".join(f"{key.name} ({key.remark})" for key in keys[:8])
    drawing = Plot(
        "line",
        node.title,
        x,
        y,
        shapes=(stretch_shapes(paths, width=_WIDTH, height=_HEIGHT),),
        legend=tuple(keys) if len(keys) > 1 else (),
        description=f"line chart: {named}",
        x_label=node.x_label,
    )
    return plot(drawing, node.markers)


def _curve(series: Series, node: Chart, x: Axis, y: Axis) -> str:
    points = thin_curve(node.x, series.y, low=x.low, high=x.high, columns=_COLUMNS)
    x_units = _round(x.shares(points.x) * _WIDTH)
    y_units = _round((1 - y.shares(points.y)) * _HEIGHT)
    line_format = "H{0}V{1}" if series.step else "L{0} {1}"
    return "".join(
        ("M{0} {1}" if is_start else line_format).format(x_unit, y_unit)
        for x_unit, y_unit, is_start in zip(x_units, y_units, points.starts, strict=True)
    )


def _round(positions: Array) -> list[int]:
    rounded: list[int] = np.rint(positions).astype(np.int64).tolist()
    return rounded


def _range(values: Array) -> tuple[float, float] | None:
    finite_values = values[np.isfinite(values)]
    return (float(finite_values.min()), float(finite_values.max())) if finite_values.size else None


def _key(series: Series, node: Chart) -> PlotKey:
    y_range = _range(finite_or_nan(series.y))
    return PlotKey(series.name, f"max {format_y(node, y_range[1])}" if y_range else "no data")
