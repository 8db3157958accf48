"""Present a ProfileResult as a Document: the answer, the findings, then tables for each device."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from cudakit.profile.activities import Activities
from cudakit.profile.analysis import DeviceGaps
from cudakit.profile.findings import call_site_text
from cudakit.profile.idle import IdleCause
from cudakit.profile.report.page import DeviceIdle, DeviceSteps, IdleTimes, explorer
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
from cudakit.profile.result import (
    Device,
    Finding,
    IdleTime,
    ProfileResult,
    Steps,
    TimeDivision,
)
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
    Value,
)
from cudakit.report.document import (
    Finding as DocumentFinding,
)
from cudakit.trace.names import short_kernel
from cudakit.trace.run_log import reasons_for_missing_events
from cudakit.units import Unavailable, capitalized, format_count, format_ratio

NO_WORK = "no GPU work was recorded"
# The columns of the causes in ``Gaps.by_cause_ns``, in the order of ``CAUSES``.
_CAUSE_COLUMNS = [IdleCause[field.removesuffix("_ns").upper()] for field in CAUSES]
_MAX_LISTED_GAPS = 5


def report(result: ProfileResult, *, top: int = 10, by: TableName | None = None) -> Document:
    """Return the report; tables show ``top`` rows, 0 shows all; ``by`` selects one of the work tables."""
    if not result.devices:
        return Document(capitalized(NO_WORK), tuple(_limits_of_recording(result)))
    nodes: list[Node] = [*_answers(result), *_limits_of_recording(result)]
    nodes += _finding_notes(result)
    sections = [
        Section(device_name(device, result), tuple(device_nodes(device, top, by)))
        for device in result.devices
    ]
    if len(sections) == 1:
        nodes += sections[0].nodes
    else:
        nodes += [_overview(result), *sections]
    device_names = {
        (device.process, device.device): device_name(device, result) for device in result.devices
    }
    nodes += limit_tables(result, device_names)
    return Document(title(result), tuple(nodes))


def page(
    result: ProfileResult, activities: Sequence[Activities], gaps: Sequence[DeviceGaps]
) -> Document:
    """Return the report with all rows and the interactive views, for an HTML page."""
    idle_times = IdleTimes(
        tuple(name for name, _ in CAUSES.values()),
        tuple(
            DeviceIdle(
                device_gaps.process,
                device_gaps.device,
                device_gaps.gaps.start_ns,
                device_gaps.gaps.end_ns,
                device_gaps.gaps.by_cause_ns[:, _CAUSE_COLUMNS],
            )
            for device_gaps in gaps
        ),
    )
    document = report(result, top=0)
    first_table_index = next(
        (i for i, node in enumerate(document.nodes) if not isinstance(node, Note)), 0
    )
    notes_before_tables, tables_and_notes = (
        document.nodes[:first_table_index],
        document.nodes[first_table_index:],
    )
    steps = [_drawn_steps(device) for device in result.devices if device.steps.steps]
    return replace(
        document,
        nodes=(*notes_before_tables, explorer(activities, idle_times, steps), *tables_and_notes),
    )


def _drawn_steps(device: Device) -> DeviceSteps:
    """Return the steps of a device for the timeline of the page."""
    steps = device.steps.steps
    return DeviceSteps(
        device.process,
        device.device,
        [step.time.start_ns for step in steps],
        [step.time.end_ns for step in steps],
        [f"{'warm-up ' if step.is_warm_up else ''}step {step.number}" for step in steps],
        [step.is_warm_up for step in steps],
    )


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
    simulated_prefix = "Simulated: " if result.simulated else ""
    devices = result.devices
    if len(devices) == 1:
        return f"{simulated_prefix}GPU busy {_busy_text(devices[0].measured)} of {_measured_time(devices[0])}"
    shares_text = _range_text([device.measured.busy_share for device in devices])
    if _has_distinct_gpus(devices):
        return f"{simulated_prefix}{len(devices)} GPUs busy {shares_text} of the time"
    return f"{simulated_prefix}{len(_processes(devices))} processes: GPU busy {shares_text} of the time"


def _has_distinct_gpus(devices: Sequence[Device]) -> bool:
    """Return whether each device is another GPU; equal CUDA indices of processes can be the same GPU."""
    return len({device.device for device in devices}) == len(devices)


def _processes(devices: Sequence[Device]) -> set[int]:
    return {device.process for device in devices}


def _busy_text(time: TimeDivision) -> str:
    return format_ratio(time.busy_share)


def _measured_time(device: Device) -> str:
    steps = device.steps
    if not steps.measured:
        return f"{duration_text(device.measured.length_ns)}, from the first to the last work"
    return f"the time of {count_text('step', steps.measured)}, {duration_text(steps.median_ns)} each (median)"


def _answers(result: ProfileResult) -> Iterator[Note]:
    """Yield why the GPUs are idle, which line has most of their time, and which rank is the last one."""
    devices = result.devices
    if idle_text := _idle_text(devices[0]) if len(devices) == 1 else _idle_range_text(devices):
        yield Note("info", idle_text)
    if largest_text := _largest_work(devices):
        noun, count = (
            ("GPUs", len(devices))
            if _has_distinct_gpus(devices)
            else ("processes", len(_processes(devices)))
        )
        devices_text = {1: "", 2: f" of both {noun}"}.get(count, f" of all {count} {noun}")
        yield Note("info", f"Line with the most GPU time{devices_text}: {largest_text}.")
    yield from _straggler(result)


def _idle_text(device: Device) -> str:
    """Return the idle share of a device and its causes as a sentence; empty if the device is busy."""
    causes = _largest_causes(device.measured)
    causes_text = ", ".join(f"{name} {format_ratio(share)}" for name, share in causes)
    idle_share_text = format_ratio(1 - device.measured.busy_share)
    return f"Idle {idle_share_text}: {causes_text}." if causes else ""


def _idle_range_text(devices: Sequence[Device]) -> str:
    """Return the idle shares of several devices and their largest causes as a sentence."""
    shares_by_cause: defaultdict[str, list[float]] = defaultdict(list)
    for device in devices:
        for name, share in _largest_causes(device.measured)[:1]:
            shares_by_cause[name].append(share)
    if not shares_by_cause:
        return ""
    idle_text = _range_text([1 - device.measured.busy_share for device in devices])
    causes = sorted(shares_by_cause.items(), key=lambda cause: -len(cause[1]))
    cause_texts = [
        f"{name} ({_range_text(shares)})"
        if len(shares) == len(devices)
        else f"{name} on {len(shares)} of {len(devices)} devices ({_range_text(shares)})"
        for name, shares in causes
    ]
    return f"Idle {idle_text}, mostly {', '.join(cause_texts)}."


def _range_text(shares: Sequence[float]) -> str:
    """Return the smallest and the largest share as text, or one share if both have the same text."""
    smallest_text, largest_text = format_ratio(min(shares)), format_ratio(max(shares))
    return smallest_text if smallest_text == largest_text else f"{smallest_text} to {largest_text}"


def _largest_work(devices: Sequence[Device]) -> str:
    """Return the line that launched most GPU time of all devices, as text.

    Return the kernel with most GPU time instead, unless the line has at least half of that kernel's time.
    """
    work_ns = sum(device.work_ns for device in devices)
    time_by_line: Counter[str] = Counter()
    time_by_kernel: Counter[str] = Counter()
    for device in devices:
        for line in device.lines:
            time_by_line[f"{call_site_text((line.frame,), 0)} in {line.frame.name}"] += line.own_ns
        for kernel in device.kernels:
            time_by_kernel[kernel.name] += kernel.total_ns
    largest_lines, largest_kernels = time_by_line.most_common(1), time_by_kernel.most_common(1)
    # The table of lines is incomplete if most work has no call stack.
    for line_text, own_ns in largest_lines:
        if not largest_kernels or 2 * own_ns >= largest_kernels[0][1]:
            return f"{line_text}, {format_ratio(share_of(own_ns, work_ns))}"
    for kernel_name, total_ns in largest_kernels:
        share_text = format_ratio(share_of(total_ns, work_ns))
        return f"kernel {short_kernel(kernel_name)}, {share_text}"
    return ""


def _largest_causes(time: TimeDivision) -> list[tuple[str, float]]:
    """Return the causes of at least 0.5% of the time with their shares of it, the largest first."""
    causes = sorted(_causes(time.idle), key=lambda cause: -cause[1])
    return [
        (name, idle_ns / time.length_ns)
        for name, idle_ns in causes
        if idle_ns * 200 >= time.length_ns
    ]


def _causes(idle: IdleTime) -> list[tuple[str, int]]:
    return [(name, getattr(idle, field)) for field, (name, _) in CAUSES.items()]


def _finding_notes(result: ProfileResult) -> Iterator[Note]:
    """Yield the findings; a finding of several devices at the same line is one note, on the worst device."""
    findings_by_site: defaultdict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in result.findings:
        findings_by_site[finding.rule, call_site_text(finding.stack, finding.site)].append(finding)
    for findings in findings_by_site.values():
        yield _finding_note(findings[0], result, findings[1:])


def _finding_note(
    finding: Finding, result: ProfileResult, other_findings: Sequence[Finding]
) -> Note:
    """Return a finding as a note; ``other_findings`` have the same rule and call site on other devices."""
    device = next(
        device
        for device in result.devices
        if (device.process, device.device) == (finding.process, finding.device)
    )
    share, steps = finding.saving_share, device.steps.measured
    saving_text = (
        f"{duration_text(finding.saving_ns / max(steps, 1))}{' per step' if steps else ''}"
    )
    saving_sentence = (
        f" Could save up to {format_ratio(share)} ({saving_text})."
        if share is not None
        else " No saving is estimated, because events are missing."
    )
    device_prefix = f"{device_name(device, result)}: " if len(result.devices) > 1 else ""
    if other_findings and share is not None:
        other_names = [
            device_name(device, result)
            for other_finding in other_findings
            for device in result.devices
            if (device.process, device.device) == (other_finding.process, other_finding.device)
        ]
        saving_sentence += f" {_other_devices_text(other_findings, other_names)}."
    places = (("change", Stack(finding.stack, finding.site)),) if finding.stack else ()
    return Note(
        "warn",
        f"{device_prefix}{finding.sentence}{saving_sentence}",
        remedies=finding.actions,
        finding=DocumentFinding(finding.rule, finding.estimate, places),
    )


def _other_devices_text(other_findings: Sequence[Finding], other_names: Sequence[str]) -> str:
    """Return which other devices have the same finding, and the range of savings, as text."""
    shares = [
        other_finding.saving_share
        for other_finding in other_findings
        if other_finding.saving_share is not None
    ]
    names = list(dict.fromkeys(other_names))
    devices_text = (
        f"{len(names):,} other devices have" if len(names) > 1 else f"{capitalized(names[0])} has"
    )
    return f"{devices_text} the same problem (could save up to {_range_text(shares)})"


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


def device_name(device: Device, result: ProfileResult) -> str:
    """Return the name of a device, such as cuda:0, with its process if the profile has several processes."""
    name = f"cuda:{device.device}"
    if len({listed_device.process for listed_device in result.devices}) == 1:
        return name
    if device.rank is None:
        return f"process {device.process} {name}"
    return f"rank {device.rank}, {name}"


def _overview(result: ProfileResult) -> Table:
    columns: Columns[Device] = (
        ("device", "text", lambda device: Text(device_name(device, result))),
        ("busy", "bar", lambda device: Ratio(device.measured.busy_share)),
        ("median step", "number", lambda device: _median_step(device.steps)),
        ("GPU time", "number", lambda device: Seconds(device.work_ns / 1e9)),
        ("collectives", "number", lambda device: Seconds(device.collectives_ns / 1e9)),
        ("largest idle cause", "text", lambda device: Text(_largest_cause(device))),
    )
    caption = (
        "GPU time: the sum of the times of all kernels, copies and memsets that ran in the measured time; "
        "work that runs at the same time counts several times."
    )
    if any(device.collectives_ns for device in result.devices):
        caption += " Collectives: the part of the measured time in which a collective ran."
    return make_table(columns, result.devices, caption, optional_titles=("GPU time", "collectives"))


def _median_step(steps: Steps) -> Value:
    return Seconds(steps.median_ns / 1e9) if steps.measured else Unavailable("no steps were found")


def _largest_cause(device: Device) -> str:
    causes = _largest_causes(device.measured)
    return f"{causes[0][0]} {format_ratio(causes[0][1])}" if causes else "-"


def _straggler(result: ProfileResult) -> Iterator[Note]:
    straggler = result.straggler
    if straggler is None:
        return
    share = straggler.last_count / straggler.matched if straggler.matched else 0.0
    place_of_straggler = (straggler.process, straggler.device)
    (name,) = (
        device_name(device, result)
        for device in result.devices
        if (device.process, device.device) == place_of_straggler
    )
    other_names = [
        device_name(device, result)
        for device in result.devices
        if (device.process, device.device) != place_of_straggler
    ]
    waiting_text = f"{other_names[0]} waited" if len(other_names) == 1 else "the other ranks waited"
    yield Note(
        "info",
        f"{capitalized(name)} started last in "
        f"{format_count(straggler.last_count)} of {format_count(straggler.matched)} measured collectives "
        f"({format_ratio(share)}); {waiting_text} {duration_text(straggler.waited_ns)}"
        " in total for its start.",
    )
