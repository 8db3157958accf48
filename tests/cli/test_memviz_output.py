"""Where the report and the exports of memviz go."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from core.memory.load import files
from core.memory.load.files import pickled
from invocation import Cli

OOM = Path(__file__).parents[2] / "examples" / "oom.pkl.gz"
EXPORTS = ["--html", "--csv", "--perfetto", "--collapsed", "--speedscope"]
SUFFIXES = ["txt", "json", "html", "md", "csv", "perfetto.json", "collapsed", "speedscope.json"]
# An option and the name of a file.
OUTPUTS = [*((option, "output") for option in EXPORTS), *(("-o", f"output.{s}") for s in SUFFIXES)]


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    path = tmp_path / "snapshot.pkl"
    path.write_bytes(pickled(files.snapshot()))
    return path


def usage_error(cli: Cli, *arguments: str | Path) -> str:
    run = cli("memviz", *arguments)
    assert (run.exit_code, run.stdout) == (2, "")
    error, hint = run.stderr.splitlines()
    assert hint.startswith("hint: ")
    return error


def test_report_goes_to_a_file_and_its_summary_to_stderr(
    cli: Cli, snapshot: Path, tmp_path: Path
) -> None:
    target = tmp_path / "report.txt"
    run = cli("memviz", snapshot, "-o", target)
    assert (run.exit_code, run.stdout) == (0, "")
    assert target.read_text().startswith("GPU memory of")
    first, *_, last = run.stderr.splitlines()
    assert first == f"GPU memory of {snapshot}"
    assert last == f"Wrote {target}"
    assert len(run.stderr.splitlines()) <= 4


def test_dash_prints_the_report_as_well(cli: Cli, snapshot: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.txt"
    run = cli("memviz", snapshot, "-o", target, "-o", "-")
    assert run.stdout == target.read_text()
    assert run.stderr == f"Wrote {target}\n"


def test_json_goes_to_stdout_beside_files(cli: Cli, snapshot: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    run = cli("memviz", snapshot, "-o", target, "--json")
    assert json.loads(run.stdout)["schema"] == "cudakit.memviz/1"
    assert run.stdout == target.read_text()


@pytest.mark.parametrize("option", OUTPUTS)
def test_a_file_that_exists_is_replaced_only_by_force(
    cli: Cli, snapshot: Path, tmp_path: Path, option: tuple[str, str]
) -> None:
    target = tmp_path / option[1]
    target.write_text("mine")
    assert "exists" in usage_error(cli, snapshot, option[0], target)
    assert target.read_text() == "mine"
    assert cli("memviz", snapshot, option[0], target, "--force").exit_code == 0
    assert target.read_text() != "mine"


@pytest.mark.parametrize("option", OUTPUTS)
@pytest.mark.parametrize("place", [".", "nowhere"])
def test_an_output_that_cannot_be_written_is_a_usage_error(
    cli: Cli, snapshot: Path, tmp_path: Path, option: tuple[str, str], place: str
) -> None:
    target = tmp_path / place / option[1]
    if place == ".":
        target.mkdir()
    usage_error(cli, snapshot, option[0], target)


@pytest.mark.parametrize("option", OUTPUTS)
def test_format_of_a_file_follows_its_suffix_or_its_old_option(
    cli: Cli, tmp_path: Path, option: tuple[str, str]
) -> None:
    target = tmp_path / option[1]
    run = cli("memviz", OOM, option[0], target)
    assert (run.exit_code, run.stdout) == (0, "")
    text = target.read_text()
    assert text.endswith("\n")
    starts = {
        "html": "<!DOCTYPE html>\n",
        "csv": "file,device,address,",
        "perfetto": "{",
        "collapsed": "cuda:0;",
        "speedscope": "{",
        "json": "{\n",
        "md": "# GPU memory of",
        "txt": "GPU memory of",
    }
    form = option[0].strip("-") if len(option[0]) > 2 else option[1].split(".")[1]
    assert text.startswith(starts[form])
    if starts[form].startswith("{"):
        assert json.loads(text)


def test_all_exports_can_be_asked_for_at_once(cli: Cli, tmp_path: Path) -> None:
    wanted = [part for option in EXPORTS for part in (option, tmp_path / option)]
    assert cli("memviz", OOM, *wanted, "--json").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == set(EXPORTS)


def test_a_trace_for_perfetto_needs_a_trace(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "segments.pkl"
    path.write_bytes(pickled(files.segments()))
    usage_error(cli, path, "-o", tmp_path / "report.txt", "--perfetto", tmp_path / "trace")
    assert list(tmp_path.iterdir()) == [path]


def test_colours_are_only_where_they_are_wanted(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, snapshot: Path
) -> None:
    assert "\x1b" not in cli("memviz", snapshot).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in cli("memviz", snapshot).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in cli("memviz", snapshot).stdout


# As a process.


def test_a_dash_reads_standard_input(command: list[str], cli: Cli) -> None:
    run = subprocess.run(
        [*command, "memviz", "-"],
        input=OOM.read_bytes(),
        capture_output=True,
        # Without this a child also gets COLUMNS, which readline sets behind Python's back.
        env=dict(os.environ),
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    first, *rest = run.stdout.decode().splitlines()
    assert first == "GPU memory of standard input"
    assert rest == cli("memviz", OOM).stdout.splitlines()[1:]


def test_a_reader_that_goes_away_ends_the_command_quietly(command: list[str]) -> None:
    with subprocess.Popen(
        [*command, "memviz", OOM, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"{\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_a_disk_that_is_full_is_an_error_of_the_machine(command: list[str], snapshot: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no full device here")
    with Path("/dev/full").open("w") as full:
        run = subprocess.run(
            [*command, "memviz", snapshot],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert run.returncode == 3
    assert "No space left" in run.stderr
    assert "Traceback" not in run.stderr


def test_every_row_of_the_csv_is_an_allocation(cli: Cli, snapshot: Path, tmp_path: Path) -> None:
    target = tmp_path / "allocations.csv"
    cli("memviz", snapshot, "--csv", target)
    allocations = [entry for entry in files.trace() if entry["action"] == "alloc"]
    assert len(target.read_text().splitlines()) == 1 + len(allocations)
