"""What was measured. Field order is the order of JSON keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from cudakit.core.bench.environment import Environment
from cudakit.core.bench.measurement import Samples
from cudakit.core.bench.method import Method
from cudakit.core.bench.roofline import Limit
from cudakit.core.bench.stats import Summary
from cudakit.core.bench.workload import Axis, Verification
from cudakit.units import Unavailable


@dataclass(frozen=True, slots=True)
class CaseResult:
    """One case of a bench: figures, every sample, and how they came about."""

    name: str  # of the bench: "gemm"
    axes: Mapping[str, Axis]  # what tells the case from its neighbours: m, n, k, dtype
    contender: str  # who ran it: "cudakit", or the library that it is compared with
    median_s: float | Unavailable  # the headline: time of one execution
    ci95_s: tuple[float, float] | Unavailable  # where the true median is, with 95 % confidence
    samples_s: tuple[float, ...]  # every time, in the order taken
    limit: Limit | Unavailable  # the least time that the device's arithmetic and wires allow
    ratio_to_limit: float | Unavailable  # limit over median, at the measured clock where known
    ratio_to_datasheet: float | Unavailable  # the same with the clock of the datasheet
    verified: bool  # whether values were compared with a reference, and are right
    verification: Verification | Unavailable  # how
    method: Method  # how it was measured
    environment: Environment  # on what
    sm_clock_hz: tuple[float, ...]  # during each sample; empty where it is not known
    discarded: int  # samples that were not kept
    converged: bool  # whether the stopping rule was met before the time ran out
    statistics: Summary | Unavailable  # of the samples
    operations: float  # of one execution; 0 where that is not what counts
    operation: str  # what they are called: "FLOP", "OP"
    bytes_moved: float  # of one execution; 0 where that is not what counts
    energy_j: float | Unavailable  # of one execution
    settings: Mapping[str, Axis]  # what was chosen besides the axes: algorithm, workspace
    rounds: tuple[int, ...] = ()  # samples of each round, which had its memory anew; empty for one

    @property
    def cycles(self) -> tuple[float, ...]:
        """Time by clock, of each sample; empty if clocks are unknown."""
        return Samples(self.samples_s, self.sm_clock_hz).cycles

    @property
    def refused(self) -> bool:
        """Whether it was not run because the device or a library does not offer it."""
        return isinstance(self.verification, Unavailable) and self.verification == self.median_s

    @property
    def key(self) -> tuple[object, ...]:
        """Identity of the case across runs."""
        return (self.name, self.contender, *sorted(self.axes.items()))

    @property
    def amount(self) -> float:
        """Operations of one execution or, without any, bytes moved; 0 for a latency."""
        return self.operations or self.bytes_moved

    @property
    def unit(self) -> str:
        """Unit of ``amount``."""
        return self.operation if self.operations else "B"

    def per_second(self, amount: float) -> float | Unavailable:
        """Return an amount of one execution as a rate per second."""
        if isinstance(self.median_s, Unavailable):
            return self.median_s
        return amount / self.median_s if self.median_s else Unavailable("it took no time")


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


@dataclass(frozen=True, slots=True)
class BenchResult:
    """What one command measured, on one device."""

    schema: ClassVar[str] = "cudakit.bench/1"
    simulated: bool  # whether nothing here is a measurement
    bench: str  # what ran: "gemm"
    time_ns: int  # when it began, since 1970
    complete: bool  # whether every case was measured; not after an interrupt
    warnings: tuple[str, ...]  # what should make a reader doubt the figures
    results: tuple[CaseResult, ...]  # a case each, in the order measured
    graphs: tuple[GraphCosts, ...] = ()  # what graphs cost and save, where any were measured
