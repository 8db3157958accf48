"""Sampling: what a sample executes, when the warm-up is over, which readings count, and when to stop."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from statistics import median
from typing import Literal

from cudakit.bench.case import Method, Rule
from cudakit.bench.stats import autocorrelation_time, median_ci, relative_half_width
from cudakit.bench.timer import MAX_QUEUED, MAX_SETS, Enqueue, Reading, SampleTimer, SampleWork
from cudakit.errors import UsageError
from cudakit.gpu.api import Stream

# --- the work of a sample -----------------------------------------------------------------------------


class BufferRotation:
    """Runs a workload on its buffer sets in rotation; ``enqueue`` takes a stream and a buffer set's index."""

    def __init__(self, enqueue: Callable[[Stream, int], None], set_count: int) -> None:
        self.set_count = set_count
        self._enqueue = enqueue
        self._next_set = 0
        self._next_at_complete = 0

    def run(self, stream: Stream, count: int = 1) -> None:
        """Enqueue executions on the next buffer sets."""
        for _ in range(count):
            self._enqueue(stream, self._next_set % self.set_count)
            self._next_set += 1

    def repeat(self, stream: Stream) -> None:
        """Enqueue an execution on the same buffer set as the previous execution."""
        self._enqueue(stream, (self._next_set - 1) % self.set_count)

    def capture(self, stream: Stream, count: int) -> None:
        """Enqueue executions that a graph captures; call ``advance`` after each launch of the graph."""
        for offset in range(count):
            self._enqueue(stream, (self._next_set + offset) % self.set_count)

    def advance(self, count: int) -> None:
        """Continue the rotation after executions that a graph launch enqueued."""
        self._next_set += count

    def complete(self, stream: Stream) -> None:
        """Enqueue executions until every buffer set was used since the previous call."""
        self.run(stream, self.set_count - (self._next_set - self._next_at_complete))
        self._next_at_complete = self._next_set


def make_sample_work(
    timer: SampleTimer, rotation: BufferRotation, method: Method, estimate_s: float
) -> SampleWork:
    """Return the work of a sample; ``estimate_s`` is the estimated time of one execution.

    Raises UsageError for L2 state flush in mode batch or graph: no flush can run between their executions.
    """
    flushes = method.cache == "flush"
    if flushes and method.mode in ("batch", "graph"):
        raise UsageError(
            f"L2 cannot be flushed between the executions of a {method.mode}",
            hint="add --mode isolated, or --cache rotate",
        )

    def repeat_and_flush(stream: Stream) -> None:
        rotation.repeat(stream)
        if flushes:
            timer.flush(stream)

    before: Enqueue | None = timer.flush if flushes else None
    if method.interleaved:
        # The workload runs once untimed. Otherwise its sample would include write-backs of the cache lines
        # that the other workloads left dirty.
        before = repeat_and_flush
    executions = max(1, round(method.sample_s / max(estimate_s, 1e-9)))
    match method.mode:
        case "graph":
            # Each buffer set is used equally often.
            rotations = -(-min(executions, MAX_SETS) // rotation.set_count)
            rotations = max(1, min(rotations, MAX_SETS // rotation.set_count))
            return _graph_work(timer, rotation, rotations * rotation.set_count, before)
        case "batch":
            executions = min(executions, MAX_QUEUED)
        case "call":
            executions = method.executions
        case _:
            executions = 1
    enqueue = partial(rotation.run, count=executions)
    return SampleWork(enqueue, executions, before, clock=method.clock)


def _graph_work(
    timer: SampleTimer, rotation: BufferRotation, executions: int, before: Enqueue | None
) -> SampleWork:
    """Capture executions in a graph, which a sample replays."""
    graph = timer.capture(partial(rotation.capture, count=executions))

    def replay(stream: Stream) -> None:
        graph.launch(stream)
        rotation.advance(executions)

    return SampleWork(replay, executions, before, close=graph.close)


# --- the end of the warm-up ---------------------------------------------------------------------------

_MAX_DRIFT = 0.01  # Maximum relative drift of times and clocks after the warm-up.
_MIN_READINGS = 8
# A check sorts its readings. The time between checks, or the number of samples between them, grows by this
# factor, which limits the cost of all checks.
_CHECK_GROWTH = 1.1


class SteadyState:
    """Decides after each reading whether the device has settled.

    A device that was idle first raises its clocks. Under heavy work it then lowers them until power and
    temperature are stable, which takes up to seconds (NVIDIA CUTLASS, "GEMM performance measurement
    guidelines"). No fixed number of executions suits all work.

    The warm-up lasts at least ``min_s``; if that is 0, one reading is enough. It ends after ``max_s`` even if
    the device has not settled.
    """

    def __init__(self, min_s: float, max_s: float) -> None:
        self.is_settled = not min_s
        self.max_s = max_s
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
        half = next(i for i, time_s in enumerate(self._times) if time_s >= self.elapsed_s / 2)
        recent = self.readings[min(half, len(self.readings) - _MIN_READINGS) :]
        clocks = [reading.sm_clock_hz for reading in recent if reading.sm_clock_hz is not None]
        times = [reading.time_s for reading in recent]
        return drift(times) < _MAX_DRIFT and drift(clocks) < _MAX_DRIFT


def drift(values: list[float]) -> float:
    """Return the relative difference between the medians of the first and the second half of values."""
    half = len(values) // 2
    if not half:
        return 0.0
    first, last = median(values[:half]), median(values[-half:])
    return abs(last - first) / first if first else 0.0


# --- readings that are no samples ---------------------------------------------------------------------

# A clock below this share of the median of recent clocks counts as throttled. nvbench uses the same share,
# but of the default clock.
_THROTTLED_SHARE = 0.75
_RECENT_CLOCK_COUNT = 101
# A clock is checked only after this number of readings.
_MIN_CLOCK_COUNT = 5
# A low clock is accepted as normal once the number of throttled readings reaches both this number and the
# number of samples.
_MAX_THROTTLED_COUNT = 10


class ThrottlingFilter:
    """Divides readings into samples, and readings to discard because the SM clock is far below recent clocks.

    ``warmup_readings`` provide the first clocks for this comparison.
    """

    def __init__(self, warmup_readings: Iterable[Reading] = ()) -> None:
        self.kept_readings: list[Reading] = []
        self.discarded_readings: list[Reading] = []
        # Whether all clocks are accepted, because low clocks persisted.
        self.accepts_all_clocks = False
        clocks = (reading.sm_clock_hz for reading in warmup_readings)
        self._clocks = deque((hz for hz in clocks if hz is not None), maxlen=_RECENT_CLOCK_COUNT)

    def add(self, reading: Reading) -> bool:
        """Add a reading, and return whether it is a sample."""
        if not reading.valid or self._is_throttled(reading):
            self.discarded_readings.append(reading)
            return False
        self.kept_readings.append(reading)
        if reading.sm_clock_hz is not None:
            self._clocks.append(reading.sm_clock_hz)
        return True

    def _is_throttled(self, reading: Reading) -> bool:
        if (
            reading.sm_clock_hz is None
            or self.accepts_all_clocks
            or len(self._clocks) < _MIN_CLOCK_COUNT
            or reading.sm_clock_hz >= _THROTTLED_SHARE * median(self._clocks)
        ):
            return False
        most = max(_MAX_THROTTLED_COUNT, len(self.kept_readings))
        self.accepts_all_clocks = len(self.discarded_readings) >= most
        return not self.accepts_all_clocks


# --- the stopping rule --------------------------------------------------------------------------------

# The spread is stable if it differs by less than _MAX_SPREAD_CHANGE from the mean of the spreads at this
# number of latest checks, during which the number of samples doubles.
_SPREADS_IN_MEAN = 8
_MAX_SPREAD_CHANGE = 0.05
_MIN_FOR_STABLE = 64


class Stopping:
    """Decides after each sample whether to stop.

    ``reason`` is ``precision`` if the precision is reached; ``stable`` if the spread is stable and the
    precision cannot be reached before the timeout (as in nvbench's stdrel criterion); ``timeout``; or empty
    while sampling continues.
    """

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.reason: Literal["", "precision", "stable", "timeout"] = ""
        self._times: list[float] = []
        self._next_check_count = rule.min_samples
        self._spreads: deque[float] = deque(maxlen=_SPREADS_IN_MEAN)

    @property
    def converged(self) -> bool:
        """Whether sampling stopped before the timeout."""
        return self.reason in ("precision", "stable")

    def add(self, time_s: float, elapsed_s: float) -> bool:
        """Add a sample, and return whether to stop.

        ``elapsed_s`` is the time since the start of the first sample, including pauses and flushes.
        """
        self._times.append(time_s)
        rule, count = self.rule, len(self._times)
        is_late = elapsed_s >= rule.timeout_s
        if not is_late and count < self._next_check_count:
            return False
        half_width, spread = self._relative_half_widths()
        may_stop = count >= rule.min_samples and elapsed_s >= rule.min_time_s
        if may_stop and half_width < rule.precision:
            self.reason = "precision"
        elif is_late:
            self.reason = "timeout"
        else:
            self._next_check_count = max(count + 1, int(count * _CHECK_GROWTH))
            self._spreads.append(spread)
            # The half-width of a CI is inversely proportional to the root of the number of samples.
            needed_s = elapsed_s * (half_width / rule.precision) ** 2 if may_stop else 0.0
            if needed_s > rule.timeout_s and self._is_stable():
                self.reason = "stable"
        return bool(self.reason)

    def _relative_half_widths(self) -> tuple[float, float]:
        """Return the half-widths of the CI and of the interquartile range, relative to the median."""
        ordered, count = sorted(self._times), len(self._times)
        middle = (ordered[(count - 1) // 2] + ordered[count // 2]) / 2
        interval = median_ci(ordered, correlation=autocorrelation_time(self._times))
        quartiles = (ordered[count // 4], ordered[count - 1 - count // 4])
        return relative_half_width(interval, middle), relative_half_width(quartiles, middle)

    def _is_stable(self) -> bool:
        if len(self._spreads) < _SPREADS_IN_MEAN or len(self._times) < _MIN_FOR_STABLE:
            return False
        mean = sum(self._spreads) / _SPREADS_IN_MEAN
        return all(abs(spread - mean) <= _MAX_SPREAD_CHANGE * mean for spread in self._spreads)
