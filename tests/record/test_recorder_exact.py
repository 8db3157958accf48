"""Tests that the recorder writes the accesses of patched kernels; streams can defer their work."""

from __future__ import annotations

from pathlib import Path

import pytest
from record.exact_programs import BEGIN, PATCHES, gaps, recorded_launches, run
from record.recorded import build_library, event_bodies, recorded, recorded_processes

from cudakit.trace.events import (
    Accessed,
    Arenas,
    Event,
    Fill,
    Launch,
    StreamCreate,
    StreamDestroy,
    StreamSync,
)
from cudakit.trace.kinds import AccessMode, Precision

ARENA_FULL = "launch with lost accesses: arena full"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("cuda"))


def position(events: list[Event], kind: type) -> int:
    return next(i for i, event in enumerate(events) if isinstance(event.body, kind))


# --- kernels ----------------------------------------------------------------------------------------


def test_accesses_of_launch_are_exact_after_synchronization(library: Path, tmp_path: Path) -> None:
    program = """
import time
cuda.defer_work(STREAM)
launch(read(0x100000, 4, stride=4, count=100), write(0x100201, 1), write(0x100204, 16))
time.sleep(0.03)  # longer than the interval between polls
wait()
cuda.stop_deferring(STREAM)
launch(read(0x100010))
"""
    events = run(tmp_path, library, program)
    first, second = recorded_launches(events)
    assert first.accesses == [
        (0x100000, 0x100190, AccessMode.READ, 0),
        (0x100201, 0x100202, AccessMode.WRITE, 0),
        (0x100204, 0x100214, AccessMode.WRITE, 0),
    ]
    assert (first.pending, first.precisions, first.ended_nodes) == (
        1,
        {Precision.EXACT},
        [(0, True)],
    )
    assert [(access.lo, access.hi) for access in first.assumed] == [(0x100000, 0x200000)]
    assert second.accesses == [(0x100010, 0x100014, AccessMode.READ, 0)]
    positions = [i for i, event in enumerate(events) if isinstance(event.body, Accessed)]
    assert position(events, StreamSync) < positions[0] < len(events) - 1
    assert gaps(events) == {}


def begins_and_ends(events: list[Event]) -> tuple[list[int], list[int]]:
    """Return the positions of each launch and of its accesses in a trace."""
    ends = {event.seq: i for i, event in enumerate(events) if isinstance(event.body, Accessed)}
    begins = [i for i, event in enumerate(events) if isinstance(event.body, Launch)]
    assert len(ends) == len(begins)
    return begins, [ends[events[i].seq] for i in begins]


def test_arena_is_read_during_next_launches_if_waits_repeat_quickly(
    library: Path, tmp_path: Path
) -> None:
    program = """
import time
for _ in range(2):
    launch(write(0x100000))
    time.sleep(0.03)  # longer than the interval between polls
    wait()
for _ in range(400):
    launch(read(0x100000))
"""
    begins, ends = begins_and_ends(events := run(tmp_path, library, program))
    assert begins[0] < ends[0] < begins[1]
    # On a slow machine, the last read was more than 100 ms ago: the arena is read at the poll after 64
    # launches.
    is_before_poll = events[begins[257]].time_ns - events[begins[0]].time_ns < 100_000_000
    assert begins[257 if is_before_poll else 60] < ends[1] < begins[-1], (
        "the device has enough to do"
    )


def test_large_arena_is_read_at_each_wait(library: Path, tmp_path: Path) -> None:
    program = """
for _ in range(4):
    launch(write(1 << 32, 4, stride=1 << 17, count=9000))  # a page each
    wait()
"""
    begins, ends = begins_and_ends(run(tmp_path, library, program))
    # The first launch is excluded: it shows how many pages the launches need.
    begins, ends = begins[1:], ends[1:]
    assert all(end < begin for end, begin in zip(ends, begins[1:], strict=False))


def test_streamed_and_sparse_pages_are_distinguished(library: Path, tmp_path: Path) -> None:
    """The host copies summaries first, because there are many pages; one page lacks the bits of one word."""
    program = """
stream = read(0x100000, 16, stride=16, count=12 * 4096), read(0x1C0000, 16, stride=16, count=4088)
launch(*stream, write(0x200000, stride=1 << 16, count=300))
wait()
"""
    (launch,) = recorded_launches(run(tmp_path, library, program))
    assert launch.accesses == [
        (0x100000, 0x1CFF80, AccessMode.READ, 0),
        (0x200000, 0x200000 + (299 << 16) + 4, AccessMode.WRITE, 0),
    ]
    assert launch.precisions == {Precision.EXACT}


def test_accesses_without_wait_are_read_at_end(library: Path, tmp_path: Path) -> None:
    events = run(tmp_path, library, "launch(write(0x100000))\nlaunch(read(0x100000))")
    assert [launch.accesses for launch in recorded_launches(events)] == [
        [(0x100000, 0x100004, AccessMode.WRITE, 0)],
        [(0x100000, 0x100004, AccessMode.READ, 0)],
    ]
    assert gaps(events) == {}


def test_unfinished_launch_at_end_is_not_exact(library: Path, tmp_path: Path) -> None:
    program = """
cuda.defer_work(STREAM)
launch(write(0x100000))
launch(write(0x200000), stream=LEGACY)
"""
    events = run(tmp_path, library, program)
    assert [launch.ended_nodes for launch in recorded_launches(events)] == [[(0, False)]] * 2
    assert gaps(events) == {ARENA_FULL: 2}


def test_older_arena_is_read_first_at_end(library: Path, tmp_path: Path) -> None:
    program = """
import time
def launch_and_replace_arena(address):
    launch(write(address))
    time.sleep(0.03)  # longer than the interval between polls
    wait(LEGACY)
wait(STREAM)
launch_and_replace_arena(0x100000)  # in the first arena
wait(STREAM)
time.sleep(0.15)  # longer than the interval between reads
wait(STREAM)
cuda.defer_work(STREAM)
launch_and_replace_arena(0x100004)  # in the second arena, which cannot be read yet
launch(write(0x100008), stream=LEGACY)  # in the first arena again
cuda.stop_deferring(STREAM)
"""
    events = run(tmp_path, library, program)
    ended_calls = [event.seq for event in events if isinstance(event.body, Accessed)]
    assert len(ended_calls) == 3
    assert ended_calls == sorted(ended_calls)


def test_arena_of_context_that_the_program_no_longer_uses_is_read(
    library: Path, tmp_path: Path
) -> None:
    program = """
import time
SECOND, SECOND_STREAM = P(0x7000), P(0x8000)
launch(write(0x100000))
wait()
cuda.make_context(SECOND, 4)
cuda.make_stream(SECOND, SECOND_STREAM, 1)
load_module(P(0x9000), SECOND)
for _ in range(2):
    launch(write(0x100004), stream=SECOND_STREAM, context=SECOND)
    time.sleep(1.1)
    wait(SECOND_STREAM, SECOND)
cuda.fill(SECOND, SECOND_STREAM, U(1), U(1), 1)
"""
    events = run(tmp_path, library, program)
    first_launch = position(events, Launch)
    (end_of_first,) = (
        i
        for i, event in enumerate(events)
        if isinstance(event.body, Accessed) and event.seq == events[first_launch].seq
    )
    assert end_of_first < position(events, Fill)


def test_arena_that_another_thread_still_reads_at_end_is_a_gap(
    library: Path, tmp_path: Path
) -> None:
    program = """
import threading, time
launch(write(0x100000))
time.sleep(0.03)  # longer than the interval between polls
duration_ms = ctypes.c_int.in_dll(cuda, "copy_duration_ms")
duration_ms.value = 7000
reader = threading.Thread(target=wait)
reader.start()
time.sleep(0.5)
duration_ms.value = 0
recorder.finish()
reader.join()
"""
    events = run(tmp_path, library, program)
    assert gaps(events) == {
        "last launches not read: another thread was still reading accesses after 5 s": 1
    }


def test_arena_of_stream_without_wait_is_read_after_its_marker(
    library: Path, tmp_path: Path
) -> None:
    program = """
import time
cuda.make_stream(CONTEXT, OTHER, 1)
cuda.defer_work(STREAM); cuda.defer_work(OTHER)
launch(write(0x100000), stream=STREAM)
launch(write(0x100004), stream=OTHER)
time.sleep(0.03)
wait(STREAM)  # says nothing about the other stream, whose marker is behind its kernel
cuda.fill(CONTEXT, STREAM, U(1), U(1), 1)
cuda.stop_deferring(OTHER)
time.sleep(0.03)
wait(STREAM)
cuda.fill(CONTEXT, STREAM, U(2), U(1), 1)
"""
    events = run(tmp_path, library, program)
    names = [type(event.body).__name__ for event in events]
    first, second = (i for i, name in enumerate(names) if name == "Fill")
    assert "Accessed" not in names[:first]
    assert names[first:second].count("Accessed") == 2
    assert [launch.accesses[0][0] for launch in recorded_launches(events)] == [0x100000, 0x100004]


def test_wait_of_one_thread_does_not_complete_launches_of_others(
    library: Path, tmp_path: Path
) -> None:
    program = """
import threading, time
def elsewhere(*arguments):
    thread = threading.Thread(target=launch, args=arguments)
    thread.start(); thread.join()
cuda.defer_work(STREAM)
launch(write(0x100000))
cuda.synchronize_in_two_steps(CONTEXT, STREAM, 0)  # the wait has ended, but its callback has not come yet
elsewhere(write(0x100004))
time.sleep(0.03)
cuda.synchronize_in_two_steps(CONTEXT, STREAM, 1)
cuda.stop_deferring(STREAM)
"""
    events = run(tmp_path, library, program)
    assert [launch.accesses[0][0] for launch in recorded_launches(events)] == [0x100000, 0x100004]
    assert [launch.ended_nodes for launch in recorded_launches(events)] == [[(0, True)]] * 2


def test_launches_of_many_threads_are_distinguished(library: Path, tmp_path: Path) -> None:
    program = """
import threading
def work(n):
    mine = P(0x10000 + n)
    cuda.make_stream(CONTEXT, mine, 1)
    for i in range(200):
        launch(write(0x100000 + (n * 200 + i) * 64, 32), stream=mine, pointer=0x100000 + n)
        if i % 50 == 49:
            wait(mine)
threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
for each in threads: each.start()
for each in threads: each.join()
"""
    events = run(tmp_path, library, program)
    launches = recorded_launches(events)
    assert gaps(events) == {}
    assert all(launch.ended_nodes == [(0, True)] for launch in launches)
    begins = sorted(lo for launch in launches for lo, _, _, _ in launch.accesses)
    assert begins == [0x100000 + i * 64 for i in range(800)]
    for launch in launches:  # assumed and exact accesses are of the same thread
        (lo, hi, _, _), thread = launch.accesses[0], launch.assumed[0].lo - 0x100000
        assert (lo - 0x100000) // 64 // 200 == thread
        assert hi - lo == 32


def test_many_launches_without_wait_are_exact(library: Path, tmp_path: Path) -> None:
    program = """
for i in range(3000):
    launch(write(0x100000 + i * 4))
"""
    events = run(tmp_path, library, program)
    assert [launch.accesses for launch in recorded_launches(events)] == [
        [(0x100000 + i * 4, 0x100004 + i * 4, AccessMode.WRITE, 0)] for i in range(3000)
    ]


def test_launch_without_space_keeps_recorded_accesses(library: Path, tmp_path: Path) -> None:
    program = """
launch(write(0x100000))
launch(read(1 << 32, 4, stride=1 << 17, count=35000))  # a page each
"""
    first, second = recorded_launches(events := run(tmp_path, library, program))
    assert first.ended_nodes == [(0, True)]
    lo, hi, mode, _ = second.accesses[0]
    assert (lo, mode, second.ended_nodes) == (1 << 32, AccessMode.READ, [(0, False)])
    assert hi < (1 << 32) + (35000 << 17), "the rest was lost"
    assert len(second.assumed) == 1
    assert gaps(events) == {ARENA_FULL: 1}


def test_space_is_reserved_for_launches_like_earlier_ones(library: Path, tmp_path: Path) -> None:
    """Without a wait, the launches of a round need twice the pages of both arenas."""
    program = """
def round(launches):
    for _ in range(launches):
        launch(read(1 << 32, 4, stride=1 << 17, count=9000))
round(3)
wait()
round(16)
"""
    events = run(tmp_path, library, program)
    assert [launch.ended_nodes for launch in recorded_launches(events)] == [[(0, True)]] * 19
    assert gaps(events) == {}


@pytest.mark.parametrize(
    ("allocated", "free", "min_bytes", "max_bytes"),
    [
        (1 << 20, 64 << 30, 256 << 20, 400 << 20),
        (8 << 30, 64 << 30, 512 << 20, (8 << 30) // 10),
        (60 << 30, 20 << 30, 512 << 20, 1 << 30),  # the limit is 1 GiB: 10 % would be 6 GiB
        (60 << 30, 512 << 20, 32 << 20, 256 << 20),  # half of the free memory
    ],
)
def test_device_memory_of_arenas_is_bounded(
    library: Path, tmp_path: Path, allocated: int, free: int, min_bytes: int, max_bytes: int
) -> None:
    program = f"""
ctypes.c_size_t.in_dll(cuda, "free_bytes").value = {free}
memory(ALLOC, 1 << 40, {allocated})
for _ in range(3):
    launch(write(0x100000))
    wait()
    for _ in range(300):
        launch(write(0x100000))
"""
    sizes = [arenas.size_bytes for arenas in event_bodies(run(tmp_path, library, program), Arenas)]
    assert min_bytes <= max(sizes) <= max_bytes


def test_accesses_without_device_memory_are_assumed(library: Path, tmp_path: Path) -> None:
    program = """
ctypes.c_int.in_dll(cuda, "refuse_memory").value = 1
launch(write(0x100000))
launch(write(0x100000))
"""
    events = run(tmp_path, library, program)
    assert [(launch.pending, len(launch.assumed)) for launch in recorded_launches(events)] == [
        (0, 1)
    ] * 2
    assert gaps(events) == {
        "no device memory for arenas: accesses inferred from arguments": 1,
        "launch inferred from arguments: arena full": 2,
    }


def test_failed_launch_has_no_accesses_and_does_not_block_arena(
    library: Path, tmp_path: Path
) -> None:
    program = """
import time
launch(write(0x100004))
launch(write(0x100000), result=700)
time.sleep(0.03)
wait()
cuda.fill(CONTEXT, STREAM, U(1), U(1), 1)
"""
    events = run(tmp_path, library, program)
    unaffected, failed = recorded_launches(events)
    assert (failed.accesses, failed.ended_nodes) == ([], [(0, True)])
    assert unaffected.accesses == [(0x100004, 0x100008, AccessMode.WRITE, 0)]
    assert type(events[-1].body).__name__ != "Accessed", "read at the wait, not at the end"


# --- modules and contexts -----------------------------------------------------------------------------


@pytest.mark.parametrize("change", ["", "ctypes.c_int.in_dll(cuda, 'refuse_memory').value = 1"])
def test_every_launch_in_patched_context_has_user_data(
    library: Path, tmp_path: Path, change: str
) -> None:
    program = f"""
{change}
launch(write(0x100000))
launch(write(0x100000), kernel=textures)
ctypes.c_int.in_dll(cuda, "refuse_patches").value = 1
load_module(P(0x5001))
launch(write(0x100000))
assert not ctypes.c_int.in_dll(cuda, "launches_without_user_data").value
"""
    run(tmp_path, library, program)


def test_unpatchable_module_is_assumed(library: Path, tmp_path: Path) -> None:
    program = """
ctypes.c_int.in_dll(cuda, "refuse_patches").value = 1
load_module(P(0x5001))
launch(write(0x100000))
ctypes.c_int.in_dll(cuda, "refuse_patches").value = 0
cuda.load_module(CONTEXT, P(0x5002), b"no machine code", ctypes.c_size_t(15))
launch(write(0x100000))
load_module(P(0x5001))  # the handle is reused
launch(write(0x100000))
"""
    events = run(tmp_path, library, program)
    assert [launch.pending for launch in recorded_launches(events)] == [0, 0, 1]
    reason = "launch inferred from arguments: machine code that could not be parsed or patched"
    assert gaps(events) == {reason: 2}


def test_kernel_with_unreported_accesses_is_not_exact(library: Path, tmp_path: Path) -> None:
    program = """
launch(write(0x100000), kernel=textures)
cuda.unload_module()
other = CUBIN.replace(b"textures", b"somebody")
cuda.load_module(CONTEXT, MODULE, other, ctypes.c_size_t(len(other)))
launch(write(0x100000), kernel=textures)  # one of the same name, in a module with the same handle
"""
    events = run(tmp_path, library, program)
    assert [launch.ended_nodes for launch in recorded_launches(events)] == [
        [(0, False)],
        [(0, True)],
    ]
    assert [len(launch.accesses) for launch in recorded_launches(events)] == [1, 1], (
        "what was recorded stays"
    )
    assert gaps(events) == {"launch inferred from arguments: texture reads": 1}


def test_multimem_counts_after_first_multicast_object(library: Path, tmp_path: Path) -> None:
    program = """
launch(write(0x100000), kernel=multimem)
cuda.call_driver(706, None)  # cuMulticastCreate
launch(write(0x100000), kernel=multimem)
"""
    events = run(tmp_path, library, program)
    assert [launch.ended_nodes for launch in recorded_launches(events)] == [
        [(0, True)],
        [(0, False)],
    ]
    assert gaps(events) == {"launch inferred from arguments: multimem instructions": 1}


def test_context_without_patch_is_assumed(library: Path, tmp_path: Path) -> None:
    begin = 'ctypes.c_int.in_dll(cuda, "capability").value = 80\n'
    program = begin + BEGIN + "launch(write(0x100000))"
    events = recorded(tmp_path, library, program, patches=PATCHES)
    assert [(launch.pending, len(launch.assumed)) for launch in recorded_launches(events)] == [
        (0, 1)
    ]
    assert list(event_bodies(events, Arenas)) == []
    assert gaps(events) == {"context without device patch: accesses inferred from arguments": 1}


def test_stream_and_context_may_be_destroyed_with_work(library: Path, tmp_path: Path) -> None:
    program = """
import time
cuda.defer_work(STREAM)
launch(write(0x100000))
cuda.destroy_stream(CONTEXT, STREAM)
cuda.make_stream(CONTEXT, STREAM, 1)  # the handle is reused
launch(write(0x100004))
time.sleep(0.03)
wait()  # waits for the second stream
cuda.fill(CONTEXT, STREAM, U(1), U(1), 1)
cuda.stop_deferring(None)
cuda.destroy_context(CONTEXT, 3)
cuda.make_context(CONTEXT, 3)
cuda.make_stream(CONTEXT, STREAM, 1)
load_module()
launch(write(0x100008))
"""
    events = run(tmp_path, library, program)
    assert [launch.accesses for launch in recorded_launches(events)] == [
        [(address, address + 4, AccessMode.WRITE, 0)] for address in (0x100000, 0x100004, 0x100008)
    ]
    assert position(events, Fill) < position(events, Accessed)
    assert all(launch.ended_nodes == [(0, True)] for launch in recorded_launches(events))
    sizes = [body.size_bytes for body in event_bodies(events, Arenas)]
    assert sizes[0] > 0
    assert sizes[-1] == 0, "the end gives everything back"
    assert sizes.count(0) == 2
    assert gaps(events) == {}


def test_pools_of_destroyed_contexts_are_reused(library: Path, tmp_path: Path) -> None:
    program = """
for i in range(40):
    context, stream = P(0x100000 + i * 16), P(0x200000 + i * 16)
    cuda.make_context(context, 0)
    cuda.make_stream(context, stream, 1)
    load_module(P(0x5000), context)
    launch(write(0x100000 + i * 4), stream=stream, context=context)
    cuda.destroy_context(context, 0)
"""
    events = run(tmp_path, library, program)
    assert [launch.accesses[0][0] for launch in recorded_launches(events)] == [
        0x100000 + i * 4 for i in range(40)
    ]


def test_stream_of_recorder_is_not_recorded(library: Path, tmp_path: Path) -> None:
    program = """
launch(write(0x100000))
cuda.destroy_recorder_stream(CONTEXT)
"""
    events = run(tmp_path, library, program)
    assert len(list(event_bodies(events, StreamCreate))) == 3
    assert list(event_bodies(events, StreamDestroy)) == []
    assert recorded_launches(events)[0].ended_nodes == [(0, True)]


def test_forked_child_does_not_record_launches_of_parent(library: Path, tmp_path: Path) -> None:
    program = """
cuda.defer_work(STREAM)
launch(write(0x100000))
if not (child := os.fork()):
    sys.exit(0)
os.waitpid(child, 0)
if not (child := os.fork()):
    cuda.make_context(CONTEXT, 0)
    cuda.make_stream(CONTEXT, OTHER, 1)
    load_module()
    launch(write(0x300000), stream=OTHER)
    sys.exit(0)
os.waitpid(child, 0)
cuda.stop_deferring(STREAM)
"""
    processes = recorded_processes(tmp_path, library, BEGIN + program, patches=PATCHES)
    first_addresses = sorted(
        [launch.accesses[0][0] for launch in recorded_launches(events)] for events in processes
    )
    assert first_addresses == [[0x100000], [0x300000]]
