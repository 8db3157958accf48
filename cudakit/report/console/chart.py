"""Render charts: curves with axes and markers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from rich.cells import cell_len
from rich.text import Text

from cudakit.report.console import text as theme
from cudakit.report.console.text import cut, escape, format_value, pad, wrap
from cudakit.report.document import Array, Chart, Marker, Series, x_value, y_value

_CHART_ROWS = 8
_MIN_COLUMNS = 8
_POINTERS = {"info": "▲", "warn": "!", "error": "✗"}
_MAX_MARKER_LINES = 3
_MARKER_GAP = 2


def chart_lines(chart: Chart, width: int) -> list[Text]:
    """Return the lines of a chart: its title, and the picture or "(no data)"."""
    title = escape(chart.title)
    lines = [Text(line, theme.HEADER) for line in wrap(title, width)] if title else []
    if len(chart.x) == 0 or not chart.series:
        return [*lines, Text("(no data)", theme.FAINT)]
    return lines + _plot_lines(chart, width)


def _plot_lines(chart: Chart, width: int) -> list[Text]:
    """Return the lines of a chart that has at least one series and one x."""
    low, high = _y_range(chart.series[:MAX_CURVES])
    label_by_row = _y_labels(chart, low, high)
    gutter_width = max(map(cell_len, label_by_row.values())) + 1
    plane = Plane(low, high, max(width - gutter_width - 1, _MIN_COLUMNS), _CHART_ROWS)
    drawn_curves = curves(chart, plane)
    picture_lines = [
        Text.assemble((_left_edge(label_by_row.get(row, ""), gutter_width), theme.FAINT), line)
        for row, line in enumerate(picture_rows(drawn_curves, plane))
    ]
    axis_line = Text(
        f"{label_by_row[_CHART_ROWS].rjust(gutter_width - 1)} ┼{'─' * plane.columns}", theme.FAINT
    )
    labels_below = [
        _x_axis_line(chart, plane.columns),
        *_marker_lines(chart.markers, chart.x, plane.columns),
    ]
    margin = " " * (gutter_width + 1)
    label_lines = [Text(margin).append_text(line) for line in labels_below]
    return [*picture_lines, axis_line, *label_lines, *legend_lines(chart, drawn_curves, width)]


def _y_range(series: Sequence[Series]) -> tuple[float, float]:
    """Return the range of the y axis, which always contains 0."""
    values_by_series = [np.asarray(curve.y, np.float64) for curve in series]
    values_by_series = [y[np.isfinite(y)] for y in values_by_series]
    return min(y.min(initial=0) for y in values_by_series), max(
        y.max(initial=0) for y in values_by_series
    )


def _y_labels(chart: Chart, low: float, high: float) -> dict[int, str]:
    """Return the labels of the upper edges of the first and the middle row, and of the axis, by row."""
    value_by_row = {0: high, _CHART_ROWS // 2: (low + high) / 2, _CHART_ROWS: low}
    return {row: format_value(y_value(chart, height)) for row, height in value_by_row.items()}


def _left_edge(label: str, gutter: int) -> str:
    return label.rjust(gutter - 1) + (" ┤" if label else " │")


def _x_axis_line(chart: Chart, columns: int) -> Text:
    end_labels = [format_value(x_value(chart, float(x))) for x in (chart.x[0], chart.x[-1])]
    first_label, last_label = (cut(end_label, columns // 2 - 1) for end_label in end_labels)
    free_columns = max(columns - cell_len(first_label) - cell_len(last_label) - 2, 0)
    label = cut(escape(chart.x_label), free_columns)
    middle_label = pad(Text(" " * ((free_columns - cell_len(label)) // 2) + label), free_columns)
    return Text(f"{first_label} {middle_label.plain} {last_label}", theme.FAINT)


# --- markers ---------------------------------------------------------------------------------------


def _marker_lines(markers: Sequence[Marker], x: Array, columns: int) -> list[Text]:
    """Return lines with each marker below its x position; overlapping labels use further lines."""
    lines: list[Text] = []
    omitted_count = 0
    ordered_markers = sorted(markers, key=lambda marker: marker.x)
    marker_columns = columns_of(
        np.array([marker.x for marker in ordered_markers]), x, columns=columns
    )
    for marker, column in zip(ordered_markers, marker_columns.tolist(), strict=True):
        start_column, text = _place_marker(marker, column, columns)
        line = next((line for line in lines if _is_free(line, start_column)), None)
        if line is None and len(lines) == _MAX_MARKER_LINES:
            omitted_count += 1
            continue
        if line is None:
            lines.append(line := Text())
        line.pad_right(start_column - line.cell_len)
        line.append_text(text)
    if omitted_count:
        lines.append(Text(f"… {omitted_count:,} more markers", theme.FAINT))
    return lines


def _place_marker(marker: Marker, column: int, columns: int) -> tuple[int, Text]:
    """Return the first column and the text of a marker: its label is right of the pointer if it fits."""
    pointer, style = _POINTERS[marker.level], theme.LEVELS[marker.level]
    label = escape(marker.label)
    if column + 2 + cell_len(label) <= columns or column < columns // 2:
        return column, Text(pointer, style).append(f" {cut(label, columns - column - 2)}", style)
    label = cut(label, column - 1)
    return column - 1 - cell_len(label), Text(f"{label} {pointer}", style)


def _is_free(line: Text, start_column: int) -> bool:
    return line.cell_len + _MARKER_GAP <= start_column


# --- curves, with glyphs that differ without color, and the legend ---------------------------------

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
