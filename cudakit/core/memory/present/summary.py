"""The first part of a report: trust in the file, failed allocations, and totals."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields

import numpy as np

from cudakit.core.memory.present.rows import device_name, stack_value, table
from cudakit.core.memory.result import DeviceMemory, State
from cudakit.document import (
    Bytes,
    Chart,
    Column,
    Count,
    Facts,
    Marker,
    Node,
    Note,
    Series,
    Table,
    Text,
    Value,
)


def health_notes(device: DeviceMemory) -> Iterator[Note]:
    """Yield whether trace and final state agree, and what to record differently."""
    health = device.health
    if device.exact:
        yield Note("ok", _exact_sentence(device))
    else:
        yield Note(
            "warn",
            _inexact_sentence(device),
            remedies=("figures before the end may be off; the end itself is exact",),
        )
    for warning in health.warnings:
        yield Note("warn", warning)
    for advice in health.advice:
        yield Note("info", advice)


def _exact_sentence(device: DeviceMemory) -> str:
    """Return the sentence of a consistent trace, with how far back it reaches."""
    if not device.events:
        return f"{device_name(device)}: the state at the end, without a trace"
    reach = (
        "from an empty allocator on"
        if device.health.begins_complete
        else "of a program that held memory before the first one"
    )
    return (
        f"{device_name(device)}: {device.events:,} events {reach}; "
        "the trace agrees with the state at its end"
    )


def _inexact_sentence(device: DeviceMemory) -> str:
    """Return how trace and final state disagree."""
    counts = device.health.contradictions
    words = ", ".join(
        f"{getattr(counts, field.name):,} {field.name.replace('_', ' ')}"
        for field in fields(counts)
        if getattr(counts, field.name)
    )
    return (
        f"{device_name(device)}: the trace of {device.events:,} events and the state at its end "
        f"disagree {device.inconsistencies:,} times ({words or 'entries passed over'})"
    )


def failures(device: DeviceMemory, top: int) -> Iterator[Node]:
    """Show the last ``top`` failed allocations, 0 for all."""
    shown = device.ooms if top == 0 else device.ooms[-top:]
    if len(shown) < len(device.ooms):
        yield Note("info", f"the last {len(shown)} of {len(device.ooms)} failed allocations:")
    for oom in shown:
        yield Note("error", oom.sentence, remedies=oom.remedies)
        yield Facts(
            (
                ("requested", Bytes(oom.size_bytes)),
                ("free on the device", Bytes(oom.device_free_bytes)),
                ("allocated", Bytes(oom.state.allocated_bytes)),
                ("reserved", Bytes(oom.state.reserved_bytes)),
                ("free in segments", Bytes(oom.free_bytes)),
                ("largest hole", Bytes(oom.largest_hole_bytes)),
                ("pending free", Bytes(oom.state.pending_free_bytes)),
                ("event", Count(oom.event)),
                ("asked by", stack_value(oom.stack, oom.site)),
            )
        )


# Ranks of a balanced program differ by less than this share of the median peak.
_OUTLIER = 0.05


def overview(devices: Sequence[DeviceMemory]) -> Table:
    """Compare devices of one or several files in a row each."""
    return table(
        (
            ("file", "text", lambda device: Text(device.file)),
            ("device", "text", lambda device: Text(device_name(device))),
            ("events", "number", lambda device: Count(device.events)),
            ("peak requested", "number", lambda device: Bytes(device.peak.requested_bytes)),
            ("peak reserved", "number", lambda device: Bytes(device.peak.highest_reserved_bytes)),
            ("end allocated", "number", lambda device: Bytes(device.end.allocated_bytes)),
            ("end reserved", "number", lambda device: Bytes(device.end.reserved_bytes)),
            ("OOMs", "number", lambda device: Count(len(device.ooms))),
        ),
        devices,
        _outlier(devices),
    )


def _outlier(devices: Sequence[DeviceMemory]) -> str:
    """Return the rank whose peak stands out, a sign of an unbalanced program; "" if none does."""
    peaks = sorted(device.peak.requested_bytes for device in devices)
    middle = peaks[len(peaks) // 2]
    highest = max(devices, key=lambda device: device.peak.requested_bytes)
    above = highest.peak.requested_bytes / middle - 1 if middle else 0.0
    if len(devices) < 3 or above < _OUTLIER:
        return ""
    return f"{highest.file} {device_name(highest)} peaks {above:.0%} above the median"


def totals(device: DeviceMemory) -> Table:
    """Show the totals of the end, the peak and the moment asked for side by side."""
    states = [("at end", device.end)]
    if device.at.name != "end":
        words = (
            f"event {device.at.event:,}" if device.at.name == "event" else f"at {device.at.name}"
        )
        states.insert(0, (words, device.at.state))
    peak = device.peak
    none = Text("")
    # The title of a row, its value at a moment, and the highest one.
    rows: tuple[tuple[str, Callable[[State], Value], Value], ...] = (
        (
            "allocated",
            lambda s: Bytes(s.allocated_bytes, s.allocated_is_derived),
            Bytes(peak.highest_allocated_bytes, peak.allocated_is_derived),
        ),
        ("requested", lambda s: Bytes(s.requested_bytes), Bytes(peak.requested_bytes)),
        ("pending free", lambda s: Bytes(s.pending_free_bytes), none),
        ("reserved", lambda s: Bytes(s.reserved_bytes), Bytes(peak.highest_reserved_bytes)),
        ("segments", lambda s: Count(s.segments), none),
        ("blocks in use", lambda s: Count(s.blocks), none),
    )
    return Table(
        columns=(
            Column("", "text"),
            *(Column(words, "number") for words, _ in states),
            Column("highest ever", "number"),
        ),
        rows=tuple(
            (Text(name), *(value(state) for _, state in states), highest)
            for name, value, highest in rows
        ),
        caption=_totals_caption(device),
    )


def _totals_caption(device: DeviceMemory) -> str:
    peak = device.peak
    when = "before the first recorded event" if peak.event < 0 else f"event {peak.event:,}"
    caption = f"the peak is the moment of most requested memory: {when} of {device.events:,}"
    if peak.allocated_is_derived:
        caption += "; ~ follows from the allocator's rules, the file does not record it"
    return caption


def curves(device: DeviceMemory) -> Chart | None:
    """Draw requested, allocated and reserved bytes from event to event, with what ran out.

    Events, not seconds: a program's pauses hold no memory, and ``--at`` takes an event.
    """
    line = device.timeline
    if len(line.event) < 2:
        return None
    return Chart(
        title="Memory along the trace",
        x=np.maximum(np.array(line.event, np.float64), 0),
        series=(
            Series("reserved", np.array(line.reserved_bytes, np.int64)),
            Series("allocated", np.array(line.allocated_bytes, np.int64)),
            Series("requested", np.array(line.requested_bytes, np.int64)),
        ),
        x_label="event",
        markers=tuple(Marker(float(oom.event), "out of memory", "error") for oom in device.ooms),
    )
