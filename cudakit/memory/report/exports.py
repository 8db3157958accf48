"""What other tools show of memory: a row for each allocation, a timeline, bytes by call stack."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from cudakit.errors import UsageError
from cudakit.memory.report.summary import device_name
from cudakit.memory.result import DeviceMemory, MemoryResult
from cudakit.memory.snapshot import Ids, Ints, Snapshot, StackTable
from cudakit.memory.steps import non_decreasing
from cudakit.report.document import Columns
from cudakit.report.timeline import (
    Argument,
    Counter,
    Flame,
    Flames,
    Group,
    Instants,
    SpanKind,
    Spans,
    Texts,
    Timeline,
    Track,
    distinct_rows,
    flat_lanes,
)
from cudakit.stacks import Frame, frame_text

# Minimum size of an allocation that is exported as a slice, as a share of the peak. So at most 200 slices
# overlap.
_MIN_SLICE_SHARE = 1 / 200

# Number of the only process in a timeline. The thread of this number would be its main thread.
_PROCESS = 1
# Times of damaged snapshots are clipped to 146 years, so that nanoseconds fit into 64 bits.
_LATEST_US = 2**62 // 1000 - 1

# Limits of the number of characters of call stacks in an export: a number that is always allowed, and a
# number per byte of the snapshot. Real snapshots have at most 2 characters per byte.
_MIN_CHARACTERS = 1 << 30
_CHARACTERS_PER_BYTE = 4


def allocations(result: MemoryResult) -> list[Columns]:
    """Return a row per allocation of every device: interval, size, stream, pool, call site and stack.

    There is a table for each snapshot. Raises UsageError if the call stacks of all rows are much longer than
    the snapshot.
    """
    devices_by_snapshot: dict[int, list[DeviceMemory]] = {}
    for device in result.devices:
        devices_by_snapshot.setdefault(id(device.snapshot), []).append(device)
    return [_allocation_columns(devices) for devices in devices_by_snapshot.values()]


def flames(result: MemoryResult) -> Flames:
    """Return the memory at the chosen moment by call stack, below the name of its device."""
    return Flames("memory by call stack", [_flame(device) for device in result.devices])


def timeline(result: MemoryResult) -> Timeline:
    """Return the curves as counters and large allocations as spans, by time since the first event.

    Raises UsageError if no snapshot has a trace.
    """
    devices = [device for device in result.devices if len(device.trace.events)]
    if not devices:
        raise UsageError(
            f"{result.files[0].name!r} has nothing on a time axis to write as a trace",
            hint="choose another output format, such as json",
        )
    tracks: list[Track] = []
    spans: list[Spans] = []
    counters: list[Counter] = []
    instants: list[Instants] = []
    for device in devices:
        time_ns = _event_clock(device)
        spans.append(_allocation_spans(device, time_ns, tracks))
        counters += _counters(device, time_ns)
        failure_times = time_ns[[oom.event for oom in device.ooms]]
        nothing = np.zeros(len(failure_times), np.int64)
        instants.append(
            Instants(
                time_ns=np.sort(failure_times),
                track=nothing - 1,
                name=nothing,
                names=Texts(("out of memory",)),
                arguments=(Argument("level", nothing, Texts(("error",))),),
            )
        )
    process = Group(result.files[0].name, _PROCESS, _PROCESS)
    return Timeline(
        [process], tracks, spans, instants, counters, chrome_head={"displayTimeUnit": "ms"}
    )


def _allocation_columns(devices: list[DeviceMemory]) -> Columns:
    """Return the allocations of all devices of one snapshot, which share the tables of texts."""
    snapshot = devices[0].snapshot
    site_frames = StackTable(snapshot).site_frames
    frame_texts = tuple(map(frame_text, snapshot.frames))
    stack_texts = tuple(
        " < ".join(frame_texts[index] for index in stack) for stack in snapshot.stacks
    )
    rows = [_allocation_rows(device, site_frames) for device in devices]
    arrays = {name: _concatenate([columns[name] for columns in rows]) for name in rows[0]}
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
    allocations, n_events = device.history.allocations, len(device.trace.events)

    def event(events: Ints) -> Ints:
        """Mask event indices before and after the trace."""
        return np.ma.masked_array(events, (events < 0) | (events >= n_events))

    def time_us(events: Ints) -> Ints:
        """Return the times of events; masked outside the trace and in files without times."""
        if not device.snapshot.has_times or not n_events:
            return np.ma.masked_array(np.zeros(len(events), np.int64), mask=True)
        times = device.trace.events.time_us[np.clip(events, 0, n_events - 1)]
        return np.ma.masked_array(times, (events < 0) | (events >= n_events))

    return {
        "file": np.zeros(len(allocations), np.int32),
        "device": np.full(len(allocations), -1 if device.device is None else device.device),
        "address": allocations.address,
        "requested_bytes": allocations.requested,
        "size_bytes": allocations.size,
        "size_is_derived": (~allocations.size_known).astype(np.uint8),
        "begin_event": event(allocations.begin),
        "free_requested_event": event(allocations.free_request),
        "end_event": event(allocations.end),
        "begin_us": time_us(allocations.begin),
        "end_us": time_us(allocations.end),
        "stream": allocations.stream,
        "pool": allocations.pool,
        "line": site_frames[allocations.stack],
        "stack": allocations.stack,
    }


def _concatenate(arrays: list[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    concatenate: Callable[..., npt.NDArray[Any]] = np.ma.concatenate
    is_masked = any(isinstance(array, np.ma.MaskedArray) for array in arrays)
    return concatenate(arrays) if is_masked else np.concatenate(arrays)


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


def _flame(device: DeviceMemory) -> Flame:
    """Return the bytes of each call stack; holders with the same stack are one."""
    name = device_name(device)
    bytes_by_stack: dict[tuple[Frame, ...], int] = {}
    for holder in device.holders:
        labels = [frame_text(frame) for frame in reversed(holder.stack)] or ["no stack recorded"]
        stack = tuple(Frame(label, "", 0) for label in (name, *labels))
        bytes_by_stack[stack] = bytes_by_stack.get(stack, 0) + holder.bytes
    used = [(stack, size_bytes) for stack, size_bytes in bytes_by_stack.items() if size_bytes > 0]
    return Flame(name, "bytes", used)


def _event_clock(device: DeviceMemory) -> Ints:
    """Return the nanoseconds from the first event to each event.

    If the file has no times, one event is one microsecond.
    """
    times = device.trace.events.time_us
    if device.snapshot.has_times:
        times = non_decreasing(times)
        times = times - times[:1]
    else:
        times = np.arange(len(times), dtype=np.int64)
    return np.clip(times, 0, _LATEST_US) * 1000


def _counters(device: DeviceMemory, time_ns: Ints) -> Iterator[Counter]:
    name, curves = device_name(device), device.history.curves
    for label, curve in (
        ("requested", curves.requested),
        ("allocated", curves.allocated),
        ("reserved", curves.reserved),
    ):
        values = curve[1:]
        changed = np.flatnonzero(np.append(True, values[1:] != values[:-1]))
        yield Counter(f"{name} memory · {name} {label}", "bytes", time_ns[changed], values[changed])


def _allocation_spans(device: DeviceMemory, time_ns: Ints, tracks: list[Track]) -> Spans:
    """Return the large allocations; add a track for each stream, and more for those that overlap."""
    allocations, snapshot = device.history.allocations, device.snapshot
    last = len(time_ns) - 1
    is_large = allocations.size >= max(int(device.peak.active_bytes * _MIN_SLICE_SHARE), 1)
    start = time_ns[np.clip(allocations.begin[is_large], 0, last)]
    end = np.maximum(time_ns[np.clip(allocations.end[is_large], 0, last)], start)
    order = np.lexsort((end, start))
    start, end = start[order], end[order]
    rows = np.flatnonzero(is_large)[order]
    lane = flat_lanes(allocations.stream[rows], start, end)
    first_rows, track = distinct_rows(allocations.stream[rows], lane)
    streams = allocations.stream[rows][first_rows].tolist()
    for stream, lane_number in zip(streams, lane[first_rows].tolist(), strict=True):
        lane_text = f" · lane {lane_number + 1}" if streams.count(stream) > 1 else ""
        name = f"{device_name(device)} stream {stream}{lane_text}"
        tracks.append(Track(name, 0, _PROCESS + 1 + len(tracks)))
    site_names, name_of_row = _site_names(snapshot, allocations.stack[rows])

    def details(span_rows: Ints) -> list[Argument]:
        allocation = rows[span_rows]
        return [
            Argument("address", allocations.address[allocation], is_address=True),
            Argument("requested_bytes", allocations.requested[allocation]),
            Argument("size_bytes", allocations.size[allocation]),
        ]

    return Spans(
        start_ns=start,
        end_ns=end,
        track=len(tracks) - len(streams) + track,
        name=name_of_row,
        names=Texts(site_names),
        kind=np.zeros(len(rows), np.int64),
        kinds=[SpanKind("allocation", details)],
    )


def _site_names(snapshot: Snapshot, stack_ids: Ids) -> tuple[tuple[str, ...], Ids]:
    """Return the texts of the call sites of stacks, and the index of each stack's text."""
    stacks, index = np.unique(stack_ids, return_inverse=True)
    names = tuple(
        frame_text(snapshot.frames[frame]) if frame >= 0 else "no stack recorded"
        for frame in StackTable(snapshot).site_frames[stacks].tolist()
    )
    _check_characters(snapshot, (names, index.astype(np.int32)))
    return names, index.astype(np.int32)
