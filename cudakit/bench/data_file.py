"""Files of known content, for benchmarks of storage."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cudakit.errors import InputError
from cudakit.input_files import read_error
from cudakit.units import format_bytes

# O_DIRECT needs offsets, sizes and addresses that are multiples of the block size of the drive: 512 or 4096
# bytes (open(2), "O_DIRECT").
BLOCK_BYTES = 4096
_CHUNK_BYTES = 16 << 20
# Odd constant whose multiples are spread over all 64-bit numbers: 2**64 divided by the golden ratio.
_SPREADING_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file whose content is a function of the offset and a seed."""

    path: Path
    size_bytes: int
    seed: int
    has_direct_io: bool  # Whether O_DIRECT bypasses the page cache.

    def expected_bytes(self, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
        """Return the bytes at an offset; offset and size are multiples of 8."""
        return content(self.seed, offset, size_bytes)


def content(seed: int, offset: int, size_bytes: int) -> npt.NDArray[np.uint8]:
    """Return the bytes at an offset of the file that a seed determines."""
    first_word = offset // _WORD_BYTES
    words = np.arange(first_word, first_word + size_bytes // _WORD_BYTES, dtype=np.uint64)
    with np.errstate(over="ignore"):
        return ((words + np.uint64(seed)) * _SPREADING_FACTOR).view(np.uint8)


@contextmanager
def temporary_data_file(
    directory: Path, size_bytes: int, seed: int, *, in_memory: bool = False
) -> Iterator[DataFile]:
    """Write a file of known content to a directory, and delete it at the end.

    ``in_memory`` is true if the file system of the directory keeps its files in host memory, as tmpfs does.
    O_DIRECT then bypasses no page cache, although tmpfs accepts the flag.

    Raises InputError if the directory is missing, cannot be written to, or has too little space.
    """
    _check_directory(directory, size_bytes)
    try:
        descriptor, file_name = tempfile.mkstemp(prefix="cudakit-bench-gds-", dir=directory)
    except OSError as error:
        raise InputError(
            f"no file can be written to {directory}: {error.strerror}",
            hint="name another directory with --path",
        ) from error
    path = Path(file_name)
    try:
        _write_content(descriptor, path, size_bytes, seed)
        yield DataFile(path, size_bytes, seed, not in_memory and _supports_direct_io(path))
    finally:
        path.unlink(missing_ok=True)


def _check_directory(directory: Path, size_bytes: int) -> None:
    if not directory.is_dir():
        if directory.exists():
            raise InputError(f"{directory} is not a directory", hint="name a directory with --path")
        raise read_error(directory, FileNotFoundError(), hint="name a directory with --path")
    disk_usage = shutil.disk_usage(directory)
    free_bytes = disk_usage.free
    # File systems without a size, such as ramfs, report 0 bytes in total.
    if disk_usage.total and size_bytes > free_bytes:
        raise InputError(
            f"the file needs {format_bytes(size_bytes)}, but only "
            f"{format_bytes(free_bytes)} is free in {directory.resolve()}",
            hint="choose a smaller --file-size, or another directory with --path",
        )


def _write_content(descriptor: int, path: Path, size_bytes: int, seed: int) -> None:
    """Write the content to the drive, not only to the page cache."""
    try:
        with os.fdopen(descriptor, "wb", buffering=0) as file:
            for offset in range(0, size_bytes, _CHUNK_BYTES):
                chunk = content(seed, offset, min(_CHUNK_BYTES, size_bytes - offset)).data
                while chunk:
                    chunk = chunk[file.write(chunk) or 0 :]
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    except OSError as error:
        raise InputError(
            f"{path} cannot be written: {error.strerror}",
            hint="choose a smaller --file-size, or another directory with --path",
        ) from error


def _supports_direct_io(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
    except OSError:  # EINVAL: the file system does not support O_DIRECT (open(2)).
        return False
    return True
