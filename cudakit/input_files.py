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

_SCHEMA: Final = re.compile(rb'^\s*\{\s*"schema":\s*"cudakit\.([a-z.-]+)/\d+"')


@dataclass(frozen=True, slots=True)
class ExpectedFile:
    """A kind of file that a command reads."""

    noun: str  # The kind with its article, for example "a memory snapshot".
    # How a file of this kind is written; PROGRAM stands for the user's program. Of a file that is not
    # expected, the command for it, in which FILE is the file; empty if there is none.
    hint: str = ""


_BENCH_HINT = "compare it with another result: cudakit bench compare FILE AFTER.json"
_KNOWN_SCHEMAS: Mapping[str, ExpectedFile] = MappingProxyType(
    {
        "profile": ExpectedFile("a profile", "show it with: cudakit profile FILE"),
        "bench": ExpectedFile("a result of cudakit bench", _BENCH_HINT),
        "suite": ExpectedFile("a result of cudakit bench suite", _BENCH_HINT),
        "tuned": ExpectedFile(
            "a result of cudakit bench gemm --tune",
            "use it with: cudakit bench gemm --tuned FILE",
        ),
        "sanitize": ExpectedFile("a saved report of races"),
        "sanitize.baseline": ExpectedFile(
            "a baseline of races", "use it with: cudakit run --sanitize --baseline FILE PROGRAM"
        ),
        "memviz": ExpectedFile("a saved report of cudakit memviz"),
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
    except (RecursionError, ValueError) as error:
        # int() raises ValueError for too many digits (sys.set_int_max_str_digits).
        is_deep = isinstance(error, RecursionError)
        defect = "its JSON is nested too deeply" if is_deep else "a number in its JSON is too long"
        raise InputError(
            f"{path} is not {expected_file.noun}: {defect}", hint=expected_file.hint
        ) from None
    return value


def check_schema(
    path: object, document: object, schema: str, expected_file: ExpectedFile
) -> Mapping[str, object]:
    """Return a JSON document if it has the schema. Raises InputError for another schema or version."""
    found_schema = document.get("schema") if isinstance(document, dict) else None
    if isinstance(document, dict) and found_schema == schema:
        return document
    name, _, version = str(found_schema).partition("/")
    if name == schema.partition("/")[0] and version.isdigit():
        raise InputError(
            f"{path} has the schema {found_schema!r}; expected {schema!r}",
            hint="read the file with the version of cudakit that wrote it",
        )
    if found_schema is None:
        first_bytes = json.dumps(document)[:START_BYTES].encode()
        reason = f"it has no schema {schema!r}"
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


def _recognize(first_bytes: bytes) -> ExpectedFile | None:
    """Return the kind of a file that starts with these bytes; None if the kind is unknown."""
    if first_bytes.startswith(b"\x1f\x8b"):  # gzip
        with suppress(EOFError, OSError, zlib.error):
            first_bytes = zlib.decompressobj(zlib.MAX_WBITS | 16).decompress(
                first_bytes, START_BYTES
            )
    if first_bytes.startswith(LOG_MAGIC):
        return ExpectedFile(
            "a log of cudakit run",
            "read it with: cudakit sanitize FILE, or cudakit profile FILE if --profile wrote it",
        )
    if match := _SCHEMA.match(first_bytes):
        schema_name = match[1].decode()
        return _KNOWN_SCHEMAS.get(
            schema_name, ExpectedFile(f"a JSON document with the schema cudakit.{schema_name}")
        )
    if b'"traceEvents"' in first_bytes:
        return ExpectedFile("a timeline", "open it at https://ui.perfetto.dev")
    # Only memory snapshots have these keys, in pickles and in JSON.
    has_snapshot_key = any(key in first_bytes for key in (b"segments", b"device_traces"))
    if first_bytes.startswith((b"\x80", b"{", b"[")) and has_snapshot_key:
        return ExpectedFile("a memory snapshot", "show it with: cudakit memviz FILE")
    if first_bytes.startswith(b"PK\x03\x04"):
        return ExpectedFile("a zip archive (as torch.save writes)")
    return None
