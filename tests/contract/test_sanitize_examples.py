"""Each example and each program of tests/sanitize_programs gets the expected report of the command itself."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent.parent
EXAMPLES, PROGRAMS = ROOT / "examples/races", ROOT / "tests/sanitize_programs"
CHECK = ROOT / "scripts/check_races.py"

SHARED = "side_stream"  # a module that several programs import


def expected(folder: Path) -> dict[str, dict[str, Any]]:
    return tomllib.loads((folder / "expected.toml").read_text(encoding="utf-8"))


def names() -> Iterator[Any]:
    for folder in (EXAMPLES, PROGRAMS):
        for name, fields in expected(folder).items():
            marks = [pytest.mark.gpu] if "needs" in fields else []
            yield pytest.param(f"{folder.name}/{name}", marks=marks, id=name)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", list(names()))
def test_command_reports_race_and_accepts_fixed_variant(name: str) -> None:
    result = subprocess.run(
        [sys.executable, str(CHECK), name], capture_output=True, text=True, check=False
    )

    if result.stdout.endswith("0 of 0 as expected, 2 skipped\n"):
        pytest.skip("something that it needs is not installed")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("variant", ["race", "fixed"])
def test_every_example_has_expectation(variant: str) -> None:
    scripts = {
        path.name.removesuffix(f"_{variant}.py") for path in EXAMPLES.glob(f"*_{variant}.py")
    }

    assert scripts == set(expected(EXAMPLES))


def test_every_program_has_expectation() -> None:
    programs = {path.stem for path in PROGRAMS.glob("*.py")} - {SHARED}
    assert programs == set(expected(PROGRAMS))


def test_example_table_matches_expectations() -> None:
    page = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    table = [line.split("|") for line in page.splitlines() if line.startswith("| `")]
    rows = {cells[1].strip(" `"): cells[-2].strip() for cells in table}

    assert rows == {name: in_the_table(fields) for name, fields in expected(EXAMPLES).items()}


def in_the_table(fields: dict[str, Any]) -> str:
    confidence = fields["confidence"]
    return "needs exact accesses" if confidence == "possible" else f"found, {confidence}"
