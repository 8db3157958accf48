"""Count the events that a program could not write to its spool, and detect a spool without a reader.

A full disk must not hide its losses. Therefore the supervisor writes the file ``losses`` before the program
starts, and a process that loses events overwrites a slot of this file, which needs no new disk space. The
supervisor also holds a lock on the file for as long as it reads the spool: if the supervisor is killed, the
lock is released, and writers and later supervisors delete the spool.
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
PREFIX = "cudakit-spool-"  # of the names of spools
# Process, number of lost events, errno of the first failure; spool.c of the native recorder writes the same.
_SLOT = struct.Struct("<3Q")
_SLOTS = 256


@dataclass(frozen=True, slots=True)
class Loss:
    """Events that one process could not write."""

    process: int
    count: int
    errno: int  # 0: unknown

    def __str__(self) -> str:
        events = "event" if self.count == 1 else "events"
        reason = f": {os.strerror(self.errno)}" if self.errno else ""
        return f"{self.count:,} {events} of process {self.process} could not be recorded{reason}"


class Losses:
    """The supervisor's side: the file, locked until ``close``."""

    def __init__(self, directory: Path) -> None:
        new = directory / f"{FILE}.new"
        self._file = new.open("x+b", buffering=0)
        self._file.write(bytes(_SLOT.size * _SLOTS))
        fcntl.flock(self._file, fcntl.LOCK_EX)
        new.rename(directory / FILE)  # never visible without its lock

    def all(self) -> Iterator[Loss]:
        """Yield the losses of each process."""
        content = os.pread(self._file.fileno(), _SLOT.size * _SLOTS, 0)
        for process, count, errno in _SLOT.iter_unpack(content):
            if count:
                yield Loss(process, count, errno)

    def close(self) -> None:
        """Release the lock."""
        self._file.close()


def report_loss(directory: Path, count: int, error: OSError) -> None:
    """Set the number of events that this process has lost. Never raises."""
    process = os.getpid()
    try:
        file = os.open(directory / FILE, os.O_RDWR)
    except OSError:
        return  # no supervisor reads this spool
    try:
        for slot in range(process, process + _SLOTS):
            at = slot % _SLOTS * _SLOT.size
            (owner, *_) = _SLOT.unpack(os.pread(file, _SLOT.size, at))
            if owner in (0, process):
                os.pwrite(file, _SLOT.pack(process, count, error.errno or 0), at)
                return
    except (OSError, struct.error):
        return
    finally:
        os.close(file)


def is_abandoned(directory: Path) -> bool:
    """Return whether the supervisor of a spool has ended without deleting it."""
    try:
        file = os.open(directory / FILE, os.O_RDWR)
    except OSError:
        return False  # not a supervised spool, or deleted
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


def delete_abandoned(parent: Path) -> None:
    """Delete the abandoned spools of this user in a directory. Never raises."""
    for directory in parent.glob(f"{PREFIX}*"):
        try:
            ours = directory.stat(follow_symlinks=False).st_uid == os.getuid()
        except OSError:
            continue
        if ours and directory.is_dir() and is_abandoned(directory):
            shutil.rmtree(directory, ignore_errors=True)
