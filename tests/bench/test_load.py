from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bench.example_results import FAILED_VERIFICATION, gemm, launch, result
from hypothesis import given
from hypothesis import strategies as st

from cudakit.bench.load import load_result
from cudakit.bench.result import BenchResult
from cudakit.bench.stats import Samples
from cudakit.errors import InputError
from cudakit.report.json import render
from cudakit.serialize import from_plain


@pytest.fixture
def file(tmp_path: Path) -> Callable[[object], Path]:
    """Return a function that writes a file: text as it is, other values as JSON."""

    def write(content: object) -> Path:
        file_path = tmp_path / "bench.json"
        file_path.write_text(content if isinstance(content, str) else json.dumps(content))
        return file_path

    return write


def json_values(*, path: str = "", value: object = None) -> Any:
    """Return a result as JSON values, with the value at a path such as ``results.0.median_s`` replaced."""
    written_result: Any = json.loads(render(result(gemm())))
    if path:
        file_path = [int(step) if step.isdigit() else step for step in path.split(".")]
        container = written_result
        for step in file_path[:-1]:
            container = container[step]
        container[file_path[-1]] = value
    return written_result


@pytest.mark.parametrize(
    "written",
    [
        result(gemm(), gemm(4096, library="torch"), launch()),
        result(gemm(verification=FAILED_VERIFICATION), gemm(samples=Samples((), discarded=3))),
        result(simulated=True, complete=False, warnings=("the clock was held down",)),
    ],
)
def test_written_result_is_read_back(written: BenchResult, file: Callable[[object], Path]) -> None:
    assert load_result(file(render(written))) == written


@given(st.lists(st.just(0.0) | st.floats(1e-9, 1e3), min_size=1, max_size=20))
def test_samples_are_read_back_to_the_last_bit(times: list[float]) -> None:
    written_result = result(gemm(samples=Samples(tuple(times))))

    assert from_plain(BenchResult, json.loads(render(written_result))) == written_result


def test_unknown_key_is_ignored(file: Callable[[object], Path]) -> None:
    assert load_result(file(json_values(path="results.0.colour", value="blue"))) == result(gemm())


def test_missing_result_file_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="does not exist"):
        load_result(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty"),
        (render(result(gemm()))[:-100], "is not valid JSON"),
        ("not json", "is not a result of cudakit bench: it is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ([], "is not a result of cudakit bench: it has no schema"),
        ({}, "it has no schema 'cudakit.bench/1'"),
        (
            {"schema": "cudakit.devices/1"},
            "is a JSON document with the schema cudakit.devices, not a result",
        ),
        ({"error": {"message": "no GPU"}}, "contains an error instead of a result: no GPU"),
        (json_values(path="simulated", value="no"), "simulated should be true or false, not 'no'"),
        (json_values(path="results", value={}), "results should be a list, not {}"),
        (json_values(path="results.0", value=7), r"results\[0\] should be an object, not 7"),
        (
            json_values(path="results.0.median_s", value="fast"),
            "results.0..median_s should be a number",
        ),
        (json_values(path="results.0.ci95_s", value=[1.0]), "ci95_s should be a list of 2"),
        (
            json_values(path="results.0.samples_s", value=[1.0, None]),
            r"samples_s\[1\] should be a number",
        ),
        (
            json_values(path="results.0.method.mode", value="fast"),
            "method.mode should be 'isolated' or",
        ),
        (
            json_values(path="results.0.limit.bound", value="x"),
            "limit.bound should be 'arithmetic' or",
        ),
        (json_values(path="results.0.samples_s", value=[-1.0]), "negative or infinite time"),
        (
            json_values(path="results.0.samples_s", value=[float("nan")]),
            "negative or infinite time",
        ),
        (json_values(path="results.0.samples_s", value=[1.0]), "64 clocks for 1 times"),
        (json_values(path="results.0.sm_clock_hz", value=[0.0]), "a clock that is not positive"),
        (
            json_values(path="results.0.environment.versions", value=[]),
            "versions should be an object",
        ),
        (
            json_values(path="results.0.unavailable", value=3) | {"bench": 1},
            "bench should be a text",
        ),
    ],
)
def test_file_without_result_error_names_position(
    content: object, message: str, file: Callable[[object], Path]
) -> None:
    with pytest.raises(InputError, match=message):
        load_result(file(content))


def test_missing_key_error_names_key(file: Callable[[object], Path]) -> None:
    written = json_values()
    del written["results"][0]["samples_s"]

    with pytest.raises(InputError, match=r"results\[0\]\.samples_s is missing"):
        load_result(file(written))


def test_newer_schema_error_has_hint(file: Callable[[object], Path]) -> None:
    with pytest.raises(InputError, match=r"cudakit\.bench/2") as caught:
        load_result(file({"schema": "cudakit.bench/2"}))
    assert "the version of cudakit that wrote" in caught.value.hint


def test_binary_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_bytes(b"\x80\x04\xff")

    with pytest.raises(InputError, match="it is not text"):
        load_result(tmp_path / "bench.json")
