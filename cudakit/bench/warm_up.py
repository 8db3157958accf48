"""Warm up: run each workload until times and SM clock are stable.

A device that was idle first raises its clocks. Under heavy work it then lowers them until power and
temperature are stable, which takes up to seconds (NVIDIA CUTLASS, "GEMM performance measurement guidelines").
No fixed number of executions suits all work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import median

from cudakit.bench.case import UnsupportedCase, WorkloadWithUntimedWork
from cudakit.bench.measurement import Reading
from cudakit.bench.method import max_warmup_s
from cudakit.bench.prepare import Progress, WorkloadRun
from cudakit.bench.sample_work import make_sample_work
from cudakit.bench.timer import SampleWork
from cudakit.errors import Unsupported

_PILOT_SAMPLES = 3  # Number of samples that estimate the time of one execution.
_MAX_DRIFT = 0.01  # Maximum relative drift of times and clocks after the warm-up.
_MIN_READINGS = 8
# A check sorts its readings. The time between checks grows by this factor, which limits the cost of all
# checks.
_CHECK_GROWTH = 1.1


def warm_up(runs: Sequence[WorkloadRun], progress: Progress) -> None:
    """Create the work of a sample for each run, and take readings until the device has settled.

    Raises UnsupportedCase for a workload that cannot run in its mode.
    """
    for run in runs:
        run.work = _make_sample_work(run)
        _settle(run, progress)


def _make_sample_work(run: WorkloadRun) -> SampleWork:
    try:
        workload = run.prepared_workload
        with_untimed_work = workload if isinstance(workload, WorkloadWithUntimedWork) else None
        pilot_work = SampleWork(run.rotation.run, with_untimed_work=with_untimed_work)
        estimate_s = min(run.timer.time(pilot_work).time_s for _ in range(_PILOT_SAMPLES))
        work = make_sample_work(run.timer, run.rotation, run.method, estimate_s)
        return replace(work, with_untimed_work=with_untimed_work)
    except Unsupported as reason:
        raise UnsupportedCase(run.workload, reason, run.settings) from reason


def _settle(run: WorkloadRun, progress: Progress) -> None:
    state = SteadyState(run.method.warmup_s, run.method.warmup_most_s)
    run.warmup_readings = state.readings
    begin_s = run.timer.now_s()
    is_over = False
    while not is_over:
        reading = run.timer.time(run.work, is_blocked=run.is_blocked)
        run.count_timeout(reading)
        is_over = state.add(reading, run.timer.now_s() - begin_s)
        if not is_over:
            progress(f"{run.title}: warming up", state.elapsed_s / state.max_s)
    run.warmup_s, run.is_settled = state.elapsed_s, state.is_settled


class SteadyState:
    """Decides after each reading whether the device has settled.

    The warm-up lasts at least ``min_s``; if that is 0, one reading is enough. It ends after ``max_s`` even if
    the device has not settled; the default is the longer one of 3 seconds and twice ``min_s``.
    """

    def __init__(self, min_s: float, max_s: float | None = None) -> None:
        self.is_settled = not min_s
        self.max_s = max_warmup_s(min_s) if max_s is None else max_s
        self.elapsed_s = 0.0
        self.readings: list[Reading] = []
        self._times: list[float] = []  # Times of the readings since the warm-up began.
        self._next_check_s = min_s

    def add(self, reading: Reading, elapsed_s: float) -> bool:
        """Add a reading taken ``elapsed_s`` after the warm-up began, and return whether to stop."""
        self.readings.append(reading)
        self._times.append(elapsed_s)
        self.elapsed_s = elapsed_s
        is_due = elapsed_s >= self._next_check_s and len(self.readings) >= _MIN_READINGS
        if not self.is_settled and is_due:
            self._next_check_s = elapsed_s * _CHECK_GROWTH
            self.is_settled = self._has_stable_half()
        return self.is_settled or elapsed_s >= self.max_s

    def _has_stable_half(self) -> bool:
        """Return whether times and clocks are stable over the second half of the warm-up."""
        half_s = self.elapsed_s / 2
        half_index = next(i for i, time_s in enumerate(self._times) if time_s >= half_s)
        recent_readings = self.readings[min(half_index, len(self.readings) - _MIN_READINGS) :]
        clocks = [
            reading.sm_clock_hz for reading in recent_readings if reading.sm_clock_hz is not None
        ]
        times = [reading.time_s for reading in recent_readings]
        return drift(times) < _MAX_DRIFT and drift(clocks) < _MAX_DRIFT


def drift(values: list[float]) -> float:
    """Return the relative difference between the medians of the first and the second half of values."""
    half_count = len(values) // 2
    if half_count == 0:
        return 0.0
    first_median, last_median = median(values[:half_count]), median(values[-half_count:])
    return abs(last_median - first_median) / first_median if first_median else 0.0
