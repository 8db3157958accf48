"""The health of a GPU: each figure compared with the value of a healthy GPU.

The expected rate is the one measured on another GPU of the model. For other models it is a share of the
theoretical peak, with a wider band. Latencies depend on the host and the driver, not on the model: their
bound is several times the measured latency, which only a faulty machine exceeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import ClassVar, Literal, TypeAlias

from cudakit.core.bench.result import BenchResult, CaseResult
from cudakit.core.bench.roofline import Fields, Limit
from cudakit.core.bench.warnings import likely_causes
from cudakit.core.bench.workload import Axis, Verification
from cudakit.units import Unavailable

Health: TypeAlias = Literal["pass", "warn", "fail"]
# measured: on another GPU of the model; derived: from the datasheet of this GPU; bound: for all machines.
Source: TypeAlias = Literal["measured", "derived", "bound"]

# Shares of the expected value: warn below, fail below, warn above. GPUs of one node differ by 5 % and more.
_OF_MEASURED = (0.93, 0.85, 1.15)
_OF_DERIVED = (0.75, 0.5, None)
_OF_BOUND = 3

# Measured on one H200 SXM with random data: GEMMs of 8192 by 8192 by 8192 by cuBLAS; copies of pinned memory
# over PCIe 5.0 x16; copies within the device, counting reads and writes; kernels on buffers of 1 GiB. "memory
# read" is the dot product of STREAM on ND H200 v5 (Azure AI benchmarking guide).
_H200: Mapping[str, float] = MappingProxyType(
    {
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
)
_MEASURED: Mapping[str, Mapping[str, float]] = MappingProxyType({"NVIDIA H200": _H200})

# Shares of the theoretical peak that the H200 reached: 0.73 to 0.85, 0.89 to 0.93, and 0.88.
_SHARES = MappingProxyType({"gemm": 0.75, "memory": 0.88, "copy": 0.88})
_OF_THE_HOST = Unavailable("the rate depends on the host more than on the GPU")
_NOT_DERIVED = MappingProxyType(
    {"copy pageable-h2d": _OF_THE_HOST, "copy pageable-d2h": _OF_THE_HOST}
)

# In seconds. On the host of that H200 a launch takes about 3 us by cuda.core, an event 0.6 us, and a kernel
# with its events 12 us. The driver serves the first allocation from a pool after each synchronization.
_BOUNDS: Mapping[str, float] = MappingProxyType(
    {
        "launch": 20e-6,
        "launch-to-start": 40e-6,
        "launch-to-finish": 50e-6,
        "launch-back-to-back": 10e-6,
        "event-record": 10e-6,
        "stream-synchronize": 20e-6,
        "alloc stream-ordered": 1e-3,
    }
)

# By bench, the axis whose value is part of a figure's name.
_NAMED_BY = MappingProxyType(
    {
        "gemm": "dtype",
        "copy": "direction",
        "memory": "operation",
        "launch": "call",
        "alloc": "allocator",
    }
)

_SIMULATED = Unavailable("not assessed: all values are simulated, computed on the CPU")
_NOTHING_ASSESSED = Unavailable("not assessed: no expected values are known for this GPU")
_UNKNOWN = Unavailable("none is known")
_WORST_FIRST: tuple[Health, ...] = ("fail", "warn", "pass")


@dataclass(frozen=True, slots=True)
class Band:
    """The expected value of one figure: a lower bound of a rate, an upper bound of a time."""

    unit: str  # "FLOP/s", "OP/s", "B/s", or "s"
    expected: float  # in that unit
    warn: float  # a worse figure is a warning
    fail: float  # a worse figure is a failure
    warn_above: (
        float | None
    )  # a higher rate is a warning: another GPU model, or a wrong measurement
    source: Source  # origin of the expected value

    def health_of(self, reached: float) -> Health:
        """Return the health of a measured value."""
        sign = 1 if self.unit == "s" else -1  # longer times and lower rates are worse
        if sign * reached > sign * self.fail:
            return "fail"
        above = self.warn_above is not None and reached > self.warn_above
        return "warn" if above or sign * reached > sign * self.warn else "pass"


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a health check."""

    name: str  # "gemm bf16"
    axes: Mapping[str, Axis]  # of its case
    health: Health | Unavailable  # Unavailable without an expected value
    reached: float | Unavailable  # measured value in ``unit``
    unit: str  # "FLOP/s", "OP/s", "B/s", or "s"
    band: Band | Unavailable  # expected value
    ratio_to_limit: float | Unavailable  # as in cudakit.bench/1

    @property
    def is_out_of_band(self) -> bool:
        """Whether the figure is a warning or a failure."""
        return self.health in ("warn", "fail")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A bench that could not be run."""

    what: str  # "gemm"
    reason: str
    remedy: str  # the command that installs the missing package


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """Whether a GPU is as fast as expected of its model."""

    schema: ClassVar[str] = "cudakit.suite/1"
    simulated: bool
    quick: bool  # whether --quick was given
    health: Health | Unavailable  # of the worst figure
    causes: tuple[str, ...]  # likely causes of warnings and failures
    figures: tuple[Figure, ...]  # in the order measured
    left_out: tuple[LeftOut, ...]  # benches that could not be run
    bench: BenchResult  # the measurement: cudakit.bench/1


def assess(
    result: BenchResult, *, quick: bool, left_out: Iterable[LeftOut] = (), fields: Fields
) -> SuiteResult:
    """Assess a measurement. ``fields`` are NVML fields that may show causes of bad figures."""
    figures = tuple(map(figure, result.results))
    pairs = zip(figures, result.results, strict=True)
    suspect = [case.environment for rated, case in pairs if rated.is_out_of_band]
    return SuiteResult(
        simulated=result.simulated,
        quick=quick,
        health=_worst(figures) or (_SIMULATED if result.simulated else _NOTHING_ASSESSED),
        causes=likely_causes(suspect, fields) if suspect else (),
        figures=figures,
        left_out=tuple(left_out),
        bench=result,
    )


def figure(case: CaseResult) -> Figure:
    """Assess a case: wrong values fail, and a case that the GPU does not support is not assessed."""
    amount, unit = measured_value(case)
    expected = _SIMULATED if case.environment.simulated else band(case)
    return Figure(
        name=figure_of(case),
        axes=case.axes,
        health=_health(case, expected, amount),
        reached=amount,
        unit=unit,
        band=expected,
        ratio_to_limit=case.ratio_to_limit,
    )


def _health(
    case: CaseResult, expected: Band | Unavailable, amount: float | Unavailable
) -> Health | Unavailable:
    if isinstance(case.verification, Verification) and not case.verification.passed:
        return "fail"
    if isinstance(amount, Unavailable):
        return amount if case.is_unsupported else "fail"
    return expected if isinstance(expected, Unavailable) else expected.health_of(amount)


def _worst(figures: Sequence[Figure]) -> Health | None:
    seen = {rated.health for rated in figures}
    return next((health for health in _WORST_FIRST if health in seen), None)


def figure_of(case: CaseResult) -> str:
    """Return the name of the figure of a case: its bench and the value of one axis, as in ``gemm bf16``."""
    kind = str(case.axes.get(_NAMED_BY.get(case.name, ""), ""))
    bench = "" if case.name == "launch" and kind else case.name  # a call is named without its bench
    peer = f"to {case.axes['peer']}" if "peer" in case.axes else ""
    return " ".join(filter(None, (bench, kind, peer)))


def measured_value(case: CaseResult) -> tuple[float | Unavailable, str]:
    """Return the rate of a case, or the time of a latency; and the unit."""
    if case.amount:
        return case.per_second(case.amount), f"{case.unit}/s"
    return case.median_s, "s"


def band(case: CaseResult) -> Band | Unavailable:
    """Return the expected value of a case, or the reason why there is none."""
    figure, (_, unit) = figure_of(case), measured_value(case)
    if unit == "s":
        return _bound(figure)
    measured = _MEASURED.get(str(case.environment.gpu), {}).get(figure)
    if measured is not None:
        return _around(measured, unit, _OF_MEASURED, "measured")
    if figure in _NOT_DERIVED:
        return _NOT_DERIVED[figure]
    return _derived(case, unit)


def _bound(figure: str) -> Band | Unavailable:
    bound_s = _BOUNDS.get(figure)
    if bound_s is None:
        return _UNKNOWN
    return Band("s", bound_s, bound_s, _OF_BOUND * bound_s, None, "bound")


def _derived(case: CaseResult, unit: str) -> Band | Unavailable:
    limit, share = case.limit, _SHARES.get(case.name)
    if share is None:
        return _UNKNOWN
    if not isinstance(limit, Limit):
        return limit
    return _around(share * case.amount / limit.datasheet_s, unit, _OF_DERIVED, "derived")


def _around(
    expected: float, unit: str, shares: tuple[float, float, float | None], source: Source
) -> Band:
    warn, fail, above = shares
    highest = None if above is None else above * expected
    return Band(unit, expected, warn * expected, fail * expected, highest, source)
