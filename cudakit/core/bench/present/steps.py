"""The table of the steps of graphs: a row for each step, a column for each number of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cudakit.core.bench.present.axes import axis_title, axis_value, fixed_words, varying
from cudakit.core.bench.result import Axis, CaseResult
from cudakit.core.bench.stats import Summary
from cudakit.document import Column, Seconds, Table, Value
from cudakit.units import Unavailable, format_ratio

_STEP, _NODES = "step", "nodes"


def are_steps(cases: Sequence[CaseResult]) -> bool:
    """Say whether cases are steps of graphs of several sizes: a list of them all would be long."""
    return (
        all(_STEP in case.axes and isinstance(case.axes.get(_NODES), int) for case in cases)
        and len({case.axes[_NODES] for case in cases}) > 1
        and len({case.axes[_STEP] for case in cases}) > 1
    )


def steps_table(cases: Sequence[CaseResult]) -> Table:
    """Compare the times of steps along the number of nodes, graph by graph."""
    graph = [name for name in varying(cases) if name not in (_STEP, _NODES)]
    counts = sorted({int(case.axes[_NODES]) for case in cases})
    rows: dict[tuple[Axis | None, ...], dict[int, CaseResult]] = {}
    for case in cases:
        key = (*(case.axes.get(name) for name in graph), case.axes[_STEP])
        rows.setdefault(key, {})[int(case.axes[_NODES])] = case
    heads = [*graph, _STEP]
    return Table(
        columns=(
            *(Column(axis_title(name), "text") for name in heads),
            *(Column(f"{count} node{'s' if count > 1 else ''}", "number") for count in counts),
        ),
        rows=tuple(
            (
                *(axis_value(name, value) for name, value in zip(heads, key, strict=True)),
                *(_time(found.get(count)) for count in counts),
            )
            for key, found in sorted(rows.items(), key=lambda row: _order(row[0], list(rows)))
        ),
        caption=_caption(cases),
    )


def _order(
    key: tuple[Axis | None, ...], keys: Sequence[tuple[Axis | None, ...]]
) -> tuple[int, ...]:
    """Keep the steps of a graph together, all in the order in which they were measured."""
    graphs = list(dict.fromkeys(one[:-1] for one in keys))
    return graphs.index(key[:-1]), keys.index(key)


def _time(case: CaseResult | None) -> Value:
    if case is None:
        return Unavailable("it was not measured")
    return case.median_s if isinstance(case.median_s, Unavailable) else Seconds(case.median_s)


def _caption(cases: Sequence[CaseResult]) -> str:
    fixed = fixed_words(cases)
    lines = [f"Time of each step, with {fixed}." if fixed else "Time of each step."]
    noise = [case.statistics.noise for case in cases if isinstance(case.statistics, Summary)]
    if noise:
        usual, most = format_ratio(median(noise)), format_ratio(max(noise))
        rest = f", the least sure of them to ± {most}" if most != usual else ""
        lines.append(f"Known to ± {usual} with 95 % confidence{rest}.")
    clocks = [median(case.sm_clock_hz) / 1e6 for case in cases if case.sm_clock_hz]
    if clocks:
        low, high = f"{min(clocks):.0f}", f"{max(clocks):.0f}"
        lines.append(f"SM clock {low if low == high else f'{low} to {high}'} MHz.")
    return " ".join(lines)
