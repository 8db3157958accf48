"""The report on collectives: their races, the ranks with a race, and calls that differ."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from sanitize.report.test_document import read
from sanitize.sample_races import (
    exact_operation,
    kernel,
    race,
    race_decoder,
    report_of,
    result_of,
)
from sanitize.test_different_calls import call_batch, collective, differences

from cudakit.report import sarif
from cudakit.sanitize.baseline import suppressions
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.hints import remedies, smallest_fix
from cudakit.sanitize.races import (
    CollectiveOperation,
    Confidence,
    Coverage,
    Operation,
    RaceKind,
    SanitizeResult,
)
from cudakit.sanitize.report import brief_sentences, report, title
from cudakit.stacks import Frame
from cudakit.trace.kinds import AccessMode, CollectiveFunction, EventKind, Precision

NCCL_KERNEL = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def all_reduce(rank: int = 0, name: str = NCCL_KERNEL) -> Operation:
    operation = CollectiveOperation(CollectiveFunction.ALL_REDUCE, rank, 2, 0)
    access = exact_operation(EventKind.COLLECTIVE, mode=AccessMode.READ | AccessMode.WRITE, seq=107)
    return replace(access, name=name, collective=operation)


UNAWAITED = race(
    RaceKind.READ_AFTER_WRITE,
    confidence=Confidence.CERTAIN,
    current=kernel(mode=AccessMode.READ, precision=Precision.EXACT),
    previous=all_reduce(),
    last_sync=None,
)


def two_ranks(collected: RaceCollector) -> SanitizeResult:
    of_rank = Coverage(launches=1, launches_exact=1, collectives=1, accesses_exact=2)
    coverage = {4242: of_rank, 4243: of_rank}
    return collected.result(exit_status=0, coverage=coverage, ranks={4242: 0, 4243: 1})


def test_report_of_a_collective(golden: Callable[[str, str], None]) -> None:
    collected = report_of(UNAWAITED)
    report_of(replace(UNAWAITED, previous=all_reduce(1, "other")), report=collected, process=4243)
    golden("run-sanitize-collective-80.txt", read(two_ranks(collected)))


def test_race_of_several_ranks_is_one_race() -> None:
    collected = report_of(UNAWAITED)
    report_of(replace(UNAWAITED, previous=all_reduce(1, "other")), report=collected, process=4243)
    (found,) = two_ranks(collected).races
    assert (found.count, found.processes) == (2, (4242, 4243))
    assert "ranks 0, 1" in read(two_ranks(collected))


def test_advice_for_torch_is_to_wait_for_the_work() -> None:
    previous = race_decoder().side(all_reduce())
    current = race_decoder().side(UNAWAITED.current)
    in_torch = Frame("all_reduce", "/lib/site-packages/torch/distributed/distributed_c10d.py", 3068)
    of_torch = replace(previous, stack=(in_torch, *previous.stack), site=previous.site + 1)
    assert smallest_fix(UNAWAITED.kind, current, of_torch) == (
        "wait for the work of the all-reduce (loader.py:31) before the kernel (train.py:44)"
    )
    assert remedies(UNAWAITED.kind, current, of_torch) == (
        "torch: work.wait(), with the work that the call with async_op=True returned",
    )
    assert "record an event" in smallest_fix(UNAWAITED.kind, current, previous)
    assert "record an event" in smallest_fix(
        UNAWAITED.kind, current, replace(of_torch, graph=1, node=2)
    )


def test_processes_without_ranks_are_counted() -> None:
    collected = report_of(UNAWAITED)
    report_of(UNAWAITED, report=collected, process=4243)
    result = collected.result(exit_status=0, coverage={4242: Coverage(), 4243: Coverage()})
    assert "2 processes" in read(result)


def test_collective_is_suppressed_by_the_name_of_its_kernel() -> None:
    collected = RaceCollector(suppressions=suppressions(["kernel:nccl*"]))
    assert not result_of(report_of(UNAWAITED, report=collected)).races


def test_name_of_a_send_has_the_other_rank() -> None:
    send = CollectiveOperation(CollectiveFunction.SEND, 0, 4, 3)
    side = race_decoder().side(replace(kernel("k"), kind=EventKind.COLLECTIVE, collective=send))
    assert side.operation == "send to rank 3 (rank 0 of 4)"
    assert side.operation_name == "send to rank 3 (called by rank 0 of 4)"


def differing() -> SanitizeResult:
    found = differences(call_batch(0, collective()), call_batch(1, collective(count=9)))
    of_rank = Coverage(launches=1, launches_exact=1, collectives=1, accesses_exact=2)
    collected = RaceCollector().result(exit_status=0, coverage={1000: of_rank, 1001: of_rank})
    return replace(collected, different_calls=tuple(found))


def test_report_of_different_calls(golden: Callable[[str, str], None]) -> None:
    golden("run-sanitize-different-calls-80.txt", read(differing()))


def test_verdict_names_different_calls() -> None:
    assert title(differing()) == "No races found, 1 collective called differently by ranks"
    assert len(brief_sentences(differing())) > len(brief_sentences(result_of(RaceCollector())))


def test_different_calls_are_results_in_sarif() -> None:
    log = json.loads("".join(sarif.render(report(differing()), root=str(Path.cwd()))))
    (result,) = log["runs"][0]["results"]
    assert result["ruleId"] == "different-count"
