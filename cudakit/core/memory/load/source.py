"""Read the uncompressed bytes of a snapshot file."""

from __future__ import annotations

import gzip
import io
import stat
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path

from cudakit.errors import SnapshotError

_GZIP = b"\x1f\x8b"
_ZSTD = b"\x28\xb5\x2f\xfd"
_ZIP = b"PK\x03\x04"
_CHUNK = 1 << 20

# Pickles of snapshots compress about 20-fold, their indented JSON up to 125-fold. Files that expand further
# are rejected, so that memory is proportional to the file size. The check starts after a fixed number of
# bytes, because the start of a file can expand more.
_MAX_EXPANSION = 200
_MIN_CHECKED_BYTES = 4 << 20

HINT_DUMP = "write a snapshot with cudakit run --memory, or torch.cuda.memory._dump_snapshot('snapshot.pkl')"


@dataclass(frozen=True, slots=True)
class Source:
    """The uncompressed content of a file, and its name."""

    name: str
    content: bytes


def read(path: str) -> Source:
    """Read a file (``-`` is standard input), and decompress gzip and Zstandard.

    Raises SnapshotError if the file cannot be read, is empty, or is a zip archive.
    """
    packed = sys.stdin.buffer.read() if path == "-" else _read_file(Path(path))
    name = "standard input" if path == "-" else path
    if not packed:
        raise SnapshotError(f"{name} is empty", hint=f"writing it did not finish; {HINT_DUMP}")
    if packed.startswith(_ZIP):
        raise SnapshotError(
            f"{name} is a zip archive (as torch.save writes), not a memory snapshot",
            hint=HINT_DUMP,
        )
    content = _unpack(packed, name)
    if not content:
        raise SnapshotError(
            f"{name} is empty after decompression", hint=f"writing it did not finish; {HINT_DUMP}"
        )
    return Source(name, content)


def _read_file(path: Path) -> bytes:
    try:
        _reject_special_file(path)
        return path.read_bytes()
    except FileNotFoundError:
        raise SnapshotError(f"{path} does not exist", hint="check the name of the file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise SnapshotError(
            f"{path} cannot be read: {reason}",
            hint="check the name and the permissions of the file",
        ) from None


def _reject_special_file(path: Path) -> None:
    mode = path.stat().st_mode
    if stat.S_ISDIR(mode):
        raise SnapshotError(
            f"{path} is a directory", hint=f"name the files in it, for example {path}/*.pkl"
        )
    if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
        raise SnapshotError(
            f"{path} is a device, not a file", hint="name a file, or - for standard input"
        )


def _unpack(packed: bytes, name: str) -> bytes:
    if packed.startswith(_GZIP):
        compressed = io.BytesIO(packed)
        return _expand(gzip.GzipFile(fileobj=compressed), compressed, name)
    if packed.startswith(_ZSTD):
        compressed = io.BytesIO(packed)
        return _expand(_open_zstd(compressed), compressed, name)
    return packed


def _open_zstd(packed: io.BufferedIOBase) -> io.BufferedIOBase:
    # The standard library has Zstandard since Python 3.14; backports.zstd is the same code.
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd
    file: io.BufferedIOBase = zstd.ZstdFile(packed)
    return file


def _expand(reader: io.BufferedIOBase, compressed: io.BufferedIOBase, name: str) -> bytes:
    """Return all bytes of ``reader``. Their number is limited by the bytes read from ``compressed``."""
    content = io.BytesIO()
    try:
        while chunk := reader.read(_CHUNK):
            content.write(chunk)
            if content.tell() > max(_MIN_CHECKED_BYTES, _MAX_EXPANSION * compressed.tell()):
                raise SnapshotError(
                    f"{name} expands to more than {_MAX_EXPANSION} times its size; "
                    "no snapshot compresses that well",
                    hint="if you trust the file, decompress it first",
                )
    except (EOFError, OSError, zlib.error) as error:
        raise _damaged_error(name, error) from None
    except Exception as error:
        # ZstdError derives from Exception, and its module is imported for Zstandard files only.
        if type(error).__name__ != "ZstdError":
            raise
        raise _damaged_error(name, error) from None
    return content.getvalue()


def _damaged_error(name: str, error: Exception) -> SnapshotError:
    return SnapshotError(
        f"{name} is compressed, and damaged or truncated: {error}", hint="copy the file again"
    )
