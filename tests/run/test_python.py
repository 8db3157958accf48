from __future__ import annotations

from pathlib import Path

import pytest

from cudakit.run.python import active_python, closed, interpreter


def python(directory: Path, name: str = "python3") -> str:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.touch(mode=0o755)
    return str(path)


@pytest.fixture
def own(tmp_path: Path) -> str:
    return python(tmp_path / "pipx/venvs/cudakit/bin", "python")


LAUNCHER = "/home/me/.local/bin/cudakit"


def test_the_python_of_the_active_environment_is_taken(tmp_path: Path, own: str) -> None:
    venv = python(tmp_path / "venv/bin", "python")
    environment = {"VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": "/usr/bin"}

    assert active_python(environment, own=own, started_as=LAUNCHER) == venv


@pytest.mark.parametrize("names", [["python3"], ["python"], ["python3", "python"]])
def test_else_the_first_python_of_the_path_is_taken(
    tmp_path: Path, own: str, names: list[str]
) -> None:
    first, *_ = [python(tmp_path / "conda/bin", name) for name in names]
    environment = {"PATH": f"{tmp_path}/none:{tmp_path}/conda/bin"}

    assert active_python(environment, own=own, started_as=LAUNCHER) == first


def test_the_own_one_is_taken_where_the_environment_is_the_same(own: str) -> None:
    home = Path(own).parent
    python(home, "python3")

    assert active_python({"PATH": str(home)}, own=own, started_as=str(home / "cudakit")) == own
    assert active_python({"VIRTUAL_ENV": str(home.parent)}, own=own, started_as=LAUNCHER) == own


def test_the_own_one_is_taken_where_there_is_no_other(own: str) -> None:
    assert active_python({"PATH": "/nowhere"}, own=own, started_as=LAUNCHER) == own


@pytest.mark.parametrize("started_as", ["lib/cudakit/__main__.py", "{home}/cudakit"])
def test_the_own_one_is_taken_where_it_was_named(tmp_path: Path, own: str, started_as: str) -> None:
    python(tmp_path / "other", "python3")
    started_as = started_as.format(home=Path(own).parent)

    assert active_python({"PATH": f"{tmp_path}/other"}, own=own, started_as=started_as) == own


@pytest.mark.parametrize(
    "line",
    [
        "python -I x.py",
        "python3.12 -E -m x",
        "python -S",
        "python -sE x.py",
        "python -W error -I x.py",
        "python -Werror -I x.py",
        "python -X dev -uS x.py",
        "python --check-hash-based-pycs always -I x.py",
    ],
)
def test_a_python_that_does_not_start_the_agent_is_found_out(line: str) -> None:
    assert "nothing will be watched" in closed(line.split())


@pytest.mark.parametrize(
    "line",
    [
        "python x.py -I",
        "python -s x.py",
        "python -P -u -B -O x.py",
        "python -m x -I",
        "python -c pass -E",
        "python -mS",
        "python -W I x.py",
        "python -X E x.py",
        "python -XI x.py",
        "python - -I",
        "python",
    ],
)
def test_any_other_python_is_taken_for_one_that_does(line: str) -> None:
    assert closed(line.split()) == ""


@pytest.mark.parametrize(
    ("first_line", "expected"),
    [
        ("#!/usr/bin/python3", ("/usr/bin/python3",)),
        ("#! /usr/bin/python3 -I", ("/usr/bin/python3", "-I")),
        ("#!/usr/bin/env python3", ("python3",)),
        ("#!/usr/bin/env -S A=1 python3 -E", ("python3", "-E")),
        ("#!/bin/sh", ()),
        ("#!", ()),
        ("import os", ()),
    ],
)
def test_the_first_line_of_a_script_says_which_python_runs_it(
    tmp_path: Path, first_line: str, expected: tuple[str, ...]
) -> None:
    script = tmp_path / "tool"
    script.write_text(f"{first_line}\nrest\n")

    assert interpreter(str(script)) == expected


@pytest.mark.parametrize("name", ["python", "python3", "python3.13", "python3.13t"])
def test_a_python_runs_itself(name: str) -> None:
    assert interpreter(f"/usr/bin/{name}") == (f"/usr/bin/{name}",)
