"""Benchmark of CUDA graphs: the time of each step to create and launch a graph, and the time a replay saves.

Each step is verified by running the graph that it created: each node writes bytes that show that it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import ClassVar, Protocol, TypeAlias

from cudakit.arrays.bandwidth import WIDTH_BYTES, Bandwidth
from cudakit.arrays.compare import Compare
from cudakit.bench.case import (
    Case,
    Mode,
    PreparedLatency,
    Verification,
    allocate,
    create_event,
    create_stream,
)
from cudakit.bench.graph_costs import graph_costs
from cudakit.bench.labels import Axis
from cudakit.bench.result import BenchResult
from cudakit.bench.spec import Spec, check_names, check_not_empty, check_range, option
from cudakit.bench.timer import capture
from cudakit.gpu.api import (
    LEGACY,
    ComputeDevice,
    DeviceInfo,
    Gpu,
    Graph,
    GraphExec,
    Graphs,
    Ptr,
    Stream,
)

# Number of parallel branches of a fork-join; further nodes extend the branches.
BRANCH_COUNT = 8
# A node writes one of these bytes to all its memory, so that a fill node can write the same data as a kernel.
BYTES = (0xF0, 0x0F)
_WORDS_PER_NODE = WIDTH_BYTES // 4
_REPEATED_BYTE = 0x01010101  # A byte multiplied by this number is a word of four equal bytes.

# A function that enqueues one node, which fills WIDTH_BYTES at an address with a byte.
_EnqueueNode: TypeAlias = Callable[[Ptr, int, Stream], None]

TOPOLOGIES = ("chain", "fork-join")
NODE_KINDS = ("kernel", "fill", "copy")
# Steps of a graph's life. The time of a step ends when its call returns, except for run (device time), and
# for replay and eager (host time until the device has finished). first-launch launches a graph without an
# upload.
STEPS = (
    "capture",
    "instantiate",
    "update",
    "upload",
    "first-launch",
    "launch",
    "run",
    "replay",
    "eager",
)
_NODES = (1, 8, 64, 512, 4096)
_SIMULATED_NODES = (1, 8, 64)
_MAX_NODES = 100_000
_MODES: Mapping[str, Mode] = {"run": "isolated", "replay": "host", "eager": "host"}
# Samples of the steps replay and eager are interleaved, so that both steps run at the same clock.
_INTERLEAVED_STEPS = ("replay", "eager")
# Maximum number of graphs that a step keeps. When the limit is reached, all of them are destroyed: only the
# sample in which this happens contains the time of the destruction, so the median does not.
_MAX_KEPT_GRAPHS = 64
_MAX_KEPT_NODES = 1 << 16  # Maximum number of nodes in all graphs that a step keeps.


class _GraphDevice(ComputeDevice, Graphs, Protocol):
    """A device that captures and launches graphs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphSpec(Spec):
    """Measure the time to create and launch CUDA graphs, and the time that they save.

    The steps:

    \b
    capture       the host time to capture the graph
    instantiate   the host time to instantiate the captured graph
    upload        the host time to upload the instantiated graph
    update        the host time to change the parameters of all nodes
    first-launch  the host time to launch a graph that was not uploaded
    launch        the host time to launch an uploaded graph
    run           the device time of one execution of the graph
    replay        the host time until the device has executed the graph
    eager         the host time until the device has executed the same nodes
                  without a graph (samples are interleaved with those of replay)

    \b
    cudakit bench graph
    cudakit bench graph --topologies chain --nodes 1,10,100,1000
    cudakit bench graph --nodes-of kernel,fill,copy --steps launch,run
    """

    bench: ClassVar[str] = "graph"

    topologies: tuple[str, ...] = option(
        "--topologies",
        "Graph topologies: chain, fork-join.  [default: both]",
        default=TOPOLOGIES,
        choices=TOPOLOGIES,
    )
    nodes: tuple[int, ...] | None = option(
        "--nodes",
        "Number of nodes per graph, for example 1,10,100.  [default: 1,8,64,512,4096; with --gpu sim 1,8,64]",
        kind="counts",
        metavar="N,...",
    )
    kinds: tuple[str, ...] = option(
        "--nodes-of",
        "Node types: kernel, fill (memset), copy; each node writes 16 bytes.  [default: kernel]",
        default=("kernel",),
        choices=NODE_KINDS,
    )
    steps: tuple[str, ...] = option(
        "--steps",
        "Steps: capture, instantiate, update, upload, first-launch, launch, run, replay, eager.  "
        "[default: all]",
        default=STEPS,
        choices=STEPS,
    )

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_names("topology", self.topologies, TOPOLOGIES)
        check_names("node type", self.kinds, NODE_KINDS)
        check_names("step", self.steps, STEPS)
        check_not_empty("nodes", self.nodes)
        for node_count in self.nodes or ():
            check_range("--nodes", node_count, 1, _MAX_NODES)

    def cases(self, gpu: DeviceInfo) -> tuple[Case, ...]:
        """Return a case per topology, node kind, number of nodes, and step."""
        node_counts = self.nodes or (_SIMULATED_NODES if gpu.simulated else _NODES)
        graphs = product(self.topologies, self.kinds, node_counts)
        return tuple(case for graph in graphs for case in self._cases_of(*graph))

    def _cases_of(self, topology: str, kind: str, node_count: int) -> Iterator[Case]:
        first_step, second_step = _INTERLEAVED_STEPS
        is_paired = set(_INTERLEAVED_STEPS) <= set(self.steps)
        for step in self.steps:
            if is_paired and step == second_step:
                continue
            # The names of interleaved workloads must differ.
            interleaved_step = GraphStep(
                second_step, topology, kind, node_count, name=f"graph {second_step}"
            )
            yield Case(
                GraphStep(step, topology, kind, node_count),
                self.method(_MODES.get(step, "call"), "hot"),
                baselines=(interleaved_step,) if is_paired and step == first_step else (),
            )

    def conclude(self, result: BenchResult, cases: Sequence[Case]) -> BenchResult:  # noqa: ARG002
        """Add the fits of the steps' times, and the break-even points."""
        return replace(result, graphs=graph_costs(result.results))


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


# --- the nodes ----------------------------------------------------------------------------------------


class Nodes:
    """Nodes of one kind; each node writes 16 bytes that no other node writes."""

    def __init__(self, gpu: ComputeDevice, topology: str, kind: str, count: int) -> None:
        self.count = count
        self._gpu = gpu
        self._size_bytes = count * WIDTH_BYTES
        branch_count = min(BRANCH_COUNT, count) if topology == "fork-join" else 1
        with ExitStack() as cleanup:
            self._enqueue_node = _KINDS[kind](gpu, cleanup)
            self._compare = cleanup.enter_context(closing(Compare(gpu)))
            self._memory = allocate(gpu, cleanup, self._size_bytes)
            self._fork_event = create_event(gpu, cleanup)
            self._side_streams = [
                (create_stream(gpu, cleanup), create_event(gpu, cleanup))
                for _ in range(branch_count - 1)
            ]
            self._clear()
            self._cleanup = cleanup.pop_all()

    def enqueue(self, stream: Stream, byte: int = BYTES[0]) -> None:
        """Enqueue all nodes on a stream and, for a fork-join, on side streams that wait for this stream."""
        gpu = self._gpu
        branch_streams = [stream, *(side_stream for side_stream, _ in self._side_streams)]
        if self._side_streams:
            gpu.record(self._fork_event, stream)
        for side_stream, _ in self._side_streams:
            gpu.wait(side_stream, self._fork_event)
        for node_index in range(self.count):
            address = Ptr(self._memory + node_index * WIDTH_BYTES)
            self._enqueue_node(address, byte, branch_streams[node_index % len(branch_streams)])
        for side_stream, join_event in self._side_streams:
            gpu.record(join_event, side_stream)
            gpu.wait(stream, join_event)

    def count_missing(self, byte: int = BYTES[0]) -> int:
        """Return the number of nodes that did not write the byte since the previous call."""
        word = byte * _REPEATED_BYTE
        wrong_count = self._compare.count_not_equal(self._memory, word, self._size_bytes, LEGACY)
        self._clear()
        return -(-wrong_count // _WORDS_PER_NODE)

    def close(self) -> None:
        """Free the memory, and destroy streams, events and kernels."""
        self._cleanup.close()

    def _clear(self) -> None:
        self._gpu.fill(self._memory, 0, self._size_bytes, LEGACY)
        self._gpu.sync()


def _prepare_kernel_node(gpu: ComputeDevice, cleanup: ExitStack) -> _EnqueueNode:
    kernels = cleanup.enter_context(closing(Bandwidth(gpu)))
    return lambda address, byte, stream: kernels.write(
        address, byte * _REPEATED_BYTE, WIDTH_BYTES, stream
    )


def _prepare_fill_node(gpu: ComputeDevice, cleanup: ExitStack) -> _EnqueueNode:  # noqa: ARG001
    return lambda address, byte, stream: gpu.fill(address, byte, WIDTH_BYTES, stream)


def _prepare_copy_node(gpu: ComputeDevice, cleanup: ExitStack) -> _EnqueueNode:
    source_by_byte = {byte: allocate(gpu, cleanup, WIDTH_BYTES) for byte in BYTES}
    for byte, source in source_by_byte.items():
        gpu.fill(source, byte, WIDTH_BYTES, LEGACY)
    return lambda address, byte, stream: gpu.copy(
        address, source_by_byte[byte], WIDTH_BYTES, stream
    )


_KINDS: Mapping[str, Callable[[ComputeDevice, ExitStack], _EnqueueNode]] = {
    "kernel": _prepare_kernel_node,
    "fill": _prepare_fill_node,
    "copy": _prepare_copy_node,
}
