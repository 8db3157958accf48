"""Graphs: work captured from a stream, and replayed at once."""

from __future__ import annotations

from cudakit.gpu.api import LEGACY, PER_THREAD, Graph, GraphExec, Stream
from cudakit.gpu.cuda.context import Handles
from cudakit.gpu.cuda.driver import check, cu
from cudakit.gpu.cuda.streams import Streams
from cudakit.gpu.cuda.update import why_not
from cudakit.gpu.explain import Status

_DEFAULT = {0: LEGACY, int(LEGACY): LEGACY, int(PER_THREAD): PER_THREAD}


class Graphs(Streams):
    """The graphs of one device."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._graphs = Handles("graph")
        self._executables = Handles("graph executable")
        self._borrowed: dict[int, Stream] = {}

    def capture_begin(self, stream: Stream) -> None:
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call(cu.cuStreamBeginCapture, self.handle(stream), mode)

    def capture_end(self, stream: Stream) -> Graph:
        return Graph(self._graphs.add(self.call(cu.cuStreamEndCapture, self.handle(stream))))

    def instantiate(self, graph: Graph) -> GraphExec:
        executable = self.call(cu.cuGraphInstantiate, self._graphs[graph], 0)
        return GraphExec(self._executables.add(executable))

    def graph_update(self, executable: GraphExec, graph: Graph) -> None:
        both = self._executables[executable], self._graphs[graph]
        result = self.ask(cu.cuGraphExecUpdate, *both)
        refused = int(result[0]) == Status.GRAPH_EXEC_UPDATE_FAILURE
        check(result, (lambda: self.ask(why_not, *both)) if refused else None)

    def graph_upload(self, executable: GraphExec, stream: Stream) -> None:
        self.call(cu.cuGraphUpload, self._executables[executable], self.handle(stream))

    def graph_launch(self, graph: GraphExec, stream: Stream) -> None:
        self.call(cu.cuGraphLaunch, self._executables[graph], self.handle(stream))

    def destroy_graph(self, graph: Graph) -> None:
        self.call(cu.cuGraphDestroy, self._graphs.remove(graph))

    def destroy_graph_exec(self, graph: GraphExec) -> None:
        self.call(cu.cuGraphExecDestroy, self._executables.remove(graph))

    def count_nodes(self, graph: Graph) -> int:
        """Count the nodes of a graph, those of graphs within it not counted."""
        _, count = self.call(cu.cuGraphGetNodes, self._graphs[graph], 0)
        return int(count)

    def borrowed(self, handle: int) -> Stream:
        """Return the id of a stream by its handle: another library's, which will destroy it."""
        if handle in _DEFAULT:
            return _DEFAULT[handle]
        if handle not in self._borrowed:
            self._borrowed[handle] = Stream(self._streams.add(cu.CUstream(handle)))
        return self._borrowed[handle]

    def close(self) -> None:
        for executable in self._executables.clear():
            self.ask(cu.cuGraphExecDestroy, executable)
        for graph in self._graphs.clear():
            self.ask(cu.cuGraphDestroy, graph)
        for stream in self._borrowed.values():
            self._streams.remove(stream)
        self._borrowed.clear()
        super().close()
