"""A cache of compiled kernels on disk.

The file name is a hash of compiler, target, options and source; the content is a SHA-256 checksum followed by
the image. Read and write errors are ignored: an unreadable image is compiled again.

Images run on the GPU, so an image is read only if no other user can have written it: its directory and its
file belong to this user, are no symbolic links, and are not writable by the group or by others.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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
        """Return an image; None if it is missing or damaged, or if another user can have written it."""
        try:
            with self._open_directory() as directory:
                # A pipe would block without O_NONBLOCK.
                flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                with open(os.open(_file_name(key), flags, dir_fd=directory), "rb") as file:
                    _check_owner(file.fileno(), stat.S_IFREG)
                    content = file.read()
        except OSError:
            return None
        digest, image = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return image if image and sha256(image).digest() == digest else None

    def keep(self, key: str, image: bytes) -> None:
        """Store an image atomically, and delete the oldest images above the limit."""
        with suppress(OSError):
            _make_private_directories(self.directory)
            with self._open_directory() as directory:
                _write_atomically(directory, _file_name(key), sha256(image).digest() + image)
                _delete_oldest(directory)

    @contextmanager
    def _open_directory(self) -> Iterator[int]:
        """Open the directory. Raises OSError if another user can have written in it."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        directory = os.open(self.directory, flags)
        try:
            _check_owner(directory, stat.S_IFDIR)
            yield directory
        finally:
            os.close(directory)


def _file_name(key: str) -> str:
    return f"{key}{_SUFFIX}"


def _check_owner(file: int, file_type: int) -> None:
    """Raise PermissionError unless an open file has this type, and only this user can write it."""
    status = os.fstat(file)
    is_private = status.st_uid == os.geteuid() and not status.st_mode & (
        stat.S_IWGRP | stat.S_IWOTH
    )
    if stat.S_IFMT(status.st_mode) != file_type or not is_private:
        raise PermissionError("another user can have written this")


def _make_private_directories(path: Path) -> None:
    """Make a directory and its missing parents, for this user only."""
    for directory in (*reversed(path.parents), path):
        if not directory.exists():
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)


def _write_atomically(directory: int, name: str, content: bytes) -> None:
    partial = f"tmp{os.getpid()}-{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    handle = os.open(partial, flags, 0o600, dir_fd=directory)
    try:
        with open(handle, "wb") as file:
            file.write(content)
        os.replace(partial, name, src_dir_fd=directory, dst_dir_fd=directory)
    except BaseException:
        os.unlink(partial, dir_fd=directory)
        raise


def _delete_oldest(directory: int) -> None:
    names = [name for name in os.listdir(directory) if name.endswith(_SUFFIX)]
    if len(names) > _MAX_FILES:
        names.sort(key=lambda name: os.stat(name, dir_fd=directory).st_mtime_ns)
        for name in names[:-_MAX_FILES]:
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory)


def cache_key(compiler: str, target: str, options: Sequence[str], source: str) -> str:
    """Return the cache key of a compilation."""
    key_parts = (_FORMAT, compiler, target, *options, source)
    return sha256(
        b"".join(_length_prefixed(key_part.encode()) for key_part in key_parts)
    ).hexdigest()


def user_cache(variables: Mapping[str, str]) -> CompileCache | None:
    """Return the cache in the user's XDG cache directory; None if there is no home directory."""
    cache_home = variables.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache_home):  # the XDG Base Directory Specification ignores relative paths
        return CompileCache(Path(cache_home) / "cudakit" / "kernels")
    try:
        return CompileCache(Path.home() / ".cache" / "cudakit" / "kernels")
    except RuntimeError:
        return None


def _length_prefixed(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content
