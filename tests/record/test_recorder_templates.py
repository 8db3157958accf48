"""Tests that the recorder replaces repeated launches by templates, and records all others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import race_logs
from record.exact_programs import BEGIN, HEAP_BYTES, PATCHES, gaps
from record.recorded import build_library, recorded, run_program
from record.test_recorder_exact_graphs import GRAPHS

from cudakit.sanitize import report
from cudakit.sanitize.races import Coverage, SanitizeResult
from cudakit.sanitize.records import reorder_records, sorted_by_call
from cudakit.sanitize.templates import TemplateAccesses
from cudakit.trace.events import (
    Access,
    Event,
    GraphDestroy,
    GraphLaunch,
    GraphNode,
    Launch,
    Template,
)
from cudakit.trace.kinds import EventKind, Precision, TemplateCheck
from cudakit.trace.spool import Batch, Spool
from cudakit.trace.trace_file import pack, unpack, view

MORE = """
two = Kernel(b"plain", 2, (0, 8), (8, 8))
def launch_with_number(number, *each, stream=STREAM, pointer=0x100000):
    set_accesses(*each)
    cuda.launch(CONTEXT, stream, ctypes.byref(two), pointers(pointer, number), None)
cuda.make_stream(CONTEXT, OTHER, 1)
memory(ALLOC, 0x300000, 0x100000)
EVENT = P(0x7000)
cuda.event(CREATED, EVENT, CONTEXT, None)
"""


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("cuda"))


def run(directory: Path, library: Path, program: str) -> list[Event]:
    """Run a program with templates, and return its events."""
    program = BEGIN + MORE + program
    return recorded(directory, library, program, patches=PATCHES, templates=True)


def template_ids(events: list[Event]) -> list[int]:
    """Return the template of each launch, in order; 0 for a launch that was recorded."""
    return [event.body.template_id for event in events if isinstance(event.body, Launch)]


def written_ranges(events: list[Event]) -> list[set[tuple[int, int]]]:
    """Return the exact ranges of each launch after templates were inserted, in order of the calls."""
    strings = [""]
    records = pack(events, lambda _: 0)
    in_order, never_read_count = reorder_records(records)
    assert never_read_count == 0
    inserted = TemplateAccesses().insert(in_order, Coverage())
    ranges: dict[int, set[tuple[int, int]]] = {}
    for event in unpack(inserted, strings):
        if isinstance(event.body, Launch):
            ranges[event.seq] = set()
        elif isinstance(event.body, Access):
            assert event.body.precision == Precision.EXACT
            ranges[event.seq].add((event.body.lo, event.body.hi))
    assert np.all(np.diff(inserted["seq"].astype(np.int64)) >= 0)
    return list(ranges.values())


def written_bytes(events: list[Event]) -> list[set[int]]:
    """Return the first byte of each contiguous access of each launch, after templates were inserted."""
    in_order, _ = reorder_records(pack(events, lambda _: 0))
    inserted = TemplateAccesses().insert(in_order, Coverage())
    written: dict[int, set[int]] = {}
    for event in unpack(inserted, [""]):
        if isinstance(event.body, Launch):
            written[event.seq] = set()
        elif isinstance(event.body, Access):
            access = event.body
            steps = range(max(access.count, 1))
            written[event.seq] |= {access.lo + i * access.stride_bytes for i in steps}
    return list(written.values())


def coverage_texts(events: list[Event]) -> tuple[SanitizeResult, str]:
    """Return the result of the analysis of a trace, and its notes on the coverage."""
    strings = [""]
    records = pack(
        events, lambda text: strings.index(text) if text in strings else _append(strings, text)
    )
    result = race_logs.analyze([Batch(1, records, strings, [()], 0, False)])
    return result, "\n".join(note.text for note in report.notes(result))


def _append(strings: list[str], text: str) -> int:
    strings.append(text)
    return len(strings) - 1


def test_third_equal_launch_uses_template(library: Path, tmp_path: Path) -> None:
    program = """
for _ in range(5):
    launch(read(0x100000), write(0x100100))
    wait()
    recorder.read()
"""
    events = run(tmp_path, library, program)
    assert template_ids(events) == [0, 0, 1, 1, 1]
    assert written_ranges(events) == 5 * [{(0x100000, 0x100004), (0x100100, 0x100104)}]
    assert gaps(events) == {}


def test_template_is_checked_and_dropped_when_accesses_change(
    library: Path, tmp_path: Path
) -> None:
    program = """
for i in range(60):
    launch(write(0x100000 + (i >= 10) * 64))
    wait()
    recorder.read()
"""
    events = run(tmp_path, library, program)
    checks = [e.body.check for e in events if isinstance(e.body, Template) and e.body.check]
    assert checks.count(TemplateCheck.DIFFERENT) == 1
    first_recorded_again = template_ids(events).index(0, 10)
    assert not any(template_ids(events)[first_recorded_again:])


def test_launch_that_is_unordered_with_other_stream_is_recorded(
    library: Path, tmp_path: Path
) -> None:
    program = """
for i in range(6):
    launch(read(0x100000))
    wait()
    recorder.read()
launch(read(0x100080), stream=OTHER, pointer=0x100080)  # ordered: the host has waited
wait(OTHER)
launch(read(0x100000))
launch(read(0x100080), stream=OTHER, pointer=0x100080)  # not ordered after the last launch
recorder.read()
for i in range(3):
    launch(read(0x100000))
    wait()
    recorder.read()
"""
    events = run(tmp_path, library, program)
    assert template_ids(events) == [0, 0, 1, 1, 1, 1, 0, 1, 0, 0, 0, 0]
    assert gaps(events) == {}


def test_wait_for_event_keeps_template(library: Path, tmp_path: Path) -> None:
    program = """
for i in range(6):
    launch(write(0x100000))
    cuda.event(RECORD, EVENT, CONTEXT, STREAM)
    cuda.event(WAIT, EVENT, CONTEXT, OTHER)
    launch(read(0x100004), stream=OTHER, pointer=0x100004)
    cuda.event(RECORD, EVENT, CONTEXT, OTHER)
    cuda.event(WAIT, EVENT, CONTEXT, STREAM)
    recorder.read()
"""
    assert template_ids(run(tmp_path, library, program))[:6] == [0, 0, 0, 0, 1, 2]


def test_number_that_moves_accesses_joins_signature(library: Path, tmp_path: Path) -> None:
    program = """
for i in range(12):
    launch_with_number(i % 2, write(0x100000 + i % 2 * 256))
    wait()
    recorder.read()
"""
    events = run(tmp_path, library, program)
    ids = template_ids(events)
    assert not any(ids[:4])
    assert len(set(ids[8:])) == 2
    assert written_ranges(events) == 6 * [{(0x100000, 0x100004)}, {(0x100100, 0x100104)}]


def test_number_without_effect_is_ignored_after_three_values(library: Path, tmp_path: Path) -> None:
    program = """
for i in range(8):
    launch_with_number(i, write(0x100000))
    wait()
    recorder.read()
"""
    assert template_ids(run(tmp_path, library, program))[:5] == [0, 0, 0, 1, 1]


def test_template_applies_to_tensors_whose_accesses_were_joined(
    library: Path, tmp_path: Path
) -> None:
    """Three tensors at equal distances are accessed as one strided set; at other distances they are not."""
    program = """
three = Kernel(b"plain", 3, (0, 8, 16), (8, 8, 8))
def launch_with_three(*tensors):
    set_accesses(*(write(tensor) for tensor in tensors))
    cuda.launch(CONTEXT, STREAM, ctypes.byref(three), pointers(*tensors), None)
    wait()
    recorder.read()
for distances in [(1, 2), (1, 2), (1, 3), (2, 5), (3, 4), (1, 2)]:
    launch_with_three(0x100000, *(0x100000 + distance * 0x200 for distance in distances))
"""
    events = run(tmp_path, library, program)
    assert template_ids(events) == [0, 0, 0, 0, 1, 1]
    assert written_bytes(events)[4:] == [
        {0x100000, 0x100600, 0x100800},
        {0x100000, 0x100200, 0x100400},
    ]


def test_access_outside_of_pointed_allocations_is_always_recorded(
    library: Path, tmp_path: Path
) -> None:
    program = """
for i in range(8):
    launch(write(0x300000))
    wait()
    recorder.read()
"""
    assert template_ids(run(tmp_path, library, program)) == 8 * [0]


@pytest.mark.parametrize("unload", ["22, (P * 1)(MODULE.value)", "680, (P * 1)(0x6000)"])
def test_unloaded_kernel_leaves_no_template_to_kernel_with_same_handles(
    library: Path, tmp_path: Path, unload: str
) -> None:
    """The driver reuses handles of modules and kernels, and all kernels of XLA may have one name."""
    program = f"""
for i in range(4):
    launch(write(0x100000))
    wait()
    recorder.read()
cuda.call_driver({unload})  # cuModuleUnload or cuLibraryUnload
load_module()
launch(write(0x100400))
"""
    events = run(tmp_path, library, program)
    assert template_ids(events) == [0, 0, 1, 1, 0]
    assert written_bytes(events)[-1] == {0x100400}


def test_templates_are_off_by_default(library: Path, tmp_path: Path) -> None:
    program = """
for i in range(4):
    launch(write(0x100000))
    wait()
    recorder.read()
"""
    events = recorded(tmp_path, library, BEGIN + program, patches=PATCHES)
    assert template_ids(events) == 4 * [0]
    assert not [event for event in events if isinstance(event.body, Template)]


# --- removing and restoring the patch -----------------------------------------------------------------

REPEAT_UNTIL_REMOVED = """
import time
def step(pointer=0x100000):
    launch(write(pointer), pointer=pointer)
    wait()
    recorder.read()
    time.sleep(0.002)  # longer than the interval between reviews
for _ in range(9):
    step()
assert cuda.patched_modules() == 0
"""


def test_patch_is_removed_when_all_launches_have_templates(library: Path, tmp_path: Path) -> None:
    events = run(tmp_path, library, REPEAT_UNTIL_REMOVED)
    assert len(template_ids(events)) == 9
    assert written_ranges(events) == 9 * [{(0x100000, 0x100004)}]


def test_patch_is_restored_before_launch_without_template(library: Path, tmp_path: Path) -> None:
    program = f"""{REPEAT_UNTIL_REMOVED}
step(0x100100)
assert cuda.patched_modules() == 1
step()
"""
    events = run(tmp_path, library, program)
    assert template_ids(events)[9] == 0
    assert written_ranges(events)[8:10] == [{(0x100000, 0x100004)}, {(0x100100, 0x100104)}]
    assert gaps(events) == {}


def test_unordered_launch_without_patch_uses_its_template(library: Path, tmp_path: Path) -> None:
    program = """
import time
def step(stream, wait_for):
    launch(write(0x300000), pointer=0x300000, stream=stream)
    if wait_for:
        wait(stream)
        recorder.read()
    time.sleep(0.002)
for _ in range(9):
    step(STREAM, True)
assert cuda.patched_modules() == 0
step(STREAM, False)
step(OTHER, True)  # not ordered after the last launch; the launch callback cannot restore the patch
step(OTHER, True)
assert cuda.patched_modules() == 1
"""
    events = run(tmp_path, library, program)
    launches = [event.body for event in events if isinstance(event.body, Launch)]
    assert [bool(launch.template_id) for launch in launches[-3:]] == [True, True, False]
    assert [launch.is_unordered for launch in launches[-3:]] == [False, True, False]
    result, _ = coverage_texts(events)
    assert len(result.races) == 1
    assert result.incomplete == (), "the template has contiguous accesses"


def test_patch_stays_while_another_stream_has_work(library: Path, tmp_path: Path) -> None:
    program = """
import time
launch(read(0x100080), stream=OTHER, pointer=0x100080)
for _ in range(9):
    launch(write(0x300000), pointer=0x300000)
    wait()
    time.sleep(0.002)
assert cuda.patched_modules() == 1
"""
    assert len(template_ids(run(tmp_path, library, program))) == 10


# --- programs that do not wait by a call ---------------------------------------------------------------

NEVER_WAIT = """
import time
ctypes.c_int.in_dll(cuda, "refuse_context_events").value = 0
end = time.monotonic() + 1.2
while time.monotonic() < end and cuda.patched_modules():
    for _ in range(64):
        launch(write(0x100000))
    recorder.read()
    time.sleep(0.01)
"""


def test_patch_is_removed_from_program_that_never_waits(library: Path, tmp_path: Path) -> None:
    program = f"{NEVER_WAIT}assert cuda.patched_modules() == 0"
    events = run(tmp_path, library, program)
    assert template_ids(events)[-1]
    assert gaps(events) == {}


def test_program_waits_only_briefly_for_work_that_never_ends(library: Path, tmp_path: Path) -> None:
    program = f"""
cuda.defer_work(OTHER)
cuda.call_host(OTHER)  # runs only after stop_deferring()
{NEVER_WAIT}
assert cuda.patched_modules() == 1
cuda.stop_deferring(OTHER)
"""
    events = run(tmp_path, library, program)
    assert gaps(events) == {}


def test_host_function_orders_later_work_after_its_stream(library: Path, tmp_path: Path) -> None:
    program = """
def round():
    for stream in (STREAM, OTHER):
        launch(write(0x300000), stream=stream, pointer=0x300000)
        cuda.call_host(stream)
    recorder.read()
for _ in range(4):
    round()
"""
    events = run(tmp_path, library, program)
    assert template_ids(events) == [0, 0, 1, 1, 1, 1, 1, 1]


def test_work_after_host_function_counts_as_unordered_when_the_function_has_run(
    library: Path, tmp_path: Path
) -> None:
    program = """
memory(ALLOC, 0x500000, 0x100000)
cuda.defer_host_functions(STREAM)
for _ in range(6):
    launch(write(0x300000), pointer=0x300000)
    cuda.call_host(STREAM)
    launch(write(0x500000), pointer=0x500000)
    cuda.run_next_host_function(STREAM)
    launch(write(0x300000), pointer=0x300000, stream=OTHER)
    launch(write(0x500000), pointer=0x500000, stream=OTHER)
    wait()
    wait(OTHER)
    recorder.read()
"""
    templates = template_ids(run(tmp_path, library, program))
    assert all(templates[6::4]), "the host function orders these launches"
    assert not any(templates[7::4]), "the host function does not order these launches"


# --- graphs -------------------------------------------------------------------------------------------


def graph_templates(events: list[Event]) -> list[int]:
    """Return the template of each graph launch, in order; 0 for a launch that was recorded."""
    return [event.body.template_id for event in events if isinstance(event.body, GraphLaunch)]


@pytest.mark.parametrize(("edges", "templates"), [(1, [0, 0, 1, 1, 1]), (0, [0, 0, 0, 0, 0])])
def test_graph_has_template_if_its_nodes_are_ordered(
    library: Path, tmp_path: Path, edges: int, templates: list[int]
) -> None:
    program = f"""
two = graph(plain, plain)
two.edges, two.before[0], two.after[0] = {edges}, 0, 1
cuda.instantiate(ctypes.byref(two), EXECUTABLE)
for _ in range(5):
    launch_graph(two, write(0x100000), write(0x100008))
    cuda.event(RECORD, EVENT, CONTEXT, STREAM)
    cuda.event(WAIT, EVENT, CONTEXT, OTHER)
    launch(read(0x100008), stream=OTHER, pointer=0x100008)
    wait()
    wait(OTHER)
    recorder.read()
"""
    events = run(tmp_path, library, GRAPHS + program)
    assert graph_templates(events) == templates
    assert gaps(events) == {}


# Each round instantiates a graph of two nodes, launches it twice, updates it in every fourth round, and
# destroys it. ``has_new_handle`` is whether the driver gives each executable graph another handle.
SHORT_LIVED_GRAPHS = """
def graph_in_line():
    nodes = [kernel_node(plain), kernel_node(plain)]
    made = Graph(2, 1)
    made.node[0], made.node[1] = map(ctypes.addressof, nodes)
    made.before[0], made.after[0] = 0, 1
    return made, nodes
made, nodes = graph_in_line()
accesses = (Touch * 2)(write(0x100000), write(0x100008))
def round(i, has_new_handle, stream=STREAM):
    executable = P(0x9000 + has_new_handle * 16 * i)
    cuda.instantiate(ctypes.byref(made), executable)
    for _ in range(2):
        cuda.set_next_accesses(accesses, 2, 0)
        cuda.launch_kernels(CONTEXT, stream, executable, ctypes.byref(made), U(1000), 1)
        cuda.synchronize(1, CONTEXT, stream)
    if i % 4 == 0:
        cuda.update_executable(executable, ctypes.byref(made), i % 8)  # every second update fails
        cuda.fail_to_instantiate(ctypes.byref(made))
    cuda.destroy_executable(executable)
"""


@pytest.mark.parametrize("has_new_handle", [False, True])
def test_10000_graphs_one_after_the_other_need_no_more_memory_and_use_template(
    library: Path, tmp_path: Path, has_new_handle: bool
) -> None:
    program = f"""{SHORT_LIVED_GRAPHS}{HEAP_BYTES}
for i in range(10_000):
    round(i, {has_new_handle})
    if i < 100:
        recorder.read()
    if i == 5000:
        bytes_before = heap_bytes()
assert heap_bytes() - bytes_before < 256 << 10
"""
    events = run(tmp_path, library, GRAPHS + program)
    assert gaps(events) == {}
    assert len(graph_templates(events)) == 20_000
    assert graph_templates(events).count(0) < 200, (
        "a few launches are recorded to verify the template"
    )


def test_each_graph_that_is_not_launched_any_more_has_one_record_after_its_last_launch(
    library: Path, tmp_path: Path
) -> None:
    program = f"""{SHORT_LIVED_GRAPHS}
for i in range(9):  # three rounds update the executable graph, one of them without success
    round(i, False)
cuda.instantiate(ctypes.byref(made), EXECUTABLE)
launch_graph(made, *accesses)
"""
    events = run(tmp_path, library, GRAPHS + program)
    graphs = {event.body.graph: event.seq for event in events if isinstance(event.body, GraphNode)}
    launches = [event for event in events if isinstance(event.body, GraphLaunch)]
    destroyed = [event for event in events if isinstance(event.body, GraphDestroy)]
    last_launches = {launch.body.graph: launch.seq for launch in launches}
    last_launch = launches[-1].body
    assert sorted(event.body.graph for event in destroyed) == sorted(
        {*graphs} - {last_launch.graph}
    )
    assert all(
        event.seq > last_launches.get(event.body.graph, graphs[event.body.graph])
        for event in destroyed
    )
    # Updates and failed instantiations leave the executable graph as it is.
    assert [event.body.executable for event in destroyed if event.body.executable] == [
        *range(1, 10)
    ]
    assert last_launch.executable == 10


def test_race_between_graph_and_copy_is_found_in_last_of_many_graphs(
    library: Path, tmp_path: Path
) -> None:
    program = f"""{SHORT_LIVED_GRAPHS}
for i in range(500):
    round(i, False)
    recorder.read()
cuda.instantiate(ctypes.byref(made), EXECUTABLE)
launch_graph(made, *accesses)
cuda.fill(CONTEXT, OTHER, U(0x100008), U(4), 1)  # not ordered after the graph
"""
    events = run(tmp_path, library, GRAPHS + program)
    assert graph_templates(events)[-1] > 0
    assert gaps(events) == {}
    result, _ = coverage_texts(events)
    assert [race.kind.value for race in result.races] == ["write-after-write"]


def test_graphs_of_two_threads_have_right_templates(library: Path, tmp_path: Path) -> None:
    program = f"""{SHORT_LIVED_GRAPHS}
import threading
for i in range(6):
    round(i, False)
    recorder.read()
def work(stream, first_round):
    for i in range(first_round, first_round + 500):
        round(i, True, stream)
threads = [threading.Thread(target=work, args=(STREAM, 1000 * i)) for i in (1, 2)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    events = run(tmp_path, library, GRAPHS + program)
    assert len(graph_templates(events)) == 2012
    assert graph_templates(events).count(0) < 400
    assert gaps(events) == {}
    result, _ = coverage_texts(events)
    assert result.races == ()


def test_graph_with_changed_nodes_has_template_if_parameters_repeat(
    library: Path, tmp_path: Path
) -> None:
    """A graph whose node alternates between two buffers, as those of XLA, has a template for each of them."""
    program = """
one = graph(plain)
cuda.instantiate(ctypes.byref(one), EXECUTABLE)
def kernel_at(pointer):
    changed = kernel_node(plain)
    array = pointers(pointer, 0, 0)
    held.append((changed, array))
    changed.kernel[5] = ctypes.addressof(array)
    return changed
both = [kernel_at(0x100000), kernel_at(0x100400)]
for i in range(8):
    changed = both[i % 2]
    call = (P * 3)(EXECUTABLE.value, one.node[0], ctypes.addressof(changed) + Node.kernel.offset)
    cuda.call_driver(692, call)  # cuGraphExecKernelNodeSetParams_v2
    launch_graph(one, write(0x100000 + i % 2 * 0x400))
    wait()
    recorder.read()
"""
    events = run(tmp_path, library, GRAPHS + program)
    assert graph_templates(events) == [0, 0, 0, 0, 1, 2, 1, 2]
    assert gaps(events) == {}
    node_count = sum(isinstance(event.body, GraphNode) for event in events)
    assert node_count == 2 + 4, "changed nodes are written for the recorded launches only"


# --- many streams -------------------------------------------------------------------------------------

# Each round creates a stream, launches a kernel on it, waits for the stream and destroys it.
# ``has_new_handle`` is whether the driver gives each stream another handle.
SHORT_LIVED_STREAMS = """
def round(i, has_new_handle):
    stream = P(0x20000 + has_new_handle * 16 * i)
    cuda.make_stream(CONTEXT, stream, 1)
    launch(write(0x300000), stream=stream, pointer=0x300000)
    wait(stream)
    cuda.destroy_stream(CONTEXT, stream)
    held.clear()
"""


@pytest.mark.parametrize("has_new_handle", [False, True])
def test_launches_on_10000_streams_one_after_the_other_use_template(
    library: Path, tmp_path: Path, has_new_handle: bool
) -> None:
    program = f"""{SHORT_LIVED_STREAMS}{HEAP_BYTES}
for i in range(10_000):
    round(i, {has_new_handle})
    if i < 100:
        recorder.read()
    if i == 5000:
        bytes_before = heap_bytes()
assert heap_bytes() - bytes_before < 256 << 10
"""
    events = run(tmp_path, library, program)
    assert gaps(events) == {}
    assert len(template_ids(events)) == 10_000
    assert template_ids(events).count(0) < 200, "a few launches are recorded to verify the template"
    result, _ = coverage_texts(events)
    assert result.races == ()


def test_race_is_found_on_stream_that_has_the_slot_of_a_destroyed_stream(
    library: Path, tmp_path: Path
) -> None:
    program = f"""{SHORT_LIVED_STREAMS}
for i in range(300):
    round(i, True)
    recorder.read()
launch(write(0x300000), pointer=0x300000)
stream = P(0x1F000)
cuda.make_stream(CONTEXT, stream, 1)
launch(write(0x300000), stream=stream, pointer=0x300000)  # not ordered after the last launch
"""
    events = run(tmp_path, library, program)
    result, _ = coverage_texts(events)
    assert [race.kind.value for race in result.races] == ["write-after-write"]
    assert gaps(events) == {}


def test_work_of_destroyed_stream_without_wait_is_unordered_with_work_of_later_streams(
    library: Path, tmp_path: Path
) -> None:
    """A later stream must not get the slot of the stream, whose work the host has not waited for."""
    program = f"""{SHORT_LIVED_STREAMS}
for i in range(12):
    round(0, False)
    recorder.read()
stream = P(0x1F000)
cuda.make_stream(CONTEXT, stream, 1)
launch(write(0x300000), stream=stream, pointer=0x300000)
cuda.destroy_stream(CONTEXT, stream)
launch(write(0x100000))
wait()
cuda.make_stream(CONTEXT, stream, 1)
launch(write(0x500000), stream=stream, pointer=0x500000)
launch(write(0x300000), stream=stream, pointer=0x300000)  # not ordered after the first stream
"""
    events = run(tmp_path, library, "memory(ALLOC, 0x500000, 0x100000)\n" + program)
    assert template_ids(events)[-4] > 0
    assert template_ids(events)[-1] == 0
    result, _ = coverage_texts(events)
    assert [race.kind.value for race in result.races] == ["write-after-write"]


def test_stream_does_not_have_the_order_of_the_destroyed_stream_with_its_slot(
    library: Path, tmp_path: Path
) -> None:
    program = f"""{SHORT_LIVED_STREAMS}
for i in range(12):
    round(0, False)
    recorder.read()
launch(write(0x300000), pointer=0x300000)
cuda.event(RECORD, EVENT, CONTEXT, STREAM)
stream = P(0x1F000)
cuda.make_stream(CONTEXT, stream, 1)
cuda.event(WAIT, EVENT, CONTEXT, stream)
cuda.destroy_stream(CONTEXT, stream)
cuda.make_stream(CONTEXT, stream, 1)
launch(write(0x300000), stream=stream, pointer=0x300000)  # not ordered after the last launch
"""
    events = run(tmp_path, library, program)
    assert [bool(template) for template in template_ids(events)[-2:]] == [True, False]


def test_stream_that_waits_for_another_stream_keeps_its_order_while_all_slots_are_in_use(
    library: Path, tmp_path: Path
) -> None:
    program = """
waiting = P(0x40000)
cuda.make_stream(CONTEXT, waiting, 1)
for _ in range(12):
    launch(write(0x300000), stream=waiting, pointer=0x300000)
    wait(waiting)
    recorder.read()
launch(write(0x300000), pointer=0x300000)
cuda.event(RECORD, EVENT, CONTEXT, STREAM)
cuda.event(WAIT, EVENT, CONTEXT, waiting)
for i in range(200):
    stream = P(0x50000 + i)
    cuda.make_stream(CONTEXT, stream, 1)
    launch(read(0x100000), stream=stream)
    wait(stream)
launch(write(0x300000), stream=waiting, pointer=0x300000)
"""
    events = run(tmp_path, library, program)
    assert gaps(events) == {}
    assert template_ids(events)[-1] > 0


def test_launches_on_more_than_128_busy_streams_are_recorded(library: Path, tmp_path: Path) -> None:
    program = f"""{SHORT_LIVED_STREAMS}
for i in range(12):
    round(i, True)
    recorder.read()
streams = [P(0x40000 + i) for i in range(140)]
for stream in streams:
    cuda.make_stream(CONTEXT, stream, 1)
for stream in streams:
    launch(read(0x500000), stream=stream, pointer=0x500000)
launch(write(0x300000), stream=streams[0], pointer=0x300000)
launch(write(0x300000), stream=streams[-1], pointer=0x300000)  # not ordered after the last launch
cuda.synchronize(2, CONTEXT, None)
for i in range(12):
    round(20 + i, True)
"""
    events = run(tmp_path, library, "memory(ALLOC, 0x500000, 0x100000)\n" + program)
    assert template_ids(events)[12:-12][-1] == 0
    result, text = coverage_texts(events)
    assert [race.kind.value for race in result.races] == ["write-after-write"]
    assert "all operations analyzed" in text
    assert "More than 128 streams had unfinished work at the same time" in text


def test_idle_streams_give_their_slots_to_busy_streams(library: Path, tmp_path: Path) -> None:
    program = """
streams = [P(0x40000 + i) for i in range(300)]
for stream in streams:
    cuda.make_stream(CONTEXT, stream, 1)
for i in range(3):
    for stream in streams:
        launch(write(0x300000), stream=stream, pointer=0x300000)
        wait(stream)
        recorder.read()
launch(write(0x300000), stream=streams[0], pointer=0x300000)
launch(write(0x300000), stream=streams[1], pointer=0x300000)  # not ordered after the last launch
"""
    events = run(tmp_path, library, program)
    assert gaps(events) == {}
    assert template_ids(events).count(0) < 50
    result, _ = coverage_texts(events)
    assert [race.kind.value for race in result.races] == ["write-after-write"]


def test_streams_of_two_threads_have_right_accesses_and_order(
    library: Path, tmp_path: Path
) -> None:
    program = """
import threading
memory(ALLOC, 0x500000, 0x100000)
for _ in range(3):
    for base in (0x300000, 0x500000):
        launch(write(base), pointer=base)
        wait()
        recorder.read()
def work(base, first_stream):
    accesses = (Touch * 1)(write(base))
    arguments = pointers(base)
    for i in range(1500):
        stream = P(first_stream + i % 7)
        cuda.make_stream(CONTEXT, stream, 1)
        for _ in range(2):
            cuda.set_next_accesses(accesses, 1, 0)
            cuda.launch(CONTEXT, stream, ctypes.byref(plain), arguments, None)
        wait(stream)
        cuda.destroy_stream(CONTEXT, stream)
places = (0x300000, 0x20000), (0x500000, 0x30000)
threads = [threading.Thread(target=work, args=place) for place in places]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
"""
    events = run(tmp_path, library, program)
    assert gaps(events) == {}
    ranges = written_ranges(events)
    for base in (0x300000, 0x500000):
        assert ranges.count({(base, base + 4)}) == 3003
    assert template_ids(events).count(0) < 600
    result, _ = coverage_texts(events)
    assert result.races == ()


def test_two_threads_have_all_accesses_while_patches_are_removed_and_restored(
    library: Path, tmp_path: Path
) -> None:
    program = """
import threading, time
memory(ALLOC, 0x500000, 0x100000)
def work(stream, base):
    for i in range(300):
        pointer = base + (i % 40 == 39) * (0x1000 + i * 0x100)  # at times a launch without a template
        touch = (Touch * 1)(write(pointer))
        with gate:  # the fake has one list of accesses for the next launch of any thread
            held.append(touch)
            cuda.set_next_accesses(touch, 1, 0)
            cuda.launch(CONTEXT, stream, ctypes.byref(plain), pointers(pointer), None)
        if i % 3 == 0:
            cuda.synchronize(1, CONTEXT, stream)
            time.sleep(0.001)
gate = threading.Lock()
places = (STREAM, 0x300000), (OTHER, 0x500000)
threads = [threading.Thread(target=work, args=place) for place in places]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
recorder.read()
"""
    events = run(tmp_path, library, program)
    ranges = written_ranges(events)
    assert len(ranges) == 600
    for (written,) in ranges:
        assert written[1] - written[0] == 4
    expected = {0x300000, 0x500000} | {
        base + 0x1000 + i * 0x100 for base in (0x300000, 0x500000) for i in range(39, 300, 40)
    }
    assert {lo for ((lo, _),) in ranges} == expected
    assert gaps(events) == {}


# Each number is a new signature, as of a fused kernel with old memory of the stack among its arguments.
NEW_SIGNATURES = """
import random
def record(number, count=2):
    first, second = 0x100000 + number % 256, 0x180000 + number // 256
    addresses = random.Random(number).sample(range(0x100200, 0x1f0000, 512), 100)
    accesses = [write(address) for address in addresses]
    for _ in range(count):
        launch_with_number(second, *accesses, pointer=first)
        wait()
        recorder.read()

plain_kernel, plain_arguments = ctypes.byref(plain), pointers(0x300000)
def launch_plain_kernel(count):
    set_accesses(write(0x300000))
    for i in range(count):
        cuda.launch(CONTEXT, STREAM, plain_kernel, plain_arguments, None)
        if i % 1000 < 3:
            wait()
            recorder.read()
    held.clear()
"""


def test_unused_templates_are_forgotten_until_their_next_launch(
    library: Path, tmp_path: Path
) -> None:
    program = f"""{NEW_SIGNATURES}{HEAP_BYTES}
for round in range(10):
    for number in range(150):
        record(round * 150 + number)
    launch_plain_kernel(33_000)
    if round == 4:
        bytes_before = heap_bytes()
assert heap_bytes() - bytes_before < 256 << 10
record(0, count=3)
"""
    run_program(tmp_path, library, BEGIN + MORE + program, patches=PATCHES, templates=True)
    records = sorted_by_call(np.concatenate([batch.records for batch in Spool(tmp_path).batches()]))
    launches = view(records[records["kind"] == EventKind.LAUNCH], EventKind.LAUNCH)
    templates = view(records[records["kind"] == EventKind.TEMPLATE], EventKind.TEMPLATE)
    templates = templates[templates["template_id"] != 0]
    is_new = np.isin(templates["seq"], launches["seq"])
    template_counts = np.cumsum(np.where(is_new, 1, -1))
    assert not np.isin(launches["template_id"], templates["template_id"][~is_new]).any()
    assert template_counts.max() <= 600
    assert template_counts[: len(template_counts) // 2].max() == template_counts.max()
    last_id = templates["template_id"].max()
    assert launches["template_id"][-3:].tolist() == [0, last_id, last_id]
    assert EventKind.GAP not in records["kind"]
