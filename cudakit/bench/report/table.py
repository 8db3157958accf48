"""The table of cases with time, rate and percentage of the peak, and the Columns for exports and charts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import NamedTuple, TypeAlias, TypeVar

import numpy as np

from cudakit.bench.benchmarks import words_of
from cudakit.bench.environment import Environment
from cudakit.bench.labels import (
    CUDAKIT,
    axis_names,
    axis_title,
    axis_value,
    called_library,
    describe_common_axes,
    short_labels,
    varying_axes,
)
from cudakit.bench.result import CaseResult
from cudakit.bench.stats import Summary, ci_over_rounds
from cudakit.report.document import Array, Column, Columns, Rate, Ratio, Seconds, Table, Text, Value
from cudakit.units import Unavailable, capitalized, format_ratio

_T = TypeVar("_T")
_RELATIVE_RATE = "rate relative to the baseline, median of interleaved samples with its 95% CI."


_Cell: TypeAlias = Callable[[CaseResult], Value]


def cases_table(cases: Sequence[CaseResult], *, with_common_axes: bool = False) -> Table:
    """Return a table with a row per case; rows of baselines are printed in a muted style.

    Axes that have one value in all cases are in the caption, or ``with_common_axes`` in columns.
    """
    if table := words_of(cases).table(cases, with_common_axes):
        return table
    axes = axis_names(cases) if with_common_axes else varying_axes(cases)
    columns, cells = zip(*_columns(cases), strict=True)
    axis_columns = (
        Column(
            axis_title(name),
            "text" if any(isinstance(case.axes.get(name), str) for case in cases) else "number",
        )
        for name in axes
    )
    return Table(
        columns=(*axis_columns, *columns),
        rows=tuple(
            (
                *(axis_value(name, case.axes.get(name)) for name in axes),
                *(make_cell(case) for make_cell in cells),
            )
            for case in cases
        ),
        caption=_caption(cases),
        faint_rows=frozenset(i for i, case in enumerate(cases) if case.library != CUDAKIT),
    )


def cell(make_cell: Callable[[_T], Value], value: _T | Unavailable) -> Value:
    """Return ``make_cell(value)``, or the value itself if it is Unavailable."""
    return value if isinstance(value, Unavailable) else make_cell(value)


def rate(case: CaseResult) -> Value:
    """Return operations per second or, for a case without operations, bytes per second."""
    if _is_latency(case):
        return Text("-")
    return cell(lambda amount: Rate(amount, case.unit), case.per_second(case.amount))


def percent_of_peak(case: CaseResult) -> Value:
    """Return the rate as a share of the peak at the measured clock; "-" for a latency."""
    return Text("-") if _is_latency(case) else cell(Ratio, case.ratio_to_limit)


def _columns(cases: Sequence[CaseResult]) -> Iterator[tuple[Column, _Cell]]:
    """Yield the columns after the axes that have a value for a case, and what makes their cells."""
    has_baselines, has_peak = bool(baseline_libraries(cases)), any(map(_has_peak, cases))
    has_busbw = any(map(_is_collective, cases))
    if len({case.name for case in cases}) > 1:
        yield Column("bench", "text"), lambda case: Text(case.name)
    if any("shape" in case.settings for case in cases):
        yield Column("shape", "text"), lambda case: Text(str(case.settings.get("shape", "-")))
    if has_baselines:
        yield Column("library", "text"), lambda case: Text(called_library(case))
    yield Column("time", "number"), lambda case: cell(Seconds, case.median_s)
    yield (
        Column("±", "number", is_optional=True),
        lambda case: cell(lambda summary: Ratio(summary.noise), case.statistics),
    )
    if any(case.amount for case in cases):
        # A narrow table with baselines shows the relative rate instead.
        is_optional = has_baselines and not words_of(cases).always_rate
        yield Column("algbw" if has_busbw else "rate", "number", is_optional=is_optional), rate
    if has_busbw:
        yield Column("busbw", "number"), _bus_bandwidth
    for baseline in measured_baselines(cases):
        yield Column(f"vs {baseline}", "number"), partial(relative_rate, baseline, cases=cases)
    if has_peak:
        yield Column("% of peak", "number"), percent_of_peak
    if any(map(_has_datasheet_peak, cases)):
        yield (
            Column("% of datasheet", "number", is_optional=True),
            lambda case: Text("-") if _is_latency(case) else cell(Ratio, case.ratio_to_datasheet),
        )
    if any(_is_known(case.energy_j) for case in cases):
        yield Column("energy", "number", is_optional=True), _energy
    if any(case.sm_clock_hz for case in cases):
        yield Column("SM clock", "number", is_optional=True), _clock
    if has_peak:
        yield (
            Column("bound", "number", is_optional=True),
            lambda case: (
                Text("-")
                if _is_latency(case)
                else cell(lambda limit: Text(limit.bound), case.limit)
            ),
        )


def _is_known(value: object) -> bool:
    return not isinstance(value, Unavailable)


def _is_latency(case: CaseResult) -> bool:
    """Return whether a case has a time, but neither operations nor bytes, so that it has no rate."""
    return not case.amount and _is_known(case.median_s)


def _is_collective(case: CaseResult) -> bool:
    return case.bus_factor is not None


def _has_peak(case: CaseResult) -> bool:
    return _is_known(case.limit)


def _has_datasheet_peak(case: CaseResult) -> bool:
    """Return whether the peak at the datasheet's clock may differ from that at the measured clock."""
    limit = case.limit
    return (
        bool(case.operations) and not isinstance(limit, Unavailable) and _is_known(limit.measured_s)
    )


def _bus_bandwidth(case: CaseResult) -> Value:
    """Return the bus bandwidth of a collective; "-" for one rank, which uses no link."""
    if case.axes.get("ranks") == 1 and _is_known(case.median_s):
        return Text("-")
    return cell(lambda bandwidth: Rate(bandwidth, case.unit), case.bus_bandwidth)


def _clock(case: CaseResult) -> Value:
    if isinstance(case.median_s, Unavailable):
        return case.median_s
    if not case.sm_clock_hz:
        return Unavailable("the clock was not measured")
    return Text(f"{median(case.sm_clock_hz) / 1e6:.0f} MHz")


def _energy(case: CaseResult) -> Value:
    """Return the energy of one operation or, without operations, of one execution."""
    if isinstance(case.energy_j, Unavailable):
        return case.energy_j
    if case.operations:
        return Text(f"{case.energy_j / case.operations * 1e12:.3g} pJ/{case.operation}")
    return Text(f"{case.energy_j:.3g} J")


def _caption(cases: Sequence[CaseResult]) -> str:
    words, common_axes = words_of(cases), describe_common_axes(cases)
    has_peak = any(map(_has_peak, cases))
    headings = " and ".join(f"vs {name}" for name in measured_baselines(cases))
    peak_text = words.peak(cases)
    if not peak_text and has_peak:
        peak_text = _explain_peak(cases)
        if any(map(_is_latency, cases)):
            peak_text += ' "-": host times and latencies have no rate and no peak.'
    lines = (
        f"All cases: {common_axes}." if common_axes else "",
        words.size(cases),
        "±: half the width of the 95% CI of the median time.",
        words.rate(cases),
        f"{capitalized(headings)}: {_RELATIVE_RATE}" if headings else "",
        peak_text,
        "Bound: the peak that applies: arithmetic, memory or link." if has_peak else "",
    )
    return " ".join(filter(None, lines))


def _explain_peak(cases: Sequence[CaseResult]) -> str:
    arithmetic_cases = [case for case in cases if case.operations and _has_peak(case)]
    if not arithmetic_cases:
        return "% of peak: rate divided by the theoretical bandwidth of the memory or link."
    text = (
        "% of peak: rate divided by the roofline of arithmetic, and of memory if data is not in the L2 "
        "cache,"
    )
    has_clock = [_has_datasheet_peak(case) for case in arithmetic_cases]
    if not any(has_clock):
        return f"{text} at the SM clock of the datasheet, because the clock was not measured."
    clock = "measured SM clock" if all(has_clock) else "SM clock that was measured, if any"
    return f"{text} at the {clock}. % of datasheet: the same at the SM clock of the datasheet."


def text_range(lowest: str, highest: str) -> str:
    """Return ``low to high``, or the single text if both are equal."""
    return lowest if lowest == highest else f"{lowest} to {highest}"


# --- cudakit's rate relative to a baseline ------------------------------------------------------------


class RelativeRate(NamedTuple):
    """cudakit's rate divided by a baseline's, and its 95% CI."""

    ratio: float
    low: float
    high: float

    def __str__(self) -> str:
        # One decimal, because 99.6% and 100.4% differ in meaning.
        return f"{self.ratio:.1%} ± {format_ratio((self.high - self.low) / 2)}"


def baseline_libraries(cases: Sequence[CaseResult]) -> list[str]:
    """Return the libraries of baselines, in the order of first appearance."""
    return [name for name in dict.fromkeys(case.library for case in cases) if name != CUDAKIT]


def measured_baselines(cases: Sequence[CaseResult]) -> list[str]:
    """Return the baselines that have at least one time."""
    return baseline_libraries([case for case in cases if _is_known(case.median_s)])


def relative_rate(baseline: str, case: CaseResult, cases: Sequence[CaseResult]) -> Value:
    """Return cudakit's rate relative to a baseline's as text: ``99.6% ± 0.2%``; "-" for a baseline."""
    if case.library != CUDAKIT:
        return Text("-")
    return cell(lambda rate: Text(str(rate)), ratio_to(baseline, case, cases))


def ratio_to(
    baseline: str, case: CaseResult, cases: Sequence[CaseResult]
) -> RelativeRate | Unavailable:
    """Return the rate of a case relative to that of a baseline in the same case."""
    other = next(
        (it for it in cases if (it.library, it.name, it.axes) == (baseline, case.name, case.axes)),
        None,
    )
    if other is None:
        return Unavailable(f"{baseline} did not run this case")
    for result in (case, other):
        if isinstance(result.median_s, Unavailable):
            return result.median_s
    # Both samples of a pair ran at the same clock.
    rounds = [
        list(zip(times, other_times, strict=False))
        for times, other_times in zip(_rounds(case), _rounds(other), strict=False)
    ]
    sizes = [len(pairs) for pairs in rounds if pairs]
    ratios = [other_s / case_s for pairs in rounds for case_s, other_s in pairs if case_s]
    if not ratios:
        return Unavailable("the measured time is 0")
    return RelativeRate(median(ratios), *ci_over_rounds(ratios, sizes if len(sizes) > 1 else ()))


def _rounds(case: CaseResult) -> Iterator[tuple[float, ...]]:
    first = 0
    for count in case.rounds or (len(case.samples_s),):
        yield case.samples_s[first : first + count]
        first += count


# --- Columns, which are named arrays, for CSV, nvbench's JSON and charts ------------------------------


def result_columns(cases: Sequence[CaseResult]) -> Columns:
    """Return the Columns ``results``, with a row per case.

    They are ``name``, the axes, then figures from ``median_s`` on; NaN is an unavailable figure. With
    baselines, ``contender`` is "cudakit" or the baseline, and ``library`` the library as the report names
    it, such as "cublaslt".
    """
    arrays: dict[str, Array] = {}
    texts: dict[str, tuple[str, ...]] = {}

    def add_words(name: str, words: Sequence[str | None]) -> None:
        """Add an index per word, -1 for None, and the distinct words that the indices refer to."""
        distinct = list(dict.fromkeys(word for word in words if word is not None))
        arrays[name] = np.array(
            [-1 if it is None else distinct.index(it) for it in words], np.int64
        )
        texts[name] = tuple(distinct)

    add_words("name", [case.name for case in cases])
    for name in axis_names(cases):
        values = [case.axes.get(name) for case in cases]
        # The types must be exact, because bool is a subclass of int.
        kinds = {type(value) for value in values}
        if kinds == {int} or kinds == {float}:
            arrays[name] = np.array(values, np.int64 if kinds == {int} else np.float64)
        else:
            add_words(name, [None if value is None else str(value) for value in values])
    has_baselines = bool(baseline_libraries(cases))
    if has_baselines:
        add_words("contender", [case.library for case in cases])
    if cases:
        figures = [_figures(case) for case in cases]
        for name in figures[0]:
            arrays[name] = np.array([row[name] for row in figures], np.float64)
        if any(map(_is_collective, cases)):
            arrays["busbw_bytes_per_s"] = np.array([number(case.bus_bandwidth) for case in cases])
        arrays["samples"] = np.array([len(case.samples_s) for case in cases], np.int64)
        arrays["verified"] = np.array([case.verified for case in cases], np.bool_)
        arrays["converged"] = np.array([case.converged for case in cases], np.bool_)
        arrays["simulated"] = np.array([case.environment.simulated for case in cases], np.bool_)
    if has_baselines:
        add_words("library", [called_library(case) for case in cases])
    return Columns("results", arrays, texts)


def _figures(case: CaseResult) -> dict[str, float]:
    summary = case.statistics if isinstance(case.statistics, Summary) else None
    low_s, high_s = summary.ci95_s if summary else (np.nan, np.nan)
    names = ("minimum_s", "q1_s", "q3_s", "maximum_s", "mean_s", "stdev_s")

    def per_second(amount: float) -> float:
        return number(case.per_second(amount)) if amount else np.nan

    return {
        "median_s": number(case.median_s),
        "ci95_low_s": low_s,
        "ci95_high_s": high_s,
        **{name: getattr(summary, name) if summary else np.nan for name in names},
        "operations_per_s": per_second(case.operations),
        "bytes_per_s": per_second(case.bytes_moved),
        "limit_s": limit_s(case),
        "ratio_to_limit": number(case.ratio_to_limit),
        "ratio_to_datasheet": number(case.ratio_to_datasheet),
        "sm_clock_hz": median(case.sm_clock_hz) if case.sm_clock_hz else np.nan,
        "energy_j": number(case.energy_j),
    }


def sample_columns(cases: Sequence[CaseResult]) -> Columns:
    """Return the Columns ``samples``: the samples of each case in the order measured."""
    clocks = (case.sm_clock_hz or (np.nan,) * len(case.samples_s) for case in cases)
    rounds = (
        round_number
        for case in cases
        for round_number, size in enumerate(case.rounds or (len(case.samples_s),))
        for _ in range(size)
    )
    return Columns(
        "samples",
        {
            "case": np.repeat(np.arange(len(cases)), [len(case.samples_s) for case in cases]),
            "time_s": np.array([time for case in cases for time in case.samples_s], np.float64),
            "sm_clock_hz": np.array([hz for row in clocks for hz in row], np.float64),
            "round": np.array(list(rounds), np.int64),
        },
        {"case": tuple(short_labels(cases))},
    )


def device_columns(environment: Environment) -> Columns:
    """Return the Columns ``device``, with one row."""
    texts = {"gpu": environment.gpu, "compute_capability": environment.compute_capability}
    known = {name: () if isinstance(it, Unavailable) else (it,) for name, it in texts.items()}
    numbers = (
        ("multiprocessors", environment.multiprocessors, 1),
        ("sm_clock_max_hz", environment.sm_clock_max_mhz, 1e6),
        ("memory_clock_hz", environment.memory_clock_mhz, 1e6),
        ("memory_bus_bits", environment.memory_bus_bits, 1),
        ("memory_bytes", environment.memory_bytes, 1),
        ("l2_bytes", environment.l2_bytes, 1),
    )
    arrays: dict[str, Array] = {name: np.array([len(it) - 1]) for name, it in known.items()}
    arrays |= {name: np.array([number(it) * factor]) for name, it, factor in numbers}
    return Columns("device", arrays, known)


def limit_s(case: CaseResult) -> float:
    """Return the lower bound of the time of a case; NaN if it is unavailable."""
    return np.nan if isinstance(case.limit, Unavailable) else case.limit.seconds


def number(value: float | Unavailable) -> float:
    """Return the value as a float; NaN if it is unavailable."""
    return np.nan if isinstance(value, Unavailable) else float(value)
