"""Warm up: run each workload until neither the times nor the SM clock drift any more.

A device that was idle first raises its clocks and then, under heavy work, lowers them until power and
temperature have settled, which takes up to seconds (NVIDIA CUTLASS, "GEMM performance measurement
guidelines"); no fixed number of runs is right for all work.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from cudakit.core.bench.measurement import Reading
from cudakit.core.bench.method import most_warmup_s
from cudakit.core.bench.prepare import Progress, WorkloadRun
from cudakit.core.bench.sampler import Sampler, make_sampler
from cudakit.core.bench.workload import Refused
from cudakit.errors import Unsupported

_PILOTS = 3
_DRIFT = 0.01
_LEAST_READINGS = 8
# Each check sorts its readings: checks are so far apart that all of them cost about as much as the last.
_GROWTH = 1.1


def warm_up(runs: Sequence[WorkloadRun], progress: Progress) -> None:
    """Make the sampler of each run, and take readings until the device has settled.

    Raises Refused for a workload that cannot run in the mode of its method.
    """
    for run in runs:
        run.sampler = _make_sampler(run)
        run.floor_s = _time_nothing_s(run)
        _settle(run, progress)


def _make_sampler(run: WorkloadRun) -> Sampler:
    """Estimate the time of one execution, and make the sampler for it."""
    try:
        pilots = [run.timer.time(run.rotation.run, blocked=False) for _ in range(_PILOTS)]
        estimate_s = min(pilot.time_s for pilot in pilots)
        return make_sampler(run.timer, run.rotation, run.method, estimate_s)
    except Unsupported as refusal:
        raise Refused(run.workload, refusal, run.settings) from refusal


def _time_nothing_s(run: WorkloadRun) -> float:
    """Time an empty sample."""
    timer, mode = run.timer, run.method.mode
    if run.method.at_host:
        pilots = [timer.time_at_host(_nothing, waits=mode == "host") for _ in range(_PILOTS)]
    else:
        pilots = [timer.time(_nothing, blocked=run.is_blocked) for _ in range(_PILOTS)]
    return min(pilot.time_s for pilot in pilots)


def _nothing(stream: object) -> None:
    """Enqueue no work."""


def _settle(run: WorkloadRun, progress: Progress) -> None:
    state = SteadyState(run.method.warmup_s, run.method.warmup_most_s)
    run.warmup = state.readings
    begin_s = run.timer.now_s()
    while not state.add(run.read(), run.timer.now_s() - begin_s):
        progress(f"{run.title}: warming up", state.elapsed_s / state.most_s)
    run.warmup_s, run.settled = state.elapsed_s, state.settled


class SteadyState:
    """Decides after each reading whether the device has settled, not before ``least_s``.

    If ``least_s`` is 0, one reading is enough. The warm-up ends after ``most_s``, settled or not; by default
    after 3 seconds or twice the least time.
    """

    def __init__(self, least_s: float, most_s: float | None = None) -> None:
        self.settled = not least_s
        self.most_s = most_warmup_s(least_s) if most_s is None else most_s
        self.elapsed_s = 0.0
        self.readings: list[Reading] = []
        self._least_s = least_s
        self._times: list[float] = []  # when each reading was taken
        self._next_check_s = least_s

    def add(self, reading: Reading, elapsed_s: float) -> bool:
        """Add a reading taken ``elapsed_s`` after the warm-up began; return whether to stop."""
        self.readings.append(reading)
        self._times.append(elapsed_s)
        self.elapsed_s = elapsed_s
        if (
            not self.settled
            and elapsed_s >= self._next_check_s
            and len(self.readings) >= _LEAST_READINGS
        ):
            self._next_check_s = elapsed_s * _GROWTH
            self.settled = self._is_settled()
        return self.settled or elapsed_s >= self.most_s

    def _is_settled(self) -> bool:
        """Compare the halves of the later half of the time, or of the last _LEAST_READINGS."""
        half_s = self.elapsed_s / 2
        first = next(i for i, at in enumerate(self._times) if at >= half_s)
        recent = self.readings[min(first, len(self.readings) - _LEAST_READINGS) :]
        clocks = [reading.sm_clock_hz for reading in recent if reading.sm_clock_hz is not None]
        return drift([reading.time_s for reading in recent]) < _DRIFT and drift(clocks) < _DRIFT


def drift(values: list[float]) -> float:
    """Return the relative difference between the medians of both halves; 0 for fewer than two values."""
    half = len(values) // 2
    if half == 0:
        return 0.0
    earlier, later = median(values[:half]), median(values[-half:])
    return abs(later - earlier) / earlier if earlier else 0.0
