"""Races behind host functions are found, whenever the functions run: from the recorder to the engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from record.exact_programs import BEGIN, PATCHES, gaps
from record.recorded import build_library, recorded
from record.test_recorder_exact_graphs import GRAPHS
from record.test_recorder_templates import MORE

from cudakit.sanitize.engine import Engine
from cudakit.sanitize.races import Race
from cudakit.sanitize.records import reorder_records
from cudakit.sanitize.templates import TemplateAccesses
from cudakit.trace.events import Event, EventRecord, HostCall, Launch
from cudakit.trace.kinds import HostCallPhase
from cudakit.trace.trace_file import pack

BEFORE, AFTER = 0x100000, 0x300000
# The times at which the host function of STREAM runs.
RUNS_AT_ONCE, RUNS_BEFORE_LATER_KERNEL, RUNS_AFTER_LATER_KERNEL = "at once", "alone", "late"
TIMES = (RUNS_AT_ONCE, RUNS_BEFORE_LATER_KERNEL, RUNS_AFTER_LATER_KERNEL)
START = {
    RUNS_AT_ONCE: "pass",
    RUNS_BEFORE_LATER_KERNEL: "cuda.defer_work(STREAM)",
    RUNS_AFTER_LATER_KERNEL: "cuda.defer_work(STREAM)",
}
RUN_FUNCTION = {
    RUNS_AT_ONCE: "pass",
    RUNS_BEFORE_LATER_KERNEL: "cuda.run_next_host_function(STREAM)",
    RUNS_AFTER_LATER_KERNEL: "cuda.stop_deferring(STREAM)",
}
MODES = pytest.mark.parametrize("templates", [False, True], ids=["exact", "auto"])


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("cuda"))


def run(directory: Path, library: Path, program: str, *, templates: bool) -> list[Event]:
    """Run a program that records exact accesses, and return its events."""
    program = BEGIN + MORE + f"BEFORE, AFTER = {BEFORE}, {AFTER}\n" + program
    events = recorded(directory, library, program, patches=PATCHES, templates=templates)
    assert gaps(events) == {}
    return events


def found_races(events: list[Event]) -> list[Race]:
    """Return all races of a trace, with the accesses of templates."""
    in_order, never_read_count = reorder_records(pack(events, lambda _: 0))
    assert never_read_count == 0
    engine, templates = Engine(), TemplateAccesses()
    in_order = templates.insert(in_order, engine.coverage)
    return engine.feed(in_order, [""], templates.possible_accesses, templates.graph_rows)


def racing_buffers(events: list[Event]) -> list[int]:
    """Return the first address of each race, in order of the calls."""
    return [race.lo for race in found_races(events)]


@MODES
@pytest.mark.parametrize("time", TIMES)
@pytest.mark.parametrize("function", ["call_host", "add_callback"])
def test_race_with_work_after_host_function_is_found_in_each_round(
    library: Path, tmp_path: Path, function: str, time: str, templates: bool
) -> None:
    # In auto mode, unordered launches have templates after they were recorded in 128 rounds.
    rounds = 140
    program = f"""
for _ in range({rounds}):
    {START[time]}
    launch(write(BEFORE), pointer=BEFORE)
    cuda.{function}(STREAM)
    launch(write(AFTER), pointer=AFTER)
    {RUN_FUNCTION[time]}
    launch(read(BEFORE), stream=OTHER, pointer=BEFORE, kernel=multimem)
    launch(read(AFTER), stream=OTHER, pointer=AFTER, kernel=multimem)
    wait()
    wait(OTHER)
    recorder.read()
"""
    events = run(tmp_path, library, program, templates=templates)

    assert racing_buffers(events) == [AFTER] * rounds
    launches = [event.body for event in events if isinstance(event.body, Launch)]
    template_counts = [sum(bool(launch.template_id) for launch in launches[i::4]) for i in range(4)]
    assert all(count > 0 for count in template_counts) is templates


@MODES
@pytest.mark.parametrize("time", TIMES)
def test_copy_by_the_host_races_with_work_after_host_function(
    library: Path, tmp_path: Path, time: str, templates: bool
) -> None:
    program = f"""
for _ in range(4):
    {START[time]}
    launch(write(BEFORE), pointer=BEFORE)
    cuda.call_host(STREAM)
    launch(write(AFTER), pointer=AFTER)
    {RUN_FUNCTION[time]}
    for buffer in (BEFORE, AFTER):
        cuda.fill(CONTEXT, OTHER, U(buffer), U(4), 1)
    wait()
    wait(OTHER)
    recorder.read()
"""
    events = run(tmp_path, library, program, templates=templates)

    assert racing_buffers(events) == [AFTER] * 4


@MODES
def test_host_functions_in_flight_on_two_streams_order_the_work_before_each(
    library: Path, tmp_path: Path, templates: bool
) -> None:
    program = """
LAST = P(0x3001)
cuda.make_stream(CONTEXT, LAST, 1)
for _ in range(4):
    for stream, buffer in ((STREAM, BEFORE), (OTHER, AFTER)):
        cuda.defer_work(stream)
        for offset in (0, 0x100):
            launch(write(buffer + offset), stream=stream, pointer=buffer + offset)
            cuda.call_host(stream)
        launch(write(buffer + 0x200), stream=stream, pointer=buffer + 0x200)
    for stream, buffer in ((OTHER, AFTER), (STREAM, BEFORE)):
        cuda.run_next_host_function(stream)
        launch(read(buffer), stream=LAST, pointer=buffer)
        cuda.run_next_host_function(stream)
        launch(read(buffer + 0x100), stream=LAST, pointer=buffer + 0x100)
        launch(read(buffer + 0x200), stream=LAST, pointer=buffer + 0x200)
    for stream in (STREAM, OTHER, LAST):
        wait(stream)
    recorder.read()
"""
    events = run(tmp_path, library, program, templates=templates)

    assert racing_buffers(events) == [AFTER + 0x200, BEFORE + 0x200] * 4


@MODES
@pytest.mark.parametrize("time", TIMES)
def test_graph_after_host_function_races(
    library: Path, tmp_path: Path, time: str, templates: bool
) -> None:
    program = f"""{GRAPHS}
one = graph(plain)
for _ in range(6):
    {START[time]}
    launch(write(BEFORE), pointer=BEFORE)
    cuda.call_host(STREAM)
    launch_graph(one, write(BEFORE + 0x100))
    {RUN_FUNCTION[time]}
    launch(read(BEFORE), stream=OTHER, pointer=BEFORE)
    launch(read(BEFORE + 0x100), stream=OTHER, pointer=BEFORE)
    wait()
    wait(OTHER)
    recorder.read()
"""
    events = run(tmp_path, library, program, templates=templates)

    assert racing_buffers(events) == [BEFORE + 0x100] * 6


@MODES
def test_host_function_in_a_graph_orders_only_the_nodes_of_the_graph(
    library: Path, tmp_path: Path, templates: bool
) -> None:
    program = f"""{GRAPHS}
three = graph(plain, plain, plain)
host_node = Node(3)
three.node[1] = ctypes.addressof(host_node)
three.edges = 2
three.before[0], three.after[0], three.before[1], three.after[1] = 0, 1, 1, 2
cuda.instantiate(ctypes.byref(three), EXECUTABLE)
for _ in range(6):
    launch_graph(three, write(BEFORE), read(BEFORE), read(BEFORE))
    launch(write(BEFORE), stream=OTHER, pointer=BEFORE)
    wait()
    wait(OTHER)
    recorder.read()
    launch(write(BEFORE), stream=OTHER, pointer=BEFORE)
    wait(OTHER)
"""
    events = run(tmp_path, library, program, templates=templates)

    assert [event.body for event in events if isinstance(event.body, HostCall)] == []
    assert racing_buffers(events) == [BEFORE] * 6


def test_event_is_recorded_directly_before_each_host_function(
    library: Path, tmp_path: Path
) -> None:
    program = """
cuda.defer_work(STREAM)
cuda.event(RECORD, EVENT, CONTEXT, STREAM)
cuda.call_host(STREAM)
cuda.call_host(STREAM)
launch(write(BEFORE))
cuda.run_next_host_function(STREAM)
cuda.run_next_host_function(STREAM)
wait()
"""
    events = run(tmp_path, library, program, templates=False)

    bodies = [event.body for event in events if isinstance(event.body, EventRecord | HostCall)]
    program_event, first, second = (body.event for body in bodies[:3])
    assert len({program_event, first, second}) == 3
    assert bodies == [
        *(EventRecord(event, 3) for event in (program_event, first, second)),
        *(HostCall(3, phase, event) for event in (first, second) for phase in HostCallPhase),
    ]
