from __future__ import annotations

from collections.abc import Mapping

import pytest
from core.bench.made import machine, times

from cudakit.core.bench.graph_costs import GraphCost, graph_costs
from cudakit.core.bench.method import Method
from cudakit.core.bench.result import CaseResult, case_result
from cudakit.units import Unavailable

STEPS = {"capture": 20e-6, "instantiate": 10e-6, "run": 5e-6, "replay": 8e-6, "eager": 11e-6}


def measured(
    steps: Mapping[str, float], *, nodes: int = 1, topology: str = "chain"
) -> list[CaseResult]:
    return [
        case_result(
            "graph",
            {"step": step, "topology": topology, "nodes": nodes},
            times(median_s),
            method=Method("host", "hot"),
            environment=machine(),
        )
        for step, median_s in steps.items()
    ]


def cost(*cases: list[CaseResult]) -> tuple[GraphCost, ...]:
    return graph_costs([case for some in cases for case in some])


def test_a_graph_has_paid_when_its_replays_saved_what_it_took_to_make() -> None:
    (only,) = cost(measured(STEPS))

    assert only.made_s == pytest.approx(30e-6, rel=0.01)
    assert only.saved_s == pytest.approx(3e-6, rel=0.05)
    assert only.break_even == pytest.approx(10, rel=0.05)
    assert only.node_s == Unavailable("there is no smaller graph to compare it with")


def test_a_node_costs_what_the_larger_graph_takes_longer() -> None:
    cases = [
        measured({"run": 5e-6 + nodes * 1e-6}, nodes=nodes, topology=topology)
        for nodes in (101, 1, 11)
        for topology in ("fork-join", "chain")
    ]
    found = cost(*cases)

    assert [(one.topology, one.nodes) for one in found] == [
        *(("chain", nodes) for nodes in (1, 11, 101)),
        *(("fork-join", nodes) for nodes in (1, 11, 101)),
    ]
    for one in found:
        if one.nodes > 1:
            assert one.node_s == pytest.approx(1e-6, rel=0.05)


def test_what_saves_nothing_never_pays() -> None:
    (only,) = cost(measured({**STEPS, "replay": 12e-6}))

    assert only.break_even == Unavailable("a replay takes no less time")


def test_what_saves_less_than_medians_differ_by_themselves_never_pays() -> None:
    (only,) = cost(measured({**STEPS, "replay": 10.99e-6}))

    assert only.break_even == Unavailable("a replay takes no less time")


def test_a_step_that_was_left_out_is_named() -> None:
    (only,) = cost(measured({"run": 5e-6}))

    assert only.saved_s == Unavailable("the step eager was not measured")
    assert only.made_s == Unavailable("the step capture was not measured")
    assert only.break_even == Unavailable("the step eager was not measured")
