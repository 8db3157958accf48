"""Samplers: take samples of a workload with the timer, in each mode of timing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from cudakit.core.bench.l2_cache import MOST_SETS
from cudakit.core.bench.measurement import Reading
from cudakit.core.bench.method import Method
from cudakit.core.bench.timer import MOST_QUEUED, Timer, Work
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Graph, Graphs, Stream


class BufferRotation:
    """Runs a workload on its buffer sets in turn; ``enqueue`` is that of ``Prepared``."""

    def __init__(self, enqueue: Callable[[Stream, int], None], sets: int) -> None:
        self.sets = sets
        self.runs = 0
        self._enqueue = enqueue
        self._next = 0
        self._complete = 0

    def run(self, stream: Stream) -> None:
        """Enqueue a run on the next buffer set."""
        self._enqueue(stream, self._next % self.sets)
        self.advance(1)

    def again(self, stream: Stream) -> None:
        """Enqueue a run on the buffer set of the previous run, without advancing."""
        self._enqueue(stream, (self._next - 1) % self.sets)
        self.runs += 1

    def capture(self, stream: Stream, count: int) -> None:
        """Enqueue runs that a graph captures; call ``advance`` when the graph was launched."""
        for number in range(count):
            self._enqueue(stream, (self._next + number) % self.sets)

    def advance(self, count: int) -> None:
        """Count runs that were enqueued."""
        self._next += count
        self.runs += count

    def complete(self, stream: Stream) -> None:
        """Enqueue runs until every buffer set had one since the previous call."""
        while self._next - self._complete < self.sets:
            self.run(stream)
        self._complete = self._next


class Sampler:
    """Takes samples of mode isolated or batch: one or more launches between two events.

    A sample is the mean time of its ``executions``; ``before`` is enqueued ahead of each.
    """

    def __init__(
        self, timer: Timer, rotation: BufferRotation, executions: int, before: Work | None
    ) -> None:
        self.executions = executions
        self._timer, self._rotation, self._before = timer, rotation, before

    def sample(self, *, blocked: bool) -> Reading:
        """Take one sample; ``blocked`` hides launch gaps."""
        reading = self._timer.time(self.enqueue, blocked=blocked, before=self._before)
        return replace(reading, time_s=reading.time_s / self.executions)

    def enqueue(self, stream: Stream) -> None:
        """Enqueue the executions of one sample, untimed."""
        for _ in range(self.executions):
            self._rotation.run(stream)

    def close(self) -> None:
        """Release what the sampler holds."""


class _GraphSampler(Sampler):
    """Graph: executions captured once, and replayed between two events."""

    def __init__(
        self, timer: Timer, rotation: BufferRotation, executions: int, before: Work | None
    ) -> None:
        super().__init__(timer, rotation, executions, before)
        graph = capture(
            timer.gpu, timer.stream, lambda stream: rotation.capture(stream, executions)
        )
        self._executable = timer.gpu.instantiate(graph)
        timer.gpu.destroy_graph(graph)

    def enqueue(self, stream: Stream) -> None:
        self._timer.gpu.graph_launch(self._executable, stream)
        self._rotation.advance(self.executions)

    def close(self) -> None:
        self._timer.gpu.destroy_graph_exec(self._executable)


class _HostSampler(Sampler):
    """Host and call: from the call until the device is done or the call returns, by the host's clock."""

    def __init__(
        self, timer: Timer, rotation: BufferRotation, before: Work | None, *, waits: bool
    ) -> None:
        super().__init__(timer, rotation, 1, before)
        self._waits = waits

    def sample(self, *, blocked: bool) -> Reading:  # noqa: ARG002 launch gaps are part of the time
        return self._timer.time_at_host(self.enqueue, before=self._before, waits=self._waits)


def make_sampler(
    timer: Timer, rotation: BufferRotation, method: Method, estimate_s: float
) -> Sampler:
    """Return the sampler of a method; ``estimate_s`` is an estimate of one execution.

    Raises UsageError for a flush between the executions of a batch or graph, which is impossible.
    """
    many, flushed = method.mode in ("batch", "graph"), method.cache == "flush"
    if many and flushed:
        raise UsageError(
            f"the cache cannot be flushed between the executions of a {method.mode}",
            hint="rotate buffers, or time each execution by itself (isolated)",
        )
    before = _before(timer, rotation, flushed=flushed, interleaved=bool(method.interleaved))
    if method.mode == "graph":
        return _GraphSampler(timer, rotation, _nodes(method, estimate_s, rotation.sets), before)
    if method.at_host:
        return _HostSampler(timer, rotation, before, waits=method.mode == "host")
    executions = min(_fill_sample(method, estimate_s), MOST_QUEUED) if many else 1
    return Sampler(timer, rotation, executions, before)


def _before(
    timer: Timer, rotation: BufferRotation, *, flushed: bool, interleaved: bool
) -> Work | None:
    """Return the work that is enqueued ahead of each sample.

    An interleaved workload runs once untimed: otherwise its sample would include write-backs of the cache
    lines that the other workloads left dirty.
    """
    if not interleaved:
        return timer.flush if flushed else None

    def prime(stream: Stream) -> None:
        rotation.again(stream)
        if flushed:
            timer.flush(stream)

    return prime


def _fill_sample(method: Method, estimate_s: float) -> int:
    """Return the number of executions that fill a sample."""
    return max(1, round(method.sample_s / max(estimate_s, 1e-9)))


def _nodes(method: Method, estimate_s: float, sets: int) -> int:
    """Return the number of executions in a graph: each buffer set equally often, so that replays rotate."""
    rounds = -(-min(_fill_sample(method, estimate_s), MOST_SETS) // sets)
    return sets * max(1, min(rounds, MOST_SETS // sets))


def capture(gpu: Graphs, stream: Stream, work: Work) -> Graph:
    """Capture what ``work`` enqueues on a stream. The capture is ended on any error."""
    gpu.capture_begin(stream)
    try:
        work(stream)
    except BaseException:
        with suppress(CudaError):  # the error that ended the capture is the one to report
            gpu.destroy_graph(gpu.capture_end(stream))
        raise
    return gpu.capture_end(stream)
