"""How the samples of each case are spread."""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.core.bench.present.labels import short_labels
from cudakit.core.bench.present.spread import spread
from cudakit.core.bench.result import CaseResult
from cudakit.core.bench.stats import Summary
from cudakit.document import Column, Count, Seconds, Table, Text, Value, View

_TITLES = ("case", "samples", "min", "q1", "median", "q3", "p99", "max", "shape")


def distribution(cases: Sequence[CaseResult]) -> View:
    """Show every sample of the Columns ``samples``, around the medians of the Columns ``results``."""
    return View("sample-spread", ("samples", "results"), spread, distribution_table(cases))


def distribution_table(cases: Sequence[CaseResult]) -> Table:
    """Give quartiles and extremes, a row for each case that has figures."""
    rows = [
        _row(name, case.statistics)
        for name, case in zip(short_labels(cases), cases, strict=True)
        if isinstance(case.statistics, Summary)
    ]
    columns = (
        Column(title, "text" if title in ("case", "shape") else "number") for title in _TITLES
    )
    return Table(tuple(columns), tuple(rows))


def _row(name: str, found: Summary) -> tuple[Value, ...]:
    times = (
        found.minimum_s,
        found.q1_s,
        found.median_s,
        found.q3_s,
        found.p99_s,
        found.maximum_s,
    )
    return (Text(name), Count(found.n), *map(Seconds, times), Text(_shape(found)))


def _shape(found: Summary) -> str:
    flags = (("drifts", found.trend), ("two groups", found.bimodal))
    return ", ".join(word for word, set_ in flags if set_)
