"""A comparison of two runs as a Document: the verdict first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.bench.compare import CaseComparison, Comparison, Verdict
from cudakit.bench.labels import count_cases, describe_common_axes, join_first_names, short_labels
from cudakit.bench.report.cases import cell
from cudakit.report.document import Column, Document, Node, Note, Ratio, Seconds, Table, Text, Value
from cudakit.units import Unavailable, format_ratio

_COLUMNS = (
    Column("case", "text"),
    Column("before", "number"),
    Column("after", "number"),
    Column("change", "number"),
    Column("95% CI", "number", is_optional=True),
    Column("in cycles", "number", is_optional=True),
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
    nodes: list[Node] = [_headline(comparison), _table(comparison), *_notes(comparison)]
    if failing_cases is not None:
        nodes.append(_fail_on_note(comparison, failing_cases))
    return Document(
        "Simulated: bench compare" if comparison.simulated else "bench compare", tuple(nodes)
    )


def _fail_on_note(comparison: Comparison, failing_cases: Sequence[CaseComparison]) -> Note:
    if not failing_cases:
        return Note("ok", "No case fails --fail-on.")
    labels = [
        label
        for case, label in zip(comparison.cases, short_labels(comparison.cases), strict=True)
        if case in failing_cases
    ]
    return Note("error", f"Failed by --fail-on: {join_first_names(labels, separator='; ')}.")


def _headline(comparison: Comparison) -> Note:
    verdict_counts = [
        f"{comparison.count(verdict)} {verdict.value}"
        for verdict in (Verdict.SLOWER, Verdict.FASTER, Verdict.AMBIGUOUS, Verdict.SAME)
        if comparison.count(verdict)
    ]
    slower_count = comparison.count(Verdict.SLOWER)
    headline_text = f"{count_cases(len(comparison.cases))}: {', '.join(verdict_counts)}."
    return Note("warn" if slower_count else "ok", headline_text)


def _table(comparison: Comparison) -> Table:
    cases = comparison.cases
    common_axes_text = describe_common_axes(cases) if len(cases) > 1 else ""
    return Table(
        _COLUMNS,
        tuple(map(_row, cases, short_labels(cases))),
        caption=(f"All cases: {common_axes_text}. " if common_axes_text else "")
        + "Change: of the median time. 95% CI: of this change; the CI of each median is widened to at "
        "least ±0.5%. In cycles: change of the median number of clock cycles (time × SM clock).",
        faint_rows=frozenset(i for i, case in enumerate(cases) if case.verdict is Verdict.SAME),
    )


def _row(case: CaseComparison, label: str) -> tuple[Value, ...]:
    interval = case.change_interval
    return (
        Text(label),
        cell(Seconds, case.before_s),
        cell(Seconds, case.after_s),
        cell(_signed_change, case.change),
        cell(_interval, interval),
        cell(_signed_change, case.cycles_change),
        Text(case.verdict.value),
    )


def _interval(interval: tuple[float, float]) -> Value:
    ci_low, ci_high = interval
    return Text(f"{_signed_text(ci_low)} to {_signed_text(ci_high)}")


def _signed_change(change: float) -> Value:
    return Text(_signed_text(change)) if change > -_SMALLEST_CHANGE else Ratio(change)


def _signed_text(change: float) -> str:
    if abs(change) < _SMALLEST_CHANGE:
        return format_ratio(abs(change))
    return f"{'+' if change > 0 else ''}{format_ratio(change)}"


def _notes(comparison: Comparison) -> Iterator[Note]:
    for difference in comparison.differences:
        yield Note("warn", f"The runs differ: {difference}.")
    label_by_id = dict(zip(map(id, comparison.cases), short_labels(comparison.cases), strict=True))
    cases_by_reason: dict[tuple[str, str], list[CaseComparison]] = {}
    for case in comparison.cases:
        if case.reason:
            cases_by_reason.setdefault((case.reason, _clock_direction(case)), []).append(case)
    for (reason, clock_direction), cases in cases_by_reason.items():
        titles_text = join_first_names([label_by_id[id(case)] for case in cases], separator="; ")
        yield Note(
            "warn", f"{titles_text}: {reason}{_describe_clock_change(clock_direction, cases)}."
        )
    labels_by_reason: dict[str, list[str]] = {}
    for case in comparison.cases:
        if isinstance(case.cycles_change, Unavailable) and not isinstance(case.change, Unavailable):
            labels_by_reason.setdefault(case.cycles_change.reason, []).append(label_by_id[id(case)])
    for reason, case_labels in labels_by_reason.items():
        titles_text = join_first_names(case_labels, separator="; ")
        yield Note("info", f"No change in cycles for {titles_text}: {reason}.")
    for run_title, labels_of_one_run in (
        ("BEFORE", comparison.only_before),
        ("AFTER", comparison.only_after),
    ):
        if labels_of_one_run:
            yield Note(
                "info",
                f"Only in {run_title}: {join_first_names(labels_of_one_run, separator='; ')}.",
            )


def _clock_direction(case: CaseComparison) -> str:
    """Return "lower" or "higher" if the SM clock explains the verdict, else ""."""
    if "in cycles" not in case.reason or isinstance(case.clock_change, Unavailable):
        return ""
    return "lower" if case.clock_change < 0 else "higher"


def _describe_clock_change(clock_direction: str, cases: Sequence[CaseComparison]) -> str:
    if not clock_direction:
        return ""
    changes = sorted(
        abs(case.clock_change) for case in cases if not isinstance(case.clock_change, Unavailable)
    )
    lowest, highest = (f"{change * 100:.1f}%" for change in (changes[0], changes[-1]))
    change_text = lowest if lowest == highest else f"{lowest} to {highest}"
    return f", because the SM clock was {change_text} {clock_direction}"
