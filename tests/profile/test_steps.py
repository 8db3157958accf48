"""Steps are found by ranges, marks and repetition, and their time contains the idle time between them."""

from __future__ import annotations

from profile_synthetic import MS, US, Program

from cudakit.profile.analysis import analyze
from cudakit.profile.result import Steps
from cudakit.profile.timeline import timeline
from cudakit.trace.events import RangePop, RangePush


def _steps(program: Program, range_name: str | None = None) -> Steps:
    (device,) = analyze([program.activities()], step_range=range_name).result.devices
    return device.steps


def _layers(program: Program, count: int) -> None:
    """Launch a forward and a backward pass through equal layers, and an optimizer."""
    for _ in range(count):
        program.kernel("gemm", 10 * US, line=10)
        program.kernel("relu", 10 * US, line=11)
    for _ in range(count):
        program.kernel("gemm_backward", 10 * US, line=20)
        program.kernel("relu_backward", 10 * US, line=20)
        program.kernel("reduce", 10 * US, line=20)
    program.kernel("adam", 10 * US, line=30)


def test_steps_are_ranges_named_like_steps() -> None:
    program = Program()
    for number in range(5):
        with program.range(f"train_step {number}"), program.range("Optimizer.step#Adam.step"):
            program.kernel("k", 100 * US)
    steps = _steps(program)
    assert (steps.source, steps.name, len(steps.steps)) == ("range", "train_step #", 5)
    assert steps.median_ns == 100 * US


def test_named_range_is_the_step_even_if_its_name_is_unusual() -> None:
    program = Program()
    for _ in range(3):
        with program.range("step"):
            for _ in range(4):
                with program.range("microbatch 1"):
                    program.kernel("k", 100 * US)
    assert len(_steps(program).steps) == 3
    assert len(_steps(program, "microbatch #").steps) == 12
    assert _steps(program, "absent").source == "none"


def test_steps_end_with_the_mark_of_the_optimizer() -> None:
    program = Program()
    for _ in range(4):
        program.kernel("k", 100 * US)
        program.kernel("adam", 100 * US)
        program.mark("optimizer step", "cudakit")
    program.kernel("evaluate", 500 * US)
    steps = _steps(program)
    assert (steps.source, len(steps.steps)) == ("mark", 4)
    assert {step.time.length_ns for step in steps.steps} == {200 * US}


def test_mark_of_another_domain_is_no_step() -> None:
    program = Program()
    for _ in range(4):
        program.kernel("k", 100 * US)
        program.mark("optimizer step", "mine")
    assert _steps(program).source == "none"


def test_repetition_finds_the_step_not_the_layer() -> None:
    program = Program()
    for number in range(10):
        _layers(program, 24)
        if number % 4 == 3:
            program.kernel("log", 10 * US, line=40)
    steps = _steps(program)
    assert (steps.source, len(steps.steps)) == ("repetition", 10)


def test_repetition_of_one_kernel_is_no_step() -> None:
    program = Program()
    for _ in range(100):
        program.kernel("k", 10 * US)
    assert _steps(program).source == "none"


def test_repetition_finds_graph_launches() -> None:
    program = Program()
    for _ in range(6):
        program.copy(1 << 20, 10 * US, line=5)
        program.graph(["a", "b", "a", "b"], 10 * US, line=6)
    assert len(_steps(program).steps) == 6


def test_first_slow_steps_are_warm_up() -> None:
    program = Program()
    for number in range(8):
        with program.range("step"):
            program.kernel("k", 5 * MS if number < 2 else 1 * MS)
    steps = _steps(program)
    assert (steps.warm_up, steps.measured, steps.median_ns) == (2, 6, 1 * MS)
    assert [step.is_warm_up for step in steps.steps] == [True, True, *[False] * 6]


def test_step_contains_the_idle_time_before_the_next_step() -> None:
    program = Program()
    for _ in range(4):
        with program.range("step"):
            program.kernel("k", 1 * MS)
        program.host(5 * MS)
    first, *_ = _steps(program).steps
    assert first.time.length_ns == 5 * MS + 5 * US
    assert first.time.busy_ns == 1 * MS


def test_step_without_work_of_a_device_is_left_out() -> None:
    program = Program()
    for number in range(4):
        with program.range("step"):
            program.host(1 * US)
            if number != 2:
                program.kernel("k", 1 * MS)
    assert [step.number for step in _steps(program).steps] == [1, 2, 4]


def test_prefetched_copy_of_the_next_step_does_not_move_its_begin() -> None:
    program = Program()
    for _ in range(4):
        with program.range("step"):
            program.copy(1 << 20, 100 * US, stream=2)
            program.kernel("k", 1 * MS, stream=1)
    assert {step.time.length_ns for step in _steps(program).steps} == {1 * MS}


def test_few_much_slower_steps_are_left_out() -> None:
    program = Program()
    for number in range(40):
        with program.range("step"):
            program.kernel("k", 1 * MS)
        if number == 20:
            program.host(500 * MS)
    (device,) = analyze([program.activities()]).result.devices
    assert (device.steps.slow, device.steps.measured) == (1, 39)
    assert device.measured.length_ns == 39 * MS
    assert device.measured.busy_share == 1
    assert device.launches == 39


def test_many_slower_steps_are_measured() -> None:
    program = Program()
    for number in range(40):
        with program.range("step"):
            program.kernel("k", (10 if number % 5 == 4 else 1) * MS)
    assert (_steps(program).slow, _steps(program).measured) == (0, 40)


# --- ranges that were open at the launch of work ---------------------------------------------------


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
