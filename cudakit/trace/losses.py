"""Count the events that a program could not write to its spool, and detect a spool without a reader.

Lost events must be reported even if the disk is full. Therefore the supervisor writes the file ``losses``
before the program starts, and a process that loses events overwrites a slot of this file, which needs no new
disk space. The supervisor also holds a lock on the file for as long as it reads the spool: if the supervisor
is killed, the lock is released, and writers and later supervisors delete the spool.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

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
