"""The fuzzer runs cases, and reports a violation of each rule."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import fuzz_memviz
import pytest

SCRIPT = Path(fuzz_memviz.__file__)


def test_same_seed_and_number_give_the_same_file() -> None:
    files = [fuzz_memviz.case_file(3, number) for number in range(20)]

    assert files == [fuzz_memviz.case_file(3, number) for number in range(20)]
    assert len({content for _, content in files}) > 10
    assert files != [fuzz_memviz.case_file(4, number) for number in range(20)]


def test_cases_are_counted_and_the_script_succeeds() -> None:
    command = [sys.executable, "-P", SCRIPT, "--seconds", "8", "--jobs", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)

    assert run.returncode == 0, run.stderr
    *outcomes, total = run.stdout.splitlines()
    assert "exit 0" in run.stdout
    assert "exit 2" in run.stdout
    assert total.endswith(" cases, seed 0")
    assert sum(int(line.split()[0].replace(",", "")) for line in outcomes) == int(
        total.split()[0].replace(",", "")
    )


@pytest.mark.parametrize("text", ["a\x1bb", "a\x9bb", "a\u202eb", "\0"])
def test_unsafe_character_in_an_output_is_a_failure(text: str) -> None:
    with pytest.raises(fuzz_memviz.Failure):
        fuzz_memviz._check_text(text, [])


def test_different_snapshots_are_not_equal() -> None:
    contents = [dict(fuzz_memviz.corpus())[f"{name}.pkl"] for name in ("host", "steps")]
    snapshots = [fuzz_memviz._snapshot_or_error(content, native=False) for content in contents]

    assert snapshots[0] != snapshots[1]
    assert snapshots[0] == fuzz_memviz._snapshot_or_error(contents[0], native=False)
