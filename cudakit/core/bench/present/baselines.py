"""The baselines of cases, and our rate as a share of theirs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median

from cudakit.core.bench.case import OURSELVES
from cudakit.core.bench.result import CaseResult
from cudakit.core.bench.stats import run_interval
from cudakit.document import Text, Value
from cudakit.units import Unavailable, format_ratio


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
    # To a tenth of a percent: 99.6 and 100.4 are not the same answer.
    return Text(f"{found.ratio:.1%} ± {format_ratio((found.high - found.low) / 2)}")


def ratio_to(baseline: str, case: CaseResult, cases: Sequence[CaseResult]) -> Share | Unavailable:
    """Return the rate of a case of ours as a share of a baseline's for the same case."""
    for other in cases:
        if other.contender == baseline and (other.name, other.axes) == (case.name, case.axes):
            return _share(case, other)
    return Unavailable(f"{baseline} did not run this case")


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
