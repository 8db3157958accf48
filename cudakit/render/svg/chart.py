"""Charts as plots: curves, areas, points and bars."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Final

import numpy as np

from cudakit.document import Array, Chart, Series
from cudakit.document.axis import Axis, Tick, rounded_axis, tight_axis
from cudakit.document.picture import Plot, PlotKey, Shape, percent, series_class, shape, stretched
from cudakit.render.markup import Markup, element
from cudakit.render.svg.matrix import matrix
from cudakit.render.svg.plot import plot
from cudakit.render.svg.thin import Points, finite, thinned
from cudakit.render.values import format_x, format_y

# A curve keeps its extremes per column: pixels of a wide page, in units of half a pixel.
_COLUMNS = 1200
_WIDTH = 2 * _COLUMNS
_HEIGHT = 1000

# More dots cover one another.
_DOTS = 4000

# Groups of bars that are drawn, and that are labelled.
_GROUPS = 200
_LABELS = 12
# The share of a group's width that its bars fill.
_FILLED = 0.72


def chart(node: Chart) -> Markup:
    """Draw a chart of any kind.

    Areas overlap from 0 up, for amounts of which each contains the next. NaN interrupts a curve.
    """
    return _KINDS[node.kind](node)


def _plotted(node: Chart, draw: Callable[[Series, Chart, Axis, Axis], str]) -> Markup:
    """Draw series as paths over a common axis."""
    heights = [finite(series.y) for series in node.series]
    x_range = _range(finite(node.x))
    y_range = _range(np.concatenate(heights) if heights else node.x)
    if x_range is None or y_range is None:
        return _no_data(node)
    x, y = tight_axis(*x_range, node.x_unit), rounded_axis(*y_range, node.y_unit)
    paths = [
        shape("path", class_=f"{node.kind} {series_class(i)}", d=draw(series, node, x, y))
        for i, series in enumerate(node.series)
    ]
    legend = [_key(series, node) for series in node.series] if len(node.series) > 1 else []
    drawing = stretched(paths, width=_WIDTH, height=_HEIGHT)
    return plot(_framed(node, (drawing,), x, y, legend, _description(node)), node.markers)


def _framed(
    node: Chart,
    shapes: Iterable[Shape],
    x: Axis,
    y: Axis,
    legend: Sequence[PlotKey],
    description: str,
) -> Plot:
    return Plot(
        node.kind, node.title, x, y, tuple(shapes), tuple(legend), description, node.x_label
    )


def _no_data(node: Chart) -> Markup:
    return element("p", f"{node.title or 'Chart'}: no data", class_="muted")


def _curve(series: Series, node: Chart, x: Axis, y: Axis) -> str:
    points = thinned(node.x, series.y, low=x.low, high=x.high, columns=_COLUMNS)
    return _path(points, x, y, step=series.step)


def _area(series: Series, node: Chart, x: Axis, y: Axis) -> str:
    """Draw the outline, down to the zero line at both ends of each uninterrupted part."""
    points = thinned(node.x, series.y, low=x.low, high=x.high, columns=_COLUMNS)
    bounds = [*np.flatnonzero(points.starts).tolist(), len(points.x)]
    ground = round(_HEIGHT * (1 - y.share(0)))
    parts = []
    for first, last in pairwise(bounds):
        part = Points(points.x[first:last], points.y[first:last], points.starts[first:last])
        left, right = _across(part.x[[0, -1]], x)
        outline = _path(part, x, y, step=series.step)
        parts.append(f"M{left} {ground}L{outline[1:]}L{right} {ground}Z")
    return "".join(parts)


def _dots(series: Series, node: Chart, x: Axis, y: Axis) -> str:
    """Draw lines without length, which round caps turn into dots of a fixed size."""
    across, up = finite(node.x), finite(series.y)
    known = np.isfinite(across) & np.isfinite(up)
    places = np.unique(
        np.stack(
            (_rounded(_across_of(across[known], x)), _rounded(_down_of(up[known], y))), axis=1
        ),
        axis=0,
    )
    shown = places[:: max(-(-len(places) // _DOTS), 1)]
    return "".join(f"M{left} {down}h0" for left, down in shown.tolist())


def _path(points: Points, x: Axis, y: Axis, *, step: bool) -> str:
    join = "H{0}V{1}" if step else "L{0} {1}"
    return "".join(
        ("M{0} {1}" if starts else join).format(left, down)
        for left, down, starts in zip(
            _across(points.x, x),
            _rounded(_down_of(points.y, y)).tolist(),
            points.starts,
            strict=True,
        )
    )


def _across(values: Array, axis: Axis) -> list[int]:
    across: list[int] = _rounded(_across_of(values, axis)).tolist()
    return across


def _across_of(values: Array, axis: Axis) -> Array:
    return axis.shares(values) * _WIDTH


def _down_of(values: Array, axis: Axis) -> Array:
    return (1 - axis.shares(values)) * _HEIGHT


def _rounded(places: Array) -> Array:
    return np.rint(places).astype(np.int64)


def _range(values: Array) -> tuple[float, float] | None:
    known = values[np.isfinite(values)]
    return (float(known.min()), float(known.max())) if known.size else None


def _key(series: Series, node: Chart) -> PlotKey:
    y_range = _range(finite(series.y))
    return PlotKey(series.name, f"peak {format_y(node, y_range[1])}" if y_range else "no data")


def _description(node: Chart) -> str:
    items = (_key(series, node) for series in node.series[:8])
    return f"{node.kind} chart: " + ", ".join(f"{item.name} ({item.remark})" for item in items)


def _bars(node: Chart) -> Markup:
    """Draw at most 200 groups of bars."""
    groups = min(len(node.x), _GROUPS)
    if not groups or not node.series:
        return _no_data(node)
    heights = np.nan_to_num(np.stack([finite(series.y)[:groups] for series in node.series]))
    y = rounded_axis(float(heights.min()), float(heights.max()), node.y_unit)
    names = format_x(node)
    drawing = (
        _bar(node, row, i, heights, y, f"{names[i]}, {series.name}")
        for row, series in enumerate(node.series)
        for i in range(groups)
    )
    legend = [PlotKey(series.name) for series in node.series] if len(node.series) > 1 else []
    left_out = len(node.x) - groups
    description = f"bar chart of {groups} groups" + (f", {left_out:,} left out" if left_out else "")
    x = _names_axis(names[:groups])
    # A marker has no position among names: markers are left out.
    return plot(_framed(node, drawing, x, y, legend, description))


def _bar(node: Chart, row: int, group: int, heights: Array, y: Axis, name: str) -> Shape:
    rows, groups = heights.shape
    height = float(heights[row, group])
    top, bottom = 1 - y.share(max(height, 0)), 1 - y.share(min(height, 0))
    width = _FILLED / groups / rows
    left = (group + (1 - _FILLED) / 2) / groups + width * row
    return shape(
        "rect",
        title=f"{name}: {format_y(node, height)}",
        class_=f"bar {series_class(row)}",
        x=percent(left),
        y=percent(top),
        width=percent(width),
        height=percent(bottom - top),
    )


def _names_axis(names: Sequence[str]) -> Axis:
    """Label the middle of each group, or of every n-th group if there are many."""
    every = -(-len(names) // _LABELS)
    ticks = (Tick(i + 0.5, names[i]) for i in range(0, len(names), every))
    return Axis(0, len(names), tuple(ticks))


_KINDS: Final[Mapping[str, Callable[[Chart], Markup]]] = {
    "line": lambda node: _plotted(node, _curve),
    "area": lambda node: _plotted(node, _area),
    "scatter": lambda node: _plotted(node, _dots),
    "bar": _bars,
    "matrix": matrix,
}
