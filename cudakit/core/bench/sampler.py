"""Samplers: one for each mode of timing, which makes samples of a workload by the timer."""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from cudakit.core.bench.blocker import MOST_QUEUED
from cudakit.core.bench.cache import MOST_SETS
from cudakit.core.bench.capturing import captured
from cudakit.core.bench.method import Method
from cudakit.core.bench.timer import Reading, Timer, Work
from cudakit.core.bench.workload import Prepared
from cudakit.errors import UsageError
from cudakit.gpu.api import Graph, Stream


class Turns:
    """Runs a workload on one buffer set after the other."""

    def __init__(self, prepared: Prepared, sets: int) -> None:
        self.sets = sets
        self.runs = 0
        self._prepared = prepared
        self._next = 0
        self._complete = 0

    def run(self, stream: Stream) -> None:
        """Enqueue a run on the next buffer set."""
        self._prepared.enqueue(stream, self._next % self.sets)
        self.advance(1)

    def again(self, stream: Stream) -> None:
        """Enqueue a run on the buffer set that was last, whose turn it is no more."""
        self._prepared.enqueue(stream, (self._next - 1) % self.sets)
        self.runs += 1

    def capture(self, stream: Stream, count: int) -> None:
        """Enqueue runs that only a graph will do; ``advance`` says when it did."""
        for number in range(count):
            self._prepared.enqueue(stream, (self._next + number) % self.sets)

    def advance(self, count: int) -> None:
        """Count runs that were enqueued."""
        self._next += count
        self.runs += count

    def complete(self, stream: Stream) -> None:
        """Enqueue runs until every buffer set had one since this was last called."""
        while self._next - self._complete < self.sets:
            self.run(stream)
        self._complete = self._next


class Sampler(Protocol):
    """Takes samples. A sample is the mean time of its executions."""

    @property
    def executions(self) -> int:
        """How many there are in a sample."""
        ...

    def sample(self, *, blocked: bool) -> Reading:
        """Take one; ``blocked`` hides the gaps between launches."""
        ...

    def enqueue(self, stream: Stream) -> None:
        """Enqueue the executions of one, without a clock."""
        ...

    def close(self) -> None:
        """Give back what was made for it."""
        ...


def sampler(timer: Timer, turns: Turns, method: Method, estimate_s: float) -> Sampler:
    """Make the sampler of a method. ``estimate_s`` is about what one execution takes.

    Raises UsageError for a method that cannot be: nothing flushes the cache inside of a batch or graph.
    """
    many, flushed = method.mode in ("batch", "graph"), method.cache == "flush"
    if many and flushed:
        raise UsageError(
            f"the cache cannot be flushed between the executions of a {method.mode}",
            hint="rotate buffers, or time each execution by itself (isolated)",
        )
    before = _before(timer, turns, flushed=flushed, interleaved=bool(method.interleaved))
    if method.mode == "graph":
        return _Replayed(timer, turns, _nodes(method, estimate_s, turns.sets), before)
    if method.at_host:
        return _AtHost(timer, turns, before, waits=method.mode == "host")
    executions = min(_filling(method, estimate_s), MOST_QUEUED) if many else 1
    return _Enqueued(timer, turns, executions, before)


class _Enqueued:
    """Isolated and batch: so many launches between two events."""

    def __init__(self, timer: Timer, turns: Turns, executions: int, before: Work | None) -> None:
        self.executions = executions
        self._timer = timer
        self._turns = turns
        self._before = before

    def sample(self, *, blocked: bool) -> Reading:
        reading = self._timer.time(self.enqueue, blocked=blocked, before=self._before)
        return _of_one(reading, self.executions)

    def close(self) -> None:
        """Nothing was made."""

    def enqueue(self, stream: Stream) -> None:
        for _ in range(self.executions):
            self._turns.run(stream)


class _Replayed:
    """Graph: so many executions captured, and replayed between two events."""

    def __init__(self, timer: Timer, turns: Turns, executions: int, before: Work | None) -> None:
        self.executions = executions
        self._timer = timer
        self._turns = turns
        self._before = before
        graph = self._capture()
        self._executable = timer.gpu.instantiate(graph)
        timer.gpu.destroy_graph(graph)

    def sample(self, *, blocked: bool) -> Reading:
        reading = self._timer.time(self.enqueue, blocked=blocked, before=self._before)
        return _of_one(reading, self.executions)

    def close(self) -> None:
        self._timer.gpu.destroy_graph_exec(self._executable)

    def enqueue(self, stream: Stream) -> None:
        self._timer.gpu.graph_launch(self._executable, stream)
        self._turns.advance(self.executions)

    def _capture(self) -> Graph:
        timer = self._timer
        return captured(
            timer.gpu, timer.stream, lambda stream: self._turns.capture(stream, self.executions)
        )


class _AtHost:
    """Host and call: from the call until the device is done or the call returns, by the host's clock."""

    executions = 1

    def __init__(self, timer: Timer, turns: Turns, before: Work | None, *, waits: bool) -> None:
        self._timer = timer
        self._turns = turns
        self._before = before
        self._waits = waits

    def sample(self, *, blocked: bool) -> Reading:  # noqa: ARG002 who waits for a launch pays for the gap
        return self._timer.time_at_host(self.enqueue, before=self._before, waits=self._waits)

    def enqueue(self, stream: Stream) -> None:
        self._turns.run(stream)

    def close(self) -> None:
        """Nothing was made."""


def _before(timer: Timer, turns: Turns, *, flushed: bool, interleaved: bool) -> Work | None:
    """Say what is enqueued ahead of each sample.

    Who takes turns with others runs once before: otherwise it would pay for what they left in the cache and
    what of it is still to be written to memory, and they for what it left.
    """
    if not interleaved:
        return timer.flush if flushed else None

    def settle(stream: Stream) -> None:
        turns.again(stream)
        if flushed:
            timer.flush(stream)

    return settle


def _of_one(reading: Reading, executions: int) -> Reading:
    return replace(reading, time_s=reading.time_s / executions)


def _filling(method: Method, estimate_s: float) -> int:
    """Say how many executions fill a sample."""
    return max(1, round(method.sample_s / max(estimate_s, 1e-9)))


def _nodes(method: Method, estimate_s: float, sets: int) -> int:
    """Say how many executions a graph has: each buffer set equally often, so that replays go on in turn."""
    rounds = -(-min(_filling(method, estimate_s), MOST_SETS) // sets)
    return sets * max(1, min(rounds, MOST_SETS // sets))
