"""Present a ProfileResult as a Document: the answer, the findings, then tables for each device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar

from cudakit.core.profile.activities import Activities
from cudakit.core.profile.analysis import DeviceGaps
from cudakit.core.profile.findings import place
from cudakit.core.profile.host_time import IdleCause
from cudakit.core.profile.present.page import DeviceIdle, DeviceSteps, Idle, explorer
from cudakit.core.profile.result import (
    Collective,
    Copies,
    Device,
    Finding,
    HostWait,
    IdleTime,
    Kernel,
    Limit,
    Line,
    NamedRange,
    ProfileResult,
    Steps,
    StreamWork,
    TimeDivision,
)
from cudakit.document import (
    Bytes,
    Column,
    Count,
    Document,
    Node,
    Note,
    Rate,
    Ratio,
    Seconds,
    Section,
    Stack,
    Table,
    Text,
    Value,
)
from cudakit.document import (
    Finding as DocumentFinding,
)
from cudakit.trace.kernel_names import short_kernel
from cudakit.trace.kinds import Direction
from cudakit.units import capitalized, format_count, format_ratio, format_seconds

_T = TypeVar("_T")
_Kind: TypeAlias = Literal["number", "text", "stack", "bar"]
_Columns: TypeAlias = Sequence[tuple[str, _Kind, Callable[[_T], Value]]]
TableName: TypeAlias = Literal["kernel", "line", "range"]

NO_WORK = "no GPU work was recorded"
# The name of each cause of idle time in reports, and its meaning.
CAUSES = {
    "launch_ns": ("launch-bound", "the host enqueued work more slowly than the GPU completed it"),
    "host_wait_ns": ("host waits", "the host waited for the GPU, then the GPU for new work"),
    "allocation_ns": ("memory allocation", "the host allocated or freed memory by the driver"),
    "data_loading_ns": ("data loading", "the host prepared data before it copied them to the GPU"),
    "other_host_ns": ("other host work", "the host was outside of CUDA calls for at least 1 ms"),
    "dependency_ns": ("dependencies", "enqueued work waited for other streams or its predecessor"),
    "unknown_ns": ("unknown", "the launch of the next work was not recorded"),
    "not_started_ns": ("before the first work", "no work had been enqueued yet"),
    "ended_ns": ("after the last work", "no more work was enqueued"),
}
# The columns of the causes in ``Gaps.by_cause_ns``, in the order of ``CAUSES``.
_CAUSE_COLUMNS = [IdleCause[field.removesuffix("_ns").upper()] for field in CAUSES]
_DIRECTIONS = {
    Direction.HOST_TO_DEVICE: "host to device",
    Direction.DEVICE_TO_HOST: "device to host",
    Direction.DEVICE_TO_DEVICE: "within the device",
    Direction.HOST_TO_HOST: "host to host",
}
_MAX_LISTED_GAPS = 5


def report(result: ProfileResult, *, top: int = 10, by: TableName | None = None) -> Document:
    """Return the report; tables show ``top`` rows, 0 shows all; ``by`` selects one of the work tables."""
    if not result.devices:
        return Document(capitalized(NO_WORK), tuple(_limits_of_recording(result)))
    nodes: list[Node] = [*_answers(result), *_limits_of_recording(result)]
    nodes += _finding_notes(result)
    sections = [
        Section(device_name(device, result), tuple(_device_nodes(device, top, by)))
        for device in result.devices
    ]
    if len(sections) == 1:
        nodes += sections[0].nodes
    else:
        nodes += [_overview(result), *_straggler(result), *sections]
    nodes += _limit_table(result)
    return Document(title(result), tuple(nodes))


def page(
    result: ProfileResult, activities: Sequence[Activities], gaps: Sequence[DeviceGaps]
) -> Document:
    """Return the report with all rows and the interactive views, for an HTML page."""
    idle = Idle(
        tuple(name for name, _ in CAUSES.values()),
        tuple(
            DeviceIdle(
                one.process,
                one.device,
                one.gaps.start_ns,
                one.gaps.end_ns,
                one.gaps.by_cause_ns[:, _CAUSE_COLUMNS],
            )
            for one in gaps
        ),
    )
    document = report(result, top=0)
    first_table = next(
        (i for i, node in enumerate(document.nodes) if not isinstance(node, Note)), 0
    )
    before, after = document.nodes[:first_table], document.nodes[first_table:]
    steps = [_drawn_steps(device) for device in result.devices if device.steps.steps]
    return replace(document, nodes=(*before, explorer(activities, idle, steps), *after))


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


def brief(result: ProfileResult) -> tuple[str | Note, ...]:
    """Return the answer, the limits of the recording and the findings."""
    if not result.devices:
        return (capitalized(NO_WORK), *_limits_of_recording(result))
    return (
        title(result),
        *_answers(result),
        *_limits_of_recording(result),
        *_finding_notes(result),
    )


# --- the answer ------------------------------------------------------------------------------------


def title(result: ProfileResult) -> str:
    """Return the verdict: ``GPU busy 43% of the time, 12.3 ms a step``."""
    simulated = "Simulated: " if result.simulated else ""
    devices = result.devices
    if len(devices) == 1:
        return f"{simulated}GPU busy {_busy(devices[0].measured)} of {_measured_time(devices[0])}"
    shares = [device.measured.busy_share for device in devices]
    return (
        f"{simulated}{len(devices)} GPUs busy {format_ratio(min(shares))} to "
        f"{format_ratio(max(shares))} of the time"
    )


def _busy(time: TimeDivision) -> str:
    return format_ratio(time.busy_share)


def _measured_time(device: Device) -> str:
    steps = device.steps
    if not steps.measured:
        return f"{_time(device.measured.length_ns)}, from the first to the last work"
    return f"the time of {_count('step', steps.measured)}, {_time(steps.median_ns)} each (median)"


def _answers(result: ProfileResult) -> Iterator[Note]:
    """Yield why the busiest device is idle, and which line has most of its time."""
    device = max(result.devices, key=lambda device: device.work_ns)
    several = f"{device_name(device, result)}: " if len(result.devices) > 1 else ""
    if causes := _largest_causes(device.measured):
        idle = format_ratio(1 - device.measured.busy_share)
        yield Note("info", f"{several}Idle {idle}: {', '.join(causes)}.")
    largest_line = max(device.lines, key=lambda line: line.own_ns, default=None)
    kernel = device.kernels[0] if device.kernels else None
    # Without call stacks of most work, the lines say little.
    if largest_line and (kernel is None or 2 * largest_line.own_ns >= kernel.total_ns):
        share = format_ratio(_share_of(largest_line.own_ns, device.work_ns))
        name = f"{place((largest_line.frame,), 0)} in {largest_line.frame.name}"
        yield Note("info", f"{several}Most GPU time: {name}, {share}.")
    elif kernel:
        share = format_ratio(kernel.share)
        yield Note("info", f"{several}Most GPU time: kernel {short_kernel(kernel.name)}, {share}.")


def _largest_causes(time: TimeDivision) -> list[str]:
    causes = sorted(_causes(time.idle), key=lambda cause: -cause[1])
    shown = [(name, idle) for name, idle in causes[:3] if idle * 200 >= time.length_ns]
    return [f"{name} {format_ratio(idle / time.length_ns)}" for name, idle in shown]


def _causes(idle: IdleTime) -> list[tuple[str, int]]:
    return [(name, getattr(idle, field)) for field, (name, _) in CAUSES.items()]


def _finding_notes(result: ProfileResult) -> Iterator[Note]:
    """Yield the findings; a finding of several devices at the same line is one note, on the worst device."""
    alike: defaultdict[tuple[str, str], list[Finding]] = defaultdict(list)
    for finding in result.findings:
        alike[finding.rule, place(finding.stack, finding.site)].append(finding)
    for findings in alike.values():
        yield _finding_note(findings[0], result, findings[1:])


def _finding_note(finding: Finding, result: ProfileResult, others: Sequence[Finding]) -> Note:
    """Return a finding as a note with its saving and its actions; ``others`` are alike on other devices."""
    device = next(
        device
        for device in result.devices
        if (device.process, device.device) == (finding.process, finding.device)
    )
    share, steps = finding.saving_share, device.steps.measured
    time = f"{_time(finding.saving_ns / max(steps, 1))}{' a step' if steps else ''}"
    saving = (
        f" Could save up to {format_ratio(share)} ({time})."
        if share is not None
        else " No saving is estimated, because events are missing."
    )
    several = f"{device_name(device, result)}: " if len(result.devices) > 1 else ""
    if others and share is not None:
        saving += f" {_also(others)}."
    places = (("change", Stack(finding.stack, finding.site)),) if finding.stack else ()
    return Note(
        "warn",
        f"{several}{finding.sentence}{saving}",
        remedies=finding.actions,
        finding=DocumentFinding(finding.rule, finding.estimate, places),
    )


def _also(others: Sequence[Finding]) -> str:
    """Return on how many other devices a finding holds, with the range of its saving."""
    shares = [other.saving_share for other in others if other.saving_share is not None]
    if len(others) == 1:
        return f"Alike on 1 other GPU ({format_ratio(shares[0])})"
    least, most = format_ratio(min(shares)), format_ratio(max(shares))
    return f"Alike on {len(others):,} other GPUs ({least} to {most})"


def _limits_of_recording(result: ProfileResult) -> Iterator[Note]:
    for reason in result.incomplete:
        yield Note("error", capitalized(reason))
    if result.gaps or result.incomplete:
        yield Note("warn", "Events are missing: shares and counts may be wrong.")
    gaps = sorted(result.gaps.items(), key=lambda gap: -gap[1])
    for reason, count in gaps[:_MAX_LISTED_GAPS]:
        yield Note("warn", f"Not recorded: {reason} ({format_count(count)} times)")
    for note in result.notes:
        yield Note("info", capitalized(note))


# --- several devices -------------------------------------------------------------------------------


def device_name(device: Device, result: ProfileResult) -> str:
    """Return the name of a device as CUDA programs write it, with its process if there are several."""
    name = f"cuda:{device.device}"
    several = len({other.process for other in result.devices}) > 1
    return f"process {device.process} {name}" if several else name


def _overview(result: ProfileResult) -> Table:
    columns: _Columns[Device] = (
        ("device", "text", lambda device: Text(device_name(device, result))),
        ("busy", "bar", lambda device: Ratio(device.measured.busy_share)),
        ("step", "number", lambda device: Seconds(device.steps.median_ns / 1e9)),
        ("GPU time", "number", lambda device: Seconds(device.work_ns / 1e9)),
        ("collectives", "number", lambda device: Seconds(device.collectives_ns / 1e9)),
        ("largest idle cause", "text", lambda device: Text(_largest_cause(device))),
    )
    return _table(columns, result.devices)


def _largest_cause(device: Device) -> str:
    causes = _largest_causes(device.measured)
    return causes[0] if causes else "-"


def _straggler(result: ProfileResult) -> Iterator[Note]:
    straggler = result.straggler
    if straggler is None:
        return
    share = straggler.last_count / straggler.matched if straggler.matched else 0.0
    yield Note(
        "info",
        f"Process {straggler.process} cuda:{straggler.device} was the last of all ranks in "
        f"{format_count(straggler.last_count)} of {format_count(straggler.matched)} collectives "
        f"({format_ratio(share)}); the other ranks waited {_time(straggler.waited_ns)} for it.",
    )


# --- one device ------------------------------------------------------------------------------------


def _device_nodes(device: Device, top: int, by: TableName | None) -> Iterator[Node]:
    yield _time_table(device)
    if device.kernels and by in (None, "kernel"):
        yield Section("Kernels", (_kernel_table(device, top),))
    if device.lines and by in (None, "line"):
        yield Section("Lines", (_line_table(device, top),))
    if device.ranges and by in (None, "range"):
        yield Section("NVTX ranges", (_range_table(device, top),))
    if device.copies:
        yield Section("Copies", (_copy_table(device, top),))
    if device.collectives:
        yield Section("Collectives", (_collective_table(device, top),))
    if device.waits:
        yield Section("Waits and allocations of the host", (_wait_table(device, top),))
    if len(device.streams) > 1:
        yield Section("Streams", (_stream_table(device, top),))


def _time_table(device: Device) -> Table:
    time = device.measured
    rows = [("busy", "at least one kernel, copy or memset ran", time.busy_ns)]
    rows += [
        (f"idle: {name}", meaning, getattr(time.idle, field))
        for field, (name, meaning) in CAUSES.items()
        if getattr(time.idle, field)
    ]
    steps = device.steps.measured
    columns: _Columns[tuple[str, str, int]] = (
        ("time", "text", lambda row: Text(row[0])),
        (
            "a step" if steps else "total",
            "number",
            lambda row: Seconds(row[2] / 1e9 / max(steps, 1)),
        ),
        ("share", "bar", lambda row: Ratio(row[2] / time.length_ns if time.length_ns else 0.0)),
        ("meaning", "text", lambda row: Text(row[1])),
    )
    return _table(columns, rows, _steps_sentence(device.steps))


def _steps_sentence(steps: Steps) -> str:
    if not steps.measured:
        return (
            "No steps were found: the tables cover the time from the first to the last work. Mark steps with "
            "an NVTX range: with cudakit.range('step')."
        )
    source = {
        "range": f"the NVTX range '{steps.name}'",
        "mark": f"the mark '{steps.name}'",
        "repetition": "a repeated sequence of launches",
    }[steps.source]
    left_out = []
    if steps.warm_up:
        name = (
            "The first step is" if steps.warm_up == 1 else f"The first {steps.warm_up:,} steps are"
        )
        left_out.append(f" {name} warm-up and left out.")
    if steps.slow:
        slow_ns = sum(step.time.length_ns for step in steps.steps if step.is_slow)
        name = "step is" if steps.slow == 1 else "steps are"
        left_out.append(
            f" {steps.slow:,} later {name} more than 3 times slower than the median and left out "
            f"({_time(slow_ns)})."
        )
    measured = _count("step", steps.measured)
    return capitalized(f"{measured} measured, found by {source}.{''.join(left_out)}")


def _kernel_table(device: Device, top: int) -> Table:
    columns: _Columns[Kernel] = (
        ("kernel", "text", lambda row: Text(short_kernel(row.name))),
        ("calls", "number", lambda row: Count(row.calls)),
        ("total", "number", lambda row: Seconds(row.total_ns / 1e9)),
        ("mean", "number", lambda row: Seconds(row.mean_ns / 1e9)),
        ("share", "number", lambda row: Ratio(row.share)),
        ("line", "text", lambda row: Text(place(row.stack, row.site))),
    )
    return _limited(columns, device.kernels, top, ("kernel", "kernels"))


def _line_table(device: Device, top: int) -> Table:
    columns: _Columns[Line] = (
        ("line", "text", lambda row: Text(f"{place((row.frame,), 0)} {row.frame.name}")),
        ("own", "number", lambda row: Seconds(row.own_ns / 1e9)),
        ("cumulative", "number", lambda row: Seconds(row.cumulative_ns / 1e9)),
        ("launches", "number", lambda row: Count(row.calls)),
        ("share", "bar", lambda row: Ratio(row.share)),
    )
    caption = "GPU time of work that the line launched itself (own), or in functions it called."
    return _limited(columns, device.lines, top, ("line", "lines"), caption)


def _range_table(device: Device, top: int) -> Table:
    columns: _Columns[NamedRange] = (
        (
            "range",
            "text",
            lambda row: Text(f"{row.domain}: {row.name}" if row.domain else row.name),
        ),
        ("launches", "number", lambda row: Count(row.count)),
        ("GPU time", "number", lambda row: Seconds(row.total_ns / 1e9)),
        ("share", "bar", lambda row: Ratio(row.share)),
    )
    return _limited(columns, device.ranges, top, ("range", "ranges"))


def _copy_table(device: Device, top: int) -> Table:
    columns: _Columns[Copies] = (
        ("direction", "text", lambda row: Text(copies_name(row))),
        ("calls", "number", lambda row: Count(row.calls)),
        ("size", "number", lambda row: Bytes(row.size_bytes)),
        ("time", "number", lambda row: Seconds(row.total_ns / 1e9)),
        (
            "rate",
            "number",
            lambda row: Rate(row.bytes_per_s, "B") if row.bytes_per_s else Text("-"),
        ),
        ("overlap", "number", lambda row: Ratio(_share_of(row.overlapped_ns, row.total_ns))),
        ("line", "text", lambda row: Text(place(row.stack, row.site))),
    )
    caption = (
        f"Overlap is the share of the time in which a kernel ran, too: "
        f"{format_ratio(_share_of(device.copies_overlapped_ns, device.copies_ns))} of all copies."
    )
    return _limited(columns, device.copies, top, ("kind of copies", "kinds of copies"), caption)


def copies_name(copies: Copies) -> str:
    """Return direction and host memory of copies: ``host to device, pageable``."""
    if copies.peer:
        return "device to device"
    direction = _DIRECTIONS[copies.direction]
    return direction if copies.host == "none" else f"{direction}, {copies.host}"


def _collective_table(device: Device, top: int) -> Table:
    columns: _Columns[Collective] = (
        ("collective", "text", lambda row: Text(short_kernel(row.name))),
        ("calls", "number", lambda row: Count(row.calls)),
        ("time", "number", lambda row: Seconds(row.total_ns / 1e9)),
        ("overlap", "number", lambda row: Ratio(_share_of(row.overlapped_ns, row.total_ns))),
        ("line", "text", lambda row: Text(place(row.stack, row.site))),
    )
    caption = "Overlap is the share of the time in which another kernel ran, too."
    return _limited(columns, device.collectives, top, ("collective", "collectives"), caption)


def _wait_table(device: Device, top: int) -> Table:
    columns: _Columns[HostWait] = (
        ("call", "text", lambda row: Text(row.function)),
        ("line", "text", lambda row: Text(place(row.stack, row.site))),
        ("calls", "number", lambda row: Count(row.calls)),
        ("host time", "number", lambda row: Seconds(row.blocked_ns / 1e9)),
        ("GPU idle", "number", lambda row: Seconds(row.idle_ns / 1e9)),
    )
    return _limited(columns, device.waits, top, ("call site", "call sites"))


def _stream_table(device: Device, top: int) -> Table:
    columns: _Columns[StreamWork] = (
        ("stream", "number", lambda row: Count(row.stream)),
        ("launches", "number", lambda row: Count(row.calls)),
        ("busy", "number", lambda row: Seconds(row.busy_ns / 1e9)),
        ("alone", "number", lambda row: Seconds(row.alone_ns / 1e9)),
    )
    caption = "Alone is the time in which only this stream had running work."
    return _limited(columns, device.streams, top, ("stream", "streams"), caption)


def _limit_table(result: ProfileResult) -> Iterator[Node]:
    if result.limits:
        columns: _Columns[Limit] = (
            ("rate of", "text", lambda row: Text(row.name)),
            ("profile", "number", lambda row: Rate(row.bytes_per_s, "B")),
            ("measured limit", "number", lambda row: Rate(row.limit_bytes_per_s, "B")),
            ("share", "bar", lambda row: Ratio(row.share)),
        )
        yield Section("Limits of this GPU", (_table(columns, result.limits),))


# --- helpers of tables -----------------------------------------------------------------------------


def _table(columns: _Columns[_T], items: Iterable[_T], caption: str = "") -> Table:
    return Table(
        tuple(Column(title, kind) for title, kind, _ in columns),
        tuple(tuple(value(item) for _, _, value in columns) for item in items),
        caption,
    )


def _limited(
    columns: _Columns[_T], items: Sequence[_T], top: int, names: tuple[str, str], caption: str = ""
) -> Table:
    """Return a table of the first ``top`` items, 0 for all; the caption counts the rest."""
    shown = items[:top] if top else items
    omitted = len(items) - len(shown)
    singular, plural = names
    rest = (
        f"{omitted:,} more {singular if omitted == 1 else plural}: --top 0 shows all."
        if omitted
        else ""
    )
    return _table(columns, shown, " ".join(filter(None, (caption, rest))))


def _share_of(part_ns: int, total_ns: int) -> float:
    return part_ns / total_ns if total_ns else 0.0


def _time(time_ns: float) -> str:
    return format_seconds(time_ns / 1e9)


def _count(name: str, count: int) -> str:
    return f"{format_count(count)} {name if count == 1 else f'{name}s'}"
