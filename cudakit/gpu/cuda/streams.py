"""Streams and events (CUDA Driver API, "Stream Management", "Event Management")."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, SupportsInt, cast

import numpy as np

from cudakit.gpu.api import (
    LEGACY,
    PER_THREAD,
    Argument,
    Dim3,
    Event,
    Graph,
    GraphExec,
    GraphNode,
    Kernel,
    Module,
    Stream,
)
from cudakit.gpu.compile import compile_cuda, user_cache
from cudakit.gpu.cuda.driver import Context, Result, call_if_available, check, cu
from cudakit.gpu.device import Handles, check_arguments
from cudakit.gpu.driver_errors import Status, cuda_error

_DEFAULT_STREAMS = {LEGACY: cu.CUstream(LEGACY), PER_THREAD: cu.CUstream(PER_THREAD)}
_RELAXED = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
_DEFAULT_BY_HANDLE = {0: LEGACY, int(LEGACY): LEGACY, int(PER_THREAD): PER_THREAD}


class CudaStreams:
    """The streams and events of one device; ``gpu.api.Streams`` has the contract of each method."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._external_streams: dict[int, Stream] = {}
        self._streams: Handles[Any] = Handles("stream", first=PER_THREAD + 1)
        self._events: Handles[Any] = Handles("event")
        self._timed_events: set[Event] = set()

    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        flag_names = cu.CUstream_flags
        flags = flag_names.CU_STREAM_DEFAULT if blocking else flag_names.CU_STREAM_NON_BLOCKING
        # The highest priority has the lowest number.
        lowest_priority, highest_priority = self._context.call(cu.cuCtxGetStreamPriorityRange)
        clamped_priority = max(highest_priority, min(lowest_priority, priority))
        return Stream(
            self._streams.add(
                self._context.call(cu.cuStreamCreateWithPriority, flags, clamped_priority)
            )
        )

    def priority(self, stream: Stream) -> int:
        return int(self._context.call(cu.cuStreamGetPriority, self.handle(stream)))

    def destroy_stream(self, stream: Stream) -> None:
        if stream in _DEFAULT_STREAMS:
            raise cuda_error(Status.INVALID_HANDLE, detail="a default stream cannot be destroyed")
        self._context.call(cu.cuStreamDestroy, self._streams.remove(stream))

    def handle(self, stream: Stream) -> object:
        """Return the driver object of a stream."""
        return _DEFAULT_STREAMS.get(stream) or self._streams[stream]

    def query_stream(self, stream: Stream) -> bool:
        return _is_complete(self._context.in_context(cu.cuStreamQuery, self.handle(stream)))

    def sync_stream(self, stream: Stream) -> None:
        self._context.call(cu.cuStreamSynchronize, self.handle(stream))

    def sync(self) -> None:
        self._context.call(cu.cuCtxSynchronize)

    def event(self, *, timing: bool = True) -> Event:
        flag_names = cu.CUevent_flags
        flags = flag_names.CU_EVENT_DEFAULT if timing else flag_names.CU_EVENT_DISABLE_TIMING
        event = Event(self._events.add(self._context.call(cu.cuEventCreate, flags)))
        if timing:
            self._timed_events.add(event)
        return event

    def destroy_event(self, event: Event) -> None:
        self._context.call(cu.cuEventDestroy, self._events.remove(event))
        self._timed_events.discard(event)

    def record(self, event: Event, stream: Stream) -> None:
        self._context.call(cu.cuEventRecord, self._events[event], self.handle(stream))

    def wait(self, stream: Stream, event: Event) -> None:
        self._context.call(cu.cuStreamWaitEvent, self.handle(stream), self._events[event], 0)

    def query_event(self, event: Event) -> bool:
        return _is_complete(self._context.in_context(cu.cuEventQuery, self._events[event]))

    def sync_event(self, event: Event) -> None:
        self._context.call(cu.cuEventSynchronize, self._events[event])

    def elapsed(self, begin: Event, end: Event) -> float:
        begin_event, end_event = self._events[begin], self._events[end]
        for event in (begin, end):
            if event not in self._timed_events:
                raise cuda_error(
                    Status.INVALID_HANDLE, detail=f"event {event} was created with timing=False"
                )
        milliseconds: float = self._context.call(
            cu.cuEventElapsedTime,
            begin_event,
            end_event,
            detail=lambda: f"events {begin} and {end} must both be recorded and complete",
        )
        return milliseconds / 1e3

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Allow this thread to allocate during a stream capture; the allocation is not part of the graph.

        In other capture modes cuMemAlloc fails and invalidates the capture (CUDA Driver API,
        cuThreadExchangeStreamCaptureMode). PyTorch's allocator also uses the relaxed mode
        (CUDAStreamCaptureModeGuard).
        """
        previous_mode = self._context.call(cu.cuThreadExchangeStreamCaptureMode, _RELAXED)
        try:
            yield
        finally:
            self._context.call(cu.cuThreadExchangeStreamCaptureMode, previous_mode)

    def external_stream(self, handle: int) -> Stream:
        """Return an id for the handle of another library's stream, which ``close`` does not destroy."""
        if handle in _DEFAULT_BY_HANDLE:
            return _DEFAULT_BY_HANDLE[handle]
        if handle not in self._external_streams:
            self._external_streams[handle] = Stream(self._streams.add(cu.CUstream(handle)))
        return self._external_streams[handle]

    def address(self, stream: Stream) -> int:
        """Return the driver handle of a stream as an int, for other libraries."""
        return int(cast("SupportsInt", self.handle(stream)))

    def close(self) -> None:
        """Destroy all remaining streams and events that this object created.

        Errors are ignored: if the context is lost, all calls fail, and the driver has freed the objects.
        """
        for event in self._events.clear():
            self._context.in_context(cu.cuEventDestroy, event)
        for stream in self._external_streams.values():
            self._streams.remove(stream)
        self._external_streams.clear()
        for handle in self._streams.clear():
            self._context.in_context(cu.cuStreamDestroy, handle)


class HandleStreams(CudaStreams):
    """Streams whose ids are driver handles, so that streams of other libraries can be passed.

    A handle must belong to an existing stream: the driver reuses handles, and cannot detect a destroyed one.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._created_streams: dict[Stream, Stream] = {}

    def handle(self, stream: Stream) -> object:
        return cu.CUstream(_DEFAULT_BY_HANDLE.get(stream, stream))

    def external_stream(self, handle: int) -> Stream:
        return _DEFAULT_BY_HANDLE.get(handle, Stream(handle))

    def stream(self, *, blocking: bool = True, priority: int = 0) -> Stream:
        internal_id = super().stream(blocking=blocking, priority=priority)
        stream = Stream(int(self._streams[internal_id]))
        self._created_streams[stream] = internal_id
        return stream

    def destroy_stream(self, stream: Stream) -> None:
        if stream not in self._created_streams:
            raise cuda_error(
                Status.INVALID_HANDLE,
                detail=f"stream {stream:#x} belongs to another library, or was destroyed",
            )
        super().destroy_stream(self._created_streams.pop(stream))


def _is_complete(result: Result) -> bool:
    if int(result[0]) == Status.NOT_READY:
        return False
    check(result)
    return True


# --- Stream capture and graphs (CUDA Driver API, "Stream Management", "Graph Management") ----------

_ACTIVE_CAPTURE = cu.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_ACTIVE

# Names of versions of the same driver function, of which the first that exists is called. The new functions,
# since CUDA 12.3, support edge data of programmatic dependent launches; the old ones return
# CUDA_ERROR_LOSSY_QUERY for such graphs. The bindings of CUDA 13 have only the new functions, under the old
# names.
_CAPTURE_INFO_FUNCTIONS = "cuStreamGetCaptureInfo_v3", "cuStreamGetCaptureInfo"
_DEPENDENCY_FUNCTIONS = "cuGraphNodeGetDependencies_v2", "cuGraphNodeGetDependencies"
# First CUDA version whose cuGraphExecUpdate fills a CUgraphExecUpdateResultInfo (cuda.h of CUDA 12).
_RESULT_INFO_VERSION = 12000


class CudaGraphs:
    """The stream captures and graphs of one device."""

    def __init__(self, context: Context, streams: CudaStreams) -> None:
        self._context, self._streams = context, streams
        self._graphs: Handles[Any] = Handles("graph")
        self._executables: Handles[Any] = Handles("graph executable")

    def capture_begin(self, stream: Stream) -> None:
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self._context.call(cu.cuStreamBeginCapture, self._streams.handle(stream), mode)

    def capture_end(self, stream: Stream) -> Graph:
        return Graph(
            self._graphs.add(
                self._context.call(cu.cuStreamEndCapture, self._streams.handle(stream))
            )
        )

    def instantiate(self, graph: Graph) -> GraphExec:
        executable = self._context.call(cu.cuGraphInstantiate, self._graphs[graph], 0)
        return GraphExec(self._executables.add(executable))

    def graph_update(self, executable: GraphExec, graph: Graph) -> None:
        handles = self._executables[executable], self._graphs[graph]
        result = self._context.in_context(cu.cuGraphExecUpdate, *handles)
        failed_update = int(result[0]) == Status.GRAPH_EXEC_UPDATE_FAILURE
        check(
            result,
            (lambda: self._context.in_context(_update_failure_reason, *handles))
            if failed_update
            else None,
        )

    def graph_upload(self, executable: GraphExec, stream: Stream) -> None:
        self._context.call(
            cu.cuGraphUpload, self._executables[executable], self._streams.handle(stream)
        )

    def graph_launch(self, graph: GraphExec, stream: Stream) -> None:
        self._context.call(cu.cuGraphLaunch, self._executables[graph], self._streams.handle(stream))

    def destroy_graph(self, graph: Graph) -> None:
        self._context.call(cu.cuGraphDestroy, self._graphs.remove(graph))

    def destroy_graph_exec(self, graph: GraphExec) -> None:
        self._context.call(cu.cuGraphExecDestroy, self._executables.remove(graph))

    def count_nodes(self, graph: Graph) -> int:
        """Return the number of nodes of a graph, without those of child graphs."""
        _, node_count = self._context.call(cu.cuGraphGetNodes, self._graphs[graph], 0)
        return int(node_count)

    def capture_id(self, stream: Stream) -> int | None:
        if stream == LEGACY:  # LEGACY is never captured; to query LEGACY would invalidate captures
            return None
        return self._query_capture(stream)[0]

    def capture_dependencies(self, stream: Stream) -> tuple[GraphNode, ...]:
        return () if stream == LEGACY else self._query_capture(stream)[1]

    def dependencies(self, node: GraphNode) -> tuple[GraphNode, ...]:
        handle = cu.CUgraphNode(node)
        *_, dependency_count = self._call_newest(_DEPENDENCY_FUNCTIONS, handle, 0)
        return (
            _node_ids(
                self._call_newest(_DEPENDENCY_FUNCTIONS, handle, dependency_count)[0][
                    :dependency_count
                ]
            )
            if dependency_count
            else ()
        )

    def close(self) -> None:
        """Destroy all remaining graphs and executables."""
        for executable in self._executables.clear():
            self._context.in_context(cu.cuGraphExecDestroy, executable)
        for graph in self._graphs.clear():
            self._context.in_context(cu.cuGraphDestroy, graph)

    def _query_capture(self, stream: Stream) -> tuple[int | None, tuple[GraphNode, ...]]:
        """Return the id of a stream's valid capture and the dependencies of its next node."""
        status, capture_id, _, nodes, *_ = self._call_newest(
            _CAPTURE_INFO_FUNCTIONS, self._streams.handle(stream)
        )
        return (int(capture_id), _node_ids(nodes)) if status == _ACTIVE_CAPTURE else (None, ())

    def _call_newest(self, names: tuple[str, str], *args: object) -> Any:
        new_name, old_name = names
        result = self._context.in_context(call_if_available, new_name, *args)
        return self._context.call(getattr(cu, old_name), *args) if result is None else check(result)


class _ResultInfo(ctypes.Structure):
    _fields_ = (
        ("result", ctypes.c_int),
        ("error_node", ctypes.c_void_p),
        ("error_from_node", ctypes.c_void_p),
    )


def _update_failure_reason(executable: Any, graph: Any) -> str:
    """Return the name of the CUgraphExecUpdateResult of a failed update.

    The driver function is called again through ctypes, because cuda-bindings (12.9, 13) drop the
    CUgraphExecUpdateResultInfo of a failed call. A failed update has no side effects.
    """
    default_flags = cu.CUdriverProcAddress_flags.CU_GET_PROC_ADDRESS_DEFAULT
    address, _ = check(
        cu.cuGetProcAddress(b"cuGraphExecUpdate", _RESULT_INFO_VERSION, default_flags)
    )
    update_graph = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 3)(int(address))
    result_info = _ResultInfo()
    update_graph(int(executable), int(graph), ctypes.addressof(result_info))
    return _result_name(result_info.result)


def _result_name(result: int) -> str:
    try:
        name: str = cu.CUgraphExecUpdateResult(result).name
    except ValueError:
        return f"CUgraphExecUpdateResult {result}"
    return name


def _node_ids(nodes: Iterable[Any]) -> tuple[GraphNode, ...]:
    """Return driver handles as ids, which are unique while the graph exists."""
    return tuple(GraphNode(int(node)) for node in nodes)


# --- Kernels: compilation, loading, and launches with checked arguments ----------------------------

_WORD_BYTES = 8

# A kernel that uses more dynamic shared memory needs an opt-in (CUDA C++ Programming Guide,
# "Shared Memory" of each compute capability).
_SHARED_WITHOUT_OPT_IN_BYTES = 48 << 10


class _LoadedKernel(NamedTuple):
    module: Module
    name: str
    function: Any
    # Parameter sizes in bytes; None if the driver does not report them.
    parameter_sizes: tuple[int, ...] | None


class CudaKernels:
    """The modules, kernels and launches of one device."""

    def __init__(self, context: Context, streams: CudaStreams) -> None:
        self._context, self._streams = context, streams
        self._modules: Handles[Any] = Handles("module")
        self._kernels: Handles[_LoadedKernel] = Handles("kernel")

    def compile(self, source: str) -> bytes:
        return compile_cuda(source, self._context.capability, cache=user_cache(os.environ))

    def load(self, image: bytes) -> Module:
        # PTX must be null-terminated; binary images ignore trailing bytes.
        return Module(self._modules.add(self._context.call(cu.cuModuleLoadData, image + b"\0")))

    def unload(self, module: Module) -> None:
        self._context.call(cu.cuModuleUnload, self._modules.remove(module))
        self._kernels.discard(lambda loaded: loaded.module == module)

    def kernel(self, module: Module, name: str) -> Kernel:
        function = self._context.call(
            cu.cuModuleGetFunction,
            self._modules[module],
            name.encode(),
            detail=lambda: f'kernel {name}; declare it extern "C" to keep its name unmangled',
        )
        # Load the kernel now: lazy loading at its first launch would synchronize, and deadlock with a polling
        # kernel.
        self._context.in_context(call_if_available, "cuFuncLoad", function)
        return Kernel(
            self._kernels.add(
                _LoadedKernel(module, name, function, self._parameter_sizes(function))
            )
        )

    def launch(
        self,
        kernel: Kernel,
        grid: Dim3,
        block: Dim3,
        args: Sequence[Argument],
        stream: Stream,
        *,
        shared_bytes: int = 0,
    ) -> None:
        loaded_kernel = self._kernels[kernel]
        check_arguments(loaded_kernel.name, loaded_kernel.parameter_sizes, args)
        _check_shape(loaded_kernel.name, grid, block)
        if shared_bytes > _SHARED_WITHOUT_OPT_IN_BYTES:
            self._allow_shared_memory(loaded_kernel, shared_bytes)
        parameters = _kernel_params(args)  # must stay referenced until the driver returns
        self._context.call(
            cu.cuLaunchKernel,
            loaded_kernel.function,
            *grid,
            *block,
            shared_bytes,
            self._streams.handle(stream),
            ctypes.addressof(parameters),
            0,
            detail=lambda: self._describe_launch(loaded_kernel, grid, block, shared_bytes),
        )

    def function_address(self, kernel: Kernel) -> int:
        """Return the driver handle of a kernel (CUfunction) as an int."""
        return int(self._kernels[kernel].function)

    @property
    def in_use(self) -> bool:
        """Whether a module is loaded."""
        return len(self._modules) > 0

    def close(self) -> None:
        """Unload all modules."""
        self._kernels.clear()
        for module in self._modules.clear():
            self._context.in_context(cu.cuModuleUnload, module)

    def _parameter_sizes(self, function: Any) -> tuple[int, ...] | None:
        # Older drivers do not report the number of parameters: query parameters until an error.
        count_result = self._context.in_context(call_if_available, "cuFuncGetParamCount", function)
        parameter_count = check(count_result) if count_result else sys.maxsize
        sizes: list[int] = []
        while len(sizes) < parameter_count:
            parameter_info = self._context.in_context(
                call_if_available, "cuFuncGetParamInfo", function, len(sizes)
            )
            if parameter_info is None:
                return None
            if parameter_info[0]:
                break
            sizes.append(parameter_info[2])
        return tuple(sizes)

    def _allow_shared_memory(self, loaded_kernel: _LoadedKernel, shared_bytes: int) -> None:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        self._context.call(
            cu.cuFuncSetAttribute,
            loaded_kernel.function,
            attribute,
            shared_bytes,
            detail=lambda: f"{shared_bytes} bytes of shared memory for {loaded_kernel.name}",
        )

    def _describe_launch(
        self, loaded_kernel: _LoadedKernel, grid: Dim3, block: Dim3, shared_bytes: int
    ) -> str:
        attribute = cu.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK
        max_threads = self._context.call(cu.cuFuncGetAttribute, attribute, loaded_kernel.function)
        launch_text = (
            f"{loaded_kernel.name} with grid {grid}, block {block}, {shared_bytes} bytes shared"
        )
        return f"{launch_text}; at most {max_threads} threads per block"


def _check_shape(name: str, grid: Dim3, block: Dim3) -> None:
    if min(*grid, *block) <= 0 or max(*grid, *block) >= 1 << 31:
        raise cuda_error(Status.INVALID_VALUE, detail=f"{name} with grid {grid}, block {block}")


def _kernel_params(args: Sequence[Argument]) -> ctypes.Array[ctypes.c_uint64]:
    """Return the kernelParams array of cuLaunchKernel, followed by the argument values it points to."""
    word_offsets: list[int] = []
    words: list[Any] = []
    for arg in args:
        word_offsets.append(len(words))
        words += _words(arg)
    params = (ctypes.c_uint64 * (len(word_offsets) + len(words)))()
    values_address = ctypes.addressof(params) + _WORD_BYTES * len(word_offsets)
    params[:] = [*(values_address + _WORD_BYTES * offset for offset in word_offsets), *words]
    return params


def _words(arg: Argument) -> Sequence[int]:
    if not isinstance(arg, np.generic):
        return (arg,)
    argument_bytes = arg.tobytes()
    if len(argument_bytes) <= _WORD_BYTES:
        return (int.from_bytes(argument_bytes, sys.byteorder),)
    return memoryview(argument_bytes + bytes(-len(argument_bytes) % _WORD_BYTES)).cast("Q").tolist()
