"""Compare two profiles by step, kernel and line."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from cudakit.profile.findings import call_site_text
from cudakit.profile.report.tables import CAUSES
from cudakit.profile.result import Device, ProfileResult
from cudakit.report.document import (
    Column,
    Document,
    Node,
    Note,
    Seconds,
    Section,
    Table,
    Text,
)
from cudakit.trace.names import short_kernels
from cudakit.units import capitalized, format_ratio, format_seconds


@dataclass(frozen=True, slots=True)
class Change:
    """A time in both profiles: per step if both have steps, otherwise in all measured time."""

    name: str  # name of the time: "step", "measured time", "busy", a cause of idle time, a kernel or a line
    before_ns: float  # time in the earlier profile; 0 if only the later profile has this name
    after_ns: float  # time in the later profile; 0 if only the earlier profile has this name

    @property
    def change_ns(self) -> float:
        """The later time minus the earlier time, in nanoseconds."""
        return self.after_ns - self.before_ns

    @property
    def growth(self) -> float | None:
        """The change divided by the earlier time; None if the earlier time is 0."""
        return self.after_ns / self.before_ns - 1 if self.before_ns else None


@dataclass(frozen=True, slots=True)
class DeviceChange:
    """The changes of one device."""

    device: int  # CUDA index in the process of the later profile
    per_step: bool  # whether the times are times of one step
    step: Change  # time of a step (median), or without steps the measured time
    busy: Change  # time in which the device was busy
    idle: tuple[Change, ...]  # changes of idle time, one for each cause
    kernels: tuple[Change, ...]  # changes of kernels, the largest first
    lines: tuple[Change, ...]  # changes of own time of lines, the largest first
    rank: int | None = None  # rank of the process in the later profile; null if there is none


@dataclass(frozen=True, slots=True)
class ProfileDiff:
    """The changes from one profile to another."""

    schema: ClassVar[str] = "cudakit.profile-diff/1"
    devices: tuple[DeviceChange, ...]  # changes of each device that both profiles have
    unmatched: int  # number of devices that only one of the profiles has
    simulated: bool = False  # whether a simulated device did the work of one of the profiles
    before_simulated: bool = False  # whether a simulated device did the work of the earlier profile
    after_simulated: bool = False  # whether a simulated device did the work of the later profile
    only_before: tuple[str, ...] = ()  # names of the devices that only the earlier profile has
    only_after: tuple[str, ...] = ()  # names of the devices that only the later profile has

    def slowest_growth(self) -> float | None:
        """Return the largest relative growth of a step; None if nothing can be compared."""
        growths = [device.step.growth for device in self.devices]
        return max((growth for growth in growths if growth is not None), default=None)


def compare(before_result: ProfileResult, after_result: ProfileResult) -> ProfileDiff:
    """Return the changes between two profiles, whose n-th devices are compared with each other."""
    device_pairs = list(zip(before_result.devices, after_result.devices, strict=False))
    pair_count = len(device_pairs)
    only_before = tuple(map(device_name, before_result.devices[pair_count:]))
    only_after = tuple(map(device_name, after_result.devices[pair_count:]))
    return ProfileDiff(
        tuple(_compare_devices(*pair) for pair in device_pairs),
        len(only_before) + len(only_after),
        before_result.simulated or after_result.simulated,
        before_result.simulated,
        after_result.simulated,
        only_before,
        only_after,
    )


def device_name(device: Device | DeviceChange) -> str:
    """Return the CUDA index of a device, with the rank of its process if it has one."""
    name = f"cuda:{device.device}"
    return name if device.rank is None else f"rank {device.rank}, {name}"


def _compare_devices(before: Device, after: Device) -> DeviceChange:
    per_step = bool(before.steps.measured and after.steps.measured)
    before_steps, after_steps = (
        (before.steps.measured, after.steps.measured) if per_step else (1, 1)
    )

    def change(name: str, time_of: Callable[[Device], int]) -> Change:
        return Change(name, time_of(before) / before_steps, time_of(after) / after_steps)

    def changes(times_of: Callable[[Device], Iterable[tuple[str, int]]]) -> tuple[Change, ...]:
        times: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        for index, (device, steps) in enumerate(((before, before_steps), (after, after_steps))):
            for name, time in times_of(device):
                times[name][index] += time / steps
        changes = [Change(name, *pair) for name, pair in times.items() if pair[0] != pair[1]]
        return tuple(sorted(changes, key=lambda row: (-abs(row.change_ns), row.name)))

    return DeviceChange(
        device=after.device,
        per_step=per_step,
        step=(
            Change("step", before.steps.median_ns, after.steps.median_ns)
            if per_step
            else change("measured time", lambda device: device.measured.length_ns)
        ),
        busy=change("busy", lambda device: device.measured.busy_ns),
        idle=changes(
            lambda device: ((name, getattr(device.measured.idle, name)) for name in CAUSES)
        ),
        kernels=changes(lambda device: ((row.name, row.total_ns) for row in device.kernels)),
        lines=changes(
            lambda device: (
                (f"{call_site_text((row.frame,), 0)} {row.frame.name}", row.own_ns)
                for row in device.lines
            )
        ),
        rank=after.rank,
    )


# --- the report ------------------------------------------------------------------------------------

# Changes below this share of a step are noise of the measurement.
_MIN_SHOWN_CHANGE = 0.01


def report(diff: ProfileDiff, *, top: int = 10) -> Document:
    """Return the report; tables show ``top`` rows, 0 shows all."""
    if not diff.devices:
        without_work = "neither profile has"
        if diff.only_before:
            without_work = "the later profile has no"
        elif diff.only_after:
            without_work = "the earlier profile (BEFORE) has no"
        return Document(f"Nothing to compare: {without_work} GPU work", ())
    nodes: list[Node] = []
    for names, file in ((diff.only_before, "earlier"), (diff.only_after, "later")):
        if names:
            verb = "is" if len(names) == 1 else "are"
            nodes.append(
                Note("warn", f"Not compared: {'; '.join(names)} {verb} only in the {file} profile.")
            )
    sections = [Section(device_name(device), tuple(_nodes(device, top))) for device in diff.devices]
    nodes += sections if len(sections) > 1 else sections[0].nodes
    simulated = {
        (True, True): "simulated: ",
        (True, False): "before simulated, after on a GPU: ",
        (False, True): "before on a GPU, after simulated: ",
    }.get((diff.before_simulated, diff.after_simulated), "")
    return Document(capitalized(f"{simulated}{_title(diff.devices)}"), tuple(nodes))


def step_table(diff: ProfileDiff) -> Table:
    """Return a table with the step of each GPU, for ``--quiet``."""
    rows = [
        replace(device.step, name=f"{device.step.name} of {device_name(device)}")
        for device in diff.devices
    ]
    return _table("", rows, "")


def _title(devices: Sequence[DeviceChange]) -> str:
    """Describe the change of the device that became slower most, or else changed most."""

    def priority(device: DeviceChange) -> tuple[bool, float]:
        growth = device.step.growth or 0.0
        return growth >= _MIN_SHOWN_CHANGE, abs(growth)

    device = max(devices, key=priority)
    step, growth = device.step, device.step.growth
    name = step.name if len(devices) == 1 else f"{step.name} of {device_name(device)}"
    times = f"{format_seconds(step.before_ns / 1e9)} → {format_seconds(step.after_ns / 1e9)}"
    if growth is None:
        return f"{name}: {times}"
    if abs(growth) < _MIN_SHOWN_CHANGE:
        return (
            f"{name} unchanged: {times}"
            if len(devices) == 1
            else f"{step.name} unchanged on all GPUs"
        )
    if -1 < growth < -0.5:
        return f"{name} {1 / (1 + growth):.1f} times as fast: {times}"
    return f"{name} {format_ratio(abs(growth))} {'slower' if growth > 0 else 'faster'}: {times}"


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


def _table(title: str, changes: Sequence[Change], caption: str) -> Table:
    columns = (
        Column(title, "text"),
        Column("before", "number"),
        Column("after", "number"),
        Column("change", "number"),
    )
    rows = []
    for row in changes:
        growth = row.growth
        if growth is None:
            growth_text = "new"
        elif not row.after_ns:
            growth_text = "gone"
        else:
            growth_text = f"{'+' if growth > 0 else ''}{format_ratio(growth)}"
        times = (Seconds(row.before_ns / 1e9), Seconds(row.after_ns / 1e9))
        rows.append((Text(row.name), *times, Text(growth_text)))
    return Table(columns, tuple(rows), caption)
