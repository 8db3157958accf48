"""``bench ops`` on a simulated device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invocation import Cli

SIM = ("bench", "ops", "--gpu", "sim", "--samples", "2")


def test_times_of_all_timings_are_written_as_json(cli: Cli) -> None:
    result = cli(*SIM, "--operations", "add,sum", "--sizes", "100", "--json")

    cases = json.loads(result.stdout)["results"]
    assert [(case["axes"]["operation"], case["axes"]["timing"]) for case in cases] == [
        (operation, timing)
        for operation in ("add", "sum")
        for timing in ("host-call", "eager", "graph")
    ]
    assert all(case["median_s"] > 0 for case in cases)


def test_report_is_labelled_simulated(cli: Cli) -> None:
    result = cli(*SIM, "--operations", "softmax", "--sizes", "100", "--timings", "eager")

    assert result.stdout.startswith("Simulated: bench ops")


def test_page_has_a_curve_over_the_sizes(cli: Cli, tmp_path: Path) -> None:
    page = tmp_path / "ops.html"

    result = cli(
        *SIM, "--operations", "add", "--sizes", "1K..4K", "--timings", "eager,host-call", "-o", page
    )

    assert result.exit_code == 0
    assert "By elements" in page.read_text()


def test_cases_beyond_the_budget_are_named_and_not_run(cli: Cli) -> None:
    result = cli(*SIM, "--sizes", "10K,20K", "--budget", "0.01", "--json")

    cases = json.loads(result.stdout)["results"]
    assert result.exit_code == 0
    assert len(cases) == 24
    assert cases[0]["median_s"] > 0
    assert cases[-1]["unavailable"]["median_s"] == (
        "no case begins after twice the time budget of 10 ms"
    )


def test_latency_has_no_rate_and_no_peak(cli: Cli) -> None:
    result = cli(*SIM, "--operations", "matmul", "--sizes", "100", "--timings", "host-call,eager")

    (latency,) = (
        line for line in result.stdout.splitlines() if "host-call" in line and " ns" in line
    )
    assert "n/a" not in latency
    assert '"-": host times and latencies have no rate and no peak.' in " ".join(
        result.stdout.split()
    )


def test_report_of_latencies_explains_no_rate(cli: Cli) -> None:
    result = cli(*SIM, "--operations", "add", "--sizes", "100", "--timings", "host-call")

    assert "host-call" in result.stdout
    assert "Rate" not in result.stdout


def test_library_that_needs_a_real_gpu_is_left_out_with_a_note(cli: Cli) -> None:
    result = cli(
        *SIM, "--operations", "add", "--sizes", "100", "--timings", "eager", "--vs", "torch"
    )

    assert result.exit_code == 0
    assert "torch needs a real GPU" in " ".join(result.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sizes", "10KiB"), "is not a number of elements"),
        (("--sizes", "10M..10K"), "is not an ascending range; write for example 10K..1M"),
        (("--operations", "divide"), "unknown operation 'divide'"),
        (("--vs", "numpy"), "unknown library 'numpy'"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(
    cli: Cli, arguments: tuple[str, str], message: str
) -> None:
    result = cli(*SIM, *arguments)

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
