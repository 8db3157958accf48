"""Compare --accesses auto with exact on corpus programs in loops of 50 rounds, with a race in one round only.

    python scripts/check_loops.py                       # all loops that can run here
    python scripts/check_loops.py 'cupy_*' --kinds steady,fresh --rounds 1,37,50
    python scripts/check_loops.py --rounds 0            # loops without a race
    python scripts/check_loops.py --until 90            # start no loop after 90 seconds

Each process runs the loops of several programs (loop_corpus.py) with --accesses auto. If its findings are not
the races that tests/sanitize_corpus/expected.toml lists, the same loops run with --accesses exact, and the
findings are compared. Loops with the race in round 0 have no race, and must have no finding. Prints the
differences, and a line for each kind of loop with the share of launches that were not recorded because
templates had their accesses. Exits with 1 if the findings of auto and exact differ.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import check_races
from check_races import CORPUS, RUN, Case, Run, run_timed
from loop_corpus import ROUNDS

LOOP_CORPUS = str(Path(__file__).with_name("loop_corpus.py"))
NO_ROUND = 0  # The racing round of loops without a race.
RACING_ROUNDS = (1, 37, ROUNDS, NO_ROUND)
MAX_PROGRAMS = 6  # Number of programs that one process runs.
GRACE_S = 25  # Seconds after --until at which running processes are killed.
FRAMEWORKS = ("cuda_python", "cupy", "jax", "numba", "torch", "triton")
# These programs change the current context or the memory settings of the process.
ALONE = ("cuda_python_two_contexts", "jax_cupy", "jax_overwritten", "jax_torch")


@dataclass(frozen=True, slots=True)
class LoopKind:
    """A way to run the loops: options of loop_corpus.py and environment variables."""

    name: str
    options: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()
    frameworks: tuple[str, ...] = FRAMEWORKS
    racing_rounds: tuple[int, ...] = (37,)


LOOP_KINDS = (
    LoopKind("steady", racing_rounds=RACING_ROUNDS),
    LoopKind("fresh", ("--fresh",), racing_rounds=(37, NO_ROUND)),
    LoopKind(
        "expandable segments",
        environment=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
        frameworks=("torch", "triton"),
    ),
    LoopKind(
        "one allocation",
        ("--one-allocation",),
        (("XLA_PYTHON_CLIENT_PREALLOCATE", "true"), ("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.1")),
        ("cupy", "jax"),
    ),
    LoopKind("two threads", ("--threads", "2"), frameworks=("cupy", "torch")),
)


@dataclass(frozen=True, slots=True)
class Job:
    """The loops that one process runs."""

    kind: LoopKind
    cases: tuple[Case, ...]  # variants "race" of the programs
    racing_round: int

    def __str__(self) -> str:
        names = " ".join(case.name for case in self.cases)
        return f"{self.kind.name}, race in round {self.racing_round}: {names}"


@dataclass(slots=True)
class Outcome:
    """The races of a job, by program, and the reports of its runs."""

    job: Job
    auto: Run
    exact: Run | None = None
    differences: list[str] = field(default_factory=list)


def jobs(patterns: list[str], kinds: list[str], rounds: list[int]) -> Iterator[Job]:
    """Yield the jobs: those with a race in the 37th or in no round first, because they use templates most."""
    by_framework: defaultdict[str, list[Case]] = defaultdict(list)
    for case in check_races.cases():
        is_selected = not patterns or case.matches_any(patterns)
        is_race = case.script.parent == CORPUS and case.variant == "race"
        if is_race and is_selected and not case.missing_requirements():
            by_framework[_framework(case)].append(case)
    planned = [
        Job(kind, group, racing_round)
        for kind in LOOP_KINDS
        for racing_round in kind.racing_rounds
        for framework in kind.frameworks
        for group in _groups(by_framework[framework])
        if (not kinds or kind.name in kinds) and (not rounds or racing_round in rounds)
    ]
    yield from sorted(planned, key=lambda job: job.racing_round not in (37, NO_ROUND))


def _framework(case: Case) -> str:
    return next(name for name in FRAMEWORKS if case.name.startswith(name))


def _groups(cases: list[Case]) -> Iterator[tuple[Case, ...]]:
    yield from ((case,) for case in cases if case.name in ALONE)
    others = [case for case in cases if case.name not in ALONE]
    for begin in range(0, len(others), MAX_PROGRAMS):
        yield tuple(others[begin : begin + MAX_PROGRAMS])


def run_job(job: Job, accesses: str, *, seconds: float, end: float, device: int) -> Run:
    """Run a job for at most ``seconds``, and until the time ``end`` at the latest."""
    seconds = max(1, min(seconds, end - time.monotonic()))
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "races.json")
        program = [LOOP_CORPUS, "--race-in", str(job.racing_round), *job.kind.options]
        environment = {"CUDA_VISIBLE_DEVICES": str(device), **dict(job.kind.environment)}
        settings = [f"{name}={value}" for name, value in environment.items()]
        command = [*RUN, "--accesses", accesses, "-o", str(output), "--", *program]
        run = run_timed(["env", *settings, *command, *(c.name for c in job.cases)], seconds)
        if output.exists():
            run.report = json.loads(output.read_text(encoding="utf-8") or "{}")
        return run


def check(
    job: Job, number: int, *, seconds: float, end: float, devices: int, always_exact: bool
) -> Outcome:
    """Run a job with auto and, if a race is missing or not expected, with exact accesses."""
    run = partial(run_job, job, seconds=seconds, end=end, device=number % devices)
    outcome = Outcome(job, run("auto"))
    problems = list(_problems(job, outcome.auto))
    if problems or always_exact:
        outcome.exact = run("exact")
        outcome.differences = list(_differences(outcome.auto, outcome.exact))
    return outcome


def _problems(job: Job, run: Run) -> Iterator[str]:
    """Yield what differs from the expected races."""
    if not run.report or run.report.get("exit_status"):
        yield f"no result: {check_races.last_line(run.stderr)}"
        return
    if job.racing_round == NO_ROUND:
        yield from _findings(run)
        return
    for case in job.cases:
        races = [race for race in run.races if check_races.has_frame_of(case.script, race)]
        if not races:
            yield f"{case.name}: missed"
        yield from (f"{case.name}: {text}" for text in _unexpected(case, races))
    scripts = [case.script for case in job.cases]
    if any(not any(check_races.has_frame_of(script, r) for script in scripts) for r in run.races):
        yield "a race without a line of the program"


def _findings(run: Run) -> Iterator[str]:
    """Yield all findings: races, possible races with launches that were not recorded, missing events."""
    yield from (f"race: {check_races.race_text(race)}" for race in run.races)
    yield from (f"unverified: {pair['sentence']}" for pair in run.report.get("unverified", ()))
    yield from (f"incomplete: {sentence}" for sentence in run.report.get("incomplete", ()))


def _unexpected(case: Case, races: Iterable[dict[str, Any]]) -> Iterator[str]:
    for race in races:
        if race["kind"] not in case.kinds:
            yield f"unexpected kind: {check_races.race_text(race)}"
        elif case.kernels and not check_races.is_between(case.kernels, race):
            yield f"unexpected kernels: {check_races.race_text(race)}"


def _differences(auto: Run, exact: Run) -> Iterator[str]:
    """Yield the races that only one of two runs reports."""
    for name, run in (("auto", auto), ("exact", exact)):
        if not run.report or run.report.get("exit_status"):
            yield f"no result with {name}: {run.stderr.strip()[-600:]}"
            return
    yield from check_races.race_differences(auto, exact, ("auto", "exact"))
    if not exact.races:
        yield from (f"only auto: {text}" for text in _findings(auto))


def print_summary(outcomes: list[Outcome]) -> None:
    launches: Counter[str] = Counter()
    from_template: Counter[str] = Counter()
    numbers: Counter[str] = Counter()
    unverified: Counter[str] = Counter()
    incomplete: Counter[str] = Counter()
    for outcome in outcomes:
        name = f"{outcome.job.kind.name}, race in round {outcome.job.racing_round}"
        coverage = outcome.auto.report.get("coverage", {})
        launches[name] += coverage.get("launches", 0)
        from_template[name] += coverage.get("launches_from_template", 0)
        numbers[name] += len(outcome.job.cases)
        unverified[name] += len(outcome.auto.report.get("unverified", ()))
        incomplete[name] += len(outcome.auto.report.get("incomplete", ()))
    for name, number in numbers.items():
        share = from_template[name] / max(launches[name], 1)
        print(
            f"{name:40} {number:3} programs, {launches[name]:6,} launches, {share:.0%} from templates,"
            f" {unverified[name]} unverified, {incomplete[name]} incomplete"
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--kinds", default="", help="such as steady,fresh")
    parser.add_argument("--rounds", default="", help="such as 1,37,50")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seconds", type=float, default=120, help="for each process")
    parser.add_argument("--until", type=float, default=1e9, help="start no process after this time")
    parser.add_argument("--compare-all", action="store_true", help="run all loops with exact, too")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = [int(number) for number in options.rounds.split(",") if number]
    kinds = [name for name in options.kinds.split(",") if name]
    begin, numbers = time.monotonic(), count()
    check_races.import_needed_modules(check_races.cases())
    planned = list(jobs(options.names, kinds, rounds))

    def check_in_time(job: Job) -> Outcome | None:
        if time.monotonic() > begin + options.until:
            return None
        return check(
            job,
            next(numbers),
            seconds=options.seconds,
            end=begin + options.until + GRACE_S,
            devices=max(check_races.visible_devices(), 1),
            always_exact=options.compare_all,
        )

    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for job, outcome in zip(planned, pool.map(check_in_time, planned), strict=True):
            if outcome is None:
                continue
            outcomes.append(outcome)
            seconds = outcome.auto.seconds + (outcome.exact.seconds if outcome.exact else 0)
            if outcome.differences:
                print(f"DIFFERENT {seconds:5.1f} s  {job}", *outcome.differences, sep="\n    ")
            elif outcome.exact and not options.compare_all:
                problems = _problems(job, outcome.auto)
                print(f"as exact  {seconds:5.1f} s  {job}", *problems, sep="\n    ")
    print_summary(outcomes)
    if options.json:
        reports = {
            str(outcome.job): {
                "auto": outcome.auto.report,
                "exact": outcome.exact.report if outcome.exact else None,
                "stderr": outcome.auto.stderr[-2000:],
                "seconds": outcome.auto.seconds,
            }
            for outcome in outcomes
        }
        options.json.write_text(json.dumps(reports), encoding="utf-8")
    different = sum(bool(outcome.differences) for outcome in outcomes)
    skipped = len(planned) - len(outcomes)
    print(f"{len(outcomes)} processes, {different} with differences, {skipped} not started")
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
