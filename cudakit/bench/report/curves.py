"""Curves of rates or times along one axis, such as the problem size, and the roofline plot."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple, TypeAlias

import numpy as np

from cudakit.bench.labels import (
    CUDAKIT,
    DIMENSIONS,
    axis_names,
    axis_title,
    is_square,
    short_labels,
)
from cudakit.bench.report.table import baseline_libraries, limit_s, number
from cudakit.bench.result import CaseResult, GraphCosts
from cudakit.bench.roofline import Limit
from cudakit.report.axis import Axis, log_axis, rounded_axis, ticked_at, tight_axis
from cudakit.report.document import (
    Array,
    Columns,
    Node,
    Section,
    View,
)
from cudakit.report.picture import (
    Plot,
    PlotKey,
    Shape,
    dots,
    percent,
    polyline,
    series_class,
    shape,
    stretch_shapes,
    to_units,
)
from cudakit.units import Unavailable, format_rate

_WIDTH, _HEIGHT = 2400, 1000


# --- charts of the cases that differ in one axis only -------------------------------------------------

# Minimum number of points of a curve.
_MIN_POINTS = 3
# Maximum number of lines in a chart: more lines would be hard to distinguish.
_MAX_LINES = 9
# The x axis is logarithmic if its largest value is at least this multiple of its smallest one.
_LOG_X_RATIO = 8
# The axis of GEMMs with m = n = k.
_SQUARE = "m=n=k"


def sweeps(cases: Sequence[CaseResult], graphs: Sequence[GraphCosts] = ()) -> Iterator[Node]:
    """Chart the rate or the time along each numeric axis with enough points.

    ``graphs`` are the costs of graphs, whose linear fits are drawn with the times of the steps.
    """
    timed = [case for case in cases if not isinstance(case.median_s, Unavailable)]
    # Square GEMMs have an additional axis.
    square_axes = [_SQUARE] if any(map(is_square, timed)) else []
    for name in [*square_axes, *axis_names(timed)]:
        groups = _groups(timed, name)
        nodes: list[Node] = []
        for panel, lines in _panels(groups) if groups else ():
            nodes.append(_sweep(name, panel, lines, graphs))
        if nodes:
            yield Section(f"By {axis_title(name).replace('=', ' = ')}", tuple(nodes))


def _groups(cases: Sequence[CaseResult], name: str) -> list[list[CaseResult]]:
    """Group the cases that differ only in one numeric axis, sorted along it."""
    groups: dict[tuple[object, ...], list[CaseResult]] = {}
    for case in cases:
        if not np.isnan(_position(case, name)):
            fixed_axes = (item for item in case.axes.items() if item[0] not in _axes_of(name))
            groups.setdefault((case.name, case.library, *fixed_axes), []).append(case)
    return [
        sorted(group, key=lambda case: _position(case, name))
        for group in groups.values()
        if len({_position(case, name) for case in group}) >= _MIN_POINTS
    ]


def _axes_of(name: str) -> tuple[str, ...]:
    return DIMENSIONS if name == _SQUARE else (name,)


def _position(case: CaseResult, name: str) -> float:
    """Return the value of a numeric axis; NaN if the case has none."""
    if name == _SQUARE and not is_square(case):
        return np.nan
    value = case.axes.get(_axes_of(name)[0])
    return float(value) if isinstance(value, int | float) else np.nan


def _panels(groups: list[list[CaseResult]]) -> Iterable[tuple[str, list[list[CaseResult]]]]:
    """Split many groups into titled charts, along the text axis that gives the fewest charts."""
    choices: list[dict[str, list[list[CaseResult]]]] = []
    for name in axis_names([group[0] for group in groups]):
        values = [group[0].axes.get(name) for group in groups]
        panels: dict[str, list[list[CaseResult]]] = {}
        for value, group in zip(values, groups, strict=True):
            panels.setdefault(str(value), []).append(group)
        if len(panels) > 1 and all(isinstance(value, str) for value in values):
            choices.append(panels)
    if len(groups) <= _MAX_LINES or not choices:
        return [("", groups)]
    small = [panels for panels in choices if max(map(len, panels.values())) <= _MAX_LINES]
    return min(small or choices, key=len).items()


def _sweep(
    name: str, panel: str, groups: Sequence[list[CaseResult]], graphs: Sequence[GraphCosts]
) -> View:
    """Return a chart with a line per group."""
    firsts = [group[0] for group in groups]
    works = short_labels(firsts, omitted_axes=_axes_of(name), with_library=False)
    labels = tuple(short_labels(firsts, omitted_axes=_axes_of(name)))
    # The colour is equal for the same work in all libraries.
    libraries, colours = [CUDAKIT, *baseline_libraries(firsts)], list(dict.fromkeys(works))
    cases = [case for group in groups for case in group]
    intervals = [
        (np.nan, np.nan) if isinstance(it.ci95_s, Unavailable) else it.ci95_s for it in cases
    ]
    # Rates in bytes and in operations per second have no common axis; a chart of NaN shows times.
    has_rates = len({case.unit == "B" for case in cases}) == 1

    def of_lines(indices: Iterable[int]) -> Array:
        return np.repeat(np.fromiter(indices, np.int64), [len(group) for group in groups])

    columns = Columns(
        f"sweep {name}: {panel}" if panel else f"sweep {name}",
        {
            "line": of_lines(range(len(groups))),
            "colour": of_lines(colours.index(work) for work in works),
            "library": of_lines(libraries.index(case.library) for case in firsts),
            name: _floats(_position(case, name) for case in cases),
            "median_s": _floats(number(case.median_s) for case in cases),
            "ci95_low_s": _floats(low for low, _ in intervals),
            "ci95_high_s": _floats(high for _, high in intervals),
            "limit_s": _floats(map(limit_s, cases)),
            "fit_s": _floats(_fit_s(case, name, graphs) for case in cases),
            "amount": _floats(case.amount or np.nan if has_rates else np.nan for case in cases),
            "unit": np.zeros(len(cases), np.int64),
        },
        {"line": labels, "unit": (_common({it.unit for it in cases}),)},
    )
    return View("sweep", (columns.name,), draw_sweep, fallback=columns)


def _common(units: set[str]) -> str:
    """Return the unit of the rates, or OP if the cases have operations of several kinds."""
    return units.pop() if len(units) == 1 else "OP"


def _fit_s(case: CaseResult, name: str, graphs: Sequence[GraphCosts]) -> float:
    """Return the fitted time of a step of a graph; NaN without a fit."""
    axes = case.axes
    for graph in graphs if name == "nodes" else ():
        if (graph.topology, graph.kind) == (axes.get("topology"), axes.get("kind")):
            for step in graph.steps:
                if step.step == axes.get("step"):
                    return number(step.fixed_s) + number(step.node_s) * _position(case, name)
    return np.nan


def _floats(values: Iterable[float]) -> Array:
    return np.fromiter(values, np.float64)


# --- the drawing of such a chart ----------------------------------------------------------------------

_SWEEP_PIXELS = 300
# An axis is logarithmic if a ratio exceeds this limit. For rates, it is that of the highest rate to the
# highest rate of the slowest line; for times, of the longest to the shortest time.
_LOG_RATE_RATIO, _LOG_TIME_RATIO = 5, 32
# Ratio of the lowest value to the lower end of a logarithmic axis.
_MARGIN = 1.5


class _Curve(NamedTuple):
    """A line of the chart, with its points."""

    name: str
    colour: str  # CSS class of the colour.
    classes: str  # All CSS classes.
    x: Array
    y: Array
    low: Array  # Lower ends of the confidence intervals.
    high: Array
    limit: Array  # The peak.
    fit: Array


def draw_sweep(columns: Sequence[Columns]) -> Plot:
    """Draw a curve per line of the Columns "sweep AXIS": the rate and its peak, or the time.

    Bars span the confidence intervals. A line connects the points or, if there is a fit, shows the fit. The
    title of the plot is the text after the colon in the name of the Columns.
    """
    (points,) = columns
    arrays, names = points.arrays, points.text["line"]
    name, _, panel = points.name.removeprefix("sweep ").partition(": ")
    x_values, amount, fit = arrays[name].astype(np.float64), arrays["amount"], arrays["fit_s"]
    low, high, y_values = (arrays[key] for key in ("ci95_low_s", "ci95_high_s", "median_s"))
    limit = arrays["limit_s"]
    shows_rate = bool(np.isfinite(amount).all())
    if shows_rate:  # the shortest time is the highest rate
        low, y_values, high, limit = amount / high, amount / y_values, amount / low, amount / limit
    curves: list[_Curve] = []
    for i, label in enumerate(names):
        of_curve = arrays["line"] == i
        first = int(np.argmax(of_curve))
        colour, library = (int(arrays[key][first]) for key in ("colour", "library"))
        classes = series_class(colour, library or None)
        values = (it[of_curve] for it in (x_values, y_values, low, high, limit, fit))
        curves.append(_Curve(label, classes.split()[0], classes, *values))
    x_low, x_high = float(x_values.min()), float(x_values.max())
    unit: Literal["bytes", "count"] = "bytes" if name.endswith("_bytes") else "count"
    is_logarithmic = x_low > 0 and x_high / x_low >= _LOG_X_RATIO
    x = (log_axis if is_logarithmic else tight_axis)(x_low, x_high, unit)
    x = ticked_at(x, x_values, unit)
    y = _y_axis(curves, points.text["unit"][0] if shows_rate else "")
    limits = list(_draw_limits(curves, x, y)) if shows_rate else []
    paths = (path for curve in curves for path in _paths(curve, x, y))
    title = ", ".join(filter(None, ("Rate" if shows_rate else "Time", panel)))
    if not shows_rate and not np.isnan(fit).all():
        title += "; lines: fixed + per node × number of nodes"
    legend = [PlotKey(curve.name, classes=curve.classes) for curve in curves]
    if limits:
        legend.append(PlotKey("peak", classes="limit shared"))
    x_title = axis_title(name).replace("=", " = ")
    return Plot(
        "line",
        title,
        x,
        y,
        shapes=(stretch_shapes([*limits, *paths], width=_WIDTH, height=_HEIGHT),),
        legend=tuple(legend) if len(legend) > 1 else (),
        description=f"{title} along {x_title}:  {', '.join(names[:8])}",
        x_label=x_title,
        height=_SWEEP_PIXELS,
    )


def _y_axis(curves: Sequence[_Curve], unit: str) -> Axis:
    """Return an axis that starts at 0, or a logarithmic axis if a line would otherwise look flat."""
    values = np.concatenate(
        [part for it in curves for part in (it.low, it.high, it.limit if unit else it.fit)]
    )
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    if not unit:
        if low > 0 and high / low > _LOG_TIME_RATIO:
            return log_axis(low / _MARGIN, high, "seconds")
        return rounded_axis(0, high, "seconds")
    if low > 0 and high > _LOG_RATE_RATIO * min(curve.y.max() for curve in curves):
        return log_axis(low / _MARGIN, high * _MARGIN, "rate", amount_unit=unit)
    return rounded_axis(0, high, "rate", amount_unit=unit)


def _draw_limits(curves: Sequence[_Curve], x: Axis, y: Axis) -> Iterator[Shape]:
    """Draw the peaks as lines. Curves with equal peaks share a line, in their colour if it is the same.

    The tooltip of a line names its curves.
    """
    peaks: list[tuple[dict[int, int], list[_Curve]]] = []
    for curve in curves:
        is_known = np.isfinite(curve.limit)
        x_units = to_units(x.shares(curve.x[is_known]), _WIDTH)
        y_units = to_units(1 - y.shares(curve.limit[is_known]), _HEIGHT)
        y_by_x = dict(zip(x_units, y_units, strict=True))
        for points, of_peak in peaks:
            common = y_by_x.keys() & points.keys()
            if common and all(y_by_x[it] == points[it] for it in common):
                points.update(y_by_x)
                of_peak.append(curve)
                break
        else:
            if y_by_x:
                peaks.append((y_by_x, [curve]))
    for points, of_peak in peaks:
        colours = {curve.colour for curve in of_peak}
        colour = "shared" if len(colours) > 1 else colours.pop()
        path = polyline(*zip(*sorted(points.items()), strict=True))
        title = f"peak of {', '.join(curve.name for curve in of_peak)}"
        yield shape("path", title=title, class_=f"line limit {colour}", d=path)


def _paths(curve: _Curve, x: Axis, y: Axis) -> Iterator[Shape]:
    x_units = to_units(x.shares(curve.x), _WIDTH)
    median_y, low_y, high_y = (
        to_units(1 - y.shares(heights), _HEIGHT) for heights in (curve.y, curve.low, curve.high)
    )
    # The line shows the fitted values or, without positive fitted values, connects the points.
    has_fit = bool((np.isfinite(curve.fit) & (curve.fit > 0)).all())
    line_y = to_units(1 - y.shares(curve.fit), _HEIGHT) if has_fit else median_y
    bars = "".join(
        f"M{at} {low}V{high}" for at, low, high in zip(x_units, low_y, high_y, strict=True)
    )
    for css_class, path in (
        (f"line {curve.classes}", polyline(x_units, line_y)),
        (f"line {curve.colour}", bars),
        (f"scatter {curve.colour}", dots(x_units, median_y)),
    ):
        yield shape("path", title=curve.name, class_=css_class, d=path)


# --- the roofline plot: operations per second by operations per byte ----------------------------------

_ROOFLINE_PIXELS = 360
# Factors by which the axes extend beyond the points and the ridge of the roofline.
_MARGIN_X, _MARGIN_Y = 2.0, 1.6
# The width of a letter as a share of a narrow plot, and the height of a line of text in pixels.
_LETTER_WIDTH, _LINE_PIXELS = 0.011, 13
_MAX_LETTERS = 40  # Maximum length of a label.
# The distance from a point to its label in pixels, and half the width of a dot as a share of the plot.
_LABEL_GAP, _DOT_RADIUS = 9, 0.009
# The distance from a roof to the middle of its label, in pixels.
_ROOF_LABEL_GAP = 10


def roofline_section(cases: Sequence[CaseResult]) -> Iterator[Node]:
    """Return the roofline plot of the cases that have arithmetic, memory traffic and known peaks."""
    plotted = [
        (case, case.limit)
        for case in cases
        if case.operations
        and case.bytes_moved
        and isinstance(case.limit, Limit)
        and not isinstance(case.median_s, Unavailable)
        and not isinstance(case.limit.operations_per_s, Unavailable)
        and not isinstance(case.limit.bytes_per_s, Unavailable)
    ]
    if plotted:
        columns = _roofline_columns(plotted)
        view = View("roofline", (columns.name,), draw_roofline, fallback=columns)
        yield Section("Roofline", (view,))


def _roofline_columns(plotted: Sequence[tuple[CaseResult, Limit]]) -> Columns:
    cases = [case for case, _ in plotted]
    kinds = [str(case.axes.get("dtype", case.axes.get("operation", case.name))) for case in cases]
    kind_names = list(dict.fromkeys(kinds))
    libraries = [CUDAKIT, *baseline_libraries(cases)]
    return Columns(
        "roofline",
        {
            "case": np.arange(len(cases)),
            "kind": np.array([kind_names.index(kind) for kind in kinds], np.int64),
            "near": np.arange(len(cases)),  # Label of the dot.
            "library": np.array([libraries.index(case.library) for case in cases], np.int64),
            "operations_per_byte": _floats(it.operations / it.bytes_moved for it in cases),
            "operations_per_s": _floats(number(it.per_second(it.operations)) for it in cases),
            "peak_operations_per_s": _floats(number(it.operations_per_s) for _, it in plotted),
            "peak_bytes_per_s": _floats(number(limit.bytes_per_s) for _, limit in plotted),
            "unit": np.zeros(len(cases), np.int64),
        },
        {
            "case": tuple(short_labels(cases)),
            "kind": tuple(kind_names),
            "near": tuple(short_labels(cases, omitted_axes=("dtype",), with_library=False)),
            "library": tuple(libraries),
            "unit": (_common({case.operation for case in cases}),),
        },
    )


# The area of a label or a dot: its ends as shares of the plot's width, and its middle in pixels from the top.
_Box: TypeAlias = tuple[float, float, float]


def _overlap(first: _Box, second: _Box) -> bool:
    is_apart = first[1] <= second[0] or second[1] <= first[0]
    return not is_apart and abs(first[2] - second[2]) < _LINE_PIXELS


class _Label(NamedTuple):
    """The label of a point or of a roof, to the right or left of the point.

    ``x`` is a share of the plot's width, ``y`` is the distance from the top of the plot in pixels.
    """

    text: str
    x: float
    y: float
    is_left: bool = False
    gap: int = _LABEL_GAP  # Distance from the point in pixels.

    @property
    def box(self) -> _Box:
        width = min(len(self.text), _MAX_LETTERS) * _LETTER_WIDTH
        offset = _DOT_RADIUS if self.gap else 0.0
        if self.is_left:
            return self.x - offset - width, self.x - offset, self.y
        return self.x + offset, self.x + offset + width, self.y

    def fits_beside(self, boxes: Iterable[_Box]) -> bool:
        """Return whether the label is inside the plot, and overlaps none of the boxes."""
        box = self.box
        return box[0] >= 0 and box[1] <= 1 and not any(_overlap(box, other) for other in boxes)

    def draw(self) -> Shape:
        return shape(
            "text",
            self.text,
            max_length=_MAX_LETTERS,
            class_="tick end outlined" if self.is_left else "tick outlined",
            x=percent(self.x),
            dx=-self.gap if self.is_left else self.gap,
            y=self.y,
            dy="0.32em",
        )


def draw_roofline(columns: Sequence[Columns]) -> Plot:
    """Draw a dot per case of the Columns "roofline", and the roofs above the dots (Williams et al., 2009)."""
    (points,) = columns
    arrays, text = points.arrays, points.text
    unit = text["unit"][0]
    peaks = np.stack((arrays["peak_operations_per_s"], arrays["peak_bytes_per_s"]), axis=1)
    intensities = np.concatenate((arrays["operations_per_byte"], peaks[:, 0] / peaks[:, 1]))
    rates = np.concatenate((arrays["operations_per_s"], peaks[:, 0]))
    x = log_axis(
        float(intensities.min()) / _MARGIN_X, float(intensities.max()) * _MARGIN_X, "count"
    )
    low, high = float(rates.min()) / _MARGIN_Y, float(rates.max()) * _MARGIN_Y
    y = log_axis(low, high, "rate", amount_unit=unit)
    title = "Rate by arithmetic intensity, below the roofline"
    roofs, cases = (
        stretch_shapes(shapes, width=_WIDTH, height=_HEIGHT)
        for shapes in (_draw_roofs(peaks, x, y), _draw_cases(points, x, y))
    )
    legend = [
        PlotKey(it, classes=f"case {series_class(i, 0)}") for i, it in enumerate(text["kind"])
    ]
    if baselines := ", ".join(text["library"][1:]):
        legend.append(PlotKey(baselines, classes="ring shared", hollow=True))
    return Plot(
        "scatter",
        title,
        x,
        y,
        shapes=(shape("g", roofs, *_draw_labels(points, peaks, x, y), cases),),
        legend=tuple(legend),
        description=f"{title}: {', '.join(text['case'][:8])}",
        x_label=f"arithmetic intensity ({unit} per byte)",
        height=_ROOFLINE_PIXELS,
    )


def _draw_roofs(peaks: Array, x: Axis, y: Axis) -> Iterator[Shape]:
    """Draw each roof: bandwidth times intensity left of the ridge, the arithmetic peak right of it."""
    for operations_per_s, bytes_per_s in np.unique(peaks, axis=0).tolist():
        # The part of the roof that is below the plot is not drawn.
        start = max(x.low, y.low / bytes_per_s)
        corners = np.array([start, operations_per_s / bytes_per_s, x.high])
        heights = np.minimum(corners * bytes_per_s, operations_per_s)
        x_units = to_units(x.shares(corners), _WIDTH)
        path = polyline(x_units, to_units(1 - y.shares(heights), _HEIGHT))
        yield shape("path", class_="line roof", d=path)


def _draw_cases(points: Columns, x: Axis, y: Axis) -> Iterator[Shape]:
    """Draw cases of baselines as rings below the dots of cudakit, so that both are visible at one point.

    Of dots that overlap, the first one has the label, and is drawn last, above the others.
    """
    arrays, names, unit = points.arrays, points.text["case"], points.text["unit"][0]
    x_units = to_units(x.shares(arrays["operations_per_byte"]), _WIDTH)
    y_units = to_units(1 - y.shares(arrays["operations_per_s"]), _HEIGHT)
    is_cudakit = arrays["library"] == 0
    for i in [*np.flatnonzero(~is_cudakit).tolist(), *np.flatnonzero(is_cudakit)[::-1].tolist()]:
        rate_text = format_rate(float(arrays["operations_per_s"][i]), unit)
        dot, colour = dots([x_units[i]], [y_units[i]]), series_class(int(arrays["kind"][i]), 0)
        title = f"{names[int(arrays['case'][i])]}: {rate_text}"
        kind = "case" if is_cudakit[i] else "ring"
        yield shape("path", title=title, class_=f"scatter {kind} {colour}", d=dot)
        if not is_cudakit[i]:
            yield shape("path", class_="scatter hole", d=dot)


def _draw_labels(points: Columns, peaks: Array, x: Axis, y: Axis) -> Iterator[Shape]:
    """Label the roofs, and the dots of cudakit: on the right, on the left, or nowhere if both lack space."""
    arrays = points.arrays
    x_shares = x.shares(arrays["operations_per_byte"]).tolist()
    heights = [_y_pixels(y, rate) for rate in arrays["operations_per_s"].tolist()]
    boxes = [
        (at - _DOT_RADIUS, at + _DOT_RADIUS, height)
        for at, height in zip(x_shares, heights, strict=True)
    ]
    roofs = list(_roof_labels(points, peaks, boxes, x, y))
    occupied = [*boxes, *(roof.box for roof in roofs)]
    labelled: list[_Box] = []
    yield from (roof.draw() for roof in roofs)
    for i in np.flatnonzero(arrays["library"] == 0).tolist():
        # Of dots that overlap, only the first has a label.
        if any(_overlap(boxes[i], box) for box in labelled):
            continue
        name = points.text["near"][int(arrays["near"][i])]
        sides = (_Label(name, x_shares[i], heights[i], is_left) for is_left in (False, True))
        if label := next((it for it in sides if it.fits_beside(occupied)), None):
            occupied.append(label.box)
            labelled.append(boxes[i])
            yield label.draw()


def _roof_labels(
    points: Columns, peaks: Array, boxes: Sequence[_Box], x: Axis, y: Axis
) -> Iterator[_Label]:
    """Label the roofs of the bandwidth and of the arithmetic peaks, at the end that dots do not cover."""
    kinds, bytes_per_s = points.arrays["kind"], float(peaks[:, 1].max())
    for operations_per_s in np.unique(peaks[:, 0]).tolist():
        kinds_at_peak = np.unique(kinds[peaks[:, 0] == operations_per_s]).tolist()
        names = ", ".join(points.text["kind"][kind] for kind in kinds_at_peak)
        text = f"{names}: {format_rate(operations_per_s, points.text['unit'][0])}"
        height = _y_pixels(y, operations_per_s) - _ROOF_LABEL_GAP
        flat = _Label(text, 1.0, height, is_left=True, gap=0)
        slope = _Label(text, x.share(operations_per_s / bytes_per_s), height)
        is_covered = any(_overlap(flat.box, box) for box in boxes)
        yield slope if is_covered and slope.fits_beside(()) else flat
    ridge = float(peaks[:, 0].max()) / bytes_per_s
    middle = (max(x.low, y.low / bytes_per_s) * ridge) ** 0.5
    height = _y_pixels(y, middle * bytes_per_s) - _ROOF_LABEL_GAP
    yield _Label(f"memory: {format_rate(bytes_per_s, 'B')}", x.share(middle), height, is_left=True)


def _y_pixels(y: Axis, rate: float) -> float:
    """Return the distance of a rate from the top of the roofline plot in pixels."""
    return _ROOFLINE_PIXELS * (1 - y.share(rate))
