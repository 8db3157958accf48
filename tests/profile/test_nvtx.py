"""The NVTX ranges of GPU work are those that were open in its thread, and those of the process."""

from __future__ import annotations

from profile_synthetic import US, Program

from cudakit.profile.analysis import analyze
from cudakit.profile.timeline import timeline
from cudakit.trace.events import RangePop, RangePush


def _ranges(program: Program) -> dict[str, int]:
    (device,) = analyze([program.activities()]).result.devices
    return {row.name: row.total_ns for row in device.ranges}


def test_range_of_the_process_contains_the_work_of_all_threads() -> None:
    program = Program()
    program.emit(RangePush("epoch", number=7))
    program.kernel("a", 10 * US)
    program.thread = 2
    with program.range("worker"):
        program.kernel("b", 20 * US)
    program.emit(RangePop(number=7))
    program.kernel("c", 40 * US)
    assert _ranges(program) == {"epoch": 30 * US, "worker": 20 * US}


def test_range_of_another_thread_does_not_contain_work() -> None:
    program = Program()
    with program.range("first"):
        program.thread = 2
        program.kernel("a", 10 * US)
        program.thread = 1
    assert _ranges(program) == {}


def test_pop_ends_the_innermost_range_of_its_domain() -> None:
    program = Program()
    program.emit(RangePush("outer", "mine"))
    program.emit(RangePush("inner"))
    program.emit(RangePop("mine"))
    program.kernel("a", 10 * US)
    assert _ranges(program) == {"inner": 10 * US}


def test_copied_ranges_of_backward_count_in_their_thread() -> None:
    program = Program()
    program.thread = 2
    program.emit(RangePush("step", is_copy=True))
    program.kernel("backward", 10 * US)
    program.emit(RangePop(is_copy=True))
    assert _ranges(program) == {"step": 10 * US}


def test_pop_without_push_is_ignored() -> None:
    program = Program()
    program.emit(RangePop())
    program.emit(RangePop(number=3))
    program.kernel("a", 10 * US)
    assert _ranges(program) == {}


def test_ranges_that_never_end_are_limited() -> None:
    program = Program()
    for _ in range(500):
        program.emit(RangePush("leaked"))
    program.kernel("a", 10 * US)
    assert _ranges(program) == {"leaked": 10 * US}


def test_range_that_a_library_does_not_end_has_no_span() -> None:
    program = Program()
    program.emit(RangePush("ncclCommInitRankConfig", "NCCL"))
    program.emit(RangePush("never ended", number=1))
    program.kernel("a", 10 * US)
    ranges = timeline(program.activities()).ranges
    names = [program.batch().strings[name] for name in ranges.name.tolist()]
    assert names == ["never ended"]
