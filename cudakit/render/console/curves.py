"""Curves of a chart: heights by column, pens that differ without colour, the canvas, and the legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from rich.text import Text

from cudakit.document import Array, Chart, Series
from cudakit.render.console import theme
from cudakit.render.console.text import cut, escaped, format_value, wrapped
from cudakit.render.values import y_value

Heights: TypeAlias = npt.NDArray[np.float64]

# More curves are not distinguishable without colour.
MOST_CURVES = 3
_BETWEEN = "   "

# Glyphs by the fill level of a curve's highest cell, and the fill of the cells below; darkest first.
_AREAS = (("▁▂▃▄▅▆▇█", "█"), (" ▒", "▒"), (" ░", "░"))
_LINES = (("▁━▔", ""), ("⣀⠤⠒⠉", ""), (".·˙", ""))
_POINTS = (("●", ""), ("x", ""), ("+", ""))


@dataclass(frozen=True, slots=True)
class Pen:
    """The glyphs of a curve: ``tops`` by the fill level of its highest cell, ``fill`` for the cells below."""

    tops: str
    style: str
    fill: str = ""

    @property
    def sample(self) -> str:
        """Return the glyph for the legend."""
        return self.fill or self.tops[len(self.tops) // 2]


_EMPTY = Pen(" ", "")
_NO_PEN = Pen("", "")


@dataclass(slots=True)
class Canvas:
    """Rows of cells, the lowest first; a cell is a glyph and the pen that drew it."""

    columns: int
    rows: int
    cells: list[list[tuple[str, Pen]]] = field(init=False)

    def __post_init__(self) -> None:
        self.cells = [[(" ", _EMPTY)] * self.columns for _ in range(self.rows)]

    def curves(self, curves: Sequence[tuple[Heights, Pen]]) -> None:
        """Draw curves of heights from 0 to 1; in each column the lower is in front."""
        for column in range(self.columns):
            tops = [(float(heights[column]), pen) for heights, pen in curves]
            known = [top for top in reversed(tops) if not math.isnan(top[0])]
            for height, pen in sorted(known, key=lambda top: -top[0]):
                self._column(column, height * self.rows, pen)

    def points(self, columns: npt.NDArray[np.int64], heights: Heights, pen: Pen) -> None:
        """Draw points at heights from 0 to 1, except those whose height is NaN."""
        known = np.isfinite(heights)
        rows = np.minimum(heights[known] * self.rows, self.rows - 1).astype(np.int64)
        for row, column in set(zip(rows.tolist(), columns[known].tolist(), strict=True)):
            self.cells[row][column] = (pen.tops, pen)

    def lines(self) -> list[Text]:
        """Return the rows from the top down, each curve in its colour."""
        return [_line(cells) for cells in reversed(self.cells)]

    def _column(self, column: int, height: float, pen: Pen) -> None:
        if pen.fill and height <= 0:
            return
        top = min(max(math.ceil(height) - 1, 0), self.rows - 1)
        for row in range(top if pen.fill else 0):
            self.cells[row][column] = (pen.fill, pen)
        level = math.ceil((height - top) * len(pen.tops)) - 1
        glyph = pen.tops[min(max(level, 0), len(pen.tops) - 1)]
        if glyph != " ":
            self.cells[top][column] = (glyph, pen)


def _line(cells: Sequence[tuple[str, Pen]]) -> Text:
    line = Text()
    for style, run in groupby(cells, key=lambda cell: cell[1].style):
        line.append("".join(glyph for glyph, _ in run), style)
    return line


@dataclass(frozen=True, slots=True)
class Plane:
    """The values at the lowest and highest edge of a chart, and its size in cells."""

    low: float
    high: float
    columns: int
    rows: int

    def scaled(self, y: Array) -> Heights:
        """Return heights from 0 to 1."""
        heights: Heights = (np.asarray(y, np.float64) - self.low) / ((self.high - self.low) or 1)
        return heights


@dataclass(frozen=True, slots=True)
class Curve:
    """A series with its heights, by column or (scatter) by point; ``like`` names a coinciding series."""

    series: Series
    heights: Heights
    pen: Pen = _NO_PEN
    like: str = ""


def curves(chart: Chart, plane: Plane) -> list[Curve]:
    """Prepare the first MOST_CURVES series; one that falls into the same cells as another has no pen."""
    found: list[Curve] = []
    for series in chart.series[:MOST_CURVES]:
        heights = plane.scaled(_reduced(chart, series, plane))
        twin = None if chart.kind == "scatter" else _twin(heights, found, plane)
        found.append(Curve(series, heights, like=twin.series.name if twin else ""))
    pens = iter(_pens(chart, [curve for curve in found if not curve.like]))
    return [curve if curve.like else replace(curve, pen=next(pens)) for curve in found]


def legend(chart: Chart, found: Sequence[Curve], width: int) -> list[Text]:
    """Name each curve and its highest value, as many on a line as fit."""
    lines: list[Text] = []
    for entry in [_entry(chart, curve, width) for curve in found if not curve.like]:
        if lines and lines[-1].cell_len + len(_BETWEEN) + entry.cell_len <= width:
            lines[-1].append(_BETWEEN).append_text(entry)
        else:
            lines.append(entry)
    remarks = [_remark(chart, curve) for curve in found if curve.like]
    others = ", ".join(escaped(series.name) for series in chart.series[MOST_CURVES:])
    remarks += [f"Not drawn: {others}."] if others else []
    return lines + [Text(line, theme.FAINT) for text in remarks for line in wrapped(text, width)]


def _reduced(chart: Chart, series: Series, plane: Plane) -> Array:
    if chart.kind == "scatter":
        return series.y
    return column_maxima(chart.x, series.y, columns=plane.columns, step=series.step)


def _twin(heights: Heights, earlier: Sequence[Curve], plane: Plane) -> Curve | None:
    for curve in earlier:
        apart = np.abs(curve.heights - heights)
        same_gaps = bool(np.all(np.isnan(curve.heights) == np.isnan(heights)))
        if same_gaps and not curve.like and not np.any(apart * plane.rows >= 1):
            return curve
    return None


def _pens(chart: Chart, found: Sequence[Curve]) -> list[Pen]:
    """Choose pens in the order of the series; areas with a lower mean are darker."""
    if chart.kind != "area":
        kinds = _LINES if chart.kind == "line" else _POINTS
        return [
            Pen(tops, style, fill) for (tops, fill), style in zip(kinds, theme.SERIES, strict=False)
        ]
    shades = _AREAS[::2] if len(found) == 2 else _AREAS
    means = [float(np.mean(curve.heights)) for curve in found]
    ranks = np.argsort(np.argsort(means, kind="stable")).tolist()
    return [
        Pen(tops, style, fill)
        for (tops, fill), style in zip([shades[rank] for rank in ranks], theme.SERIES, strict=False)
    ]


def _entry(chart: Chart, curve: Curve, width: int) -> Text:
    highest = f"  max {_highest(chart, curve)}"
    name = cut(escaped(curve.series.name), max(width - len(highest) - 2, 8))
    sample = (curve.pen.sample, curve.pen.style)
    return Text.assemble(sample, f" {name}", (highest, theme.FAINT))


def _remark(chart: Chart, curve: Curve) -> str:
    name, like = escaped(curve.series.name), escaped(curve.like)
    return f"{name}, max {_highest(chart, curve)}, is too close to {like} to be drawn."


def _highest(chart: Chart, curve: Curve) -> str:
    known = np.asarray(curve.series.y, np.float64)
    known = known[np.isfinite(known)]
    return format_value(y_value(chart, float(known.max()) if len(known) else float("nan")))


def column_maxima(x: Array, y: Array, *, columns: int, step: bool) -> Heights:
    """Reduce a curve to the maximum that it reaches within each column, so that every peak is visible.

    ``x`` ascends. A column without a sample shows the value held (``step``) or interpolated at its
    left edge; NaN where the curve has no value.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    known = np.isfinite(x)
    x, y = x[known], np.where(np.isfinite(y[known]), y[known], np.nan)
    if len(x) == 0:
        return np.full(columns, np.nan)
    edges = x[0] + (x[-1] - x[0]) * np.arange(columns) / columns
    held = np.maximum(np.searchsorted(x, edges, side="right") - 1, 0)
    heights: Heights = y[held] if step else np.interp(edges, x, y)
    np.fmax.at(heights, columns_of(x, x, columns=columns), y)
    return heights


def columns_of(positions: Array, x: Array, *, columns: int) -> npt.NDArray[np.int64]:
    """Return the columns of positions on the x axis; the nearest for positions outside it."""
    first, last = float(x[0]), float(x[-1])
    shares = (np.asarray(positions, np.float64) - first) / ((last - first) or 1.0)
    return np.clip(np.nan_to_num(shares) * columns, 0, columns - 1).astype(np.int64)
