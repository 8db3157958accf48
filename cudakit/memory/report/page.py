"""The data of the interactive page: every allocation, segment and event of a device as arrays.

In the script, the index of an event stands for the state after this event, and -1 for the state before the
first event. An allocation is in use from event ``begin`` until event ``end``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from cudakit.memory.report.summary import device_name
from cudakit.memory.result import DeviceDiff, DeviceMemory
from cudakit.memory.snapshot import (
    Action,
    DeviceTrace,
    Ids,
    Ints,
    SegmentKind,
    Snapshot,
    StackTable,
    concatenate,
    pool_name,
    take,
)
from cudakit.memory.steps import active_annotation, annotations_of, non_decreasing
from cudakit.report.document import Array, Explorer, ExplorerData
from cudakit.stacks import Frame

_SCRIPT_PACKAGE = "cudakit.memory.report"
# Number of characters to which names from files are cut, so that a damaged file makes no huge page.
_MAX_TEXT_LENGTH = 400
_MAX_ANNOTATIONS = 100_000
# Maximum number of open ranges that are searched for the start of a range.
_MAX_SEARCHED_RANGES = 100


def explorer(device: DeviceMemory) -> Explorer:
    """Return the interactive views of the memory of one device."""
    return Explorer(
        "memory",
        _SCRIPT_PACKAGE,
        lambda: ExplorerData(_device_arrays(device), _device_facts(device)),
    )


def _device_arrays(device: DeviceMemory) -> Mapping[str, Array]:
    history, trace = device.history, device.trace
    order = np.argsort(history.allocations.begin, kind="stable")
    allocations = take(history.allocations, order)
    range_ids, _ = active_annotation(device.snapshot, trace)
    oom_events = np.flatnonzero(trace.events.action == Action.OOM)
    parent_nodes, node_frames, leaf_nodes = _call_tree(device.snapshot.stacks)
    event_times = non_decreasing(trace.events.time_us)
    segments = concatenate(history.segments.plain_segments, history.segments.mapped_ranges)
    return {
        # Event -1 becomes 0, so that no number is negative; the script subtracts 1.
        "begin": allocations.begin + 1,
        "pending": allocations.free_request - allocations.begin,
        "ending": allocations.end - allocations.free_request,
        "address": allocations.address,
        "size": allocations.size,
        "requested": allocations.requested,
        "stack": allocations.stack,
        "stream": allocations.stream,
        "pool": allocations.pool,
        "category": _ids_by_event(trace.events.category, allocations.source),
        "range": _ids_by_event(range_ids, allocations.source),
        "segment_begin": segments.begin + 1,
        "segment_end": segments.end,
        "segment_address": segments.address,
        "segment_size": segments.size,
        "segment_stream": segments.stream,
        "segment_pool": segments.pool,  # -1: not recorded
        "segment_kind": segments.kind,
        "segment_expandable": segments.expandable.astype(np.uint8),
        # If events contradict each other, the reserved memory differs from the sum of the segments.
        "reserved": history.curves.reserved,
        "action": trace.events.action,
        "time_us": event_times - event_times[0] if len(event_times) else event_times,
        "oom_event": oom_events,
        "oom_size": trace.events.size[oom_events],
        "oom_free": trace.events.address[oom_events],
        "node_parent": parent_nodes,
        "node_frame": node_frames,
        "stack_node": leaf_nodes,
        "stack_site": StackTable(device.snapshot).site_frames + 1,
    }


def all_devices(devices: Sequence[DeviceMemory]) -> Explorer:
    """Return one interactive view of the memory of all devices over time."""
    return Explorer("memory_devices", _SCRIPT_PACKAGE, lambda: _devices_data(devices))


def _devices_data(devices: Sequence[DeviceMemory]) -> ExplorerData:
    """Return the reduced curves of each device; arrays of device 0 are "event0", "time0" and so on."""
    arrays: dict[str, Array] = {}
    facts = []
    for number, device in enumerate(devices):
        timeline, trace = device.timeline, device.trace
        event_times = non_decreasing(trace.events.time_us)
        first_us = int(event_times[0]) if len(event_times) else 0
        events = np.array(timeline.event, np.int64)
        # Event -1 becomes 0, so that no number is negative.
        arrays[f"event{number}"] = events + 1
        arrays[f"time{number}"] = (
            event_times[np.maximum(events, 0)] - first_us if len(event_times) else event_times
        )
        arrays[f"requested{number}"] = np.array(timeline.requested_bytes, np.int64)
        arrays[f"reserved{number}"] = np.array(timeline.reserved_bytes, np.int64)
        facts.append(
            {
                "name": _cut_text(f"{device.file}: {device_name(device)}"),
                "events": len(trace.events),
                "has_times": device.snapshot.has_times,
                "first_us": first_us,
                "last_us": int(event_times[-1]) if len(event_times) else 0,
                "failures": [oom.event for oom in device.ooms],
                "failure_times": [(oom.time_us or first_us) - first_us for oom in device.ooms],
            }
        )
    return ExplorerData(arrays, {"devices": facts})


def difference(device: DeviceDiff) -> Explorer:
    """Return the interactive flame graph of the changes between two snapshots."""
    return Explorer("memory_difference", _SCRIPT_PACKAGE, lambda: _difference_data(device))


def _difference_data(device: DeviceDiff) -> ExplorerData:
    rows_by_moment = {
        name: (*moment.grown, *moment.appeared, *moment.shrunk, *moment.vanished)
        for name, moment in (("peak", device.peak), ("end", device.end))
    }
    index_by_frame: dict[Frame, int] = {}
    parents, frames, leaves = _call_tree(
        [
            tuple(index_by_frame.setdefault(frame, len(index_by_frame)) for frame in row.stack)
            for rows in rows_by_moment.values()
            for row in rows
        ]
    )
    arrays: dict[str, Array] = {"node_parent": parents, "node_frame": frames}
    first = 0
    for name, rows in rows_by_moment.items():
        changes = np.array([row.change_bytes for row in rows], np.int64)
        for kind, amounts in (("grown", changes.clip(min=0)), ("shrunk", -changes.clip(max=0))):
            arrays[f"{name}_{kind}"] = self_bytes = np.zeros(len(parents), np.int64)
            np.add.at(self_bytes, leaves[first : first + len(rows)], amounts)
        first += len(rows)
    return ExplorerData(arrays, {"frames": _frame_rows(index_by_frame)})


def _frame_rows(frames: Iterable[Frame]) -> list[tuple[str, str, int]]:
    return [(_cut_text(frame.name), _cut_text(frame.filename), frame.line) for frame in frames]


def _ids_by_event(ids: Ids, source_events: Ints) -> Ids:
    """Return the id that each allocation has by its alloc event; 0 if the trace lacks this event.

    ``ids`` has an id for each event, and ``source_events`` the index of each allocation's alloc event, or -1.
    """
    allocation_ids = np.zeros(len(source_events), np.int32)
    allocation_ids[source_events >= 0] = ids[source_events[source_events >= 0]]
    return allocation_ids


def _call_tree(stacks: Sequence[Sequence[int]]) -> tuple[Ints, Ints, Ints]:
    """Return the call tree of stacks: the parent and the frame of each node, and the node of each stack.

    Stacks are frame indices, innermost first. Node 0 is the root; outer calls are nearer to it.
    """
    parents, frames = [0], [0]
    child_by_parent_and_frame: dict[tuple[int, int], int] = {}
    leaves = []
    for stack in stacks:
        node = 0
        for frame_index in reversed(stack):
            child = child_by_parent_and_frame.get((node, frame_index))
            if child is None:
                child = child_by_parent_and_frame[node, frame_index] = len(parents)
                parents.append(node)
                frames.append(frame_index)
            node = child
        leaves.append(node)
    return (np.array(parents, np.int64), np.array(frames, np.int64), np.array(leaves, np.int64))


def _device_facts(device: DeviceMemory) -> dict[str, Any]:
    snapshot, trace = device.snapshot, device.trace
    _, range_names = active_annotation(snapshot, trace)
    first_us = int(trace.events.time_us[0]) if len(trace.events) else 0
    return {
        "device": device_name(device),
        "file": device.file,
        "events": len(trace.events),
        "begins_complete": device.history.begins_complete,
        "has_times": snapshot.has_times,
        "first_us": first_us,
        "peak_event": device.history.peak_moment() - 1,
        "shown_event": device.at.event,
        "frames": _frame_rows(snapshot.frames),
        "texts": [_cut_text(text) for text in snapshot.texts],
        "range_names": [_cut_text(name) for name in range_names],
        "ranges": _annotation_ranges(snapshot, trace, range_names),
        "pools": [pool_name(pool) for pool in snapshot.pools],
        "kinds": [kind.name.lower() for kind in SegmentKind],
        "actions": [action.name.lower() for action in Action],
        "snapshots": np.flatnonzero(trace.events.action == Action.SNAPSHOT)[:100].tolist(),
    }


def _annotation_ranges(
    snapshot: Snapshot, trace: DeviceTrace, names: tuple[str, ...]
) -> list[tuple[int, int, int, int]]:
    """Return the annotations as (first event, event after the last, nesting depth, index of the name)."""
    if not snapshot.has_times or not len(trace.events):
        return []
    event_times = non_decreasing(trace.events.time_us)
    index_by_name = {name: index for index, name in enumerate(names)}
    open_ranges: list[tuple[str, int]] = []
    ranges = []
    for annotation in annotations_of(snapshot, trace)[:_MAX_ANNOTATIONS]:
        event = int(np.searchsorted(event_times, annotation.time_us))
        if annotation.is_start:
            open_ranges.append((annotation.name, event))
            continue
        # The innermost range of this name; the bound limits the time if ranges never end.
        for depth in range(len(open_ranges) - 1, -1, -1)[:_MAX_SEARCHED_RANGES]:
            name, start = open_ranges[depth]
            if name == annotation.name:
                del open_ranges[depth]
                if start < event and name in index_by_name:
                    ranges.append((start, event, depth, index_by_name[name]))
                break
    return sorted(ranges)


def _cut_text(text: str) -> str:
    return text if len(text) <= _MAX_TEXT_LENGTH else f"{text[:_MAX_TEXT_LENGTH]}…"
