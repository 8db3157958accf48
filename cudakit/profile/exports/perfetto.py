"""Write a profile as a Perfetto trace: the messages of perfetto/protos/perfetto/trace in their wire format.

Each stream of a device and each thread has a track. A span is two TrackEvents, its begin and its end. Names
and call stacks are interned: written once, and referred to by number.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import BinaryIO, Final

import numpy as np

from cudakit.profile.activities import Activities
from cudakit.profile.call_sites import call_path, call_site
from cudakit.profile.exports.protobuf import (
    Bytes2D,
    beside,
    bytes_field,
    constant,
    fixed64_column,
    interleaved,
    message_column,
    number_column,
    number_field,
    text_field,
)
from cudakit.profile.exports.texts import printable_text
from cudakit.profile.exports.tracks import (
    HostSource,
    device_names,
    distinct_rows,
    host_tracks,
    work_tracks,
)
from cudakit.profile.timeline import (
    Column,
    Timeline,
    WorkKind,
    first_time,
    timeline,
)
from cudakit.trace.kinds import EventKind

# Numbers of fields in trace_packet.proto, track_event.proto, track_descriptor.proto and interned_data.proto.
_TRACE_PACKET: Final = 1
_TIMESTAMP: Final = 8
_SEQUENCE_ID: Final = 10
_TRACK_EVENT: Final = 11
_INTERNED_DATA: Final = 12
_SEQUENCE_FLAGS: Final = 13
_TRACK_DESCRIPTOR: Final = 60

_STATE_CLEARED: Final = 1  # flag SEQ_INCREMENTAL_STATE_CLEARED of a TracePacket
_NEEDS_STATE: Final = 2  # flag SEQ_NEEDS_INCREMENTAL_STATE of a TracePacket

_BEGIN, _END, _INSTANT = 1, 2, 3  # types of TrackEvents
_EVENT_TYPE: Final = 9
_EVENT_TRACK: Final = 11
_EVENT_CATEGORY: Final = 3
_EVENT_NAME: Final = 10
_EVENT_ANNOTATION: Final = 4
_EVENT_FLOW: Final = 47
_EVENT_LAST_FLOW: Final = 48

_CATEGORIES, _NAMES, _ANNOTATION_NAMES, _STRINGS = 1, 2, 3, 29  # fields of InternedData

# Number of spans that are encoded at once, which bounds the memory of the export.
_BLOCK_SPANS = 1 << 16
_SEQUENCE_NUMBER = 1
_CATEGORY_NAMES = ("kernel", "gpu_memcpy", "gpu_memset", "user_annotation", "cuda_api", "cuda_sync")
_FIRST_HOST_CATEGORY = 3  # index in _CATEGORY_NAMES; the categories of GPU work come before it
_ANNOTATIONS = ("stream", "correlation", "call site", "call stack", "grid", "block", "bytes")


def write_perfetto_trace(activities: Sequence[Activities], file: BinaryIO) -> None:
    """Write the profiles of processes as one Perfetto trace, in pieces of bounded size."""
    timelines = [timeline(process_activities) for process_activities in activities]
    base_ns = first_time(timelines)
    interned_texts = _InternedTexts()
    uuids = count(1)
    file.write(_first_packet())
    for index, process_timeline in enumerate(timelines):
        for packets in _Process(
            process_timeline, base_ns, interned_texts, uuids, flow_offset=index << 32
        ).packets():
            file.write(packets)


def _packet(*fields: bytes) -> bytes:
    content = b"".join((number_field(_SEQUENCE_ID, _SEQUENCE_NUMBER), *fields))
    return bytes_field(_TRACE_PACKET, content)


def _first_packet() -> bytes:
    """Return the first packet, which defines the names of categories and annotations."""
    interned_data = b"".join(
        bytes_field(field_number, number_field(1, text_number) + text_field(2, name))
        for field_number, interned_names in (
            (_CATEGORIES, _CATEGORY_NAMES),
            (_ANNOTATION_NAMES, _ANNOTATIONS),
        )
        for text_number, name in enumerate(interned_names, 1)
    )
    return _packet(
        number_field(_SEQUENCE_FLAGS, _STATE_CLEARED | _NEEDS_STATE),
        bytes_field(_INTERNED_DATA, interned_data),
    )


class _InternedTexts:
    """The numbers of interned names and strings, and the packets that define them."""

    def __init__(self) -> None:
        self._number_by_text: dict[tuple[int, str], int] = {}
        self._new_packets: list[bytes] = []

    def text_numbers(self, kind: int, texts: Sequence[str]) -> Column:
        """Return the number of each text; kinds are fields of InternedData."""
        return np.array(
            [self._text_number(kind, printable_text(text)) for text in texts], np.uint64
        )

    def _text_number(self, kind: int, text: str) -> int:
        text_number = self._number_by_text.get((kind, text))
        if text_number is None:
            text_number = self._number_by_text[kind, text] = len(self._number_by_text) + 1
            self._new_packets.append(
                bytes_field(kind, number_field(1, text_number) + text_field(2, text))
            )
        return text_number

    def packets(self) -> Iterator[bytes]:
        """Yield the packets that define the numbers assigned since the last call."""
        new_packets, self._new_packets = self._new_packets, []
        for first_packet in range(0, len(new_packets), 1000):
            yield _packet(
                number_field(_SEQUENCE_FLAGS, _NEEDS_STATE),
                bytes_field(
                    _INTERNED_DATA, b"".join(new_packets[first_packet : first_packet + 1000])
                ),
            )


@dataclass(frozen=True, slots=True)
class _Uuids:
    """The identifiers of the tracks of a process."""

    work: Column  # identifiers of the tracks of GPU work, by index of the track
    host: Column  # identifiers of the tracks of host calls, by index of the track


class _Process:
    """Encodes the tracks and events of one process."""

    def __init__(
        self,
        process_timeline: Timeline,
        base_ns: int,
        interned: _InternedTexts,
        uuids: count[int],
        *,
        flow_offset: int,
    ) -> None:
        self._timeline = process_timeline
        self._base_ns = base_ns
        self._interned = interned
        self._flow_offset = flow_offset
        self._next_uuid = uuids
        self._work = work_tracks(process_timeline)
        self._host = host_tracks(process_timeline)
        self._strings: dict[str, Column] = {}

    def packets(self) -> Iterator[bytes]:
        """Yield the packets of the process."""
        uuids, descriptors = self._descriptors()
        yield from descriptors
        self._names = self._interned.text_numbers(_NAMES, self._timeline.names)
        stacks = self._timeline.stacks
        self._sites = self._interned.text_numbers(_STRINGS, [call_site(stack) for stack in stacks])
        self._stacks = self._interned.text_numbers(
            _STRINGS, [" ▸ ".join(call_path(stack)) for stack in stacks]
        )
        yield from self._interned.packets()
        for rows in _row_blocks(np.arange(len(self._timeline.work.start_ns))):
            encoded_packets = self._work_packets(rows, uuids)
            yield from self._interned.packets()
            yield encoded_packets
        yield from self._host_packets(uuids)
        yield from self._mark_packets(uuids)

    # --- tracks ------------------------------------------------------------------------------------

    def _descriptors(self) -> tuple[_Uuids, list[bytes]]:
        pid = self._timeline.process
        packets: list[bytes] = []

        def describe_track(*fields: bytes, parent: int = 0) -> int:
            uuid = next(self._next_uuid)
            parent_field = number_field(5, parent) if parent else b""
            content = b"".join((number_field(1, uuid), parent_field, *fields))
            packets.append(_packet(bytes_field(_TRACK_DESCRIPTOR, content)))
            return uuid

        process_uuid = describe_track(
            bytes_field(3, number_field(1, pid) + text_field(6, f"process {pid}")),
            text_field(2, f"process {pid}"),
        )
        simulated_suffix = " (simulated)" if self._timeline.simulated else ""
        device_uuids = {
            device: describe_track(
                text_field(2, printable_text(f"{name} of process {pid}{simulated_suffix}"))
            )
            for device, name in device_names(self._timeline).items()
        }
        work_uuids = [
            describe_track(
                text_field(2, printable_text(track.name)), parent=device_uuids[track.group]
            )
            for track in self._work.tracks
        ]
        host_uuids = [
            describe_track(text_field(2, printable_text(track.name)), parent=process_uuid)
            for track in self._host.tracks
        ]
        return _Uuids(np.array(work_uuids, np.uint64), np.array(host_uuids, np.uint64)), packets

    # --- events ------------------------------------------------------------------------------------

    def _work_packets(self, rows: Column, uuids: _Uuids) -> bytes:
        """Return begins and ends of GPU work in the order of ``rows``, which Perfetto's stable sort keeps."""
        kinds = self._timeline.work.kind[rows]
        rows_by_kind = [(kind, np.flatnonzero(kinds == kind)) for kind in WorkKind]
        encoded_spans = [
            self._spans_of_kind(kind, rows[is_of_source], uuids)
            for kind, is_of_source in rows_by_kind
            if len(is_of_source)
        ]
        return interleaved(np.argsort(np.argsort(kinds, kind="stable")), *encoded_spans)

    def _spans_of_kind(self, kind: WorkKind, rows: Column, uuids: _Uuids) -> Bytes2D:
        """Return the begin and the end event of each piece of work of a kind, next to each other."""
        work = self._timeline.work
        tracks = number_column(_EVENT_TRACK, uuids.work[self._work.track[rows]])
        fields = [
            tracks,
            constant(number_field(_EVENT_CATEGORY, kind + 1)),
            number_column(_EVENT_NAME, self._names[work.name[rows]]),
            _annotation("stream", work.stream[rows]),
            _annotation("correlation", work.correlation[rows]),
            _text_annotation("call site", self._sites[work.site[rows]]),
            _text_annotation("call stack", self._stacks[work.site[rows]]),
        ]
        if kind is WorkKind.KERNEL:
            records = self._timeline.activities.records_of(EventKind.KERNEL_RUN)[work.record[rows]]
            fields += [
                _text_annotation(name, self._dimensions(records[name]))
                for name in ("grid", "block")
            ]
        else:
            fields.append(_annotation("bytes", work.size_bytes[rows]))
        flows = self._flow_offset + work.correlation[rows].astype(np.uint64)
        fields.append(fixed64_column(_EVENT_LAST_FLOW, flows))
        return beside(
            self._events(_BEGIN, work.start_ns[rows], *fields),
            self._events(_END, work.end_ns[rows], tracks),
        )

    def _dimensions(self, sizes: Column) -> Column:
        """Return the interned text of the sizes of a grid or of a thread block, such as "8 × 1 × 1"."""
        first_indices, row_numbers = distinct_rows(*(sizes[:, axis] for axis in range(3)))
        texts = [" × ".join(map(str, row)) for row in sizes[first_indices].tolist()]
        return self._interned.text_numbers(_STRINGS, texts)[row_numbers]

    def _host_packets(self, uuids: _Uuids) -> Iterator[bytes]:
        """Yield the events of ranges and API calls, for each track in the order of their nesting."""
        host = self._host
        span_count = len(host.row)
        is_launch = np.zeros(len(self._timeline.calls.start_ns), np.bool_)
        call = self._timeline.work.call
        is_launch[call[call >= 0]] = True
        for event_order in _row_blocks(_nesting_order(host.track, host.start_ns, host.end_ns)):
            is_begin = event_order < span_count
            begin_rows, end_rows = event_order[is_begin], event_order[~is_begin] - span_count
            columns = []
            if len(begin_rows):
                columns.append(self._host_begins(begin_rows, is_launch, uuids))
            if len(end_rows):
                tracks = number_column(_EVENT_TRACK, uuids.host[host.track[end_rows]])
                columns.append(self._events(_END, host.end_ns[end_rows], tracks))
            # The column of begins precedes the column of ends.
            yield interleaved(np.argsort(np.argsort(~is_begin, kind="stable")), *columns)

    def _host_begins(self, rows: Column, is_launch: Column, uuids: _Uuids) -> Bytes2D:
        """Return the begin of each host span; ``is_launch`` is a mask of the API calls that started work."""
        host, timeline = self._host, self._timeline
        tables = (timeline.ranges, timeline.calls)
        names = np.zeros(len(rows), np.uint64)
        correlation = np.zeros(len(rows), np.uint64)
        site = np.zeros(len(rows), np.int64)
        # An arrow connects a span and a piece of work with the same flow id. A span that started no work gets
        # an id of its own, so that Perfetto draws no arrow.
        flow_ids = np.uint64(1 << 63) + rows.astype(np.uint64)
        for source in HostSource:
            is_of_source = host.source[rows] == source
            table_rows = host.row[rows][is_of_source]
            names[is_of_source] = self._names[tables[source].name[table_rows]]
            if source is HostSource.CALL:
                correlation[is_of_source] = timeline.calls.correlation[table_rows]
                site[is_of_source] = timeline.calls.site[table_rows]
                has_arrow = np.zeros(len(rows), np.bool_)
                has_arrow[is_of_source] = is_launch[table_rows]
                flow_ids = np.where(has_arrow, self._flow_offset + correlation, flow_ids)
        category = host.source[rows].astype(np.uint64) + _FIRST_HOST_CATEGORY + 1
        return self._events(
            _BEGIN,
            host.start_ns[rows],
            number_column(_EVENT_TRACK, uuids.host[host.track[rows]]),
            number_column(_EVENT_CATEGORY, category),
            number_column(_EVENT_NAME, names),
            _annotation("correlation", correlation),
            _text_annotation("call site", self._sites[site]),
            fixed64_column(_EVENT_FLOW, flow_ids),
        )

    def _mark_packets(self, uuids: _Uuids) -> Iterator[bytes]:
        marks = self._timeline.marks
        uuid_of_thread = {
            track.number: int(uuid)
            for track, uuid in zip(self._host.tracks, uuids.host.tolist(), strict=True)
            if not track.lane
        }
        tracks = np.array(
            [uuid_of_thread.get(thread, 0) for thread in marks.thread.tolist()], np.uint64
        )
        for rows in _row_blocks(np.flatnonzero(tracks)):
            events = self._events(
                _INSTANT,
                marks.start_ns[rows],
                number_column(_EVENT_TRACK, tracks[rows]),
                number_column(_EVENT_NAME, self._names[marks.name[rows]]),
            )
            yield events.tobytes()

    def _events(self, event_type: int, times: Column, *fields: Bytes2D) -> Bytes2D:
        """Return a packet with a TrackEvent for each time."""
        return message_column(
            _TRACE_PACKET,
            constant(
                number_field(_SEQUENCE_ID, _SEQUENCE_NUMBER)
                + number_field(_SEQUENCE_FLAGS, _NEEDS_STATE)
            ),
            number_column(_TIMESTAMP, times - self._base_ns),
            message_column(_TRACK_EVENT, constant(number_field(_EVENT_TYPE, event_type)), *fields),
        )


def _annotation(name: str, annotation_values: Column) -> Bytes2D:
    """Return a DebugAnnotation with a number."""
    name_number = _ANNOTATIONS.index(name) + 1
    return message_column(
        _EVENT_ANNOTATION,
        constant(number_field(1, name_number)),
        number_column(3, annotation_values),
    )


def _text_annotation(name: str, text_numbers: Column) -> Bytes2D:
    """Return a DebugAnnotation with an interned string."""
    name_number = _ANNOTATIONS.index(name) + 1
    return message_column(
        _EVENT_ANNOTATION, constant(number_field(1, name_number)), number_column(17, text_numbers)
    )


def _row_blocks(rows: Column) -> Iterator[Column]:
    return (
        rows[first_row : first_row + _BLOCK_SPANS]
        for first_row in range(0, len(rows), _BLOCK_SPANS)
    )


def _nesting_order(track: Column, start: Column, end: Column) -> Column:
    """Return the order of the begins (items 0 to n - 1) and ends (items n to 2n - 1) of nested spans.

    Tracks follow one another. Spans are sorted by start, outer spans first. Of events of a track at the same
    time, ends of earlier spans come first, the innermost first; then begins, the outermost first. The end of
    a span without duration follows its begin directly.
    """
    span_number = np.arange(len(start))
    is_empty = start == end
    times = np.concatenate([start, end])
    is_begin_or_empty = np.concatenate([np.ones(len(start), np.bool_), is_empty])
    sort_place = np.concatenate(
        [2 * span_number, np.where(is_empty, 2 * span_number + 1, -span_number)]
    )
    return np.lexsort((sort_place, is_begin_or_empty, times, np.concatenate([track, track])))
