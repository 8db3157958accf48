"""Tables and charts of cudakit's rate relative to each baseline."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from cudakit.bench.labels import CUDAKIT, short_labels
from cudakit.bench.report.spread import MAX_LANES, WIDTH, Lane, Mark, draw_lanes, omitted_lanes
from cudakit.bench.result import CaseResult
from cudakit.bench.stats import ci_over_rounds
from cudakit.report.axis import Axis, tight_axis
from cudakit.report.document import (
    Array,
    Column,
    Columns,
    Node,
    Ratio,
    Section,
    Table,
    Text,
    Value,
    View,
)
from cudakit.report.picture import Figure, dots, shape, stretch_shapes, to_units
from cudakit.units import Unavailable, format_ratio

# Height of a lane in pixels, and in the units of the lane's drawing.
_LANE_PIXELS = 38
_HEIGHT = 100
# The axis extends at least this far to both sides of ratio 1, which is equal speed.
_MIN_EXTENT = 0.01
_MARGIN = 1.08


@dataclass(frozen=True, slots=True)
class RelativeRate:
    """cudakit's rate divided by a baseline's, and its 95% CI."""

    ratio: float
    low: float
    high: float


def baseline_libraries(cases: Sequence[CaseResult]) -> list[str]:
    """Return the libraries of baselines, in the order of first appearance."""
    return [name for name in dict.fromkeys(case.library for case in cases) if name != CUDAKIT]


def measured_baselines(cases: Sequence[CaseResult]) -> list[str]:
    """Return the baselines that have at least one time."""
    timed_cases = [case for case in cases if not isinstance(case.median_s, Unavailable)]
    return baseline_libraries(timed_cases)


def relative_rate(baseline: str, case: CaseResult, cases: Sequence[CaseResult]) -> Value:
    """Return cudakit's rate relative to a baseline's as text: ``99.6% ± 0.2%``; "-" for a baseline."""
    if case.library != CUDAKIT:
        return Text("-")
    rate_ratio = ratio_to(baseline, case, cases)
    if isinstance(rate_ratio, Unavailable):
        return rate_ratio
    # One decimal, because 99.6% and 100.4% differ in meaning.
    return Text(f"{rate_ratio.ratio:.1%} ± {format_ratio((rate_ratio.high - rate_ratio.low) / 2)}")


def ratio_to(
    baseline: str, case: CaseResult, cases: Sequence[CaseResult]
) -> RelativeRate | Unavailable:
    """Return the rate of a case relative to that of a baseline in the same case."""
    for baseline_case in cases:
        if baseline_case.library == baseline and (baseline_case.name, baseline_case.axes) == (
            case.name,
            case.axes,
        ):
            return _rate_ratio(case, baseline_case)
    return Unavailable(f"{baseline} did not run this case")


def baseline_sections(cases: Sequence[CaseResult]) -> Iterator[Node]:
    """Show cudakit's rate relative to each baseline, case by case."""
    cudakit_cases = [case for case in cases if case.library == CUDAKIT]
    case_labels = short_labels(cudakit_cases)
    for baseline in measured_baselines(cases):
        rates = [
            (name, rate)
            for name, case in zip(case_labels, cudakit_cases, strict=True)
            if isinstance(rate := ratio_to(baseline, case, cases), RelativeRate)
        ]
        if rates:
            columns = _columns(baseline, rates)
            picture = View(
                "relative-rate", (columns.name,), draw_relative_rates, _table(baseline, rates)
            )
            yield Section(f"Compared with {baseline}", (columns, picture))


def draw_relative_rates(columns: Sequence[Columns]) -> Figure:
    """Draw cudakit's rate relative to a baseline with its 95% CI; cudakit is faster to the right of 100%.

    ``columns`` is the Columns "vs BASELINE" with the arrays "case" (a number, with names in ``text``),
    "ratio", "low" and "high".
    """
    (rates,) = columns
    baseline = rates.name.removeprefix("vs ")
    case_labels = rates.text["case"][:MAX_LANES]
    intervals = np.stack(
        [rates.arrays[key][: len(case_labels)] for key in ("low", "ratio", "high")], axis=1
    )
    axis = _axis(intervals)
    title = f"Rate relative to {baseline}"
    rows = [
        _lane(name, interval, axis) for name, interval in zip(case_labels, intervals, strict=True)
    ]
    drawing = draw_lanes(
        rows, axis, Mark(1.0, f"as fast as {baseline}"), height=_LANE_PIXELS, title=title
    )
    omitted_remark = omitted_lanes(len(rates.text["case"]) - len(case_labels))
    return Figure("lanes", (drawing, *omitted_remark), title)


def _rate_ratio(case: CaseResult, baseline: CaseResult) -> RelativeRate | Unavailable:
    for result in (case, baseline):
        if isinstance(result.median_s, Unavailable):
            return result.median_s
    rounds = [sample_pairs for sample_pairs in _sample_pairs(case, baseline) if sample_pairs]
    ratios = [
        baseline_s / case_s
        for sample_pairs in rounds
        for case_s, baseline_s in sample_pairs
        if case_s
    ]
    if not ratios:
        return Unavailable("the measured time is 0")
    ci_low, ci_high = ci_over_rounds(
        ratios, [len(sample_pairs) for sample_pairs in rounds] if len(rounds) > 1 else ()
    )
    return RelativeRate(median(ratios), ci_low, ci_high)


def _sample_pairs(case: CaseResult, baseline: CaseResult) -> Iterator[list[tuple[float, float]]]:
    """Yield the pairs of interleaved samples of each round: both samples of a pair ran at the same clock."""
    for case_times, baseline_times in zip(_rounds(case), _rounds(baseline), strict=False):
        yield list(zip(case_times, baseline_times, strict=False))


def _rounds(case: CaseResult) -> Iterator[tuple[float, ...]]:
    """Yield the sample times of each round."""
    first_sample = 0
    for sample_count in case.rounds or (len(case.samples_s),):
        yield case.samples_s[first_sample : first_sample + sample_count]
        first_sample += sample_count


def _axis(intervals: Array) -> Axis:
    """Return an axis that is symmetric about 100%."""
    extent = max(float(np.abs(intervals - 1).max()), _MIN_EXTENT) * _MARGIN
    return tight_axis(max(1 - extent, 0.0), 1 + extent, "ratio")


def _lane(name: str, interval: Array, axis: Axis) -> Lane:
    """Return the lane of a case; ``interval`` is the lower end of the CI, the ratio, and the upper end."""
    low_x, median_x, high_x = to_units(axis.shares(interval), WIDTH)
    y = _HEIGHT // 2
    half_width = (float(interval[2]) - float(interval[0])) / 2
    bar = shape("path", class_="line s0", d=f"M{low_x} {y}H{high_x}M{low_x} 30V70M{high_x} 30V70")
    dot = shape("path", class_="scatter case s0", d=dots([median_x], [y]))
    remark = f"{interval[1]:.1%} ± {format_ratio(half_width)}"
    return Lane(name, remark, stretch_shapes((bar, dot), width=WIDTH, height=_HEIGHT))


def _columns(baseline: str, rates: Sequence[tuple[str, RelativeRate]]) -> Columns:
    ratios = [rate for _, rate in rates]
    return Columns(
        f"vs {baseline}",
        {
            "case": np.arange(len(rates)),
            "ratio": np.array([rate.ratio for rate in ratios]),
            "low": np.array([rate.low for rate in ratios]),
            "high": np.array([rate.high for rate in ratios]),
        },
        {"case": tuple(name for name, _ in rates)},
    )


def _table(baseline: str, rates: Sequence[tuple[str, RelativeRate]]) -> Table:
    titles = (f"vs {baseline}", "CI low", "CI high")
    return Table(
        columns=(Column("case", "text"), *(Column(title, "number") for title in titles)),
        rows=tuple(
            (Text(name), Ratio(rate.ratio), Ratio(rate.low), Ratio(rate.high))
            for name, rate in rates
        ),
        caption=f"Rate relative to {baseline}, with its 95% CI.",
    )
