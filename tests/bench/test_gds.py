""""""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.gds import (
    DIRECTIONS,
    PATTERNS,
    DataFile,
    GdsSpec,
    PreparedTransfer,
    Transfer,
    content,
    temporary_data_file,
)
from cudakit.bench.pipeline import run
from cudakit.bench.result import CaseResult
from cudakit.errors import InputError, Unsupported
from cudakit.gpu.api import LEGACY, Gpu, Ptr, StoragePath
from cudakit.gpu.sim import Sim
from cudakit.gpu.sim.device import SimStorage, SimStorageFile
from cudakit.units import Unavailable

KIB = 1 << 10
MIB = 1 << 20


@pytest.fixture
def file(tmp_path: Path) -> Iterator[DataFile]:
    with temporary_data_file(tmp_path, MIB, 3) as data_file:
        yield data_file


def measure(gpu: Gpu, file: DataFile, direction: str, **options: Any) -> tuple[CaseResult, ...]:
    options = {"sizes_bytes": (64 * KIB,), "threads": (2,)} | options
    return run(GdsSpec(files={direction: file}, rounds=1, **options), gpu).results


@pytest.mark.parametrize("direction", DIRECTIONS)
@pytest.mark.parametrize("pattern", PATTERNS)
def test_both_implementations_are_measured_and_verified(
    file: DataFile, direction: str, pattern: str
) -> None:
    with closing(Sim()) as gpu:
        free_bytes = gpu.memory_info().free_bytes
        cufile, posix = measure(gpu, file, direction, patterns=(pattern,))

        assert cufile.verified
        assert posix.verified
        assert (cufile.settings["library"], posix.library) == ("cufile", "posix")
        assert cufile.axes == {
            "direction": direction,
            "pattern": pattern,
            "size_bytes": 64 * KIB,
            "threads": 2,
        }
        assert gpu.memory_info().free_bytes == free_bytes


def test_rate_counts_the_bytes_of_all_threads(file: DataFile) -> None:
    with closing(Sim()) as gpu:
        (cufile, _) = measure(gpu, file, "read", threads=(4,), patterns=("random",))

    transfers = Transfer(file, "read", "random", 64 * KIB, 4)
    assert cufile.bytes_moved == transfers.bytes_per_execution
    assert cufile.bytes_moved == 4 * transfers.transfers_per_thread * 64 * KIB


class LazyFile(SimStorageFile):
    """A file whose reads and writes of random offsets do nothing."""

    def read(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        pass

    def write(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        pass


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_transfer_that_moves_nothing_is_wrong(file: DataFile, direction: str) -> None:
    with closing(Sim()) as gpu, ExitStack() as cleanup:
        prepared = PreparedTransfer(gpu, Transfer(file, direction, "random", 64 * KIB, 2), 0)
        cleanup.callback(prepared.close)
        prepared.enqueue(LEGACY, 0)
        assert prepared.verify().passed

        lazy = LazyFile(gpu.memory, file.path, writable=True)
        cleanup.callback(lazy.close)
        prepared._routes[:] = [lazy, lazy]
        prepared.enqueue(LEGACY, 0)

        assert not prepared.verify().passed


@pytest.mark.parametrize("size_bytes", [4 * KIB, 64 * KIB])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_offsets_are_distinct_aligned_and_in_one_half(
    file: DataFile, size_bytes: int, pattern: str
) -> None:
    with closing(Sim()) as gpu:
        transfer = Transfer(file, "read", pattern, size_bytes, 2)
        prepared = PreparedTransfer(gpu, transfer, 0)
        for _ in range(5):
            offsets = [offset for row in prepared._choose_offsets() for offset in row]

            assert len(set(offsets)) == len(offsets) == 2 * transfer.transfers_per_thread
            assert all(offset % size_bytes == 0 for offset in offsets)
            assert max(offsets) + size_bytes <= file.size_bytes // 2
        prepared.close()


def test_file_that_is_too_small_is_rejected_with_the_needed_size(file: DataFile) -> None:
    with (
        closing(Sim()) as gpu,
        pytest.raises(InputError, match=r"need 2\.00 MiB, two transfers per thread"),
    ):
        GdsSpec(files={"read": file}, sizes_bytes=(512 * KIB,), threads=(2,)).cases(gpu)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sizes_bytes": (1000,)}, "not a multiple of 4096"),
        ({"threads": (0,)}, "--threads is 0"),
        ({"patterns": ("zigzag",)}, "unknown pattern 'zigzag'"),
    ],
)
def test_invalid_options_are_rejected(
    file: DataFile, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        GdsSpec(files={"read": file}, **options)


class RefusingStorage(SimStorage):
    """Storage that refuses every file."""

    def open(self, path: Path, **options: bool) -> SimStorageFile:
        del path, options
        raise Unsupported("no drive is known")


class DeviceWithoutStorage(Sim):
    """A device whose storage refuses every file."""

    def storage(self) -> SimStorage:
        return RefusingStorage(self.memory)


def test_baseline_is_measured_where_cufile_refuses_the_file(file: DataFile) -> None:
    with closing(DeviceWithoutStorage()) as gpu:
        cufile, posix = measure(gpu, file, "read", patterns=("random",))

    assert cufile.is_unsupported
    assert isinstance(cufile.median_s, Unavailable)
    assert cufile.median_s.reason == "no drive is known"
    assert posix.verified


class DirectStorage(SimStorage):
    """Storage whose transfers are direct, and only to or from registered addresses."""

    def __init__(self, device: Sim) -> None:
        super().__init__(device.memory)
        self.registered_sizes: dict[Ptr, int] = {}

    def open(self, path: Path, *, writable: bool, direct: bool) -> SimStorageFile:
        del direct
        return DirectFile(self, path, writable=writable)

    def register(self, buffer: Ptr, size_bytes: int) -> bool:
        self.registered_sizes[buffer] = size_bytes
        return True

    def path_used(self) -> StoragePath:
        return "direct"


class DirectFile(SimStorageFile):
    """A file that refuses addresses inside a registered buffer, as cuFile does not recognise them."""

    def __init__(self, storage: DirectStorage, path: Path, *, writable: bool) -> None:
        super().__init__(storage._memory, path, writable=writable)
        self._storage = storage

    def read(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        self._check(buffer, buffer_offset + size_bytes)
        super().read(buffer, buffer_offset, size_bytes, file_offset)

    def write(self, buffer: Ptr, buffer_offset: int, size_bytes: int, file_offset: int) -> None:
        self._check(buffer, buffer_offset + size_bytes)
        super().write(buffer, buffer_offset, size_bytes, file_offset)

    def _check(self, buffer: Ptr, end_offset: int) -> None:
        sizes = self._storage.registered_sizes
        if sizes:  # The first transfer finds the data path, before buffers are registered.
            assert end_offset <= sizes[buffer]


class DeviceWithDirectStorage(Sim):
    """A device with GPUDirect Storage."""

    def storage(self) -> SimStorage:
        return DirectStorage(self)


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_buffers_of_direct_transfers_are_registered(file: DataFile, direction: str) -> None:
    with closing(DeviceWithDirectStorage()) as gpu:
        cufile, _ = measure(gpu, file, direction, patterns=("random",))

    assert cufile.verified
    assert cufile.settings["path"] == "GPUDirect Storage"
    assert cufile.settings["buffers"] == "registered buffers"


def test_buffers_in_compatibility_mode_are_not_registered(file: DataFile) -> None:
    with closing(Sim()) as gpu:
        cufile, posix = measure(gpu, file, "read", patterns=("random",))

    assert cufile.settings["path"] == "compatibility mode: through host memory"
    assert cufile.settings["buffers"] == "unregistered buffers"
    assert "buffers" not in posix.settings


WORDS = st.integers(0, 1000).map(lambda word: 8 * word)


@given(seed=st.integers(0, 2**64 - 1), offset=WORDS, first_bytes=WORDS, second_bytes=WORDS)
def test_content_of_two_parts_equals_that_of_the_whole(
    seed: int, offset: int, first_bytes: int, second_bytes: int
) -> None:
    first = content(seed, offset, first_bytes)
    second = content(seed, offset + first_bytes, second_bytes)

    whole = content(seed, offset, first_bytes + second_bytes)

    assert np.array_equal(np.concatenate([first, second]), whole)


def test_content_differs_between_offsets_and_seeds() -> None:
    assert not np.array_equal(content(0, 0, 4096), content(0, 4096, 4096))
    assert not np.array_equal(content(0, 0, 4096), content(1, 0, 4096))


def test_file_has_the_expected_content_and_is_deleted(tmp_path: Path) -> None:
    with temporary_data_file(tmp_path, 100 * KIB, 7) as file:
        written = file.path.read_bytes()
        assert written == file.expected_bytes(0, 100 * KIB).tobytes()
        assert len(written) == file.size_bytes == 100 * KIB

    assert list(tmp_path.iterdir()) == []


def test_file_is_deleted_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), temporary_data_file(tmp_path, KIB, 0):
        raise KeyboardInterrupt

    assert list(tmp_path.iterdir()) == []


def test_missing_directory_is_an_input_error(tmp_path: Path) -> None:
    with (
        pytest.raises(InputError, match="does not exist"),
        temporary_data_file(tmp_path / "none", KIB, 0),
    ):
        pass


def test_path_of_a_file_is_not_a_directory(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.touch()

    with pytest.raises(InputError, match="is not a directory"), temporary_data_file(path, KIB, 0):
        pass


def test_file_larger_than_the_free_space_is_rejected_before_anything_is_written(
    tmp_path: Path,
) -> None:
    size_bytes = shutil.disk_usage(tmp_path).free + (1 << 40)

    with (
        pytest.raises(InputError, match="is free in") as error,
        temporary_data_file(tmp_path, size_bytes, 0),
    ):
        pass

    assert "--file-size" in error.value.hint
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_directory_without_write_permission_is_an_input_error(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)

    with (
        pytest.raises(InputError, match="no file can be written"),
        temporary_data_file(tmp_path, KIB, 0),
    ):
        pass


def test_file_in_memory_does_not_bypass_the_page_cache(tmp_path: Path) -> None:
    with temporary_data_file(tmp_path, 4 * KIB, 0, in_memory=True) as file:
        assert not file.has_direct_io


# Writes a data file to a ramfs, which refuses O_DIRECT, and prints whether O_DIRECT is used.
RAMFS_PROGRAM = """
import subprocess, sys
from pathlib import Path
from cudakit.bench.gds import temporary_data_file
subprocess.run(["mount", "-t", "ramfs", "ramfs", sys.argv[1]], check=True)
with temporary_data_file(Path(sys.argv[1]), 1 << 20, 3) as file:
    print(file.has_direct_io)
"""


def test_file_system_without_direct_io_uses_the_page_cache(tmp_path: Path) -> None:
    namespace = ("unshare", "--user", "--map-root-user", "--mount")
    if not shutil.which("unshare") or subprocess.run((*namespace, "true"), check=False).returncode:
        pytest.skip("mount namespaces cannot be created here")
    done = subprocess.run(
        [*namespace, sys.executable, "-P", "-c", RAMFS_PROGRAM, tmp_path],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )

    assert done.stdout == "False\n"
