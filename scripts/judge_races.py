"""Hold ``cudakit run --sanitize`` to what the examples and the test programs expect of it.

    python scripts/judge_races.py --jobs 8            # all that can run here, so many at a time
    python scripts/judge_races.py sim_copies threads  # these
    python scripts/judge_races.py --plain             # without cudakit: do the programs themselves work

Each name of examples/races/expected.toml and tests/sanitize_programs/expected.toml is a pair: a program with
a race, which must be found and show a line of the program, and its fixed twin, in which nothing may be found.
Prints a line for each program and exits with 1 where one was judged wrongly; --json FILE keeps what was said.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LISTS = (ROOT / "examples/races", ROOT / "tests/sanitize_programs")
RACES_FOUND = 1  # the exit code, where the program's own is 0
SURENESS = ("possible", "likely", "certain")  # "possible" is hidden unless asked for


@dataclass(frozen=True, slots=True)
class Case:
    """One program, and what is expected of it."""

    name: str
    variant: str  # race, fixed
    script: Path
    arguments: tuple[str, ...]
    kinds: tuple[str, ...]
    confidence: str
    needs: tuple[str, ...] = ()
    status: int = 0
    devices: int = 1

    @property
    def must_be_found(self) -> bool:
        return self.variant == "race" and self.confidence != "possible"

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


def cases() -> Iterator[Case]:
    for folder in LISTS:
        expected = tomllib.loads((folder / "expected.toml").read_text(encoding="utf-8"))
        for name, fields in expected.items():
            for variant in ("race", "fixed"):
                yield case(folder, name, variant, fields)


def case(folder: Path, name: str, variant: str, fields: dict[str, Any]) -> Case:
    """Make a case: a script of its own for each variant, or one that is told which."""
    own = folder / f"{name}_{variant}.py"
    script, arguments = (own, ()) if own.exists() else (folder / f"{name}.py", (variant,))
    values = {key: tuple(v) if isinstance(v, list) else v for key, v in fields.items()}
    return Case(name, variant, script, arguments, **values)


@cache
def is_usable(module: str) -> bool:
    """Say whether a module can be imported: to be installed is not enough where versions do not fit."""
    command = [sys.executable, "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def plain(case: Case) -> Run:
    return timed([sys.executable, str(case.script), *case.arguments])


def watched(case: Case) -> Run:
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "races.json")
        command = [sys.executable, "-P", "-m", "cudakit", "run", "--sanitize", "-o", str(output)]
        own = ["--python", sys.executable, "--", str(case.script), *case.arguments]
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
    if case.variant == "fixed":
        yield from (f"FALSE ALARM: {in_words(race)}" for race in run.races)
        return
    if case.must_be_found and not run.races:
        yield "MISSED"
    yield from (f"of another kind: {in_words(r)}" for r in run.races if r["kind"] not in case.kinds)
    if run.races and max(map(sureness, run.races)) < SURENESS.index(case.confidence):
        yield f"less sure than {case.confidence}"
    if run.races and not any(shows(case.script, race) for race in run.races):
        yield "no line of the program"


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
        return f"{mark:7} {seconds}  {self.case.name:33} {self.case.variant:5}  {self.words}"


def judged(case: Case, *, without_cudakit: bool) -> Judgement:
    if reason := case.missing():
        return Judgement(case, None, reason, None)
    if without_cudakit:
        run = plain(case)
        words = last_line(run.stderr) if run.exit_code else ""
        return Judgement(case, run.exit_code == case.status, words, run)
    run = watched(case)
    wrong = list(complaints(case, run))
    return Judgement(case, not wrong, "; ".join(wrong) or seen(run), run)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--json", type=Path)
    chosen = parser.parse_args()
    if unknown := set(chosen.names) - {case.name for case in cases()}:
        parser.error(f"no such name: {', '.join(sorted(unknown))}")
    return chosen


def main() -> int:
    chosen = options()
    some = [case for case in cases() if not chosen.names or case.name in chosen.names]
    judgements: list[Judgement] = []
    with ThreadPoolExecutor(chosen.jobs) as pool:
        for judgement in pool.map(partial(judged, without_cudakit=chosen.plain), some):
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
