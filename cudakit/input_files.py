"""Read the files that a user names, and report in the same words why a file cannot be used.

A file of another kind, such as a memory snapshot that is given to ``cudakit profile``, is recognized by its
first bytes, so that the error can name the command that reads it.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from cudakit.errors import InputError
from cudakit.units import format_bytes

# First bytes of a log of ``cudakit run --log``.
LOG_MAGIC: Final = b"cudakit log\n"

# The size limit stops reading of endless files such as /dev/zero; results are far smaller.
_MAX_BYTES: Final = 256 << 20
_CHUNK_BYTES: Final = 1 << 20
# Number of bytes at the start of a file that identify its kind.
START_BYTES: Final = 4096

_GZIP_MAGIC: Final = b"\x1f\x8b"
_ZIP_MAGIC: Final = b"PK\x03\x04"
_SCHEMA: Final = re.compile(rb'^\s*\{\s*"schema":\s*"cudakit\.([a-z.-]+)/\d+"')
# Keys that only memory snapshots have, in pickles and in JSON.
_SNAPSHOT_KEYS: Final = (b"segments", b"device_traces")


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """The kind of file that a command reads."""

    noun: str  # The kind with its article, for example "a memory snapshot".
    hint: str  # How a file of this kind is written. PROGRAM stands for the user's program.


@dataclass(frozen=True, slots=True)
class _KnownFile:
    """A kind of file that some command of cudakit writes or reads."""

    noun: str  # The kind with its article.
    # The command for files of this kind, in which FILE is the file; empty if there is none.
    hint: str = ""


_LOG = _KnownFile(
    "a log of cudakit run",
    "read it with: cudakit sanitize FILE, or cudakit profile FILE if --profile wrote it",
)
_SNAPSHOT = _KnownFile("a memory snapshot", "show it with: cudakit memviz FILE")
_BENCH_HINT = "compare it with another result: cudakit bench compare FILE AFTER.json"
_KNOWN_SCHEMAS: Mapping[str, _KnownFile] = MappingProxyType(
    {
        "profile": _KnownFile("a profile", "show it with: cudakit profile FILE"),
        "bench": _KnownFile("a result of cudakit bench", _BENCH_HINT),
        "suite": _KnownFile("a result of cudakit bench suite", _BENCH_HINT),
        "tuned": _KnownFile(
            "a result of cudakit bench gemm --tune",
            "use it with: cudakit bench gemm --tuned FILE",
        ),
        "sanitize": _KnownFile("a saved report of races"),
        "sanitize.baseline": _KnownFile(
            "a baseline of races", "use it with: cudakit run --sanitize --baseline FILE PROGRAM"
        ),
        "memviz": _KnownFile("a saved report of cudakit memviz"),
    }
)


def read_error(
    path: object,
    error: OSError | ValueError,
    *,
    error_type: type[InputError] = InputError,
    hint: str = "",
) -> InputError:
    """Return the error for a file that is missing or cannot be read; ``error`` is Python's exception.

    ``hint`` replaces the remedy for a missing file.
    """
    if isinstance(error, FileNotFoundError):
        return error_type(f"{path} does not exist", hint=hint or "check the file name")
    if isinstance(error, IsADirectoryError):
        return error_type(f"{path} is a directory", hint="name a file in it")
    reason = getattr(error, "strerror", None) or str(error)
    return error_type(
        f"{path} cannot be read: {reason}", hint="check the name and the permissions of the file"
    )


def read_text(path: Path, expected_file: ExpectedFile, *, may_be_empty: bool = False) -> str:
    """Return the content of a UTF-8 file without its byte order mark.

    Raises InputError if the file is unreadable, empty, too large or not text.
    """
    content = bytearray()
    try:
        with path.open("rb") as file:
            # A single read of the maximum would need twice the memory.
            while len(content) <= _MAX_BYTES and (chunk := file.read(_CHUNK_BYTES)):
                content += chunk
    except (OSError, ValueError) as error:
        raise read_error(path, error) from None
    if len(content) > _MAX_BYTES:
        raise InputError(
            f"{path} is larger than {format_bytes(_MAX_BYTES)}", hint=expected_file.hint
        )
    if not (content or may_be_empty):
        raise empty_file_error(path, expected_file)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise wrong_file_error(
            path, bytes(content[:START_BYTES]), expected_file, reason="it is not text"
        ) from None


def read_json(path: Path, expected_file: ExpectedFile) -> object:
    """Return the JSON value of a file. Raises InputError, for invalid JSON with the position of the error."""
    text = read_text(path, expected_file)
    try:
        value: object = json.loads(text)
    except json.JSONDecodeError as error:
        if not text.lstrip().startswith(("{", "[")):
            raise wrong_file_error(
                path, text.encode(), expected_file, reason="it is not JSON"
            ) from None
        defect = "it ends too early" if error.pos >= len(text.rstrip()) else error.msg
        raise InputError(
            f"{path} is not valid JSON: {defect} (line {error.lineno}, column {error.colno})",
            hint=expected_file.hint,
        ) from None
    except RecursionError:
        raise InputError(
            f"{path} is not {expected_file.noun}: its JSON is nested too deeply",
            hint=expected_file.hint,
        ) from None
    except ValueError:  # int() raises this error for too many digits (sys.set_int_max_str_digits).
        raise InputError(
            f"{path} is not {expected_file.noun}: a number in its JSON is too long",
            hint=expected_file.hint,
        ) from None
    return value


def check_schema(
    path: object, document: object, schema: str, expected_file: ExpectedFile
) -> Mapping[str, object]:
    """Return a JSON document if it has the schema. Raises InputError for another schema or version."""
    found_schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(document, dict) and found_schema == schema:
        return document
    if _is_another_version(found_schema, schema):
        raise InputError(
            f"{path} has the schema {found_schema!r}; expected {schema!r}",
            hint="read the file with the version of cudakit that wrote it",
        )
    if found_schema is None:
        first_bytes, reason = (
            json.dumps(document)[:START_BYTES].encode(),
            f"it has no schema {schema!r}",
        )
    else:
        first_bytes = json.dumps({"schema": found_schema}).encode()
        reason = f"it has the schema {str(found_schema)[:60]!r}"
    raise wrong_file_error(path, first_bytes, expected_file, reason=reason)


def empty_file_error(
    path: object, expected_file: ExpectedFile, *, error_type: type[InputError] = InputError
) -> InputError:
    """Return the error for an empty file."""
    return error_type(f"{path} is empty", hint=expected_file.hint)


def wrong_file_error(
    path: object,
    first_bytes: bytes,
    expected_file: ExpectedFile,
    *,
    reason: str = "",
    error_type: type[InputError] = InputError,
) -> InputError:
    """Return the error for a file of another kind.

    The kind is recognized by the first bytes of the file. If they are those of no known kind, the error
    contains ``reason``.
    """
    known_file = _recognize(first_bytes[:START_BYTES])
    if known_file and known_file.noun != expected_file.noun:
        return error_type(
            f"{path} is {known_file.noun}, not {expected_file.noun}",
            hint=known_file.hint.replace("FILE", str(path)) or expected_file.hint,
        )
    if str(path).endswith(".py"):
        return error_type(
            f"{path} is a Python script, not {expected_file.noun}",
            hint=expected_file.hint.replace("PROGRAM", str(path)),
        )
    reason_text = f": {reason}" if reason else ""
    return error_type(f"{path} is not {expected_file.noun}{reason_text}", hint=expected_file.hint)


def _recognize(first_bytes: bytes) -> _KnownFile | None:
    """Return the kind of a file that starts with these bytes; None if the kind is unknown."""
    if first_bytes.startswith(_GZIP_MAGIC):
        with suppress(EOFError, OSError, zlib.error):
            first_bytes = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(
                first_bytes, START_BYTES
            )
    if first_bytes.startswith(LOG_MAGIC):
        return _LOG
    if match := _SCHEMA.match(first_bytes):
        schema_name = match[1].decode()
        return _KNOWN_SCHEMAS.get(
            schema_name, _KnownFile(f"a JSON document with the schema cudakit.{schema_name}")
        )
    if b'"traceEvents"' in first_bytes:
        return _KnownFile("a timeline", "open it at https://ui.perfetto.dev")
    if first_bytes.startswith((b"\x80", b"{", b"[")) and any(
        key in first_bytes for key in _SNAPSHOT_KEYS
    ):
        return _SNAPSHOT
    if first_bytes.startswith(_ZIP_MAGIC):
        return _KnownFile("a zip archive (as torch.save writes)")
    return None


def _is_another_version(schema: object, expected_schema: str) -> bool:
    """Return whether a schema is another version of the expected one."""
    name, _, version = str(schema).partition("/")
    return name == expected_schema.partition("/")[0] and version.isdigit()
