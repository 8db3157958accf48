"""Storage: transfers between files and device memory."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol, TypeAlias

from cudakit.gpu.api.values import Ptr

# How a library moves the data. direct: from the drive to device memory (GPUDirect Storage); compatibility:
# through host memory, as cuFile does without its kernel driver or for file systems that do not support it.
StoragePath: TypeAlias = Literal["direct", "compatibility", "unknown"]


class StorageFile(Protocol):
    """An open file. Any thread may transfer; offsets and sizes are multiples of 4096 bytes."""

    def read(self, ptr: Ptr, size_bytes: int, file_offset: int) -> None:
        """Read bytes of the file to device memory, and wait. Raises EnvironmentUnusable if that fails."""

    def write(self, ptr: Ptr, size_bytes: int, file_offset: int) -> None:
        """Write device memory to the file, and wait. Raises EnvironmentUnusable if that fails."""

    def close(self) -> None:
        """Close the file. A second call does nothing."""


class Storage(Protocol):
    """A library that transfers between files and device memory."""

    @property
    def version(self) -> str:
        """Version of the library."""

    def open(self, path: Path, *, writable: bool, direct: bool) -> StorageFile:
        """Open a file; ``direct`` opens it with O_DIRECT. Raises Unsupported if the library refuses that."""

    def register(self, ptr: Ptr, size_bytes: int) -> None:
        """Register device memory until ``close``, so that transfers from and to the memory are faster."""

    def path_used(self) -> StoragePath:
        """Return how the transfers so far were performed."""

    def close(self) -> None:
        """Release the library. A second call does nothing."""
