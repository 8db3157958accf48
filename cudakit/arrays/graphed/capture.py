"""Capture of a function's work into a graph, and errors for work that cannot be captured."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Protocol, TypeAlias, TypeVar

from cudakit.arrays.graphed.streams import StreamSource
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Graph, GraphExec, Graphs, Memory, Ptr, Stream, Streams
from cudakit.gpu.driver_errors import Status
from cudakit.gpu.external_streams import StreamHandle

_T = TypeVar("_T")
Work: TypeAlias = Callable[[StreamHandle], _T]
_G = TypeVar("_G")

_HOST_HINT = (
    "move synchronization, driver allocations and host copies out of the function; with warmup=1 or more, "
    "one-time initialization runs before the capture"
)
_STREAM_HINT = "enqueue on the function's current stream, or on its parameter named `stream`"

_HINTS: Mapping[Status, str] = MappingProxyType(
    {
        Status.STREAM_CAPTURE_UNSUPPORTED: _HOST_HINT,
        Status.STREAM_CAPTURE_INVALIDATED: f"{_HOST_HINT}; {_STREAM_HINT}",
        Status.STREAM_CAPTURE_UNJOINED: "let the captured stream wait for all forked streams at the end",
        Status.STREAM_CAPTURE_ISOLATION: "do not wait inside the function for an event recorded before it",
        Status.STREAM_CAPTURE_IMPLICIT: f"it used the legacy default stream: {_STREAM_HINT}",
        Status.CAPTURED_EVENT: "do not query or synchronize events from the host inside the function",
    }
)
# Error texts of cudaGetErrorString and CuPy, for libraries that do not report the code.
_STATUS_BY_TEXT: Mapping[str, Status] = MappingProxyType(
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
    """The captured work of a function, as a graph of the driver."""

    def __init__(self, gpu: GraphDevice, streams: StreamSource) -> None:
        self.gpu = gpu
        self.streams = streams
        # A blocking stream: work on the legacy stream then fails. With a non-blocking stream, such work would
        # be missing in the graph without an error.
        self.capture_stream = gpu.stream(blocking=True)
        self._executable: GraphExec | None = None

    def run(self, work: Work[object], run_count: int) -> None:
        """Wait for all enqueued work, and run the work ``run_count`` times on the capture stream."""
        handle = self.streams.handle(self.capture_stream)
        self.gpu.sync()
        with self.streams.as_current(handle):
            for _ in range(run_count):
                work(handle)
        self.gpu.sync_stream(self.capture_stream)

    def capture(self, work: Work[_T]) -> _T:
        """Capture the work; return its result. Raises CudaError for work that cannot be captured."""
        graph, work_result = self._capture(work)
        try:
            self._executable = self.gpu.instantiate(graph)
        finally:
            self.gpu.destroy_graph(graph)
        return work_result

    def update(self, work: Work[_T]) -> _T:
        """Capture the work again and update the graph. Raises CudaError if the topology differs."""
        graph, work_result = self._capture(work)
        try:
            self.gpu.graph_update(self._require_executable(), graph)
        finally:
            self.gpu.destroy_graph(graph)
        return work_result

    def copy(self, dst: Ptr, src: Ptr, size_bytes: int, stream: Stream) -> None:
        """Enqueue a copy of new contents into a captured buffer."""
        if size_bytes and dst != src:
            self.gpu.copy(dst, src, size_bytes, stream)

    def launch(self, stream: Stream) -> None:
        """Launch the graph."""
        self.gpu.graph_launch(self._require_executable(), stream)

    def close(self) -> None:
        """Wait for the device, and release all resources."""
        self.gpu.sync()
        if self._executable is not None:
            self.gpu.destroy_graph_exec(self._executable)
            self._executable = None
        self.gpu.destroy_stream(self.capture_stream)

    def _require_executable(self) -> GraphExec:
        if self._executable is None:
            raise UsageError("nothing has been captured yet")
        return self._executable

    def _capture(self, work: Work[_T]) -> tuple[Graph, _T]:
        gpu, stream = self.gpu, self.capture_stream
        handle = self.streams.handle(stream)
        with self.streams.as_current(handle):
            graph, work_result = run_captured(
                lambda: work(handle),
                begin_capture=lambda: gpu.capture_begin(stream),
                end_capture=lambda: gpu.capture_end(stream),
                destroy_graph=gpu.destroy_graph,
            )
        if not gpu.count_nodes(graph):
            gpu.destroy_graph(graph)
            raise UsageError(
                "the function enqueued nothing on the captured stream", hint=_STREAM_HINT
            )
        return graph, work_result


def run_captured(
    work: Callable[[], _T],
    *,
    begin_capture: Callable[[], object],
    end_capture: Callable[[], _G],
    destroy_graph: Callable[[_G], object],
) -> tuple[_G, _T]:
    """Run work within a capture; return the results of ``end_capture`` and of the work.

    Raises CudaError for work that cannot be captured, and otherwise the exception of the work. On an
    exception, the graph is passed to ``destroy_graph``.
    """
    with _no_garbage_collection():
        begin_capture()
        try:
            work_result = work()
        except BaseException as error:
            capture_error = _abort_capture(end_capture, destroy_graph)
            if isinstance(error, Exception) and (capture_error or status_of(error)):
                raise capture_failure(error, capture_error) from error
            raise
        try:
            return end_capture(), work_result
        except (CudaError, RuntimeError) as capture_error:  # torch raises RuntimeError
            raise capture_failure(capture_error) from capture_error


def _abort_capture(
    end_capture: Callable[[], _G], destroy_graph: Callable[[_G], object]
) -> Exception | None:
    """End a capture and destroy its graph; return the error of an invalidated capture, or None."""
    try:
        destroy_graph(end_capture())
    except (CudaError, RuntimeError) as capture_error:
        return capture_error
    return None


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection: finalizers must not free memory or unload kernels during a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def capture_failure(error: BaseException, end_error: BaseException | None = None) -> CudaError:
    """Return the CudaError for an invalidated capture; ``end_error`` was raised when the capture ended."""
    status = status_of(error) or status_of(end_error) or Status.STREAM_CAPTURE_INVALIDATED
    reason = str(error).strip().partition("\n")[0]
    return CudaError(
        status,
        f"CUDA_ERROR_{status.name}",
        f"the function cannot be captured: {reason}",
        hint=_HINTS.get(status, _HOST_HINT),
    )


def status_of(error: BaseException | None) -> Status | None:
    """Return the CUDA status in the code or text of a library's capture error; None for other errors."""
    # Names of the attribute with the code in errors of cudakit and Numba, of CuPy, and of torch.
    for name in ("code", "status", "error_code"):
        code = getattr(error, name, None)
        if isinstance(code, int) and code in _HINTS:
            return Status(code)
    text = str(error)
    return next((status for fragment, status in _STATUS_BY_TEXT.items() if fragment in text), None)
