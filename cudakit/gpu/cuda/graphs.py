"""Stream capture and graphs (CUDA Driver API, "Stream Management", "Graph Management")."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

from cudakit.gpu.api import LEGACY, Graph, GraphExec, GraphNode, Stream
from cudakit.gpu.cuda.context import Context
from cudakit.gpu.cuda.driver import call_if_available, check, cu
from cudakit.gpu.cuda.streams import CudaStreams
from cudakit.gpu.driver_errors import Status
from cudakit.gpu.handles import Handles

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
