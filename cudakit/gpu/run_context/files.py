"""Read the files that describe a system: /proc, /dev, /sys, /etc."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import TypeVar

from cudakit.units import Unavailable

_T = TypeVar("_T")

# At most 4 MiB are read, more than any of the files has: some files under /proc have no end.
_MAX_CHUNKS = 64
# /proc/sys refuses reads of 4 MiB and more (KMALLOC_MAX_SIZE).
_CHUNK_BYTES = 1 << 16
# File systems that keep their files in host memory.
_MEMORY_FILE_SYSTEMS = ("tmpfs", "ramfs")


@dataclass(frozen=True, slots=True)
class Files:
    """The files below ``root``: ``/`` is the running system, None a system without any files.

    Paths are absolute, as on the running system. An unreadable file is treated as absent.
    """

    root: Path | None

    def text(self, path: str) -> str | None:
        """Return the text of a file without newlines at its end, or None if it cannot be read."""
        location = self.locate(path)
        if location is None:
            return None
        try:
            with location.open("rb", buffering=0) as file:
                chunks = takewhile(bool, (file.read(_CHUNK_BYTES) for _ in range(_MAX_CHUNKS)))
                return b"".join(chunks).decode(errors="replace").rstrip("\n")
        except OSError:
            return None

    def lines(self, path: str) -> list[str]:
        """Return the lines of a file, or no lines if it is absent."""
        return (self.text(path) or "").splitlines()

    def names(self, directory: str) -> tuple[str, ...]:
        """Return the sorted names in a directory, or no names if it is absent."""
        location = self.locate(directory)
        with suppress(OSError):
            return tuple(sorted(os.listdir(location))) if location else ()
        return ()

    def exists(self, path: str) -> bool:
        """Return whether a file or directory exists."""
        location = self.locate(path)
        return location is not None and os.path.exists(location)

    def is_in_memory(self, device: int) -> bool:
        """Return whether the file system with a device number (stat(2), st_dev) keeps files in host memory.

        Source: proc_pid_mountinfo(5), whose third field is the device number of a mounted file system.
        """
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in self.lines("/proc/self/mountinfo"):
            mount_fields, _, file_system_fields = line.partition(" - ")
            if mount_fields.split(" ")[2:3] == [number]:
                return file_system_fields.split(" ")[0] in _MEMORY_FILE_SYSTEMS
        return False

    def resolve(self, path: str) -> str:
        """Return a path with symbolic links resolved, or the path itself if it does not exist."""
        location = self.locate(path)
        if location is None or not os.path.exists(location):
            return path
        resolved_path = os.path.realpath(location)
        root = os.path.realpath(str(self.root))
        return (
            "/" + os.path.relpath(resolved_path, root)
            if resolved_path.startswith(root)
            else resolved_path
        )

    def locate(self, path: str) -> Path | None:
        """Return the location of a file on this system; None for a system without files."""
        return None if self.root is None else self.root / path.lstrip("/")


SYSTEM = Files(Path("/"))
NO_FILES = Unavailable("the machine is simulated")


def attempt(read: Callable[[], _T]) -> _T | Unavailable:
    """Return the result of a function, or Unavailable if it raises, so that other facts are still read."""
    try:
        return read()
    except Exception as error:  # noqa: BLE001 any error is reported instead of the fact
        return Unavailable(f"reading failed: {type(error).__name__}: {error}")
