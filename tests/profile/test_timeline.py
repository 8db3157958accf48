"""The batches of several traces are collected into one table for each kind of activity."""

from __future__ import annotations

from profile_synthetic import US, Program

from cudakit.profile.timeline import ActivityCollector
from cudakit.trace.kinds import EventKind
from cudakit.trace.spool import Batch


def _chain(program: Program, chain: int) -> Batch:
    batch = program.batch()
    return Batch(batch.process, batch.records, batch.strings, batch.stacks, chain)


def test_strings_and_stacks_of_two_traces_of_a_process_are_joined() -> None:
    first, second = Program(), Program()
    first.kernel("gemm", 10 * US, line=3)
    second.kernel("relu", 10 * US, line=4)
    second.kernel("gemm", 10 * US, line=3)
    collector = ActivityCollector()
    collector.add(_chain(first, 0))
    collector.add(_chain(second, 1))
    (activities,) = collector.activities()
    kernels, calls = (
        activities.records[EventKind.KERNEL_RUN],
        activities.records[EventKind.API_CALL],
    )
    names = [activities.strings[index] for index in kernels["name"].tolist()]
    lines = [activities.stacks[site][1].line for site in calls["site"].tolist()]
    assert names == ["gemm", "relu", "gemm"]
    assert lines == [3, 4, 3]
    assert kernels["name"][0] == kernels["name"][2]


def test_batches_of_one_trace_continue_its_tables() -> None:
    program = Program()
    program.kernel("gemm", 10 * US, line=3)
    early = program.batch()
    program.kernel("relu", 10 * US, line=4)
    late = program.batch()
    collector = ActivityCollector()
    collector.add(early)
    new_records = late.records[len(early.records) :]
    collector.add(Batch(late.process, new_records, late.strings, late.stacks))
    (activities,) = collector.activities()
    kernels = activities.records[EventKind.KERNEL_RUN]
    assert [activities.strings[index] for index in kernels["name"].tolist()] == ["gemm", "relu"]


def test_processes_are_kept_apart_in_the_order_of_their_numbers() -> None:
    collector = ActivityCollector()
    for process in (300, 100):
        program = Program(process=process)
        program.kernel("gemm", 10 * US)
        collector.add(program.batch(simulated=process == 300))
    assert [(one.process, one.simulated) for one in collector.activities()] == [
        (100, False),
        (300, True),
    ]


def test_kind_without_events_has_an_empty_table() -> None:
    collector = ActivityCollector()
    collector.add(Program().batch())
    (activities,) = collector.activities()
    assert len(activities.records[EventKind.COPY_RUN]) == 0
    assert collector.activities()[0].records[EventKind.KERNEL_RUN]["start_ns"].tolist() == []
