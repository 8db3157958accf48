"""The figures of a fleet that can be compared: of links, of GPUs, and of hosts.

A link to the host has the figures of copies between host and GPU; a link between two GPUs has those of
peer copies. The figure of a GPU is that of its suite or the median of its links, and the figure of a host is
the median of its GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from cudakit.bench.fleet.result import FleetGpu, FleetHost, Subject, SubjectKind
from cudakit.bench.health import SuiteResult, figure_name, measured_value
from cudakit.bench.method import Axis
from cudakit.bench.result import CaseResult
from cudakit.units import Unavailable

_MEDIAN_OF_SEVERAL = Unavailable("the figure is the median of several figures")
# Benches whose figures depend on the CPU and the driver of the host more than on the GPU.
_HOST_BENCHES = ("launch", "alloc")
_UNKNOWN_PATH = "link of unknown topology"


@dataclass(frozen=True, slots=True)
class FleetFigure:
    """One figure of a host, a GPU or a link. Figures with the same ``key`` can be compared."""

    subject: Subject
    name: str  # Name of the figure: "copy h2d".
    axes: Mapping[str, Axis]  # Axes of the case, without those that name the peer.
    group: str  # GPU model, and topology of a link between GPUs.
    unit: str  # "FLOP/s", "OP/s", "B/s", or "s".
    value: float  # Value in ``unit``.
    ci95: tuple[float, float] | Unavailable  # 95% CI in ``unit``, in ascending order.
    is_of_host: bool  # Whether the figure depends on the host more than on the GPU.

    @property
    def key(self) -> tuple[object, ...]:
        """The properties that comparable figures share."""
        return (self.subject.kind, self.name, self.group, self.unit, *sorted(self.axes.items()))

    @property
    def higher_is_better(self) -> bool:
        """Whether the figure is a rate, not a time."""
        return self.unit != "s"


def fleet_figures(hosts: Sequence[FleetHost]) -> tuple[FleetFigure, ...]:
    """Return the figures of all links, GPUs and hosts."""
    return tuple(figure for host in hosts for figure in _figures_of_host(host))


def _figures_of_host(host: FleetHost) -> Iterator[FleetFigure]:
    """Yield the figures of the links and GPUs of a host, and those of the host itself."""
    figures = [
        figure
        for gpu in host.gpus
        if isinstance(gpu.suite, SuiteResult)
        for figure in _figures_of_gpu(host, gpu, gpu.suite)
    ]
    peer_copies = [figure for figure in figures if figure.subject.peer is not None]
    gpu_figures = [figure for figure in figures if figure.subject.peer is None]
    gpu_figures += [figure for figure, link_count in _medians(peer_copies, "gpu") if link_count > 1]
    yield from (*gpu_figures, *peer_copies)
    for figure, gpu_count in _medians(gpu_figures, "host"):
        if gpu_count > 1 or figure.is_of_host:
            yield figure


def _figures_of_gpu(host: FleetHost, gpu: FleetGpu, suite: SuiteResult) -> Iterator[FleetFigure]:
    for case in suite.bench.results:
        value, unit = measured_value(case)
        if isinstance(value, Unavailable):
            continue  # The case is not supported, or its values are wrong: the suite reports that.
        peer = case.axes.get("peer")
        axes = {name: axis for name, axis in case.axes.items() if name != "peer"}
        link_path = f", {_link_path(host, gpu, peer)}" if isinstance(peer, int) else ""
        yield FleetFigure(
            subject=_subject(host.name, gpu.index, case),
            name=figure_name(replace(case, axes=axes)),
            axes=axes | {"quick": str(suite.quick).lower()},
            group=f"{gpu.model}{link_path}",
            unit=unit,
            value=value,
            ci95=_ci95(case),
            is_of_host=case.name in _HOST_BENCHES,
        )


def _subject(host: str, gpu_index: int, case: CaseResult) -> Subject:
    peer = case.axes.get("peer")
    if isinstance(peer, int):
        return Subject("link", host, gpu_index, peer)
    is_link = case.name == "copy" and case.axes.get("direction") != "d2d"
    return Subject("link" if is_link else "gpu", host, gpu_index)


def _link_path(host: FleetHost, gpu: FleetGpu, peer_index: int) -> str:
    """Return the topology of the link between two GPUs of a host.

    The UUID of a GPU that failed is unknown; its links have the topology that all links of the host share.
    """
    uuids = {gpu.uuid, *(peer_gpu.uuid for peer_gpu in host.gpus if peer_gpu.index == peer_index)}
    links = host.facts.links
    paths = {link.path for link in links if {link.first_uuid, link.second_uuid} == uuids}
    paths = paths or {link.path for link in links}
    return paths.pop() if len(paths) == 1 else _UNKNOWN_PATH


def _ci95(case: CaseResult) -> tuple[float, float] | Unavailable:
    """Return the 95% CI of the rate or the time of a case."""
    if isinstance(case.ci95_s, Unavailable) or not case.amount:
        return case.ci95_s
    low_s, high_s = case.ci95_s
    return (case.amount / high_s, case.amount / low_s)


def _medians(
    figures: Sequence[FleetFigure], kind: SubjectKind
) -> Iterator[tuple[FleetFigure, int]]:
    """Yield the median of the figures of each GPU or host, and the number of these figures."""
    figures_by_key: dict[tuple[object, ...], list[FleetFigure]] = {}
    for figure in figures:
        subject = Subject(kind, figure.subject.host, figure.subject.gpu if kind == "gpu" else None)
        figures_by_key.setdefault((subject, *figure.key), []).append(
            replace(figure, subject=subject)
        )
    for figures_of_subject in figures_by_key.values():
        median_value = median(figure.value for figure in figures_of_subject)
        ci95 = figures_of_subject[0].ci95 if len(figures_of_subject) == 1 else _MEDIAN_OF_SEVERAL
        yield replace(figures_of_subject[0], value=median_value, ci95=ci95), len(figures_of_subject)
