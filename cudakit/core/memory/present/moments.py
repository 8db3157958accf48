"""Totals: devices of several files compared, and the moments of one device."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cudakit.core.memory.present.rows import device_name
from cudakit.core.memory.result import DeviceMemory, State
from cudakit.document import Bytes, Column, Count, Table, Text, Value

# Ranks of a balanced program differ by less than this share of the median peak.
_OUTLIER = 0.05


def overview(devices: Sequence[DeviceMemory]) -> Table:
    """Compare devices of one or several files in a row each."""
    return Table(
        columns=(
            Column("file", "text"),
            Column("device", "text"),
            Column("events", "number"),
            Column("peak requested", "number"),
            Column("peak reserved", "number"),
            Column("end allocated", "number"),
            Column("end reserved", "number"),
            Column("OOMs", "number"),
        ),
        rows=tuple(
            (
                Text(device.file),
                Text(device_name(device)),
                Count(device.events),
                Bytes(device.peak.requested_bytes),
                Bytes(device.peak.highest_reserved_bytes),
                Bytes(device.end.allocated_bytes),
                Bytes(device.end.reserved_bytes),
                Count(len(device.ooms)),
            )
            for device in devices
        ),
        caption=_outlier(devices),
    )


def _outlier(devices: Sequence[DeviceMemory]) -> str:
    """Name the rank whose peak stands out, as an unbalanced program has one."""
    peaks = sorted(device.peak.requested_bytes for device in devices)
    middle = peaks[len(peaks) // 2]
    highest = max(devices, key=lambda device: device.peak.requested_bytes)
    above = highest.peak.requested_bytes / middle - 1 if middle else 0.0
    if len(devices) < 3 or above < _OUTLIER:
        return ""
    return f"{highest.file} {device_name(highest)} peaks {above:.0%} above the median"


def moments(device: DeviceMemory) -> Table:
    """Set the end, the peak and the moment asked for side by side."""
    states: list[tuple[str, State]] = [("end", device.end)]
    if device.at.name != "end":
        states.insert(
            0, (device.at.name if device.at.name != "event" else "event", device.at.state)
        )
    rows: tuple[tuple[str, Callable[[State], Value]], ...] = (
        ("allocated", lambda s: Bytes(s.allocated_bytes, s.allocated_is_derived)),
        ("requested", lambda s: Bytes(s.requested_bytes)),
        ("pending free", lambda s: Bytes(s.pending_free_bytes)),
        ("reserved", lambda s: Bytes(s.reserved_bytes)),
        ("segments", lambda s: Count(s.segments)),
        ("blocks in use", lambda s: Count(s.blocks)),
    )
    highest: dict[str, Value] = {
        "allocated": Bytes(device.peak.highest_allocated_bytes, device.peak.allocated_is_derived),
        "requested": Bytes(device.peak.requested_bytes),
        "reserved": Bytes(device.peak.highest_reserved_bytes),
    }
    none = Text("")
    return Table(
        columns=(
            Column("", "text"),
            *(
                Column(f"at {name}" if name != "event" else _event(device), "number")
                for name, _ in states
            ),
            Column("highest ever", "number"),
        ),
        rows=tuple(
            (Text(name), *(value(state) for _, state in states), highest.get(name, none))
            for name, value in rows
        ),
        caption=_moments_caption(device),
    )


def _event(device: DeviceMemory) -> str:
    return f"event {device.at.event:,}"


def _moments_caption(device: DeviceMemory) -> str:
    peak = device.peak
    when = "before the first recorded event" if peak.event < 0 else f"event {peak.event:,}"
    caption = f"the peak is the moment of most requested memory: {when} of {device.events:,}"
    if peak.allocated_is_derived:
        caption += "; ~ follows from the allocator's rules, the file does not record it"
    return caption
