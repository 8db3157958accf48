"""Costs of graphs: the linear fit of each step, and the break-even point of each size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from cudakit.bench.report.cases import cell
from cudakit.bench.result import BreakEven, GraphCosts, StepCost
from cudakit.report.document import Column, Count, Node, Ratio, Seconds, Section, Table, Text, Value
from cudakit.units import Unavailable

_GRAPH_COLUMNS = (Column("topology", "text"), Column("node type", "text"))
_STEP_COLUMNS = (
    *_GRAPH_COLUMNS,
    Column("step", "text"),
    Column("fixed", "number"),
    Column("per node", "number"),
    Column("max error", "number"),
)
_BREAK_EVEN_COLUMNS = (
    *_GRAPH_COLUMNS,
    Column("nodes", "number"),
    Column("creation", "number"),
    Column("saved per replay", "number"),
    Column("break-even", "number"),
)
_STEPS_CAPTION = (
    "Fit: time of a step = fixed + per node × number of nodes. Max error: the largest relative deviation of "
    "a measured time from the fit."
)
_BREAK_EVENS_CAPTION = (
    "Creation: the time to capture and instantiate. Saved per replay: compared with eager launches of the "
    "same nodes; samples are interleaved. Break-even: the number of replays that save the creation time; - "
    "if a replay saves no time."
)

_DECIMALS = 12  # Times below a picosecond are rounding errors of a subtraction.


def graph_section(graphs: Sequence[GraphCosts]) -> Iterator[Node]:
    """Return a section with the costs of graphs, or nothing if no graph was measured."""
    step_tables = _table(
        _STEP_COLUMNS,
        [_step(graph, step) for graph in graphs for step in graph.steps],
        _STEPS_CAPTION,
    )
    payoff_tables = _table(
        _BREAK_EVEN_COLUMNS,
        [_break_even(graph, payoff) for graph in graphs for payoff in graph.payoffs],
        _BREAK_EVENS_CAPTION,
    )
    if tables := (*step_tables, *payoff_tables):
        yield Section("Graph costs and savings", tables)


def _table(
    columns: tuple[Column, ...], rows: Sequence[tuple[Value, ...]], caption: str
) -> Iterator[Table]:
    """Yield a table of the rows that have a value, if there are any."""
    rows_with_values = tuple(
        row
        for row in rows
        if not all(isinstance(value, Unavailable) for value in row[len(_GRAPH_COLUMNS) + 1 :])
    )
    reasons = dict.fromkeys(
        value.reason for row in rows_with_values for value in row if isinstance(value, Unavailable)
    )
    if reasons:
        caption = f"{caption} n/a: {'; '.join(reasons)}."
    if rows_with_values:
        yield Table(columns, rows_with_values, caption)


def _step(graph: GraphCosts, cost: StepCost) -> tuple[Value, ...]:
    return (
        Text(graph.topology),
        Text(graph.kind),
        Text(cost.step),
        cell(_seconds, cost.fixed_s),
        cell(_seconds, cost.node_s),
        cell(Ratio, cost.deviation),
    )


def _break_even(graph: GraphCosts, payoff: BreakEven) -> tuple[Value, ...]:
    return (
        Text(graph.topology),
        Text(graph.kind),
        Count(payoff.nodes),
        cell(_seconds, payoff.made_s),
        cell(_seconds, payoff.saved_s),
        _replays_to_break_even(payoff),
    )


def _replays_to_break_even(payoff: BreakEven) -> Value:
    if not isinstance(payoff.replays, Unavailable):
        return Count(ceil(payoff.replays))
    are_times_known = not isinstance(payoff.saved_s, Unavailable) and not isinstance(
        payoff.made_s, Unavailable
    )
    return Text("-") if are_times_known else payoff.replays


def _seconds(value: float) -> Seconds:
    return Seconds(round(value, _DECIMALS))
