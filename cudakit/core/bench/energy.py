"""Energy of one execution, from a counter that moves a few times a second only.

To read the counter takes milliseconds, so that it is not done between samples: the work goes on for a while
behind them without a pause, and the counter is watched meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import cycle
from typing import TypeAlias

from cudakit.core.bench.blocker import MOST_QUEUED
from cudakit.gpu.api import Gpu, Stream
from cudakit.units import Unavailable

# Two of them are queued: long enough for the counter to be read meanwhile, which takes up to 6 ms.
_CHUNK_S = 0.02
# So many times the time that is to lie between the steps is waited, at most.
_MOST_TIMES = 3.0
# Who waits costs energy too, which would be counted as that of the work.
_LEAST_BUSY = 0.9

ReadJ: TypeAlias = Callable[[], float | Unavailable]


class Steps:
    """The moments when a counter was seen to move; what lies outside of them is not known."""

    def __init__(self, read_j: ReadJ, now_s: Callable[[], float]) -> None:
        self._read_j, self._now_s = read_j, now_s
        self._seen_j = read_j()
        self._moments: list[tuple[float, float]] = []  # s, J

    @property
    def refusal(self) -> Unavailable | None:
        """Why there is no counter, where there is none."""
        return self._seen_j if isinstance(self._seen_j, Unavailable) else None

    @property
    def elapsed_s(self) -> float:
        """Time from the first step to the last."""
        return self._moments[-1][0] - self._moments[0][0] if self._moments else 0.0

    def look(self) -> None:
        """Look whether the counter has moved."""
        read_j = self._read_j()
        if read_j != self._seen_j and not isinstance(read_j, Unavailable):
            self._seen_j = read_j
            self._moments.append((self._now_s(), read_j))

    def power_w(self) -> float:
        """Return the mean power between the first step and the last, in watts."""
        return (self._moments[-1][1] - self._moments[0][1]) / self.elapsed_s


class Burn:
    """Work that goes on without a pause until the counter has moved for long enough.

    ``work`` enqueues ``runs`` executions, of ``run_s`` seconds each; ``least_s`` lie between the first step
    and the last.
    """

    def __init__(
        self,
        gpu: Gpu,
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
        self._steps = Steps(read_j or (lambda: counted_j(gpu)), now_s)
        self._works = _works_in_chunk(runs, run_s)
        self._found: float | Unavailable = Unavailable("it was broken off")

    def go_on(self) -> Iterator[float]:
        """Run; yields how much of the way is done."""
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
                    self._steps.look()
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
        """Return the joules of one execution; Unavailable where the counter or the work leaves gaps."""
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


def counted_j(gpu: Gpu) -> float | Unavailable:
    """Read the joules that a device has counted since its driver was loaded."""
    counted = gpu.telemetry(("energy_j",)).fields.get("energy_j")
    if isinstance(counted, int | float):
        return counted
    return Unavailable("the GPU does not count energy")


def _works_in_chunk(runs: int, run_s: float) -> int:
    wanted = _CHUNK_S / max(runs * run_s, 1e-9)
    return max(1, min(round(wanted), MOST_QUEUED // 2 // runs))
