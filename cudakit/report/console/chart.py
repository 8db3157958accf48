"""Render charts: curves with axes and markers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from rich.cells import cell_len
from rich.text import Text

from cudakit.report.console import theme
from cudakit.report.console.curves import (
    MAX_CURVES,
    Plane,
    columns_of,
    curves,
    legend_lines,
    picture_rows,
)
from cudakit.report.console.text import cut, escape, format_value, pad, wrap
from cudakit.report.document import Array, Chart, Marker, Series
from cudakit.report.values import x_value, y_value

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


# --- markers


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
