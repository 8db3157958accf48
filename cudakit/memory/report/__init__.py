"""The MemoryResult as a Document: the answer first, the details after it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from cudakit.memory.report import page, summary, tables
from cudakit.memory.report.rows import device_name, files_name, moment_name, per_device
from cudakit.memory.result import DeviceMemory, MemoryResult
from cudakit.memory.selection import MemorySpec
from cudakit.memory.snapshot import POOL_NAMES, pool_name
from cudakit.report.document import Document, Node, Note, Section

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
        yield Section("Peak per step", tuple(tables.step_peaks(device, top)))
    moment = moment_name(device)
    yield tables.memory_in_use(device, top)
    for facet in device.facets:
        if all(group.name in _NAMES_OF_RECORDER for group in facet.groups):
            continue
        yield Section(
            f"Memory by {facet.name.replace('_', ' ')} {moment}",
            (tables.facet_table(facet, top),),
        )
    if device.churn:
        yield Section("Allocations over the whole trace", (tables.churn(device, top),))
    yield Section(f"Segments {moment}", (tables.segments(device, top),))
    yield Section("Layout at the end", (tables.emptiest_segments(device),))
    yield Section(f"Fragmentation {moment}", tuple(tables.fragmentation(device, top)))
    yield Section("Leak suspects", tuple(tables.leaks(device, top)))
