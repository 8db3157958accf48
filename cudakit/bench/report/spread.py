"""A chart of lanes: a row per case, with its name on the left and its drawing over a common axis."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cudakit.bench.labels import short_labels
from cudakit.bench.result import CaseResult
from cudakit.bench.stats import Summary
from cudakit.report.axis import Axis, tight_axis
from cudakit.report.document import (
    Array,
    Column,
    Columns,
    Count,
    Seconds,
    Section,
    Table,
    Text,
    Value,
    View,
)
from cudakit.report.picture import (
    Caption,
    Drawing,
    Figure,
    NoData,
    Shape,
    dots,
    percent,
    shape,
    stretch_shapes,
    to_units,
)
from cudakit.units import format_seconds

# Width of the drawings in units, which are stretched to the width of the page.
WIDTH = 2400
# Maximum number of lanes; further cases are not drawn.
MAX_LANES = 40

# Width of the column with the names of cases, as a share of the page, and the letters that fit into it.
_NAME_SHARE = 0.3
_NAME_LETTERS = 34
_TICK_PIXELS = 26  # Height of the axis labels.


@dataclass(frozen=True, slots=True)
class Lane:
    """A case: its name, a remark below it, and its drawing."""

    name: str
    remark: str
    drawing: Shape


@dataclass(frozen=True, slots=True)
class Mark:
    """A reference value of the axis, and its label."""

    value: float
    label: str


def draw_lanes(
    lanes: Sequence[Lane], axis: Axis, mark: Mark, *, height: int, title: str
) -> Drawing:
    """Draw lanes of ``height`` pixels each above their axis."""
    bottom = len(lanes) * height
    drawings = shape(
        "svg",
        *_grid(axis, mark, bottom),
        *(_lane_drawing(lane, i * height, height) for i, lane in enumerate(lanes)),
        x=percent(_NAME_SHARE),
        width=percent(1 - _NAME_SHARE),
        height=bottom + _TICK_PIXELS,
        class_="strips",
    )
    names = (_lane_name(lane, i * height, height) for i, lane in enumerate(lanes))
    return Drawing(title, (drawings, *names), height=bottom + _TICK_PIXELS)


def omitted_lanes(count: int) -> tuple[Caption, ...]:
    """Return a caption with the number of cases without a lane, if any."""
    return (Caption(f"{count:,} more cases are not drawn."),) if count else ()


def _grid(axis: Axis, mark: Mark, bottom: int) -> Iterator[Shape]:
    for tick in axis.ticks:
        x = percent(axis.share(tick.value))
        is_mark = abs(tick.value - mark.value) < 1e-9
        line_class = "zero" if is_mark else "grid"
        label = mark.label if is_mark else tick.label
        yield shape("line", class_=line_class, x1=x, x2=x, y1=0, y2=bottom)
        yield shape("text", label, class_="tick middle", x=x, y=bottom + 19)


def _lane_drawing(lane: Lane, top: int, height: int) -> Shape:
    drawing = shape("svg", lane.drawing, y=top + 4, width="100%", height=height - 8)
    return shape("g", drawing, title=f"{lane.name}: {lane.remark}")


def _lane_name(lane: Lane, top: int, height: int) -> Shape:
    middle_y = top + height / 2
    return shape(
        "g",
        shape("text", lane.name, max_length=_NAME_LETTERS, class_="name", x=0, y=middle_y - 3),
        shape(
            "text", lane.remark, max_length=2 * _NAME_LETTERS, class_="remark", x=0, y=middle_y + 12
        ),
        title=f"{lane.name}: {lane.remark}",
    )


# --- The distribution of samples: a lane per case, a dot per sample, relative to the median --------

_COLUMN_TITLES = ("case", "samples", "min", "q1", "median", "q3", "p99", "max", "shape")
_TIME_FIELDS = ("minimum_s", "q1_s", "median_s", "q3_s", "p99_s", "maximum_s")

# Height of a lane in pixels, and in the units of the lane's drawing.
_LANE_PIXELS = 44
_HEIGHT = 400

_MAX_DOTS = 1000
# Samples beyond these quantiles are counted, but not drawn.
_DRAWN_QUANTILES = (0.005, 0.995)
_QUARTILES = (0.25, 0.75)
# Samples that are this number of interquartile ranges beyond a quartile are not drawn either, because one
# outlier would compress the scale for all other samples.
_MAX_IQRS = 6.0
_MIN_EXTENT = 0.005
_CAPTION = (
    "A dot is a sample; time runs from top to bottom. Vertical lines: the median of each round. Shaded: the "
    "interquartile range; darker: the 95% CI of the median."
)


@dataclass(frozen=True, slots=True)
class _Case:
    """The relative deviations of a case's samples from their median."""

    name: str
    median_s: float
    deviations: Array
    rounds: Array
    interval: tuple[float, float]

    @property
    def drawn_range(self) -> tuple[float, float]:
        """The lowest and the highest deviation that are drawn."""
        # With few samples, the quantiles are the smallest and the largest deviation.
        lowest_deviation = float(np.quantile(self.deviations, _DRAWN_QUANTILES[0], method="lower"))
        highest_deviation = float(
            np.quantile(self.deviations, _DRAWN_QUANTILES[1], method="higher")
        )
        q1, q3 = map(float, np.quantile(self.deviations, _QUARTILES))
        max_distance = max(_MAX_IQRS * (q3 - q1), _MIN_EXTENT)
        return max(lowest_deviation, q1 - max_distance), min(highest_deviation, q3 + max_distance)


def sample_section(cases: Sequence[CaseResult]) -> Section:
    """Return a chart of every sample, relative to the median of its case, and a table of quantiles."""
    view = View("sample-spread", ("samples", "results"), draw_samples, _spread_table(cases))
    return Section("Distribution of the samples", (view,))


def draw_samples(columns: Sequence[Columns]) -> Figure | NoData:
    """Draw the deviations of samples from the median of their case, in the order of measurement.

    ``columns`` are the Columns "samples" with the arrays "case" (a number, with names in ``text``),
    "time_s" and "round", and the Columns "results" with the arrays "ci95_low_s" and "ci95_high_s", one item
    per case.
    """
    samples, result_columns = columns
    cases = list(_cases(samples, result_columns))
    if not cases:
        return NoData("No samples.")
    drawn_cases = cases[:MAX_LANES]
    axis = _axis(drawn_cases)
    title = "Samples around the median of their case"
    rows = [_lane(case, axis) for case in drawn_cases]
    drawing = draw_lanes(rows, axis, Mark(0.0, "median"), height=_LANE_PIXELS, title=title)
    omitted_remark = omitted_lanes(len(cases) - len(drawn_cases))
    return Figure("lanes spread", (drawing, Caption(_CAPTION), *omitted_remark))


def _cases(columns: Columns, result_columns: Columns) -> Iterator[_Case]:
    arrays = columns.arrays
    for i, name in enumerate(columns.text["case"]):
        is_of_case = arrays["case"] == i
        times = arrays["time_s"][is_of_case]
        median = float(np.median(times)) if len(times) else 0.0
        if median > 0:
            ci_low_s, ci_high_s = (
                float(result_columns.arrays[f"ci95_{end}_s"][i]) for end in ("low", "high")
            )
            interval = (ci_low_s / median - 1, ci_high_s / median - 1)
            yield _Case(name, median, times / median - 1, arrays["round"][is_of_case], interval)


def _axis(cases: list[_Case]) -> Axis:
    lows, highs = zip(*(case.drawn_range for case in cases), strict=True)
    axis = tight_axis(min(*lows, -_MIN_EXTENT), max(*highs, _MIN_EXTENT), "ratio")
    ticks = (
        replace(tick, label=f"+{tick.label}") if tick.value > 0 else tick for tick in axis.ticks
    )
    return replace(axis, ticks=tuple(ticks))


def _lane(case: _Case, axis: Axis) -> Lane:
    is_inside = (case.deviations >= axis.low) & (case.deviations <= axis.high)
    outside_count = len(is_inside) - int(is_inside.sum())
    remark = f"{format_seconds(case.median_s, pad=True)}, {len(is_inside):,} samples" + (
        f", {outside_count:,} beyond" if outside_count else ""
    )
    shapes_of_lane = (
        *_draw_intervals(case, axis),
        _draw_dots(case, axis, is_inside),
        *_draw_medians(case, axis),
    )
    return Lane(case.name, remark, stretch_shapes(shapes_of_lane, width=WIDTH, height=_HEIGHT))


def _draw_intervals(case: _Case, axis: Axis) -> Iterator[Shape]:
    """Draw the interquartile range and the CI of the median as rectangles."""
    quartiles = np.quantile(case.deviations, _QUARTILES)
    for css_class, interval_ends in (("half", quartiles), ("interval", np.array(case.interval))):
        if np.isfinite(interval_ends).all():
            low_x, high_x = to_units(np.clip(axis.shares(interval_ends), 0, 1), WIDTH)
            yield shape(
                "rect", class_=css_class, x=low_x, y=0, width=max(high_x - low_x, 1), height=_HEIGHT
            )


def _draw_dots(case: _Case, axis: Axis, is_inside: Array) -> Shape:
    """Draw a dot for each sample within the axis; of more than _MAX_DOTS samples, draw only some."""
    heights = (np.arange(len(is_inside)) + 0.5) / len(is_inside)
    dot_step = max(-(-int(is_inside.sum()) // _MAX_DOTS), 1)
    x_shares = axis.shares(case.deviations[is_inside][::dot_step])
    return shape(
        "path",
        class_="scatter s0",
        d=dots(to_units(x_shares, WIDTH), to_units(heights[is_inside][::dot_step], _HEIGHT)),
    )


def _draw_medians(case: _Case, axis: Axis) -> Iterator[Shape]:
    """Draw the median of each round over the height of its samples."""
    round_starts = np.flatnonzero(np.diff(case.rounds, prepend=-1))
    round_ends = [*round_starts[1:].tolist(), len(case.rounds)]
    for round_start, round_end in zip(round_starts.tolist(), round_ends, strict=True):
        round_median = np.median(case.deviations[round_start:round_end])
        (median_x,) = to_units(np.clip(axis.shares(np.array([round_median])), 0, 1), WIDTH)
        top_y, bottom_y = (
            round(_HEIGHT * sample_index / len(case.rounds))
            for sample_index in (round_start, round_end)
        )
        gap = 12 if len(round_ends) > 1 else 0
        yield shape("path", class_="line s1", d=f"M{median_x} {top_y + gap}V{bottom_y - gap}")


def _spread_table(cases: Sequence[CaseResult]) -> Table:
    """Return quartiles and extremes, a row per case with samples."""
    rows = [
        _spread_row(name, case.statistics)
        for name, case in zip(short_labels(cases), cases, strict=True)
        if isinstance(case.statistics, Summary)
    ]
    columns = (
        Column(title, "text" if title in ("case", "shape") else "number")
        for title in _COLUMN_TITLES
    )
    return Table(tuple(columns), tuple(rows))


def _spread_row(name: str, summary: Summary) -> tuple[Value, ...]:
    times = (Seconds(getattr(summary, field_name)) for field_name in _TIME_FIELDS)
    return (Text(name), Count(summary.n), *times, Text(_describe_shape(summary)))


def _describe_shape(summary: Summary) -> str:
    flags = (("drifts", summary.trend), ("two groups", summary.bimodal))
    return ", ".join(word for word, is_set in flags if is_set)
