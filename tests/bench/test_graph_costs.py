from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from bench.example_results import gemm, machine, result, samples_near
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.case import Method
from cudakit.bench.graph import fit, graph_costs
from cudakit.bench.load import load_result
from cudakit.bench.result import BreakEven, CaseResult, GraphCosts, StepCost
from cudakit.bench.stats import Samples
from cudakit.bench.summary import case_result
from cudakit.report.json import render
from cudakit.units import Unavailable

STEPS = {"capture": 20e-6, "instantiate": 10e-6, "run": 5e-6, "replay": 8e-6, "eager": 11e-6}
AMOUNTS = st.floats(1e-9, 1e-3)


def step_results(
    steps: Mapping[str, float], *, nodes: int = 1, topology: str = "chain", kind: str = "kernel"
) -> list[CaseResult]:
    return [
        case_result(
            "graph",
            {"step": step, "topology": topology, "kind": kind, "nodes": nodes},
            samples_near(median_s),
            method=Method("host", "hot"),
            environment=machine(),
        )
        for step, median_s in steps.items()
    ]


def costs(*cases: Sequence[CaseResult]) -> tuple[GraphCosts, ...]:
    return graph_costs([case for group in cases for case in group])


def break_even(steps: Mapping[str, float]) -> BreakEven:
    ((point,),) = (graph.payoffs for graph in costs(step_results(steps)))
    return point


def test_break_even_is_creation_over_saving() -> None:
    fitted = break_even(STEPS)

    assert fitted.made_s == pytest.approx(30e-6, rel=0.01)
    assert fitted.saved_s == pytest.approx(3e-6, rel=0.05)
    assert fitted.replays == pytest.approx(10, rel=0.05)


def test_graph_without_saving_has_no_break_even() -> None:
    assert break_even({**STEPS, "replay": 12e-6}).replays == Unavailable("a replay saves no time")


def test_saving_below_resolution_has_no_break_even() -> None:
    fitted = break_even({**STEPS, "replay": 10.99e-6})

    assert fitted.replays == Unavailable("a replay saves no time")


def test_break_even_names_missing_step() -> None:
    fitted = break_even({"run": 5e-6})

    assert fitted.saved_s == Unavailable("the step eager was not measured")
    assert fitted.made_s == Unavailable("the step capture was not measured")
    assert fitted.replays == Unavailable("the step eager was not measured")


def test_step_time_is_fitted_by_number_of_nodes() -> None:
    cases = [
        step_results({"launch": 2.5e-6 + nodes * 1e-9, "run": nodes * 2e-6}, nodes=nodes)
        for nodes in (512, 1, 4096)
    ]
    ((launch, run),) = (graph.steps for graph in costs(*cases))

    assert (launch.step, run.step) == ("launch", "run")
    assert launch.fixed_s == pytest.approx(2.5e-6, rel=0.01)
    assert launch.node_s == pytest.approx(1e-9, rel=0.01)
    assert run.fixed_s == pytest.approx(0, abs=5e-9)
    assert run.node_s == pytest.approx(2e-6, rel=0.01)
    assert all(float(str(step.deviation)) < 0.01 for step in (launch, run))


def test_fit_has_maximum_deviation() -> None:
    cases = [step_results({"run": 1e-6 * nodes**0.5}, nodes=nodes) for nodes in (1, 64, 4096)]
    ((run,),) = (graph.steps for graph in costs(*cases))

    assert isinstance(run.deviation, float)
    assert run.deviation > 0.3


def test_one_size_has_no_fit() -> None:
    ((run,),) = (graph.steps for graph in costs(step_results({"run": 1e-6})))

    assert run == StepCost("run", *[Unavailable("a fit needs graphs of two sizes")] * 3)


def test_size_without_time_is_not_fitted() -> None:
    (unmeasured,) = step_results({"run": 1.0}, nodes=50)
    withheld = case_result(
        "graph",
        unmeasured.axes,
        Samples(()),
        method=unmeasured.method,
        environment=unmeasured.environment,
    )
    measured_cases = [step_results({"run": nodes * 1e-6}, nodes=nodes) for nodes in (1, 100)]
    ((run,),) = (graph.steps for graph in costs(*measured_cases, [withheld]))

    assert run.node_s == pytest.approx(1e-6, rel=0.01)


def test_costs_are_grouped_by_topology_and_kind_in_measured_order() -> None:
    cases = [
        step_results(STEPS, topology=topology, kind=kind, nodes=nodes)
        for nodes in (10, 1)
        for topology in ("fork-join", "chain")
        for kind in ("kernel", "copy")
    ]
    fitted = costs(*cases, [gemm()])

    assert [(graph.topology, graph.kind) for graph in fitted] == [
        (topology, kind) for topology in ("fork-join", "chain") for kind in ("kernel", "copy")
    ]
    assert all([point.nodes for point in graph.payoffs] == [1, 10] for graph in fitted)


def test_costs_are_written_to_json_and_read_back(tmp_path: Path) -> None:
    cases = [case for nodes in (1, 10) for case in step_results(STEPS, nodes=nodes)]
    written_result = result(
        *cases, graphs=graph_costs([*cases, *step_results({"run": 1e-6}, kind="fill")])
    )
    path = tmp_path / "graphs.json"
    path.write_text(render(written_result))

    assert json.loads(path.read_text())["graphs"][0]["payoffs"][0]["nodes"] == 1
    assert load_result(path) == written_result


@given(AMOUNTS, AMOUNTS, st.lists(st.integers(1, 4096), min_size=2, max_size=8, unique=True))
def test_fit_of_exact_line(fixed_s: float, node_s: float, nodes: list[int]) -> None:
    times_s = [fixed_s + node_s * n for n in nodes]
    fitted = fit(nodes, times_s)

    assert [fitted[0] + fitted[1] * n for n in nodes] == pytest.approx(times_s, rel=1e-6)


@given(st.dictionaries(st.integers(1, 4096), AMOUNTS, min_size=2, max_size=8))
def test_fit_is_not_negative_and_has_least_error(times_s: dict[int, float]) -> None:
    def error(fixed_s: float, node_s: float) -> float:
        return sum(((fixed_s + node_s * n) / s - 1) ** 2 for n, s in times_s.items())

    fixed_s, node_s = fit([*times_s], [*times_s.values()])

    assert fixed_s >= 0
    assert node_s >= 0
    for factor in (0.9, 1.1):
        assert error(fixed_s, node_s) <= error(fixed_s * factor, node_s) + 1e-6
        assert error(fixed_s, node_s) <= error(fixed_s, node_s * factor) + 1e-6


def test_fit_rejects_zero_time() -> None:
    with pytest.raises(ValueError, match="not positive"):
        fit([1, 2], [0.0, 1.0])
