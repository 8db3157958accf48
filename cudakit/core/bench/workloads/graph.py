"""Graph: what it costs to make a graph and to launch it, and what a replay saves."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from cudakit.core.bench.case import Case
from cudakit.core.bench.method import Mode
from cudakit.core.bench.spec import GraphSpec
from cudakit.core.bench.workloads.graph_steps import PREPARED, PreparedStep
from cudakit.core.bench.workloads.topology import Nodes
from cudakit.gpu.api import Gpu

_NODES = (1, 8, 64, 512, 4096)
_SIMULATED_NODES = (1, 8, 64)
_MODES: Mapping[str, Mode] = {"run": "isolated", "replay": "host", "eager": "host"}
# Of these the difference is shown: they take turns, a sample each, so that both meet the same clock.
_PAIR = ("replay", "eager")


def graph_cases(spec: GraphSpec, gpu: Gpu) -> tuple[Case, ...]:
    """Make a case of each topology, kind and number of nodes, and step."""
    counts = spec.nodes or (_SIMULATED_NODES if gpu.simulated else _NODES)
    graphs = product(spec.topologies, spec.kinds, counts)
    return tuple(case for graph in graphs for case in _cases_of(spec, *graph))


def _cases_of(spec: GraphSpec, topology: str, kind: str, nodes: int) -> Iterator[Case]:
    first, second = _PAIR
    paired = set(_PAIR) <= set(spec.steps)
    for step in spec.steps:
        if paired and step == second:
            continue
        # Those that take turns are told apart by their names.
        other = GraphStep(second, topology, kind, nodes, name=f"graph {second}")
        yield Case(
            GraphStep(step, topology, kind, nodes),
            spec.method(_MODES.get(step, "call"), "hot"),
            rivals=(other,) if paired and step == first else (),
        )


@dataclass(frozen=True, slots=True)
class GraphStep:
    """One step in the life of a graph."""

    step: str
    topology: str
    kind: str
    nodes: int
    name: str = "graph"
    library: str = "cudakit"

    @property
    def axes(self) -> Mapping[str, str | int | float]:
        return {
            "step": self.step,
            "topology": self.topology,
            "kind": self.kind,
            "nodes": self.nodes,
        }

    def prepare(self, gpu: Gpu, seed: int) -> PreparedStep:  # noqa: ARG002
        nodes = Nodes(gpu, self.topology, self.kind, self.nodes)
        try:
            return PREPARED[self.step](gpu, nodes)
        except BaseException:
            nodes.close()
            raise
