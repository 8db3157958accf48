"""Files that a command cannot use: one line in the same words everywhere, and exit code 2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from invocation import CliRun, run_cli

ROOT = Path(__file__).parents[2]
RACE = str(ROOT / "examples" / "races" / "sim_copies_race.py")
STEPS = str(ROOT / "examples" / "profile" / "sim_steps.py")
SNAPSHOT = str(ROOT / "tests" / "data" / "leak.pkl.gz")

# A command line for each parameter that is an input file; FILE is the file.
LINES = {
    "memviz": "memviz FILE",
    "memviz --diff": f"memviz {SNAPSHOT} --diff FILE",
    "profile": "profile FILE",
    "profile --diff": "profile profile.log --diff FILE",
    "profile --bench": "profile profile.log --bench FILE",
    "sanitize": "sanitize FILE",
    "sanitize --baseline": "sanitize races.log --baseline FILE",
    "sanitize --suppress": "sanitize races.log --suppress @FILE",
    "bench compare": "bench compare FILE FILE",
    "bench gemm --shapes": "bench gemm --gpu sim --shapes FILE",
    "bench gemm --tuned": "bench gemm 16 --gpu sim --tuned FILE",
    "run --baseline": f"run --sanitize --baseline FILE {RACE}",
    "run --suppress": f"run --sanitize --suppress @FILE {RACE}",
}
EACH = pytest.mark.parametrize("line", LINES.values(), ids=LINES)


@pytest.fixture(scope="module")
def log_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("logs")
    run_cli("run", "--sanitize", "--log", str(directory / "races.log"), "-q", RACE)
    run_cli("run", "--profile", "--log", str(directory / "profile.log"), "-q", STEPS)
    return directory


@pytest.fixture(autouse=True)
def current_directory(tmp_path: Path, log_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree(log_directory, tmp_path, dirs_exist_ok=True)


def refuse(line: str, file: str) -> tuple[str, str]:
    """Run a command with the file; return the message and the hint of its error."""
    return split_error(run_cli(*line.replace("FILE", file).split()), line)


def split_error(done: CliRun, line: str) -> tuple[str, str]:
    # ``run`` exits with 125 if it fails before the program starts.
    assert (done.exit_code, done.stdout) == (125 if line.startswith("run") else 2, "")
    message, hint = done.stderr.splitlines()
    return message.removeprefix("cudakit: error: "), hint.removeprefix("hint: ")


@EACH
def test_missing_file_is_named(line: str) -> None:
    assert refuse(line, "absent") == ("absent does not exist", "check the file name")


@EACH
def test_directory_is_named(line: str) -> None:
    Path("folder").mkdir()

    assert refuse(line, "folder") == ("folder is a directory", "name a file in it")


@EACH
def test_file_that_cannot_be_read_is_named(line: str) -> None:
    name = "x" * 300

    message, hint = refuse(line, name)

    assert message == f"{name} cannot be read: File name too long"
    assert hint == "check the name and the permissions of the file"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
@EACH
def test_file_without_permission_is_named(line: str) -> None:
    Path("locked").touch(mode=0o000)

    assert refuse(line, "locked") == (
        "locked cannot be read: Permission denied",
        "check the name and the permissions of the file",
    )


@pytest.mark.parametrize("line", [line for name, line in LINES.items() if "--suppress" not in name])
def test_empty_file_is_named_with_the_way_to_write_one(line: str) -> None:
    Path("nothing").touch()

    message, hint = refuse(line, "nothing")

    assert message == "nothing is empty"
    assert hint.startswith("write ")


@EACH
def test_binary_file_is_not_the_expected_kind(line: str) -> None:
    Path("garbage").write_bytes(b"\x89\xff\x00\x81" * 500)

    message, hint = refuse(line, "garbage")

    assert message.startswith("garbage is not a ")
    assert hint.startswith(("write ", "use a text file"))


@pytest.mark.parametrize("command", ["profile", "sanitize", "bench compare"])
def test_snapshot_names_memviz(command: str) -> None:
    message, hint = refuse(LINES[command], SNAPSHOT)

    assert message.startswith(f"{SNAPSHOT} is a memory snapshot, not a ")
    assert hint == f"show it with: cudakit memviz {SNAPSHOT}"


@pytest.mark.parametrize("command", ["memviz", "bench compare"])
def test_log_names_the_commands_that_read_logs(command: str) -> None:
    message, hint = refuse(LINES[command], "races.log")

    assert message.startswith("races.log is a log of cudakit run, not a ")
    assert "cudakit sanitize races.log" in hint
    assert "cudakit profile races.log" in hint


@pytest.mark.parametrize(
    ("command", "option"),
    [("memviz", "--memory"), ("profile", "--profile"), ("sanitize", "--sanitize")],
)
def test_script_names_the_run_that_records_it(command: str, option: str) -> None:
    Path("train.py").write_text("import torch\n")

    message, hint = refuse(LINES[command], "train.py")

    assert message.startswith("train.py is a Python script, not a ")
    assert f"cudakit run {option}" in hint
    assert "train.py" in hint


@pytest.mark.parametrize(
    "line",
    [
        f"memviz {SNAPSHOT} -o FILE",
        "profile profile.log -o FILE",
        "sanitize races.log -o FILE",
        "devices --gpu sim -o FILE",
        "explain 700 -o FILE",
        f"run --sanitize -o FILE {RACE}",
        f"run --sanitize --log FILE {RACE}",
        f"run --sanitize --write-baseline FILE {RACE}",
        f"run --memory --snapshot FILE {RACE}",
    ],
)
def test_unwritable_file_is_refused_before_the_work(line: str) -> None:
    Path("folder").mkdir()
    Path("file").touch()

    assert refuse(line, "nowhere/x.json") == (
        "cannot write nowhere/x.json: the directory nowhere does not exist",
        "create it with: mkdir -p nowhere",
    )
    assert refuse(line, "file/x.json") == (
        "cannot write file/x.json: Not a directory",
        "choose another file",
    )
    assert refuse(line, "folder/") == ("folder/ is a directory", "name a file in it")


@pytest.mark.parametrize("option", ["--sanitize", "--memory", "--profile"])
def test_program_that_does_not_exist_is_named(option: str) -> None:
    done = run_cli("run", option, "absent.py")

    assert done.exit_code == 127
    assert "absent.py does not exist\nhint: check the file name\n" in done.stderr


def test_completion_that_cannot_be_installed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "home").touch()
    environment = {"HOME": str(tmp_path / "home"), "PATH": os.environ["PATH"]}

    done = subprocess.run(
        [sys.executable, "-P", "-m", "cudakit", "completion", "bash", "--install"],
        env=environment,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert "cannot write " in done.stderr
    assert "Not a directory\nhint: write the script to a file that your shell reads" in done.stderr
