"""A trace on disk: appended to while the program runs, readable wherever it was cut off.

The file begins with 32 bytes: ``cudakit\\n``, the version of the format, the bytes of a record, the clock
(``Clock``) and zeros. Blocks follow, each with 16 bytes before it: a tag of four letters, the number of
its items, the number of its bytes. All numbers are little-endian.

* ``text``: strings, each its length in bytes and UTF-8. The first string of a file has the number 1, 0 is
  the empty one.
* ``stak``: Python stacks, innermost frame first: the number of frames, then function, file and line of
  each, the first two as numbers of strings. The first stack has the number 1, 0 is the unknown one.
* ``rcds``: records (``layout.RECORD``). What they name stands before them.
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
from cudakit.trace.layout import RECORD, RECORD_BYTES, Records, pack

VERSION = 1
MAGIC = b"cudakit\n"

_HEADER = struct.Struct("<8s3I12x")
_BLOCK = struct.Struct("<4sIQ")
_NUMBER = struct.Struct("<I")
_FRAME = struct.Struct("<3I")

# Enough to make the cost of a write small, few enough that a crash loses little.
_RECORDS_PER_BLOCK = 512


class Clock(IntEnum):
    """What the times of a trace count from."""

    MONOTONIC = 1  # of the host: CLOCK_MONOTONIC
    VIRTUAL = 2  # of a simulated device: from its start


class Frame(NamedTuple):
    """One frame of a Python stack; line 0 is unknown."""

    function: str
    file: str
    line: int


Stack: TypeAlias = tuple[Frame, ...]


class Writer:
    """Appends to a new file; a sink of events: ``Sim(sink=writer.write)``."""

    def __init__(self, path: Path, *, clock: Clock) -> None:
        self._file: BinaryIO = path.open("xb", buffering=0)
        self._file.write(_HEADER.pack(MAGIC, VERSION, RECORD_BYTES, clock))
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
        """Append an event; it is on disk after the next ``flush``, which comes by itself as well."""
        self._events.append(event)
        if len(self._events) >= _RECORDS_PER_BLOCK:
            self.flush()

    def stack(self, stack: Stack) -> int:
        """Give a stack, innermost frame first, its number: the ``site`` of events."""
        number = self._stacks.get(stack)
        if number is None:
            number = self._stacks[stack] = len(self._stacks)
            self._new_stacks.append(self._packed(stack))
        return number

    def flush(self) -> None:
        """Write out what was appended so far."""
        records = pack(self._events, self._number)
        self._block(b"text", self._new_strings)
        self._block(b"stak", self._new_stacks)
        self._block(b"rcds", [record.tobytes() for record in records])
        for written in (self._events, self._new_strings, self._new_stacks):
            written.clear()

    def close(self) -> None:
        """Write out everything, and end."""
        if not self._file.closed:
            self.flush()
            self._file.close()

    def _number(self, text: str) -> int:
        number = self._strings.get(text)
        if number is None:
            number = self._strings[text] = len(self._strings)
            encoded = text.encode("utf-8", "surrogateescape")
            self._new_strings.append(_NUMBER.pack(len(encoded)) + encoded)
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
            self._file.write(_BLOCK.pack(tag, len(items), len(payload)) + payload)


class Reader:
    """Reads a file, also one that is still being written, or was cut off.

    Raises InputError for what is no trace, or one of another version.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb")
        try:
            self.clock = self._read_header()
        except InputError:
            self._file.close()
            raise
        self.strings: list[str] = [""]
        self.stacks: list[Stack] = [()]
        self._records_left = 0  # of a block whose end was not there yet

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def batches(self, *, records: int = 65536) -> Iterator[Records]:
        """Yield what is there, in batches of at most so many records; called again, what came since.

        The strings and stacks that a batch names are in ``strings`` and ``stacks`` by then.
        """
        while self._records_left or self._next_block():
            count = min(records, self._records_left, self._remaining_bytes() // RECORD_BYTES)
            if not count:
                return
            self._records_left -= count
            yield np.frombuffer(self._file.read(count * RECORD_BYTES), RECORD)

    def _read_header(self) -> Clock:
        header = self._file.read(_HEADER.size)
        if len(header) < _HEADER.size or not header.startswith(MAGIC):
            raise InputError(f"{self._path} is not a trace of cudakit")
        _, version, record_bytes, clock = _HEADER.unpack(header)
        if (version, record_bytes) != (VERSION, RECORD_BYTES):
            raise InputError(
                f"{self._path} is a trace of version {version}; this cudakit reads {VERSION}",
                hint="read it with the cudakit that wrote it",
            )
        if clock not in set(Clock):
            raise InputError(f"{self._path} is damaged: there is no clock {clock}")
        return Clock(clock)

    def _next_block(self) -> bool:
        """Read up to the next block of records; False where none has begun."""
        while self._remaining_bytes() >= _BLOCK.size:
            begin = self._file.tell()
            tag, count, size_bytes = _BLOCK.unpack(self._file.read(_BLOCK.size))
            if tag == b"rcds":
                self._records_left = count
                return True
            if self._remaining_bytes() < size_bytes:  # it is still being written
                self._file.seek(begin)
                return False
            self._read_table(tag, count, self._file.read(size_bytes))
        return False

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

    def _remaining_bytes(self) -> int:
        return os.fstat(self._file.fileno()).st_size - self._file.tell()


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
