"""A directory of traces: each process of a program writes its own, while another reads them all.

A trace is a chain of files ``PID-NNNNNN.trace``, counted from 0, of which each continues the one before
(``trace.log``); a second one of the same process is ``PID.1-NNNNNN.trace``, and so on. A program that
replaces itself (``exec``), or a new process with the number of an old one, may write a new first file in
the place of the old: a new chain.
"""

from __future__ import annotations

import os
import re
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

_SEGMENT = re.compile(r"((\d+)(?:\.\d+)?)-(\d{6,})\.trace")
_HEADER_BYTES = 32
# Few enough that whoever feeds on them can look up in between.
_RECORDS_PER_BATCH = 8192
_SEGMENT_BYTES = 4 << 20

# The files of one chain by their numbers.
_Segments: TypeAlias = Mapping[int, "os.DirEntry[str]"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one trace, in order, and the tables that they name."""

    process: int
    records: Records
    strings: Sequence[str]
    stacks: Sequence[Stack]
    chain: int = 0  # of the process, counted from 0: numbers of different chains are unrelated
    simulated: bool = False  # whether a simulated device did this


class Spool:
    """Reads what processes write into a directory, each process in its order.

    With ``discard`` what was read is deleted; of a chain's first file the name stays. What cannot be read is
    left out, and said in ``damaged``.
    """

    def __init__(self, directory: Path, *, discard: bool = False) -> None:
        self.damaged: list[str] = []
        self._directory = directory
        self._discard = discard
        self._chains: dict[str, _Chain] = {}
        self._begun: Counter[int] = Counter()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def batches(self) -> Iterator[Batch]:
        """Yield what came since the last call, up to what is there when this one begins."""
        for name, segments in self._listing().items():
            chain = self._chains.get(name)
            if chain is not None and chain.is_over(segments):
                yield from self._readable(chain, chain.rest())
                chain = None
            if chain is None:
                chain = self._chains[name] = self._new_chain(name)
            yield from self._readable(chain, chain.batches(segments))

    def close(self) -> None:
        """Close the files that are open."""
        for chain in self._chains.values():
            chain.close()

    def _listing(self) -> dict[str, dict[int, os.DirEntry[str]]]:
        found: defaultdict[str, dict[int, os.DirEntry[str]]] = defaultdict(dict)
        with os.scandir(self._directory) as entries:
            for entry in entries:
                if match := _SEGMENT.fullmatch(entry.name):
                    found[match[1]][int(match[3])] = entry
        return found

    def _new_chain(self, name: str) -> _Chain:
        process = int(name.partition(".")[0])
        self._begun[process] += 1
        return _Chain(process, self._begun[process] - 1, discard=self._discard)

    def _readable(self, chain: _Chain, batches: Iterator[Batch]) -> Iterator[Batch]:
        try:
            yield from batches
        except InputError as error:
            self.damaged.append(error.message)
            chain.give_up()


class _Chain:
    """The files of one trace, read one after the other."""

    def __init__(self, process: int, number: int, *, discard: bool) -> None:
        self._process = process
        self._number = number
        self._discard = discard
        self._segment = 0  # the one that is read, or is to be read next
        self._first: int | None = None  # the inode of segment 0
        self._path = ""
        self._reader: Reader | None = None
        self._tables: Reader | None = None
        self._given_up = False

    def is_over(self, segments: _Segments) -> bool:
        """Say whether a new chain took the place of this one."""
        return self._first is not None and 0 in segments and segments[0].inode() != self._first

    def batches(self, segments: _Segments) -> Iterator[Batch]:
        # In this order: what ends after it was asked is read to its end next time.
        alive = _is_alive(self._process)
        while self._open(segments):
            yield from self._read()
            if self._segment + 1 not in segments:
                break
            self._end_segment()
        if self._reader and not alive:
            self._end_segment()

    def rest(self) -> Iterator[Batch]:
        """Read to the end the file that is open, whose name is taken by another."""
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
        """Open the file that comes next, once its header is there."""
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
            os.truncate(self._path, 0)  # its name keeps the chain's place
        elif self._discard:
            os.unlink(self._path)
        self._segment += 1


class SpoolWriter:
    """Writes the events of this process into a spool; a sink, as ``Writer`` is, and ``stack`` likewise.

    Every event is in a file when ``write`` returns, and no file is made before the first. A process that
    is forked off writes a trace of its own. Where a file cannot be written, what comes is lost, and a line
    in ``PID.failed`` says so: nothing is raised.
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
        self._failed = False

    def write(self, event: Event) -> None:
        """Append an event."""
        try:
            if writer := self._open():
                writer.write(event)
                writer.flush()
        except OSError as error:
            self._fail(error)

    def stack(self, stack: Stack) -> int:
        """Give a stack, innermost frame first, its number."""
        try:
            writer = self._open()
        except OSError as error:
            return self._fail(error)
        return writer.stack(stack) if writer else 0

    def close(self) -> None:
        """End the trace; its events are all written by then."""
        if self._writer:
            self._writer.close()
        self._failed = True

    def __del__(self) -> None:
        self.close()  # or Python would warn of an open file, in a program that has opened none

    def _open(self) -> Writer | None:
        """Return the writer of this process, in a file that has room; None after a failure."""
        if self._failed:
            return None
        if self._process != os.getpid():
            self._begin()
        elif self._writer and self._writer.size_bytes >= self._segment_bytes:
            self._segment += 1
            self._writer.go_on(self._directory / f"{self._name}-{self._segment:06d}.trace")
        return self._writer

    def _begin(self) -> None:
        """Begin the first free chain of this process."""
        self._process = os.getpid()
        self._segment = 0
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

    def _fail(self, error: OSError) -> int:
        if not self._failed:
            self._failed = True
            complain(self._directory, f"events are lost: {error}")
        return 0


def complain(directory: Path, message: str) -> None:
    """Leave a line for the reader of a spool: something failed in this process. Never fails itself."""
    try:
        with (directory / f"{os.getpid()}.failed").open("a", encoding="utf-8") as file:
            file.write(" ".join(message.split()) + "\n")
    except OSError:
        return


def _is_alive(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
