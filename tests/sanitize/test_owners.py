"""Tests whose a race is, from the program calls and call stacks of its operations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from sanitize.sample_races import MEMORY, STREAMS, exact_operation, found_race, race

from cudakit.sanitize.findings import RaceCollector, findings, message
from cudakit.sanitize.owners import (
    StreamUse,
    is_one_program_call,
    known_issue,
    library_entry,
    library_of,
)
from cudakit.sanitize.races import FoundRace, Race, RaceOwner, Side
from cudakit.sanitize.report.races import race_note
from cudakit.stacks import BACKWARD_FRAME, Frame, Stack
from cudakit.trace.events import Event, EventBody, Fill, StreamCreate, StreamDestroy, StreamSync
from cudakit.trace.kinds import StreamFlag
from cudakit.trace.trace_file import pack

PACKAGES = "/venv/lib/python3.12/site-packages"
STEP = Frame("step", "/home/user/train.py", 10)
MAIN = Frame("<module>", "/home/user/train.py", 90)
RNN = Frame("forward", f"{PACKAGES}/torch/nn/modules/rnn.py", 1124)
STREAM = Frame("__new__", f"{PACKAGES}/torch/cuda/streams.py", 37)
ENGINE = Frame("run", f"{PACKAGES}/torch/autograd/graph.py", 800)
BACKWARD = Frame(BACKWARD_FRAME, "", 0)
EXIT = Frame("__enter__", "/usr/lib/python3.12/contextlib.py", 137)

DIRECT: Stack = (STEP, MAIN)
IN_TORCH: Stack = (RNN, STEP, MAIN)
DEEPER_IN_TORCH: Stack = (RNN, RNN, STEP, MAIN)
IN_BACKWARD: Stack = (BACKWARD, ENGINE, STEP, MAIN)
ONLY_TORCH: Stack = (RNN, ENGINE)
NEW_STREAM: Stack = (STREAM, STEP, MAIN)
NEW_STREAM_IN_TORCH: Stack = (STREAM, RNN, STEP, MAIN)
STACKS: Sequence[Stack] = (
    (),
    DIRECT,
    IN_TORCH,
    DEEPER_IN_TORCH,
    IN_BACKWARD,
    ONLY_TORCH,
    NEW_STREAM,
    NEW_STREAM_IN_TORCH,
)
FIRST, SECOND = 21, 22  # numbers of two streams


@pytest.mark.parametrize(
    ("stack", "library"),
    [
        (IN_TORCH, "torch"),
        (IN_BACKWARD, "torch"),
        (DIRECT, ""),
        (ONLY_TORCH, ""),
        ((), ""),
        ((EXIT, STEP), ""),
        ((Frame("f", f"{PACKAGES}/single.py", 1), STEP), "single"),
        ((Frame("f", "/src/cudakit/gpu/sim/device.py", 1), STEP), "cudakit"),
    ],
)
def test_library_is_the_package_that_the_program_called(stack: Stack, library: str) -> None:
    assert library_of(stack) == library


def test_entry_frame_is_inside_the_innermost_frame_of_the_program() -> None:
    frames = (RNN, STEP, ENGINE, MAIN)

    assert library_entry(frames) == frames[0]
    assert library_entry(frames[1:]) is None


def calls(current: int, previous: int, *, seqs: tuple[int, int] = (9, 8), **fields: int) -> Race:
    """Return a race of two fills with these program calls, both of them inside torch."""
    base = exact_operation(site=STACKS.index(IN_TORCH))
    return race(
        current=replace(base, seq=seqs[0], stream=FIRST, program_call=current, **fields),
        previous=replace(base, seq=seqs[1], stream=SECOND, program_call=previous, **fields),
        allocation=replace(MEMORY, site=0),
        last_sync=None,
    )


def test_equal_program_calls_are_one_call_unless_unknown() -> None:
    assert is_one_program_call(calls(5, 5))
    assert not is_one_program_call(calls(5, 6))
    assert not is_one_program_call(calls(0, 0))


def test_nodes_of_one_graph_launch_are_compared_by_their_capture() -> None:
    one_launch = calls(5, 5, seqs=(9, 9), graph=3)
    captured_apart = replace(one_launch, current=replace(one_launch.current, capturing_call=2))
    captured_together = replace(
        captured_apart, previous=replace(one_launch.previous, capturing_call=2)
    )

    assert not is_one_program_call(one_launch)
    assert not is_one_program_call(captured_apart)
    assert is_one_program_call(captured_together)


def test_two_launches_of_captured_work_are_compared_by_the_launches() -> None:
    assert not is_one_program_call(calls(5, 6, graph=3, capturing_call=2))


# --- streams


def use_of(*calls: tuple[EventBody, Stack, int]) -> StreamUse:
    """Return the use of streams by calls: the event, the call stack and the program call of each."""
    use = StreamUse()
    events = [
        Event(body, seq=seq, site=STACKS.index(stack), program_call=program_call, context=1)
        for seq, (body, stack, program_call) in enumerate(calls, 1)
    ]
    use.feed(pack(events, lambda _: 0), STACKS)
    return use


def created(number: int) -> StreamCreate:
    return StreamCreate(number, StreamFlag.NON_BLOCKING)


def work(number: int) -> Fill:
    return Fill(number, 0, 8)


KEPT_INSIDE = (
    (created(FIRST), IN_TORCH, 4),
    (created(SECOND), IN_TORCH, 4),
    (work(FIRST), IN_TORCH, 4),
    (work(SECOND), DEEPER_IN_TORCH, 4),
)


def test_streams_that_one_call_created_and_used_are_the_librarys() -> None:
    end = (
        StreamDestroy(FIRST),
        DIRECT,
        8,
    )  # the program drops the last reference to the library's object
    use = use_of(*KEPT_INSIDE, (work(FIRST), IN_BACKWARD, 7), end)

    assert use.are_library_streams(FIRST, SECOND)
    assert not use.are_library_streams(FIRST, 1)


@pytest.mark.parametrize(
    "use",
    [
        use_of(*KEPT_INSIDE, (StreamSync(FIRST), DIRECT, 9)),
        use_of(*KEPT_INSIDE[:3], (work(SECOND), IN_TORCH, 5)),
        use_of(*KEPT_INSIDE[:2]),
        use_of((created(FIRST), IN_TORCH, 3), (work(FIRST), IN_TORCH, 3), *KEPT_INSIDE[1:]),
        use_of((created(FIRST), DIRECT, 4), *KEPT_INSIDE[1:]),
        use_of((created(FIRST), (), 0), (work(FIRST), (), 0), *KEPT_INSIDE[1:]),
    ],
    ids=[
        "used-by-program",
        "used-later",
        "never-used",
        "created-by-two-calls",
        "created-by-program",
        "unknown-creation",
    ],
)
def test_other_streams_are_not_the_librarys(use: StreamUse) -> None:
    assert not use.are_library_streams(FIRST, SECOND)


@pytest.mark.parametrize(
    ("stack", "is_reachable"),
    [
        (NEW_STREAM, True),
        (NEW_STREAM_IN_TORCH, False),
        (IN_TORCH, False),
        (DIRECT, True),
        ((), True),
    ],
)
def test_program_has_access_to_streams_that_it_asked_for(stack: Stack, is_reachable: bool) -> None:
    assert use_of((created(FIRST), stack, 4)).is_reachable(FIRST) is is_reachable


def test_program_has_access_to_a_stream_that_it_passed_to_cuda() -> None:
    use = use_of((created(FIRST), NEW_STREAM_IN_TORCH, 4), (work(FIRST), DIRECT, 5))

    assert use.is_reachable(FIRST)


def test_program_may_have_access_to_streams_of_a_pool() -> None:
    pool = [(created(number), NEW_STREAM_IN_TORCH, 4) for number in range(FIRST, FIRST + 32)]

    assert use_of(*pool).is_reachable(FIRST)
    assert not use_of(*pool[1:]).is_reachable(SECOND)


def test_damaged_call_stack_number_is_not_the_programs() -> None:
    use = StreamUse()
    events = [Event(created(FIRST), seq=1, site=90), Event(work(FIRST), seq=2, site=99)]
    use.feed(pack(events, lambda _: 0), STACKS)

    assert not use.are_library_streams(FIRST)


# --- reports


def reported(*races: Race, use: StreamUse | None = None, internal: bool = False) -> RaceCollector:
    report = RaceCollector(counts_library_races=internal)
    report.add(1, races, stacks=STACKS, flag_by_stream=STREAMS, stream_use=use or StreamUse())
    return report


def only_race(report: RaceCollector) -> FoundRace:
    (found_race,) = report.result(exit_status=0, coverage={}).races
    return found_race


def test_race_of_one_call_is_the_librarys_and_no_finding() -> None:
    report = reported(calls(5, 5))

    assert (only_race(report).owner, only_race(report).library) == (RaceOwner.LIBRARY, "torch")
    assert "developers of torch" in only_race(report).hint
    assert not findings(report.result(exit_status=0, coverage={}))


def test_internal_makes_the_race_of_a_library_a_finding() -> None:
    assert findings(reported(calls(5, 5), internal=True).result(exit_status=0, coverage={}))


def test_one_occurrence_in_two_calls_makes_the_race_the_programs() -> None:
    race_in_two_calls = calls(7, 6, seqs=(19, 18))
    report = reported(calls(5, 5), race_in_two_calls, calls(8, 8, seqs=(29, 28)))

    found_race = only_race(report)
    assert (found_race.owner, found_race.library, found_race.count) == (RaceOwner.PROGRAM, None, 3)
    assert found_race.current.seq == 19


def test_race_without_frames_of_the_program_is_the_programs() -> None:
    site = STACKS.index(ONLY_TORCH)
    one_call = calls(5, 5)
    without_program = replace(
        one_call,
        current=replace(one_call.current, site=site),
        previous=replace(one_call.previous, site=site),
    )

    assert only_race(reported(without_program)).owner is RaceOwner.PROGRAM


def test_race_of_streams_kept_inside_is_the_librarys_until_the_program_uses_one() -> None:
    in_two_calls = calls(7, 8)
    use = use_of(*KEPT_INSIDE)
    report = reported(in_two_calls, use=use)
    assert only_race(report).owner is RaceOwner.LIBRARY

    use.feed(pack([Event(work(FIRST), seq=99, site=1)], lambda _: 0), STACKS)
    assert only_race(report).owner is RaceOwner.PROGRAM


def test_advice_does_not_name_a_stream_of_a_library() -> None:
    use = use_of((created(FIRST), NEW_STREAM_IN_TORCH, 4), (work(FIRST), IN_TORCH, 5))
    hint = only_race(reported(calls(7, 8), use=use)).hint

    assert hint.startswith("make the host wait for the whole device after the copy (train.py:10)")
    assert "no access to stream 21" in hint


def test_advice_names_the_streams_of_all_occurrences() -> None:
    first = calls(7, 8)
    second = replace(first, previous=replace(first.previous, stream=23))

    hint = only_race(reported(first, second)).hint
    assert "record an event on each stream (stream 22 and stream 23)" in hint


# --- Known races of libraries, recognized by the kernels and call stacks of both sides -------------

SITE_PACKAGES = "/opt/venv/lib/python3.12/site-packages"
RACE = found_race()
FILL = "void at::native::vectorized_elementwise_kernel<2, at::native::FillFunctor<long> >"
SCRIPT = Frame("main", "/home/user/train.py", 7)


def side_in(file: str, function: str, *, kernel: str | None = None) -> Side:
    stack = (Frame(function, f"{SITE_PACKAGES}/{file}", 100), SCRIPT)
    return replace(RACE.current, stack=stack, site=1, kernel=kernel)


FFT = side_in("cupy/fft/_fft.py", "_exec_fft", kernel="void regular_fft_factor<512u>")
FFT_COPY = side_in("cupy/fft/_fft.py", "_exec_fft")
CAPTURE = side_in("torch/cuda/graphs.py", "CUDAGraph.capture_begin", kernel=FILL)
REPLAY = side_in("torch/cuda/graphs.py", "CUDAGraph.replay", kernel=FILL)


@pytest.mark.parametrize("sides", [(FFT, FFT), (FFT, FFT_COPY), (FFT_COPY, FFT)])
def test_ffts_of_cupy_that_share_a_plan_are_a_known_issue(sides: tuple[Side, Side]) -> None:
    issue = known_issue(*sides)

    assert issue
    assert issue.reference.endswith("cupy/issues/8079")


@pytest.mark.parametrize("sides", [(CAPTURE, REPLAY), (REPLAY, CAPTURE)])
def test_seed_of_a_replayed_graph_is_a_known_issue(sides: tuple[Side, Side]) -> None:
    issue = known_issue(*sides)

    assert issue
    assert "replay" in issue.reference


@pytest.mark.parametrize(
    "sides",
    [
        (FFT, RACE.previous),
        (RACE.current, FFT),
        (CAPTURE, CAPTURE),
        (REPLAY, replace(CAPTURE, kernel="void at::native::add")),
        (side_in("cupy/fft/_fft.py", "fft"), FFT),
        (side_in("mine/fft/_fft.py", "_exec_fft"), FFT),
    ],
)
def test_race_with_work_of_the_program_is_no_known_issue(sides: tuple[Side, Side]) -> None:
    assert known_issue(*sides) is None


def test_report_names_the_issue_and_its_advice_instead_of_a_wait() -> None:
    race = replace(RACE, current=FFT, previous=FFT, known_issue=known_issue(FFT, FFT))

    assert "set_size(0)" in race_note(race).remedies[0]
    assert "8079" in message([race])
    assert "record an event" not in message([race])
