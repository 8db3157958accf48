"""The result of a bench. The order of fields is the order of JSON keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from cudakit.bench.case import Method, Verification
from cudakit.bench.environment import Environment
from cudakit.bench.labels import Axis
from cudakit.bench.roofline import Limit
from cudakit.bench.stats import Summary
from cudakit.units import Unavailable

# Key in the settings of a collective case: bus bandwidth divided by algorithm bandwidth.
BUS_FACTOR = "bus_factor"


@dataclass(frozen=True, slots=True)
class CaseResult:
    """The result of one case: the figures, all samples, and how they were measured."""

    name: str  # Name of the bench: "gemm".
    axes: Mapping[str, Axis]  # Parameters that identify the case: m, n, k, dtype.
    # The library that ran the case: "cudakit" for the measured one, else the name of a baseline.
    library: str = field(metadata={"json": "contender"})
    median_s: float | Unavailable  # Median time of one execution.
    ci95_s: tuple[float, float] | Unavailable  # 95% CI of the median time.
    samples_s: tuple[float, ...]  # Times of the samples in the order measured.
    limit: Limit | Unavailable  # Lower bound of the time, from the roofline.
    ratio_to_limit: float | Unavailable  # Share of the peak, at the measured clock if known.
    ratio_to_datasheet: float | Unavailable  # Share of the peak at the datasheet's clock.
    verified: bool  # Whether computed values were compared with a reference, and are correct.
    # Comparison of the values with a reference; null for a case without values.
    verification: Verification | Unavailable
    method: Method  # How the samples were measured.
    environment: Environment  # Conditions of the measurement.
    sm_clock_hz: tuple[float, ...]  # Mean SM clock during each sample; empty if unknown.
    discarded: int  # Number of readings that were discarded.
    converged: bool  # Whether the stopping rule was met before the timeout.
    statistics: Summary | Unavailable  # Summary of the samples; null without samples.
    operations: float  # Operations of one execution; 0 for a case without arithmetic.
    operation: str  # Unit of the operations: "FLOP" or "OP".
    # Bytes that one execution reads and writes, or the size of a collective; 0 for a latency.
    bytes_moved: float
    energy_j: float | Unavailable  # Energy of one execution.
    settings: Mapping[str, Axis]  # Other parameters: algorithm, workspace.
    rounds: tuple[int, ...] = ()  # Number of samples of each round; empty for one round.
    # Reason why sampling ended: precision, stable, timeout, budget, interrupted or wrong. Empty for a case
    # that was not run, and in results of older versions.
    stop_reason: str = ""

    @property
    def cycles(self) -> tuple[float, ...]:
        """Clock cycles of each sample: its time multiplied by its SM clock. Empty if the clock is unknown."""
        return tuple(
            time_s * hz for time_s, hz in zip(self.samples_s, self.sm_clock_hz, strict=False)
        )

    @property
    def is_unsupported(self) -> bool:
        """Whether the case was not run because the device or library does not support it."""
        return isinstance(self.verification, Unavailable) and self.verification == self.median_s

    @property
    def key(self) -> tuple[object, ...]:
        """The key of the case: equal for the same case in two runs."""
        return (self.name, self.library, *sorted(self.axes.items()))

    @property
    def amount(self) -> float:
        """Operations of one execution or, for a case without arithmetic, bytes moved; 0 for a latency."""
        return self.operations or self.bytes_moved

    @property
    def unit(self) -> str:
        """Unit of ``amount``."""
        return self.operation if self.operations else "B"

    @property
    def bus_factor(self) -> float | None:
        """Bus bandwidth divided by algorithm bandwidth; None for a case that is no measured collective."""
        factor = self.settings.get(BUS_FACTOR)
        return factor if isinstance(factor, float) else None

    @property
    def bus_bandwidth(self) -> float | Unavailable:
        """Bytes per second that nccl-tests call busbw; unavailable for one rank, which uses no link."""
        if self.bus_factor is None or self.axes.get("ranks") == 1:
            return Unavailable("one rank uses no link")
        return self.per_second(self.bus_factor * self.bytes_moved)

    def per_second(self, amount: float) -> float | Unavailable:
        """Return an amount of one execution divided by the median time."""
        if isinstance(self.median_s, Unavailable):
            return self.median_s
        return amount / self.median_s if self.median_s else Unavailable("the measured time is 0")


@dataclass(frozen=True, slots=True)
class StepCost:
    """A linear fit of the time of a step: ``fixed_s + node_s * nodes``."""

    step: str  # Name of the step.
    fixed_s: float | Unavailable  # Time that does not depend on the number of nodes.
    node_s: float | Unavailable  # Additional time per node.
    deviation: float | Unavailable  # Largest relative deviation of a measured time from the fit.


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The number of replays after which a graph has saved the time of its creation."""

    nodes: int  # Number of nodes of the graph.
    made_s: float | Unavailable  # Time to capture and instantiate the graph.
    saved_s: float | Unavailable  # Time that a replay saves compared with eager launches.
    replays: float | Unavailable  # Number of replays that save the creation time.


@dataclass(frozen=True, slots=True)
class GraphCosts:
    """The costs of graphs of one topology and one kind of node."""

    topology: str  # Topology of the graph: "chain" or "fork-join".
    kind: str  # Kind of the nodes.
    steps: tuple[StepCost, ...]  # Costs of the steps in the order measured.
    payoffs: tuple[BreakEven, ...]  # Break-even points by increasing number of nodes.


@dataclass(frozen=True, slots=True)
class CopyOverlap:
    """How copies of one direction and size overlap with GEMMs on another stream."""

    direction: str  # Direction of the copies: "h2d".
    size_bytes: int  # Size of one copy.
    copies: int  # Number of copies in one execution, enqueued one after the other.
    gemms: int  # Number of GEMMs in one execution, enqueued one after the other.
    copy_s: float | Unavailable  # Time of the copies alone.
    gemm_s: float | Unavailable  # Time of the GEMMs alone.
    both_s: float | Unavailable  # Time of both together, from the first start to the last end.
    # Share of the shorter one of copy_s and gemm_s that the overlap saves: 1 if both_s is the longer one, 0
    # if both_s is their sum or more.
    overlap: float | Unavailable
    copy_during_gemm_s: float | Unavailable  # Time of the copies while GEMMs run all the time.
    gemm_during_copy_s: float | Unavailable  # Time of the GEMMs while copies run all the time.
    copy_slowdown: float | Unavailable  # Relative increase of the copies' time while GEMMs run.
    gemm_slowdown: float | Unavailable  # Relative increase of the GEMMs' time while copies run.
    copy_bytes_per_s: float | Unavailable  # Rate of the copies alone.
    gemm_flop_per_s: float | Unavailable  # Rate of the GEMMs alone.


@dataclass(frozen=True, slots=True)
class RankFacts:
    """One rank of a group that performs collective operations, with its process and its GPU."""

    host: str  # Name of the host.
    process: int  # Process id.
    device: int  # CUDA device index in the process.
    gpu: str  # Name of the GPU model.
    uuid: str  # UUID of the GPU; "" if unknown.
    pci_bus_id: str  # PCI address of the GPU; "" if unknown.
    nccl_version: str  # Version of NCCL: "2.28.9".
    nccl_path: str  # Path of NCCL's shared library.
    free_bytes: int  # Free device memory before the measurement.


@dataclass(frozen=True, slots=True)
class CollectiveRate:
    """The bandwidths of one case of collective operations, as nccl-tests define them."""

    bus_factor: float | Unavailable  # Bus bandwidth divided by algorithm bandwidth.
    algbw_bytes_per_s: float | Unavailable  # Algorithm bandwidth: the size divided by the time.
    busbw_bytes_per_s: float | Unavailable  # Bus bandwidth; unavailable for one rank.


@dataclass(frozen=True, slots=True)
class Collectives:
    """The ranks and the bandwidths of a benchmark of collective operations."""

    ranks: tuple[RankFacts, ...]  # Ranks in their order.
    variables: Mapping[str, str]  # Environment variables NCCL_* of rank 0.
    # Connection of each pair of ranks on the host of rank 0. The key "0-1" is the pair of ranks 0 and 1,
    # the value "NV18" is a path as nvidia-smi topo -m names it.
    links: Mapping[str, str]
    rates: tuple[CollectiveRate, ...]  # Bandwidths of each item of ``results``.


@dataclass(frozen=True, slots=True)
class BenchResult:
    """The result of one ``cudakit bench`` command on one device."""

    schema: ClassVar[str] = "cudakit.bench/1"
    simulated: bool  # Whether a simulated device did the work.
    bench: str  # Name of the bench: "gemm".
    time_ns: int  # Start of the run in nanoseconds since 1970.
    complete: bool  # False if the user interrupted the run.
    warnings: tuple[str, ...]  # Reasons to doubt the figures.
    results: tuple[CaseResult, ...]  # A result per case and library, in the order measured.
    graphs: tuple[GraphCosts, ...] = ()  # Costs of graphs; empty for other benches.
    collectives: Collectives | None = (
        None  # Ranks and bandwidths of collectives; null for other benches.
    )
    # How copies overlap with GEMMs, by direction and size; empty for other benches.
    overlaps: tuple[CopyOverlap, ...] = ()
    # Reason why the run ended early, such as a rank that ended or a drive that failed; "" for other runs.
    failure: str = ""
