"""The MemoryResult as a Document: the answer first, the details after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np

from cudakit.memory.report import page, summary
from cudakit.memory.report.summary import (
    NO_STACK,
    ColumnSpec,
    device_name,
    files_name,
    growth_sentence,
    limited_table,
    moment_name,
    per_device,
    rising_sentence,
    stack_value,
    step_definition,
    table,
)
from cudakit.memory.result import Churn, DeviceMemory, Facet, MemoryResult, SegmentGroup
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import DRIVER, JAX, MANAGED, POOL_NAMES, pool_name
from cudakit.memory.steps import evenly_spaced
from cudakit.report.document import (
    Bytes,
    Change,
    Chart,
    Count,
    Document,
    Facts,
    Node,
    Note,
    Ratio,
    Seconds,
    Section,
    Series,
    Table,
    Text,
    Value,
)
from cudakit.units import Unavailable, capitalized, format_bytes, format_count, format_ratio

# Names that the recorder of ``run --memory`` gives to blocks in the place of user metadata; "" is no name.
_NAMES_OF_RECORDER = ("", *POOL_NAMES.values())


def report(result: MemoryResult, spec: MemorySpec | None = None, *, top: int = 10) -> Document:
    """Return the report; tables show ``top`` rows, 0 shows all.

    With ``spec``, the report begins with the stream and the pool that it selects.
    """
    devices = result.devices
    overview = (summary.overview(devices), page.all_devices(devices)) if len(devices) > 1 else ()
    device_nodes = per_device(
        (f"{device.file}: {device_name(device)}", _sections(device, top)) for device in devices
    )
    title = f"GPU memory of {files_name(result.files)}"
    closing_notes = _answers(result) if len(devices) == 1 else brief_sentences(result)
    selection = _selection_note(result, spec or MemorySpec())
    return Document(title, (*selection, *overview, *device_nodes), closing_nodes=closing_notes)


def summary_report(result: MemoryResult, spec: MemorySpec | None = None) -> Document:
    """Return only the summary: the state, the cause and the action of each device.

    With ``spec``, the summary begins with the stream and the pool that it selects.
    """
    selection = _selection_note(result, spec or MemorySpec())
    return Document(f"GPU memory of {files_name(result.files)}", (*selection, *_answers(result)))


def _selection_note(result: MemoryResult, spec: MemorySpec) -> Iterator[Note]:
    """Yield a note that names the selected stream and pool. The selection does not apply to failures."""
    stream_text = "" if spec.stream is None else f"stream {spec.stream}"
    pool_text = "" if spec.pool is None else f"pool {pool_name(spec.pool)}"
    if selected_text := " and ".join(filter(None, (stream_text, pool_text))):
        has_failure = any(device.ooms for device in result.devices)
        scope_text = "; failed allocations are those of the whole device" if has_failure else ""
        yield Note("info", f"Shown: {selected_text} only{scope_text}.")
    shown_files = {device.file for device in result.devices}
    if missing_names := [file.name for file in result.files if file.name not in shown_files]:
        yield Note("info", f"Without the selected device: {', '.join(missing_names)}.")
    if spec.at == "oom":
        unfailed_names = [
            f"{device.file} {device_name(device)}" for device in result.devices if not device.ooms
        ]
        if unfailed_names:
            yield Note(
                "info",
                f"No allocation failed in {', '.join(unfailed_names)}: in place of a failure, --at oom shows"
                " the state at the end.",
            )


def _answers(result: MemoryResult) -> tuple[Node, ...]:
    return per_device(
        (f"{device.file}: {device_name(device)}", summary.answer(device))
        for device in result.devices
    )


def brief_sentences(result: MemoryResult) -> tuple[Note, ...]:
    """Return the answer and the warnings of each device; of several devices, with file and device."""
    sentences = []
    for device in result.devices:
        notes = [*summary.answer(device), *summary.reliability(device)]
        for note in (*notes[:3], *(note for note in notes[3:] if note.level == "warn")):
            if len(result.devices) > 1:
                name = device_name(device)
                # A note may itself name the device.
                source = device.file if f" {name} " in note.text else f"{device.file} {name}"
                note = replace(note, text=f"{source}: {note.text}")
            sentences.append(note)
    return tuple(sentences)


def _sections(device: DeviceMemory, top: int) -> Iterator[Node]:
    yield from summary.answer(device)
    yield from summary.reliability(device)
    yield page.explorer(device)
    if device.ooms:
        yield Section("Out of memory", tuple(summary.failures(device, top)))
    yield Section(
        "Memory", tuple(node for node in (summary.totals(device), summary.curves(device)) if node)
    )
    if len(device.steps.peaks) > 1:
        yield Section("Peak per step", tuple(step_peaks(device, top)))
    moment = moment_name(device)
    yield memory_in_use(device, top)
    for facet in device.facets:
        if all(group.name in _NAMES_OF_RECORDER for group in facet.groups):
            continue
        yield Section(
            f"Memory by {facet.name.replace('_', ' ')} {moment}",
            (facet_table(facet, top),),
        )
    if device.churn:
        yield Section("Allocations over the whole trace", (churn(device, top),))
    yield Section(f"Segments {moment}", (segments(device, top),))
    yield Section("Layout at the end", (emptiest_segments(device),))
    yield Section(f"Fragmentation {moment}", tuple(fragmentation(device, top)))
    yield Section("Leak suspects", tuple(leaks(device, top)))


# --- Tables by call site: memory in use, growth from step to step, and allocations over the trace ---

# The bytes, the share and the number of the blocks of a Holder, Line or Group.
_USE_COLUMNS: Final[tuple[ColumnSpec[Any], ...]] = (
    ("in use", "number", lambda row: Bytes(row.bytes)),
    ("share", "bar", lambda row: Ratio(row.share)),
    ("blocks", "number", lambda row: Count(row.count)),
)


def memory_in_use(device: DeviceMemory, top: int) -> Section:
    """List the call sites and the call stacks that hold most memory.

    If each call site has one call stack, the tables would be the same: only the call stacks are listed.
    """
    moment = moment_name(device)
    by_stack = limited_table(
        (
            *_USE_COLUMNS,
            ("call stack", "stack", lambda holder: stack_value(holder.stack, holder.site)),
        ),
        device.holders,
        top,
        caption="In use: the sizes of the blocks, which the allocator rounds up.",
    )
    if len(device.lines) == len(device.holders):
        return Section(f"Memory by call stack {moment}", (by_stack,))
    by_site = limited_table(
        (*_USE_COLUMNS, ("call site", "text", lambda line: line.frame or Text(NO_STACK))),
        device.lines,
        top,
        ("call site", "call sites"),
    )
    return Section(f"Memory by call site {moment}", (by_site, by_stack))


_FACET_PLURALS = {"category": "categories", "user metadata": "user metadata"}


def facet_table(facet: Facet, top: int) -> Table:
    """List the values of a facet, such as annotations, that hold most memory."""
    facet_name = facet.name.replace("_", " ")
    return limited_table(
        (*_USE_COLUMNS, (facet_name, "text", lambda group: Text(group.name or "(none)"))),
        facet.groups,
        top,
        (facet_name, _FACET_PLURALS.get(facet_name, f"{facet_name}s")),
    )


def leaks(device: DeviceMemory, top: int) -> Iterator[Node]:
    """List the call stacks that hold more memory after each step."""
    steps = device.steps
    if not device.events:
        yield Note("info", "Growth was not checked: the snapshot has no trace.")
        return
    if steps.source == "none":
        yield Note(
            "info",
            "Growth was not checked: fewer than 3 steps were found in the events that are shown.",
            remedies=(f"mark each step with {device.snapshot.calls.mark_step}",),
        )
        return
    compared_sentence = (
        f"{steps.count} step boundaries were compared, with {steps.count - 1} steps between them; "
        f"{step_definition(device)}."
    )
    if device.leaks:
        yield Note("warn", f"{growth_sentence(device)} {compared_sentence}")
        yield limited_table(
            (
                ("per step", "number", lambda leak: Bytes(leak.bytes_per_step)),
                ("at last step boundary", "number", lambda leak: Bytes(leak.bytes)),
                ("blocks", "number", lambda leak: Count(leak.count)),
                ("call stack", "stack", lambda leak: stack_value(leak.stack, leak.site)),
            ),
            device.leaks,
            top,
        )
    elif steps.rising:
        rise_text = f"{rising_sentence(device)} (section Peak per step)"
        yield Note(
            "info",
            f"No call stack holds more memory after each step, but {rise_text}. {compared_sentence}",
        )
    elif any(row.change_bytes > 0 for row in steps.site_growth):
        yield Note(
            "ok",
            "No call stack kept growing from step to step. Section Peak per step lists what grew from the"
            f" first to the last step. {compared_sentence}",
        )
    else:
        yield Note("ok", f"No call stack holds more memory after each step. {compared_sentence}")


_LIFETIME_CAPTION = "Mean lifetime: n/a if no block was freed, or if the snapshot has no times."


def churn(device: DeviceMemory, top: int) -> Table:
    """List the call stacks that allocate most over the whole trace."""
    listed_rows = device.churn[:top] if top else device.churn
    has_missing_lifetime = any(row.mean_lifetime_us is None for row in listed_rows)
    return limited_table(
        (
            ("requested", "number", lambda row: Bytes(row.bytes)),
            ("share", "bar", lambda row: Ratio(row.share)),
            ("count", "number", lambda row: Count(row.count)),
            ("mean lifetime", "number", _mean_lifetime),
            ("call stack", "stack", lambda row: stack_value(row.stack, row.site)),
        ),
        device.churn,
        top,
        caption=_LIFETIME_CAPTION if has_missing_lifetime else "",
    )


def _mean_lifetime(row: Churn) -> Value:
    if row.mean_lifetime_us is None:
        return Unavailable("nothing was freed, or the file has no times")
    return Seconds(row.mean_lifetime_us / 1e6)


# --- Segments: totals by group, fragmentation, and their layout ------------------------------------

_MAX_LISTED_SEGMENTS = 5  # maximum number of segments that a terminal shows


def segments(device: DeviceMemory, top: int) -> Table:
    """List the groups of segments: one per pool, stream and kind."""
    names = {POOL_NAMES[group.pool] for group in device.segments if group.pool in POOL_NAMES}
    captions = [f"Pool {name}: {text}." for name, text in _POOL_CAPTIONS.items() if name in names]
    if names:
        captions.append('Kind "-": only segments of PyTorch are small or large.')
    return limited_table(
        (
            ("pool", "text", lambda group: Text(pool_name(group.pool))),
            ("stream", "number", lambda group: Count(group.stream)),
            ("kind", "text", _segment_kind),
            ("segments", "number", lambda group: Count(group.segments)),
            ("reserved", "number", lambda group: Bytes(group.reserved_bytes)),
            ("in use", "number", lambda group: Bytes(group.used_bytes)),
            ("free", "number", lambda group: Bytes(group.free_bytes)),
            ("largest free block", "number", lambda group: Bytes(group.largest_hole_bytes)),
        ),
        device.segments,
        top,
        ("group", "groups"),
        caption=" ".join(captions),
    )


_POOL_CAPTIONS = {
    DRIVER: "memory from calls of the driver, such as cudaMalloc, outside any library's pool",
    MANAGED: "memory of cudaMallocManaged, which GPU and host share",
    JAX: "the pool of JAX",
}


def _segment_kind(group: SegmentGroup) -> Text:
    if group.pool in POOL_NAMES:  # Only PyTorch's pools have small and large segments.
        return Text("-")
    return Text(f"{group.kind}, expandable" if group.expandable else group.kind)


def fragmentation(device: DeviceMemory, top: int) -> Iterator[Node]:
    """Show the free memory in segments, and the blocks that keep these segments in use."""
    summary = device.fragmentation
    free_text = f"{format_bytes(summary.free_bytes)} ({format_ratio(summary.free_share)}"
    rounding_text = (
        f"{format_bytes(summary.rounding_bytes)} ({format_ratio(summary.rounding_share)}"
    )
    yield Facts(
        (
            ("free in segments", Text(f"{free_text} of reserved)")),
            ("largest free block", Bytes(summary.largest_hole_bytes)),
            ("free blocks", Count(summary.holes)),
            ("free in segments in use", Bytes(summary.stranded_bytes)),
            ("free in empty segments", Bytes(summary.releasable_bytes)),
            ("lost to rounding", Text(f"{rounding_text} of the blocks in use)")),
        )
    )
    differs_at_failure = device.ooms and device.ooms[-1].free_bytes != summary.free_bytes
    if device.at.name == "peak" and differs_at_failure:
        yield Note("info", "At the failed allocation these figures differ: --at oom shows them.")
    if summary.pins:
        yield limited_table(
            (
                ("free", "number", lambda pin: Bytes(pin.pinned_bytes)),
                ("unshared", "number", lambda pin: Bytes(pin.alone_bytes)),
                ("segments", "number", lambda pin: Count(pin.segments)),
                ("blocks", "number", lambda pin: Count(pin.blocks)),
                ("block bytes", "number", lambda pin: Bytes(pin.bytes)),
                ("call stack of the blocks", "stack", lambda pin: stack_value(pin.stack, pin.site)),
            ),
            summary.pins,
            top,
            caption="Free: free memory in the segments that contain these blocks. Unshared: free"
            " memory in segments that contain no blocks of other call stacks.",
        )


def emptiest_segments(device: DeviceMemory) -> Table:
    """Return the segments at the end with the most free memory; the page draws all segments."""
    layout = device.layout
    free_by_segment, used_by_segment = layout.free_by_segment(), layout.used_by_segment()
    block_counts = np.bincount(layout.block_segment, minlength=len(free_by_segment))
    return table(
        (
            ("segment", "text", lambda i: Text(f"0x{int(layout.segments.address[i]):x}")),
            ("size", "number", lambda i: Bytes(int(layout.segments.size[i]))),
            ("in use", "number", lambda i: Bytes(int(used_by_segment[i]))),
            ("free", "number", lambda i: Bytes(int(free_by_segment[i]))),
            ("blocks in use", "number", lambda i: Count(int(block_counts[i]))),
        ),
        np.argsort(-free_by_segment, kind="stable")[:_MAX_LISTED_SEGMENTS].tolist(),
        f"The {_MAX_LISTED_SEGMENTS} segments with the most free memory are listed."
        if len(free_by_segment) > _MAX_LISTED_SEGMENTS
        else "",
    )


# --- The peak of each step: a chart, a table, and the growth by call site --------------------------


def step_peaks(device: DeviceMemory, top: int) -> Iterator[Node]:
    """Show the peaks of the steps, and the memory that grew between the first and the last step."""
    peaks = device.steps.peaks
    first_peak_bytes = peaks[0].requested_bytes
    yield Chart(
        title="Requested memory of each step",
        x=np.array([peak.step for peak in peaks], np.float64),
        series=(
            Series("peak", np.array([peak.requested_bytes for peak in peaks], np.int64)),
            Series("at the start", np.array([peak.start_bytes for peak in peaks], np.int64)),
        ),
        x_label="step",
        x_end=peaks[-1].step + 1,
    )
    listed_peaks = (
        peaks if top == 0 else [peaks[index] for index in evenly_spaced(len(peaks), max(top, 2))]
    )
    omitted_count = len(peaks) - len(listed_peaks)
    step_noun = "step" if omitted_count == 1 else "steps"
    yield table(
        (
            ("step", "number", lambda peak: Count(peak.step)),
            ("peak", "number", lambda peak: Bytes(peak.requested_bytes)),
            ("change", "number", lambda peak: Change(peak.requested_bytes - first_peak_bytes)),
            ("at the start", "number", lambda peak: Bytes(peak.start_bytes)),
            ("reserved", "number", lambda peak: Bytes(peak.reserved_bytes)),
            (
                "event of the peak",
                "number",
                lambda peak: Count(peak.peak_event) if peak.peak_event >= 0 else Text("-"),
            ),
        ),
        listed_peaks,
        (
            f"{format_count(omitted_count)} more {step_noun}: --top 0 shows all. "
            if omitted_count
            else ""
        )
        + "Reserved: the most within the step; all other sizes are requested memory. Change: of the peak,"
        f" since the first step. {capitalized(step_definition(device))}; the table counts steps from 0."
        + (' Event "-": before the first event.' if peaks[0].peak_event < 0 else ""),
    )
    if device.steps.site_growth:
        yield limited_table(
            (
                ("change", "number", lambda row: Change(row.change_bytes)),
                ("first step", "number", lambda row: Bytes(row.before_bytes)),
                ("last step", "number", lambda row: Bytes(row.after_bytes)),
                ("blocks", "number", lambda row: Count(row.after_count)),
                ("call stack", "stack", lambda row: stack_value(row.stack, row.site)),
            ),
            device.steps.site_growth,
            top,
            caption="Requested memory at the peak of the first and of the last"
            " step. Blocks: at the peak of the last step.",
        )
