"""The first part of a report: the answer, the reliability of the file, failed allocations, and totals."""

from __future__ import annotations

import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Literal, TypeAlias, TypeVar

import numpy as np

from cudakit.memory.history import State
from cudakit.memory.result import (
    Cause,
    DeviceDiff,
    DeviceMemory,
    DiffRow,
    FileFacts,
    Leak,
    Line,
    Oom,
    Peak,
    ReplayedRemedy,
)
from cudakit.memory.snapshot import pool_name, site_name
from cudakit.memory.verdict import replays_sentence
from cudakit.report.document import (
    Bytes,
    Chart,
    Column,
    Count,
    Facts,
    Marker,
    Node,
    Note,
    Section,
    Series,
    Stack,
    Table,
    Text,
    Value,
)
from cudakit.stacks import Frame
from cudakit.units import format_bytes, format_count, format_ratio

# --- the answer ------------------------------------------------------------------------------------


def answer(device: DeviceMemory) -> Iterator[Note]:
    """Yield three notes: the state, the cause, and the action."""
    yield _state_note(device)
    yield Note("info", _cause_note(device), evidence=evidence(device))
    yield Note("info", f"Action: {_action_note(device)}", settings=recommended_settings(device))


def _state_note(device: DeviceMemory) -> Note:
    if device.ooms:
        return Note("error", _failure_sentence(device, device.ooms[-1]))
    if device.leaks:
        return Note("warn", growth_sentence(device))
    peak = device.peak
    if not device.events:
        requested_text = format_bytes(device.end.requested_bytes)
        reserved_text = format_bytes(device.end.reserved_bytes)
        return Note(
            "info",
            f"Without a trace, only the end is known: {requested_text} requested, {reserved_text} reserved.",
        )
    size_text = (
        f"peak {format_bytes(peak.requested_bytes)} requested{in_annotation(peak)},"
        f" at most {format_bytes(peak.highest_reserved_bytes)} reserved"
    )
    if device.steps.rising:
        return Note("warn", f"No allocation failed, but {rising_sentence(device)}: {size_text}.")
    if device.steps.source == "none":
        return Note(
            "ok", f"No allocation failed: {size_text}. Growth between steps was not checked."
        )
    return Note(
        "ok",
        f"No allocation failed, and no call stack holds more memory after each step: {size_text}.",
    )


def _failure_sentence(device: DeviceMemory, oom: Oom) -> str:
    total_text = (
        f" ({format_bytes(oom.device_total_bytes)} in total)" if oom.device_total_bytes else ""
    )
    limit_text = ", but beyond the memory limit of this process" if oom.limited else ""
    earlier_count, earlier_text = len(device.ooms) - 1, ""
    if earlier_count:
        plural = "s" * (earlier_count > 1)
        earlier_text = f" ({earlier_count:,} earlier allocation{plural} failed too.)"
    return (
        f"Allocating {format_bytes(oom.size_bytes)} failed on {device_name(device)} at event"
        f" {format_count(oom.event)}{_failure_place(device, oom)}:"
        f" {format_bytes(oom.state.active_bytes)} in use,"
        f" {format_bytes(oom.state.reserved_bytes)} reserved,"
        f" {format_bytes(oom.device_free_bytes)} free on the device{total_text}{limit_text}.{earlier_text}"
    )


def _failure_place(device: DeviceMemory, oom: Oom) -> str:
    """Return the annotation, the pool and the stream of a failed request.

    If all steps have the same annotation, its name does not identify the step: the step has a number.
    """
    place_text = f"{pool_name(oom.pool)} pool, stream {oom.stream}"
    source_kind, _, step_name = device.steps.source.partition(" ")
    if source_kind == "annotation" and not step_name.endswith("#"):
        for peak in device.steps.peaks:
            if peak.first_event <= oom.event <= peak.last_event:
                inner_ranges = () if oom.ranges == (step_name,) else oom.ranges
                inner_text = in_annotation(replace(oom, ranges=inner_ranges))
                return (
                    f" in step {format_count(peak.step)}, counted from 0{',' * bool(inner_text)}"
                    f"{inner_text} ({step_definition(device)}; {place_text})"
                )
    return f"{in_annotation(oom)} ({place_text})"


_MAX_SHOWN_RANGES = 3
_MAX_NAME_LENGTH = 60  # maximum length of the name of an annotation or a mark


def in_annotation(oom_or_peak: Oom | Peak) -> str:
    """Return the innermost annotations of an event, and the last mark before the event; ``""`` without any.

    For example: `` in annotation 'step 7 / backward' after mark 'warm-up ended'``.
    """
    names = [_shortened(name) for name in oom_or_peak.ranges[-_MAX_SHOWN_RANGES:]]
    if len(oom_or_peak.ranges) > len(names):
        names.insert(0, "…")
    annotation_text = f" in annotation '{' / '.join(names)}'" if names else ""
    mark = oom_or_peak.last_mark
    return annotation_text + (f" after mark '{_shortened(mark)}'" if mark else "")


def _shortened(name: str) -> str:
    return name if len(name) <= _MAX_NAME_LENGTH else f"{name[: _MAX_NAME_LENGTH - 1]}…"


def rising_sentence(device: DeviceMemory) -> str:
    """Return a part of a sentence: how much the peaks of the steps rise."""
    steps = device.steps
    return (
        f"the peak of each step rises from {format_bytes(steps.peaks[0].requested_bytes)} to"
        f" {format_bytes(steps.peaks[-1].requested_bytes)} over {format_count(steps.peaks[-1].step + 1)}"
        " steps"
    )


def growth_sentence(device: DeviceMemory) -> str:
    """Return a sentence: how many call stacks hold more memory after each step, and how much memory."""
    leak_count = len(device.leaks)
    growth_text = format_bytes(sum(leak.bytes_per_step for leak in device.leaks))
    if leak_count == 1:
        return f"1 call stack holds {growth_text} more memory after each step."
    return f"{leak_count:,} call stacks together hold {growth_text} more memory after each step."


def _cause_text(cause: Cause) -> tuple[str, str]:
    """Return the name of a cause, and its sentence, which may end with the name in parentheses."""
    name = cause.id.replace("_", " ")
    return name, cause.sentence.removesuffix(f" ({name})")


def _cause_note(device: DeviceMemory) -> str:
    if device.ooms:
        name, sentence = _cause_text(device.ooms[-1].causes[0])
        return f"Cause ({name}): {sentence}."
    if device.leaks:
        leak = device.leaks[0]
        size_text = format_bytes(leak.bytes)
        return f"Largest growth: {_site_text(leak)}, {size_text} in use at the last step boundary."
    if not device.lines:
        return f"No memory is in use {moment_name(device)}."
    return f"Largest call site {moment_name(device)}: {_line_text(device.lines[0], 'in use ')}."


def _site_text(row: Leak | DiffRow) -> str:
    return site_name(row.stack[row.site]) if row.stack else NO_STACK


def _line_text(line: Line, use: str = "") -> str:
    site_text = NO_STACK if line.frame is None else site_name(line.frame)
    return f"{site_text}, {format_bytes(line.bytes)} {use}({format_ratio(line.share)})"


def _action_note(device: DeviceMemory) -> str:
    call_names = device.snapshot.calls
    if device.ooms:
        return f"{device.ooms[-1].remedies[0]}."
    if device.leaks:
        return "find the reference that keeps this memory alive."
    if not device.events:
        return f"record a trace: call {call_names.record_trace} before the first allocation."
    if device.steps.rising:
        return "limit what grows: section Peak per step lists it by call site."
    if device.steps.source == "none":
        return f"mark each step with {call_names.mark_step}, so that growth can be checked."
    if device.at.name != "peak":
        return "to lower the peak, start with the largest call site at the peak (--at peak)."
    return "to lower the peak, start with the largest call site."


# --- how reliable the file is ----------------------------------------------------------------------


def reliability(device: DeviceMemory) -> Iterator[Note]:
    """Yield notes: whether the trace and the final state agree, and how to record a better file."""
    name, events_text = device_name(device), f"{device.events:,} event{'s' * (device.events != 1)}"
    curves = device.history.curves
    if not device.exact:
        yield Note(
            "warn",
            f"{name}: {_disagreement(device, events_text)}.",
            remedies=("figures at the end are exact; earlier ones may be wrong",),
        )
    elif not device.events:
        yield Note("ok", f"{name}: state at the end, without a trace.")
    else:
        start_text = "no memory in use"
        if curves.active[0]:
            start_text = "memory in use"
        elif curves.reserved[0]:
            start_text = f"{format_bytes(int(curves.reserved[0]))} reserved, but not in use"
        yield Note(
            "ok", f"{name}: {events_text}, starting with {start_text}; trace and final state agree."
        )
    for warning in device.health.warnings:
        yield Note("warn", warning)
    # Without a trace, ``answer`` already contains this advice.
    for advice in device.health.advice if device.events else ():
        yield Note("info", advice)


def _disagreement(device: DeviceMemory, events_text: str) -> str:
    contradiction_texts = ", ".join(
        f"{count:,} {nouns[count != 1]}"
        for field, nouns in _CONTRADICTIONS.items()
        if (count := getattr(device.health.contradictions, field))
    )
    if not contradiction_texts:
        return f"{events_text}; invalid entries of the trace were skipped"
    times_text = "once" if device.inconsistencies == 1 else f"{device.inconsistencies:,} times"
    return f"the trace of {events_text} and the final state disagree {times_text} ({contradiction_texts})"


# One and several contradictions of each kind; the keys are the fields of Contradictions.
_CONTRADICTIONS = {
    "lost_allocations": (
        "block without an allocation in the trace",
        "blocks without an allocation in the trace",
    ),
    "lost_frees": ("block without a free in the trace", "blocks without a free in the trace"),
    "lost_requests": (
        "completed free without a request in the trace",
        "completed frees without a request in the trace",
    ),
    "sizes": (
        "block whose sizes in trace and final state differ",
        "blocks whose sizes in trace and final state differ",
    ),
    "segments": ("contradicting segment event", "contradicting segment events"),
    "over_reserved": (
        "moment with more memory in use than reserved",
        "moments with more memory in use than reserved",
    ),
}


# --- failed allocations ----------------------------------------------------------------------------


def failures(device: DeviceMemory, top: int) -> Iterator[Node]:
    """Show the last ``top`` failed allocations, 0 for all."""
    shown_ooms = device.ooms if top == 0 else device.ooms[-top:]
    if len(shown_ooms) < len(device.ooms):
        yield Note("info", f"The last {len(shown_ooms)} of {len(device.ooms)} failed allocations:")
    for oom in shown_ooms:
        if len(device.ooms) > 1:
            yield Note("error", oom.sentence)
        yield Facts(
            (
                ("requested", Bytes(oom.size_bytes)),
                ("pool", Text(pool_name(oom.pool))),
                ("stream", Count(oom.stream)),
                ("event", Count(oom.event)),
                (f"free on {device_name(device)}", Bytes(oom.device_free_bytes)),
                ("allocated", Bytes(oom.state.allocated_bytes)),
                ("reserved", Bytes(oom.state.reserved_bytes)),
                ("pending free", Bytes(oom.state.pending_free_bytes)),
                ("free in all segments", Bytes(oom.free_bytes)),
                ("largest free block", Bytes(oom.largest_hole_bytes)),
                ("requested by", stack_value(oom.stack, oom.site)),
            )
        )
        yield Note(
            "info",
            "Causes, the root cause first:",
            remedies=tuple(": ".join(_cause_text(cause)) for cause in oom.causes),
        )
        yield Note("info", "Actions, the most useful first:", remedies=oom.remedies)
        yield from _replay_table(oom, is_last=oom is device.ooms[-1])


def _replay_table(oom: Oom, *, is_last: bool) -> Iterator[Node]:
    """Show the result of the replays with each change; only the last failure is replayed."""
    if not oom.replays:
        if is_last and oom.causes[0].id == "fragmentation":
            yield Note(
                "info",
                "No setting was tested: with the recorded settings, a replay of the events before the failure"
                " does not fail, or takes too long.",
            )
        return
    yield table(
        (
            ("replayed with", "text", lambda replay: Text(_change_name(replay))),
            (
                "the failed request",
                "text",
                lambda replay: Text("succeeds" if replay.helps else "fails"),
            ),
            ("peak reserved", "number", lambda replay: Bytes(replay.peak_reserved_bytes)),
        ),
        oom.replays,
        'Rows marked "program:" replay a change of the program, not a setting.'
        if any(_change_name(replay) != replay.change for replay in oom.replays)
        else "",
    )
    if sentence := replays_sentence(oom):
        yield Note("info", sentence)


def _change_name(replay: ReplayedRemedy) -> str:
    is_of_program = replay.settings is None and replay.cause == "fragmentation"
    return f"program: {replay.change}" if is_of_program else replay.change


# --- several devices -------------------------------------------------------------------------------

# Ranks of a balanced program differ by less than this share of the median peak.
_MIN_OUTLIER_EXCESS = 0.05


def overview(devices: Sequence[DeviceMemory]) -> Table:
    """Compare devices of one or several files in a row each."""
    return table(
        (
            ("file", "text", lambda device: Text(device.file)),
            ("device", "text", lambda device: Text(device_name(device))),
            ("OOMs", "number", lambda device: Count(len(device.ooms))),
            ("peak requested", "number", lambda device: Bytes(device.peak.requested_bytes)),
            (
                "highest reserved",
                "number",
                lambda device: Bytes(device.peak.highest_reserved_bytes),
            ),
            ("end allocated", "number", lambda device: Bytes(device.end.allocated_bytes)),
            ("end reserved", "number", lambda device: Bytes(device.end.reserved_bytes)),
            ("events", "number", lambda device: Count(device.events)),
        ),
        devices,
        _outlier_sentence(devices),
    )


def _outlier_sentence(devices: Sequence[DeviceMemory]) -> str:
    """Return a sentence on a rank whose peak is much higher, because work is unbalanced; "" if none is."""
    peaks = sorted(device.peak.requested_bytes for device in devices)
    median_peak = peaks[len(peaks) // 2]
    excess = peaks[-1] / median_peak - 1 if median_peak else 0.0
    if len(devices) < 3 or excess < _MIN_OUTLIER_EXCESS:
        return ""
    excess_text = f"{excess:.0%} above the median"
    if excess >= 1:
        excess_text = f"{1 + excess:.1f} times the median"
    highest = max(devices, key=lambda device: device.peak.requested_bytes)
    return (
        f"The peak of {highest.file} {device_name(highest)} is {excess_text} of the requested peaks in this"
        " table."
    )


# --- totals ----------------------------------------------------------------------------------------


def totals(device: DeviceMemory) -> Table:
    """Show the totals at the chosen moment and at the end, and their maxima; without a trace, at the end."""
    states = [("at end", device.end)]
    if device.at.name != "end" and device.events:
        title = (
            f"at event {device.at.event:,}"
            if device.at.name == "event"
            else {"oom": "at failure"}.get(device.at.name, f"at {device.at.name}")
        )
        states.insert(0, (title, device.at.state))
    peak = device.peak
    # Rows of the table: title, function that returns the value at a moment, and maximum over the trace.
    rows: tuple[tuple[str, Callable[[State], Value], Value], ...] = (
        (
            "allocated",
            lambda state: Bytes(state.allocated_bytes, state.allocated_is_derived),
            Bytes(peak.highest_allocated_bytes, peak.allocated_is_derived),
        ),
        ("requested", lambda state: Bytes(state.requested_bytes), Bytes(peak.requested_bytes)),
        ("pending free", lambda state: Bytes(state.pending_free_bytes), Text("")),
        ("reserved", lambda state: Bytes(state.reserved_bytes), Bytes(peak.highest_reserved_bytes)),
        ("segments", lambda state: Count(state.segments), Text("")),
        ("blocks in use", lambda state: Count(state.blocks), Text("")),
    )
    titles = [title for title, _ in states] + ["maximum"] * bool(device.events)
    return Table(
        columns=(Column("", "text"), *(Column(title, "number") for title in titles)),
        rows=tuple(
            (Text(title), *(value_at(state) for _, state in states), maximum)[: 1 + len(titles)]
            for title, value_at, maximum in rows
        ),
        caption=_totals_caption(device, [state for _, state in states]),
    )


def _totals_caption(device: DeviceMemory, states: Sequence[State]) -> str:
    peak = device.peak
    sentences = []
    if device.events:
        moment_text = f"after event {peak.event:,}" if peak.event >= 0 else "before the first event"
        sentences.append(
            f"The peak is the moment with the most requested memory, {moment_text}{in_annotation(peak)};"
            f" the last event is {device.events - 1:,}."
        )
    timeline = device.timeline
    if (
        device.end.pending_free_bytes
        or device.at.state.pending_free_bytes
        or (np.array(timeline.requested_bytes) > np.array(timeline.allocated_bytes)).any()
    ):
        sentences.append(
            "Requested and blocks in use include blocks that are pending free; allocated does not."
        )
    if peak.allocated_is_derived or any(state.allocated_is_derived for state in states):
        sentences.append("Sizes marked ~ were computed by the allocator's rules, not recorded.")
    return " ".join(sentences)


def curves(device: DeviceMemory) -> Chart | None:
    """Draw requested, allocated and reserved bytes after each event, and failed allocations.

    The axis counts events, not seconds, because ``--at`` takes an event.
    """
    timeline = device.timeline
    if len(timeline.event) < 2:
        return None
    return Chart(
        title="Memory over the trace",
        x=np.maximum(np.array(timeline.event, np.float64), 0),
        series=(
            Series("reserved", np.array(timeline.reserved_bytes, np.int64)),
            Series("allocated", np.array(timeline.allocated_bytes, np.int64)),
            Series("requested", np.array(timeline.requested_bytes, np.int64)),
        ),
        x_label="event",
        markers=tuple(Marker(float(oom.event), "out of memory", "error") for oom in device.ooms),
    )


# --- The evidence for the answer of a report, and the recommended settings. Only HTML pages show them ---

_MAX_EVIDENCE_LINES = 3


def evidence(device: DeviceMemory) -> tuple[str, ...]:
    """Return the figures that support the cause: sizes, replays, growth, or the largest call sites."""
    if device.ooms:
        return tuple(_failure_evidence(device.ooms[-1]))
    if device.leaks:
        return tuple(
            f"{_site_text(leak)}: from {format_bytes(leak.growth[0])} to {format_bytes(leak.growth[-1])} over"
            f" {format_count(device.steps.count)} moments between steps, {format_bytes(leak.bytes_per_step)}"
            " per step"
            for leak in device.leaks[:_MAX_EVIDENCE_LINES]
        )
    if device.steps.rising:
        return tuple(
            f"{_site_text(row)}: {format_bytes(row.before_bytes)} at the peak of the first step,"
            f" {format_bytes(row.after_bytes)} at the peak of the last one"
            for row in device.steps.site_growth[:_MAX_EVIDENCE_LINES]
        )
    # The sentence of the cause names the largest call site already.
    return tuple(
        f"next {moment_name(device)}: {_line_text(line)}"
        for line in device.lines[1:_MAX_EVIDENCE_LINES]
    )


def recommended_settings(device: DeviceMemory) -> str:
    """Return the recommended settings as the assignment of a shell variable; "" if none is recommended."""
    variable = device.snapshot.calls.settings_variable
    for oom in device.ooms[-1:]:
        for replay in oom.replays:
            if replay.recommended and replay.settings is not None:
                return f"{variable}={shlex.quote(replay.settings)}"
    return ""


def _failure_evidence(oom: Oom) -> Iterator[str]:
    yield (
        f"requested {format_bytes(oom.size_bytes)}; free on the device"
        f" {format_bytes(oom.device_free_bytes)}; free in segments {format_bytes(oom.free_bytes)}; largest"
        f" free block {format_bytes(oom.largest_hole_bytes)}"
    )
    yield from (f"another cause: {cause.sentence}" for cause in oom.causes[1:])
    helpful_changes = [replay.change for replay in oom.replays if replay.helps]
    if sentence := replays_sentence(oom):
        yield sentence.removesuffix(".")
    elif helpful_changes:
        yield (
            f"of {format_count(len(oom.replays))} changes that were replayed, {len(helpful_changes)} let the"
            f" request succeed: {', '.join(helpful_changes)}"
        )


# --- Parts of the tables of a report: names, stacks, and tables limited to a number of rows --------

_T = TypeVar("_T")
# A column of a table: its title, its kind, and the function that returns the value of an item.
ColumnSpec: TypeAlias = tuple[str, Literal["number", "text", "stack", "bar"], Callable[[_T], Value]]

NO_STACK = "no stack recorded (C++ thread, or before the trace)"


def device_name(device: DeviceMemory | DeviceDiff) -> str:
    """Return the name of a device as CUDA programs write it."""
    return "pinned host memory" if device.device is None else f"cuda:{device.device}"


def moment_name(device: DeviceMemory) -> str:
    """Return the name of the moment that the tables show."""
    moment = device.at
    if moment.name == "peak" and not device.events:
        return "at the end"  # without a trace, the peak is not known
    return {"peak": "at the peak", "end": "at the end", "oom": "when memory ran out"}.get(
        moment.name, f"after event {moment.event:,}"
    )


def step_definition(device: DeviceMemory) -> str:
    """Return a clause that defines a step of the program."""
    source_kind, _, source_name = device.steps.source.partition(" ")
    if source_kind == "annotation":
        if source_name.endswith("#"):
            return f"each step is an annotation '{source_name.removesuffix('#')}' with a number"
        return f"all steps are annotations with the same name, '{source_name}'"
    if source_kind == "loop":
        return f"each step starts at {source_name.removeprefix('at ')}"
    if source_kind == "snapshot":
        return "each step starts at a snapshot event of the trace"
    return "each step is one repetition of the same sequence of allocations"


def files_name(files: Sequence[FileFacts]) -> str:
    """Return the name of the only file, or the number of files."""
    return files[0].name if len(files) == 1 else f"{len(files)} files"


def per_device(device_nodes: Iterable[tuple[str, Iterable[Node]]]) -> tuple[Node, ...]:
    """Return the nodes of a single device; for several devices, a section for each (name, nodes)."""
    sections = tuple(Section(name, _mark_distinct_frames(nodes)) for name, nodes in device_nodes)
    return sections[0].nodes if len(sections) == 1 else sections


def stack_value(frames: tuple[Frame, ...], site: int) -> Value:
    """Return a call stack, or the text for a missing one."""
    return Stack(frames, site) if frames else Text(NO_STACK)


def _mark_distinct_frames(nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return the nodes with a marked frame in each of their call stacks that looks like another.

    All tables are compared together, so that a call stack has the same name in each of them.
    """
    listed_nodes = tuple(nodes)
    indices = _distinct_indices(set(_table_stacks(listed_nodes)))

    def marked_cell(cell: Value) -> Value:
        return replace(cell, distinct_index=indices[cell]) if isinstance(cell, Stack) else cell

    def marked_node(node: Node) -> Node:
        if isinstance(node, Section):
            return replace(node, nodes=tuple(map(marked_node, node.nodes)))
        if isinstance(node, Table):
            return replace(node, rows=tuple(tuple(map(marked_cell, row)) for row in node.rows))
        return node

    return tuple(map(marked_node, listed_nodes))


def _table_stacks(nodes: Iterable[Node]) -> Iterator[Stack]:
    for node in nodes:
        if isinstance(node, Section):
            yield from _table_stacks(node.nodes)
        elif isinstance(node, Table):
            yield from (cell for row in node.rows for cell in row if isinstance(cell, Stack))


def _distinct_indices(stacks: Iterable[Stack]) -> dict[Stack, int | None]:
    """Return the index of the frame that distinguishes each stack from those that look like it, or None.

    Stacks look alike if they have the same call site and the same function as their innermost frame.
    """
    groups: defaultdict[tuple[Frame, str | None], list[Stack]] = defaultdict(list)
    for stack in stacks:
        innermost_function = stack.frames[0].name if stack.site else None
        groups[stack.frames[stack.site], innermost_function].append(stack)
    distinct_indices: dict[Stack, int | None] = {}
    for similar in groups.values():
        counts = Counter(position for stack in similar for position in enumerate(stack.frames))
        for stack in similar:
            # The innermost of the frames that the fewest of the similar stacks share. None if all of them
            # share the frames of this stack: it is the only one, or the beginning of the others.
            fewest = len(similar)
            distinct_indices[stack] = None
            for index, frame in enumerate(stack.frames):
                if index != stack.site and counts[index, frame] < fewest:
                    distinct_indices[stack], fewest = index, counts[index, frame]
    return distinct_indices


def table(
    columns: Sequence[ColumnSpec[_T]],
    items: Iterable[_T],
    caption: str = "",
) -> Table:
    """Return a table with a row per item."""
    return Table(
        tuple(Column(title, kind) for title, kind, _ in columns),
        tuple(tuple(value_of(item) for _, _, value_of in columns) for item in items),
        caption,
    )


def limited_table(
    columns: Sequence[ColumnSpec[_T]],
    items: Sequence[_T],
    top: int,
    names: tuple[str, str] = ("call stack", "call stacks"),
    *,
    caption: str = "",
) -> Table:
    """Return a table of the first ``top`` items, 0 for all; the caption counts the rest."""
    listed_items = items if top == 0 else items[:top]
    if omitted_count := len(items) - len(listed_items):
        noun = names[omitted_count != 1]
        caption = f"{omitted_count:,} more {noun}: --top 0 shows all. {caption}".rstrip()
    return table(columns, listed_items, caption)
