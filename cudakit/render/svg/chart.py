"""Charts: each kind is a function that draws into the frame of ``plot``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Final

import numpy as np

from cudakit.document import Array, Chart, Series
from cudakit.render.markup import Markup, element
from cudakit.render.svg.bars import bars
from cudakit.render.svg.matrix import matrix
from cudakit.render.svg.plot import LegendItem, figure, series_class, stretched
from cudakit.render.svg.scale import Axis, rounded_axis, tight_axis
from cudakit.render.svg.thin import Points, finite, thinned
from cudakit.render.svg.words import y_words

# Columns in which a curve keeps its extremes: pixels of a wide page, in units of half a pixel.
_COLUMNS = 1200
_WIDTH = 2 * _COLUMNS
_HEIGHT = 1000

# More dots than this hide one another.
_DOTS = 4000


def chart(node: Chart) -> Markup:
    """Draw a chart of any kind.

    Areas lie over one another from 0 up: they suit amounts of which each contains the next. NaN
    interrupts a curve.
    """
    return _KINDS[node.kind](node)


def _plotted(node: Chart, draw: Callable[[Series, Chart, Axis, Axis], str]) -> Markup:
    """Draw series as paths over a common axis."""
    heights = [finite(series.y) for series in node.series]
    x_range, y_range = (
        _range(finite(node.x)),
        _range(np.concatenate(heights) if heights else node.x),
    )
    if x_range is None or y_range is None:
        return element("p", f"{node.title or 'Chart'}: no data", class_="muted")
    x, y = tight_axis(*x_range, node.x_unit), rounded_axis(*y_range, node.y_unit)
    paths = [
        element("path", class_=f"{node.kind} {series_class(i)}", d=draw(series, node, x, y))
        for i, series in enumerate(node.series)
    ]
    legend = [_legend_item(s, node) for s in node.series] if len(node.series) > 1 else []
    return figure(
        node,
        stretched(paths, width=_WIDTH, height=_HEIGHT),
        x=x,
        y=y,
        legend=legend,
        description=_description(node),
    )


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


def _legend_item(series: Series, node: Chart) -> LegendItem:
    y_range = _range(finite(series.y))
    return LegendItem(series.name, f"peak {y_words(node, y_range[1])}" if y_range else "no data")


def _description(node: Chart) -> str:
    items = (_legend_item(series, node) for series in node.series[:8])
    return f"{node.kind} chart: " + ", ".join(f"{item.name} ({item.remark})" for item in items)


_KINDS: Final[Mapping[str, Callable[[Chart], Markup]]] = {
    "line": lambda node: _plotted(node, _curve),
    "area": lambda node: _plotted(node, _area),
    "scatter": lambda node: _plotted(node, _dots),
    "bar": bars,
    "matrix": matrix,
}
