"""Hold ``cudakit run --sanitize`` to what the examples and the test programs expect of it.

    python scripts/judge_races.py --jobs 8            # all that can run here, so many at a time
    python scripts/judge_races.py sim_copies 'cupy_*' # these
    python scripts/judge_races.py --plain             # without cudakit: do the programs themselves work
    python scripts/judge_races.py --accesses arguments
    python scripts/judge_races.py '*_race' '*_clean' --keep tests/sanitize_corpus/logs

Each name of examples/races/expected.toml and tests/sanitize_programs/expected.toml is a pair: a program with
a race, which must be found and show a line of the program, and its fixed twin, in which nothing may be found.
Each name of tests/sanitize_corpus/expected.toml is one program, with either.

The programs of the corpus are held to what exact accesses show, and with --accesses arguments to what can be
known without them. Prints a line for each program and exits with 1 where one was judged wrongly; --json FILE
keeps what was said, --keep DIR what was recorded (race_logs), from which it can be said again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAIRS = (ROOT / "examples/races", ROOT / "tests/sanitize_programs")
CORPUS = ROOT / "tests/sanitize_corpus"
RECORD = ROOT / "scripts/record_races.py"
RACES_FOUND = 1  # the exit code, where the program's own is 0
LEAST_EXACT = 0.99
SURENESS = ("possible", "likely", "certain")  # "possible" is hidden unless asked for


@dataclass(frozen=True, slots=True)
class Case:
    """One program, and what is expected of it."""

    name: str
    variant: str  # race, or what has none: fixed, clean
    script: Path
    arguments: tuple[str, ...]
    kinds: tuple[str, ...]
    confidence: str
    needs: tuple[str, ...] = ()
    status: int = 0
    devices: int = 1
    kernels: tuple[str, ...] = ()  # patterns of the two sides, in any order; "|" is "or"
    exact: bool = (
        False  # whether the verdict counts only where what kernels touched is known exactly
    )

    @property
    def must_be_found(self) -> bool:
        return self.variant == "race" and self.confidence != "possible"

    @property
    def label(self) -> str:
        return "_".join((self.script.stem, *self.arguments))

    def missing(self) -> str:
        """Say what this machine lacks for it."""
        absent = [name for name in self.needs if not is_usable(name)]
        if absent:
            return f"needs {', '.join(absent)}"
        devices = len(list(Path("/dev").glob("nvidia[0-9]*")))
        return f"needs {self.devices} GPUs" if self.needs and devices < self.devices else ""


@dataclass(slots=True)
class Run:
    """How a program ended, and what was found in it."""

    exit_code: int
    seconds: float
    stderr: str
    found: dict[str, Any] = field(default_factory=dict)

    @property
    def races(self) -> list[dict[str, Any]]:
        races: list[dict[str, Any]] = self.found.get("races", [])
        return races


def cases(accesses: str = "exact") -> Iterator[Case]:
    """Yield all cases, with what is expected where accesses are known like that."""
    for folder in PAIRS:
        for name, fields in expected(folder).items():
            for variant in ("race", "fixed"):
                yield case(folder, name, variant, fields)
    for name, fields in expected(CORPUS).items():
        yield of_corpus(name, accesses, **fields)


def expected(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the list of a folder; what is a list there is a tuple here."""
    listed = tomllib.loads((folder / "expected.toml").read_text(encoding="utf-8"))
    return {
        name: {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
        for name, fields in listed.items()
    }


def case(folder: Path, name: str, variant: str, fields: dict[str, Any]) -> Case:
    """Make a case: a script of its own for each variant, or one that is told which."""
    own = folder / f"{name}_{variant}.py"
    script, arguments = (own, ()) if own.exists() else (folder / f"{name}.py", (variant,))
    return Case(name, variant, script, arguments, **fields)


def of_corpus(name: str, known: str, *, verdict: str, accesses: str = "", **fields: Any) -> Case:
    """Make a case of the corpus; ``accesses`` are those that its race takes, ``known`` those that are had."""
    sure = "certain" if known == "exact" else "likely" if accesses == known else "possible"
    made = Case(name, verdict, CORPUS / f"{name}.py", (), fields.pop("kinds", ()), sure)
    return replace(made, exact=known == "exact", **fields)


@cache
def is_usable(module: str) -> bool:
    """Say whether a module can be imported: to be installed is not enough where versions do not fit."""
    command = [sys.executable, "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def plain(case: Case) -> Run:
    return timed([sys.executable, str(case.script), *case.arguments])


def watched(case: Case, accesses: str | None = None, keep: Path | None = None) -> Run:
    """Run a program under cudakit; with ``keep``, what was recorded goes there as well."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "races.json")
        command = [sys.executable, "-P", "-m", "cudakit", "run", "--sanitize"]
        command += ["--python", sys.executable]
        if keep:
            command = [sys.executable, str(RECORD), "--log", str(keep / f"{case.label}.npz")]
        chosen = ["--accesses", accesses] if accesses else []
        own = ["-o", str(output), *chosen, "--", str(case.script), *case.arguments]
        run = timed([*command, *own])
        if output.exists():
            run.found = json.loads(output.read_text(encoding="utf-8") or "{}")
    return run


def timed(command: list[str]) -> Run:
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    # Python's own word for a signal is negative, a shell's is not.
    code = done.returncode if done.returncode >= 0 else 128 - done.returncode
    return Run(code, time.perf_counter() - start, done.stderr)


def complaints(case: Case, run: Run) -> Iterator[str]:
    """Say what is not as expected."""
    if not run.found:
        yield f"no result: {last_line(run.stderr)}"
        return
    if run.found.get("exit_status") != case.status:
        yield f"exit_status {run.found.get('exit_status')}, the program's is {case.status}"
    expected = case.status or (RACES_FOUND if run.races else 0)
    if run.exit_code != expected:
        yield f"exit code {run.exit_code}, not {expected}"
    yield from wrong_races(case, run)


def wrong_races(case: Case, run: Run) -> Iterator[str]:
    if case.exact and (share := exact_share(run)) < LEAST_EXACT:
        yield f"only {share:.1%} of the accesses are known exactly"
    if case.variant != "race":
        yield from (f"FALSE ALARM: {in_words(race)}" for race in run.races)
        return
    if case.must_be_found and not run.races:
        yield "MISSED"
    yield from (f"of another kind: {in_words(r)}" for r in run.races if r["kind"] not in case.kinds)
    if case.kernels:
        yield from (f"of others: {in_words(r)}" for r in run.races if not is_of(case.kernels, r))
    if run.races and max(map(sureness, run.races)) < SURENESS.index(case.confidence):
        yield f"less sure than {case.confidence}"
    if run.races and not any(shows(case.script, race) for race in run.races):
        yield "no line of the program"


def exact_share(run: Run) -> float:
    """Return which part of the accesses is known exactly; none of none."""
    coverage = run.found.get("coverage", {})
    counts = {key: count for key, count in coverage.items() if key.startswith("accesses_")}
    return counts.get("accesses_exact", 0) / max(sum(counts.values()), 1)


def is_of(patterns: Sequence[str], race: dict[str, Any]) -> bool:
    """Say whether the two sides of a race are those of two patterns, in any order."""
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


def sureness(race: dict[str, Any]) -> int:
    return SURENESS.index(race["confidence"])


def shows(script: Path, race: dict[str, Any]) -> bool:
    """Say whether a stack of either side goes through the program."""
    frames = [frame for side in ("current", "previous") for frame in race[side]["stack"]]
    return any(Path(str(frame["filename"])).name == script.name for frame in frames)


def in_words(race: dict[str, Any]) -> str:
    sides = " after ".join(str(race[side]["operation"])[:60] for side in ("current", "previous"))
    return f"{race['count']} x {race['confidence']} {race['kind']} ({sides})"


def seen(run: Run) -> str:
    """Say in a few words what was found and how much was looked at."""
    coverage = run.found.get("coverage", {})
    counts = ", ".join(
        f"{coverage[key]} {key}" for key in ("launches", "copies") if key in coverage
    )
    races = "; ".join(map(in_words, run.races[:2])) or "clean"
    gaps = sum(run.found.get("gaps", {}).values())
    return f"{races} [{counts}{f', {gaps} gaps' if gaps else ''}]"


def last_line(text: str) -> str:
    return next((line for line in reversed(text.splitlines()) if line.strip()), "nothing was said")


@dataclass(frozen=True, slots=True)
class Judgement:
    """What came of a case."""

    case: Case
    right: bool | None  # None: it cannot run here
    words: str
    run: Run | None

    def __str__(self) -> str:
        mark = {True: "ok", False: "WRONG", None: "skipped"}[self.right]
        seconds = f"{self.run.seconds:5.1f} s" if self.run else " " * 7
        return f"{mark:7} {seconds}  {self.case.name:35} {self.case.variant:5}  {self.words}"


def judged(
    case: Case, *, without_cudakit: bool, accesses: str | None = None, keep: Path | None = None
) -> Judgement:
    if reason := case.missing():
        return Judgement(case, None, reason, None)
    if without_cudakit:
        run = plain(case)
        words = last_line(run.stderr) if run.exit_code else ""
        return Judgement(case, run.exit_code == case.status, words, run)
    run = watched(case, accesses, keep)
    wrong = list(complaints(case, run))
    return Judgement(case, not wrong, "; ".join(wrong) or seen(run), run)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--accesses", choices=["exact", "arguments"])
    parser.add_argument("--keep", type=Path, metavar="DIR")
    chosen = parser.parse_args()
    names = {case.name for case in cases()}
    if unknown := [each for each in chosen.names if not any(matches(n, each) for n in names)]:
        parser.error(f"no such name: {', '.join(sorted(unknown))}")
    return chosen


def main() -> int:
    chosen = options()
    some = [
        case
        for case in cases(chosen.accesses or "exact")
        if not chosen.names or any(matches(case.name, each) for each in chosen.names)
    ]
    judge = partial(
        judged,
        without_cudakit=chosen.plain,
        accesses=chosen.accesses,
        keep=chosen.keep,
    )
    judgements: list[Judgement] = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for judgement in pool.map(judge, some):
            judgements.append(judgement)
            print(judgement, flush=True)
    if chosen.json:
        said = {
            f"{each.case.name} {each.case.variant}": each.run.found | {"stderr": each.run.stderr}
            for each in judgements
            if each.run
        }
        chosen.json.write_text(json.dumps(said, indent=1), encoding="utf-8")
    ran = [each.right for each in judgements if each.right is not None]
    print(f"{sum(ran)} of {len(ran)} as expected, {len(judgements) - len(ran)} skipped")
    return 0 if all(ran) else 1


if __name__ == "__main__":
    sys.exit(main())
