"""Benchmark of storage: cuFile (GPUDirect Storage) beside pread or pwrite with a copy through host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from itertools import chain, product
from typing import ClassVar

import numpy as np

from cudakit.arrays.fill import Fill
from cudakit.bench.case import POISON, Case, Verification, allocate, verification
from cudakit.bench.data_file import BLOCK_BYTES, DataFile
from cudakit.bench.labels import Axis
from cudakit.bench.roofline import Work
from cudakit.bench.spec import Spec, check_names, check_not_empty, check_range, check_sizes
from cudakit.bench.workloads.storage_routes import (
    POSIX,
    CuFileRoute,
    FileTransfer,
    PosixRoute,
    Route,
    RouteFactory,
)
from cudakit.errors import InputError
from cudakit.gpu.api import LEGACY, DeviceInfo, Gpu, Ptr, Stream
from cudakit.units import format_bytes

# Directions and orders of transfers between files and device memory.
STORAGE_DIRECTIONS = ("read", "write")
PATTERNS = ("sequential", "random")
_MAX_THREADS = 1024
_SIZES_BYTES = (64 << 10, 1 << 20, 16 << 20)
_THREADS = (1, 8)
_SIMULATED_SIZES_BYTES = (4 << 10, 64 << 10)
_SIMULATED_THREADS = (1, 2)
_RANDOM_BLOCK_BYTES = 16  # The kernel generates random bits in blocks of this size.
_PAGE_CACHE_BYPASSED = "page cache bypassed by O_DIRECT"
_PAGE_CACHE_USED = "page cache used"
_REFERENCE = "the content of the file"


@dataclass(frozen=True, slots=True, kw_only=True)
class GdsSpec(Spec):
    """Options of ``cudakit bench gds``."""

    bench: ClassVar[str] = "gds"

    rounds: int = 2
    files: Mapping[str, DataFile]  # The file of each direction that is measured.
    patterns: tuple[str, ...] = PATTERNS
    # Sizes of a transfer in bytes, and numbers of threads. None: several sizes or numbers are measured.
    sizes_bytes: tuple[int, ...] | None = None
    threads: tuple[int, ...] | None = None

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions to measure."""
        return tuple(self.files)

    def cases(self, gpu: DeviceInfo) -> tuple[Case, ...]:
        return gds_cases(self, gpu)

    def __post_init__(self) -> None:
        Spec.__post_init__(self)
        check_names("direction", self.directions, STORAGE_DIRECTIONS)
        check_names("pattern", self.patterns, PATTERNS)
        check_sizes(self.sizes_bytes, BLOCK_BYTES)
        check_not_empty("threads", self.threads)
        for thread_count in self.threads or ():
            check_range("--threads", thread_count, 1, _MAX_THREADS)


def gds_cases(spec: GdsSpec, gpu: DeviceInfo) -> tuple[Case, ...]:
    """Return a case per direction, pattern, size and number of threads.

    Raises InputError if the file is smaller than the transfers of one case.
    """
    sizes_bytes = spec.sizes_bytes or (_SIMULATED_SIZES_BYTES if gpu.simulated else _SIZES_BYTES)
    thread_counts = spec.threads or (_SIMULATED_THREADS if gpu.simulated else _THREADS)
    # Simulated host memory is not aligned to pages, as O_DIRECT needs.
    files = {
        direction: replace(file, has_direct_io=file.has_direct_io and not gpu.simulated)
        for direction, file in spec.files.items()
    }
    return tuple(
        _case(spec, Transfer(files[direction], direction, pattern, size_bytes, threads))
        for direction, pattern, size_bytes, threads in product(
            spec.directions, spec.patterns, sizes_bytes, thread_counts
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
        baselines=(PosixTransfer(transfer),),
        settings={"library": "cufile"},
    )


@dataclass(frozen=True, slots=True)
class Transfer(FileTransfer):
    """Transfers between a file and device memory by cuFile."""

    name: str = "gds"

    @property
    def axes(self) -> Mapping[str, Axis]:
        return {
            "direction": self.direction,
            "pattern": self.pattern,
            "size_bytes": self.size_bytes,
            "threads": self.threads,
        }

    def prepare(self, gpu: Gpu, seed: int) -> PreparedTransfer:
        return PreparedTransfer(gpu, self, seed, CuFileRoute)


@dataclass(frozen=True, slots=True)
class PosixTransfer:
    """Transfers between a file and device memory by pread or pwrite, through pinned host memory."""

    transfer: Transfer
    library: str = POSIX

    @property
    def name(self) -> str:
        return self.transfer.name

    @property
    def axes(self) -> Mapping[str, Axis]:
        return self.transfer.axes

    def prepare(self, gpu: Gpu, seed: int) -> PreparedTransfer:
        return PreparedTransfer(gpu, self.transfer, seed, PosixRoute)


class PreparedTransfer:
    """The buffers, threads and file offsets of a case.

    Each execution continues at the next part of the file, so that caches of the drive are of little use.
    """

    footprint_bytes = 0
    operations = 0

    def __init__(
        self,
        gpu: Gpu,
        transfer: Transfer,
        seed: int,
        open_route: Callable[[Gpu, Transfer, list[Ptr], ExitStack], RouteFactory],
    ) -> None:
        self._gpu, self._transfer, self._seed = gpu, transfer, seed
        self._bytes_per_thread = transfer.size_bytes * transfer.transfers_per_thread
        self.bytes_moved = transfer.bytes_per_execution
        self._transfer_count = transfer.threads * transfer.transfers_per_thread
        self._random = np.random.default_rng(seed)
        # Each implementation uses one half of the file, because samples of both alternate.
        self._slot_count = transfer.slots_per_half
        self._first_slot = self._slot_count if open_route is PosixRoute else 0
        self._next_slot = 0
        self._last_offsets: list[list[int]] = []
        with ExitStack() as cleanup:
            self._pool = cleanup.enter_context(ThreadPoolExecutor(transfer.threads))
            self._buffers = [
                allocate(gpu, cleanup, self._bytes_per_thread) for _ in range(transfer.threads)
            ]
            self._route = open_route(gpu, transfer, self._buffers, cleanup)
            self._fill()
            self._cleanup = cleanup.pop_all()

    @property
    def settings(self) -> Mapping[str, Axis]:
        """The path of the data, and whether the page cache of the operating system was used."""
        has_direct_io = self._transfer.file.has_direct_io
        return {
            **self._route.settings,
            "page_cache": _PAGE_CACHE_BYPASSED if has_direct_io else _PAGE_CACHE_USED,
            "transfers_per_execution": self._transfer_count,
        }

    def rotate(self, set_count: int) -> None:
        """Do nothing: the L2 state does not matter, because storage is much slower than L2."""

    def enqueue(self, stream: Stream, set_index: int) -> None:  # noqa: ARG002
        """Perform the transfers of one execution, and wait for all."""
        self._last_offsets = self._choose_offsets()
        work_of_threads = list(
            zip(self._route.routes, self._buffers, self._last_offsets, strict=True)
        )
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
                expected_bytes = self._expected_device_bytes(offset)
                wrong_bytes += int(np.count_nonzero(device_bytes != expected_bytes))
        self._poison()
        detail = f"{wrong_bytes} bytes differ" if wrong_bytes else ""
        return verification(float(wrong_bytes > 0), 0.0, _REFERENCE, detail)

    def close(self) -> None:
        """Close the file, end the threads and free the memory."""
        self._cleanup.close()

    def _transfer_of_thread(self, route: Route, buffer: Ptr, offsets: list[int]) -> None:
        """Perform the transfers of one thread."""
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

    def _expected_device_bytes(
        self, offset: int
    ) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
        """Return the bytes that device memory must contain after a transfer at an offset of the file."""
        transfer = self._transfer
        if transfer.direction == "read":
            return transfer.file.expected_bytes(offset, transfer.size_bytes)
        with transfer.file.path.open("rb") as file:
            file.seek(offset)
            return np.frombuffer(file.read(transfer.size_bytes), np.uint8)

    def _read_back(self, ptr: Ptr) -> np.ndarray[tuple[int, ...], np.dtype[np.uint8]]:
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
