"""The result of a fleet as a Document: the findings, then each figure beside its peers, then the hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cudakit.bench.fleet.analysis import MAX_SCORE, RATE_TOLERANCE, TIME_TOLERANCE
from cudakit.bench.fleet.result import (
    Finding,
    FleetHost,
    FleetResult,
    PeerComparison,
)
from cudakit.bench.health import SuiteResult, figure_table
from cudakit.bench.labels import join_first_names
from cudakit.report.document import (
    Column,
    Columns,
    Count,
    Document,
    Node,
    Note,
    Rate,
    Ratio,
    Seconds,
    Section,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, capitalized, format_ratio

# The columns of a comparison after the name of its subject.
_COMPARISON_COLUMNS = (
    Column("figure", "text"),
    Column("measured", "number"),
    Column("peers", "number"),
    Column("of peers", "number"),
    Column("limit", "number"),
)
_SLOW_COLUMNS = (
    Column("slower", "text"),
    *_COMPARISON_COLUMNS,
    Column("spread", "number", is_optional=True),
)
_SUBJECT_COLUMNS = (Column("of", "text"), *_COMPARISON_COLUMNS, Column("verdict", "text"))
_SLOW_CAPTION = (
    "Peers: the median of the same figure of all other GPUs of the model, or links of the same topology. Of "
    "peers: the speed relative to it. Spread: the median absolute deviation of the peers. Limit: the "
    f"lowest normal speed: {1 - RATE_TOLERANCE:.0%} of the peers for rates and "
    f"{1 / (1 + TIME_TOLERANCE):.0%} for times, or {MAX_SCORE:g} robust standard deviations of the peers "
    "below their median, if that is lower."
)
_FIGURE_COLUMNS = (
    Column("figure", "text"),
    Column("compared", "text"),
    Column("median", "number"),
    Column("spread", "number"),
    Column("slowest", "number"),
    Column("slowest is", "text"),
)
_FIGURE_CAPTION = (
    "Median and spread (median absolute deviation) of all. Slowest: its speed relative to the median of all "
    'others; "-": none is slower. The figure of a host is the median of its GPUs; a host with '
    "one GPU has rows for launch and alloc only. Links are those to the host and between GPUs. The "
    "peer copies of a GPU are the median of its links to other GPUs."
)
_HOST_COLUMNS = (
    Column("host", "text"),
    Column("GPUs", "number"),
    Column("measured", "number"),
    Column("failed", "number"),
    Column("model", "text"),
    Column("cudakit", "text", is_optional=True),
    Column("address", "text", is_optional=True),
)
# Maximum number of rows of slow figures for each finding, and in total.
_ROWS_PER_FINDING, _MAX_ROWS = 4, 40
_KIND_NAMES = {"host": "hosts", "gpu": "GPUs", "link": "links"}


def present_fleet(result: FleetResult, *, detail: bool = False) -> Document:
    """Return the report of a fleet; ``detail`` adds the figures of every GPU, for a page.

    The Columns ``comparisons`` are for exports such as CSV.
    """
    headline = _headline(result)
    nodes: list[Node] = [_comparison_columns(result.comparisons), headline]
    slower_findings = [finding for finding in result.findings if finding.kind == "slower"]
    if slower_findings:
        nodes.append(_slow_table(slower_findings))
    nodes += _finding_notes(result.findings)
    nodes += [Note("warn", f"{capitalized(warning_text)}.") for warning_text in result.warnings]
    if result.comparisons:
        nodes.append(Section("Figures of the fleet", (_figure_table(result.comparisons),)))
    nodes += _sections_without_peers(result)
    nodes.append(Section("Hosts", (_host_table(result.hosts),)))
    if detail:
        nodes += [_subject_section(host, result.comparisons) for host in result.hosts]
    return Document(_title(result), tuple(nodes), closing_nodes=(headline,))


def _title(result: FleetResult) -> str:
    gpu_count = sum(_measured_count(host) for host in result.hosts)
    prefix = "Simulated: " if result.simulated else ""
    suffix = "" if result.comparisons or result.findings else ", not compared"
    gpu_text = _of_all(gpu_count, sum(host.facts.gpu_count for host in result.hosts), "GPU")
    host_count = sum(1 for host in result.hosts if _measured_count(host))
    counts_text = f"{gpu_text} on {_of_all(host_count, len(result.hosts), 'host')}"
    return f"{prefix}bench suite, {counts_text}{suffix}"


def _headline(result: FleetResult) -> Note:
    """Return the verdict: which hosts, GPUs and links have findings."""
    if result.findings:
        slower_subjects = [
            f"{finding.subject} ({finding.slow_figures[0].figure}: "
            f"{format_ratio(finding.slow_figures[0].of_peers)} of peers)"
            for finding in result.findings
            if finding.kind == "slower"
        ]
        failed_subjects = [
            str(finding.subject) for finding in result.findings if finding.kind == "failed"
        ]
        wrong_gpu_subjects = [
            str(finding.subject) for finding in result.findings if finding.kind == "wrong-gpu"
        ]
        unhealthy_subjects = [
            str(finding.subject) for finding in result.findings if finding.kind == "unhealthy"
        ]
        clauses = [
            f"{clause}: {join_first_names(subject_names, 4)}"
            for clause, subject_names in (
                ("slower than peers", slower_subjects),
                ("failed", failed_subjects),
                ("measured another GPU", wrong_gpu_subjects),
                ("health check failed", unhealthy_subjects),
            )
            if subject_names
        ]
        return Note("error", f"{capitalized('; '.join(clauses))}.")
    if not result.comparisons:
        return Note("info", "Nothing was compared: no GPU has peers.")
    compared_subjects = {kind: set[object]() for kind in _KIND_NAMES}
    for comparison in result.comparisons:
        compared_subjects[comparison.subject.kind].add(comparison.subject)
    count_texts = [
        f"{len(subjects)} {_KIND_NAMES[kind]}"
        for kind, subjects in compared_subjects.items()
        if subjects
    ]
    return Note("ok", f"None is slower than its peers: {', '.join(count_texts)} compared.")


def _slow_table(findings: Sequence[Finding]) -> Table:
    """Return the slowest figures of each finding, with their peers."""
    rows: list[tuple[Value, ...]] = []
    omitted_count = 0
    for finding in findings:
        shown_figures = finding.slow_figures[:_ROWS_PER_FINDING] if len(rows) < _MAX_ROWS else ()
        omitted_count += len(finding.slow_figures) - len(shown_figures)
        rows += map(_slow_row, shown_figures)
    omitted_text = (
        f"{_count(omitted_count, 'more slow figure')} in the JSON. " if omitted_count else ""
    )
    return Table(_SLOW_COLUMNS, tuple(rows), omitted_text + _SLOW_CAPTION)


def _slow_row(slow_figure: PeerComparison) -> tuple[Value, ...]:
    spread = _share(slow_figure.peer_mad, slow_figure.peer_median)
    return (*_comparison_cells(slow_figure), spread)


def _comparison_cells(comparison: PeerComparison) -> tuple[Value, ...]:
    """Return the subject of a comparison, and its values in _COMPARISON_COLUMNS."""
    return (
        Text(str(comparison.subject)),
        Text(comparison.figure),
        _amount(comparison.value, comparison.unit),
        _amount(comparison.peer_median, comparison.unit),
        Ratio(comparison.of_peers),
        _limit_speed(comparison),
    )


def _finding_notes(findings: Sequence[Finding]) -> Iterator[Note]:
    """Yield the reason of each failure, and the conditions of slow subjects."""
    for finding in findings:
        remedies = (finding.hint,) if finding.hint else ()
        if finding.kind != "slower":
            conditions_text = (
                f" Likely causes: {'; '.join(finding.conditions)}." if finding.conditions else ""
            )
            yield Note("error", f"{finding.subject}: {finding.text}.{conditions_text}", remedies)
        elif finding.conditions:
            yield Note("warn", f"{finding.subject}: {'; '.join(finding.conditions)}.")


def _figure_table(comparisons: Sequence[PeerComparison]) -> Table:
    """Return a row per group of comparable figures: median, spread, and the slowest."""
    groups: dict[tuple[object, ...], list[PeerComparison]] = {}
    for comparison in comparisons:
        kind = comparison.subject.kind
        groups.setdefault(
            (comparison.figure, kind, comparison.group, *sorted(comparison.axes.items())), []
        ).append(comparison)
    has_models = len({comparison.group.partition(",")[0] for comparison in comparisons}) > 1
    return Table(
        _FIGURE_COLUMNS,
        tuple(_figure_row(group, with_model=has_models) for group in groups.values()),
        _FIGURE_CAPTION,
    )


def _figure_row(group: Sequence[PeerComparison], *, with_model: bool) -> tuple[Value, ...]:
    first_comparison, slowest_comparison = (
        group[0],
        min(group, key=lambda comparison: comparison.of_peers),
    )
    # Rounded as in the report, so that a subject whose figure is shown as 100% is not named.
    slowest_speed = round(slowest_comparison.of_peers, 3)
    figure_values = np.array([comparison.value for comparison in group])
    median = float(np.median(figure_values))
    model = f", {first_comparison.group}" if with_model else ""
    return (
        Text(first_comparison.figure),
        Text(f"{len(group)} {_KIND_NAMES[first_comparison.subject.kind]}{model}"),
        _amount(median, first_comparison.unit),
        _share(float(np.median(np.abs(figure_values - median))), median),
        Ratio(slowest_speed),
        Text(str(slowest_comparison.subject) if slowest_speed < 1 else "-"),
    )


def _host_table(hosts: Sequence[FleetHost]) -> Table:
    return Table(_HOST_COLUMNS, tuple(_host_row(host) for host in hosts))


def _host_row(host: FleetHost) -> tuple[Value, ...]:
    models = dict.fromkeys(gpu.model for gpu in host.gpus if gpu.model)
    return (
        Text(host.name),
        Count(max(host.facts.gpu_count, len(host.gpus))),
        Count(_measured_count(host)),
        Count(sum(bool(gpu.error) for gpu in host.gpus)),
        Text(", ".join(models) or "-"),
        Text(host.facts.versions.get("cudakit", "-")),
        Text(host.facts.address or "-"),
    )


def _sections_without_peers(result: FleetResult) -> Iterator[Node]:
    """Yield the figures of each measured GPU without peers. Its links may have peers."""
    compared_gpus = {
        (comparison.subject.host, comparison.subject.gpu)
        for comparison in result.comparisons
        if comparison.subject.kind == "gpu"
    }
    for host in result.hosts:
        for gpu in host.gpus:
            if isinstance(gpu.suite, SuiteResult) and (host.name, gpu.index) not in compared_gpus:
                table = figure_table(gpu.suite)
                yield Section(f"Figures of {host.name} GPU {gpu.index}, without peers", (table,))


def _subject_section(host: FleetHost, comparisons: Sequence[PeerComparison]) -> Section:
    """Return the figures of all GPUs and links of a host."""
    rows = tuple(
        (*_comparison_cells(comparison), Text("slow" if comparison.is_slow else "ok"))
        for comparison in comparisons
        if comparison.subject.host == host.name
    )
    return Section(f"All figures of {host.name}", (Table(_SUBJECT_COLUMNS, rows),), is_folded=True)


def _comparison_columns(comparisons: Sequence[PeerComparison]) -> Columns:
    """Return the Columns ``comparisons``, with a row per figure of a host, GPU or link."""
    texts_by_column = {
        "host": [comparison.subject.host for comparison in comparisons],
        "kind": [comparison.subject.kind for comparison in comparisons],
        "figure": [comparison.figure for comparison in comparisons],
        "group": [comparison.group for comparison in comparisons],
        "unit": [comparison.unit for comparison in comparisons],
    }
    number_columns = ("value", "peer_median", "peer_mad", "limit", "of_peers")
    array_by_column = {name: np.array(values, np.str_) for name, values in texts_by_column.items()}
    for name in ("gpu", "peer"):
        indices = [getattr(comparison.subject, name) for comparison in comparisons]
        array_by_column[name] = np.array(
            ["" if index is None else str(index) for index in indices], np.str_
        )
    for name in number_columns:
        values = [getattr(comparison, name) for comparison in comparisons]
        array_by_column[name] = np.array(values, np.float64)
    array_by_column["peer_count"] = np.array(
        [comparison.peer_count for comparison in comparisons], np.int64
    )
    array_by_column["slow"] = np.array([comparison.is_slow for comparison in comparisons], np.bool_)
    column_order = (
        "host",
        "gpu",
        "peer",
        "kind",
        "figure",
        "group",
        "unit",
        *number_columns,
        "peer_count",
        "slow",
    )
    return Columns("comparisons", {name: array_by_column[name] for name in column_order})


def _measured_count(host: FleetHost) -> int:
    return sum(isinstance(gpu.suite, SuiteResult) for gpu in host.gpus)


def _amount(amount: float, unit: str) -> Value:
    return Seconds(amount) if unit == "s" else Rate(amount, unit.removesuffix("/s"))


def _limit_speed(comparison: PeerComparison) -> Value:
    """Return the speed at the limit, relative to the peers."""
    if comparison.unit == "s":
        return _share(comparison.peer_median, comparison.limit)
    return _share(comparison.limit, comparison.peer_median)


def _share(amount: float, median: float) -> Value:
    return Ratio(amount / median) if median else Unavailable("the median is 0")


def _of_all(count: int, all_count: int, noun: str) -> str:
    """Return a count, and the count of all if it differs: "7 of 8 GPUs", "2 GPUs"."""
    return _count(count, noun) if count >= all_count else f"{count} of {_count(all_count, noun)}"


def _count(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"
