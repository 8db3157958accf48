"""The result of a fleet: the suite result of each GPU, and the GPUs, links and hosts that are slow.

The order of fields is the order of JSON keys.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal, TypeAlias

from cudakit.bench.health import SuiteResult
from cudakit.bench.method import Axis
from cudakit.units import Unavailable

SubjectKind: TypeAlias = Literal["host", "gpu", "link"]
FindingKind: TypeAlias = Literal["slower", "failed", "wrong-gpu", "unhealthy"]


@dataclass(frozen=True, slots=True)
class HostLink:
    """The connection of two GPUs of a host, as NVML reports it."""

    first_uuid: str  # UUID of one GPU.
    second_uuid: str  # UUID of the other GPU.
    path: str  # Topology as nvidia-smi abbreviates it: "NV18", "PIX", "SYS".


@dataclass(frozen=True, slots=True)
class HostFacts:
    """The facts about one host; the file host.json of a results directory."""

    schema: ClassVar[str] = "cudakit.fleet-host/1"
    name: str  # Name of the host.
    address: str = ""  # Address of the host in the Ray cluster; "" if unknown.
    gpu_count: int = 0  # Number of GPUs that the host offers to Ray; 0 if unknown.
    versions: Mapping[str, str] = field(
        default_factory=dict
    )  # Versions of cudakit, Python and Ray.
    simulated: bool = False  # Whether the GPUs are simulated.
    links: tuple[HostLink, ...] = ()  # Connections between the GPUs; empty if unknown.
    # UUIDs of the GPUs by CUDA device index, as CUDA reports them; empty if unknown.
    gpu_uuids: tuple[str, ...] = ()
    error: str = ""  # Reason why the host could not be measured; "" if it could.
    hint: str = ""  # Remedy for ``error``.

    def gpu_uuid(self, gpu_index: int) -> str:
        """Return the UUID of the GPU with a CUDA device index; "" if unknown."""
        return self.gpu_uuids[gpu_index] if gpu_index < len(self.gpu_uuids) else ""


@dataclass(frozen=True, slots=True)
class FleetGpu:
    """One GPU of a host, with the result of its suite."""

    index: int  # CUDA device index on the host.
    model: str  # Name of the GPU model; "" if unknown.
    uuid: str  # UUID of the GPU; "" if unknown.
    pci_bus_id: str  # PCI address of the GPU; "" if unknown.
    error: str  # Reason why the measurement failed; "" if it did not fail.
    hint: str  # Remedy for ``error``.
    # The result of cudakit bench suite, with all samples; null for a GPU without result.
    suite: SuiteResult | Unavailable


@dataclass(frozen=True, slots=True)
class FleetHost:
    """One host with its GPUs."""

    facts: HostFacts  # Facts about the host.
    gpus: tuple[FleetGpu, ...]  # GPUs of the host by index.

    @property
    def name(self) -> str:
        """The name of the host."""
        return self.facts.name


@dataclass(frozen=True, slots=True)
class Subject:
    """A host, a GPU, or a link of a GPU, to which a figure belongs."""

    kind: SubjectKind  # Kind of the subject: "host", "gpu" or "link".
    host: str  # Name of the host.
    gpu: int | None = None  # CUDA index of the GPU; null for a host.
    peer: int | None = None  # CUDA index of the second GPU of a link; null for a link to the host.

    def __str__(self) -> str:
        if self.kind == "host":
            return self.host
        if self.kind == "gpu":
            return f"{self.host} GPU {self.gpu}"
        link_end = "host" if self.peer is None else f"GPU {self.peer}"
        return f"{self.host} link GPU {self.gpu}-{link_end}"


@dataclass(frozen=True, slots=True)
class PeerComparison:
    """One figure of a subject, compared with the same figure of its peers."""

    subject: Subject  # Subject of the figure.
    figure: str  # Name of the figure: "copy h2d".
    axes: Mapping[str, Axis]  # Axes of the figure's case.
    group: str  # Common property of the peers: GPU model, and topology of a link.
    unit: str  # Unit of the figure: "FLOP/s", "OP/s", "B/s", or "s".
    value: float  # Figure of the subject in ``unit``; for a host, the median over its GPUs.
    # 95% CI of the figure; null for a median of several figures.
    ci95: tuple[float, float] | Unavailable
    peer_count: int  # Number of peers.
    peer_median: float  # Median of the peers in ``unit``.
    peer_mad: float  # Median absolute deviation of the peers in ``unit``.
    limit: float  # Worst value that is not slower than the peers, in ``unit``.
    of_peers: float  # Speed relative to the peers' median: 0.75 is 25% slower.
    # Whether the value is worse than the limit, and its CI worse than the peers' median.
    is_slow: bool


@dataclass(frozen=True, slots=True)
class Finding:
    """One defect of the fleet: a subject that is slower than its peers, failed, or is unhealthy.

    The kind "wrong-gpu" is a result of another GPU than the subject.
    """

    kind: FindingKind  # Kind of the finding.
    subject: Subject  # Host, GPU or link that the finding is about.
    text: str  # Sentence without capital letter and full stop.
    hint: str  # Remedy; "" if none is known.
    slow_figures: tuple[PeerComparison, ...] = ()  # Figures that are slow, the slowest first.
    # Conditions of the subject that are likely causes, or that differ from those of its peers.
    conditions: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FleetResult:
    """The result of ``cudakit bench suite`` on a fleet of GPUs."""

    schema: ClassVar[str] = "cudakit.fleet/1"
    simulated: bool  # Whether simulated devices did the work.
    complete: (
        bool  # False if GPUs have neither a result nor an error, because the run was interrupted.
    )
    findings: tuple[Finding, ...]  # Hosts, GPUs and links with defects.
    warnings: tuple[str, ...]  # Reasons to doubt the comparisons.
    comparisons: tuple[PeerComparison, ...]  # All figures that have peers.
    hosts: tuple[FleetHost, ...]  # Hosts with the suite results of their GPUs.
