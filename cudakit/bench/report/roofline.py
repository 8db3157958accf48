"""The roofline plot: operations per second by operations per byte, below arithmetic peak and bandwidth."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from cudakit.bench.labels import CUDAKIT, short_labels
from cudakit.bench.report.baselines import baseline_libraries
from cudakit.bench.report.cases import rate
from cudakit.bench.report.columns import number
from cudakit.bench.result import CaseResult
from cudakit.bench.roofline import Limit
from cudakit.report.axis import Axis, log_axis
from cudakit.report.document import (
    Array,
    Column,
    Columns,
    Node,
    Rate,
    Ratio,
    Section,
    Table,
    Text,
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
_PLOT_PIXELS = 360
# Factors by which the axes extend beyond the points and the ridge of the roofline.
_MARGIN_X, _MARGIN_Y = 2.0, 1.6
# The width of a letter as a share of a narrow plot, and the height of a line of text in pixels.
_LETTER_WIDTH, _LINE_PIXELS = 0.011, 13
_MAX_LETTERS = 40  # Maximum length of a label.
# The distance from a point to its label in pixels, and half the width of a dot as a share of the plot.
_LABEL_GAP, _DOT_RADIUS = 9, 0.009
# The distance from a roof to the middle of its label, in pixels.
_ROOF_LABEL_GAP = 10


@dataclass(frozen=True, slots=True)
class _Box:
    """The area of a label or a dot: x is a share of the plot's width, y is in pixels."""

    left_x: float
    right_x: float
    middle_y: float

    @property
    def is_inside(self) -> bool:
        return self.left_x >= 0 and self.right_x <= 1

    def overlaps(self, other_box: _Box) -> bool:
        is_apart = self.right_x <= other_box.left_x or other_box.right_x <= self.left_x
        return not is_apart and abs(self.middle_y - other_box.middle_y) < _LINE_PIXELS


@dataclass(frozen=True, slots=True)
class _PointLabel:
    """The label of a point or of a roof, to the right or left of the point.

    ``x_share`` is a share of the plot's width, ``y_pixels`` is the distance from the top of the plot.
    """

    text: str
    x_share: float
    y_pixels: float
    is_left: bool = False
    gap: int = _LABEL_GAP  # Distance from the point in pixels.

    @property
    def box(self) -> _Box:
        width = min(len(self.text), _MAX_LETTERS) * _LETTER_WIDTH
        offset = _DOT_RADIUS if self.gap else 0.0
        if self.is_left:
            return _Box(self.x_share - offset - width, self.x_share - offset, self.y_pixels)
        return _Box(self.x_share + offset, self.x_share + offset + width, self.y_pixels)

    def draw(self) -> Shape:
        return shape(
            "text",
            self.text,
            max_length=_MAX_LETTERS,
            class_="tick end outlined" if self.is_left else "tick outlined",
            x=percent(self.x_share),
            dx=-self.gap if self.is_left else self.gap,
            y=self.y_pixels,
            dy="0.32em",
        )


@dataclass(frozen=True, slots=True)
class _Picture:
    """The Columns of the roofline plot, and its axes."""

    columns: Columns
    x: Axis
    y: Axis

    @property
    def unit(self) -> str:
        return self.columns.text["unit"][0]

    @property
    def peaks(self) -> Array:
        arrays = self.columns.arrays
        return np.stack((arrays["peak_operations_per_s"], arrays["peak_bytes_per_s"]), axis=1)

    def y_pixels(self, rate: float) -> float:
        """Return the distance of a rate from the top of the plot in pixels."""
        return _PLOT_PIXELS * (1 - self.y.share(rate))


def roofline_section(cases: Sequence[CaseResult]) -> Iterator[Node]:
    """Return the roofline plot of the cases that have arithmetic, memory traffic and known peaks."""
    cases_with_peak = [
        (case, case.limit)
        for case in cases
        if case.operations
        and case.bytes_moved
        and isinstance(case.limit, Limit)
        and not isinstance(case.median_s, Unavailable)
        and not isinstance(case.limit.operations_per_s, Unavailable)
        and not isinstance(case.limit.bytes_per_s, Unavailable)
    ]
    if cases_with_peak:
        columns = _roofline_columns(cases_with_peak)
        picture = View("roofline", (columns.name,), draw_roofline, _roofline_table(cases_with_peak))
        yield Section("Roofline", (columns, picture))


def draw_roofline(columns: Sequence[Columns]) -> Plot:
    """Draw a dot per case of the Columns "roofline", and the roofs above the dots (Williams et al., 2009).

    The arrays "case", "kind" (of arithmetic), "near" (the label of the dot), "library" (0 is cudakit) and
    "unit" (of the operations) have numbers, whose names are in ``text``. The arrays "operations_per_byte",
    "operations_per_s", "peak_operations_per_s" and "peak_bytes_per_s" are positive.
    """
    (cases_with_peak,) = columns
    picture = _picture(cases_with_peak)
    title = "Rate by arithmetic intensity, below the roofline"
    roof_shapes, case_shapes = (
        stretch_shapes(shapes_and_labels, width=_WIDTH, height=_HEIGHT)
        for shapes_and_labels in (_draw_roofs(picture), _draw_cases(picture))
    )
    return Plot(
        "scatter",
        title,
        picture.x,
        picture.y,
        shapes=(shape("g", roof_shapes, *_draw_labels(picture), case_shapes),),
        legend=tuple(_legend(picture)),
        description=f"{title}: {', '.join(cases_with_peak.text['case'][:8])}",
        x_label=f"arithmetic intensity ({picture.unit} per byte)",
        height=_PLOT_PIXELS,
    )


def _picture(columns: Columns) -> _Picture:
    arrays = columns.arrays
    intensity, rate = arrays["operations_per_byte"], arrays["operations_per_s"]
    peak, bandwidth = arrays["peak_operations_per_s"], arrays["peak_bytes_per_s"]
    x = _axis(np.concatenate((intensity, peak / bandwidth)), "count", _MARGIN_X)
    y = _axis(np.concatenate((rate, peak)), "rate", _MARGIN_Y, amount_unit=columns.text["unit"][0])
    return _Picture(columns, x, y)


def _legend(picture: _Picture) -> list[PlotKey]:
    kinds = picture.columns.text["kind"]
    kind_keys = [
        PlotKey(kind, classes=f"case {series_class(i, 0)}") for i, kind in enumerate(kinds)
    ]
    baselines = ", ".join(picture.columns.text["library"][1:])
    baseline_keys = [PlotKey(baselines, classes="ring shared", hollow=True)] if baselines else []
    return [*kind_keys, *baseline_keys]


def _axis(
    values: Array, unit: Literal["count", "rate"], margin: float, *, amount_unit: str = ""
) -> Axis:
    return log_axis(
        float(values.min()) / margin, float(values.max()) * margin, unit, amount_unit=amount_unit
    )


def _draw_roofs(picture: _Picture) -> Iterator[Shape]:
    """Draw each roof: bandwidth times intensity left of the ridge, the arithmetic peak right of it."""
    x, y = picture.x, picture.y
    for operations_per_s, bytes_per_s in np.unique(picture.peaks, axis=0).tolist():
        # The part of the roof that is below the plot is not drawn.
        roof_start = max(x.low, y.low / bytes_per_s)
        corners = np.array([roof_start, operations_per_s / bytes_per_s, x.high])
        heights = np.minimum(corners * bytes_per_s, operations_per_s)
        path = polyline(
            to_units(x.shares(corners), _WIDTH), to_units(1 - y.shares(heights), _HEIGHT)
        )
        yield shape("path", class_="line roof", d=path)


def _roof_labels(picture: _Picture, dots: Sequence[_Box]) -> Iterator[_PointLabel]:
    """Label the roofs of the bandwidth and of the arithmetic peaks, at the end that dots do not cover."""
    kinds, peaks = picture.columns.arrays["kind"], picture.peaks
    bytes_per_s = float(peaks[:, 1].max())
    for operations_per_s in np.unique(peaks[:, 0]).tolist():
        kinds_at_peak = np.unique(kinds[peaks[:, 0] == operations_per_s]).tolist()
        kind_names = ", ".join(picture.columns.text["kind"][kind] for kind in kinds_at_peak)
        label = f"{kind_names}: {format_rate(operations_per_s, picture.unit)}"
        height = picture.y_pixels(operations_per_s) - _ROOF_LABEL_GAP
        ridge_share = picture.x.share(operations_per_s / bytes_per_s)
        flat_label, slope_label = (
            _PointLabel(label, 1.0, height, is_left=True, gap=0),
            _PointLabel(label, ridge_share, height),
        )
        yield (
            slope_label
            if any(map(flat_label.box.overlaps, dots)) and slope_label.box.is_inside
            else flat_label
        )
    ridge_share = float(peaks[:, 0].max()) / bytes_per_s
    slope_middle = (max(picture.x.low, picture.y.low / bytes_per_s) * ridge_share) ** 0.5
    label = f"memory: {format_rate(bytes_per_s, 'B')}"
    height = picture.y_pixels(slope_middle * bytes_per_s) - _ROOF_LABEL_GAP
    yield _PointLabel(label, picture.x.share(slope_middle), height, is_left=True)


def _draw_cases(picture: _Picture) -> Iterator[Shape]:
    """Draw cases of baselines as rings below the dots of cudakit, so that both are visible at one point.

    Of dots that overlap, the first one has the label, and is drawn last, above the others.
    """
    arrays, case_labels = picture.columns.arrays, picture.columns.text["case"]
    dot_x = to_units(picture.x.shares(arrays["operations_per_byte"]), _WIDTH)
    dot_y = to_units(1 - picture.y.shares(arrays["operations_per_s"]), _HEIGHT)
    is_cudakit = arrays["library"] == 0
    drawing_order = [*np.flatnonzero(~is_cudakit), *np.flatnonzero(is_cudakit)[::-1]]
    for i in map(int, drawing_order):
        name = case_labels[int(arrays["case"][i])]
        rate_text = format_rate(float(arrays["operations_per_s"][i]), picture.unit)
        dot, colour = dots([dot_x[i]], [dot_y[i]]), series_class(int(arrays["kind"][i]), 0)
        is_baseline = bool(arrays["library"][i])
        yield shape(
            "path",
            title=f"{name}: {rate_text}",
            class_=f"scatter {'ring' if is_baseline else 'case'} {colour}",
            d=dot,
        )
        if is_baseline:
            yield shape("path", class_="scatter hole", d=dot)


def _draw_labels(picture: _Picture) -> Iterator[Shape]:
    """Label the roofs, and the dots of cudakit: on the right, on the left, or nowhere if both lack space."""
    arrays, point_labels = picture.columns.arrays, picture.columns.text["near"]
    x_shares = picture.x.shares(arrays["operations_per_byte"]).tolist()
    heights = [picture.y_pixels(rate) for rate in arrays["operations_per_s"].tolist()]
    dots = [
        _Box(x - _DOT_RADIUS, x + _DOT_RADIUS, y) for x, y in zip(x_shares, heights, strict=True)
    ]
    roofs = list(_roof_labels(picture, dots))
    occupied_boxes = [*dots, *(roof.box for roof in roofs)]
    labelled_dots: list[_Box] = []
    yield from (roof.draw() for roof in roofs)
    for i in np.flatnonzero(arrays["library"] == 0).tolist():
        # Of dots that overlap, only the first has a label.
        if any(map(dots[i].overlaps, labelled_dots)):
            continue
        name = point_labels[int(arrays["near"][i])]
        for is_left in (False, True):
            label = _PointLabel(name, x_shares[i], heights[i], is_left=is_left)
            if label.box.is_inside and not any(map(label.box.overlaps, occupied_boxes)):
                occupied_boxes.append(label.box)
                labelled_dots.append(dots[i])
                yield label.draw()
                break


def _roofline_columns(cases_with_peak: Sequence[tuple[CaseResult, Limit]]) -> Columns:
    cases = [case for case, _ in cases_with_peak]
    limits = [limit for _, limit in cases_with_peak]
    kinds = [str(case.axes.get("dtype", case.axes.get("operation", case.name))) for case in cases]
    kind_names = list(dict.fromkeys(kinds))
    point_labels = short_labels(cases, omitted_axes=("dtype",), with_library=False)
    libraries = [CUDAKIT, *baseline_libraries(cases)]
    units = {case.operation for case in cases}
    return Columns(
        "roofline",
        {
            "case": np.arange(len(cases_with_peak)),
            "kind": np.array([kind_names.index(kind) for kind in kinds], np.int64),
            "near": np.arange(len(cases_with_peak)),
            "library": np.array([libraries.index(case.library) for case in cases], np.int64),
            "operations_per_byte": np.array([case.operations / case.bytes_moved for case in cases]),
            "operations_per_s": np.array(
                [number(case.per_second(case.operations)) for case in cases]
            ),
            "peak_operations_per_s": np.array([number(limit.operations_per_s) for limit in limits]),
            "peak_bytes_per_s": np.array([number(limit.bytes_per_s) for limit in limits]),
            "unit": np.zeros(len(cases_with_peak), np.int64),
        },
        {
            "case": tuple(short_labels(cases)),
            "kind": tuple(kind_names),
            "near": tuple(point_labels),
            "library": tuple(libraries),
            "unit": (units.pop() if len(units) == 1 else "OP",),
        },
    )


def _roofline_table(cases_with_peak: Sequence[tuple[CaseResult, Limit]]) -> Table:
    case_labels = short_labels([case for case, _ in cases_with_peak])
    return Table(
        columns=(
            Column("case", "text"),
            Column("operations per byte", "number"),
            Column("rate", "number"),
            Column("peak", "number"),
            Column("% of peak", "bar"),
        ),
        rows=tuple(
            (
                Text(name),
                Text(_format_number(case.operations / case.bytes_moved)),
                rate(case),
                Rate(case.operations / limit.seconds, case.operation),
                Ratio(number(case.ratio_to_limit)),
            )
            for name, (case, limit) in zip(case_labels, cases_with_peak, strict=True)
        ),
        caption="Peak: the lower of the arithmetic peak, and bandwidth times operations per byte.",
    )


def _format_number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
