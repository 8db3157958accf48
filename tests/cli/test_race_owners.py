"""Tests that races on a simulated device are attributed to the program, or to a library that it calls."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any, TypeAlias

import pytest

pytest.importorskip(
    "cudakit.record._frames", reason="no compiler was there when cudakit was installed"
)

PROGRAMS = Path(__file__).parents[1] / "attribution_programs"
PREFIXES = ("library_", "program_")
needs_program_calls = pytest.mark.skipif(
    sys.version_info < (3, 12), reason="Python numbers program calls from 3.12 on"
)

Races: TypeAlias = dict[str, set[str]]

ONE_RACE_OF_LIBRARY = """
from fakesim import SIZE, Library
from cudakit.gpu.open import open_gpu

gpu = open_gpu("sim")
library = Library(gpu)
block, stream = gpu.malloc(SIZE), gpu.stream()
library.forget_fork(block, stream)
gpu.sync()
"""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the programs, and the library that they call in site-packages."""
    directory = tmp_path_factory.mktemp("owners")
    packages = directory / "site-packages"
    packages.mkdir()
    shutil.copy(PROGRAMS / "fakesim.py", packages)
    shutil.copy(PROGRAMS / "sim_programs.py", directory)
    (directory / "one.py").write_text(ONE_RACE_OF_LIBRARY)
    return directory


def cudakit(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(directory / "site-packages"), "COLUMNS": "80"}
    return subprocess.run(
        [sys.executable, "-P", "-m", "cudakit", *arguments],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def owners_by_function(report: dict[str, Any]) -> Races:
    """Return the owners of the races of each function of the programs; "" for races of none of them."""
    owners: defaultdict[str, set[str]] = defaultdict(set)
    for race in report["races"]:
        stacks = race["current"]["stack"] + race["previous"]["stack"]
        functions = {
            part
            for frame in stacks
            for part in frame["name"].split(".")
            if part.startswith(PREFIXES)
        }
        for function in functions or {""}:
            owners[function].add(race["owner"])
    return dict(owners)


def function_names() -> list[str]:
    text = (PROGRAMS / "sim_programs.py").read_text()
    return [line[4:].partition("(")[0] for line in text.splitlines() if line.startswith("def ")]


@needs_program_calls
def test_each_race_has_the_owner_that_its_program_names(directory: Path) -> None:
    cudakit(
        directory,
        "run",
        "--sanitize",
        "-f",
        "-o",
        "all.json",
        "--log",
        "all.log",
        "sim_programs.py",
    )

    owners = owners_by_function(json.loads((directory / "all.json").read_text()))
    names = [name for name in function_names() if name.startswith(PREFIXES)]
    assert len(names) >= 30
    # The race of this program is between threads that run no frame of it.
    assert owners.pop("") == {"program"}
    # The library has races of its own around the callbacks.
    assert owners.pop("program_callback_in_library") == {"library", "program"}
    names.remove("program_callback_in_library")
    names.remove("program_threads_of_library_function")
    assert owners == {name: {name.partition("_")[0]} for name in names}


@needs_program_calls
def test_log_gives_the_same_owners_as_the_run(directory: Path) -> None:
    cudakit(
        directory,
        "run",
        "--sanitize",
        "-f",
        "-o",
        "run.json",
        "--log",
        "run.log",
        "sim_programs.py",
    )
    result = cudakit(directory, "sanitize", "run.log", "-f", "-o", "log.json")

    from_run, from_log = (
        [(race["owner"], race["library"], race["count"]) for race in json.loads(text)["races"]]
        for text in ((directory / name).read_text() for name in ("run.json", "log.json"))
    )
    assert from_run == from_log
    assert result.returncode == 1


@needs_program_calls
def test_race_of_library_fails_only_with_internal(directory: Path) -> None:
    run = cudakit(
        directory, "run", "--sanitize", "-f", "-o", "one.sarif", "--log", "one.log", "one.py"
    )
    internal = cudakit(
        directory, "run", "--sanitize", "--internal", "-f", "-o", "in.sarif", "one.py"
    )
    log = cudakit(directory, "sanitize", "one.log")
    log_internal = cudakit(directory, "sanitize", "one.log", "--internal")

    assert [each.returncode for each in (run, internal, log, log_internal)] == [0, 1, 0, 1]
    levels = [
        [
            result["level"]
            for result in json.loads((directory / name).read_text())["runs"][0]["results"]
        ]
        for name in ("one.sarif", "in.sarif")
    ]
    assert levels == [["note"], ["error"]]
    assert "1 race inside a library" in log.stdout
    assert "fakesim.py" in log.stdout


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 numbers program calls")
def test_every_race_is_of_the_program_if_program_calls_are_unknown(directory: Path) -> None:
    result = cudakit(directory, "run", "--sanitize", "-f", "-o", "old.json", "sim_programs.py")

    owners = owners_by_function(json.loads((directory / "old.json").read_text()))
    assert set().union(*owners.values()) == {"program"}
    assert result.returncode == 1
