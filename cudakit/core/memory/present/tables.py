"""The tables of the memory report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import TypeVar

from cudakit.core.memory.result import (
    DeviceMemory,
    Facet,
    Fragmentation,
    Oom,
    State,
)
from cudakit.document import (
    Bytes,
    Column,
    Count,
    Facts,
    Frame,
    Node,
    Note,
    Ratio,
    Seconds,
    Stack,
    Table,
    Text,
    Unavailable,
    Value,
)

_T = TypeVar("_T")

# Ranks of a balanced program differ by less than this share of the median peak.
_OUTLIER = 0.05

NO_STACK = "no stack recorded (C++ thread, e.g. backward)"


def device_name(device: DeviceMemory) -> str:
    """Name a device as CUDA programs do."""
    return "pinned host memory" if device.device is None else f"cuda:{device.device}"


def moment_name(device: DeviceMemory) -> str:
    """Say of which moment the tables speak."""
    at = device.at
    return {"peak": "at the peak", "end": "at the end", "oom": "when it ran out"}.get(
        at.name, f"after event {at.event:,}"
    )


def exact_sentence(device: DeviceMemory) -> str:
    """Say that the file can be trusted, and how far back it reaches."""
    if not device.events:
        return f"{device_name(device)}: the state at the end, without a trace"
    reach = (
        "from an empty allocator on"
        if device.health.begins_complete
        else "of which the last part is recorded"
    )
    return (
        f"{device_name(device)}: {device.events:,} events {reach}; "
        "the trace agrees with the state at its end"
    )


def inexact_sentence(device: DeviceMemory) -> str:
    """Say how trace and final state disagree."""
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


def lines(device: DeviceMemory, top: int) -> Table:
    """List the source lines that hold most."""
    return _limited(
        ("line of source", "lines of source"),
        (
            Column("bytes", "number"),
            Column("share", "bar"),
            Column("blocks", "number"),
            Column("line of your program", "text"),
        ),
        device.lines,
        lambda line: (
            Bytes(line.bytes),
            Ratio(line.share),
            Count(line.count),
            line.frame or Text(NO_STACK),
        ),
        top,
    )


def holders(device: DeviceMemory, top: int) -> Table:
    """List the call stacks that hold most."""
    return _limited(
        ("call stack", "call stacks"),
        (
            Column("bytes", "number"),
            Column("share", "bar"),
            Column("blocks", "number"),
            Column("call stack", "stack"),
        ),
        device.holders,
        lambda holder: (
            Bytes(holder.bytes),
            Ratio(holder.share),
            Count(holder.count),
            stack_value(holder.stack, holder.site),
        ),
        top,
    )


def facet(found: Facet, top: int) -> Table:
    """List the values of a facet that hold most."""
    return _limited(
        ("value", "values"),
        (
            Column("bytes", "number"),
            Column("share", "bar"),
            Column("blocks", "number"),
            Column(found.name.replace("_", " "), "text"),
        ),
        found.groups,
        lambda group: (
            Bytes(group.bytes),
            Ratio(group.share),
            Count(group.count),
            Text(group.name or "(none)"),
        ),
        top,
    )


def segments(device: DeviceMemory, top: int) -> Table:
    """List the groups of segments."""
    return _limited(
        ("group", "groups"),
        (
            Column("pool", "text"),
            Column("stream", "number"),
            Column("kind", "text"),
            Column("segments", "number"),
            Column("reserved", "number"),
            Column("in use", "number"),
            Column("free", "number"),
            Column("largest hole", "number"),
        ),
        device.segments,
        lambda group: (
            Text(pool_name(group.pool)),
            Count(group.stream),
            Text(f"{group.kind}, expandable" if group.expandable else group.kind),
            Count(group.segments),
            Bytes(group.reserved_bytes),
            Bytes(group.used_bytes),
            Bytes(group.free_bytes),
            Bytes(group.largest_hole_bytes),
        ),
        top,
    )


def pool_name(pool: tuple[int, int]) -> str:
    """Name a pool: (0, 0) is the default one, a first number is a graph's, a second a MemPool's."""
    if pool == (0, 0):
        return "default"
    return f"graph {pool[0]},{pool[1]}" if pool[0] else f"user {pool[0]},{pool[1]}"


def fragmentation(device: DeviceMemory, top: int) -> Iterator[Node]:
    """Show what is free inside segments, and the blocks that pin it there."""
    found = device.fragmentation
    yield _fragmentation_facts(found)
    if found.pins:
        yield _limited(
            ("call stack", "call stacks"),
            (
                Column("pins", "number"),
                Column("alone", "number"),
                Column("segments", "number"),
                Column("with blocks", "number"),
                Column("of", "number"),
                Column("call stack of the pinning blocks", "stack"),
            ),
            found.pins,
            lambda pin: (
                Bytes(pin.pinned_bytes),
                Bytes(pin.alone_bytes),
                Count(pin.segments),
                Count(pin.blocks),
                Bytes(pin.bytes),
                stack_value(pin.stack, pin.site),
            ),
            top,
        )


def _fragmentation_facts(found: Fragmentation) -> Facts:
    return Facts(
        (
            ("free inside segments", Bytes(found.free_bytes)),
            ("of reserved", Ratio(found.free_share)),
            ("largest hole", Bytes(found.largest_hole_bytes)),
            ("holes", Count(found.holes)),
            ("pinned by blocks", Bytes(found.stranded_bytes)),
            ("in empty segments", Bytes(found.releasable_bytes)),
            ("lost to rounding", Bytes(found.rounding_bytes)),
            ("of blocks", Ratio(found.rounding_share)),
        )
    )


def leaks(device: DeviceMemory, top: int) -> Iterator[Node]:
    """List the stacks that hold more after each step."""
    steps = device.steps
    if steps.source == "none":
        yield Note(
            "info",
            "no steps were found to compare",
            remedies=("mark them with torch.profiler.record_function('step 1') and so on",),
        )
        return
    by = f"{steps.count} moments compared, by {steps.source}"
    if not device.leaks:
        yield Note("ok", f"nothing grows from step to step ({by})")
        return
    n = len(device.leaks)
    who = "1 call stack holds" if n == 1 else f"{n} call stacks hold"
    yield Note("warn", f"{who} more after each step ({by})")
    yield _limited(
        ("call stack", "call stacks"),
        (
            Column("per step", "number"),
            Column("held now", "number"),
            Column("blocks", "number"),
            Column("call stack", "stack"),
        ),
        device.leaks,
        lambda leak: (
            Bytes(leak.bytes_per_step),
            Bytes(leak.bytes),
            Count(leak.count),
            stack_value(leak.stack, leak.site),
        ),
        top,
    )


def churn(device: DeviceMemory, top: int) -> Table:
    """List the stacks that allocate most over the trace."""
    return _limited(
        ("call stack", "call stacks"),
        (
            Column("allocated", "number"),
            Column("share", "bar"),
            Column("times", "number"),
            Column("mean life", "number"),
            Column("call stack", "stack"),
        ),
        device.churn,
        lambda row: (
            Bytes(row.bytes),
            Ratio(row.share),
            Count(row.count),
            Unavailable("none of them ended, or the file has no times")
            if row.mean_lifetime_us is None
            else Seconds(row.mean_lifetime_us / 1e6),
            stack_value(row.stack, row.site),
        ),
        top,
    )


def oom_facts(oom: Oom) -> Facts:
    """Show the figures behind a verdict."""
    return Facts(
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


def stack_value(frames: tuple[Frame, ...], site: int) -> Value:
    """Show a stack, or say that there is none."""
    return Stack(frames, site) if frames else Text(NO_STACK)


def _limited(
    names: tuple[str, str],
    columns: tuple[Column, ...],
    items: Sequence[_T],
    row: Callable[[_T], tuple[Value, ...]],
    top: int,
) -> Table:
    shown = items if top == 0 else items[:top]
    caption = left_out(len(items) - len(shown), *names)
    return Table(columns, tuple(row(item) for item in shown), caption)


def left_out(n: int, one: str, many: str) -> str:
    """Say how many rows a table does not show; nothing where it shows all."""
    return f"{n:,} more {one if n == 1 else many}: --top 0 shows all" if n else ""
