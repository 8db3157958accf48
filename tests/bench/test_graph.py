""""""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import closing
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from bench.example_results import gemm, machine, result, samples_near
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.case import Method, Rule
from cudakit.bench.graph import (
    NODE_KINDS,
    STEPS,
    TOPOLOGIES,
    GraphSpec,
    fit,
    graph_costs,
    graph_section,
)
from cudakit.bench.load import load_result
from cudakit.bench.pipeline import run
from cudakit.bench.result import BreakEven, CaseResult, GraphCosts, StepCost
from cudakit.bench.stats import Samples
from cudakit.bench.summary import case_result
from cudakit.errors import CudaError
from cudakit.gpu.api import Graph, GraphExec, Ptr, Stream
from cudakit.gpu.sim import Launch, Sim
from cudakit.report.document import Count, Ratio, Seconds, Section, Table, Text
from cudakit.report.json import render
from cudakit.units import Unavailable


def figures(spec: GraphSpec) -> dict[tuple[object, ...], float]:
    """Return the verified times by step, topology and number of nodes."""
    with closing(Sim()) as gpu:
        result = run(spec, gpu)
    return {
        (case.axes["step"], case.axes["topology"], case.axes["nodes"]): case.median_s
        for case in result.results
        if not isinstance(case.median_s, Unavailable) and case.verified
    }


def test_every_step_of_every_topology_has_verified_time() -> None:
    times_s = figures(GraphSpec(nodes=(1, 20)))

    assert set(times_s) == {
        (step, topology, nodes) for step in STEPS for topology in TOPOLOGIES for nodes in (1, 20)
    }


@pytest.mark.parametrize("kind", NODE_KINDS)
def test_every_node_kind_has_every_step(kind: str) -> None:
    times_s = figures(GraphSpec(kinds=(kind,), nodes=(9,), topologies=("fork-join",)))

    assert set(times_s) == {(step, "fork-join", 9) for step in STEPS}


def test_replay_and_eager_are_interleaved() -> None:
    with closing(Sim()) as gpu:
        results = run(GraphSpec(topologies=("chain",), nodes=(3,)), gpu).results

    interleaved_count = {case.axes["step"]: len(case.method.interleaved) for case in results}
    assert interleaved_count.pop("replay") == interleaved_count.pop("eager") == 2
    assert set(interleaved_count.values()) == {0}


def test_single_step_is_not_interleaved() -> None:
    with closing(Sim()) as gpu:
        (case,) = run(GraphSpec(topologies=("chain",), nodes=(3,), steps=("eager",)), gpu).results

    assert case.axes["step"] == "eager"
    assert case.method.interleaved == ()


def test_result_has_graph_costs() -> None:
    with closing(Sim()) as gpu:
        (chain,) = run(GraphSpec(topologies=("chain",), nodes=(4, 16)), gpu).graphs

    assert [cost.step for cost in chain.steps] == list(STEPS)
    (run_cost,) = (cost for cost in chain.steps if cost.step == "run")
    assert run_cost.node_s == pytest.approx(1e-6, rel=0.1)
    assert [payoff.nodes for payoff in chain.payoffs] == [4, 16]
    assert all(isinstance(payoff.made_s, float) for payoff in chain.payoffs)


def test_branches_run_faster_than_chain_and_more_nodes_take_longer() -> None:
    times_s = figures(GraphSpec(nodes=(8, 40), steps=("run", "eager", "replay")))

    assert times_s["run", "fork-join", 40] < times_s["run", "chain", 40]
    assert times_s["run", "chain", 8] < times_s["run", "chain", 40]
    assert times_s["replay", "fork-join", 40] < times_s["eager", "fork-join", 40]


def test_launch_step_does_not_wait() -> None:
    times_s = figures(GraphSpec(topologies=("chain",), nodes=(40,), steps=("launch", "replay")))

    assert times_s["launch", "chain", 40] < times_s["replay", "chain", 40]


@pytest.mark.parametrize("step", STEPS)
def test_node_that_does_not_run_withholds_time(step: str) -> None:
    runs = count()

    def skip_some(launch: Launch, target: Ptr, word: np.uint32, vectors: np.uint64) -> None:
        if next(runs) % 5:
            launch.write(target, np.uint32, 4 * int(vectors))[:] = word

    with closing(Sim(host_kernels={"cudakit_write": skip_some})) as gpu:
        spec = GraphSpec(topologies=("fork-join",), nodes=(10,), steps=(step,))
        (case,) = run(spec, gpu).results

    assert isinstance(case.median_s, Unavailable)
    assert "of 10 nodes did not run" in case.median_s.reason


class IgnoringUpdates(Sim):
    """A simulated device whose graph updates have no effect."""

    def graph_update(self, executable: GraphExec, graph: Graph) -> None:
        """Do nothing."""


def test_update_without_effect_withholds_time() -> None:
    with closing(IgnoringUpdates()) as gpu:
        spec = GraphSpec(topologies=("chain",), nodes=(4,), steps=("update",))
        (case,) = run(spec, gpu).results

    assert isinstance(case.median_s, Unavailable)
    assert "4 of 4 nodes did not run" in case.median_s.reason


@pytest.mark.parametrize("step", ["first-launch", "launch", "run", "replay", "eager"])
def test_nodes_that_stop_after_first_check_withhold_time(step: str) -> None:
    runs = count()

    def stop_after_five(launch: Launch, target: Ptr, word: np.uint32, vectors: np.uint64) -> None:
        if next(runs) < 5:
            launch.write(target, np.uint32, 4 * int(vectors))[:] = word

    with closing(Sim(host_kernels={"cudakit_write": stop_after_five})) as gpu:
        spec = GraphSpec(topologies=("chain",), nodes=(5,), steps=(step,))
        (case,) = run(spec, gpu).results

    assert next(runs) > 30
    assert isinstance(case.median_s, Unavailable)


class CountingGraphs(Sim):
    """A simulated device that counts its graphs and executable graphs."""

    live = 0

    def capture_end(self, stream: Stream) -> Graph:
        self.live += 1
        return super().capture_end(stream)

    def instantiate(self, graph: Graph) -> GraphExec:
        self.live += 1
        return super().instantiate(graph)

    def destroy_graph(self, graph: Graph) -> None:
        self.live -= 1
        super().destroy_graph(graph)

    def destroy_graph_exec(self, graph: GraphExec) -> None:
        self.live -= 1
        super().destroy_graph_exec(graph)


@pytest.mark.parametrize("step", STEPS)
def test_every_graph_is_destroyed(step: str) -> None:
    with closing(CountingGraphs()) as gpu:
        rule = Rule(min_samples=150)
        run(GraphSpec(topologies=("chain",), nodes=(2,), steps=(step,), rule=rule), gpu)

        assert gpu.live == 0


def test_failed_instantiation_frees_memory() -> None:
    with closing(Sim()) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        gpu.fail_next("instantiate", CudaError(1, "CUDA_ERROR_INVALID_VALUE", "injected error"))
        with pytest.raises(CudaError, match="injected error"):
            run(GraphSpec(nodes=(3,), steps=("replay",)), gpu)

        assert gpu.memory_info().free_bytes == free_bytes
        assert run(GraphSpec(nodes=(3,), steps=("replay",)), gpu).complete


NOT_MEASURED = Unavailable("not measured")
RUN = StepCost("run", 1e-6, 2e-6, 0.01)
BREAK_EVEN = BreakEven(8, 1e-5, 2e-6, 4.3)


def tables(*graphs: GraphCosts) -> tuple[Table, ...]:
    (section,) = graph_section(graphs)
    assert isinstance(section, Section)
    return tuple(node for node in section.nodes if isinstance(node, Table))


def test_step_has_row_with_its_fit() -> None:
    steps, _ = tables(GraphCosts("chain", "kernel", (RUN,), (BREAK_EVEN,)))

    assert steps.rows == (
        (Text("chain"), Text("kernel"), Text("run"), Seconds(1e-6), Seconds(2e-6), Ratio(0.01)),
    )


def test_number_of_nodes_has_row_with_break_even_rounded_up() -> None:
    _, break_evens = tables(GraphCosts("chain", "kernel", (RUN,), (BREAK_EVEN,)))

    assert break_evens.rows == (
        (Text("chain"), Text("kernel"), Count(8), Seconds(1e-5), Seconds(2e-6), Count(5)),
    )


def test_missing_value_has_its_reason_in_the_caption() -> None:
    payoff = BreakEven(8, Unavailable("the step capture was not measured"), 2e-6, NOT_MEASURED)
    _, break_evens = tables(GraphCosts("chain", "kernel", (RUN,), (payoff,)))

    assert "n/a: the step capture was not measured; " in break_evens.caption


def test_time_below_a_picosecond_is_shown_as_zero() -> None:
    step = StepCost("launch", 1e-6, 1e-21, 0.0)
    (steps,) = tables(GraphCosts("chain", "kernel", (step,), ()))

    assert steps.rows[0][4] == Seconds(0.0)


def test_rows_and_tables_without_values_are_omitted() -> None:
    unmeasured_step = StepCost("run", NOT_MEASURED, NOT_MEASURED, NOT_MEASURED)
    (table,) = tables(GraphCosts("chain", "kernel", (unmeasured_step,), (BREAK_EVEN,)))

    assert [column.name for column in table.columns][-1] == "break-even"
    unmeasured_graph = GraphCosts(
        "chain",
        "kernel",
        (unmeasured_step,),
        (BreakEven(1, NOT_MEASURED, NOT_MEASURED, NOT_MEASURED),),
    )
    assert list(graph_section([unmeasured_graph])) == []
    assert list(graph_section([])) == []


COST_STEPS = {"capture": 20e-6, "instantiate": 10e-6, "run": 5e-6, "replay": 8e-6, "eager": 11e-6}
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
    fitted = break_even(COST_STEPS)

    assert fitted.made_s == pytest.approx(30e-6, rel=0.01)
    assert fitted.saved_s == pytest.approx(3e-6, rel=0.05)
    assert fitted.replays == pytest.approx(10, rel=0.05)


def test_graph_without_saving_has_no_break_even() -> None:
    assert break_even({**COST_STEPS, "replay": 12e-6}).replays == Unavailable(
        "a replay saves no time"
    )


def test_saving_below_resolution_has_no_break_even() -> None:
    fitted = break_even({**COST_STEPS, "replay": 10.99e-6})

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
        step_results(COST_STEPS, topology=topology, kind=kind, nodes=nodes)
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
    cases = [case for nodes in (1, 10) for case in step_results(COST_STEPS, nodes=nodes)]
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
