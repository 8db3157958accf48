"""The health of a GPU: each figure compared with the value of a healthy GPU.

The expected rate is the one measured on another GPU of the model. For other models it is a share of the
theoretical peak, with a wider band. Latencies depend on the host and the driver, not on the model: their
bound is several times the measured latency, which only a faulty machine exceeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

from cudakit.bench.case import Verification
from cudakit.bench.environment import environment_warnings, likely_causes
from cudakit.bench.labels import Axis, describe_sizes, join_first_names
from cudakit.bench.report.lanes import sample_section
from cudakit.bench.report.notes import SIMULATED_NOTE, machine_facts, notes, title
from cudakit.bench.report.table import (
    cell,
    device_columns,
    percent_of_peak,
    result_columns,
    sample_columns,
)
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.bench.roofline import Fields
from cudakit.bench.summary import environments
from cudakit.report.document import (
    Column,
    Document,
    Node,
    Note,
    Rate,
    Ratio,
    Seconds,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, capitalized, format_ratio

Health: TypeAlias = Literal["pass", "warn", "fail"]
# Source of an expected value: measured on a GPU of the model, derived from the datasheet, or a general bound.
Source: TypeAlias = Literal["measured", "derived", "bound"]

# Shares of the expected value: warn below, fail below and, of a measured one, warn above. GPUs of one node
# differ by 5 % and more.
# Four other H200s at their power limit reached 0.84 to 0.88 of the expected rates of tensor-core GEMMs.
_SHARES_OF_MEASURED_VALUE = (0.93, 0.80, 1.15)
_SHARES_OF_DERIVED_VALUE = (0.75, 0.5)
# A time fails beyond this multiple of its bound.
_FAIL_MULTIPLE = 3

# Measured on one H200 SXM with random data: GEMMs of 8192 by 8192 by 8192 by cuBLAS; copies of pinned memory
# over PCIe 5.0 x16; copies within the device, counting reads and writes; kernels on buffers of 1 GiB. "memory
# read" is the dot product of STREAM on ND H200 v5 (Azure AI benchmarking guide).
_MEASURED_FIGURES: Mapping[str, Mapping[str, float]] = {
    "NVIDIA H200": {
        "gemm fp64": 57.1e12,
        "gemm fp32": 50.6e12,
        "gemm tf32": 410e12,
        "gemm fp16": 764e12,
        "gemm bf16": 793e12,
        "gemm fp8_e4m3": 1441e12,
        "copy h2d": 55.5e9,
        "copy d2h": 55.4e9,
        "copy d2d": 4260e9,
        "memory copy": 4273e9,
        "memory triad": 4377e9,
        "memory read": 4480e9,
    }
}

# Expected shares of the theoretical peak. The H200 reached 0.73 to 0.85 in GEMMs, 0.89 to 0.93 in memory
# kernels, and 0.88 in copies.
_SHARES_OF_PEAK: Mapping[str, float] = {"gemm": 0.75, "memory": 0.88, "copy": 0.88}
_NOT_DERIVED = ("copy pageable-h2d", "copy pageable-d2h")

# Upper bounds in seconds. On the host of the measured H200, a launch takes about 3 us by cuda.core, an event
# 0.6 us, and a kernel with its events 12 us. The driver serves the first allocation from a pool after each
# synchronization.
_TIME_LIMITS: Mapping[str, float] = {
    "launch": 20e-6,
    "launch-to-start": 40e-6,
    "launch-to-finish": 50e-6,
    "launch-back-to-back": 10e-6,
    "event-record": 10e-6,
    "stream-synchronize": 20e-6,
    "alloc stream-ordered": 1e-3,
}

# For each bench, the axis whose value is part of a figure's name.
_NAMING_AXES: Mapping[str, str] = {
    "gemm": "dtype",
    "copy": "direction",
    "memory": "operation",
    "launch": "call",
    "alloc": "allocator",
}

_NOT_ASSESSED = Unavailable("not assessed: all values are simulated, computed on the CPU")
_NOTHING_ASSESSED = Unavailable("not assessed: no expected values are known for this GPU")
_NO_EXPECTATION = Unavailable("none is known")
_WORST_FIRST: tuple[Health, ...] = ("fail", "warn", "pass")


@dataclass(frozen=True, slots=True)
class Band:
    """The expected value of one figure, and the limits beyond which a value is a warning or a failure."""

    unit: str  # Unit of the figure: "FLOP/s", "OP/s", "B/s", or "s".
    expected: float  # Expected value in ``unit``.
    warn: float  # Limit: a figure that is worse is a warning.
    fail: float  # Limit: a figure that is worse is a failure.
    # Upper limit of a rate: a higher rate is a warning, because the GPU is of another model or the
    # measurement is wrong. null: no limit.
    warn_above: float | None
    source: Source  # Origin of the expected value.

    def health_of(self, measured_value: float) -> Health:
        """Return the health of a measured value."""
        sign = 1 if self.unit == "s" else -1  # longer times and lower rates are worse
        if sign * measured_value > sign * self.fail:
            return "fail"
        is_too_high = self.warn_above is not None and measured_value > self.warn_above
        return "warn" if is_too_high or sign * measured_value > sign * self.warn else "pass"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a health check."""

    name: str  # Name of the figure: "gemm bf16".
    axes: Mapping[str, Axis]  # Axes of the figure's case.
    health: Health | Unavailable  # Unavailable if there is no expected value.
    reached: float | Unavailable  # Measured value in ``unit``.
    unit: str  # Unit of the figure: "FLOP/s", "OP/s", "B/s", or "s".
    band: Band | Unavailable  # Expected value and its limits.
    ratio_to_limit: float | Unavailable  # Share of the peak at the measured clock.

    @property
    def is_out_of_band(self) -> bool:
        """Whether the figure is a warning or a failure."""
        return self.health in ("warn", "fail")


@dataclass(frozen=True, slots=True)
class SkippedBench:
    """A bench that could not be run."""

    what: str  # Name of the bench: "gemm".
    reason: str  # Reason why the bench was not run.
    remedy: str  # Command that installs the missing package.


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """The result of a health check: whether a GPU is as fast as expected of its model."""

    schema: ClassVar[str] = "cudakit.suite/1"
    simulated: bool  # whether a simulated device did the work
    quick: bool  # Whether --quick was given.
    health: Health | Unavailable  # Health of the worst figure.
    causes: tuple[str, ...]  # Likely causes of warnings and failures.
    figures: tuple[Figure, ...]  # Figures in the order measured.
    left_out: tuple[SkippedBench, ...]  # Benches that could not be run.
    bench: BenchResult  # The measurement, of schema cudakit.bench/1.


def assess_health(
    result: BenchResult, *, quick: bool, left_out: Iterable[SkippedBench] = (), fields: Fields
) -> SuiteResult:
    """Assess a measurement. ``fields`` are NVML fields that may show causes of bad figures."""
    figures = tuple(map(figure, result.results))
    suspects = [
        case.environment
        for rated, case in zip(figures, result.results, strict=True)
        if rated.is_out_of_band
    ]
    healths = {rated.health for rated in figures}
    worst = next((health for health in _WORST_FIRST if health in healths), None)
    return SuiteResult(
        simulated=result.simulated,
        quick=quick,
        health=worst or (_NOT_ASSESSED if result.simulated else _NOTHING_ASSESSED),
        causes=likely_causes(suspects, fields) if suspects else (),
        figures=figures,
        left_out=tuple(left_out),
        bench=result,
    )


def figure(case: CaseResult) -> Figure:
    """Assess a case: wrong values fail, and a case that the GPU does not support is not assessed."""
    reached, unit = measured_value(case)
    expected = _NOT_ASSESSED if case.environment.simulated else band(case)
    health: Health | Unavailable
    if isinstance(case.verification, Verification) and not case.verification.passed:
        health = "fail"
    elif isinstance(reached, Unavailable):
        health = reached if case.is_unsupported else "fail"
    else:
        health = expected if isinstance(expected, Unavailable) else expected.health_of(reached)
    return Figure(
        name=figure_name(case),
        axes=case.axes,
        health=health,
        reached=reached,
        unit=unit,
        band=expected,
        ratio_to_limit=case.ratio_to_limit,
    )


def figure_name(case: CaseResult) -> str:
    """Return the name of the figure of a case: its bench and the value of one axis, as in ``gemm bf16``."""
    axis_text = str(case.axes.get(_NAMING_AXES.get(case.name, ""), ""))
    # Calls such as "launch-to-start" are named without "launch".
    bench_name = "" if case.name == "launch" and axis_text else case.name
    peer_text = f"to {case.axes['peer']}" if "peer" in case.axes else ""
    return " ".join(filter(None, (bench_name, axis_text, peer_text)))


def measured_value(case: CaseResult) -> tuple[float | Unavailable, str]:
    """Return the rate of a case, or its time if it measures a latency, and the unit of this value."""
    if case.amount:
        return case.per_second(case.amount), f"{case.unit}/s"
    return case.median_s, "s"


def band(case: CaseResult) -> Band | Unavailable:
    """Return the expected value of a case, or the reason why there is none."""
    name, (_, unit) = figure_name(case), measured_value(case)
    if unit == "s":
        bound_s = _TIME_LIMITS.get(name)
        if bound_s is None:
            return _NO_EXPECTATION
        return Band("s", bound_s, bound_s, _FAIL_MULTIPLE * bound_s, None, "bound")
    measured = _MEASURED_FIGURES.get(str(case.environment.gpu), {}).get(name)
    if measured is not None:
        warn, fail, warn_above = _SHARES_OF_MEASURED_VALUE
        return Band(
            unit, measured, warn * measured, fail * measured, warn_above * measured, "measured"
        )
    if name in _NOT_DERIVED:
        return Unavailable("the rate depends on the host more than on the GPU")
    limit, share_of_peak = case.limit, _SHARES_OF_PEAK.get(case.name)
    if share_of_peak is None:
        return _NO_EXPECTATION
    if isinstance(limit, Unavailable):
        return limit
    derived = share_of_peak * case.amount / limit.datasheet_s
    warn, fail = _SHARES_OF_DERIVED_VALUE
    return Band(unit, derived, warn * derived, fail * derived, None, "derived")


# --- the report: the verdict, then each figure with its expected value --------------------------------

_COLUMNS = (
    Column("figure", "text"),
    *(Column(it, "number") for it in ("measured", "expected", "of expected", "% of peak")),
    *(Column(title, "text") for title in ("verdict", "source")),
)
_CAPTION = (
    "Source of the expected value: measured (on another GPU of this model), derived (a fraction of the "
    "theoretical peak), or bound (a time that no healthy machine exceeds)."
)
_NEXT_STEPS = (
    "look for other load on the GPU and the host: cudakit devices",
    "check the set-up: cudakit doctor",
)


def present_health(suite: SuiteResult, *, detail: bool = False) -> Document:
    """Return the report of a health check; ``detail`` adds the distribution of the samples, for a page.

    The Columns are for exports such as CSV, as in the reports of other benches.
    """
    result = suite.bench
    cases = result.results
    # The headline gives these warnings as likely causes, and says that values are simulated.
    causes = environment_warnings(environments(cases))
    other_warnings = tuple(warning for warning in result.warnings if warning not in causes)
    other_notes = [
        note
        for note in notes(replace(result, warnings=other_warnings))
        if note.text != SIMULATED_NOTE
    ]
    nodes: list[Node] = [result_columns(cases), _headline(suite), figure_table(suite)]
    for bench in suite.left_out:
        text = f"{bench.what} was not run: {bench.reason}."
        nodes.append(Note("warn", text, (bench.remedy,)))
    nodes += [*_without_expectation(suite), *other_notes]
    if cases:
        samples = sample_columns(cases)
        nodes += [machine_facts(result), samples, device_columns(cases[0].environment)]
        nodes += [sample_section(samples)] if detail else []
    is_assessed = any(not isinstance(figure.health, Unavailable) for figure in suite.figures)
    return Document(title(result) + ("" if is_assessed else ", not assessed"), tuple(nodes))


def _headline(suite: SuiteResult) -> Note:
    """Return the verdict, the figures outside of their bands, and likely causes."""
    assessed = [figure for figure in suite.figures if not isinstance(figure.health, Unavailable)]
    abnormal = [figure for figure in assessed if figure.is_out_of_band]
    if not assessed:
        reason = suite.health.reason if isinstance(suite.health, Unavailable) else "nothing was run"
        return Note("info", f"{capitalized(reason)}.")
    if not abnormal:
        return Note("ok", f"Pass: all {len(assessed)} assessed figures are as expected.")
    names: list[str] = []
    for figure in sorted(abnormal, key=lambda figure: figure.health != "fail"):
        remark = ""
        if isinstance(figure.reached, Unavailable):
            remark = " (no value)"
        elif not isinstance(figure.band, Unavailable):
            remark = f" ({format_ratio(figure.reached / figure.band.expected)} of expected)"
        names.append(figure.name + remark)
    verdict = "Fail" if suite.health == "fail" else "Warning"
    text = (
        f"{verdict}: {len(abnormal)} of {len(assessed)} figures are not as expected: "
        f"{join_first_names(names, 4)}."
    )
    if suite.causes:
        text += f" Likely causes: {'; '.join(suite.causes)}."
    remedies = () if suite.causes else _NEXT_STEPS
    return Note("error" if suite.health == "fail" else "warn", text, remedies)


def figure_table(suite: SuiteResult) -> Table:
    """Return a row per figure, without expected values if no figure has one."""
    figures, cases = suite.figures, suite.bench.results
    rows = list(map(_row, figures, cases))
    sizes_text = describe_sizes(cases)
    caption = f"Sizes: {sizes_text}." if sizes_text else ""
    if all(isinstance(figure.band, Unavailable) for figure in figures):
        shown = (0, 1, 4)  # The columns without an expectation.
        shown_rows = (tuple(row[i] for i in shown) for row in rows)
        return Table(tuple(_COLUMNS[i] for i in shown), tuple(shown_rows), caption)
    return Table(
        _COLUMNS,
        tuple(rows),
        " ".join(filter(None, (caption, _CAPTION))),
        faint_rows=frozenset(
            i for i, figure in enumerate(figures) if isinstance(figure.health, Unavailable)
        ),
    )


def _row(figure: Figure, case: CaseResult) -> tuple[Value, ...]:
    band = figure.band
    expected: tuple[Value, Value, Value] = (
        (band, band, band)
        if isinstance(band, Unavailable)
        else (
            amount(band.expected, band.unit),
            cell(lambda reached: Ratio(reached / band.expected), figure.reached),
            Text(band.source),
        )
    )
    return (
        Text(figure.name),
        cell(lambda reached: amount(reached, figure.unit), figure.reached),
        *expected[:2],
        percent_of_peak(case),
        cell(Text, figure.health),
        expected[2],
    )


def amount(value: float, unit: str) -> Value:
    """Return a figure in its unit, as a time or a rate."""
    return Seconds(value) if unit == "s" else Rate(value, unit.removesuffix("/s"))


def _without_expectation(suite: SuiteResult) -> Iterator[Note]:
    """Yield the reason why a figure lacks an expected value; nothing if all figures lack one."""
    names: dict[str, list[str]] = {}
    for figure in suite.figures:
        if isinstance(figure.band, Unavailable):
            names.setdefault(figure.band.reason, []).append(figure.name)
    if sum(map(len, names.values())) < len(suite.figures):
        for reason, figure_names in names.items():
            names_text = join_first_names(list(dict.fromkeys(figure_names)))
            yield Note("info", f"No expected value for {names_text}: {reason}.")
