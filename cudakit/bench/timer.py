"""The timer: the time and the SM clock of a sample, and the L2 state before it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from math import ceil
from time import perf_counter
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np

from cudakit.arrays.spin import Spin
from cudakit.arrays.timestamp import STAMP_BYTES, Timestamp, clock_hz
from cudakit.bench.case import Cache, Clock, WorkloadWithUntimedWork
from cudakit.bench.roofline import Work
from cudakit.errors import CudaError
from cudakit.gpu.api import ComputeDevice, DeviceInfo, Gpu, Graph, Graphs, Ptr, Stream
from cudakit.gpu.api.facts import Field
from cudakit.units import Unavailable

# Time limit of the blocking kernel: much longer than filling a queue, which takes about 1000 launches of 10
# us.
_BLOCKING_LIMIT_S = 2.0
# Maximum number of calls to enqueue at once: a launch blocks the host if the device's queue is full.
MAX_QUEUED = 500
_WORD_BYTES = 4
# Environment variables that make launches synchronous, or make kernels wait for a tool.
_DISABLING_VARIABLES = ("CUDA_LAUNCH_BLOCKING", "CUDA_INJECTION64_PATH")

# A function that enqueues work on a stream.
Enqueue: TypeAlias = Callable[[Stream], None]


@dataclass(frozen=True, slots=True)
class Reading:
    """One timed execution or batch of executions, before samples are selected."""

    time_s: float
    sm_clock_hz: float | None = None  # Mean SM clock during the reading; None if unknown.
    valid: bool = True  # False if the blocking kernel timed out.


@dataclass(frozen=True, slots=True)
class SampleWork:
    """The work of one sample, and the clock that times it."""

    enqueue: Enqueue
    executions: int = 1  # Number of executions; the time of a sample is their mean.
    enqueue_before: Enqueue | None = None  # Untimed work before the sample.
    clock: Clock = "device"
    close: Callable[[], None] = lambda: None
    # Workload that enqueues untimed work right before and after the sample; None if it has no such work.
    with_untimed_work: WorkloadWithUntimedWork | None = None
    # Untimed work that makes several devices start the timed work at the same time; None for one device.
    align_devices: Enqueue | None = None


class CapturedWork(NamedTuple):
    """Work in a CUDA graph: a function that launches the graph, and a function that destroys the graph."""

    launch: Enqueue
    close: Callable[[], None]


class SampleTimer(Protocol):
    """The methods of a timer that the pipeline calls; see ``Timer``."""

    gpu: Gpu
    stream: Stream
    l2_bytes: int
    now_s: Callable[[], float]

    def flush(self, stream: Stream) -> None: ...
    def time(self, work: SampleWork, *, is_blocked: bool = False) -> Reading: ...
    def capture(self, work: Enqueue) -> CapturedWork: ...
    def close(self) -> None: ...


class Timer:
    """Times work on one stream of a device; ``blocking_limit_s`` limits the time of the blocking kernel.

    ``wait`` waits for the work of a stream; the default is ``sync_stream`` of the device.
    """

    def __init__(
        self,
        gpu: Gpu,
        *,
        blocking_limit_s: float = _BLOCKING_LIMIT_S,
        wait: Callable[[Stream], None] | None = None,
    ) -> None:
        self.gpu = gpu
        self._wait = wait or gpu.sync_stream
        fields = gpu.facts().fields
        multiprocessors = fields.get("multiprocessor_count")
        self.l2_bytes = l2_size_bytes(fields)
        self.stream = gpu.stream(blocking=False)
        self._flushed_memory: Ptr | None = None
        self.now_s = host_clock(gpu)
        self._clock = _SmClock(gpu, multiprocessors if isinstance(multiprocessors, int) else 1)
        self._blocking_kernel = _BlockingKernel(gpu, blocking_limit_s)
        self._begin_event, self._end_event = gpu.event(), gpu.event()

    def time(self, work: SampleWork, *, is_blocked: bool = False) -> Reading:
        """Time one sample. The stream must be idle, and is idle afterwards.

        With ``is_blocked`` a kernel blocks the stream until all work is enqueued; this has no effect if the
        host clock times the work. The SM clock is measured over the timed work.
        """
        if work.clock != "device":
            return self._host_time(work)
        gpu, stream = self.gpu, self.stream
        if work.enqueue_before:
            work.enqueue_before(stream)
        with self._blocking_kernel.blocking(stream) if is_blocked else nullcontext():
            if work.align_devices:
                work.align_devices(stream)
            if work.with_untimed_work:
                work.with_untimed_work.enqueue_before_sample(stream)
            self._clock.begin(stream)
            gpu.record(self._begin_event, stream)
            work.enqueue(stream)
            gpu.record(self._end_event, stream)
            self._clock.end(stream)
            if work.with_untimed_work:
                work.with_untimed_work.enqueue_after_sample(stream)
        self._wait(stream)
        is_valid = not (is_blocked and self._blocking_kernel.has_timed_out)
        time_s = gpu.elapsed(self._begin_event, self._end_event) / work.executions
        return Reading(time_s, self._clock.take_hz(), is_valid)

    def _host_time(self, work: SampleWork) -> Reading:
        """Time one sample by the host clock, until the device has finished or the call returns."""
        stream = self.stream
        if work.enqueue_before:
            work.enqueue_before(stream)
        self._clock.begin(stream)
        if work.align_devices:
            work.align_devices(stream)
        self._wait(stream)
        begin_s = self.now_s()
        work.enqueue(stream)
        if work.clock == "host":
            self._wait(stream)
        time_s = (self.now_s() - begin_s) / work.executions
        self._clock.end(stream)
        self._wait(stream)
        return Reading(time_s, self._clock.take_hz())

    def flush(self, stream: Stream) -> None:
        """Overwrite the L2 cache, so that it holds no data of a workload."""
        size_bytes = _CACHE_MULTIPLE * self.l2_bytes
        if self._flushed_memory is None:
            self._flushed_memory = self.gpu.malloc(size_bytes)
        self.gpu.fill(self._flushed_memory, 0, size_bytes, stream)

    def capture(self, work: Enqueue) -> CapturedWork:
        """Capture work in a graph."""
        gpu = self.gpu
        graph = capture(gpu, self.stream, work)
        executable = gpu.instantiate(graph)
        gpu.destroy_graph(graph)
        return CapturedWork(
            partial(gpu.graph_launch, executable), partial(gpu.destroy_graph_exec, executable)
        )

    def close(self) -> None:
        """Wait for the stream, and release all resources of the timer."""
        self.gpu.sync_stream(self.stream)
        self._blocking_kernel.close()
        self._clock.close()
        if self._flushed_memory is not None:
            self.gpu.free(self._flushed_memory)
        for event in (self._begin_event, self._end_event):
            self.gpu.destroy_event(event)
        self.gpu.destroy_stream(self.stream)


def capture(gpu: Graphs, stream: Stream, work: Enqueue) -> Graph:
    """Return a graph of the work that ``work`` enqueues on a stream. Any error ends the capture."""
    gpu.capture_begin(stream)
    try:
        work(stream)
    except BaseException:
        with suppress(CudaError):  # the error of ``work`` is raised instead
            gpu.destroy_graph(gpu.capture_end(stream))
        raise
    return gpu.capture_end(stream)


def host_clock(gpu: DeviceInfo) -> Callable[[], float]:
    """Return a function that reads the time in seconds; virtual time on a simulated device."""
    if gpu.simulated:
        return lambda: gpu.telemetry().time_ns / 1e9
    return perf_counter


def disabling_variable(variables: Mapping[str, str]) -> str:
    """Return the environment variable that would make the blocking kernel time out, or ""."""
    is_set = (name for name in _DISABLING_VARIABLES if variables.get(name, "0") not in ("", "0"))
    return next(is_set, "")


class _BlockingKernel:
    """Blocks a stream until work is enqueued, so that samples contain no launch gaps.

    As in nvbench, a kernel spins on a flag in pinned memory. The kernel ends after a time limit, because the
    host cannot set the flag while one of its calls waits for the device.
    """

    def __init__(self, gpu: ComputeDevice, limit_s: float) -> None:
        self._gpu = gpu
        self._limit_ns = int(limit_s * 1e9)
        self._kernel = Spin(gpu)
        self._release_flag = gpu.host_malloc(2 * _WORD_BYTES)
        self._timed_out_flag = Ptr(self._release_flag + _WORD_BYTES)
        self._flag_words = np.frombuffer(
            gpu.host_view(self._release_flag, 2 * _WORD_BYTES), np.uint32
        )

    @contextmanager
    def blocking(self, stream: Stream) -> Iterator[None]:
        """Block a stream while the ``with`` body enqueues work on it."""
        self._flag_words[:] = 0
        self._kernel.until(self._release_flag, self._timed_out_flag, self._limit_ns, stream)
        try:
            yield
        finally:
            self._flag_words[0] = 1

    @property
    def has_timed_out(self) -> bool:
        """Whether the last kernel, which must have finished, reached its time limit."""
        return bool(self._flag_words[1])

    def close(self) -> None:
        del self._flag_words
        self._gpu.host_free(self._release_flag)
        self._kernel.close()


class _SmClock:
    """Measures the mean SM clock between two points of a stream."""

    def __init__(self, gpu: ComputeDevice, multiprocessors: int) -> None:
        self._gpu = gpu
        self._kernel = Timestamp(gpu)
        self._multiprocessors = multiprocessors
        self._zero_bytes = bytes(2 * multiprocessors * STAMP_BYTES)
        self._first_stamps = gpu.host_malloc(len(self._zero_bytes))
        self._last_stamps = Ptr(self._first_stamps + multiprocessors * STAMP_BYTES)
        self._stamp_bytes = gpu.host_view(self._first_stamps, len(self._zero_bytes))

    def begin(self, stream: Stream) -> None:
        """Enqueue the first clock reading. Call ``take_hz`` of the previous measurement first."""
        self._stamp_bytes[:] = self._zero_bytes
        self._kernel.stamp(self._first_stamps, self._multiprocessors, stream)

    def end(self, stream: Stream) -> None:
        """Enqueue the second clock reading of the measurement."""
        self._kernel.stamp(self._last_stamps, self._multiprocessors, stream)

    def take_hz(self) -> float | None:
        """Return the SM clock between the two readings; None if too little time passed between them."""
        counters = self._stamp_bytes.cast("Q")
        half = len(counters) // 2
        return clock_hz(counters[:half], counters[half:])

    def close(self) -> None:
        self._stamp_bytes.release()
        self._gpu.host_free(self._first_stamps)
        self._kernel.close()


# --- the L2 state at the start of an execution --------------------------------------------------------

# Rotated buffers are larger than twice the cache (NVIDIA CUTLASS, "GEMM performance measurement guidelines").
_CACHE_MULTIPLE = 2
# Maximum number of buffer sets: each set needs an allocation, and a node in a graph.
MAX_SETS = 1000
# Reason why a case has no peak.
IN_CACHE = Unavailable(
    "some or all data stays in the L2 cache, and datasheets state no L2 bandwidth"
)
_SHARE_OF_FREE = 0.9  # Maximum share of the free memory for buffer sets.
# Assumed cache size if the device reports none: larger than most L2 caches, so that rotation evicts all data.
_UNKNOWN_L2_BYTES = 128 << 20


def l2_size_bytes(fields: Mapping[str, Field]) -> int:
    """Return the size of the L2 cache of a device."""
    size_bytes = fields.get("l2_cache_size_bytes")
    return size_bytes if isinstance(size_bytes, int) and size_bytes > 0 else _UNKNOWN_L2_BYTES


def buffer_sets(cache: Cache, *, l2_bytes: int, footprint_bytes: int, free_bytes: int) -> int:
    """Return the number of buffer sets for an L2 state; one set is already allocated.

    With ``rotate``, all other sets together are twice as large as the cache, so that a set is evicted before
    it is reused. The number is lower if the free memory or MAX_SETS does not allow that many sets.
    """
    if cache != "rotate" or footprint_bytes <= 0:
        return 1
    needed_sets = max(2, ceil(_CACHE_MULTIPLE * l2_bytes / footprint_bytes) + 1)
    fitting_sets = 1 + int(_SHARE_OF_FREE * free_bytes) // footprint_bytes
    return min(needed_sets, fitting_sets, MAX_SETS)


def is_cold(set_count: int, *, l2_bytes: int, footprint_bytes: int) -> bool:
    """Return whether twice the cache size is written between two uses of a buffer set."""
    return max(set_count - 1, int(set_count == 1)) * footprint_bytes >= _CACHE_MULTIPLE * l2_bytes


def can_be_cold(cache: Cache, *, l2_bytes: int, footprint_bytes: int) -> bool:
    """Return whether an execution finds none of its data in the cache, with enough free memory."""
    set_count = MAX_SETS if cache == "rotate" else 1
    return cache == "flush" or is_cold(
        set_count, l2_bytes=l2_bytes, footprint_bytes=footprint_bytes
    )


def work_of_peak(
    work: Work, cache: Cache, *, l2_bytes: int, footprint_bytes: int
) -> Work | Unavailable:
    """Return the part of the work whose peak is known: data that stays in L2 is no traffic of the memory."""
    if can_be_cold(cache, l2_bytes=l2_bytes, footprint_bytes=footprint_bytes):
        return work
    return replace(work, bytes_moved=0) if work.operations else IN_CACHE
