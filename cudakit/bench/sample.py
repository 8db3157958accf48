"""Sample: take samples of all workloads in turn until all stopping rules are met."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from cudakit.bench.measurement import Reading
from cudakit.bench.prepare import Progress, WorkloadRun
from cudakit.bench.stopping import Stopping

_FIRST_PAUSE_S, _MAX_PAUSE_S = 0.05, 1.0
# A clock below this share of the median of recent clocks counts as throttled. nvbench uses the same share,
# but of the default clock.
_THROTTLED_SHARE = 0.75
_RECENT_CLOCK_COUNT = 101
# A clock is checked only after this number of readings.
_MIN_CLOCK_COUNT = 5
# A low clock is accepted as normal once the number of throttled readings reaches both this number and the
# number of samples.
_MAX_THROTTLED_COUNT = 10


def sample(runs: Sequence[WorkloadRun], progress: Progress, pause: Callable[[float], None]) -> None:
    """Take samples of the runs in turn, so that all run at the same clock.

    A run with enough samples continues until all runs have enough.
    """
    samplings = [_Sampling(run) for run in runs]
    while not all(sampling.is_done for sampling in samplings):
        for sampling in samplings:
            run = sampling.run
            reading = run.timer.time(run.work, is_blocked=run.is_blocked)
            if pause_s := sampling.add(reading):
                pause(pause_s)
        unfinished_samplings = [
            sampling for sampling in samplings if not sampling.is_done
        ] or samplings
        progress(
            unfinished_samplings[0].run.title,
            min(sampling.fraction for sampling in unfinished_samplings),
        )
    for run in runs:
        end_sampling(run)


def end_sampling(run: WorkloadRun) -> None:
    """Record the telemetry and the number of executions after the last sample."""
    run.is_sampling = False
    run.end_execution = run.rotation.execution_count
    run.telemetry_after = run.timer.gpu.telemetry()


class ThrottlingFilter:
    """Divides readings into samples, and readings to discard because the SM clock is far below recent clocks.

    ``warmup_readings`` provide the first clocks for this comparison.
    """

    def __init__(self, warmup_readings: Iterable[Reading] = ()) -> None:
        self.kept_readings: list[Reading] = []
        self.discarded_readings: list[Reading] = []
        self.accepts_all_clocks = (
            False  # Whether all clocks are accepted, because low clocks persisted.
        )
        self._clocks: deque[float] = deque(maxlen=_RECENT_CLOCK_COUNT)
        for reading in warmup_readings:
            self._add_clock(reading)

    def add(self, reading: Reading) -> bool:
        """Add a reading, and return whether it is a sample."""
        is_sample = reading.valid and not self._is_throttled(reading)
        (self.kept_readings if is_sample else self.discarded_readings).append(reading)
        if is_sample:
            self._add_clock(reading)
        return is_sample

    def _add_clock(self, reading: Reading) -> None:
        if reading.sm_clock_hz is not None:
            self._clocks.append(reading.sm_clock_hz)

    def _is_throttled(self, reading: Reading) -> bool:
        if (
            reading.sm_clock_hz is None
            or self.accepts_all_clocks
            or len(self._clocks) < _MIN_CLOCK_COUNT
        ):
            return False
        is_low = reading.sm_clock_hz < _THROTTLED_SHARE * median(self._clocks)
        if is_low and len(self.discarded_readings) >= max(
            _MAX_THROTTLED_COUNT, len(self.kept_readings)
        ):
            self.accepts_all_clocks = True
            return False
        return is_low


class _Sampling:
    """The samples of one run, and its stopping rule."""

    def __init__(self, run: WorkloadRun) -> None:
        self.run = run
        self._pause_s = _FIRST_PAUSE_S
        self._stopping = Stopping(run.method.rule)
        self._throttling_filter = ThrottlingFilter(run.warmup_readings)
        run.kept_readings, run.discarded_readings = (
            self._throttling_filter.kept_readings,
            self._throttling_filter.discarded_readings,
        )
        run.is_sampling = True
        run.telemetry_before = run.timer.gpu.telemetry()
        run.begin_execution = run.rotation.execution_count
        run.begin_s = run.timer.now_s()

    @property
    def is_done(self) -> bool:
        """Whether the run has enough samples, or reached its timeout."""
        return bool(self.run.stop_reason)

    @property
    def fraction(self) -> float:
        """Estimate of the share of sampling that is done, for the progress display."""
        run, rule = self.run, self.run.method.rule
        sample_share = len(run.kept_readings) / max(rule.min_samples, 1)
        return min(
            1.0, max(0.9 * min(sample_share, 1.0), run.elapsed_s / max(rule.timeout_s, 1e-9))
        )

    def add(self, reading: Reading) -> float:
        """Add a reading, and return the seconds to pause: the device cools down after a throttled reading."""
        run = self.run
        run.count_timeout(reading)
        run.elapsed_s = run.timer.now_s() - run.begin_s
        if self._throttling_filter.add(reading):
            self._pause_s = _FIRST_PAUSE_S
            self._apply_stopping_rule(reading)
            return 0.0
        if run.elapsed_s >= run.method.rule.timeout_s:
            run.stop_reason = run.stop_reason or "timeout"
            return 0.0
        if not reading.valid:
            return 0.0
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, _MAX_PAUSE_S)
        return pause_s

    def _apply_stopping_rule(self, reading: Reading) -> None:
        run = self.run
        run.accepts_throttled = self._throttling_filter.accepts_all_clocks
        time_s = reading.time_s * run.work.executions
        if not self.is_done and self._stopping.add(time_s, elapsed_s=run.elapsed_s):
            run.stop_reason, run.is_converged = self._stopping.reason, self._stopping.converged
