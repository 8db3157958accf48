"""``cudakit sanitize`` from end to end, on logs of programs that use the simulated device."""

from __future__ import annotations

import io
import json
import os
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import pytest
from invocation import Cli, Terminal

from cudakit.cli import main

ROOT = Path(__file__).parents[2]
RACES = ROOT / "examples/races"
LAST_RELEASE = ROOT / "tests/sanitize_corpus/logs"
LOG = "races.log"


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The "python" of the environment must have cudakit.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)


@pytest.mark.parametrize(
    ("program", "code"), [("sim_kernels_race", 1), ("sim_kernels_fixed", 0), ("sim_copies_race", 1)]
)
def test_report_on_the_log_is_that_of_the_run(program: str, code: int, cli: Cli) -> None:
    script = RACES / f"{program}.py"
    ran = cli("run", "--sanitize", "--log", LOG, "-o", "run.json", "-o", "run.txt", script)
    second_run = cli("sanitize", LOG, "-o", "log.json", "-o", "log.txt")

    assert ran.exit_code == second_run.exit_code == code
    assert ran.stderr.endswith("Wrote run.json\nWrote run.txt\nWrote races.log\n")
    assert Path("log.json").read_bytes() == Path("run.json").read_bytes()
    assert Path("log.txt").read_bytes() == Path("run.txt").read_bytes()


def test_same_log_gives_same_report(cli: Cli) -> None:
    log = LAST_RELEASE / "torch_graph_branches_race.npz"

    first, second = cli("sanitize", log), cli("sanitize", log)

    assert (first.exit_code, first.stderr) == (1, "")
    assert first.stdout == second.stdout
    assert first.stdout.startswith("1 race, found 3 times")


def test_sanitize_applies_suppressions_to_the_log(cli: Cli) -> None:
    cli("run", "--sanitize", "--log", LOG, RACES / "sim_kernels_race.py")

    done = cli("sanitize", LOG, "--suppress", "kernel:add", "--json")

    result = json.loads(done.stdout)
    assert done.exit_code == 0
    assert result["races"] == []
    assert [suppression["races"] for suppression in result["suppressed"]] == [1]


def test_failed_program_and_its_status_are_in_the_log(cli: Cli) -> None:
    Path("program.py").write_text((RACES / "sim_copies_fixed.py").read_text() + "\nexit(7)\n")

    assert cli("run", "--sanitize", "--log", LOG, "program.py").exit_code == 7
    done = cli("sanitize", LOG, "--json")

    assert (done.exit_code, json.loads(done.stdout)["exit_status"]) == (0, 7)


def test_log_without_gpu_work_is_reported_as_incomplete(cli: Cli) -> None:
    Path("program.py").write_text("")
    cli("run", "--sanitize", "--require-gpu", "--log", LOG, "program.py")

    done = cli("sanitize", LOG, "-q")

    assert done.exit_code == 1
    assert "--require-gpu" in done.stdout


def test_progress_is_shown_on_a_terminal_only(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    log = LAST_RELEASE / "torch_graph_branches_race.npz"
    terminal = Terminal()

    with redirect_stdout(io.StringIO()), redirect_stderr(terminal):
        main(["sanitize", str(log)])

    assert "analyzing the log" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert cli("sanitize", log).stderr == ""


def test_damaged_log_is_one_line_and_exit_code_2(cli: Cli) -> None:
    cli("run", "--sanitize", "--log", LOG, RACES / "sim_copies_race.py")
    content = Path(LOG).read_bytes()
    Path(LOG).write_bytes(content[:-9] + bytes(9))

    done = cli("sanitize", LOG)

    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr == (
        "cudakit: error: races.log is damaged: a checksum is wrong\n"
        "hint: copy the file again, or repeat the run\n"
    )


def test_races_before_the_end_of_a_truncated_log_are_reported_and_the_result_is_incomplete(
    cli: Cli,
) -> None:
    cli("run", "--sanitize", "--log", LOG, RACES / "sim_copies_race.py")
    content = Path(LOG).read_bytes()
    Path(LOG).write_bytes(content[:-9])

    done = cli("sanitize", LOG)

    assert (done.exit_code, done.stderr) == (1, "")
    verdict, *lines = done.stdout.splitlines()
    assert verdict == "1 race between streams, result incomplete, on a simulated device"
    end = f"The log is truncated: it ends at byte {len(content) - 9:,}, after CUDA call "
    assert sum(end in line for line in lines) == 1
    assert json.loads(cli("sanitize", LOG, "--json").stdout)["exit_status"] is None


def test_log_that_is_truncated_before_its_first_event_is_refused(cli: Cli) -> None:
    cli("run", "--sanitize", "--log", LOG, RACES / "sim_copies_race.py")
    Path(LOG).write_bytes(Path(LOG).read_bytes()[:30])

    done = cli("sanitize", LOG)

    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("cudakit: error: races.log is damaged: the file is truncated\n")


def test_foreign_file_is_rejected_with_the_command_that_writes_a_log(cli: Cli) -> None:
    done = cli("sanitize", RACES / "sim_copies_race.py")

    assert (done.exit_code, done.stdout) == (2, "")
    error, hint = done.stderr.splitlines()
    assert error.endswith("is a Python script, not a log of cudakit run --sanitize")
    assert hint.startswith("hint: write a log with: cudakit run --sanitize --log races.log /")
    assert hint.endswith("sim_copies_race.py")


def test_existing_log_is_replaced_only_with_force(cli: Cli) -> None:
    Path(LOG).write_text("mine")
    line = ["run", "--sanitize", "--log", LOG]

    refused = cli(*line, RACES / "sim_copies_race.py")
    assert refused.exit_code == 125
    assert "races.log exists" in refused.stderr
    assert Path(LOG).read_text() == "mine"

    assert cli(*line, "-f", RACES / "sim_copies_race.py").exit_code == 1
    assert cli("sanitize", LOG).exit_code == 1


def test_full_disk_under_the_log_is_an_error_after_the_report(cli: Cli) -> None:
    done = cli("run", "--sanitize", "--log", "/dev/full", RACES / "sim_copies_race.py")

    assert done.exit_code == 3
    assert done.stderr.startswith("1 race between streams")
    assert "cudakit: error: cannot write /dev/full: No space left on device\n" in done.stderr


def test_log_needs_sanitize_and_a_file_of_its_own(cli: Cli) -> None:
    alone = cli("run", "--memory", "--log", LOG, "program.py")
    twice = cli("run", "--sanitize", "--log", "a.json", "-o", "./a.json", "program.py")

    assert alone.exit_code == twice.exit_code == 125
    assert "add --sanitize" in alone.stderr
    assert "named twice" in twice.stderr


def test_races_of_a_baseline_are_not_reported_and_do_not_fail_the_run(cli: Cli) -> None:
    script = RACES / "sim_kernels_race.py"

    written = cli("run", "--sanitize", "--log", LOG, "--write-baseline", "known.json", script)
    second_run = cli("run", "--sanitize", "--baseline", "known.json", script)
    log = cli("sanitize", LOG, "--baseline", "known.json", "--json")

    assert (written.exit_code, second_run.exit_code, log.exit_code) == (0, 0, 0)
    assert "1 race between streams" in written.stderr
    assert written.stderr.endswith("Wrote known.json\n")
    assert "Not reported: 1 race of the baseline known.json, found once" in second_run.stderr
    assert json.loads(log.stdout)["baseline"]["count"] == 1


def test_races_of_a_baseline_that_did_not_occur_are_named(cli: Cli) -> None:
    cli("run", "--sanitize", "--write-baseline", "known.json", RACES / "sim_kernels_race.py")

    other_run = cli("run", "--sanitize", "--baseline", "known.json", RACES / "sim_copies_race.py")

    assert "i The race of the baseline known.json did not occur" in other_run.stderr


def test_race_that_a_baseline_does_not_have_fails_the_run(cli: Cli) -> None:
    cli("run", "--sanitize", "--write-baseline", "known.json", RACES / "sim_copies_race.py")

    done = cli(
        "run", "--sanitize", "--baseline", "known.json", "-o", "r.json",
        RACES / "sim_kernels_race.py",
    )  # fmt: skip

    assert done.exit_code == 1
    assert json.loads(Path("r.json").read_text())["baseline"]["absent"] == 1


def test_damaged_baseline_ends_before_the_program_starts(cli: Cli) -> None:
    Path("known.json").write_text("{}")
    Path("program.py").write_text("open('started', 'w')")

    ran = cli("run", "--sanitize", "--baseline", "known.json", "program.py")
    read = cli("sanitize", LOG, "--baseline", "known.json")

    assert (ran.exit_code, read.exit_code) == (125, 2)
    assert "known.json is not a baseline of races: it has no schema" in ran.stderr
    assert not Path("started").exists()


def _report_words(cli: Cli, log: Path | str, *arguments: str) -> str:
    """Return the report on a log, without line breaks."""
    return " ".join(cli("sanitize", log, *arguments).stdout.split())


def test_race_of_a_graph_node_names_the_line_that_launched_the_graph(cli: Cli) -> None:
    text = _report_words(cli, LAST_RELEASE / "cuda_python_graph_update_race.npz")

    assert "after the launch of graph 1 (cuda_python_graph_update.py:33), which has" in text
    assert "before the launch of graph 1 (cuda_python_graph_update.py:33) was enqueued" in text
    assert "graph launched at cuda_python_graph_update.py:33 <module>" in text
    assert "Not analyzed, so that races may be missing: a node of an executable graph" in text


def test_strided_access_has_the_number_of_accessed_bytes(cli: Cli) -> None:
    text = _report_words(cli, LAST_RELEASE / "cupy_columns_race.npz")

    assert "writes 1.00 KiB of the 7.97 KiB at the start of the allocation" in text
    assert "both access 4 B at offset 32 B of the allocation; a strided access may have" in text


def test_certain_race_with_an_unknown_part_of_a_tensor_is_explained(cli: Cli) -> None:
    text = _report_words(cli, LAST_RELEASE / "torch_matmul_result_race.npz")

    assert "writes an unknown part of the 8.00 MiB at the start of the allocation" in text
    assert "both access up to 8.00 MiB at the start of the allocation" in text
    assert "certain: the earlier access is a store to an unknown part of the tensor, the" in text
    assert "the later one is exact and covers all of it" in text


def test_race_of_the_baseline_that_is_also_suppressed_did_occur(cli: Cli) -> None:
    log = LAST_RELEASE / "cupy_legacy_stream_race.npz"
    cli("sanitize", log, "--write-baseline", "races.json")

    text = _report_words(cli, log, "--baseline", "races.json", "--suppress", "kernel:*add*")

    assert "Not reported: 2 races of the baseline races.json" in text
    assert "occurred" not in text
    assert "did not occur" not in text
