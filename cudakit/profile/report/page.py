"""The data of the interactive page: GPU work, API calls, ranges and idle time of all processes as arrays.

Times are nanoseconds after the first activity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from cudakit.profile.analysis import DeviceGaps
from cudakit.profile.exports import device_names, work_tracks
from cudakit.profile.idle import IdleCause
from cudakit.profile.report.tables import CAUSES
from cudakit.profile.result import Device
from cudakit.profile.timeline import (
    Activities,
    Column,
    Spans,
    Timeline,
    WorkKind,
    first_time,
    timeline,
)
from cudakit.report.document import Array, Explorer, ExplorerData
from cudakit.report.timeline import distinct_rows, flat_lanes
from cudakit.stacks import Frame, call_site_index
from cudakit.trace.kinds import EventKind

# Maximum number of devices of each process, of streams of each device, and of rows of the ranges and of
# the calls of each process that the page draws. Sums count all work.
_MAX_DEVICES = 64
_MAX_STREAMS = 24
_MAX_HOST_ROWS = 16
# Number of characters to which names from traces are cut, so that a damaged trace makes no huge page.
_MAX_TEXT_LENGTH = 400

_WORK_COLUMNS = ("start", "duration", "track", "kind", "signature", "size", "in_graph", "call")
_CALL_COLUMNS = ("start", "duration", "row", "name", "node")
_RANGE_COLUMNS = ("start", "duration", "row", "name")
_IDLE_COLUMNS = ("start", "duration", "row", *(f"cause{number}" for number in range(len(CAUSES))))
# The columns of the causes in ``Gaps.by_cause_ns``, in the order of ``CAUSES``.
_CAUSE_COLUMNS = [IdleCause[field.removesuffix("_ns").upper()] for field in CAUSES]

_PageTable: TypeAlias = dict[str, Column]


def explorer(
    activities: Sequence[Activities],
    gaps: Sequence[DeviceGaps] = (),
    devices: Sequence[Device] = (),
) -> Explorer:
    """Return the interactive views of the profiles of all processes, with their idle time and steps."""
    return Explorer(
        "profile", "cudakit.profile.report", lambda: _Page(activities, devices).data(gaps)
    )


class _Page:
    """Collects the arrays of all processes."""

    def __init__(self, activities: Sequence[Activities], devices: Sequence[Device]) -> None:
        self._timelines = [timeline(process_activities) for process_activities in activities]
        self._devices = [device for device in devices if device.steps.steps]
        self._base_ns = first_time(self._timelines)
        self._number_by_name: dict[str, int] = {}
        self._tree = _CallTree()
        self._signatures = _Signatures(self._tree)
        # Place, source, label and group of each row of the timeline. Rows are drawn in the order of their
        # places; the source is the table that has the spans of the row; the group is the heading of the
        # rows of a device or process.
        self._rows: list[tuple[tuple[int, ...], str, str, str]] = []
        # Row (or -1), device and stream of each track of GPU work.
        self._tracks: list[tuple[int, int, int]] = []

    def data(self, gaps: Sequence[DeviceGaps]) -> ExplorerData:
        """Return all arrays, and the texts and numbers that JSON can hold."""
        call_tables, range_tables, work_tables = [], [], []
        for index, process in enumerate(self._timelines):
            names = np.array([self._name_number(name) for name in process.names], np.int64)
            nodes = np.array([self._tree.add_stack(stack) for stack in process.stacks], np.int64)
            work_tables.append(self._work_table(index, names, nodes))
            range_tables.append(self._span_table(index, "range", process.ranges, names))
            call_tables.append(self._span_table(index, "call", process.calls, names))
            call_tables[-1]["node"] = _call_nodes(process, nodes)
        range_tables += map(self._step_table, self._devices)
        _, idle_table = _sorted_table(_IDLE_COLUMNS, [self._idle_table(row) for row in gaps])
        first_call_rows = np.cumsum([0, *(len(table["start"]) for table in call_tables)])
        for table, first_call_row in zip(work_tables, first_call_rows[:-1].tolist(), strict=True):
            table["call"] = np.where(table["call"] >= 0, table["call"] + first_call_row, -1)
        call_order, call_table = _sorted_table(_CALL_COLUMNS, call_tables)
        _, work_table = _sorted_table(_WORK_COLUMNS, work_tables)
        work_table["call"] = _places_in(call_order, work_table["call"]) + 1
        _, range_table = _sorted_table(_RANGE_COLUMNS, range_tables)
        row_order = sorted(range(len(self._rows)), key=lambda number: self._rows[number][0])
        tracks = np.array(self._tracks, np.int64).reshape(-1, 3)
        tables = {
            "track": {"row": tracks[:, 0], "device": tracks[:, 1], "stream": tracks[:, 2]},
            "call": call_table,
            "range": range_table,
            "idle": idle_table,
        }
        for table in tables.values():
            table["row"] = _places_in(np.array(row_order, np.int64), table["row"]) + 1
        tables["work"] = _sorted_by_track(work_table)
        arrays = {
            f"{name}_{column}": _as_small_as_possible(values)
            for name, table in tables.items()
            for column, values in table.items()
        }
        return ExplorerData({**arrays, **self._signatures.arrays()}, self._facts(row_order))

    def _facts(self, row_order: Iterable[int]) -> Mapping[str, Any]:
        ends = [end for process in self._timelines if (end := process.last_ns()) is not None]
        steps = [
            step.time
            for device in self._devices
            for step in device.steps.steps
            if not step.is_warm_up
        ]
        return {
            "duration_ns": max(ends, default=self._base_ns) - self._base_ns,
            # The time that the page shows first: all steps but the warm-up.
            "measured_ns": (
                (min(time.start_ns for time in steps), max(time.end_ns for time in steps))
                if steps
                else None
            ),
            "rows": [self._rows[number][1:] for number in row_order],
            "names": list(self._number_by_name),
            "frames": list(self._tree.frames),
            "kinds": [kind.name.lower() for kind in WorkKind],
            "causes": [name for name, _ in CAUSES.values()],
            "devices": [
                [(index << 16) + device, self._device_name(process, name)]
                for index, process in enumerate(self._timelines)
                for device, name in list(device_names(process).items())[:_MAX_DEVICES]
            ],
            "processes": len(self._timelines),
            "simulated": any(process.simulated for process in self._timelines),
        }

    def _device_name(self, process: Timeline, name: str) -> str:
        rank = process.activities.rank
        if rank is not None:
            return f"rank {rank}, {name}"
        return f"{name} of process {process.process}" if len(self._timelines) > 1 else name

    def _name_number(self, name: str) -> int:
        """Return the number of a name in the list of names of the page."""
        return self._number_by_name.setdefault(_cut(name), len(self._number_by_name))

    def _append_row(self, place: tuple[int, ...], source: str, label: str, group: str) -> int:
        """Add a row to the timeline, and return its number."""
        self._rows.append((place, source, label, group))
        return len(self._rows) - 1

    # --- GPU work and the host ---------------------------------------------------------------------

    def _work_table(self, index: int, names: Column, nodes: Column) -> _PageTable:
        """Return the work of a process, and add a track and a row for each stream."""
        process = self._timelines[index]
        work = process.work
        lanes, track = work_tracks(process)
        work_counts = np.bincount(track, minlength=len(lanes))
        row_of_track = [-1] * len(lanes)
        tracks_of_device: dict[int, list[int]] = {}
        for number, lane in enumerate(lanes):
            tracks_of_device.setdefault(lane.device, []).append(number)
        names_of_devices = device_names(process)
        for device, tracks in list(tracks_of_device.items())[:_MAX_DEVICES]:
            group = self._device_name(process, names_of_devices[device])
            most_used = sorted(tracks, key=lambda number: -int(work_counts[number]))
            for number in most_used[:_MAX_STREAMS]:
                row_of_track[number] = self._append_row(
                    (index, 0, device, 2, number), "work", lanes[number].name, group
                )
        first_track = len(self._tracks)
        self._tracks += [
            (row, lane.device + (index << 16), lane.number)
            for row, lane in zip(row_of_track, lanes, strict=True)
        ]
        return {
            "start": work.start_ns - self._base_ns,
            "duration": work.end_ns - work.start_ns,
            "track": first_track + track,
            "kind": work.kind,
            "signature": self._signatures.of_work(process, names, nodes),
            "size": work.size_bytes.astype(np.int64) & ((1 << 53) - 1),
            "in_graph": (work.graph_node != 0).astype(np.uint8),
            "call": work.call,
        }

    def _span_table(self, index: int, source: str, spans: Spans, names: Column) -> _PageTable:
        """Return the ranges or calls of a process, and add a row for each thread and depth."""
        process = self._timelines[index]
        rank = process.activities.rank
        group = f"process {process.process}"
        if rank is not None:
            group = f"rank {rank}, {group}"
        _, thread = distinct_rows(spans.thread)
        lane = flat_lanes(thread, spans.start_ns, spans.end_ns)
        first_spans, track = distinct_rows(thread, lane)
        span_counts = np.bincount(track, minlength=len(first_spans))
        row_of_track = np.full(len(first_spans), -1, np.int64)
        for number in np.argsort(-span_counts, kind="stable")[:_MAX_HOST_ROWS].tolist():
            first_span = first_spans[number]
            thread_number = int(spans.thread[first_span])
            label = f"thread {thread_number}" if thread_number else "process"
            label += " · ranges" if source == "range" else " · CUDA API"
            place = (index, 1, thread_number, int(source == "call"), int(lane[first_span]))
            row_of_track[number] = self._append_row(place, source, label, group)
        return {
            "start": spans.start_ns - self._base_ns,
            "duration": spans.end_ns - spans.start_ns,
            "row": row_of_track[track],
            "name": names[spans.name],
        }

    # --- steps and idle time -----------------------------------------------------------------------

    def _device_row(self, of: Device | DeviceGaps, place: int, source: str, label: str) -> int:
        """Add a row at a place among the rows of a device, and return its number."""
        index = [process.process for process in self._timelines].index(of.process)
        process = self._timelines[index]
        group = self._device_name(process, device_names(process)[of.device])
        return self._append_row((index, 0, of.device, place), source, label, group)

    def _step_table(self, device: Device) -> _PageTable:
        """Return the steps of a device, and add a row for the steps."""
        row = self._device_row(device, 0, "range", "steps")
        steps = device.steps.steps
        start = np.array([step.time.start_ns for step in steps], np.int64)
        end = np.array([step.time.end_ns for step in steps], np.int64)
        names = [f"{'warm-up ' if step.is_warm_up else ''}step {step.number}" for step in steps]
        return {
            "start": start,
            "duration": np.maximum(end - start, 0),
            "row": np.full(len(start), row),
            "name": np.array([self._name_number(name) for name in names], np.int64),
        }

    def _idle_table(self, device: DeviceGaps) -> _PageTable:
        """Return the gaps of a device with a column for each cause, and add a row for them."""
        gaps = device.gaps
        causes = gaps.by_cause_ns[:, _CAUSE_COLUMNS].T
        row = self._device_row(device, 1, "idle", "idle")
        columns = (gaps.start_ns - self._base_ns, gaps.end_ns - gaps.start_ns)
        rows = np.full(len(gaps.start_ns), row)
        return dict(zip(_IDLE_COLUMNS, (*columns, rows, *causes), strict=True))


def _call_nodes(process: Timeline, nodes: Column) -> Column:
    """Return the node of each call's stack; 0 if the work of the call has the same stack.

    Most calls launch work, so that most nodes are 0, which keeps the page small.
    """
    work, calls = process.work, process.calls
    has_call = work.call >= 0
    has_same_stack = np.zeros(len(calls.site), np.bool_)
    has_same_stack[work.call[has_call]] = work.site[has_call] == calls.site[work.call[has_call]]
    return np.where(has_same_stack, 0, nodes[calls.site])


# --- columns: joined, sorted and small enough to be sent -------------------------------------------


def _cut(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_LENGTH else f"{text[:_MAX_TEXT_LENGTH]}…"


def _sorted_table(
    columns: Iterable[str], tables: Sequence[_PageTable]
) -> tuple[Column, _PageTable]:
    """Join tables and sort the rows by start. Return the order of the rows, and the table."""
    empty = np.empty(0, np.int64)
    joined = {
        name: np.concatenate([empty, *(table[name] for table in tables)]).astype(np.int64)
        for name in columns
    }
    order = np.argsort(joined["start"], kind="stable")
    return order, {name: column[order] for name, column in joined.items()}


def _sorted_by_track(table: _PageTable) -> _PageTable:
    """Sort work by track, and replace starts and calls by differences, which makes the page smaller.

    Work of a track does not overlap, and mostly runs in the order of its calls, so that the gaps between work
    and the differences between the numbers of calls are small.
    """
    order = np.argsort(table["track"], kind="stable")
    table = {name: column[order] for name, column in table.items()}
    previous_end = np.roll(table["start"] + table["duration"], 1)
    begins_track = np.diff(table["track"], prepend=-1) != 0
    gap = table.pop("start") - np.where(begins_track, 0, previous_end)
    return table | {"gap": gap, "call": np.diff(table["call"], prepend=0)}


def _places_in(order: Column, numbers: Column) -> Column:
    """Return the place of each number in an order; the place of -1 is -1."""
    places = np.empty(len(order) + 1, np.int64)
    places[order] = np.arange(len(order))
    places[-1] = -1
    return places[numbers]


def _as_small_as_possible(column: Column) -> Column:
    """Return a column as 8-bit integers if all of its values fit into 8 bits."""
    is_small = not len(column) or (column.min() >= 0 and column.max() < 256)
    return column.astype(np.uint8) if is_small else column


# --- signatures of GPU work, and the call tree that they refer to ----------------------------------
#
# Work with the same call stack, name and launch configuration has the same signature. The page computes the
# times of kernels, call sites and call stacks from the times of signatures.

_LAUNCH_COLUMNS = (
    *(f"{size}_{axis}" for size in ("grid", "block") for axis in "xyz"),
    "registers",
    "shared",
)


class _CallTree:
    """The call tree of all stacks. Node 0 is the root, and a node's number is higher than its parent's."""

    def __init__(self) -> None:
        self.frames: dict[tuple[str, str, int], int] = {("", "", 0): 0}
        # Parent and frame of each node.
        self.nodes: dict[tuple[int, int], int] = {(-1, 0): 0}

    def frame(self, frame: Frame) -> int:
        """Return the number of a frame."""
        return self.frames.setdefault(
            (_cut(frame.name), _cut(frame.filename), frame.line), len(self.frames)
        )

    def child(self, parent: int, frame: Frame) -> int:
        """Return the node of a call below a node."""
        return self.nodes.setdefault((parent, self.frame(frame)), len(self.nodes))

    def add_stack(self, stack: Sequence[Frame]) -> int:
        """Add the frames of a stack, and return the node of its innermost frame."""
        node = 0
        for frame in reversed(stack):
            node = self.child(node, frame)
        return node


class _Signatures:
    """Numbers the signatures of the work of all processes."""

    def __init__(self, tree: _CallTree) -> None:
        self._tree = tree
        # A signature is a node of the call tree, a name, the frame of the call site, and a launch
        # configuration.
        self._signatures: dict[tuple[int, int, int, int], int] = {}
        self._launches: dict[tuple[int, ...], int] = {(0,) * len(_LAUNCH_COLUMNS): 0}

    def of_work(self, process: Timeline, names: Column, nodes: Column) -> Column:
        """Return the signature of each piece of work.

        ``names`` has the number of each name of the process, ``nodes`` the node of each call stack.
        """
        work = process.work
        columns = (work.site, work.name, self._launches_of_work(process))
        first_rows, numbers = distinct_rows(*columns)
        signatures = []
        for site, name, launch in zip(
            *(column[first_rows].tolist() for column in columns), strict=True
        ):
            stack = process.stacks[site]
            leaf = self._tree.child(int(nodes[site]), Frame(process.names[name], "", 0))
            call_site = self._tree.frame(stack[call_site_index(stack)]) if stack else 0
            signature = (leaf, int(names[name]), call_site, launch)
            signatures.append(self._signatures.setdefault(signature, len(self._signatures)))
        return np.array(signatures, np.int64)[numbers]

    def _launches_of_work(self, process: Timeline) -> Column:
        """Return the number of the launch configuration of each piece of work; 0 for copies and memsets."""
        is_kernel = process.work.kind == WorkKind.KERNEL
        records = process.activities.records[EventKind.KERNEL_RUN]
        kernels = records[process.work.record[is_kernel]]
        columns = [
            *kernels["grid"].T,
            *kernels["block"].T,
            kernels["registers"],
            kernels["shared_bytes"],
        ]
        first_rows, numbers = distinct_rows(*columns)
        rows = zip(*(column[first_rows].tolist() for column in columns), strict=True)
        launches = [self._launches.setdefault(row, len(self._launches)) for row in rows]
        launch_of_work = np.zeros(len(is_kernel), np.int64)
        launch_of_work[is_kernel] = np.array(launches, np.int64)[numbers]
        return launch_of_work

    def arrays(self) -> dict[str, Array]:
        """Return the columns of the signatures, of the nodes of the call tree, and of the launches."""
        signatures = np.array(list(self._signatures), np.int64).reshape(-1, 4).T
        nodes = np.array(list(self._tree.nodes), np.int64).T
        nodes[:, 0] = 0  # the root
        launches = np.array(list(self._launches), np.int64).T
        columns = (
            ("signature", ("node", "name", "site", "launch"), signatures),
            ("node", ("parent", "frame"), nodes),
            ("launch", _LAUNCH_COLUMNS, launches),
        )
        return {
            f"{table}_{name}": values
            for table, names, array in columns
            for name, values in zip(names, array, strict=True)
        }
