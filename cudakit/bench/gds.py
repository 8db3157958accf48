"""Benchmark of storage: cuFile (GPUDirect Storage) beside pread or pwrite with a copy through host memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, replace
from itertools import chain, product
from pathlib import Path
from typing import ClassVar, Protocol

import numpy as np
import numpy.typing as npt

from cudakit.arrays.fill import Fill
from cudakit.bench.case import (
    POISON,
    Case,
    Verification,
    allocate,
    create_stream,
    verification,
)
from cudakit.bench.labels import Axis
from cudakit.bench.report.table import text_range
from cudakit.bench.result import CaseResult
from cudakit.bench.roofline import Work
from cudakit.bench.spec import (
    Spec,
    check_names,
    check_not_empty,
    check_range,
    check_sizes,
    option,
    sizes_option,
)
from cudakit.bench.words import Words
from cudakit.errors import InputError, StorageError
from cudakit.gpu.api import LEGACY, DeviceInfo, Gpu, Ptr, StoragePath, Stream
from cudakit.input_files import read_error
from cudakit.units import Unavailable, format_bytes

DIRECTIONS = ("read", "write")
PATTERNS = ("sequential", "random")
CUFILE, POSIX = "cufile", "posix"  # The measured library and the baseline.

_SIZES_BYTES = (64 << 10, 1 << 20, 16 << 20)
_THREADS = (1, 8)
_SIMULATED_SIZES_BYTES = (4 << 10, 64 << 10)
_SIMULATED_THREADS = (1, 2)
_MAX_THREADS = 1024
# Maximum number of transfers, and of bytes, of one thread in an execution: large enough that the start of
# threads is negligible, and small enough that a sample is short.
_MAX_TRANSFERS = 64
_BYTES_PER_THREAD = 16 << 20
_RANDOM_BLOCK_BYTES = 16  # The kernel generates random bits in blocks of this size.
_PATH_TEXTS: Mapping[StoragePath, str] = {
    "direct": "GPUDirect Storage",
    "compatibility": "compatibility mode: through host memory",
    "unknown": "unknown path",
}
# O_DIRECT needs offsets, sizes and addresses that are multiples of the block size of the drive: 512 or 4096
# bytes (open(2), "O_DIRECT").
_BLOCK_BYTES = 4096
_CHUNK_BYTES = 16 << 20
# Odd constant whose multiples are spread over all 64-bit numbers: 2**64 divided by the golden ratio.
_SPREADING_FACTOR = np.uint64(0x9E37_79B9_7F4A_7C15)
_WORD_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class GdsSpec(Spec):
    """Options of ``cudakit bench gds``."""

    bench: ClassVar[str] = "gds"

    rounds: int = 2
    files: Mapping[str, DataFile]  # The file of each direction that is measured.
    patterns: tuple[str, ...] = option(
        "--patterns",
        "Order of the file offsets: sequential, random.  [default: both]",
        default=PATTERNS,
        choices=PATTERNS,
    )
    # Sizes of a transfer in bytes, and numbers of threads. None: several sizes or numbers are measured.
    sizes_bytes: tuple[int, ...] | None = sizes_option(
        "Bytes of each transfer", default="64KiB,1MiB,16MiB; with --gpu sim 4KiB,64KiB"
    )
    threads: tuple[int, ...] | None = option(
        "--threads",
        "Numbers of threads that transfer at the same time.  [default: 1,8; with --gpu sim 1,2]",
        kind="counts",
    )

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_names("direction", tuple(self.files), DIRECTIONS)
        check_names("pattern", self.patterns, PATTERNS)
        check_sizes(self.sizes_bytes, _BLOCK_BYTES)
        check_not_empty("threads", self.threads)
        for thread_count in self.threads or ():
            check_range("--threads", thread_count, 1, _MAX_THREADS)

    def cases(self, gpu: DeviceInfo) -> tuple[Case, ...]:
        """Return a case per direction, pattern, size and number of threads.

        Raises InputError if the file is smaller than the transfers of one case.
        """
        sizes_bytes = self.sizes_bytes or (
            _SIMULATED_SIZES_BYTES if gpu.simulated else _SIZES_BYTES
        )
        thread_counts = self.threads or (_SIMULATED_THREADS if gpu.simulated else _THREADS)
        # Simulated host memory is not aligned to pages, as O_DIRECT needs.
        files = {
            direction: replace(file, has_direct_io=file.has_direct_io and not gpu.simulated)
            for direction, file in self.files.items()
        }
        return tuple(
            _case(self, Transfer(files[direction], direction, pattern, size_bytes, threads))
            for direction, pattern, size_bytes, threads in product(
                files, self.patterns, sizes_bytes, thread_counts
            )
        )


def _case(spec: GdsSpec, transfer: Transfer) -> Case:
    if transfer.slots_per_half < transfer.threads:
        needed_bytes = 2 * transfer.size_bytes * transfer.threads
        is_single = transfer.threads == 1
        thread_text = "1 thread" if is_single else f"{transfer.threads} threads"
        raise InputError(
            f"the file of {format_bytes(transfer.file.size_bytes)} is too small: {thread_text} with "
            f"transfers of {format_bytes(transfer.size_bytes)} {'needs' if is_single else 'need'} "
            f"{format_bytes(needed_bytes)}, two transfers per thread",
            hint="choose a larger --file-size, smaller --sizes or fewer --threads",
        )
    # Transfers block the host, so that no blocking kernel can hide the gaps before them.
    method = replace(spec.method("host", "hot", fill="bits"), blocker=False)
    return Case(
        transfer,
        method,
        Work(link_bytes=transfer.bytes_per_execution, link="host"),
        size_bytes=transfer.bytes_per_execution,
        buffers=2,
        host_bytes=transfer.bytes_per_execution,
        baselines=(replace(transfer, library=POSIX),),
        settings={"library": CUFILE},
    )


@dataclass(frozen=True, slots=True)
class Transfer:
    """Transfers between a file and device memory. Each thread makes several transfers in one execution."""

    file: DataFile
    direction: str  # "read" (file to device) or "write" (device to file).
    pattern: str  # Order of the file offsets: "sequential" or "random".
    size_bytes: int  # Bytes of one transfer.
    threads: int  # Number of threads that transfer at the same time.
    library: str = CUFILE
    name: str = "gds"

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {
            "direction": self.direction,
            "pattern": self.pattern,
            "size_bytes": self.size_bytes,
            "threads": self.threads,
        }

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

    def prepare(self, gpu: Gpu, seed: int) -> PreparedTransfer:
        return PreparedTransfer(gpu, self, seed)


class PreparedTransfer:
    """The buffers, threads and file offsets of a case.

    Each execution continues at the next part of the file, so that caches of the drive are of little use.
    """

    footprint_bytes = 0
    operations = 0

    def __init__(self, gpu: Gpu, transfer: Transfer, seed: int) -> None:
        self._gpu, self._transfer, self._seed = gpu, transfer, seed
        self._bytes_per_thread = transfer.size_bytes * transfer.transfers_per_thread
        self.bytes_moved = transfer.bytes_per_execution
        self._transfer_count = transfer.threads * transfer.transfers_per_thread
        self._random = np.random.default_rng(seed)
        # Each implementation uses one half of the file, because samples of both alternate.
        self._slot_count = transfer.slots_per_half
        self._first_slot = self._slot_count if transfer.library == POSIX else 0
        self._next_slot = 0
        self._last_offsets: list[list[int]] = []
        with ExitStack() as cleanup:
            self._pool = cleanup.enter_context(ThreadPoolExecutor(transfer.threads))
            self._buffers = [
                allocate(gpu, cleanup, self._bytes_per_thread) for _ in range(transfer.threads)
            ]
            self._routes, settings = (
                _open_posix(gpu, transfer, cleanup)
                if transfer.library == POSIX
                else _open_cufile(gpu, transfer, self._buffers, cleanup)
            )
            # The path of the data, and whether the page cache of the operating system was used.
            has_direct_io = transfer.file.has_direct_io
            self.settings: Mapping[str, Axis] = {
                **settings,
                "page_cache": "page cache bypassed by O_DIRECT"
                if has_direct_io
                else "page cache used",
                "transfers_per_execution": self._transfer_count,
            }
            self._fill()
            self._cleanup = cleanup.pop_all()

    def rotate(self, set_count: int) -> None:
        """Do nothing: the L2 state does not matter, because storage is much slower than L2."""

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002
        """Perform the transfers of one execution, and wait for all."""
        self._last_offsets = self._choose_offsets()
        work_of_threads = list(zip(self._routes, self._buffers, self._last_offsets, strict=True))
        if self._transfer.threads == 1 or self._gpu.simulated:
            for thread_work in work_of_threads:
                self._transfer_of_thread(*thread_work)
        else:
            for future in [
                self._pool.submit(self._transfer_of_thread, *thread_work)
                for thread_work in work_of_threads
            ]:
                future.result()

    def verify(self) -> Verification:
        """Compare device memory with the content of the file at the last offsets."""
        transfer, wrong_bytes = self._transfer, 0
        for buffer, offsets in zip(self._buffers, self._last_offsets, strict=True):
            for position, offset in enumerate(offsets):
                device_bytes = self._read_back(Ptr(buffer + position * transfer.size_bytes))
                if transfer.direction == "read":
                    expected_bytes = transfer.file.expected_bytes(offset, transfer.size_bytes)
                else:
                    with transfer.file.path.open("rb") as file:
                        file.seek(offset)
                        expected_bytes = np.frombuffer(file.read(transfer.size_bytes), np.uint8)
                wrong_bytes += int(np.count_nonzero(device_bytes != expected_bytes))
        self._poison()
        detail = f"{wrong_bytes} bytes differ" if wrong_bytes else ""
        return verification(float(wrong_bytes > 0), 0.0, "the content of the file", detail)

    def close(self) -> None:
        self._cleanup.close()

    def _transfer_of_thread(self, route: Route, buffer: Ptr, offsets: list[int]) -> None:
        transfer = self._transfer
        transfer_data = route.read if transfer.direction == "read" else route.write
        for position, offset in enumerate(offsets):
            transfer_data(buffer, position * transfer.size_bytes, transfer.size_bytes, offset)

    def _choose_offsets(self) -> list[list[int]]:
        """Return the file offsets of each thread: consecutive parts of the file, or random ones."""
        transfer, transfer_count = self._transfer, self._transfer_count
        if transfer.pattern == "random":
            file_slots = self._random.choice(self._slot_count, transfer_count, replace=False)
        else:
            if self._next_slot + transfer_count > self._slot_count:
                self._next_slot = 0
            file_slots = np.arange(self._next_slot, self._next_slot + transfer_count)
            self._next_slot += transfer_count
        file_slots += self._first_slot
        offsets_by_thread: list[list[int]] = (
            (file_slots * transfer.size_bytes).reshape(transfer.threads, -1).tolist()
        )
        return offsets_by_thread

    def _read_back(self, ptr: Ptr) -> npt.NDArray[np.uint8]:
        size_bytes = self._transfer.size_bytes
        staging_buffer = self._gpu.host_malloc(size_bytes, pinned=False)
        try:
            self._gpu.copy(staging_buffer, ptr, size_bytes, LEGACY)
            self._gpu.sync()
            view = self._gpu.host_view(staging_buffer, size_bytes)
            device_bytes = np.frombuffer(view, np.uint8).copy()
            view.release()
        finally:
            self._gpu.host_free(staging_buffer)
        return device_bytes

    def _fill(self) -> None:
        """Fill device memory with random bits for writes, and with POISON for reads."""
        if self._transfer.direction == "read":
            self._poison()
            return
        with closing(Fill(self._gpu)) as fill:
            for thread_number, buffer in enumerate(self._buffers):
                block_count = self._bytes_per_thread // _RANDOM_BLOCK_BYTES
                fill.bits(buffer, block_count, LEGACY, seed=self._seed, sequence=thread_number)
            self._gpu.sync()

    def _poison(self) -> None:
        """Overwrite the targets of the last transfers, so that transfers that did nothing are found."""
        transfer = self._transfer
        if transfer.direction == "read":
            for buffer in self._buffers:
                self._gpu.fill(buffer, POISON, self._bytes_per_thread, LEGACY)
            self._gpu.sync()
            return
        with transfer.file.path.open("r+b") as file:
            for offset in chain.from_iterable(self._last_offsets):
                file.seek(offset)
                file.write(bytes([POISON]) * transfer.size_bytes)


# --- the two routes of the data ---------------------------------------------------------------------


class Route(Protocol):
    """Transfers data of one thread between the file and a buffer in device memory."""

    def read(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Read a part of the file to a part of the buffer, and wait for the end of the transfer."""

    def write(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        """Write a part of the buffer to the file, and wait for the end of the transfer."""


def _open_cufile(
    gpu: Gpu, transfer: Transfer, buffers: list[Ptr], cleanup: ExitStack
) -> tuple[list[Route], dict[str, Axis]]:
    """Return the Route of each thread, which is one file that cuFile opened, and settings for the report.

    Registration prepares device memory for direct transfers of the drive (cuFile API Reference Guide,
    cuFileBufRegister). In compatibility mode cuFile copies through host memory, and registered buffers are
    slower (docs/explanation/performance.md), so buffers are registered for direct transfers only.
    """
    storage = cleanup.enter_context(closing(gpu.storage()))
    file = storage.open(
        transfer.file.path,
        writable=transfer.direction == "write",
        direct=transfer.file.has_direct_io,
    )
    cleanup.callback(file.close)
    file.read(buffers[0], 0, transfer.size_bytes, 0)  # The data path is known after a transfer.
    path = storage.path_used()
    buffer_bytes = transfer.size_bytes * transfer.transfers_per_thread
    are_registered = path != "compatibility" and all(
        storage.register(buffer, buffer_bytes) for buffer in buffers
    )
    return [file] * transfer.threads, {
        "library": CUFILE,
        "version": storage.version,
        "path": _PATH_TEXTS[path],
        "buffers": "registered buffers" if are_registered else "unregistered buffers",
    }


def _open_posix(
    gpu: Gpu, transfer: Transfer, cleanup: ExitStack
) -> tuple[list[Route], dict[str, Axis]]:
    """Return a Route per thread, with a pinned buffer and a stream, and settings for the report."""
    open_flags = os.O_RDWR if transfer.direction == "write" else os.O_RDONLY
    direct_flag = os.O_DIRECT if transfer.file.has_direct_io else 0
    try:
        descriptor = os.open(transfer.file.path, open_flags | direct_flag)
    except OSError as error:
        raise StorageError(f"{transfer.file.path} cannot be opened: {error.strerror}") from error
    cleanup.callback(os.close, descriptor)
    routes: list[Route] = [
        _StagedFile(gpu, descriptor, transfer.size_bytes, cleanup) for _ in range(transfer.threads)
    ]
    return routes, {"library": POSIX, "path": "copied through pinned host memory"}


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


# --- the file ---------------------------------------------------------------------------------------


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
        has_direct_io = not in_memory
        if has_direct_io:
            try:
                os.close(os.open(path, os.O_RDONLY | os.O_DIRECT))
            except OSError:  # EINVAL: the file system does not support O_DIRECT (open(2)).
                has_direct_io = False
        yield DataFile(path, size_bytes, seed, has_direct_io)
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


# --- the report ---------------------------------------------------------------------------------------


def _explain_sizes(cases: Sequence[CaseResult]) -> str:
    counts = [
        round(case.bytes_moved) // int(case.axes["size_bytes"])
        for case in cases
        if not isinstance(case.median_s, Unavailable)
    ]
    span = f" ({text_range(f'{min(counts):,}', f'{max(counts):,}')})" if counts else ""
    return f"Size: of one transfer. Time: of all transfers of a sample{span}."


GdsSpec.words = Words(size=_explain_sizes, always_rate=True)
