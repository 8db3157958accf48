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

from cudakit.bench.labels import (
    Axis,
    count_cases,
    describe_common_axes,
    full_label,
    join_first_names,
    short_labels,
)
from cudakit.bench.report.table import cell, text_range
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.bench.stats import RESOLUTION, ci_over_rounds
from cudakit.errors import InputError, UsageError
from cudakit.report.document import Column, Document, Node, Note, Ratio, Seconds, Table, Text, Value
from cudakit.units import Unavailable, format_bytes, format_ratio, parse_ratio

# Lower end of the CI, median, upper end of the CI.
_Interval: TypeAlias = tuple[float, float, float]

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


def compare(
    before_result: BenchResult, after_result: BenchResult, *, force: bool = False
) -> Comparison:
    """Compare the common cases of two runs.

    Raises InputError if the runs have no common case or, unless ``force``, differ in environment or method.
    """
    cases_before = {case.key: case for case in before_result.results}
    cases_after = {case.key: case for case in after_result.results}
    pairs = [(cases_before[key], case) for key, case in cases_after.items() if key in cases_before]
    if not pairs:
        raise InputError(
            f"the two runs have no case in common: BEFORE has {_first_label(before_result)}, AFTER has"
            f" {_first_label(after_result)}",
            hint="run the same benchmark with the same options twice",
        )
    differences = tuple(dict.fromkeys(it for pair in pairs for it in _differences(*pair)))
    if differences and not force:
        raise InputError(
            f"the two runs are not comparable: {'; '.join(differences)}",
            hint="repeat the measurement on the same machine with the same options, or add --ignore-mismatch",
        )
    return Comparison(
        simulated=before_result.simulated or after_result.simulated,
        differences=differences,
        cases=tuple(compare_case(*pair) for pair in pairs),
        only_before=tuple(
            full_label(it) for it in before_result.results if it.key not in cases_after
        ),
        only_after=tuple(
            full_label(it) for it in after_result.results if it.key not in cases_before
        ),
    )


def compare_case(before: CaseResult, after: CaseResult) -> CaseComparison:
    """Return the verdict and the changes of one case."""
    missing = [
        f"no time in {name}: {case.median_s.reason}"
        for case, name in ((before, "BEFORE"), (after, "AFTER"))
        if isinstance(case.median_s, Unavailable)
    ]
    reason = "; ".join(missing) or _differing_work(before, after)
    if isinstance(before.median_s, Unavailable) and before.median_s == after.median_s:
        reason = f"no time in either run: {before.median_s.reason}"
    verdict, no_time = Verdict.AMBIGUOUS, Unavailable("the measured time is 0")
    change: float | Unavailable = Unavailable(reason)
    change_interval: tuple[float, float] | Unavailable = Unavailable(reason)
    if not reason:
        first, second = (_interval(case.samples_s, case.rounds) for case in (before, after))
        verdict, reason = _verdict(before, after, first, second)
        change = second[1] / first[1] - 1 if first[1] else no_time
        change_interval = (
            (second[0] / first[2] - 1, second[2] / first[0] - 1) if first[0] else no_time
        )
    return CaseComparison(
        name=after.name,
        axes=after.axes,
        library=after.library,
        verdict=verdict,
        before_s=before.median_s,
        after_s=after.median_s,
        change=change,
        change_interval=change_interval,
        clock_change=_median_change(before.sm_clock_hz, after.sm_clock_hz),
        cycles_change=change
        if isinstance(change, Unavailable)
        else _median_change(before.cycles, after.cycles),
        reason=reason,
    )


def _verdict(
    before: CaseResult, after: CaseResult, first: _Interval, second: _Interval
) -> tuple[Verdict, str]:
    """Return the verdict on two intervals, and the reason if it differs from the one on their times."""
    in_time = _verdict_from_intervals(first, second)
    if in_time is Verdict.AMBIGUOUS:
        reason = "the confidence intervals overlap, but a median is outside of the other interval"
        return in_time, reason
    if in_time is Verdict.SAME or not (before.sm_clock_hz and after.sm_clock_hz):
        return in_time, ""
    in_cycles = _verdict_from_intervals(
        _interval(before.cycles, before.rounds), _interval(after.cycles, after.rounds)
    )
    if in_cycles is in_time:
        return in_time, ""
    cycles_text = "the same" if in_cycles is Verdict.SAME else in_cycles.value
    return Verdict.AMBIGUOUS, f"{in_time.value} in time, {cycles_text} in cycles"


def _differing_work(before: CaseResult, after: CaseResult) -> str:
    """Describe the different numbers of operations in one execution of two runs; "" if they are equal."""
    names = [it for it in _COUNTED_OPERATIONS if it in before.settings and it in after.settings]
    before_text, after_text = (
        " and ".join(f"{case.settings[name]} {_COUNTED_OPERATIONS[name]}" for name in names)
        for case in (before, after)
    )
    if before_text == after_text:
        return ""
    return f"the times are those of {before_text} in BEFORE, and of {after_text} in AFTER"


def _verdict_from_intervals(first: _Interval, second: _Interval) -> Verdict:
    if second[2] < first[0]:
        return Verdict.FASTER
    if second[0] > first[2]:
        return Verdict.SLOWER
    is_mutual = first[0] <= second[1] <= first[2] and second[0] <= first[1] <= second[2]
    return Verdict.SAME if is_mutual else Verdict.AMBIGUOUS


def _interval(times: tuple[float, ...], rounds: tuple[int, ...]) -> _Interval:
    """Return the CI of the median, with at least RESOLUTION to both sides."""
    low, high = ci_over_rounds(times, rounds)
    middle = median(times)
    return min(low, middle * (1 - RESOLUTION)), middle, max(high, middle * (1 + RESOLUTION))


def _median_change(before: tuple[float, ...], after: tuple[float, ...]) -> float | Unavailable:
    if not before or not after or not median(before):
        return Unavailable("the SM clock of a run is unknown")
    return median(after) / median(before) - 1


def _differences(before: CaseResult, after: CaseResult) -> Iterator[str]:
    yield from before.environment.differences_from(after.environment)
    yield from before.method.differences_from(after.method)
    for name, title in _COMPARED_SETTINGS.items():
        # A case that was not measured has no settings.
        if name in before.settings and name in after.settings:
            values = (before.settings[name], after.settings[name])
            first, second = (
                format_bytes(value)
                if isinstance(value, int) and name.endswith("_bytes")
                else str(value).removeprefix("page cache ") or "default"
                for value in values
            )
            if first != second:
                yield f"{title}: {first} before, {second} after"


def _first_label(result: BenchResult) -> str:
    labels = [full_label(case) for case in result.results]
    return f"{labels[0]}{' ...' if len(labels) > 1 else ''}" if labels else "nothing"


# --- conditions that fail a comparison ----------------------------------------------------------------


# A verdict that fails a comparison, and the minimum relative change of the median.
FailOn: TypeAlias = tuple[Verdict, float]


def failing_cases(
    comparison: Comparison, conditions: Sequence[FailOn]
) -> tuple[CaseComparison, ...]:
    """Return the cases that meet a condition, and those whose time only the later run lacks.

    A case meets a condition if it has the verdict, and more than the minimum change or an unknown change.
    Cases that lack a time in both runs count if the reasons differ.
    """
    return tuple(
        case
        for case in comparison.cases
        if (isinstance(case.after_s, Unavailable) and case.after_s != case.before_s)
        or any(
            case.verdict is verdict
            and (isinstance(case.change, Unavailable) or abs(case.change) > min_change)
            for verdict, min_change in conditions
        )
    )


def parse_fail_on(text: str) -> FailOn:
    """Parse ``slower``, ``slower:5%``, ``faster:0.1`` or ``ambiguous``; raises UsageError for other text."""
    verdict_word, colon, threshold_text = text.strip().partition(":")
    verdicts = {verdict.value: verdict for verdict in Verdict if verdict is not Verdict.SAME}
    try:
        verdict = verdicts[verdict_word]
        min_change = parse_ratio(threshold_text) if colon else 0.0
    except (KeyError, ValueError):
        raise UsageError(
            f"--fail-on {text!r} is not valid",
            hint=f"choose from {', '.join(verdicts)}, each with an optional change: slower:5%",
        ) from None
    if min_change > 1 and not threshold_text.endswith("%"):
        raise UsageError(
            f"--fail-on {text!r} is ambiguous", hint=f"write {verdict_word}:{threshold_text}%"
        )
    return verdict, min_change


# --- the report: the verdict first --------------------------------------------------------------------

_COLUMNS = (
    Column("case", "text"),
    *(Column(title, "number") for title in ("before", "after", "change")),
    *(Column(title, "number", is_optional=True) for title in ("95% CI", "in cycles")),
    Column("verdict", "text"),
)
# Changes below this ratio are shown without a sign: "<0.1%".
_SMALLEST_CHANGE = 0.001


def present_comparison(
    comparison: Comparison, failing_cases: Sequence[CaseComparison] | None = None
) -> Document:
    """Return the report of a comparison: the number of cases per verdict, a row per case, then reasons.

    ``failing_cases`` are the cases that meet a condition of ``--fail-on``; None without a condition.
    """
    cases = comparison.cases
    labels = short_labels(cases)
    counts = {
        verdict: sum(case.verdict is verdict for case in cases)
        for verdict in (Verdict.SLOWER, Verdict.FASTER, Verdict.AMBIGUOUS, Verdict.SAME)
    }
    counts_text = ", ".join(f"{count} {it.value}" for it, count in counts.items() if count)
    headline = f"{count_cases(len(cases))}: {counts_text}."
    common_axes = describe_common_axes(cases) if len(cases) > 1 else ""
    table = Table(
        _COLUMNS,
        tuple(map(_row, cases, labels)),
        caption=(f"All cases: {common_axes}. " if common_axes else "")
        + "Change: of the median time. 95% CI: of this change; the CI of each median is widened to at "
        "least ±0.5%. In cycles: change of the median number of clock cycles (time × SM clock).",
        faint_rows=frozenset(i for i, case in enumerate(cases) if case.verdict is Verdict.SAME),
    )
    nodes: list[Node] = [
        Note("warn" if counts[Verdict.SLOWER] else "ok", headline),
        table,
        *_notes(comparison, labels),
    ]
    if failing_cases:
        failed = [label for case, label in zip(cases, labels, strict=True) if case in failing_cases]
        failed_text = join_first_names(failed, separator="; ")
        nodes.append(Note("error", f"Failed by --fail-on: {failed_text}."))
    elif failing_cases is not None:
        nodes.append(Note("ok", "No case fails --fail-on."))
    title = "Simulated: bench compare" if comparison.simulated else "bench compare"
    return Document(title, tuple(nodes))


def _row(case: CaseComparison, label: str) -> tuple[Value, ...]:
    def signed(change: float) -> Value:
        return Text(_signed_text(change)) if change > -_SMALLEST_CHANGE else Ratio(change)

    return (
        Text(label),
        cell(Seconds, case.before_s),
        cell(Seconds, case.after_s),
        cell(signed, case.change),
        cell(lambda ends: Text(" to ".join(map(_signed_text, ends))), case.change_interval),
        cell(signed, case.cycles_change),
        Text(case.verdict.value),
    )


def _signed_text(change: float) -> str:
    if abs(change) < _SMALLEST_CHANGE:
        return format_ratio(abs(change))
    return f"{'+' if change > 0 else ''}{format_ratio(change)}"


def _notes(comparison: Comparison, labels: Sequence[str]) -> Iterator[Note]:
    for difference in comparison.differences:
        yield Note("warn", f"The runs differ: {difference}.")
    doubtful: dict[tuple[str, str], list[tuple[str, float]]] = {}
    without_cycles: dict[str, list[str]] = {}
    for case, label in zip(comparison.cases, labels, strict=True):
        # The SM clock explains a verdict that differs in cycles.
        clock_change, direction = 0.0, ""
        if "in cycles" in case.reason and not isinstance(case.clock_change, Unavailable):
            direction = "lower" if case.clock_change < 0 else "higher"
            clock_change = abs(case.clock_change)
        if case.reason:
            doubtful.setdefault((case.reason, direction), []).append((label, clock_change))
        if isinstance(case.cycles_change, Unavailable) and not isinstance(case.change, Unavailable):
            without_cycles.setdefault(case.cycles_change.reason, []).append(label)
    for (reason, direction), labelled_changes in doubtful.items():
        cases_text = join_first_names([label for label, _ in labelled_changes], separator="; ")
        changes = sorted(change for _, change in labelled_changes)
        span = text_range(f"{changes[0] * 100:.1f}%", f"{changes[-1] * 100:.1f}%")
        cause = f", because the SM clock was {span} {direction}" if direction else ""
        yield Note("warn", f"{cases_text}: {reason}{cause}.")
    for reason, case_labels in without_cycles.items():
        cases_text = join_first_names(case_labels, separator="; ")
        yield Note("info", f"No change in cycles for {cases_text}: {reason}.")
    for name, only in (("BEFORE", comparison.only_before), ("AFTER", comparison.only_after)):
        if only:
            yield Note("info", f"Only in {name}: {join_first_names(only, separator='; ')}.")
