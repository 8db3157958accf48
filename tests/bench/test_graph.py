""""""

from __future__ import annotations

from contextlib import closing
from itertools import count

import numpy as np
import pytest

from cudakit.bench.case import Rule
from cudakit.bench.graph import NODE_KINDS, STEPS, TOPOLOGIES, GraphSpec, graph_section
from cudakit.bench.pipeline import run
from cudakit.bench.result import BreakEven, GraphCosts, StepCost
from cudakit.errors import CudaError
from cudakit.gpu.api import Graph, GraphExec, Ptr, Stream
from cudakit.gpu.sim import Launch, Sim
from cudakit.report.document import Count, Ratio, Seconds, Section, Table, Text
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
