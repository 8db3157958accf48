"""The WhatIfResult as a Document."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from cudakit.memory.report.rows import ColumnSpec, files_name, per_device, table
from cudakit.memory.result import (
    LIMITED_BASELINE,
    DeviceWhatIf,
    Limit,
    Outcome,
    WhatIfResult,
)
from cudakit.memory.whatif import join_names, shortage_text
from cudakit.report.document import (
    Bytes,
    Change,
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
from cudakit.units import Unavailable, format_bytes, format_count


def report(result: WhatIfResult) -> Document:
    """Return the report, the answer first."""
    device_nodes = per_device(
        (f"{device.file}: cuda:{device.device}", _sections(device)) for device in result.devices
    )
    return Document(f"GPU memory of {files_name(result.files)} under other settings", device_nodes)


def brief_sentences(result: WhatIfResult) -> tuple[Note, ...]:
    """Return the headline and the warnings of each device; of several devices, with file and device."""
    has_several = len(result.devices) > 1
    return tuple(
        replace(note, text=f"{device.file} cuda:{device.device}: {note.text}")
        if has_several
        else note
        for device in result.devices
        for note in (*_answers(device), _reliability_notes(device))
    )


def _answers(device: DeviceWhatIf) -> Iterator[Note]:
    """Yield what the limit and the settings would have changed."""
    limit, baseline = device.limit, device.baseline
    has_failed = baseline.ooms > 0 or baseline.shortage is not None
    if limit is not None and limit.source == "given" and device.recorded.ooms and not has_failed:
        yield Note(
            "ok",
            f"With a memory limit of {format_bytes(limit.bytes)}, no request fails with the recorded"
            " settings.",
        )
    yield Note("info" if device.best is None else "ok", f"{device.headline}.")
    yield from _shortage_notes(device)


def _sections(device: DeviceWhatIf) -> Iterator[Node]:
    yield from _answers(device)
    yield _reliability_notes(device)
    if device.limit is not None:
        yield Note("info", _limit_sentence(device.limit))
    baseline = () if device.baseline == device.replayed else (device.baseline,)
    outcomes = (device.recorded, device.replayed, *baseline, *device.tried)
    yield Section("Reserved memory", (_reserved_table(device, outcomes),))
    yield Section("Driver calls and failures", (_driver_table(outcomes),))


def _shortage_notes(device: DeviceWhatIf) -> Iterator[Note]:
    names_by_shortage: dict[str, list[str]] = {}
    for outcome in (device.baseline, *device.tried):
        if outcome.shortage is not None:
            names_by_shortage.setdefault(shortage_text(outcome), []).append(outcome.name)
    for shortage_sentence, settings in names_by_shortage.items():
        replays_noun = "this replay" if len(settings) == 1 else "these replays"
        yield Note(
            "warn",
            f"{join_names(settings)}: out of memory {shortage_sentence};"
            f" the figures of {replays_noun} end there.",
        )


def _reliability_notes(device: DeviceWhatIf) -> Note:
    if not device.differences:
        is_user_limit = device.limit is not None and device.limit.source == "given"
        limit_clause = ", without --what-if-limit," if is_user_limit else ""
        if is_user_limit and device.recorded.ooms:
            limit_clause = ", with the limit of the recording in place of --what-if-limit,"
        return Note(
            "ok",
            f"The replay with the recorded settings{limit_clause} reproduces every recorded figure.",
        )
    texts = []
    for difference in device.differences:
        is_size = difference.figure.startswith(("peak", "end"))
        recorded, replayed = map(
            format_bytes if is_size else format_count, (difference.recorded, difference.replayed)
        )
        texts.append(f"{difference.figure} {replayed} instead of {recorded}")
    return Note(
        "warn",
        f"The replay with the recorded settings differs from the recording: {'; '.join(texts)}.",
        device.reasons or ("the reason is unknown",),
    )


def _limit_sentence(limit: Limit) -> str:
    size_text = format_bytes(limit.bytes)
    if limit.source == "given":
        return f"Memory limit of the other replays: {size_text} (--what-if-limit)."
    if limit.source == "device full":
        return (
            f"Memory limit of the replays: {size_text}, the reserved memory of the process plus the free"
            " memory of the device when the request failed."
        )
    return (
        f"Memory limit of the replays: {size_text}, the most that was reserved in the recording;"
        " --what-if-limit sets another."
    )


def _reserved_table(device: DeviceWhatIf, outcomes: tuple[Outcome, ...]) -> Table:
    baseline = device.baseline
    # The peak of a replay that ended early is not comparable.
    compared = {
        id(outcome)
        for outcome in device.tried
        if outcome.shortage is None and baseline.shortage is None
    }

    def change_cell(outcome: Outcome) -> Value:
        increase_bytes = outcome.peak.reserved_bytes - baseline.peak.reserved_bytes
        return Change(increase_bytes) if id(outcome) in compared else Text("")

    change_column: ColumnSpec[Outcome] = ("change", "number", change_cell)
    change_text = f'Change: of the peak, relative to the row "{_ROW_NAMES[baseline.name]}". '
    return table(
        (
            _SETTINGS_COLUMN,
            ("peak", "number", lambda outcome: Bytes(outcome.peak.reserved_bytes)),
            *((change_column,) if compared else ()),
            ("end", "number", lambda outcome: Bytes(outcome.end.reserved_bytes)),
            ("free in segments", "number", lambda outcome: Bytes(outcome.fragmentation_bytes)),
            ("free share", "number", lambda outcome: Ratio(outcome.fragmentation)),
        ),
        outcomes,
        f"{change_text if compared else ''}Free in segments: at the peak of requested memory. Free "
        "share: free in segments, relative to the memory reserved at that peak.",
    )


def _driver_table(outcomes: tuple[Outcome, ...]) -> Table:
    return table(
        (
            _SETTINGS_COLUMN,
            ("allocations", "number", lambda outcome: Count(outcome.device_allocations)),
            ("frees", "number", lambda outcome: Count(outcome.device_frees)),
            (
                "retries",
                "number",
                lambda outcome: (
                    Unavailable("the file does not record who released memory")
                    if outcome.retries is None
                    else Count(outcome.retries)
                ),
            ),
            ("out of memory", "number", lambda outcome: Count(outcome.ooms)),
        ),
        outcomes,
        "Retries: driver allocations repeated after an attempt to release the whole cache. Out of memory: "
        "failed requests.",
    )


# Titles of the rows that are not named after settings, by the name of the outcome.
_ROW_NAMES: Final = {
    "recorded": "recording",
    "replayed, as recorded": "replay with recorded settings",
    LIMITED_BASELINE: "recorded settings with the limit",
}


_SETTINGS_COLUMN: Final[ColumnSpec[Outcome]] = (
    "settings",
    "text",
    lambda outcome: Text(_ROW_NAMES.get(outcome.name, outcome.name)),
)
