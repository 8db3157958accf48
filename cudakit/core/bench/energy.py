"""Energy of one execution, from a counter that moves a few times a second only."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from cudakit.gpu.api import Gpu
from cudakit.units import Unavailable

# The counter of an H200 moves ten times a second: looking more often than that by far finds each step soon.
_LOOK_S = 0.005
# Between the first step and the last: how late a step is seen is then at most a percent of it.
_LEAST_S = 0.5
# Who waits costs energy too, which would be counted as that of the work.
_LEAST_BUSY = 0.9


class _Step(NamedTuple):
    """The counter at the moment when it was seen to have moved."""

    energy_j: float
    time_s: float
    runs: int
    busy_s: float

    def plus(self, first: _Step, last: _Step) -> _Step:
        """Add what lies between two steps."""
        return _Step(
            self.energy_j + last.energy_j - first.energy_j,
            self.time_s + last.time_s - first.time_s,
            self.runs + last.runs - first.runs,
            self.busy_s + last.busy_s - first.busy_s,
        )


class EnergyMeter:
    """Takes the energy between two steps of the counter, and the work done meanwhile.

    What lies before the first step and behind the last is left out: the counter says nothing of where
    between two steps it is. ``read_j`` returns the joules counted so far, or why there are none.
    """

    def __init__(
        self, read_j: Callable[[], float | Unavailable], now_s: Callable[[], float]
    ) -> None:
        self._read_j, self._now_s = read_j, now_s
        self._seen_j: float | Unavailable | None = None
        self._looked_s = float("-inf")
        self._first: _Step | None = None
        self._last: _Step | None = None
        self._total = _Step(0.0, 0.0, 0, 0.0)

    def look(self, runs: int, busy_s: float) -> None:
        """Look whether the counter has moved. ``runs`` and ``busy_s`` are of all the work so far."""
        now_s = self._now_s()
        if now_s - self._looked_s < _LOOK_S or isinstance(self._seen_j, Unavailable):
            return
        self._looked_s = now_s
        energy_j, seen_j = self._read_j(), self._seen_j
        self._seen_j = energy_j
        if isinstance(energy_j, Unavailable) or seen_j is None or energy_j == seen_j:
            return
        self._last = _Step(energy_j, now_s, runs, busy_s)
        self._first = self._first or self._last

    def pause(self) -> None:
        """Count nothing until the next look: other work may run meanwhile."""
        if self._first is not None and self._last is not None:
            self._total = self._total.plus(self._first, self._last)
        self._first = self._last = None
        if not isinstance(self._seen_j, Unavailable):
            self._seen_j = None

    def per_run_j(self) -> float | Unavailable:
        """Return the joules of one execution; Unavailable where too little was seen, or the device idled."""
        self.pause()
        if isinstance(self._seen_j, Unavailable):
            return self._seen_j
        energy_j, elapsed_s, runs, busy_s = self._total
        if elapsed_s < _LEAST_S or not runs:
            return Unavailable("too short for the energy counter")
        if busy_s < _LEAST_BUSY * elapsed_s:
            share = busy_s / elapsed_s
            return Unavailable(f"the GPU was busy with it for {share:.0%} of the time only")
        return energy_j / runs


def counted_j(gpu: Gpu) -> float | Unavailable:
    """Read the joules that a device has counted since its driver was loaded."""
    counted = gpu.telemetry(("energy_j",)).fields.get("energy_j")
    if isinstance(counted, int | float):
        return counted
    return Unavailable("the GPU does not count energy")
