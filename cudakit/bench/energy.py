"""The energy of one execution, from a counter that is updated a few times per second.

Reading the counter takes milliseconds, so it is not read between samples: after the last sample the work
continues without a pause while the counter is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle
from statistics import median
from typing import Protocol, TypeAlias

from cudakit.bench.prepare import Progress, WorkloadRun
from cudakit.bench.timer import MAX_QUEUED
from cudakit.gpu.api import DeviceInfo, Stream, Streams
from cudakit.units import Unavailable

# Seconds that a chunk takes. A chunk is a number of executions that are enqueued together, followed by an
# event; two chunks are in the queue at a time. Reading the energy counter takes up to 6 ms.
_CHUNK_S = 0.02
# The maximum duration of a measurement, as a multiple of the time between its first and last counter change.
_MAX_DURATION_FACTOR = 3.0
# Minimum share of time in which the device must be busy: an idle device draws power without work.
_MIN_BUSY_SHARE = 0.9

ReadJ: TypeAlias = Callable[[], float | Unavailable]


def measure_energy(runs: Sequence[WorkloadRun], progress: Progress) -> None:
    """Measure the energy of one execution of each run with samples, if its method has ``energy_s``."""
    for run in runs:
        if not (run.method.energy_s and run.kept_readings):
            continue
        meter = EnergyMeter(
            run.timer.gpu,
            run.timer.stream,
            run.work.enqueue,
            executions=run.work.executions,
            execution_s=median(reading.time_s for reading in run.kept_readings),
            min_s=run.method.energy_s,
            now_s=run.timer.now_s,
        )
        try:
            for fraction in meter.run():
                progress(f"{run.title}: measuring energy", fraction)
        except BaseException:
            run.stop_reason = "interrupted"
            raise
        run.energy_j = meter.per_execution_j()


class CounterChanges:
    """The times at which the energy counter changed, and its values."""

    def __init__(self, read_j: ReadJ, now_s: Callable[[], float]) -> None:
        self._read_j, self._now_s = read_j, now_s
        self._last_j = read_j()
        self._changes: list[tuple[float, float]] = []  # Time in seconds, value in joules.

    @property
    def why_missing(self) -> Unavailable | None:
        """The reason why the device has no counter, or None if it has one."""
        return self._last_j if isinstance(self._last_j, Unavailable) else None

    @property
    def elapsed_s(self) -> float:
        """Time in seconds between the first and the last change."""
        return self._changes[-1][0] - self._changes[0][0] if self._changes else 0.0

    def poll(self) -> None:
        """Read the counter, and record the time and the value if the value has changed."""
        energy_j = self._read_j()
        if energy_j != self._last_j and not isinstance(energy_j, Unavailable):
            self._last_j = energy_j
            self._changes.append((self._now_s(), energy_j))

    def power_w(self) -> float:
        """Return the mean power in watts between the first and the last change."""
        return (self._changes[-1][1] - self._changes[0][1]) / self.elapsed_s


class _MeteredDevice(DeviceInfo, Streams, Protocol):
    """A device with an energy counter."""


class EnergyMeter:
    """Repeats work without a pause until two changes of the energy counter are ``min_s`` seconds apart.

    ``enqueue_work`` enqueues ``executions`` executions of ``execution_s`` seconds each.
    """

    def __init__(
        self,
        gpu: _MeteredDevice,
        stream: Stream,
        enqueue_work: Callable[[Stream], None],
        *,
        executions: int,
        execution_s: float,
        min_s: float,
        now_s: Callable[[], float],
        read_j: ReadJ | None = None,
    ) -> None:
        self._gpu, self._stream, self._enqueue_work = gpu, stream, enqueue_work
        self._executions, self._execution_s = executions, execution_s
        self._min_s, self._now_s = min_s, now_s
        self._counter_changes = CounterChanges(read_j or (lambda: read_energy_j(gpu)), now_s)
        self._repeat_count = _repeats_per_chunk(executions, execution_s)
        self._energy_j: float | Unavailable = Unavailable(
            "the measurement of energy was interrupted"
        )

    def run(self) -> Iterator[float]:
        """Repeat the work, and yield the fraction of the measuring time that has passed."""
        if why_missing := self._counter_changes.why_missing:
            self._energy_j = why_missing
            return
        gpu, stream = self._gpu, self._stream
        with ExitStack() as cleanup:
            events = [gpu.event(timing=False) for _ in range(2)]
            for event in events:
                cleanup.callback(gpu.destroy_event, event)
                self._enqueue()
                gpu.record(event, stream)
            cleanup.callback(gpu.sync_stream, stream)
            chunk_ends_s: list[float] = []  # times at which the host saw that a chunk had completed
            begin_s = self._now_s()
            for event in cycle(events):
                while not gpu.query_event(event):
                    self._counter_changes.poll()
                chunk_ends_s.append(self._now_s())
                progress_share = self._counter_changes.elapsed_s / self._min_s
                is_over = (
                    progress_share >= 1
                    or chunk_ends_s[-1] - begin_s > _MAX_DURATION_FACTOR * self._min_s
                )
                if is_over and len(chunk_ends_s) > 1:  # two ends give the duration of a chunk
                    break
                yield min(progress_share, 1.0)
                self._enqueue()
                gpu.record(event, stream)
        self._energy_j = self._compute_energy_j(chunk_ends_s)

    def per_execution_j(self) -> float | Unavailable:
        """Return the joules of one execution; Unavailable if the counter was too slow or the device idle."""
        return self._energy_j

    def _enqueue(self) -> None:
        for _ in range(self._repeat_count):
            self._enqueue_work(self._stream)

    def _compute_energy_j(self, chunk_ends_s: list[float]) -> float | Unavailable:
        if self._counter_changes.elapsed_s < self._min_s:
            return Unavailable("the energy counter changed too rarely")
        seconds_per_chunk = (chunk_ends_s[-1] - chunk_ends_s[0]) / (len(chunk_ends_s) - 1)
        elapsed_s = seconds_per_chunk / (self._repeat_count * self._executions)
        if self._execution_s < _MIN_BUSY_SHARE * elapsed_s:
            busy_share = self._execution_s / elapsed_s
            return Unavailable(f"the GPU was busy for only {busy_share:.0%} of the time")
        return self._counter_changes.power_w() * elapsed_s


def read_energy_j(gpu: DeviceInfo) -> float | Unavailable:
    """Return the joules that a device has consumed since its driver was loaded."""
    energy_j = gpu.telemetry(("energy_j",)).fields.get("energy_j")
    if isinstance(energy_j, int | float):
        return energy_j
    return Unavailable("the GPU has no energy counter")


def _repeats_per_chunk(executions: int, execution_s: float) -> int:
    """Return how often the work is enqueued per chunk: two chunks must fit in the queue of launches."""
    repeat_count = _CHUNK_S / max(executions * execution_s, 1e-9)
    return max(1, min(round(repeat_count), MAX_QUEUED // 2 // executions))
