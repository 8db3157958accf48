from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from core.bench.made import WRONG, gemm, launch, result
from hypothesis import given
from hypothesis import strategies as st

from cudakit.core.bench.load import load_result, read_text
from cudakit.core.bench.measurement import Samples
from cudakit.core.bench.result import BenchResult
from cudakit.errors import InputError
from cudakit.render.json import render
from cudakit.serialize import from_plain


@pytest.fixture
def file(tmp_path: Path) -> Callable[[object], Path]:
    """Write a file: a text unchanged, other values as JSON."""

    def write(content: object) -> Path:
        path = tmp_path / "bench.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return path

    return write


def plain(*, at: str = "", value: object = None) -> Any:
    """Return a result as JSON values with one value replaced: ``results.0.median_s``."""
    made: Any = json.loads(render(result(gemm())))
    if at:
        path = [int(step) if step.isdigit() else step for step in at.split(".")]
        inner = made
        for step in path[:-1]:
            inner = inner[step]
        inner[path[-1]] = value
    return made


@pytest.mark.parametrize(
    "made",
    [
        result(gemm(), gemm(4096, library="torch"), launch()),
        result(gemm(verification=WRONG), gemm(samples=Samples((), discarded=3))),
        result(simulated=True, complete=False, warnings=("the clock was held down",)),
    ],
)
def test_written_result_is_read_back(made: BenchResult, file: Callable[[object], Path]) -> None:
    assert load_result(file(render(made))) == made


@given(st.lists(st.just(0.0) | st.floats(1e-9, 1e3), min_size=1, max_size=20))
def test_samples_are_read_back_to_the_last_bit(times: list[float]) -> None:
    made = result(gemm(samples=Samples(tuple(times))))

    assert from_plain(BenchResult, json.loads(render(made))) == made


def test_unknown_key_is_ignored(file: Callable[[object], Path]) -> None:
    assert load_result(file(plain(at="results.0.colour", value="blue"))) == result(gemm())


def test_missing_result_file_error(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="cannot be read: No such file"):
        load_result(tmp_path / "none.json")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "is not JSON: it ends too early"),
        (render(result(gemm()))[:-100], "is not JSON"),
        ("not json", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ([], "contains no result of cudakit bench"),
        ({}, "has the schema None instead of 'cudakit.bench/1'"),
        ({"schema": "cudakit.devices/1"}, "has the schema 'cudakit.devices/1'"),
        ({"error": {"message": "no GPU"}}, "contains an error instead of a result: no GPU"),
        (plain(at="simulated", value="no"), "simulated should be true or false, not 'no'"),
        (plain(at="results", value={}), "results should be a list, not {}"),
        (plain(at="results.0", value=7), r"results\[0\] should be an object, not 7"),
        (plain(at="results.0.median_s", value="fast"), "results.0..median_s should be a number"),
        (plain(at="results.0.ci95_s", value=[1.0]), "ci95_s should be a list of 2"),
        (plain(at="results.0.samples_s", value=[1.0, None]), r"samples_s\[1\] should be a number"),
        (plain(at="results.0.method.mode", value="fast"), "method.mode should be 'isolated' or"),
        (plain(at="results.0.limit.bound", value="x"), "limit.bound should be 'arithmetic' or"),
        (plain(at="results.0.samples_s", value=[-1.0]), "negative or infinite time"),
        (plain(at="results.0.samples_s", value=[float("nan")]), "negative or infinite time"),
        (plain(at="results.0.samples_s", value=[1.0]), "64 clocks for 1 times"),
        (plain(at="results.0.sm_clock_hz", value=[0.0]), "a clock that is not positive"),
        (plain(at="results.0.environment.versions", value=[]), "versions should be an object"),
        (plain(at="results.0.unavailable", value=3) | {"bench": 1}, "bench should be a text"),
    ],
)
def test_file_without_result_error_names_position(
    content: object, words: str, file: Callable[[object], Path]
) -> None:
    with pytest.raises(InputError, match=words):
        load_result(file(content))


def test_missing_key_error_names_key(file: Callable[[object], Path]) -> None:
    made = plain()
    del made["results"][0]["samples_s"]

    with pytest.raises(InputError, match=r"results\[0\]\.samples_s is missing"):
        load_result(file(made))


def test_newer_schema_error_has_hint(file: Callable[[object], Path]) -> None:
    with pytest.raises(InputError, match=r"cudakit\.bench/2") as caught:
        load_result(file({"schema": "cudakit.bench/2"}))
    assert "the version of cudakit that wrote" in caught.value.hint


def test_binary_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "bench.json").write_bytes(b"\x80\x04\xff")

    with pytest.raises(InputError, match="not a text file"):
        load_result(tmp_path / "bench.json")


def test_byte_order_mark_is_removed(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"\xef\xbb\xbf4 4 4\r\n")

    assert read_text(file, hint="") == "4 4 4\r\n"


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="none cannot be read: No such file"):
        read_text(tmp_path / "none", hint="")
    with pytest.raises(InputError, match="cannot be read: Is a directory"):
        read_text(tmp_path, hint="")


def test_binary_content_error_has_hint(tmp_path: Path) -> None:
    file = tmp_path / "image"
    file.write_bytes(b"\x89PNG\xff")

    with pytest.raises(InputError, match="is not a text file") as caught:
        read_text(file, hint="write one")
    assert caught.value.hint == "write one"
