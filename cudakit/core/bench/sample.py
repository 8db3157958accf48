"""Sample: take readings of all workloads in turn until every stopping rule is met."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from statistics import median

from cudakit.core.bench.measurement import Reading
from cudakit.core.bench.prepare import Progress, WorkloadRun
from cudakit.core.bench.stopping import Stopping

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
# nvbench discards samples below this share of the default clock; here, of the median of recent clocks.
_LEAST_CLOCK = 0.75
_REMEMBERED = 101
_LEAST_REMEMBERED = 5
# If a low clock was seen this often, and as often as a usual one, it counts as usual.
_MOST_THROTTLED = 10


def sample(runs: Sequence[WorkloadRun], progress: Progress, pause: Callable[[float], None]) -> None:
    """Take samples in turn, one of each run, so that all meet the same clock.

    A run that has enough samples continues until all have: each sample follows one of every other run.
    """
    samplings = [_Sampling(run, pause) for run in runs]
    while not all(one.is_done for one in samplings):
        for one in samplings:
            one.take()
        unfinished = [one for one in samplings if not one.is_done] or samplings
        progress(unfinished[0].run.title, min(one.fraction for one in unfinished))
    for run in runs:
        end_sampling(run)


def end_sampling(run: WorkloadRun) -> None:
    """Record the telemetry and the number of runs behind the last sample."""
    run.is_sampling = False
    run.end_runs = run.rotation.runs
    run.after = run.timer.gpu.telemetry()


class ThrottlingFilter:
    """Decides which readings are samples: not those at an SM clock far below the usual.

    ``warmup`` are readings from which the usual clock is learned.
    """

    def __init__(self, warmup: Iterable[Reading] = ()) -> None:
        self.kept: list[Reading] = []
        self.discarded: list[Reading] = []
        self.gave_up = False  # whether low clocks became usual, and count from then on
        self._clocks: deque[float] = deque(maxlen=_REMEMBERED)
        for reading in warmup:
            self._learn(reading)

    def add(self, reading: Reading) -> bool:
        """Add a reading; return whether it is a sample."""
        good = reading.valid and not self._is_throttled(reading)
        (self.kept if good else self.discarded).append(reading)
        if good:
            self._learn(reading)
        return good

    def _learn(self, reading: Reading) -> None:
        if reading.sm_clock_hz is not None:
            self._clocks.append(reading.sm_clock_hz)

    def _is_throttled(self, reading: Reading) -> bool:
        if reading.sm_clock_hz is None or self.gave_up or len(self._clocks) < _LEAST_REMEMBERED:
            return False
        low = reading.sm_clock_hz < _LEAST_CLOCK * median(self._clocks)
        if low and len(self.discarded) >= max(_MOST_THROTTLED, len(self.kept)):
            self.gave_up = True
            return False
        return low


class _Sampling:
    """The sampling of one run: which readings it keeps, and when it has enough."""

    def __init__(self, run: WorkloadRun, pause: Callable[[float], None]) -> None:
        self.run, self._pause = run, pause
        self._pause_s = _FIRST_PAUSE_S
        self._stopping = Stopping(run.method.rule)
        self._filter = ThrottlingFilter(run.warmup)
        run.kept, run.discarded = self._filter.kept, self._filter.discarded
        run.is_sampling = True
        run.before = run.timer.gpu.telemetry()
        run.begin_runs = run.rotation.runs
        run.begin_s = run.timer.now_s()

    @property
    def is_done(self) -> bool:
        """Whether the run has enough samples, or no time left."""
        return bool(self.run.stopped)

    @property
    def fraction(self) -> float:
        """An estimate of the fraction of samples that were taken."""
        run, rule = self.run, self.run.method.rule
        samples = len(run.kept) / max(rule.min_samples, 1)
        return min(1.0, max(0.9 * min(samples, 1.0), run.elapsed_s / max(rule.timeout_s, 1e-9)))

    def take(self) -> None:
        """Take a reading. After one at a low clock, let the device rest."""
        run = self.run
        reading = run.read()
        run.elapsed_s = run.timer.now_s() - run.begin_s
        if self._filter.add(reading):
            self._pause_s = _FIRST_PAUSE_S
            self._consider(reading)
        elif run.elapsed_s >= run.method.rule.timeout_s:
            run.stopped = run.stopped or "timeout"
        elif reading.valid:
            self._pause(self._pause_s)
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)

    def _consider(self, reading: Reading) -> None:
        """Apply the stopping rule to a sample, unless there are enough already."""
        run = self.run
        run.throttling_counts = self._filter.gave_up
        time_s = reading.time_s * run.executions
        if not self.is_done and self._stopping.add(time_s, elapsed_s=run.elapsed_s):
            run.stopped, run.converged = self._stopping.reason, self._stopping.converged
