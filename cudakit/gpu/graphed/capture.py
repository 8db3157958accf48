"""A function's work captured into a graph, and why a function cannot be captured, in one line."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import TypeAlias, TypeVar

from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Gpu, Graph, GraphExec, Ptr, Stream
from cudakit.gpu.driver_errors import Status
from cudakit.gpu.external_streams import StreamHandle
from cudakit.gpu.graphed.streams import Surroundings

_T = TypeVar("_T")
Work: TypeAlias = Callable[[StreamHandle], _T]
_G = TypeVar("_G")

_HOST = (
    "leave out of the function what waits for the device, asks the driver for memory, or copies from and to "
    "the host; what is made at the first call only is made by warmup=1 or more"
)
_STREAM = "enqueue on the stream that is current inside, or take a parameter named `stream` and enqueue there"

_HINTS: Mapping[Status, str] = MappingProxyType(
    {
        Status.STREAM_CAPTURE_UNSUPPORTED: _HOST,
        Status.STREAM_CAPTURE_INVALIDATED: f"{_HOST}; and {_STREAM}",
        Status.STREAM_CAPTURE_UNJOINED: "let the stream of the capture wait for the other ones at the end",
        Status.STREAM_CAPTURE_ISOLATION: "wait for no event from before the function inside of it",
        Status.STREAM_CAPTURE_IMPLICIT: f"it used the legacy default stream: {_STREAM}",
        Status.CAPTURED_EVENT: "ask or wait for no event at the host inside the function",
    }
)
# What cudaGetErrorString says of them, and CuPy where it does not even try: libraries pass on nothing else.
_SAID: Mapping[str, Status] = MappingProxyType(
    {
        "stream is capturing": Status.STREAM_CAPTURE_UNSUPPORTED,
        "legacy stream depend on a capturing blocking stream": Status.STREAM_CAPTURE_IMPLICIT,
        "dependency created on uncaptured work": Status.STREAM_CAPTURE_ISOLATION,
        "event last recorded in a capturing stream": Status.CAPTURED_EVENT,
    }
)
EMPTY = "the function enqueued nothing on the stream that was captured"
EMPTY_HINT = _STREAM


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


def captured(
    work: Callable[[], _T],
    *,
    begin: Callable[[], object],
    end: Callable[[], _G],
    drop: Callable[[_G], object],
) -> tuple[_G, _T]:
    """Do some work within a capture; return what ``end`` and the work returned.

    Raises CudaError for what cannot be captured, and else what the work raises; ``drop`` is then given what
    was captured for nothing.
    """
    with _collector_off():
        begin()
        try:
            value = work()
        except BaseException as error:
            spoiled = _broken_off(end, drop)
            if isinstance(error, Exception) and (spoiled or is_refusal(error)):
                raise refusal(error, spoiled) from error
            raise
        try:
            return end(), value
        except (CudaError, RuntimeError) as spoiled:  # the latter is torch's
            raise refusal(spoiled) from spoiled


def _broken_off(end: Callable[[], _G], drop: Callable[[_G], object]) -> Exception | None:
    """End a capture for nothing; return the error that this gives where it was spoiled."""
    try:
        drop(end())
    except (CudaError, RuntimeError) as spoiled:
        return spoiled
    return None


@contextmanager
def _collector_off() -> Iterator[None]:
    """Keep the garbage collector from freeing memory of a device, or unloading kernels, amid a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def is_refusal(error: BaseException) -> bool:
    """Say whether an error is one of capturing, and not the function's own."""
    return _status(error) is not None


def refusal(error: BaseException, ended: BaseException | None = None) -> CudaError:
    """Explain what spoiled a capture; ``ended`` is what the capture itself ended with, if with an error."""
    status = _status(error) or _status(ended) or Status.STREAM_CAPTURE_INVALIDATED
    said = str(error).strip().partition("\n")[0]
    return CudaError(
        status,
        f"CUDA_ERROR_{status.name}",
        f"the function cannot be captured: {said}",
        hint=_HINTS.get(status, _HOST),
    )


def _status(error: BaseException | None) -> Status | None:
    """Find the driver's error in that of any library: its number, or the words for it."""
    # Ours and Numba's, CuPy's, torch's.
    for name in ("code", "status", "error_code"):
        code = getattr(error, name, None)
        if isinstance(code, int) and code in _HINTS:
            return Status(code)
    text = str(error)
    return next((status for words, status in _SAID.items() if words in text), None)
