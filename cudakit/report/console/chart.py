"""Render charts: curves with axes and markers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len
from rich.text import Text

from cudakit.report.console.table import (
    FAINT,
    HEADER,
    LEVELS,
    SERIES,
    cut,
    escape,
    format_value,
    pad,
    wrap,
)
from cudakit.report.document import Array, Chart, Marker, Series, x_value, y_value

_CHART_ROWS = 8
_MIN_COLUMNS = 8
_POINTERS = {"info": "▲", "warn": "!", "error": "✗"}
_MAX_MARKER_LINES = 3
_MARKER_GAP = 2


def chart_lines(chart: Chart, width: int) -> list[Text]:
    """Return the lines of a chart: its title, and the picture or "(no data)"."""
    title = escape(chart.title)
    lines = [Text(line, HEADER) for line in wrap(title, width)] if title else []
    if len(chart.x) == 0 or not chart.series:
        return [*lines, Text("(no data)", FAINT)]
    drawn_values = [np.asarray(series.y, np.float64) for series in chart.series[:_MAX_CURVES]]
    finite_values = np.concatenate([values[np.isfinite(values)] for values in drawn_values])
    # The y axis always contains 0.
    low, high = finite_values.min(initial=0), finite_values.max(initial=0)
    # The labels of the upper edges of the first and the middle row, and of the axis.
    value_by_row = {0: high, _CHART_ROWS // 2: (low + high) / 2, _CHART_ROWS: low}
    labels = {row: format_value(y_value(chart, y)) for row, y in value_by_row.items()}
    gutter = max(map(cell_len, labels.values()))
    columns = max(width - gutter - 2, _MIN_COLUMNS)
    curves = _curves(chart, low, (high - low) or 1, columns)
    for row, line in enumerate(_picture(curves, columns)):
        label = labels.get(row, "")
        edge = f"{label.rjust(gutter)} {'┤' if label else '│'}"
        lines.append(Text.assemble((edge, FAINT), line))
    lines.append(Text(f"{labels[_CHART_ROWS].rjust(gutter)} ┼{'─' * columns}", FAINT))
    margin = " " * (gutter + 2)
    below = [_x_axis_line(chart, columns), *_marker_lines(chart.markers, chart.x, columns)]
    lines += [Text(margin).append_text(line) for line in below]
    return lines + _legend_lines(chart, curves, width)


def _x_axis_line(chart: Chart, columns: int) -> Text:
    first, last = (
        cut(format_value(x_value(chart, float(x))), columns // 2 - 1)
        for x in (chart.x[0], chart.x[-1])
    )
    free = max(columns - cell_len(first) - cell_len(last) - 2, 0)
    label = cut(escape(chart.x_label), free)
    middle = pad(Text(" " * ((free - cell_len(label)) // 2) + label), free)
    return Text(f"{first} {middle.plain} {last}", FAINT)


# --- markers ---------------------------------------------------------------------------------------


def _marker_lines(markers: Sequence[Marker], x: Array, columns: int) -> list[Text]:
    """Return lines with each marker below its x position; overlapping labels use further lines."""
    lines: list[Text] = []
    omitted_count = 0
    ordered = sorted(markers, key=lambda marker: marker.x)
    marker_columns = _columns_of(np.array([marker.x for marker in ordered]), x, columns)
    for marker, column in zip(ordered, marker_columns.tolist(), strict=True):
        pointer, label = _POINTERS[marker.level], escape(marker.label)
        # The label is right of the pointer if it fits.
        if column + 2 + cell_len(label) <= columns or column < columns // 2:
            start, text = column, f"{pointer} {cut(label, columns - column - 2)}"
        else:
            label = cut(label, column - 1)
            start, text = column - 1 - cell_len(label), f"{label} {pointer}"
        line = next((line for line in lines if line.cell_len + _MARKER_GAP <= start), None)
        if line is None and len(lines) == _MAX_MARKER_LINES:
            omitted_count += 1
            continue
        if line is None:
            lines.append(line := Text())
        line.pad_right(start - line.cell_len)
        line.append(text, LEVELS[marker.level])
    if omitted_count:
        lines.append(Text(f"… {omitted_count:,} more markers", FAINT))
    return lines


# --- curves, with glyphs that differ without color, and the legend ---------------------------------

Heights: TypeAlias = npt.NDArray[np.float64]

# Without color, more than three curves could not be distinguished.
_MAX_CURVES = 3
_LEGEND_GAP = "   "

# The glyphs of each curve, from the lowest to the highest position in a cell: heavy, medium and light dots.
_CURVE_GLYPHS = ("⣤⠶⠛", "⣀⠤⠒⠉", "⡀⠄⠂⠁")


@dataclass(frozen=True, slots=True)
class _Curve:
    """A series with its heights from 0 to 1 by column, its glyphs and its style."""

    series: Series
    heights: Heights
    glyphs: str
    style: str
    hidden: list[Series]  # series that are not drawn, because they have the same cells


def _curves(chart: Chart, low: float, span: float, columns: int) -> list[_Curve]:
    """Return the curves to draw; a series with the same cells as an earlier one is hidden by it."""
    curves: list[_Curve] = []
    for series in chart.series[:_MAX_CURVES]:
        maxima = column_maxima(chart.x, series.y, columns=columns, step=series.step)
        heights = (maxima - low) / span
        for curve in curves:
            is_far = np.any(np.abs(curve.heights - heights) * _CHART_ROWS >= 1)
            if not is_far and np.array_equal(np.isnan(curve.heights), np.isnan(heights)):
                curve.hidden.append(series)
                break
        else:
            glyphs, style = _CURVE_GLYPHS[len(curves)], SERIES[len(curves)]
            curves.append(_Curve(series, heights, glyphs, style, []))
    return curves


def _picture(curves: Sequence[_Curve], columns: int) -> list[Text]:
    """Return the rows of the picture, from the top down; a lower curve hides a higher one."""
    cells = [[(" ", "")] * columns for _ in range(_CHART_ROWS)]
    for column in range(columns):
        tops = [
            (float(curve.heights[column]) * _CHART_ROWS, curve)
            for curve in reversed(curves)
            if not math.isnan(curve.heights[column])
        ]
        for height, curve in sorted(tops, key=lambda top: -top[0]):
            row = min(max(math.ceil(height) - 1, 0), _CHART_ROWS - 1)
            position = math.ceil((height - row) * len(curve.glyphs)) - 1
            glyph = curve.glyphs[min(max(position, 0), len(curve.glyphs) - 1)]
            cells[row][column] = (glyph, curve.style)
    lines = []
    for row_cells in reversed(cells):
        line = Text()
        for style, run in groupby(row_cells, key=lambda cell: cell[1]):
            line.append("".join(glyph for glyph, _ in run), style)
        lines.append(line)
    return lines


def _legend_lines(chart: Chart, curves: Sequence[_Curve], width: int) -> list[Text]:
    """Return lines with the name and the highest value of each curve, and which series are not drawn."""
    lines: list[Text] = []
    remarks = []
    for curve in curves:
        highest = f"  max {_highest_text(chart, curve.series)}"
        name = escape(curve.series.name)
        sample = (curve.glyphs[len(curve.glyphs) // 2], curve.style)
        short_name = cut(name, max(width - len(highest) - 2, 8))
        entry = Text.assemble(sample, f" {short_name}", (highest, FAINT))
        if lines and lines[-1].cell_len + len(_LEGEND_GAP) + entry.cell_len <= width:
            lines[-1].append(_LEGEND_GAP).append_text(entry)
        else:
            lines.append(entry)
        if curve.hidden:
            hidden = " and ".join(
                f"{escape(series.name)} (max {_highest_text(chart, series)})"
                for series in curve.hidden
            )
            verb = "are" if len(curve.hidden) > 1 else "is"
            remarks.append(f"{hidden} {verb} too close to {name} to be drawn.")
    if undrawn := ", ".join(escape(series.name) for series in chart.series[_MAX_CURVES:]):
        remarks.append(f"Not drawn: {undrawn}.")
    return lines + [Text(line, FAINT) for text in remarks for line in wrap(text, width)]


def _highest_text(chart: Chart, series: Series) -> str:
    values = np.asarray(series.y, np.float64)
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
    np.fmax.at(heights, _columns_of(x, x, columns), y)
    return heights


def _columns_of(positions: Array, x: Array, columns: int) -> npt.NDArray[np.int64]:
    """Return the columns of x values; values outside of the axis get the nearest column."""
    first_x, last_x = float(x[0]), float(x[-1])
    shares = (np.asarray(positions, np.float64) - first_x) / ((last_x - first_x) or 1.0)
    return np.clip(np.nan_to_num(shares) * columns, 0, columns - 1).astype(np.int64)
