"""Streams by name, and the work that they are given."""

from __future__ import annotations

from typing import Any, Protocol

from allocator_scenarios.capturing import CapturedByDriver, GraphInMemory
from allocator_scenarios.gate import Gate
from allocator_scenarios.memory import InMemory
from allocator_scenarios.subject import STREAMS
from cudakit.core.memory.allocator.reuse import CaptureGraph
from cudakit.core.memory.allocator.upstream import GraphOfGpu
from cudakit.gpu.api import Stream


class Work(Protocol):
    """What keeps streams busy. A stream that is not busy is done when it is waited for."""

    numbers: dict[str, int]  # of the streams, for the allocator

    def busy(self, stream: str) -> None: ...
    def settle(self, stream: str) -> None: ...
    def join(self, stream: str, other: str) -> None: ...
    def work(self, stream: str) -> None: ...
    def begin_capture(self, stream: str) -> CaptureGraph: ...
    def end_capture(self, stream: str) -> None: ...


class WorkInMemory:
    """Streams that are done when somebody says so."""

    def __init__(self, device: InMemory) -> None:
        self._device = device
        self._graph: GraphInMemory | None = None
        self.numbers = {name: number for number, name in enumerate(STREAMS, 11)}

    def busy(self, stream: str) -> None: ...

    def settle(self, stream: str) -> None:
        self._device.finish(self.numbers[stream])

    def join(self, stream: str, other: str) -> None:
        if self._graph:
            self._graph.join(self.numbers[stream], self.numbers[other])

    def work(self, stream: str) -> None:
        if self._graph:
            self._graph.add(self.numbers[stream])

    def begin_capture(self, stream: str) -> CaptureGraph:
        self._graph = GraphInMemory(self.numbers[stream])
        return self._graph

    def end_capture(self, stream: str) -> None:  # noqa: ARG002
        self._graph = None


class WorkOnGpu:
    """Streams of a real GPU, and a gate for each."""

    def __init__(self, gpu: Any) -> None:
        self._gpu = gpu
        self.numbers = {name: gpu.stream(blocking=False) for name in STREAMS}
        self._gates = {name: Gate(gpu) for name in STREAMS}
        self._captured = CapturedByDriver()

    def busy(self, stream: str) -> None:
        gate = self._gates[stream]
        gate.close()
        self._wait(self._stream(stream), gate.lane)

    def settle(self, stream: str) -> None:
        self._gates[stream].open()
        self._gpu.sync_stream(self._stream(stream))

    def join(self, stream: str, other: str) -> None:
        self._wait(self._stream(stream), self._stream(other))

    def work(self, stream: str) -> None:
        """Launch a kernel that ends at once."""
        self._gates[stream].pass_through(self._stream(stream))

    def begin_capture(self, stream: str) -> CaptureGraph:
        self._captured.begin(self._gpu.handle(self._stream(stream)))
        return GraphOfGpu(self._gpu)

    def end_capture(self, stream: str) -> None:
        self._captured.end(self._gpu.handle(self._stream(stream)))

    def _stream(self, name: str) -> Stream:
        return Stream(self.numbers[name])

    def _wait(self, stream: Stream, other: Stream) -> None:
        event = self._gpu.event(timing=False)
        self._gpu.record(event, other)
        self._gpu.wait(stream, event)
        self._gpu.destroy_event(event)
