"""The table of cases: time, rate and percentage of the peak."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Literal, TypeVar

from cudakit.bench.labels import (
    CUDAKIT,
    Axis,
    axis_names,
    axis_title,
    axis_value,
    describe_common_axes,
    varying_axes,
)
from cudakit.bench.report.baselines import baseline_libraries, measured_baselines, relative_rate
from cudakit.bench.result import CaseResult
from cudakit.bench.stats import Summary
from cudakit.report.document import Column, Rate, Ratio, Seconds, Table, Text, Value
from cudakit.units import Unavailable, capitalized, format_ratio

_STEP, _NODES = "step", "nodes"

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class _CaseColumn:
    """A column of the table, which is shown if ``has_value`` is true for a case."""

    title: str
    cell: Callable[[CaseResult], Value]
    kind: Literal["number", "text"] = "number"
    has_value: Callable[[CaseResult], bool] = lambda _: True
    is_optional: bool = False


def cases_table(cases: Sequence[CaseResult], *, with_common_axes: bool = False) -> Table:
    """Return a table with a row per case; rows of baselines are printed in a muted style.

    Axes that have one value in all cases are in the caption, or ``with_common_axes`` in columns. The steps of
    graphs of several sizes have a more compact table: see ``graph_operations_table``.
    """
    if are_graph_operations(cases):
        return graph_operations_table(cases, with_common_axes=with_common_axes)
    axes = axis_names(cases) if with_common_axes else varying_axes(cases)
    visible_columns = [column for column in _columns(cases) if any(map(column.has_value, cases))]
    return Table(
        columns=(
            *(_axis_column(name, cases) for name in axes),
            *(Column(column.title, column.kind, column.is_optional) for column in visible_columns),
        ),
        rows=tuple(
            (
                *(axis_value(name, case.axes.get(name)) for name in axes),
                *(column.cell(case) for column in visible_columns),
            )
            for case in cases
        ),
        caption=_caption(cases),
        faint_rows=frozenset(i for i, case in enumerate(cases) if case.library != CUDAKIT),
    )


def rate(case: CaseResult) -> Value:
    """Return operations per second or, for a case without operations, bytes per second."""
    if isinstance(case.median_s, Unavailable):
        return case.median_s
    if not case.amount:
        return Text("-")
    return cell(lambda amount: Rate(amount, case.unit), case.per_second(case.amount))


def percent_of_peak(case: CaseResult) -> Value:
    """Return the rate as a share of the peak at the measured clock; "-" for a latency."""
    return Text("-") if _is_latency(case) else cell(Ratio, case.ratio_to_limit)


def _percent_of_datasheet(case: CaseResult) -> Value:
    """Return the rate as a share of the peak at the datasheet's clock; "-" for a latency."""
    return Text("-") if _is_latency(case) else cell(Ratio, case.ratio_to_datasheet)


def _bound(case: CaseResult) -> Value:
    """Return the term of the roofline that limits a case; "-" for a latency."""
    if _is_latency(case):
        return Text("-")
    return cell(lambda limit: Text(limit.bound), case.limit)


def _is_latency(case: CaseResult) -> bool:
    """Return whether a case has a time, but neither operations nor bytes, so that it has no rate."""
    return not case.amount and not isinstance(case.median_s, Unavailable)


def cell(make_cell: Callable[[_T], Value], value: _T | Unavailable) -> Value:
    """Return ``make_cell(value)``, or the value itself if it is Unavailable."""
    return value if isinstance(value, Unavailable) else make_cell(value)


def _columns(cases: Sequence[CaseResult]) -> list[_CaseColumn]:
    has_several_benches = len({case.name for case in cases}) > 1
    has_baselines = bool(baseline_libraries(cases))
    return [
        _CaseColumn("bench", lambda case: Text(case.name), "text", lambda _: has_several_benches),
        _CaseColumn("shape", _shape, "text", lambda case: "shape" in case.settings),
        _CaseColumn("library", _library, "text", lambda _: has_baselines),
        _CaseColumn("time", lambda case: cell(Seconds, case.median_s)),
        _CaseColumn(
            "±",
            lambda case: cell(lambda summary: Ratio(summary.noise), case.statistics),
            is_optional=True,
        ),
        # A narrow table with baselines shows the relative rate instead.
        _CaseColumn(
            "algbw" if any(map(_is_collective, cases)) else "rate",
            rate,
            has_value=lambda case: bool(case.amount),
            is_optional=has_baselines and not all(case.name == "gds" for case in cases),
        ),
        _CaseColumn("busbw", _bus_bandwidth, has_value=_is_collective),
        *(
            _CaseColumn(f"vs {baseline}", partial(relative_rate, baseline, cases=cases))
            for baseline in measured_baselines(cases)
        ),
        _CaseColumn("% of peak", percent_of_peak, has_value=_has_peak),
        _CaseColumn(
            "% of datasheet",
            _percent_of_datasheet,
            has_value=_has_datasheet_peak,
            is_optional=True,
        ),
        _CaseColumn("energy", _energy, has_value=_has_energy, is_optional=True),
        _CaseColumn(
            "SM clock",
            _clock,
            has_value=lambda case: bool(case.sm_clock_hz),
            is_optional=True,
        ),
        _CaseColumn(
            "bound",
            _bound,
            has_value=_has_peak,
            is_optional=True,
        ),
    ]


def _is_collective(case: CaseResult) -> bool:
    return case.bus_factor is not None


def _bus_bandwidth(case: CaseResult) -> Value:
    """Return the bus bandwidth of a collective; "-" for one rank, which uses no link."""
    if case.axes.get("ranks") == 1 and not isinstance(case.median_s, Unavailable):
        return Text("-")
    return cell(lambda bandwidth: Rate(bandwidth, case.unit), case.bus_bandwidth)


def _axis_column(name: str, cases: Sequence[CaseResult]) -> Column:
    is_numeric = all(not isinstance(case.axes.get(name), str) for case in cases)
    return Column(axis_title(name), "number" if is_numeric else "text")


def _caption(cases: Sequence[CaseResult]) -> str:
    common_axes_text = describe_common_axes(cases)
    caption_lines = [f"All cases: {common_axes_text}."] if common_axes_text else []
    if all(case.name == "gds" for case in cases):
        caption_lines.append(
            f"Size: of one transfer. Time: of all transfers of a sample{_transfer_counts(cases)}."
        )
    caption_lines.append("±: half the width of the 95% CI of the median time.")
    if rate_text := _explain_rate(cases):
        caption_lines.append(rate_text)
    if libraries := measured_baselines(cases):
        headings = " and ".join(f"vs {name}" for name in libraries)
        caption_lines.append(
            f"{capitalized(headings)}: rate relative to the baseline, median of interleaved samples with "
            "its 95% CI."
        )
    if any(case.axes.get("access") for case in cases):
        caption_lines.append("Access: direct between the GPUs, or staged in host memory.")
    if any(map(_is_collective, cases)):
        caption_lines.append(
            "Algbw: size divided by time. Busbw: algbw times the factor of nccl-tests, comparable with "
            "the peak of a GPU's links in one direction."
        )
    elif any(map(_has_peak, cases)):
        caption_lines.append(_explain_peak(cases))
        if any(map(_is_latency, cases)):
            caption_lines.append('"-": host times and latencies have no rate and no peak.')
    if any(map(_has_peak, cases)):
        caption_lines.append("Bound: the peak that applies: arithmetic, memory or link.")
    return " ".join(caption_lines)


def _transfer_counts(cases: Sequence[CaseResult]) -> str:
    """Return the number of transfers of a sample or its range in parentheses; "" if nothing was measured."""
    counts = [
        round(case.bytes_moved) // int(case.axes["size_bytes"])
        for case in cases
        if not isinstance(case.median_s, Unavailable)
    ]
    return f" ({_text_range(f'{min(counts):,}', f'{max(counts):,}')})" if counts else ""


def _explain_rate(cases: Sequence[CaseResult]) -> str:
    """Describe the bytes of a rate if they are not the size of the case; return "" if they are."""
    directions = {case.axes.get("direction") for case in cases if case.name == "copy"}
    bench_names = {case.name for case in cases}
    if directions == {"d2d"} or bench_names == {"memory"}:
        return "Rate: of all bytes read and written."
    if bench_names == {"ops"}:
        units = {case.unit for case in cases if case.amount}
        if "B" in units:
            scope_text = "" if units == {"B"} else " in bytes"
            return f"Rate{scope_text}: of all bytes read and written."
    texts = ["for d2d of all bytes read and written"] if "d2d" in directions else []
    if summed_text := " and ".join(name for name in ("both", "peer-both") if name in directions):
        texts.append(f"for {summed_text} the sum of the two directions")
    return f"Rate: {'; '.join(texts)}." if texts else ""


def _explain_peak(cases: Sequence[CaseResult]) -> str:
    """Describe the peak and its SM clock."""
    arithmetic_cases = [case for case in cases if case.operations and _has_peak(case)]
    if not arithmetic_cases:
        return "% of peak: rate divided by the theoretical bandwidth of the memory or link."
    roofline_text = (
        "% of peak: rate divided by the roofline of arithmetic, and of memory if data is not in the L2 "
        "cache,"
    )
    has_measured_clock = [_has_datasheet_peak(case) for case in arithmetic_cases]
    if not any(has_measured_clock):
        return (
            f"{roofline_text} at the SM clock of the datasheet, because the clock was not measured."
        )
    clock_text = (
        "measured SM clock" if all(has_measured_clock) else "SM clock that was measured, if any"
    )
    return f"{roofline_text} at the {clock_text}. % of datasheet: the same at the SM clock of the datasheet."


def _has_peak(case: CaseResult) -> bool:
    return not isinstance(case.limit, Unavailable)


def _has_datasheet_peak(case: CaseResult) -> bool:
    """Return whether the peak at the datasheet's clock may differ from that at the measured clock."""
    limit = case.limit
    is_clock_known = not isinstance(limit, Unavailable) and not isinstance(
        limit.measured_s, Unavailable
    )
    return is_clock_known and bool(case.operations)


def _library(case: CaseResult) -> Value:
    """Return the library that computed a case: for cudakit's GEMM, the library that cudakit called."""
    library_words = str(case.settings.get("library", "")).split()
    return Text(library_words[0] if case.library == CUDAKIT and library_words else case.library)


def _shape(case: CaseResult) -> Value:
    shape_name = case.settings.get("shape")
    return Text("-" if shape_name is None else str(shape_name))


def _clock(case: CaseResult) -> Value:
    """Return the median SM clock of the samples."""
    if isinstance(case.median_s, Unavailable):
        return case.median_s
    if not case.sm_clock_hz:
        return Unavailable("the clock was not measured")
    return Text(f"{median(case.sm_clock_hz) / 1e6:.0f} MHz")


def _has_energy(case: CaseResult) -> bool:
    return not isinstance(case.energy_j, Unavailable)


def _energy(case: CaseResult) -> Value:
    """Return the energy of one operation or, without operations, of one execution."""
    if isinstance(case.energy_j, Unavailable):
        return case.energy_j
    if case.operations:
        return Text(f"{case.energy_j / case.operations * 1e12:.3g} pJ/{case.operation}")
    return Text(f"{case.energy_j:.3g} J")


def are_graph_operations(cases: Sequence[CaseResult]) -> bool:
    """Return whether all cases measure an operation on a graph, such as its launch.

    The cases must have at least two operations, and graphs of at least two node counts.
    """
    return (
        all(_STEP in case.axes and isinstance(case.axes.get(_NODES), int) for case in cases)
        and len({case.axes[_NODES] for case in cases}) > 1
        and len({case.axes[_STEP] for case in cases}) > 1
    )


def graph_operations_table(cases: Sequence[CaseResult], *, with_common_axes: bool = False) -> Table:
    """Return a table with a row per operation on a graph, and a column per number of nodes.

    ``with_common_axes`` adds columns for axes that have one value in all cases.
    """
    axes = axis_names(cases) if with_common_axes else varying_axes(cases)
    axes = [name for name in axes if name not in (_STEP, _NODES)]
    node_counts = sorted({int(case.axes[_NODES]) for case in cases})
    rows: dict[tuple[Axis | None, ...], dict[int, CaseResult]] = {}
    for case in cases:
        key = (*(case.axes.get(name) for name in axes), case.axes[_STEP])
        rows.setdefault(key, {})[int(case.axes[_NODES])] = case
    column_names = [*axes, _STEP]
    # Sorting is stable, so the operations on a graph stay in the order in which they were measured.
    graph_keys = list(dict.fromkeys(key[:-1] for key in rows))
    return Table(
        columns=(
            *(Column(axis_title(name), "text") for name in column_names),
            *(
                Column(f"{node_count} node{'s' if node_count > 1 else ''}", "number")
                for node_count in node_counts
            ),
        ),
        rows=tuple(
            (
                *(axis_value(name, value) for name, value in zip(column_names, key, strict=True)),
                *(_step_time(case_by_count.get(node_count)) for node_count in node_counts),
            )
            for key, case_by_count in sorted(
                rows.items(), key=lambda row: graph_keys.index(row[0][:-1])
            )
        ),
        caption=_steps_caption(cases),
    )


def _step_time(case: CaseResult | None) -> Value:
    return Text("-") if case is None else cell(Seconds, case.median_s)


def _steps_caption(cases: Sequence[CaseResult]) -> str:
    common_axes_text = describe_common_axes(cases)
    caption_lines = [
        f"Median time of each step. All cases: {common_axes_text}."
        if common_axes_text
        else "Median time of each step."
    ]
    noises = [case.statistics.noise for case in cases if isinstance(case.statistics, Summary)]
    if noises:
        noise_range = _text_range(format_ratio(min(noises)), format_ratio(max(noises)))
        caption_lines.append(f"±: {noise_range} (half the width of the 95% CI).")
    clocks = [median(case.sm_clock_hz) / 1e6 for case in cases if case.sm_clock_hz]
    if clocks:
        caption_lines.append(
            f"SM clock: {_text_range(f'{min(clocks):.0f}', f'{max(clocks):.0f}')} MHz."
        )
    return " ".join(caption_lines)


def _text_range(lowest_text: str, highest_text: str) -> str:
    return lowest_text if lowest_text == highest_text else f"{lowest_text} to {highest_text}"
