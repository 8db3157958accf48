from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cudakit.errors import UsageError
from cudakit.run.command import Command, CommandNotExecutable, CommandNotFound, resolve

ENVIRONMENT = {"PATH": "bin:/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def executable(path: str, content: str = "#!/bin/sh\n") -> str:
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text(content)
    Path(path).chmod(0o755)
    return path


def resolved(*words: str) -> Command:
    return resolve(words, python=sys.executable, environment=ENVIRONMENT)


@pytest.mark.parametrize(
    "words",
    [
        ("train.py",),
        ("train.py", "-m", "--x"),
        ("-m", "pkg.train", "a"),
        ("-mpkg",),
        ("-c", "print(1)"),
        ("-",),
        ("plain", "a"),
        ("app",),
    ],
)
def test_scripts_modules_and_code_are_run_by_python(words: tuple[str, ...]) -> None:
    Path("train.py").touch()
    Path("plain").touch(mode=0o644)
    Path("app").mkdir()
    Path("app/__main__.py").touch()

    command = resolved(*words)

    assert command == Command(sys.executable, (sys.executable, *words), sys.executable)


def test_a_script_that_could_run_by_itself_is_run_by_the_python_that_was_asked_for() -> None:
    executable("train.py", "#!/usr/bin/env python3\n")

    assert resolved("./train.py").argv == (sys.executable, "./train.py")


def test_a_command_is_found_in_the_path() -> None:
    executable("bin/launch")

    assert resolved("launch", "-c", "x") == Command("bin/launch", ("launch", "-c", "x"))


def test_a_command_is_preferred_to_a_file_of_its_name() -> None:
    executable("bin/train")
    Path("train").write_text("print(1)")

    assert resolved("train").program == "bin/train"


def test_a_script_that_says_which_python_runs_it_is_known_to_be_python() -> None:
    executable("bin/tool", f"#!{sys.executable}\n")

    command = resolved("tool", "x")

    assert command.program == "bin/tool"
    assert command.python == sys.executable


def test_what_is_not_there_is_not_found() -> None:
    for word in ("no-such-command", "missing.py", "./missing"):
        with pytest.raises(CommandNotFound, match=word) as caught:
            resolved(word)
        assert caught.value.exit_code == 127


def test_what_cannot_be_executed_is_refused() -> None:
    Path("directory").mkdir()

    with pytest.raises(CommandNotExecutable, match="is a directory") as caught:
        resolved("./directory")
    assert caught.value.exit_code == 126


def test_an_option_of_python_is_refused_with_a_hint() -> None:
    with pytest.raises(UsageError) as caught:
        resolved("-X", "dev")
    assert "cudakit run -- python -X" in caught.value.hint


def test_nothing_to_run_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing to run"):
        resolved()


def test_another_python_can_be_chosen() -> None:
    other = executable("bin/python9")

    assert resolve(["-m", "x"], python="python9", environment=ENVIRONMENT).program == other
    with pytest.raises(CommandNotFound, match="python8"):
        resolve(["-m", "x"], python="python8", environment=ENVIRONMENT)


def test_a_python_that_cannot_be_watched_is_told() -> None:
    executable("bin/python3")
    executable("bin/tool", "#!/usr/bin/python3 -sI\n")

    assert resolved("python3", "-I", "x.py").unwatched.startswith("python3 -I reads no environment")
    assert resolved("tool").unwatched.startswith("python3 -I ")
    assert resolved("python3", "x.py", "-I").unwatched == ""
