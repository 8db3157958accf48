"""Streams by name, the work that keeps them busy, and captures of them; on a GPU and in memory."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Protocol

import numpy as np

from allocator_scenarios.scenario import STREAMS
from allocator_scenarios.upstreams import UpstreamInMemory
from cudakit.allocator.upstream import CaptureGraph, GpuGraph
from cudakit.gpu.api import Gpu, Ptr, Stream

MAX_GATE_NS = 2_000_000_000
SOURCE = """
extern "C" __global__ void gate(volatile unsigned *open, unsigned ticket, unsigned long long most_ns) {
    unsigned long long begin, now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
    do {
        asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    } while (*open < ticket && now - begin < most_ns);
}
"""


class Gate:
    """A stream that a kernel blocks until ``open``, so that streams that wait for it are busy."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self.blocked_stream: Stream = gpu.stream(blocking=False)
        self._kernel = gpu.kernel(gpu.load(gpu.compile(SOURCE)), "gate")
        self._flag_ptr: Ptr = gpu.host_malloc(
            64
        )  # pinned memory, which the device reads at the same address
        self._flag = np.frombuffer(gpu.host_view(self._flag_ptr, 64), dtype=np.uint32)
        self._flag[0] = 0
        self._ticket = 0

    def close(self) -> None:
        """Block the stream."""
        self._ticket += 1
        self._launch(self._ticket, self.blocked_stream)

    def pass_through(self, stream: Stream) -> None:
        """Launch a kernel that ends at once."""
        self._launch(0, stream)

    def open(self) -> None:
        """Unblock the stream, and wait until it is idle."""
        self._flag[0] = self._ticket
        self._gpu.sync_stream(self.blocked_stream)

    def _launch(self, ticket: int, stream: Stream) -> None:
        arguments = (self._flag_ptr, np.uint32(ticket), np.uint64(MAX_GATE_NS))
        self._gpu.launch(self._kernel, (1, 1, 1), (1, 1, 1), arguments, stream)


class DriverCapture:
    """Begins and ends captures. Streams are the driver's handles."""

    def __init__(self) -> None:
        from cuda.bindings import driver

        self._driver = driver

    def begin(self, handle: Any) -> None:
        """Begin a capture during which the thread may allocate."""
        mode = self._driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        self._call(self._driver.cuStreamBeginCapture, handle, mode)

    def end(self, handle: Any) -> None:
        """End a capture and destroy its graph."""
        (graph,) = self._call(self._driver.cuStreamEndCapture, handle)
        self._call(self._driver.cuGraphDestroy, graph)

    def _call(self, function: Callable[..., tuple[Any, ...]], *args: object) -> list[Any]:
        status, *values = function(*args)
        if status:
            raise RuntimeError(f"{function.__name__}: {status!r}")
        return values


class GraphInMemory:
    """The graph of a capture that begins on one stream and includes the streams that wait for it."""

    def __init__(self, stream: int) -> None:
        self._terminals: dict[int, set[int]] = {stream: set()}
        self._predecessors: list[set[int]] = []  # direct predecessors of each node

    def add(self, stream: int) -> None:
        """Add a node to a captured stream."""
        if stream in self._terminals:
            self._predecessors.append(self._terminals[stream])
            self._terminals[stream] = {len(self._predecessors) - 1}

    def make_wait(self, stream: int, other_stream: int) -> None:
        """Make a stream wait for a captured one."""
        if other_stream in self._terminals:
            terminals = self._terminals.setdefault(stream, set())
            self._terminals[stream] = terminals | self._terminals[other_stream]

    def capture(self, stream: int) -> int | None:
        return 1 if stream in self._terminals else None

    def terminals(self, stream: int) -> Collection[int]:
        return self._terminals[stream]

    def predecessors(self, node: int) -> Collection[int]:
        return self._predecessors[node]


class Work(Protocol):
    """Keeps streams busy until they finish their work."""

    numbers: dict[str, int]  # numbers of the streams for the allocator

    def keep_busy(self, stream: str) -> None: ...
    def finish_work(self, stream: str) -> None: ...
    def make_wait(self, stream: str, other_stream: str) -> None: ...
    def enqueue_work(self, stream: str) -> None: ...
    def begin_capture(self, stream: str) -> CaptureGraph: ...
    def end_capture(self, stream: str) -> None: ...


class WorkInMemory:
    """Simulated streams whose work ends when a scenario finishes it."""

    def __init__(self, device: UpstreamInMemory) -> None:
        self._device = device
        self._graph: GraphInMemory | None = None
        self.numbers = {name: number for number, name in enumerate(STREAMS, 11)}

    def keep_busy(self, stream: str) -> None: ...

    def finish_work(self, stream: str) -> None:
        self._device.finish(self.numbers[stream])

    def make_wait(self, stream: str, other_stream: str) -> None:
        if self._graph:
            self._graph.make_wait(self.numbers[stream], self.numbers[other_stream])

    def enqueue_work(self, stream: str) -> None:
        if self._graph:
            self._graph.add(self.numbers[stream])

    def begin_capture(self, stream: str) -> CaptureGraph:
        self._graph = GraphInMemory(self.numbers[stream])
        return self._graph

    def end_capture(self, stream: str) -> None:  # noqa: ARG002
        self._graph = None


class WorkOnGpu:
    """Streams of a real GPU, each with a gate that blocks it."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.numbers = {name: gpu.stream(blocking=False) for name in STREAMS}
        self._gates = {name: Gate(gpu) for name in STREAMS}
        self._captured = DriverCapture()

    def keep_busy(self, stream: str) -> None:
        gate = self._gates[stream]
        gate.close()
        self._wait(self._stream(stream), gate.blocked_stream)

    def finish_work(self, stream: str) -> None:
        self._gates[stream].open()
        self._gpu.sync_stream(self._stream(stream))

    def make_wait(self, stream: str, other_stream: str) -> None:
        self._wait(self._stream(stream), self._stream(other_stream))

    def enqueue_work(self, stream: str) -> None:
        """Launch a kernel that ends at once."""
        self._gates[stream].pass_through(self._stream(stream))

    def begin_capture(self, stream: str) -> CaptureGraph:
        self._captured.begin(self._gpu.streams.handle(self._stream(stream)))
        return GpuGraph(self._gpu)

    def end_capture(self, stream: str) -> None:
        self._captured.end(self._gpu.streams.handle(self._stream(stream)))

    def _stream(self, name: str) -> Stream:
        return Stream(self.numbers[name])

    def _wait(self, stream: Stream, other_stream: Stream) -> None:
        event = self._gpu.event(timing=False)
        self._gpu.record(event, other_stream)
        self._gpu.wait(stream, event)
        self._gpu.destroy_event(event)
