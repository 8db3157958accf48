"""A captured function of device buffers, which is replayed, given new contents, and updated."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from cudakit.errors import UsageError
from cudakit.gpu.external_streams import StreamHandle
from cudakit.gpu.graphed.buffers import Buffer, buffer_of, check_contents
from cudakit.gpu.graphed.capture import DriverGraph, GraphDevice
from cudakit.gpu.graphed.streams import FrameworkStreams, SimulatedStreams

if TYPE_CHECKING:
    from cudakit.gpu.cuda.device import Cuda

_T = TypeVar("_T")


class Graphed(Generic[_T]):
    """What ``cudakit.graph`` returns: called with new contents, or replayed, until it is closed."""

    def __init__(
        self,
        graph: DriverGraph,
        function: Callable[..., _T],
        buffers: tuple[object, ...],
        *,
        warmup: int,
        close: Callable[[], object],
    ) -> None:
        self._graph = graph
        self._function = function
        self._given = buffers  # kept alive: the graph uses their memory
        self._buffers = tuple(buffer_of(given, place) for place, given in enumerate(buffers))
        self._close = close
        self._closed = False
        if warmup:
            graph.run(self._work(function), warmup)
        self._value = graph.capture(self._work(function))

    def __call__(self, *contents: object, stream: object = None) -> _T:
        """Copy new contents into the buffers that were captured, replay, and return what the function did.

        All of it is enqueued and not waited for. Contents are arrays of a device of the same dtype and
        shape; a buffer itself stays as it is. Raises UsageError for what does not fit.
        """
        self._check_open()
        new = self._checked(contents)
        target = self._graph.stream(stream)
        for captured, source in zip(self._buffers, new, strict=True):
            size_bytes = captured.form.size_bytes if captured.form else 0
            self._graph.copy(captured.ptr, source.ptr, size_bytes, target)
        self._graph.launch(target)
        return self._value

    def replay(self, stream: object = None) -> _T:
        """Enqueue all that was captured, with what is in the buffers, and return what the function did.

        ``stream`` is a stream of any library, or its handle; without one, the current stream of torch or
        CuPy, where the first buffers are theirs, or else that of ``cudakit.stream``.
        """
        self._check_open()
        self._graph.launch(self._graph.stream(stream))
        return self._value

    def update(self, function: Callable[..., _T] | None = None, *, warmup: int = 0) -> _T:
        """Capture the function again, or another one, on the same buffers, and return what it did.

        The parameters of the graph change; with torch another graph takes its place. Raises CudaError,
        CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE, where the work has another order or is of other kinds, or
        what ``cudakit.graph`` raises: then all is as it was.
        """
        self._check_open()
        work = self._work(function or self._function)
        if warmup:
            self._graph.run(work, warmup)
        self._value = self._graph.update(work)
        self._function = function or self._function
        return self._value

    def close(self) -> None:
        """Wait for the device, and give the graph and its memory back. A second time does nothing."""
        if not self._closed:
            self._closed = True
            self._close()
            del self._graph, self._given, self._value

    def __enter__(self) -> Graphed[_T]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _work(self, function: Callable[..., _T]) -> Callable[[StreamHandle], _T]:
        given = self._given
        if _takes_stream(function):
            return lambda handle: function(*given, stream=handle)
        return lambda handle: function(*given)  # noqa: ARG005

    def _checked(self, contents: tuple[object, ...]) -> tuple[Buffer, ...]:
        if len(contents) != len(self._buffers):
            raise UsageError(
                f"{len(self._buffers)} buffers were captured, and {len(contents)} given",
                hint="pass one for each, or none at all to replay()",
            )
        new = tuple(buffer_of(given, place) for place, given in enumerate(contents))
        for place, pair in enumerate(zip(new, self._buffers, strict=True)):
            check_contents(*pair, place)
        return new

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the graph was closed")


def _takes_stream(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter named ``stream``."""
    try:
        return "stream" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # builtins may have no signature
        return False


def capture_function(
    function: Callable[..., _T],
    buffers: tuple[object, ...],
    device: object,
    warmup: int,
) -> Graphed[_T]:
    """Warm a function up and capture it; see ``cudakit.graph``."""
    if warmup < 0:
        raise UsageError(f"warmup is {warmup}, and must be at least 0")
    owned = ExitStack()
    try:
        graph = _graph(buffers, device, owned)
        owned.callback(graph.close)
        return Graphed(graph, function, buffers, warmup=warmup, close=owned.close)
    except BaseException:
        owned.close()
        raise


def _graph(buffers: tuple[object, ...], device: object, owned: ExitStack) -> DriverGraph:
    if getattr(device, "simulated", False):
        return DriverGraph(cast("GraphDevice", device), SimulatedStreams())
    gpu = _real(buffers, device, owned)
    streams = FrameworkStreams(gpu, buffers)
    if any(map(_is_tensor, buffers)):
        from cudakit.gpu.graphed.torch_graph import TorchGraph

        return TorchGraph(gpu, streams, gpu.ordinal)
    return DriverGraph(gpu, streams)


def _real(buffers: tuple[object, ...], device: object, owned: ExitStack) -> Cuda:
    from cudakit.gpu.cuda.device import Cuda

    if isinstance(device, Cuda):
        return device
    if not isinstance(device, int | None):
        raise UsageError(
            f"no device: {device!r}", hint="give CUDA's number of one, or a device itself"
        )
    gpu = Cuda(_ordinal_of(buffers) if device is None else device)
    owned.callback(gpu.close)
    return gpu


def _ordinal_of(buffers: tuple[object, ...]) -> int:
    """Return the device of the first buffer, or else the current device."""
    from cudakit.gpu.cuda.current import current_device
    from cudakit.gpu.cuda.driver import cu, initialize

    initialize()
    which = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    for place, given in enumerate(buffers[:1]):
        status, ordinal = cu.cuPointerGetAttribute(which, buffer_of(given, place).ptr)
        if not status:
            return int(ordinal)
    return current_device()


def _is_tensor(given: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(given, torch.Tensor)
