"""Read the results that ``cudakit bench`` wrote."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TypeVar

from cudakit.bench.health import SuiteResult
from cudakit.bench.result import BenchResult
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
    document = read_json(path, RESULT_FILE)
    if isinstance(document, dict) and document.get("schema") == SuiteResult.schema:
        document = document.get("bench")
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
    if isinstance(document, dict) and "error" in document and "schema" not in document:
        error = document["error"]
        message = error.get("message", error) if isinstance(error, dict) else error
        raise InputError(
            f"{path} contains an error instead of a result: {message}",
            hint="repeat the measurement",
        )
    document = check_schema(path, document, kind.schema, expected_file)
    try:
        return from_plain(kind, document)
    except Mismatch as mismatch:
        raise InputError(f"{path} is damaged: {mismatch}", hint=RESULT_FILE.hint) from None


def _check_values(result: BenchResult, path: Path) -> None:
    """Raise InputError for values that no measurement can have."""
    for index, case in enumerate(result.results):
        times, clocks = case.samples_s, case.sm_clock_hz
        defect = ""
        if not all(0 <= time < math.inf for time in times):
            defect = "samples_s contains a negative or infinite time"
        elif not all(0 < clock < math.inf for clock in clocks):
            defect = "sm_clock_hz contains a clock that is not positive"
        elif clocks and len(clocks) != len(times):
            defect = f"sm_clock_hz has {len(clocks)} clocks for {len(times)} times"
        elif case.rounds and sum(case.rounds) != len(times):
            defect = f"rounds counts {sum(case.rounds)} of {len(times)} samples"
        elif not times and not isinstance(case.median_s, Unavailable):
            defect = "samples_s is empty, but median_s is not"
        if defect:
            raise InputError(f"{path} is damaged: results[{index}].{defect}", hint=RESULT_FILE.hint)
