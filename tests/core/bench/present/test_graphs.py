from __future__ import annotations

from typing import Any

from core.bench.made import gemm, machine, times

from cudakit.core.bench.method import Method
from cudakit.core.bench.present.graphs import graph_section
from cudakit.core.bench.result import CaseResult, case_result
from cudakit.document import Section, Table, Text

STEPS = {"capture": 6e-6, "instantiate": 4e-6, "run": 1e-6, "replay": 5e-6, "eager": 7e-6}


def graph(nodes: int, **steps: float) -> list[CaseResult]:
    given: dict[str, Any] = {"method": Method("host", "hot"), "environment": machine()}
    return [
        case_result("graph", {"topology": "chain", "nodes": nodes, "step": step}, times(s), **given)
        for step, s in steps.items()
    ]


def table(cases: list[CaseResult]) -> Table:
    (section,) = graph_section(cases)
    assert isinstance(section, Section)
    (found,) = section.nodes
    assert isinstance(found, Table)
    return found


def test_a_graph_has_a_row_with_what_it_costs_and_when_it_pays() -> None:
    first, second = table([*graph(1, **STEPS), *graph(3, **{**STEPS, "run": 2e-6})]).rows

    assert first[:2] != second[:2]
    # Ten microseconds to make, two saved by each replay.
    assert isinstance(first[-1], Text)
    assert abs(float(first[-1].value) - 5) < 0.1


def test_without_steps_to_conclude_from_there_is_no_table() -> None:
    assert list(graph_section(graph(1, launch=1e-6))) == []
    assert list(graph_section([gemm()])) == []
