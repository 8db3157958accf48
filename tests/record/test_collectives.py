"""Tests the recorder as a profiler plugin of NCCL. A fake NCCL makes the events, a fake CUDA the launches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from record.recorded import (
    HERE,
    build_library,
    event_bodies,
    recorded,
    recorded_processes,
)

from cudakit.trace.events import (
    Access,
    Accessed,
    Collective,
    Communicator,
    Event,
    Gap,
    GraphNode,
    Launch,
)
from cudakit.trace.kinds import CollectiveFunction, NcclDatatype

BEGIN = f"""
sys.path.insert(0, {str(HERE)!r})
import fake_nccl
nccl_kernel = Kernel(b"_Z39ncclDevKernel_AllReduce_Sum_f32_RING_LL24ncclDevKernelArgsStorageILm4096EE",
                     1, (0,), (8,))
internal = pointers(0x90000)
memory(ALLOC, 0x90000, 0x1000)  # memory of NCCL
launch = lambda stream: cuda.launch(CONTEXT, stream, ctypes.byref(nccl_kernel), internal, None)
"""
JOIN = (
    BEGIN
    + """
plugin = fake_nccl.Plugin(VERSION)
comm = fake_nccl.Communicator(plugin, launch, rank=1, ranks=4, hash=77, name=b"dp")
"""
)
NEW_VERSIONS = pytest.mark.parametrize("version", [5, 6])
ALL_VERSIONS = pytest.mark.parametrize("version", range(1, 7))


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("cuda"))


def run(tmp_path: Path, library: Path, version: int, program: str) -> list[Event]:
    return recorded(tmp_path, library, f"VERSION = {version}\n{JOIN}{program}")


def gaps(events: list[Event]) -> list[tuple[str, int]]:
    return [(body.reason, body.count) for body in event_bodies(events, Gap)]  # type: ignore[attr-defined]


@ALL_VERSIONS
def test_collective_has_the_call_and_the_stream_of_its_launch(
    library: Path, tmp_path: Path, version: int
) -> None:
    events = run(tmp_path, library, version, "comm.all_reduce(0x1000, 0x2000, 512, STREAM)")
    (launch,) = (event for event in events if isinstance(event.body, Launch))
    assert launch.body == Launch(3, launch.body.name, (2, 3, 4), (32, 1, 1), pending=True)
    followers = [event for event in events if event.seq == launch.seq][1:]
    assert [event.body for event in followers] == [
        Accessed(exact=True),
        Collective(
            3,
            0x1000,
            0x2000,
            512,
            communicator=1,
            sequence=1,
            group=1,
            root=0,
            function=CollectiveFunction.ALL_REDUCE,
            datatype=NcclDatatype.FLOAT32,
            name=launch.body.name,
        ),
    ]
    assert not list(event_bodies(events, Access))  # the arguments are pointers to NCCL's memory
    assert not gaps(events)


@ALL_VERSIONS
def test_communicator_is_recorded_with_all_that_its_version_reports(
    library: Path, tmp_path: Path, version: int
) -> None:
    events = run(tmp_path, library, version, "comm.all_reduce(0x1000, 0x2000, 512, STREAM)")
    communicators = list(event_bodies(events, Communicator))
    if version >= 4:
        assert communicators == [Communicator(77, 1, "dp", 1, 4, version)]
    else:
        assert communicators == [
            Communicator(0, 1, "", -1, 0, version),
            Communicator(77, 1, "", 1, 0, version),
        ]


@ALL_VERSIONS
def test_send_and_receive_have_one_buffer_and_the_other_rank(
    library: Path, tmp_path: Path, version: int
) -> None:
    program = "with comm: comm.send(0x1000, 8, 2, STREAM); comm.recv(0x2000, 16, 3, STREAM)"
    events = run(tmp_path, library, version, program)
    collectives = [
        (body.function.name, body.send, body.receive, body.element_count, body.root, body.group)
        for body in event_bodies(events, Collective)
    ]
    assert collectives == [("SEND", 0x1000, 0, 8, 2, 1), ("RECEIVE", 0, 0x2000, 16, 3, 1)]
    assert len(list(event_bodies(events, Launch))) == 1


@NEW_VERSIONS
@pytest.mark.parametrize("report", ["before", "after"])
def test_buffers_from_a_host_function_belong_to_their_launch(
    library: Path, tmp_path: Path, version: int, report: str
) -> None:
    program = f"""
comm.report = {report!r}
comm.all_reduce(0x1000, 0x1000, 1, STREAM)
comm.all_reduce(0x2000, 0x2000, 2, STREAM)
comm.report = "direct"
comm.all_reduce(0x3000, 0x3000, 3, STREAM)
"""
    events = run(tmp_path, library, version, program)
    launches = [event.seq for event in events if isinstance(event.body, Launch)]
    collectives = [event for event in events if isinstance(event.body, Collective)]
    assert [event.seq for event in collectives] == launches
    assert [event.body.sequence for event in collectives] == [1, 2, 3]  # type: ignore[union-attr]
    assert not gaps(events)


@NEW_VERSIONS
def test_kernels_without_events_are_counted(library: Path, tmp_path: Path, version: int) -> None:
    program = 'comm.report = "never"; comm.all_reduce(0x1000, 0x1000, 1, STREAM)'
    events = run(tmp_path, library, version, program)
    reason = "collective whose buffers are unknown: NCCL does not report this kind of operation"
    assert gaps(events) == [(reason, 1)]
    (launch,) = event_bodies(events, Launch)
    assert launch.pending is False  # type: ignore[attr-defined]


def test_old_version_without_report_on_the_thread_is_counted(library: Path, tmp_path: Path) -> None:
    program = """
comm.report = "after"
comm.all_reduce(0x1000, 0x1000, 1, STREAM)
cuda.event(RECORD, P(0x77), CONTEXT, STREAM)
"""
    events = run(tmp_path, library, 4, program)
    assert [reason for reason, _ in gaps(events)] == [
        "collective whose buffers are unknown: the stream is not reported by this version of NCCL",
        "collective whose buffers are unknown: NCCL did not report them",
    ]
    assert [body.exact for body in event_bodies(events, Accessed)] == [False]


@NEW_VERSIONS
def test_two_communicators_in_one_process_keep_their_operations(
    library: Path, tmp_path: Path, version: int
) -> None:
    program = """
other = fake_nccl.Communicator(plugin, launch, rank=0, ranks=4, hash=78)
comm.all_reduce(0x1000, 0x1000, 1, STREAM)
other.all_reduce(0x2000, 0x2000, 2, STREAM)
comm.destroy()
other.all_reduce(0x3000, 0x3000, 3, STREAM)
"""
    events = run(tmp_path, library, version, program)
    assert [
        (body.communicator, body.sequence, body.send) for body in event_bodies(events, Collective)
    ] == [(1, 1, 0x1000), (2, 1, 0x2000), (2, 2, 0x3000)]


@NEW_VERSIONS
def test_failed_launch_leaves_no_operation(library: Path, tmp_path: Path, version: int) -> None:
    program = """
comm.launch = lambda stream: False
comm.all_reduce(0x1000, 0x1000, 1, STREAM)
comm.launch = launch
comm.all_reduce(0x2000, 0x2000, 2, STREAM)
"""
    events = run(tmp_path, library, version, program)
    assert [body.send for body in event_bodies(events, Collective)] == [0x2000]


def test_plugin_of_the_user_stays(library: Path, tmp_path: Path) -> None:
    program = """
os.environ["NCCL_PROFILER_PLUGIN"] = "mine"
recorder.stop()
recorder.start(spool, library, 0, PATCHES)
cuda.make_context(CONTEXT, 3)
cuda.make_stream(CONTEXT, STREAM, 1)
"""
    check = "assert fake_nccl.plugin_path() == 'mine'\nlaunch(STREAM)"
    preset = "os.environ['NCCL_PROFILER_PLUGIN'] = 'mine'\n"
    events = recorded(
        tmp_path,
        library,
        "ctypes.CDLL(None).unsetenv(b'NCCL_PROFILER_PLUGIN')\n" + preset + program + BEGIN + check,
    )
    assert gaps(events)[-1] == (
        "collective whose buffers are unknown: NCCL_PROFILER_PLUGIN names another plugin",
        1,
    )


def test_kernel_of_nccl_without_plugin_is_counted(library: Path, tmp_path: Path) -> None:
    events = recorded(tmp_path, library, BEGIN + "launch(STREAM)")
    assert gaps(events) == [
        ("collective whose buffers are unknown: NCCL loaded no profiler plugin", 1)
    ]


@NEW_VERSIONS
def test_destroyed_communicator_ends_its_launches(
    library: Path, tmp_path: Path, version: int
) -> None:
    """An aborted communicator never reports the buffers of its last launches."""
    program = """
comm.report = "lost"
comm.all_reduce(0x1000, 0x1000, 1, STREAM)
comm.destroy()
other = fake_nccl.Communicator(plugin, launch, hash=78)
other.all_reduce(0x2000, 0x2000, 2, STREAM)
comm.report_buffers([])  # a late event of the destroyed communicator
"""
    events = run(tmp_path, library, version, program)
    assert [body.exact for body in event_bodies(events, Accessed)] == [False, True]  # type: ignore[attr-defined]
    assert [body.send for body in event_bodies(events, Collective)] == [0x2000]  # type: ignore[attr-defined]
    assert gaps(events) == [("collective whose buffers are unknown: NCCL did not report them", 1)]


def test_library_path_with_default_plugin_is_kept(library: Path, tmp_path: Path) -> None:
    program = """
directory = spool + "/plugins"
os.mkdir(directory)
open(directory + "/libnccl-profiler.so", "w").close()
recorder.stop()
libc = ctypes.CDLL(None)
libc.unsetenv(b"NCCL_PROFILER_PLUGIN")
os.environ["LD_LIBRARY_PATH"] = "/no/such:" + directory
recorder.start(spool, library, 0, PATCHES)
cuda.make_context(CONTEXT, 3)
cuda.make_stream(CONTEXT, STREAM, 1)
"""
    check = "assert fake_nccl.plugin_path() is None\nlaunch(STREAM)"
    events = recorded(tmp_path, library, program + BEGIN + check)
    assert gaps(events)[-1] == (
        "collective whose buffers are unknown: LD_LIBRARY_PATH has another plugin, libnccl-profiler.so",
        1,
    )


def test_forked_child_is_a_rank_of_its_own(library: Path, tmp_path: Path) -> None:
    program = """
child = os.fork()
if not child:
    cuda.make_context(CONTEXT, 3)
    cuda.make_stream(CONTEXT, STREAM, 1)
    plugin = fake_nccl.Plugin(VERSION)
    comm = fake_nccl.Communicator(plugin, launch, rank=2, ranks=4, hash=99)
    comm.all_reduce(0x5000, 0x5000, 1, STREAM)
    recorder.stop()
    os._exit(0)
os.waitpid(child, 0)
comm.all_reduce(0x1000, 0x1000, 1, STREAM)
"""
    processes = recorded_processes(tmp_path, library, f"VERSION = 6\n{JOIN}{program}")
    collectives = [
        (body.communicator, body.send)  # type: ignore[attr-defined]
        for events in processes
        for body in event_bodies(events, Collective)
    ]
    assert sorted(collectives) == [(1, 0x1000), (1, 0x5000)]


@pytest.mark.usefixtures("library")
def test_plugin_in_a_process_that_is_not_recorded_requests_no_events() -> None:
    program = f"""
import ctypes, sys
sys.path.insert(0, {str(HERE)!r})
import importlib.util, fake_nccl
path = importlib.util.find_spec("cudakit.record._recorder").origin
ctypes.CDLL(None).setenv(b"NCCL_PROFILER_PLUGIN", path.encode(), 1)
for version in range(1, 7):
    comm = fake_nccl.Communicator(fake_nccl.Plugin(version), lambda stream: None)
    assert comm.mask.value == 0 and comm.context.value
    comm.all_reduce(0x1000, 0x1000, 1, None)
    comm.destroy()
"""
    result = subprocess.run(
        [sys.executable, "-P", "-c", program], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("name", ["ncclDevKernel_SendRecv", "_Z26ncclDevKernel_AllGather_LLv",
                                  "ncclKernel_AllReduce", "_Z24ncclSymkDevKernel_Generic"])  # fmt: skip
def test_kernels_of_nccl_are_recognized(library: Path, tmp_path: Path, name: str) -> None:
    program = f"""
kernel = Kernel({name.encode()!r}, 0)
cuda.launch(CONTEXT, STREAM, ctypes.byref(kernel), None, None)
"""
    assert len(gaps(recorded(tmp_path, library, program))) == 1


@pytest.mark.parametrize("name", ["my_ncclDevKernel", "_ZN4ncclDevKernel1kEv", "nccl", "_Z3addv"])
def test_other_kernels_are_not_taken_for_those_of_nccl(
    library: Path, tmp_path: Path, name: str
) -> None:
    program = f"""
kernel = Kernel({name.encode()!r}, 0)
cuda.launch(CONTEXT, STREAM, ctypes.byref(kernel), None, None)
"""
    assert not gaps(recorded(tmp_path, library, program))


def test_nothing_is_recorded_after_stop(library: Path, tmp_path: Path) -> None:
    program = """
recorder.stop()
late = fake_nccl.Communicator(plugin, lambda stream: None, hash=79)
assert late.mask.value == 0 and late.context.value
late.all_reduce(0x1000, 0x2000, 512, STREAM)
comm.all_reduce(0x1000, 0x2000, 512, STREAM)
late.destroy()
comm.destroy()
"""
    events = run(tmp_path, library, 6, program)
    assert not list(event_bodies(events, Collective))
    assert len(list(event_bodies(events, Communicator))) == 1


# --- graphs -------------------------------------------------------------------------------------------

CAPTURE = """
class Node(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("kernel", U * 9), ("copy", U * 25), ("fill", U * 5), ("child", P)]
class Graph(ctypes.Structure):
    _fields_ = [("nodes", ctypes.c_size_t), ("edges", ctypes.c_size_t), ("node", P * 8),
                ("before", ctypes.c_int * 8), ("after", ctypes.c_int * 8)]
plain_kernel = Kernel(b"k", 0)
def node_of(kernel):
    node = Node(0)
    node.kernel[0] = ctypes.addressof(kernel)
    return node
def instantiate(*nodes):
    graph = Graph(len(nodes), 0)
    for i, node in enumerate(nodes):
        graph.node[i] = ctypes.addressof(node)
    cuda.instantiate(ctypes.byref(graph), P(0x9000))
collective_node, other_node = node_of(nccl_kernel), node_of(plain_kernel)
comm.launch = lambda stream: cuda.capture_launch(
    stream, ctypes.byref(nccl_kernel), ctypes.byref(collective_node))
comm.capturing = True
"""


@NEW_VERSIONS
def test_captured_collectives_follow_their_node(
    library: Path, tmp_path: Path, version: int
) -> None:
    program = """
comm.all_reduce(0x1000, 0x1000, 1, STREAM)
instantiate(other_node, collective_node)
"""
    events = run(tmp_path, library, version, CAPTURE + program)
    (node,) = (
        event for event in events if isinstance(event.body, GraphNode) and event.body.node == 2
    )
    (operation,) = (event for event in events if isinstance(event.body, Collective))
    assert operation.seq == node.seq
    assert operation.body == Collective(
        0, 0x1000, 0x1000, 1, 1, sequence=1, root=0, graph=1, node=2, name=node.body.name,
        function=CollectiveFunction.ALL_REDUCE, datatype=NcclDatatype.FLOAT32,
    )  # fmt: skip
    assert not gaps(events)
    assert not list(event_bodies(events, Launch))


@NEW_VERSIONS
def test_captured_calls_are_not_counted_among_the_others(
    library: Path, tmp_path: Path, version: int
) -> None:
    program = """
comm.all_reduce(0x1000, 0x1000, 1, STREAM)
comm.launch, comm.capturing = launch, False
comm.all_reduce(0x2000, 0x2000, 1, STREAM)
"""
    (operation,) = event_bodies(run(tmp_path, library, version, CAPTURE + program), Collective)
    assert (operation.sequence, operation.group) == (1, 1)  # type: ignore[attr-defined]


@NEW_VERSIONS
def test_buffers_of_a_graph_launch_are_not_those_of_a_later_launch(
    library: Path, tmp_path: Path, version: int
) -> None:
    """With several hosts, NCCL reports captured collectives in each launch of the graph."""
    program = """
captured = fake_nccl.Operation("AllReduce", 0x1000, 0x1000, 1, "ncclFloat32", 0, STREAM)
comm.report = "never"
original = comm.report_buffers
comm.launch = lambda stream: None
with comm:
    comm._call(captured)
comm.report, comm.launch, comm.capturing = "direct", launch, False
comm._on_thread([captured])
comm.all_reduce(0x2000, 0x2000, 1, STREAM)
"""
    events = run(tmp_path, library, version, CAPTURE + program)
    assert [body.send for body in event_bodies(events, Collective)] == [0x2000]  # type: ignore[attr-defined]
    assert gaps(events) == [
        ("collective whose buffers are unknown: captured into a graph, between several hosts", 1)
    ]


@NEW_VERSIONS
def test_captured_kernel_of_nccl_without_events_is_counted(
    library: Path, tmp_path: Path, version: int
) -> None:
    program = """
comm.report = "never"
comm.all_reduce(0x1000, 0x1000, 1, STREAM)
instantiate(collective_node)
"""
    events = run(tmp_path, library, version, CAPTURE + program)
    assert gaps(events) == [("captured collective whose buffers are unknown", 1)]


@NEW_VERSIONS
def test_reused_handle_of_a_node_has_no_collective(
    library: Path, tmp_path: Path, version: int
) -> None:
    program = """
comm.all_reduce(0x1000, 0x1000, 1, STREAM)
cuda.capture_launch(STREAM, ctypes.byref(nccl_kernel), ctypes.byref(collective_node))
instantiate(collective_node)
"""
    events = run(tmp_path, library, version, CAPTURE + program)
    assert gaps(events) == [("captured collective whose buffers are unknown", 1)]
