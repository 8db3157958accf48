"""What a system shows of itself as files: /proc, /dev, /sys, /etc. Reads, and never writes."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path

# Far above what any file here has; some under /proc have no end.
_MOST_PIECES = 64
# /proc/sys refuses reads of 4 MiB and more (KMALLOC_MAX_SIZE).
_PIECE_BYTES = 1 << 16


@dataclass(frozen=True, slots=True)
class Files:
    """The files under ``root``: ``/`` is the running system, None one that shows nothing.

    Paths are absolute, as on the running system. What is absent and what may not be read look alike.
    """

    root: Path | None

    def text(self, path: str) -> str | None:
        """Return the text of a file, without its last newline."""
        place = self.place(path)
        if place is None:
            return None
        try:
            with place.open("rb", buffering=0) as file:
                pieces = takewhile(bool, (file.read(_PIECE_BYTES) for _ in range(_MOST_PIECES)))
                return b"".join(pieces).decode(errors="replace").rstrip("\n")
        except OSError:
            return None

    def names(self, directory: str) -> tuple[str, ...]:
        """Return the sorted names in a directory, none where there is no such directory."""
        place = self.place(directory)
        with suppress(OSError):
            return tuple(sorted(os.listdir(place))) if place else ()
        return ()

    def exists(self, path: str) -> bool:
        place = self.place(path)
        return place is not None and os.path.exists(place)

    def resolve(self, path: str) -> str:
        """Follow symbolic links; a path that leads nowhere is returned as it is."""
        place = self.place(path)
        if place is None or not os.path.exists(place):
            return path
        real = os.path.realpath(place)
        top = os.path.realpath(str(self.root))
        return "/" + os.path.relpath(real, top) if real.startswith(top) else real

    def place(self, path: str) -> Path | None:
        """Return where a file of that path lies, None for files that show nothing."""
        return None if self.root is None else self.root / path.lstrip("/")
