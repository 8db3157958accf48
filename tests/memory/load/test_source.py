from __future__ import annotations

import gzip
import io
import os
import sys
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable, Iterator
from hashlib import sha512
from pathlib import Path

import pytest
from memory.load.files import MIB, zstd

from cudakit.errors import SnapshotError
from cudakit.memory import load

CONTENT = bytes(range(256)) * 50

Compress = Callable[[bytes], bytes]
BOTH = pytest.mark.parametrize("compress", [gzip.compress, zstd.compress], ids=["gzip", "zstd"])


@pytest.fixture
def refused(tmp_path: Path) -> Callable[[bytes], SnapshotError]:
    """Write bytes to a file, and return the error of reading it."""

    def error(content: bytes) -> SnapshotError:
        path = tmp_path / "file"
        path.write_bytes(content)
        with pytest.raises(SnapshotError) as caught:
            load.read(str(path))
        assert str(path) in caught.value.message
        assert caught.value.hint
        return caught.value

    return error


def chance(size: int, seed: int = 0) -> bytes:
    """Return incompressible bytes."""
    digests = (sha512(b"%d %d" % (seed, i)).digest() for i in range(size // 64 + 1))
    return b"".join(digests)[:size]


def read(tmp_path: Path, content: bytes) -> bytes:
    path = tmp_path / "file"
    path.write_bytes(content)
    found = load.read(str(path))
    assert found.name == str(path)
    return found.content


def test_uncompressed_file_is_read_as_it_is(tmp_path: Path) -> None:
    assert read(tmp_path, CONTENT) == CONTENT


@BOTH
def test_compression_is_detected_by_the_first_bytes(tmp_path: Path, compress: Compress) -> None:
    assert read(tmp_path, compress(CONTENT)) == CONTENT


@BOTH
def test_concatenated_compressed_files_are_one_file(tmp_path: Path, compress: Compress) -> None:
    assert read(tmp_path, compress(CONTENT) + compress(b"more")) == CONTENT + b"more"


@BOTH
def test_truncated_compressed_stream_is_rejected_at_every_length(
    refused: Callable[[bytes], SnapshotError], compress: Compress
) -> None:
    packed = compress(chance(1000))
    for length in (5, 11, 30, len(packed) // 2, len(packed) - 5, len(packed) - 1):
        assert (
            "cannot be decompressed: the file is damaged or truncated"
            in refused(packed[:length]).message
        )


@BOTH
def test_compressed_file_with_a_wrong_byte_is_rejected(
    refused: Callable[[bytes], SnapshotError], compress: Compress
) -> None:
    packed = bytearray(compress(CONTENT))
    packed[-10:-5] = b"\xff" * 5
    assert (
        "cannot be decompressed: the file is damaged or truncated" in refused(bytes(packed)).message
    )


@BOTH
def test_compressed_file_with_trailing_bytes_is_rejected(
    refused: Callable[[bytes], SnapshotError], compress: Compress
) -> None:
    assert "damaged" in refused(compress(CONTENT) + b"something else").message


@BOTH
def test_empty_compressed_file_is_rejected(
    refused: Callable[[bytes], SnapshotError], compress: Compress
) -> None:
    assert "is empty after decompression" in refused(compress(b"")).message


def test_empty_file_is_rejected(refused: Callable[[bytes], SnapshotError]) -> None:
    assert "is empty" in refused(b"").message


def test_torch_save_archive_is_recognized(
    refused: Callable[[bytes], SnapshotError],
) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", CONTENT)
    assert "zip archive (as torch.save" in refused(archive.getvalue()).message


# Paths that are not files.


@pytest.mark.parametrize(
    ("path", "why"),
    [
        ("nowhere.pkl", "nowhere.pkl does not exist"),
        ("nowhere/snapshot.pkl", "does not exist"),
        ("x" * 5000, "cannot be read: File name too long"),
        ("nul\0byte", "cannot be read: embedded null"),
        ("/dev/zero", "/dev/zero is a device"),
        ("/dev/null", "/dev/null is a device"),
        ("/dev", "/dev is a directory"),
    ],
    ids=["missing", "missing directory", "long", "nul", "endless", "null", "directory"],
)
def test_path_that_is_not_a_file_is_rejected_by_name(path: str, why: str) -> None:
    with pytest.raises(SnapshotError) as caught:
        load.read(path)
    assert why in caught.value.message
    assert caught.value.hint


def test_unreadable_file_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "secret.pkl"
    path.write_bytes(CONTENT)
    path.chmod(0)
    if os.access(path, os.R_OK):
        pytest.skip("this user may read everything")
    with pytest.raises(SnapshotError, match="Permission denied"):
        load.read(str(path))


def test_pipe_is_read_to_its_end() -> None:
    reading, writing = os.pipe()
    os.write(writing, CONTENT)
    os.close(writing)
    try:
        assert load.read(f"/dev/fd/{reading}").content == CONTENT
    finally:
        os.close(reading)


def test_dash_is_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(gzip.compress(CONTENT))))
    found = load.read("-")
    assert (found.name, found.content) == ("standard input", CONTENT)


# Files that expand.


def zeros(total: int) -> Iterator[bytes]:
    return (bytes(MIB) for _ in range(total // MIB))


def gzip_bomb(total: int) -> bytes:
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    return b"".join([*map(packer.compress, zeros(total)), packer.flush()])


def zstd_bomb(total: int) -> bytes:
    packer = zstd.ZstdCompressor()
    return b"".join([*map(packer.compress, zeros(total)), packer.flush()])


@pytest.mark.parametrize("bomb", [gzip_bomb, zstd_bomb])
def test_decompression_bomb_is_rejected_with_little_memory(
    refused: Callable[[bytes], SnapshotError], bomb: Callable[[int], bytes]
) -> None:
    packed = bomb(64 * MIB)
    tracemalloc.start()
    try:
        error = refused(packed)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert "more than 50 times its size" in error.message
    assert peak < 40 * MIB


def test_decompression_bomb_after_harmless_data_is_rejected(
    refused: Callable[[bytes], SnapshotError],
) -> None:
    harmless = gzip.compress(chance(100_000))
    assert "more than 50 times" in refused(harmless + gzip_bomb(64 * MIB)).message


@BOTH
def test_file_that_compresses_40_fold_is_read(tmp_path: Path, compress: Compress) -> None:
    content = b"".join(chance(64, i) + bytes(2600) for i in range(2000))
    packed = compress(content)
    assert 30 < len(content) / len(packed) < 50
    assert read(tmp_path, packed) == content
