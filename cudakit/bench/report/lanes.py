"""Charts of lanes: a row per case, with its name on the left and its drawing over a common axis.

One shows the distribution of the samples, one cudakit's rate relative to a baseline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeAlias

import numpy as np

from cudakit.bench.labels import CUDAKIT, short_labels
from cudakit.bench.report.table import RelativeRate, measured_baselines, ratio_to
from cudakit.bench.result import CaseResult
from cudakit.report.axis import Axis, tight_axis
from cudakit.report.document import (
    Array,
    Columns,
    Node,
    Section,
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
_WIDTH = 2400
# Maximum number of lanes; further cases are not drawn.
_MAX_LANES = 40
# Width of the column with the names of cases, as a share of the page, and the letters that fit into it.
_NAME_SHARE = 0.3
_NAME_LETTERS = 34
_TICK_PIXELS = 26  # Height of the axis labels.


# A case: its name, a remark below it, and its drawing.
_Lane: TypeAlias = tuple[str, str, Shape]


def _draw_lanes(
    lanes: Sequence[_Lane], axis: Axis, mark: tuple[float, str], *, height: int, title: str
) -> Drawing:
    """Draw lanes of ``height`` pixels above their axis, with the label of a reference value."""
    bottom = len(lanes) * height
    inside: list[Shape] = []
    for tick in axis.ticks:
        x, is_mark = percent(axis.share(tick.value)), abs(tick.value - mark[0]) < 1e-9
        css_class, label = ("zero", mark[1]) if is_mark else ("grid", tick.label)
        inside.append(shape("line", class_=css_class, x1=x, x2=x, y1=0, y2=bottom))
        inside.append(shape("text", label, class_="tick middle", x=x, y=bottom + 19))
    names: list[Shape] = []
    for i, (name, remark, picture) in enumerate(lanes):
        drawing = shape("svg", picture, y=i * height + 4, width="100%", height=height - 8)
        inside.append(shape("g", drawing, title=f"{name}: {remark}"))
        middle = (i + 0.5) * height
        texts = (
            shape("text", text, max_length=letters, class_=css_class, x=0, y=middle + offset)
            for css_class, text, letters, offset in (
                ("name", name, _NAME_LETTERS, -3),
                ("remark", remark, 2 * _NAME_LETTERS, 12),
            )
        )
        names.append(shape("g", *texts, title=f"{name}: {remark}"))
    drawings = shape(
        "svg",
        *inside,
        x=percent(_NAME_SHARE),
        width=percent(1 - _NAME_SHARE),
        height=bottom + _TICK_PIXELS,
        class_="strips",
    )
    return Drawing(title, (drawings, *names), height=bottom + _TICK_PIXELS)


def _omitted(count: int) -> tuple[Caption, ...]:
    return (Caption(f"{count:,} more cases are not drawn."),) if count else ()


# --- the distribution of samples: a dot per sample, relative to the median ----------------------------

# Height of a lane in pixels, and in the units of the lane's drawing.
_SPREAD_PIXELS, _SPREAD_HEIGHT = 44, 400
_MAX_DOTS = 1000
# Samples beyond these quantiles are counted, but not drawn.
_DRAWN_QUANTILES = (0.005, 0.995)
_QUARTILES = (0.25, 0.75)
# Samples that are this number of interquartile ranges beyond a quartile are not drawn either, because one
# outlier would compress the scale for all other samples.
_MAX_IQRS = 6.0
_MIN_SPREAD = 0.005
_CAPTION = (
    "A dot is a sample; time runs from top to bottom. Vertical lines: the median of each round. Shaded: the "
    "interquartile range; darker: the 95% CI of the median."
)


class _Spread(NamedTuple):
    """The relative deviations of a case's samples from their median."""

    name: str
    median_s: float
    deviations: Array
    rounds: Array
    interval: tuple[float, float]


def sample_section(samples: Columns) -> Section:
    """Return a chart of every sample, relative to the median of its case."""
    view = View("sample-spread", (samples.name, "results"), draw_samples, fallback=samples)
    return Section("Distribution of the samples", (view,))


def draw_samples(columns: Sequence[Columns]) -> Figure | NoData:
    """Draw the deviations of samples from the median of their case, in the order of measurement.

    ``columns`` are the Columns "samples" and "results".
    """
    samples, results = columns
    spreads: list[_Spread] = []
    for i, name in enumerate(samples.text["case"]):
        is_of_case = samples.arrays["case"] == i
        times = samples.arrays["time_s"][is_of_case]
        median = float(np.median(times)) if len(times) else 0.0
        if median > 0:
            low_s, high_s = (float(results.arrays[f"ci95_{end}_s"][i]) for end in ("low", "high"))
            interval = (low_s / median - 1, high_s / median - 1)
            rounds = samples.arrays["round"][is_of_case]
            spreads.append(_Spread(name, median, times / median - 1, rounds, interval))
    if not spreads:
        return NoData("No samples.")
    drawn = spreads[:_MAX_LANES]
    low, high = -_MIN_SPREAD, _MIN_SPREAD
    for spread in drawn:
        # With few samples, the quantiles are the smallest and the largest deviation.
        lowest = float(np.quantile(spread.deviations, _DRAWN_QUANTILES[0], method="lower"))
        highest = float(np.quantile(spread.deviations, _DRAWN_QUANTILES[1], method="higher"))
        q1, q3 = map(float, np.quantile(spread.deviations, _QUARTILES))
        distance = max(_MAX_IQRS * (q3 - q1), _MIN_SPREAD)
        low, high = min(low, max(lowest, q1 - distance)), max(high, min(highest, q3 + distance))
    axis = tight_axis(low, high, "ratio")
    ticks = (
        replace(tick, label=f"+{tick.label}") if tick.value > 0 else tick for tick in axis.ticks
    )
    axis = replace(axis, ticks=tuple(ticks))
    drawing = _draw_lanes(
        [_spread_lane(spread, axis) for spread in drawn],
        axis,
        (0.0, "median"),
        height=_SPREAD_PIXELS,
        title="Samples around the median of their case",
    )
    omitted = _omitted(len(spreads) - len(drawn))
    return Figure("lanes spread", (drawing, Caption(_CAPTION), *omitted))


def _spread_lane(spread: _Spread, axis: Axis) -> _Lane:
    deviations, count = spread.deviations, len(spread.deviations)
    is_inside = (deviations >= axis.low) & (deviations <= axis.high)
    inside_count = int(is_inside.sum())
    beyond = f", {count - inside_count:,} beyond" if inside_count < count else ""
    shapes: list[Shape] = []
    # The interquartile range, and the CI of the median.
    quartiles = np.quantile(deviations, _QUARTILES)
    for css_class, span in (("half", quartiles), ("interval", np.array(spread.interval))):
        if np.isfinite(span).all():
            low_x, high_x = to_units(np.clip(axis.shares(span), 0, 1), _WIDTH)
            width = max(high_x - low_x, 1)
            shapes.append(
                shape("rect", class_=css_class, x=low_x, y=0, width=width, height=_SPREAD_HEIGHT)
            )
    # A dot for each sample within the axis, of more than _MAX_DOTS samples only some.
    step = max(-(-inside_count // _MAX_DOTS), 1)
    x = to_units(axis.shares(deviations[is_inside][::step]), _WIDTH)
    heights = (np.arange(count) + 0.5) / count
    y = to_units(heights[is_inside][::step], _SPREAD_HEIGHT)
    shapes.append(shape("path", class_="scatter s0", d=dots(x, y)))
    # The median of each round, over the height of its samples.
    starts = np.flatnonzero(np.diff(spread.rounds, prepend=-1)).tolist()
    ends = [*starts[1:], count]
    gap = 12 if len(ends) > 1 else 0
    for start, end in zip(starts, ends, strict=True):
        median = np.array([np.median(deviations[start:end])])
        (median_x,) = to_units(np.clip(axis.shares(median), 0, 1), _WIDTH)
        top, bottom = (round(_SPREAD_HEIGHT * index / count) for index in (start, end))
        path = f"M{median_x} {top + gap}V{bottom - gap}"
        shapes.append(shape("path", class_="line s1", d=path))
    remark = f"{format_seconds(spread.median_s, pad=True)}, {count:,} samples{beyond}"
    drawing = stretch_shapes(shapes, width=_WIDTH, height=_SPREAD_HEIGHT)
    return spread.name, remark, drawing


# --- cudakit's rate relative to each baseline, case by case -------------------------------------------

# Height of a lane in pixels, and in the units of the lane's drawing.
_RATE_PIXELS, _RATE_HEIGHT = 38, 100
# The axis extends at least this far to both sides of ratio 1, which is equal speed.
_MIN_EXTENT = 0.01
_MARGIN = 1.08


def baseline_sections(cases: Sequence[CaseResult]) -> Iterator[Node]:
    """Show cudakit's rate relative to each baseline, case by case."""
    ours = [case for case in cases if case.library == CUDAKIT]
    labels = short_labels(ours)
    for baseline in measured_baselines(cases):
        name = f"vs {baseline}"
        rates = [
            (label, rate)
            for label, case in zip(labels, ours, strict=True)
            if isinstance(rate := ratio_to(baseline, case, cases), RelativeRate)
        ]
        if not rates:
            continue
        arrays = dict(zip(RelativeRate._fields, np.array([it for _, it in rates]).T, strict=True))
        columns = Columns(
            name,
            {"case": np.arange(len(rates)), **arrays},
            {"case": tuple(label for label, _ in rates)},
        )
        view = View("relative-rate", (name,), draw_relative_rates, fallback=columns)
        yield Section(f"Compared with {baseline}", (view,))


def draw_relative_rates(columns: Sequence[Columns]) -> Figure:
    """Draw cudakit's rate relative to a baseline with its 95% CI; cudakit is faster to the right of 100%.

    ``columns`` is the Columns "vs BASELINE".
    """
    (rates,) = columns
    baseline, labels = rates.name.removeprefix("vs "), rates.text["case"][:_MAX_LANES]
    arrays = (rates.arrays[key][: len(labels)].tolist() for key in RelativeRate._fields)
    drawn = list(map(RelativeRate, *arrays))
    extent = max(abs(it - 1) for rate in drawn for it in rate)
    extent = max(extent, _MIN_EXTENT) * _MARGIN
    axis = tight_axis(max(1 - extent, 0.0), 1 + extent, "ratio")  # symmetric about 100%
    lanes: list[_Lane] = []
    for label, rate in zip(labels, drawn, strict=True):
        points = axis.shares(np.array([rate.low, rate.ratio, rate.high]))
        low_x, ratio_x, high_x = to_units(points, _WIDTH)
        y = _RATE_HEIGHT // 2
        path = f"M{low_x} {y}H{high_x}M{low_x} 30V70M{high_x} 30V70"
        bar = shape("path", class_="line s0", d=path)
        dot = shape("path", class_="scatter case s0", d=dots([ratio_x], [y]))
        picture = stretch_shapes((bar, dot), width=_WIDTH, height=_RATE_HEIGHT)
        lanes.append((label, str(rate), picture))
    title = f"Rate relative to {baseline}"
    mark = (1.0, f"as fast as {baseline}")
    drawing = _draw_lanes(lanes, axis, mark, height=_RATE_PIXELS, title=title)
    omitted = _omitted(len(rates.text["case"]) - len(labels))
    return Figure("lanes", (drawing, *omitted), title)
