"""Present a ProfileResult as a Document: the answer, the findings, then tables for each device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cudakit.profile.analysis import DeviceGaps
from cudakit.profile.findings import call_site_text
from cudakit.profile.report.page import explorer
from cudakit.profile.report.tables import (
    CAUSES,
    Columns,
    TableName,
    count_text,
    device_nodes,
    duration_text,
    limit_tables,
    make_table,
    share_of,
)
from cudakit.profile.result import Device, Finding, ProfileResult
from cudakit.profile.timeline import Activities
from cudakit.report.document import (
    Document,
    Node,
    Note,
    Ratio,
    Seconds,
    Section,
    Stack,
    Table,
    Text,
)
from cudakit.report.document import (
    Finding as DocumentFinding,
)
from cudakit.trace.names import short_kernel
from cudakit.trace.run_log import reasons_for_missing_events
from cudakit.units import Unavailable, capitalized, format_count, format_ratio

NO_WORK = "no GPU work was recorded"
_MAX_LISTED_GAPS = 5


def report(result: ProfileResult, *, top: int = 10, by: TableName | None = None) -> Document:
    """Return the report; tables show ``top`` rows, 0 shows all; ``by`` selects one of the work tables."""
    if not result.devices:
        return Document(capitalized(NO_WORK), tuple(_limits_of_recording(result)))
    nodes: list[Node] = [*_answers(result), *_limits_of_recording(result), *_finding_notes(result)]
    names = _device_names(result)
    sections = [
        Section(names[device.process, device.device], tuple(device_nodes(device, top, by)))
        for device in result.devices
    ]
    if len(sections) == 1:
        nodes += sections[0].nodes
    else:
        nodes += [_overview(result), *sections]
    nodes += limit_tables(result, names)
    return Document(title(result), tuple(nodes))


def page(
    result: ProfileResult, activities: Sequence[Activities], gaps: Sequence[DeviceGaps]
) -> Document:
    """Return the report with all rows and the interactive views, for an HTML page."""
    document = report(result, top=0)
    first_table = next(
        (i for i, node in enumerate(document.nodes) if not isinstance(node, Note)), 0
    )
    views = explorer(activities, gaps, result.devices)
    nodes = document.nodes
    return replace(document, nodes=(*nodes[:first_table], views, *nodes[first_table:]))


def brief_sentences(result: ProfileResult) -> tuple[str | Note, ...]:
    """Return the answer, the limits of the recording and the findings."""
    if not result.devices:
        return (capitalized(NO_WORK), *_limits_of_recording(result))
    limits = list(_limits_of_recording(result))
    return (
        title(result),
        *(note for note in limits if note.level == "error"),
        *_answers(result),
        *(note for note in limits if note.level != "error"),
        *_finding_notes(result),
    )


# --- the answer ------------------------------------------------------------------------------------


def title(result: ProfileResult) -> str:
    """Return the verdict: ``GPU busy 43% of the time, 12.3 ms a step``."""
    prefix = "Simulated: " if result.simulated else ""
    devices = result.devices
    shares = _range_text([device.measured.busy_share for device in devices])
    if len(devices) > 1:
        number, noun = _device_count(devices)
        gpus = "GPUs busy" if noun == "GPUs" else "processes: GPU busy"
        return f"{prefix}{number} {gpus} {shares} of the time"
    steps = devices[0].steps
    if steps.measured:
        count = count_text("step", steps.measured)
        time = f"the time of {count}, {duration_text(steps.median_ns)} each (median)"
    else:
        time = f"{duration_text(devices[0].measured.length_ns)}, from the first to the last work"
    return f"{prefix}GPU busy {shares} of {time}"


def _device_count(devices: Sequence[Device]) -> tuple[int, str]:
    """Return the number of GPUs, or of processes: equal CUDA indices of processes can be the same GPU."""
    if len({device.device for device in devices}) == len(devices):
        return len(devices), "GPUs"
    return len({device.process for device in devices}), "processes"


def _answers(result: ProfileResult) -> Iterator[Note]:
    """Yield why the GPUs are idle, which line has most of their time, and which rank is the last one."""
    devices = result.devices
    idle_text = _range_text([1 - device.measured.busy_share for device in devices])
    if len(devices) == 1:
        causes_text = ": " + ", ".join(_cause_texts(devices[0])) if _cause_texts(devices[0]) else ""
    else:
        causes_text = _causes_of_devices(devices)
    if causes_text:
        yield Note("info", f"Idle {idle_text}{causes_text}.")
    if largest_text := _largest_work(devices):
        count, noun = _device_count(devices)
        of_all = {1: "", 2: f" of both {noun}"}.get(count, f" of all {count} {noun}")
        yield Note("info", f"Line with the most GPU time{of_all}: {largest_text}.")
    if result.straggler:
        straggler = result.straggler
        names = _device_names(result)
        name = names.pop((straggler.process, straggler.device))
        waiting = (
            f"{next(iter(names.values()))} waited" if len(names) == 1 else "the other ranks waited"
        )
        share = share_of(straggler.last_count, straggler.matched)
        yield Note(
            "info",
            f"{capitalized(name)} started last in {format_count(straggler.last_count)} of"
            f" {format_count(straggler.matched)} measured collectives ({format_ratio(share)});"
            f" {waiting} {duration_text(straggler.waited_ns)} in total for its start.",
        )


def _largest_causes(device: Device) -> list[tuple[str, float]]:
    """Return the causes of at least 0.5% of the time with their shares of it, the largest first."""
    time = device.measured
    causes = [(name, getattr(time.idle, field)) for field, (name, _) in CAUSES.items()]
    return [
        (name, idle_ns / time.length_ns)
        for name, idle_ns in sorted(causes, key=lambda cause: -cause[1])
        if idle_ns * 200 >= time.length_ns
    ]


def _cause_texts(device: Device) -> list[str]:
    return [f"{name} {format_ratio(share)}" for name, share in _largest_causes(device)]


def _causes_of_devices(devices: Sequence[Device]) -> str:
    """Return the largest causes of the idle time of several devices as text; empty if they are busy."""
    shares_by_cause: defaultdict[str, list[float]] = defaultdict(list)
    for device in devices:
        for name, share in _largest_causes(device)[:1]:
            shares_by_cause[name].append(share)
    texts = []
    for name, shares in sorted(shares_by_cause.items(), key=lambda cause: -len(cause[1])):
        some = f" on {len(shares)} of {len(devices)} devices" if len(shares) < len(devices) else ""
        texts.append(f"{name}{some} ({_range_text(shares)})")
    return f", mostly {', '.join(texts)}" if texts else ""


def _range_text(shares: Sequence[float]) -> str:
    """Return the smallest and the largest share as text, or one share if both have the same text."""
    return " to ".join(dict.fromkeys((format_ratio(min(shares)), format_ratio(max(shares)))))


def _largest_work(devices: Sequence[Device]) -> str:
    """Return the line that launched most GPU time of all devices, as text.

    Return the kernel with most GPU time instead, unless the line has at least half of that kernel's time.
    """
    time_by_line: Counter[str] = Counter()
    time_by_kernel: Counter[str] = Counter()
    for device in devices:
        for line in device.lines:
            time_by_line[f"{call_site_text((line.frame,), 0)} in {line.frame.name}"] += line.own_ns
        for kernel in device.kernels:
            time_by_kernel[kernel.name] += kernel.total_ns
    largest = time_by_line.most_common(1)
    kernels = time_by_kernel.most_common(1)
    # The table of lines is incomplete if most work has no call stack.
    if kernels and (not largest or 2 * largest[0][1] < kernels[0][1]):
        largest = [(f"kernel {short_kernel(name)}", time) for name, time in kernels]
    work_ns = sum(device.work_ns for device in devices)
    return "".join(f"{name}, {format_ratio(share_of(time, work_ns))}" for name, time in largest)


# --- findings and limits ---------------------------------------------------------------------------


def _finding_notes(result: ProfileResult) -> Iterator[Note]:
    """Yield the findings; a finding of several devices at the same line is one note, on the worst device."""
    findings_by_site: defaultdict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in result.findings:
        findings_by_site[finding.rule, call_site_text(finding.stack, finding.site)].append(finding)
    for findings in findings_by_site.values():
        yield _finding_note(findings[0], result, findings[1:])


def _finding_note(finding: Finding, result: ProfileResult, others: Sequence[Finding]) -> Note:
    """Return a finding as a note; ``others`` have the same rule and call site on other devices."""
    names = _device_names(result)
    key = (finding.process, finding.device)
    steps = next(
        device.steps.measured for device in result.devices if (device.process, device.device) == key
    )
    if finding.saving_share is None:
        saving = " No saving is estimated, because events are missing."
    else:
        time = f"{duration_text(finding.saving_ns / max(steps, 1))}{' per step' if steps else ''}"
        saving = f" Could save up to {format_ratio(finding.saving_share)} ({time})."
    if others and finding.saving_share is not None:
        shares = [other.saving_share for other in others if other.saving_share is not None]
        other_names = list(dict.fromkeys(names[other.process, other.device] for other in others))
        have = (
            f"{len(other_names):,} other devices have"
            if len(other_names) > 1
            else f"{capitalized(other_names[0])} has"
        )
        saving += f" {have} the same problem (could save up to {_range_text(shares)})."
    prefix = f"{names[key]}: " if len(names) > 1 else ""
    places = (("change", Stack(finding.stack, finding.site)),) if finding.stack else ()
    return Note(
        "warn",
        f"{prefix}{finding.sentence}{saving}",
        remedies=finding.actions,
        finding=DocumentFinding(finding.rule, finding.estimate, places),
    )


def _limits_of_recording(result: ProfileResult) -> Iterator[Note]:
    for reason in result.incomplete:
        yield Note("error", capitalized(reason))
    if result.gaps or reasons_for_missing_events(result.incomplete):
        yield Note("warn", "Events are missing: shares and counts may be wrong.")
    gaps = sorted(result.gaps.items(), key=lambda gap: -gap[1])
    for reason, gap_count in gaps[:_MAX_LISTED_GAPS]:
        yield Note("warn", f"Not recorded: {reason} ({format_count(gap_count)} times)")
    for note in result.notes:
        yield Note("info", capitalized(note))


# --- several devices -------------------------------------------------------------------------------


def _device_names(result: ProfileResult) -> dict[tuple[int, int], str]:
    """Return a name such as cuda:0 by PID and device, with the process if the profile has several."""
    is_one_process = len({device.process for device in result.devices}) == 1
    names = {}
    for device in result.devices:
        name = f"cuda:{device.device}"
        if not is_one_process and device.rank is None:
            name = f"process {device.process} {name}"
        elif not is_one_process:
            name = f"rank {device.rank}, {name}"
        names[device.process, device.device] = name
    return names


def _overview(result: ProfileResult) -> Table:
    names = _device_names(result)
    columns: Columns[Device] = (
        ("device", "text", lambda device: Text(names[device.process, device.device])),
        ("busy", "bar", lambda device: Ratio(device.measured.busy_share)),
        (
            "median step",
            "number",
            lambda device: (
                Seconds(device.steps.median_ns / 1e9)
                if device.steps.measured
                else Unavailable("no steps were found")
            ),
        ),
        ("GPU time", "number", lambda device: Seconds(device.work_ns / 1e9)),
        ("collectives", "number", lambda device: Seconds(device.collectives_ns / 1e9)),
        ("largest idle cause", "text", lambda device: Text((*_cause_texts(device), "-")[0])),
    )
    caption = (
        "GPU time: the sum of the times of all kernels, copies and memsets that ran in the measured time; "
        "work that runs at the same time counts several times."
    )
    if any(device.collectives_ns for device in result.devices):
        caption += " Collectives: the part of the measured time in which a collective ran."
    return make_table(columns, result.devices, caption, optional=("GPU time", "collectives"))
