"""A graph of the driver's, or of the simulated device's: run ahead, captured, updated, launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

from cudakit.errors import UsageError
from cudakit.gpu.api import Gpu, Graph, GraphExec, Ptr, Stream
from cudakit.gpu.external_streams import StreamHandle
from cudakit.gpu.graphed.capturing import captured
from cudakit.gpu.graphed.refusals import EMPTY, EMPTY_HINT
from cudakit.gpu.graphed.streams import Surroundings

_T = TypeVar("_T")
Work: TypeAlias = Callable[[StreamHandle], _T]


class DriverGraph:
    """What a function enqueues, as a graph of one device."""

    def __init__(self, gpu: Gpu, surroundings: Surroundings) -> None:
        self.gpu = gpu
        self.surroundings = surroundings
        # It blocks the legacy stream: what goes astray there is refused, and not left out in silence.
        self.side = gpu.stream(blocking=True)
        self._executable: GraphExec | None = None

    def run(self, work: Work[object], times: int) -> None:
        """Do the work so many times on the stream that is to be captured, behind all that was enqueued."""
        handle = self.surroundings.handle(self.side)
        self.gpu.sync()
        with self.surroundings.entered(handle):
            for _ in range(times):
                work(handle)
        self.gpu.sync_stream(self.side)

    def capture(self, work: Work[_T]) -> _T:
        """Capture the work, and return what it returned. Raises CudaError for what cannot be captured."""
        graph, value = self._captured(work)
        try:
            self._executable = self.gpu.instantiate(graph)
        finally:
            self.gpu.destroy_graph(graph)
        return value

    def update(self, work: Work[_T]) -> _T:
        """Capture the work anew, as the same graph with other parameters. Raises CudaError for another."""
        graph, value = self._captured(work)
        try:
            self.gpu.graph_update(self._ready(), graph)
        finally:
            self.gpu.destroy_graph(graph)
        return value

    def stream(self, given: object) -> Stream:
        """Return the stream that was given, or the current one for None."""
        return self.surroundings.stream(given)

    def copy(self, to: Ptr, from_: Ptr, size_bytes: int, stream: Stream) -> None:
        """Enqueue a copy of new contents."""
        if size_bytes and to != from_:
            self.gpu.copy(to, from_, size_bytes, stream)

    def launch(self, stream: Stream) -> None:
        """Enqueue all that was captured."""
        self.gpu.graph_launch(self._ready(), stream)

    def close(self) -> None:
        """Wait for the device, and give everything back."""
        self.gpu.sync()
        if self._executable is not None:
            self.gpu.destroy_graph_exec(self._executable)
            self._executable = None
        self.gpu.destroy_stream(self.side)

    def _ready(self) -> GraphExec:
        if self._executable is None:
            raise UsageError("nothing was captured yet")
        return self._executable

    def _captured(self, work: Work[_T]) -> tuple[Graph, _T]:
        gpu, side = self.gpu, self.side
        handle = self.surroundings.handle(side)
        with self.surroundings.entered(handle):
            graph, value = captured(
                lambda: work(handle),
                begin=lambda: gpu.capture_begin(side),
                end=lambda: gpu.capture_end(side),
                drop=gpu.destroy_graph,
            )
        if not gpu.count_nodes(graph):
            gpu.destroy_graph(graph)
            raise UsageError(EMPTY, hint=EMPTY_HINT)
        return graph, value
