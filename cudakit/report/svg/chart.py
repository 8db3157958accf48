"""Render charts as plots of curves. Every point is drawn: charts have at most some thousand points."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from cudakit.report.axis import Axis, rounded_axis, tight_axis
from cudakit.report.document import Array, Chart, Series
from cudakit.report.markup import Markup, element
from cudakit.report.picture import Plot, PlotKey, series_class, shape, stretch_shapes
from cudakit.report.svg.plot import plot
from cudakit.report.values import format_y

# Coordinates are half pixels of a page of 1,200 pixels.
_COORDINATE_WIDTH = 2400
_COORDINATE_HEIGHT = 1000

# The difference of two larger values may overflow to infinity. Measured values are much smaller.
_LARGEST_VALUE = 1e300


def chart(node: Chart) -> Markup:
    """Return the series as curves over a common x axis. NaN interrupts a curve."""
    heights = [_finite_values(series.y) for series in node.series]
    x_ends = [] if node.x_end is None else [node.x_end]
    x_range = _finite_range(_finite_values(np.append(node.x, x_ends)))
    y_range = _finite_range(np.concatenate(heights) if heights else node.x)
    if x_range is None or y_range is None:
        return element("p", f"{node.title or 'Chart'}: no data", class_="muted")
    x, y = tight_axis(*x_range, node.x_unit), rounded_axis(*y_range, node.y_unit)
    paths = [
        shape(
            "path", class_=f"line {series_class(series_index)}", d=_curve_path(series, node, x, y)
        )
        for series_index, series in enumerate(node.series)
    ]
    legend_keys = [_legend_key(series, node) for series in node.series]
    curve_names = ", ".join(
        f"{legend_key.name} ({legend_key.remark})" for legend_key in legend_keys[:8]
    )
    drawing = Plot(
        "line",
        node.title,
        x,
        y,
        shapes=(stretch_shapes(paths, width=_COORDINATE_WIDTH, height=_COORDINATE_HEIGHT),),
        legend=tuple(legend_keys) if len(legend_keys) > 1 else (),
        description=f"line chart: {curve_names}",
        x_label=node.x_label,
    )
    return plot(drawing, node.markers)


def _curve_path(series: Series, node: Chart, x: Axis, y: Axis) -> str:
    """Return the path of a curve. Values that are not finite interrupt the curve."""
    x_order = np.argsort(node.x, kind="stable")
    points_x, points_y = _finite_values(node.x)[x_order], _finite_values(series.y)[x_order]
    is_finite = np.isfinite(points_x) & np.isfinite(points_y)
    # A point starts a new line if values before it are missing.
    gap_counts = np.cumsum(~is_finite)[is_finite]
    is_line_start = np.diff(gap_counts, prepend=-1) != 0
    x_positions = _rounded_positions(x.shares(points_x[is_finite]) * _COORDINATE_WIDTH)
    y_positions = _rounded_positions((1 - y.shares(points_y[is_finite])) * _COORDINATE_HEIGHT)
    join_format = "H{0}V{1}" if series.step else "L{0} {1}"
    path = "".join(
        ("M{0} {1}" if is_start else join_format).format(left, top)
        for left, top, is_start in zip(x_positions, y_positions, is_line_start, strict=True)
    )
    has_last_step = series.step and node.x_end is not None and is_finite.any() and is_finite[-1]
    return f"{path}H{_COORDINATE_WIDTH}" if has_last_step else path


def _finite_values(values: Array) -> npt.NDArray[np.float64]:
    """Return values as floats; those that cannot be drawn become NaN."""
    floats = np.asarray(values, dtype=np.float64)
    is_drawable = np.abs(floats) <= _LARGEST_VALUE
    return floats if is_drawable.all() else np.where(is_drawable, floats, np.nan)


def _rounded_positions(positions: Array) -> list[int]:
    rounded_positions: list[int] = np.rint(positions).astype(np.int64).tolist()
    return rounded_positions


def _finite_range(values: Array) -> tuple[float, float] | None:
    finite_values = values[np.isfinite(values)]
    return (float(finite_values.min()), float(finite_values.max())) if finite_values.size else None


def _legend_key(series: Series, node: Chart) -> PlotKey:
    y_range = _finite_range(_finite_values(series.y))
    return PlotKey(series.name, f"max {format_y(node, y_range[1])}" if y_range else "no data")
