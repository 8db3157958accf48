"""Benchmark of CUDA graphs: the time of each step to create and launch a graph, and the time a replay saves.

Each step is verified by running the graph that the step created.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Protocol

from cudakit.bench.case import Case, PreparedLatency, Verification
from cudakit.bench.method import Axis, Mode
from cudakit.bench.spec import GraphSpec
from cudakit.bench.timer import capture
from cudakit.bench.workloads.graph_nodes import BYTES, Nodes
from cudakit.gpu.api import LEGACY, ComputeDevice, DeviceInfo, Gpu, Graph, GraphExec, Graphs, Stream

_NODES = (1, 8, 64, 512, 4096)
_SIMULATED_NODES = (1, 8, 64)
_MODES: Mapping[str, Mode] = {"run": "isolated", "replay": "host", "eager": "host"}
# Samples of the steps replay and eager are interleaved, so that both steps run at the same clock.
_INTERLEAVED_STEPS = ("replay", "eager")
# Maximum number of graphs that a step keeps. When the limit is reached, all of them are destroyed: only the
# sample in which this happens contains the time of the destruction, so the median does not.
_MAX_KEPT_GRAPHS = 64
_MAX_KEPT_NODES = 1 << 16  # Maximum number of nodes in all graphs that a step keeps.


class _GraphDevice(ComputeDevice, Graphs, Protocol):
    """A device that captures and launches graphs."""


def graph_cases(spec: GraphSpec, gpu: DeviceInfo) -> tuple[Case, ...]:
    """Return a case per topology, node kind, number of nodes, and step."""
    node_counts = spec.nodes or (_SIMULATED_NODES if gpu.simulated else _NODES)
    graphs = product(spec.topologies, spec.kinds, node_counts)
    return tuple(case for graph in graphs for case in _cases_of(spec, *graph))


def _cases_of(spec: GraphSpec, topology: str, kind: str, node_count: int) -> Iterator[Case]:
    first_step, second_step = _INTERLEAVED_STEPS
    is_paired = set(_INTERLEAVED_STEPS) <= set(spec.steps)
    for step in spec.steps:
        if is_paired and step == second_step:
            continue
        # The names of interleaved workloads must differ.
        interleaved_step = GraphStep(
            second_step, topology, kind, node_count, name=f"graph {second_step}"
        )
        yield Case(
            GraphStep(step, topology, kind, node_count),
            spec.method(_MODES.get(step, "call"), "hot"),
            baselines=(interleaved_step,) if is_paired and step == first_step else (),
        )


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One step of creating or launching a graph."""

    step: str
    topology: str
    kind: str
    nodes: int
    name: str = "graph"
    library: str = "cudakit"

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {
            "step": self.step,
            "topology": self.topology,
            "kind": self.kind,
            "nodes": self.nodes,
        }

    def prepare(self, gpu: Gpu, seed: int) -> PreparedStep:  # noqa: ARG002
        nodes = Nodes(gpu, self.topology, self.kind, self.nodes)
        try:
            return _STEPS[self.step](gpu, nodes)
        except BaseException:
            nodes.close()
            raise


class PreparedStep(PreparedLatency):
    """A step and the nodes of its graph. Verification checks that all nodes have run."""

    def __init__(self, gpu: _GraphDevice, nodes: Nodes) -> None:
        super().__init__()
        self.gpu, self.nodes = gpu, nodes
        self.byte = BYTES[0]  # The byte that the nodes write.
        self.max_kept_graphs = max(4, min(_MAX_KEPT_GRAPHS, _MAX_KEPT_NODES // nodes.count))
        self.cleanup.enter_context(closing(nodes))

    def enqueue(self, stream: Stream, set_index: int) -> None:
        """Enqueue or perform the step once; ``set_index`` is not used."""
        raise NotImplementedError

    def finish(self) -> None:
        """Run the nodes after a step that does not run them, such as capture."""

    def verify(self) -> Verification:
        self.finish()
        missing_count = self.nodes.count_missing(self.byte)
        detail = f"{missing_count} of {self.nodes.count} nodes did not run" if missing_count else ""
        error = missing_count / self.nodes.count
        return Verification(not missing_count, error, 0.0, "the byte that each node writes", detail)

    def capture_nodes(self, byte: int = BYTES[0]) -> Graph:
        """Capture the nodes on a new stream, and return the graph, which the caller destroys."""
        stream = self.gpu.stream(blocking=False)
        try:
            return capture(self.gpu, stream, partial(self.nodes.enqueue, byte=byte))
        finally:
            self.gpu.destroy_stream(stream)

    def instantiate_nodes(self) -> GraphExec:
        """Capture and instantiate the nodes; ``cleanup`` destroys the executable graph."""
        graph = self.capture_nodes()
        executable = self.gpu.instantiate(graph)
        self.gpu.destroy_graph(graph)
        self.cleanup.callback(self.gpu.destroy_graph_exec, executable)
        return executable

    def run(self, executable: GraphExec) -> None:
        """Launch an executable graph, and wait for the device."""
        self.gpu.graph_launch(executable, LEGACY)
        self.gpu.sync()


class _Eager(PreparedStep):
    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002
        self.nodes.enqueue(stream)


class _Replay(PreparedStep):
    def __init__(self, gpu: _GraphDevice, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        self._executable = self.instantiate_nodes()

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002
        self.gpu.graph_launch(self._executable, stream)


class _Capture(PreparedStep):
    def __init__(self, gpu: _GraphDevice, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        self._graphs: list[Graph] = []
        self.cleanup.callback(self._destroy_graphs)

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002
        if len(self._graphs) >= self.max_kept_graphs:
            self._destroy_graphs()
        self._graphs.append(capture(self.gpu, stream, self.nodes.enqueue))

    def finish(self) -> None:
        executable = self.gpu.instantiate(self._graphs[-1])
        self.run(executable)
        self.gpu.destroy_graph_exec(executable)

    def _destroy_graphs(self) -> None:
        while self._graphs:
            self.gpu.destroy_graph(self._graphs.pop())


class _Instantiate(PreparedStep):
    def __init__(self, gpu: _GraphDevice, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        self._graph = self.capture_nodes()
        self._executables: list[GraphExec] = []
        self.cleanup.callback(gpu.destroy_graph, self._graph)
        self.cleanup.callback(self._destroy_executables)

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002
        if len(self._executables) >= self.max_kept_graphs:
            self._destroy_executables()
        self._executables.append(self.gpu.instantiate(self._graph))

    def finish(self) -> None:
        self.run(self._executables[-1])

    def _destroy_executables(self) -> None:
        while self._executables:
            self.gpu.destroy_graph_exec(self._executables.pop())


class _Update(PreparedStep):
    """Updates an executable graph to one of two graphs in turn.

    The nodes of the two graphs write different bytes.
    """

    def __init__(self, gpu: _GraphDevice, nodes: Nodes) -> None:
        super().__init__(gpu, nodes)
        self._executable = self.instantiate_nodes()
        self._graphs = {byte: self.capture_nodes(byte) for byte in BYTES}
        for graph in self._graphs.values():
            self.cleanup.callback(gpu.destroy_graph, graph)

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002
        self.byte = BYTES[self.byte == BYTES[0]]
        self.gpu.graph_update(self._executable, self._graphs[self.byte])

    def finish(self) -> None:
        self.run(self._executable)


class _FirstUse(PreparedStep):
    """Uploads or launches executable graphs for the first time; the graphs are instantiated in advance."""

    def __init__(self, gpu: _GraphDevice, nodes: Nodes, *, uploads: bool) -> None:
        super().__init__(gpu, nodes)
        self._uploads = uploads
        self._first_use_call = gpu.graph_upload if uploads else gpu.graph_launch
        self._graph = self.capture_nodes()
        self._unused_executables: list[GraphExec] = []
        self._used_executables: list[GraphExec] = []
        self.cleanup.callback(gpu.destroy_graph, self._graph)
        self.cleanup.callback(self._destroy_executables)
        self._instantiate()

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002
        if not self._unused_executables:
            self._destroy_executables()
            self._instantiate()
        self._used_executables.append(self._unused_executables.pop())
        self._first_use_call(self._used_executables[-1], stream)

    def finish(self) -> None:
        if self._uploads:
            self.run(self._used_executables[-1])

    def _instantiate(self) -> None:
        for _ in range(self.max_kept_graphs):
            self._unused_executables.append(self.gpu.instantiate(self._graph))

    def _destroy_executables(self) -> None:
        for executables in (self._used_executables, self._unused_executables):
            while executables:
                self.gpu.destroy_graph_exec(executables.pop())


_STEPS: Mapping[str, Callable[[_GraphDevice, Nodes], PreparedStep]] = {
    "capture": _Capture,
    "instantiate": _Instantiate,
    "update": _Update,
    "upload": partial(_FirstUse, uploads=True),
    "first-launch": partial(_FirstUse, uploads=False),
    "launch": _Replay,
    "run": _Replay,
    "replay": _Replay,
    "eager": _Eager,
}
