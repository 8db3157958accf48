from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cudakit.errors import UsageError
from cudakit.record.command import (
    Command,
    CommandNotExecutable,
    CommandNotFound,
    active_python,
    interpreter,
    resolve,
    why_not_instrumented,
)

ENVIRONMENT = {"PATH": "bin:/usr/bin:/bin"}


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
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
def test_scripts_modules_and_code_run_in_python(words: tuple[str, ...]) -> None:
    Path("train.py").touch()
    Path("plain").touch(mode=0o644)
    Path("app").mkdir()
    Path("app/__main__.py").touch()

    command = resolved(*words)

    assert command == Command(sys.executable, (sys.executable, *words), sys.executable)


def test_executable_script_runs_in_the_requested_python() -> None:
    executable("train.py", "#!/usr/bin/env python3\n")

    assert resolved("./train.py").argv == (sys.executable, "./train.py")


def test_command_is_found_in_path() -> None:
    executable("bin/launch")

    assert resolved("launch", "-c", "x") == Command("bin/launch", ("launch", "-c", "x"))


def test_command_is_preferred_to_a_file_of_its_name() -> None:
    executable("bin/train")
    Path("train").write_text("print(1)")

    assert resolved("train").program == "bin/train"


def test_script_with_python_shebang_runs_in_that_python() -> None:
    executable("bin/tool", f"#!{sys.executable}\n")

    command = resolved("tool", "x")

    assert command.program == "bin/tool"
    assert command.python == sys.executable


def test_missing_program_is_not_found() -> None:
    for word in ("no-such-command", "missing.py", "./missing"):
        with pytest.raises(CommandNotFound, match=word) as caught:
            resolved(word)
        assert caught.value.exit_code == 127


def test_program_without_execute_permission_is_refused() -> None:
    Path("directory").mkdir()

    with pytest.raises(CommandNotExecutable, match="is a directory") as caught:
        resolved("./directory")
    assert caught.value.exit_code == 126


def test_python_option_is_refused_with_a_hint() -> None:
    with pytest.raises(UsageError) as caught:
        resolved("-X", "dev")
    assert "cudakit run -- python -X" in caught.value.hint


def test_empty_command_is_refused() -> None:
    with pytest.raises(UsageError, match="no program to run"):
        resolved()


def test_python_option_selects_the_interpreter() -> None:
    other_python = executable("bin/python9")

    assert resolve(["-m", "x"], python="python9", environment=ENVIRONMENT).program == other_python
    with pytest.raises(CommandNotFound, match="python8"):
        resolve(["-m", "x"], python="python8", environment=ENVIRONMENT)


def test_isolated_python_is_reported_as_not_instrumented() -> None:
    executable("bin/python3")
    executable("bin/tool", "#!/usr/bin/python3 -sI\n")

    assert resolved("python3", "-I", "x.py").not_instrumented.startswith(
        "the program is not recorded: python3 -I ignores PYTHONPATH"
    )
    assert resolved("tool").not_instrumented.endswith(": python3 -I ignores PYTHONPATH")
    assert resolved("python3", "x.py", "-I").not_instrumented == ""


# --- which Python


def python(directory: Path, name: str = "python3") -> str:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / name
    path.touch(mode=0o755)
    return str(path)


@pytest.fixture
def cudakit_python(tmp_path: Path) -> str:
    return python(tmp_path / "pipx/venvs/cudakit/bin", "python")


LAUNCHER = "/home/me/.local/bin/cudakit"


def test_python_of_the_active_environment_is_used(tmp_path: Path, cudakit_python: str) -> None:
    venv = python(tmp_path / "venv/bin", "python")
    environment = {"VIRTUAL_ENV": str(tmp_path / "venv"), "PATH": "/usr/bin"}

    assert active_python(environment, cudakit_python=cudakit_python, started_as=LAUNCHER) == venv


@pytest.mark.parametrize("names", [["python3"], ["python"], ["python3", "python"]])
def test_first_python_in_path_is_used_without_virtual_env(
    tmp_path: Path, cudakit_python: str, names: list[str]
) -> None:
    first, *_ = [python(tmp_path / "conda/bin", name) for name in names]
    environment = {"PATH": f"{tmp_path}/none:{tmp_path}/conda/bin"}

    assert active_python(environment, cudakit_python=cudakit_python, started_as=LAUNCHER) == first


def test_own_python_is_used_in_its_own_environment(cudakit_python: str) -> None:
    home = Path(cudakit_python).parent
    python(home, "python3")

    assert (
        active_python(
            {"PATH": str(home)}, cudakit_python=cudakit_python, started_as=str(home / "cudakit")
        )
        == cudakit_python
    )
    assert (
        active_python(
            {"VIRTUAL_ENV": str(home.parent)}, cudakit_python=cudakit_python, started_as=LAUNCHER
        )
        == cudakit_python
    )


def test_own_python_is_used_if_path_has_none(cudakit_python: str) -> None:
    assert (
        active_python({"PATH": "/nowhere"}, cudakit_python=cudakit_python, started_as=LAUNCHER)
        == cudakit_python
    )


@pytest.mark.parametrize("started_as", ["lib/cudakit/__main__.py", "{home}/cudakit"])
def test_own_python_is_used_if_the_user_named_it(
    tmp_path: Path, cudakit_python: str, started_as: str
) -> None:
    python(tmp_path / "other", "python3")
    started_as = started_as.format(home=Path(cudakit_python).parent)

    assert (
        active_python(
            {"PATH": f"{tmp_path}/other"}, cudakit_python=cudakit_python, started_as=started_as
        )
        == cudakit_python
    )


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
def test_options_that_disable_the_agent_are_detected(line: str) -> None:
    assert "the program is not recorded" in why_not_instrumented(line.split())


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
def test_other_options_do_not_disable_the_agent(line: str) -> None:
    assert why_not_instrumented(line.split()) == ""


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
def test_interpreter_is_read_from_the_shebang(
    tmp_path: Path, first_line: str, expected: tuple[str, ...]
) -> None:
    script = tmp_path / "tool"
    script.write_text(f"{first_line}\nrest\n")

    assert interpreter(str(script)) == expected


@pytest.mark.parametrize("name", ["python", "python3", "python3.13", "python3.13t"])
def test_interpreter_of_python_is_itself(name: str) -> None:
    assert interpreter(f"/usr/bin/{name}") == (f"/usr/bin/{name}",)
