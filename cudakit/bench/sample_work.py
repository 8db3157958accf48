"""The work of one sample of a workload, in each mode."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from cudakit.bench.l2_cache import MAX_SETS
from cudakit.bench.method import Method
from cudakit.bench.timer import MAX_QUEUED, Enqueue, SampleTimer, SampleWork
from cudakit.errors import UsageError
from cudakit.gpu.api import Stream


class BufferRotation:
    """Runs a workload on its buffer sets in rotation; ``enqueue`` takes a stream and a buffer set's index."""

    def __init__(self, enqueue: Callable[[Stream, int], None], set_count: int) -> None:
        self.set_count = set_count
        self.execution_count = 0
        self._enqueue = enqueue
        self._next_set = 0
        self._next_at_complete = 0

    def run(self, stream: Stream) -> None:
        """Enqueue an execution on the next buffer set."""
        self._enqueue(stream, self._next_set % self.set_count)
        self.advance(1)

    def run_many(self, stream: Stream, count: int) -> None:
        """Enqueue ``count`` executions."""
        for _ in range(count):
            self.run(stream)

    def repeat(self, stream: Stream) -> None:
        """Enqueue an execution on the same buffer set as the previous execution."""
        self._enqueue(stream, (self._next_set - 1) % self.set_count)
        self.execution_count += 1

    def capture(self, stream: Stream, count: int) -> None:
        """Enqueue executions that a graph captures; call ``advance`` after each launch of the graph."""
        for offset in range(count):
            self._enqueue(stream, (self._next_set + offset) % self.set_count)

    def advance(self, count: int) -> None:
        """Continue the rotation after executions that a graph launch enqueued."""
        self._next_set += count
        self.execution_count += count

    def complete(self, stream: Stream) -> None:
        """Enqueue executions until every buffer set was used since the previous call."""
        while self._next_set - self._next_at_complete < self.set_count:
            self.run(stream)
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
    enqueue_before = _work_before_sample(
        timer, rotation, flushes=flushes, is_interleaved=bool(method.interleaved)
    )
    if method.mode == "graph":
        return _graph_work(
            timer,
            rotation,
            _executions_per_graph(method, estimate_s, rotation.set_count),
            enqueue_before,
        )
    if method.mode == "batch":
        executions = min(_executions_per_batch(method, estimate_s), MAX_QUEUED)
        return SampleWork(partial(rotation.run_many, count=executions), executions, enqueue_before)
    if method.mode == "call" and method.executions > 1:
        enqueue_calls = partial(rotation.run_many, count=method.executions)
        return SampleWork(enqueue_calls, method.executions, enqueue_before, clock=method.clock)
    return SampleWork(rotation.run, enqueue_before=enqueue_before, clock=method.clock)


def _graph_work(
    timer: SampleTimer, rotation: BufferRotation, executions: int, enqueue_before: Enqueue | None
) -> SampleWork:
    """Capture executions in a graph, which a sample replays."""
    graph = timer.capture(partial(rotation.capture, count=executions))

    def replay(stream: Stream) -> None:
        graph.launch(stream)
        rotation.advance(executions)

    return SampleWork(replay, executions, enqueue_before, close=graph.close)


def _work_before_sample(
    timer: SampleTimer, rotation: BufferRotation, *, flushes: bool, is_interleaved: bool
) -> Enqueue | None:
    """Return the untimed work before each sample.

    An interleaved workload runs once untimed. Otherwise its sample would include write-backs of the cache
    lines that the other workloads left dirty.
    """
    if not is_interleaved:
        return timer.flush if flushes else None

    def repeat_and_flush(stream: Stream) -> None:
        rotation.repeat(stream)
        if flushes:
            timer.flush(stream)

    return repeat_and_flush


def _executions_per_batch(method: Method, estimate_s: float) -> int:
    """Return the number of executions that take ``method.sample_s``."""
    return max(1, round(method.sample_s / max(estimate_s, 1e-9)))


def _executions_per_graph(method: Method, estimate_s: float, set_count: int) -> int:
    """Return the number of executions per graph: a multiple of the number of buffer sets."""
    rotation_count = -(-min(_executions_per_batch(method, estimate_s), MAX_SETS) // set_count)
    return set_count * max(1, min(rotation_count, MAX_SETS // set_count))
