"""The energy of one execution, from a counter that is updated a few times per second.

Reading the counter takes milliseconds, so it is not read between samples: after the last sample the work
continues without a pause while the counter is read.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from itertools import cycle
from typing import Protocol, TypeAlias

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


class _MeteredDevice(DeviceInfo, Streams, Protocol):
    """A device with an energy counter."""


def energy_per_execution(
    gpu: _MeteredDevice,
    stream: Stream,
    enqueue_work: Callable[[Stream], None],
    *,
    executions: int,
    execution_s: float,
    min_s: float,
    now_s: Callable[[], float],
    progress: Callable[[float], None],
    read_j: ReadJ | None = None,
) -> float | Unavailable:
    """Return the joules of one execution; Unavailable if the counter was too slow or the device idle.

    ``enqueue_work`` enqueues ``executions`` executions of ``execution_s`` seconds each. It is repeated
    without a pause until two changes of the counter are ``min_s`` seconds apart.
    """
    counter = CounterChanges(read_j or (lambda: read_energy_j(gpu)), now_s)
    if isinstance(counter.last_j, Unavailable):
        return counter.last_j
    # Two chunks must fit in the queue of launches.
    repeats = max(
        1,
        min(round(_CHUNK_S / max(executions * execution_s, 1e-9)), MAX_QUEUED // 2 // executions),
    )

    def enqueue_chunk(event: int) -> None:
        for _ in range(repeats):
            enqueue_work(stream)
        gpu.record(events[event], stream)

    with ExitStack() as cleanup:
        events = [gpu.event(timing=False) for _ in range(2)]
        for i, event in enumerate(events):
            cleanup.callback(gpu.destroy_event, event)
            enqueue_chunk(i)
        cleanup.callback(gpu.sync_stream, stream)
        ends_s: list[float] = []  # times at which the host saw that a chunk had completed
        begin_s = now_s()
        for i in cycle(range(2)):
            while not gpu.query_event(events[i]):
                counter.poll()
            ends_s.append(now_s())
            share = counter.elapsed_s / min_s
            is_over = share >= 1 or ends_s[-1] - begin_s > _MAX_DURATION_FACTOR * min_s
            if is_over and len(ends_s) > 1:  # two ends give the duration of a chunk
                break
            progress(min(share, 1.0))
            enqueue_chunk(i)
    if counter.elapsed_s < min_s:
        return Unavailable("the energy counter changed too rarely")
    elapsed_s = (ends_s[-1] - ends_s[0]) / (len(ends_s) - 1) / (repeats * executions)
    if execution_s < _MIN_BUSY_SHARE * elapsed_s:
        return Unavailable(f"the GPU was busy for only {execution_s / elapsed_s:.0%} of the time")
    return counter.power_w() * elapsed_s


class CounterChanges:
    """The times at which the energy counter changed, and its values."""

    def __init__(self, read_j: ReadJ, now_s: Callable[[], float]) -> None:
        self._read_j, self._now_s = read_j, now_s
        self.last_j = read_j()
        self._changes: list[tuple[float, float]] = []  # Time in seconds, value in joules.

    @property
    def elapsed_s(self) -> float:
        """Time in seconds between the first and the last change."""
        return self._changes[-1][0] - self._changes[0][0] if self._changes else 0.0

    def poll(self) -> None:
        """Read the counter, and record the time and the value if the value has changed."""
        energy_j = self._read_j()
        if energy_j != self.last_j and not isinstance(energy_j, Unavailable):
            self.last_j = energy_j
            self._changes.append((self._now_s(), energy_j))

    def power_w(self) -> float:
        """Return the mean power in watts between the first and the last change."""
        return (self._changes[-1][1] - self._changes[0][1]) / self.elapsed_s


def read_energy_j(gpu: DeviceInfo) -> float | Unavailable:
    """Return the joules that a device has consumed since its driver was loaded."""
    energy_j = gpu.telemetry(("energy_j",)).fields.get("energy_j")
    if isinstance(energy_j, int | float):
        return energy_j
    return Unavailable("the GPU has no energy counter")
