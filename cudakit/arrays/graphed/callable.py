"""``cudakit.graph``: capture a function of device buffers as a CUDA graph, and replay it."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any, Generic, TypeVar, cast

from cudakit.arrays.graphed.buffers import Buffer, buffer_of, check_contents
from cudakit.arrays.graphed.capture import DriverGraph, GraphDevice
from cudakit.arrays.graphed.streams import FrameworkStreams, SimulatedStreams
from cudakit.errors import UsageError
from cudakit.gpu.external_streams import StreamHandle

if TYPE_CHECKING:
    from cudakit.gpu.api import Gpu
    from cudakit.gpu.cuda.device import Cuda

_T = TypeVar("_T")


class Graphed(Generic[_T]):
    """A captured function, which ``cudakit.graph`` returns. Call it with new contents, or replay it."""

    def __init__(
        self,
        graph: DriverGraph,
        function: Callable[..., _T],
        buffers: tuple[object, ...],
        *,
        warmup_runs: int,
        close: Callable[[], object],
    ) -> None:
        self._graph = graph
        self._function = function
        self._arguments = buffers  # The graph uses the memory of the arguments.
        self._buffers = tuple(buffer_of(argument, index) for index, argument in enumerate(buffers))
        self._close_resources = close
        self._is_closed = False
        if warmup_runs:
            graph.run(self._work(function), warmup_runs)
        self._captured_value = graph.capture(self._work(function))

    def __call__(self, *contents: object, stream: object = None) -> _T:
        """Copy new contents into the captured buffers, replay, and return the function's captured result.

        The work is enqueued without waiting. Contents are device arrays of the same dtype and shape; a
        captured buffer that is passed again is not copied. Raises UsageError if contents do not match.
        """
        self._check_open()
        sources = self._checked_buffers(contents)
        replay_stream = self._graph.streams.stream(stream)
        for captured_buffer, source in zip(self._buffers, sources, strict=True):
            size_bytes = captured_buffer.layout.size_bytes if captured_buffer.layout else 0
            self._graph.copy(captured_buffer.ptr, source.ptr, size_bytes, replay_stream)
        self._graph.launch(replay_stream)
        return self._captured_value

    def replay(self, stream: object = None) -> _T:
        """Enqueue a replay with the current buffer contents; return the function's captured result.

        ``stream`` is a stream of any library, or a driver handle. The default is the current stream of torch
        or CuPy if the first array among the buffers is theirs, else that of ``cudakit.stream``.
        """
        self._check_open()
        self._graph.launch(self._graph.streams.stream(stream))
        return self._captured_value

    def update(self, function: Callable[..., _T] | None = None, *, warmup: int = 0) -> _T:
        """Capture the function again, or another function, on the same buffers; return its result.

        The function runs ``warmup`` times before the capture. The parameters of the executable graph are
        updated; with torch, the graph is replaced. Raises CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE if the new
        graph has a different topology, and the errors of ``cudakit.graph``; the previous graph then stays
        in use.
        """
        self._check_open()
        work = self._work(function or self._function)
        if warmup:
            self._graph.run(work, warmup)
        self._captured_value = self._graph.update(work)
        self._function = function or self._function
        return self._captured_value

    def close(self) -> None:
        """Wait for the device, and release the graph and its memory. A second call has no effect."""
        if not self._is_closed:
            self._is_closed = True
            self._close_resources()
            del self._graph, self._arguments, self._captured_value

    def __enter__(self) -> Graphed[_T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self, function: Callable[..., _T]) -> Callable[[StreamHandle], _T]:
        arguments = self._arguments
        if _takes_stream(function):
            return lambda handle: function(*arguments, stream=handle)
        return lambda handle: function(*arguments)  # noqa: ARG005

    def _checked_buffers(self, contents: tuple[object, ...]) -> tuple[Buffer, ...]:
        if len(contents) != len(self._buffers):
            raise UsageError(
                f"{len(self._buffers)} buffers were captured, {len(contents)} given",
                hint="pass one array per buffer, or call replay() to keep the contents",
            )
        sources = tuple(buffer_of(argument, index) for index, argument in enumerate(contents))
        for index, pair in enumerate(zip(sources, self._buffers, strict=True)):
            check_contents(*pair, index)
        return sources

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the graph was closed", hint="make a new one with cudakit.graph")


def _takes_stream(function: Callable[..., Any]) -> bool:
    """Return whether a function has a parameter named ``stream``."""
    try:
        return "stream" in inspect.signature(function).parameters
    except (TypeError, ValueError):  # Builtin functions may have no signature.
        return False


def graph(
    fn: Callable[..., _T],
    *buffers: object,
    device: int | Gpu | None = None,
    warmup: int = 3,
) -> Graphed[_T]:
    """Capture the GPU work of ``fn(*buffers)`` as a CUDA graph, and return it for replays.

    Buffers are device memory: torch tensors, arrays with ``__cuda_array_interface__`` (CuPy, Numba) or DLPack
    (cuda.core), or addresses. Each replay uses the same memory; bind other arguments with a lambda or
    ``functools.partial``.

    The returned object has these methods; only ``close`` waits for the device:

    * ``graphed(*contents)`` copies new contents of the same dtype and shape into the buffers, replays, and
      returns the value that ``fn`` returned during the capture; each replay overwrites its memory;
    * ``graphed.replay(stream=None)`` replays with the current contents, by default on the current stream of
      torch or CuPy if the first array is theirs, else on that of ``cudakit.stream``;
    * ``graphed.update(fn=None, warmup=0)`` captures again, with other parameters or another function;
    * ``graphed.close()`` releases the graph, as does leaving a ``with`` block.

    ``fn`` runs ``warmup`` times, which changes its buffers, and is then captured, on a new stream that is
    current in torch and CuPy if they are imported. For libraries without a current stream (Numba, cuda.core,
    cuda.bindings), give ``fn`` a parameter named ``stream``: it receives the driver handle, an int that also
    implements ``__cuda_stream__``. Work on the legacy default stream raises an error, because it would not be
    captured; other threads must not use that stream during the capture either. Garbage collection is off
    during the capture.

    With torch tensors among the buffers, the graph is a ``torch.cuda.CUDAGraph``, which handles torch's
    allocator (with a private pool) and random number generators; pass at least one tensor if ``fn`` uses
    torch. CuPy allocates from a private pool. Other allocations inside ``fn`` raise an error. Replays do not
    record gradients.

    ``device`` is a CUDA device index or a cudakit device, real or simulated, which stays open; the default is
    the device of the first buffer.

    Raises CudaError (CUDA_ERROR_STREAM_CAPTURE_...) if the work cannot be captured, UsageError if an
    argument is not a buffer or ``fn`` enqueues nothing, EnvironmentUnusable without a driver, and the
    exceptions of ``fn``.

    >>> from cudakit.gpu.sim import Sim
    >>> sim = Sim()
    >>> buffer = sim.malloc(1024)
    >>> def clear(buffer, stream):
    ...     sim.fill(buffer, 0, 1024, stream)
    >>> with cudakit.graph(clear, buffer, device=sim) as cleared:
    ...     cleared.replay()
    """
    if warmup < 0:
        raise UsageError(f"warmup is {warmup}, must be at least 0")
    resources = ExitStack()
    try:
        captured_graph = _graph(buffers, device, resources)
        resources.callback(captured_graph.close)
        return Graphed(captured_graph, fn, buffers, warmup_runs=warmup, close=resources.close)
    except BaseException:
        resources.close()
        raise


def _graph(buffers: tuple[object, ...], device: object, resources: ExitStack) -> DriverGraph:
    if getattr(device, "simulated", False):
        return DriverGraph(cast("GraphDevice", device), SimulatedStreams())
    gpu = _open_cuda(buffers, device, resources)
    streams = FrameworkStreams(gpu, buffers)
    if any(map(_is_tensor, buffers)):
        from cudakit.arrays.graphed.torch_graph import TorchGraph

        return TorchGraph(gpu, streams, gpu.ordinal)
    return DriverGraph(gpu, streams)


def _open_cuda(buffers: tuple[object, ...], device: object, resources: ExitStack) -> Cuda:
    from cudakit.gpu.cuda.device import Cuda

    if isinstance(device, Cuda):
        return device
    if not isinstance(device, int | None):
        raise UsageError(
            f"not a device: {device!r}", hint="pass a CUDA device index or a device object"
        )
    gpu = Cuda(_ordinal_of(buffers) if device is None else device)
    resources.callback(gpu.close)
    return gpu


def _ordinal_of(buffers: tuple[object, ...]) -> int:
    """Return the index of the first buffer's device; without a device buffer, of the current device."""
    from cudakit.gpu.cuda.current import current_device
    from cudakit.gpu.cuda.driver import cu, initialize

    initialize()
    attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    for index, argument in enumerate(buffers[:1]):
        status, ordinal = cu.cuPointerGetAttribute(attribute, buffer_of(argument, index).ptr)
        if not status:
            return int(ordinal)
    return current_device()


def _is_tensor(argument: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(argument, torch.Tensor)
