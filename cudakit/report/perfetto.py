"""Render the curves and spans of a Document as a trace for ui.perfetto.dev and chrome://tracing.

The format is the Trace Event Format: JSON with times in microseconds. Perfetto has these limits
(importers/json): it drops a slice that overlaps another slice of its thread without nesting, reads a time as
a double and truncates it to nanoseconds, and rejects a file with an escaped surrogate pair.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import heappop, heappush, merge
from operator import itemgetter
from typing import TypeAlias

import numpy as np

from cudakit.errors import UsageError
from cudakit.report.columns import Texts, is_address, join_in_chunks, text_decoder
from cudakit.report.document import Array, Chart, Columns, Document, walk
from cudakit.report.escape import escape_invisible

_BLOCK_ROWS = 1024

_PID = 1
# The thread whose tid equals the pid is the main thread; lanes have the tids after it.
_FIRST_TID = _PID + 1

# Times are clipped to 146 years, so that a start plus a duration fits in 64 bits of nanoseconds.
_LIMIT_NS = 2**62 - 1024

_SLICE_ARRAYS = frozenset({"start_us", "duration_us", "track", "name"})

_Event: TypeAlias = tuple[int, str]  # time in nanoseconds, and the event as a JSON object


def render(document: Document) -> Iterator[str]:
    """Yield a trace in chunks of about 64 KiB, with events in order of time.

    * Each series of a Chart is a counter track with an event for each change of its value. Each marker is an
      instant. ``x`` is time; a count is shown as microseconds.
    * Columns with ``start_us``, ``duration_us``, ``track`` and a ``name`` decoded by ``text`` are slices;
      all further arrays are arguments. Overlapping spans of a track are on numbered lanes, each of which is a
      thread. A negative duration counts as 0. A row with a NaN or infinite time is left out.

    All Charts and Columns of a document must count time from the same instant. Raises UsageError if the
    document has neither.
    """
    nodes = tuple(walk(document.nodes))
    charts = [node for node in nodes if isinstance(node, Chart)]
    slice_nodes = [node for node in nodes if isinstance(node, Columns) and _has_slices(node)]
    if not charts and not slice_nodes:
        raise UsageError(
            f"{document.title!r} has nothing on a time axis to write as a trace",
            hint="choose another output format, such as json",
        )
    return join_in_chunks(_file_texts(_event_objects(document.title, charts, slice_nodes)))


def _has_slices(columns: Columns) -> bool:
    return columns.arrays.keys() >= _SLICE_ARRAYS and "name" in columns.text


def _file_texts(json_objects: Iterable[str]) -> Iterator[str]:
    yield '{"displayTimeUnit":"ms","traceEvents":['
    for index, text in enumerate(json_objects):
        yield f",\n{text}" if index else f"\n{text}"
    yield "\n]}\n"


def _event_objects(title: str, charts: list[Chart], slice_nodes: list[Columns]) -> Iterator[str]:
    yield _metadata_object("process_name", "name", title, tid=_PID)
    sources: list[Iterator[_Event]] = []
    for chart in charts:
        sources += _marker_events(chart), *_counter_tracks(chart)
    first_tid = _FIRST_TID
    for columns in slice_nodes:
        slices = _slices(columns, first_tid=first_tid)
        sources.append(_slice_events(slices))
        for tid, name in enumerate(slices.lane_names, first_tid):
            yield _metadata_object("thread_name", "name", name, tid=tid)
            yield _metadata_object("thread_sort_index", "sort_index", tid, tid=tid)
        first_tid += len(slices.lane_names)
    for _, text in merge(*sources, key=itemgetter(0)):
        yield text


def _metadata_object(kind: str, key: str, value: str | int, *, tid: int) -> str:
    text = _quote(value) if isinstance(value, str) else value
    return f'{{"ph":"M","pid":{_PID},"tid":{tid},"name":"{kind}","args":{{"{key}":{text}}}}}'


# --- charts ---------------------------------------------------------------------------------------


def _marker_events(chart: Chart) -> Iterator[_Event]:
    for marker in sorted(chart.markers, key=lambda marker: marker.x):
        if not math.isfinite(marker.x):
            continue
        time_ns = _nanoseconds(np.array([marker.x]), _ns_per_x(chart))
        label = _quote(marker.label)
        yield (
            int(time_ns[0]),
            f'{{"ph":"i","ts":{_time_texts(time_ns)[0]},"pid":{_PID},"tid":{_PID},"s":"p",'
            f'"name":{label},"args":{{"level":"{marker.level}"}}}}',
        )


def _counter_tracks(chart: Chart) -> Iterator[Iterator[_Event]]:
    for series in chart.series:
        name = f"{chart.title} · {series.name}" if chart.title else series.name
        finite_indices = np.flatnonzero(np.isfinite(chart.x) & np.isfinite(series.y))
        time_ns = _nanoseconds(chart.x[finite_indices], _ns_per_x(chart))
        time_order = np.argsort(time_ns, kind="stable")
        time_ns, y = time_ns[time_order], series.y[finite_indices][time_order]
        changed_indices = np.flatnonzero(np.append(True, y[1:] != y[:-1])[: len(y)])
        yield _counter_events(name, chart.y_unit, time_ns[changed_indices], y[changed_indices])


def _ns_per_x(chart: Chart) -> int:
    return 1_000_000_000 if chart.x_unit == "seconds" else 1_000


def _counter_events(name: str, unit: str, time_ns: Array, y: Array) -> Iterator[_Event]:
    event_prefix = f'{{"ph":"C","ts":%s,"pid":{_PID},"name":{_quote(name).replace("%", "%%")}'
    template = f'{event_prefix},"args":{{"{unit}":%s}}}}'
    for block in _row_blocks(len(y)):
        texts = zip(_time_texts(time_ns[block]), _number_texts(y[block]), strict=True)
        yield from zip(time_ns[block].tolist(), map(template.__mod__, texts), strict=True)


# --- spans ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Slices:
    """The spans of a Columns node in order of start; every array has one item per span."""

    columns: Columns
    row: Array  # indices into the arrays of ``columns``
    start_ns: Array
    duration_ns: Array
    tid: Array
    lane_names: tuple[str, ...]  # name of the thread of each tid, from the first tid


def _slices(columns: Columns, *, first_tid: int) -> _Slices:
    arrays = columns.arrays
    row_indices = np.flatnonzero(
        np.isfinite(arrays["start_us"]) & np.isfinite(arrays["duration_us"])
    )
    start_ns = _nanoseconds(arrays["start_us"][row_indices], 1_000)
    duration_ns = np.maximum(_nanoseconds(arrays["duration_us"][row_indices], 1_000), 0)
    slice_order = np.lexsort((duration_ns, start_ns))
    row_indices, start_ns, duration_ns = (
        row_indices[slice_order],
        start_ns[slice_order],
        duration_ns[slice_order],
    )
    track_ids, track_indices = np.unique(arrays["track"][row_indices], return_inverse=True)
    slice_lanes = _lane_by_slice(
        track_indices, start_ns, start_ns + duration_ns, track_count=len(track_ids)
    )
    lane_counts = np.zeros(len(track_ids), dtype=np.int64)
    np.maximum.at(lane_counts, track_indices, slice_lanes + 1)
    slice_tids = first_tid + (np.cumsum(lane_counts) - lane_counts)[track_indices] + slice_lanes
    lane_names = _lane_names(_track_names(columns, track_ids), lane_counts.tolist())
    return _Slices(columns, row_indices, start_ns, duration_ns, slice_tids, tuple(lane_names))


def _lane_by_slice(
    track_indices: Array, start_ns: Array, end_ns: Array, *, track_count: int
) -> Array:
    """Return for each span the lowest lane of its track that is free at its start.

    This greedy coloring of intervals needs as many lanes as spans overlap at most.
    """
    busy_lanes: list[list[tuple[int, int]]] = [
        [] for _ in range(track_count)
    ]  # a heap of (end, lane) for each track
    free_lanes: list[list[int]] = [
        [] for _ in range(track_count)
    ]  # a heap of free lanes for each track
    lanes = np.empty(len(track_indices), dtype=np.int64)
    for block in _row_blocks(len(track_indices)):
        lane_of_slice = []
        slices_of_block = zip(
            *(array[block].tolist() for array in (track_indices, start_ns, end_ns)), strict=True
        )
        for track_index, slice_start, slice_end in slices_of_block:
            while busy_lanes[track_index] and busy_lanes[track_index][0][0] <= slice_start:
                heappush(free_lanes[track_index], heappop(busy_lanes[track_index])[1])
            lane = (
                heappop(free_lanes[track_index])
                if free_lanes[track_index]
                else len(busy_lanes[track_index])
            )
            heappush(busy_lanes[track_index], (slice_end, lane))
            lane_of_slice.append(lane)
        lanes[block] = lane_of_slice
    return lanes


def _track_names(columns: Columns, ids: Array) -> list[str]:
    known_names = columns.text.get("track", ())
    return [
        known_names[track] if 0 <= track < len(known_names) else f"track {track}"
        for track in ids.tolist()
    ]


def _lane_names(tracks: list[str], lanes: list[int]) -> Iterator[str]:
    for name, lane_count in zip(tracks, lanes, strict=True):
        if lane_count == 1:
            yield name
        else:
            yield from (f"{name} · lane {lane_number}" for lane_number in range(1, lane_count + 1))


def _slice_events(slices: _Slices) -> Iterator[_Event]:
    columns = slices.columns
    argument_names = [name for name in columns.arrays if name not in _SLICE_ARRAYS]
    encoders = {name: _item_encoder(name, columns) for name in ("name", *argument_names)}
    keys_text = ",".join(f"{_quote(name).replace('%', '%%')}:%s" for name in argument_names)
    template = (
        f'{{"ph":"X","ts":%s,"dur":%s,"pid":{_PID},"tid":%d,"name":%s,"args":{{{keys_text}}}}}'
    )
    for block in _row_blocks(len(slices.row)):
        block_rows, start_ns = slices.row[block], slices.start_ns[block]
        texts = zip(
            _time_texts(start_ns),
            _duration_texts(slices.duration_ns[block]),
            slices.tid[block].tolist(),
            *(encode(columns.arrays[name][block_rows]) for name, encode in encoders.items()),
            strict=True,
        )
        yield from zip(start_ns.tolist(), map(template.__mod__, texts), strict=True)


# --- values ---------------------------------------------------------------------------------------


def _row_blocks(count: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK_ROWS) for start in range(0, count, _BLOCK_ROWS))


def _nanoseconds(times: Array, ns_per_unit: int) -> Array:
    """Convert times in units of ``ns_per_unit`` nanoseconds to int64, clipped to the limit."""
    if times.dtype.kind == "f":
        rounded_ns = np.rint(times.astype(np.float64) * ns_per_unit)
        return np.clip(rounded_ns, -_LIMIT_NS, _LIMIT_NS).astype(np.int64)
    max_time = _LIMIT_NS // ns_per_unit
    return np.clip(times.astype(np.int64), -max_time, max_time) * ns_per_unit


def _time_texts(time_ns: Array) -> list[str]:
    # Add a tenth of a nanosecond: Perfetto multiplies a double by 1000 and truncates 1.001 us to 1000 ns.
    return [text + "1" if "." in text else text for text in _duration_texts(time_ns)]


def _duration_texts(span_ns: Array) -> list[str]:
    """Format nanoseconds as microseconds, with three decimals unless they are integers."""
    whole_us, remainder_ns = np.divmod(np.abs(span_ns), 1_000)
    if not remainder_ns.any():
        return list(map(str, (span_ns // 1_000).tolist()))
    parts_of_durations = zip(
        (span_ns < 0).tolist(), whole_us.tolist(), remainder_ns.tolist(), strict=True
    )
    return [
        f"{'-' if is_negative else ''}{us}.{ns:03d}" if ns else f"{'-' if is_negative else ''}{us}"
        for is_negative, us, ns in parts_of_durations
    ]


def _item_encoder(name: str, columns: Columns) -> Texts:
    """Return the function that formats the items of an array as JSON."""
    text_by_id = columns.text.get(name)
    if text_by_id is not None:
        unknown_value = '""' if name == "name" else "null"
        return text_decoder(map(_quote, text_by_id), unknown_text=unknown_value)
    array = columns.arrays[name]
    if is_address(name, array):
        return _address_texts
    return _number_texts if array.dtype.kind in "biuf" else _quoted_texts


def _address_texts(array: Array) -> list[str]:
    return [f'"{item:#x}"' for item in array.tolist()]


def _number_texts(array: Array) -> list[str]:
    if array.dtype.kind == "b":
        return ["true" if item else "false" for item in array.tolist()]
    if array.dtype.kind == "f":
        return [repr(item) if math.isfinite(item) else "null" for item in array.tolist()]
    return list(map(str, array.tolist()))


def _quoted_texts(array: Array) -> list[str]:
    return [_quote(str(item)) for item in array.tolist()]


def _quote(text: str) -> str:
    return json.dumps(escape_invisible(text), ensure_ascii=False)
