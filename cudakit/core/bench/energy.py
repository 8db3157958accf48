"""Energy of one execution, from a counter that is updated only a few times a second.

Reading the counter takes milliseconds, so it is not read between samples: after them the work continues
without a pause, and the counter is read meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from itertools import cycle
from statistics import median
from typing import Protocol, TypeAlias

from cudakit.core.bench.prepare import Progress, WorkloadRun
from cudakit.core.bench.timer import MOST_QUEUED
from cudakit.gpu.api import DeviceInfo, Stream, Streams
from cudakit.units import Unavailable

# Two chunks are queued: long enough for reading the counter meanwhile, which takes up to 6 ms.
_CHUNK_S = 0.02
# The longest wait, as a multiple of the time that the counter is to span.
_MOST_TIMES = 3.0
# An idle device draws power too, which would be counted as that of the work.
_LEAST_BUSY = 0.9

ReadJ: TypeAlias = Callable[[], float | Unavailable]


def count_energy(runs: Sequence[WorkloadRun], progress: Progress) -> None:
    """Measure the energy of one execution of each run that has samples, if its method asks for it."""
    for run in runs:
        if run.sampler is None or not (run.method.energy_s and run.kept):
            continue
        meter = EnergyMeter(
            run.timer.gpu,
            run.timer.stream,
            run.sampler.enqueue,
            runs=run.executions,
            run_s=median(reading.time_s for reading in run.kept),
            least_s=run.method.energy_s,
            now_s=run.timer.now_s,
        )
        try:
            for fraction in meter.run():
                progress(f"{run.title}: counting energy", fraction)
        except BaseException:
            run.stopped = "interrupted"
            raise
        run.energy_j = meter.per_run_j()


class CounterSteps:
    """The moments at which a counter was seen to change."""

    def __init__(self, read_j: ReadJ, now_s: Callable[[], float]) -> None:
        self._read_j, self._now_s = read_j, now_s
        self._seen_j = read_j()
        self._moments: list[tuple[float, float]] = []  # s, J

    @property
    def refusal(self) -> Unavailable | None:
        """Why there is no counter, or None if there is one."""
        return self._seen_j if isinstance(self._seen_j, Unavailable) else None

    @property
    def elapsed_s(self) -> float:
        """Time from the first step to the last."""
        return self._moments[-1][0] - self._moments[0][0] if self._moments else 0.0

    def poll(self) -> None:
        """Read the counter, and record the moment if it has changed."""
        read_j = self._read_j()
        if read_j != self._seen_j and not isinstance(read_j, Unavailable):
            self._seen_j = read_j
            self._moments.append((self._now_s(), read_j))

    def power_w(self) -> float:
        """Return the mean power between the first step and the last, in watts."""
        return (self._moments[-1][1] - self._moments[0][1]) / self.elapsed_s


class _MeteredDevice(DeviceInfo, Streams, Protocol):
    """A device with an energy counter."""


class EnergyMeter:
    """Repeats work without a pause until the counter has changed over at least ``least_s``.

    ``work`` enqueues ``runs`` executions, of ``run_s`` seconds each.
    """

    def __init__(
        self,
        gpu: _MeteredDevice,
        stream: Stream,
        work: Callable[[Stream], None],
        *,
        runs: int,
        run_s: float,
        least_s: float,
        now_s: Callable[[], float],
        read_j: ReadJ | None = None,
    ) -> None:
        self._gpu, self._stream, self._work = gpu, stream, work
        self._runs, self._run_s, self._least_s, self._now_s = runs, run_s, least_s, now_s
        self._steps = CounterSteps(read_j or (lambda: counted_j(gpu)), now_s)
        self._works = _works_in_chunk(runs, run_s)
        self._found: float | Unavailable = Unavailable("it was broken off")

    def run(self) -> Iterator[float]:
        """Repeat the work; yields the fraction of the time that has passed."""
        if refusal := self._steps.refusal:
            self._found = refusal
            return
        gpu, stream = self._gpu, self._stream
        with ExitStack() as owned:
            events = [gpu.event(timing=False) for _ in range(2)]
            for event in events:
                owned.callback(gpu.destroy_event, event)
                self._enqueue()
                gpu.record(event, stream)
            owned.callback(gpu.sync_stream, stream)
            ends_s: list[float] = []  # of each chunk
            begin_s = self._now_s()
            for event in cycle(events):
                while not gpu.query_event(event):
                    self._steps.poll()
                ends_s.append(self._now_s())
                fraction = self._steps.elapsed_s / self._least_s
                is_over = fraction >= 1 or ends_s[-1] - begin_s > _MOST_TIMES * self._least_s
                if is_over and len(ends_s) > 1:  # how long a chunk takes lies between two ends
                    break
                yield min(fraction, 1.0)
                self._enqueue()
                gpu.record(event, stream)
        self._found = self._energy_j(ends_s)

    def per_run_j(self) -> float | Unavailable:
        """Return the joules of one execution; Unavailable if the counter or the work has gaps."""
        return self._found

    def _enqueue(self) -> None:
        for _ in range(self._works):
            self._work(self._stream)

    def _energy_j(self, ends_s: list[float]) -> float | Unavailable:
        if self._steps.elapsed_s < self._least_s:
            return Unavailable("the energy counter moved too seldom")
        chunk_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1)
        elapsed_s = chunk_s / (self._works * self._runs)
        if self._run_s < _LEAST_BUSY * elapsed_s:
            share = self._run_s / elapsed_s
            return Unavailable(f"the GPU could be kept busy for {share:.0%} of the time only")
        return self._steps.power_w() * elapsed_s


def counted_j(gpu: DeviceInfo) -> float | Unavailable:
    """Read the joules that a device has consumed since its driver was loaded."""
    counted = gpu.telemetry(("energy_j",)).fields.get("energy_j")
    if isinstance(counted, int | float):
        return counted
    return Unavailable("the GPU does not count energy")


def _works_in_chunk(runs: int, run_s: float) -> int:
    wanted = _CHUNK_S / max(runs * run_s, 1e-9)
    return max(1, min(round(wanted), MOST_QUEUED // 2 // runs))
