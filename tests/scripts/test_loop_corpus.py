"""loop_corpus.py runs a program of the corpus in rounds, with its race in one round only."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path

import check_races
import loop_corpus
import pytest

PROGRAM = """\
import sys
import threading

race = sys.argv[1] == "race"


def synchronize():
    rounds.append((list(done), threading.current_thread().name))
    done.clear()


rounds, done, made = [], [], []
made.append(1)
index = 7 if race else 3
synchronize()

for _ in range(1):
    done.append(index)
if race:
    done.append("race")
synchronize()
"""
CORPUS_PROGRAMS = sorted(
    {case.script for case in check_races.cases() if case.script.parent == check_races.CORPUS}
)


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM, encoding="utf-8")
    return path


def test_only_the_selected_round_has_the_race(program: Path) -> None:
    variables = loop_corpus.run(loop_corpus.loop_of(program), racing_round=37)

    rounds = [work for work, _ in variables["rounds"] if work]
    assert len(rounds) == loop_corpus.ROUNDS
    assert [number for number, work in enumerate(rounds, 1) if work == [7, "race"]] == [37]
    assert rounds.count([3]) == loop_corpus.ROUNDS - 1
    assert variables["made"] == [1]


@pytest.mark.parametrize("path", CORPUS_PROGRAMS, ids=lambda path: path.stem)
def test_rounds_of_corpus_programs_have_work_and_no_imports(path: Path) -> None:
    loop = loop_corpus.loop_of(path)
    text = str(loop)
    setup, body = text.split(f"for round in range({loop_corpus.ROUNDS}):")
    assert "import" not in body
    assert "race" in body
    assert "race" not in "\n".join(line for line in setup.splitlines() if "race:" not in line)
    assert body.strip()
    fresh = loop_corpus.loop_of(path, fresh=True)
    assert len(fresh.round) >= len(loop.round)


def test_threads_run_rounds_in_turn(program: Path) -> None:
    pools = [ThreadPoolExecutor(1, f"thread-{number}") for number in range(2)]
    loop = loop_corpus.loop_of(program)
    variables = loop_corpus.run(loop, racing_round=0, threads=cycle(pools))

    names = [thread for work, thread in variables["rounds"] if work]
    assert names == ["thread-0_0", "thread-1_0"] * (loop_corpus.ROUNDS // 2)
