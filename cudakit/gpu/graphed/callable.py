"""A captured function of device buffers, which is replayed, given new contents, and updated."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from cudakit.errors import UsageError
from cudakit.gpu.external_streams import StreamHandle
from cudakit.gpu.graphed.buffers import Buffer, buffer_of, check_contents
from cudakit.gpu.graphed.capture import DriverGraph, GraphDevice
from cudakit.gpu.graphed.streams import FrameworkStreams, SimulatedStreams

if TYPE_CHECKING:
    from cudakit.gpu.api import Gpu
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
        target = self._graph.streams.stream(stream)
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
        self._graph.launch(self._graph.streams.stream(stream))
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

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self, function: Callable[..., _T]) -> Callable[[StreamHandle], _T]:
        given = self._given
        if _takes_stream(function):
            return lambda handle: function(*given, stream=handle)
        return lambda handle: function(*given)  # noqa: ARG005

    def _checked(self, contents: tuple[object, ...]) -> tuple[Buffer, ...]:
        if len(contents) != len(self._buffers):
            raise UsageError(
                f"{len(self._buffers)} buffers were captured, {len(contents)} given",
                hint="pass one array per buffer, or call replay() to keep the contents",
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


def graph(
    fn: Callable[..., _T],
    *buffers: object,
    device: int | Gpu | None = None,
    warmup: int = 3,
) -> Graphed[_T]:
    """Capture what ``fn(*buffers)`` enqueues on a GPU as a CUDA graph, and return it to be replayed.

    Buffers are memory of a device: tensors of torch, arrays with ``__cuda_array_interface__`` (CuPy, Numba)
    or DLPack (cuda.core), or mere addresses. The graph goes on using that memory, and all else that ``fn``
    uses; bind what is no buffer by a lambda or ``functools.partial``.

    What it returns has these methods, none of which waits for the device but ``close``:

    * ``graphed(*contents)`` copies new contents, of the same dtype and shape, into the buffers, replays, and
      returns what ``fn`` returned when it was captured, whose memory each replay writes anew;
    * ``graphed.replay(stream=None)`` replays with what is in the buffers, on the current stream of torch or
      CuPy where the first buffers are theirs, or else on that of ``cudakit.stream``;
    * ``graphed.update(fn=None, warmup=0)`` captures again, or another function, for other parameters;
    * ``graphed.close()`` gives all back; it is a context manager, too.

    ``fn`` first runs ``warmup`` times, and so changes its buffers, and is then captured: both on a stream
    that is made for it, which is the current one of torch and CuPy meanwhile, where the program has imported
    them. Where a library has no current stream (Numba, cuda.core, cuda.bindings), give ``fn`` a parameter
    named ``stream``: it gets the driver's handle, a number that also speaks ``__cuda_stream__``. What goes to
    the legacy default stream is refused, as it would be left out; other threads must not use that stream
    meanwhile either. Garbage is not collected during the capture.

    With torch tensors among the buffers it is a ``torch.cuda.CUDAGraph``, because only that knows how torch's
    allocator (a private pool) and random numbers are captured; pass at least one tensor where ``fn`` uses
    torch. CuPy allocates from a pool of the graph's own. Other allocations inside ``fn`` are refused. No
    gradient flows through a replay.

    ``device`` is CUDA's number of one, or a device of cudakit itself, the simulated one included, which is
    not closed; without it, the device of the first buffer is taken.

    Raises CudaError with the driver's name of what cannot be captured (CUDA_ERROR_STREAM_CAPTURE_...),
    UsageError for what is no buffer and for a function that enqueues nothing, EnvironmentUnusable without
    a driver, and what ``fn`` itself raises.

    >>> from cudakit.gpu.sim import Sim
    >>> sim = Sim()
    >>> buffer = sim.malloc(1024)
    >>> def clear(buffer, stream):
    ...     sim.fill(buffer, 0, 1024, stream)
    >>> with graph(clear, buffer, device=sim) as cleared:
    ...     cleared.replay()
    """
    if warmup < 0:
        raise UsageError(f"warmup is {warmup}, must be at least 0")
    owned = ExitStack()
    try:
        captured = _graph(buffers, device, owned)
        owned.callback(captured.close)
        return Graphed(captured, fn, buffers, warmup=warmup, close=owned.close)
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
            f"not a device: {device!r}", hint="pass a CUDA device index or a device object"
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
