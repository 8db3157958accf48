"""Benchmark of latencies: of launches and waits, and of the creation of events and streams."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from cudakit.arrays.bandwidth import WIDTH_BYTES, Bandwidth
from cudakit.arrays.spin import Spin
from cudakit.bench.case import Case, Mode, PreparedLatency
from cudakit.bench.labels import Axis
from cudakit.bench.spec import Spec, check_names, option
from cudakit.bench.words import Words
from cudakit.gpu.api import ComputeDevice, DeviceInfo, Gpu, Stream

CALLS = (
    "launch",
    "launch-to-start",
    "launch-to-finish",
    "launch-back-to-back",
    "event-record",
    "stream-synchronize",
    "event-create-destroy",
    "stream-create-destroy",
)

# Number of times that the host polls pinned memory between two queries of the stream.
_POLLS_PER_QUERY = 1000
_WORD_BITS = 32

_Call: TypeAlias = Callable[[Stream], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchSpec(Spec):
    """Measure the latency of launches and waits, and of the creation of events and streams.

    The calls:

    \b
    launch               the host time of one launch
    launch-to-start      from the launch until the host sees the first
                         write of the kernel
    launch-to-finish     from the launch until the stream is synchronized
    launch-back-to-back  the device time per kernel of many launches
    other calls          the host time of the call

    \b
    cudakit bench launch
    cudakit bench launch --calls launch,launch-to-finish
    """

    bench: ClassVar[str] = "launch"

    calls: tuple[str, ...] = option(
        "--calls",
        f"Calls: {', '.join(CALLS)}.  [default: all]",
        default=CALLS,
        choices=CALLS,
    )

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_names("call", self.calls, CALLS)

    def cases(self, gpu: DeviceInfo) -> tuple[Case, ...]:  # noqa: ARG002
        """Return one case per driver call."""
        return tuple(Case(Launch(call), self.method(_CALLS[call][0], "hot")) for call in self.calls)


@dataclass(frozen=True, slots=True)
class Launch:
    """A workload of one driver call, or of several calls that are timed together."""

    call: str
    name: str = "launch"

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {"call": self.call}

    def prepare(self, gpu: Gpu, seed: int) -> PreparedLaunch:  # noqa: ARG002
        return PreparedLaunch(gpu, self.call)


class PreparedLaunch(PreparedLatency):
    """A driver call, and the resources that the call needs."""

    def __init__(self, gpu: ComputeDevice, call: str) -> None:
        super().__init__()
        self._call = _CALLS[call][1](gpu, self.cleanup)

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002
        self._call(stream)


class _LaunchToStart:
    """Launches a kernel, and waits until the host reads the value that the kernel writes to pinned memory."""

    def __init__(self, gpu: ComputeDevice, cleanup: ExitStack) -> None:
        self._gpu = gpu
        self._kernel = cleanup.enter_context(closing(Bandwidth(gpu)))
        self._pinned_ptr = gpu.host_malloc(WIDTH_BYTES)
        cleanup.callback(gpu.host_free, self._pinned_ptr)
        view = gpu.host_view(self._pinned_ptr, WIDTH_BYTES)
        view[:] = bytes(WIDTH_BYTES)
        self._words = view.cast("I")
        cleanup.callback(self._words.release)
        self._launch_count = 0

    def __call__(self, stream: Stream) -> None:
        self._launch_count = (self._launch_count + 1) % (1 << _WORD_BITS)
        self._kernel.write(self._pinned_ptr, self._launch_count, WIDTH_BYTES, stream)
        while not self._has_started() and not self._gpu.query_stream(stream):
            pass

    def _has_started(self) -> bool:
        return any(self._words[0] == self._launch_count for _ in range(_POLLS_PER_QUERY))


def _empty_kernel(gpu: ComputeDevice, cleanup: ExitStack) -> _Call:
    return cleanup.enter_context(closing(Spin(gpu))).empty


def _event_record(gpu: ComputeDevice, cleanup: ExitStack) -> _Call:
    event = gpu.event()
    cleanup.callback(gpu.destroy_event, event)
    return lambda stream: gpu.record(event, stream)


# The mode of each call, and a function that prepares it.
_CALLS: Mapping[str, tuple[Mode, Callable[[ComputeDevice, ExitStack], _Call]]] = {
    "launch": ("call", _empty_kernel),
    "launch-to-start": ("call", _LaunchToStart),
    "launch-to-finish": ("host", _empty_kernel),
    "launch-back-to-back": ("batch", _empty_kernel),
    "event-record": ("call", _event_record),
    "stream-synchronize": ("call", lambda gpu, _: gpu.sync_stream),
    "event-create-destroy": ("call", lambda gpu, _: lambda _: gpu.destroy_event(gpu.event())),
    "stream-create-destroy": (
        "call",
        lambda gpu, _: lambda _: gpu.destroy_stream(gpu.stream(blocking=False)),
    ),
}


LaunchSpec.words = Words(
    timing=lambda case: (
        "host time until the host sees the first write of the kernel"
        if case.axes.get("call") == "launch-to-start"
        else ""
    )
)
