"""``bench gds`` on a simulated device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from invocation import Cli

SIM = ("bench", "gds", "--gpu", "sim", "--sizes", "64KiB", "--threads", "1")


def test_rates_of_both_directions_are_written_as_json(cli: Cli, tmp_path: Path) -> None:
    result = cli(*SIM, "--directions", "read,write", "--path", tmp_path, "--json")

    cases = json.loads(result.stdout)["results"]
    assert {case["axes"]["direction"] for case in cases} == {"read", "write"}
    assert all(case["bytes_moved"] > 0 for case in cases)
    assert list(tmp_path.iterdir()) == []


def test_report_says_how_the_data_was_moved(cli: Cli, tmp_path: Path) -> None:
    result = cli(*SIM, "--path", tmp_path)

    words = " ".join(result.stdout.split())
    assert "cufile simulated, compatibility mode: through host memory" in words
    assert "vs posix" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--path", "no-such-directory"), "no-such-directory does not exist"),
        (("--file-size", "100PiB"), "has only"),
        (("--file-size", "64KiB"), "needs 128 KiB, two transfers per thread"),
        (("--directions", "sideways"), "unknown direction 'sideways'"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(
    cli: Cli, tmp_path: Path, arguments: tuple[str, str], message: str
) -> None:
    path = () if "--path" in arguments else ("--path", tmp_path)

    result = cli(*SIM, *path, *arguments)

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
