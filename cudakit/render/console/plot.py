"""The picture of a chart: curves or points in eight rows, axes with units, markers, a legend."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from cudakit.document import Chart, Series
from cudakit.render.console import theme
from cudakit.render.console.canvas import Canvas
from cudakit.render.console.curves import MOST_CURVES, Curve, Plane, curves, legend
from cudakit.render.console.escape import escaped
from cudakit.render.console.figures import x_value, y_value
from cudakit.render.console.grid import padded
from cudakit.render.console.markers import marker_lines
from cudakit.render.console.sampling import columns_of
from cudakit.render.console.words import words
from cudakit.render.console.wrap import cut

_ROWS = 8
_LEAST_COLUMNS = 8


def plot_lines(chart: Chart, width: int) -> list[Text]:
    """Draw a line, area or scatter chart that has at least one series and one x."""
    low, high = _extremes(chart.series[:MOST_CURVES])
    labels = _y_labels(chart, low, high)
    gutter = max(map(cell_len, labels.values())) + 1
    plane = Plane(low, high, max(width - gutter - 1, _LEAST_COLUMNS), _ROWS)
    found = curves(chart, plane)
    rows = [
        Text.assemble((_edge(labels.get(row, ""), gutter), theme.FAINT), line)
        for row, line in enumerate(_canvas(chart, found, plane).lines())
    ]
    axis = Text(f"{labels[_ROWS].rjust(gutter - 1)} ┼{'─' * plane.columns}", theme.FAINT)
    below = [_x_range(chart, plane.columns), *marker_lines(chart.markers, chart.x, plane.columns)]
    margin = " " * (gutter + 1)
    beneath = [Text(margin).append_text(line) for line in below]
    return [*rows, axis, *beneath, *legend(chart, found, width)]


def _extremes(series: Sequence[Series]) -> tuple[float, float]:
    """Give the range of the y axis: always with 0 in it, so that areas are honest."""
    known = [np.asarray(one.y, np.float64) for one in series]
    known = [y[np.isfinite(y)] for y in known]
    return min(y.min(initial=0) for y in known), max(y.max(initial=0) for y in known)


def _y_labels(chart: Chart, low: float, high: float) -> dict[int, str]:
    """Label the upper edges of the first and the middle row, and the axis."""
    at = {0: high, _ROWS // 2: (low + high) / 2, _ROWS: low}
    return {row: words(y_value(chart, height)) for row, height in at.items()}


def _canvas(chart: Chart, found: Sequence[Curve], plane: Plane) -> Canvas:
    canvas = Canvas(plane.columns, plane.rows)
    drawn = [(curve.heights, curve.pen) for curve in found if not curve.like]
    if chart.kind != "scatter":
        canvas.curves(drawn)
        return canvas
    places = columns_of(chart.x, chart.x, columns=plane.columns)
    for heights, pen in reversed(drawn):
        canvas.points(places, heights, pen)
    return canvas


def _edge(label: str, gutter: int) -> str:
    return label.rjust(gutter - 1) + (" ┤" if label else " │")


def _x_range(chart: Chart, columns: int) -> Text:
    ends = [words(x_value(chart, float(x))) for x in (chart.x[0], chart.x[-1])]
    first, last = (cut(end, columns // 2 - 1) for end in ends)
    room = max(columns - cell_len(first) - cell_len(last) - 2, 0)
    label = cut(escaped(chart.x_label), room)
    middle = padded(Text(" " * ((room - cell_len(label)) // 2) + label), room)
    return Text(f"{first} {middle.plain} {last}", theme.FAINT)
