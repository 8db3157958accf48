from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from pathlib import Path

import mutate_waits
import pytest
import race_logs
from check_races import Case
from mutate_waits import Outcome, compare_reports, mutants, outcome, programs, source_without, waits
from sanitize.brute_force import UnorderedPairs, unordered_accesses

from cudakit.trace.events import Event, EventBody, Fill, Gap, StreamCreate, StreamSync
from cudakit.trace.kinds import StreamFlag
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import pack, unpack

CASES = list(programs())


def codes(source: str) -> list[str]:
    return [wait.code for wait in waits(source)]


@pytest.mark.parametrize(
    "statement",
    [
        "side.wait_stream(main)",
        "side.wait_event(main.record())",
        "torch.cuda.synchronize()",
        "event.synchronize()",
        "gpu.sync()",
        "event.wait(stream)",
        "wait(second, first)",
        "batch.record_stream(torch.cuda.current_stream())",
        "call(driver.cuStreamWaitEvent(stream, event, 0))",
        "call(driver.cuCtxSynchronize())",
        "wave.block_until_ready()",
        "while not event.query(): pass",
        "while not event.done: time.sleep(0)",
    ],
)
def test_waiting_statement_is_mutated(statement: str) -> None:
    assert codes(f"if ordered:\n    {statement}\nprint(1)") == [statement]


@pytest.mark.parametrize(
    "statement",
    [
        "done = stream.record()",
        "waits = 3",
        "total = (batch * 2).sum()",
        "with torch.cuda.stream(side): batch.add_(1)",
        "while not done: work()",
        "wait = synchronize",
    ],
)
def test_statement_without_wait_is_not_mutated(statement: str) -> None:
    assert codes(statement) == []


def test_mutation_removes_only_wait() -> None:
    source = "ä = 1; side.wait_stream(\n    main\n)  # why\nrest()\n"

    (wait,) = waits(source)
    assert source_without(source, wait) == "ä = 1; pass  # why\nrest()\n"


def test_wait_expression_is_replaced_by_argument() -> None:
    source = "x = (f(1).block_until_ready(), 2)\ny = jax.block_until_ready(g(x, x))\n"

    first, second = waits(source)
    assert source_without(source, first) == "x = (f(1), 2)\ny = jax.block_until_ready(g(x, x))\n"
    assert source_without(source, second) == "x = (f(1).block_until_ready(), 2)\ny = g(x, x)\n"


@pytest.mark.parametrize("case", CASES, ids=[case.script.stem for case in CASES])
def test_mutant_differs_in_single_statement(case: Case) -> None:
    source = case.script.read_text(encoding="utf-8")
    case_mutants = mutants(case)

    for mutant in case_mutants:
        changed = source_without(source, mutant.wait)
        pairs = zip(ast.parse(source).body, ast.parse(changed).body, strict=True)
        assert sum(ast.dump(before) != ast.dump(after) for before, after in pairs) == 1
        assert len(waits(changed)) == len(case_mutants) - 1


def test_more_than_sixty_fixed_programs_have_mutants() -> None:
    assert sum(bool(mutants(case)) for case in CASES) > 60
    assert all(case.variant != "race" for case in CASES)


def trace(*bodies: EventBody) -> Batch:
    strings = {"": 0}
    streams = (StreamCreate(number, StreamFlag.NON_BLOCKING) for number in (1, 2))
    events = [Event(body, seq=seq, context=1) for seq, body in enumerate((*streams, *bodies), 1)]
    records = pack(events, lambda text: strings.setdefault(text, len(strings)))
    return Batch(1, records, list(strings), [()], simulated=True)


RACE = trace(Fill(1, 0, 8), Fill(2, 0, 8))
CLEAN = trace(Fill(1, 0, 8), StreamSync(1), Fill(2, 0, 8))


def test_mutant_is_reported_or_redundant() -> None:
    assert outcome([RACE]) == Outcome("reported", "fill after fill")
    assert outcome([CLEAN]) == Outcome("redundant", "")
    assert outcome([CLEAN, RACE]).verdict == "reported"


def test_mutant_with_lost_accesses_is_unproven() -> None:
    trace_with_gap = trace(Fill(1, 0, 8), Gap("accesses are lost", 2))

    assert outcome([trace_with_gap]) == Outcome("unproven", "2 x accesses are lost")


def test_disagreement_with_brute_force_is_miss_or_false_alarm() -> None:
    (pair,) = unordered_accesses(unpack(RACE.records, RACE.strings)).pairs

    assert (
        compare_reports(race_logs.analyze([CLEAN]), UnorderedPairs([pair], Counter())).verdict
        == "MISSED"
    )
    assert (
        compare_reports(race_logs.analyze([RACE]), UnorderedPairs([], Counter())).verdict == "ALARM"
    )


def test_simulated_mutants_are_reported_or_redundant(tmp_path: Path) -> None:
    command = [sys.executable, mutate_waits.__file__, "sim_kernels*", "--keep", str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)

    verdicts = [line.split()[0] for line in process.stdout.splitlines()]
    assert verdicts == ["reported", "redundant", "2"], process.stdout + process.stderr
    assert process.returncode == 0
    assert len(list(tmp_path.glob("sim_kernels_fixed-*.log"))) == 2
