"""Costs of graphs: the fit of each step, and the break-even point of each size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import ceil

from cudakit.core.bench.present.cases import cell
from cudakit.core.bench.result import GraphCosts, Payoff, StepCost
from cudakit.document import Column, Count, Node, Ratio, Seconds, Section, Table, Text, Value
from cudakit.units import Unavailable

_GRAPH = (Column("topology", "text"), Column("kind", "text"))
_STEPS = (
    *_GRAPH,
    Column("step", "text"),
    Column("fixed", "number"),
    Column("per node", "number"),
    Column("off by", "number"),
)
_PAYOFFS = (
    *_GRAPH,
    Column("nodes", "number"),
    Column("to make", "number"),
    Column("saved by a replay", "number"),
    Column("pays after", "number"),
)
_STEPS_CAPTION = (
    "A step takes the fixed time, and the time per node for each of them; off by is the most that a graph "
    "differs from that."
)
_PAYOFFS_CAPTION = (
    "To make: capture and instantiate. Saved by a replay: against enqueueing the nodes one by one, measured "
    "in turn. Pays after: so many replays."
)

# Less than a picosecond is a rounding residue of a subtraction.
_PLACES = 12


def graph_section(graphs: Sequence[GraphCosts]) -> Iterator[Node]:
    """Show the costs of graphs, if any are known."""
    steps = _table(
        _STEPS, [_step(graph, step) for graph in graphs for step in graph.steps], _STEPS_CAPTION
    )
    payoffs = _table(
        _PAYOFFS,
        [_payoff(graph, payoff) for graph in graphs for payoff in graph.payoffs],
        _PAYOFFS_CAPTION,
    )
    if tables := (*steps, *payoffs):
        yield Section("What a graph costs and saves", tables)


def _table(
    columns: tuple[Column, ...], rows: Sequence[tuple[Value, ...]], caption: str
) -> Iterator[Table]:
    """Return a table of the rows that have a value, if any."""
    known = tuple(
        row
        for row in rows
        if not all(isinstance(value, Unavailable) for value in row[len(_GRAPH) + 1 :])
    )
    if known:
        yield Table(columns, known, caption)


def _step(graph: GraphCosts, cost: StepCost) -> tuple[Value, ...]:
    return (
        Text(graph.topology),
        Text(graph.kind),
        Text(cost.step),
        cell(_seconds, cost.fixed_s),
        cell(_seconds, cost.node_s),
        cell(Ratio, cost.deviation),
    )


def _payoff(graph: GraphCosts, payoff: Payoff) -> tuple[Value, ...]:
    return (
        Text(graph.topology),
        Text(graph.kind),
        Count(payoff.nodes),
        cell(_seconds, payoff.made_s),
        cell(_seconds, payoff.saved_s),
        cell(lambda replays: Count(ceil(replays)), payoff.replays),
    )


def _seconds(value: float) -> Seconds:
    return Seconds(round(value, _PLACES))
