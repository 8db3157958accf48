"""Warm-up: until neither the times nor the clock of the SMs still move in one direction.

A device that was idle first raises its clocks and then, under heavy work, lowers them until power and
temperature have settled, which takes up to seconds (NVIDIA CUTLASS, "GEMM performance measurement
guidelines"); no fixed number of runs is right for all work.
"""

from __future__ import annotations

from statistics import median

from cudakit.core.bench.timer import Reading

_DRIFT = 0.01
_LEAST_READINGS = 8
_MOST_S = 3.0
# A look sorts what it looks at: looks are so far apart that all of them cost about as much as the last.
_GROWTH = 1.1


class Settling:
    """Decides after each reading whether the device has settled; ``least_s`` must pass in any case.

    With 0 nothing is to settle, and one reading is enough. It ends after ``most_s``, settled or not: without
    that, after 3 seconds or twice the least.
    """

    def __init__(self, least_s: float, most_s: float | None = None) -> None:
        self.settled = not least_s  # which nobody asked for
        self.most_s = most_warmup_s(least_s) if most_s is None else most_s
        self.elapsed_s = 0.0
        self.readings: list[Reading] = []
        self._least_s = least_s
        self._times: list[float] = []  # when each reading was taken
        self._next_look_s = least_s

    def add(self, reading: Reading, elapsed_s: float) -> bool:
        """Take in a reading, so long after the begin of the first; True means stop."""
        self.readings.append(reading)
        self._times.append(elapsed_s)
        self.elapsed_s = elapsed_s
        if (
            not self.settled
            and elapsed_s >= self._next_look_s
            and len(self.readings) >= _LEAST_READINGS
        ):
            self._next_look_s = elapsed_s * _GROWTH
            self.settled = self._is_settled()
        return self.settled or elapsed_s >= self.most_s

    def _is_settled(self) -> bool:
        """Look at the later half of the time, or at the least number of readings that says something."""
        half_s = self.elapsed_s / 2
        first = next(i for i, at in enumerate(self._times) if at >= half_s)
        recent = self.readings[min(first, len(self.readings) - _LEAST_READINGS) :]
        clocks = [reading.sm_clock_hz for reading in recent if reading.sm_clock_hz is not None]
        return drift([reading.time_s for reading in recent]) < _DRIFT and drift(clocks) < _DRIFT


def most_warmup_s(least_s: float) -> float:
    """Say after which time a warm-up ends, settled or not, where nobody said so."""
    return max(_MOST_S, 2 * least_s) if least_s else 0.0


def drift(values: list[float]) -> float:
    """Say by which share the median of the later half differs from that of the earlier; 0 for too few."""
    half = len(values) // 2
    if half == 0:
        return 0.0
    earlier, later = median(values[:half]), median(values[-half:])
    return abs(later - earlier) / earlier if earlier else 0.0
