from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from bench.example_results import FAILED_VERIFICATION, gemm, launch, machine, result

from cudakit.bench.result import BenchResult
from cudakit.cli.bench.measure import FORMATS, exit_code, report
from cudakit.cli.failure import ExitCode
from cudakit.cli.output import OutputOptions, Target, open_outputs
from cudakit.errors import UsageError


def output(*paths: Path) -> OutputOptions:
    targets = tuple(Target(str(path)) for path in paths)
    return OutputOptions(json=False, targets=targets, force=True, quiet=True, formats=FORMATS)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[BenchResult], dict[str, str]]:
    def write(bench_result: BenchResult) -> dict[str, str]:
        places = {form: tmp_path / f"run.{form}" for form in FORMATS}
        with open_outputs(output(*places.values())) as outputs:
            outputs.write(report(bench_result))
        return {form: place.read_text(encoding="utf-8") for form, place in places.items()}

    return write


def test_suffix_selects_format(
    written: Callable[[BenchResult], dict[str, str]],
) -> None:
    texts = written(result(gemm(), gemm(4096)))

    assert json.loads(texts["json"])["schema"] == "cudakit.bench/1"
    assert json.loads(texts["nvbench.json"])["benchmarks"][0]["name"] == "gemm"
    assert texts["csv"].startswith("name,m,n,k,dtype,median_s,")
    assert texts["md"].startswith("# bench gemm, NVIDIA H200\n")
    assert texts["html"].startswith("<!DOCTYPE html>")
    assert 'class="lanes spread"' in texts["html"]


def test_files_of_simulated_run_are_labelled(
    written: Callable[[BenchResult], dict[str, str]],
) -> None:
    texts = written(result(gemm(environment=machine(simulated=True)), simulated=True))

    assert json.loads(texts["json"])["simulated"] is True
    assert "Simulated: " in json.loads(texts["nvbench.json"])["meta"]["argv"][0]
    header, row = (line.split(",") for line in texts["csv"].splitlines())
    assert dict(zip(header, row, strict=True))["simulated"] == "true"
    assert texts["md"].startswith("# Simulated: ")
    assert "<h1>Simulated: " in texts["html"]


def test_case_that_failed_verification_has_no_figure_in_any_file(
    written: Callable[[BenchResult], dict[str, str]],
) -> None:
    texts = written(result(gemm(verification=FAILED_VERIFICATION)))

    (case,) = json.loads(texts["json"])["results"]
    assert (case["median_s"], case["samples_s"], case["verified"]) == (None, [], False)
    (state,) = json.loads(texts["nvbench.json"])["benchmarks"][0]["states"]
    assert (state["is_skipped"], state["summaries"]) == (True, [])
    header, row = (line.split(",") for line in texts["csv"].splitlines())
    assert dict(zip(header, row, strict=True))["median_s"] == ""
    for form in ("md", "html"):
        assert "No time is reported" in texts[form]
        assert "TFLOP" not in texts[form]


@pytest.mark.parametrize("name", ["run", "run.xyz", "json", "run.json.gz"])
def test_unknown_suffix_is_rejected_before_files_are_created(name: str, tmp_path: Path) -> None:
    with (
        pytest.raises(UsageError, match="this report has no format with this suffix") as caught,
        open_outputs(output(tmp_path / "run.json", tmp_path / name)),
    ):
        pass
    assert caught.value.hint == "end the name in .json, .html, .md, .txt, .csv or .nvbench.json"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("bench_result", "code"),
    [
        (result(gemm()), ExitCode.OK),
        (result(launch()), ExitCode.OK),  # there is nothing to verify
        (result(gemm(verification=FAILED_VERIFICATION), gemm(4096)), ExitCode.FINDINGS),
        (result(gemm(), complete=False), ExitCode.INTERRUPTED),
        (result(gemm(verification=FAILED_VERIFICATION), complete=False), ExitCode.FINDINGS),
    ],
)
def test_exit_code_of_bench_depends_on_verification_and_completeness(
    bench_result: BenchResult, code: ExitCode
) -> None:
    assert exit_code(bench_result) is code
