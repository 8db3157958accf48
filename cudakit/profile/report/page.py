"""The data of the interactive page: GPU work, API calls, ranges and idle time of all processes as arrays.

Column are nanoseconds after the first activity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cudakit.profile.activities import Activities
from cudakit.profile.exports import device_names, work_tracks
from cudakit.profile.timeline import Column, Spans, Timeline, WorkKind, first_time, timeline
from cudakit.report.document import Array, Explorer, ExplorerData
from cudakit.report.timeline import distinct_rows, flat_lanes
from cudakit.stacks import Frame, call_site_index
from cudakit.trace.kinds import EventKind

_PACKAGE = "cudakit.profile.report"
# Maximum number of devices of each process, of streams of each device, and of rows of the ranges and of
# the calls of each process that the page draws. Sums count all work.
_MAX_DEVICES = 64
_MAX_STREAMS = 24
_MAX_HOST_ROWS = 16

_WORK_COLUMNS = ("start", "duration", "track", "kind", "signature", "size", "in_graph", "call")
_CALL_COLUMNS = ("start", "duration", "row", "name", "node")
_RANGE_COLUMNS = ("start", "duration", "row", "name")


@dataclass(frozen=True, slots=True)
class DeviceIdle:
    """The gaps between the work of a process on a device, sorted by time."""

    process: int
    device: int
    start_ns: Column
    end_ns: Column
    by_cause_ns: Column  # a row for each gap, a column for each cause; a row adds up to the gap


@dataclass(frozen=True, slots=True)
class IdleTimes:
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
    activities: Sequence[Activities],
    idle_times: IdleTimes | None = None,
    steps: Sequence[DeviceSteps] = (),
) -> Explorer:
    """Return the interactive views of the profiles of all processes."""
    return Explorer(
        "profile", _PACKAGE, lambda: _Page(activities, idle_times or IdleTimes(()), steps).data()
    )


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
        self, activities: Sequence[Activities], idle_times: IdleTimes, steps: Sequence[DeviceSteps]
    ) -> None:
        self._timelines = [timeline(process_activities) for process_activities in activities]
        self._idle_times = idle_times
        self._steps = steps
        self._base_ns = first_time(self._timelines)
        self._number_by_name: dict[str, int] = {}
        self._tree = CallTree()
        self._signatures = Signatures(self._tree)
        self._rows: list[_Row] = []
        # Row (or -1), device and stream of each track of GPU work.
        self._tracks: list[tuple[int, int, int]] = []

    def data(self) -> ExplorerData:
        """Return all arrays, and the texts and numbers that JSON can hold."""
        call_tables, range_tables, work_tables = [], [], []
        for process_index, process_timeline in enumerate(self._timelines):
            names = np.array([self._name_number(name) for name in process_timeline.names], np.int64)
            nodes = np.array(
                [self._tree.add_stack(stack) for stack in process_timeline.stacks], np.int64
            )
            work_tables.append(self._work_table(process_index, process_timeline, names, nodes))
            range_tables.append(
                self._span_table(process_index, "range", process_timeline.ranges, names)
            )
            call_tables.append(
                self._span_table(process_index, "call", process_timeline.calls, names)
            )
            call_tables[-1]["node"] = self._call_nodes(process_timeline, nodes)
        range_tables += map(self._step_table, self._steps)
        idle_columns = self._idle_table()
        first_call_rows = np.cumsum([0, *(len(table["start"]) for table in call_tables)])
        for table, first_call_row in zip(work_tables, first_call_rows[:-1].tolist(), strict=True):
            table["call"] = np.where(table["call"] >= 0, table["call"] + first_call_row, -1)
        call_order, call_table = sorted_table(_CALL_COLUMNS, call_tables)
        _, work_table = sorted_table(_WORK_COLUMNS, work_tables)
        work_table["call"] = places_in(call_order, work_table["call"]) + 1
        _, range_table = sorted_table(_RANGE_COLUMNS, range_tables)
        row_order = sorted(range(len(self._rows)), key=lambda number: self._rows[number].place)
        tracks = np.array(self._tracks, np.int64).reshape(-1, 3)
        track_table = {"row": tracks[:, 0], "device": tracks[:, 1], "stream": tracks[:, 2]}
        tables = {
            "track": track_table,
            "call": call_table,
            "range": range_table,
            "idle": idle_columns,
        }
        for table in tables.values():
            table["row"] = places_in(np.array(row_order, np.int64), table["row"]) + 1
        tables["work"] = sorted_by_track(work_table)
        arrays = {
            f"{name}_{column}": as_small_as_possible(column_values)
            for name, table in tables.items()
            for column, column_values in table.items()
        }
        return ExplorerData({**arrays, **self._signatures.arrays()}, self._facts(row_order))

    def _facts(self, row_order: Iterable[int]) -> Mapping[str, Any]:
        ends = [
            end
            for process_timeline in self._timelines
            if (end := process_timeline.last_ns()) is not None
        ]
        rows = [self._rows[fact_number] for fact_number in row_order]
        return {
            "duration_ns": max(ends, default=self._base_ns) - self._base_ns,
            "measured_ns": self._measured_time(),
            "rows": [[row.source, row.label, row.group] for row in rows],
            "names": list(self._number_by_name),
            "frames": list(self._tree.frames),
            "kinds": [kind.name.lower() for kind in WorkKind],
            "causes": list(self._idle_times.causes),
            "devices": [
                [(process_index << 16) + device, self._device_name(process_timeline, name)]
                for process_index, process_timeline in enumerate(self._timelines)
                for device, name in list(device_names(process_timeline).items())[:_MAX_DEVICES]
            ],
            "processes": len(self._timelines),
            "simulated": any(process_timeline.simulated for process_timeline in self._timelines),
        }

    def _device_name(self, process_timeline: Timeline, name: str) -> str:
        rank = process_timeline.activities.rank
        if rank is not None:
            return f"rank {rank}, {name}"
        return f"{name} of process {process_timeline.process}" if len(self._timelines) > 1 else name

    def _name_number(self, name: str) -> int:
        """Return the number of a name in the list of names of the page."""
        return self._number_by_name.setdefault(cut_text(name), len(self._number_by_name))

    def _append_row(self, place: tuple[int, ...], source: str, label: str, group: str) -> int:
        """Add a row to the timeline, and return its number."""
        self._rows.append(_Row(place, source, label, group))
        return len(self._rows) - 1

    # --- GPU work ----------------------------------------------------------------------------------

    def _work_table(
        self, process_index: int, process_timeline: Timeline, names: Column, nodes: Column
    ) -> PageTable:
        work = process_timeline.work
        return {
            "start": work.start_ns - self._base_ns,
            "duration": work.end_ns - work.start_ns,
            "track": self._add_tracks(process_index, process_timeline),
            "kind": work.kind,
            "signature": self._signatures.of_work(process_timeline, names, nodes),
            "size": work.size_bytes.astype(np.int64) & ((1 << 53) - 1),
            "in_graph": (work.graph_node != 0).astype(np.uint8),
            "call": work.call,
        }

    def _add_tracks(self, process_index: int, process_timeline: Timeline) -> Column:
        """Add a track and a row for each stream; return the track of each piece of work."""
        lanes, track_of_work = work_tracks(process_timeline)
        name_by_device = device_names(process_timeline)
        work_counts = np.bincount(track_of_work, minlength=len(lanes))
        row_of_track = np.full(len(lanes), -1, np.int64)
        tracks_of_device: dict[int, list[int]] = {}
        for track_number, track in enumerate(lanes):
            tracks_of_device.setdefault(track.device, []).append(track_number)
        for device, tracks in list(tracks_of_device.items())[:_MAX_DEVICES]:
            group = self._device_name(process_timeline, name_by_device[device])
            most_used_tracks = sorted(
                tracks, key=lambda track_number: -int(work_counts[track_number])
            )[:_MAX_STREAMS]
            for track_number in most_used_tracks:
                place = (process_index, 0, device, 2, track_number)
                label = lanes[track_number].name
                row_of_track[track_number] = self._append_row(place, "work", label, group)
        first_track_number = len(self._tracks)
        self._tracks += [
            (row, track.device + (process_index << 16), track.number)
            for row, track in zip(row_of_track.tolist(), lanes, strict=True)
        ]
        return first_track_number + track_of_work

    # --- the host ----------------------------------------------------------------------------------

    def _call_nodes(self, process_timeline: Timeline, nodes: Column) -> Column:
        """Return the node of each call's stack; 0 if the work of the call has the same stack.

        Most calls launch work, so that most nodes are 0, which keeps the page small.
        """
        work, calls = process_timeline.work, process_timeline.calls
        has_call = work.call >= 0
        has_same_stack = np.zeros(len(calls.site), np.bool_)
        has_same_stack[work.call[has_call]] = work.site[has_call] == calls.site[work.call[has_call]]
        return np.where(has_same_stack, 0, nodes[calls.site])

    def _span_table(
        self, process_index: int, source: str, spans: Spans, names: Column
    ) -> PageTable:
        """Return the ranges or calls of a process, and add a row for each thread and depth."""
        _, thread = distinct_rows(spans.thread)
        lane = flat_lanes(thread, spans.start_ns, spans.end_ns)
        first_spans, track = distinct_rows(thread, lane)
        span_counts = np.bincount(track, minlength=len(first_spans))
        row_of_track = np.full(len(first_spans), -1, np.int64)
        process = _process_name(self._timelines[process_index])
        for span_number in np.argsort(-span_counts, kind="stable")[:_MAX_HOST_ROWS].tolist():
            first_span = first_spans[span_number]
            thread_number = int(spans.thread[first_span])
            label = f"thread {thread_number}" if thread_number else "process"
            label += " · ranges" if source == "range" else " · CUDA API"
            place = (process_index, 1, thread_number, int(source == "call"), int(lane[first_span]))
            row_of_track[span_number] = self._append_row(place, source, label, process)
        return {
            "start": spans.start_ns - self._base_ns,
            "duration": spans.end_ns - spans.start_ns,
            "row": row_of_track[track],
            "name": names[spans.name],
        }

    def _measured_time(self) -> tuple[int, int] | None:
        """Return the time that the page shows first: all steps but the warm-up; None without steps."""
        measured_times = [
            (start, end)
            for steps in self._steps
            for start, end, is_warm_up in zip(
                steps.start_ns, steps.end_ns, steps.is_warm_up, strict=True
            )
            if not is_warm_up
        ]
        if not measured_times:
            return None
        return min(start for start, _ in measured_times), max(end for _, end in measured_times)

    # --- steps and idle time -----------------------------------------------------------------------

    def _step_table(self, steps: DeviceSteps) -> PageTable:
        """Return the steps of a device, and add a row for the steps."""
        row = self._device_row(steps, 0, "range", "steps")
        start = np.array(steps.start_ns, np.int64)
        return {
            "start": start,
            "duration": np.maximum(np.array(steps.end_ns, np.int64) - start, 0),
            "row": np.full(len(start), row),
            "name": np.array([self._name_number(name) for name in steps.names], np.int64),
        }

    def _device_row(
        self, device: DeviceIdle | DeviceSteps, place: int, source: str, label: str
    ) -> int:
        """Add a row at a place among the rows of a device, and return its number."""
        process_index = [process_timeline.process for process_timeline in self._timelines].index(
            device.process
        )
        process_timeline = self._timelines[process_index]
        group = self._device_name(process_timeline, device_names(process_timeline)[device.device])
        return self._append_row((process_index, 0, device.device, place), source, label, group)

    def _idle_table(self) -> PageTable:
        """Return the gaps of all devices, and add a row for each device; the last columns are the causes."""
        tables = []
        for device_idle in self._idle_times.devices:
            row = self._device_row(device_idle, 1, "idle", "idle")
            causes = device_idle.by_cause_ns.reshape(-1, len(self._idle_times.causes))
            tables.append(
                {
                    "start": device_idle.start_ns - self._base_ns,
                    "duration": device_idle.end_ns - device_idle.start_ns,
                    "row": np.full(len(causes), row),
                    **{
                        f"cause{cause_number}": causes[:, cause_number]
                        for cause_number in range(causes.shape[1])
                    },
                }
            )
        causes_columns = (
            f"cause{cause_number}" for cause_number in range(len(self._idle_times.causes))
        )
        _, table = sorted_table(("start", "duration", "row", *causes_columns), tables)
        return table


def _process_name(process_timeline: Timeline) -> str:
    """Return the name of a process in the timeline of the page, with its rank if the rank is known."""
    rank = process_timeline.activities.rank
    name = f"process {process_timeline.process}"
    return name if rank is None else f"rank {rank}, {name}"


# --- columns: joined, sorted and small enough to be sent -------------------------------------------

# Number of characters to which names from traces are cut.
_MAX_TEXT_LENGTH = 400

PageTable = dict[str, Column]


def cut_text(text: str) -> str:
    """Return a text of at most 400 characters, so that a damaged trace makes no huge page."""
    return text if len(text) <= _MAX_TEXT_LENGTH else f"{text[:_MAX_TEXT_LENGTH]}…"


def sorted_table(columns: Iterable[str], tables: Sequence[PageTable]) -> tuple[Column, PageTable]:
    """Join tables and sort the rows by start. Return the order of the rows, and the table."""
    empty_column = np.empty(0, np.int64)
    joined_columns = {
        name: np.concatenate([empty_column, *(table[name] for table in tables)]).astype(np.int64)
        for name in columns
    }
    row_order = np.argsort(joined_columns["start"], kind="stable")
    return row_order, {name: column[row_order] for name, column in joined_columns.items()}


def sorted_by_track(work_columns: PageTable) -> PageTable:
    """Sort work by track, and replace starts and calls by differences, which makes the page smaller.

    Work of a track does not overlap, and mostly runs in the order of its calls, so that the gaps between work
    and the differences between the numbers of calls are small.
    """
    row_order = np.argsort(work_columns["track"], kind="stable")
    work_columns = {name: column[row_order] for name, column in work_columns.items()}
    previous_end = np.roll(work_columns["start"] + work_columns["duration"], 1)
    begins_track = np.diff(work_columns["track"], prepend=-1) != 0
    gap_before = work_columns.pop("start") - np.where(begins_track, 0, previous_end)
    return work_columns | {"gap": gap_before, "call": np.diff(work_columns["call"], prepend=0)}


def places_in(order: Column, searched_numbers: Column) -> Column:
    """Return the place of each number in an order; the place of -1 is -1."""
    places = np.empty(len(order) + 1, np.int64)
    places[order] = np.arange(len(order))
    places[-1] = -1
    return places[searched_numbers]


def as_small_as_possible(column: Column) -> Column:
    """Return a column as 8-bit integers if all of its values fit into 8 bits."""
    is_small = not len(column) or (column.min() >= 0 and column.max() < 256)
    return column.astype(np.uint8) if is_small else column


# --- signatures of GPU work, and the call tree that they refer to ----------------------------------
#
# Work with the same call stack, name and launch configuration has the same signature. The page computes the
# times of kernels, call sites and call stacks from the times of signatures.

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


class CallTree:
    """The call tree of all stacks. Node 0 is the root, and a node's number is higher than its parent's."""

    def __init__(self) -> None:
        self.parents, self.node_frames = [0], [0]
        self.frames: dict[tuple[str, str, int], int] = {("", "", 0): 0}
        self._children: dict[tuple[int, int], int] = {}

    def frame(self, frame: Frame) -> int:
        """Return the number of a frame."""
        frame_key = (cut_text(frame.name), cut_text(frame.filename), frame.line)
        return self.frames.setdefault(frame_key, len(self.frames))

    def child(self, parent: int, frame: Frame) -> int:
        """Return the node of a call below a node."""
        child_key = (parent, self.frame(frame))
        if child_key not in self._children:
            self._children[child_key] = len(self.parents)
            self.parents.append(parent)
            self.node_frames.append(child_key[1])
        return self._children[child_key]

    def add_stack(self, stack: Sequence[Frame]) -> int:
        """Add the frames of a stack, and return the node of its innermost frame."""
        node = 0
        for frame in reversed(stack):
            node = self.child(node, frame)
        return node


class Signatures:
    """Numbers the signatures of the work of all processes."""

    def __init__(self, tree: CallTree) -> None:
        self._tree = tree
        # The number of each signature. A signature is a node of the call tree, a name, the frame of the
        # call site, and a launch configuration.
        self._signatures: dict[tuple[int, int, int, int], int] = {}
        self._launches: dict[tuple[int, ...], int] = {(0,) * len(_LAUNCH_COLUMNS): 0}

    def of_work(self, process_timeline: Timeline, names: Column, nodes: Column) -> Column:
        """Return the signature of each piece of work.

        ``names`` has the number of each name of the process, ``nodes`` the node of each call stack.
        """
        work = process_timeline.work
        columns = (work.site, work.name, self._launches_of_work(process_timeline))
        first_rows, row_numbers = distinct_rows(*columns)
        signatures = []
        for site, name, launch in zip(
            *(column[first_rows].tolist() for column in columns), strict=True
        ):
            leaf_node = self._tree.child(
                int(nodes[site]), Frame(process_timeline.names[name], "", 0)
            )
            signature = (
                leaf_node,
                int(names[name]),
                self._call_site(process_timeline.stacks[site]),
                launch,
            )
            signatures.append(self._signatures.setdefault(signature, len(self._signatures)))
        return np.array(signatures, np.int64)[row_numbers]

    def _call_site(self, stack: Sequence[Frame]) -> int:
        """Return the number of the frame of a stack's call site; 0 for an empty stack."""
        return self._tree.frame(stack[call_site_index(stack)]) if stack else 0

    def _launches_of_work(self, process_timeline: Timeline) -> Column:
        """Return the number of the launch configuration of each piece of work; 0 for copies and memsets."""
        work = process_timeline.work
        is_kernel = work.kind == WorkKind.KERNEL
        kernels = process_timeline.activities.records[EventKind.KERNEL_RUN][work.record[is_kernel]]
        columns = [
            *(kernels["grid"][:, axis] for axis in range(3)),
            *(kernels["block"][:, axis] for axis in range(3)),
            kernels["registers"],
            kernels["shared_bytes"],
        ]
        first_rows, row_numbers = distinct_rows(*columns)
        rows = zip(*(column[first_rows].tolist() for column in columns), strict=True)
        launches = [self._launches.setdefault(row, len(self._launches)) for row in rows]
        launch_of_work = np.zeros(len(is_kernel), np.int64)
        launch_of_work[is_kernel] = np.array(launches, np.int64)[row_numbers]
        return launch_of_work

    def arrays(self) -> dict[str, Array]:
        """Return the columns of the signatures, of the nodes of the call tree, and of the launches."""
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
