"""A trace file: appended to while the program runs, and readable if it is truncated anywhere.

The file begins with 32 bytes: ``cudakit\\n``, the version of the format, the size of a record, the clock
(``Clock``), four zero bytes and, in eight bytes, the end of the readable part (0: the end of the file),
because a mapped file is larger than its content. Blocks follow, each after a header of 16 bytes: a tag of
four letters, the number of items, the size in bytes. All numbers are little-endian.

* ``text``: strings, each with its length in bytes, in UTF-8. The first string of a file has the number 1;
  0 is the empty string.
* ``stak``: Python call stacks, innermost frame first: the number of frames, then function, file and line of
  each, the first two as numbers of strings. The first stack has the number 1; 0 is the unknown stack.
* ``rcds``: records (``layout.RECORD``). The strings and stacks that they refer to are in earlier blocks.

A trace may continue in another file, which continues the numbers of strings and stacks.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator, Sequence
from enum import IntEnum
from pathlib import Path
from typing import BinaryIO, NamedTuple, TypeAlias

import numpy as np

from cudakit.errors import InputError
from cudakit.trace.events import Event
from cudakit.trace.layout import RECORD, RECORD_BYTES, Records, find_invalid, pack

VERSION = 1
MAGIC = b"cudakit\n"

_HEADER = struct.Struct("<8s3I4xQ")
_END = struct.Struct("<Q")
_END_AT = _HEADER.size - _END.size
_BLOCK = struct.Struct("<4sIQ")
_NUMBER = struct.Struct("<I")
_FRAME = struct.Struct("<3I")

# Large enough for cheap writes, small enough that a crash loses little.
_RECORDS_PER_BLOCK = 512
_WINDOW_BYTES = 1 << 20


class Clock(IntEnum):
    """The clock of the times in a trace."""

    MONOTONIC = 1  # CLOCK_MONOTONIC of the host
    VIRTUAL = 2  # time of a simulated device since its creation


class Frame(NamedTuple):
    """A frame of a Python stack; line 0 is unknown."""

    function: str
    file: str
    line: int


Stack: TypeAlias = tuple[Frame, ...]


class Writer:
    """Writes events to a new file; usable as a sink: ``Sim(sink=writer.write)``."""

    def __init__(self, path: Path, *, clock: Clock) -> None:
        self._clock = clock
        self._file = self._new_file(path)
        self._events: list[Event] = []
        self._strings: dict[str, int] = {"": 0}
        self._stacks: dict[Stack, int] = {(): 0}
        self._new_strings: list[bytes] = []
        self._new_stacks: list[bytes] = []

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def write(self, event: Event) -> None:
        """Append an event. It is written by the next ``flush``, which also happens automatically."""
        self._events.append(event)
        if len(self._events) >= _RECORDS_PER_BLOCK:
            self.flush()

    def stack(self, stack: Stack) -> int:
        """Return the number of a stack, innermost frame first: the ``site`` of events."""
        number = self._stacks.get(stack)
        if number is None:
            number = self._stacks[stack] = len(self._stacks)
            self._new_stacks.append(self._packed(stack))
        return number

    @property
    def size_bytes(self) -> int:
        """The size of the open file."""
        return self._file.tell()

    def continue_in(self, path: Path) -> None:
        """Continue the trace in another new file; strings and stacks keep their numbers."""
        self.close()
        self._file = self._new_file(path)

    def start_over(self, path: Path) -> None:
        """Begin another trace in a forked process, which drops the parent's unwritten events.

        All strings and stacks are written again, so that their numbers stay valid.
        """
        self._file.close()
        self._events.clear()
        self._new_strings = [_packed_text(text) for text in self._strings if text]
        self._new_stacks = [self._packed(stack) for stack in self._stacks if stack]
        self._file = self._new_file(path)

    def flush(self) -> None:
        """Write the events appended so far."""
        records = pack(self._events, self._number)
        self._block(b"text", self._new_strings)
        self._block(b"stak", self._new_stacks)
        self._block(b"rcds", [record.tobytes() for record in records])
        for written in (self._events, self._new_strings, self._new_stacks):
            written.clear()

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

    def _number(self, text: str) -> int:
        number = self._strings.get(text)
        if number is None:
            number = self._strings[text] = len(self._strings)
            self._new_strings.append(_packed_text(text))
        return number

    def _packed(self, stack: Stack) -> bytes:
        frames = (
            _FRAME.pack(self._number(frame.function), self._number(frame.file), frame.line)
            for frame in stack
        )
        return _NUMBER.pack(len(stack)) + b"".join(frames)

    def _block(self, tag: bytes, items: Sequence[bytes]) -> None:
        if items:
            payload = b"".join(items)
            left, begin = _BLOCK.pack(tag, len(items), len(payload)) + payload, self._file.tell()
            try:
                while left:  # a write may be short
                    left = left[self._file.write(left) :]
            except OSError:
                self._file.truncate(
                    begin
                )  # leave no part of a block, so that all of the file is readable
                raise


class Reader:
    """Reads a file, also while it is being written or if it is truncated.

    ``after`` is the reader of the file that this one continues. Raises InputError if the file is not a trace,
    or has another version.
    """

    def __init__(self, path: Path, *, after: Reader | None = None) -> None:
        self._path = path
        # Unbuffered, because a buffer would read beyond the end of the written part.
        self._file = path.open("rb", buffering=0)
        try:
            self.clock = self._read_header()
        except InputError:
            self._file.close()
            raise
        self.strings: list[str] = after.strings if after else [""]
        self.stacks: list[Stack] = after.stacks if after else [()]
        self._records_left = 0  # of an incomplete block
        self._at = self._end = _HEADER.size
        self._window = b""  # a part of the file, read at once
        self._window_at = 0

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def batches(self, *, records: int = 65536) -> Iterator[Records]:
        """Yield the records since the last call, in batches of at most ``records``.

        ``strings`` and ``stacks`` contain all that a batch refers to.
        """
        self._end = self._readable_bytes()
        while found := self._gather(records):
            batch = np.frombuffer(found, RECORD)
            if reason := find_invalid(batch, len(self.strings)):
                raise InputError(f"{self._path} is damaged: {reason}")
            yield batch

    @property
    def is_truncated(self) -> bool:
        """Whether the file ends within a block, once all of it was read."""
        return self._records_left > 0 or self._at < self._readable_bytes()

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

    def _gather(self, records: int) -> bytes:
        """Read up to ``records`` records."""
        found: list[bytes] = []
        while records and (self._records_left or self._next_block()):
            count = min(records, self._records_left, (self._end - self._at) // RECORD_BYTES)
            if not count:
                break
            found.append(self._take(count * RECORD_BYTES))
            self._records_left -= count
            records -= count
        return b"".join(found)

    def _next_block(self) -> bool:
        """Read up to the next block of records; return False if there is none yet."""
        while self._end - self._at >= _BLOCK.size:
            tag, count, size_bytes = _BLOCK.unpack(self._take(_BLOCK.size))
            if tag == b"rcds":
                self._records_left = count
                return True
            if self._end - self._at < size_bytes:  # incomplete
                self._at -= _BLOCK.size
                return False
            self._read_table(tag, count, self._take(size_bytes))
        return False

    def _take(self, size_bytes: int) -> bytes:
        """Return the next bytes, which must be readable."""
        begin = self._at - self._window_at
        if begin + size_bytes > len(self._window):
            wanted = max(size_bytes, min(self._end - self._at, _WINDOW_BYTES))
            self._window = os.pread(self._file.fileno(), wanted, self._at)
            self._window_at, begin = self._at, 0
        self._at += size_bytes
        return self._window[begin : begin + size_bytes]

    def _read_table(self, tag: bytes, count: int, payload: bytes) -> None:
        try:
            if tag == b"text":
                self.strings += _strings(payload, count)
            elif tag == b"stak":
                self.stacks += _stacks(payload, count, self.strings)
            else:
                raise InputError(f"{self._path} is damaged: there is no block {tag!r}")
        except (struct.error, IndexError) as error:
            raise InputError(f"{self._path} is damaged: a table of it cannot be read") from error

    def _readable_bytes(self) -> int:
        """Return the end of the readable part, which grows while the file is written."""
        size_bytes = os.fstat(self._file.fileno()).st_size
        (end,) = _END.unpack(os.pread(self._file.fileno(), _END.size, _END_AT))
        return min(end, size_bytes) if end else size_bytes


def _packed_text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogateescape")
    return _NUMBER.pack(len(encoded)) + encoded


def _strings(payload: bytes, count: int) -> Iterator[str]:
    at = 0
    for _ in range(count):
        (length,) = _NUMBER.unpack_from(payload, at)
        at += _NUMBER.size + length
        if at > len(payload):
            raise IndexError("a string ends beyond its table")
        yield payload[at - length : at].decode("utf-8", "surrogateescape")


def _stacks(payload: bytes, count: int, strings: Sequence[str]) -> Iterator[Stack]:
    at = 0
    for _ in range(count):
        (depth,) = _NUMBER.unpack_from(payload, at)
        at += _NUMBER.size
        end = at + depth * _FRAME.size
        numbers = (_FRAME.unpack_from(payload, place) for place in range(at, end, _FRAME.size))
        yield tuple(Frame(strings[name], strings[file], line) for name, file, line in numbers)
        at = end
