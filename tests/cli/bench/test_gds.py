"""``bench gds`` on a simulated device."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from invocation import Cli

END_TIMEOUT_S = 60
# A run of about 20 s of CPU time, which no time limit ends on a busy machine.
LONG_RUN = ("--sizes", "4KiB..64KiB", "--threads", "1,2,4,8", "--samples", "10", "--budget", "600")
SIM = ("bench", "gds", "--gpu", "sim", "--sizes", "64KiB", "--threads", "1")


def start(*arguments: str | Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "cudakit", *SIM[:4], *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_for_data_file(directory: Path) -> list[Path]:
    """Return the data file of a run, once it exists."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    while not (paths := list(directory.iterdir())):
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
    return paths


def wait_for_cpu_time(process: subprocess.Popen[str], seconds: float = 2.0) -> None:
    """Wait until a process has used some CPU time; then LONG_RUN has completed a few of its 40 cases."""
    deadline_s = time.monotonic() + END_TIMEOUT_S
    used_s = 0.0
    while used_s < seconds:
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
        fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        # The user and system time are fields 14 and 15 of the line (proc(5)), in clock ticks.
        used_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_rates_of_both_directions_are_written_as_json(cli: Cli, tmp_path: Path) -> None:
    result = cli(*SIM, "--directions", "read,write", "--path", tmp_path, "--json")

    cases = json.loads(result.stdout)["results"]
    assert {case["axes"]["direction"] for case in cases} == {"read", "write"}
    assert all(case["bytes_moved"] > 0 for case in cases)
    assert list(tmp_path.iterdir()) == []


def test_report_says_how_the_data_was_moved(cli: Cli, tmp_path: Path) -> None:
    result = cli(*SIM, "--path", tmp_path)

    words = " ".join(result.stdout.split())
    assert "cufile simulated, compatibility mode: through host memory" in words
    assert "vs posix" in words


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--path", "no-such-directory"), "no-such-directory does not exist"),
        (("--file-size", "100PiB"), "is free in"),
        (("--file-size", "64KiB"), "needs 128 KiB, two transfers per thread"),
        (("--file-size", "0"), "--file-size is 0"),
        (("--directions", "sideways"), "unknown direction 'sideways'"),
    ],
)
def test_bad_input_gives_one_line_and_exit_code_2(
    cli: Cli, tmp_path: Path, arguments: tuple[str, str], message: str
) -> None:
    path = () if "--path" in arguments else ("--path", tmp_path)

    result = cli(*SIM, *path, *arguments)

    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_file_that_is_cut_during_the_run_ends_it_with_the_completed_cases(tmp_path: Path) -> None:
    result_path, directory = tmp_path / "gds.json", tmp_path / "data"
    directory.mkdir()
    process = start(*LONG_RUN, "--path", directory, "-o", result_path)
    (data_path,) = wait_for_data_file(directory)
    wait_for_cpu_time(process)
    os.truncate(data_path, 0)
    stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)

    assert process.returncode == 3, stderr
    assert stdout == ""
    assert "Ended after" in stderr
    result = json.loads(result_path.read_text())
    assert not result["complete"]
    assert result["results"]
    assert "bytes at offset" in result["failure"]
    assert list(directory.iterdir()) == []


@pytest.mark.parametrize("signal_number", [signal.SIGINT, signal.SIGTERM])
def test_interrupt_keeps_the_completed_cases_and_deletes_the_file(
    tmp_path: Path, signal_number: signal.Signals
) -> None:
    process = start(*LONG_RUN, "--path", tmp_path)
    wait_for_data_file(tmp_path)
    wait_for_cpu_time(process)
    process.send_signal(signal_number)
    stdout, stderr = process.communicate(timeout=END_TIMEOUT_S)

    assert process.returncode == 130, stderr
    assert "Interrupted after" in stdout
    assert list(tmp_path.iterdir()) == []


def test_file_is_deleted_if_the_command_ends_while_it_is_written(tmp_path: Path) -> None:
    process = start("--file-size", "1GiB", "--path", tmp_path)
    wait_for_data_file(tmp_path)
    process.terminate()
    process.communicate(timeout=END_TIMEOUT_S)

    assert process.returncode == 130
    assert list(tmp_path.iterdir()) == []


@pytest.mark.gpu
def test_cufile_of_a_gpu_moves_the_right_bytes(tmp_path: Path) -> None:
    # A process of its own, like that of a user: cuFile may crash.
    arguments = ("--directions", "read,write", "--patterns", "random", "--sizes", "4KiB,1MiB")
    options = ("--path", tmp_path, "--file-size", "64MiB", "--threads", "4", "--json")
    effort = ("--samples", "3", "--rounds", "1", "--warmup", "0", "--timeout", "0.5")
    run = subprocess.run(
        [
            sys.executable,
            "-P",
            "-m",
            "cudakit",
            "bench",
            "gds",
            *arguments,
            *map(str, options),
            *effort,
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    assert run.returncode == 0, run.stderr
    cases = [case for case in json.loads(run.stdout)["results"] if case["median_s"] is not None]
    assert {case["contender"] for case in cases} >= {"posix"}
    assert all(case["verified"] for case in cases)
