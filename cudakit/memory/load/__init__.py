"""Load a snapshot file. No class in a file is looked up, and nothing in a file is called."""

from __future__ import annotations

import gzip
import io
import json
import stat
import sys
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING

from cudakit.errors import SnapshotError
from cudakit.input_files import (
    LOG_MAGIC,
    empty_file_error,
    read_error,
    wrong_file_error,
)
from cudakit.memory.load import pickled, schema
from cudakit.memory.load.tree import (
    SNAPSHOT_FILE,
    Budget,
    NotASnapshotError,
    ObjectTree,
    memory_share,
)

if TYPE_CHECKING:
    from cudakit.memory.load.tree import Tree
    from cudakit.memory.snapshot import Snapshot


# Bytes that may precede the first character of JSON: byte-order marks, the zeros of UTF-16, and white space.
_BEFORE_JSON = b"\xef\xbb\xbf\xff\xfe\x00 \t\r\n"
# First opcodes of a pickle: PROTO; in protocols 0 and 1 MARK, an empty list or dictionary, or GLOBAL, which
# the reader rejects by name.
_PICKLE_STARTS = (b"\x80", b"(", b"]", b"}", b"c")


def load(path: str, memory_bytes: int | None = None) -> Snapshot:
    """Read a memory snapshot: pickle (protocols 0 to 5) or JSON, plain, gzip or Zstandard; ``-`` is stdin.

    ``memory_bytes`` is the available memory; None is unlimited. Raises SnapshotError, with the reason in one
    line, for any other file, and for a file that needs too much time or memory (see ``limits``).
    """
    source_file = read(path, memory_bytes)
    budget = Budget(source_file.file_bytes, len(source_file.content), memory_bytes)
    try:
        file_format, tree = _parse_tree(source_file.content, budget)
        return schema.build(
            tree,
            source=source_file.name,
            file_format=file_format,
            size_bytes=len(source_file.content),
        )
    except NotASnapshotError as error:
        raise wrong_file_error(
            source_file.name,
            source_file.content,
            SNAPSHOT_FILE,
            reason=error.message,
            error_type=SnapshotError,
        ) from None
    except SnapshotError as error:
        raise SnapshotError(
            f"{source_file.name}: {error.message}", hint=error.hint or SNAPSHOT_FILE.hint
        ) from None


def _parse_tree(content: bytes, budget: Budget) -> tuple[str, Tree]:
    if content[:64].lstrip(_BEFORE_JSON)[:1] in (b"{", b"["):
        return "json", _json_tree(content, budget)
    # A log of cudakit run starts with "c", as a pickle of protocol 0 can.
    if content.startswith(LOG_MAGIC) or not content.startswith(_PICKLE_STARTS):
        start = content[:8].decode("latin-1")
        raise NotASnapshotError(f"it is neither a pickle nor JSON; its first bytes are {start!a}")
    return "pickle", pickled.read(content, budget)


# Size in bytes of the Python object that each character of JSON begins: a dictionary, a list, or another
# value.
_OBJECT_BYTES = {b"{": 232, b"[": 64, b",": 40, b":": 16}


def _json_tree(content: bytes, budget: Budget) -> Tree:
    character_bytes = len(content) if content.isascii() else 4 * len(content)
    object_bytes = sum(
        content.count(character) * object_size for character, object_size in _OBJECT_BYTES.items()
    )
    budget.check_objects(character_bytes + object_bytes)
    try:
        return ObjectTree(json.loads(content), budget)
    except RecursionError:
        reason = "the nesting is too deep"
    except UnicodeDecodeError:
        reason = "the text is not UTF-8"
    except json.JSONDecodeError as error:
        reason = str(error)
    except ValueError:
        reason = "a number has thousands of digits"
    raise SnapshotError(
        f"invalid JSON: {reason}", hint="write the file again with the program that wrote it"
    )


# --- Read the uncompressed bytes of a snapshot file ------------------------------------------------

_GZIP_MAGIC = b"\x1f\x8b"
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"
_ZIP_MAGIC = b"PK\x03\x04"
_CHUNK_BYTES = 1 << 20

# Pickles of snapshots compress about 12-fold, and their JSON about 48-fold. Files that expand further are
# rejected, so that memory is proportional to the file size. The check starts after a fixed number of bytes,
# because the start of a file can expand more.
_MAX_EXPANSION = 50
_MIN_CHECKED_BYTES = 4 << 20


@dataclass(frozen=True, slots=True)
class Source:
    """The uncompressed content of a file, its name, and its size before decompression."""

    name: str
    content: bytes
    file_bytes: int


def read(path: str, memory_bytes: int | None = None) -> Source:
    """Read a file (``-`` is standard input), and decompress gzip and Zstandard.

    ``memory_bytes`` is the available memory; None is unlimited. Raises SnapshotError if the file cannot be
    read, is empty, is a zip archive, or is larger than half of the available memory.
    """
    max_bytes = memory_share(memory_bytes)
    name = "standard input" if path == "-" else path
    compressed_bytes = (
        _read_stream(sys.stdin.buffer, name, max_bytes)
        if path == "-"
        else _read_file(Path(path), max_bytes)
    )
    if not compressed_bytes:
        raise empty_file_error(name, SNAPSHOT_FILE, error_type=SnapshotError)
    if compressed_bytes.startswith(_ZIP_MAGIC):
        raise wrong_file_error(name, compressed_bytes, SNAPSHOT_FILE, error_type=SnapshotError)
    content = _unpack(compressed_bytes, name, max_bytes)
    if not content:
        raise SnapshotError(f"{name} is empty after decompression", hint=SNAPSHOT_FILE.hint)
    return Source(name, content, len(compressed_bytes))


def _read_file(path: Path, max_bytes: int) -> bytes:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            raise SnapshotError(
                f"{path} is a device, not a file", hint="name a file, or - for standard input"
            )
        if stat.S_ISREG(status.st_mode) and status.st_size > max_bytes:
            raise _size_error(str(path), max_bytes)
        with path.open("rb") as stream:
            return stream.read() if status.st_size else _read_stream(stream, str(path), max_bytes)
    except (OSError, ValueError) as error:
        raise read_error(path, error, error_type=SnapshotError) from None


def _read_stream(stream: IO[bytes], name: str, max_bytes: int) -> bytes:
    """Read a stream, which can be endless, up to the limit."""
    content = io.BytesIO()
    while chunk := stream.read(_CHUNK_BYTES):
        content.write(chunk)
        if content.tell() > max_bytes:
            raise _size_error(name, max_bytes)
    return content.getvalue()


def _size_error(name: str, max_bytes: int) -> SnapshotError:
    return SnapshotError(
        f"{name} is larger than {max_bytes >> 20:,} MiB, half of the available memory",
        hint="use a machine with more memory, or take the snapshot again with fewer events (max_entries)",
    )


def _unpack(compressed_bytes: bytes, name: str, max_bytes: int) -> bytes:
    compressed_file = io.BytesIO(compressed_bytes)
    if compressed_bytes.startswith(_GZIP_MAGIC):
        return _expand(gzip.GzipFile(fileobj=compressed_file), compressed_file, name, max_bytes)
    if compressed_bytes.startswith(_ZSTD_MAGIC):
        # The standard library has Zstandard since Python 3.14; backports.zstd is the same code.
        if sys.version_info >= (3, 14):
            from compression import zstd
        else:
            from backports import zstd
        return _expand(zstd.ZstdFile(compressed_file), compressed_file, name, max_bytes)
    return compressed_bytes


def _expand(
    reader: io.BufferedIOBase, compressed_file: io.BufferedIOBase, name: str, max_bytes: int
) -> bytes:
    """Return all bytes of ``reader``. Raises SnapshotError if they exceed ``max_bytes`` or expand too far."""
    content = io.BytesIO()
    try:
        while chunk := reader.read(_CHUNK_BYTES):
            content.write(chunk)
            if content.tell() > max(_MIN_CHECKED_BYTES, _MAX_EXPANSION * compressed_file.tell()):
                raise SnapshotError(
                    f"{name} expands to more than {_MAX_EXPANSION} times its size; "
                    "no snapshot compresses that well",
                    hint="if you trust the file, decompress it first",
                )
            if content.tell() > max_bytes:
                raise _size_error(f"{name}, decompressed,", max_bytes)
    except Exception as error:
        # ZstdError derives from Exception, and its module is imported for Zstandard files only.
        is_damage = isinstance(error, EOFError | OSError | zlib.error)
        if not is_damage and type(error).__name__ != "ZstdError":
            raise
        raise SnapshotError(
            f"{name} cannot be decompressed: the file is damaged or truncated ({error})",
            hint="copy the file again, or write the snapshot again",
        ) from None
    return content.getvalue()
