"""The measurement of one workload: readings, samples, and the merging of rounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from cudakit.core.bench.method import Method
from cudakit.core.bench.workload import Axis, Verification, worst
from cudakit.gpu.api.facts import Telemetry
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class Reading:
    """One timed execution or batch of executions, before samples are selected."""

    time_s: float
    sm_clock_hz: float | None = None  # mean SM clock meanwhile; None if unknown
    valid: bool = True  # False if the blocking kernel timed out


@dataclass(frozen=True, slots=True)
class Samples:
    """The samples of one case in the order measured.

    Raises ValueError if the numbers of clocks or of samples in rounds do not match the number of times.
    """

    times_s: tuple[float, ...]  # of one execution each
    sm_clock_hz: tuple[float, ...] = ()  # mean during each sample; empty if unknown
    discarded: int = (
        0  # number of readings at a throttled clock or with a timeout of the blocking kernel
    )
    converged: bool = True  # whether the stopping rule was met before the timeout
    rounds: tuple[int, ...] = ()  # number of samples of each round; empty for one round

    def __post_init__(self) -> None:
        if self.sm_clock_hz and len(self.sm_clock_hz) != len(self.times_s):
            raise ValueError(f"{len(self.sm_clock_hz)} clocks for {len(self.times_s)} times")
        if self.rounds and sum(self.rounds) != len(self.times_s):
            raise ValueError(f"rounds of {sum(self.rounds)} samples for {len(self.times_s)} times")

    @property
    def cycles(self) -> tuple[float, ...]:
        """Times multiplied by clocks, which do not depend on the clock; empty if clocks are unknown."""
        return tuple(t * hz for t, hz in zip(self.times_s, self.sm_clock_hz, strict=False))


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measurement of one workload. Its figures are valid only if its verification passed."""

    name: str
    axes: Mapping[str, Axis]
    settings: Mapping[str, Axis]  # that the workload reports
    method: Method  # with the actual values
    samples: Samples  # empty if computed values are wrong
    verification: Verification
    stopped: str  # why sampling ended: precision, stable, timeout, interrupted, wrong
    settled: bool  # whether clock and times were stable before the first sample
    cold: bool  # whether a buffer set was evicted from the L2 cache before it was reused
    warmup: tuple[Reading, ...]
    discarded: tuple[Reading, ...]
    before: Telemetry  # before the first sample
    after: Telemetry  # after the last sample
    footprint_bytes: int  # of one buffer set
    bytes_moved: int  # of one execution
    operations: int  # of one execution
    executions: int  # between ``before`` and ``after``
    energy_j: float | Unavailable  # of one execution
    elapsed_s: float  # from the first sample to the last
    warnings: tuple[str, ...]  # deviations from the method

    @property
    def ends_case(self) -> bool:
        """Whether this is the last round of its case."""
        return self.stopped in ("interrupted", "wrong")

    @property
    def interrupted(self) -> bool:
        """Whether the user interrupted it."""
        return self.stopped == "interrupted"


def merge_rounds(rounds: Sequence[Measurement], method: Method) -> Measurement:
    """Merge the rounds of one workload. Wrong values in any round leave no samples."""
    first, last = rounds[0], rounds[-1]
    planned = replace(
        first.method, rule=method.rule, warmup_most_s=method.warmup_most_s, energy_s=method.energy_s
    )
    if len(rounds) == 1:
        return replace(first, method=planned)
    return replace(
        first,
        settings=last.settings,
        method=replace(
            planned,
            warmup_s=sum(part.method.warmup_s for part in rounds),
            blocker=all(part.method.blocker for part in rounds),
            rounds=len(rounds),
        ),
        samples=_merge_samples(rounds),
        verification=worst(part.verification for part in rounds),
        stopped=_worst_reason([part.stopped for part in rounds]),
        settled=all(part.settled for part in rounds),
        cold=all(part.cold for part in rounds),
        warmup=tuple(chain.from_iterable(part.warmup for part in rounds)),
        discarded=tuple(chain.from_iterable(part.discarded for part in rounds)),
        after=last.after,
        executions=sum(part.executions for part in rounds),
        energy_j=last.energy_j,
        elapsed_s=sum(part.elapsed_s for part in rounds),
        warnings=tuple(dict.fromkeys(chain.from_iterable(part.warnings for part in rounds))),
    )


def _merge_samples(rounds: Sequence[Measurement]) -> Samples:
    parts = [part.samples for part in rounds]
    discarded = sum(samples.discarded for samples in parts)
    if not all(part.verification.passed for part in rounds):
        return Samples((), discarded=discarded, converged=False)
    clocks = all(len(samples.sm_clock_hz) == len(samples.times_s) for samples in parts)
    return Samples(
        times_s=tuple(chain.from_iterable(samples.times_s for samples in parts)),
        sm_clock_hz=tuple(chain.from_iterable(s.sm_clock_hz for s in parts)) if clocks else (),
        discarded=discarded,
        converged=all(samples.converged for samples in parts),
        rounds=tuple(len(samples.times_s) for samples in parts),
    )


def _worst_reason(reasons: Sequence[str]) -> str:
    for reason in ("wrong", "interrupted", "timeout", "stable"):
        if reason in reasons:
            return reason
    return reasons[-1]
