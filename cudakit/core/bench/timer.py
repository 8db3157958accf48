"""The timer: how long work took on the device, and at which clock, or how long the host waited for it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from typing import TypeAlias

from cudakit.core.bench.blocker import LIMIT_S, Blocker
from cudakit.core.bench.cache import Flush, l2_size_bytes
from cudakit.core.bench.clock import SmClock, host_clock
from cudakit.gpu.api import Gpu, Stream

Work: TypeAlias = Callable[[Stream], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """What the timer says of one piece of work."""

    time_s: float
    sm_clock_hz: float | None = None  # of the SMs meanwhile; None where it is not known
    valid: bool = True  # whether the blocker held until all was enqueued


class Timer:
    """One stream of a device, with two events, a blocker and a clock of the SMs; ``close`` gives all back.

    ``blocker_limit_s`` is the patience of the watchdog.
    """

    def __init__(self, gpu: Gpu, *, blocker_limit_s: float = LIMIT_S) -> None:
        self.gpu = gpu
        fields = gpu.facts().fields
        multiprocessors = fields.get("multiprocessor_count")
        self.l2_bytes = l2_size_bytes(fields)
        self.stream = gpu.stream(blocking=False)
        self.flush = Flush(gpu, self.l2_bytes)
        self.now_s = host_clock(gpu)
        self._clock = SmClock(gpu, multiprocessors if isinstance(multiprocessors, int) else 1)
        self._blocker = Blocker(gpu, limit_s=blocker_limit_s)
        self._begin, self._end = gpu.event(), gpu.event()

    def time(self, work: Work, *, blocked: bool, before: Work | None = None) -> Reading:
        """Time what ``work`` enqueues, between two events; ``before`` is enqueued ahead of them.

        The stream must be idle, and is so afterwards. ``blocked`` lets nothing begin before all of it is
        enqueued. The clock is read outside of the events.
        """
        gpu, stream = self.gpu, self.stream
        if before:
            before(stream)
        with self._blocker.holding(stream) if blocked else nullcontext():
            self._clock.begin(stream)
            gpu.record(self._begin, stream)
            work(stream)
            gpu.record(self._end, stream)
            self._clock.end(stream)
        gpu.sync_stream(stream)
        held = not (blocked and self._blocker.gave_up)
        return Reading(gpu.elapsed(self._begin, self._end), self._clock.take_hz(), held)

    def time_at_host(
        self, work: Work, *, before: Work | None = None, waits: bool = True
    ) -> Reading:
        """Time what ``work`` enqueues by the host's clock, from the first call until the device is done.

        Without ``waits``, until ``work`` returns: the device is waited for outside of the time.
        """
        stream = self.stream
        if before:
            before(stream)
        self._clock.begin(stream)
        self.gpu.sync_stream(stream)
        begin_s = self.now_s()
        work(stream)
        if waits:
            self.gpu.sync_stream(stream)
        time_s = self.now_s() - begin_s
        self._clock.end(stream)
        self.gpu.sync_stream(stream)
        return Reading(time_s, self._clock.take_hz())

    def close(self) -> None:
        """Give everything back."""
        self.gpu.sync_stream(self.stream)
        self._blocker.close()
        self._clock.close()
        self.flush.close()
        for event in (self._begin, self._end):
            self.gpu.destroy_event(event)
        self.gpu.destroy_stream(self.stream)
