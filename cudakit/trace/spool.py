"""A spool: a directory with the traces of all processes of a program, and one reader.

A trace is a chain of files ``PID-NNNNNN.trace``, numbered from 0, each of which continues the previous one
(``trace.log``). The second trace of a process is ``PID.1-NNNNNN.trace``, and so on. After ``exec``, or if the
operating system reuses a PID, a new first file replaces the old one and begins a new chain.
"""

from __future__ import annotations

import os
import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeAlias

from cudakit.errors import InputError
from cudakit.trace.events import Event
from cudakit.trace.layout import Records
from cudakit.trace.log import Clock, Reader, Stack, Writer
from cudakit.trace.losses import is_abandoned, report_loss

# Linux allows PIDs up to 2^22.
_SEGMENT = re.compile(r"((\d{1,7})(?:\.\d{1,7})?)-(\d{6,9})\.trace")
_HEADER_BYTES = 32
# Small enough for the consumer to handle signals between batches.
_RECORDS_PER_BATCH = 8192
_SEGMENT_BYTES = 4 << 20

# The files of one chain by their numbers.
_Segments: TypeAlias = Mapping[int, "os.DirEntry[str]"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of one trace, with its string and stack tables so far."""

    process: int
    records: Records
    strings: Sequence[str]
    stacks: Sequence[Stack]
    chain: int = 0  # number of the trace within the process; each has its own tables
    simulated: bool = False  # whether a simulated device recorded it


class Spool:
    """Reads the traces in a directory, the records of each trace in order.

    ``discard`` deletes files after reading; the first file of a chain stays, empty. ``damaged`` lists the
    errors of traces that cannot be read.
    """

    def __init__(self, directory: Path, *, discard: bool = False) -> None:
        self.damaged: list[str] = []
        self._directory = directory
        self._discard = discard
        self._chains: dict[str, _Chain] = {}
        self._chain_counts: Counter[int] = Counter()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def batches(self) -> Iterator[Batch]:
        """Yield the records since the last call."""
        for name, segments in self._listing().items():
            chain = self._chains.get(name)
            if chain is not None and chain.is_over(segments):
                yield from self._readable(chain, chain.rest())
                chain = None
            if chain is None:
                chain = self._chains[name] = self._new_chain(name)
            yield from self._readable(chain, chain.batches(segments))

    def close(self) -> None:
        """Close all open files."""
        for chain in self._chains.values():
            chain.close()

    def _listing(self) -> dict[str, dict[int, os.DirEntry[str]]]:
        found: defaultdict[str, dict[int, os.DirEntry[str]]] = defaultdict(dict)
        with os.scandir(self._directory) as entries:
            for entry in entries:
                match = _SEGMENT.fullmatch(entry.name)
                if match and entry.is_file(follow_symlinks=False):
                    found[match[1]][int(match[3])] = entry
        return found

    def _new_chain(self, name: str) -> _Chain:
        process = int(name.partition(".")[0])
        self._chain_counts[process] += 1
        return _Chain(process, self._chain_counts[process] - 1, discard=self._discard)

    def _readable(self, chain: _Chain, batches: Iterator[Batch]) -> Iterator[Batch]:
        try:
            yield from batches
        except InputError as error:
            self.damaged.append(error.message)
            chain.give_up()


class _Chain:
    """The files of one trace, and the position in them."""

    def __init__(self, process: int, number: int, *, discard: bool) -> None:
        self._process = process
        self._number = number
        self._discard = discard
        self._segment = 0  # the current or next one
        self._first: int | None = None  # the inode of segment 0
        self._path = ""
        self._reader: Reader | None = None
        self._tables: Reader | None = None
        self._given_up = False

    def is_over(self, segments: _Segments) -> bool:
        """Return whether a new chain has replaced this one."""
        return self._first is not None and 0 in segments and segments[0].inode() != self._first

    def batches(self, segments: _Segments) -> Iterator[Batch]:
        # Before reading: a process that ends during it may have written more, which the next call reads.
        alive = _is_alive(self._process)
        while self._open(segments):
            yield from self._read()
            if self._segment + 1 not in segments:
                break
            self._end_segment()
        if self._reader and not alive:
            if self._reader.is_truncated:
                raise InputError(f"the trace of process {self._process} is truncated: {self._path}")
            self._end_segment()

    def rest(self) -> Iterator[Batch]:
        """Read the rest of the open file, whose name now belongs to another chain."""
        yield from self._read()
        self.close()

    def give_up(self) -> None:
        self.close()
        self._given_up = True

    def close(self) -> None:
        if self._reader:
            self._reader.close()
        self._reader = None

    def _open(self, segments: _Segments) -> Reader | None:
        """Open the next file once its header is complete."""
        entry = segments.get(self._segment)
        if self._reader or self._given_up or not entry or entry.stat().st_size < _HEADER_BYTES:
            return self._reader
        if self._segment == 0:
            self._first = entry.inode()
        self._path = entry.path
        self._reader = self._tables = Reader(Path(entry.path), after=self._tables)
        return self._reader

    def _read(self) -> Iterator[Batch]:
        if self._reader is None:
            return
        strings, stacks = self._reader.strings, self._reader.stacks
        simulated = self._reader.clock is Clock.VIRTUAL
        for records in self._reader.batches(records=_RECORDS_PER_BATCH):
            yield Batch(self._process, records, strings, stacks, self._number, simulated)

    def _end_segment(self) -> None:
        self.close()
        if self._discard and self._segment == 0:
            os.truncate(self._path, 0)  # the name still marks the chain as existing
        elif self._discard:
            os.unlink(self._path)
        self._segment += 1


class SpoolWriter:
    """Writes the events of this process into a spool, with the interface of ``Writer``.

    Each event is in the file when ``write`` returns; the first event creates the file. A forked process
    writes its own trace. If a file cannot be written, this and later events are lost and counted
    (``losses``); nothing is raised. If the supervisor is gone, the spool is deleted and the recording ends.
    """

    def __init__(
        self, directory: Path, *, clock: Clock, segment_bytes: int = _SEGMENT_BYTES
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._segment_bytes = segment_bytes
        self._writer: Writer | None = None
        self._process = 0
        self._name = ""
        self._segment = 0
        self._closed = False
        self._failure: OSError | None = None
        self._lost = 0  # events of this process

    def write(self, event: Event) -> None:
        """Append an event."""
        try:
            if writer := self._open():
                writer.write(event)
                writer.flush()
        except OSError as error:
            self._failure = error
        if self._failure:
            self._lost += 1
            report_loss(self._directory, self._lost, self._failure)

    def stack(self, stack: Stack) -> int:
        """Return the number of a stack, innermost frame first; 0 after a failure."""
        try:
            writer = self._open()
        except OSError as error:
            self._failure = error
            return 0
        return writer.stack(stack) if writer else 0

    def close(self) -> None:
        """End the trace."""
        if self._writer:
            self._writer.close(flush=not self._failure)
        self._closed = True
        if is_abandoned(self._directory):
            shutil.rmtree(self._directory, ignore_errors=True)

    def __del__(self) -> None:
        self.close()  # otherwise Python warns about an open file that the program did not open

    def _open(self) -> Writer | None:
        """Return the writer of this process, in a file below the size limit; None after a failure."""
        if self._closed or self._failure:
            return None
        if self._process != os.getpid():
            self._begin()
        elif self._writer and self._writer.size_bytes >= self._segment_bytes:
            if is_abandoned(self._directory):
                self.close()
                return None
            self._segment += 1
            self._writer.continue_in(self._directory / f"{self._name}-{self._segment:06d}.trace")
        return self._writer

    def _begin(self) -> None:
        """Begin the first free chain of this process."""
        self._process = os.getpid()
        self._segment = self._lost = 0
        for number in count():
            self._name = f"{self._process}.{number}" if number else f"{self._process}"
            path = self._directory / f"{self._name}-000000.trace"
            try:
                if self._writer is None:
                    self._writer = Writer(path, clock=self._clock)
                else:
                    self._writer.start_over(path)
            except FileExistsError:
                continue
            return


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
