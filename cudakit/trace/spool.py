"""A spool: a directory to which all processes of a program write their traces, and which one process reads.

A trace is a chain of files ``PID-NNNNNN.trace``, numbered from 0, each of which continues the previous one
(``trace.trace_file``). The second trace of a process is ``PID.1-NNNNNN.trace``, and so on. After ``exec``, or
if the operating system reuses a PID, a new first file replaces the old one and begins a new chain.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import struct
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TypeAlias

from cudakit.errors import InputError
from cudakit.stacks import Stack
from cudakit.trace.events import Event
from cudakit.trace.trace_file import Clock, Records, TraceReader, TraceWriter

# Linux allows PIDs up to 2^22, which has seven digits.
_FILE_NAME = re.compile(r"((\d{1,7})(?:\.\d{1,7})?)-(\d{6,9})\.trace")
_HEADER_BYTES = 32
# A batch is small, because the supervisor handles signals between batches.
_RECORDS_PER_BATCH = 8192
# Size from which on a trace continues in the next file of its chain.
_MAX_FILE_BYTES = 4 << 20

# The files of one chain of trace files, by their numbers.
_ChainFiles: TypeAlias = Mapping[int, "os.DirEntry[str]"]


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive records of one trace, with its string and stack tables up to these records."""

    process: int  # PID of the recorded process
    records: Records
    strings: Sequence[str]  # string table of the trace
    stacks: Sequence[Stack]  # stack table of the trace
    trace_number: int = 0  # number of the trace within the process, from 0
    simulated: bool = False  # whether the records are of a simulated device


class Spool:
    """Reads the traces in a directory, the records of each trace in order.

    ``discard`` deletes each file after reading it, except the first file of a chain, which is emptied.
    ``error_messages`` lists the error messages for traces that cannot be read.
    """

    def __init__(self, directory: Path, *, discard: bool = False) -> None:
        self.error_messages: list[str] = []
        self._directory = directory
        self._discard = discard
        self._chains: dict[str, _Chain] = {}
        self._chain_counts: Counter[int] = Counter()

    def __enter__(self) -> Spool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def batches(self) -> Iterator[Batch]:
        """Yield the records of all traces that were written since the last call."""
        for name, files in self._list_files().items():
            chain = self._chains.get(name)
            if chain is not None and chain.is_replaced(files):
                yield from self._read_until_damaged(chain, chain.remaining_batches())
                chain = None
            if chain is None:
                process = int(name.partition(".")[0])
                chain = _Chain(process, self._chain_counts[process], discard=self._discard)
                self._chains[name] = chain
                self._chain_counts[process] += 1
            yield from self._read_until_damaged(chain, chain.batches(files))

    def close(self) -> None:
        """Close all open files."""
        for chain in self._chains.values():
            chain.close()

    def _list_files(self) -> dict[str, dict[int, os.DirEntry[str]]]:
        """Return the files by the name of their chain and their number in it."""
        chains: defaultdict[str, dict[int, os.DirEntry[str]]] = defaultdict(dict)
        with os.scandir(self._directory) as directory_entries:
            for file in directory_entries:
                name_match = _FILE_NAME.fullmatch(file.name)
                if name_match and file.is_file(follow_symlinks=False):
                    chains[name_match[1]][int(name_match[3])] = file
        return chains

    def _read_until_damaged(self, chain: _Chain, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield the batches of a chain; if the chain is damaged, store the error and stop reading it."""
        try:
            yield from batches
        except InputError as error:
            self.error_messages.append(error.message)
            chain.stop_reading()


class _Chain:
    """Reads the files of one trace in order."""

    def __init__(self, process: int, chain_number: int, *, discard: bool) -> None:
        self._process = process
        self._trace_number = chain_number
        self._discard = discard
        self._file_number = 0  # number of the open file, or of the next file if none is open
        self._first_inode: int | None = None  # inode of the chain's first file, once it was opened
        self._path = ""
        self._reader: TraceReader | None = None  # reader of the open file
        # reader of the last file, whose tables the next file continues
        self._last_reader: TraceReader | None = None
        self._is_stopped = False

    def is_replaced(self, files: _ChainFiles) -> bool:
        """Return whether a new chain of the same name has replaced this one."""
        return (
            self._first_inode is not None and 0 in files and files[0].inode() != self._first_inode
        )

    def batches(self, files: _ChainFiles) -> Iterator[Batch]:
        """Yield the new records; ``files`` are the files of the chain that exist now."""
        # The process is checked before reading: if it ends during the read, it may have written further
        # records.
        was_alive = _is_alive(self._process)
        while self._open_reader(files):
            yield from self._read_batches()
            if self._file_number + 1 not in files:
                break
            self._finish_file()
        if self._reader and not was_alive:
            if self._reader.is_truncated:
                raise InputError(
                    f"the trace of process {self._process} is truncated: {self._path}",
                    hint="check that the disk of the temporary directory has free space, and run again",
                )
            self._finish_file()

    def remaining_batches(self) -> Iterator[Batch]:
        """Read the rest of the open file, whose name now belongs to another chain."""
        yield from self._read_batches()
        self.close()

    def stop_reading(self) -> None:
        """Ignore all further records of the chain."""
        self.close()
        self._is_stopped = True

    def close(self) -> None:
        if self._reader:
            self._reader.close()
        self._reader = None

    def _open_reader(self, files: _ChainFiles) -> TraceReader | None:
        """Return the reader of the open file. Without one, open the next file if its header is complete."""
        file = files.get(self._file_number)
        if self._reader or self._is_stopped or not file or file.stat().st_size < _HEADER_BYTES:
            return self._reader
        if self._file_number == 0:
            self._first_inode = file.inode()
        self._path = file.path
        self._reader = TraceReader(Path(file.path), previous_reader=self._last_reader)
        self._last_reader = self._reader
        return self._reader

    def _read_batches(self) -> Iterator[Batch]:
        if self._reader is None:
            return
        strings, stacks = self._reader.strings, self._reader.stacks
        simulated = self._reader.clock is Clock.VIRTUAL
        for records in self._reader.batches(records=_RECORDS_PER_BATCH):
            yield Batch(self._process, records, strings, stacks, self._trace_number, simulated)

    def _finish_file(self) -> None:
        """Close the open file, which was read completely, and continue with the next one."""
        self.close()
        if self._discard and self._file_number == 0:
            # The first file is not deleted, because its inode identifies the chain of files.
            os.truncate(self._path, 0)
        elif self._discard:
            os.unlink(self._path)
        self._file_number += 1


class SpoolWriter:
    """Writes the events of this process into a spool, with the interface of ``TraceWriter``.

    Each event is in the file when ``write`` returns; the first event creates the file. A forked process
    writes a separate trace. If a file cannot be written, this and later events are lost and counted
    (``losses``); no error is raised. If the supervisor has ended, the spool is deleted and recording ends.
    A trace continues in the next file of its chain once a file has ``max_file_bytes``.
    """

    def __init__(
        self, directory: Path, *, clock: Clock, max_file_bytes: int = _MAX_FILE_BYTES
    ) -> None:
        self._directory = directory
        self._clock = clock
        self._max_file_bytes = max_file_bytes
        self._writer: TraceWriter | None = None
        self._process = 0  # PID of the process that writes the current chain
        self._chain_name = ""
        self._file_number = 0
        self._is_closed = False
        self._failure: OSError | None = None
        self._lost_event_count = 0  # number of events that this process has lost

    def write(self, event: Event) -> None:
        """Append an event and write it to the file."""
        try:
            if writer := self._current_writer():
                writer.write(event)
                writer.flush()
        except OSError as error:
            self._failure = error
        if self._failure:
            self._lost_event_count += 1
            report_loss(self._directory, self._lost_event_count, self._failure)

    def stack(self, stack: Stack) -> int:
        """Return the index of a call stack (innermost frame first) in the stack table; 0 after a failure."""
        try:
            writer = self._current_writer()
        except OSError as error:
            self._failure = error
            return 0
        return writer.stack(stack) if writer else 0

    def close(self) -> None:
        """End the trace."""
        if self._writer:
            self._writer.close(flush=not self._failure)
        self._is_closed = True
        if is_abandoned(self._directory):
            shutil.rmtree(self._directory, ignore_errors=True)

    def __del__(self) -> None:
        self.close()  # otherwise Python warns about an open file that the program did not open

    def _current_writer(self) -> TraceWriter | None:
        """Return the writer of this process, with a file below the size limit; None after a failure."""
        if self._is_closed or self._failure:
            return None
        if self._process != os.getpid():
            self._begin_chain()
        elif self._writer and self._writer.size_bytes >= self._max_file_bytes:
            if is_abandoned(self._directory):
                self.close()
                return None
            self._file_number += 1
            name = f"{self._chain_name}-{self._file_number:06d}.trace"
            self._writer.continue_in(self._directory / name)
        return self._writer

    def _begin_chain(self) -> None:
        """Begin a chain of this process, under the first name that no other chain uses."""
        self._process = os.getpid()
        self._file_number = self._lost_event_count = 0
        for trace_number in count():
            self._chain_name = (
                f"{self._process}.{trace_number}" if trace_number else f"{self._process}"
            )
            path = self._directory / f"{self._chain_name}-000000.trace"
            try:
                if self._writer is None:
                    self._writer = TraceWriter(path, clock=self._clock)
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


# --- Count the events that a program could not write to its spool, and detect a spool without a reader ---
#
# Lost events must be reported even if the disk is full. Therefore the supervisor writes the file ``losses``
# before the program starts, and a process that loses events overwrites a slot of this file, which needs no
# new disk space. The supervisor also holds a lock on the file for as long as it reads the spool: if it is
# killed, the lock is released, and writers and later supervisors delete the spool.

FILE = "losses"
SPOOL_PREFIX = "cudakit-spool-"  # prefix of the directory names of spools
# A slot has the PID, the number of lost events, and the errno of the first failure. spool.c of the native
# recorder writes the same format.
_SLOT = struct.Struct("<3Q")
_SLOT_COUNT = 256


@dataclass(frozen=True, slots=True)
class Loss:
    """The number of events that one process could not write, and the reason."""

    process: int  # PID of the process
    count: int
    errno: int  # error number of the first failed write; 0 if it is unknown

    def __str__(self) -> str:
        event_count_text = "event" if self.count == 1 else "events"
        reason = f": {os.strerror(self.errno)}" if self.errno else ""
        return f"{self.count:,} {event_count_text} of process {self.process} could not be recorded{reason}"


class Losses:
    """The file ``losses`` of a spool, which the supervisor creates, locks and reads."""

    def __init__(self, directory: Path) -> None:
        temporary_path = directory / f"{FILE}.new"
        self._file = temporary_path.open("x+b", buffering=0)
        self._file.write(bytes(_SLOT.size * _SLOT_COUNT))
        fcntl.flock(self._file, fcntl.LOCK_EX)
        temporary_path.rename(
            directory / FILE
        )  # renamed last, so that the file is never visible without its lock

    def read_all(self) -> Iterator[Loss]:
        """Yield the loss of each process that lost events."""
        slots_content = os.pread(self._file.fileno(), _SLOT.size * _SLOT_COUNT, 0)
        for process, record_count, errno in _SLOT.iter_unpack(slots_content):
            if record_count:
                yield Loss(process, record_count, errno)

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def report_loss(directory: Path, lost_count: int, error: OSError) -> None:
    """Write the number of events that this process has lost to its slot of the file. Never raises."""
    process = os.getpid()
    try:
        losses_descriptor = os.open(directory / FILE, os.O_RDWR)
    except OSError:
        return  # no supervisor reads this spool
    try:
        for slot in range(process, process + _SLOT_COUNT):
            offset = slot % _SLOT_COUNT * _SLOT.size
            (slot_process, *_) = _SLOT.unpack(os.pread(losses_descriptor, _SLOT.size, offset))
            if slot_process in (0, process):
                os.pwrite(
                    losses_descriptor, _SLOT.pack(process, lost_count, error.errno or 0), offset
                )
                return
    except (OSError, struct.error):
        return
    finally:
        os.close(losses_descriptor)


def is_abandoned(directory: Path) -> bool:
    """Return whether the supervisor of a spool has ended without deleting the spool."""
    try:
        losses_descriptor = os.open(directory / FILE, os.O_RDWR)
    except OSError:
        return False  # the directory is not a spool of a supervisor, or was deleted
    try:
        fcntl.flock(losses_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(losses_descriptor)
    return True


def delete_abandoned(parent: Path) -> None:
    """Delete the abandoned spools of this user in a directory. Never raises."""
    for directory in parent.glob(f"{SPOOL_PREFIX}*"):
        try:
            belongs_to_user = directory.stat(follow_symlinks=False).st_uid == os.getuid()
        except OSError:
            continue
        if belongs_to_user and directory.is_dir() and is_abandoned(directory):
            shutil.rmtree(directory, ignore_errors=True)
