"""The data of the interactive page: GPU work, API calls, ranges and idle time of all processes as arrays.

Times are nanoseconds after the first activity. Work with the same call stack, name and launch configuration
has the same *signature*. Sums by kernel, by call site and by call stack are sums over signatures.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudakit.core.profile.activities import Activities
from cudakit.core.profile.call_sites import call_site_index
from cudakit.core.profile.exports.lanes import flat_lanes
from cudakit.core.profile.exports.tracks import device_names, distinct_rows, work_tracks
from cudakit.core.profile.timeline import (
    Column,
    Spans,
    Timeline,
    WorkKind,
    first_time,
    timeline,
)
from cudakit.document import Array, Explorer, ExplorerData
from cudakit.trace.kinds import EventKind
from cudakit.trace.trace_file import Frame

_PACKAGE = "cudakit.core.profile.present"
# Number of characters to which names from traces are cut, so that a damaged trace makes no huge page.
_MAX_TEXT_LENGTH = 400
# Number of devices of each process, of streams of each device, and of rows of the ranges and of the calls of
# each process that the page draws. Sums count all work.
_MAX_DEVICES = 64
_MAX_STREAMS = 24
_MAX_HOST_ROWS = 16

_WORK_COLUMNS = ("start", "duration", "track", "kind", "signature", "size", "in_graph", "call")
_CALL_COLUMNS = ("start", "duration", "row", "name", "node")
_RANGE_COLUMNS = ("start", "duration", "row", "name")
_LAUNCH_COLUMNS = (
    "grid_x",
    "grid_y",
    "grid_z",
    "block_x",
    "block_y",
    "block_z",
    "registers",
    "shared",
)

_Table = dict[str, Column]


@dataclass(frozen=True, slots=True)
class DeviceIdle:
    """The gaps between the work of a process on a device, sorted by time."""

    process: int
    device: int
    start_ns: Column
    end_ns: Column
    by_cause_ns: Column  # a row for each gap, a column for each cause; a row adds up to the gap


@dataclass(frozen=True, slots=True)
class Idle:
    """The idle time of all devices, divided by cause."""

    causes: tuple[str, ...]  # name of each column of ``DeviceIdle.by_cause_ns``
    devices: tuple[DeviceIdle, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceSteps:
    """The steps of a process on a device, sorted by time."""

    process: int
    device: int
    start_ns: Sequence[int]  # nanoseconds after the first activity of all processes
    end_ns: Sequence[int]
    names: Sequence[str]
    is_warm_up: Sequence[bool]


def explorer(
    activities: Sequence[Activities], idle: Idle | None = None, steps: Sequence[DeviceSteps] = ()
) -> Explorer:
    """Return the interactive views of the profiles of all processes."""
    return Explorer("profile", _PACKAGE, lambda: _Page(activities, idle or Idle(()), steps).data())


class _CallTree:
    """The call tree of all stacks. Node 0 is the root, and a node's number is higher than its parent's."""

    def __init__(self) -> None:
        self.parents, self.node_frames = [0], [0]
        self.frames: dict[tuple[str, str, int], int] = {("", "", 0): 0}
        self._children: dict[tuple[int, int], int] = {}

    def frame(self, frame: Frame) -> int:
        """Return the number of a frame."""
        key = (_cut(frame.function), _cut(frame.file), frame.line)
        return self.frames.setdefault(key, len(self.frames))

    def child(self, parent: int, frame: Frame) -> int:
        """Return the node of a call below a node."""
        key = (parent, self.frame(frame))
        if key not in self._children:
            self._children[key] = len(self.parents)
            self.parents.append(parent)
            self.node_frames.append(key[1])
        return self._children[key]

    def leaf(self, stack: Sequence[Frame]) -> int:
        """Return the node of a stack's innermost frame."""
        node = 0
        for frame in reversed(stack):
            node = self.child(node, frame)
        return node


@dataclass(frozen=True, slots=True)
class _Row:
    """A row of the timeline. Rows are drawn in the order of their places."""

    place: tuple[int, ...]
    source: (
        str  # name of the table that has the spans of the row: "work", "call", "range" or "idle"
    )
    label: str
    group: str  # heading of the rows of a device or process


class _Page:
    """Collects the arrays of all processes."""

    def __init__(
        self, activities: Sequence[Activities], idle: Idle, steps: Sequence[DeviceSteps]
    ) -> None:
        self._timelines = [timeline(process) for process in activities]
        self._idle = idle
        self._steps = steps
        self._base_ns = first_time(self._timelines)
        self._names: dict[str, int] = {}
        self._tree = _CallTree()
        self._rows: list[_Row] = []
        # Row (or -1), device and stream of each track of GPU work.
        self._tracks: list[tuple[int, int, int]] = []
        # The number of each signature: node of the tree, name, frame of the call site, and launch.
        self._signatures: dict[tuple[int, int, int, int], int] = {}
        self._launches: dict[tuple[int, ...], int] = {(0,) * len(_LAUNCH_COLUMNS): 0}

    def data(self) -> ExplorerData:
        """Return all arrays, and the texts and numbers that JSON can hold."""
        calls, ranges, works = [], [], []
        for index, process in enumerate(self._timelines):
            names = np.array([self._name(name) for name in process.names], np.int64)
            nodes = np.array([self._tree.leaf(stack) for stack in process.stacks], np.int64)
            works.append(self._work(index, process, names, nodes))
            ranges.append(self._spans(index, "range", process.ranges, names))
            calls.append(self._spans(index, "call", process.calls, names))
            calls[-1]["node"] = self._nodes_of_calls(process, nodes)
        ranges += map(self._step_table, self._steps)
        idle = self._idle_table()
        first_calls = np.cumsum([0, *(len(table["start"]) for table in calls)])
        for table, first_call in zip(works, first_calls[:-1].tolist(), strict=True):
            table["call"] = np.where(table["call"] >= 0, table["call"] + first_call, -1)
        call_order, call_table = _sorted_table(_CALL_COLUMNS, calls)
        _, work_table = _sorted_table(_WORK_COLUMNS, works)
        work_table["call"] = _places(call_order, work_table["call"]) + 1
        _, range_table = _sorted_table(_RANGE_COLUMNS, ranges)
        row_order = sorted(range(len(self._rows)), key=lambda number: self._rows[number].place)
        tracks = np.array(self._tracks, np.int64).reshape(-1, 3)
        track_table = {"row": tracks[:, 0], "device": tracks[:, 1], "stream": tracks[:, 2]}
        tables = {"track": track_table, "call": call_table, "range": range_table, "idle": idle}
        for table in tables.values():
            table["row"] = _places(np.array(row_order, np.int64), table["row"]) + 1
        tables["work"] = _by_track(work_table)
        arrays = {
            f"{name}_{column}": _compact(values)
            for name, table in tables.items()
            for column, values in table.items()
        }
        return ExplorerData({**arrays, **self._signature_arrays()}, self._facts(row_order))

    def _facts(self, row_order: Iterable[int]) -> Mapping[str, Any]:
        ends = [end for process in self._timelines if (end := process.last_ns()) is not None]
        rows = [self._rows[number] for number in row_order]
        return {
            "duration_ns": max(ends, default=self._base_ns) - self._base_ns,
            "measured_ns": self._measured_time(),
            "rows": [[row.source, row.label, row.group] for row in rows],
            "names": list(self._names),
            "frames": list(self._tree.frames),
            "kinds": [kind.name.lower() for kind in WorkKind],
            "causes": list(self._idle.causes),
            "devices": [
                [(index << 16) + device, self._device_name(process, name)]
                for index, process in enumerate(self._timelines)
                for device, name in list(device_names(process).items())[:_MAX_DEVICES]
            ],
            "processes": len(self._timelines),
            "simulated": any(process.simulated for process in self._timelines),
        }

    def _device_name(self, process: Timeline, name: str) -> str:
        return f"{name} of process {process.process}" if len(self._timelines) > 1 else name

    def _signature_arrays(self) -> dict[str, Array]:
        signatures = np.array(list(self._signatures), np.int64).reshape(-1, 4)
        launches = np.array(list(self._launches), np.int64)
        return {
            "signature_node": signatures[:, 0],
            "signature_name": signatures[:, 1],
            "signature_site": signatures[:, 2],
            "signature_launch": signatures[:, 3],
            "node_parent": np.array(self._tree.parents, np.int64),
            "node_frame": np.array(self._tree.node_frames, np.int64),
            **{f"launch_{name}": launches[:, i] for i, name in enumerate(_LAUNCH_COLUMNS)},
        }

    def _name(self, name: str) -> int:
        return self._names.setdefault(_cut(name), len(self._names))

    def _add_row(self, place: tuple[int, ...], source: str, label: str, group: str) -> int:
        self._rows.append(_Row(place, source, label, group))
        return len(self._rows) - 1

    # --- GPU work ----------------------------------------------------------------------------------

    def _work(self, index: int, process: Timeline, names: Column, nodes: Column) -> _Table:
        work = process.work
        return {
            "start": work.start_ns - self._base_ns,
            "duration": work.end_ns - work.start_ns,
            "track": self._tracks_of_work(index, process),
            "kind": work.kind,
            "signature": self._signatures_of_work(process, names, nodes),
            "size": work.size_bytes.astype(np.int64) & ((1 << 53) - 1),
            "in_graph": (work.graph_node != 0).astype(np.uint8),
            "call": work.call,
        }

    def _tracks_of_work(self, index: int, process: Timeline) -> Column:
        """Add the tracks of the devices and a row for each, and return the track of each piece of work."""
        work = work_tracks(process)
        names = device_names(process)
        counts = np.bincount(work.track, minlength=len(work.tracks))
        row_of_track = np.full(len(work.tracks), -1, np.int64)
        tracks_of_device: dict[int, list[int]] = {}
        for number, track in enumerate(work.tracks):
            tracks_of_device.setdefault(track.group, []).append(number)
        for device, tracks in list(tracks_of_device.items())[:_MAX_DEVICES]:
            group = self._device_name(process, names[device])
            most_used = sorted(tracks, key=lambda number: -int(counts[number]))[:_MAX_STREAMS]
            for number in most_used:
                place = (index, 0, device, 2, number)
                label = work.tracks[number].name
                row_of_track[number] = self._add_row(place, "work", label, group)
        first_track = len(self._tracks)
        self._tracks += [
            (row, track.group + (index << 16), track.number)
            for row, track in zip(row_of_track.tolist(), work.tracks, strict=True)
        ]
        return first_track + work.track

    def _signatures_of_work(self, process: Timeline, names: Column, nodes: Column) -> Column:
        work = process.work
        columns = (work.site, work.name, self._launches_of_work(process))
        first, number = distinct_rows(*columns)
        signatures = []
        for site, name, launch in zip(*(column[first].tolist() for column in columns), strict=True):
            leaf = self._tree.child(int(nodes[site]), Frame(process.names[name], "", 0))
            signature = (leaf, int(names[name]), self._site(process.stacks[site]), launch)
            signatures.append(self._signatures.setdefault(signature, len(self._signatures)))
        return np.array(signatures, np.int64)[number]

    def _site(self, stack: Sequence[Frame]) -> int:
        """Return the number of the frame of a stack's call site; 0 for an empty stack."""
        return self._tree.frame(stack[call_site_index(stack)]) if stack else 0

    def _launches_of_work(self, process: Timeline) -> Column:
        """Return the number of the launch configuration of each piece of work; 0 for copies and memsets."""
        work = process.work
        is_kernel = work.kind == WorkKind.KERNEL
        kernels = process.activities.of(EventKind.KERNEL_RUN)[work.record[is_kernel]]
        columns = [
            *(kernels["grid"][:, axis] for axis in range(3)),
            *(kernels["block"][:, axis] for axis in range(3)),
            kernels["registers"],
            kernels["shared_bytes"],
        ]
        first, number = distinct_rows(*columns)
        rows = zip(*(column[first].tolist() for column in columns), strict=True)
        launches = [self._launches.setdefault(row, len(self._launches)) for row in rows]
        launch_of_work = np.zeros(len(is_kernel), np.int64)
        launch_of_work[is_kernel] = np.array(launches, np.int64)[number]
        return launch_of_work

    # --- the host ----------------------------------------------------------------------------------

    def _nodes_of_calls(self, process: Timeline, nodes: Column) -> Column:
        """Return the node of each call's stack; 0 if the work that it launched has the same stack.

        Most calls launch work, so that most nodes are 0, which keeps the page small.
        """
        work, calls = process.work, process.calls
        has_call = work.call >= 0
        has_same_stack = np.zeros(len(calls.site), np.bool_)
        has_same_stack[work.call[has_call]] = work.site[has_call] == calls.site[work.call[has_call]]
        return np.where(has_same_stack, 0, nodes[calls.site])

    def _spans(self, index: int, source: str, spans: Spans, names: Column) -> _Table:
        """Return the ranges or calls of a process, and add a row for each thread and depth."""
        _, thread = distinct_rows(spans.thread)
        lane = flat_lanes(thread, spans.start_ns, spans.end_ns)
        first, track = distinct_rows(thread, lane)
        counts = np.bincount(track, minlength=len(first))
        row_of_track = np.full(len(first), -1, np.int64)
        process = self._timelines[index].process
        for number in np.argsort(-counts, kind="stable")[:_MAX_HOST_ROWS].tolist():
            span = first[number]
            thread_number = int(spans.thread[span])
            label = f"thread {thread_number}" if thread_number else "process"
            label += " · ranges" if source == "range" else " · CUDA API"
            place = (index, 1, thread_number, int(source == "call"), int(lane[span]))
            row_of_track[number] = self._add_row(place, source, label, f"process {process}")
        return {
            "start": spans.start_ns - self._base_ns,
            "duration": spans.end_ns - spans.start_ns,
            "row": row_of_track[track],
            "name": names[spans.name],
        }

    def _measured_time(self) -> tuple[int, int] | None:
        """Return the time of all steps but the warm-up; None without steps. The page opens on it."""
        times = [
            (start, end)
            for steps in self._steps
            for start, end, is_warm_up in zip(
                steps.start_ns, steps.end_ns, steps.is_warm_up, strict=True
            )
            if not is_warm_up
        ]
        if not times:
            return None
        return min(start for start, _ in times), max(end for _, end in times)

    # --- steps and idle time -----------------------------------------------------------------------

    def _step_table(self, steps: DeviceSteps) -> _Table:
        """Return the steps of a device, and add a row for them."""
        row = self._device_row(steps, 0, "range", "steps")
        start = np.array(steps.start_ns, np.int64)
        return {
            "start": start,
            "duration": np.maximum(np.array(steps.end_ns, np.int64) - start, 0),
            "row": np.full(len(start), row),
            "name": np.array([self._name(name) for name in steps.names], np.int64),
        }

    def _device_row(
        self, device: DeviceIdle | DeviceSteps, place: int, source: str, label: str
    ) -> int:
        """Add a row at a place among the rows of a device, and return its number."""
        index = [process.process for process in self._timelines].index(device.process)
        process = self._timelines[index]
        group = self._device_name(process, device_names(process)[device.device])
        return self._add_row((index, 0, device.device, place), source, label, group)

    def _idle_table(self) -> _Table:
        """Return the gaps of all devices, and add a row for each device; the last columns are the causes."""
        tables = []
        for idle in self._idle.devices:
            row = self._device_row(idle, 1, "idle", "idle")
            causes = idle.by_cause_ns.reshape(-1, len(self._idle.causes))
            tables.append(
                {
                    "start": idle.start_ns - self._base_ns,
                    "duration": idle.end_ns - idle.start_ns,
                    "row": np.full(len(causes), row),
                    **{f"cause{number}": causes[:, number] for number in range(causes.shape[1])},
                }
            )
        causes_columns = (f"cause{number}" for number in range(len(self._idle.causes)))
        _, table = _sorted_table(("start", "duration", "row", *causes_columns), tables)
        return table


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_LENGTH else f"{text[:_MAX_TEXT_LENGTH]}…"


def _sorted_table(columns: Iterable[str], tables: Sequence[_Table]) -> tuple[Column, _Table]:
    """Join tables and sort the rows by start. Return the order of the rows, and the table."""
    empty = np.empty(0, np.int64)
    joined = {
        name: np.concatenate([empty, *(table[name] for table in tables)]).astype(np.int64)
        for name in columns
    }
    order = np.argsort(joined["start"], kind="stable")
    return order, {name: column[order] for name, column in joined.items()}


def _by_track(work: _Table) -> _Table:
    """Sort work by track, and replace starts and calls by differences, which makes the page smaller.

    Work of a track does not overlap, and mostly runs in the order of its calls, so that the gaps between work
    and the differences between the numbers of calls are small.
    """
    order = np.argsort(work["track"], kind="stable")
    work = {name: column[order] for name, column in work.items()}
    previous_end = np.roll(work["start"] + work["duration"], 1)
    begins_track = np.diff(work["track"], prepend=-1) != 0
    gap = work.pop("start") - np.where(begins_track, 0, previous_end)
    return work | {"gap": gap, "call": np.diff(work["call"], prepend=0)}


def _places(order: Column, numbers: Column) -> Column:
    """Return the place in an order of each number; -1 for -1."""
    places = np.empty(len(order) + 1, np.int64)
    places[order] = np.arange(len(order))
    places[-1] = -1
    return places[numbers]


def _compact(column: Column) -> Column:
    """Return a column as bytes if all of its values fit."""
    is_small = not len(column) or (column.min() >= 0 and column.max() < 256)
    return column.astype(np.uint8) if is_small else column
