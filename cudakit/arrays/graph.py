"""``cudakit.graph``: capture a function of device buffers as a CUDA graph, and replay it."""

from __future__ import annotations

import gc
import inspect
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeAlias, TypeVar, cast

import numpy as np

from cudakit.arrays.calls import simulated_stream
from cudakit.errors import CudaError, UsageError
from cudakit.gpu.api import Graph, GraphExec, Graphs, Memory, Ptr, Stream, Streams
from cudakit.gpu.arrays import current_stream
from cudakit.gpu.device_array import DLPACK_DEVICES, StreamHandle, stream_of_cupy, view_of_capsule
from cudakit.gpu.driver_errors import Status

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
        if len(contents) != len(self._buffers):
            raise UsageError(
                f"{len(self._buffers)} buffers were captured, {len(contents)} given",
                hint="pass one array per buffer, or call replay() to keep the contents",
            )
        sources = tuple(buffer_of(argument, index) for index, argument in enumerate(contents))
        for index, pair in enumerate(zip(sources, self._buffers, strict=True)):
            check_contents(*pair, index)
        replay_stream = self._graph.streams.stream(stream)
        for captured_buffer, source in zip(self._buffers, sources, strict=True):
            size_bytes = captured_buffer.layout.size_bytes if captured_buffer.layout else 0
            if size_bytes and captured_buffer.ptr != source.ptr:
                self._graph.gpu.copy(captured_buffer.ptr, source.ptr, size_bytes, replay_stream)
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
        try:
            takes_stream = "stream" in inspect.signature(function).parameters
        except (TypeError, ValueError):  # Builtin functions may have no signature.
            takes_stream = False
        if takes_stream:
            return lambda handle: function(*arguments, stream=handle)
        return lambda _: function(*arguments)

    def _check_open(self) -> None:
        if self._is_closed:
            raise UsageError("the graph was closed", hint="make a new one with cudakit.graph")


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
    from cudakit.gpu.cuda.device import Cuda

    if isinstance(device, Cuda):
        gpu = device
    elif isinstance(device, int | None):
        gpu = Cuda(_ordinal_of(buffers) if device is None else device)
        resources.callback(gpu.close)
    else:
        raise UsageError(
            f"not a device: {device!r}", hint="pass a CUDA device index or a device object"
        )
    streams = FrameworkStreams(gpu, buffers)
    torch = sys.modules.get("torch")
    if torch is not None and any(isinstance(buffer, torch.Tensor) for buffer in buffers):
        return TorchGraph(gpu, streams, gpu.ordinal)
    return DriverGraph(gpu, streams)


def _ordinal_of(buffers: tuple[object, ...]) -> int:
    """Return the index of the first buffer's device; without a device buffer, of the current device."""
    from cudakit.gpu.cuda.current import current_device
    from cudakit.gpu.cuda.driver import cu, initialize

    initialize()
    attribute = cu.CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL
    if buffers:
        status, ordinal = cu.cuPointerGetAttribute(attribute, buffer_of(buffers[0], 0).ptr)
        if not status:
            return int(ordinal)
    return current_device()


# --- Capture of a function's work into a graph, and errors for work that cannot be captured -------

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
            self.gpu.graph_update(cast("GraphExec", self._executable), graph)
        finally:
            self.gpu.destroy_graph(graph)
        return work_result

    def launch(self, stream: Stream) -> None:
        """Launch the graph."""
        self.gpu.graph_launch(cast("GraphExec", self._executable), stream)

    def close(self) -> None:
        """Wait for the device, and release all resources."""
        self.gpu.sync()
        if self._executable is not None:
            self.gpu.destroy_graph_exec(self._executable)
            self._executable = None
        self.gpu.destroy_stream(self.capture_stream)

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
    # Finalizers must not free memory or unload kernels during a capture.
    collects_garbage = gc.isenabled()
    gc.disable()
    try:
        begin_capture()
        try:
            work_result = work()
        except BaseException as error:
            capture_error: Exception | None = None
            try:
                destroy_graph(end_capture())
            except (CudaError, RuntimeError) as end_error:
                capture_error = end_error
            if isinstance(error, Exception) and (capture_error or status_of(error)):
                raise capture_failure(error, capture_error) from error
            raise
        try:
            return end_capture(), work_result
        except (CudaError, RuntimeError) as error:  # torch raises RuntimeError
            raise capture_failure(error) from error
    finally:
        if collects_garbage:
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


# --- Device buffers of any library: address, size, dtype and shape --------------------------------

_HINT = "pass device arrays or addresses; bind other arguments with functools.partial or a lambda"
# stream=-1 requests no synchronization ("Python Specification for DLPack").
_NO_STREAM = -1


@dataclass(frozen=True, slots=True)
class Layout:
    """The dtype, shape and contiguity of a buffer. New contents must have the same layout."""

    dtype: str  # Name of the dtype in numpy.
    shape: tuple[int, ...]
    size_bytes: int
    is_dense: bool  # Whether the buffer is C-contiguous.

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}{'' if self.is_dense else ', strided'}"


@dataclass(frozen=True, slots=True)
class Buffer:
    """A buffer in device memory. ``layout`` is None if only the address is known."""

    ptr: Ptr
    layout: Layout | None = None


def buffer_of(argument: object, buffer_number: int) -> Buffer:
    """Return the buffer of an argument. Raises UsageError if the argument is not device memory."""
    if isinstance(argument, int) and not isinstance(argument, bool):
        return Buffer(Ptr(argument))
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(argument, torch.Tensor):
        # torch's __cuda_array_interface__ supports neither bfloat16 nor tensors that require grad.
        if argument.is_cuda:
            size_bytes = argument.numel() * argument.element_size()
            dtype = str(argument.dtype).removeprefix("torch.")
            layout = Layout(
                dtype, tuple(argument.shape), size_bytes, bool(argument.is_contiguous())
            )
            return Buffer(Ptr(argument.data_ptr()), layout)
    elif hasattr(argument, "__cuda_array_interface__"):
        return _buffer_of_interface(argument.__cuda_array_interface__)
    elif (
        hasattr(argument, "__dlpack__")
        and hasattr(argument, "__dlpack_device__")
        and int(argument.__dlpack_device__()[0]) in DLPACK_DEVICES
    ):
        # The capsule is not consumed: it frees its tensor, and the argument keeps the memory.
        capsule = argument.__dlpack__(stream=_NO_STREAM)
        view, item_bytes = view_of_capsule(capsule)
        is_dense = _is_dense(view.shape, [stride / item_bytes for stride in view.strides])
        return Buffer(view.ptr, Layout(view.dtype, view.shape, view.size * item_bytes, is_dense))
    kind = f"{type(argument).__module__}.{type(argument).__qualname__}".removeprefix("builtins.")
    if isinstance(argument, np.ndarray) or hasattr(argument, "__dlpack__"):
        kind += " in host memory"
    raise UsageError(f"buffer {buffer_number} is not a device buffer: {kind}", hint=_HINT)


def check_contents(new_buffer: Buffer, captured_buffer: Buffer, buffer_number: int) -> None:
    """Raise UsageError if the contents of ``new_buffer`` cannot be copied into the captured buffer."""
    if new_buffer.ptr == captured_buffer.ptr:
        return
    for buffer, verb in ((captured_buffer, "was captured as"), (new_buffer, "is")):
        if buffer.layout is None:
            raise UsageError(
                f"buffer {buffer_number} {verb} a plain address, whose size is unknown",
                hint="pass arrays, or fill the buffer yourself and call replay()",
            )
    if new_buffer.layout != captured_buffer.layout or (
        new_buffer.layout and not new_buffer.layout.is_dense
    ):
        raise UsageError(
            f"buffer {buffer_number} was captured as {captured_buffer.layout}, got {new_buffer.layout}",
            hint="contents must have the same dtype and shape, and be contiguous",
        )


def _buffer_of_interface(interface: Mapping[str, Any]) -> Buffer:
    """Read the CUDA Array Interface, version 3. An array without strides is C-contiguous."""
    dtype, shape = np.dtype(interface["typestr"]), tuple(map(int, interface["shape"]))
    strides = interface.get("strides")
    is_dense = strides is None or _is_dense(shape, [stride / dtype.itemsize for stride in strides])
    size_bytes = math.prod(shape) * dtype.itemsize
    return Buffer(Ptr(int(interface["data"][0])), Layout(dtype.name, shape, size_bytes, is_dense))


def _is_dense(shape: tuple[int, ...], strides: Any) -> bool:
    """Return whether strides, in elements, describe a C-contiguous array."""
    dense_stride = 1
    for extent, stride in zip(reversed(shape), reversed(list(strides)), strict=True):
        if extent != 1 and stride != dense_stride:
            return math.prod(shape) == 0
        dense_stride *= extent
    return True


# --- Streams for captured functions: the current streams of frameworks, or streams of a simulated device


class SimulatedStreams:
    """The streams of a simulated device, which no framework uses."""

    def handle(self, stream: Stream) -> StreamHandle:
        return StreamHandle(stream)

    def stream(self, stream_argument: object) -> Stream:
        return simulated_stream(stream_argument)

    def as_current(self, handle: StreamHandle) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()


class FrameworkStreams:
    """The current streams of torch and CuPy, if they are imported, and of cudakit."""

    def __init__(self, gpu: Cuda, buffers: Sequence[object]) -> None:
        self._gpu = gpu
        packages = (type(buffer).__module__.partition(".")[0] for buffer in buffers)
        self._library = next((package for package in packages if package in ("torch", "cupy")), "")
        self._pool: Any = None

    def handle(self, stream: Stream) -> StreamHandle:
        """Return the handle to pass to a captured function."""
        return StreamHandle(self._gpu.stream_address(stream))

    def stream(self, stream_argument: object) -> Stream:
        """Return the stream for an argument of any library; for None, the current stream."""
        if stream_argument is None:
            return self._gpu.streams.external_stream(
                current_stream(self._library, self._gpu.ordinal)
            )
        from cudakit.gpu.cuda.current import stream

        with stream(stream_argument) as handle:
            return self._gpu.streams.external_stream(handle)

    @contextmanager
    def as_current(self, handle: StreamHandle) -> Iterator[None]:
        """Make a stream current in every imported framework during a ``with`` block."""
        from cudakit.gpu.cuda import current

        with current.device(self._gpu.ordinal), current.stream(handle), ExitStack() as stack:
            torch = sys.modules.get("torch")
            if torch is not None and torch.cuda.is_initialized():
                stream = torch.cuda.ExternalStream(int(handle), device=self._gpu.ordinal)
                stack.enter_context(torch.cuda.stream(stream))
            cupy = sys.modules.get("cupy")
            if cupy is not None:
                # Replays reuse the addresses of a private memory pool.
                self._pool = self._pool or cupy.cuda.MemoryPool()
                stack.enter_context(stream_of_cupy(cupy, handle))
                stack.enter_context(cupy.cuda.using_allocator(self._pool.malloc))
            yield


StreamSource: TypeAlias = SimulatedStreams | FrameworkStreams


# --- Capture of functions of torch tensors as a torch.cuda.CUDAGraph ------------------------------
#
# Only torch.cuda.CUDAGraph keeps allocations of a capture in a private pool of torch's caching allocator, and
# advances the random number generators at each replay ("CUDA Graphs" in torch's notes on CUDA semantics).

# Handles of the legacy default stream: NULL and CU_STREAM_LEGACY.
_LEGACY_HANDLES = (0, 1)


class TorchGraph(DriverGraph):
    """The captured work of a function of torch tensors."""

    def __init__(self, gpu: GraphDevice, streams: StreamSource, ordinal: int) -> None:
        super().__init__(gpu, streams)
        self._torch: Any = sys.modules["torch"]
        self._ordinal = ordinal
        self._graph: Any = None

    def capture(self, work: Work[_T]) -> _T:
        graph, handle = self._torch.cuda.CUDAGraph(), self.streams.handle(self.capture_stream)
        pool_id = self._torch.cuda.graph_pool_handle()
        # Release cached memory, because the graph's private pool cannot reuse it.
        gc.collect()
        self._torch.cuda.empty_cache()
        self.gpu.sync()
        with self.streams.as_current(handle):
            _, work_result = run_captured(
                lambda: work(handle),
                begin_capture=lambda: graph.capture_begin(
                    pool_id, capture_error_mode="thread_local"
                ),
                end_capture=lambda: self._end_capture(graph, pool_id),
                destroy_graph=lambda _: None,
            )
        self._graph = graph
        return work_result

    def _end_capture(self, graph: Any, pool_id: tuple[int, int]) -> None:
        """End the capture; after a failure, release the private pool, which torch would leave in use.

        torch's allocator aborts the process when a MemPool is deleted while a pool is in use by a capture
        (CUDAGraph::capture_end of aten/src/ATen/cuda/CUDAGraph.cpp and synchronize_and_free_events of
        c10/cuda/CUDACachingAllocator.cpp, torch 2.11).
        """
        try:
            graph.capture_end()
        except Exception:
            torch_c = self._torch._C
            if hasattr(torch_c, "_cuda_endAllocateToPool"):  # since torch 2.8
                torch_c._cuda_endAllocateToPool(self._ordinal, pool_id)
                torch_c._cuda_releasePool(self._ordinal, pool_id)
            raise

    def update(self, work: Work[_T]) -> _T:
        """Capture the work again; the new graph replaces the old one and may have another topology."""
        return self.capture(work)

    def launch(self, stream: Stream) -> None:
        cuda, handle = self._torch.cuda, int(self.streams.handle(stream))
        with cuda.device(self._ordinal):
            external_stream = cuda.ExternalStream(handle, self._ordinal)
            replay_stream = cuda.default_stream() if handle in _LEGACY_HANDLES else external_stream
            with cuda.stream(replay_stream):
                self._graph.replay()

    def close(self) -> None:
        self.gpu.sync()
        self._graph = None
        super().close()
