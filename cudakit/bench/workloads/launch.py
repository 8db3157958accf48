"""Benchmark of latencies: of launches and waits, and of the creation of events and streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import TypeAlias

from cudakit.arrays.bandwidth import WIDTH_BYTES, Bandwidth
from cudakit.arrays.spin import Spin
from cudakit.bench.case import Case
from cudakit.bench.method import Mode
from cudakit.bench.spec import LaunchSpec
from cudakit.bench.workload import PreparedLatency
from cudakit.gpu.api import ComputeDevice, DeviceInfo, Gpu, Stream

_Call: TypeAlias = Callable[[Stream], None]

# Number of times that the host polls pinned memory between two queries of the stream.
_POLLS_PER_QUERY = 1000
_WORD_BITS = 32


def launch_cases(spec: LaunchSpec, gpu: DeviceInfo) -> tuple[Case, ...]:  # noqa: ARG001
    """Return one case per driver call."""
    return tuple(Case(Launch(call), spec.method(_CALLS[call].mode, "hot")) for call in spec.calls)


@dataclass(frozen=True, slots=True)
class Launch:
    """A workload of one driver call, or of several calls that are timed together."""

    call: str
    name: str = "launch"

    @property
    def axes(self) -> Mapping[str, str | int | float]:
        return {"call": self.call}

    def prepare(self, gpu: Gpu, seed: int) -> PreparedLaunch:  # noqa: ARG002
        return PreparedLaunch(gpu, _CALLS[self.call].make_call)


class PreparedLaunch(PreparedLatency):
    """A driver call, and the resources that the call needs."""

    def __init__(
        self, gpu: ComputeDevice, make_call: Callable[[ComputeDevice, PreparedLatency], _Call]
    ) -> None:
        super().__init__()
        self._call = make_call(gpu, self)

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002
        self._call(stream)


class _LaunchToStart:
    """Launches a kernel, and waits until the host reads the value that the kernel writes to pinned memory."""

    def __init__(self, gpu: ComputeDevice, prepared_launch: PreparedLatency) -> None:
        self._gpu = gpu
        self._kernel = prepared_launch.cleanup.enter_context(closing(Bandwidth(gpu)))
        self._pinned_ptr = gpu.host_malloc(WIDTH_BYTES)
        prepared_launch.cleanup.callback(gpu.host_free, self._pinned_ptr)
        view = gpu.host_view(self._pinned_ptr, WIDTH_BYTES)
        view[:] = bytes(WIDTH_BYTES)
        self._words = view.cast("I")
        prepared_launch.cleanup.callback(self._words.release)
        self._launch_count = 0

    def __call__(self, stream: Stream) -> None:
        self._launch_count = (self._launch_count + 1) % (1 << _WORD_BITS)
        self._kernel.write(self._pinned_ptr, self._launch_count, WIDTH_BYTES, stream)
        while not self._has_started() and not self._gpu.query_stream(stream):
            pass

    def _has_started(self) -> bool:
        return any(self._words[0] == self._launch_count for _ in range(_POLLS_PER_QUERY))


def _prepare_empty_kernel(gpu: ComputeDevice, prepared_launch: PreparedLatency) -> _Call:
    return prepared_launch.cleanup.enter_context(closing(Spin(gpu))).empty


def _prepare_record(gpu: ComputeDevice, prepared_launch: PreparedLatency) -> _Call:
    event = gpu.event()
    prepared_launch.cleanup.callback(gpu.destroy_event, event)
    return lambda stream: gpu.record(event, stream)


@dataclass(frozen=True, slots=True)
class _TimedCall:
    mode: Mode
    make_call: Callable[[ComputeDevice, PreparedLatency], _Call]


_CALLS: Mapping[str, _TimedCall] = {
    "launch": _TimedCall("call", _prepare_empty_kernel),
    "launch-to-start": _TimedCall("call", _LaunchToStart),
    "launch-to-finish": _TimedCall("host", _prepare_empty_kernel),
    "launch-back-to-back": _TimedCall("batch", _prepare_empty_kernel),
    "event-record": _TimedCall("call", _prepare_record),
    "stream-synchronize": _TimedCall("call", lambda gpu, _: gpu.sync_stream),
    "event-create-destroy": _TimedCall(
        "call",
        lambda gpu, _: lambda _: gpu.destroy_event(gpu.event()),
    ),
    "stream-create-destroy": _TimedCall(
        "call",
        lambda gpu, _: lambda _: gpu.destroy_stream(gpu.stream(blocking=False)),
    ),
}
