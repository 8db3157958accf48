"""The measurement of one workload: readings, samples, and the merging of rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from cudakit.bench.case import Verification, worst_verification
from cudakit.bench.method import Axis, Method
from cudakit.gpu.api.facts import Telemetry
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class Reading:
    """One timed execution or batch of executions, before samples are selected."""

    time_s: float
    sm_clock_hz: float | None = None  # Mean SM clock during the reading; None if unknown.
    valid: bool = True  # False if the blocking kernel timed out.


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one case in the order measured.

    Raises ValueError if only some of the samples have clocks, or if the numbers of samples in ``rounds`` do
    not add up to the number of samples.
    """

    times_s: tuple[float, ...]  # Time of one execution, for each sample.
    sm_clock_hz: tuple[float, ...] = ()  # Mean clock during each sample; empty if unknown.
    # Number of readings that are no samples: the clock was throttled, or the blocking kernel timed out.
    discarded: int = 0
    converged: bool = True  # Whether the stopping rule was met before the timeout.
    rounds: tuple[int, ...] = ()  # Number of samples of each round; empty for one round.

    def __post_init__(self) -> None:
        if self.sm_clock_hz and len(self.sm_clock_hz) != len(self.times_s):
            raise ValueError(f"{len(self.sm_clock_hz)} clocks for {len(self.times_s)} times")
        if self.rounds and sum(self.rounds) != len(self.times_s):
            raise ValueError(f"rounds of {sum(self.rounds)} samples for {len(self.times_s)} times")

    @property
    def cycles(self) -> tuple[float, ...]:
        """Clock cycles of each sample: its time multiplied by its clock. Empty if clocks are unknown."""
        return tuple(
            time_s * clock_hz
            for time_s, clock_hz in zip(self.times_s, self.sm_clock_hz, strict=False)
        )


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of one workload. Its figures are valid only if the verification passed."""

    name: str
    axes: Mapping[str, Axis]
    settings: Mapping[str, Axis]  # Settings that the workload reports.
    method: Method  # Method with the values that were actually used.
    samples: Samples  # Empty if computed values are wrong.
    verification: Verification
    # Reason why sampling ended: precision, stable, timeout, interrupted or wrong.
    stop_reason: str
    is_settled: bool  # Whether clock and times were stable before the first sample.
    is_cold: bool  # Whether each buffer set was evicted from the L2 cache before its reuse.
    warmup_readings: tuple[Reading, ...]  # Readings of the warm-up.
    discarded_readings: tuple[Reading, ...]  # Readings after the warm-up that are no samples.
    telemetry_before: Telemetry  # Telemetry before the first sample.
    telemetry_after: Telemetry  # Telemetry after the last sample.
    footprint_bytes: int  # Size of one buffer set.
    bytes_moved: int  # Bytes that one execution reads and writes.
    operations: int  # Arithmetic operations of one execution.
    executions: int  # Number of executions between ``telemetry_before`` and ``telemetry_after``.
    energy_j: float | Unavailable  # Energy of one execution.
    elapsed_s: float  # Time from the first sample to the last.
    warnings: tuple[str, ...]  # Ways in which the measurement differed from its method.

    @property
    def ends_case(self) -> bool:
        """Whether no further round of the case is measured."""
        return self.stop_reason in ("interrupted", "wrong")

    @property
    def was_interrupted(self) -> bool:
        """Whether the user interrupted the measurement."""
        return self.stop_reason == "interrupted"


def merge_rounds(rounds: Sequence[Measurement], method: Method) -> Measurement:
    """Merge the rounds of one workload. Wrong values in any round leave no samples."""
    first_round, last_round = rounds[0], rounds[-1]
    planned_method = replace(
        first_round.method,
        rule=method.rule,
        warmup_most_s=method.warmup_most_s,
        energy_s=method.energy_s,
    )
    if len(rounds) == 1:
        return replace(first_round, method=planned_method)
    return replace(
        first_round,
        settings=last_round.settings,
        method=replace(
            planned_method,
            warmup_s=sum(measurement.method.warmup_s for measurement in rounds),
            blocker=all(measurement.method.blocker for measurement in rounds),
            rounds=len(rounds),
        ),
        samples=_merge_samples(rounds),
        verification=worst_verification(measurement.verification for measurement in rounds),
        stop_reason=_worst_reason([measurement.stop_reason for measurement in rounds]),
        is_settled=all(measurement.is_settled for measurement in rounds),
        is_cold=all(measurement.is_cold for measurement in rounds),
        warmup_readings=tuple(
            chain.from_iterable(measurement.warmup_readings for measurement in rounds)
        ),
        discarded_readings=tuple(
            chain.from_iterable(measurement.discarded_readings for measurement in rounds)
        ),
        telemetry_after=last_round.telemetry_after,
        executions=sum(measurement.executions for measurement in rounds),
        energy_j=last_round.energy_j,
        elapsed_s=sum(measurement.elapsed_s for measurement in rounds),
        warnings=tuple(
            dict.fromkeys(chain.from_iterable(measurement.warnings for measurement in rounds))
        ),
    )


def _merge_samples(rounds: Sequence[Measurement]) -> Samples:
    samples_by_round = [measurement.samples for measurement in rounds]
    discarded_count = sum(samples.discarded for samples in samples_by_round)
    if not all(measurement.verification.passed for measurement in rounds):
        return Samples((), discarded=discarded_count, converged=False)
    has_clocks = all(
        len(samples.sm_clock_hz) == len(samples.times_s) for samples in samples_by_round
    )
    return Samples(
        times_s=tuple(chain.from_iterable(samples.times_s for samples in samples_by_round)),
        sm_clock_hz=tuple(chain.from_iterable(samples.sm_clock_hz for samples in samples_by_round))
        if has_clocks
        else (),
        discarded=discarded_count,
        converged=all(samples.converged for samples in samples_by_round),
        rounds=tuple(len(samples.times_s) for samples in samples_by_round),
    )


def _worst_reason(reasons: Sequence[str]) -> str:
    for reason in ("wrong", "interrupted", "timeout", "stable"):
        if reason in reasons:
            return reason
    return reasons[-1]
