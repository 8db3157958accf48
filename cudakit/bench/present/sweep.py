"""The drawing of rates or times along one axis, such as the problem size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cudakit.bench.labels import axis_title
from cudakit.report.axis import Axis, log_axis, rounded_axis, ticked_at, tight_axis
from cudakit.report.document import Array, Columns
from cudakit.report.picture import (
    Plot,
    PlotKey,
    Shape,
    dots,
    polyline,
    series_class,
    shape,
    stretch_shapes,
    to_units,
)

_WIDTH, _HEIGHT = 2400, 1000
_PLOT_PIXELS = 300
# An axis is logarithmic if a ratio exceeds this limit. For the x axis, the ratio is that of the largest to
# the smallest value; for rates, of the highest rate to the highest rate of the slowest line; for times, of
# the longest to the shortest time.
_LOG_X_RATIO, _LOG_RATE_RATIO, _LOG_TIME_RATIO = 8, 5, 32
# Ratio of the lowest value to the lower end of a logarithmic axis.
_MARGIN = 1.5


@dataclass(frozen=True, slots=True)
class _Curves:
    """The points of all lines: x, y, the ends of the confidence interval, the peak and the fitted value."""

    line: Array
    x: Array
    y: Array
    low: Array
    high: Array
    limit: Array
    fit: Array
    classes: tuple[str, ...]  # CSS classes of each line.


def draw_sweep(columns: Sequence[Columns]) -> Plot:
    """Draw a curve per line of the Columns "sweep AXIS": the rate and its peak, or the time.

    The arrays are "line" (a number, with names in ``text``), "colour" and "library" of the line, AXIS,
    "median_s", "ci95_low_s", "ci95_high_s", "limit_s", "fit_s", and "amount" and "unit" of the work per
    execution. Bars span the confidence intervals. A line connects the points or, if there is a fit, shows
    the fit. The title of the plot is the text after the colon in the name of the Columns.
    """
    (point_columns,) = columns
    name, _, panel = point_columns.name.removeprefix("sweep ").partition(": ")
    shows_rate = bool(np.isfinite(point_columns.arrays["amount"]).all())
    curves = _curves(point_columns, name, shows_rate=shows_rate)
    x, y = (
        _x_axis(curves.x, name),
        _y_axis(curves, point_columns.text["unit"][0] if shows_rate else ""),
    )
    line_names = point_columns.text["line"]
    limits = list(_draw_limits(curves, line_names, x, y)) if shows_rate else []
    paths = (path for i, label in enumerate(line_names) for path in _paths(curves, i, label, x, y))
    fit_text = (
        ""
        if shows_rate or np.isnan(curves.fit).all()
        else "; lines: fixed + per node × number of nodes"
    )
    title = ", ".join(filter(None, ("Rate" if shows_rate else "Time", panel))) + fit_text
    x_title = axis_title(name).replace("=", " = ")
    return Plot(
        "line",
        title,
        x,
        y,
        shapes=(stretch_shapes([*limits, *paths], width=_WIDTH, height=_HEIGHT),),
        legend=tuple(_legend(curves, line_names, has_limits=bool(limits))),
        description=f"{title} along {x_title}:  {', '.join(line_names[:8])}",
        x_label=x_title,
        height=_PLOT_PIXELS,
    )


def _curves(columns: Columns, name: str, *, shows_rate: bool) -> _Curves:
    arrays = columns.arrays
    low_s, median_s, high_s = (arrays[key] for key in ("ci95_low_s", "median_s", "ci95_high_s"))
    line, axis_values, limit = arrays["line"], arrays[name].astype(np.float64), arrays["limit_s"]
    fit = arrays["fit_s"]
    first_indices = [int(np.argmax(line == i)) for i in range(len(columns.text["line"]))]
    classes = tuple(
        series_class(
            int(arrays["colour"][first_index]), int(arrays["library"][first_index]) or None
        )
        for first_index in first_indices
    )
    if not shows_rate:
        return _Curves(line, axis_values, median_s, low_s, high_s, limit, fit, classes)
    # The shortest time is the highest rate.
    amount = arrays["amount"]
    return _Curves(
        line,
        axis_values,
        amount / median_s,
        amount / high_s,
        amount / low_s,
        amount / limit,
        fit,
        classes,
    )


def _x_axis(values: Array, name: str) -> Axis:
    smallest_value, largest_value = float(values.min()), float(values.max())
    unit: Literal["bytes", "count"] = "bytes" if name.endswith("_bytes") else "count"
    is_logarithmic = smallest_value > 0 and largest_value / smallest_value >= _LOG_X_RATIO
    axis = (
        log_axis(smallest_value, largest_value, unit)
        if is_logarithmic
        else tight_axis(smallest_value, largest_value, unit)
    )
    return ticked_at(axis, values, unit)


def _y_axis(curves: _Curves, unit: str) -> Axis:
    """Return an axis that starts at 0, or a logarithmic axis if a line would otherwise look flat."""
    plotted_values = np.concatenate((curves.low, curves.high, curves.limit if unit else curves.fit))
    finite_values = plotted_values[np.isfinite(plotted_values)]
    smallest_value, largest_value = float(finite_values.min()), float(finite_values.max())
    if not unit:
        is_logarithmic = smallest_value > 0 and largest_value / smallest_value > _LOG_TIME_RATIO
        return (
            log_axis(smallest_value / _MARGIN, largest_value, "seconds")
            if is_logarithmic
            else rounded_axis(0, largest_value, "seconds")
        )
    peaks = [curves.y[curves.line == i].max() for i in range(len(curves.classes))]
    if smallest_value > 0 and largest_value > _LOG_RATE_RATIO * min(peaks):
        return log_axis(smallest_value / _MARGIN, largest_value * _MARGIN, "rate", amount_unit=unit)
    return rounded_axis(0, largest_value, "rate", amount_unit=unit)


def _draw_limits(curves: _Curves, line_names: Sequence[str], x: Axis, y: Axis) -> Iterator[Shape]:
    """Draw the peaks as lines. Curves with equal peaks share a line, in their colour if it is the same.

    The tooltip of a line names its curves.
    """
    peak_lines: list[tuple[dict[int, int], set[str], list[str]]] = []
    for i, (classes, name) in enumerate(zip(curves.classes, line_names, strict=True)):
        is_of_curve = (curves.line == i) & np.isfinite(curves.limit)
        x_units = to_units(x.shares(curves.x[is_of_curve]), _WIDTH)
        y_units = to_units(1 - y.shares(curves.limit[is_of_curve]), _HEIGHT)
        y_by_x = dict(zip(x_units, y_units, strict=True))
        for limit_points, colours, names in peak_lines:
            common_x = y_by_x.keys() & limit_points.keys()
            if common_x and all(y_by_x[x_unit] == limit_points[x_unit] for x_unit in common_x):
                limit_points.update(y_by_x)
                colours.add(_colour(classes))
                names.append(name)
                break
        else:
            if y_by_x:
                peak_lines.append((y_by_x, {_colour(classes)}, [name]))
    for y_by_x, colours, names in peak_lines:
        path = polyline(*zip(*sorted(y_by_x.items()), strict=True))
        colour = "shared" if len(colours) > 1 else next(iter(colours))
        yield shape(
            "path", title=f"peak of {', '.join(names)}", class_=f"line limit {colour}", d=path
        )


def _colour(classes: str) -> str:
    return classes.split()[0]


def _paths(curves: _Curves, line_index: int, name: str, x: Axis, y: Axis) -> Iterator[Shape]:
    is_of_curve = curves.line == line_index
    x_units = to_units(x.shares(curves.x[is_of_curve]), _WIDTH)
    median_y, low_y, high_y = (
        to_units(1 - y.shares(heights[is_of_curve]), _HEIGHT)
        for heights in (curves.y, curves.low, curves.high)
    )
    interval_bars = "".join(
        f"M{x_unit} {bar_bottom}V{bar_top}"
        for x_unit, bar_bottom, bar_top in zip(x_units, low_y, high_y, strict=True)
    )
    classes = curves.classes[line_index]
    colour = _colour(classes)
    for kind, path in (
        (f"line {classes}", _line(curves, is_of_curve, x_units, median_y, y)),
        (f"line {colour}", interval_bars),
        (f"scatter {colour}", dots(x_units, median_y)),
    ):
        yield shape("path", title=name, class_=kind, d=path)


def _line(
    curves: _Curves, is_of_curve: Array, x_units: list[int], median_y: list[int], y: Axis
) -> str:
    """Return the path of the fitted values or, without positive fitted values, of the points."""
    fitted_values = curves.fit[is_of_curve]
    has_fit = np.isfinite(fitted_values).all() and bool((fitted_values > 0).all())
    return polyline(
        x_units, to_units(1 - y.shares(fitted_values), _HEIGHT) if has_fit else median_y
    )


def _legend(curves: _Curves, names: tuple[str, ...], *, has_limits: bool) -> list[PlotKey]:
    legend_keys = [
        PlotKey(name, classes=classes) for name, classes in zip(names, curves.classes, strict=True)
    ]
    if has_limits:
        return [*legend_keys, PlotKey("peak", classes="limit shared")]
    return legend_keys if len(legend_keys) > 1 else []
