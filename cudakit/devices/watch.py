"""The state of ``devices --watch``: the samples of the last minute, sorting, filtering and keys."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from cudakit.devices.report import report, shows_utilization
from cudakit.devices.result import Device, DevicesResult
from cudakit.devices.select import label, short_label
from cudakit.gpu.api.facts import Field
from cudakit.report.document import Column, Document, Note, Ratio, Section, Table, Text, Value
from cudakit.units import Unavailable

HISTORY_SECONDS = 60
# The values by which devices can be sorted, the largest first. The key "s" selects the next one.
_SORT_VALUES: dict[str, Callable[[Device], Field]] = {
    "index": lambda device: 0,  # noqa: ARG005
    "SM": lambda device: sm_activity(device),
    "memory": lambda device: device.field("memory_used_bytes"),
    "temperature": lambda device: device.field("temperature_gpu_c"),
    "power": lambda device: device.field("power_draw_w"),
}
_ENTER, _ESCAPE, _BACKSPACE = ("\r", "\n"), "\x1b", ("\x7f", "\b")


class Quit(Exception):
    """The key "q" was pressed."""


@dataclass(frozen=True, slots=True)
class WatchView:
    """The settings of the report on a terminal; a pressed key gives a new view."""

    sort: str = "index"  # name of the value by which devices are sorted
    pattern: str = ""  # text that a device's name or one of its processes must contain
    shows_processes: bool = False  # whether processes are shown
    is_editing: bool = False  # whether pressed keys are added to the pattern

    def press(self, key: str) -> WatchView:
        """Return the view after a key. Raises Quit for "q"."""
        if self.is_editing:
            if key in _ENTER:
                return replace(self, is_editing=False)
            if key == _ESCAPE:
                return replace(self, is_editing=False, pattern="")
            if key in _BACKSPACE:
                return replace(self, pattern=self.pattern[:-1])
            return replace(self, pattern=self.pattern + key) if key.isprintable() else self
        match key:
            case "q":
                raise Quit
            case "s":
                sort_names = [*_SORT_VALUES]
                return replace(
                    self, sort=sort_names[(sort_names.index(self.sort) + 1) % len(sort_names)]
                )
            case "p":
                return replace(self, shows_processes=not self.shows_processes)
            case "/" | "f":
                return replace(self, is_editing=True, pattern="")
            case "\x1b":
                return replace(self, pattern="")
        return self

    @property
    def needs_processes(self) -> bool:
        """Return whether the report needs the processes: to show them, or to filter by them."""
        return self.shows_processes or bool(self.pattern)

    @property
    def help(self) -> str:
        """The line that explains the keys."""
        if self.is_editing:
            return f"filter: {self.pattern}_  (Enter keeps it, Esc clears it)"
        filter_text = f"filter ({self.pattern})" if self.pattern else "filter"
        return f"keys: s sort (by {self.sort}), / {filter_text}, p processes, q quit"


def arrange(result: DevicesResult, view: WatchView) -> DevicesResult:
    """Return the devices that match the pattern of a view, sorted as the view sorts them."""

    def magnitude(device: Device) -> float:
        value = _SORT_VALUES[view.sort](device)
        return float(value) if isinstance(value, (int, float)) else -1.0

    matching = []
    for device in result.devices:
        processes = device.processes if isinstance(device.processes, tuple) else ()
        texts = (label(device), *(f"{process.name} {process.user}" for process in processes))
        if any(view.pattern.lower() in text.lower() for text in texts):
            matching.append(device)
    matching.sort(key=magnitude, reverse=True)
    return replace(result, devices=tuple(matching))


# --- history ---------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Sample:
    """The SM activity and the memory use of one device at one time, as fractions from 0 to 1."""

    time_ns: int
    sm_activity: float | Unavailable
    memory: float | Unavailable


@dataclass(slots=True)
class History:
    """The samples of the last minute of each device."""

    _samples: dict[str, deque[Sample]] = field(default_factory=dict)

    def add_samples(self, result: DevicesResult) -> None:
        """Add the state of each device and drop samples that are older than a minute."""
        oldest_ns = result.time_ns - HISTORY_SECONDS * 10**9
        for device in result.devices:
            samples = self._samples.setdefault(label(device), deque())
            samples.append(Sample(result.time_ns, sm_activity(device), memory_share(device)))
            while samples[0].time_ns < oldest_ns:
                samples.popleft()

    def samples(self, device: Device) -> Sequence[Sample]:
        """Return the samples of a device, oldest first."""
        return tuple(self._samples.get(label(device), ()))


def sm_activity(device: Device) -> float | Unavailable:
    """Return the SM activity from 0 to 1, or the utilization if the GPU does not measure SM activity."""
    percent = device.field("sm_activity_percent")
    if isinstance(percent, Unavailable):
        percent = device.field("utilization_gpu_percent")
    if isinstance(percent, (int, float)):
        return percent / 100
    return percent if isinstance(percent, Unavailable) else Unavailable("not a number")


def memory_share(device: Device) -> float | Unavailable:
    """Return the fraction of memory that is in use, from 0 to 1."""
    used, total = device.field("memory_used_bytes"), device.total_memory
    if isinstance(used, int) and isinstance(total, int) and total:
        return used / total
    reasons = (value for value in (used, total) if isinstance(value, Unavailable))
    return next(reasons, Unavailable("not a number"))


def averages(
    samples: Sequence[tuple[int, float | Unavailable]], *, now_ns: int, interval_count: int
) -> Iterator[float | None]:
    """Yield the mean of each interval of the last minute; None for an interval without samples."""
    interval_ns = HISTORY_SECONDS * 10**9 / interval_count
    intervals: list[list[float]] = [[] for _ in range(interval_count)]
    for time_ns, sample_value in samples:
        interval_index = interval_count - 1 - int((now_ns - time_ns) // interval_ns)
        if 0 <= interval_index < interval_count and not isinstance(sample_value, Unavailable):
            intervals[interval_index].append(sample_value)
    for interval_values in intervals:
        yield sum(interval_values) / len(interval_values) if interval_values else None


# --- The report of ``devices --watch`` on a terminal: bars, the history of a minute, and the keys ---

_BAR_GLYPHS = "▁▂▃▄▅▆▇█"
_NO_VALUE_GLYPH = "·"
_UTILIZATION_CAPTION = "For devices with ~ above, SM is that share of time."
# Width of the table without the two histories, in characters of the terminal.
_WIDTH_WITHOUT_HISTORIES = 52
# Limits of the width of a history, in characters.
_MIN_HISTORY_WIDTH, _MAX_HISTORY_WIDTH = 8, 30


def live_report(
    result: DevicesResult, history: History, view: WatchView, *, width: int, with_keys: bool
) -> Document:
    """Return the report with bars and history; with ``with_keys`` also the line that explains the keys."""
    devices = arrange(result, view)
    if not view.shows_processes:
        # The processes were read only for the filter.
        shown = tuple(replace(device, processes=None) for device in devices.devices)
        devices = replace(devices, devices=shown)
    devices_report = report(devices, with_activity=True)
    title = f"SM activity and memory, last {HISTORY_SECONDS} s"
    nodes = [*devices_report.nodes, Section(title, (_history_table(devices, history, width),))]
    if with_keys:
        nodes.append(Note("info", view.help))
    return Document(devices_report.title, tuple(nodes))


def _history_table(result: DevicesResult, history: History, width: int) -> Table:
    history_width = (width - _WIDTH_WITHOUT_HISTORIES) // 2
    sample_count = min(max(history_width, _MIN_HISTORY_WIDTH), _MAX_HISTORY_WIDTH)
    columns = (
        Column("device"),
        Column("SM", "bar"),
        Column("history"),
        Column("memory", "bar"),
        Column("history"),
    )
    no_sample = Sample(result.time_ns, Unavailable("no sample"), Unavailable("no sample"))

    def sparks(values: Iterable[tuple[int, float | Unavailable]]) -> Text:
        shares = averages([*values], now_ns=result.time_ns, interval_count=sample_count)
        return Text(sparkline(shares))

    rows = []
    for device in result.devices:
        samples = history.samples(device)
        last = samples[-1] if samples else no_sample
        rows.append(
            (
                Text(short_label(device)),
                _ratio_value(last.sm_activity),
                sparks((sample.time_ns, sample.sm_activity) for sample in samples),
                _ratio_value(last.memory),
                sparks((sample.time_ns, sample.memory) for sample in samples),
            )
        )
    caption = _UTILIZATION_CAPTION if any(map(shows_utilization, result.devices)) else ""
    return Table(columns, tuple(rows), caption=caption)


def _ratio_value(fraction: float | Unavailable) -> Value:
    return fraction if isinstance(fraction, Unavailable) else Ratio(fraction)


def sparkline(fractions: Iterable[float | None]) -> str:
    """Draw each fraction from 0 to 1 as a character; a missing fraction is a dot."""
    highest_level = len(_BAR_GLYPHS) - 1
    return "".join(
        _NO_VALUE_GLYPH
        if fraction is None
        else _BAR_GLYPHS[round(min(max(fraction, 0.0), 1.0) * highest_level)]
        for fraction in fractions
    )
