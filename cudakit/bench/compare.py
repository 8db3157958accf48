"""Compare two runs: a verdict on each case, from the CIs of its times and cycles.

A case is faster or slower if the 95% CIs of both medians are disjoint, in time and in cycles: a lower clock
changes times, but not cycles. Each CI extends at least 0.5% to both sides, because the medians of runs on one
idle machine differ by that much.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import ClassVar, TypeAlias

from cudakit.bench.labels import Axis, full_label
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.bench.stats import ci_over_rounds
from cudakit.errors import InputError, UsageError
from cudakit.units import Unavailable, format_bytes, parse_ratio

# Minimum half-width of a CI, relative to the median.
RESOLUTION = 0.005

_Interval: TypeAlias = tuple[
    float, float, float
]  # Lower end of the CI, median, upper end of the CI.

# Settings that make two results incomparable if they differ, with their titles.
_COMPARED_SETTINGS = {
    "library": "library",
    "workspace_bytes": "workspace limit",
    "asked": "GEMM settings",
    "page_cache": "page cache",
}
# Numbers of operations in one execution. A case whose numbers differ is ambiguous.
_COUNTED_OPERATIONS = {
    "transfers_per_execution": "transfers",
    "copies": "copies",
    "gemms": "GEMMs",
}


class Verdict(Enum):
    """The change of a case between two runs."""

    FASTER = "faster"
    SLOWER = "slower"
    SAME = "same"
    AMBIGUOUS = "ambiguous"


_FAILING_VERDICTS = {verdict.value: verdict for verdict in Verdict if verdict is not Verdict.SAME}


@dataclass(frozen=True, slots=True)
class CaseComparison:
    """The change of one case between two runs."""

    name: str  # Name of the bench.
    axes: Mapping[str, Axis]  # parameters that identify the case
    # The library that ran the case: "cudakit" for the measured one, else the name of a baseline.
    library: str = field(metadata={"json": "contender"})
    verdict: Verdict  # result of the comparison
    before_s: float | Unavailable  # Median time in the earlier run.
    after_s: float | Unavailable  # Median time in the later run.
    change: float | Unavailable  # Relative change of the median: 0.05 is 5% slower.
    change_interval: tuple[float, float] | Unavailable  # 95% CI of the change.
    clock_change: float | Unavailable  # Relative change of the SM clock: -0.05 is 5% lower.
    cycles_change: float | Unavailable  # Relative change of the median of time x SM clock.
    # Reason why the verdict differs from the verdict of the times alone, or why there is no verdict; else "".
    reason: str


@dataclass(frozen=True, slots=True)
class Comparison:
    """The comparison of two runs, case by case."""

    schema: ClassVar[str] = "cudakit.bench.compare/1"
    simulated: bool  # Whether a run was on a simulated device.
    # Differences of environment and method. Without --ignore-mismatch they are an error.
    differences: tuple[str, ...]
    cases: tuple[CaseComparison, ...]  # Common cases in the order of the later run.
    only_before: tuple[str, ...]  # Labels of cases that only the earlier run has.
    only_after: tuple[str, ...]  # Labels of cases that only the later run has.

    def count(self, verdict: Verdict) -> int:
        """Return the number of cases with the given verdict."""
        return sum(case.verdict is verdict for case in self.cases)


def compare(
    before_result: BenchResult, after_result: BenchResult, *, force: bool = False
) -> Comparison:
    """Compare the common cases of two runs.

    Raises InputError if the runs have no common case or, unless ``force``, differ in environment or method.
    """
    cases_before = {case.key: case for case in before_result.results}
    cases_after = {case.key: case for case in after_result.results}
    matching_cases = [
        (cases_before[key], case) for key, case in cases_after.items() if key in cases_before
    ]
    if not matching_cases:
        raise InputError(
            f"the two runs have no case in common: BEFORE has {_first_label(before_result)}, AFTER has"
            f" {_first_label(after_result)}",
            hint="run the same benchmark with the same options twice",
        )
    differences = tuple(
        dict.fromkeys(
            difference
            for matching_case in matching_cases
            for difference in _differences(*matching_case)
        )
    )
    if differences and not force:
        raise InputError(
            f"the two runs are not comparable: {'; '.join(differences)}",
            hint="repeat the measurement on the same machine with the same options, or add --ignore-mismatch",
        )
    return Comparison(
        simulated=before_result.simulated or after_result.simulated,
        differences=differences,
        cases=tuple(compare_case(*matching_case) for matching_case in matching_cases),
        only_before=tuple(
            full_label(case) for key, case in cases_before.items() if key not in cases_after
        ),
        only_after=tuple(
            full_label(case) for key, case in cases_after.items() if key not in cases_before
        ),
    )


def compare_case(before_case: CaseResult, after_case: CaseResult) -> CaseComparison:
    """Return the verdict and the changes of one case."""
    interval_before, interval_after = (
        _interval(case.samples_s, case.rounds) for case in (before_case, after_case)
    )
    verdict, reason = _verdict(before_case, after_case)
    change: float | Unavailable
    change_interval: tuple[float, float] | Unavailable
    change = change_interval = Unavailable(reason or "the measured time is 0")
    if (
        interval_before is not None
        and interval_after is not None
        and interval_before[1] > 0
        and not _differing_work(before_case, after_case)
    ):
        change, change_interval = (
            interval_after[1] / interval_before[1] - 1,
            _change_interval(interval_before, interval_after),
        )
    return CaseComparison(
        name=after_case.name,
        axes=after_case.axes,
        library=after_case.library,
        verdict=verdict,
        before_s=before_case.median_s,
        after_s=after_case.median_s,
        change=change,
        change_interval=change_interval,
        clock_change=_median_change(before_case.sm_clock_hz, after_case.sm_clock_hz),
        cycles_change=change
        if isinstance(change, Unavailable)
        else _median_change(before_case.cycles, after_case.cycles),
        reason=reason,
    )


@dataclass(frozen=True, slots=True)
class FailOn:
    """A condition that fails a comparison: a verdict, and a minimum change."""

    verdict: Verdict
    threshold: float = 0.0  # Minimum relative change of the median.

    def is_met_by(self, case: CaseComparison) -> bool:
        """Return whether a case has the verdict, and more than the minimum change or an unknown change."""
        if case.verdict is not self.verdict:
            return False
        return isinstance(case.change, Unavailable) or abs(case.change) > self.threshold


def failing_cases(
    comparison: Comparison, conditions: Sequence[FailOn]
) -> tuple[CaseComparison, ...]:
    """Return the cases that meet a condition, and those whose time only the later run lacks.

    Cases that lack a time in both runs count if the reasons differ.
    """
    return tuple(
        case
        for case in comparison.cases
        if (isinstance(case.after_s, Unavailable) and case.after_s != case.before_s)
        or any(condition.is_met_by(case) for condition in conditions)
    )


def parse_fail_on(text: str) -> FailOn:
    """Parse ``slower``, ``slower:5%``, ``faster:0.1`` or ``ambiguous``; raises UsageError for other text."""
    verdict_word, colon, threshold_text = text.strip().partition(":")
    invalid_error = UsageError(
        f"--fail-on {text!r} is not valid",
        hint=f"choose from {', '.join(_FAILING_VERDICTS)}, each with an optional change: slower:5%",
    )
    if verdict_word not in _FAILING_VERDICTS or (colon and not threshold_text):
        raise invalid_error
    try:
        min_change = parse_ratio(threshold_text) if threshold_text else 0.0
    except ValueError:
        raise invalid_error from None
    if min_change > 1 and not threshold_text.endswith("%"):
        raise UsageError(
            f"--fail-on {text!r} is ambiguous", hint=f"write {verdict_word}:{threshold_text}%"
        )
    return FailOn(_FAILING_VERDICTS[verdict_word], min_change)


def _verdict(before_case: CaseResult, after_case: CaseResult) -> tuple[Verdict, str]:
    missing_reason = _describe_missing_times(before_case.median_s, after_case.median_s)
    if reason := missing_reason or _differing_work(before_case, after_case):
        return Verdict.AMBIGUOUS, reason
    time_verdict = _verdict_from_intervals(
        _interval(before_case.samples_s, before_case.rounds),
        _interval(after_case.samples_s, after_case.rounds),
    )
    if time_verdict is Verdict.AMBIGUOUS:
        return (
            time_verdict,
            "the confidence intervals overlap, but a median is outside of the other interval",
        )
    if time_verdict is Verdict.SAME or not (before_case.sm_clock_hz and after_case.sm_clock_hz):
        return time_verdict, ""
    cycles_verdict = _verdict_from_intervals(
        _interval(before_case.cycles, before_case.rounds),
        _interval(after_case.cycles, after_case.rounds),
    )
    if cycles_verdict is time_verdict:
        return time_verdict, ""
    verdict_in_cycles = "the same" if cycles_verdict is Verdict.SAME else cycles_verdict.value
    return Verdict.AMBIGUOUS, f"{time_verdict.value} in time, {verdict_in_cycles} in cycles"


def _describe_missing_times(before_s: float | Unavailable, after_s: float | Unavailable) -> str:
    """Return the reasons for missing times with the runs that lack them, or ""."""
    if isinstance(before_s, Unavailable) and before_s == after_s:
        return f"no time in either run: {before_s.reason}"
    return "; ".join(
        f"no time in {run_name}: {time_s.reason}"
        for time_s, run_name in ((before_s, "BEFORE"), (after_s, "AFTER"))
        if isinstance(time_s, Unavailable)
    )


def _differing_work(before_case: CaseResult, after_case: CaseResult) -> str:
    """Describe the different numbers of operations in one execution of two runs; "" if they are equal."""
    counts = [
        (
            f"{before_case.settings[name]} {title}",
            f"{after_case.settings[name]} {title}",
        )
        for name, title in _COUNTED_OPERATIONS.items()
        if name in before_case.settings and name in after_case.settings
    ]
    before_text, after_text = (
        (" and ".join(texts) for texts in zip(*counts, strict=True)) if counts else ("", "")
    )
    if before_text == after_text:
        return ""
    return f"the times are those of {before_text} in BEFORE, and of {after_text} in AFTER"


def _verdict_from_intervals(
    before_interval: _Interval | None, after_interval: _Interval | None
) -> Verdict:
    """Return the verdict from two CIs alone."""
    if before_interval is None or after_interval is None:
        return Verdict.AMBIGUOUS
    if after_interval[2] < before_interval[0]:
        return Verdict.FASTER
    if after_interval[0] > before_interval[2]:
        return Verdict.SLOWER
    is_mutual = (
        before_interval[0] <= after_interval[1] <= before_interval[2]
        and after_interval[0] <= before_interval[1] <= after_interval[2]
    )
    return Verdict.SAME if is_mutual else Verdict.AMBIGUOUS


def _interval(times: tuple[float, ...], rounds: tuple[int, ...]) -> _Interval | None:
    """Return the CI of the median, with at least RESOLUTION to both sides; None without samples."""
    if not times:
        return None
    ci_low, ci_high = ci_over_rounds(times, rounds)
    median_value = median(times)
    return (
        min(ci_low, median_value * (1 - RESOLUTION)),
        median_value,
        max(ci_high, median_value * (1 + RESOLUTION)),
    )


def _change_interval(
    before_interval: _Interval, after_interval: _Interval
) -> tuple[float, float] | Unavailable:
    if before_interval[0] <= 0:
        return Unavailable("the measured time is 0")
    return after_interval[0] / before_interval[2] - 1, after_interval[2] / before_interval[0] - 1


def _median_change(
    cycles_before: tuple[float, ...], cycles_after: tuple[float, ...]
) -> float | Unavailable:
    if not cycles_before or not cycles_after or not median(cycles_before):
        return Unavailable("the SM clock of a run is unknown")
    return median(cycles_after) / median(cycles_before) - 1


def _differences(before_case: CaseResult, after_case: CaseResult) -> Iterator[str]:
    yield from before_case.environment.differences_from(after_case.environment)
    yield from before_case.method.differences_from(after_case.method)
    for name, title in _COMPARED_SETTINGS.items():
        # A case that was not measured has no settings.
        if name in before_case.settings and name in after_case.settings:
            before_text, after_text = (
                _setting_text(name, case.settings[name]) for case in (before_case, after_case)
            )
            if before_text != after_text:
                yield f"{title}: {before_text} before, {after_text} after"


def _setting_text(name: str, value: object) -> str:
    if isinstance(value, int) and name.endswith("_bytes"):
        return format_bytes(value)
    return str(value).removeprefix("page cache ") or "default"


def _first_label(result: BenchResult) -> str:
    labels = [full_label(case) for case in result.results]
    return f"{labels[0]}{' ...' if len(labels) > 1 else ''}" if labels else "nothing"
