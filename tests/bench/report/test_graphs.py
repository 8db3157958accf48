from __future__ import annotations

from cudakit.bench.report.graphs import graph_section
from cudakit.bench.result import BreakEven, GraphCosts, StepCost
from cudakit.report.document import Count, Ratio, Seconds, Section, Table, Text
from cudakit.units import Unavailable

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
