"""What graphs cost and save, concluded from the steps that were measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from cudakit.core.bench.graph_costs import GraphCost, graph_costs
from cudakit.core.bench.result import CaseResult
from cudakit.document import Column, Count, Node, Seconds, Section, Table, Text, Value
from cudakit.units import Unavailable

_COLUMNS = (
    Column("topology", "text"),
    Column("nodes", "number"),
    Column("per node", "number"),
    Column("to make", "number"),
    Column("saved by a replay", "number"),
    Column("pays after", "number"),
)
_CAPTION = (
    "Per node: what each node more than in the graph above adds on the device. To make: capture and "
    "instantiate. Saved by a replay: against launching the kernels one by one. Pays after: so many replays."
)

# What is less than a picosecond is left over from a subtraction.
_PLACES = 12


def graph_section(cases: Sequence[CaseResult]) -> Iterator[Node]:
    """Show the costs of the graphs among the cases, where any could be worked out."""
    costs = graph_costs(
        [case for case in cases if case.axes.keys() >= {"topology", "nodes", "step"}]
    )
    rows = tuple(map(_row, costs))
    if any(not isinstance(value, Unavailable) for row in rows for value in row[2:]):
        yield Section("What a graph costs and saves", (Table(_COLUMNS, rows, _CAPTION),))


def _row(cost: GraphCost) -> tuple[Value, ...]:
    pays = cost.break_even
    return (
        Text(cost.topology),
        Count(cost.nodes),
        *map(_seconds, (cost.node_s, cost.made_s, cost.saved_s)),
        pays if isinstance(pays, Unavailable) else Text(f"{pays:.3g}"),
    )


def _seconds(value: float | Unavailable) -> Value:
    return value if isinstance(value, Unavailable) else Seconds(round(value, _PLACES))
