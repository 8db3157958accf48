"""Compare the suite results of a fleet: each figure of a host, a GPU or a link with those of its peers.

A link to the host has the figures of copies between host and GPU; a link between two GPUs has those of
peer copies. The figure of a GPU is that of its suite or the median of its links, and the figure of a host is
the median of its GPUs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from cudakit.bench.environment import Environment, environment_warnings
from cudakit.bench.fleet.result import (
    Finding,
    FleetGpu,
    FleetHost,
    FleetResult,
    PeerComparison,
    Subject,
    SubjectKind,
)
from cudakit.bench.health import SuiteResult, figure_name, measured_value
from cudakit.bench.labels import join_first_names
from cudakit.bench.result import CaseResult
from cudakit.bench.summary import environments
from cudakit.units import Unavailable, format_ratio

# A rate below 93 % of the rates of other GPUs is slow: even GPUs of one host differ by 5 %, see ``health``.
RATE_TOLERANCE = 0.07
# The tolerance of times is larger, because latencies depend on the host: a latency of one GPU differed by a
# factor of 1.9 between two processes of an otherwise idle host.
TIME_TOLERANCE = 1.0
# A value is an outlier if its modified z-score is above 3.5 (Iglewicz and Hoaglin, "How to Detect and Handle
# Outliers", 1993).
MAX_SCORE = 3.5
# For normally distributed values, the standard deviation is the MAD multiplied by this factor.
SIGMA_PER_MAD = 1.4826

_OTHER_GPU = Unavailable("the result is that of another GPU")
# Facts of an Environment that are the same on equal GPUs of equal hosts: their names in reports, and units.
_CONDITIONS = (
    ("power_limit_w", "power limit", " W"),
    ("sm_clock_max_mhz", "maximum SM clock", " MHz"),
    ("memory_clock_mhz", "memory clock", " MHz"),
    ("pcie", "PCIe link", ""),
    ("multiprocessors", "number of SMs", ""),
)
_MODE_NAMES = {"mig_mode": "MIG mode", "mps_enabled": "MPS mode", "ecc_enabled": "ECC mode"}
_MEASURE_AGAIN = (
    "measure it again: delete its file, and run cudakit bench suite --ray with the same --results"
)


def analyze(hosts: Sequence[FleetHost]) -> FleetResult:
    """Return the result of a fleet whose GPUs have suite results or errors.

    If a file has the result of another GPU than its name says, the result is a finding, and is not
    compared.
    """
    failures = [
        Finding("failed", subject, error, hint)
        for host in hosts
        for subject, error, hint in (
            (Subject("host", host.name), host.facts.error, host.facts.hint),
            *((Subject("gpu", host.name, it.index), it.error, it.hint) for it in host.gpus),
        )
        if error
    ]
    hosts, wrong_gpus = separate_wrong_results(hosts)
    figures = [figure for host in hosts for figure in _figures_of_host(host)]
    comparisons = tuple(_compare_figures(figures))
    gpus = [gpu for host in hosts for gpu in host.gpus]
    suites = [gpu.suite for gpu in gpus if isinstance(gpu.suite, SuiteResult)]
    return FleetResult(
        simulated=any(suite.simulated for suite in suites)
        or any(host.facts.simulated for host in hosts),
        complete=not any(map(_is_missing, gpus)) and all(suite.bench.complete for suite in suites),
        findings=(
            *failures,
            *wrong_gpus,
            *_slow_subjects(hosts, comparisons),
            *_unhealthy_gpus(hosts),
        ),
        warnings=tuple(_warnings(hosts, has_comparisons=bool(comparisons))),
        comparisons=comparisons,
        hosts=hosts,
    )


def _measured_gpus(hosts: Sequence[FleetHost]) -> list[tuple[Subject, str, SuiteResult]]:
    """Return each GPU with a suite result, its model and the result."""
    return [
        (Subject("gpu", host.name, gpu.index), gpu.model, gpu.suite)
        for host in hosts
        for gpu in host.gpus
        if isinstance(gpu.suite, SuiteResult) and gpu.suite.bench.results
    ]


def _is_missing(gpu: FleetGpu) -> bool:
    """Return whether a GPU has neither a result nor an error."""
    return isinstance(gpu.suite, Unavailable) and not gpu.error


# --- figures ----------------------------------------------------------------------------------------


def _figures_of_host(host: FleetHost) -> Iterator[PeerComparison]:
    """Yield the figures of the links and GPUs of a host, and those of the host itself."""
    figures = [
        figure
        for gpu in host.gpus
        if isinstance(gpu.suite, SuiteResult)
        for case in gpu.suite.bench.results
        if (figure := _figure(host, gpu, gpu.suite, case))
    ]
    peer_copies = [figure for figure in figures if figure.subject.peer is not None]
    gpu_figures = [figure for figure in figures if figure.subject.peer is None]
    gpu_figures += [figure for figure, link_count in _medians(peer_copies, "gpu") if link_count > 1]
    yield from (*gpu_figures, *peer_copies)
    for figure, gpu_count in _medians(gpu_figures, "host"):
        # Latencies depend on the CPU and the driver of the host more than on the GPU.
        if gpu_count > 1 or figure.unit == "s":
            yield figure


def _figure(
    host: FleetHost, gpu: FleetGpu, suite: SuiteResult, case: CaseResult
) -> PeerComparison | None:
    """Return the figure of a case; None if the suite reports that the case is unsupported or wrong."""
    value, unit = measured_value(case)
    if isinstance(value, Unavailable):
        return None
    peer, ci95 = case.axes.get("peer"), case.ci95_s
    axes = {name: axis for name, axis in case.axes.items() if name != "peer"}
    is_link = case.name == "copy" and case.axes.get("direction") != "d2d"
    subject = Subject("link" if is_link else "gpu", host.name, gpu.index)
    group = gpu.model
    if isinstance(peer, int):
        subject = Subject("link", host.name, gpu.index, peer)
        group = f"{gpu.model}, {_link_path(host, gpu, peer)}"
    if not isinstance(ci95, Unavailable) and case.amount:
        ci95 = (case.amount / ci95[1], case.amount / ci95[0])
    name = figure_name(replace(case, axes=axes))
    axes["quick"] = str(suite.quick).lower()
    return PeerComparison(subject, name, axes, group, unit, value, ci95)


def _link_path(host: FleetHost, gpu: FleetGpu, peer_index: int) -> str:
    """Return the topology of the link between two GPUs of a host.

    The UUID of a GPU that failed is unknown; its links have the topology that all links of the host share.
    """
    uuids = {gpu.uuid, *(peer_gpu.uuid for peer_gpu in host.gpus if peer_gpu.index == peer_index)}
    links = host.facts.links
    paths = {link.path for link in links if {link.first_uuid, link.second_uuid} == uuids}
    paths = paths or {link.path for link in links}
    return paths.pop() if len(paths) == 1 else "link of unknown topology"


def _medians(
    figures: Sequence[PeerComparison], kind: SubjectKind
) -> Iterator[tuple[PeerComparison, int]]:
    """Yield the median of the figures of each GPU or host, and the number of these figures."""
    of_subjects: dict[Subject, list[PeerComparison]] = {}
    for figure in figures:
        subject = Subject(kind, figure.subject.host, figure.subject.gpu if kind == "gpu" else None)
        of_subjects.setdefault(subject, []).append(replace(figure, subject=subject))
    for group in (group for each in of_subjects.values() for group in comparable_figures(each)):
        value = median(figure.value for figure in group)
        of_several = Unavailable("the figure is the median of several figures")
        ci95 = group[0].ci95 if len(group) == 1 else of_several
        yield replace(group[0], value=value, ci95=ci95), len(group)


def comparable_figures(figures: Sequence[PeerComparison]) -> Iterable[list[PeerComparison]]:
    """Return the figures in groups: those of a group can be compared."""
    groups: dict[tuple[object, ...], list[PeerComparison]] = {}
    for it in figures:
        key = (it.subject.kind, it.figure, it.group, it.unit, *sorted(it.axes.items()))
        groups.setdefault(key, []).append(it)
    return groups.values()


# --- comparison with peers --------------------------------------------------------------------------


def _compare_figures(figures: Sequence[PeerComparison]) -> Iterator[PeerComparison]:
    """Compare each figure with its peers; a figure without peers is left out."""
    for group in comparable_figures(figures):
        is_rate = group[0].unit != "s"
        statistics = compare_with_peers(
            [figure.value for figure in group],
            higher_is_better=is_rate,
            tolerance=RATE_TOLERANCE if is_rate else TIME_TOLERANCE,
        )
        # There are no statistics for a single figure.
        for figure, peers in zip(group, statistics, strict=False):
            peer_median, peer_mad, limit, is_outlier = peers
            share = figure.value / peer_median if peer_median else 1.0
            # If the peers' median is in the CI of the figure, chance may explain the difference.
            low, high = (1.0, 0.0) if isinstance(figure.ci95, Unavailable) else figure.ci95
            yield replace(
                figure,
                peer_count=len(group) - 1,
                peer_median=peer_median,
                peer_mad=peer_mad,
                limit=limit,
                of_peers=share if is_rate or not share else 1 / share,
                is_slow=is_outlier and not low <= peer_median <= high,
            )


def compare_with_peers(
    values: Sequence[float], *, higher_is_better: bool, tolerance: float
) -> list[tuple[float, float, float, bool]]:
    """Return for each value the median and MAD of all others, its limit, and whether it is an outlier.

    The limit is the worst value that is no outlier: it is worse than the peers' median by ``tolerance`` times
    the median, or by 3.5 robust standard deviations of the peers if that is more. The value itself does not
    affect its limit. A single value has no peers.
    """
    statistics = []
    for i in range(len(values) if len(values) > 1 else 0):
        peers = np.delete(np.array(values, np.float64), i)
        middle = float(np.median(peers))
        mad = float(np.median(np.abs(peers - middle)))
        distance = max(tolerance * middle, MAX_SCORE * SIGMA_PER_MAD * mad)
        limit = middle - distance if higher_is_better else middle + distance
        is_outlier = values[i] < limit if higher_is_better else values[i] > limit
        statistics.append((middle, mad, limit, is_outlier))
    return statistics


# --- findings ---------------------------------------------------------------------------------------


def separate_wrong_results(
    hosts: Sequence[FleetHost],
) -> tuple[tuple[FleetHost, ...], list[Finding]]:
    """Return the hosts without the results of another GPU, according to its UUID, and a finding for each.

    A GPU can be measured under the index of another one if the order of GPUs changes between two tasks, if
    two Ray nodes offer the same GPU, or if files are copied. Then the figures of one GPU must not be compared
    with themselves. The UUIDs of different hosts with simulated GPUs may be the same.
    """
    checked_hosts: list[FleetHost] = []
    findings: list[Finding] = []
    subjects_by_uuid: dict[tuple[str, str], Subject] = {}
    for host in hosts:
        gpus: list[FleetGpu] = []
        for gpu in host.gpus:
            gpus.append(gpu)
            if not gpu.uuid or not isinstance(gpu.suite, SuiteResult):
                continue
            subject = Subject("gpu", host.name, gpu.index)
            key = (host.name if gpu.suite.simulated else "", gpu.uuid)
            first = subjects_by_uuid.setdefault(key, subject)
            expected = host.facts.gpu_uuid(gpu.index)
            if expected and gpu.uuid != expected:
                text = f"its result is that of another GPU: {gpu.uuid} instead of {expected}"
            elif first != subject:
                text = f"its result is that of the same GPU as {first}: {gpu.uuid}"
            else:
                continue
            findings.append(Finding("wrong-gpu", subject, text, _MEASURE_AGAIN))
            gpus[-1] = replace(gpu, error=text, hint=_MEASURE_AGAIN, suite=_OTHER_GPU)
        checked_hosts.append(replace(host, gpus=tuple(gpus)))
    return tuple(checked_hosts), findings


def _unhealthy_gpus(hosts: Sequence[FleetHost]) -> Iterator[Finding]:
    for subject, _, suite in _measured_gpus(hosts):
        if suite.health != "fail":
            continue
        failed = []
        for figure in suite.figures:
            if figure.health != "fail":
                continue
            name, band, reached = figure.name, figure.band, figure.reached
            if (
                not isinstance(band, Unavailable)
                and not isinstance(reached, Unavailable)
                and reached
            ):
                share = band.expected / reached if band.unit == "s" else reached / band.expected
                name += f" ({format_ratio(share)} of the expected speed)"
            failed.append(name)
        text = f"the health check fails: {join_first_names(failed, 4)}"
        yield Finding("unhealthy", subject, text, "", conditions=suite.causes)


def _slow_subjects(
    hosts: Sequence[FleetHost], comparisons: Sequence[PeerComparison]
) -> list[Finding]:
    """Return a finding for each subject with slow figures, hosts first, then the slowest first.

    A slow figure of a host is not repeated for the GPUs and links of the host, and a slow figure of a GPU is
    not repeated for the links of the GPU.
    """
    slow = [comparison for comparison in comparisons if comparison.is_slow]
    slow_keys = {(comparison.subject, comparison.figure) for comparison in slow}
    slow_by_subject: dict[Subject, list[PeerComparison]] = {}
    for comparison in slow:
        subject = comparison.subject
        outer = [Subject("host", subject.host)] if subject.kind != "host" else []
        if subject.kind == "link":
            indices = (subject.gpu, subject.peer)
            outer += [Subject("gpu", subject.host, i) for i in indices if i is not None]
        if slow_keys.isdisjoint((each, comparison.figure) for each in outer):
            slow_by_subject.setdefault(subject, []).append(comparison)
    conditions = _unusual_conditions(hosts)
    findings = []
    for subject, of_subject in slow_by_subject.items():
        slowest_first = sorted(of_subject, key=lambda comparison: comparison.of_peers)
        texts = [
            f"{comparison.figure} ({format_ratio(comparison.of_peers)} of its peers)"
            for comparison in slowest_first
        ]
        text = f"slower than its peers: {join_first_names(texts, 3)}"
        causes = conditions.get((subject.host, subject.gpu), ())
        findings.append(Finding("slower", subject, text, "", tuple(slowest_first), causes))
    return sorted(
        findings,
        key=lambda finding: (finding.subject.kind != "host", finding.slow_figures[0].of_peers),
    )


def _unusual_conditions(
    hosts: Sequence[FleetHost],
) -> Mapping[tuple[str, int | None], tuple[str, ...]]:
    """Return for each GPU, and for each host, the conditions that may explain why it is slow.

    The conditions of a GPU are the warnings about its environment, and facts that most GPUs of the model do
    not share. The conditions of a host are those that all its GPUs share.
    """
    measured = [
        (*gpu, _comparable_facts(gpu[2].bench.results[0].environment))
        for gpu in _measured_gpus(hosts)
    ]
    conditions: dict[tuple[str, int | None], tuple[str, ...]] = {}
    for subject, model, suite, facts in measured:
        warnings = environment_warnings(environments(suite.bench.results))
        facts_of_all = [other for _, other_model, _, other in measured if other_model == model]
        rare = []
        for name, fact in facts.items():
            counts = Counter(other.get(name, "") for other in facts_of_all)
            common, gpu_count = counts.most_common(1)[0]
            is_rare = fact != common and common and 2 * gpu_count > len(facts_of_all)
            if is_rare and not any(name in warning for warning in warnings):
                rare.append(f"the {name} is {fact}, that of most peers {common}")
        conditions[subject.host, subject.gpu] = (*warnings, *rare)
    for host in hosts:
        of_gpus = [conditions[key] for key in conditions if key[0] == host.name] or [()]
        shared = tuple(text for text in of_gpus[0] if all(text in texts for texts in of_gpus))
        conditions[host.name, None] = shared
    return conditions


def _comparable_facts(environment: Environment) -> dict[str, str]:
    """Return the facts of an environment that equal GPUs of equal hosts share, as text with units."""
    modes, versions, host = environment.modes, environment.versions, environment.host
    facts: list[tuple[str, object, str]] = [
        *((title, getattr(environment, name), unit) for name, title, unit in _CONDITIONS),
        *((title, modes.get(name), "") for name, title in _MODE_NAMES.items()),
        *((f"{name} version", versions.get(name), "") for name in ("driver", "CUDA")),
        *((f"{name} of the host", host.get(name), "") for name in ("cpu", "kernel")),
    ]
    texts = {}
    for name, fact, unit in facts:
        if isinstance(fact, bool):
            texts[name] = "on" if fact else "off"
        elif fact is not None and not isinstance(fact, Unavailable):
            texts[name] = f"{fact:g}{unit}" if isinstance(fact, float) else f"{fact}{unit}"
    return texts


# --- warnings ---------------------------------------------------------------------------------------


def _warnings(hosts: Sequence[FleetHost], *, has_comparisons: bool) -> Iterator[str]:
    missing = [
        str(Subject("gpu", host.name, gpu.index))
        for host in hosts
        for gpu in host.gpus
        if _is_missing(gpu)
    ]
    if missing:
        yield f"not measured: {join_first_names(missing, 4)}"
    for program in dict.fromkeys(name for host in hosts for name in host.facts.versions):
        hosts_by_version: dict[str, list[str]] = {}
        for host in hosts:
            if version := host.facts.versions.get(program):
                hosts_by_version.setdefault(version, []).append(host.name)
        if len(hosts_by_version) > 1:
            versions = "; ".join(
                f"{version} on {join_first_names(names, 3)}"
                for version, names in hosts_by_version.items()
            )
            yield f"the hosts have different versions of {program}: {versions}"
    measured = _measured_gpus(hosts)
    # Benches that were not run on some GPUs, for example without their library.
    gpus_by_skipped: dict[tuple[str, str], list[str]] = {}
    for subject, _, suite in measured:
        for bench in suite.left_out:
            skipped = (bench.what, f"{bench.reason}: {bench.remedy}")
            gpus_by_skipped.setdefault(skipped, []).append(str(subject))
    for (name, reason), gpus in gpus_by_skipped.items():
        yield f"{name} was not run on {join_first_names(gpus, 3)}: {reason}"
    model_counts = Counter(model or "a GPU of unknown model" for _, model, _ in measured)
    single = [model for model, gpu_count in model_counts.items() if gpu_count == 1]
    # Without comparisons, the headline of the report states that no GPU has peers.
    if single and has_comparisons:
        yield (
            f"{join_first_names(single)}: not compared with other GPUs, because only "
            f"{'one' if len(single) == 1 else 'one of each'} was measured"
        )
    interrupted = [str(subject) for subject, _, suite in measured if not suite.bench.complete]
    if interrupted:
        yield f"the suite was interrupted on {join_first_names(interrupted, 4)}"
