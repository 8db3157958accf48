"""The health check as a Document: the verdict, then each figure with its expected value."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cudakit.bench.environment import environment_warnings
from cudakit.bench.health import Figure, SuiteResult
from cudakit.bench.labels import describe_sizes, join_first_names
from cudakit.bench.report.cases import cell, percent_of_peak
from cudakit.bench.report.columns import device_columns, result_columns, sample_columns
from cudakit.bench.report.facts import machine_facts, title
from cudakit.bench.report.notes import SIMULATED_NOTE, notes
from cudakit.bench.report.spread import sample_section
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.bench.summary import environments
from cudakit.report.document import (
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
from cudakit.units import Unavailable, capitalized, format_ratio

_MEASURED_COLUMNS = (Column("figure", "text"), Column("measured", "number"))
_EXPECTED_COLUMNS = (Column("expected", "number"), Column("of expected", "number"))
_PEAK_COLUMNS = (Column("% of peak", "number"),)
_VERDICT_COLUMNS = (Column("verdict", "text"), Column("source", "text"))
_CAPTION = (
    "Source of the expected value: measured (on another GPU of this model), derived (a fraction of the "
    "theoretical peak), or bound (a time that no healthy machine exceeds)."
)
_NEXT_STEPS = (
    "look for other load on the GPU and the host: cudakit devices",
    "check the set-up: cudakit doctor",
)


def present_health(suite: SuiteResult, *, detail: bool = False) -> Document:
    """Return the report of a health check; ``detail`` adds the distribution of the samples, for a page.

    The Columns are for exports such as CSV, as in the reports of other benches.
    """
    result = suite.bench
    nodes: list[Node] = [result_columns(result.results), _headline(suite), figure_table(suite)]
    # The note on simulated values is dropped, because the headline says the same.
    other_notes = [
        note for note in notes(_without_likely_causes(result)) if note.text != SIMULATED_NOTE
    ]
    nodes += [*_not_run(suite), *_without_expectation(suite), *other_notes]
    if result.results:
        nodes += [
            machine_facts(result.results),
            sample_columns(result.results),
            device_columns(result.results[0].environment),
        ]
    if result.results and detail:
        nodes.append(sample_section(result.results))
    is_assessed = any(not isinstance(figure.health, Unavailable) for figure in suite.figures)
    return Document(
        title(result) if is_assessed else f"{title(result)}, not assessed", tuple(nodes)
    )


def _headline(suite: SuiteResult) -> Note:
    """Return the verdict, the figures outside of their bands, and likely causes."""
    assessed_figures = [
        figure for figure in suite.figures if not isinstance(figure.health, Unavailable)
    ]
    abnormal_figures = [figure for figure in assessed_figures if figure.is_out_of_band]
    if not assessed_figures:
        reason = suite.health.reason if isinstance(suite.health, Unavailable) else "nothing was run"
        return Note("info", f"{capitalized(reason)}.")
    if not abnormal_figures:
        return Note("ok", f"Pass: all {len(assessed_figures)} assessed figures are as expected.")
    verdict = "Fail" if suite.health == "fail" else "Warning"
    figures_worst_first = sorted(abnormal_figures, key=lambda figure: figure.health != "fail")
    figure_names_text = join_first_names(
        [_describe_figure(figure) for figure in figures_worst_first], 4
    )
    text = (
        f"{verdict}: {len(abnormal_figures)} of {len(assessed_figures)} figures are not as expected: "
        f"{figure_names_text}."
    )
    if suite.causes:
        text += f" Likely causes: {'; '.join(suite.causes)}."
    remedies = () if suite.causes else _NEXT_STEPS
    return Note("error" if suite.health == "fail" else "warn", text, remedies)


def _describe_figure(figure: Figure) -> str:
    if isinstance(figure.reached, Unavailable):
        return f"{figure.name} (no value)"
    if isinstance(figure.band, Unavailable):
        return figure.name
    return f"{figure.name} ({format_ratio(figure.reached / figure.band.expected)} of expected)"


def figure_table(suite: SuiteResult) -> Table:
    """Return a row per figure, without expected values if no figure has one."""
    figures = suite.figures
    is_assessed = any(not isinstance(figure.band, Unavailable) for figure in figures)
    rows = tuple(
        _row(figure, case, is_assessed=is_assessed)
        for figure, case in zip(figures, suite.bench.results, strict=True)
    )
    sizes_text = describe_sizes(suite.bench.results)
    captions = [f"Sizes: {sizes_text}."] if sizes_text else []
    if not is_assessed:
        return Table((*_MEASURED_COLUMNS, *_PEAK_COLUMNS), rows, " ".join(captions))
    unassessed_figures = frozenset(
        i for i, figure in enumerate(figures) if isinstance(figure.health, Unavailable)
    )
    return Table(
        (*_MEASURED_COLUMNS, *_EXPECTED_COLUMNS, *_PEAK_COLUMNS, *_VERDICT_COLUMNS),
        rows,
        " ".join([*captions, _CAPTION]),
        faint_rows=unassessed_figures,
    )


def _row(figure: Figure, case: CaseResult, *, is_assessed: bool) -> tuple[Value, ...]:
    measured_cell = (
        Text(figure.name),
        cell(lambda amount: _amount(amount, figure.unit), figure.reached),
    )
    if not is_assessed:
        return (*measured_cell, percent_of_peak(case))
    return (
        *measured_cell,
        cell(lambda band: _amount(band.expected, band.unit), figure.band),
        _share(figure),
        percent_of_peak(case),
        cell(Text, figure.health),
        cell(lambda band: Text(band.source), figure.band),
    )


def _amount(amount: float, unit: str) -> Value:
    return Seconds(amount) if unit == "s" else Rate(amount, unit.removesuffix("/s"))


def _share(figure: Figure) -> Value:
    band = figure.band
    if isinstance(band, Unavailable):
        return band
    return cell(lambda amount: Ratio(amount / band.expected), figure.reached)


def _not_run(suite: SuiteResult) -> Iterator[Note]:
    for bench in suite.left_out:
        yield Note("warn", f"{bench.what} was not run: {bench.reason}.", (bench.remedy,))


def _without_expectation(suite: SuiteResult) -> Iterator[Note]:
    """Yield the reason why a figure lacks an expected value; nothing if all figures lack one."""
    names_by_reason: dict[str, list[str]] = {}
    for figure in suite.figures:
        if isinstance(figure.band, Unavailable):
            names_by_reason.setdefault(figure.band.reason, []).append(figure.name)
    if sum(map(len, names_by_reason.values())) < len(suite.figures):
        for reason, figure_names in names_by_reason.items():
            yield Note("info", f"No expected value for {_join_names(figure_names)}: {reason}.")


def _join_names(names: Sequence[str]) -> str:
    return join_first_names(list(dict.fromkeys(names)))


def _without_likely_causes(result: BenchResult) -> BenchResult:
    """Return the result without the warnings that the headline gives as likely causes."""
    likely_causes = environment_warnings(environments(result.results))
    return replace(
        result,
        warnings=tuple(warning for warning in result.warnings if warning not in likely_causes),
    )
