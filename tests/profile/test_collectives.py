"""Sizes and rates of collectives, as nccl-tests define them."""

from __future__ import annotations

import pytest
from profile_synthetic import US, Program

from cudakit.profile.analysis import analyze
from cudakit.profile.present.report import report
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
