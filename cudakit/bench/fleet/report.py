"""The result of a fleet as a Document: the findings, then each figure beside its peers, then the hosts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from cudakit.bench.fleet.analysis import (
    MAX_SCORE,
    RATE_TOLERANCE,
    TIME_TOLERANCE,
    comparable_figures,
)
from cudakit.bench.fleet.result import Finding, FleetHost, FleetResult, PeerComparison
from cudakit.bench.health import SuiteResult, amount, figure_table
from cudakit.bench.labels import join_first_names
from cudakit.report.document import (
    Array,
    Column,
    Columns,
    Count,
    Document,
    Node,
    Note,
    Ratio,
    Section,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, capitalized, format_ratio

# The columns of a comparison after the name of its subject.
_COMPARISON_COLUMNS = (
    Column("figure", "text"),
    *(Column(title, "number") for title in ("measured", "peers", "of peers", "limit")),
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
    *(Column(title, "text") for title in ("figure", "compared")),
    *(Column(title, "number") for title in ("median", "spread", "slowest")),
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
    *(Column(title, "number") for title in ("GPUs", "measured", "failed")),
    Column("model", "text"),
    *(Column(title, "text", is_optional=True) for title in ("cudakit", "address")),
)
# Maximum number of rows of slow figures for each finding, and in total.
_ROWS_PER_FINDING, _MAX_ROWS = 4, 40
_KIND_NAMES = {"host": "hosts", "gpu": "GPUs", "link": "links"}
_FINDING_CLAUSES = {
    "slower": "slower than peers",
    "failed": "failed",
    "wrong-gpu": "measured another GPU",
    "unhealthy": "health check failed",
}


def present_fleet(result: FleetResult, *, detail: bool = False) -> Document:
    """Return the report of a fleet; ``detail`` adds the figures of every GPU, for a page.

    The Columns ``comparisons`` are for exports such as CSV.
    """
    headline = _headline(result)
    nodes: list[Node] = [_comparison_columns(result.comparisons), headline]
    if slower := [finding for finding in result.findings if finding.kind == "slower"]:
        nodes.append(_slow_table(slower))
    # The reason of each failure, and the conditions of slow subjects.
    for finding in result.findings:
        conditions = "; ".join(finding.conditions)
        if finding.kind != "slower":
            causes_text = f" Likely causes: {conditions}." if conditions else ""
            remedies = (finding.hint,) if finding.hint else ()
            text = f"{finding.subject}: {finding.text}.{causes_text}"
            nodes.append(Note("error", text, remedies))
        elif conditions:
            nodes.append(Note("warn", f"{finding.subject}: {conditions}."))
    nodes += [Note("warn", f"{capitalized(warning)}.") for warning in result.warnings]
    if result.comparisons:
        nodes.append(Section("Figures of the fleet", (_figure_table(result.comparisons),)))
    nodes += _sections_without_peers(result)
    nodes.append(Section("Hosts", (Table(_HOST_COLUMNS, tuple(map(_host_row, result.hosts))),)))
    for host in result.hosts if detail else ():
        rows = tuple(
            (*_comparison_cells(comparison), Text("slow" if comparison.is_slow else "ok"))
            for comparison in result.comparisons
            if comparison.subject.host == host.name
        )
        table = Table(_SUBJECT_COLUMNS, rows)
        nodes.append(Section(f"All figures of {host.name}", (table,), is_folded=True))
    measured_counts = list(map(_measured_count, result.hosts))
    gpu_count = sum(host.facts.gpu_count for host in result.hosts)
    title = (
        f"{'Simulated: ' if result.simulated else ''}bench suite, "
        f"{_of_all(sum(measured_counts), gpu_count, 'GPU')} on "
        f"{_of_all(sum(map(bool, measured_counts)), len(result.hosts), 'host')}"
        f"{'' if result.comparisons or result.findings else ', not compared'}"
    )
    return Document(title, tuple(nodes), closing_nodes=(headline,))


def _headline(result: FleetResult) -> Note:
    if result.findings:
        subjects: dict[str, list[str]] = {kind: [] for kind in _FINDING_CLAUSES}
        for finding in result.findings:
            text = str(finding.subject)
            if finding.kind == "slower":
                slowest = finding.slow_figures[0]
                text += f" ({slowest.figure}: {format_ratio(slowest.of_peers)} of peers)"
            subjects[finding.kind].append(text)
        clauses = [
            f"{clause}: {join_first_names(subjects[kind], 4)}"
            for kind, clause in _FINDING_CLAUSES.items()
            if subjects[kind]
        ]
        return Note("error", f"{capitalized('; '.join(clauses))}.")
    if not result.comparisons:
        return Note("info", "Nothing was compared: no GPU has peers.")
    compared = {comparison.subject for comparison in result.comparisons}
    counts = {kind: sum(subject.kind == kind for subject in compared) for kind in _KIND_NAMES}
    count_texts = [f"{count} {_KIND_NAMES[kind]}" for kind, count in counts.items() if count]
    return Note("ok", f"None is slower than its peers: {', '.join(count_texts)} compared.")


def _slow_table(findings: Sequence[Finding]) -> Table:
    rows: list[tuple[Value, ...]] = []
    omitted_count = 0
    for finding in findings:
        shown_figures = finding.slow_figures[:_ROWS_PER_FINDING] if len(rows) < _MAX_ROWS else ()
        omitted_count += len(finding.slow_figures) - len(shown_figures)
        rows += [
            (*_comparison_cells(slow), _share(slow.peer_mad, slow.peer_median))
            for slow in shown_figures
        ]
    plural = "s" * (omitted_count != 1)
    omitted = f"{omitted_count} more slow figure{plural} in the JSON. " if omitted_count else ""
    return Table(_SLOW_COLUMNS, tuple(rows), omitted + _SLOW_CAPTION)


def _comparison_cells(comparison: PeerComparison) -> tuple[Value, ...]:
    """Return the subject of a comparison, and its values in _COMPARISON_COLUMNS."""
    limit, peers = comparison.limit, comparison.peer_median
    return (
        Text(str(comparison.subject)),
        Text(comparison.figure),
        amount(comparison.value, comparison.unit),
        amount(comparison.peer_median, comparison.unit),
        Ratio(comparison.of_peers),
        # The speed at the limit, relative to the peers.
        _share(peers, limit) if comparison.unit == "s" else _share(limit, peers),
    )


def _figure_table(comparisons: Sequence[PeerComparison]) -> Table:
    """Return a row per group of comparable figures: median, spread, and the slowest."""
    has_models = len({comparison.group.partition(",")[0] for comparison in comparisons}) > 1
    rows: list[tuple[Value, ...]] = []
    for group in comparable_figures(comparisons):
        first, slowest = group[0], min(group, key=lambda comparison: comparison.of_peers)
        # Rounded as in the report, so that a subject whose figure is shown as 100% is not named.
        slowest_speed = round(slowest.of_peers, 3)
        values = np.array([comparison.value for comparison in group])
        median = float(np.median(values))
        model = f", {first.group}" if has_models else ""
        rows.append(
            (
                Text(first.figure),
                Text(f"{len(group)} {_KIND_NAMES[first.subject.kind]}{model}"),
                amount(median, first.unit),
                _share(float(np.median(np.abs(values - median))), median),
                Ratio(slowest_speed),
                Text(str(slowest.subject) if slowest_speed < 1 else "-"),
            )
        )
    return Table(_FIGURE_COLUMNS, tuple(rows), _FIGURE_CAPTION)


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


def _comparison_columns(comparisons: Sequence[PeerComparison]) -> Columns:
    """Return the Columns ``comparisons``, with a row per figure of a host, GPU or link."""
    arrays: dict[str, Array] = {}
    for name in ("host", "gpu", "peer", "kind"):
        values = [getattr(comparison.subject, name) for comparison in comparisons]
        arrays[name] = np.array(["" if it is None else str(it) for it in values], np.str_)
    for kind, names in (
        (np.str_, ("figure", "group", "unit")),
        (np.float64, ("value", "peer_median", "peer_mad", "limit", "of_peers")),
        (np.int64, ("peer_count",)),
        (np.bool_, ("is_slow",)),
    ):
        for name in names:
            values = [getattr(comparison, name) for comparison in comparisons]
            arrays[name.removeprefix("is_")] = np.array(values, kind)
    return Columns("comparisons", arrays)


def _measured_count(host: FleetHost) -> int:
    return sum(isinstance(gpu.suite, SuiteResult) for gpu in host.gpus)


def _share(part: float, median: float) -> Value:
    return Ratio(part / median) if median else Unavailable("the median is 0")


def _of_all(count: int, all_count: int, noun: str) -> str:
    """Return a count, and the count of all if it differs: "7 of 8 GPUs", "2 GPUs"."""
    text = f"{max(count, all_count)} {noun}{'s' * (max(count, all_count) != 1)}"
    return text if count >= all_count else f"{count} of {text}"
