"""Remove the waits of correct programs, one at a time, and check that each race is found.

    python scripts/mutate_waits.py --list             # list the waits that can be removed
    python scripts/mutate_waits.py --jobs 4           # run all mutants that can run here
    python scripts/mutate_waits.py 'sim_*' 'cupy_*'   # run the mutants of these programs
    python scripts/mutate_waits.py --accesses auto --compare exact --until 120

The programs are the fixed variants in examples/races and tests/sanitize_corpus. A mutant lacks one statement
that makes a stream or the host wait, or that informs an allocator. The report of the engine is compared with
a brute force search over the events of the same run:

    reported    a race was reported, and brute force finds one
    redundant   no race was reported, and brute force finds none: the wait was not needed
    MISSED      no race was reported, but brute force finds one
    ALARM       a race was reported, but brute force finds none
    unproven    no race was reported or found, but some accesses are not exact, for the printed reasons
    broken      the program does not run without the wait

With --compare, each mutant also runs with other accesses. The verdict is DIFFERENT if a race is reported in
only one of the two runs. Exits with 1 for any MISSED, ALARM or DIFFERENT. --json FILE writes the outcomes.
--until S starts no mutant after S seconds.
"""

from __future__ import annotations

import argparse
import ast
import json
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TypeGuard

import check_races
import race_logs

from cudakit.sanitize.findings import findings
from cudakit.sanitize.races import Coverage, SanitizeResult
from cudakit.sanitize.records import NEVER_READ, reorder_records
from cudakit.sanitize.templates import TemplateAccesses
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import unpack

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests"))  # The brute force search belongs to the tests.

from sanitize.brute_force import (  # noqa: E402 it is found by the line above
    UnorderedPairs,
    unordered_accesses,
    with_graph_rows,
)

# Calls that wait, in any framework. A call with such a call among its arguments also counts as a wait.
WAITS = frozenset({
    *("wait", "wait_event", "wait_stream", "synchronize", "sync", "record_stream"),
    *("cuStreamWaitEvent", "cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize"),
    *("cuStreamWaitValue32", "cuStreamWaitValue64", "block_until_ready"),
})  # fmt: skip
# The waiting calls that return the awaited object.
RETURNING_WAITS = frozenset({"block_until_ready"})
# Calls that a polling loop repeats until they return true.
QUERIES = frozenset({"query", "done", "is_done"})
ENGINE_ERRORS = ("MISSED", "ALARM", "DIFFERENT")
# Modules that programs import from the folder of the program.
HELPER_MODULES = {"cuda_driver.py", "cuda_kernels.py"}
TIMEOUT_S = 120


@dataclass(frozen=True, slots=True)
class Wait:
    """A statement that waits, or a call that returns the awaited object, and its replacement in a mutant.

    Lines are counted from 1, columns in bytes from 0.
    """

    line: int
    column: int
    end_line: int
    end_column: int
    code: str
    replacement: str = "pass"


@dataclass(frozen=True, slots=True)
class Mutant:
    """A program without one of its waits."""

    program: Path
    arguments: tuple[str, ...]
    wait: Wait

    def __str__(self) -> str:
        return f"{self.program.stem}:{self.wait.line}  {self.wait.code}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The verdict on a mutant, and a sentence about the reason."""

    verdict: str
    text: str


def waits(source: str) -> list[Wait]:
    """Return the waits in the fixed variant of a program, in the order of the source."""
    collected: list[Wait] = []
    _collect(ast.parse(source), source, collected)
    return sorted(collected, key=lambda wait: (wait.line, wait.column))


def _collect(node: ast.AST, source: str, collected: list[Wait]) -> None:
    if isinstance(node, ast.stmt) and is_wait(node):
        collected.append(_wait(node, source))
        return
    if isinstance(node, ast.Call) and _name(node) in RETURNING_WAITS:
        collected.append(_wait(node, source, replacement=_awaited(node)))
    for child in ast.iter_child_nodes(node):
        if not (_is_racy_branch(node) and child in node.body):
            _collect(child, source, collected)


def _is_racy_branch(node: ast.AST) -> TypeGuard[ast.If]:
    """Return whether a statement is ``if race:``; only the variant with the race runs the body."""
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "race"


def is_wait(node: ast.stmt) -> bool:
    """Return whether a statement only waits, and stores no result."""
    match node:
        case ast.Expr(value=ast.Call() as call):
            return any(_name(child) in WAITS for child in ast.walk(call))
        case ast.While(test=test, body=[ast.Pass() | ast.Expr()], orelse=[]):
            return any(_name(child) in QUERIES for child in ast.walk(test))
    return False


def source_without(source: str, wait: Wait) -> str:
    """Return the source without a wait."""
    lines = source.encode().splitlines(keepends=True)
    before = [*lines[: wait.line - 1], lines[wait.line - 1][: wait.column]]
    after = [lines[wait.end_line - 1][wait.end_column :], *lines[wait.end_line :]]
    return b"".join([*before, wait.replacement.encode(), *after]).decode()


def _name(node: ast.AST) -> str:
    """Return the name of a called function or of a read query attribute, without the object, or ""."""
    match node:
        case ast.Call(func=ast.Name(id=name)) | ast.Call(func=ast.Attribute(attr=name)):
            return name
        case ast.Attribute(attr=name) if name in QUERIES:
            return name
    return ""


def _awaited(call: ast.Call) -> str:
    """Return the object that a call waits for and returns."""
    return ast.unparse(call.args[0] if call.args else call.func.value)  # type: ignore[attr-defined]


def _wait(node: ast.stmt | ast.Call, source: str, **replacement: str) -> Wait:
    code = " ".join((ast.get_source_segment(source, node) or "").split())
    end = node.end_lineno or node.lineno, node.end_col_offset or node.col_offset
    return Wait(node.lineno, node.col_offset, *end, code, **replacement)


def programs() -> Iterator[check_races.Case]:
    """Yield the fixed variants of the examples and of the corpus."""
    for case in check_races.cases():
        if case.variant == "fixed" and case.script.parent != check_races.PROGRAMS:
            yield case


def mutants(case: check_races.Case) -> list[Mutant]:
    source = case.script.read_text(encoding="utf-8")
    return [Mutant(case.script, case.arguments, wait) for wait in waits(source)]


def run_mutant(mutant: Mutant, *, accesses: str | None, keep: Path | None) -> Outcome:
    """Run a mutant in a folder with the modules that its program imports."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for helper in HELPER_MODULES & {path.name for path in mutant.program.parent.iterdir()}:
            shutil.copy(mutant.program.with_name(helper), folder)
        script, output = folder / mutant.program.name, folder / "races.json"
        source = mutant.program.read_text(encoding="utf-8")
        script.write_text(source_without(source, mutant.wait), encoding="utf-8")
        log = (keep or folder) / f"{script.stem}-{mutant.wait.line}.log"
        command = [*check_races.RUN, "-o", str(output), "--log", str(log)]
        command += [*(["--accesses", accesses] if accesses else []), "--", str(script)]
        command += mutant.arguments
        run = check_races.run_timed(command, TIMEOUT_S)
        if not output.exists() or json.loads(output.read_text(encoding="utf-8"))["exit_status"]:
            return Outcome("broken", check_races.last_line(run.stderr))
        return outcome(race_logs.load(log))


def run_and_compare(
    mutant: Mutant,
    *,
    accesses: str | None,
    other_accesses: str | None,
    keep: Path | None,
    deadline: float,
) -> Outcome | None:
    """Run a mutant with one or two kinds of accesses. Return None if the deadline has passed."""
    if time.monotonic() > deadline:
        return None
    result = run_mutant(mutant, accesses=accesses, keep=keep)
    if other_accesses is None:
        return result
    other_result = run_mutant(mutant, accesses=other_accesses, keep=None)
    if (result.verdict == "reported") == (other_result.verdict == "reported"):
        return result
    names = accesses or "default", other_accesses
    texts = (
        f"{name}: {r.verdict} {r.text}"
        for name, r in zip(names, (result, other_result), strict=True)
    )
    return Outcome("DIFFERENT", "; ".join(texts))


def outcome(traces: list[Batch]) -> Outcome:
    """Compare the engine's report of a run with the pairs that brute force finds."""
    brute_force = UnorderedPairs([], Counter())
    for trace in traces:
        records, never_read_count = reorder_records(trace.records)
        templates = TemplateAccesses()
        records = templates.insert(records, Coverage())
        records = with_graph_rows(records, templates.graph_rows)
        trace_result = unordered_accesses(unpack(records, trace.strings))
        brute_force.pairs.extend(trace_result.pairs)
        brute_force.uncertainties.update(trace_result.uncertainties)
        brute_force.uncertainties.update({NEVER_READ: never_read_count} if never_read_count else {})
    return compare_reports(race_logs.analyze(traces), brute_force)


def compare_reports(result: SanitizeResult, brute_force: UnorderedPairs) -> Outcome:
    reported = findings(result)
    doubts = "; ".join(f"{count} x {reason}" for reason, count in brute_force.uncertainties.items())
    if reported:
        sides = f"{reported[0].current.operation} after {reported[0].previous.operation}"
        is_confirmed = brute_force.pairs or brute_force.uncertainties
        return Outcome("reported" if is_confirmed else "ALARM", sides)
    if brute_force.pairs:
        first, second = brute_force.pairs[0]
        return Outcome("MISSED", f"calls {first.event.seq} and {second.event.seq}; {doubts}")
    return Outcome("unproven", doubts) if doubts else Outcome("redundant", "")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*", help="patterns of programs")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--accesses", choices=["auto", "exact", "arguments"])
    parser.add_argument(
        "--compare", choices=["auto", "exact"], help="run again with these accesses"
    )
    parser.add_argument("--until", type=float, default=float("inf"), metavar="S")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep the logs of the mutants")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    options = parse_options()
    cases = [case for case in programs() if not options.names or case.matches_any(options.names)]
    if not options.list:
        cases = [case for case in cases if not case.missing_requirements()]
    selected_mutants = [mutant for case in cases for mutant in mutants(case)]
    if options.list:
        print(
            *selected_mutants, f"{len(selected_mutants)} mutants of {len(cases)} programs", sep="\n"
        )
        return 0
    counts: Counter[str] = Counter()
    outcomes: dict[str, dict[str, str]] = {}
    run = partial(
        run_and_compare,
        accesses=options.accesses,
        other_accesses=options.compare,
        keep=options.keep,
        deadline=time.monotonic() + options.until,
    )
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutant, result in zip(selected_mutants, pool.map(run, selected_mutants), strict=True):
            if result is None:
                counts["not run"] += 1
                continue
            print(f"{result.verdict:9}  {mutant}  {result.text}".rstrip(), flush=True)
            counts[result.verdict] += 1
            outcomes[str(mutant)] = asdict(result)
    if options.json:
        options.json.write_text(json.dumps(outcomes, indent=1), encoding="utf-8")
    counts_text = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    print(f"{len(selected_mutants)} mutants of {len(cases)} programs: {counts_text}")
    return int(any(counts[verdict] for verdict in ENGINE_ERRORS))


if __name__ == "__main__":
    sys.exit(main())
