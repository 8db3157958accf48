"""The health of a GPU: its figures, each judged by what is expected of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from cudakit.core.bench.bands import Band, Health, band, figure_of, reached
from cudakit.core.bench.causes import causes
from cudakit.core.bench.limits import Fields
from cudakit.core.bench.result import Axis, BenchResult, CaseResult
from cudakit.core.bench.verification import Verification
from cudakit.units import Unavailable

_SIMULATED = Unavailable("not judged: simulated")
_NOTHING_JUDGED = Unavailable(
    "no expectation is known of this GPU: figures are shown, and not judged"
)
_WORST_FIRST: tuple[Health, ...] = ("fail", "warn", "pass")


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a health check."""

    name: str  # which: "gemm bf16"
    axes: Mapping[str, Axis]  # of its case
    health: Health | Unavailable  # unavailable where nothing is expected
    reached: float | Unavailable  # in ``unit``
    unit: str  # "FLOP/s", "OP/s", "B/s", or "s"
    band: Band | Unavailable  # what is expected of it
    ratio_to_limit: float | Unavailable  # as in cudakit.bench/1

    @property
    def is_out_of_band(self) -> bool:
        """Whether it is not what a healthy machine reaches."""
        return self.health in ("warn", "fail")


@dataclass(frozen=True, slots=True)
class LeftOut:
    """What could not be measured at all."""

    what: str  # "gemm"
    reason: str
    remedy: str  # what to do: the exact pip install


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """Whether a GPU is as fast as its kind."""

    schema: ClassVar[str] = "cudakit.suite/1"
    simulated: bool  # whether nothing here is a measurement
    quick: bool  # whether it was to take about a minute
    health: Health | Unavailable  # the worst of its figures
    causes: tuple[str, ...]  # what was seen that may have put figures out of their bands
    figures: tuple[Figure, ...]  # in the order measured
    left_out: tuple[LeftOut, ...]  # what could not be measured
    bench: BenchResult  # the measurement: cudakit.bench/1


def conclude(
    result: BenchResult, *, quick: bool, left_out: Iterable[LeftOut] = (), fields: Fields
) -> SuiteResult:
    """Judge a measurement. ``fields`` are facts and telemetry of NVML, where causes may be seen."""
    figures = tuple(map(figure, result.results))
    pairs = zip(figures, result.results, strict=True)
    suspect = [case.environment for one, case in pairs if one.is_out_of_band]
    return SuiteResult(
        simulated=result.simulated,
        quick=quick,
        health=_worst(figures) or (_SIMULATED if result.simulated else _NOTHING_JUDGED),
        causes=causes(suspect, fields) if suspect else (),
        figures=figures,
        left_out=tuple(left_out),
        bench=result,
    )


def figure(case: CaseResult) -> Figure:
    """Judge a case. One whose values are wrong fails; what the GPU cannot do is not judged."""
    amount, unit = reached(case)
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
        return amount if _is_refused(case) else "fail"
    return expected if isinstance(expected, Unavailable) else expected.judge(amount)


def _is_refused(case: CaseResult) -> bool:
    """Say whether the GPU, or the library, does not offer it: then no limit is known for it either."""
    return isinstance(case.limit, Unavailable) and case.limit == case.median_s


def _worst(figures: Sequence[Figure]) -> Health | None:
    judged = {one.health for one in figures}
    return next((health for health in _WORST_FIRST if health in judged), None)
