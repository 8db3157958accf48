"""Draw charts, plots and figures as SVG."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
import numpy.typing as npt

from cudakit.report.axis import Axis, rounded_axis, tight_axis
from cudakit.report.document import Array, Chart, Marker, Series, format_y
from cudakit.report.escape import Markup, element, escape, join
from cudakit.report.picture import (
    Caption,
    Drawing,
    Figure,
    Key,
    Legend,
    Plot,
    PlotKey,
    Shape,
    name_beside,
    percent,
    series_class,
    shape,
    stretch_shapes,
)

# Heights in pixels. A plot is as wide as the page.
_TICKS_HEIGHT = 26
_X_LABEL_HEIGHT = 18
_MARKER_LINE_HEIGHT = 18

_MAX_MARKERS = 200
_MAX_MARKER_LINES = 4
# Maximum length in characters of a marker label, and of a tick label.
_MAX_LABEL_LENGTH = 60
_MAX_TICK_LABEL_LENGTH = 14
# Width of a character as a share of a medium plot, to detect labels that overlap.
_CHARACTER_WIDTH_SHARE = 0.008

_DOT_PATH = "M12 5h0"
_SAMPLE_PATH_BY_KIND = {"line": "M0 5h24", "scatter": _DOT_PATH}
_SYMBOLS = {"info": "▾", "warn": "!", "error": "✗"}


@dataclass(frozen=True, slots=True)
class _PlacedMarker:
    """A marker and its position in the plot."""

    marker: Marker
    share: float  # position of the vertical line, as a share of the x axis
    end: float  # position of the end of the label, as a share of the x axis
    line: int = 0  # line of text that the label is on, counted from the top

    @property
    def extends_left(self) -> bool:
        return self.end < self.share

    @property
    def has_label(self) -> bool:
        return self.line < _MAX_MARKER_LINES

    def overlaps(self, other: _PlacedMarker) -> bool:
        low, high = sorted((self.share, self.end))
        other_low, other_high = sorted((other.share, other.end))
        return low < other_high and other_low < high


def plot(node: Plot, markers: Sequence[Marker] = ()) -> Markup:
    """Return shapes between axes, with legend and markers."""
    placed_markers = _place_markers(markers, node.x)
    markers_height = _MARKER_LINE_HEIGHT * max(
        (placed_marker.line + 1 for placed_marker in placed_markers if placed_marker.has_label),
        default=0,
    )
    shapes = map(draw_shape, node.shapes)
    picture = element(
        "svg",
        element("title", node.title),
        element("desc", node.description),
        _y_grid(node.y, markers_height, node.height),
        element("svg", *shapes, y=markers_height, width="100%", height=node.height, class_="plot"),
        _x_labels(node.x, markers_height + node.height, node.x_label),
        *(
            _draw_marker(placed_marker, markers_height, markers_height + node.height)
            for placed_marker in placed_markers
        ),
        class_="chart",
        role="img",
        width="100%",
        height=markers_height
        + node.height
        + _TICKS_HEIGHT
        + (_X_LABEL_HEIGHT if node.x_label else 0),
    )
    caption = element("figcaption", node.title) if node.title else None
    return element(
        "figure", caption, _legend(node), picture, _omitted_markers(markers), class_="plotted"
    )


def _y_grid(axis: Axis, markers_height: int, height: int) -> Markup:
    return join(
        grid_element
        for tick in axis.ticks
        for line_y in (markers_height + round(height * (1 - axis.share(tick.value)), 1),)
        for grid_element in (
            element(
                "line",
                class_="grid" if tick.value else "zero",
                x2="100%",
                y1=line_y,
                y2=line_y,
            ),
            draw_shape(name_beside(tick.label, y=line_y)),
        )
    )


def _x_labels(axis: Axis, bottom: int, label: str) -> Markup:
    ticks = (
        join(
            (
                element("line", class_="axis", x1=label_x, x2=label_x, y1=bottom, y2=bottom + 5),
                element(
                    "text",
                    escape(tick.label, limit=_MAX_TICK_LABEL_LENGTH),
                    class_="tick middle",
                    x=label_x,
                    y=bottom + 19,
                ),
            )
        )
        for tick in axis.ticks
        for label_x in (percent(axis.share(tick.value)),)
    )
    axis_name = (
        element(
            "text",
            escape(label, limit=_MAX_LABEL_LENGTH),
            class_="tick end",
            x="100%",
            y=bottom + 37,
        )
        if label
        else None
    )
    return join((*ticks, axis_name))


def _legend(node: Plot) -> Markup | None:
    if not node.legend:
        return None
    kind = node.kind
    legend_items = (
        element(
            "li",
            element(
                "svg",
                element(
                    "path",
                    class_=f"{kind} {plot_key.classes or series_class(series_index)}",
                    d=_SAMPLE_PATH_BY_KIND[kind],
                ),
                element("path", class_="scatter hole", d=_DOT_PATH) if plot_key.hollow else None,
                class_="key",
                width=24,
                height=10,
                aria_hidden="true",
            ),
            element("span", plot_key.name),
            element("span", plot_key.remark, class_="muted") if plot_key.remark else None,
        )
        for series_index, plot_key in enumerate(node.legend)
    )
    return element("ul", *legend_items, class_="legend")


def _place_markers(markers: Sequence[Marker], axis: Axis) -> list[_PlacedMarker]:
    """Place markers, each label below the labels that it would overlap; clip positions to the axis.

    Labels that extend to the left are placed from right to left, the others from left to right. In this order
    the line of a marker, which starts at its label, crosses no label placed before.
    """
    finite_markers = sorted((marker for marker in markers if isfinite(marker.x)), key=lambda m: m.x)
    unplaced_markers = [_place_marker(marker, axis) for marker in finite_markers[:_MAX_MARKERS]]
    left_markers = [
        placed_marker for placed_marker in reversed(unplaced_markers) if placed_marker.extends_left
    ]
    placed_markers: list[_PlacedMarker] = []
    for placed_marker in left_markers + [
        placed_marker for placed_marker in unplaced_markers if not placed_marker.extends_left
    ]:
        lines = [
            earlier_marker.line
            for earlier_marker in placed_markers
            if earlier_marker.has_label and earlier_marker.overlaps(placed_marker)
        ]
        placed_markers.append(replace(placed_marker, line=max(lines, default=-1) + 1))
    return placed_markers


def _place_marker(marker: Marker, axis: Axis) -> _PlacedMarker:
    share = min(max(axis.share(marker.x), 0.0), 1.0)
    width_share = _CHARACTER_WIDTH_SHARE * (min(len(marker.label), _MAX_LABEL_LENGTH) + 3)
    extends_left = share + width_share > 1
    return _PlacedMarker(
        marker, share, share - width_share if extends_left else share + width_share
    )


def _draw_marker(placed_marker: _PlacedMarker, markers_height: int, bottom: int) -> Markup:
    marker_x, marker = percent(placed_marker.share), placed_marker.marker
    line_top = (
        placed_marker.line * _MARKER_LINE_HEIGHT + 4 if placed_marker.has_label else markers_height
    )
    label_text = f"{_SYMBOLS[marker.level]} {marker.label}"
    label = element(
        "text",
        escape(label_text, limit=_MAX_LABEL_LENGTH),
        class_="end" if placed_marker.extends_left else None,
        x=marker_x,
        dx=-5 if placed_marker.extends_left else 5,
        y=line_top + 9,
    )
    return element(
        "g",
        element("title", label_text),
        element("line", x1=marker_x, x2=marker_x, y1=line_top, y2=bottom),
        label if placed_marker.has_label else None,
        class_=f"marker {marker.level}",
    )


def _omitted_markers(markers: Sequence[Marker]) -> Markup | None:
    omitted_count = len(markers) - _MAX_MARKERS
    if omitted_count <= 0:
        return None
    return element("p", f"{omitted_count:,} more markers are not drawn.", class_="caption")


# --- charts as plots of curves; every point is drawn, at most some thousand ------------------------

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


# --- shapes and figures ----------------------------------------------------------------------------


def draw_shape(shape: Shape) -> Markup:
    """Return a shape with its children; labels and tooltips are escaped."""
    title = None if shape.title is None else element("title", shape.title)
    children = (
        escape(child, limit=shape.max_length) if isinstance(child, str) else draw_shape(child)
        for child in shape.children
    )
    return element(shape.kind, title, *children, **shape.attributes)


def figure(node: Figure) -> Markup:
    """Return the parts of a figure, from top to bottom."""
    title = element("figcaption", node.title) if node.title else None
    return element("figure", title, *map(_draw_part, node.parts), class_=node.kind)


def _draw_part(part: Legend | Drawing | Caption) -> Markup:
    match part:
        case Legend(keys, width):
            return element("ul", *(_legend_item(key, width) for key in keys), class_="legend")
        case Drawing():
            return _drawing(part)
        case Caption(text):
            return element("p", text, class_="caption")


def _legend_item(key: Key, width: int) -> Markup:
    sample_element = element(
        "svg", draw_shape(key.sample), class_="key", width=width, height=12, aria_hidden="true"
    )
    remark = join((" ", element("span", key.remark, class_="muted"))) if key.remark else None
    return element("li", sample_element, key.name, remark)


def _drawing(drawing: Drawing) -> Markup:
    return element(
        "svg",
        element("title", drawing.title),
        element("desc", drawing.description) if drawing.description else None,
        *map(draw_shape, drawing.shapes),
        class_="chart",
        role="img",
        width="100%",
        height=drawing.height,
    )
