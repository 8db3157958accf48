"""Matrices: a cell for each series (row) and x (column), the darker the larger."""

from __future__ import annotations

import math

import numpy as np

from cudakit.document import Array, Chart
from cudakit.document.picture import name_beside, percent
from cudakit.render.markup import Markup, element, join
from cudakit.render.svg.figure import drawn
from cudakit.render.svg.plot import name_around
from cudakit.render.svg.thin import finite
from cudakit.render.values import format_x, format_y

_CELL_HEIGHT = 26
_SIDE = 64
# With more columns numbers do not fit into the cells.
_FIGURES = 12
# The number on a darker cell has the colour of the page.
_DARK = 0.55


def matrix(node: Chart) -> Markup:
    """Draw at most 64 rows and columns of a matrix."""
    rows, names = node.series[:_SIDE], format_x(node)[:_SIDE]
    if not rows or not names:
        return element("p", f"{node.title or 'Matrix'}: no data", class_="muted")
    values = np.stack([finite(series.y)[: len(names)] for series in rows])
    cells = join(_cell(node, values, i, j) for i in range(len(rows)) for j in range(len(names)))
    picture = element(
        "svg",
        element("title", node.title),
        element("desc", f"matrix of {len(rows)} rows and {len(names)} columns"),
        _column_names(names),
        *(
            drawn(name_beside(series.name, y=(i + 1.5) * _CELL_HEIGHT))
            for i, series in enumerate(rows)
        ),
        cells,
        class_="chart",
        role="img",
        width="100%",
        height=(len(rows) + 1) * _CELL_HEIGHT,
    )
    caption = element("figcaption", node.title) if node.title else None
    return element("figure", caption, picture, _left_out(node), class_="plotted")


def _cell(node: Chart, values: Array, row: int, column: int) -> Markup:
    value = float(values[row, column])
    columns = values.shape[1]
    shade = _shade(value, values)
    figure = element(
        "text",
        format_y(node, value),
        class_="figure dark middle" if shade > _DARK else "figure middle",
        x=percent((column + 0.5) / columns),
        y=(row + 1.5) * _CELL_HEIGHT,
        dy="0.32em",
    )
    square = element(
        "rect",
        element("title", format_y(node, value)),
        class_="cell",
        fill_opacity=round(shade, 2),
        x=percent(column / columns),
        y=(row + 1) * _CELL_HEIGHT,
        width=percent(1 / columns),
        height=_CELL_HEIGHT,
    )
    return join((square, figure if columns <= _FIGURES else None))


def _shade(value: float, values: Array) -> float:
    highest = float(np.nanmax(values, initial=0))
    return max(value, 0) / highest if highest and math.isfinite(value) else 0.0


def _column_names(names: list[str]) -> Markup:
    return join(
        name_around(name, x=percent((i + 0.5) / len(names)), y=18) for i, name in enumerate(names)
    )


def _left_out(node: Chart) -> Markup | None:
    if len(node.series) <= _SIDE and len(node.x) <= _SIDE:
        return None
    words = f"The first {_SIDE} of {len(node.series):,} rows and {len(node.x):,} columns."
    return element("p", words, class_="caption")
