"""The distribution of samples: a lane per case, a dot per sample, relative to the median."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from cudakit.core.bench.labels import short_labels
from cudakit.core.bench.present.lanes import MAX_LANES, WIDTH, Lane, Mark, lanes, omitted_lanes
from cudakit.core.bench.result import CaseResult
from cudakit.core.bench.stats import Summary
from cudakit.document import (
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
from cudakit.document.axis import Axis, tight_axis
from cudakit.document.picture import (
    Caption,
    Figure,
    NoData,
    Shape,
    dots,
    shape,
    stretched,
    to_units,
)
from cudakit.units import format_seconds

_TITLES = ("case", "samples", "min", "q1", "median", "q3", "p99", "max", "shape")
_TIMES = ("minimum_s", "q1_s", "median_s", "q3_s", "p99_s", "maximum_s")

# The height of a lane in pixels, and of its drawing in units.
_LANE = 44
_HEIGHT = 400

_MAX_DOTS = 1000
# Samples beyond these quantiles are counted, not drawn.
_OUTER = (0.005, 0.995)
_QUARTERS = (0.25, 0.75)
# So are samples more than this many interquartile ranges beyond the quartiles: one outlier would compress the
# scale for all others.
_FENCE = 6.0
_MIN_EXTENT = 0.005
_CAPTION = (
    "A dot is a sample; time runs from top to bottom. Vertical lines: the median of each round. Shaded: the "
    "interquartile range; darker: the 95% CI of the median."
)


@dataclass(frozen=True, slots=True)
class _Case:
    """The deviations of the samples of a case from their median, relative to it."""

    name: str
    median_s: float
    deviations: Array
    rounds: Array
    interval: tuple[float, float]

    @property
    def outer(self) -> tuple[float, float]:
        # With few samples these quantiles are the extremes.
        low = float(np.quantile(self.deviations, _OUTER[0], method="lower"))
        high = float(np.quantile(self.deviations, _OUTER[1], method="higher"))
        below, above = np.quantile(self.deviations, _QUARTERS)
        fence = max(_FENCE * float(above - below), _MIN_EXTENT)
        return max(low, float(below) - fence), min(high, float(above) + fence)


def sample_section(cases: Sequence[CaseResult]) -> Section:
    """Show every sample of the Columns ``samples`` relative to the median of its case."""
    view = View("sample-spread", ("samples", "results"), draw_samples, _spread_table(cases))
    return Section("Distribution of the samples", (view,))


def draw_samples(columns: Sequence[Columns]) -> Figure | NoData:
    """Draw the deviations of samples from the median of their case, in the order of measurement.

    The arrays of ``samples`` are ``case`` (decoded by ``text``), ``time_s`` and ``round``; those of
    ``results`` are ``ci95_low_s`` and ``ci95_high_s``, one item per case.
    """
    samples, figures = columns
    cases = list(_cases(samples, figures))
    if not cases:
        return NoData("No samples.")
    drawn = cases[:MAX_LANES]
    axis = _axis(drawn)
    title = "Samples around the median of their case"
    rows = [_lane(case, axis) for case in drawn]
    drawing = lanes(rows, axis, Mark(0.0, "median"), height=_LANE, title=title)
    beyond = omitted_lanes(len(cases) - len(drawn))
    return Figure("lanes spread", (drawing, Caption(_CAPTION), *beyond))


def _cases(columns: Columns, figures: Columns) -> Iterator[_Case]:
    arrays = columns.arrays
    for i, name in enumerate(columns.text["case"]):
        of_case = arrays["case"] == i
        times = arrays["time_s"][of_case]
        median = float(np.median(times)) if len(times) else 0.0
        if median > 0:
            low, high = (float(figures.arrays[f"ci95_{end}_s"][i]) for end in ("low", "high"))
            interval = (low / median - 1, high / median - 1)
            yield _Case(name, median, times / median - 1, arrays["round"][of_case], interval)


def _axis(cases: list[_Case]) -> Axis:
    lows, highs = zip(*(case.outer for case in cases), strict=True)
    axis = tight_axis(min(*lows, -_MIN_EXTENT), max(*highs, _MIN_EXTENT), "ratio")
    ticks = (replace(t, label=f"+{t.label}") if t.value > 0 else t for t in axis.ticks)
    return replace(axis, ticks=tuple(ticks))


def _lane(case: _Case, axis: Axis) -> Lane:
    inside = (case.deviations >= axis.low) & (case.deviations <= axis.high)
    beyond = len(inside) - int(inside.sum())
    remark = f"{format_seconds(case.median_s, pad=True)}, {len(inside):,} samples" + (
        f", {beyond:,} beyond" if beyond else ""
    )
    parts = (*_boxes(case, axis), _cloud(case, axis, inside), *_draw_medians(case, axis))
    return Lane(case.name, remark, stretched(parts, width=WIDTH, height=_HEIGHT))


def _boxes(case: _Case, axis: Axis) -> Iterator[Shape]:
    quarters = np.quantile(case.deviations, _QUARTERS)
    for kind, ends in (("half", quarters), ("interval", np.array(case.interval))):
        if np.isfinite(ends).all():
            low, high = to_units(np.clip(axis.shares(ends), 0, 1), WIDTH)
            yield shape("rect", class_=kind, x=low, y=0, width=max(high - low, 1), height=_HEIGHT)


def _cloud(case: _Case, axis: Axis, inside: Array) -> Shape:
    heights = (np.arange(len(inside)) + 0.5) / len(inside)
    every = max(-(-int(inside.sum()) // _MAX_DOTS), 1)
    across = axis.shares(case.deviations[inside][::every])
    return shape(
        "path",
        class_="scatter s0",
        d=dots(to_units(across, WIDTH), to_units(heights[inside][::every], _HEIGHT)),
    )


def _draw_medians(case: _Case, axis: Axis) -> Iterator[Shape]:
    """Draw the median of each round over the height of its samples."""
    starts = np.flatnonzero(np.diff(case.rounds, prepend=-1))
    ends = [*starts[1:].tolist(), len(case.rounds)]
    for start, end in zip(starts.tolist(), ends, strict=True):
        middle = np.median(case.deviations[start:end])
        (at,) = to_units(np.clip(axis.shares(np.array([middle])), 0, 1), WIDTH)
        top, bottom = (round(_HEIGHT * edge / len(case.rounds)) for edge in (start, end))
        gap = 12 if len(ends) > 1 else 0
        yield shape("path", class_="line s1", d=f"M{at} {top + gap}V{bottom - gap}")


def _spread_table(cases: Sequence[CaseResult]) -> Table:
    """Return quartiles and extremes, a row per case with samples."""
    rows = [
        _spread_row(name, case.statistics)
        for name, case in zip(short_labels(cases), cases, strict=True)
        if isinstance(case.statistics, Summary)
    ]
    columns = (
        Column(title, "text" if title in ("case", "shape") else "number") for title in _TITLES
    )
    return Table(tuple(columns), tuple(rows))


def _spread_row(name: str, summary: Summary) -> tuple[Value, ...]:
    times = (Seconds(getattr(summary, time)) for time in _TIMES)
    return (Text(name), Count(summary.n), *times, Text(_describe_shape(summary)))


def _describe_shape(summary: Summary) -> str:
    flags = (("drifts", summary.trend), ("two groups", summary.bimodal))
    return ", ".join(word for word, set_ in flags if set_)
