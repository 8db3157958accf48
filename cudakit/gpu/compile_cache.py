"""A cache of compiled kernels on disk.

The file name is a hash of compiler, target, options and source; the content is a SHA-256 checksum followed by
the image. Read and write errors are ignored: an unreadable image is compiled again.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

_FORMAT = "cudakit compiled kernels 1"  # format version, part of each key
_DIGEST_BYTES = 32
_SUFFIX = ".image"
# Maximum number of images, because programs may generate any number of sources.
_MAX_FILES = 512


@dataclass(frozen=True, slots=True)
class CompileCache:
    """Compiled images by key, in a directory that is created at the first write."""

    directory: Path

    def get(self, key: str) -> bytes | None:
        """Return an image; None if it is missing or damaged."""
        try:
            content = self._path(key).read_bytes()
        except OSError:
            return None
        digest, image = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return image if image and sha256(image).digest() == digest else None

    def keep(self, key: str, image: bytes) -> None:
        """Store an image atomically, and delete the oldest images above the limit."""
        with suppress(OSError):
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._write_atomically(self._path(key), sha256(image).digest() + image)
            self._delete_oldest()

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}{_SUFFIX}"

    def _write_atomically(self, path: Path, content: bytes) -> None:
        handle, name = tempfile.mkstemp(dir=self.directory)
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(content)
            Path(name).replace(path)
        except BaseException:
            Path(name).unlink(missing_ok=True)
            raise

    def _delete_oldest(self) -> None:
        paths = [*self.directory.glob(f"*{_SUFFIX}")]
        if len(paths) > _MAX_FILES:
            paths.sort(key=lambda path: path.stat().st_mtime_ns)
            for path in paths[:-_MAX_FILES]:
                path.unlink(missing_ok=True)


def cache_key(compiler: str, target: str, options: Sequence[str], source: str) -> str:
    """Return the cache key of a compilation."""
    parts = (_FORMAT, compiler, target, *options, source)
    return sha256(b"".join(_length_prefixed(part.encode()) for part in parts)).hexdigest()


def user_cache(variables: Mapping[str, str]) -> CompileCache | None:
    """Return the cache in the user's XDG cache directory; None if there is no home directory."""
    cache_home = variables.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache_home):  # the XDG Base Directory Specification ignores relative paths
        return CompileCache(Path(cache_home) / "cudakit" / "kernels")
    try:
        return CompileCache(Path.home() / ".cache" / "cudakit" / "kernels")
    except RuntimeError:
        return None


def _length_prefixed(part: bytes) -> bytes:
    return len(part).to_bytes(8, "little") + part
