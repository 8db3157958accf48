"""Analyze the suite results of a fleet: compare each figure with its peers, and list findings."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from cudakit.bench.environment import Environment
from cudakit.bench.fleet.figures import FleetFigure, fleet_figures
from cudakit.bench.fleet.identity import without_wrong_results, wrong_gpu_findings
from cudakit.bench.fleet.outliers import PeerStatistics, compare_with_peers
from cudakit.bench.fleet.result import (
    Finding,
    FleetGpu,
    FleetHost,
    FleetResult,
    PeerComparison,
    Subject,
)
from cudakit.bench.health import Figure, SuiteResult
from cudakit.bench.labels import join_first_names
from cudakit.bench.warnings import environment_warnings, environments
from cudakit.units import Unavailable, format_ratio

# A rate below 93 % of the rates of other GPUs is slow: even GPUs of one host differ by 5 %, see ``health``.
RATE_TOLERANCE = 0.07
# The tolerance of times is larger, because latencies depend on the host: a latency of one GPU differed by a
# factor of 1.9 between two processes of an otherwise idle host.
TIME_TOLERANCE = 1.0

NOT_MEASURED = Unavailable("not measured")
# Facts of an Environment that are the same on equal GPUs of equal hosts: their names in reports, and units.
_CONDITIONS = {
    "power_limit_w": ("power limit", " W"),
    "sm_clock_max_mhz": ("maximum SM clock", " MHz"),
    "memory_clock_mhz": ("memory clock", " MHz"),
    "pcie": ("PCIe link", ""),
    "multiprocessors": ("number of SMs", ""),
}
_MODE_NAMES = {"mig_mode": "MIG mode", "mps_enabled": "MPS mode", "ecc_enabled": "ECC mode"}


def analyze(hosts: Sequence[FleetHost]) -> FleetResult:
    """Return the result of a fleet whose GPUs have suite results or errors.

    If a file has the result of another GPU than its name says, the result is a finding, and is not
    compared.
    """
    failures, identity_findings = tuple(_failures(hosts)), wrong_gpu_findings(hosts)
    hosts = without_wrong_results(hosts, identity_findings)
    comparisons = compare_figures(fleet_figures(hosts))
    gpus = [gpu for host in hosts for gpu in host.gpus]
    suites = [gpu.suite for gpu in gpus if isinstance(gpu.suite, SuiteResult)]
    return FleetResult(
        simulated=any(suite.simulated for suite in suites)
        or any(host.facts.simulated for host in hosts),
        complete=all(not is_missing(gpu) for gpu in gpus)
        and all(suite.bench.complete for suite in suites),
        findings=(
            *failures,
            *identity_findings,
            *_slow_subjects(hosts, comparisons),
            *_unhealthy_gpus(hosts),
        ),
        warnings=tuple(_warnings(hosts, has_comparisons=bool(comparisons))),
        comparisons=comparisons,
        hosts=hosts,
    )


def is_missing(gpu: FleetGpu) -> bool:
    """Return whether a GPU has neither a result nor an error."""
    return isinstance(gpu.suite, Unavailable) and not gpu.error


def compare_figures(figures: Sequence[FleetFigure]) -> tuple[PeerComparison, ...]:
    """Compare each figure with the figures of the same key; a figure without peers is left out."""
    figures_by_key: dict[tuple[object, ...], list[FleetFigure]] = {}
    for figure in figures:
        figures_by_key.setdefault(figure.key, []).append(figure)
    return tuple(
        _comparison(figure, statistics)
        for comparable_figures in figures_by_key.values()
        for figure, statistics in zip(
            comparable_figures,
            compare_with_peers(
                [figure.value for figure in comparable_figures],
                higher_is_better=comparable_figures[0].higher_is_better,
                tolerance=RATE_TOLERANCE
                if comparable_figures[0].higher_is_better
                else TIME_TOLERANCE,
            ),
            strict=False,  # There are no statistics for a single figure.
        )
    )


def _comparison(figure: FleetFigure, statistics: PeerStatistics) -> PeerComparison:
    is_outlier = statistics.has_outlier(figure.value, higher_is_better=figure.higher_is_better)
    share_of_median = figure.value / statistics.peer_median if statistics.peer_median else 1.0
    return PeerComparison(
        subject=figure.subject,
        figure=figure.name,
        axes=figure.axes,
        group=figure.group,
        unit=figure.unit,
        value=figure.value,
        ci95=figure.ci95,
        peer_count=statistics.peer_count,
        peer_median=statistics.peer_median,
        peer_mad=statistics.peer_mad,
        limit=statistics.limit,
        of_peers=share_of_median
        if figure.higher_is_better or not share_of_median
        else 1 / share_of_median,
        is_slow=is_outlier and not _includes_peers(figure, statistics.peer_median),
    )


def _includes_peers(figure: FleetFigure, peer_median: float) -> bool:
    """Return whether the peers' median is in the CI of a figure: then chance may explain the difference."""
    if isinstance(figure.ci95, Unavailable):
        return False
    ci_low, ci_high = figure.ci95
    return ci_low <= peer_median <= ci_high


# --- findings --------------------------------------------------------------------------------------


def _failures(hosts: Sequence[FleetHost]) -> Iterator[Finding]:
    for host in hosts:
        if host.facts.error:
            subject = Subject("host", host.name)
            yield Finding("failed", subject, host.facts.error, host.facts.hint)
        for gpu in host.gpus:
            if gpu.error:
                subject = Subject("gpu", host.name, gpu.index)
                yield Finding("failed", subject, gpu.error, gpu.hint)


def _unhealthy_gpus(hosts: Sequence[FleetHost]) -> Iterator[Finding]:
    for host, gpu, suite in _measured_gpus(hosts):
        if suite.health == "fail":
            failed_figures = [
                _describe_failure(figure) for figure in suite.figures if figure.health == "fail"
            ]
            yield Finding(
                "unhealthy",
                Subject("gpu", host.name, gpu.index),
                f"the health check fails: {join_first_names(failed_figures, 4)}",
                "",
                conditions=suite.causes,
            )


def _describe_failure(figure: Figure) -> str:
    """Return the name of a figure, and its share of the expected value if both are known."""
    band, measured_figure = figure.band, figure.reached
    if (
        isinstance(measured_figure, Unavailable)
        or isinstance(band, Unavailable)
        or not measured_figure
    ):
        return figure.name
    share_of_expected = (
        band.expected / measured_figure if band.unit == "s" else measured_figure / band.expected
    )
    return f"{figure.name} ({format_ratio(share_of_expected)} of the expected speed)"


def _slow_subjects(
    hosts: Sequence[FleetHost], comparisons: Sequence[PeerComparison]
) -> Iterator[Finding]:
    """Yield a finding for each subject with slow figures, hosts first, then the slowest first.

    A slow figure of a host is not repeated for the GPUs and links of the host, and a slow figure of a GPU is
    not repeated for the links of the GPU.
    """
    slow_comparisons = [comparison for comparison in comparisons if comparison.is_slow]
    slow_keys = {(comparison.subject, comparison.figure) for comparison in slow_comparisons}
    comparisons_by_subject: dict[Subject, list[PeerComparison]] = {}
    for comparison in slow_comparisons:
        outer_keys = {
            (subject, comparison.figure) for subject in _outer_subjects(comparison.subject)
        }
        if slow_keys.isdisjoint(outer_keys):
            comparisons_by_subject.setdefault(comparison.subject, []).append(comparison)
    conditions = _unusual_conditions(hosts)
    findings = []
    for subject, comparisons_of_subject in comparisons_by_subject.items():
        slowest_first = sorted(comparisons_of_subject, key=lambda comparison: comparison.of_peers)
        figure_texts = [
            f"{comparison.figure} ({format_ratio(comparison.of_peers)} of its peers)"
            for comparison in slowest_first
        ]
        findings.append(
            Finding(
                "slower",
                subject,
                f"slower than its peers: {join_first_names(figure_texts, 3)}",
                "",
                tuple(slowest_first),
                conditions.get((subject.host, subject.gpu), ()),
            )
        )
    yield from sorted(
        findings,
        key=lambda finding: (finding.subject.kind != "host", finding.slow_figures[0].of_peers),
    )


def _outer_subjects(subject: Subject) -> Iterator[Subject]:
    """Yield the host of a GPU or a link, and the GPUs of a link."""
    if subject.kind != "host":
        yield Subject("host", subject.host)
    if subject.kind == "link":
        yield Subject("gpu", subject.host, subject.gpu)
        if subject.peer is not None:
            yield Subject("gpu", subject.host, subject.peer)


def _unusual_conditions(
    hosts: Sequence[FleetHost],
) -> Mapping[tuple[str, int | None], tuple[str, ...]]:
    """Return for each GPU, and for each host, the conditions that may explain why it is slow.

    The conditions of a GPU are the warnings about its environment, and facts that most GPUs of the model do
    not share. The conditions of a host are those that all its GPUs share.
    """
    environments_of_model: dict[str, list[Environment]] = {}
    for _, gpu, suite in _measured_gpus(hosts):
        environments_of_model.setdefault(gpu.model, []).append(suite.bench.results[0].environment)
    conditions: dict[tuple[str, int | None], tuple[str, ...]] = {}
    for host, gpu, suite in _measured_gpus(hosts):
        environment = suite.bench.results[0].environment
        warnings = environment_warnings(environments(suite.bench.results))
        rare_facts = _rare_facts(environment, environments_of_model[gpu.model])
        conditions[host.name, gpu.index] = (
            *warnings,
            *(text for name, text in rare_facts if not any(name in text for text in warnings)),
        )
    for host in hosts:
        gpu_conditions = [conditions[key] for key in conditions if key[0] == host.name] or [()]
        conditions[host.name, None] = tuple(
            text
            for text in gpu_conditions[0]
            if all(text in conditions_of_gpu for conditions_of_gpu in gpu_conditions)
        )
    return conditions


def _rare_facts(
    environment: Environment, all_environments: Sequence[Environment]
) -> Iterator[tuple[str, str]]:
    """Yield the name of each fact that differs from the fact of most environments, and a sentence."""
    facts_of_all = [_comparable_facts(other_environment) for other_environment in all_environments]
    for name, fact in _comparable_facts(environment).items():
        gpu_counts = Counter(facts.get(name, "") for facts in facts_of_all)
        common_fact, gpu_count = gpu_counts.most_common(1)[0]
        if fact != common_fact and common_fact and 2 * gpu_count > len(facts_of_all):
            yield name, f"the {name} is {fact}, that of most peers {common_fact}"


def _comparable_facts(environment: Environment) -> dict[str, str]:
    """Return the facts of an environment that equal GPUs of equal hosts share, as text with units."""
    facts: dict[str, tuple[object, str]] = {
        title: (getattr(environment, name), unit) for name, (title, unit) in _CONDITIONS.items()
    }
    facts |= {title: (environment.modes.get(name), "") for name, title in _MODE_NAMES.items()}
    facts |= {
        f"{name} version": (environment.versions.get(name), "") for name in ("driver", "CUDA")
    }
    facts |= {f"{name} of the host": (environment.host.get(name), "") for name in ("cpu", "kernel")}
    return {
        name: f"{_fact_text(fact)}{unit}"
        for name, (fact, unit) in facts.items()
        if fact is not None and not isinstance(fact, Unavailable)
    }


def _fact_text(fact: object) -> str:
    if isinstance(fact, bool):
        return "on" if fact else "off"
    return f"{fact:g}" if isinstance(fact, float) else str(fact)


# --- warnings --------------------------------------------------------------------------------------


def _warnings(hosts: Sequence[FleetHost], *, has_comparisons: bool) -> Iterator[str]:
    missing_gpus = [
        str(Subject("gpu", host.name, gpu.index))
        for host in hosts
        for gpu in host.gpus
        if is_missing(gpu)
    ]
    if missing_gpus:
        yield f"not measured: {join_first_names(missing_gpus, 4)}"
    yield from _differing_versions(hosts)
    yield from _skipped_benches(hosts)
    model_counts = Counter(gpu.model for _, gpu, _ in _measured_gpus(hosts))
    single_models = [
        model or "a GPU of unknown model"
        for model, gpu_count in model_counts.items()
        if gpu_count == 1
    ]
    # Without comparisons, the headline of the report states that no GPU has peers.
    if single_models and has_comparisons:
        count_text = "one" if len(single_models) == 1 else "one of each"
        yield (
            f"{join_first_names(single_models)}: not compared with other GPUs, because only {count_text} was"
            " measured"
        )
    interrupted_gpus = [
        str(Subject("gpu", host.name, gpu.index))
        for host, gpu, suite in _measured_gpus(hosts)
        if not suite.bench.complete
    ]
    if interrupted_gpus:
        yield f"the suite was interrupted on {join_first_names(interrupted_gpus, 4)}"


def _skipped_benches(hosts: Sequence[FleetHost]) -> Iterator[str]:
    """Yield a sentence for each bench that was not run on some GPUs, for example without its library."""
    gpus_by_bench: dict[tuple[str, str], list[str]] = {}
    for host, gpu, suite in _measured_gpus(hosts):
        for bench in suite.left_out:
            subject = Subject("gpu", host.name, gpu.index)
            gpus_by_bench.setdefault((bench.what, f"{bench.reason}: {bench.remedy}"), []).append(
                str(subject)
            )
    for (bench_name, reason), gpu_names in gpus_by_bench.items():
        yield f"{bench_name} was not run on {join_first_names(gpu_names, 3)}: {reason}"


def _differing_versions(hosts: Sequence[FleetHost]) -> Iterator[str]:
    """Yield a sentence for each program whose version differs between hosts."""
    program_names = dict.fromkeys(
        program_name for host in hosts for program_name in host.facts.versions
    )
    for program_name in program_names:
        hosts_by_version: dict[str, list[str]] = {}
        for host in hosts:
            if version := host.facts.versions.get(program_name):
                hosts_by_version.setdefault(version, []).append(host.name)
        if len(hosts_by_version) > 1:
            version_texts = [
                f"{version} on {join_first_names(host_names, 3)}"
                for version, host_names in hosts_by_version.items()
            ]
            yield f"the hosts have different versions of {program_name}: {'; '.join(version_texts)}"


def _measured_gpus(
    hosts: Sequence[FleetHost],
) -> Iterator[tuple[FleetHost, FleetGpu, SuiteResult]]:
    """Yield each GPU whose suite has results, with its host."""
    for host in hosts:
        for gpu in host.gpus:
            if isinstance(gpu.suite, SuiteResult) and gpu.suite.bench.results:
                yield host, gpu, gpu.suite
