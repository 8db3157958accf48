"""Tests the records of a profile. A fake CUPTI makes callbacks and delivers activity records."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import pytest
from record.recorded import CAPTURE, HERE

from cudakit.trace.events import (
    ApiCall,
    Collective,
    Communicator,
    CopyRun,
    DeviceInfo,
    Event,
    FillRun,
    Gap,
    GraphNodeSite,
    KernelRun,
    Mark,
    ProfileWindow,
)
from cudakit.trace.kinds import CollectiveFunction, Direction, MemoryKind
from cudakit.trace.spool import Spool
from cudakit.trace.trace_file import unpack

# Prologue of every program: ``open_profile`` begins a profile, and ``kernel`` and its like build records.
BEGIN = """
import ctypes, importlib, os, struct, sys, time
spool, library, walker = sys.argv[1], sys.argv[2], int(sys.argv[3])
recorder = importlib.import_module("cudakit.record._recorder")
if walker:
    walker = importlib.import_module("cudakit.record._frames").walker
cupti = ctypes.CDLL(library)
cupti.current_time.restype = ctypes.c_uint64
P, U = ctypes.c_void_p, ctypes.c_uint64
DRIVER, RUNTIME = 1, 2
MEMCPY, MEMSET, KERNEL, PEER = 1, 2, 10, 22
SIZES = {MEMCPY: 88, MEMSET: 80, KERNEL: 200, PEER: 88}
names = []  # keeps the names of kernels alive

def set_sizes():
    for kind, size in SIZES.items():
        cupti.set_record_bytes(kind, ctypes.c_size_t(size))

def name(text):
    names.append(ctypes.create_string_buffer(text.encode()))
    return ctypes.addressof(names[-1])

def kernel(text, correlation, start=100, end=200, *, node=0, device=1, size=200):
    record = bytearray(size)
    struct.pack_into("<iBBH", record, 0, KERNEL, 0, 0, 40)
    struct.pack_into("<QQ", record, 16, start, end)
    struct.pack_into("<III6iii", record, 40, device, 5, 7, 2, 3, 4, 32, 2, 1, 1000, 24)
    struct.pack_into("<I", record, 92, correlation)
    struct.pack_into("<Q", record, 104, text if isinstance(text, int) else name(text))
    struct.pack_into("<Q", record, 144, node)
    return bytes(record)

def copy(copy_kind, source, destination, count, correlation, *, size=88):
    record = bytearray(size)
    struct.pack_into("<iBBBBQQQIIII", record, 0, MEMCPY, copy_kind, source, destination, 1, count, 300,
                     400, 1, 5, 7, correlation)
    struct.pack_into("<Q", record, 64, 0)
    return bytes(record)

def peer_copy(source, destination, device, *, size=88):
    record = bytearray(size)
    struct.pack_into("<iBBBBQQQIIIIIIII", record, 0, PEER, 10, 3, 3, 1, 64, 300, 400, device, 5, 7, source, 1,
                     destination, 2, 9)
    return bytes(record)

def fill(count, correlation, *, size=80):
    record = bytearray(size)
    struct.pack_into("<iIQQQIIII", record, 0, MEMSET, 0, count, 500, 600, 1, 5, 7, correlation)
    return bytes(record)

def deliver(*records):
    content = b"".join(records)
    return cupti.deliver(content, ctypes.c_size_t(len(content)))

def call(domain, cbid, correlation, inner=None, parameters=None):
    cupti.call(domain, cbid, 0, correlation, 5, parameters)
    if inner:
        inner()
    cupti.call(domain, cbid, 1, correlation, 5, parameters)

set_sizes()
recorder.start(spool, "", walker, (), True)

def open_profile(**options):
    recorder.profile(library, now=True, **options)
"""

Profiled: TypeAlias = Callable[..., list[Event]]


@pytest.fixture(scope="session")
def fake_cupti(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if not compiler:
        pytest.skip("there is no C compiler")
    if not find_spec("cudakit.record._recorder"):
        pytest.skip("the recorder was not built")
    library = tmp_path_factory.mktemp("cupti") / "libcupti.so.13"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-std=c11", "-O1", "-Wall", "-Wextra", "-Werror",
         *shlex.split(os.environ.get("CFLAGS", "")), f"-I{CAPTURE / 'native/recorder'}",
         str(HERE / "fake_cupti.c"), "-lpthread", "-o", str(library)],
        check=True,
    )  # fmt: skip
    return library


@pytest.fixture
def profiled(fake_cupti: Path, tmp_path: Path) -> Profiled:
    """Return a function that runs a program, and returns the events of its process in order."""

    def run(program: str, *, with_stacks: bool = False) -> list[Event]:
        (tmp_path / "program.py").write_text(BEGIN + program, encoding="utf-8")
        spool = tmp_path / "spool"
        spool.mkdir()
        result = subprocess.run(
            [
                sys.executable,
                "-P",
                "program.py",
                str(spool),
                str(fake_cupti),
                str(int(with_stacks)),
            ],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        assert not result.stderr
        return [
            event
            for batch in Spool(spool).batches()
            for event in unpack(batch.records, batch.strings)
        ]

    return run


def bodies(events: list[Event], kind: type) -> Iterator[object]:
    return (event.body for event in events if isinstance(event.body, kind))


# Sizes of the records of kernels, copies, peer copies and memsets, by release of CUPTI: those of the
# newest CUpti_ActivityKernelN, MemcpyN, MemcpyPtoPN and MemsetN in the header cupti_activity.h.
RECORD_SIZES = {
    "12.0": (200, 88, 88, 80),
    "12.1 to 12.9": (208, 88, 96, 88),
    "13.0": (216, 96, 96, 88),
    "13.5": (248, 112, 96, 104),
}


@pytest.mark.parametrize("sizes", RECORD_SIZES.values(), ids=RECORD_SIZES)
def test_records_of_all_releases_give_the_same_events(
    profiled: Profiled, sizes: tuple[int, int, int, int]
) -> None:
    events = profiled(f"""
kernel_size, copy_size, peer_size, fill_size = {sizes}
SIZES.update({{KERNEL: kernel_size, MEMCPY: copy_size, PEER: peer_size, MEMSET: fill_size}})
set_sizes()
open_profile()
deliver(
    kernel("gemm", 11, node=77, size=kernel_size), copy(1, 1, 3, 4096, 12, size=copy_size),
    copy(2, 3, 2, 8, 13, size=copy_size), peer_copy(1, 2, 1, size=peer_size),
    fill(256, 14, size=fill_size),
)
recorder.finish()
""")
    kernels = list(bodies(events, KernelRun))
    assert kernels == [KernelRun(7, "gemm", 11, 100, 200, 77, (2, 3, 4), (32, 2, 1), 40, 1024)]
    assert list(bodies(events, CopyRun)) == [
        CopyRun(
            7,
            300,
            400,
            4096,
            12,
            -1,
            Direction.HOST_TO_DEVICE,
            MemoryKind.PAGEABLE,
            MemoryKind.DEVICE,
        ),
        CopyRun(
            7, 300, 400, 8, 13, -1, Direction.DEVICE_TO_HOST, MemoryKind.DEVICE, MemoryKind.PINNED
        ),
        CopyRun(
            7, 300, 400, 64, 9, 2, Direction.DEVICE_TO_DEVICE, MemoryKind.DEVICE, MemoryKind.DEVICE
        ),
    ]
    assert list(bodies(events, FillRun)) == [FillRun(7, 500, 600, 256, 14)]
    runs = [event for event in events if isinstance(event.body, KernelRun | FillRun)]
    assert {(event.device, event.context) for event in runs} == {(1, 5)}
    assert [event.device for event in events if isinstance(event.body, DeviceInfo)] == [1]


def test_times_of_cupti_are_on_the_clock_of_the_trace(profiled: Profiled) -> None:
    profiled("""
open_profile()
before = time.monotonic_ns()
now = cupti.current_time()
assert before <= now <= time.monotonic_ns()
""")


def test_call_of_the_runtime_is_recorded_as_its_driver_call(profiled: Profiled) -> None:
    events = profiled(
        """
open_profile()
def launch():
    call(RUNTIME, 1, 11, lambda: call(DRIVER, 1, 11))
launch()
call(DRIVER, 1, 12, lambda: call(DRIVER, 7, 13))  # only the outer of two driver calls is recorded
call(DRIVER, 7, 14)
call(DRIVER, 3, 15)  # cuGetProcAddress is not recorded
call(DRIVER, 6, 16)  # neither is cuLaunchHostFunc
""",
        with_stacks=True,
    )
    calls = [event for event in events if isinstance(event.body, ApiCall)]
    assert [(event.body.function, event.body.correlation) for event in calls] == [
        ("cuLaunchKernel", 11),
        ("cuLaunchKernel", 12),
        ("cuMemcpyAsync", 14),
    ]
    assert all(event.body.start_ns <= event.body.end_ns for event in calls)
    assert calls[0].site not in (0, calls[1].site)


def test_allocation_has_its_size(profiled: Profiled) -> None:
    events = profiled("""
open_profile()
call(DRIVER, 2, 1, parameters=(U * 2)(0x1000, 4096))
""")
    (call,) = bodies(events, ApiCall)
    assert (call.function, call.size_bytes) == ("cuMemAlloc", 4096)


def test_api_call_has_the_device_of_its_context(profiled: Profiled) -> None:
    events = profiled("""
open_profile()
cupti.resource(1, P(5), None, None, 0)
call(DRIVER, 1, 11)
""")
    assert [event.device for event in events if isinstance(event.body, ApiCall)] == [5]


def test_graph_nodes_and_their_copies_have_the_call_site_of_the_capture(profiled: Profiled) -> None:
    events = profiled(
        """
open_profile()
def capture():
    cupti.resource(13, None, P(101), None, 0)
    cupti.resource(13, None, P(102), None, 3)  # a host node
capture()
cupti.resource(20, None, P(201), P(101), 0)
cupti.resource(20, None, P(202), P(999), 0)  # a copy of a node from before the profile
cupti.resource(14, None, P(101), None, 0)
cupti.resource(20, None, P(203), P(101), 0)  # the node was destroyed
""",
        with_stacks=True,
    )
    sites = [
        (event.body.graph_node, event.site)
        for event in events
        if isinstance(event.body, GraphNodeSite)
    ]
    assert [node for node, _ in sites] == [101, 201]
    assert len({site for _, site in sites}) == 1
    assert sites[0][1]


def test_dropped_records_are_counted(profiled: Profiled) -> None:
    events = profiled("""
open_profile()
cupti.set_dropped(ctypes.c_size_t(7))
deliver(kernel("k", 1))
""")
    gaps = list(bodies(events, Gap))
    assert [gap.count for gap in gaps] == [7]
    assert "dropped" in gaps[0].reason


def test_buffers_are_zero_when_cupti_gets_them_again(profiled: Profiled) -> None:
    profiled("""
open_profile()
assert all(deliver(kernel("k", i), kernel("k", i)) for i in range(100))
""")


def test_memory_of_buffers_is_bounded(profiled: Profiled) -> None:
    profiled("""
open_profile()
assert cupti.exhaust_buffers() == 512
assert not deliver(kernel("k", 1))
""")


def test_record_that_exceeds_its_buffer_ends_the_buffer(profiled: Profiled) -> None:
    events = profiled("""
open_profile()
deliver(kernel("complete", 1), kernel("cut", 2)[:120])
deliver(kernel("next buffer", 3), kernel("cut", 4)[:2])
deliver(kernel("no times", 5, 0, 0), kernel("ends before its start", 6, 9, 5), kernel("last", 7))
""")
    assert [run.name for run in bodies(events, KernelRun)] == ["complete", "next buffer", "last"]
    assert [(gap.reason.partition(",")[0], gap.count) for gap in bodies(events, Gap)] == [
        ("buffer of CUPTI with a damaged record: its later activities are not recorded", 1),
        ("buffer of CUPTI with a damaged record: its later activities are not recorded", 1),
        ("GPU activities without times", 2),
    ]


def test_buffers_that_complete_on_several_threads_are_all_recorded(profiled: Profiled) -> None:
    events = profiled("""
open_profile()
content = b"".join(kernel(f"kernel {i}", i) for i in range(1, 1001))
cupti.deliver_on_threads(content, ctypes.c_size_t(len(content)), 10)
""")
    runs = list(bodies(events, KernelRun))
    assert len(runs) == 40_000
    assert all(run.name == f"kernel {run.correlation}" for run in runs)


def test_nothing_is_left_behind_after_the_duration(profiled: Profiled) -> None:
    events = profiled("""
open_profile(duration=0.2)
call(DRIVER, 1, 1)
assert cupti.records_kernels()
deadline = time.monotonic() + 20
while cupti.records_kernels() and time.monotonic() < deadline:
    time.sleep(0.01)
time.sleep(0.05)
call(DRIVER, 1, 2)
assert not cupti.is_active()
""")
    assert [each.correlation for each in bodies(events, ApiCall)] == [1]
    assert [each.is_open for each in bodies(events, ProfileWindow)] == [True, False]


@pytest.mark.parametrize("ends_with_the_program", [True, False])
def test_unfinished_work_is_lost_only_if_the_program_has_ended(
    profiled: Profiled, ends_with_the_program: bool
) -> None:
    events = profiled(f"""
open_profile(duration={0 if ends_with_the_program else 0.1})
unfinished = kernel("unfinished", 1, 100, 0)
cupti.set_unfinished(unfinished, ctypes.c_size_t(len(unfinished)))
if not {ends_with_the_program}:
    deadline = time.monotonic() + 20
    while cupti.is_active() and time.monotonic() < deadline:
        time.sleep(0.01)
recorder.finish()
assert not cupti.is_active()
""")
    gaps = [gap.count for gap in bodies(events, Gap)]
    assert gaps == ([1] if ends_with_the_program else [])
    assert not list(bodies(events, KernelRun))


def test_delay_keeps_the_window_closed(profiled: Profiled) -> None:
    events = profiled("""
open_profile(delay=0.3)
call(DRIVER, 1, 1)
assert not cupti.records_kernels()
deadline = time.monotonic() + 20
while not cupti.records_kernels() and time.monotonic() < deadline:
    time.sleep(0.01)
call(DRIVER, 1, 2)
recorder.finish()
assert not cupti.is_active()
""")
    assert [each.correlation for each in bodies(events, ApiCall)] == [2]
    assert [each.is_open for each in bodies(events, ProfileWindow)] == [True, False]


def test_calls_of_the_program_open_and_close_the_window(profiled: Profiled) -> None:
    events = profiled("""
open_profile(paused=True)
call(DRIVER, 1, 1)
call(RUNTIME, 2, 2, lambda: call(DRIVER, 4, 2))  # cudaProfilerStart calls cuProfilerStart
call(DRIVER, 1, 3)
call(DRIVER, 5, 4)
call(DRIVER, 1, 5)
assert not cupti.records_kernels()
""")
    assert [each.correlation for each in bodies(events, ApiCall)] == [3]
    assert [each.is_open for each in bodies(events, ProfileWindow)] == [True, False]


@pytest.mark.parametrize(
    ("variable", "value", "rank"),
    [
        ("RANK", "3", 3),
        ("OMPI_COMM_WORLD_RANK", "0", 0),
        ("SLURM_PROCID", "12", 12),
        ("RANK", "-1", -1),
        ("RANK", "3 of 4", -1),
        ("RANK", "99999999999", -1),
        ("OTHER", "1", -1),
    ],
)
def test_window_has_the_rank_of_the_process(
    profiled: Profiled, variable: str, value: str, rank: int
) -> None:
    events = profiled(f"os.environ[{variable!r}] = {value!r}\nopen_profile()\nrecorder.finish()\n")
    assert [each.rank for each in bodies(events, ProfileWindow)] == [rank, rank]


def test_call_that_was_entered_before_the_window_has_no_record(profiled: Profiled) -> None:
    events = profiled("""
open_profile()
cupti.call(DRIVER, 1, 0, 1, 5, None)  # entered, but the window closes before the exit
call(DRIVER, 5, 2)
call(DRIVER, 4, 3)
cupti.call(DRIVER, 1, 1, 1, 5, None)
call(DRIVER, 1, 4)
""")
    assert [each.correlation for each in bodies(events, ApiCall)] == [4]


def test_child_of_a_fork_records_nothing_of_the_parent(profiled: Profiled) -> None:
    events = profiled("""
open_profile()
deliver(kernel("parent", 1))
child = os.fork()
if not child:
    call(DRIVER, 1, 2)
    recorder.finish()
    os._exit(0)
os.waitpid(child, 0)
deliver(kernel("parent", 3))
recorder.finish()
""")
    assert [run.correlation for run in bodies(events, KernelRun)] == [1, 3]


def test_other_subscriber_is_named(profiled: Profiled) -> None:
    profiled("""
cupti.set_subscribe_result(39)
try:
    open_profile()
except RuntimeError as error:
    assert "another profiler" in str(error) and "Other Profiler" in str(error), error
else:
    raise AssertionError
""")


def test_missing_privileges_are_a_gap(profiled: Profiled) -> None:
    events = profiled("""
cupti.set_enable_result(35)
open_profile()
assert not cupti.records_kernels()
""")
    (gap,) = bodies(events, Gap)
    assert "administrator" in gap.reason
    assert not list(bodies(events, ProfileWindow))


def test_driver_begins_the_profile_at_the_first_use_of_cuda(profiled: Profiled) -> None:
    events = profiled("""
recorder.profile(library)
assert not cupti.is_active()
libc = ctypes.CDLL(None)
libc.getenv.restype = ctypes.c_char_p
injected = ctypes.CDLL(libc.getenv(b"CUDA_INJECTION64_PATH").decode())
assert injected.InitializeInjection() == 1
deliver(kernel("k", 1))
recorder.finish()
assert not cupti.is_active()
""")
    assert [run.correlation for run in bodies(events, KernelRun)] == [1]


def test_failure_at_the_first_use_of_cuda_is_a_message(profiled: Profiled) -> None:
    profiled("""
cupti.set_subscribe_result(39)
recorder.profile(library)
ctypes.CDLL(recorder.__file__).InitializeInjection()
(notice,) = [each for each in os.listdir(spool) if each.endswith(".unrecorded")]
assert "another profiler" in open(os.path.join(spool, notice)).read()
""")


def test_marks_are_recorded_beside_the_profile(profiled: Profiled) -> None:
    events = profiled("""
open_profile()
recorder.mark("optimizer step")
""")
    assert list(bodies(events, Mark)) == [Mark("optimizer step", "cudakit")]


NCCL = f"""
sys.path.insert(0, {str(HERE)!r})
import fake_nccl
open_profile(paused=PAUSED)
launches = []
def launch(stream):
    launches.append(len(launches) + 11)
    call(DRIVER, 1, launches[-1])
comm = fake_nccl.Communicator(fake_nccl.Plugin(5), launch, rank=1, ranks=4, hash=77, name=b"dp")
"""


def test_collective_has_the_number_of_the_call_that_launched_it(profiled: Profiled) -> None:
    events = profiled(
        "PAUSED = False\n"
        + NCCL
        + "call(DRIVER, 1, 5)\ncomm.all_reduce(0x1000, 0x2000, 512, None)\ncall(DRIVER, 1, 6)\n"
    )
    (communicator,) = bodies(events, Communicator)
    assert (communicator.communicator, communicator.rank_count) == (1, 4)
    calls = {
        event.body.correlation: event.seq for event in events if isinstance(event.body, ApiCall)
    }
    assert set(calls) == {5, 11, 6}
    ((seq, collective),) = (
        (event.seq, event.body) for event in events if isinstance(event.body, Collective)
    )
    assert seq == calls[11]
    assert (collective.function, collective.element_count) == (CollectiveFunction.ALL_REDUCE, 512)
    assert not list(bodies(events, Gap))


def test_collectives_outside_of_the_profiled_time_are_not_recorded(profiled: Profiled) -> None:
    events = profiled(
        "PAUSED = True\n"
        + NCCL
        + "comm.all_reduce(0x1000, 0x2000, 512, None)\n"
        + "call(DRIVER, 4, 3)  # cuProfilerStart\n"
        + "comm.all_reduce(0x1000, 0x2000, 64, None)\n"
        + "call(DRIVER, 5, 4)  # cuProfilerStop\n"
        + "comm.all_reduce(0x1000, 0x2000, 128, None)\n"
    )
    assert [each.element_count for each in bodies(events, Collective)] == [64]
    assert not list(bodies(events, Gap))
