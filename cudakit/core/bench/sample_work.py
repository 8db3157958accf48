"""The work of one sample of a workload, in each mode."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial

from cudakit.core.bench.l2_cache import MAX_SETS
from cudakit.core.bench.method import Method
from cudakit.core.bench.timer import MAX_QUEUED, Enqueue, SampleWork, Timer
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Graph, Graphs, Stream


class BufferRotation:
    """Runs a workload on its buffer sets in rotation; ``enqueue`` is that of ``Prepared``."""

    def __init__(self, enqueue: Callable[[Stream, int], None], sets: int) -> None:
        self.sets = sets
        self.runs = 0
        self._enqueue = enqueue
        self._next = 0
        self._complete = 0

    def run(self, stream: Stream) -> None:
        """Enqueue an execution on the next buffer set."""
        self._enqueue(stream, self._next % self.sets)
        self.advance(1)

    def run_many(self, stream: Stream, count: int) -> None:
        """Enqueue ``count`` executions."""
        for _ in range(count):
            self.run(stream)

    def repeat(self, stream: Stream) -> None:
        """Enqueue an execution on the buffer set of the previous one."""
        self._enqueue(stream, (self._next - 1) % self.sets)
        self.runs += 1

    def capture(self, stream: Stream, count: int) -> None:
        """Enqueue executions that a graph captures; call ``advance`` when the graph was launched."""
        for number in range(count):
            self._enqueue(stream, (self._next + number) % self.sets)

    def advance(self, count: int) -> None:
        """Count executions that were enqueued."""
        self._next += count
        self.runs += count

    def complete(self, stream: Stream) -> None:
        """Enqueue executions until every buffer set was used since the previous call."""
        while self._next - self._complete < self.sets:
            self.run(stream)
        self._complete = self._next


def make_sample_work(
    timer: Timer, rotation: BufferRotation, method: Method, estimate_s: float
) -> SampleWork:
    """Return the work of a sample; ``estimate_s`` is an estimate of one execution.

    Raises UsageError for a batch or graph with a flush between its executions, which is impossible.
    """
    flushed = method.cache == "flush"
    if flushed and method.mode in ("batch", "graph"):
        raise UsageError(
            f"L2 cannot be flushed between the executions of a {method.mode}",
            hint="add --mode isolated, or --cache rotate",
        )
    before = _before(timer, rotation, flushed=flushed, interleaved=bool(method.interleaved))
    if method.mode == "graph":
        return _graph_work(timer, rotation, _nodes(method, estimate_s, rotation.sets), before)
    if method.mode == "batch":
        executions = min(_executions(method, estimate_s), MAX_QUEUED)
        return SampleWork(partial(rotation.run_many, count=executions), executions, before)
    return SampleWork(rotation.run, before=before, clock=method.clock)


def _graph_work(
    timer: Timer, rotation: BufferRotation, executions: int, before: Enqueue | None
) -> SampleWork:
    """Capture executions in a graph, which a sample replays."""
    gpu = timer.gpu
    graph = capture(gpu, timer.stream, partial(rotation.capture, count=executions))
    executable = gpu.instantiate(graph)
    gpu.destroy_graph(graph)

    def replay(stream: Stream) -> None:
        gpu.graph_launch(executable, stream)
        rotation.advance(executions)

    return SampleWork(replay, executions, before, close=partial(gpu.destroy_graph_exec, executable))


def _before(
    timer: Timer, rotation: BufferRotation, *, flushed: bool, interleaved: bool
) -> Enqueue | None:
    """Return the untimed work before each sample.

    An interleaved workload runs once untimed. Otherwise its sample would include write-backs of the cache
    lines that the other workloads left dirty.
    """
    if not interleaved:
        return timer.flush if flushed else None

    def repeat_and_flush(stream: Stream) -> None:
        rotation.repeat(stream)
        if flushed:
            timer.flush(stream)

    return repeat_and_flush


def _executions(method: Method, estimate_s: float) -> int:
    """Return the number of executions that take ``method.sample_s``."""
    return max(1, round(method.sample_s / max(estimate_s, 1e-9)))


def _nodes(method: Method, estimate_s: float, sets: int) -> int:
    """Return the number of executions per graph: each buffer set is used equally often."""
    turns = -(-min(_executions(method, estimate_s), MAX_SETS) // sets)
    return sets * max(1, min(turns, MAX_SETS // sets))


def capture(gpu: Graphs, stream: Stream, work: Enqueue) -> Graph:
    """Capture what ``work`` enqueues on a stream. The capture is ended on any error."""
    gpu.capture_begin(stream)
    try:
        work(stream)
    except BaseException:
        with suppress(CudaError):  # the error that ended the capture is the one to report
            gpu.destroy_graph(gpu.capture_end(stream))
        raise
    return gpu.capture_end(stream)
