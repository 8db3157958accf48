"""What a measurement leaves behind: every time, and the clock at which each was made."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Samples:
    """The times of one case, in the order in which they were taken.

    Raises ValueError where there are clocks, but not one for each time, or rounds that hold another number.
    """

    times_s: tuple[float, ...]  # of one execution each
    sm_clock_hz: tuple[float, ...] = ()  # of the SMs during each; empty where it is not known
    discarded: int = 0  # that were not kept: the clock was too low, or the blocker timed out
    converged: bool = True  # whether the stopping rule was met before the time ran out
    rounds: tuple[int, ...] = ()  # samples of each, one behind the other; empty where there was one

    def __post_init__(self) -> None:
        if self.sm_clock_hz and len(self.sm_clock_hz) != len(self.times_s):
            raise ValueError(f"{len(self.sm_clock_hz)} clocks for {len(self.times_s)} times")
        if self.rounds and sum(self.rounds) != len(self.times_s):
            raise ValueError(f"rounds of {sum(self.rounds)} samples for {len(self.times_s)} times")

    @property
    def cycles(self) -> tuple[float, ...]:
        """Time by clock: what stays when only the clock changes. Empty where clocks are unknown."""
        return tuple(t * hz for t, hz in zip(self.times_s, self.sm_clock_hz, strict=False))
