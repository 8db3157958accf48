"""Files that users name: text, JSON, and results of ``cudakit bench`` read back."""

from __future__ import annotations

import json
import math
from pathlib import Path

from cudakit.core.bench.health import SuiteResult
from cudakit.core.bench.result import BenchResult, CaseResult
from cudakit.errors import InputError
from cudakit.serialize import Mismatch, from_plain
from cudakit.units import Unavailable, format_bytes

# No result is this large; an endless device such as /dev/zero is.
_MOST_BYTES = 256 << 20
_HINT = "write one with cudakit bench ... --json"


def read_text(path: Path, *, hint: str) -> str:
    """Read a file as UTF-8, with or without a byte order mark.

    Raises InputError if it is missing, too large or not text; ``hint`` explains how to make one.
    """
    content = _content(path)
    if len(content) > _MOST_BYTES:
        raise InputError(f"{path} is larger than {format_bytes(_MOST_BYTES)}", hint=hint)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise InputError(f"{path} is not a text file", hint=hint) from None


def read_json(path: Path, *, hint: str) -> object:
    """Read the JSON of a file.

    Raises InputError with the position of the problem; ``hint`` explains how to make such a file.
    """
    text = read_text(path, hint=hint)
    try:
        plain: object = json.loads(text)
    except json.JSONDecodeError as error:
        end = "it ends too soon" if error.pos >= len(text.rstrip()) else error.msg
        raise InputError(
            f"{path} is not JSON: {end} (line {error.lineno}, column {error.colno})", hint=hint
        ) from None
    except RecursionError:
        raise InputError(f"{path} is not JSON of a result: too deep", hint=hint) from None
    except ValueError:  # of int: sys.set_int_max_str_digits
        raise InputError(
            f"{path} is not JSON of a result: a number is too long", hint=hint
        ) from None
    return plain


def load_result(path: Path) -> BenchResult:
    """Read a file that ``cudakit bench ... --json`` wrote; of a health check, its measurement.

    Raises InputError if it is missing, damaged, of a newer schema or another kind of file.
    """
    plain = _measured(read_json(path, hint=_HINT))
    if not isinstance(plain, dict):
        raise InputError(f"{path} holds no result of cudakit bench", hint=_HINT)
    if "error" in plain and "schema" not in plain:
        raise InputError(f"{path} holds an error, not a result: {_said(plain['error'])}")
    schema = plain.get("schema")
    if schema != BenchResult.schema:
        raise InputError(
            f"{path} has the schema {schema!r}, and {BenchResult.schema!r} is needed",
            hint=_HINT if not _is_newer(schema) else "read it with the cudakit that wrote it",
        )
    try:
        result = from_plain(BenchResult, plain)
    except Mismatch as problem:
        raise InputError(f"{path} is damaged: {problem}", hint=_HINT) from None
    _check(result, path)
    return result


def _measured(plain: object) -> object:
    is_suite = isinstance(plain, dict) and plain.get("schema") == SuiteResult.schema
    return plain.get("bench") if is_suite and isinstance(plain, dict) else plain


def _said(error: object) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _is_newer(schema: object) -> bool:
    name, _, version = str(schema).partition("/")
    return name == "cudakit.bench" and version.isdigit() and int(version) > 1


def _check(result: BenchResult, path: Path) -> None:
    """Raise InputError for values that no measurement gives."""
    for at, case in enumerate(result.results):
        problem = _problem(case)
        if problem:
            raise InputError(f"{path} is damaged: results[{at}].{problem}", hint=_HINT)


def _problem(case: CaseResult) -> str:
    if not all(0 <= time < math.inf for time in case.samples_s):
        return "samples_s has a time that is negative or no number"
    if not all(0 < clock < math.inf for clock in case.sm_clock_hz):
        return "sm_clock_hz has a clock that is not positive"
    if case.sm_clock_hz and len(case.sm_clock_hz) != len(case.samples_s):
        return f"sm_clock_hz has {len(case.sm_clock_hz)} clocks for {len(case.samples_s)} times"
    if case.rounds and sum(case.rounds) != len(case.samples_s):
        return f"rounds has {sum(case.rounds)} samples of {len(case.samples_s)}"
    if not case.samples_s and not isinstance(case.median_s, Unavailable):
        return "samples_s is empty, and there is a median"
    return ""


def _content(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InputError(
            f"{path} cannot be read: {error.strerror or error}", hint="check the name of the file"
        ) from None
