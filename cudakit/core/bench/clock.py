"""Clocks: what time it is for who waits, and how fast the SMs ran."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from cudakit.gpu.api import Gpu, Ptr, Stream
from cudakit.kernels.timestamp import STAMP_BYTES, Timestamp, clock_hz


def host_clock(gpu: Gpu) -> Callable[[], float]:
    """Return how to read the time in seconds; of a simulated device it is the virtual one."""
    if gpu.simulated:
        return lambda: gpu.telemetry().time_ns / 1e9
    return perf_counter


class SmClock:
    """Measures the clock of the SMs between two places of a stream."""

    def __init__(self, gpu: Gpu, multiprocessors: int) -> None:
        self._gpu = gpu
        self._kernel = Timestamp(gpu)
        self._count = multiprocessors
        self._nothing = bytes(2 * multiprocessors * STAMP_BYTES)
        self._first = gpu.host_malloc(len(self._nothing))
        self._last = Ptr(self._first + multiprocessors * STAMP_BYTES)
        self._bytes = gpu.host_view(self._first, len(self._nothing))

    def begin(self, stream: Stream) -> None:
        """Enqueue the first reading; the one before must have been taken."""
        self._bytes[:] = self._nothing
        self._kernel.stamp(self._first, self._count, stream)

    def end(self, stream: Stream) -> None:
        """Enqueue the second one."""
        self._kernel.stamp(self._last, self._count, stream)

    def take_hz(self) -> float | None:
        """Return the clock, when both were reached; None where too little time passed to tell."""
        words = self._bytes.cast("Q")
        half = len(words) // 2
        return clock_hz(words[:half], words[half:])

    def close(self) -> None:
        """Give everything back."""
        self._bytes.release()
        self._gpu.host_free(self._first)
        self._kernel.close()
