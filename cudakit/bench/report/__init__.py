"""Results of ``cudakit bench`` as Documents."""

from __future__ import annotations

from cudakit.bench.benchmarks import words_of_bench
from cudakit.bench.report.curves import roofline_section, sweeps
from cudakit.bench.report.lanes import baseline_sections, sample_section
from cudakit.bench.report.notes import machine_facts, notes, title
from cudakit.bench.report.table import cases_table, device_columns, result_columns, sample_columns
from cudakit.bench.result import BenchResult
from cudakit.report.document import Document, Node


def present(result: BenchResult, *, detail: bool = False) -> Document:
    """Return the report of a result: the table, notes, then the measurement method.

    ``detail`` adds charts and the distribution of the samples, for a page. The Columns ``results``,
    ``samples`` and ``device`` are for exports and charts.
    """
    cases, answer = result.results, words_of_bench(result.bench).answer
    nodes: list[Node] = [result_columns(cases)]
    if answer:
        nodes += answer(result)
    elif cases:
        nodes.append(cases_table(cases))
    samples = sample_columns(cases)
    nodes += [*notes(result), samples]
    if cases:
        nodes += [machine_facts(result), device_columns(cases[0].environment)]
    if cases and detail:
        nodes += sweeps(cases, result.graphs)
        nodes += roofline_section(cases)
        nodes += baseline_sections(cases)
        nodes.append(sample_section(samples))
    return Document(title(result), tuple(nodes))
