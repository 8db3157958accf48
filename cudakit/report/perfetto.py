"""Write a timeline as a Perfetto trace: the messages of perfetto/protos/perfetto/trace in their wire format.

A span is two TrackEvents, its begin and its end. Names and texts are interned: written once, and referred to
by number.

Many messages of the same shape are encoded at once. A column of messages is a two-dimensional array of bytes,
with one row for each message. All rows of a column have the same length, because varints are padded: a varint
may have continuation bytes with a value of zero (protobuf.dev, "Encoding"; Perfetto's own writer pads lengths
in this way).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from cudakit.report.timeline import (
    Argument,
    Column,
    Counter,
    Instants,
    Spans,
    Texts,
    Timeline,
    distinct_rows,
    printable_text,
    row_blocks,
)

Bytes2D: TypeAlias = npt.NDArray[np.uint8]

# Numbers of fields in trace_packet.proto, track_event.proto, track_descriptor.proto and interned_data.proto.
_TRACE_PACKET: Final = 1
_TIMESTAMP: Final = 8
_SEQUENCE_ID: Final = 10
_TRACK_EVENT: Final = 11
_INTERNED_DATA: Final = 12
_SEQUENCE_FLAGS: Final = 13
_TRACK_DESCRIPTOR: Final = 60
_TRACK_NAME, _TRACK_PROCESS, _TRACK_PARENT, _TRACK_COUNTER = 2, 3, 5, 8

_STATE_CLEARED: Final = 1  # flag SEQ_INCREMENTAL_STATE_CLEARED of a TracePacket
_NEEDS_STATE: Final = 2  # flag SEQ_NEEDS_INCREMENTAL_STATE of a TracePacket

_BEGIN, _END, _INSTANT, _COUNTER = 1, 2, 3, 4  # types of TrackEvents
_EVENT_TYPE: Final = 9
_EVENT_TRACK: Final = 11
_EVENT_CATEGORY: Final = 3
_EVENT_NAME: Final = 10
_EVENT_ANNOTATION: Final = 4
_EVENT_VALUE: Final = 30
_EVENT_FLOW: Final = 47
_EVENT_LAST_FLOW: Final = 48
_NUMBER, _DOUBLE, _POINTER, _TEXT = 3, 5, 7, 17  # values of a DebugAnnotation

_CATEGORIES, _NAMES, _ANNOTATION_NAMES, _STRINGS = 1, 2, 3, 29  # fields of InternedData

# Number of spans that are encoded at once, which bounds the memory of the export.
_BLOCK_SPANS = 1 << 16
_SEQUENCE_NUMBER = 1
# First number of the arrows of spans without an arrow: an arrow is drawn between equal numbers only.
_FIRST_UNUSED_ARROW = np.uint64(1 << 63)


def render(timeline: Timeline) -> Iterator[bytes]:
    """Yield a Perfetto trace in pieces of bounded size."""
    return _Writer(timeline).packets()


class _Writer:
    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._interned = _InternedTexts()
        self._next_uuid = count(1)

    def packets(self) -> Iterator[bytes]:
        yield _packet(number_field(_SEQUENCE_FLAGS, _STATE_CLEARED | _NEEDS_STATE))
        timeline = self._timeline
        groups = []
        for group in timeline.groups:
            name = printable_text(group.name)
            process = bytes_field(
                _TRACK_PROCESS, number_field(1, group.process) + text_field(6, name)
            )
            if group.is_device:
                process = b""
                name = printable_text(f"{group.name} of process {group.process}{group.remark}")
            groups.append(self._describe(process, text_field(_TRACK_NAME, name)))
        yield from (packet for _, packet in groups)
        tracks = [
            self._describe(
                text_field(_TRACK_NAME, printable_text(track.name)), parent=groups[track.group][0]
            )
            for track in timeline.tracks
        ]
        yield from (packet for _, packet in tracks)
        self._group_uuid = groups[0][0] if groups else 0
        self._uuids = np.array([uuid for uuid, _ in tracks], np.uint64)
        for counter in timeline.counters:
            yield from self._counter(counter)
        for spans in timeline.spans:
            if spans.nest:
                yield from self._nested_spans(spans)
            else:
                yield from self._flat_spans(spans)
        for instants in timeline.instants:
            yield from self._instants(instants)

    def _describe(self, *fields: bytes, parent: int = 0) -> tuple[int, bytes]:
        """Return the identifier of a new track, and the packet that describes the track."""
        uuid = next(self._next_uuid)
        parent_field = number_field(_TRACK_PARENT, parent) if parent else b""
        content = b"".join((number_field(1, uuid), parent_field, *fields))
        return uuid, _packet(bytes_field(_TRACK_DESCRIPTOR, content))

    def _counter(self, counter: Counter) -> Iterator[bytes]:
        unit = text_field(6, counter.unit)
        uuid, packet = self._describe(
            text_field(_TRACK_NAME, printable_text(counter.name)),
            bytes_field(_TRACK_COUNTER, unit),
            parent=self._group_uuid,
        )
        yield packet
        for rows in row_blocks(len(counter.values), _BLOCK_SPANS):
            yield self._events(
                _COUNTER,
                counter.time_ns[rows],
                constant(number_field(_EVENT_TRACK, uuid)),
                number_column(_EVENT_VALUE, counter.values[rows]),
            ).tobytes()

    def _instants(self, instants: Instants) -> Iterator[bytes]:
        uuids = np.append(
            self._uuids, np.uint64(self._group_uuid)
        )  # the last one is that of track -1
        for rows in row_blocks(len(instants.time_ns), _BLOCK_SPANS):
            events = self._events(
                _INSTANT,
                instants.time_ns[rows],
                number_column(_EVENT_TRACK, uuids[instants.track[rows]]),
                self._text_column(_EVENT_NAME, _NAMES, instants.names, instants.name[rows]),
                *(
                    self._annotation(argument, argument.values[rows])
                    for argument in instants.arguments
                ),
            )
            yield from self._interned.packets()
            yield events.tobytes()

    # --- spans -------------------------------------------------------------------------------------

    def _flat_spans(self, spans: Spans) -> Iterator[bytes]:
        """Yield begins and ends in the order of the spans, which Perfetto's stable sort keeps."""
        for rows in row_blocks(len(spans.start_ns), _BLOCK_SPANS):
            kinds, columns = self._begins(spans, rows)
            by_kind = np.argsort(kinds, kind="stable")
            ends = self._ends(spans, rows[by_kind])
            first = 0
            both = []
            for begins in columns:
                both.append(beside(begins, ends[first : first + len(begins)]))
                first += len(begins)
            yield from self._interned.packets()
            yield interleaved(np.argsort(by_kind), *both)

    def _nested_spans(self, spans: Spans) -> Iterator[bytes]:
        """Yield begins and ends, for each track in the order of their nesting."""
        span_count = len(spans.start_ns)
        order = _nesting_order(spans.track, spans.start_ns, spans.end_ns)
        for block in row_blocks(len(order), _BLOCK_SPANS):
            event_order = order[block]
            is_begin = event_order < span_count
            kinds, columns = self._begins(spans, event_order[is_begin])
            if not is_begin.all():
                columns.append(self._ends(spans, event_order[~is_begin] - span_count))
            # Columns of begins, one for each kind, precede the column of ends.
            column_of_event = np.full(len(event_order), len(spans.kinds), np.int64)
            column_of_event[is_begin] = kinds
            yield from self._interned.packets()
            yield interleaved(np.argsort(np.argsort(column_of_event, kind="stable")), *columns)

    def _begins(self, spans: Spans, rows: Column) -> tuple[Column, list[Bytes2D]]:
        """Return the kind of each span, and a column of begin events for each kind that occurs."""
        kinds = spans.kind[rows]
        columns = []
        for number, kind in enumerate(spans.kinds):
            rows_of_kind = rows[kinds == number]
            if not len(rows_of_kind):
                continue
            fields = [
                number_column(_EVENT_TRACK, self._uuids[spans.track[rows_of_kind]]),
                constant(
                    number_field(_EVENT_CATEGORY, self._interned.number(_CATEGORIES, kind.category))
                ),
                self._text_column(_EVENT_NAME, _NAMES, spans.names, spans.name[rows_of_kind]),
            ]
            fields += [
                self._annotation(argument, argument.values)
                for argument in kind.arguments(rows_of_kind)
                if argument.name
            ]
            if spans.arrow is not None:
                arrows = spans.arrow[rows_of_kind].astype(np.uint64)
                arrows = np.where(
                    arrows == 0, _FIRST_UNUSED_ARROW + rows_of_kind.astype(np.uint64), arrows
                )
                flow = _EVENT_FLOW if spans.begins_arrows else _EVENT_LAST_FLOW
                fields.append(fixed64_column(flow, arrows))
            columns.append(self._events(_BEGIN, spans.start_ns[rows_of_kind], *fields))
        return kinds, columns

    def _ends(self, spans: Spans, rows: Column) -> Bytes2D:
        tracks = number_column(_EVENT_TRACK, self._uuids[spans.track[rows]])
        return self._events(_END, spans.end_ns[rows], tracks)

    def _events(self, event_type: int, times: Column, *fields: Bytes2D) -> Bytes2D:
        """Return a packet with a TrackEvent for each time."""
        return message_column(
            _TRACE_PACKET,
            constant(
                number_field(_SEQUENCE_ID, _SEQUENCE_NUMBER)
                + number_field(_SEQUENCE_FLAGS, _NEEDS_STATE)
            ),
            number_column(_TIMESTAMP, times - self._timeline.begin_ns),
            message_column(_TRACK_EVENT, constant(number_field(_EVENT_TYPE, event_type)), *fields),
        )

    def _annotation(self, argument: Argument, values: Column) -> Bytes2D:
        """Return a DebugAnnotation of each event."""
        if argument.texts is not None:
            value = self._text_column(_TEXT, _STRINGS, argument.texts, values)
        elif values.ndim == 2:
            first_indices, row_numbers = distinct_rows(*values.T)
            texts = [" × ".join(map(str, row)) for row in values[first_indices].tolist()]
            numbers = np.array([self._interned.number(_STRINGS, text) for text in texts], np.uint64)
            value = number_column(_TEXT, numbers[row_numbers])
        elif values.dtype.kind == "f":
            value = fixed64_column(_DOUBLE, values.astype(np.float64).view(np.uint64))
        else:
            value = number_column(_POINTER if argument.is_address else _NUMBER, values)
        name_number = self._interned.number(_ANNOTATION_NAMES, argument.name)
        return message_column(_EVENT_ANNOTATION, constant(number_field(1, name_number)), value)

    def _text_column(self, field: int, kind: int, texts: Texts, indices: Column) -> Bytes2D:
        return number_column(field, self._interned.numbers(kind, texts, indices))


class _InternedTexts:
    """The numbers of interned names and strings, and the packets that define them."""

    def __init__(self) -> None:
        self._number_by_text: dict[tuple[int, str], int] = {}
        self._numbers_by_texts: dict[tuple[int, int], Column] = {}
        self._new_definitions: list[bytes] = []

    def number(self, kind: int, text: str) -> int:
        """Return the number of a text; kinds are fields of InternedData."""
        number = self._number_by_text.get((kind, text))
        if number is None:
            number = self._number_by_text[kind, text] = len(self._number_by_text) + 1
            self._new_definitions.append(
                bytes_field(kind, number_field(1, number) + text_field(2, text))
            )
        return number

    def numbers(self, kind: int, texts: Texts, indices: Column) -> Column:
        """Return the number of each text; 0 stands for one that has no number yet."""
        key = (kind, id(texts))
        known = self._numbers_by_texts.get(key)
        if known is None:
            known = self._numbers_by_texts[key] = np.zeros(len(texts.items), np.uint64)
        for index in np.unique(indices[known[indices] == 0]).tolist():
            known[index] = self.number(kind, texts.text(index))
        numbers: Column = known[indices]
        return numbers

    def packets(self) -> Iterator[bytes]:
        """Yield the packets that define the numbers assigned since the last call."""
        definitions, self._new_definitions = self._new_definitions, []
        for first in range(0, len(definitions), 1000):
            yield _packet(
                number_field(_SEQUENCE_FLAGS, _NEEDS_STATE),
                bytes_field(_INTERNED_DATA, b"".join(definitions[first : first + 1000])),
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


def _packet(*fields: bytes) -> bytes:
    content = b"".join((number_field(_SEQUENCE_ID, _SEQUENCE_NUMBER), *fields))
    return bytes_field(_TRACE_PACKET, content)


# --- the wire format -------------------------------------------------------------------------------

_VARINT, _FIXED64, _LENGTH = 0, 1, 2  # wire types


def varint(number: int) -> bytes:
    """Return a number as a varint."""
    encoded = bytearray()
    while number > 0x7F:
        encoded.append(0x80 | number & 0x7F)
        number >>= 7
    encoded.append(number)
    return bytes(encoded)


def number_field(field: int, number: int) -> bytes:
    """Return a field with a number."""
    return varint(field << 3 | _VARINT) + varint(number)


def bytes_field(field: int, content: bytes) -> bytes:
    """Return a field with bytes: a text or a message."""
    return varint(field << 3 | _LENGTH) + varint(len(content)) + content


def text_field(field: int, text: str) -> bytes:
    """Return a field with a text, which must have no lone surrogates."""
    return bytes_field(field, text.encode())


def constant(content: bytes) -> Bytes2D:
    """Return a column with one row, whose bytes are the same in every message."""
    return np.frombuffer(content, np.uint8).reshape(1, -1)


def number_column(field: int, numbers: Column) -> Bytes2D:
    """Return a field with a different number in each message."""
    unsigned_numbers = numbers.astype(np.uint64)
    byte_count = max((int(unsigned_numbers.max(initial=0)).bit_length() + 6) // 7, 1)
    shifts = np.arange(byte_count, dtype=np.uint64) * np.uint64(7)
    digits = (unsigned_numbers[:, None] >> shifts & np.uint64(0x7F)).astype(np.uint8)
    digits[:, :-1] |= 0x80
    return beside(constant(varint(field << 3 | _VARINT)), digits)


def fixed64_column(field: int, numbers: Column) -> Bytes2D:
    """Return a field of 8 bytes, which holds one of the numbers in each message."""
    number_bytes = np.ascontiguousarray(numbers, "<u8").view(np.uint8).reshape(len(numbers), 8)
    return beside(constant(varint(field << 3 | _FIXED64)), number_bytes)


def message_column(field: int, *columns: Bytes2D) -> Bytes2D:
    """Return a field with a message in each row, which consists of the columns."""
    content = beside(*columns)
    return beside(constant(varint(field << 3 | _LENGTH) + varint(content.shape[1])), content)


def beside(*columns: Bytes2D) -> Bytes2D:
    """Join columns row by row; a column with one row is repeated."""
    rows = max(len(column) for column in columns)
    return np.concatenate(
        [np.broadcast_to(column, (rows, column.shape[1])) for column in columns], axis=1
    )


def interleaved(order: Column, *columns: Bytes2D) -> bytes:
    """Return the rows of all columns as bytes; ``order`` lists row numbers of the joined columns."""
    widths = np.concatenate([np.full(len(column), column.shape[1]) for column in columns])
    place = np.empty(len(order), np.int64)
    row_ends = np.cumsum(widths[order])
    place[order] = row_ends - widths[order]
    encoded_columns = np.empty(int(row_ends[-1]) if len(row_ends) else 0, np.uint8)
    first_row = 0
    for column in columns:
        rows = place[first_row : first_row + len(column)]
        encoded_columns[rows[:, None] + np.arange(column.shape[1])] = column
        first_row += len(column)
    return encoded_columns.tobytes()
