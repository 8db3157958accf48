"""The health check as a Document: each figure with its expected value."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cudakit.core.bench.health import Figure, SuiteResult
from cudakit.core.bench.present.cases import cell
from cudakit.core.bench.present.columns import device_columns, result_columns, sample_columns
from cudakit.core.bench.present.facts import machine_facts, title
from cudakit.core.bench.present.labels import first_few
from cudakit.core.bench.present.notes import notes
from cudakit.core.bench.present.spread import sample_section
from cudakit.core.bench.result import BenchResult
from cudakit.core.bench.warnings import environment_warnings, environments
from cudakit.document import (
    Column,
    Document,
    Node,
    Note,
    Rate,
    Ratio,
    Seconds,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, format_ratio

_COLUMNS = (
    Column("figure", "text"),
    Column("reached", "number"),
    Column("expected", "number"),
    Column("of expected", "number"),
    Column("of limit", "number"),
    Column("health", "text"),
    Column("by", "text"),
)
_CAPTION = (
    "What is expected was measured on another GPU of the model, or is derived as a share of what the "
    "datasheet allows, or is a bound that times stay below on any machine."
)
_NO_CAUSE = (
    "look for other load on the GPU and the host: cudakit devices",
    "look for what is wrong with the set-up: cudakit doctor",
)


def present_health(suite: SuiteResult, *, detail: bool = False) -> Document:
    """Show whether the GPU is as fast as its kind.

    The Columns are for exports, as those of other benches; ``detail`` adds the distribution of the samples.
    """
    result = suite.bench
    nodes: list[Node] = [result_columns(result.results), _headline(suite)]
    rows = tuple(map(_row, suite.figures))
    judged = [not isinstance(one.health, Unavailable) for one in suite.figures]
    faint = frozenset(at for at, is_judged in enumerate(judged) if not is_judged)
    nodes += [Table(_COLUMNS, rows, _CAPTION, faint=faint)]
    nodes += [*_left_out(suite), *notes(_without_warnings(result))]
    if result.results:
        nodes += [
            machine_facts(result.results),
            sample_columns(result.results),
            device_columns(result.results[0].environment),
        ]
    if result.results and detail:
        nodes.append(sample_section(result.results))
    return Document(title(result), tuple(nodes))


def _headline(suite: SuiteResult) -> Note:
    """Return the verdict, the figures out of band, and likely causes."""
    judged = [one for one in suite.figures if not isinstance(one.health, Unavailable)]
    bad = [one for one in judged if one.is_out_of_band]
    if not judged:
        why = suite.health.reason if isinstance(suite.health, Unavailable) else "nothing ran"
        return Note("info", f"{_capital(why)}.")
    if not bad:
        return Note("ok", f"Pass: all {len(judged)} figures that are judged are as expected.")
    verdict = "Fail" if suite.health == "fail" else "Warn"
    text = f"{verdict}: {len(bad)} of {len(judged)} figures are out of band: {_named(bad)}."
    if suite.causes:
        text += f" Likely causes: {'; '.join(suite.causes)}."
    remedies = () if suite.causes else _NO_CAUSE
    return Note("error" if suite.health == "fail" else "warn", text, remedies)


def _named(figures: list[Figure]) -> str:
    """List the worst first, with their share of the expected value."""
    worst_first = sorted(figures, key=lambda one: one.health != "fail")
    return first_few([_in_words(one) for one in worst_first], most=4, separator=", ")


def _in_words(figure: Figure) -> str:
    if isinstance(figure.reached, Unavailable):
        return f"{figure.name} (no figure)"
    if isinstance(figure.band, Unavailable):
        return figure.name
    return f"{figure.name} ({format_ratio(figure.reached / figure.band.expected)} of expected)"


def _row(figure: Figure) -> tuple[Value, ...]:
    return (
        Text(figure.name),
        cell(lambda amount: _amount(amount, figure.unit), figure.reached),
        cell(lambda band: _amount(band.expected, band.unit), figure.band),
        _share(figure),
        cell(Ratio, figure.ratio_to_limit),
        cell(Text, figure.health),
        cell(lambda band: Text(band.source), figure.band),
    )


def _amount(amount: float, unit: str) -> Value:
    return Seconds(amount) if unit == "s" else Rate(amount, unit.removesuffix("/s"))


def _share(figure: Figure) -> Value:
    if isinstance(figure.band, Unavailable):
        return figure.band
    if isinstance(figure.reached, Unavailable):
        return figure.reached
    return Ratio(figure.reached / figure.band.expected)


def _left_out(suite: SuiteResult) -> Iterator[Note]:
    for one in suite.left_out:
        yield Note("warn", f"{one.what} was left out: {one.reason}.", (one.remedy,))


def _without_warnings(result: BenchResult) -> BenchResult:
    """Return the result without the warnings that the headline gives as causes."""
    said = environment_warnings(environments(result.results))
    return replace(result, warnings=tuple(each for each in result.warnings if each not in said))


def _capital(words: str) -> str:
    return words[:1].upper() + words[1:]
