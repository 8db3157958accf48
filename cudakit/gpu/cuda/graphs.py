"""Graphs: work captured from a stream, and replayed at once."""

from __future__ import annotations

from cudakit.gpu.api import Graph, GraphExec, Stream
from cudakit.gpu.cuda.context import Handles
from cudakit.gpu.cuda.driver import cu
from cudakit.gpu.cuda.streams import Streams


class Graphs(Streams):
    """The graphs of one device."""

    def __init__(self, ordinal: int) -> None:
        super().__init__(ordinal)
        self._graphs = Handles("graph")
        self._executables = Handles("graph executable")

    def capture_begin(self, stream: Stream) -> None:
        mode = cu.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        self.call(cu.cuStreamBeginCapture, self.handle(stream), mode)

    def capture_end(self, stream: Stream) -> Graph:
        return Graph(self._graphs.add(self.call(cu.cuStreamEndCapture, self.handle(stream))))

    def instantiate(self, graph: Graph) -> GraphExec:
        executable = self.call(cu.cuGraphInstantiate, self._graphs[graph], 0)
        return GraphExec(self._executables.add(executable))

    def graph_launch(self, graph: GraphExec, stream: Stream) -> None:
        self.call(cu.cuGraphLaunch, self._executables[graph], self.handle(stream))

    def destroy_graph(self, graph: Graph) -> None:
        self.call(cu.cuGraphDestroy, self._graphs.remove(graph))

    def destroy_graph_exec(self, graph: GraphExec) -> None:
        self.call(cu.cuGraphExecDestroy, self._executables.remove(graph))

    def close(self) -> None:
        for executable in self._executables.clear():
            self.ask(cu.cuGraphExecDestroy, executable)
        for graph in self._graphs.clear():
            self.ask(cu.cuGraphDestroy, graph)
        super().close()
