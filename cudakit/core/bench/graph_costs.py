"""What the steps of graphs come to: the cost of a node, and after how many replays a graph has paid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from cudakit.core.bench.compare import RESOLUTION
from cudakit.core.bench.result import CaseResult
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class GraphCost:
    """One graph: a topology, and a number of nodes."""

    topology: str
    nodes: int
    node_s: (
        float | Unavailable
    )  # that each node more than in the next smaller graph adds on the device
    saved_s: float | Unavailable  # by a replay, against launching the kernels one by one
    made_s: float | Unavailable  # to capture and instantiate it
    break_even: float | Unavailable  # replays after which that has paid


def graph_costs(cases: Sequence[CaseResult]) -> tuple[GraphCost, ...]:
    """Conclude from the cases of ``bench graph``, by topology and from few nodes to many."""
    steps: dict[tuple[str, int], dict[str, float | Unavailable]] = {}
    for case in cases:
        topology, nodes = str(case.axes["topology"]), int(case.axes["nodes"])
        steps.setdefault((topology, nodes), {})[str(case.axes["step"])] = case.median_s
    costs: list[GraphCost] = []
    for graph in sorted(steps):
        smaller = max((other for other in steps if _is_smaller(other, graph)), default=None)
        costs.append(_cost(graph, steps, smaller))
    return tuple(costs)


def _is_smaller(other: tuple[str, int], graph: tuple[str, int]) -> bool:
    return other[0] == graph[0] and other[1] < graph[1]


def _cost(
    graph: tuple[str, int],
    steps: Mapping[tuple[str, int], Mapping[str, float | Unavailable]],
    smaller: tuple[str, int] | None,
) -> GraphCost:
    own = steps[graph]
    saved_s = _difference(_of(own, "eager"), _of(own, "replay"))
    made_s = _sum(_of(own, "capture"), _of(own, "instantiate"))
    return GraphCost(
        topology=graph[0],
        nodes=graph[1],
        node_s=_node_s(own, steps[smaller], graph[1] - smaller[1])
        if smaller
        else Unavailable("there is no smaller graph to compare it with"),
        saved_s=saved_s,
        made_s=made_s,
        break_even=_break_even(made_s, saved_s, _of(own, "eager")),
    )


def _of(steps: Mapping[str, float | Unavailable], name: str) -> float | Unavailable:
    return steps.get(name, Unavailable(f"the step {name} was not measured"))


def _node_s(
    own: Mapping[str, float | Unavailable], smaller: Mapping[str, float | Unavailable], more: int
) -> float | Unavailable:
    added = _difference(_of(own, "run"), _of(smaller, "run"))
    return added if isinstance(added, Unavailable) else added / more


def _break_even(
    made_s: float | Unavailable, saved_s: float | Unavailable, eager_s: float | Unavailable
) -> float | Unavailable:
    if isinstance(saved_s, Unavailable):
        return saved_s
    if isinstance(made_s, Unavailable):
        return made_s
    if isinstance(eager_s, Unavailable):
        return eager_s
    # Less than medians differ by themselves is no saving.
    if saved_s <= RESOLUTION * eager_s:
        return Unavailable("a replay takes no less time")
    return made_s / saved_s


def _difference(one: float | Unavailable, other: float | Unavailable) -> float | Unavailable:
    if isinstance(one, Unavailable):
        return one
    return other if isinstance(other, Unavailable) else one - other


def _sum(one: float | Unavailable, other: float | Unavailable) -> float | Unavailable:
    if isinstance(one, Unavailable):
        return one
    return other if isinstance(other, Unavailable) else one + other
