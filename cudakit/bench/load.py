"""Read the results that ``cudakit bench`` wrote."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar

from cudakit.bench.health import SuiteResult
from cudakit.bench.result import BenchResult, CaseResult
from cudakit.errors import InputError
from cudakit.input_files import ExpectedFile, check_schema, read_json
from cudakit.serialize import Mismatch, from_plain
from cudakit.units import Unavailable

_Result = TypeVar("_Result", BenchResult, SuiteResult)

RESULT_FILE = ExpectedFile(
    "a result of cudakit bench", "write a result with: cudakit bench ... -o result.json"
)
SUITE_FILE = ExpectedFile(
    "a result of cudakit bench suite", "write a result with: cudakit bench suite -o result.json"
)


def load_result(path: Path) -> BenchResult:
    """Read a result that ``cudakit bench`` wrote; from a health check, return its measurement.

    Raises InputError if the file is missing or damaged, or if its schema is newer or not that of a bench.
    """
    document = _bench_document(read_json(path, RESULT_FILE))
    result = _from_document(BenchResult, document, path, RESULT_FILE)
    _check_values(result, path)
    return result


def load_suite(path: Path) -> SuiteResult:
    """Read a result of ``cudakit bench suite``. Raises the errors of ``load_result``."""
    suite = _from_document(SuiteResult, read_json(path, SUITE_FILE), path, SUITE_FILE)
    _check_values(suite.bench, path)
    return suite


def _from_document(
    kind: type[_Result], document: object, path: Path, expected_file: ExpectedFile
) -> _Result:
    """Return a result of the class ``kind`` from its JSON value."""
    if isinstance(document, dict) and "error" in document and "schema" not in document:
        raise InputError(
            f"{path} contains an error instead of a result: {_error_message(document['error'])}",
            hint="repeat the measurement",
        )
    document = check_schema(path, document, kind.schema, expected_file)
    try:
        return from_plain(kind, document)
    except Mismatch as mismatch:
        raise InputError(f"{path} is damaged: {mismatch}", hint=RESULT_FILE.hint) from None


def _bench_document(document: object) -> object:
    is_suite = isinstance(document, dict) and document.get("schema") == SuiteResult.schema
    return document.get("bench") if is_suite and isinstance(document, dict) else document


def _error_message(error: object) -> str:
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)


def _check_values(result: BenchResult, path: Path) -> None:
    """Raise InputError for values that no measurement can have."""
    for index, case in enumerate(result.results):
        defect = _find_defect(case)
        if defect:
            raise InputError(f"{path} is damaged: results[{index}].{defect}", hint=RESULT_FILE.hint)


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
