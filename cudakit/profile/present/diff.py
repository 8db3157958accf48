"""Present a ProfileDiff as a Document."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from cudakit.profile.diff import Change, DeviceChange, ProfileDiff
from cudakit.profile.present.tables import CAUSES
from cudakit.report.document import (
    Column,
    Document,
    Node,
    Note,
    Seconds,
    Section,
    Table,
    Text,
    Value,
)
from cudakit.trace.kernel_names import short_kernels
from cudakit.units import capitalized, format_ratio, format_seconds

# Changes below this share of a step are noise of the measurement.
_MIN_SHOWN_CHANGE = 0.01


def report(diff: ProfileDiff, *, top: int = 10) -> Document:
    """Return the report; tables show ``top`` rows, 0 shows all."""
    if not diff.devices:
        return Document(f"Nothing to compare: {_profiles_without_work(diff)} GPU work", ())
    device_sections = [
        (_device_name(device), tuple(_nodes(device, top))) for device in diff.devices
    ]
    nodes: list[Node] = []
    for names, file in ((diff.only_before, "earlier"), (diff.only_after, "later")):
        if names:
            verb = "is" if len(names) == 1 else "are"
            nodes.append(
                Note("warn", f"Not compared: {'; '.join(names)} {verb} only in the {file} profile.")
            )
    nodes += (
        device_sections[0][1]
        if len(device_sections) == 1
        else [Section(*device_section) for device_section in device_sections]
    )
    return Document(
        capitalized(f"{_simulated_prefix(diff)}{_title(diff.devices)}"),
        tuple(nodes),
    )


def _profiles_without_work(diff: ProfileDiff) -> str:
    """Return which of the profiles have no GPU work, as the beginning of a sentence."""
    if diff.only_before:
        return "the later profile has no"
    if diff.only_after:
        return "the earlier profile (BEFORE) has no"
    return "neither profile has"


def _simulated_prefix(diff: ProfileDiff) -> str:
    """Return which of the profiles are simulated, as the beginning of a title."""
    match diff.before_simulated, diff.after_simulated:
        case True, True:
            return "simulated: "
        case True, False:
            return "before simulated, after on a GPU: "
        case False, True:
            return "before on a GPU, after simulated: "
        case _:
            return ""


def step_table(diff: ProfileDiff) -> Table:
    """Return a table with the step of each GPU, for ``--quiet``."""
    rows = [
        replace(device.step, name=f"{device.step.name} of {_device_name(device)}")
        for device in diff.devices
    ]
    return _table("", rows, "")


def _title(devices: Sequence[DeviceChange]) -> str:
    """Describe the change of the device that became slower most, or else changed most."""
    device = max(devices, key=_title_priority)
    step = device.step
    name = step.name if len(devices) == 1 else f"{step.name} of {_device_name(device)}"
    times_text = f"{format_seconds(step.before_ns / 1e9)} → {format_seconds(step.after_ns / 1e9)}"
    growth = step.growth
    if growth is None:
        return f"{name}: {times_text}"
    if len(devices) > 1 and abs(growth) < _MIN_SHOWN_CHANGE:
        return f"{step.name} unchanged on all GPUs"
    return f"{name} {_speed_text(growth)}: {times_text}"


def _title_priority(device: DeviceChange) -> tuple[bool, float]:
    growth = device.step.growth or 0.0
    return growth >= _MIN_SHOWN_CHANGE, abs(growth)


def _device_name(device: DeviceChange) -> str:
    name = f"cuda:{device.device}"
    return name if device.rank is None else f"rank {device.rank}, {name}"


def _speed_text(growth: float) -> str:
    """Describe a growth of time: a factor if the time has more than halved, else a percentage."""
    if abs(growth) < _MIN_SHOWN_CHANGE:
        return "unchanged"
    if -1 < growth < -0.5:
        return f"{1 / (1 + growth):.1f} times as fast"
    return f"{format_ratio(abs(growth))} {'slower' if growth > 0 else 'faster'}"


def _nodes(device: DeviceChange, top: int) -> Iterator[Node]:
    idle_changes = [
        Change(f"idle: {CAUSES[row.name][0]}", row.before_ns, row.after_ns) for row in device.idle
    ]
    mean_texts = "busy and idle" if idle_changes else "busy"
    times_caption = (
        f"Per step: the median time of a step, and the mean {mean_texts} time."
        if device.per_step
        else "Times are totals: no steps to compare."
    )
    yield _table("", [device.step, device.busy, *idle_changes], times_caption)
    short_names = short_kernels(row.name for row in device.kernels)
    kernels = tuple(replace(row, name=short_names[row.name]) for row in device.kernels)
    for title, rows in (("Kernels", kernels), ("Lines", device.lines)):
        if rows:
            shown_rows = rows[:top] if top else rows
            omitted_count = len(rows) - len(shown_rows)
            caption = "Mean time per step." if device.per_step else "Total time."
            if omitted_count:
                caption += f" {omitted_count:,} more changed: --top 0 shows all."
            yield Section(title, (_table(title.lower().removesuffix("s"), shown_rows, caption),))


def _table(title: str, rows: Sequence[Change], caption: str) -> Table:
    columns = (
        Column(title, "text"),
        Column("before", "number"),
        Column("after", "number"),
        Column("change", "number"),
    )
    return Table(columns, tuple(map(_row, rows)), caption)


def _row(change: Change) -> tuple[Value, ...]:
    return (
        Text(change.name),
        Seconds(change.before_ns / 1e9),
        Seconds(change.after_ns / 1e9),
        Text(_growth_text(change)),
    )


def _growth_text(change: Change) -> str:
    """Return the relative change with its sign; ``new`` or ``gone`` if only one profile has the time."""
    growth = change.growth
    if growth is None:
        return "new"
    if not change.after_ns:
        return "gone"
    return f"{'+' if growth > 0 else ''}{format_ratio(growth)}"
