from __future__ import annotations

from itertools import pairwise

import pytest
from gpu.happens_before import races
from gpu.kernels import SimBench
from gpu.programs import Run, Step, certain_facts, ordered, programs
from hypothesis import given, settings

SEEDS = (None, 0, 1, 2, 3, 4)
FEW_EXAMPLES = settings(max_examples=20, deadline=None)


@settings(max_examples=40, deadline=None)
@given(programs().map(ordered))
def test_ordered_program_gives_same_result_for_every_seed(program: list[Step]) -> None:
    runs = [Run(program, seed=seed) for seed in SEEDS]

    assert races(certain_facts(runs[0].trace)) == []
    assert {run.failure for run in runs} == {""}
    assert {tuple(run.result) for run in runs} == {tuple(runs[0].result)}


@FEW_EXAMPLES
@given(programs().map(ordered))
def test_same_seed_gives_same_run(program: list[Step]) -> None:
    for seed in (None, 5):
        first, second = Run(program, seed=seed), Run(program, seed=seed)

        assert first.trace == second.trace
        assert first.result == second.result


@FEW_EXAMPLES
@given(programs().map(ordered))
def test_trace_facts_do_not_depend_on_schedule(program: list[Step]) -> None:
    unseeded, seeded = (certain_facts(Run(program, seed=seed).trace) for seed in (None, 9))

    assert [event.body for event in unseeded] == [event.body for event in seeded]


@FEW_EXAMPLES
@given(programs().map(ordered))
def test_trace_times_and_sequence_never_decrease(program: list[Step]) -> None:
    for seed in (None, 7):
        trace = Run(program, seed=seed).trace

        assert all(
            earlier.time_ns <= later.time_ns and earlier.seq <= later.seq
            for earlier, later in pairwise(trace)
        )


# Two racing steps, and the possible results.
RACES: dict[str, list[Step]] = {
    "streams without an event": [("fill", 2, 0, 0), ("fill", 3, 0, 0)],
    "a non-blocking stream and the legacy one": [("fill", 4, 0, 0), ("fill", 0, 0, 0)],
    "an event recorded too early": [
        ("record", 2, 0, 0), ("fill", 2, 0, 0), ("wait", 3, 0, 0), ("fill", 3, 0, 0),
    ],
    "a wait of the wrong stream": [
        ("fill", 2, 0, 0), ("record", 2, 0, 0), ("wait", 4, 0, 0), ("fill", 3, 0, 0),
    ],
    "two graphs": [("graph", 4, 0, 1), ("graph", 5, 0, 1)],
}  # fmt: skip


@pytest.mark.parametrize("program", RACES.values(), ids=RACES)
def test_race_changes_result_for_some_seed(program: list[Step]) -> None:
    results = {tuple(Run(program, seed=seed).result) for seed in range(24)}

    assert races(Run(program).trace)
    assert len(results) > 1


ORDERS: dict[str, list[Step]] = {
    "one stream": [("fill", 4, 0, 0), ("fill", 4, 0, 0)],
    "blocking streams around the legacy one": [
        ("fill", 2, 0, 0), ("fill", 0, 1, 0), ("fill", 3, 0, 0),
    ],
    "the stream of the thread after the legacy one": [("fill", 0, 0, 0), ("fill", 1, 0, 0)],
    "an event": [
        ("fill", 4, 0, 0), ("record", 4, 0, 0), ("wait", 5, 0, 0), ("fill", 5, 0, 0),
    ],
    "the host": [("fill", 4, 0, 0), ("sync stream", 4, 0, 0), ("fill", 5, 0, 0)],
    "one stream, with a wait between": [
        ("record", 5, 0, 0), ("fill", 4, 0, 0), ("wait", 4, 0, 0), ("fill", 4, 0, 0),
    ],
    "an event that was recorded again after the wait": [
        ("fill", 4, 0, 0), ("record", 4, 0, 0), ("wait", 5, 0, 0),
        ("record", 5, 0, 0), ("fill", 5, 0, 0),
    ],
    "the legacy stream after both": [
        ("fill", 2, 0, 0), ("fill", 3, 1, 0), ("copy", 0, 0, 1), ("copy", 2, 1, 0),
    ],
    "one graph twice": [("graph", 4, 0, 1), ("replay", 5, 0, 0)],
}  # fmt: skip


@pytest.mark.parametrize("program", ORDERS.values(), ids=ORDERS)
def test_programs_ordered_by_cudas_implicit_rules_have_no_race(program: list[Step]) -> None:
    assert races(Run(program).trace) == []
    assert len({tuple(Run(program, seed=seed).result) for seed in range(12)}) == 1


def test_legacy_stream_waits_for_work_of_destroyed_stream() -> None:
    for seed in range(24):
        bench = SimBench(seed=seed)
        stream, value = bench.gpu.stream(), bench.ints()
        bench.store(value, 1, stream)
        bench.gpu.destroy_stream(stream)
        bench.store(value, 2)

        assert bench.read(value) == [2]


def test_unordered_free_fails_for_some_seed() -> None:
    program: list[Step] = [("borrow", 4, 0, 0), ("return", 5, 1, 0)]

    failures = {Run(program, seed=seed).failure for seed in range(24)}

    assert failures == {"", "CUDA_ERROR_ILLEGAL_ADDRESS"}
