"""Profile a block of this process as ``cudakit run --profile`` does, and time a block on the GPU."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from cudakit.errors import UsageError
from cudakit.gpu.api import LEGACY, Event, Gpu, Stream
from cudakit.gpu.compile import demangle
from cudakit.profile.analysis import analyze
from cudakit.profile.idle import launched_work
from cudakit.profile.result import ProfileResult
from cudakit.profile.timeline import ActivityCollector, Timeline, timeline
from cudakit.record.recording import begin_profile
from cudakit.trace.spool import Batch

GpuChoice: TypeAlias = Literal["auto", "sim"]

_MAX_TIME_NS = 1 << 62


class Profiled:
    """The profile of a ``with`` block; it is complete when the block has ended."""

    def __init__(self) -> None:
        self._result: ProfileResult | None = None

    @property
    def result(self) -> ProfileResult:
        """The result of ``cudakit run --profile -o FILE.json``. Raises UsageError until the block ends."""
        if self._result is None:
            raise UsageError(
                "the profile is complete when its block has ended", hint="read it after the block"
            )
        return self._result


@contextmanager
def profile(*, step_range: str | None = None, gpu: GpuChoice = "auto") -> Iterator[Profiled]:
    """Profile the GPU work that all threads of this process launch in a block.

    ``step_range`` is the NVTX range that is a step; by default, steps are found. A process can profile one
    block of real GPU work. Simulated devices that are opened in a block are profiled, too; with
    ``gpu="sim"``, real devices are not, and any number of blocks is possible. Prints nothing.

    Raises UsageError in a process that is already recorded or was profiled before; EnvironmentUnusable if
    CUDA cannot be profiled.

    >>> with cudakit.profile(gpu="sim") as profile:
    ...     pass
    >>> profile.result.devices
    ()
    """
    collector, profiled = ActivityCollector(), Profiled()
    recording = begin_profile(collector.add, gpu=gpu)
    recording.record_simulated(enabled=True)
    try:
        yield profiled
    finally:
        recording.record_simulated(enabled=False)
        with recording.synchronize_and_drain():
            profiled._result = analyze(
                collector.activities(),
                step_range=step_range,
                demangle=demangle,
                notes=recording.cuda.notes,
                incomplete=recording.incomplete,
            ).result
        recording.close()


@dataclass(frozen=True, slots=True)
class GpuTime:
    """The GPU time and the number of GPU operations of one pytest test."""

    test: str  # id of the test
    busy_ns: int  # time in which work of the test ran
    launches: int  # number of kernels, copies and memsets


class TestTimes:
    """Profiles this process, and divides the GPU work among tests, for ``pytest --cuda-profile``.

    Work of real devices belongs to the test in which the host launched it. The work is attributed when the
    profile ends, because CUPTI delivers its records late. Work of simulated devices, whose time is virtual,
    belongs to the test that was running when it was recorded.
    """

    def __init__(self) -> None:
        self._real_collector = ActivityCollector()
        self._simulated_collector = ActivityCollector()
        self._test_windows: list[tuple[str, int, int]] = []  # id, begin and end of each test
        self._time_by_test: dict[str, GpuTime] = {}
        self._recording = begin_profile(self._add_batch)
        self._recording.record_simulated(enabled=True)

    @contextmanager
    def measure(self, test: str) -> Iterator[None]:
        """Attribute the GPU work of a ``with`` block to a test."""
        begin_ns = time.monotonic_ns()
        try:
            yield
        finally:
            self._test_windows.append((test, begin_ns, time.monotonic_ns()))
            with self._recording.drain():
                timelines = list(map(timeline, self._simulated_collector.activities()))
                self._add_time(test, timelines, -_MAX_TIME_NS, _MAX_TIME_NS)
                self._simulated_collector = ActivityCollector()

    def finish(self) -> list[GpuTime]:
        """End the profile; return the tests with GPU work, those with the most time first."""
        self._recording.record_simulated(enabled=False)
        with self._recording.synchronize_and_drain():
            timelines = list(map(timeline, self._real_collector.activities()))
            for test, begin_ns, end_ns in self._test_windows:
                self._add_time(test, timelines, begin_ns, end_ns)
        self._recording.close()
        return sorted(self._time_by_test.values(), key=lambda used: -used.busy_ns)

    def _add_batch(self, batch: Batch) -> None:
        (self._simulated_collector if batch.simulated else self._real_collector).add(batch)

    def _add_time(self, test: str, timelines: list[Timeline], begin_ns: int, end_ns: int) -> None:
        """Add the GPU work that was launched between two times to a test."""
        for process_timeline in timelines:
            busy_ns, launch_count = launched_work(process_timeline, begin_ns, end_ns)
            if launch_count:
                earlier_time = self._time_by_test.get(test, GpuTime(test, 0, 0))
                self._time_by_test[test] = GpuTime(
                    test, earlier_time.busy_ns + busy_ns, earlier_time.launches + launch_count
                )


@dataclass(slots=True)
class Timing:
    """The GPU time of a ``with`` block."""

    _gpu: Gpu
    _events: tuple[Event, Event]
    _closes_gpu: bool
    _seconds: float = field(default=math.nan)

    @property
    def seconds(self) -> float:
        """Time from the begin to the end of the block in its stream. The first read waits for the GPU."""
        if math.isnan(self._seconds):
            begin_event, end_event = self._events
            self._gpu.sync_event(end_event)
            self._seconds = self._gpu.elapsed(begin_event, end_event)
            for event in self._events:
                self._gpu.destroy_event(event)
            if self._closes_gpu:
                self._gpu.close()
        return self._seconds


@contextmanager
def timed(stream: object = None, *, gpu: Gpu | None = None) -> Iterator[Timing]:
    """Measure the time that the work of a block takes on the GPU, by CUDA events.

    ``stream`` is a stream of torch, CuPy, Numba or cuda.core, or a driver handle; by default it is cudakit's
    current stream. On a device ``gpu`` that cudakit opened, it is a stream of that device. The block is not
    synchronized: reading ``seconds`` waits for its end.

    >>> with cudakit.timed() as timing:  # doctest: +SKIP
    ...     model(batch)
    >>> timing.seconds  # doctest: +SKIP
    0.0123

    On a simulated device, the time is simulated:

    >>> from cudakit.gpu.sim import Sim
    >>> with cudakit.timed(gpu=Sim()) as timing:
    ...     pass
    >>> timing.seconds < 1e-5
    True
    """
    device, measured_stream = _current_stream(stream) if gpu is None else (gpu, LEGACY)
    if gpu is not None and isinstance(stream, int):
        measured_stream = Stream(stream)
    begin, end = device.event(), device.event()
    device.record(begin, measured_stream)
    yield Timing(device, (begin, end), gpu is None)
    device.record(end, measured_stream)


def _current_stream(stream: object) -> tuple[Gpu, Stream]:
    """Return the device of a stream, and the stream; None is cudakit's current stream."""
    from cudakit.gpu.cuda import current
    from cudakit.gpu.cuda.device import Cuda

    with current.stream(current.current_stream() if stream is None else stream):
        device = Cuda(current.current_device())
        return device, device.streams.external_stream(current.current_stream())
