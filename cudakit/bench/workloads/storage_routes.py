"""The two routes of data between a file and device memory: cuFile, and pread or pwrite with a copy."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass
from typing import Protocol

from cudakit.bench.case import create_stream
from cudakit.bench.data_file import DataFile
from cudakit.bench.labels import Axis
from cudakit.errors import StorageError
from cudakit.gpu.api import Gpu, Ptr, StoragePath

POSIX = "posix"  # Name of the baseline in results.

# Maximum number of transfers, and of bytes, of one thread in an execution: large enough that the start of
# threads is negligible, and small enough that a sample is short.
_MAX_TRANSFERS = 64
_BYTES_PER_THREAD = 16 << 20
_PATH_TEXTS: Mapping[StoragePath, str] = {
    "direct": "GPUDirect Storage",
    "compatibility": "compatibility mode: through host memory",
    "unknown": "unknown path",
}


@dataclass(frozen=True, slots=True)
class FileTransfer:
    """Transfers between a file and device memory. Each thread makes several transfers in one execution."""

    file: DataFile
    direction: str  # "read" (file to device) or "write" (device to file).
    pattern: str  # Order of the file offsets: "sequential" or "random".
    size_bytes: int  # Bytes of one transfer.
    threads: int  # Number of threads that transfer at the same time.

    @property
    def transfers_per_thread(self) -> int:
        """Number of transfers of each thread in one execution."""
        transfers_in_half = self.slots_per_half // self.threads
        return max(1, min(_MAX_TRANSFERS, _BYTES_PER_THREAD // self.size_bytes, transfers_in_half))

    @property
    def slots_per_half(self) -> int:
        """Number of transfers that fit into half of the file."""
        return self.file.size_bytes // (2 * self.size_bytes)

    @property
    def bytes_per_execution(self) -> int:
        """Bytes that all threads transfer in one execution."""
        return self.size_bytes * self.threads * self.transfers_per_thread


class Route(Protocol):
    """Transfers data of one thread between the file and a buffer in device memory."""

    def read(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Read a part of the file to a part of the buffer, and wait for the end of the transfer."""

    def write(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Write a part of the buffer to the file, and wait for the end of the transfer."""


class RouteFactory(Protocol):
    """Opens a Route for each thread. ``settings`` describes the data path after the first transfers."""

    routes: list[Route]

    @property
    def settings(self) -> Mapping[str, Axis]: ...


class CuFileRoute:
    """cuFile's reads and writes; all threads share one open file.

    Registration prepares device memory for direct transfers of the drive (cuFile API Reference Guide,
    cuFileBufRegister). In compatibility mode cuFile copies through host memory, and registered buffers are
    slower (docs/explanation/performance.md), so buffers are registered for direct transfers only.
    """

    def __init__(
        self, gpu: Gpu, transfer: FileTransfer, buffers: list[Ptr], cleanup: ExitStack
    ) -> None:
        self._storage = cleanup.enter_context(closing(gpu.storage()))
        file = self._storage.open(
            transfer.file.path,
            writable=transfer.direction == "write",
            direct=transfer.file.has_direct_io,
        )
        cleanup.callback(file.close)
        file.read(buffers[0], 0, transfer.size_bytes, 0)  # The data path is known after a transfer.
        self._path = self._storage.path_used()
        buffer_bytes = transfer.size_bytes * transfer.transfers_per_thread
        self._has_registered_buffers = self._path != "compatibility" and all(
            self._storage.register(buffer, buffer_bytes) for buffer in buffers
        )
        self.routes: list[Route] = [file] * transfer.threads

    @property
    def settings(self) -> Mapping[str, Axis]:
        """The version of cuFile, the path of the data, and whether the buffers are registered with cuFile."""
        return {
            "library": "cufile",
            "version": self._storage.version,
            "path": _PATH_TEXTS[self._path],
            "buffers": "registered buffers"
            if self._has_registered_buffers
            else "unregistered buffers",
        }


class PosixRoute:
    """pread and pwrite, with a pinned buffer and a stream for each thread."""

    def __init__(
        self, gpu: Gpu, transfer: FileTransfer, buffers: list[Ptr], cleanup: ExitStack
    ) -> None:
        open_flags = os.O_RDWR if transfer.direction == "write" else os.O_RDONLY
        direct_flag = os.O_DIRECT if transfer.file.has_direct_io else 0
        try:
            descriptor = os.open(transfer.file.path, open_flags | direct_flag)
        except OSError as error:
            raise StorageError(
                f"{transfer.file.path} cannot be opened: {error.strerror}"
            ) from error
        cleanup.callback(os.close, descriptor)
        self.routes: list[Route] = [
            _StagedFile(gpu, descriptor, transfer.size_bytes, cleanup) for _ in buffers
        ]

    @property
    def settings(self) -> Mapping[str, Axis]:
        """The path of the data, for the report."""
        return {"library": POSIX, "path": "copied through pinned host memory"}


class _StagedFile:
    """A file whose bytes pass through one pinned buffer."""

    def __init__(self, gpu: Gpu, descriptor: int, size_bytes: int, cleanup: ExitStack) -> None:
        self._gpu, self._descriptor = gpu, descriptor
        self._staging_buffer = gpu.host_malloc(size_bytes)
        cleanup.callback(gpu.host_free, self._staging_buffer)
        self._view = gpu.host_view(self._staging_buffer, size_bytes)
        cleanup.callback(self._view.release)
        self._stream = create_stream(gpu, cleanup)

    def read(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        self._transfer_all(os.preadv, size_bytes, file_offset)
        self._gpu.copy(Ptr(buffer + buffer_offset), self._staging_buffer, size_bytes, self._stream)
        self._gpu.sync_stream(self._stream)

    def write(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        self._gpu.copy(self._staging_buffer, Ptr(buffer + buffer_offset), size_bytes, self._stream)
        self._gpu.sync_stream(self._stream)
        self._transfer_all(os.pwritev, size_bytes, file_offset)

    def _transfer_all(self, call: Callable[..., int], size_bytes: int, file_offset: int) -> None:
        total_bytes = 0
        while total_bytes < size_bytes:
            remaining_view = self._view[total_bytes:size_bytes]
            reason = "end of the file"
            try:
                transferred_bytes = call(
                    self._descriptor, [remaining_view], file_offset + total_bytes
                )
            except OSError as error:
                transferred_bytes, reason = 0, str(error.strerror)
            if transferred_bytes <= 0:
                raise StorageError(
                    f"{call.__name__} moved {total_bytes} of {size_bytes} bytes at offset "
                    f"{file_offset}: {reason}"
                )
            total_bytes += transferred_bytes
