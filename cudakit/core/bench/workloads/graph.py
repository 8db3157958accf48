"""Graph: what it costs to capture, instantiate and launch, and what a replay saves."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass

from cudakit.core.bench.capturing import captured
from cudakit.core.bench.case import Case
from cudakit.core.bench.method import Mode
from cudakit.core.bench.spec import GraphSpec
from cudakit.core.bench.verification import Verification
from cudakit.core.bench.workloads.latency import Latency
from cudakit.core.bench.workloads.topology import Nodes
from cudakit.gpu.api import LEGACY, Gpu, Graph, GraphExec, Stream

_NODES = (1, 10, 100, 1000)
_SIMULATED_NODES = (1, 10, 50)
# What a step makes is kept until there is so much of it: to destroy it each time would count.
_MOST_KEPT = 64


def graph_cases(spec: GraphSpec, gpu: Gpu) -> tuple[Case, ...]:
    """Make a case of each topology, number of nodes and step."""
    usual = _SIMULATED_NODES if gpu.simulated else _NODES
    return tuple(
        Case(GraphStep(step, topology, nodes), spec.method(_STEPS[step].mode, "hot"))
        for topology in spec.topologies
        for nodes in spec.nodes or usual
        for step in spec.steps
    )


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One step in the life of a graph."""

    step: str
    topology: str
    nodes: int
    name: str = "graph"

    @property
    def axes(self) -> Mapping[str, str | int | float]:
        return {"step": self.step, "topology": self.topology, "nodes": self.nodes}

    def prepare(self, gpu: Gpu, seed: int) -> PreparedStep:  # noqa: ARG002
        nodes = Nodes(gpu, self.topology, self.nodes)
        try:
            return _STEPS[self.step].make(gpu, nodes)
        except BaseException:
            nodes.close()
            raise


class PreparedStep(Latency):
    """The nodes, each of which must have run when the step is verified."""

    def __init__(self, gpu: Gpu, nodes: Nodes) -> None:
        super().__init__()
        self.gpu, self.nodes = gpu, self.owned.enter_context(closing(nodes))

    def enqueue(self, stream: Stream, index: int) -> None:
        """Do the step."""
        raise NotImplementedError

    def finish(self) -> None:
        """Have the nodes run, where the step itself does not."""

    def verify(self) -> Verification:
        self.finish()
        missing = self.nodes.take_missing()
        detail = f"{missing} of {self.nodes.count} nodes did not run" if missing else ""
        error = missing / self.nodes.count
        return Verification(not missing, error, 0.0, "what each node writes", detail)


class _Eager(PreparedStep):
    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        self.nodes.enqueue(stream)


class _Capture(PreparedStep):
    def __init__(self, gpu: Gpu, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        self._made: list[Graph] = []
        self.owned.callback(self._destroy)

    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        if len(self._made) >= _MOST_KEPT:
            self._destroy()
        self._made.append(captured(self.gpu, stream, self.nodes.enqueue))

    def finish(self) -> None:
        executable = self.gpu.instantiate(self._made[-1])
        _run(self.gpu, executable)
        self.gpu.destroy_graph_exec(executable)

    def _destroy(self) -> None:
        while self._made:
            self.gpu.destroy_graph(self._made.pop())


class _Instantiate(PreparedStep):
    def __init__(self, gpu: Gpu, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        self._graph = _captured_aside(gpu, nodes)
        self._made: list[GraphExec] = []
        self.owned.callback(gpu.destroy_graph, self._graph)
        self.owned.callback(self._destroy)

    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        if len(self._made) >= _MOST_KEPT:
            self._destroy()
        self._made.append(self.gpu.instantiate(self._graph))

    def finish(self) -> None:
        _run(self.gpu, self._made[-1])

    def _destroy(self) -> None:
        while self._made:
            self.gpu.destroy_graph_exec(self._made.pop())


class _Replay(PreparedStep):
    def __init__(self, gpu: Gpu, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        graph = _captured_aside(gpu, nodes)
        self._executable = gpu.instantiate(graph)
        gpu.destroy_graph(graph)
        self.owned.callback(gpu.destroy_graph_exec, self._executable)

    def enqueue(self, stream: Stream, index: int) -> None:  # noqa: ARG002
        self.gpu.graph_launch(self._executable, stream)


@dataclass(frozen=True, slots=True)
class _Step:
    mode: Mode
    make: Callable[[Gpu, Nodes], PreparedStep]


_STEPS: Mapping[str, _Step] = {
    "capture": _Step("call", _Capture),
    "instantiate": _Step("call", _Instantiate),
    "launch": _Step("call", _Replay),
    "run": _Step("isolated", _Replay),
    "replay": _Step("host", _Replay),
    "eager": _Step("host", _Eager),
}


def _captured_aside(gpu: Gpu, nodes: Nodes) -> Graph:
    stream = gpu.stream(blocking=False)
    try:
        return captured(gpu, stream, nodes.enqueue)
    finally:
        gpu.destroy_stream(stream)


def _run(gpu: Gpu, executable: GraphExec) -> None:
    gpu.graph_launch(executable, LEGACY)
    gpu.sync()
