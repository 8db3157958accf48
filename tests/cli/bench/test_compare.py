from __future__ import annotations

import json
from pathlib import Path

import pytest
from bench.example_results import FAILED_VERIFICATION, gemm, machine, result
from invocation import Cli

from cudakit.bench.result import BenchResult
from cudakit.bench.stats import Samples
from cudakit.report.json import render
from cudakit.units import Unavailable

REASON = Unavailable("fp8 is multiplied in layout tn only")


@pytest.fixture
def saved(tmp_path: Path) -> dict[str, Path]:
    """Write results by their change since ``before``."""
    results: dict[str, BenchResult] = {
        "before": result(gemm()),
        "same": result(gemm()),
        "slower": result(gemm(rate=700e12)),
        "faster": result(gemm(rate=850e12)),
        "wrong": result(gemm(verification=FAILED_VERIFICATION)),
        "elsewhere": result(gemm(environment=machine(gpu="NVIDIA B200"))),
        "simulated": result(gemm(), simulated=True),
        "by cublas": result(gemm(settings={"library": "cublas"})),
        "by cublaslt": result(gemm(settings={"library": "cublaslt"})),
        "refused": result(gemm(samples=Samples(()), verification=REASON)),
    }
    places = {name: tmp_path / f"{name}.json" for name in results}
    for name, place in places.items():
        place.write_text(render(results[name]), encoding="utf-8")
    return places


@pytest.mark.parametrize("after", ["same", "slower", "faster"])
def test_compare_shows_verdict_per_case(after: str, saved: dict[str, Path], cli: Cli) -> None:
    run = cli("bench", "compare", saved["before"], saved[after])

    assert (run.exit_code, run.stderr) == (0, "")
    assert f"1 {after}." in run.stdout


@pytest.mark.parametrize(
    ("after", "limits", "code"),
    [
        ("slower", (), 0),
        ("slower", ("slower",), 1),
        ("slower", ("slower:5%",), 1),
        ("slower", ("slower:20%",), 0),
        ("slower", ("slower:20%", "slower:1%"), 1),
        ("faster", ("slower:5%",), 0),
        ("faster", ("faster:5%",), 1),
        ("same", ("slower", "faster", "ambiguous"), 0),
        # Nobody knows that it did not get slower.
        ("wrong", ("slower:5%",), 1),
    ],
)
def test_fail_on_gives_exit_code_1(
    after: str, limits: tuple[str, ...], code: int, saved: dict[str, Path], cli: Cli
) -> None:
    options = [word for limit in limits for word in ("--fail-on", limit)]

    assert cli("bench", "compare", saved["before"], saved[after], *options).exit_code == code


@pytest.mark.parametrize(
    ("condition", "sentence"),
    [("slower", "✗ Failed by --fail-on: "), ("faster", "✓ No case fails")],
)
def test_report_names_cases_that_fail(
    condition: str, sentence: str, saved: dict[str, Path], cli: Cli
) -> None:
    run = cli("bench", "compare", saved["before"], saved["slower"], "--fail-on", condition)

    assert sentence in run.stdout


def test_different_machines_are_rejected_without_ignore_mismatch(
    saved: dict[str, Path], cli: Cli
) -> None:
    two = (saved["before"], saved["elsewhere"])
    refused, forced = (
        cli("bench", "compare", *two),
        cli("bench", "compare", *two, "--ignore-mismatch"),
    )

    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "NVIDIA H200 before, NVIDIA B200 after" in refused.stderr
    assert "--ignore-mismatch" in refused.stderr
    assert forced.exit_code == 0
    assert "The runs differ" in forced.stdout


def test_different_libraries_are_rejected(saved: dict[str, Path], cli: Cli) -> None:
    refused = cli("bench", "compare", saved["by cublas"], saved["by cublaslt"])

    assert refused.exit_code == 2
    assert "library: cublas before, cublaslt after" in refused.stderr


def test_case_unsupported_in_both_runs_is_no_regression(saved: dict[str, Path], cli: Cli) -> None:
    failing = ("--fail-on", "slower")
    both = cli("bench", "compare", saved["refused"], saved["refused"], *failing)
    later = cli("bench", "compare", saved["before"], saved["refused"], *failing)

    assert (both.exit_code, later.exit_code) == (0, 1)


def test_measurements_of_suites_are_compared(
    saved: dict[str, Path], cli: Cli, tmp_path: Path
) -> None:
    bench = json.loads(saved["slower"].read_text())
    suite = tmp_path / "suite.json"
    suite.write_text(json.dumps({"schema": "cudakit.suite/1", "bench": bench}))

    assert cli("bench", "compare", saved["before"], suite, "--fail-on", "slower").exit_code == 1


def test_compare_json_and_markdown_agree(saved: dict[str, Path], cli: Cli, tmp_path: Path) -> None:
    two, comment = (saved["before"], saved["slower"]), tmp_path / "comment.md"
    plain = json.loads(cli("bench", "compare", *two, "--json", "-o", comment).stdout)
    table = comment.read_text(encoding="utf-8")

    assert plain["schema"] == "cudakit.bench.compare/1"
    assert [case["verdict"] for case in plain["cases"]] == ["slower"]
    assert table.startswith("# bench compare\n")
    assert table.splitlines()[-3].endswith("| slower |")


def test_comparison_of_simulated_run_is_labelled(saved: dict[str, Path], cli: Cli) -> None:
    two = (saved["simulated"], saved["simulated"])

    assert cli("bench", "compare", *two).stdout.startswith("Simulated: ")
    assert json.loads(cli("bench", "compare", *two, "--json").stdout)["simulated"] is True


@pytest.mark.parametrize("text", ["slow", "slower:", "slower:x%", "same"])
def test_invalid_fail_on_is_rejected(text: str, saved: dict[str, Path], cli: Cli) -> None:
    run = cli("bench", "compare", saved["before"], saved["slower"], "--fail-on", text)

    assert (run.exit_code, run.stdout) == (2, "")
    assert "slower:5%" in run.stderr


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": "cudakit.bench/2"}', "\0"])
def test_file_without_result_gives_exit_code_2(
    text: str, saved: dict[str, Path], cli: Cli, tmp_path: Path
) -> None:
    bad_path = tmp_path / "bad.json"
    bad_path.write_text(text)

    for two in ((bad_path, saved["before"]), (saved["before"], bad_path), (tmp_path, bad_path)):
        run = cli("bench", "compare", *two)
        assert (run.exit_code, run.stdout) == (2, "")
        assert run.stderr.startswith("cudakit: error: ")
