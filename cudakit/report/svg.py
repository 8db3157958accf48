"""Draw charts, plots and figures as SVG."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np
import numpy.typing as npt

from cudakit.report.axis import Axis, rounded_axis, tight_axis
from cudakit.report.document import Array, Chart, Marker, Series, format_value, y_value
from cudakit.report.escape import Markup, element, escape
from cudakit.report.picture import (
    Caption,
    Drawing,
    Figure,
    Legend,
    Plot,
    PlotKey,
    Shape,
    name_beside,
    percent,
    series_class,
    shape,
    stretch_shapes,
    to_units,
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
    placed = _place_markers(markers, node.x)
    top = _MARKER_LINE_HEIGHT * max((one.line + 1 for one in placed if one.has_label), default=0)
    bottom = top + node.height
    picture = element(
        "svg",
        element("title", node.title),
        element("desc", node.description),
        *_y_grid(node.y, top, node.height),
        element(
            "svg",
            *map(draw_shape, node.shapes),
            y=top,
            width="100%",
            height=node.height,
            class_="plot",
        ),
        *_x_labels(node.x, bottom, node.x_label),
        *(_draw_marker(one, top, bottom) for one in placed),
        class_="chart",
        role="img",
        width="100%",
        height=bottom + _TICKS_HEIGHT + (_X_LABEL_HEIGHT if node.x_label else 0),
    )
    omitted = len(markers) - _MAX_MARKERS
    return element(
        "figure",
        element("figcaption", node.title) if node.title else None,
        _legend(node),
        picture,
        element("p", f"{omitted:,} more markers are not drawn.", class_="caption")
        if omitted > 0
        else None,
        class_="plotted",
    )


def _y_grid(axis: Axis, top: int, height: int) -> Iterator[Markup]:
    for tick in axis.ticks:
        y = top + round(height * (1 - axis.share(tick.value)), 1)
        yield element("line", class_="grid" if tick.value else "zero", x2="100%", y1=y, y2=y)
        yield draw_shape(name_beside(tick.label, y=y))


def _x_labels(axis: Axis, bottom: int, label: str) -> Iterator[Markup]:
    for tick in axis.ticks:
        x = percent(axis.share(tick.value))
        yield element("line", class_="axis", x1=x, x2=x, y1=bottom, y2=bottom + 5)
        text = escape(tick.label, limit=_MAX_TICK_LABEL_LENGTH)
        yield element("text", text, class_="tick middle", x=x, y=bottom + 19)
    if label:
        text = escape(label, limit=_MAX_LABEL_LENGTH)
        yield element("text", text, class_="tick end", x="100%", y=bottom + 37)


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
    unplaced = []
    finite = sorted((marker for marker in markers if isfinite(marker.x)), key=lambda m: m.x)
    for marker in finite[:_MAX_MARKERS]:
        share = min(max(axis.share(marker.x), 0.0), 1.0)
        width = _CHARACTER_WIDTH_SHARE * (min(len(marker.label), _MAX_LABEL_LENGTH) + 3)
        end = share - width if share + width > 1 else share + width
        unplaced.append(_PlacedMarker(marker, share, end))
    to_left = [one for one in reversed(unplaced) if one.extends_left]
    placed: list[_PlacedMarker] = []
    for one in to_left + [one for one in unplaced if not one.extends_left]:
        lines = [earlier.line for earlier in placed if earlier.has_label and earlier.overlaps(one)]
        placed.append(replace(one, line=max(lines, default=-1) + 1))
    return placed


def _draw_marker(placed: _PlacedMarker, top: int, bottom: int) -> Markup:
    marker, x = placed.marker, percent(placed.share)
    line_top = placed.line * _MARKER_LINE_HEIGHT + 4 if placed.has_label else top
    text = f"{_SYMBOLS[marker.level]} {marker.label}"
    label = element(
        "text",
        escape(text, limit=_MAX_LABEL_LENGTH),
        class_="end" if placed.extends_left else None,
        x=x,
        dx=-5 if placed.extends_left else 5,
        y=line_top + 9,
    )
    return element(
        "g",
        element("title", text),
        element("line", x1=x, x2=x, y1=line_top, y2=bottom),
        label if placed.has_label else None,
        class_=f"marker {marker.level}",
    )


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
        shape("path", class_=f"line {series_class(index)}", d=_curve_path(series, node, x, y))
        for index, series in enumerate(node.series)
    ]
    keys = []
    for series, values in zip(node.series, heights, strict=True):
        range_of_series = _finite_range(values)
        highest = format_value(y_value(node, range_of_series[1])) if range_of_series else ""
        keys.append(PlotKey(series.name, f"max {highest}" if highest else "no data"))
    curve_names = ", ".join(f"{key.name} ({key.remark})" for key in keys[:8])
    drawing = Plot(
        "line",
        node.title,
        x,
        y,
        shapes=(stretch_shapes(paths, width=_COORDINATE_WIDTH, height=_COORDINATE_HEIGHT),),
        legend=tuple(keys) if len(keys) > 1 else (),
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
    x_positions = to_units(x.shares(points_x[is_finite]), _COORDINATE_WIDTH)
    y_positions = to_units(1 - y.shares(points_y[is_finite]), _COORDINATE_HEIGHT)
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


def _finite_range(values: Array) -> tuple[float, float] | None:
    finite_values = values[np.isfinite(values)]
    return (float(finite_values.min()), float(finite_values.max())) if finite_values.size else None


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
            items = []
            for key in keys:
                sample = draw_shape(key.sample)
                sample = element(
                    "svg", sample, class_="key", width=width, height=12, aria_hidden="true"
                )
                remark = element("span", key.remark, class_="muted")
                items.append(
                    element("li", sample, key.name, *((" ", remark) if key.remark else ()))
                )
            return element("ul", *items, class_="legend")
        case Drawing():
            return element(
                "svg",
                element("title", part.title),
                element("desc", part.description) if part.description else None,
                *map(draw_shape, part.shapes),
                class_="chart",
                role="img",
                width="100%",
                height=part.height,
            )
        case Caption(text):
            return element("p", text, class_="caption")
