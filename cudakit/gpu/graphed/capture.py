"""The work of a function captured into a graph, and errors for functions that cannot be captured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar

from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Graph, GraphExec, Graphs, Memory, Ptr, Stream, Streams
from cudakit.gpu.driver_errors import Status
from cudakit.gpu.external_streams import StreamHandle
from cudakit.gpu.graphed.streams import StreamSource

_T = TypeVar("_T")
Work: TypeAlias = Callable[[StreamHandle], _T]
_G = TypeVar("_G")

_HOST = (
    "move synchronization, driver allocations and host copies out of the function; with warmup=1 or more, "
    "one-time initialization runs before the capture"
)
_STREAM = "enqueue on the function's current stream, or on its parameter named `stream`"

_HINTS: Mapping[Status, str] = MappingProxyType(
    {
        Status.STREAM_CAPTURE_UNSUPPORTED: _HOST,
        Status.STREAM_CAPTURE_INVALIDATED: f"{_HOST}; {_STREAM}",
        Status.STREAM_CAPTURE_UNJOINED: "let the captured stream wait for all forked streams at the end",
        Status.STREAM_CAPTURE_ISOLATION: "do not wait inside the function for an event recorded before it",
        Status.STREAM_CAPTURE_IMPLICIT: f"it used the legacy default stream: {_STREAM}",
        Status.CAPTURED_EVENT: "do not query or synchronize events from the host inside the function",
    }
)
# Texts of cudaGetErrorString, and of CuPy: some libraries report nothing else.
_SAID: Mapping[str, Status] = MappingProxyType(
    {
        "stream is capturing": Status.STREAM_CAPTURE_UNSUPPORTED,
        "legacy stream depend on a capturing blocking stream": Status.STREAM_CAPTURE_IMPLICIT,
        "dependency created on uncaptured work": Status.STREAM_CAPTURE_ISOLATION,
        "event last recorded in a capturing stream": Status.CAPTURED_EVENT,
    }
)


class GraphDevice(Memory, Streams, Graphs, Protocol):
    """A device that captures and launches graphs."""


class DriverGraph:
    """The work of a function as a graph of one device."""

    def __init__(self, gpu: GraphDevice, streams: StreamSource) -> None:
        self.gpu = gpu
        self.streams = streams
        # Blocking, so that work enqueued in the legacy stream is an error, and not silently left out.
        self.side = gpu.stream(blocking=True)
        self._executable: GraphExec | None = None

    def run(self, work: Work[object], times: int) -> None:
        """Run the work ``times`` times on the stream of the capture, after all enqueued work."""
        handle = self.streams.handle(self.side)
        self.gpu.sync()
        with self.streams.entered(handle):
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
        """Capture the work again, with other parameters. Raises CudaError for a graph of another shape."""
        graph, value = self._captured(work)
        try:
            self.gpu.graph_update(self._ready(), graph)
        finally:
            self.gpu.destroy_graph(graph)
        return value

    def copy(self, to: Ptr, from_: Ptr, size_bytes: int, stream: Stream) -> None:
        """Enqueue a copy of new contents."""
        if size_bytes and to != from_:
            self.gpu.copy(to, from_, size_bytes, stream)

    def launch(self, stream: Stream) -> None:
        """Launch the graph."""
        self.gpu.graph_launch(self._ready(), stream)

    def close(self) -> None:
        """Wait for the device, and release everything."""
        self.gpu.sync()
        if self._executable is not None:
            self.gpu.destroy_graph_exec(self._executable)
            self._executable = None
        self.gpu.destroy_stream(self.side)

    def _ready(self) -> GraphExec:
        if self._executable is None:
            raise UsageError("nothing has been captured yet")
        return self._executable

    def _captured(self, work: Work[_T]) -> tuple[Graph, _T]:
        gpu, side = self.gpu, self.side
        handle = self.streams.handle(side)
        with self.streams.entered(handle):
            graph, value = captured(
                lambda: work(handle),
                begin=lambda: gpu.capture_begin(side),
                end=lambda: gpu.capture_end(side),
                drop=gpu.destroy_graph,
            )
        if not gpu.count_nodes(graph):
            gpu.destroy_graph(graph)
            raise UsageError("the function enqueued nothing on the captured stream", hint=_STREAM)
        return graph, value


def captured(
    work: Callable[[], _T],
    *,
    begin: Callable[[], object],
    end: Callable[[], _G],
    drop: Callable[[_G], object],
) -> tuple[_G, _T]:
    """Run work within a capture. Return the results of ``end`` and of the work.

    Raises CudaError for what cannot be captured, and else what the work raises; ``drop`` is then given what
    was captured for nothing.
    """
    with _collector_off():
        begin()
        try:
            value = work()
        except BaseException as error:
            spoiled = _broken_off(end, drop)
            if isinstance(error, Exception) and (spoiled or status_of(error)):
                raise refusal(error, spoiled) from error
            raise
        try:
            return end(), value
        except (CudaError, RuntimeError) as spoiled:  # the latter is torch's
            raise refusal(spoiled) from spoiled


def _broken_off(end: Callable[[], _G], drop: Callable[[_G], object]) -> Exception | None:
    """End a capture and drop its graph. Return the error of an invalidated capture."""
    try:
        drop(end())
    except (CudaError, RuntimeError) as spoiled:
        return spoiled
    return None


@contextmanager
def _collector_off() -> Iterator[None]:
    """Turn the garbage collector off: during a capture it must not free memory or unload kernels."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def refusal(error: BaseException, ended: BaseException | None = None) -> CudaError:
    """Return the error that explains an invalidated capture; ``ended`` is the error of its end, if any."""
    status = status_of(error) or status_of(ended) or Status.STREAM_CAPTURE_INVALIDATED
    said = str(error).strip().partition("\n")[0]
    return CudaError(
        status,
        f"CUDA_ERROR_{status.name}",
        f"the function cannot be captured: {said}",
        hint=_HINTS.get(status, _HOST),
    )


def status_of(error: BaseException | None) -> Status | None:
    """Return the status of a capture in an error of any library, found by its number or its text.

    None for an error that does not come from a capture.
    """
    # cudakit and Numba, CuPy, torch.
    for name in ("code", "status", "error_code"):
        code = getattr(error, name, None)
        if isinstance(code, int) and code in _HINTS:
            return Status(code)
    text = str(error)
    return next((status for words, status in _SAID.items() if words in text), None)
