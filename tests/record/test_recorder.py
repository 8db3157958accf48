"""Tests the trace that the recorder writes. A fake CUDA makes the callbacks."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from record.recorded import build_library, event_bodies, recorded, recorded_processes

from cudakit.trace.events import (
    Access,
    Alloc,
    Copy,
    EventQueryOk,
    EventRecord,
    EventSync,
    Fill,
    Free,
    Gap,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    HostCall,
    Launch,
    StreamCreate,
    StreamDestroy,
    StreamSync,
    StreamWait,
)
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    Direction,
    EventKind,
    HostCallPhase,
    HostMemory,
    NodeType,
    Precision,
    StreamFlag,
)
from cudakit.trace.spool import Spool
from cudakit.trace.trace_file import layout

READ_WRITE = AccessMode.READ | AccessMode.WRITE


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("cuda"))


@pytest.mark.usefixtures("library")
def test_record_layout_equals_trace_layout() -> None:
    recorder = importlib.import_module("cudakit.record._recorder")
    kinds = {
        "memory": EventKind.ALLOC, "launch": EventKind.LAUNCH, "access": EventKind.ACCESS,
        "copy": EventKind.COPY, "fill": EventKind.FILL, "stream_create": EventKind.STREAM_CREATE,
        "event": EventKind.EVENT_RECORD,
        "node": EventKind.GRAPH_NODE, "edge": EventKind.GRAPH_EDGE, "graph_launch": EventKind.GRAPH_LAUNCH,
        "memop": EventKind.MEMOP, "host_call": EventKind.HOST_CALL, "gap": EventKind.GAP,
        "accessed": EventKind.ACCESSED, "access_template": EventKind.TEMPLATE,
        "template_pointers": EventKind.TEMPLATE_POINTERS, "arenas": EventKind.ARENAS,
        "launch_delay": EventKind.LAUNCH_DELAYED, "graph_destroy": EventKind.GRAPH_DESTROY,
        "range_push": EventKind.RANGE_PUSH, "range_pop": EventKind.RANGE_POP, "mark": EventKind.MARK,
        "out_of_memory": EventKind.OUT_OF_MEMORY,
        "api_call": EventKind.API_CALL, "kernel_run": EventKind.KERNEL_RUN, "copy_run": EventKind.COPY_RUN,
        "fill_run": EventKind.FILL_RUN,
        "graph_node_site": EventKind.GRAPH_NODE_SITE, "profile_window": EventKind.PROFILE_WINDOW,
        "device_info": EventKind.DEVICE_INFO,
        "communicator": EventKind.COMMUNICATOR, "collective": EventKind.COLLECTIVE,
    }  # fmt: skip
    for name, offset in recorder.offsets()["record"].items():
        part, _, field = name.rpartition(".")
        fields = layout(kinds[part] if part else EventKind.ALLOC).fields
        assert fields is not None
        assert fields[field][1] == offset, name


def test_streams_have_ids_and_blocking_flags(library: Path, tmp_path: Path) -> None:
    program = """
cuda.make_stream(CONTEXT, OTHER, 0)
cuda.create_per_thread_stream(CONTEXT, P(0x4000))
cuda.destroy_stream(CONTEXT, OTHER)
cuda.make_stream(CONTEXT, OTHER, 1)
"""
    events = recorded(tmp_path, library, program)
    created = [(body.stream, body.flag) for body in event_bodies(events, StreamCreate)]
    assert created == [
        (1, StreamFlag.NON_BLOCKING),  # a stream that the driver creates with the context
        (2, StreamFlag.LEGACY),
        (3, StreamFlag.NON_BLOCKING),
        (4, StreamFlag.BLOCKING),
        (5, StreamFlag.PER_THREAD),
        (6, StreamFlag.NON_BLOCKING),  # the handle was reused, but not the id
    ]
    assert [body.stream for body in event_bodies(events, StreamDestroy)] == [4]
    assert {event.device for event in events if isinstance(event.body, StreamDestroy)} == {3}


def test_pointer_arguments_are_accesses(library: Path, tmp_path: Path) -> None:
    program = """
memory(ALLOC, 0x10000, 0x1000)
memory(ALLOC, 0x20000, 0x1000)
kernel = Kernel(b"saxpy", 3, (0, 8, 16), (8, 4, 24))
class Inner(ctypes.Structure):
    _fields_ = [("n", U), ("at", U), ("end", U)]
inner = Inner(7, 0x20010, 0x21000)  # the last word points past the end of the allocation
first, second = U(0x10080), ctypes.c_uint32(5)
parameters = (P * 3)(*(ctypes.addressof(each) for each in (first, second, inner)))
cuda.launch(CONTEXT, STREAM, ctypes.byref(kernel), parameters, None)
"""
    events = recorded(tmp_path, library, program)
    assert list(event_bodies(events, Launch)) == [Launch(3, "saxpy", (2, 3, 4), (32, 1, 1))]
    assert list(event_bodies(events, Access)) == [
        Access(0x10080, 0x11000, READ_WRITE, Precision.ASSUMED),
        Access(0x20010, 0x21000, READ_WRITE, Precision.ASSUMED),
    ]
    calls = {event.seq for event in events if isinstance(event.body, Launch | Access)}
    assert len(calls) == 1


def test_pointer_in_large_parameter_is_uncertain(library: Path, tmp_path: Path) -> None:
    program = """
memory(ALLOC, 0x10000, 0x1000)
kernel = Kernel(b"foreach", 2, (0, 3000), (3000, 8))
table = (U * 375)()
table[0], table[300] = 0x10010, 0x10020
again = U(0x10010)
parameters = (P * 2)(ctypes.addressof(table), ctypes.addressof(again))
cuda.launch(CONTEXT, STREAM, ctypes.byref(kernel), parameters, None)
"""
    events = recorded(tmp_path, library, program)
    assert [(body.lo, body.precision) for body in event_bodies(events, Access)] == [
        (0x10010, Precision.ASSUMED),  # the pointer is also passed outside of the large parameter
        (0x10020, Precision.UNCERTAIN),
    ]


def test_packed_arguments_are_read(library: Path, tmp_path: Path) -> None:
    program = """
memory(ALLOC, 0x10000, 0x1000)
kernel = Kernel(b"k", 2, (0, 8), (4, 8))
packed = (U * 2)(1, 0x10020)
size = ctypes.c_size_t(16)
extra = (P * 5)(1, ctypes.addressof(packed), 2, ctypes.addressof(size), 0)
cuda.launch(CONTEXT, STREAM, ctypes.byref(kernel), None, extra)
"""
    events = recorded(tmp_path, library, program)
    assert [body.lo for body in event_bodies(events, Access)] == [0x10020]


def test_pointer_to_freed_memory_is_ignored(library: Path, tmp_path: Path) -> None:
    program = """
memory(ALLOC, 0x10000, 0x1000)
memory(FREE, 0x10000, 0x1000)
kernel = Kernel(b"k", 1, (0,), (8,))
cuda.launch(CONTEXT, STREAM, ctypes.byref(kernel), pointers(0x10000), None)
"""
    events = recorded(tmp_path, library, program)
    assert list(event_bodies(events, Access)) == []
    assert list(event_bodies(events, Free)) == [Free(0x10000, 0x1000, AllocationKind.SYNC)]


@pytest.mark.parametrize(
    "unload",
    [
        "cuda.unload_module()",
        "cuda.call_driver(22, (P * 1)(0x5000))  # cuModuleUnload",
        "cuda.call_driver(680, (P * 1)(0x6000))  # cuLibraryUnload",
    ],
)
def test_kernel_handle_is_queried_again_after_module_unload(
    library: Path, tmp_path: Path, unload: str
) -> None:
    program = f"""
memory(ALLOC, 0x10000, 0x1000)
kernel = Kernel(b"none", 0)
cuda.launch(CONTEXT, STREAM, ctypes.byref(kernel), pointers(0x10000), None)
{unload}
kernel.name, kernel.parameters, kernel.sizes[0] = b"one", 1, 8
cuda.launch(CONTEXT, STREAM, ctypes.byref(kernel), pointers(0x10000), None)
"""
    events = recorded(tmp_path, library, program)
    assert [body.name for body in event_bodies(events, Launch)] == ["none", "one"]
    assert len(list(event_bodies(events, Access))) == 1


def test_kernel_names_of_equal_hash_are_distinct(library: Path, tmp_path: Path) -> None:
    # These names have the same 64-bit FNV-1a hash, by which the recorder looks up the ids of strings.
    program = """
for name in (b"8yn0iYCKYHlIj4-BwPqk", b"GReLUrM4wMqfg9yzV3KQ") * 2:
    kernel = Kernel(name, 0)
    cuda.launch(CONTEXT, STREAM, ctypes.byref(kernel), pointers(), None)
    cuda.unload_module()
"""
    events = recorded(tmp_path, library, program)
    names = [body.name for body in event_bodies(events, Launch)]
    assert names == ["8yn0iYCKYHlIj4-BwPqk", "GReLUrM4wMqfg9yzV3KQ"] * 2


def test_memory_records_kind_of_allocation_and_free(library: Path, tmp_path: Path) -> None:
    program = """
memory(ALLOC, 0x10000, 0x100)
memory(ALLOC, 0x20000, 0x100, flags=2)
memory(ALLOC, 0x30000, 0x100, context=None)
memory(HOST_ALLOC, 0x40000, 0x100)
memory(ALLOC_ASYNC, 0x50000, 0x100, stream=STREAM, context=None)
memory(FREE_ASYNC, 0x50000, 0x100, stream=STREAM, context=None)
memory(ALLOC_ASYNC, 0x50000, 0x100, stream=STREAM, context=None)
memory(FREE, 0x50000, 0x100, context=None)
memory(FREE, 0x30000, 0x100, context=None)
"""
    events = recorded(tmp_path, library, program)
    assert [(body.allocation_kind, body.stream) for body in event_bodies(events, Alloc)] == [
        (AllocationKind.SYNC, 0),
        (AllocationKind.MANAGED, 0),
        (AllocationKind.VIRTUAL, 0),
        (AllocationKind.PINNED, 0),
        (AllocationKind.STREAM_ORDERED, 3),
        (AllocationKind.STREAM_ORDERED, 3),
    ]
    assert [(body.allocation_kind, body.stream) for body in event_bodies(events, Free)] == [
        (AllocationKind.STREAM_ORDERED, 3),
        (AllocationKind.SYNC, 0),  # cuMemFree waits for the device
        (AllocationKind.VIRTUAL, 0),
    ]


def test_3d_copy_is_one_record_per_slice(library: Path, tmp_path: Path) -> None:
    program = """
memory(HOST_ALLOC, 0x40000, 0x10000)
box = (U * 6)(16, 2, 3, 32, 64, 5)  # bytes, rows, slices, pitches, rows from slice to slice
cuda.copy_rows(CONTEXT, STREAM, U(0x10000), U(0x40000), box, 2)
"""
    events = recorded(tmp_path, library, program)
    copies = list(event_bodies(events, Copy))
    assert copies[0] == Copy(
        3, 0x10000, 0x40000, 16, 2, 64, 32, Direction.HOST_TO_DEVICE, HostMemory.PINNED
    )
    assert [(body.destination - 0x10000, body.source - 0x40000) for body in copies] == [
        (0, 0),
        (64 * 5, 32 * 5),
        (64 * 10, 32 * 10),
    ]


def test_fill_size_is_in_bytes(library: Path, tmp_path: Path) -> None:
    events = recorded(tmp_path, library, "cuda.fill(CONTEXT, STREAM, U(0x10000), U(10), 4)")
    assert list(event_bodies(events, Fill)) == [Fill(3, 0x10000, 40)]


def test_synchronization_is_recorded_if_calls_succeed(library: Path, tmp_path: Path) -> None:
    program = """
E = P(0x7000)
cuda.event(CREATED, E, CONTEXT, None)
cuda.event(RECORD, E, CONTEXT, STREAM)
cuda.event(WAIT, E, CONTEXT, LEGACY)
cuda.query_event(E, 600)  # not ready
cuda.query_event(E, 0)
cuda.event(SYNCHRONIZE, E, CONTEXT, None)
cuda.synchronize(1, CONTEXT, STREAM)
cuda.event(DESTROYED, E, CONTEXT, None)
cuda.event(CREATED, E, CONTEXT, None)
cuda.event(RECORD, E, CONTEXT, STREAM)
"""
    events = recorded(tmp_path, library, program)
    kinds = (EventRecord, StreamWait, EventQueryOk, EventSync, StreamSync)
    assert [event.body for event in events if isinstance(event.body, kinds)] == [
        EventRecord(1, 3),
        StreamWait(2, 1),
        EventQueryOk(1),
        EventSync(1),
        StreamSync(3),
        EventRecord(2, 3),
    ]


def test_host_function_is_recorded_when_stream_reaches_it(library: Path, tmp_path: Path) -> None:
    program = """
cuda.call_host(None)
cuda.defer_work(STREAM)
cuda.call_host(STREAM)
cuda.call_host(None)
cuda.stop_deferring(STREAM)
"""
    events = recorded(tmp_path, library, program)
    assert list(event_bodies(events, HostCall)) == [
        HostCall(stream, phase, event)
        for stream, event in ((2, 1), (2, 3), (3, 2))
        for phase in (HostCallPhase.BEGIN, HostCallPhase.END)
    ]
    assert list(event_bodies(events, EventRecord)) == [
        EventRecord(event, stream) for event, stream in ((1, 2), (2, 3), (3, 2))
    ]
    assert list(event_bodies(events, Gap)) == []


GRAPHS = """
class Copy(ctypes.Structure):
    _fields_ = [("side", ctypes.c_char * 88)]
class Node(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("kernel", U * 9), ("copy", U * 25), ("fill", U * 5),
                ("child", P)]
class Graph(ctypes.Structure):
    _fields_ = [("nodes", ctypes.c_size_t), ("edges", ctypes.c_size_t), ("node", P * 8),
                ("before", ctypes.c_int * 8), ("after", ctypes.c_int * 8)]
def graph(nodes, edges):
    made = Graph(len(nodes), len(edges))
    made.held = nodes
    for i, node in enumerate(nodes):
        made.node[i] = ctypes.addressof(node)
    for i, (before, after) in enumerate(edges):
        made.before[i], made.after[i] = before, after
    return made
def fill_node(address, size):
    node = Node(2)
    node.fill[0], node.fill[2], node.fill[3], node.fill[4] = address, 1 << 32, size, 1
    return node
EXECUTABLE = P(0x9000)
"""


def test_graph_is_recorded_with_edges_and_launches(library: Path, tmp_path: Path) -> None:
    program = """
one = graph([fill_node(0x10000, 16), fill_node(0x10010, 16)], [(0, 1)])
cuda.instantiate(ctypes.byref(one), EXECUTABLE)
cuda.launch_graph(CONTEXT, STREAM, EXECUTABLE, 0)
cuda.launch_graph(CONTEXT, LEGACY, EXECUTABLE, 0)
"""
    events = recorded(tmp_path, library, GRAPHS + program)
    assert list(event_bodies(events, GraphNode)) == [
        GraphNode(1, 1, NodeType.FILL),
        GraphNode(1, 2, NodeType.FILL),
    ]
    assert list(event_bodies(events, Access)) == [
        Access(0x10000, 0x10010, AccessMode.WRITE, node=1),
        Access(0x10010, 0x10020, AccessMode.WRITE, node=2),
    ]
    assert list(event_bodies(events, GraphEdge)) == [GraphEdge(1, 1, 2)]
    assert list(event_bodies(events, GraphLaunch)) == [GraphLaunch(3, 1, 1), GraphLaunch(2, 1, 1)]
    assert list(event_bodies(events, Copy)) == []  # a memcpy node is recorded as a node
    assert list(event_bodies(events, Gap)) == []


def test_child_graph_is_between_two_nodes(library: Path, tmp_path: Path) -> None:
    program = """
inner = graph([fill_node(0x10000, 16), fill_node(0x20000, 16)], [])
outer_node = Node(4)
outer_node.child = ctypes.addressof(inner)
outer = graph([fill_node(0x30000, 16), outer_node, fill_node(0x40000, 16)], [(0, 1), (1, 2)])
cuda.instantiate(ctypes.byref(outer), EXECUTABLE)
"""
    events = recorded(tmp_path, library, GRAPHS + program)
    edges = {(body.before, body.after) for body in event_bodies(events, GraphEdge)}
    # nodes: 1 memset, 2 and 3 begin and end of the child graph, 4 and 5 nodes of the child graph, 6 memset
    assert edges == {(1, 2), (2, 3), (2, 4), (2, 5), (4, 3), (5, 3), (3, 6)}


def test_graph_launch_with_other_nodes_is_gap(library: Path, tmp_path: Path) -> None:
    program = """
cuda.instantiate(ctypes.byref(graph([fill_node(0x10000, 16)], [])), EXECUTABLE)
cuda.launch_graph(CONTEXT, STREAM, EXECUTABLE, 1)
cuda.launch_graph(CONTEXT, STREAM, P(0x9999), 0)
"""
    events = recorded(tmp_path, library, GRAPHS + program)
    assert [body.reason for body in event_bodies(events, Gap)] == [
        "graph launch with a different number of kernels than instantiated",
        "graph launch whose instantiation was not recorded",
    ]


def test_records_survive_process_death(library: Path, tmp_path: Path) -> None:
    program = "cuda.fill(CONTEXT, STREAM, U(0x10000), U(10), 4)\nos.kill(os.getpid(), 9)"
    events = recorded(tmp_path, library, program, status=-9)
    assert len(list(event_bodies(events, Fill))) == 1


def test_forked_child_has_own_trace(library: Path, tmp_path: Path) -> None:
    program = """
cuda.fill(CONTEXT, STREAM, U(0x10000), U(10), 1)
if not (child := os.fork()):
    cuda.make_context(CONTEXT, 0)
    cuda.make_stream(CONTEXT, STREAM, 1)
    cuda.fill(CONTEXT, STREAM, U(0x20000), U(20), 1)
    os._exit(0)
os.waitpid(child, 0)
cuda.fill(CONTEXT, STREAM, U(0x30000), U(30), 1)
"""
    processes = recorded_processes(tmp_path, library, program)
    fills = sorted([body.address for body in event_bodies(events, Fill)] for events in processes)
    assert fills == [[0x10000, 0x30000], [0x20000]]


def test_exec_keeps_both_traces(library: Path, tmp_path: Path) -> None:
    program = """
cuda.fill(CONTEXT, STREAM, U(0x10000), U(10), 1)
if "again" not in os.environ:
    os.environ["again"] = "1"
    os.execv(sys.executable, sys.orig_argv)
"""
    recorded(tmp_path, library, program)
    batches = list(Spool(tmp_path).batches())
    assert len({(batch.process, batch.trace_number) for batch in batches}) == 2
    assert len({batch.process for batch in batches}) == 1


def test_long_recording_continues_in_next_file(library: Path, tmp_path: Path) -> None:
    program = """
memory(ALLOC, 0x10000, 0x1000)
kernel = Kernel(b"k", 3, (0, 8, 16), (8, 8, 8))
cuda.launch_often(CONTEXT, STREAM, ctypes.byref(kernel), pointers(0x10000, 0x10100, 0x10200), 30000)
"""
    events = recorded(tmp_path, library, program)
    assert len(list(tmp_path.glob("*.trace"))) > 1
    assert len(list(event_bodies(events, Launch))) == 30000
    assert [event.seq for event in events] == sorted(event.seq for event in events)


def test_full_disk_loses_and_counts_records(library: Path, tmp_path: Path) -> None:
    program = """
recorder.stop()
recorder.start(spool + "/missing", library)
cuda.fill(CONTEXT, STREAM, U(0x10000), U(10), 1)
counts = recorder.counts()
assert (counts["lost"], counts["errno"]) == (1, 2), counts
"""
    recorded(tmp_path, library, program)


def test_small_disk_gets_smaller_files(library: Path, tmp_path: Path) -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
for _ in range(60_000):
    cuda.fill(CONTEXT, STREAM, U(0x10000), U(10), 1)
"""
    assert len(list(event_bodies(recorded(tmp_path, library, program), Fill))) == 60_000
    assert min(file.stat().st_size for file in tmp_path.glob("*.trace")) == 1 << 20


READ_BY_OTHER = """
import struct, subprocess
recorder.stop()
own = spool + "/own"
os.mkdir(own)
HOLD = "import fcntl, sys; file = open(sys.argv[1], 'wb'); file.write(bytes(24 * 256)); file.flush();" \
    " fcntl.flock(file, fcntl.LOCK_EX); print(flush=True); sys.stdin.read()"
command = [sys.executable, "-c", HOLD, own + "/losses"]
reader = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
reader.stdout.readline()
recorder.start(own, library)
cuda.fill(CONTEXT, STREAM, U(0x10000), U(10), 1)
assert len(os.listdir(own)) == 2
"""


def test_recording_ends_if_its_reader_is_killed(library: Path, tmp_path: Path) -> None:
    program = """
reader.kill()
reader.wait()
for _ in range(100_000):
    cuda.fill(CONTEXT, STREAM, U(0x10000), U(10), 1)
assert not os.path.exists(own)
"""
    recorded(tmp_path, library, READ_BY_OTHER + program)


def test_lost_records_are_counted_in_the_losses_file(library: Path, tmp_path: Path) -> None:
    program = """
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (24 * 256, resource.RLIM_INFINITY))
for _ in range(60_000):
    cuda.fill(CONTEXT, STREAM, U(0x10000), U(10), 1)
def slots():
    with open(own + "/losses", "rb") as file:
        return {process: count for process, count, _ in struct.iter_unpack("<3Q", file.read())}
lost = recorder.counts()["lost"]
assert lost > 20_000 and lost // 2 <= slots()[os.getpid()] <= lost
recorder.stop()
assert slots()[os.getpid()] == lost
reader.kill()
"""
    recorded(tmp_path, library, READ_BY_OTHER + program)


@pytest.mark.usefixtures("library")
def test_start_error_names_the_reason() -> None:
    recorder = importlib.import_module("cudakit.record._recorder")
    with pytest.raises(RuntimeError, match="cannot open shared object file"):
        recorder.check("/no/such/library.so")
    with pytest.raises(RuntimeError, match="has no function sanitizerSubscribe"):
        recorder.check("libc.so.6")
