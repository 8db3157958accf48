"""Exports for other tools: allocations as rows, curves over time, memory as a call tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.errors import UsageError
from cudakit.memory.analyze.call_sites import StackTable
from cudakit.memory.analyze.steps import non_decreasing
from cudakit.memory.present.rows import device_name
from cudakit.memory.result import DeviceMemory, Holder, MemoryResult
from cudakit.memory.snapshot import Ids, Ints, Snapshot
from cudakit.report.document import Chart, Columns, Document, Marker, Series, Tree
from cudakit.stacks import Frame

# Minimum size of an allocation that is exported as a slice, as a share of the peak. So at most 200 slices
# overlap.
_MIN_SLICE_SHARE = 1 / 200

# Limits of the number of characters of call stacks in an export: a number that is always allowed, and a
# number per byte of the snapshot. Real snapshots have at most 2 characters per byte.
_MIN_CHARACTERS = 1 << 30
_CHARACTERS_PER_BYTE = 4


def allocations(result: MemoryResult) -> Document:
    """Return a row per allocation of every device: interval, size, stream, pool, call site and stack.

    Raises UsageError if the call stacks of all rows are much longer than the snapshot.
    """
    devices_by_snapshot: dict[int, list[DeviceMemory]] = {}
    for device in result.devices:
        devices_by_snapshot.setdefault(id(device.snapshot), []).append(device)
    columns_by_snapshot = [_allocation_columns(devices) for devices in devices_by_snapshot.values()]
    return Document("allocations", (_join_columns(columns_by_snapshot),))


def flame(result: MemoryResult) -> Document:
    """Return the memory at the chosen moment as a call tree per device, outermost calls first."""
    return Document("memory by call stack", tuple(_call_tree(device) for device in result.devices))


def timeline(result: MemoryResult) -> Document:
    """Return the curves as counters and large allocations as slices, by time since the first event."""
    parts = [part for device in result.devices for part in _timeline_parts(device)]
    return Document(result.files[0].name, tuple(parts))


def _allocation_columns(devices: list[DeviceMemory]) -> Columns:
    """Return the allocations of all devices of one snapshot, which share the tables of texts."""
    snapshot = devices[0].snapshot
    site_frames = StackTable(snapshot).site_frames
    frame_texts = tuple(map(frame_text, snapshot.frames))
    stack_texts = tuple(
        " < ".join(frame_texts[frame_index] for frame_index in stack) for stack in snapshot.stacks
    )
    columns_by_device = [_allocation_rows(device, site_frames) for device in devices]
    arrays = {
        name: _concatenate([device_columns[name] for device_columns in columns_by_device])
        for name in columns_by_device[0]
    }
    _check_characters(snapshot, (stack_texts, arrays["stack"]), (frame_texts, arrays["line"]))
    return Columns(
        "allocations",
        arrays,
        text={
            "file": (devices[0].file,),
            "pool": tuple(f"{a},{b}" for a, b in snapshot.pools),
            "line": frame_texts,
            "stack": stack_texts,
        },
    )


def _allocation_rows(device: DeviceMemory, site_frames: Ids) -> dict[str, npt.NDArray[Any]]:
    allocations, n_events = device.replay.allocations, len(device.trace.events)
    return {
        "file": np.zeros(len(allocations), np.int32),
        "device": np.full(len(allocations), -1 if device.device is None else device.device),
        "address": allocations.address,
        "requested_bytes": allocations.requested,
        "size_bytes": allocations.size,
        "size_is_derived": (~allocations.size_known).astype(np.uint8),
        "begin_event": _masked_outside_trace(allocations.begin, n_events),
        "free_requested_event": _masked_outside_trace(allocations.free_request, n_events),
        "end_event": _masked_outside_trace(allocations.end, n_events),
        "begin_us": _event_times(device, allocations.begin),
        "end_us": _event_times(device, allocations.end),
        "stream": allocations.stream,
        "pool": allocations.pool,
        "line": site_frames[allocations.stack],
        "stack": allocations.stack,
    }


def _check_characters(snapshot: Snapshot, *columns: tuple[tuple[str, ...], Ids]) -> None:
    """Raise UsageError if columns of texts are longer than any export of a real snapshot.

    Rows share their texts, so that a small file can describe an export of terabytes.
    """
    max_characters = _MIN_CHARACTERS + _CHARACTERS_PER_BYTE * snapshot.size_bytes
    character_count = 0
    for texts, text_ids in columns:
        text_lengths = np.fromiter(map(len, texts), np.int64, len(texts))
        character_count += int(text_lengths[text_ids[text_ids >= 0]].sum())
    if character_count > max_characters:
        raise UsageError(
            f"the call stacks of this export would have {character_count:.1e} characters",
            hint="choose another output format, such as html or json",
        )


def frame_text(frame: Frame) -> str:
    """Return a frame as one line: file, line, function."""
    location = f"{frame.filename}:{frame.line}" if frame.line else frame.filename
    return f"{location} {frame.name}".strip()


def _masked_outside_trace(events: Ints, n_events: int) -> Ints:
    """Mask event indices before and after the trace."""
    return np.ma.masked_array(events, (events < 0) | (events >= n_events))


def _event_times(device: DeviceMemory, events: Ints) -> Ints:
    """Return the times of events; masked outside the trace and in files without times."""
    times = device.trace.events.time_us
    n_events = len(times)
    has_times = device.snapshot.has_times and n_events > 0
    event_times = (
        times[np.clip(events, 0, n_events - 1)] if has_times else np.zeros(len(events), np.int64)
    )
    return np.ma.masked_array(event_times, (events < 0) | (events >= n_events) | (not has_times))


def _join_columns(columns_to_join: list[Columns]) -> Columns:
    if len(columns_to_join) == 1:
        return columns_to_join[0]
    arrays: dict[str, list[npt.NDArray[np.generic]]] = {
        name: [] for name in columns_to_join[0].arrays
    }
    texts_by_name: dict[str, tuple[str, ...]] = dict.fromkeys(columns_to_join[0].text, ())
    for part_columns in columns_to_join:
        for name, array in part_columns.arrays.items():
            id_offset = len(texts_by_name.get(name, ()))
            arrays[name].append(np.where(array < 0, -1, array + id_offset) if id_offset else array)
        for name, texts in part_columns.text.items():
            texts_by_name[name] += texts
    return Columns(
        columns_to_join[0].name,
        {name: _concatenate(columns) for name, columns in arrays.items()},
        texts_by_name,
    )


def _concatenate(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    concatenate: Callable[..., npt.NDArray[Any]] = np.ma.concatenate
    is_masked = any(isinstance(array, np.ma.MaskedArray) for array in arrays)
    return concatenate(arrays) if is_masked else np.concatenate(arrays)


def _call_tree(device: DeviceMemory) -> Tree:
    """Merge the call stacks of all holders into a tree."""
    root = _CallNode(device_name(device))
    for holder in device.holders:
        root.add_bytes(_frame_labels(holder), holder.bytes)
    return root.to_tree()


def _frame_labels(holder: Holder) -> list[str]:
    if not holder.stack:
        return ["no stack recorded"]
    return [frame_text(frame) for frame in reversed(holder.stack)]


class _CallNode:
    """A mutable node of the call tree."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.bytes = 0
        self.children: dict[str, _CallNode] = {}

    def add_bytes(self, labels: list[str], size: int) -> None:
        node = self
        node.bytes += size
        for label in labels:
            node = node.children.setdefault(label, _CallNode(label))
            node.bytes += size

    def to_tree(self) -> Tree:
        """Return the tree, built without recursion: stacks can be deeper than Python's recursion limit."""
        nodes = [self]
        tree_by_id: dict[int, Tree] = {}
        for node in nodes:
            nodes.extend(node.children.values())
        for node in reversed(nodes):
            children = tuple(tree_by_id[id(child)] for child in node.children.values())
            tree_by_id[id(node)] = Tree(node.label, node.bytes, children)
        return tree_by_id[id(self)]


def _timeline_parts(device: DeviceMemory) -> Iterator[Chart | Columns]:
    trace, curves = device.trace, device.replay.curves
    n_events = len(trace.events)
    if not n_events:
        return
    time_by_event = _event_clock(device)
    name = device_name(device)
    yield Chart(
        title=f"{name} memory",
        x=time_by_event / 1e6,
        series=tuple(
            Series(f"{name} {label}", curve[1:])
            for label, curve in (
                ("requested", curves.requested),
                ("allocated", curves.allocated),
                ("reserved", curves.reserved),
            )
        ),
        x_unit="seconds",
        markers=tuple(
            Marker(float(time_by_event[oom.event]) / 1e6, "out of memory", "error")
            for oom in device.ooms
        ),
    )
    yield _allocation_slices(device, time_by_event)


def _event_clock(device: DeviceMemory) -> Ints:
    """Return the microseconds from the first event to each event; event indices if the file has no times."""
    times = device.trace.events.time_us
    if not device.snapshot.has_times:
        return np.arange(len(times), dtype=np.int64)
    times = non_decreasing(times)
    return times - times[:1]


def _allocation_slices(device: DeviceMemory, time_by_event: Ints) -> Columns:
    allocations, snapshot = device.replay.allocations, device.snapshot
    n_events = len(time_by_event)
    is_large = allocations.size >= max(int(device.peak.active_bytes * _MIN_SLICE_SHARE), 1)
    start_times = time_by_event[np.clip(allocations.begin[is_large], 0, n_events - 1)]
    end_times = time_by_event[np.clip(allocations.end[is_large], 0, n_events - 1)]
    site_names, name_index_by_row = _site_names(snapshot, allocations.stack[is_large])
    streams = tuple(
        f"{device_name(device)} stream {stream_number}"
        for stream_number in range(len(device.trace.streams))
    )
    return Columns(
        f"{device_name(device)} allocations",
        {
            "start_us": start_times,
            "duration_us": end_times - start_times,
            "track": allocations.stream[is_large],
            "name": name_index_by_row,
            "address": allocations.address[is_large],
            "requested_bytes": allocations.requested[is_large],
            "size_bytes": allocations.size[is_large],
        },
        text={"track": streams, "name": site_names},
    )


def _site_names(snapshot: Snapshot, stack_ids: Ids) -> tuple[tuple[str, ...], Ids]:
    """Return the texts of the call sites of stacks, and the index of each stack's text."""
    stack_table = StackTable(snapshot)
    used_stacks, stack_index = np.unique(stack_ids, return_inverse=True)
    used_frames = [snapshot.stacks[stack_id] for stack_id in used_stacks.tolist()]
    site_names = tuple(
        frame_text(snapshot.frames[frames[stack_table.site_index(stack_id)]])
        if frames
        else "no stack recorded"
        for stack_id, frames in zip(used_stacks.tolist(), used_frames, strict=True)
    )
    _check_characters(snapshot, (site_names, stack_index.astype(np.int32)))
    return site_names, stack_index.astype(np.int32)
