"""What was measured. Field order is the order of JSON keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from cudakit.core.bench.costs import GraphCosts
from cudakit.core.bench.environment import Environment
from cudakit.core.bench.limits import Limit
from cudakit.core.bench.method import Method
from cudakit.core.bench.samples import Samples
from cudakit.core.bench.stats import Summary, summarize
from cudakit.core.bench.verification import Verification
from cudakit.units import Unavailable

Axis: TypeAlias = str | int | float

_NO_ENERGY = Unavailable("no energy was read")
_UNKNOWN_LIMIT = Unavailable("no limit was asked for")
_NOTHING_TO_VERIFY = Unavailable("there are no values to verify")


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case of a bench: figures, every sample, and how they came about."""

    name: str  # of the bench: "gemm"
    axes: Mapping[str, Axis]  # what tells the case from its neighbours: m, n, k, dtype
    contender: str  # who ran it: "cudakit", or the library that it is compared with
    median_s: float | Unavailable  # the headline: time of one execution
    ci95_s: tuple[float, float] | Unavailable  # where the true median is, with 95 % confidence
    samples_s: tuple[float, ...]  # every time, in the order taken
    limit: Limit | Unavailable  # the least time that the device's arithmetic and wires allow
    ratio_to_limit: float | Unavailable  # limit over median, at the measured clock where known
    ratio_to_datasheet: float | Unavailable  # the same with the clock of the datasheet
    verified: bool  # whether values were compared with a reference, and are right
    verification: Verification | Unavailable  # how
    method: Method  # how it was measured
    environment: Environment  # on what
    sm_clock_hz: tuple[float, ...]  # during each sample; empty where it is not known
    discarded: int  # samples that were not kept
    converged: bool  # whether the stopping rule was met before the time ran out
    statistics: Summary | Unavailable  # of the samples
    operations: float  # of one execution; 0 where that is not what counts
    operation: str  # what they are called: "FLOP", "OP"
    bytes_moved: float  # of one execution; 0 where that is not what counts
    energy_j: float | Unavailable  # of one execution
    settings: Mapping[str, Axis]  # what was chosen besides the axes: algorithm, workspace
    rounds: tuple[int, ...] = ()  # samples of each round, which had its memory anew; empty for one

    @property
    def cycles(self) -> tuple[float, ...]:
        """Time by clock, of each sample; empty where clocks are unknown."""
        return Samples(self.samples_s, self.sm_clock_hz).cycles

    @property
    def refused(self) -> bool:
        """Whether nothing was run, as the device or a library does not offer it: nothing is wrong either."""
        return isinstance(self.verification, Unavailable) and self.verification == self.median_s

    @property
    def key(self) -> tuple[object, ...]:
        """What is the same for the same case in another run."""
        return (self.name, self.contender, *sorted(self.axes.items()))

    def per_second(self, amount: float) -> float | Unavailable:
        """Give an amount of one execution as a rate."""
        if isinstance(self.median_s, Unavailable):
            return self.median_s
        return amount / self.median_s if self.median_s else Unavailable("it took no time")


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What one command measured, on one device."""

    schema: ClassVar[str] = "cudakit.bench/1"
    simulated: bool  # whether nothing here is a measurement
    bench: str  # what ran: "gemm"
    time_ns: int  # when it began, since 1970
    complete: bool  # whether every case was measured; not after an interrupt
    warnings: tuple[str, ...]  # what should make a reader doubt the figures
    results: tuple[CaseResult, ...]  # a case each, in the order measured
    graphs: tuple[GraphCosts, ...] = ()  # what graphs cost and save, where any were measured


def case_result(
    name: str,
    axes: Mapping[str, Axis],
    samples: Samples,
    *,
    method: Method,
    environment: Environment,
    limit: Limit | Unavailable = _UNKNOWN_LIMIT,
    verification: Verification | Unavailable = _NOTHING_TO_VERIFY,
    operations: float = 0.0,
    operation: str = "FLOP",
    bytes_moved: float = 0.0,
    energy_j: float | Unavailable = _NO_ENERGY,
    contender: str = "cudakit",
    settings: Mapping[str, Axis] | None = None,
) -> CaseResult:
    """Conclude a case. What failed its verification, or has no samples, has no figures."""
    withheld = _withheld(samples, verification)
    kept = Samples((), discarded=samples.discarded, converged=False) if withheld else samples
    summary = withheld or summarize(kept)
    median_s = withheld or _median(summary)
    return CaseResult(
        name=name,
        axes=dict(axes),
        contender=contender,
        median_s=median_s,
        ci95_s=summary.ci95_s if isinstance(summary, Summary) else summary,
        samples_s=kept.times_s,
        limit=limit,
        ratio_to_limit=_ratio(limit, median_s),
        ratio_to_datasheet=_ratio(limit, median_s, datasheet=True),
        verified=isinstance(verification, Verification) and verification.passed,
        verification=verification,
        method=method,
        environment=environment,
        sm_clock_hz=kept.sm_clock_hz,
        discarded=kept.discarded,
        converged=kept.converged,
        statistics=summary,
        operations=operations,
        operation=operation,
        bytes_moved=bytes_moved,
        energy_j=withheld or energy_j,
        settings=dict(settings or {}),
        rounds=kept.rounds,
    )


def _withheld(samples: Samples, verification: Verification | Unavailable) -> Unavailable | None:
    if isinstance(verification, Verification) and not verification.passed:
        why = verification.detail or (
            f"error {verification.error:.2g} against {verification.against}, "
            f"at most {verification.tolerance:.2g} is rounding"
        )
        return Unavailable(f"the computed values are wrong: {why}")
    return None if samples.times_s else Unavailable("no sample could be kept")


def _median(summary: Summary | Unavailable) -> float | Unavailable:
    return summary if isinstance(summary, Unavailable) else summary.median_s


def _ratio(
    limit: Limit | Unavailable, median_s: float | Unavailable, *, datasheet: bool = False
) -> float | Unavailable:
    if isinstance(median_s, Unavailable):
        return median_s
    if isinstance(limit, Unavailable):
        return limit
    least_s = limit.datasheet_s if datasheet else limit.seconds
    return least_s / median_s if median_s else Unavailable("it took no time")
