"""Tests that the recorder writes the accesses of patched graph nodes, and stores through tensor maps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from record.exact_programs import gaps, recorded_launches, run
from record.recorded import build_library, event_bodies

from cudakit.trace.events import Access, Event, GraphNode
from cudakit.trace.kinds import AccessMode, NodeType, Precision

MAPS = Path(__file__).parents[1] / "data/tensor_maps.json"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_library(tmp_path_factory.mktemp("cuda"))


# --- graphs -------------------------------------------------------------------------------------------

GRAPHS = """
class Node(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("kernel", U * 9), ("copy", U * 25), ("fill", U * 5),
                ("child", P)]
class Graph(ctypes.Structure):
    _fields_ = [("nodes", ctypes.c_size_t), ("edges", ctypes.c_size_t), ("node", P * 8),
                ("before", ctypes.c_int * 8), ("after", ctypes.c_int * 8)]
EXECUTABLE, OTHER_EXECUTABLE = P(0x9000), P(0x9001)
arguments = pointers(0x100000)
def kernel_node(of=plain):
    node = Node(0)
    node.kernel[0], node.kernel[5] = ctypes.addressof(of), ctypes.addressof(arguments)
    return node
def graph(*kernels, executable=EXECUTABLE):
    nodes = [kernel_node(each) for each in kernels]
    made = Graph(len(nodes), 0)
    held.append(nodes)
    for i, node in enumerate(nodes):
        made.node[i] = ctypes.addressof(node)
    cuda.instantiate(ctypes.byref(made), executable)
    return made
def launch_graph(of, *each, first_grid=1000, in_line=1, executable=EXECUTABLE, result=0):
    set_accesses(*each, result=result)
    cuda.launch_kernels(CONTEXT, STREAM, executable, ctypes.byref(of), U(first_grid), in_line)
"""


@pytest.mark.parametrize("in_line", [0, 1])
def test_graph_nodes_are_distinguished_in_every_launch(
    library: Path, tmp_path: Path, in_line: int
) -> None:
    program = f"""
cuda.defer_work(STREAM)
three = graph(plain, plain, plain)
for i in range(4):
    launch(read(0x100000 + i * 64))
    launch_graph(three, *(write(0x100004 + i * 64 + n * 8) for n in range(3)), in_line={in_line})
wait()
"""
    events = run(tmp_path, library, GRAPHS + program)
    for i, (kernel, graph) in enumerate(zip(*[iter(recorded_launches(events))] * 2, strict=True)):
        address = 0x100004 + i * 64
        assert kernel.accesses == [(address - 4, address, AccessMode.READ, 0)]
        assert graph.pending == 3
        assert graph.accesses == [
            (address + node * 8, address + node * 8 + 4, AccessMode.WRITE, node + 1)
            for node in range(3)
        ]
        assert graph.ended_nodes == [(node + 1, True) for node in range(3)]
    assert gaps(events) == {}


def test_alternating_graph_launches_are_distinguished(library: Path, tmp_path: Path) -> None:
    program = """
cuda.defer_work(STREAM)
one, other = graph(plain, plain), graph(plain, executable=OTHER_EXECUTABLE)
for i in range(3):
    launch_graph(one, write(0x100000), write(0x100008), first_grid=50)
    launch_graph(other, write(0x100010), first_grid=52, executable=OTHER_EXECUTABLE)
wait()
"""
    launches = recorded_launches(run(tmp_path, library, GRAPHS + program))
    assert [[(lo, node) for lo, _, _, node in launch.accesses] for launch in launches] == [
        [(0x100000, 1), (0x100008, 2)],
        [(0x100010, 1)],
    ] * 3


def test_unexpected_grid_ids_make_the_arena_lost(library: Path, tmp_path: Path) -> None:
    program = """
two = graph(plain, plain)
launch_graph(two, write(0x100000), write(0x100008), first_grid=1000)
launch_graph(two, write(0x100000), write(0x100008), first_grid=1001)  # beyond the reserved range
import time; time.sleep(0.03)
wait()
launch_graph(two, write(0x100000), write(0x100008), first_grid=1001)
"""
    events = run(tmp_path, library, GRAPHS + program)
    first, second, third = recorded_launches(events)
    assert [exact for _, exact in first.ended_nodes + second.ended_nodes] == [False] * 4
    assert third.ended_nodes == [(1, True), (2, True)]


def test_missing_nodes_are_assumed_and_unexpected_nodes_ignored(
    library: Path, tmp_path: Path
) -> None:
    program = """
three = graph(plain, plain, plain)
two = graph(plain, plain)
launch_graph(three, *(write(0x100000 + i * 8) for i in range(3)))
one = Graph(1, 0)
one.node[0] = two.node[0]
launch_graph(one, write(0x100020), first_grid=2000)
"""
    events = run(tmp_path, library, GRAPHS + program)
    launch_with_unexpected, launch_with_missing = recorded_launches(events)
    assert launch_with_unexpected.accesses == [
        (0x100000, 0x100004, AccessMode.WRITE, 1),
        (0x100008, 0x10000C, AccessMode.WRITE, 2),
    ]
    assert launch_with_unexpected.ended_nodes == [(1, True), (2, True)]
    assert launch_with_missing.accesses == [(0x100020, 0x100024, AccessMode.WRITE, 1)]
    assert sorted(launch_with_missing.ended_nodes) == [(0, False), (1, True)]
    assert gaps(events) == {"graph launch with a different number of kernels than instantiated": 2}


def test_accesses_of_failed_graph_launch_are_ended(library: Path, tmp_path: Path) -> None:
    program = """
two = graph(plain, plain)
launch_graph(two, write(0x100000), write(0x100008), result=700)
launch(write(0x100010))
cuda.fill(CONTEXT, STREAM, U(1), U(1), 1)
"""
    events = run(tmp_path, library, GRAPHS + program)
    failed, unaffected = recorded_launches(events)
    assert failed.accesses == []
    assert unaffected.accesses == [(0x100010, 0x100014, AccessMode.WRITE, 0)]
    assert "Fill" in {type(event.body).__name__ for event in events}, "no node's, but a fill"


def test_unreported_node_is_not_exact_and_others_are(library: Path, tmp_path: Path) -> None:
    program = """
two = graph(textures, plain)
launch_graph(two, write(0x100000), write(0x100008))
"""
    events = run(tmp_path, library, GRAPHS + program)
    (launch,) = recorded_launches(events)
    assert sorted(launch.ended_nodes) == [(1, False), (2, True)]
    assert launch.accesses == [
        (0x100000, 0x100004, AccessMode.WRITE, 1),
        (0x100008, 0x10000C, AccessMode.WRITE, 2),
    ]
    assert gaps(events) == {"graph kernel inferred from arguments: texture reads": 1}


def test_many_graph_launches_without_wait_have_indices(library: Path, tmp_path: Path) -> None:
    program = """
graphs = [graph(plain, executable=P(0x9100 + i)) for i in range(40)]
for round in range(15):  # the first launch of each takes many indices: more than there are, in all
    for i, each in enumerate(graphs):
        launch_graph(each, write(0x100000 + i * 4), first_grid=7 + 10000 * round, executable=P(0x9100 + i))
"""
    launches = recorded_launches(run(tmp_path, library, GRAPHS + program))
    assert [launch.accesses[0][0] for launch in launches] == [
        0x100000 + i * 4 for i in range(40)
    ] * 15


# --- stores through tensor maps -------------------------------------------------------------------------


def recorded_matrix_map() -> dict[str, object]:
    """Return a recorded tensor map of a byte matrix with gaps between rows."""
    maps = json.loads(MAPS.read_text())["encoded"]
    return next(
        tensor_map
        for tensor_map in maps
        if tensor_map["dims"] == [1024, 512] and tensor_map["strides"] == [4112]
    )


TENSORS = """
MAP = bytes.fromhex(recorded_matrix_map["map"])
ADDRESS = recorded_matrix_map["address"]
memory(ALLOC, ADDRESS, 1 << 23)
def a_map_at(address):
    return address.to_bytes(8, "little") + MAP[8:]
stores = Kernel(b"stores", 0, (0, 64, 128), (64, 64, 64))
reduces = Kernel(b"reduces", 1, (0,), (64,))
def launch_stores(*maps, loads=(), kernel=stores):
    buffers = [ctypes.create_string_buffer(each, 64) for each in maps]
    held.append(buffers)
    set_accesses(*(Touch(ctypes.addressof(buffers[i]), 0, 1, 0, 0) for i in loads))
    kernel.parameters = len(maps)
    cuda.launch(CONTEXT, STREAM, ctypes.byref(kernel), (P * len(maps))(*map(ctypes.addressof, buffers)), None)
"""


def run_tensors(directory: Path, library: Path, program: str) -> list[Event]:
    return run(
        directory, library, f"recorded_matrix_map = {recorded_matrix_map()!r}\n{TENSORS}{program}"
    )


def test_tensor_map_without_loads_counts_as_stored_through(library: Path, tmp_path: Path) -> None:
    program = "launch_stores(a_map_at(ADDRESS), a_map_at(ADDRESS + (1 << 22)), loads=[0])"
    (launch,) = recorded_launches(events := run_tensors(tmp_path, library, program))
    address = recorded_matrix_map()["address"]
    assert isinstance(address, int)
    written = [body for body in event_bodies(events, Access) if body.mode == AccessMode.WRITE]
    assert written == [
        Access(
            address + (1 << 22),
            address + (1 << 22) + 511 * 4112 + 1024,
            AccessMode.WRITE,
            Precision.SUMMARY,
            stride_bytes=4112,
            count=512,
        )
    ]
    assert (launch.pending, launch.ended_nodes) == (1, [(0, True)])
    assert {mode for _, _, mode, _ in launch.accesses} == {AccessMode.READ, AccessMode.WRITE}


@pytest.mark.parametrize(
    "program",
    [
        "launch_stores(a_map_at(ADDRESS), loads=[0])",  # the tensor map of the stores is not a parameter
        "launch_stores(a_map_at(ADDRESS), a_map_at(ADDRESS + (1 << 22)), loads=[0, 1])",
    ],
)
def test_stores_through_unknown_map_are_not_exact(
    library: Path, tmp_path: Path, program: str
) -> None:
    (launch,) = recorded_launches(events := run_tensors(tmp_path, library, program))
    assert launch.assumed
    assert {mode for _, _, mode, _ in launch.accesses} == {AccessMode.READ}, (
        "what was recorded stays"
    )
    assert launch.ended_nodes == [(0, False)]
    assert gaps(events) == {"launch with lost accesses: store through an unknown tensor map": 1}


def test_stores_without_map_parameter_are_assumed(library: Path, tmp_path: Path) -> None:
    # no map; a tensor outside of all allocations; a tensor that exceeds its allocation
    program = "launch_stores(bytes(64), a_map_at(1 << 62), a_map_at(ADDRESS + (1 << 22) * 3 // 2))"
    (launch,) = recorded_launches(events := run_tensors(tmp_path, library, program))
    assert (launch.accesses, launch.ended_nodes) == ([], [(0, False)])
    assert gaps(events) == {"launch inferred from arguments: tensor-map stores": 1}


def test_reduced_tensor_is_accessed_atomically(library: Path, tmp_path: Path) -> None:
    program = "launch_stores(a_map_at(ADDRESS), kernel=reduces)"
    (launch,) = recorded_launches(events := run_tensors(tmp_path, library, program))
    assert launch.ended_nodes == [(0, True)]
    assert {mode for _, _, mode, _ in launch.accesses} == {
        AccessMode.READ | AccessMode.WRITE | AccessMode.ATOMIC
    }
    assert launch.precisions == {Precision.SUMMARY}
    assert gaps(events) == {}


def test_dimension_without_stride_does_not_extend_the_tensor(library: Path, tmp_path: Path) -> None:
    """cuBLAS appends dimensions of 2^31 - 1 elements whose stride is 0."""
    program = """
rank = MAP[8] & 0x8F | 2 << 4
extended = MAP[:8] + bytes([rank]) + MAP[9:40] + (0x7FFFFFFE).to_bytes(4, "little") + MAP[44:]
launch_stores(extended)
"""
    (launch,) = recorded_launches(events := run_tensors(tmp_path, library, program))
    (written,) = (body for body in event_bodies(events, Access) if body.mode == AccessMode.WRITE)
    assert (written.hi - written.lo, written.count) == (511 * 4112 + 1024, 512)
    assert launch.ended_nodes == [(0, True)]


NODES_WITH_STORES = """
EXEC_KERNEL_SET_PARAMS, EXEC_CHILD_SET_PARAMS = 692, 586
def parameters_of(*maps):
    buffers = [ctypes.create_string_buffer(each, 64) for each in maps]
    array = (P * len(maps))(*map(ctypes.addressof, buffers))
    held.append((buffers, array))
    return ctypes.addressof(array)
def set_parameters(node, *maps):
    node.kernel[0], node.kernel[5] = ctypes.addressof(stores), parameters_of(*maps)
stores.parameters = 1
node, storing = kernel_node(stores), Graph(1, 0)
set_parameters(node, a_map_at(ADDRESS))
storing.node[0] = ctypes.addressof(node)
cuda.instantiate(ctypes.byref(storing), EXECUTABLE)
nothing = Touch(0x100000, 4, 0, 4, READ)
launch_graph(storing, nothing)
"""


def stored_at(events: list[Event]) -> list[int]:
    return [body.lo for body in event_bodies(events, Access) if body.precision == Precision.SUMMARY]


def test_graph_node_stores_through_its_tensor_maps(library: Path, tmp_path: Path) -> None:
    events = run_tensors(tmp_path, library, GRAPHS + NODES_WITH_STORES)
    assert stored_at(events) == [recorded_matrix_map()["address"]]
    assert [launch.ended_nodes for launch in recorded_launches(events)] == [[(1, True)]]
    assert gaps(events) == {}


def test_changed_graph_node_stores_through_its_new_tensor_map(
    library: Path, tmp_path: Path
) -> None:
    program = """
changed = kernel_node(stores)
set_parameters(changed, a_map_at(ADDRESS + (1 << 22)))
call = (P * 3)(EXECUTABLE.value, ctypes.addressof(node), ctypes.addressof(changed) + Node.kernel.offset)
cuda.call_driver(EXEC_KERNEL_SET_PARAMS, call)
launch_graph(storing, nothing)
cuda.call_driver(650, (P * 3)())  # cuGraphNodeSetEnabled, which is not followed
cuda.call_driver(696, (P * 2)(EXECUTABLE.value, ctypes.addressof(storing)))  # cuGraphExecUpdate
launch_graph(storing, nothing)
"""
    events = run_tensors(tmp_path, library, GRAPHS + NODES_WITH_STORES + program)
    address = recorded_matrix_map()["address"]
    assert isinstance(address, int)
    assert stored_at(events) == [address, address + (1 << 22), address]
    assert gaps(events) == {"executable graph whose nodes were changed": 1}


def test_changed_child_graph_stores_through_its_new_tensor_map(
    library: Path, tmp_path: Path
) -> None:
    program = """
def graph_of(one):
    held.append(one)
    made = Graph(1, 0)
    made.node[0] = ctypes.addressof(one)
    return made
def child_node(inner):
    one = Node(4)
    one.child = ctypes.addressof(inner)
    return one
parent = child_node(storing)
outer = graph_of(parent)
cuda.instantiate(ctypes.byref(outer), OTHER_EXECUTABLE)
changed = kernel_node(stores)
set_parameters(changed, a_map_at(ADDRESS + (1 << 22)))
other = graph_of(changed)
call = (P * 3)(OTHER_EXECUTABLE.value, ctypes.addressof(parent), ctypes.addressof(other))
cuda.call_driver(EXEC_CHILD_SET_PARAMS, call)
launch_graph(storing, nothing, executable=OTHER_EXECUTABLE)
waits = graph_of(Node(12))  # a batch of stream memory operations
call = (P * 3)(OTHER_EXECUTABLE.value, ctypes.addressof(parent), ctypes.addressof(waits))
cuda.call_driver(EXEC_CHILD_SET_PARAMS, call)
"""
    events = run_tensors(tmp_path, library, GRAPHS + NODES_WITH_STORES + program)
    address = recorded_matrix_map()["address"]
    assert isinstance(address, int)
    assert stored_at(events) == [address, address + (1 << 22)]
    assert gaps(events) == {"executable graph whose nodes were changed": 1}


COPY_AND_FILL = """
def copy_node(source, destination, size):
    one = Node(1)
    for begin, address in ((0, source), (11, destination)):
        one.copy[begin + 4], one.copy[begin + 6] = 2, address  # of device memory
    one.copy[22] = size
    return one
def fill_node(address, size):
    one = Node(2)
    one.fill[0], one.fill[2], one.fill[3], one.fill[4] = address, 1 << 32, size, 1
    return one
copy, fill = copy_node(0x100000, 0x100100, 64), fill_node(0x100200, 64)
both = Graph(2, 0)
for i, one in enumerate((copy, fill)):
    both.node[i] = ctypes.addressof(one)
cuda.instantiate(ctypes.byref(both), EXECUTABLE)
new_copy, new_fill = copy_node(0x100400, 0x100500, 32), fill_node(0x100600, 16)
def change(function, node, parameters, executable=EXECUTABLE):
    cuda.call_driver(function, (P * 3)(executable.value, ctypes.addressof(node), parameters))
"""
WRITTEN_BEFORE_CHANGE = [(0x100100, 64), (0x100200, 64)]


def written_by_nodes(events: list[Event]) -> list[tuple[int, int]]:
    written = (
        body for body in event_bodies(events, Access) if body.mode == AccessMode.WRITE and body.node
    )
    return [(body.lo, body.hi - body.lo) for body in written]


def test_changed_copy_and_memset_nodes_access_their_new_addresses(
    library: Path, tmp_path: Path
) -> None:
    program = """
change(562, copy, ctypes.addressof(new_copy) + Node.copy.offset)
change(563, fill, ctypes.addressof(new_fill) + Node.fill.offset)
"""
    events = run(tmp_path, library, GRAPHS + COPY_AND_FILL + program)
    assert written_by_nodes(events) == [*WRITTEN_BEFORE_CHANGE, (0x100500, 32), (0x100600, 16)]
    nodes = [(body.graph, body.node, body.node_type) for body in event_bodies(events, GraphNode)]
    assert nodes == [(1, 1, NodeType.COPY), (1, 2, NodeType.FILL)] * 2
    assert gaps(events) == {}


def test_nodes_changed_by_generic_call_access_their_new_addresses(
    library: Path, tmp_path: Path
) -> None:
    program = """
def generic(kind, of, offset, skipped):  # CUgraphNodeParams
    made = (U * 32)(kind)
    size = 200 if kind == 1 else 40
    ctypes.memmove(ctypes.addressof(made) + 16 + skipped, ctypes.addressof(of) + offset, size)
    held.append(made)
    return ctypes.addressof(made)
change(714, copy, generic(1, new_copy, Node.copy.offset, 16))
change(714, fill, generic(2, new_fill, Node.fill.offset, 0))
change(714, fill, generic(12, new_fill, Node.fill.offset, 0))  # a batch of stream memory operations
"""
    events = run(tmp_path, library, GRAPHS + COPY_AND_FILL + program)
    assert written_by_nodes(events) == [*WRITTEN_BEFORE_CHANGE, (0x100500, 32), (0x100600, 16)]
    assert gaps(events) == {"executable graph whose nodes were changed": 1}


def test_changed_node_of_unknown_executable_is_reported(library: Path, tmp_path: Path) -> None:
    program = """
change(562, copy, ctypes.addressof(new_copy) + Node.copy.offset, OTHER_EXECUTABLE)
"""
    events = run(tmp_path, library, GRAPHS + COPY_AND_FILL + program)
    assert written_by_nodes(events) == WRITTEN_BEFORE_CHANGE
    assert gaps(events) == {"executable graph whose nodes were changed": 1}


def test_changed_child_graph_copies_to_its_new_addresses(library: Path, tmp_path: Path) -> None:
    program = """
parent, other = Node(4), Graph(2, 0)
parent.child = ctypes.addressof(both)
outer = Graph(1, 0)
outer.node[0] = ctypes.addressof(parent)
cuda.instantiate(ctypes.byref(outer), OTHER_EXECUTABLE)
for i, one in enumerate((new_copy, new_fill)):
    other.node[i] = ctypes.addressof(one)
change(586, parent, ctypes.addressof(other), OTHER_EXECUTABLE)
"""
    events = run(tmp_path, library, GRAPHS + COPY_AND_FILL + program)
    new_ranges = [(0x100500, 32), (0x100600, 16)]
    assert written_by_nodes(events) == [*WRITTEN_BEFORE_CHANGE, *WRITTEN_BEFORE_CHANGE, *new_ranges]
    changed = [(body.graph, body.node) for body in event_bodies(events, GraphNode)][-2:]
    assert changed == [(2, 3), (2, 4)]
    assert gaps(events) == {}
