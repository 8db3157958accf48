"""The table of cases: time, rate and share of the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal, TypeVar

from cudakit.core.bench.case import OURSELVES
from cudakit.core.bench.present.baselines import baselines, compared, share_of
from cudakit.core.bench.present.labels import axis_title, axis_value, fixed_words, varying
from cudakit.core.bench.result import CaseResult
from cudakit.core.bench.stats import Summary
from cudakit.core.bench.workload import Axis
from cudakit.document import Column, Rate, Ratio, Seconds, Table, Text, Value
from cudakit.units import Unavailable, format_ratio

_STEP, _NODES = "step", "nodes"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _Shown:
    """A column, its cells, and whether it has a value for a case."""

    title: str
    cell: Callable[[CaseResult], Value]
    kind: Literal["number", "text"] = "number"
    needed: Callable[[CaseResult], bool] = lambda _: True


def cases_table(cases: Sequence[CaseResult]) -> Table:
    """Return a table with a row for each case; baselines are faint.

    Steps of graphs have a row for all sizes of a graph.
    """
    if are_steps(cases):
        return steps_table(cases)
    axes = varying(cases)
    shown = [column for column in _columns(cases) if any(column.needed(case) for case in cases)]
    return Table(
        columns=(
            *(_axis_column(name, cases) for name in axes),
            *(Column(column.title, column.kind) for column in shown),
        ),
        rows=tuple(
            (
                *(axis_value(name, case.axes.get(name)) for name in axes),
                *(column.cell(case) for column in shown),
            )
            for case in cases
        ),
        caption=_caption(cases),
        faint=frozenset(at for at, case in enumerate(cases) if case.contender != OURSELVES),
    )


def rate(case: CaseResult) -> Value:
    """Return the rate of a case: operations per second if it has any, else bytes."""
    if not case.amount:
        return Unavailable("it is a latency")
    return cell(lambda amount: Rate(amount, case.unit), case.per_second(case.amount))


def cell(make: Callable[[_T], Value], found: _T | Unavailable) -> Value:
    """Return a known value as a cell made of it, an unavailable one as it is."""
    return found if isinstance(found, Unavailable) else make(found)


def _columns(cases: Sequence[CaseResult]) -> list[_Shown]:
    several = len({case.name for case in cases}) > 1
    return [
        _Shown("bench", lambda case: Text(case.name), "text", lambda _: several),
        _Shown("shape", _shape, "text", lambda case: "shape" in case.settings),
        _Shown("by", lambda case: Text(case.contender), "text", lambda _: bool(baselines(cases))),
        _Shown("time", lambda case: cell(Seconds, case.median_s)),
        _Shown("±", lambda case: cell(lambda found: Ratio(found.noise), case.statistics)),
        _Shown("rate", rate, needed=lambda case: bool(case.amount)),
        *(
            _Shown(f"of {baseline}", partial(share_of, baseline, cases=cases))
            for baseline in compared(cases)
        ),
        _Shown("of limit", lambda case: cell(Ratio, case.ratio_to_limit), needed=_has_limit),
        _Shown(
            "of datasheet", lambda case: cell(Ratio, case.ratio_to_datasheet), needed=_has_datasheet
        ),
        _Shown("energy", _energy, needed=_has_energy),
        _Shown("SM clock", _clock, needed=lambda case: bool(case.sm_clock_hz)),
        # As a number: narrow tables drop it first.
        _Shown(
            "bound",
            lambda case: cell(lambda found: Text(found.bound), case.limit),
            "number",
            _has_limit,
        ),
    ]


def _axis_column(name: str, cases: Sequence[CaseResult]) -> Column:
    numbers = all(not isinstance(case.axes.get(name), str) for case in cases)
    return Column(axis_title(name), "number" if numbers else "text")


def _caption(cases: Sequence[CaseResult]) -> str:
    fixed = fixed_words(cases)
    lines = [f"All with {fixed}."] if fixed else []
    if others := compared(cases):
        lines.append(
            f"Of {' or '.join(others)} is our rate as a share of theirs: the median of samples in turn, with "
            "95 % confidence."
        )
    if any(map(_has_limit, cases)):
        lines.append(_limit_words(cases))
    return " ".join(lines)


def _limit_words(cases: Sequence[CaseResult]) -> str:
    """Describe the limit and its SM clock."""
    computing = [case for case in cases if case.operations and _has_limit(case)]
    if not computing:
        return "The limit is the least time that memory and links allow."
    least = "The limit is the least time that arithmetic and memory allow"
    measured = [_has_datasheet(case) for case in computing]
    if not any(measured):
        return f"{least}, at the datasheet's SM clock: the clock was not measured."
    clock = "measured" if all(measured) else "where that was measured"
    return f"{least}, at the SM clock {clock}; of datasheet is the same at the datasheet's clock."


def _has_limit(case: CaseResult) -> bool:
    return not isinstance(case.limit, Unavailable)


def _has_datasheet(case: CaseResult) -> bool:
    """Return whether the limit at the datasheet's clock differs from that at the measured one."""
    found = case.limit
    known = not isinstance(found, Unavailable) and not isinstance(found.measured_s, Unavailable)
    return known and bool(case.operations)


def _shape(case: CaseResult) -> Value:
    name = case.settings.get("shape")
    return Text("-" if name is None else str(name))


def _clock(case: CaseResult) -> Value:
    """Return the median SM clock of the samples."""
    if not case.sm_clock_hz:
        return Unavailable("the clock was not measured")
    return Text(f"{median(case.sm_clock_hz) / 1e6:.0f} MHz")


def _has_energy(case: CaseResult) -> bool:
    return not isinstance(case.energy_j, Unavailable)


def _energy(case: CaseResult) -> Value:
    """Return the energy of one operation, or of one execution without operations."""
    if isinstance(case.energy_j, Unavailable):
        return case.energy_j
    if case.operations:
        return Text(f"{case.energy_j / case.operations * 1e12:.3g} pJ/{case.operation}")
    return Text(f"{case.energy_j:.3g} J")


def are_steps(cases: Sequence[CaseResult]) -> bool:
    """Return whether cases are steps of graphs of several sizes, which get a compact table."""
    return (
        all(_STEP in case.axes and isinstance(case.axes.get(_NODES), int) for case in cases)
        and len({case.axes[_NODES] for case in cases}) > 1
        and len({case.axes[_STEP] for case in cases}) > 1
    )


def steps_table(cases: Sequence[CaseResult]) -> Table:
    """Return a table of the steps of each graph, with a column for each number of nodes."""
    graph = [name for name in varying(cases) if name not in (_STEP, _NODES)]
    counts = sorted({int(case.axes[_NODES]) for case in cases})
    rows: dict[tuple[Axis | None, ...], dict[int, CaseResult]] = {}
    for case in cases:
        key = (*(case.axes.get(name) for name in graph), case.axes[_STEP])
        rows.setdefault(key, {})[int(case.axes[_NODES])] = case
    heads = [*graph, _STEP]
    # The steps of a graph stay in the order measured.
    graphs = list(dict.fromkeys(key[:-1] for key in rows))
    return Table(
        columns=(
            *(Column(axis_title(name), "text") for name in heads),
            *(Column(f"{count} node{'s' if count > 1 else ''}", "number") for count in counts),
        ),
        rows=tuple(
            (
                *(axis_value(name, value) for name, value in zip(heads, key, strict=True)),
                *(_step_time(found.get(count)) for count in counts),
            )
            for key, found in sorted(rows.items(), key=lambda row: graphs.index(row[0][:-1]))
        ),
        caption=_steps_caption(cases),
    )


def _step_time(case: CaseResult | None) -> Value:
    if case is None:
        return Unavailable("it was not measured")
    return cell(Seconds, case.median_s)


def _steps_caption(cases: Sequence[CaseResult]) -> str:
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
