"""Read the files that a user names: text, JSON, and results of ``cudakit bench``."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import TypeVar

from cudakit.core.bench.health import SuiteResult
from cudakit.core.bench.result import BenchResult, CaseResult
from cudakit.errors import InputError, read_error
from cudakit.serialize import Mismatch, from_plain
from cudakit.units import Unavailable, format_bytes

_Result = TypeVar("_Result", BenchResult, SuiteResult)

# The size limit stops reading of endless files such as /dev/zero; results are far smaller.
_MAX_FILE_BYTES = 256 << 20
_HINT = "give a file that cudakit bench wrote: cudakit bench ... -o result.json"


def read_text(path: Path, *, hint: str) -> str:
    """Return the content of a UTF-8 file without its byte order mark.

    Raises InputError with ``hint`` if the file is missing, too large or not text.
    """
    file_bytes = _read_bytes(path)
    if len(file_bytes) > _MAX_FILE_BYTES:
        raise InputError(f"{path} is larger than {format_bytes(_MAX_FILE_BYTES)}", hint=hint)
    try:
        return file_bytes.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file", hint=hint) from None


def read_json(path: Path, *, hint: str) -> object:
    """Return the JSON value of a file. Raises InputError with the position of the error and ``hint``."""
    text = read_text(path, hint=hint)
    try:
        document: object = json.loads(text)
    except json.JSONDecodeError as error:
        defect = "it ends too early" if error.pos >= len(text.rstrip()) else error.msg
        raise InputError(
            f"{path} is not JSON: {defect} (line {error.lineno}, column {error.colno})", hint=hint
        ) from None
    except RecursionError:
        raise InputError(
            f"{path} is not a result: its JSON is nested too deeply", hint=hint
        ) from None
    except ValueError:  # int() raises this error for too many digits (sys.set_int_max_str_digits).
        raise InputError(
            f"{path} is not a result: a number in its JSON is too long", hint=hint
        ) from None
    return document


def describe_schema(schema: object) -> str:
    """Name the schema of a JSON document for an error message."""
    return "no schema" if schema is None else f"the schema {schema!r}"


def load_result(path: Path) -> BenchResult:
    """Read a result that ``cudakit bench`` wrote; from a health check, return its measurement.

    Raises InputError if the file is missing or damaged, or if its schema is newer or not that of a bench.
    """
    document = _bench_document(read_json(path, hint=_HINT))
    result = _from_document(BenchResult, document, path)
    _check_values(result, path)
    return result


def load_suite(path: Path) -> SuiteResult:
    """Read a result of ``cudakit bench suite``. Raises the errors of ``load_result``."""
    suite = _from_document(SuiteResult, read_json(path, hint=_HINT), path)
    _check_values(suite.bench, path)
    return suite


def _from_document(kind: type[_Result], document: object, path: Path) -> _Result:
    """Return a result of the class ``kind`` from its JSON value."""
    if not isinstance(document, dict):
        raise InputError(f"{path} contains no result of cudakit bench", hint=_HINT)
    if "error" in document and "schema" not in document:
        raise InputError(
            f"{path} contains an error instead of a result: {_error_message(document['error'])}"
        )
    schema = document.get("schema")
    if schema != kind.schema:
        raise InputError(
            f"{path} has {describe_schema(schema)}; expected {kind.schema!r}",
            hint=_HINT
            if not _is_newer(schema, kind.schema)
            else "read the file with the version of cudakit that wrote it",
        )
    try:
        return from_plain(kind, document)
    except Mismatch as mismatch:
        raise InputError(f"{path} is damaged: {mismatch}", hint=_HINT) from None


def _bench_document(document: object) -> object:
    is_suite = isinstance(document, dict) and document.get("schema") == SuiteResult.schema
    return document.get("bench") if is_suite and isinstance(document, dict) else document


def _error_message(error: object) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _is_newer(schema: object, expected_schema: str) -> bool:
    """Return whether a schema is a later version of the expected one."""
    name, _, version = str(schema).partition("/")
    expected_name, _, expected_version = expected_schema.partition("/")
    return name == expected_name and version.isdigit() and int(version) > int(expected_version)


def _check_values(result: BenchResult, path: Path) -> None:
    """Raise InputError for values that no measurement can have."""
    for index, case in enumerate(result.results):
        defect = _find_defect(case)
        if defect:
            raise InputError(f"{path} is damaged: results[{index}].{defect}", hint=_HINT)


def _find_defect(case: CaseResult) -> str:
    if not all(0 <= time < math.inf for time in case.samples_s):
        return "samples_s contains a negative or infinite time"
    if not all(0 < clock < math.inf for clock in case.sm_clock_hz):
        return "sm_clock_hz contains a clock that is not positive"
    if case.sm_clock_hz and len(case.sm_clock_hz) != len(case.samples_s):
        return f"sm_clock_hz has {len(case.sm_clock_hz)} clocks for {len(case.samples_s)} times"
    if case.rounds and sum(case.rounds) != len(case.samples_s):
        return f"rounds counts {sum(case.rounds)} of {len(case.samples_s)} samples"
    if not case.samples_s and not isinstance(case.median_s, Unavailable):
        return "samples_s is empty, but median_s is not"
    return ""


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise read_error(path, error) from None
