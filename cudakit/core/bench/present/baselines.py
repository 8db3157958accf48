"""The baselines of cases, and our rate as a share of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from cudakit.core.bench.case import OURSELVES
from cudakit.core.bench.present.labels import short_labels
from cudakit.core.bench.present.lanes import MOST_LANES, WIDTH, Lane, Mark, lanes, left_out
from cudakit.core.bench.result import CaseResult
from cudakit.core.bench.stats import run_interval
from cudakit.document import Array, Column, Columns, Node, Ratio, Section, Table, Text, Value, View
from cudakit.document.axis import Axis, tight_axis
from cudakit.document.picture import Figure, dots, shape, stretched, to_units
from cudakit.units import Unavailable, format_ratio

# Height of a lane in pixels, and in units of its drawing.
_LANE = 38
_HEIGHT = 100
# Least reach of the axis from equal speed.
_LEAST_REACH = 0.01
_MARGIN = 1.08


@dataclass(frozen=True, slots=True)
class Share:
    """Our rate as a share of a baseline's, and its 95 % CI."""

    ratio: float
    low: float
    high: float


def baselines(cases: Sequence[CaseResult]) -> list[str]:
    """List the baselines, in the order of first appearance."""
    return [name for name in dict.fromkeys(case.contender for case in cases) if name != OURSELVES]


def compared(cases: Sequence[CaseResult]) -> list[str]:
    """List the baselines that have a figure."""
    known = [case for case in cases if not isinstance(case.median_s, Unavailable)]
    return baselines(known)


def share_of(baseline: str, case: CaseResult, cases: Sequence[CaseResult]) -> Value:
    """Format our rate as a share of a baseline's, with its 95 % CI."""
    if case.contender != OURSELVES:
        return Text("-")
    found = ratio_to(baseline, case, cases)
    if isinstance(found, Unavailable):
        return found
    # To a tenth of a percent: 99.6 and 100.4 differ in meaning.
    return Text(f"{found.ratio:.1%} ± {format_ratio((found.high - found.low) / 2)}")


def ratio_to(baseline: str, case: CaseResult, cases: Sequence[CaseResult]) -> Share | Unavailable:
    """Return the rate of a case of ours as a share of a baseline's for the same case."""
    for other in cases:
        if other.contender == baseline and (other.name, other.axes) == (case.name, case.axes):
            return _share(case, other)
    return Unavailable(f"{baseline} did not run this case")


def baseline_sections(cases: Sequence[CaseResult]) -> Iterator[Node]:
    """Show our rate as a share of each baseline's, case by case, with its 95 % CI."""
    own = [case for case in cases if case.contender == OURSELVES]
    names = short_labels(own)
    for baseline in compared(cases):
        found = [
            (name, share)
            for name, case in zip(names, own, strict=True)
            if isinstance(share := ratio_to(baseline, case, cases), Share)
        ]
        if found:
            columns = _share_columns(baseline, found)
            picture = View("beside", (columns.name,), beside, _share_table(baseline, found))
            yield Section(f"Beside {baseline}", (columns, picture))


def beside(columns: Sequence[Columns]) -> Figure:
    """Draw our rate as a share of a baseline's, with its 95 % interval; to the right of 100 % we are faster.

    The arrays of ``beside BASELINE`` are ``case`` (decoded by ``text``), ``ratio``, ``low`` and ``high``.
    """
    (shares,) = columns
    baseline = shares.name.removeprefix("beside ")
    names = shares.text["case"][:MOST_LANES]
    ends = np.stack([shares.arrays[key][: len(names)] for key in ("low", "ratio", "high")], axis=1)
    axis = _share_axis(ends)
    title = f"Our rate as a share of {baseline}'s"
    rows = [_lane(name, row, axis) for name, row in zip(names, ends, strict=True)]
    drawing = lanes(rows, axis, Mark(1.0, f"as fast as {baseline}"), height=_LANE, title=title)
    beyond = left_out(len(shares.text["case"]) - len(names))
    return Figure("lanes", (drawing, *beyond), title)


def _share(own: CaseResult, other: CaseResult) -> Share | Unavailable:
    for case in (own, other):
        if isinstance(case.median_s, Unavailable):
            return case.median_s
    pairs = [pair for pair in _pairs(own, other) if pair]
    ratios = [theirs / ours for pair in pairs for ours, theirs in pair if ours]
    if not ratios:
        return Unavailable("it took no time")
    low, high = run_interval(ratios, [len(pair) for pair in pairs] if len(pairs) > 1 else ())
    return Share(median(ratios), low, high)


def _pairs(own: CaseResult, other: CaseResult) -> Iterator[list[tuple[float, float]]]:
    """Yield the interleaved samples of each round: both met the same clock."""
    for ours, theirs in zip(_rounds(own), _rounds(other), strict=False):
        yield list(zip(ours, theirs, strict=False))


def _rounds(case: CaseResult) -> Iterator[tuple[float, ...]]:
    begin = 0
    for count in case.rounds or (len(case.samples_s),):
        yield case.samples_s[begin : begin + count]
        begin += count


def _share_axis(ends: Array) -> Axis:
    """Return an axis around 100 %: slower to the left, faster to the right."""
    reach = max(float(np.abs(ends - 1).max()), _LEAST_REACH) * _MARGIN
    return tight_axis(max(1 - reach, 0.0), 1 + reach, "ratio")


def _lane(name: str, ends: Array, axis: Axis) -> Lane:
    low, middle, high = to_units(axis.shares(ends), WIDTH)
    half = _HEIGHT // 2
    reach = (float(ends[2]) - float(ends[0])) / 2
    bar = shape("path", class_="line s0", d=f"M{low} {half}H{high}M{low} 30V70M{high} 30V70")
    dot = shape("path", class_="scatter case s0", d=dots([middle], [half]))
    remark = f"{ends[1]:.1%} ± {format_ratio(reach)}"
    return Lane(name, remark, stretched((bar, dot), width=WIDTH, height=_HEIGHT))


def _share_columns(baseline: str, found: Sequence[tuple[str, Share]]) -> Columns:
    shares = [share for _, share in found]
    return Columns(
        f"beside {baseline}",
        {
            "case": np.arange(len(found)),
            "ratio": np.array([share.ratio for share in shares]),
            "low": np.array([share.low for share in shares]),
            "high": np.array([share.high for share in shares]),
        },
        {"case": tuple(name for name, _ in found)},
    )


def _share_table(baseline: str, found: Sequence[tuple[str, Share]]) -> Table:
    titles = (f"of {baseline}", "least", "most")
    return Table(
        columns=(Column("case", "text"), *(Column(title, "number") for title in titles)),
        rows=tuple(
            (Text(name), Ratio(share.ratio), Ratio(share.low), Ratio(share.high))
            for name, share in found
        ),
        caption=f"Our rate as a share of {baseline}'s, with what it may be at least and at most.",
    )
