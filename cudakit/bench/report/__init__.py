"""Results of ``cudakit bench`` as Documents."""

from __future__ import annotations

from cudakit.bench.report.baselines import baseline_sections
from cudakit.bench.report.cases import cases_table
from cudakit.bench.report.columns import device_columns, result_columns, sample_columns
from cudakit.bench.report.curves import sweeps
from cudakit.bench.report.facts import machine_facts, title
from cudakit.bench.report.graphs import graph_section
from cudakit.bench.report.notes import notes
from cudakit.bench.report.overlap import overlap_answers
from cudakit.bench.report.roofline import roofline_section
from cudakit.bench.report.spread import sample_section
from cudakit.bench.result import BenchResult
from cudakit.report.document import Document, Node


def present(result: BenchResult, *, detail: bool = False) -> Document:
    """Return the report of a result: the table, notes, then the measurement method.

    ``detail`` adds charts and the distribution of the samples, for a page. The Columns ``results``,
    ``samples`` and ``device`` are for exports and charts.
    """
    cases = result.results
    nodes: list[Node] = [result_columns(cases), *overlap_answers(result.overlaps)]
    if cases and not result.overlaps:
        nodes.append(cases_table(cases))
    nodes += [
        *graph_section(result.graphs),
        *notes(result),
        sample_columns(cases),
    ]
    if cases:
        nodes += [machine_facts(cases, result.collectives), device_columns(cases[0].environment)]
    if cases and detail:
        nodes += sweeps(cases, result.graphs)
        nodes += roofline_section(cases)
        nodes += baseline_sections(cases)
        nodes.append(sample_section(cases))
    return Document(title(result), tuple(nodes))
