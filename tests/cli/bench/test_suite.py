from __future__ import annotations

import json
from pathlib import Path

from invocation import Cli

from cudakit.cli.failure import ExitCode

QUICK = ("bench", "suite", "--quick", "--gpu", "sim")


def test_simulated_quick_suite_is_labelled_in_every_format(cli: Cli, tmp_path: Path) -> None:
    places = [tmp_path / f"run.{end}" for end in ("json", "csv", "md", "html", "nvbench.json")]
    run = cli(*QUICK, *(word for place in places for word in ("-o", place)), "-o", "-")

    assert run.exit_code == ExitCode.OK
    lines = run.stdout.splitlines()
    assert lines[0] == "Simulated: bench suite, NVIDIA H200, not assessed"
    assert lines[2].endswith("Not assessed: all values are simulated, computed on the CPU.")
    assert max(map(len, lines)) <= 100
    assert "n/a" not in run.stdout
    assert {place.name for place in tmp_path.iterdir()} == {place.name for place in places}
    result = json.loads(places[0].read_text())
    assert (result["schema"], result["quick"], result["health"]) == ("cudakit.suite/1", True, None)
    assert (
        result["unavailable"]["health"]
        == "not assessed: all values are simulated, computed on the CPU"
    )
    assert result["bench"]["schema"] == "cudakit.bench/1"
    names = [figure["name"] for figure in result["figures"]]
    assert {"launch", "copy h2d", "memory triad", "gemm fp8_e4m3"} <= set(names)
    assert len(names) == len(result["bench"]["results"])


def test_gpu_of_existing_results_is_refused(cli: Cli) -> None:
    run = cli("bench", "suite", "--results", "nightly", "--gpu", "sim")

    assert run.exit_code == ExitCode.USAGE
    assert "--results without --ray measures nothing, so --gpu has no effect" in run.stderr


def test_unknown_suffix_is_rejected_before_measurement(
    cli: Cli,
) -> None:
    run = cli(*QUICK, "-o", "health.pdf")

    assert (run.exit_code, run.stdout) == (ExitCode.USAGE, "")
    assert "health.pdf" in run.stderr
