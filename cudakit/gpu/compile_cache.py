"""Compiled kernels on disk, so that a source is compiled once per architecture.

A file is named by what went into it, and holds a SHA-256 of the rest of itself and the machine code. The
cache helps where it can and is never in the way: what cannot be read is compiled, what cannot be written
is forgotten.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

_FORM = "cudakit compiled kernels 1"  # of files and their names
_DIGEST_BYTES = 32
_SUFFIX = ".image"
# Sources generated per shape must not fill the disk.
_MOST_FILES = 512


@dataclass(frozen=True, slots=True)
class CompileCache:
    """Images by key in a directory, which is created with the first image."""

    directory: Path

    def get(self, key: str) -> bytes | None:
        """Return an image; None without one, or for a damaged file."""
        try:
            content = self._place(key).read_bytes()
        except OSError:
            return None
        digest, image = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return image if image and sha256(image).digest() == digest else None

    def keep(self, key: str, image: bytes) -> None:
        """Keep an image, written atomically; the oldest images are deleted."""
        with suppress(OSError):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._replace(self._place(key), sha256(image).digest() + image)
            self._make_room()

    def _place(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _replace(self, place: Path, content: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self.directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(name).replace(place)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _make_room(self) -> None:
        places = [*self.directory.glob(f"*{_SUFFIX}")]
        if len(places) > _MOST_FILES:
            places.sort(key=lambda place: place.stat().st_mtime_ns)
            for place in places[:-_MOST_FILES]:
                place.unlink(missing_ok=True)


def cache_key(compiler: str, target: str, options: Sequence[str], source: str) -> str:
    """Return the key of a source: equal keys mean equal images."""
    parts = (_FORM, compiler, target, *options, source)
    return sha256(b"".join(_counted(part.encode()) for part in parts)).hexdigest()


def user_cache(variables: Mapping[str, str]) -> CompileCache | None:
    """Return the cache of this user, by the XDG Base Directory Specification; None without a home."""
    named = variables.get("XDG_CACHE_HOME", "")
    if os.path.isabs(named):  # by the specification, relative paths are ignored
        return CompileCache(Path(named) / "cudakit" / "kernels")
    try:
        return CompileCache(Path.home() / ".cache" / "cudakit" / "kernels")
    except RuntimeError:
        return None


def _counted(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part
