"""Sizes and rates of collectives, as nccl-tests define them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from profile_synthetic import MS, US, Program, activities_of

from cudakit.profile.analysis import analyze
from cudakit.profile.report import report
from cudakit.profile.result import Collective, ProfileResult
from cudakit.report import console
from cudakit.trace.events import Communicator
from cudakit.trace.kinds import CollectiveFunction

KERNEL = "ncclDevKernel_Generic"
MIB = 1 << 20


def _result(program: Program) -> ProfileResult:
    return analyze([program.activities()]).result


def _collectives(program: Program) -> tuple[Collective, ...]:
    return _result(program).devices[0].collectives


def _program(*, ranks: int = 4) -> Program:
    program = Program()
    program.emit(Communicator(77, 1, "", 0, ranks))
    return program


@pytest.mark.parametrize(
    ("function", "size_bytes", "bus_factor"),
    [
        (CollectiveFunction.ALL_REDUCE, 4 * MIB, 1.5),
        (CollectiveFunction.ALL_GATHER, 16 * MIB, 0.75),
        (CollectiveFunction.REDUCE_SCATTER, 16 * MIB, 0.75),
        (CollectiveFunction.BROADCAST, 4 * MIB, 1.0),
        (CollectiveFunction.SEND, 4 * MIB, 1.0),
    ],
)
def test_rates_of_a_collective_are_those_of_nccl_tests(
    function: CollectiveFunction, size_bytes: int, bus_factor: float
) -> None:
    program = _program()
    program.collective(KERNEL, 100 * US, function, MIB)
    (collective,) = _collectives(program)
    assert (collective.size_bytes, collective.ranks) == (size_bytes, 4)
    assert collective.algorithm_bytes_per_s == pytest.approx(size_bytes / 100e-6)
    assert collective.bus_bytes_per_s == pytest.approx(bus_factor * size_bytes / 100e-6)


def test_collectives_of_different_sizes_are_different_rows() -> None:
    program = _program()
    for count in (MIB, 2 * MIB, MIB):
        program.collective(KERNEL, count // MIB * 100 * US, CollectiveFunction.ALL_REDUCE, count)
    rows = [(row.calls, row.size_bytes) for row in _collectives(program)]
    assert sorted(rows) == [(1, 8 * MIB), (2, 4 * MIB)]


def test_operations_of_a_group_add_up() -> None:
    program = _program()
    program.collective(KERNEL, 100 * US, CollectiveFunction.ALL_REDUCE, MIB)
    program.events.append(program.events[-1])
    (collective,) = _collectives(program)
    assert (collective.calls, collective.size_bytes) == (1, 8 * MIB)


def test_collective_without_a_record_has_no_size() -> None:
    program = _program()
    program.kernel(KERNEL, 100 * US)
    program.collective(KERNEL, 100 * US, CollectiveFunction.ALL_REDUCE, MIB, communicator=9)
    (collective,) = _collectives(program)
    assert (collective.calls, collective.size_bytes, collective.bus_bytes_per_s) == (2, None, None)


def test_unknown_size_of_a_collective_is_no_lost_event() -> None:
    program = _program()
    program.kernel(KERNEL, 100 * US)
    program.lose("collective whose buffers are unknown: NCCL loaded no profiler plugin", 1)
    assert not _result(program).gaps


def test_report_shows_the_bus_bandwidth() -> None:
    program = _program(ranks=2)
    program.collective(KERNEL, 100 * US, CollectiveFunction.ALL_REDUCE, MIB)
    text = console.render(
        report(_result(program)), width=100, color=False, ascii_only=True, height=100
    )
    assert "4.00 MiB" in text
    assert "41.9 GB/s" in text
    assert "NCCL 2.28" not in text


# --- the rank that others wait for -----------------------------------------------------------------

ALL_REDUCE = "ncclDevKernel_AllReduce_Sum_f32_RING_LL"


def _ranks(*compute_ns: int, collectives: tuple[int, ...] = (8, 8)) -> ProfileResult:
    """Return the profile of ranks that reduce after each step of computing; all end a reduction together."""
    programs = [Program(process=100 + rank) for rank in range(len(compute_ns))]
    for step in range(max(collectives)):
        arrived = []
        for program, duration in zip(programs, compute_ns, strict=True):
            with program.range("step"):
                arrived.append(program.kernel("gemm", duration, line=10))
        last = max(arrived)
        for program, arrival, count in zip(programs, arrived, collectives, strict=True):
            if step < count:
                program.kernel(ALL_REDUCE, last - arrival + 100 * US, line=20)
                program.synchronize()
    return analyze(activities_of(*programs)).result


def test_slowest_rank_is_the_straggler() -> None:
    straggler = _ranks(1 * MS, 2 * MS).straggler
    assert straggler is not None
    assert (straggler.process, straggler.matched, straggler.last_count) == (101, 8, 8)
    assert straggler.waited_ns == 8 * MS


def test_ranks_with_different_collectives_are_not_matched() -> None:
    assert _ranks(1 * MS, 2 * MS, collectives=(8, 7)).straggler is None


def test_one_rank_has_no_straggler() -> None:
    assert _ranks(1 * MS, collectives=(8,)).straggler is None


def test_report_names_the_straggler_and_has_a_section_for_each_rank() -> None:
    text = console.render(
        report(_ranks(1 * MS, 2 * MS)), width=100, color=False, ascii_only=False, height=1000
    )
    assert "Process 101 cuda:0 started last in 8 of 8 measured collectives" in text
    assert "── process 100 cuda:0 " in text
    assert "── process 101 cuda:0 " in text


def test_report_names_ranks_that_a_launcher_numbered() -> None:
    result = _ranks(1 * MS, 2 * MS)
    devices = tuple(replace(device, rank=rank) for rank, device in enumerate(result.devices))
    document = report(replace(result, devices=devices))

    text = console.render(document, width=100, color=False, ascii_only=False, height=1000)

    assert "Rank 1, cuda:0 started last in 8 of 8 measured collectives" in text
    assert "── rank 0, cuda:0 " in text
    assert "process 100" not in text


def test_collectives_outside_the_measured_time_are_not_matched() -> None:
    programs = [Program(process=100 + rank) for rank in range(2)]
    for step in range(12):
        # The first step of the second rank is long: it is warm-up.
        times = (1 * MS, 90 * MS if step == 0 else 2 * MS)
        ends = []
        for program, time in zip(programs, times, strict=True):
            with program.range("step"):
                ends.append(program.kernel("gemm", time, line=10))
        for program, end in zip(programs, ends, strict=True):
            program.kernel(ALL_REDUCE, max(ends) - end + 100 * US, line=20)
            program.synchronize()

    result = analyze(activities_of(*programs)).result

    assert result.straggler is not None
    assert result.straggler.matched < 12
    assert result.straggler.waited_ns < 12 * MS


def test_overlap_of_collectives_counts_other_kernels_only() -> None:
    program = Program()
    program.kernel("gemm", 300 * US, stream=1)
    program.kernel(ALL_REDUCE, 100 * US, stream=2)
    program.kernel(ALL_REDUCE, 100 * US, stream=3)
    (device,) = analyze([program.activities()]).result.devices
    (collective,) = device.collectives
    assert (collective.calls, collective.total_ns, collective.overlapped_ns) == (
        2,
        200 * US,
        200 * US,
    )
    assert device.collectives_overlapped_ns == device.collectives_ns == 105 * US
