"""A cache of compiled kernels on disk.

The file name is a hash of compiler, target, options and source. The content is a SHA-256 checksum, the label
of the image in JSON on one line, and the image. Read and write errors are ignored, unless ``cache warm``
writes the images: an unreadable image is compiled again.

Images run on the GPU, so an image is read only if no other user can have written it: its directory and its
file belong to this user, are no symbolic links, and are not writable by the group or by others.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

_FORMAT_VERSION = "cudakit compiled kernels 2"  # format version, part of each key
_DIGEST_BYTES = 32
_IMAGE_SUFFIX = ".image"
_TEMPORARY_PREFIX = "tmp"


@dataclass(frozen=True, slots=True)
class Label:
    """The content of an image, for people who list the cache."""

    kernels: (
        str  # names of the kernels, separated by commas; with the name of the source, "name: a, b"
    )
    target: str  # architecture of the image, such as "sm_90"
    compiler: str  # compiler and its version, such as "NVRTC 13.0"


@dataclass(frozen=True, slots=True)
class CachedImage:
    """An image in the cache."""

    label: Label
    size_bytes: int  # size of the file
    written_ns: int  # time of the last write, in nanoseconds since 1970


@dataclass(frozen=True, slots=True)
class CompileCache:
    """Compiled images by key, in a directory that is created at the first write.

    The number and the total size of the images are limited, because programs may generate any number of
    sources. Above a limit, the oldest images are deleted.
    """

    directory: Path
    max_images: int = 512
    max_bytes: int = 256 << 20
    reports_errors: bool = False  # whether ``keep`` raises OSError if an image cannot be stored

    def get(self, key: str) -> bytes | None:
        """Return an image; None if it is missing or damaged, or if another user can have written it."""
        try:
            with self._open_directory() as directory_descriptor:
                return _read_image(directory_descriptor, _file_name(key))[1]
        except (OSError, ValueError):
            return None

    def keep(self, key: str, image: bytes, label: Label) -> None:
        """Store an image atomically, and delete the oldest images above the limits.

        Raises OSError only if ``reports_errors`` is true: most callers have the image, and need no cache.
        """
        content = json.dumps(asdict(label)).encode() + b"\n" + image
        with nullcontext() if self.reports_errors else suppress(OSError):
            _make_private_directories(self.directory)
            with self._open_directory() as directory_descriptor:
                _write_atomically(
                    directory_descriptor, _file_name(key), sha256(content).digest() + content
                )
                self._delete_oldest(directory_descriptor)

    def images(self) -> tuple[list[CachedImage], int]:
        """Return the images, newest first, and the number of files that are not usable.

        Raises PermissionError if another user can have written in the directory. A missing directory is an
        empty cache.
        """
        images: list[CachedImage] = []
        unusable_count = 0
        try:
            with self._open_directory() as directory_descriptor:
                for name in _image_names(directory_descriptor):
                    try:
                        label, _ = _read_image(directory_descriptor, name)
                        file_status = os.stat(name, dir_fd=directory_descriptor)
                        images.append(
                            CachedImage(label, file_status.st_size, file_status.st_mtime_ns)
                        )
                    except (OSError, ValueError):
                        unusable_count += 1
        except FileNotFoundError:
            pass
        return sorted(images, key=lambda image: -image.written_ns), unusable_count

    def clear(self) -> tuple[int, int]:
        """Delete all images, and files that an interrupted write left; return their number and size in bytes.

        Raises PermissionError if another user can have written in the directory.
        """
        deleted_count = deleted_bytes = 0
        try:
            with self._open_directory() as directory_descriptor:
                for name in os.listdir(directory_descriptor):
                    if name.endswith(_IMAGE_SUFFIX) or name.startswith(_TEMPORARY_PREFIX):
                        with suppress(FileNotFoundError):
                            deleted_bytes += os.stat(
                                name, dir_fd=directory_descriptor, follow_symlinks=False
                            ).st_size
                            os.unlink(name, dir_fd=directory_descriptor)
                            deleted_count += 1
        except FileNotFoundError:
            pass
        return deleted_count, deleted_bytes

    def _delete_oldest(self, directory_descriptor: int) -> None:
        files = []
        for name in _image_names(directory_descriptor):
            with suppress(FileNotFoundError):
                file_status = os.stat(name, dir_fd=directory_descriptor, follow_symlinks=False)
                files.append((file_status.st_mtime_ns, file_status.st_size, name))
        files.sort(reverse=True)
        total_bytes = 0
        for position, (_, size_bytes, name) in enumerate(files):
            total_bytes += size_bytes
            # The newest image stays, however large it is.
            if position >= self.max_images or (position and total_bytes > self.max_bytes):
                with suppress(FileNotFoundError):
                    os.unlink(name, dir_fd=directory_descriptor)

    @contextmanager
    def _open_directory(self) -> Iterator[int]:
        """Open the directory. Raises OSError if another user can have written in it."""
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        directory_descriptor = os.open(self.directory, flags)
        try:
            _check_owner(directory_descriptor, stat.S_IFDIR)
            yield directory_descriptor
        finally:
            os.close(directory_descriptor)


def _read_image(directory_descriptor: int, name: str) -> tuple[Label, bytes]:
    """Return the label and the image of a file.

    Raises ValueError if the file is damaged, OSError if it is missing or another user can have written it.
    """
    # Without O_NONBLOCK, opening a pipe would block.
    flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    with open(os.open(name, flags, dir_fd=directory_descriptor), "rb") as file:
        _check_owner(file.fileno(), stat.S_IFREG)
        digest, content = file.read(_DIGEST_BYTES), file.read()
    if sha256(content).digest() != digest:
        raise ValueError("the checksum is wrong")
    line, _, image = content.partition(b"\n")
    fields = json.loads(line)
    return Label(fields["kernels"], fields["target"], fields["compiler"]), image


def _image_names(directory_descriptor: int) -> list[str]:
    return [name for name in os.listdir(directory_descriptor) if name.endswith(_IMAGE_SUFFIX)]


def _file_name(key: str) -> str:
    return f"{key}{_IMAGE_SUFFIX}"


def _check_owner(file_descriptor: int, file_type: int) -> None:
    """Raise PermissionError unless an open file has the expected type, and only this user can write it."""
    file_status = os.fstat(file_descriptor)
    only_user_can_write = file_status.st_uid == os.geteuid() and not file_status.st_mode & (
        stat.S_IWGRP | stat.S_IWOTH
    )
    if stat.S_IFMT(file_status.st_mode) != file_type or not only_user_can_write:
        raise PermissionError("another user can have written this")


def _make_private_directories(path: Path) -> None:
    """Make a directory and its missing parents, for this user only."""
    for directory in (*reversed(path.parents), path):
        if not directory.exists():
            with suppress(FileExistsError):
                directory.mkdir(mode=0o700)


def _write_atomically(directory_descriptor: int, name: str, content: bytes) -> None:
    partial_name = f"{_TEMPORARY_PREFIX}{os.getpid()}-{os.urandom(8).hex()}"
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(partial_name, flags, 0o600, dir_fd=directory_descriptor)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        os.replace(
            partial_name, name, src_dir_fd=directory_descriptor, dst_dir_fd=directory_descriptor
        )
    except BaseException:
        os.unlink(partial_name, dir_fd=directory_descriptor)
        raise


def cache_key(compiler: str, target: str, options: Sequence[str], source: str) -> str:
    """Return the cache key of a compilation."""
    key_parts = (_FORMAT_VERSION, compiler, target, *options, source)
    return sha256(
        b"".join(_length_prefixed(key_part.encode()) for key_part in key_parts)
    ).hexdigest()


def user_cache(variables: Mapping[str, str]) -> CompileCache | None:
    """Return the cache in ``CUDAKIT_CACHE_DIR``, or else in the user's XDG cache directory.

    Without both variables and without a home directory there is no cache, and the result is None.
    """
    if directory := variables.get("CUDAKIT_CACHE_DIR", ""):
        return CompileCache(Path(directory).absolute() / "kernels")
    cache_home = variables.get("XDG_CACHE_HOME", "")
    if os.path.isabs(cache_home):  # the XDG Base Directory Specification ignores relative paths
        return CompileCache(Path(cache_home) / "cudakit" / "kernels")
    try:
        return CompileCache(Path.home() / ".cache" / "cudakit" / "kernels")
    except RuntimeError:
        return None


def _length_prefixed(content: bytes) -> bytes:
    return len(content).to_bytes(8, "little") + content
