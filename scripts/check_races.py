"""Compare the reports of ``cudakit run --sanitize`` on examples and test programs with the expected ones.

    python scripts/check_races.py                     # all programs that can run here, four at a time
    python scripts/check_races.py sim_copies 'cupy_*' --all
    python scripts/check_races.py 'sanitize_corpus/*' # one folder: races, sanitize_programs, sanitize_corpus
    python scripts/check_races.py --plain             # run the programs without cudakit
    python scripts/check_races.py --accesses arguments
    python scripts/check_races.py --accesses auto --compare exact
    python scripts/check_races.py 'sanitize_corpus/*' --keep tests/sanitize_corpus/logs

Each name in the expected.toml of a folder stands for two variants of a program. For the variant "race", a
race must be reported with a line of the program in a call stack; for the variant "fixed", no race may be
reported. The variants are two scripts, or one script with the argument "race" or "fixed".

The corpus needs exact accesses; with --accesses arguments, only the races that assumed accesses reveal must
be reported. Prints a line for each wrong result, with --all for each program, and exits with 1 if a result is
wrong. A program that takes longer than --seconds is killed and counts as wrong. --json FILE writes the
reports. --keep DIR writes small logs of the recorded events (race_logs), from which tests repeat the reports
without a GPU. --compare runs a program whose result is wrong again, with other accesses, and prints the
differences between the races of both runs. --until S starts no program after S seconds.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
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
RACES_FOUND = 1  # The exit code of cudakit if there are races and the program ends with 0.
TIMED_OUT = 124  # The exit code of timeout(1).
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception|Exit)\b")
MIN_EXACT_SHARE = 0.99  # The required share of launches with exact accesses.
CONFIDENCES = (
    "possible",
    "likely",
    "certain",
)  # cudakit does not report possible races by default.


@dataclass(frozen=True, slots=True)
class Case:
    """A variant of a program, and the report expected for it."""

    name: str
    variant: str  # "race" or "fixed".
    script: Path
    arguments: tuple[str, ...]
    kinds: tuple[str, ...]  # The kinds of race that may be reported.
    confidence: str  # The confidence that at least one reported race must have.
    needs: tuple[str, ...] = ()  # The modules that the program imports.
    status: int = 0  # The exit code of the program.
    devices: int = 1  # The number of GPUs that the program needs.
    kernels: tuple[
        str, ...
    ] = ()  # Patterns of the two racing kernels, in any order; "|" means "or".
    exact: bool = False  # Whether nearly all launches must have exact accesses.

    @property
    def must_be_found(self) -> bool:
        return self.variant == "race" and self.confidence != "possible"

    @property
    def label(self) -> str:
        return "_".join((self.script.stem, *self.arguments))

    @property
    def path(self) -> str:
        """The name after the name of its folder, because two folders can contain the same name."""
        return f"{self.script.parent.name}/{self.name}"

    def matches_any(self, patterns: Sequence[str]) -> bool:
        """Return whether at least one pattern matches the name, with or without the folder."""
        return any(
            matches(name, pattern) for pattern in patterns for name in (self.name, self.path)
        )

    def missing_requirements(self) -> str:
        """Return a sentence about the modules or GPUs that this machine lacks, "" if it lacks none."""
        missing_modules = [name for name in self.needs if not is_usable(name)]
        if missing_modules:
            return f"needs {', '.join(missing_modules)}"
        has_enough_gpus = not self.needs or visible_devices() >= self.devices
        return "" if has_enough_gpus else f"needs {self.devices} GPUs"


@dataclass(slots=True)
class Run:
    """The exit code of a program that ran, and cudakit's report about it."""

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
        make_case = corpus_case if folder == CORPUS else example_case
        for name, fields in read_expected(folder).items():
            for variant in ("race", "fixed"):
                variant_script = folder / f"{name}_{variant}.py"
                script, arguments = (
                    (variant_script, ())
                    if variant_script.exists()
                    else (folder / f"{name}.py", (variant,))
                )
                yield make_case(partial(Case, name, variant, script, arguments), accesses, **fields)


def read_expected(folder: Path) -> dict[str, dict[str, Any]]:
    """Read the expected reports of a folder by name, with tuples instead of lists."""
    fields_by_name = tomllib.loads((folder / "expected.toml").read_text(encoding="utf-8"))
    return {
        name: {
            key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
        }
        for name, fields in fields_by_name.items()
    }


def example_case(
    make_case: partial[Case], recorded_accesses: str, *, confidence: str, **fields: Any
) -> Case:
    """Return a case of the examples; ``confidence`` applies to assumed accesses."""
    is_certain = recorded_accesses == "exact" and confidence == "possible"
    return make_case(confidence="certain" if is_certain else confidence, **fields)


def corpus_case(
    make_case: partial[Case],
    recorded_accesses: str,
    *,
    accesses: str,
    sure: str = "certain",
    **fields: Any,
) -> Case:
    """Return a case of the corpus, whose race must be reported if ``accesses`` are recorded."""
    if recorded_accesses == "exact":
        return make_case(confidence=sure, exact=True, **fields)
    return make_case(confidence="likely" if accesses == recorded_accesses else "possible", **fields)


@cache
def is_usable(module: str) -> bool:
    """Return whether a module can be imported; the import of an installed module may fail."""
    command = [sys.executable, "-c", f"import {module}"]
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def import_needed_modules(cases: Iterable[Case]) -> None:
    """Check all modules that programs need at the same time, because importing some of them takes seconds."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(is_usable, {module for case in cases for module in case.needs}))


visible_devices = cache(device_count)


def run_plain(case: Case, seconds: float) -> Run:
    return run_timed([sys.executable, str(case.script), *case.arguments], seconds)


def run_under_cudakit(case: Case, seconds: float, accesses: str | None, keep: Path | None) -> Run:
    """Run a program under cudakit; also write a small log into the directory ``keep``, unless it is None."""
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder, "races.json"), Path(folder, "races.log")
        options = [*(["--accesses", accesses] if accesses else []), "--log", str(log)]
        arguments = ["-o", str(output), *options, "--", str(case.script), *case.arguments]
        run = run_timed([*RUN, *arguments], seconds)
        if output.exists():
            run.report = json.loads(output.read_text(encoding="utf-8") or "{}")
        if keep and log.exists():
            race_logs.save_small_log(log, keep / f"{case.label}.log", program=case.script.name)
    return run


def run_timed(command: list[str], seconds: float) -> Run:
    """Run a command; kill the process and its children if the command takes longer than ``seconds``."""
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
    # subprocess returns a negative number for a signal, a shell returns 128 plus the number.
    code = process.returncode if process.returncode >= 0 else 128 - process.returncode
    return Run(code, time.perf_counter() - start, stderr)


def differences(case: Case, run: Run) -> Iterator[str]:
    """Yield the differences between the report and the expected report."""
    if not run.report:
        yield f"no result: {last_line(run.stderr)}"
        return
    if run.report.get("exit_status") != case.status:
        status = run.report.get("exit_status")
        yield f"exit_status {status}, expected {case.status}: {last_error(run.stderr)}"
    expected_code = case.status or (RACES_FOUND if run.races else 0)
    if run.exit_code != expected_code:
        yield f"exit code {run.exit_code}, expected {expected_code}"
    yield from wrong_races(case, run)


def wrong_races(case: Case, run: Run) -> Iterator[str]:
    if case.exact and (share := exact_share(run)) < MIN_EXACT_SHARE:
        yield f"only {share:.1%} of the launches have exact accesses"
    if case.variant != "race":
        yield from (f"FALSE POSITIVE: {race_text(race)}" for race in run.races)
        return
    if case.must_be_found and not run.races:
        yield "MISSED"
    yield from (
        f"unexpected kind: {race_text(race)}"
        for race in run.races
        if race["kind"] not in case.kinds
    )
    if case.kernels:
        unexpected = (race for race in run.races if not is_between(case.kernels, race))
        yield from (f"unexpected kernels: {race_text(race)}" for race in unexpected)
    if run.races and max(map(confidence, run.races)) < CONFIDENCES.index(case.confidence):
        yield f"less confidence than {case.confidence}"
    if run.races and not any(has_frame_of(case.script, race) for race in run.races):
        yield "no line of the program in the call stacks"


def exact_share(run: Run) -> float:
    """Return the share of launches whose accesses are exact; 0 without launches."""
    coverage = run.report.get("coverage", {})
    counts = [
        coverage.get(f"launches_{precision}", 0) for precision in ("exact", "assumed", "unknown")
    ]
    return float(counts[0] / max(sum(counts), 1))


def is_between(patterns: Sequence[str], race: dict[str, Any]) -> bool:
    """Return whether the two operations of a race match two patterns, in any order."""
    current, previous = (
        str(race[side]["kernel"] or race[side]["operation"]).lower()
        for side in ("current", "previous")
    )
    first_pattern, second_pattern = patterns
    return (matches(current, first_pattern) and matches(previous, second_pattern)) or (
        matches(current, second_pattern) and matches(previous, first_pattern)
    )


def matches(name: str, patterns: str) -> bool:
    return any(fnmatchcase(name, pattern.lower()) for pattern in patterns.split("|"))


def confidence(race: dict[str, Any]) -> int:
    return CONFIDENCES.index(race["confidence"])


def has_frame_of(script: Path, race: dict[str, Any]) -> bool:
    """Return whether the call stack of at least one operation has a frame of the program."""
    frames = [frame for side in ("current", "previous") for frame in race[side]["stack"]]
    return any(Path(str(frame["filename"])).name == script.name for frame in frames)


def race_text(race: dict[str, Any]) -> str:
    sides = " after ".join(str(race[side]["operation"])[:60] for side in ("current", "previous"))
    return f"{race['count']} x {race['confidence']} {race['kind']} ({sides})"


def summary(run: Run) -> str:
    """Return the races and the coverage in one line."""
    coverage = run.report.get("coverage", {})
    counts = ", ".join(
        f"{coverage[key]} {key}"
        for key in ("launches", "launches_exact", "copies")
        if key in coverage
    )
    races = "; ".join(map(race_text, run.races[:2])) or "no races"
    gaps = sum(run.report.get("gaps", {}).values())
    return f"{races} [{counts}{f', {gaps} gaps' if gaps else ''}]"


def last_line(text: str) -> str:
    """Return the last line that is neither empty nor the name of a file that cudakit wrote."""
    lines = (line for line in reversed(text.splitlines()) if line.strip())
    return next((line for line in lines if not line.startswith("Wrote ")), "no output")


def last_error(text: str) -> str:
    """Return the last line that names an exception of Python, or else the last line."""
    lines = [line for line in text.splitlines() if _EXCEPTION.match(line)]
    return lines[-1] if lines else last_line(text)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a case."""

    case: Case
    is_right: (
        bool | None
    )  # Whether the result is right; None if the program cannot run on this machine.
    text: str  # What is wrong, why the program did not run, or a summary.
    run: Run | None
    log: Path | None = None  # The path of the log for --keep.
    differences: tuple[str, ...] = ()  # Races that only one of the two runs of --compare reports.

    @property
    def lacks_log(self) -> bool:
        return self.log is not None and self.run is not None and not self.log.exists()

    def __str__(self) -> str:
        mark = {True: "ok", False: "WRONG", None: "skipped"}[self.is_right]
        seconds = f"{self.run.seconds:5.1f} s" if self.run else " " * 7
        line = f"{mark:7} {seconds}  {self.case.path:45} {self.case.variant:5}  {self.text}"
        return "\n    ".join((line, *self.differences))


def race_differences(run: Run, other_run: Run, names: tuple[str, str]) -> Iterator[str]:
    """Yield the races that only one of two runs reports; ``names`` are the accesses of the runs."""
    keys, other_keys = ({race_key(race) for race in r.races} for r in (run, other_run))
    for name, only_here in zip(names, (keys - other_keys, other_keys - keys), strict=True):
        yield from (f"only {name}: {' | '.join(key)}" for key in sorted(only_here))


def race_key(race: dict[str, Any]) -> tuple[str, ...]:
    """Return the fields of a race that are equal in all runs of a program."""
    return race["kind"], race["confidence"], *(_side_text(race[s]) for s in ("current", "previous"))


def _side_text(side: dict[str, Any]) -> str:
    folders = {folder.name for folder in FOLDERS}
    paths = ((Path(str(frame["filename"])), frame["line"]) for frame in side["stack"])
    lines = [f"{path.stem}:{line}" for path, line in paths if path.parent.name in folders]
    return f"{str(side['operation'])[:70]} at {', '.join(lines)}"


def check_case(
    case: Case,
    *,
    without_cudakit: bool,
    seconds: float,
    accesses: str | None,
    keep: Path | None,
    compare: str | None = None,
    deadline: float = float("inf"),
) -> Outcome:
    """Run a case, unless ``time.monotonic()`` has passed the deadline, and compare the report."""
    if reason := case.missing_requirements():
        return Outcome(case, None, reason, None)
    if time.monotonic() > deadline:
        return Outcome(case, None, "no time was left", None)
    if without_cudakit:
        run = run_plain(case, seconds)
        text = last_line(run.stderr) if run.exit_code else ""
        return Outcome(case, run.exit_code == case.status, text, run)
    run = run_under_cudakit(case, seconds, accesses, keep)
    problems = list(differences(case, run))
    log = keep / f"{case.label}.log" if keep else None
    different: tuple[str, ...] = ()
    if compare and problems:
        names = accesses or "default", compare
        other_run = run_under_cudakit(case, seconds, compare, None)
        different = tuple(race_differences(run, other_run, names))
    text = "; ".join(problems) or summary(run)
    return Outcome(case, not problems, text, run, log, different)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--all", action="store_true", help="a line for every program")
    parser.add_argument("--jobs", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=180, help="for each program")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--accesses", choices=["auto", "exact", "arguments"])
    parser.add_argument(
        "--compare", choices=["auto", "exact"], help="run again with these accesses"
    )
    parser.add_argument("--until", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--keep", type=Path, metavar="DIR")
    options = parser.parse_args()
    all_cases = list(cases())
    if unknown := [
        name for name in options.names if not any(case.matches_any([name]) for case in all_cases)
    ]:
        parser.error(f"no such name: {', '.join(sorted(unknown))}")
    return options


def main() -> int:
    options = parse_options()
    selected = [
        case
        for case in cases("arguments" if options.accesses == "arguments" else "exact")
        if not options.names or case.matches_any(options.names)
    ]
    deadline = time.monotonic() + options.until
    import_needed_modules(selected)
    check = partial(
        check_case,
        without_cudakit=options.plain,
        seconds=options.seconds,
        accesses=options.accesses,
        keep=options.keep,
        compare=options.compare,
        deadline=deadline,
    )
    outcomes: list[Outcome] = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for outcome in pool.map(check, selected):
            outcomes.append(outcome)
            if options.all or outcome.is_right is False:
                print(outcome, flush=True)
    if options.json:
        reports = {
            f"{outcome.case.path} {outcome.case.variant}": outcome.run.report
            | {"stderr": outcome.run.stderr}
            for outcome in outcomes
            if outcome.run
        }
        options.json.write_text(json.dumps(reports, indent=1), encoding="utf-8")
    if missing := [outcome.case.label for outcome in outcomes if outcome.lacks_log]:
        print(f"no log, because it is larger than {race_logs.MAX_LOG_BYTES:,} bytes or nothing was")
        print(f"recorded: {', '.join(missing)}")
    verdicts = [outcome.is_right for outcome in outcomes if outcome.is_right is not None]
    print(
        f"{sum(verdicts)} of {len(verdicts)} as expected, {len(outcomes) - len(verdicts)} skipped"
    )
    return 0 if all(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main())
