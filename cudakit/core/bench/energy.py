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

from cudakit.core.bench.prepare import Progress, WorkloadRun
from cudakit.core.bench.timer import MAX_QUEUED
from cudakit.gpu.api import DeviceInfo, Stream, Streams
from cudakit.units import Unavailable

# The length of each of two queued chunks of work. Reading the counter meanwhile takes up to 6 ms.
_CHUNK_S = 0.02
# The maximum duration, as a multiple of the time that the counter should span.
_MAX_DURATION = 3.0
# An idle device draws power too, which would be attributed to the work.
_MIN_BUSY = 0.9

ReadJ: TypeAlias = Callable[[], float | Unavailable]


def measure_energy(runs: Sequence[WorkloadRun], progress: Progress) -> None:
    """Measure the energy of one execution of each run with samples, if its method has ``energy_s``."""
    for run in runs:
        if not (run.method.energy_s and run.kept):
            continue
        meter = EnergyMeter(
            run.timer.gpu,
            run.timer.stream,
            run.work.enqueue,
            runs=run.work.executions,
            run_s=median(reading.time_s for reading in run.kept),
            min_s=run.method.energy_s,
            now_s=run.timer.now_s,
        )
        try:
            for fraction in meter.run():
                progress(f"{run.title}: measuring energy", fraction)
        except BaseException:
            run.stopped = "interrupted"
            raise
        run.energy_j = meter.per_run_j()


class CounterSteps:
    """The times at which the energy counter changed."""

    def __init__(self, read_j: ReadJ, now_s: Callable[[], float]) -> None:
        self._read_j, self._now_s = read_j, now_s
        self._seen_j = read_j()
        self._changes: list[tuple[float, float]] = []  # s, J

    @property
    def missing(self) -> Unavailable | None:
        """The reason why the device has no counter, or None if it has one."""
        return self._seen_j if isinstance(self._seen_j, Unavailable) else None

    @property
    def elapsed_s(self) -> float:
        """Time between the first and the last change."""
        return self._changes[-1][0] - self._changes[0][0] if self._changes else 0.0

    def poll(self) -> None:
        """Read the counter, and record the time if its value has changed."""
        read_j = self._read_j()
        if read_j != self._seen_j and not isinstance(read_j, Unavailable):
            self._seen_j = read_j
            self._changes.append((self._now_s(), read_j))

    def power_w(self) -> float:
        """Return the mean power in watts between the first and the last change."""
        return (self._changes[-1][1] - self._changes[0][1]) / self.elapsed_s


class _MeteredDevice(DeviceInfo, Streams, Protocol):
    """A device with an energy counter."""


class EnergyMeter:
    """Repeats work without a pause until the changes of the counter span at least ``min_s``.

    ``work`` enqueues ``runs`` executions of ``run_s`` seconds each.
    """

    def __init__(
        self,
        gpu: _MeteredDevice,
        stream: Stream,
        work: Callable[[Stream], None],
        *,
        runs: int,
        run_s: float,
        min_s: float,
        now_s: Callable[[], float],
        read_j: ReadJ | None = None,
    ) -> None:
        self._gpu, self._stream, self._work = gpu, stream, work
        self._runs, self._run_s, self._min_s, self._now_s = runs, run_s, min_s, now_s
        self._steps = CounterSteps(read_j or (lambda: read_energy_j(gpu)), now_s)
        self._repeats = _repeats_per_chunk(runs, run_s)
        self._found: float | Unavailable = Unavailable("the measurement of energy was interrupted")

    def run(self) -> Iterator[float]:
        """Repeat the work, and yield the fraction of the time that has passed."""
        if missing := self._steps.missing:
            self._found = missing
            return
        gpu, stream = self._gpu, self._stream
        with ExitStack() as cleanup:
            events = [gpu.event(timing=False) for _ in range(2)]
            for event in events:
                cleanup.callback(gpu.destroy_event, event)
                self._enqueue()
                gpu.record(event, stream)
            cleanup.callback(gpu.sync_stream, stream)
            ends_s: list[float] = []  # of each chunk
            begin_s = self._now_s()
            for event in cycle(events):
                while not gpu.query_event(event):
                    self._steps.poll()
                ends_s.append(self._now_s())
                fraction = self._steps.elapsed_s / self._min_s
                is_over = fraction >= 1 or ends_s[-1] - begin_s > _MAX_DURATION * self._min_s
                if is_over and len(ends_s) > 1:  # two ends give the duration of a chunk
                    break
                yield min(fraction, 1.0)
                self._enqueue()
                gpu.record(event, stream)
        self._found = self._energy_j(ends_s)

    def per_run_j(self) -> float | Unavailable:
        """Return the joules of one execution; Unavailable if the counter was too slow or the device idle."""
        return self._found

    def _enqueue(self) -> None:
        for _ in range(self._repeats):
            self._work(self._stream)

    def _energy_j(self, ends_s: list[float]) -> float | Unavailable:
        if self._steps.elapsed_s < self._min_s:
            return Unavailable("the energy counter changed too rarely")
        chunk_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
        elapsed_s = chunk_s / (self._repeats * self._runs)
        if self._run_s < _MIN_BUSY * elapsed_s:
            share = self._run_s / elapsed_s
            return Unavailable(f"the GPU was busy for only {share:.0%} of the time")
        return self._steps.power_w() * elapsed_s


def read_energy_j(gpu: DeviceInfo) -> float | Unavailable:
    """Return the joules that a device has consumed since its driver was loaded."""
    counted = gpu.telemetry(("energy_j",)).fields.get("energy_j")
    if isinstance(counted, int | float):
        return counted
    return Unavailable("the GPU has no energy counter")


def _repeats_per_chunk(runs: int, run_s: float) -> int:
    repeats = _CHUNK_S / max(runs * run_s, 1e-9)
    return max(1, min(round(repeats), MAX_QUEUED // 2 // runs))
