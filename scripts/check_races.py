"""Compare the reports of ``cudakit run --sanitize`` on examples and test programs with the expected ones.

    python scripts/check_races.py                     # all programs that can run here, four at a time
    python scripts/check_races.py sim_copies 'cupy_*' --all
    python scripts/check_races.py 'sanitize_corpus/*' # one folder: races, sanitize_programs, sanitize_corpus
    python scripts/check_races.py --plain             # without cudakit: do the programs work
    python scripts/check_races.py --accesses arguments
    python scripts/check_races.py 'sanitize_corpus/*' --keep tests/sanitize_corpus/logs

Each name in the expected.toml of a folder is a pair of programs: a race, which must be found with a line of
the program in its call stack, and the fixed variant, for which no race may be reported. A pair is two
scripts, or one script with the argument "race" or "fixed".

The corpus needs exact accesses; with --accesses arguments, only the races that assumed accesses show must be
found. Prints a line for each wrong result, with --all for each program, and exits with 1 if there is any. A
program that takes longer than --seconds is killed and counts as wrong. --json FILE writes the reports. --keep
DIR writes small logs of the recorded events (race_logs), from which tests repeat the reports without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

import race_logs

from cudakit.gpu.cuda.current import device_count

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "tests/sanitize_corpus"
PROGRAMS = ROOT / "tests/sanitize_programs"
FOLDERS = (ROOT / "examples/races", PROGRAMS, CORPUS)
RUN = [sys.executable, "-P", "-m", "cudakit", "run", "--sanitize", "--python", sys.executable]
RACES_FOUND = 1  # the exit code if the program's own is 0
TIMED_OUT = 124  # the exit code of timeout(1)
LEAST_EXACT = 0.99  # share of launches with exact accesses
CONFIDENCES = ("possible", "likely", "certain")  # possible races are hidden by default


@dataclass(frozen=True, slots=True)
class Case:
    """One variant of a program, and the expected report."""

    name: str
    variant: str  # race or fixed
    script: Path
    arguments: tuple[str, ...]
    kinds: tuple[str, ...]
    confidence: str
    needs: tuple[str, ...] = ()
    status: int = 0
    devices: int = 1
    kernels: tuple[str, ...] = ()  # patterns of the two sides, in any order; "|" is "or"
    exact: bool = False  # whether nearly all launches must have exact accesses

    @property
    def must_be_found(self) -> bool:
        return self.variant == "race" and self.confidence != "possible"

    @property
    def label(self) -> str:
        return "_".join((self.script.stem, *self.arguments))

    @property
    def path(self) -> str:
        """The name with its folder, because some names are in two folders."""
        return f"{self.script.parent.name}/{self.name}"

    def is_named(self, patterns: Sequence[str]) -> bool:
        """Return whether one of the patterns matches the name, with or without its folder."""
        return any(
            matches(name, pattern) for pattern in patterns for name in (self.name, self.path)
        )

    def missing(self) -> str:
        """Return the requirements of the program that this machine lacks, or an empty text."""
        absent = [name for name in self.needs if not is_usable(name)]
        if absent:
            return f"needs {', '.join(absent)}"
        enough = not self.needs or visible_devices() >= self.devices
        return "" if enough else f"needs {self.devices} GPUs"


@dataclass(slots=True)
class Run:
    """The exit code of a program, and the report about it."""

    exit_code: int
    seconds: float
    stderr: str
    report: dict[str, Any] = field(default_factory=dict)

    @property
    def races(self) -> list[dict[str, Any]]:
        races: list[dict[str, Any]] = self.report.get("races", [])
        return races


def cases(accesses: str = "exact") -> Iterator[Case]:
    """Yield all cases with the report expected for ``accesses``: "exact" or "arguments"."""
    for folder in FOLDERS:
        make = of_corpus if folder == CORPUS else of_example
        for name, fields in expected(folder).items():
            for variant in ("race", "fixed"):
                own = folder / f"{name}_{variant}.py"
                script, arguments = (
                    (own, ()) if own.exists() else (folder / f"{name}.py", (variant,))
                )
                yield make(partial(Case, name, variant, script, arguments), accesses, **fields)


def expected(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the list of a folder; lists in it become tuples."""
    listed = tomllib.loads((folder / "expected.toml").read_text(encoding="utf-8"))
    return {
        name: {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
        for name, fields in listed.items()
    }


def of_example(make: partial[Case], recorded: str, *, confidence: str, **fields: Any) -> Case:
    """Make a case of the examples, whose ``confidence`` is that with assumed accesses."""
    certain = recorded == "exact" and confidence == "possible"
    return make(confidence="certain" if certain else confidence, **fields)


def of_corpus(
    make: partial[Case], recorded: str, *, accesses: str, sure: str = "certain", **fields: Any
) -> Case:
    """Make a case of the corpus, whose race must be found with ``accesses``."""
    sure = sure if recorded == "exact" else "likely" if accesses == recorded else "possible"
    return make(confidence=sure, exact=recorded == "exact", **fields)


@cache
def is_usable(module: str) -> bool:
    """Return whether a module can be imported; an installed one may fail to."""
    command = [sys.executable, "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


visible_devices = cache(device_count)


def plain(case: Case, seconds: float) -> Run:
    return timed([sys.executable, str(case.script), *case.arguments], seconds)


def under_cudakit(case: Case, seconds: float, accesses: str | None, keep: Path | None) -> Run:
    """Run a program under cudakit; with ``keep``, also write a small log there."""
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "races.json"), Path(folder, "races.log")
        chosen = [*(["--accesses", accesses] if accesses else []), "--log", str(log)]
        own = ["-o", str(output), *chosen, "--", str(case.script), *case.arguments]
        run = timed([*RUN, *own], seconds)
        if output.exists():
            run.report = json.loads(output.read_text(encoding="utf-8") or "{}")
        if keep and log.exists():
            race_logs.keep(log, keep / f"{case.label}.log", program=case.script.name)
    return run


def timed(command: list[str], seconds: float) -> Run:
    """Run a command; kill it with all its children if it takes longer."""
    start = time.perf_counter()
    process = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        _, stderr = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, stderr = process.communicate()
        return Run(TIMED_OUT, seconds, f"{stderr}\nnot finished after {seconds:g} s")
    # subprocess returns a negative number for a signal, a shell does not.
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Run(code, time.perf_counter() - start, stderr)


def differences(case: Case, run: Run) -> Iterator[str]:
    """Yield the differences from the expected report."""
    if not run.report:
        yield f"no result: {last_line(run.stderr)}"
        return
    if run.report.get("exit_status") != case.status:
        yield f"exit_status {run.report.get('exit_status')}, expected {case.status}"
    expected = case.status or (RACES_FOUND if run.races else 0)
    if run.exit_code != expected:
        yield f"exit code {run.exit_code}, expected {expected}"
    yield from wrong_races(case, run)


def wrong_races(case: Case, run: Run) -> Iterator[str]:
    if case.exact and (share := exact_share(run)) < LEAST_EXACT:
        yield f"only {share:.1%} of the launches have exact accesses"
    if case.variant != "race":
        yield from (f"FALSE POSITIVE: {in_words(race)}" for race in run.races)
        return
    if case.must_be_found and not run.races:
        yield "MISSED"
    yield from (f"unexpected kind: {in_words(r)}" for r in run.races if r["kind"] not in case.kinds)
    if case.kernels:
        others = (race for race in run.races if not is_between(case.kernels, race))
        yield from (f"unexpected kernels: {in_words(race)}" for race in others)
    if run.races and max(map(confidence, run.races)) < CONFIDENCES.index(case.confidence):
        yield f"less confidence than {case.confidence}"
    if run.races and not any(shows(case.script, race) for race in run.races):
        yield "no line of the program in the call stacks"


def exact_share(run: Run) -> float:
    """Return the share of launches whose accesses are exact; 0 without launches."""
    coverage = run.report.get("coverage", {})
    counts = [coverage.get(f"launches_{known}", 0) for known in ("exact", "assumed", "unknown")]
    return float(counts[0] / max(sum(counts), 1))


def is_between(patterns: Sequence[str], race: dict[str, Any]) -> bool:
    """Return whether the two sides of a race match two patterns, in any order."""
    one, other = (
        str(race[side]["kernel"] or race[side]["operation"]).lower()
        for side in ("current", "previous")
    )
    first, second = patterns
    return (matches(one, first) and matches(other, second)) or (
        matches(one, second) and matches(other, first)
    )


def matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern.lower()) for pattern in patterns.split("|"))


def confidence(race: dict[str, Any]) -> int:
    return CONFIDENCES.index(race["confidence"])


def shows(script: Path, race: dict[str, Any]) -> bool:
    """Return whether the call stack of either side has a frame of the program."""
    frames = [frame for side in ("current", "previous") for frame in race[side]["stack"]]
    return any(Path(str(frame["filename"])).name == script.name for frame in frames)


def in_words(race: dict[str, Any]) -> str:
    sides = " after ".join(str(race[side]["operation"])[:60] for side in ("current", "previous"))
    return f"{race['count']} x {race['confidence']} {race['kind']} ({sides})"


def summary(run: Run) -> str:
    """Return the findings and the coverage in one line."""
    coverage = run.report.get("coverage", {})
    counts = ", ".join(
        f"{coverage[key]} {key}"
        for key in ("launches", "launches_exact", "copies")
        if key in coverage
    )
    races = "; ".join(map(in_words, run.races[:2])) or "no races"
    gaps = sum(run.report.get("gaps", {}).values())
    return f"{races} [{counts}{f', {gaps} gaps' if gaps else ''}]"


def last_line(text: str) -> str:
    """Return the last line that is neither empty nor the name of a file that cudakit wrote."""
    lines = (line for line in reversed(text.splitlines()) if line.strip())
    return next((line for line in lines if not line.startswith("Wrote ")), "no output")


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a case."""

    case: Case
    right: bool | None  # None: the program cannot run here
    words: str
    run: Run | None
    log: Path | None = None  # the log for --keep

    @property
    def lacks_log(self) -> bool:
        return self.log is not None and self.run is not None and not self.log.exists()

    def __str__(self) -> str:
        mark = {True: "ok", False: "WRONG", None: "skipped"}[self.right]
        seconds = f"{self.run.seconds:5.1f} s" if self.run else " " * 7
        return f"{mark:7} {seconds}  {self.case.path:45} {self.case.variant:5}  {self.words}"


def checked(
    case: Case, *, without_cudakit: bool, seconds: float, accesses: str | None, keep: Path | None
) -> Outcome:
    if reason := case.missing():
        return Outcome(case, None, reason, None)
    if without_cudakit:
        run = plain(case, seconds)
        words = last_line(run.stderr) if run.exit_code else ""
        return Outcome(case, run.exit_code == case.status, words, run)
    run = under_cudakit(case, seconds, accesses, keep)
    wrong = list(differences(case, run))
    log = keep / f"{case.label}.log" if keep else None
    return Outcome(case, not wrong, "; ".join(wrong) or summary(run), run, log)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--all", action="store_true", help="a line for every program")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=180, help="for each program")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--accesses", choices=["exact", "arguments"])
    parser.add_argument("--keep", type=Path, metavar="DIR")
    chosen = parser.parse_args()
    known = list(cases())
    if unknown := [
        name for name in chosen.names if not any(case.is_named([name]) for case in known)
    ]:
        parser.error(f"no such name: {', '.join(sorted(unknown))}")
    return chosen


def main() -> int:
    chosen = options()
    selected = [
        case
        for case in cases(chosen.accesses or "exact")
        if not chosen.names or case.is_named(chosen.names)
    ]
    check = partial(
        checked,
        without_cudakit=chosen.plain,
        seconds=chosen.seconds,
        accesses=chosen.accesses,
        keep=chosen.keep,
    )
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for outcome in pool.map(check, selected):
            outcomes.append(outcome)
            if chosen.all or outcome.right is False:
                print(outcome, flush=True)
    if chosen.json:
        reports = {
            f"{outcome.case.path} {outcome.case.variant}": outcome.run.report
            | {"stderr": outcome.run.stderr}
            for outcome in outcomes
            if outcome.run
        }
        chosen.json.write_text(json.dumps(reports, indent=1), encoding="utf-8")
    if missing := [outcome.case.label for outcome in outcomes if outcome.lacks_log]:
        print(f"no log, because it is larger than {race_logs.MOST_BYTES:,} bytes or nothing was")
        print(f"recorded: {', '.join(missing)}")
    ran = [outcome.right for outcome in outcomes if outcome.right is not None]
    print(f"{sum(ran)} of {len(ran)} as expected, {len(outcomes) - len(ran)} skipped")
    return 0 if all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
