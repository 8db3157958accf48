"""Costs of graphs: linear fits of step times against the number of nodes, and break-even points."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

import numpy as np

from cudakit.bench.result import BreakEven, CaseResult, GraphCosts, StepCost
from cudakit.bench.stats import RESOLUTION
from cudakit.units import Unavailable

_Time = float | Unavailable
_ONE_SIZE = Unavailable("a fit needs graphs of two sizes")


def graph_costs(cases: Sequence[CaseResult]) -> tuple[GraphCosts, ...]:
    """Return the costs of graphs by topology and node kind; cases of other benches are ignored."""
    graph_cases = [
        case for case in cases if case.axes.keys() >= {"step", "topology", "kind", "nodes"}
    ]
    return tuple(
        GraphCosts(topology, kind, tuple(_step_costs(group)), tuple(_break_even_points(group)))
        for (topology, kind), group in _group_by_graph(graph_cases)
    )


def fit(nodes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """Fit a fixed time and a time per node, neither negative, by least squares of relative errors.

    Errors are relative, because the times of small and large graphs differ by orders of magnitude. Raises
    ValueError for times that are not positive.
    """
    node_counts, times = np.asarray(nodes, np.float64), np.asarray(times_s, np.float64)
    if not (times > 0).all():
        raise ValueError("a time is not positive")
    fixed_term, node_term = 1 / times, node_counts / times
    columns = np.column_stack([fixed_term, node_term])
    fixed_s, node_s = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)[0].tolist()
    if fixed_s < 0:
        return 0.0, float(node_term.sum() / (node_term @ node_term))
    if node_s < 0:
        return float(fixed_term.sum() / (fixed_term @ fixed_term)), 0.0
    return float(fixed_s), float(node_s)


def _group_by_graph(
    cases: Sequence[CaseResult],
) -> Iterable[tuple[tuple[str, str], list[CaseResult]]]:
    def graph_key(case: CaseResult) -> tuple[str, str]:
        return str(case.axes["topology"]), str(case.axes["kind"])

    graph_order = {key: i for i, key in enumerate(dict.fromkeys(map(graph_key, cases)))}
    ordered_cases = sorted(cases, key=lambda case: graph_order[graph_key(case)])
    return ((key, list(group)) for key, group in groupby(ordered_cases, graph_key))


def _step_costs(cases: Sequence[CaseResult]) -> Iterable[StepCost]:
    for step in dict.fromkeys(str(case.axes["step"]) for case in cases):
        yield _step_cost(step, [case for case in cases if case.axes["step"] == step])


def _step_cost(step: str, cases: Sequence[CaseResult]) -> StepCost:
    time_by_node_count = {_node_count(case): case.median_s for case in cases}
    valid_time_by_node_count = {
        node_count: time_s
        for node_count, time_s in time_by_node_count.items()
        if not isinstance(time_s, Unavailable) and time_s > 0
    }
    if len(valid_time_by_node_count) < 2:
        return StepCost(step, _ONE_SIZE, _ONE_SIZE, _ONE_SIZE)
    fixed_s, node_s = fit([*valid_time_by_node_count], [*valid_time_by_node_count.values()])
    deviations = (
        abs(time_s / (fixed_s + node_s * node_count) - 1)
        for node_count, time_s in valid_time_by_node_count.items()
    )
    return StepCost(step, fixed_s, node_s, max(deviations))


def _break_even_points(cases: Sequence[CaseResult]) -> Iterable[BreakEven]:
    for node_count in sorted({_node_count(case) for case in cases}):
        step_times = {
            str(case.axes["step"]): case.median_s
            for case in cases
            if _node_count(case) == node_count
        }
        yield _break_even_point(node_count, step_times)


def _break_even_point(node_count: int, step_times: Mapping[str, _Time]) -> BreakEven:
    made_s = _signed_sum(step_times, capture=1, instantiate=1)
    saved_s = _signed_sum(step_times, eager=1, replay=-1)
    return BreakEven(
        node_count,
        made_s,
        saved_s,
        _replays_to_break_even(made_s, saved_s, _signed_sum(step_times, eager=1)),
    )


def _replays_to_break_even(made_s: _Time, saved_s: _Time, eager_s: _Time) -> _Time:
    if isinstance(saved_s, Unavailable):
        return saved_s
    if isinstance(made_s, Unavailable):
        return made_s
    # A difference of two medians below RESOLUTION is not significant.
    if isinstance(eager_s, Unavailable) or saved_s <= RESOLUTION * eager_s:
        return Unavailable("a replay saves no time")
    return made_s / saved_s


def _signed_sum(step_times: Mapping[str, _Time], **sign_by_step: int) -> _Time:
    """Return the sum of the times of steps, each multiplied by its sign."""
    total_s = 0.0
    for step, sign in sign_by_step.items():
        time_s = step_times.get(step, Unavailable(f"the step {step} was not measured"))
        if isinstance(time_s, Unavailable):
            return time_s
        total_s += sign * time_s
    return total_s


def _node_count(case: CaseResult) -> int:
    return int(case.axes["nodes"])
