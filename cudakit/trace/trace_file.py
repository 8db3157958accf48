"""Write and read trace files. A program appends to its file while it runs; a truncated file can be read.

The file begins with a header of 32 bytes: ``cudakit\n``, the version of the format, the size of a record,
the clock (``Clock``), four zero bytes, and in eight bytes the end of the written part. That number is 0 if
the written part ends with the file; a memory-mapped file is larger than its written part. Blocks follow, each
after a header of 16 bytes: a tag of four letters, the number of items, the size in bytes. All numbers are
little-endian.

* ``text``: strings in UTF-8, each after its length in bytes. They continue the string table, in which index 0
  is the empty string.
* ``stak``: Python call stacks, innermost frame first: the number of frames, then for each frame the string
  indices of function and file, and the line. They continue the stack table, in which index 0 is the unknown
  stack.
* ``rcds``: records (``RECORD``). The strings and stacks that they refer to are in earlier blocks.

A trace may continue in another file, whose blocks continue the same string and stack tables.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from enum import IntEnum, IntFlag
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, TypeAlias, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from cudakit.errors import InputError
from cudakit.stacks import Frame, Stack
from cudakit.trace.events import Event, EventBody, Text
from cudakit.trace.kinds import EventKind

VERSION = 1
MAGIC = b"cudakit\n"

_HEADER = struct.Struct("<8s3I4xQ")
_WRITTEN_END = struct.Struct("<Q")  # end of the written part, the last field of the header
_END_OFFSET = _HEADER.size - _WRITTEN_END.size
_BLOCK = struct.Struct("<4sIQ")
_COUNT = struct.Struct("<I")
_FRAME = struct.Struct("<3I")

# Number of records that are written at once. A larger block is cheaper per record, but a crash loses more.
_RECORDS_PER_BLOCK = 512
# Number of bytes that the reader reads with one system call.
_WINDOW_BYTES = 1 << 20


class Clock(IntEnum):
    """The clock of the times in a trace."""

    MONOTONIC = 1  # CLOCK_MONOTONIC of the host
    VIRTUAL = 2  # simulated time since a simulated device was created


class TraceWriter:
    """Writes events to a new file; usable as a sink: ``Sim(sink=writer.write)``."""

    def __init__(self, path: Path, *, clock: Clock) -> None:
        self._clock = clock
        self._file = self._new_file(path)
        self._events: list[Event] = []
        self._index_by_string: dict[str, int] = {"": 0}
        self._index_by_stack: dict[Stack, int] = {(): 0}
        self._new_strings: list[bytes] = []
        self._new_stacks: list[bytes] = []

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, event: Event) -> None:
        """Append an event. The next ``flush`` writes it; a full block of events is flushed automatically."""
        self._events.append(event)
        if len(self._events) >= _RECORDS_PER_BLOCK:
            self.flush()

    def stack(self, stack: Stack) -> int:
        """Return the index of a call stack (innermost frame first) in the stack table, for ``Event.site``."""
        index = self._index_by_stack.get(stack)
        if index is None:
            index = self._index_by_stack[stack] = len(self._index_by_stack)
            self._new_stacks.append(self._packed_stack(stack))
        return index

    @property
    def size_bytes(self) -> int:
        """The size of the open file."""
        return self._file.tell()

    def continue_in(self, path: Path) -> None:
        """Continue the trace in another new file; strings and stacks keep their indices."""
        self.close()
        self._file = self._new_file(path)

    def start_over(self, path: Path) -> None:
        """Begin another trace in a forked process, and drop the events that the parent has yet to write.

        All strings and stacks are written again, so that their indices stay valid.
        """
        self._file.close()
        self._events.clear()
        self._new_strings = [_packed_text(text) for text in self._index_by_string if text]
        self._new_stacks = [self._packed_stack(stack) for stack in self._index_by_stack if stack]
        self._file = self._new_file(path)

    def flush(self) -> None:
        """Write the events appended so far."""
        records = pack(self._events, self._string_index)
        self._write_block(b"text", self._new_strings)
        self._write_block(b"stak", self._new_stacks)
        self._write_block(b"rcds", [record.tobytes() for record in records])
        for written_items in (self._events, self._new_strings, self._new_stacks):
            written_items.clear()

    def close(self, *, flush: bool = True) -> None:
        """Write all events, unless ``flush`` is false, and close the file."""
        if not self._file.closed:
            if flush:
                self.flush()
            self._file.close()

    def _new_file(self, path: Path) -> BinaryIO:
        file = path.open("xb", buffering=0)
        file.write(_HEADER.pack(MAGIC, VERSION, RECORD_BYTES, self._clock, 0))
        return file

    def _string_index(self, text: str) -> int:
        """Return the index of a string in the string table, which is extended if necessary."""
        index = self._index_by_string.get(text)
        if index is None:
            index = self._index_by_string[text] = len(self._index_by_string)
            self._new_strings.append(_packed_text(text))
        return index

    def _packed_stack(self, stack: Stack) -> bytes:
        frames = (
            _FRAME.pack(
                self._string_index(frame.name), self._string_index(frame.filename), frame.line
            )
            for frame in stack
        )
        return _COUNT.pack(len(stack)) + b"".join(frames)

    def _write_block(self, tag: bytes, packed_items: Sequence[bytes]) -> None:
        if packed_items:
            content = b"".join(packed_items)
            unwritten_bytes = _BLOCK.pack(tag, len(packed_items), len(content)) + content
            block_start = self._file.tell()
            try:
                while unwritten_bytes:  # a call of write may write only a part of the bytes
                    unwritten_bytes = unwritten_bytes[self._file.write(unwritten_bytes) :]
            except OSError:
                # Remove the incomplete block, so that the whole file stays readable.
                self._file.truncate(block_start)
                raise


class TraceReader:
    """Reads a trace file, also while the program writes it, and also a truncated one.

    ``previous_reader`` is the reader of the file that this file continues; both share string and stack
    tables. Raises InputError if the file is not a trace, or has another version.
    """

    def __init__(self, path: Path, *, previous_reader: TraceReader | None = None) -> None:
        self._path = path
        # The file is unbuffered, because a buffer would read beyond the end of the written part.
        self._file = path.open("rb", buffering=0)
        try:
            self.clock = self._read_header()
        except InputError:
            self._file.close()
            raise
        self.strings: list[str] = previous_reader.strings if previous_reader else [""]
        self.stacks: list[Stack] = previous_reader.stacks if previous_reader else [()]
        self._unread_record_count = 0  # number of records in the current block, not read yet
        self._position = self._written_end = _HEADER.size
        self._window = b""  # bytes of the file from `_window_start` on, read with one call
        self._window_start = 0

    def __enter__(self) -> TraceReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def batches(self, *, records: int = 65536) -> Iterator[Records]:
        """Yield the records written since the last call, in batches of at most ``records``.

        ``strings`` and ``stacks`` contain all strings and stacks that a batch refers to.
        """
        self._written_end = self._find_written_end()
        while content := self._read_records(records):
            batch = np.frombuffer(content, RECORD)
            if reason := find_invalid(batch, len(self.strings)):
                raise InputError(f"{self._path} is damaged: {reason}")
            yield batch

    @property
    def is_truncated(self) -> bool:
        """Whether the file ends within a block. Valid after all records were read."""
        return self._unread_record_count > 0 or self._position < self._find_written_end()

    def _read_header(self) -> Clock:
        header = self._file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise InputError(f"{self._path} is not a trace of cudakit")
        _, version, record_bytes, clock, _ = _HEADER.unpack(header)
        if (version, record_bytes) != (VERSION, RECORD_BYTES):
            raise InputError(
                f"{self._path} is a trace of version {version}; this cudakit reads {VERSION}",
                hint="read it with the cudakit that wrote it",
            )
        if clock not in set(Clock):
            raise InputError(f"{self._path} is damaged: there is no clock {clock}")
        return Clock(clock)

    def _read_records(self, max_count: int) -> bytes:
        """Read at most ``max_count`` records; return their bytes."""
        content_parts: list[bytes] = []
        while max_count and (self._unread_record_count or self._find_records_block()):
            complete_record_count = (self._written_end - self._position) // RECORD_BYTES
            record_count = min(max_count, self._unread_record_count, complete_record_count)
            if not record_count:
                break
            content_parts.append(self._read_bytes(record_count * RECORD_BYTES))
            self._unread_record_count -= record_count
            max_count -= record_count
        return b"".join(content_parts)

    def _find_records_block(self) -> bool:
        """Read the blocks before the next block of records; return False if none was written yet."""
        while self._written_end - self._position >= _BLOCK.size:
            tag, item_count, size_bytes = _BLOCK.unpack(self._read_bytes(_BLOCK.size))
            if tag == b"rcds":
                self._unread_record_count = item_count
                return True
            if self._written_end - self._position < size_bytes:  # the block is incomplete
                self._position -= _BLOCK.size
                return False
            self._read_table(tag, item_count, self._read_bytes(size_bytes))
        return False

    def _read_bytes(self, size_bytes: int) -> bytes:
        """Return the next bytes of the written part."""
        window_offset = self._position - self._window_start
        if window_offset + size_bytes > len(self._window):
            window_bytes = max(size_bytes, min(self._written_end - self._position, _WINDOW_BYTES))
            self._window = os.pread(self._file.fileno(), window_bytes, self._position)
            self._window_start, window_offset = self._position, 0
        self._position += size_bytes
        return self._window[window_offset : window_offset + size_bytes]

    def _read_table(self, tag: bytes, item_count: int, content: bytes) -> None:
        """Extend the string or the stack table by the content of a block."""
        try:
            if tag == b"text":
                self.strings += _unpack_strings(content, item_count)
            elif tag == b"stak":
                self.stacks += _unpack_stacks(content, item_count, self.strings)
            else:
                raise InputError(f"{self._path} is damaged: there is no block {tag!r}")
        except (struct.error, IndexError) as error:
            raise InputError(
                f"{self._path} is damaged: its string or stack table cannot be read"
            ) from error

    def _find_written_end(self) -> int:
        """Return the end of the written part, which grows while the program runs."""
        size_bytes = os.fstat(self._file.fileno()).st_size
        (written_end,) = _WRITTEN_END.unpack(
            os.pread(self._file.fileno(), _WRITTEN_END.size, _END_OFFSET)
        )
        return min(written_end, size_bytes) if written_end else size_bytes


def _packed_text(text: str) -> bytes:
    encoded_text = text.encode("utf-8", "surrogateescape")
    return _COUNT.pack(len(encoded_text)) + encoded_text


def _unpack_strings(content: bytes, string_count: int) -> Iterator[str]:
    offset = 0
    for _ in range(string_count):
        (length,) = _COUNT.unpack_from(content, offset)
        offset += _COUNT.size + length
        if offset > len(content):
            raise IndexError("a string ends beyond its table")
        yield content[offset - length : offset].decode("utf-8", "surrogateescape")


def _unpack_stacks(content: bytes, stack_count: int, strings: Sequence[str]) -> Iterator[Stack]:
    offset = 0
    for _ in range(stack_count):
        (frame_count,) = _COUNT.unpack_from(content, offset)
        offset += _COUNT.size
        end_offset = offset + frame_count * _FRAME.size
        frames = (
            _FRAME.unpack_from(content, offset_of_frame)
            for offset_of_frame in range(offset, end_offset, _FRAME.size)
        )
        yield tuple(Frame(strings[name], strings[file], line) for name, file, line in frames)
        offset = end_offset


# --- Store events as records of 96 bytes: the fields common to all kinds, then the body ------------
#
# Numbers are little-endian, and fields are aligned as in C. ``batch["kind"] == EventKind.COPY`` selects the
# copies of a batch; ``view(copies, EventKind.COPY)`` gives access to the fields of their bodies.

Records: TypeAlias = npt.NDArray[np.void]

RECORD_BYTES = 96
# End of the addresses that accesses may have. CUDA's addresses have at most 57 bits.
ADDRESS_END = 1 << 62
_COMMON = (
    ("seq", "<u8"),
    ("time_ns", "<i8"),
    ("thread", "<u4"),
    ("program_call", "<u4"),  # number of the program call; 0 if unknown
    ("stream", "<u4"),  # number of the stream; 0 if events of this kind have no stream
    ("context", "<u4"),
    ("site", "<u4"),
    ("device", "<i2"),
    ("kind", "<u2"),
)
_COMMON_BYTES = 40

RECORD = np.dtype([*_COMMON, ("body", f"V{RECORD_BYTES - _COMMON_BYTES}")])
# A record as one item without fields, because numpy moves records with fields twenty times as slowly.
_OPAQUE_RECORD = np.dtype((np.void, RECORD_BYTES))


@cache
def layout(kind: EventKind) -> np.dtype[np.void]:
    """Return the numpy type of the records of a kind: the common fields, then the body."""
    names, formats = map(list, zip(*_COMMON, strict=True))
    offsets = [RECORD.fields[name][1] for name in names] if RECORD.fields else []
    end_offset = _COMMON_BYTES
    for name, hint in _type_hints(kind).items():
        if name == "stream":
            continue  # one of the common fields
        # An enumeration is stored in one byte.
        type_code = str(hint.__metadata__[0]) if get_origin(hint) is Annotated else "<u1"
        dtype = np.dtype(type_code)
        end_offset += -end_offset % dtype.base.alignment
        names.append(name)
        formats.append(type_code)
        offsets.append(end_offset)
        end_offset += dtype.itemsize
    return np.dtype(
        {"names": names, "formats": formats, "offsets": offsets, "itemsize": RECORD_BYTES}
    )


def view(records: Records, kind: EventKind) -> Records:
    """Return a view of records, all of one kind, with the fields of the body."""
    return np.ascontiguousarray(records).view(layout(kind))


def take_records(
    records: Records, selection: npt.NDArray[np.intp] | npt.NDArray[np.bool_]
) -> Records:
    """Return the records that indices or a mask select."""
    indices = np.flatnonzero(selection) if selection.dtype == np.bool_ else selection
    return np.ascontiguousarray(records).view(_OPAQUE_RECORD).take(indices).view(RECORD)


def concatenate_records(record_arrays: Sequence[Records]) -> Records:
    """Return several arrays of records as one; a single array is returned unchanged."""
    if len(record_arrays) == 1:
        return record_arrays[0]
    opaque_arrays = [
        np.ascontiguousarray(record_array).view(_OPAQUE_RECORD) for record_array in record_arrays
    ]
    return np.concatenate(opaque_arrays).view(RECORD)


def find_invalid(records: Records, string_count: int) -> str:
    """Return why records are invalid, or an empty text; ``string_count`` is the length of the string table.

    Checks enumerations, string indices and the addresses of accesses. Records of unknown kinds count as
    valid.
    """
    kinds = records["kind"]
    for kind_number in np.flatnonzero(np.bincount(kinds)).tolist():
        if kind_number not in _BODIES:
            continue
        kind = EventKind(kind_number)
        rows, is_kind = records.view(layout(kind)), kinds == kind  # `view` would copy the records
        for name, minimum, maximum in _bounds(kind):
            field_values = rows[name][is_kind]
            if (
                field_values.max() > (string_count - 1 if maximum is None else maximum)
                or field_values.min() < minimum
            ):
                return f"invalid {name} in a record of kind {kind.name}"
        if kind is EventKind.ACCESS and (
            rows["lo"][is_kind].max() > ADDRESS_END or rows["hi"][is_kind].max() > ADDRESS_END
        ):
            return "invalid address in a record of kind ACCESS"
    return ""


@cache
def _bounds(kind: EventKind) -> tuple[tuple[str, int, int | None], ...]:
    """Return the name, minimum and maximum of each enumeration and string index in a kind's body.

    The maximum of a string index is None, because it depends on the string table.
    """
    bounds: list[tuple[str, int, int | None]] = []
    for name, hint in _type_hints(kind).items():
        if hint is Text:
            bounds.append((name, 0, None))
        elif isinstance(hint, type) and issubclass(hint, IntFlag):
            bounds.append((name, 0, sum(hint)))
        elif isinstance(hint, type) and issubclass(hint, IntEnum):
            bounds.append((name, min(hint), max(hint)))
    return tuple(bounds)


def pack(events: Sequence[Event], string_index: Callable[[str], int]) -> Records:
    """Return events as records; ``string_index`` returns the index of a string in the string table."""
    records = np.zeros(len(events), RECORD)
    for row, event in enumerate(events):
        body = event.body
        record = records[row : row + 1].view(layout(body.kind))
        record["kind"] = body.kind
        for name in _EVENT_FIELDS:
            record[name] = getattr(event, name)
        for name, hint in _type_hints(body.kind).items():
            field_value = getattr(body, name)
            record[name] = string_index(field_value) if hint is Text else field_value
    return records


def unpack(records: Records, strings: Sequence[str]) -> Iterator[Event]:
    """Yield the events of records. This is slow: use it for tests and small traces only."""
    for row in range(len(records)):
        kind = EventKind(int(records["kind"][row]))
        record = records[row : row + 1].view(layout(kind))
        common_fields = {name: int(record[name][0]) for name in _EVENT_FIELDS}
        body_fields = {
            name: _decode(hint, record[name][0].tolist(), strings)
            for name, hint in _type_hints(kind).items()
        }
        yield Event(_BODIES[kind](**body_fields), **common_fields)


def _decode(hint: Any, stored_value: Any, strings: Sequence[str]) -> Any:
    """Return the value of a field from its stored number."""
    if hint is Text:
        return strings[stored_value]
    if get_origin(hint) is Annotated:
        return tuple(stored_value) if isinstance(stored_value, list) else stored_value
    return hint(stored_value)


@cache
def _type_hints(kind: EventKind) -> dict[str, Any]:
    type_hints = get_type_hints(_BODIES[kind], include_extras=True)
    return {field.name: type_hints[field.name] for field in fields(_BODIES[kind])}


_BODIES: dict[EventKind, type[EventBody]] = {body.kind: body for body in get_args(EventBody)}
_EVENT_FIELDS = tuple(field.name for field in fields(Event) if field.name != "body")
