"""``cudakit run --sanitize`` of two ranks that call collectives, as processes that write their own traces."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
from invocation import Cli

# Each rank fills a buffer, sums it over the ranks on another stream, and reads the sum.
PROGRAM = """
import multiprocessing, os, sys
from pathlib import Path
from cudakit.trace.events import *
from cudakit.trace.kinds import AccessMode, CollectiveFunction, NcclDatatype, StreamFlag
from cudakit.trace.spool import SpoolWriter
from cudakit.trace.trace_file import Clock, Frame

def run_rank(rank, how):
    writer = SpoolWriter(Path(os.environ["CUDAKIT_SPOOL"]), clock=Clock.VIRTUAL)
    def call(seq, *bodies, line):
        site = writer.stack((Frame("main", "/home/user/train.py", line),))
        for body in bodies:
            writer.write(Event(body, seq=seq, context=1, thread=1, site=site))
    count = 9 if how == "count" and rank == 1 else 8
    call(1, Communicator(77, 1, rank=rank, rank_count=2), line=1)
    call(2, StreamCreate(1, StreamFlag.NON_BLOCKING), line=2)
    call(3, StreamCreate(2, StreamFlag.NON_BLOCKING), line=2)
    call(4, Fill(1, 0x10000, 64), line=3)
    call(5, EventRecord(1, 1), line=4)
    call(6, StreamWait(2, 1), line=4)
    call(7, Launch(2, f"ncclDevKernel_{rank}", pending=True), Accessed(),
         Collective(2, 0x10000, 0x10000, count, 1, sequence=1, group=1,
                    function=CollectiveFunction.ALL_REDUCE, datatype=NcclDatatype.FLOAT32,
                    name=f"ncclDevKernel_{rank}"),
         line=5 + rank if how == "count" else 5)
    if how != "race":
        call(8, EventRecord(2, 2), line=6)
        call(9, StreamWait(1, 2), line=6)
    if how != "died" or rank == 0:
        call(10, Copy(1, 0x20000, 0x10000, 32), line=7)
    writer.close()
    os._exit(rank if how == "died" else 0)

if __name__ == "__main__":
    ranks = [multiprocessing.Process(target=run_rank, args=(rank, sys.argv[1])) for rank in (0, 1)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
"""


@pytest.fixture(autouse=True)
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    # The "python" of the environment must have cudakit.
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("VIRTUAL_ENV", raising=False)
    (tmp_path / "ranks.py").write_text(PROGRAM)


def sanitized(cli: Cli, how: str) -> tuple[int, dict[str, Any]]:
    done = cli("run", "--sanitize", "--log", "ranks.log", "-o", "ranks.json", "ranks.py", how)
    return done.exit_code, json.loads(Path("ranks.json").read_text())


def test_result_used_after_wait_is_clean(cli: Cli) -> None:
    code, result = sanitized(cli, "clean")
    assert (code, result["races"], result["different_calls"]) == (0, [], [])
    assert result["coverage"]["collectives"] == 2
    assert sorted(process["rank"] for process in result["processes"]) == [0, 1]


def test_same_race_of_two_ranks_is_reported_once(cli: Cli) -> None:
    code, result = sanitized(cli, "race")
    (race,) = result["races"]
    assert (code, race["kind"], race["count"]) == (1, "read_after_write", 2)
    assert sorted(race["processes"]) == sorted(
        process["process"] for process in result["processes"]
    )
    lines = [race[side]["stack"][0]["line"] for side in ("previous", "current")]
    assert lines == [5, 7]


def test_calls_that_differ_are_findings_with_both_lines(cli: Cli) -> None:
    code, result = sanitized(cli, "count")
    (difference,) = result["different_calls"]
    assert (code, result["races"], difference["kind"]) == (1, [], "count")
    assert [difference[call]["stack"][0]["line"] for call in ("first", "second")] == [5, 6]
    again = cli("sanitize", "ranks.log", "--json")
    assert (again.exit_code, json.loads(again.stdout)["different_calls"]) == (1, [difference])


def test_rank_that_died_is_no_difference(cli: Cli) -> None:
    code, result = sanitized(cli, "died")
    assert (code, result["races"], result["different_calls"]) == (0, [], [])
