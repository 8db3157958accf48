"""What graphs cost, and what they save: concluded from the steps that were measured."""

from __future__ import annotations

from dataclasses import dataclass

from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class StepCost:
    """The time of a step as a line over the number of nodes: ``fixed_s + node_s * nodes``."""

    step: str
    fixed_s: float | Unavailable  # of the step, whatever the graph
    node_s: float | Unavailable  # for each node
    deviation: (
        float | Unavailable
    )  # the most that a graph's time differs from the line, relative to it


@dataclass(frozen=True, slots=True)
class Payoff:
    """When a graph of one size has paid for itself."""

    nodes: int
    made_s: float | Unavailable  # to capture and instantiate it
    saved_s: float | Unavailable  # by a replay, against enqueueing the nodes one by one
    replays: float | Unavailable  # after which what was saved is what it took to make


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """All graphs of one topology and one kind of node."""

    topology: str
    kind: str  # of the nodes
    steps: tuple[StepCost, ...]  # in the order in which they were measured
    payoffs: tuple[Payoff, ...]  # from few nodes to many
