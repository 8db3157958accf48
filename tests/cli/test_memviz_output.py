"""The outputs of memviz: terminal, files, JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from invocation import Cli
from memory.load import files
from memory.load.files import pickled

OOM = Path(__file__).parents[1] / "data" / "oom.pkl.gz"
SUFFIXES = ["txt", "json", "html", "md", "csv", "perfetto.json", "collapsed", "speedscope.json"]


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
    state, cause, action, written = run.stderr.splitlines()
    assert state.startswith("✗ Allocating ")
    assert cause.startswith("i Cause (")
    assert action.startswith("i Action: ")
    assert written == f"Wrote {target}"


def test_quiet_prints_the_answer_of_one_file_in_three_lines(cli: Cli, snapshot: Path) -> None:
    run = cli("memviz", snapshot, "-q")
    assert (run.exit_code, run.stderr) == (0, "")
    assert len(run.stdout.splitlines()) == 3


def test_quiet_prints_state_cause_and_action_of_each_file(cli: Cli, snapshot: Path) -> None:
    run = cli("memviz", snapshot, OOM, "-q")
    first, *_, second, cause, action = run.stdout.splitlines()
    assert first.startswith(f"✗ {snapshot}: Allocating")
    assert first.count("cuda:0") == 1
    assert second.startswith(f"✗ {OOM}: Allocating 96.0 MiB failed on cuda:0 at event 7,712")
    assert cause.startswith(f"i {OOM} cuda:0: Cause (")
    assert action.startswith(f"i {OOM} cuda:0: Action: ")


def test_quiet_prints_the_headline_of_a_replay(cli: Cli) -> None:
    run = cli("memviz", OOM, "--what-if", "max_split_size_mb:128", "-q")
    assert run.stdout.splitlines()[0] == (
        "i max_split_size_mb:128 would not have let the failed request succeed."
    )


def test_without_the_compiled_reader_a_note_names_the_remedy(snapshot: Path) -> None:
    script = (
        "import sys; sys.modules['cudakit.memory.load._pickled'] = None;"
        "from cudakit.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script, "memviz", snapshot],
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0
    assert run.stderr == (
        "note: the report took about 10 times longer, because cudakit was installed without a C compiler;"
        " install one and reinstall cudakit\n"
    )


def test_dash_prints_the_report_as_well(cli: Cli, snapshot: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.txt"
    run = cli("memviz", snapshot, "-o", target, "-o", "-")
    assert run.stdout == target.read_text()
    assert run.stderr == f"Wrote {target}\n"


def test_json_is_printed_in_addition_to_files(cli: Cli, snapshot: Path, tmp_path: Path) -> None:
    target = tmp_path / "report.json"
    run = cli("memviz", snapshot, "-o", target, "--json")
    assert json.loads(run.stdout)["schema"] == "cudakit.memviz/1"
    assert run.stdout == target.read_text()


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_existing_file_is_replaced_only_by_force(
    cli: Cli, snapshot: Path, tmp_path: Path, suffix: str
) -> None:
    target = tmp_path / f"output.{suffix}"
    target.write_text("mine")
    assert "exists" in usage_error(cli, snapshot, "-o", target)
    assert target.read_text() == "mine"
    assert cli("memviz", snapshot, "-o", target, "--force").exit_code == 0
    assert target.read_text() != "mine"


@pytest.mark.parametrize("suffix", SUFFIXES)
@pytest.mark.parametrize("place", [".", "nowhere"])
def test_unwritable_output_is_a_usage_error(
    cli: Cli, snapshot: Path, tmp_path: Path, suffix: str, place: str
) -> None:
    target = tmp_path / place / f"output.{suffix}"
    if place == ".":
        target.mkdir()
    usage_error(cli, snapshot, "-o", target)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_format_of_a_file_follows_its_suffix(cli: Cli, tmp_path: Path, suffix: str) -> None:
    target = tmp_path / f"output.{suffix}"
    run = cli("memviz", OOM, "-o", target)
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
    form = suffix.split(".")[0]
    assert text.startswith(starts[form])
    if starts[form].startswith("{"):
        assert json.loads(text)


def test_all_exports_can_be_written_at_once(cli: Cli, tmp_path: Path) -> None:
    names = [f"output.{suffix}" for suffix in SUFFIXES]
    arguments = [part for name in names for part in ("-o", tmp_path / name)]
    assert cli("memviz", OOM, *arguments, "--json").exit_code == 0
    assert {path.name for path in tmp_path.iterdir()} == set(names)


def test_perfetto_export_without_a_trace_is_a_usage_error(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "segments.pkl"
    path.write_bytes(pickled(files.segments()))
    trace = tmp_path / "trace.perfetto.json"
    usage_error(cli, path, "-o", tmp_path / "report.txt", "-o", trace)
    assert list(tmp_path.iterdir()) == [path]


def test_colors_follow_force_color_and_no_color(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, snapshot: Path
) -> None:
    assert "\x1b" not in cli("memviz", snapshot).stdout
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert "\x1b[" in cli("memviz", snapshot).stdout
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in cli("memviz", snapshot).stdout


# In a subprocess.


def test_dash_reads_standard_input(command: list[str], cli: Cli) -> None:
    run = subprocess.run(
        [*command, "memviz", "-"],
        input=OOM.read_bytes(),
        capture_output=True,
        # readline sets COLUMNS in the C environment, which a child would inherit.
        env=dict(os.environ),
        check=False,
    )
    assert (run.returncode, run.stderr) == (0, b"")
    first_line, *other_lines = run.stdout.decode().splitlines()
    assert first_line == "GPU memory of standard input"
    assert other_lines == cli("memviz", OOM).stdout.splitlines()[1:]


def test_closed_pipe_ends_the_command_without_a_message(command: list[str]) -> None:
    with subprocess.Popen(
        [*command, "memviz", OOM, "--json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout
        assert process.stderr
        assert process.stdout.readline() == b"{\n"
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


def test_full_disk_is_an_environment_error(command: list[str], snapshot: Path) -> None:
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


def test_csv_has_a_row_per_allocation(cli: Cli, snapshot: Path, tmp_path: Path) -> None:
    target = tmp_path / "allocations.csv"
    cli("memviz", snapshot, "-o", target)
    allocations = [entry for entry in files.trace() if entry["action"] == "alloc"]
    assert len(target.read_text().splitlines()) == 1 + len(allocations)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--diff", OOM, "--summary"], "--diff has no summary; remove --summary"),
        (["--diff", OOM, "--at", "peak"], "--diff always compares the peak and the end"),
        (["--what-if", "", "--summary"], "--what-if has no summary; remove --summary"),
    ],
)
def test_option_without_effect_is_refused(cli: Cli, arguments: list[str], message: str) -> None:
    run = cli("memviz", OOM, *arguments)

    assert run.exit_code == 2
    assert message in run.stderr
