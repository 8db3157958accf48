"""Every program of the corpus is judged rightly: on a GPU by the command, elsewhere by what was kept."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import judge_races
import pytest
import race_logs
from judge_races import CORPUS, Case, Run

from cudakit.core.sanitize.races import RaceKind
from cudakit.render import json as rendered
from cudakit.trace.kinds import Kind, Known
from cudakit.trace.layout import view

LOGS = CORPUS / "logs"
JUDGE = judge_races.ROOT / "scripts/judge_races.py"
PROGRAMS = {case.name: case for case in judge_races.cases() if case.script.parent == CORPUS}
HELPERS = {"cuda_kernels"}


def complaints(case: Case, log: Path) -> list[str]:
    """Hold what the engine finds in a log to what is expected of the program."""
    result = race_logs.judged(race_logs.load(log))
    found: dict[str, Any] = json.loads(rendered.render(result))
    return list(judge_races.wrong_races(case, Run(0, 0.0, "", found)))


@pytest.mark.gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", PROGRAMS)
def test_a_race_is_found_and_what_is_clean_is_left_alone(name: str) -> None:
    done = subprocess.run(
        [sys.executable, str(JUDGE), name, "--accesses", "exact", "--all"],
        capture_output=True,
        text=True,
        check=False,
    )

    if "skipped" in done.stdout.splitlines()[0]:
        pytest.skip(done.stdout.splitlines()[0])
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", PROGRAMS)
def test_what_was_recorded_on_a_gpu_is_judged_as_expected(name: str) -> None:
    log = LOGS / f"{PROGRAMS[name].label}.npz"
    if not log.exists():
        pytest.skip(
            f"no log yet: on a GPU, judge_races.py --keep tests/sanitize_corpus/logs {name}"
        )

    assert complaints(PROGRAMS[name], log) == []
    assert log.stat().st_size <= race_logs.MOST_BYTES, "it is kept in the repository"


@pytest.fixture
def simulated(tmp_path: Path) -> Path:
    """Record a program of a simulated device, whose accesses are as exact as those of a GPU."""
    command = [sys.executable, str(JUDGE), "sim_kernels", "--keep", str(tmp_path / "logs")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return tmp_path / "logs"


def test_a_log_says_what_the_run_said(simulated: Path) -> None:
    cases = {case.variant: case for case in judge_races.cases() if case.name == "sim_kernels"}
    race, fixed = (simulated / f"sim_kernels_{variant}.npz" for variant in ("race", "fixed"))

    assert complaints(cases["race"], race) == []
    assert complaints(cases["fixed"], fixed) == []
    assert complaints(cases["race"], fixed) == ["MISSED"]
    (alarm,) = complaints(cases["fixed"], race)
    assert alarm.startswith("FALSE ALARM: 1 x certain write_after_write (kernel add after kernel")


def test_a_race_of_other_kernels_or_another_kind_is_not_the_one(simulated: Path) -> None:
    race = simulated / "sim_kernels_race.npz"
    case = next(case for case in judge_races.cases() if case.name == "sim_kernels")

    assert complaints(replace(case, kernels=("add", "*")), race) == []
    (other,) = complaints(replace(case, kernels=("add", "multiply|copy")), race)
    assert other.startswith("of others: ")
    (other,) = complaints(replace(case, kinds=("write_after_read",)), race)
    assert other.startswith("of another kind: ")


def test_what_is_clean_counts_only_where_accesses_are_exact(simulated: Path) -> None:
    fixed = simulated / "sim_kernels_fixed.npz"
    cases = {case.variant: case for case in judge_races.cases() if case.name == "sim_kernels"}
    (chain,) = race_logs.load(fixed)
    accesses = chain.records["kind"] == Kind.ACCESS
    assumed = view(chain.records[accesses], Kind.ACCESS)
    assumed["known"] = Known.ASSUMED
    chain.records[accesses] = assumed.view(chain.records.dtype)
    race_logs.save(simulated / "assumed.npz", [chain])

    exact = replace(cases["fixed"], exact=True)
    assert complaints(exact, fixed) == []
    assert complaints(exact, simulated / "assumed.npz") == [
        "only 0.0% of the launches are known exactly"
    ]


def test_a_log_holds_nothing_of_the_machine(simulated: Path) -> None:
    (chain,) = race_logs.load(simulated / "sim_kernels_race.npz")

    assert {text for text in chain.strings if text} == {"add"}
    assert {frame.file for stack in chain.stacks for frame in stack} == {"sim_kernels_race.py"}
    assert not chain.records["time_ns"].any()
    assert set(chain.records["thread"].tolist()) == {1}
    assert (simulated / "sim_kernels_race.npz").stat().st_size < 2000


def test_every_program_is_listed_with_what_is_expected_of_it() -> None:
    scripts = {path.stem for path in CORPUS.glob("*.py")} - HELPERS

    assert scripts == set(PROGRAMS)
    for name, case in PROGRAMS.items():
        assert name.endswith(f"_{case.variant}")
        assert bool(case.kinds) == bool(case.kernels) == (case.variant == "race"), name
        assert set(case.kinds) <= {kind.name.lower() for kind in RaceKind}


def test_half_of_the_programs_race_in_every_framework() -> None:
    counts = Counter((name.split("_")[0], case.variant) for name, case in PROGRAMS.items())

    frameworks = {framework for framework, _ in counts}
    assert frameworks == {"cupy", "cuda", "torch", "triton", "numba", "jax"}
    assert all(counts[each, "race"] == counts[each, "clean"] >= 3 for each in frameworks)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_short_and_says_what_is_wrong_or_why_it_is_right(name: str) -> None:
    source = PROGRAMS[name].script.read_text(encoding="utf-8")

    assert (ast.get_docstring(ast.parse(source)) or "").endswith(".")
    assert 10 <= len(source.splitlines()) <= 35
    assert ("# WRONG: " in source) == (PROGRAMS[name].variant == "race")


def test_without_exact_accesses_less_has_to_be_found() -> None:
    must = {
        accesses: {case.name for case in judge_races.cases(accesses) if case.must_be_found}
        for accesses in ("exact", "arguments")
    }

    assert {case.name for case in PROGRAMS.values() if case.variant == "race"} <= must["exact"]
    assert must["arguments"] & set(PROGRAMS) == {"cupy_fill_then_read_race", "cupy_async_pool_race"}
