"""The steps in the life of a graph: each is done over and over, and what it made must run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from functools import partial

from cudakit.core.bench.capturing import captured
from cudakit.core.bench.verification import Verification
from cudakit.core.bench.workloads.latency import Latency
from cudakit.core.bench.workloads.topology import BYTES, Nodes
from cudakit.gpu.api import LEGACY, Gpu, Graph, GraphExec, Stream

# What a step makes is kept until there is so much of it: to destroy it each time would count. One sample in
# so many pays for that, which does not move the median.
_MOST_KEPT = 64
_MOST_KEPT_NODES = 1 << 16


class PreparedStep(Latency):
    """The nodes, each of which must have run when the step is verified."""

    def __init__(self, gpu: Gpu, nodes: Nodes) -> None:
        super().__init__()
        self.gpu, self.nodes = gpu, nodes
        self.byte = BYTES[0]  # what the nodes write
        self.most_kept = max(4, min(_MOST_KEPT, _MOST_KEPT_NODES // nodes.count))
        self.owned.enter_context(closing(nodes))

    def enqueue(self, stream: Stream, index: int) -> None:
        """Do the step."""
        raise NotImplementedError

    def finish(self) -> None:
        """Have the nodes run, where the step itself does not."""

    def verify(self) -> Verification:
        self.finish()
        missing = self.nodes.take_missing(self.byte)
        detail = f"{missing} of {self.nodes.count} nodes did not run" if missing else ""
        error = missing / self.nodes.count
        return Verification(not missing, error, 0.0, "what each node writes", detail)

    def captured(self, byte: int = BYTES[0]) -> Graph:
        """Capture the nodes, on a stream of their own."""
        stream = self.gpu.stream(blocking=False)
        try:
            return captured(self.gpu, stream, partial(self.nodes.enqueue, byte=byte))
        finally:
            self.gpu.destroy_stream(stream)

    def instantiated(self) -> GraphExec:
        """Capture the nodes, and make what can be launched; it is destroyed with the rest."""
        graph = self.captured()
        executable = self.gpu.instantiate(graph)
        self.gpu.destroy_graph(graph)
        self.owned.callback(self.gpu.destroy_graph_exec, executable)
        return executable

    def run(self, executable: GraphExec) -> None:
        """Launch, and wait for it."""
        self.gpu.graph_launch(executable, LEGACY)
        self.gpu.sync()


class _Eager(PreparedStep):
    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        self.nodes.enqueue(stream)


class _Replay(PreparedStep):
    def __init__(self, gpu: Gpu, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        self._executable = self.instantiated()

    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        self.gpu.graph_launch(self._executable, stream)


class _Capture(PreparedStep):
    def __init__(self, gpu: Gpu, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        self._made: list[Graph] = []
        self.owned.callback(self._destroy)

    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        if len(self._made) >= self.most_kept:
            self._destroy()
        self._made.append(captured(self.gpu, stream, self.nodes.enqueue))

    def finish(self) -> None:
        executable = self.gpu.instantiate(self._made[-1])
        self.run(executable)
        self.gpu.destroy_graph_exec(executable)

    def _destroy(self) -> None:
        while self._made:
            self.gpu.destroy_graph(self._made.pop())


class _Instantiate(PreparedStep):
    def __init__(self, gpu: Gpu, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        self._graph = self.captured()
        self._made: list[GraphExec] = []
        self.owned.callback(gpu.destroy_graph, self._graph)
        self.owned.callback(self._destroy)

    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        if len(self._made) >= self.most_kept:
            self._destroy()
        self._made.append(self.gpu.instantiate(self._graph))

    def finish(self) -> None:
        self.run(self._made[-1])

    def _destroy(self) -> None:
        while self._made:
            self.gpu.destroy_graph_exec(self._made.pop())


class _Update(PreparedStep):
    """Takes the parameters of two graphs in turn: the nodes write one byte, or the other."""

    def __init__(self, gpu: Gpu, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        self._executable = self.instantiated()
        self._graphs = {byte: self.captured(byte) for byte in BYTES}
        for graph in self._graphs.values():
            self.owned.callback(gpu.destroy_graph, graph)

    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        self.byte = BYTES[self.byte == BYTES[0]]
        self.gpu.graph_update(self._executable, self._graphs[self.byte])

    def finish(self) -> None:
        self.run(self._executable)


class _Fresh(PreparedStep):
    """Does the step with an executable that nothing was done with yet; some are made ahead."""

    def __init__(self, gpu: Gpu, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        self._graph = self.captured()
        self._fresh: list[GraphExec] = []
        self.used: list[GraphExec] = []
        self.owned.callback(gpu.destroy_graph, self._graph)
        self.owned.callback(self._destroy)
        self._make()

    def take(self) -> GraphExec:
        """Return the next one."""
        if not self._fresh:
            self._destroy()
            self._make()
        self.used.append(self._fresh.pop())
        return self.used[-1]

    def _make(self) -> None:
        for _ in range(self.most_kept):
            self._fresh.append(self.gpu.instantiate(self._graph))

    def _destroy(self) -> None:
        for kept in (self.used, self._fresh):
            while kept:
                self.gpu.destroy_graph_exec(kept.pop())


class _Upload(_Fresh):
    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        self.gpu.graph_upload(self.take(), stream)

    def finish(self) -> None:
        self.run(self.used[-1])


class _FirstLaunch(_Fresh):
    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        self.gpu.graph_launch(self.take(), stream)


PREPARED: Mapping[str, Callable[[Gpu, Nodes], PreparedStep]] = {
    "capture": _Capture,
    "instantiate": _Instantiate,
    "update": _Update,
    "upload": _Upload,
    "first-launch": _FirstLaunch,
    "launch": _Replay,
    "run": _Replay,
    "replay": _Replay,
    "eager": _Eager,
}
