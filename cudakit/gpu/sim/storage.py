"""Simulated storage: transfers of real files through host memory, as by cuFile in compatibility mode."""

from __future__ import annotations

import os
from pathlib import Path

from cudakit.errors import StorageError
from cudakit.gpu.api import LEGACY, Memory, Ptr
from cudakit.gpu.api.storage import StoragePath


class SimStorage:
    """Storage of a simulated device; ``memory`` is the memory of the device."""

    version = "simulated"

    def __init__(self, memory: Memory) -> None:
        self._memory = memory

    def open(self, path: Path, *, writable: bool, direct: bool) -> SimStorageFile:  # noqa: ARG002
        """Open a file, always without O_DIRECT."""
        return SimStorageFile(self._memory, path, writable=writable)

    def register(self, buffer: Ptr, size_bytes: int) -> bool:  # noqa: ARG002
        """Return False: simulated transfers go through host memory."""
        return False

    def path_used(self) -> StoragePath:
        """Return "compatibility": all data passes through host memory."""
        return "compatibility"

    def close(self) -> None:
        """Do nothing: simulated storage holds no resources."""


class SimStorageFile:
    """A file whose bytes are staged in host memory."""

    def __init__(self, memory: Memory, path: Path, *, writable: bool) -> None:
        self._memory = memory
        self._file = path.open("r+b" if writable else "rb", buffering=0)

    def read(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Read bytes of the file to device memory, and wait."""
        staging_ptr = self._memory.host_malloc(size_bytes, pinned=False)
        try:
            view = self._memory.host_view(staging_ptr, size_bytes)
            read_bytes = os.preadv(self._file.fileno(), [view], file_offset)
            view.release()
            _check_complete(read_bytes, size_bytes, file_offset)
            self._memory.copy(Ptr(buffer + buffer_offset), staging_ptr, size_bytes, LEGACY)
        finally:
            self._memory.host_free(staging_ptr)

    def write(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Write device memory to the file, and wait."""
        staging_ptr = self._memory.host_malloc(size_bytes, pinned=False)
        try:
            self._memory.copy(staging_ptr, Ptr(buffer + buffer_offset), size_bytes, LEGACY)
            view = self._memory.host_view(staging_ptr, size_bytes)
            written_bytes = os.pwritev(self._file.fileno(), [view], file_offset)
            view.release()
        finally:
            self._memory.host_free(staging_ptr)
        _check_complete(written_bytes, size_bytes, file_offset)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _check_complete(transferred_bytes: int, size_bytes: int, file_offset: int) -> None:
    if transferred_bytes != size_bytes:
        raise StorageError(
            f"the file has {transferred_bytes} of {size_bytes} bytes at offset {file_offset}"
        )
