"""check_races.py stops programs at a time limit, checks their reports, and writes only small logs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import check_races
import pytest
import race_logs
from check_races import TIMED_OUT, Outcome, Run

CASE = replace(next(check_races.cases()), exact=True)
CLEAN = {"exit_status": 0, "races": [], "gaps": {}}


def is_running(process: int) -> bool:
    """Return whether a process still runs; a zombie does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_program_over_time_limit_is_killed_with_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    run = check_races.run_timed(
        ["sh", "-c", f"sleep 100 & echo $! > {pid_file}; echo why >&2; wait"], 1
    )

    assert run.exit_code == TIMED_OUT
    assert run.stderr.splitlines() == ["why", "", "not finished after 1 s"]
    process = int(pid_file.read_text())
    deadline = time.monotonic() + 10
    while is_running(process) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not is_running(process)


def test_exit_code_of_program_killed_by_signal_is_that_of_a_shell() -> None:
    assert check_races.run_timed(["sh", "-c", "exit 3"], 10).exit_code == 3
    assert check_races.run_timed(["sh", "-c", "kill -9 $$"], 10).exit_code == 137


@pytest.mark.parametrize(
    ("counts", "problems"),
    [
        ({"launches_exact": 99, "launches_assumed": 1}, []),
        ({"launches_exact": 97, "launches_assumed": 2, "launches_unknown": 1}, ["only 97.0%"]),
        ({"launches_assumed": 5}, ["only 0.0%"]),
        ({}, ["only 0.0%"]),
    ],
)
def test_result_is_wrong_without_exact_accesses_of_nearly_all_launches(
    counts: dict[str, Any], problems: list[str]
) -> None:
    run = Run(0, 1.0, "", {**CLEAN, "coverage": {"launches": 100, "accesses_exact": 7, **counts}})

    reported = list(check_races.wrong_races(replace(CASE, variant="fixed"), run))
    assert [text.partition(" of the launches")[0] for text in reported] == problems


def test_too_large_log_is_not_written_and_is_reported(tmp_path: Path) -> None:
    log, target = check_races.CORPUS / "logs/cupy_chain_race.npz", tmp_path / "small.log"

    race_logs.save_small_log(log, target, program="cupy_chain.py", max_bytes=100)
    assert not target.exists()
    assert Outcome(CASE, True, "", Run(1, 1.0, ""), target).lacks_log

    race_logs.save_small_log(log, target, program="cupy_chain.py")
    assert target.stat().st_size < race_logs.MAX_LOG_BYTES
