"""Results of ``cudakit bench`` as Documents."""

from __future__ import annotations

from cudakit.core.bench.present.baselines import baseline_sections
from cudakit.core.bench.present.cases import cases_table
from cudakit.core.bench.present.columns import device_columns, result_columns, sample_columns
from cudakit.core.bench.present.curves import sweeps
from cudakit.core.bench.present.facts import machine_facts, title
from cudakit.core.bench.present.graphs import graph_section
from cudakit.core.bench.present.notes import notes
from cudakit.core.bench.present.roofline import roofline_section
from cudakit.core.bench.present.spread import sample_spread
from cudakit.core.bench.result import BenchResult
from cudakit.document import Document, Node, Section


def present(result: BenchResult, *, detail: bool = False) -> Document:
    """Show the figures, their limits, and warnings.

    ``detail`` adds charts and the distribution of the samples, for a page. The Columns ``results`` are for
    exports, and come first.
    """
    nodes: list[Node] = [result_columns(result.results)]
    if result.results:
        nodes += [machine_facts(result.results), cases_table(result.results)]
    nodes += [*graph_section(result.graphs), *notes(result)]
    nodes += _exports(result)
    if detail and result.results:
        nodes += _detail(result)
    return Document(title(result), tuple(nodes))


def _exports(result: BenchResult) -> list[Node]:
    samples = sample_columns(result.results)
    return [samples, *(device_columns(case.environment) for case in result.results[:1])]


def _detail(result: BenchResult) -> list[Node]:
    cases = result.results
    samples = Section("Distribution of the samples", (sample_spread(cases),))
    return [
        *sweeps(cases, result.graphs),
        *roofline_section(cases),
        *baseline_sections(cases),
        samples,
    ]
