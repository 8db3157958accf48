"""Words: what the report of one benchmark says, and those of others do not. They are in its file."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from cudakit.bench.result import BenchResult, CaseResult
from cudakit.report.document import Node, Table, Value

_Sentence = Callable[[Sequence[CaseResult]], str]


def _nothing(cases: Sequence[CaseResult]) -> str:  # noqa: ARG001
    return ""


@dataclass(frozen=True, slots=True)
class Words:
    """The words of a benchmark; sentences are "" if they do not apply to the cases."""

    size: _Sentence = (
        _nothing  # What the size and the time of a case are, in the caption of the table.
    )
    rate: _Sentence = _nothing  # What bytes a rate counts, if they are not the size of the case.
    peak: _Sentence = _nothing  # What is compared with the peak, if it is not the rate.
    timing: Callable[[CaseResult], str] = lambda _: (
        ""
    )  # What a sample times, if the mode does not say it.
    # Whether the rate is shown in narrow tables with baselines too, beside the relative rate.
    always_rate: bool = False
    # The table of cases, with a column for each common axis or without; None: a row per case.
    table: Callable[[Sequence[CaseResult], bool], Table | None] = lambda *_: None
    # What is shown instead of the table of cases; None: the table.
    answer: Callable[[BenchResult], Iterable[Node]] | None = None
    # The cases that notes name: a case per row of the table.
    rows: Callable[[BenchResult], Sequence[CaseResult]] = lambda result: result.results
    # Rows below the table, among those of the machine.
    facts: Callable[[BenchResult], list[tuple[str, Value]]] = lambda _: []
