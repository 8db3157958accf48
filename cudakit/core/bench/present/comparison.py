"""A comparison of two runs as a Document: the verdict first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.core.bench.compare import CaseComparison, Comparison, Verdict, label
from cudakit.core.bench.present.cases import cell
from cudakit.core.bench.present.labels import first_few
from cudakit.document import Column, Document, Note, Ratio, Seconds, Table, Text, Value
from cudakit.units import Unavailable, format_ratio

_COLUMNS = (
    Column("case", "text"),
    Column("before", "number"),
    Column("after", "number"),
    Column("change", "number"),
    Column("least", "number"),
    Column("most", "number"),
    Column("in cycles", "number"),
    Column("verdict", "text"),
)


def present_comparison(comparison: Comparison) -> Document:
    """Show the verdict on each case; unchanged ones are faint."""
    return Document(
        "Simulated: bench compare" if comparison.simulated else "bench compare",
        (_headline(comparison), _table(comparison), *_remarks(comparison)),
    )


def _headline(comparison: Comparison) -> Note:
    counts = [
        f"{comparison.count(verdict)} {verdict.value}"
        for verdict in (Verdict.SLOWER, Verdict.FASTER, Verdict.AMBIGUOUS, Verdict.SAME)
        if comparison.count(verdict)
    ]
    slower = comparison.count(Verdict.SLOWER)
    return Note("error" if slower else "ok", f"{', '.join(counts)}.".capitalize())


def _table(comparison: Comparison) -> Table:
    cases = comparison.cases
    return Table(
        _COLUMNS,
        tuple(map(_row, cases)),
        caption="Change of the median time, and the least and the most that it may be.",
        faint=frozenset(at for at, case in enumerate(cases) if case.verdict is Verdict.SAME),
    )


def _row(case: CaseComparison) -> tuple[Value, ...]:
    interval = case.change_interval
    least, most = (interval,) * 2 if isinstance(interval, Unavailable) else interval
    return (
        Text(label(case)),
        cell(Seconds, case.before_s),
        cell(Seconds, case.after_s),
        cell(_change, case.change),
        cell(_change, least),
        cell(_change, most),
        cell(_change, case.cycles_change),
        Text(case.verdict.value),
    )


def _change(value: float) -> Value:
    return Text(f"+{format_ratio(value)}") if value > 0 else Ratio(value)


def _remarks(comparison: Comparison) -> Iterator[Note]:
    for line in comparison.differences:
        yield Note("warn", f"The runs are not alike: {line}.")
    reasons: dict[tuple[str, str], list[CaseComparison]] = {}
    for case in comparison.cases:
        if case.reason:
            reasons.setdefault((case.reason, _clock_word(case)), []).append(case)
    for (reason, clock), cases in reasons.items():
        which = first_few([label(case) for case in cases])
        yield Note("warn", f"{which}: {reason}{_clock_words(clock, cases)}.")
    for run, names in (("earlier", comparison.only_before), ("later", comparison.only_after)):
        if names:
            yield Note("info", f"Only in the {run} run: {first_few(names)}.")


def _clock_word(case: CaseComparison) -> str:
    """Return how the clock changed if the verdict depends on cycles, else ""."""
    if "in cycles" not in case.reason or isinstance(case.clock_change, Unavailable):
        return ""
    return "lower" if case.clock_change < 0 else "higher"


def _clock_words(word: str, cases: Sequence[CaseComparison]) -> str:
    if not word:
        return ""
    known = [each.clock_change for each in cases]
    changes = sorted(abs(each) for each in known if not isinstance(each, Unavailable))
    least, most = (f"{each * 100:.1f}" for each in (changes[0], changes[-1]))
    by = f"{most} %" if least == most else f"{least} to {most} %"
    return f": the clock was {by} {word}"
