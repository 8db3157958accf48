"""The drawing of rates or times along one axis, such as the problem size."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cudakit.bench.labels import (
    CUDAKIT,
    DIMENSIONS,
    axis_names,
    axis_title,
    is_square,
    short_labels,
)
from cudakit.bench.report.columns import limit_s, number
from cudakit.bench.result import CaseResult, GraphCosts
from cudakit.report.axis import Axis, log_axis, rounded_axis, ticked_at, tight_axis
from cudakit.report.document import Array, Chart, Columns, Node, Section, Series, View
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
from cudakit.units import Unavailable

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


# --- Charts of the rate or time of cases that differ in one axis only ------------------------------

# Minimum number of points of a curve.
_MIN_POINTS = 3
# Maximum number of lines in a chart: more lines would be hard to distinguish.
_MAX_LINES = 9
# The x axis is logarithmic if its largest value is at least this multiple of its smallest one.
_MIN_LOG_RATIO = 8
# The axis of GEMMs with m = n = k.
_SQUARE = "m=n=k"


@dataclass(frozen=True, slots=True)
class _Line:
    """Cases that differ in one axis only, sorted along it."""

    name: str
    cases: tuple[CaseResult, ...]
    colour: int  # Index of the colour: equal for the same work in all libraries.
    library: int  # Index of the library: 0 is cudakit.


def sweeps(cases: Sequence[CaseResult], graphs: Sequence[GraphCosts] = ()) -> Iterator[Node]:
    """Chart the rate or the time along each numeric axis with enough points.

    ``graphs`` are the costs of graphs, whose linear fits are drawn with the times of the steps.
    """
    timed_cases = [case for case in cases if not isinstance(case.median_s, Unavailable)]
    # Square GEMMs have an additional axis.
    square_axes = [_SQUARE] if any(map(is_square, timed_cases)) else []
    for name in [*square_axes, *axis_names(timed_cases)]:
        if groups := _groups(timed_cases, name):
            pictures = (
                node for group in _panels(groups) for node in _picture(name, *group, graphs)
            )
            yield Section(f"By {axis_title(name).replace('=', ' = ')}", tuple(pictures))


def _groups(cases: Sequence[CaseResult], name: str) -> list[list[CaseResult]]:
    """Group the cases that differ only in one numeric axis, sorted along it."""
    cases_by_axes: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        if _coordinate(case, name) is not None:
            fixed_axes = (
                (axis, axis_value)
                for axis, axis_value in case.axes.items()
                if axis not in _axes_of(name)
            )
            cases_by_axes.setdefault((case.name, case.library, *fixed_axes), []).append(case)
    return [
        sorted(cases_of_group, key=lambda case: _position(case, name))
        for cases_of_group in cases_by_axes.values()
        if len({_coordinate(case, name) for case in cases_of_group}) >= _MIN_POINTS
    ]


def _axes_of(name: str) -> tuple[str, ...]:
    return DIMENSIONS if name == _SQUARE else (name,)


def _coordinate(case: CaseResult, name: str) -> float | None:
    if name == _SQUARE:
        return _coordinate(case, DIMENSIONS[0]) if is_square(case) else None
    value = case.axes.get(name)
    return float(value) if isinstance(value, int | float) else None


def _position(case: CaseResult, name: str) -> float:
    return _coordinate(case, name) or 0.0


def _panels(
    groups: Sequence[list[CaseResult]],
) -> Iterator[tuple[str, list[list[CaseResult]]]]:
    """Split many groups into titled charts, along the text axis that gives the fewest charts."""
    first_cases = [group[0] for group in groups]
    panels_by_axis: dict[str, dict[str, list[list[CaseResult]]]] = {}
    for name in axis_names(first_cases):
        curves_by_panel: dict[str, list[list[CaseResult]]] = {}
        for group in groups:
            curves_by_panel.setdefault(str(group[0].axes.get(name, "-")), []).append(group)
        if len(curves_by_panel) > 1 and all(
            isinstance(first_case.axes.get(name), str) for first_case in first_cases
        ):
            panels_by_axis[name] = curves_by_panel
    if len(groups) <= _MAX_LINES or not panels_by_axis:
        yield "", list(groups)
        return
    small_enough_panels = [
        curves_by_chart
        for curves_by_chart in panels_by_axis.values()
        if max(map(len, curves_by_chart.values())) <= _MAX_LINES
    ]
    yield from min(small_enough_panels or panels_by_axis.values(), key=len).items()


def _picture(
    name: str, panel: str, groups: Sequence[list[CaseResult]], graphs: Sequence[GraphCosts]
) -> tuple[Node, ...]:
    lines = _lines(name, groups)
    columns = _columns(f"{name}: {panel}" if panel else name, name, lines, graphs)
    return columns, View("sweep", (columns.name,), draw_sweep, _chart(name, lines))


def _lines(name: str, groups: Sequence[list[CaseResult]]) -> list[_Line]:
    first_cases = [group[0] for group in groups]
    omitted_axes = _axes_of(name)
    work_labels = short_labels(first_cases, omitted_axes=omitted_axes, with_library=False)
    libraries = list(dict.fromkeys([CUDAKIT, *(first_case.library for first_case in first_cases)]))
    colours = list(dict.fromkeys(work_labels))
    line_labels = short_labels(first_cases, omitted_axes=omitted_axes)
    return [
        _Line(label, tuple(group), colours.index(work_label), libraries.index(group[0].library))
        for label, work_label, group in zip(line_labels, work_labels, groups, strict=True)
    ]


def _columns(
    title: str, name: str, lines: Sequence[_Line], graphs: Sequence[GraphCosts]
) -> Columns:
    indexed_cases = [(index, line, case) for index, line in enumerate(lines) for case in line.cases]
    cases = [case for _, _, case in indexed_cases]
    no_interval = (np.nan, np.nan)
    intervals = [
        no_interval if isinstance(case.ci95_s, Unavailable) else case.ci95_s for case in cases
    ]
    return Columns(
        f"sweep {title}",
        {
            "line": np.array([index for index, _, _ in indexed_cases], np.int64),
            "colour": np.array([line.colour for _, line, _ in indexed_cases], np.int64),
            "library": np.array([line.library for _, line, _ in indexed_cases], np.int64),
            name: _float_array(_position(case, name) for case in cases),
            "median_s": _float_array(number(case.median_s) for case in cases),
            "ci95_low_s": _float_array(low for low, _ in intervals),
            "ci95_high_s": _float_array(high for _, high in intervals),
            "limit_s": _float_array(map(limit_s, cases)),
            "fit_s": _float_array(_fit_s(case, name, graphs) for case in cases),
            "amount": _float_array(_amounts(cases)),
            "unit": np.zeros(len(cases), np.int64),
        },
        {"line": tuple(line.name for line in lines), "unit": (_unit(cases),)},
    )


def _fit_s(case: CaseResult, name: str, graphs: Sequence[GraphCosts]) -> float:
    """Return the fitted time of a step; NaN without a fit."""
    for graph in graphs:
        if (graph.topology, graph.kind) == (case.axes.get("topology"), case.axes.get("kind")):
            for step in graph.steps:
                if step.step == case.axes.get("step") and name == "nodes":
                    return number(step.fixed_s) + number(step.node_s) * _position(case, name)
    return float("nan")


def _amounts(cases: Sequence[CaseResult]) -> list[float]:
    """Return the work per execution, or NaN for all cases if some count bytes and others operations.

    Rates in bytes and in operations per second have no common axis; a chart of NaN shows times.
    """
    is_in_bytes = {case.unit == "B" for case in cases}
    return [case.amount or np.nan if len(is_in_bytes) == 1 else np.nan for case in cases]


def _unit(cases: Sequence[CaseResult]) -> str:
    """Return the unit of the rates, or OP if the cases have operations of several kinds."""
    units = {case.unit for case in cases}
    return units.pop() if len(units) == 1 else "OP"


def _chart(name: str, lines: Sequence[_Line]) -> Chart:
    """Return a chart for terminal and Markdown: of the % of peak if all cases have one, else of the time."""
    cases = [case for line in lines for case in line.cases]
    positions = sorted({_position(case, name) for case in cases})
    shows_percent_of_peak = not any(isinstance(case.ratio_to_limit, Unavailable) for case in cases)
    is_logarithmic = positions[0] > 0 and positions[-1] / positions[0] >= _MIN_LOG_RATIO
    title = axis_title(name)
    return Chart(
        title="% of peak" if shows_percent_of_peak else "Time",
        x=np.log2(positions) if is_logarithmic else np.array(positions, np.float64),
        series=tuple(
            Series(
                line.name,
                _curve_heights(line, name, positions, percent_of_peak=shows_percent_of_peak),
                step=False,
            )
            for line in lines
        ),
        x_label=f"log2 of {title}" if is_logarithmic else title,
        y_unit="ratio" if shows_percent_of_peak else "seconds",
    )


def _curve_heights(
    line: _Line, name: str, positions: list[float], *, percent_of_peak: bool
) -> Array:
    """Return the height of a line at each position, NaN where the line has no point."""
    height_by_x = {
        _position(case, name): number(case.ratio_to_limit if percent_of_peak else case.median_s)
        for case in line.cases
    }
    return _float_array(height_by_x.get(position, np.nan) for position in positions)


def _float_array(values: Iterable[float]) -> Array:
    return np.fromiter(values, np.float64)
