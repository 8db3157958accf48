"""Draw the curves of a chart, with glyphs that differ without color, and the legend."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from rich.text import Text

from cudakit.report.console import theme
from cudakit.report.console.text import cut, escape, format_value, wrap
from cudakit.report.document import Array, Chart, Series
from cudakit.report.values import y_value

Heights: TypeAlias = npt.NDArray[np.float64]

# Without color, more than three curves could not be distinguished.
MAX_CURVES = 3
_LEGEND_GAP = "   "

# The glyphs of each curve, from the lowest to the highest position in a cell: heavy, medium and light dots.
_CURVE_GLYPHS = ("⣤⠶⠛", "⣀⠤⠒⠉", "⡀⠄⠂⠁")


@dataclass(frozen=True, slots=True)
class Pen:
    """The glyphs of a curve, from the lowest to the highest position in a cell, and its style."""

    glyphs: str
    style: str


_EMPTY_PEN = Pen(" ", "")


@dataclass(frozen=True, slots=True)
class Plane:
    """The values at the lower and upper edge of a chart, and its size in cells."""

    low: float
    high: float
    columns: int
    rows: int

    def scaled_heights(self, y: Array) -> Heights:
        """Return y values as heights from 0 to 1."""
        heights: Heights = (np.asarray(y, np.float64) - self.low) / ((self.high - self.low) or 1)
        return heights


@dataclass(frozen=True, slots=True)
class Curve:
    """A series with its heights by column."""

    series: Series
    heights: Heights
    pen: Pen = _EMPTY_PEN
    coinciding_name: str = ""  # name of an earlier series that has the same cells


def curves(chart: Chart, plane: Plane) -> list[Curve]:
    """Return the first MAX_CURVES series as curves; a series with the same cells as another has no pen."""
    drawn_curves: list[Curve] = []
    for series in chart.series[:MAX_CURVES]:
        maxima = column_maxima(chart.x, series.y, columns=plane.columns, step=series.step)
        heights = plane.scaled_heights(maxima)
        coinciding_curve = _coinciding_curve(heights, drawn_curves, plane)
        drawn_curves.append(
            Curve(
                series,
                heights,
                coinciding_name=coinciding_curve.series.name if coinciding_curve else "",
            )
        )
    pens = map(Pen, _CURVE_GLYPHS, theme.SERIES)
    return [
        curve if curve.coinciding_name else replace(curve, pen=next(pens)) for curve in drawn_curves
    ]


def picture_rows(drawn_curves: Sequence[Curve], plane: Plane) -> list[Text]:
    """Return the rows of the picture, from the top down; a lower curve hides a higher one."""
    cells = [[(" ", _EMPTY_PEN)] * plane.columns for _ in range(plane.rows)]
    for column in range(plane.columns):
        curve_tops = [
            (float(curve.heights[column]) * plane.rows, curve.pen)
            for curve in reversed(drawn_curves)
            if not (curve.coinciding_name or math.isnan(curve.heights[column]))
        ]
        for height, pen in sorted(curve_tops, key=lambda top: -top[0]):
            row = min(max(math.ceil(height) - 1, 0), plane.rows - 1)
            glyph_index = math.ceil((height - row) * len(pen.glyphs)) - 1
            glyph = pen.glyphs[min(max(glyph_index, 0), len(pen.glyphs) - 1)]
            cells[row][column] = (glyph, pen)
    return [_row_text(row) for row in reversed(cells)]


def _row_text(cells: Sequence[tuple[str, Pen]]) -> Text:
    line = Text()
    for style, run_cells in groupby(cells, key=lambda cell: cell[1].style):
        line.append("".join(glyph for glyph, _ in run_cells), style)
    return line


def legend_lines(chart: Chart, drawn_curves: Sequence[Curve], width: int) -> list[Text]:
    """Return lines with the name and the highest value of each curve."""
    lines: list[Text] = []
    for entry in [
        _legend_entry(chart, curve, width) for curve in drawn_curves if not curve.coinciding_name
    ]:
        if lines and lines[-1].cell_len + len(_LEGEND_GAP) + entry.cell_len <= width:
            lines[-1].append(_LEGEND_GAP).append_text(entry)
        else:
            lines.append(entry)
    remarks = _hiding_remarks(chart, drawn_curves)
    undrawn_names_text = ", ".join(escape(series.name) for series in chart.series[MAX_CURVES:])
    remarks += [f"Not drawn: {undrawn_names_text}."] if undrawn_names_text else []
    return lines + [Text(line, theme.FAINT) for text in remarks for line in wrap(text, width)]


def _coinciding_curve(
    heights: Heights, earlier_curves: Sequence[Curve], plane: Plane
) -> Curve | None:
    for curve in earlier_curves:
        distance = np.abs(curve.heights - heights)
        has_same_gaps = bool(np.all(np.isnan(curve.heights) == np.isnan(heights)))
        if has_same_gaps and not curve.coinciding_name and not np.any(distance * plane.rows >= 1):
            return curve
    return None


def _legend_entry(chart: Chart, curve: Curve, width: int) -> Text:
    highest_value_text = f"  max {_highest_text(chart, curve)}"
    name = cut(escape(curve.series.name), max(width - len(highest_value_text) - 2, 8))
    glyphs = curve.pen.glyphs
    sample = (glyphs[len(glyphs) // 2], curve.pen.style)
    return Text.assemble(sample, f" {name}", (highest_value_text, theme.FAINT))


def _hiding_remarks(chart: Chart, curves: Sequence[Curve]) -> list[str]:
    """Return a sentence for each drawn curve that hides other curves."""
    hidden_names: dict[str, list[str]] = {}
    for curve in curves:
        if curve.coinciding_name:
            name = f"{escape(curve.series.name)} (max {_highest_text(chart, curve)})"
            hidden_names.setdefault(escape(curve.coinciding_name), []).append(name)
    return [
        f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} too close to {drawn_name} to be drawn."
        for drawn_name, names in hidden_names.items()
    ]


def _highest_text(chart: Chart, curve: Curve) -> str:
    values = np.asarray(curve.series.y, np.float64)
    values = values[np.isfinite(values)]
    return format_value(y_value(chart, float(values.max()) if len(values) else float("nan")))


def column_maxima(x: Array, y: Array, *, columns: int, step: bool) -> Heights:
    """Return the maximum of a curve in each column, so that every peak is visible.

    ``x`` is ascending. A column without a sample has the last value (``step``) or the value interpolated at
    its left edge, or NaN if the curve has no value there.
    """
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    is_finite = np.isfinite(x)
    x, y = x[is_finite], np.where(np.isfinite(y[is_finite]), y[is_finite], np.nan)
    if len(x) == 0:
        return np.full(columns, np.nan)
    column_edges = x[0] + (x[-1] - x[0]) * np.arange(columns) / columns
    last_sample_indices = np.maximum(np.searchsorted(x, column_edges, side="right") - 1, 0)
    heights: Heights = y[last_sample_indices] if step else np.interp(column_edges, x, y)
    np.fmax.at(heights, columns_of(x, x, columns=columns), y)
    return heights


def columns_of(positions: Array, x: Array, *, columns: int) -> npt.NDArray[np.int64]:
    """Return the columns of x values; values outside of the axis get the nearest column."""
    first_x, last_x = float(x[0]), float(x[-1])
    shares = (np.asarray(positions, np.float64) - first_x) / ((last_x - first_x) or 1.0)
    return np.clip(np.nan_to_num(shares) * columns, 0, columns - 1).astype(np.int64)
