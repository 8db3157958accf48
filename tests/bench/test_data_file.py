from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.data_file import content, temporary_data_file
from cudakit.errors import InputError

KIB = 1 << 10
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
from cudakit.bench.data_file import temporary_data_file
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
