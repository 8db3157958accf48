"""Benchmark of CUDA graphs: the time of each step to create and launch a graph, and the time a replay saves.

Each step is verified by running the graph that it created: each node writes bytes that show that it ran.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from math import ceil
from statistics import median
from typing import ClassVar, Protocol, TypeAlias, TypeVar

import numpy as np

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
    exact_verification,
)
from cudakit.bench.labels import (
    Axis,
    axis_names,
    axis_title,
    axis_value,
    describe_common_axes,
    varying_axes,
)
from cudakit.bench.report.table import cases_table, cell, text_range
from cudakit.bench.result import BenchResult, BreakEven, CaseResult, GraphCosts, StepCost
from cudakit.bench.spec import Spec, check_names, check_not_empty, check_range, option
from cudakit.bench.stats import RESOLUTION, Summary
from cudakit.bench.timer import capture
from cudakit.bench.words import Words
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
from cudakit.report.document import Column, Count, Node, Ratio, Seconds, Section, Table, Text, Value
from cudakit.units import Unavailable, format_ratio

# Number of parallel branches of a fork-join; further nodes extend the branches.
BRANCH_COUNT = 8
# A node writes one of these bytes to all its memory, so that a fill node can write the same data as a kernel.
BYTES = (0xF0, 0x0F)
_WORDS_PER_NODE = WIDTH_BYTES // 4
_REPEATED_BYTE = 0x01010101  # A byte multiplied by this number is a word of four equal bytes.

_Handle = TypeVar("_Handle", Graph, GraphExec)

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
        f"Graph topologies: {', '.join(TOPOLOGIES)}.  [default: both]",
        default=TOPOLOGIES,
        choices=TOPOLOGIES,
    )
    nodes: tuple[int, ...] | None = option(
        "--nodes",
        "Number of nodes per graph, for example 1,10,100.  [default: 1,8,64,512,4096; with --gpu sim 1,8,64]",
        kind="counts",
    )
    kinds: tuple[str, ...] = option(
        "--nodes-of",
        "Node types: kernel, fill (memset), copy; each node writes 16 bytes.  [default: kernel]",
        default=("kernel",),
        choices=NODE_KINDS,
    )
    steps: tuple[str, ...] = option(
        "--steps",
        f"Steps: {', '.join(STEPS)}.  [default: all]",
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
            second = GraphStep(second_step, topology, kind, node_count, f"graph {second_step}")
            yield Case(
                GraphStep(step, topology, kind, node_count),
                self.method(_MODES.get(step, "call"), "hot"),
                baselines=(second,) if is_paired and step == first_step else (),
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
        return PreparedStep(gpu, self)


class _Enqueue(Protocol):
    """Enqueues or performs a step once; ``set_index`` is not used, because there is one buffer set."""

    def __call__(self, stream: Stream, set_index: int) -> None: ...


class PreparedStep(PreparedLatency):
    """A step and the nodes of its graph. Verification checks that all nodes have run."""

    def __init__(self, gpu: _GraphDevice, step: GraphStep) -> None:
        super().__init__()
        self.gpu = gpu
        self.byte = BYTES[0]  # The byte that the nodes write.
        self.max_kept_graphs = max(4, min(_MAX_KEPT_GRAPHS, _MAX_KEPT_NODES // step.nodes))
        # An attribute instead of a method, because the time of each Python call is part of a sample.
        self.enqueue: _Enqueue
        with self.cleanup as cleanup:
            self.nodes = Nodes(gpu, cleanup, step.topology, step.kind, step.nodes)
            self.enqueue, self._run_nodes = _STEPS[step.step](self)
            self.cleanup = cleanup.pop_all()

    def verify(self) -> Verification:
        self._run_nodes()
        missing_count = self.nodes.count_missing(self.byte)
        reference = "the byte that each node writes"
        return exact_verification(missing_count, self.nodes.count, reference, "nodes did not run")

    def capture_nodes(self, byte: int = BYTES[0]) -> Graph:
        """Capture the nodes on a new stream; ``cleanup`` destroys the graph."""
        stream = self.gpu.stream(blocking=False)
        try:
            graph = capture(self.gpu, stream, partial(self.nodes.enqueue, byte=byte))
        finally:
            self.gpu.destroy_stream(stream)
        self.cleanup.callback(self.gpu.destroy_graph, graph)
        return graph

    def instantiate_nodes(self) -> GraphExec:
        """Capture and instantiate the nodes; ``cleanup`` destroys the executable graph."""
        executable = self.gpu.instantiate(self.capture_nodes())
        self.cleanup.callback(self.gpu.destroy_graph_exec, executable)
        return executable

    def run(self, executable: GraphExec) -> None:
        """Launch an executable graph, and wait for the device."""
        self.gpu.graph_launch(executable, LEGACY)
        self.gpu.sync()

    def keep(self, destroy: Callable[[_Handle], None]) -> tuple[list[_Handle], Callable[[], None]]:
        """Return a list of graphs that the step creates, and a function that destroys all of them."""
        kept: list[_Handle] = []

        def destroy_all() -> None:
            while kept:
                destroy(kept.pop())

        self.cleanup.callback(destroy_all)
        return kept, destroy_all


# What a step enqueues, and a function that runs its nodes for the check, if the step does not.
_PreparedCalls: TypeAlias = tuple[_Enqueue, Callable[[], None]]


def _do_nothing() -> None:
    pass


def _eager(step: PreparedStep) -> _PreparedCalls:
    def enqueue(stream: Stream, set_index: int) -> None:  # noqa: ARG001
        step.nodes.enqueue(stream)

    return enqueue, _do_nothing


def _replay(step: PreparedStep) -> _PreparedCalls:
    gpu, executable = step.gpu, step.instantiate_nodes()

    def enqueue(stream: Stream, set_index: int) -> None:  # noqa: ARG001
        gpu.graph_launch(executable, stream)

    return enqueue, _do_nothing


def _capture(step: PreparedStep) -> _PreparedCalls:
    gpu, nodes = step.gpu, step.nodes
    graphs, destroy_all = step.keep(gpu.destroy_graph)

    def enqueue(stream: Stream, set_index: int) -> None:  # noqa: ARG001
        if len(graphs) >= step.max_kept_graphs:
            destroy_all()
        graphs.append(capture(gpu, stream, nodes.enqueue))

    def run_nodes() -> None:
        executable = gpu.instantiate(graphs[-1])
        step.run(executable)
        gpu.destroy_graph_exec(executable)

    return enqueue, run_nodes


def _instantiate(step: PreparedStep) -> _PreparedCalls:
    gpu, graph = step.gpu, step.capture_nodes()
    executables, destroy_all = step.keep(gpu.destroy_graph_exec)

    def enqueue(stream: Stream, set_index: int) -> None:  # noqa: ARG001
        if len(executables) >= step.max_kept_graphs:
            destroy_all()
        executables.append(gpu.instantiate(graph))

    return enqueue, lambda: step.run(executables[-1])


def _update(step: PreparedStep) -> _PreparedCalls:
    """Update an executable graph to one of two graphs in turn, whose nodes write different bytes."""
    gpu, executable = step.gpu, step.instantiate_nodes()
    graphs = {byte: step.capture_nodes(byte) for byte in BYTES}

    def enqueue(stream: Stream, set_index: int) -> None:  # noqa: ARG001
        step.byte = BYTES[step.byte == BYTES[0]]
        gpu.graph_update(executable, graphs[step.byte])

    return enqueue, lambda: step.run(executable)


def _first_use(step: PreparedStep, *, uploads: bool) -> _PreparedCalls:
    """Upload or launch executable graphs for the first time; the graphs are instantiated in advance."""
    gpu, graph = step.gpu, step.capture_nodes()
    use = gpu.graph_upload if uploads else gpu.graph_launch
    unused, _ = step.keep(gpu.destroy_graph_exec)
    used, destroy_used = step.keep(gpu.destroy_graph_exec)

    def refill() -> None:
        destroy_used()
        unused.extend(gpu.instantiate(graph) for _ in range(step.max_kept_graphs))

    def enqueue(stream: Stream, set_index: int) -> None:  # noqa: ARG001
        if not unused:
            refill()
        used.append(unused.pop())
        use(used[-1], stream)

    refill()
    return enqueue, (lambda: step.run(used[-1])) if uploads else _do_nothing


_STEPS: Mapping[str, Callable[[PreparedStep], _PreparedCalls]] = {
    "capture": _capture,
    "instantiate": _instantiate,
    "update": _update,
    "upload": partial(_first_use, uploads=True),
    "first-launch": partial(_first_use, uploads=False),
    "launch": _replay,
    "run": _replay,
    "replay": _replay,
    "eager": _eager,
}


# --- the nodes ----------------------------------------------------------------------------------------


class Nodes:
    """Nodes of one kind; each node writes 16 bytes that no other node writes."""

    def __init__(
        self, gpu: ComputeDevice, cleanup: ExitStack, topology: str, kind: str, count: int
    ) -> None:
        self.count = count
        self._gpu = gpu
        self._size_bytes = count * WIDTH_BYTES
        branch_count = min(BRANCH_COUNT, count) if topology == "fork-join" else 1
        self._enqueue_node = _KINDS[kind](gpu, cleanup)
        self._compare = cleanup.enter_context(closing(Compare(gpu)))
        self._memory = allocate(gpu, cleanup, self._size_bytes)
        self._fork_event = create_event(gpu, cleanup)
        self._side_streams = [
            (create_stream(gpu, cleanup), create_event(gpu, cleanup))
            for _ in range(branch_count - 1)
        ]
        self._clear()

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

    def _clear(self) -> None:
        self._gpu.fill(self._memory, 0, self._size_bytes, LEGACY)
        self._gpu.sync()


def _kernel_node(gpu: ComputeDevice, cleanup: ExitStack) -> _EnqueueNode:
    kernels = cleanup.enter_context(closing(Bandwidth(gpu)))
    return lambda address, byte, stream: kernels.write(
        address, byte * _REPEATED_BYTE, WIDTH_BYTES, stream
    )


def _fill_node(gpu: ComputeDevice, cleanup: ExitStack) -> _EnqueueNode:  # noqa: ARG001
    return lambda address, byte, stream: gpu.fill(address, byte, WIDTH_BYTES, stream)


def _copy_node(gpu: ComputeDevice, cleanup: ExitStack) -> _EnqueueNode:
    sources = {byte: allocate(gpu, cleanup, WIDTH_BYTES) for byte in BYTES}
    for byte, source in sources.items():
        gpu.fill(source, byte, WIDTH_BYTES, LEGACY)
    return lambda address, byte, stream: gpu.copy(address, sources[byte], WIDTH_BYTES, stream)


_KINDS: Mapping[str, Callable[[ComputeDevice, ExitStack], _EnqueueNode]] = {
    "kernel": _kernel_node,
    "fill": _fill_node,
    "copy": _copy_node,
}


# --- the costs: fits of step times against the number of nodes, and break-even points -----------------

_Time: TypeAlias = float | Unavailable
_ONE_SIZE = Unavailable("a fit needs graphs of two sizes")


def graph_costs(cases: Sequence[CaseResult]) -> tuple[GraphCosts, ...]:
    """Return the costs of graphs by topology and node kind; cases of other benches are ignored."""
    groups: dict[tuple[str, str], dict[str, dict[int, _Time]]] = {}
    for case in cases:
        axes = case.axes
        if axes.keys() >= {"step", "topology", "kind", "nodes"}:
            times = groups.setdefault((str(axes["topology"]), str(axes["kind"])), {})
            times.setdefault(str(axes["step"]), {})[int(axes["nodes"])] = case.median_s
    return tuple(
        GraphCosts(
            *graph,
            tuple(_step_cost(step, times) for step, times in times_by_step.items()),
            tuple(
                _break_even(count, {step: it.get(count) for step, it in times_by_step.items()})
                for count in sorted({count for it in times_by_step.values() for count in it})
            ),
        )
        for graph, times_by_step in groups.items()
    )


def fit(nodes: Sequence[int], times_s: Sequence[float]) -> tuple[float, float]:
    """Fit a fixed time and a time per node, neither negative, by least squares of relative errors.

    Errors are relative, because the times of small and large graphs differ by orders of magnitude. Raises
    ValueError for times that are not positive.
    """
    counts, times = np.asarray(nodes, np.float64), np.asarray(times_s, np.float64)
    if not (times > 0).all():
        raise ValueError("a time is not positive")
    fixed_term, node_term = 1 / times, counts / times
    columns = np.column_stack([fixed_term, node_term])
    fixed_s, node_s = np.linalg.lstsq(columns, np.ones_like(times), rcond=None)[0].tolist()
    if fixed_s < 0:
        return 0.0, float(node_term.sum() / (node_term @ node_term))
    if node_s < 0:
        return float(fixed_term.sum() / (fixed_term @ fixed_term)), 0.0
    return float(fixed_s), float(node_s)


def _step_cost(step: str, time_by_count: Mapping[int, _Time]) -> StepCost:
    times = {
        count: time_s
        for count, time_s in time_by_count.items()
        if not isinstance(time_s, Unavailable) and time_s > 0
    }
    if len(times) < 2:
        return StepCost(step, _ONE_SIZE, _ONE_SIZE, _ONE_SIZE)
    fixed_s, node_s = fit([*times], [*times.values()])
    deviations = (abs(it / (fixed_s + node_s * count) - 1) for count, it in times.items())
    return StepCost(step, fixed_s, node_s, max(deviations))


def _break_even(node_count: int, step_times: Mapping[str, _Time | None]) -> BreakEven:
    def signed_sum(**signs: int) -> _Time:
        total_s = 0.0
        for step, sign in signs.items():
            time_s = step_times.get(step)
            if time_s is None:
                return Unavailable(f"the step {step} was not measured")
            if isinstance(time_s, Unavailable):
                return time_s
            total_s += sign * time_s
        return total_s

    made_s, saved_s = signed_sum(capture=1, instantiate=1), signed_sum(eager=1, replay=-1)
    eager_s = signed_sum(eager=1)
    replays: _Time
    if isinstance(saved_s, Unavailable):
        replays = saved_s
    elif isinstance(made_s, Unavailable):
        replays = made_s
    # A difference of two medians below RESOLUTION is not significant.
    elif isinstance(eager_s, Unavailable) or saved_s <= RESOLUTION * eager_s:
        replays = Unavailable("a replay saves no time")
    else:
        replays = made_s / saved_s
    return BreakEven(node_count, made_s, saved_s, replays)


# --- the report ---------------------------------------------------------------------------------------

_GRAPH_COLUMNS = (Column("topology", "text"), Column("node type", "text"))
_STEPS_CAPTION = (
    "Fit: time of a step = fixed + per node × number of nodes. Max error: the largest relative deviation of "
    "a measured time from the fit."
)
_BREAK_EVENS_CAPTION = (
    "Creation: the time to capture and instantiate. Saved per replay: compared with eager launches of the "
    "same nodes; samples are interleaved. Break-even: the number of replays that save the creation time; - "
    "if a replay saves no time."
)
_DECIMALS = 12  # Times below a picosecond are rounding errors of a subtraction.


def graph_answer(result: BenchResult) -> Iterator[Node]:
    """Yield the table of cases, then a section with the costs of graphs."""
    if result.results:
        yield cases_table(result.results)
    yield from graph_section(result.graphs)


def are_graph_steps(cases: Sequence[CaseResult]) -> bool:
    """Return whether all cases are steps of graphs, with several steps and several node counts."""
    return (
        all("step" in case.axes and isinstance(case.axes.get("nodes"), int) for case in cases)
        and len({case.axes["nodes"] for case in cases}) > 1
        and len({case.axes["step"] for case in cases}) > 1
    )


def steps_table(cases: Sequence[CaseResult], with_common_axes: bool) -> Table | None:
    """Return a table with a row per step, and a column per number of nodes; None for other cases.

    ``with_common_axes`` adds columns for axes that have one value in all cases.
    """
    if not are_graph_steps(cases):
        return None
    axes = axis_names(cases) if with_common_axes else varying_axes(cases)
    axes = [name for name in axes if name not in ("step", "nodes")]
    counts = sorted({int(case.axes["nodes"]) for case in cases})
    # By graph, then by step, both in the order in which they were measured.
    rows: dict[tuple[Axis | None, ...], dict[Axis, dict[int, CaseResult]]] = {}
    for case in cases:
        steps = rows.setdefault(tuple(case.axes.get(name) for name in axes), {})
        steps.setdefault(case.axes["step"], {})[int(case.axes["nodes"])] = case
    names = [*axes, "step"]
    common = describe_common_axes(cases)
    lines = ["Median time of each step." + (f" All cases: {common}." if common else "")]
    noises = [case.statistics.noise for case in cases if isinstance(case.statistics, Summary)]
    if noises:
        noise = text_range(format_ratio(min(noises)), format_ratio(max(noises)))
        lines.append(f"±: {noise} (half the width of the 95% CI).")
    clocks = [median(case.sm_clock_hz) / 1e6 for case in cases if case.sm_clock_hz]
    if clocks:
        lines.append(f"SM clock: {text_range(f'{min(clocks):.0f}', f'{max(clocks):.0f}')} MHz.")
    return Table(
        columns=(
            *(Column(axis_title(name), "text") for name in names),
            *(Column(f"{count} node{'s' if count > 1 else ''}", "number") for count in counts),
        ),
        rows=tuple(
            (
                *(axis_value(*it) for it in zip(names, (*graph, step), strict=True)),
                *(
                    cell(Seconds, by_count[count].median_s) if count in by_count else Text("-")
                    for count in counts
                ),
            )
            for graph, steps in rows.items()
            for step, by_count in steps.items()
        ),
        caption=" ".join(lines),
    )


def graph_section(graphs: Sequence[GraphCosts]) -> Iterator[Node]:
    """Yield a section with the fits and break-even points, or nothing if no graph was measured."""

    def seconds(time_s: _Time) -> Value:
        return cell(lambda value: Seconds(round(value, _DECIMALS)), time_s)

    fits: list[tuple[Value, ...]] = []
    payoffs: list[tuple[Value, ...]] = []
    for graph in graphs:
        names = (Text(graph.topology), Text(graph.kind))
        for cost in graph.steps:
            times = seconds(cost.fixed_s), seconds(cost.node_s)
            fits.append((*names, Text(cost.step), *times, cell(Ratio, cost.deviation)))
        for payoff in graph.payoffs:
            replays = cell(lambda value: Count(ceil(value)), payoff.replays)
            # Of known times, a replay saves none.
            if not {type(payoff.saved_s), type(payoff.made_s)} & {Unavailable}:
                replays = Text("-") if isinstance(replays, Unavailable) else replays
            times = seconds(payoff.made_s), seconds(payoff.saved_s)
            payoffs.append((*names, Count(payoff.nodes), *times, replays))
    tables = (
        *_costs_table(("step", "fixed", "per node", "max error"), fits, _STEPS_CAPTION),
        *_costs_table(
            ("nodes", "creation", "saved per replay", "break-even"), payoffs, _BREAK_EVENS_CAPTION
        ),
    )
    if tables:
        yield Section("Graph costs and savings", tables)


def _costs_table(
    titles: tuple[str, ...], rows: Sequence[tuple[Value, ...]], caption: str
) -> Iterator[Table]:
    """Yield a table of the rows that have a value, if there are any."""
    columns = (Column(title, "text" if title == "step" else "number") for title in titles)
    shown = [row for row in rows if not all(isinstance(it, Unavailable) for it in row[3:])]
    missing = (it.reason for row in shown for it in row if isinstance(it, Unavailable))
    if reasons := "; ".join(dict.fromkeys(missing)):
        caption = f"{caption} n/a: {reasons}."
    if shown:
        yield Table((*_GRAPH_COLUMNS, *columns), tuple(shown), caption)


GraphSpec.words = Words(table=steps_table, answer=graph_answer)
