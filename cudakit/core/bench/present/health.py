"""The health check as a Document: each figure beside what a GPU of this model reaches."""

from __future__ import annotations

from collections.abc import Sequence

from cudakit.core.bench.bands import Band, Judgement, figure_of
from cudakit.core.bench.present.cases import rate
from cudakit.core.bench.present.columns import result_columns
from cudakit.core.bench.present.machine import title
from cudakit.core.bench.present.notes import notes
from cudakit.core.bench.result import BenchResult
from cudakit.document import Column, Document, Node, Note, Rate, Ratio, Table, Text, Value
from cudakit.units import Unavailable

_COLUMNS = (
    Column("figure", "text"),
    Column("rate", "number"),
    Column("expected", "number"),
    Column("of expected", "number"),
    Column("of limit", "number"),
    Column("health", "text"),
)


def present_health(result: BenchResult, judgements: Sequence[Judgement]) -> Document:
    """Show whether the GPU is as fast as its kind."""
    nodes: tuple[Node, ...] = (
        result_columns(result.results),
        _headline(result, judgements),
        Table(_COLUMNS, tuple(map(_row, judgements))),
        *notes(result),
    )
    return Document(title(result), nodes)


def _headline(result: BenchResult, judgements: Sequence[Judgement]) -> Note:
    judged = [one.health for one in judgements if not isinstance(one.health, Unavailable)]
    if "fail" in judged:
        text = f"{judged.count('fail')} of {len(judged)} figures are too low for this GPU, or withheld."
        return Note("error", text)
    if "warn" in judged:
        text = (
            f"{judged.count('warn')} of {len(judged)} figures are not quite what this GPU reaches."
        )
        return Note("warn", text)
    if judged:
        return Note("ok", f"All {len(judged)} figures that are judged are what this GPU reaches.")
    gpu = result.results[0].environment.gpu if result.results else Unavailable("nothing ran")
    name = "this GPU" if isinstance(gpu, Unavailable) else gpu
    return Note("info", f"No expectation is known of {name}: figures are shown, not judged.")


def _row(judgement: Judgement) -> tuple[Value, ...]:
    case, expected = judgement.case, judgement.band
    reached = rate(case)
    return (
        Text(figure_of(case)),
        reached,
        Rate(expected.expected, expected.unit) if isinstance(expected, Band) else expected,
        _share(reached, expected),
        case.ratio_to_limit
        if isinstance(case.ratio_to_limit, Unavailable)
        else Ratio(case.ratio_to_limit),
        judgement.health if isinstance(judgement.health, Unavailable) else Text(judgement.health),
    )


def _share(reached: Value, expected: Band | Unavailable) -> Value:
    if isinstance(expected, Unavailable):
        return expected
    return Ratio(reached.value / expected.expected) if isinstance(reached, Rate) else reached
