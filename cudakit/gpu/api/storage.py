"""Storage: transfers between files and device memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from cudakit.gpu.api.values import Ptr

# How a library moves the data. direct: from the drive to device memory (GPUDirect Storage); compatibility:
# through host memory, as cuFile does without its kernel driver or for file systems that do not support it.
StoragePath: TypeAlias = Literal["direct", "compatibility", "unknown"]


class StorageFile(Protocol):
    """An open file. Any thread may transfer; offsets and sizes are multiples of 4096 bytes.

    ``buffer`` is the address of device memory; if the memory is registered, the address at which it was
    registered.
    """

    def read(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Read bytes of the file to device memory, and wait. Raises StorageError if that fails."""

    def write(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Write device memory to the file, and wait. Raises StorageError if that fails."""

    def close(self) -> None:
        """Close the file. A second call does nothing."""


class Storage(Protocol):
    """A library that transfers between files and device memory."""

    @property
    def version(self) -> str:
        """Version of the library."""

    def open(self, path: Path, *, writable: bool, direct: bool) -> StorageFile:
        """Open a file; ``direct`` opens it with O_DIRECT. Raises Unsupported if the library refuses that."""

    def register(self, buffer: Ptr, size_bytes: int) -> bool:
        """Register device memory until ``close`` for direct transfers; return whether that worked."""

    def path_used(self) -> StoragePath:
        """Return how the transfers so far were performed."""

    def close(self) -> None:
        """Release the library. A second call does nothing."""
