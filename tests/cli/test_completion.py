"""Shell completion, through the protocol of each shell and in a real bash."""

from __future__ import annotations

import os
import pty
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import pytest
from invocation import Cli

from cudakit.bench.copy import DIRECTIONS
from cudakit.cli import COMMANDS

BASH_BREAKS = " \t\n\"'><=;|&(:"

Complete: TypeAlias = Callable[[str], list[str]]


@pytest.fixture
def complete(command: list[str]) -> Complete:
    """Ask for completions as bash does; return the lines of the answer."""

    def complete(line: str) -> list[str]:
        request = {
            "COMP_LINE": line,
            "COMP_WORDBREAKS": BASH_BREAKS,
            "_CUDAKIT_COMPLETE": "bash_complete",
        }
        run = subprocess.run(
            command, check=True, capture_output=True, text=True, env={**os.environ, **request}
        )
        return run.stdout.splitlines()

    return complete


def test_commands_are_completed_without_importing_them(complete: Complete) -> None:
    assert complete("cudakit ") == [f"plain,{name}" for name in COMMANDS]


@pytest.mark.parametrize(
    ("line", "completions"),
    [
        ("cudakit run --st", ["plain,--stop-on-first"]),
        ("cudakit run --show pos", ["plain,possible"]),
        ("cudakit run --sanitize trai", ["file,trai"]),
        ("cudakit run --sanitize -o ra", ["file,ra"]),
        ("cudakit run --suppress s", ["plain,site:"]),
        ("cudakit memviz sn", ["file,sn"]),
        ("cudakit memviz --diff be", ["file,be"]),
        ("cudakit memviz x.pkl --at ", ["plain,peak", "plain,end", "plain,oom"]),
        ("cudakit memviz x.pkl --device h", ["plain,host"]),
        ("cudakit memviz x.pkl --fail-on ", ["plain,growth:5%"]),
        ("cudakit memviz x.pkl --what-if ex", ["plain,expandable_segments:True"]),
        ("cudakit devices --gpu sim:h200x", ["plain,h200x2"]),
        ("cudakit devices --gpu=sim:h200x", ["plain,h200x2"]),
        ("cudakit devices --fields uui", ["plain,uuid"]),
        ("cudakit devices --fields name,uui", ["plain,name,uuid"]),
        ("cudakit doctor --explain CK001", ["plain,CK001"]),
        ("cudakit bench copy --directions ", [f"plain,{name}" for name in DIRECTIONS]),
        ("cudakit bench gemm --dtype bf16,fp8_e4", ["plain,bf16,fp8_e4m3"]),
        ("cudakit bench gemm --preset gpt", ["plain,gpt3-175b"]),
        ("cudakit bench gemm --layout tn,n", ["plain,tn,nn", "plain,tn,nt"]),
        ("cudakit bench gemm --epilogue gelu-", ["plain,gelu-bias"]),
        ("cudakit bench gemm --tuned tu", ["file,tu"]),
        ("cudakit bench compare a", ["file,a"]),
        ("cudakit bench compare a.json b.json --fail-on s", ["plain,slower:5%", "plain,slower"]),
        ("cudakit completion ", ["plain,bash", "plain,zsh", "plain,fish"]),
    ],
)
def test_values_and_files_are_completed(
    complete: Complete, line: str, completions: list[str]
) -> None:
    assert complete(line) == completions


def test_old_spellings_are_not_offered(complete: Complete) -> None:
    offered = complete("cudakit devices --") + complete("cudakit memviz --")

    assert {"plain,--device", "plain,--output"} <= set(offered)
    assert "plain,--id" not in offered


@pytest.mark.parametrize(
    ("shell", "variables", "completions"),
    [
        ("zsh", {"COMP_WORDS": "cudakit devices --gpu sim:h200x", "COMP_CWORD": "3"}, "sim:h200x2"),
        (
            "zsh",
            {"COMP_WORDS": "cudakit devices --gpu=sim:h200x", "COMP_CWORD": "2"},
            "--gpu=sim:h200x2",
        ),
        (
            "fish",
            {"COMP_WORDS": "cudakit devices --gpu=sim:b", "COMP_CWORD": "--gpu=sim:h200x"},
            "--gpu=sim:h200x2",
        ),
        (
            "fish",
            {"COMP_WORDS": "cudakit bench gemm --dtype bf16,int", "COMP_CWORD": "bf16,int"},
            "bf16,int8",
        ),
    ],
)
def test_zsh_and_fish_get_whole_words(
    command: list[str], shell: str, variables: dict[str, str], completions: str
) -> None:
    request = variables | {"_CUDAKIT_COMPLETE": f"{shell}_complete"}
    run = subprocess.run(
        command, check=True, capture_output=True, text=True, env={**os.environ, **request}
    )

    assert completions in re.split(r"[\n\t]|plain,", run.stdout)


# --- scripts ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_shell_accepts_its_script(cli: Cli, shell: str, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text(cli("completion", shell).stdout)

    assert "_CUDAKIT_COMPLETE" in script.read_text()
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    subprocess.run([shell, "-n", script], check=True)


@pytest.mark.parametrize(
    ("shell", "place", "step"),
    [
        ("bash", ".local/share/bash-completion/completions/cudakit", "Start a new bash"),
        ("zsh", ".zfunc/_cudakit", "~/.zshrc"),
        ("fish", ".config/fish/completions/cudakit.fish", "every new fish"),
    ],
)
def test_install_writes_one_file_and_may_be_repeated(
    cli: Cli, shell: str, place: str, step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_DATA_HOME", "XDG_CONFIG_HOME", "BASH_COMPLETION_USER_DIR"):
        monkeypatch.delenv(name, raising=False)
    target = tmp_path / place

    first = cli("completion", shell, "--install")
    assert first.stderr.startswith(f"Wrote {target}\n")
    assert step in first.stderr
    assert target.read_text() == cli("completion", shell).stdout
    target.write_text("the script of an earlier version")
    cli("completion", shell, "--install")
    last = cli("completion", shell, "--install")
    assert last.stderr.startswith(f"{target} is up to date\n")
    assert target.read_text() == cli("completion", shell).stdout
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [target]


def test_install_follows_the_directories_of_the_environment(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    monkeypatch.delenv("BASH_COMPLETION_USER_DIR", raising=False)

    assert cli("completion", "bash", "--install").exit_code == 0
    assert (tmp_path / "data/bash-completion/completions/cudakit").is_file()


def test_install_into_a_home_that_cannot_be_written_names_another_way(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "file"
    home.touch()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("XDG_CONFIG_HOME", raising=False)

    refused = cli("completion", "fish", "--install")
    assert refused.exit_code == 2
    assert "Not a directory" in refused.stderr
    assert "cudakit completion fish > FILE" in refused.stderr
    assert "mkdir" not in refused.stderr


# --- a real bash -----------------------------------------------------------------------------------


@pytest.fixture
def type_in_bash(tmp_path: Path, cli: Cli) -> Callable[[str], str]:
    """Type a line and a tab in an interactive bash; return what the line became."""
    if shutil.which("bash") is None:
        pytest.skip("bash is not installed")
    program = tmp_path / "bin" / "cudakit"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -P -m cudakit "$@"\n')
    program.chmod(0o755)
    (tmp_path / "completion").write_text(cli("completion", "bash").stdout)
    (tmp_path / "snapshot.pkl").touch()
    environment = {"PATH": f"{program.parent}:{os.environ['PATH']}", "HOME": str(tmp_path)}

    def type_line(line: str) -> str:
        master, slave = pty.openpty()
        with subprocess.Popen(
            ["bash", "--noprofile", "--norc", "-i"],  # noqa: S607
            stdin=slave,
            stdout=slave,
            stderr=slave,
            cwd=tmp_path,
            env=os.environ | environment | {"TERM": "dumb", "PS1": "$ "},
            start_new_session=True,
        ) as bash:
            os.close(slave)
            os.write(master, b"stty cols 200; source ./completion\r")
            # A tab, then the line becomes the argument of echo.
            os.write(master, f"{line}\t\x01echo 'GOT:\x05'\rexit\r".encode())
            shown = b""
            while bash.poll() is None or not re.search(rb"\nGOT:.*\n", shown):
                try:
                    shown += os.read(master, 4096)
                except OSError:  # bash has ended
                    break
        os.close(master)
        (completed,) = re.findall(r"\nGOT:(.*?)\r?\n", shown.decode())
        return str(completed)

    return type_line


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("cudakit memv", "cudakit memviz "),
        ("cudakit memviz sn", "cudakit memviz snapshot.pkl "),
        ("cudakit memviz --diff sn", "cudakit memviz --diff snapshot.pkl "),
        ("cudakit memviz -o sn", "cudakit memviz -o snapshot.pkl "),
        ("cudakit devices --gpu sim:h200x", "cudakit devices --gpu sim:h200x2 "),
        ("cudakit devices --gpu=sim:h200x", "cudakit devices --gpu=sim:h200x2 "),
        ("cudakit bench gemm --dtype bf16,int", "cudakit bench gemm --dtype bf16,int8 "),
        ("cudakit run --suppress s", "cudakit run --suppress site:"),
    ],
)
def test_bash_completes_a_line(
    type_in_bash: Callable[[str], str], typed: str, completed: str
) -> None:
    assert type_in_bash(typed) == completed
