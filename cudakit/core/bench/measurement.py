"""What was measured of one workload: readings, samples, and the rounds that they come from."""

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
    """One timed piece of work."""

    time_s: float
    sm_clock_hz: float | None = None  # mean SM clock meanwhile; None where it is not known
    valid: bool = True  # whether the blocking kernel held until everything was enqueued


@dataclass(frozen=True, slots=True)
class Samples:
    """The times of one case, in the order in which they were taken.

    Raises ValueError if there are clocks but not one for each time, or if the rounds hold another number.
    """

    times_s: tuple[float, ...]  # of one execution each
    sm_clock_hz: tuple[float, ...] = ()  # of the SMs during each; empty where it is not known
    discarded: int = (
        0  # readings that are no samples: throttled clock, or blocking kernel timed out
    )
    converged: bool = True  # whether the stopping rule was met before the time ran out
    rounds: tuple[int, ...] = ()  # samples of each round, in order; empty for a single round

    def __post_init__(self) -> None:
        if self.sm_clock_hz and len(self.sm_clock_hz) != len(self.times_s):
            raise ValueError(f"{len(self.sm_clock_hz)} clocks for {len(self.times_s)} times")
        if self.rounds and sum(self.rounds) != len(self.times_s):
            raise ValueError(f"rounds of {sum(self.rounds)} samples for {len(self.times_s)} times")

    @property
    def cycles(self) -> tuple[float, ...]:
        """Time by clock: constant when only the clock changes. Empty where clocks are unknown."""
        return tuple(t * hz for t, hz in zip(self.times_s, self.sm_clock_hz, strict=False))


@dataclass(frozen=True, slots=True)
class Measurement:
    """One workload, measured. No figure of it is valid unless its verification passed."""

    name: str
    axes: Mapping[str, Axis]
    settings: Mapping[str, Axis]  # how it was set up, where it reports that
    method: Method  # as it was carried out
    samples: Samples  # none if the computed values are wrong
    verification: Verification
    stopped: str  # why sampling ended: precision, stable, timeout, interrupted, wrong
    settled: bool  # whether clock and times had settled before the first sample
    cold: bool  # whether the L2 cache held nothing of a buffer set when its turn came
    warmup: tuple[Reading, ...]  # every reading before the first sample
    discarded: tuple[Reading, ...]  # the readings that are no samples
    floor_s: float  # time of an empty sample: not subtracted anywhere
    before: Telemetry  # read before the first sample
    after: Telemetry  # read after the last
    footprint_bytes: int  # of one buffer set
    bytes_moved: int  # of one execution
    operations: int  # of one execution
    executions: int  # between ``before`` and ``after``
    energy_j: float | Unavailable  # of one execution
    elapsed_s: float  # from the first sample to the last
    warnings: tuple[str, ...]  # deviations from the method

    @property
    def ends_case(self) -> bool:
        """Whether no further round makes sense."""
        return self.stopped in ("interrupted", "wrong")

    @property
    def interrupted(self) -> bool:
        """Whether the user interrupted it."""
        return self.stopped == "interrupted"


def merge_rounds(rounds: Sequence[Measurement], method: Method) -> Measurement:
    """Merge the rounds of one workload. A wrong value in any round leaves no samples at all."""
    first, last = rounds[0], rounds[-1]
    asked = replace(
        first.method, rule=method.rule, warmup_most_s=method.warmup_most_s, energy_s=method.energy_s
    )
    if len(rounds) == 1:
        return replace(first, method=asked)
    return replace(
        first,
        settings=last.settings,
        method=replace(
            asked,
            warmup_s=sum(each.method.warmup_s for each in rounds),
            blocker=all(each.method.blocker for each in rounds),
            rounds=len(rounds),
        ),
        samples=_merge_samples(rounds),
        verification=worst(each.verification for each in rounds),
        stopped=_worst_reason([each.stopped for each in rounds]),
        settled=all(each.settled for each in rounds),
        cold=all(each.cold for each in rounds),
        warmup=tuple(chain.from_iterable(each.warmup for each in rounds)),
        discarded=tuple(chain.from_iterable(each.discarded for each in rounds)),
        floor_s=min(each.floor_s for each in rounds),
        after=last.after,
        executions=sum(each.executions for each in rounds),
        energy_j=last.energy_j,
        elapsed_s=sum(each.elapsed_s for each in rounds),
        warnings=tuple(dict.fromkeys(chain.from_iterable(each.warnings for each in rounds))),
    )


def _merge_samples(rounds: Sequence[Measurement]) -> Samples:
    found = [each.samples for each in rounds]
    discarded = sum(samples.discarded for samples in found)
    if not all(each.verification.passed for each in rounds):
        return Samples((), discarded=discarded, converged=False)
    clocks = all(len(samples.sm_clock_hz) == len(samples.times_s) for samples in found)
    return Samples(
        times_s=tuple(chain.from_iterable(samples.times_s for samples in found)),
        sm_clock_hz=tuple(chain.from_iterable(s.sm_clock_hz for s in found)) if clocks else (),
        discarded=discarded,
        converged=all(samples.converged for samples in found),
        rounds=tuple(len(samples.times_s) for samples in found),
    )


def _worst_reason(reasons: Sequence[str]) -> str:
    for reason in ("wrong", "interrupted", "timeout", "stable"):
        if reason in reasons:
            return reason
    return reasons[-1]
