"""The comparison of two snapshots, and the replays with other settings, as Documents."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import replace
from typing import Final

from cudakit.memory.report import page
from cudakit.memory.report.summary import (
    ColumnSpec,
    device_name,
    files_name,
    limited_table,
    per_device,
    stack_value,
    table,
)
from cudakit.memory.result import (
    LIMITED_BASELINE,
    DeviceDiff,
    DeviceWhatIf,
    DiffResult,
    Limit,
    MomentDiff,
    Outcome,
    WhatIfResult,
)
from cudakit.memory.snapshot import site_name
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
from cudakit.units import Unavailable, format_bytes, format_count, format_ratio

# Maximum ratio of after to before for which growth is a percentage (1,000%). Beyond it, growth is a factor.
_MAX_PERCENT_RATIO = 11


def diff_report(result: DiffResult, *, top: int = 10) -> Document:
    """Return the report; tables show ``top`` rows, 0 shows all."""
    device_nodes = per_device(
        (device_name(device), _device_nodes(device, top)) for device in result.devices
    )
    return Document(f"GPU memory: {result.before.name} → {result.after.name}", device_nodes)


def _device_nodes(device: DeviceDiff, top: int) -> Iterator[Node]:
    moments = {"peak": device.peak, "end": device.end}
    texts = [f"{_change_text(moment)} at the {name}" for name, moment in moments.items()]
    yield Note(
        "warn" if any(map(_has_grown, moments.values())) else "ok",
        f"Requested memory: {'; '.join(texts)}.{_largest_increase_text(device.peak)}",
    )
    yield _totals_table(device)
    yield page.difference(device)
    for name, moment in moments.items():
        tables = tuple(_change_tables(moment, top))
        yield Section(f"Changes at the {name}", tables or (Note("ok", "No call stack changed."),))


def _largest_increase_text(moment: MomentDiff) -> str:
    """Return a sentence on the call site whose memory grew most at the peak; "" if none grew."""
    change_by_site: defaultdict[str, int] = defaultdict(int)
    for row in (*moment.grown, *moment.appeared, *moment.shrunk, *moment.vanished):
        if row.stack:
            change_by_site[site_name(row.stack[row.site])] += row.change_bytes
    site = max(change_by_site, key=lambda site: change_by_site[site], default="")
    if change_by_site[site] <= 0:
        return ""
    size_text = format_bytes(change_by_site[site])
    return f" Largest increase of a call site at the peak: {site}, {size_text}."


def _has_grown(moment: MomentDiff) -> bool:
    return moment.after.state.requested_bytes > moment.before.state.requested_bytes


def _change_text(moment: MomentDiff) -> str:
    bytes_before = moment.before.state.requested_bytes
    bytes_after = moment.after.state.requested_bytes
    if bytes_before == bytes_after:
        return f"unchanged ({format_bytes(bytes_after)})"
    direction = "more" if bytes_after > bytes_before else "less"
    size_text = format_bytes(abs(bytes_after - bytes_before))
    if not bytes_before:
        return f"{size_text} {direction}"
    if bytes_after / bytes_before > _MAX_PERCENT_RATIO:
        return f"{size_text} {direction} ({_factor_text(bytes_before, bytes_after)} as much)"
    return f"{size_text} ({format_ratio(abs(bytes_after / bytes_before - 1))}) {direction}"


def _factor_text(bytes_before: int, bytes_after: int) -> str:
    return f"{round(bytes_after / bytes_before):,} times"


def _totals_table(device: DeviceDiff) -> Table:
    rows = [
        (f"{amount} at {name}", *(getattr(side.state, f"{amount}_bytes") for side in sides))
        for name, sides in (
            ("peak", (device.peak.before, device.peak.after)),
            ("end", (device.end.before, device.end.after)),
        )
        for amount in ("requested", "reserved")
    ]
    return table(
        (
            ("", "text", lambda row: Text(row[0])),
            ("before", "number", lambda row: Bytes(row[1])),
            ("after", "number", lambda row: Bytes(row[2])),
            ("change", "number", lambda row: Change(row[2] - row[1])),
            ("growth", "number", lambda row: _growth_value(row[1], row[2])),
        ),
        rows,
        " ".join(
            f"The snapshot {side} has no trace: its peak is unknown, and its end is compared."
            for side, moment in (("before", device.end.before), ("after", device.end.after))
            if moment.event < 0
        ),
    )


def _growth_value(bytes_before: int, bytes_after: int) -> Value:
    if not bytes_before:
        return Unavailable("no memory was in use before")
    if bytes_after / bytes_before > _MAX_PERCENT_RATIO:
        return Text(_factor_text(bytes_before, bytes_after))
    return Ratio(bytes_after / bytes_before - 1)


_ROWS_CAPTION = (
    "Sizes: those of the blocks, which the allocator rounds up. A row combines call stacks with the same"
    " files and functions, whose lines may differ; it names the lines of the largest."
)


def _change_tables(moment: MomentDiff, top: int) -> Iterator[Node]:
    rows_by_kind = {
        kind: rows
        for kind in ("grown", "appeared", "shrunk", "vanished")
        if (rows := getattr(moment, kind))
    }
    for kind, rows in rows_by_kind.items():
        yield limited_table(
            (
                (kind, "number", lambda row: Change(row.change_bytes)),
                ("before", "number", lambda row: Bytes(row.before_bytes)),
                ("after", "number", lambda row: Bytes(row.after_bytes)),
                ("blocks after", "number", lambda row: Count(row.after_count)),
                ("call stack", "stack", lambda row: stack_value(row.stack, row.site)),
            ),
            rows,
            top,
            caption=_ROWS_CAPTION if kind == [*rows_by_kind][-1] else "",
        )


# --- The WhatIfResult as a Document ----------------------------------------------------------------


def what_if_report(result: WhatIfResult) -> Document:
    """Return the report, the answer first."""
    device_nodes = per_device(
        (f"{device.file}: cuda:{device.device}", _what_if_nodes(device))
        for device in result.devices
    )
    return Document(f"GPU memory of {files_name(result.files)} under other settings", device_nodes)


def what_if_sentences(result: WhatIfResult) -> tuple[Note, ...]:
    """Return the headline and the warnings of each device; of several devices, with file and device."""
    has_several = len(result.devices) > 1
    return tuple(
        replace(note, text=f"{device.file} cuda:{device.device}: {note.text}")
        if has_several
        else note
        for device in result.devices
        for note in (*_what_if_answers(device), _reliability_notes(device))
    )


def _what_if_answers(device: DeviceWhatIf) -> Iterator[Note]:
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


def _what_if_nodes(device: DeviceWhatIf) -> Iterator[Node]:
    yield from _what_if_answers(device)
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
