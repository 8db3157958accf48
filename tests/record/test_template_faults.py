"""Tests that ``--accesses auto`` reports what it cannot observe, and loses no race, after a fault."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from record.exact_programs import BEGIN, PATCHES, gaps
from record.recorded import build_library, event_bodies, recorded
from record.test_recorder import READ_BY_OTHER
from record.test_recorder_exact_graphs import GRAPHS
from record.test_recorder_templates import (
    MORE,
    REPEAT_UNTIL_REMOVED,
    coverage_texts,
    graph_templates,
    run,
    template_ids,
    written_ranges,
)

from cudakit.trace.events import GraphLaunch, HostCall, Launch, Template
from cudakit.trace.kinds import TemplateCheck

REFUSE = "ctypes.c_int.in_dll(cuda, {!r}).value = 1\n"
REFUSE_PATCHES, REFUSE_UNPATCHING, REFUSE_MEMORY = map(
    REFUSE.format, ("refuse_patches", "refuse_unpatching", "refuse_memory")
)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("cuda"))


# --- instrumentation that cannot be switched ----------------------------------------------------------


def test_module_whose_patch_cannot_be_removed_is_recorded_as_before(
    library: Path, tmp_path: Path
) -> None:
    program = f"""{REFUSE_UNPATCHING}
import time
def step(pointer=0x100000, stream=STREAM):
    launch(write(pointer), pointer=pointer, stream=stream)
    time.sleep(0.002)
for _ in range(9):
    step()
    wait()
    recorder.read()
step(0x100100)
step(0x100100, OTHER)  # not ordered after the last launch
"""
    events = run(tmp_path, library, program)
    assert written_ranges(events)[-3:] == [
        {(0x100000, 0x100004)},
        {(0x100100, 0x100104)},
        {(0x100100, 0x100104)},
    ]
    assert gaps(events) == {"module whose instrumentation could not be removed": 1}
    result, _ = coverage_texts(events)
    assert result.coverage.launches_exact == 11
    assert len(result.races) == 1


def test_patch_that_cannot_be_restored_is_in_the_coverage(library: Path, tmp_path: Path) -> None:
    program = f"""{REPEAT_UNTIL_REMOVED}{REFUSE_PATCHES}
step(0x100100)
step()
"""
    events = run(tmp_path, library, program)
    assert template_ids(events)[-1] > 0, "launches with a template need no patch"
    result, text = coverage_texts(events)
    assert result.coverage.launches_assumed == 1
    assert (
        "10 exact (recorded, or taken from an earlier launch), 1 assumed from pointer arguments"
        in text
    )
    assert "module whose instrumentation could not be restored (1 operation)" in text


def test_race_with_template_is_found_although_no_patch_can_be_restored(
    library: Path, tmp_path: Path
) -> None:
    program = f"""{REPEAT_UNTIL_REMOVED}{REFUSE_PATCHES}
launch(write(0x100000))
cuda.fill(CONTEXT, OTHER, U(0x100000), U(16), 1)  # not ordered after the launch
"""
    result, _ = coverage_texts(run(tmp_path, library, program))
    assert len(result.races) == 1


def test_race_without_template_is_possible_if_the_patch_cannot_be_restored(
    library: Path, tmp_path: Path
) -> None:
    program = f"""{REPEAT_UNTIL_REMOVED}{REFUSE_PATCHES}
launch(write(0x100100), pointer=0x100100)
cuda.fill(CONTEXT, OTHER, U(0x100100), U(16), 1)  # not ordered after the launch
"""
    result, _ = coverage_texts(run(tmp_path, library, program))
    assert [race.confidence.value for race in result.races] == ["likely"]


REPEAT_GRAPH_UNTIL_REMOVED = """
import time
one = graph(plain)
for _ in range(12):
    launch_graph(one, write({written:#x}))
    wait()
    recorder.read()
    time.sleep(0.002)  # longer than the interval between reviews
assert cuda.patched_modules() == 0
"""


@pytest.mark.parametrize(
    ("written", "filled", "has_race", "is_unverified"),
    [
        (0x100000, 0x100000, True, False),
        (0x100000, 0x100100, False, False),  # a graph that accessed the first bytes of an array
        (0x100008, 0x100008, True, True),
        (0x100008, 0x100100, False, True),  # the accesses may depend on the content of memory
    ],
)
def test_unordered_graph_whose_patch_cannot_be_restored_is_compared_with_earlier_work(
    library: Path,
    tmp_path: Path,
    written: int,
    filled: int,
    has_race: bool,
    is_unverified: bool,
) -> None:
    program = f"""{REPEAT_GRAPH_UNTIL_REMOVED.format(written=written)}{REFUSE_PATCHES}
cuda.fill(CONTEXT, OTHER, U({filled:#x}), U(16), 1)
launch_graph(one, write({written:#x}))  # not ordered after the fill
"""
    events = run(tmp_path, library, GRAPHS + program)
    assert graph_templates(events)[-1] > 0
    last_launch = list(event_bodies(events, GraphLaunch))[-1]
    assert isinstance(last_launch, GraphLaunch)
    assert last_launch.is_unordered
    result, _ = coverage_texts(events)
    assert (bool(result.races), bool(result.unverified)) == (has_race, is_unverified)
    assert result.incomplete == ()
    for pair in result.unverified:
        assert pair.sentence.startswith(
            "graph launch on stream 3 (non-blocking) is not ordered after "
        )
        assert pair.sentence.endswith(
            "the accesses of the later launch were not recorded, but taken from another launch "
            "of the same kernel"
        )


@pytest.mark.parametrize(("filled", "is_unverified"), [(0x300100, True), (0x2FFF00, False)])
def test_unordered_launch_without_patch_is_compared_with_earlier_work(
    library: Path, tmp_path: Path, filled: int, is_unverified: bool
) -> None:
    """The launch may have accessed the bytes from its pointer on, and no other ones."""
    program = f"""
memory(FREE, 0x300000, 0x100000)
memory(ALLOC, 0x200000, 0x200000)
import time
def step():
    launch(write(0x300008), pointer=0x300000)
    wait()
    recorder.read()
    time.sleep(0.002)  # longer than the interval between reviews
for _ in range(9):
    step()
assert cuda.patched_modules() == 0
cuda.fill(CONTEXT, OTHER, U({filled:#x}), U(16), 1)  # the next launch is not ordered after it
{REFUSE_PATCHES}
step()
"""
    events = run(tmp_path, library, program)
    assert template_ids(events)[-1] > 0
    result, _ = coverage_texts(events)
    assert result.races == ()
    assert bool(result.unverified) is is_unverified


def test_patch_is_restored_for_scattered_accesses_next_to_unordered_work(
    library: Path, tmp_path: Path
) -> None:
    program = """
import time
def step(wait_for=STREAM):
    launch(write(0x300008), pointer=0x300000)
    if wait_for:
        wait(wait_for)
        recorder.read()
        time.sleep(0.002)  # longer than the interval between reviews
for _ in range(9):
    step()
assert cuda.patched_modules() == 0
step(wait_for=None)
cuda.fill(CONTEXT, OTHER, U(0x3FFF00), U(16), 1)  # not ordered with the launches, in the same allocation
step()
assert cuda.patched_modules() == 1
"""
    events = run(tmp_path, library, program)
    assert [bool(template) for template in template_ids(events)[-2:]] == [True, False]
    result, _ = coverage_texts(events)
    assert result.races == ()
    assert result.incomplete == ()


# --- templates that are wrong -------------------------------------------------------------------------


def test_template_that_turns_out_wrong_is_in_the_coverage(library: Path, tmp_path: Path) -> None:
    program = """
for i in range(60):
    launch(write(0x100000 + (i >= 10) * 64))
    wait()
    recorder.read()
"""
    result, text = coverage_texts(run(tmp_path, library, program))
    assert result.coverage.template_differences == 1
    assert "compared with an earlier launch: 1 difference" in text


USE_NEXT_TO_UNORDERED_WORK = """
launch_with_number(0, write(0x100000))
cuda.fill(CONTEXT, OTHER, U(0x1FFF00), U(16), 1)  # not ordered with the launches, in the same allocation
wait()
def step(accessed=0x100000, number=0):
    launch_with_number(number, write(accessed))
    wait()
    recorder.read()
for _ in range(12):
    step()
"""


def test_template_that_turns_out_wrong_next_to_unordered_work_is_a_finding(
    library: Path, tmp_path: Path
) -> None:
    program = f"""{USE_NEXT_TO_UNORDERED_WORK}
for _ in range(60):
    step(0x100040)
"""
    events = run(tmp_path, library, program)
    checks = [event.body.check for event in events if isinstance(event.body, Template)]
    assert TemplateCheck.DIFFERENT in checks
    result, _ = coverage_texts(events)
    (sentence,) = result.incomplete
    assert "accessed other bytes than their earlier launches" in sentence
    assert "rerun with --accesses exact" in sentence


def test_changed_argument_that_changes_accesses_is_no_wrong_template(
    library: Path, tmp_path: Path
) -> None:
    """The template applied only to launches with the old argument, whose accesses were right."""
    program = f"""{USE_NEXT_TO_UNORDERED_WORK}
step(0x100040, number=1)
"""
    events = run(tmp_path, library, program)
    assert any(template_ids(events))
    result, _ = coverage_texts(events)
    assert result.incomplete == ()
    assert gaps(events) == {}


# --- device memory ------------------------------------------------------------------------------------


def test_accesses_without_device_memory_are_assumed(library: Path, tmp_path: Path) -> None:
    program = f"""{REFUSE_MEMORY}
for _ in range(6):
    launch(write(0x100000))
    wait()
launch(write(0x100000))
cuda.fill(CONTEXT, OTHER, U(0x100000), U(16), 1)  # not ordered after the launch
"""
    events = run(tmp_path, library, program)
    result, text = coverage_texts(events)
    assert "7 assumed from pointer arguments" in text
    assert "no device memory for arenas" in text
    assert [race.confidence.value for race in result.races] == ["likely"]


def test_race_is_found_if_memory_suffices_for_one_arena_only(library: Path, tmp_path: Path) -> None:
    program = f"""
launch(write(0x100000))
wait()
{REFUSE_MEMORY}
for _ in range(6):
    launch(write(0x100000))
    wait()
    recorder.read()
launch(write(0x100000))
cuda.fill(CONTEXT, OTHER, U(0x100000), U(16), 1)  # not ordered after the launch
"""
    result, _ = coverage_texts(run(tmp_path, library, program))
    assert result.coverage.launches_exact == 8
    assert [race.confidence.value for race in result.races] == ["certain"]


# --- delays -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("templates", [False, True])
def test_wait_of_other_thread_does_not_order_a_launch_that_the_recorder_delays(
    library: Path, tmp_path: Path, templates: bool
) -> None:
    """As in JAX, a host function behind a kernel tells another thread that the kernel has ended."""
    program = """
import threading, time
# Later launches of this kernel get as much space.
launch(read(1 << 32, 4, stride=1 << 17, count=27000), kernel=multimem)
wait()
cuda.defer_work(STREAM)
launch(write(0x100000), kernel=multimem)
launch(write(0x100200), kernel=multimem)  # both arenas are in use now
cuda.call_host(STREAM)
def complete_stream():
    time.sleep(0.1)
    cuda.stop_deferring(STREAM)
thread = threading.Thread(target=complete_stream)
thread.start()
launch(write(0x100000), kernel=multimem, stream=OTHER)  # waits for an arena until the stream is complete
thread.join()
"""
    events = recorded(
        tmp_path, library, BEGIN + MORE + program, patches=PATCHES, templates=templates
    )
    host_call = next(event for event in events if isinstance(event.body, HostCall))
    last_launch = [event for event in events if isinstance(event.body, Launch)][-1]
    assert last_launch.time_ns > host_call.time_ns
    assert last_launch.seq < host_call.seq
    assert gaps(events) == {}
    result, _ = coverage_texts(events)
    assert [race.kind.value for race in result.races] == ["write-after-write"]


# --- readers and programs that end --------------------------------------------------------------------


def test_program_continues_if_its_reader_is_killed(library: Path, tmp_path: Path) -> None:
    restart = READ_BY_OTHER.replace(
        "start(own, library)", "start(own, library, 0, PATCHES, templates=TEMPLATES)"
    )
    program = """
reader.kill()
reader.wait()
for _ in range(3000):
    launch(write(0x100000))
    wait()
recorder.read()
for _ in range(100_000):
    cuda.fill(CONTEXT, STREAM, U(0x100000), U(4), 1)
assert not os.path.exists(own)
"""
    recorded(tmp_path, library, restart + BEGIN + program, patches=PATCHES, templates=True)


def test_killed_program_keeps_race_with_template(library: Path, tmp_path: Path) -> None:
    program = """
for _ in range(6):
    launch(write(0x100000))
    wait()
    recorder.read()
launch(write(0x100000))
cuda.fill(CONTEXT, OTHER, U(0x100000), U(16), 1)  # not ordered after the launch
os.kill(os.getpid(), 9)
"""
    events = recorded(
        tmp_path,
        library,
        BEGIN + MORE + program,
        status=-signal.SIGKILL,
        patches=PATCHES,
        templates=True,
    )
    assert template_ids(events)[-1] > 0
    result, _ = coverage_texts(events)
    assert [race.confidence.value for race in result.races] == ["certain"]
