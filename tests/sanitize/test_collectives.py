"""Tests the accesses of NCCL's collectives, and their races with other work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sanitize.brute_force import unordered_accesses
from sanitize.random_traces import BYTE_COUNT, Step, steps, trace
from sanitize.trace_scene import READ, SIZE, WRITE, Scene, address_of

from cudakit.sanitize.collectives import (
    PEER_KERNELS,
    UNKNOWN_FUNCTION,
    UNKNOWN_RANKS,
    AccessedRange,
    Buffers,
    Membership,
)
from cudakit.sanitize.engine import Engine
from cudakit.sanitize.races import CollectiveOperation, Confidence, Race, RaceKind
from cudakit.trace.events import (
    Access,
    Accessed,
    Collective,
    Communicator,
    Event,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    Launch,
)
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    AllocationLayer,
    CollectiveFunction,
    EventKind,
    NcclDatatype,
    NodeType,
)
from cudakit.trace.trace_file import pack

ALL_REDUCE, ALL_GATHER = CollectiveFunction.ALL_REDUCE, CollectiveFunction.ALL_GATHER
REDUCE_SCATTER, BROADCAST = CollectiveFunction.REDUCE_SCATTER, CollectiveFunction.BROADCAST
REDUCE = CollectiveFunction.REDUCE
SEND, RECEIVE = CollectiveFunction.SEND, CollectiveFunction.RECEIVE

KERNEL_NAME = "ncclDevKernel_Generic"
ROOT, OTHER = Membership(rank=1, rank_count=4), Membership(rank=2, rank_count=4)


@pytest.mark.parametrize(
    ("function", "send", "receive", "membership", "expected"),
    [
        (ALL_REDUCE, 1000, 2000, ROOT, [(1000, 1010, READ), (2000, 2010, WRITE)]),
        (ALL_REDUCE, 1000, 1000, ROOT, [(1000, 1010, READ | WRITE)]),
        (ALL_GATHER, 1000, 2000, ROOT, [(1000, 1010, READ), (2000, 2040, WRITE)]),
        (ALL_GATHER, 1010, 1000, ROOT, [(1010, 1020, READ), (1000, 1010, WRITE), (1020, 1040, WRITE)]),
        (REDUCE_SCATTER, 1000, 2000, ROOT, [(1000, 1040, READ), (2000, 2010, WRITE)]),
        (REDUCE_SCATTER, 1000, 1010, ROOT,
         [(1000, 1010, READ), (1010, 1020, READ | WRITE), (1020, 1040, READ)]),
        (BROADCAST, 1000, 2000, ROOT, [(1000, 1010, READ), (2000, 2010, WRITE)]),
        (BROADCAST, 1000, 1000, ROOT, [(1000, 1010, READ)]),
        (BROADCAST, 1000, 2000, OTHER, [(2000, 2010, WRITE)]),
        (BROADCAST, 1000, 1000, OTHER, [(1000, 1010, WRITE)]),
        (REDUCE, 1000, 2000, ROOT, [(1000, 1010, READ), (2000, 2010, WRITE)]),
        (REDUCE, 1000, 1000, ROOT, [(1000, 1010, READ | WRITE)]),
        (REDUCE, 1000, 2000, OTHER, [(1000, 1010, READ)]),
        (REDUCE, 1000, 1000, OTHER, [(1000, 1010, READ)]),
        (SEND, 1000, 0, ROOT, [(1000, 1010, READ)]),
        (RECEIVE, 0, 1000, ROOT, [(1000, 1010, WRITE)]),
    ],
)  # fmt: skip
def test_accessed_ranges_follow_the_definition_of_the_function(
    function: CollectiveFunction,
    send: int,
    receive: int,
    membership: Membership,
    expected: list[tuple[int, int, int]],
) -> None:
    buffers = Buffers(send, receive, 10, membership, root=1)
    assert list(buffers.accessed_ranges(function)) == [AccessedRange(*each) for each in expected]


class CollectiveScene(Scene):
    """A scene with communicator 1: this process is rank 1 of 4. Collectives run in stream 2."""

    def __init__(self, membership: Communicator | None = None) -> None:
        super().__init__()
        self.call(membership or Communicator(77, 1, rank=1, rank_count=4))

    def collective(
        self,
        function: CollectiveFunction,
        send: str = "",
        receive: str = "",
        *,
        stream: int = 2,
        root: int = 0,
        size: int = SIZE,
    ) -> list[Race]:
        operation = operation_of(function, send, receive, stream=stream, root=root, size=size)
        return self.call(Launch(stream, KERNEL_NAME, pending=True), Accessed(), operation)


def operation_of(
    function: CollectiveFunction, send: str = "", receive: str = "", *, stream: int = 2, root: int = 0,
    size: int = SIZE, node: int = 0,
) -> Collective:  # fmt: skip
    return Collective(
        stream,
        address_of(send) if send else 0,
        address_of(receive) if receive else 0,
        size // 4,
        communicator=1,
        root=root,
        graph=1 if node else 0,
        node=node,
        function=function,
        datatype=NcclDatatype.FLOAT32,
        name=KERNEL_NAME,
    )


def test_result_used_before_wait_races() -> None:
    scene = CollectiveScene()
    scene.write(1, "x")
    scene.record(1, 1)
    scene.wait(2, 1)
    assert scene.collective(ALL_REDUCE, "x", "x") == []
    (race,) = scene.read(1, "x")
    assert (race.kind, race.confidence) == (RaceKind.READ_AFTER_WRITE, Confidence.CERTAIN)
    assert race.previous.kind is EventKind.COLLECTIVE
    assert race.previous.collective == CollectiveOperation(ALL_REDUCE, 1, 4, 0)
    assert race.previous.name == KERNEL_NAME


def test_result_used_after_wait_is_ordered() -> None:
    scene = CollectiveScene()
    scene.write(1, "x")
    scene.record(1, 1)
    scene.wait(2, 1)
    scene.collective(ALL_REDUCE, "x", "x")
    scene.record(2, 2)
    scene.wait(1, 2)
    assert scene.write(1, "x") == []


def test_input_overwritten_during_the_collective_races() -> None:
    scene = CollectiveScene()
    scene.collective(REDUCE, "x", root=0)
    (race,) = scene.write(1, "x")
    assert race.kind is RaceKind.WRITE_AFTER_READ


def test_input_read_during_the_collective_is_no_race() -> None:
    scene = CollectiveScene()
    scene.collective(ALL_REDUCE, "x", "y")
    assert scene.read(1, "x") == []


def test_all_gather_writes_the_parts_of_all_ranks() -> None:
    scene = CollectiveScene()
    scene.collective(ALL_GATHER, "x", "y")
    last_part = address_of("y") + 3 * SIZE
    (race,) = scene.read(1, last_part)
    assert (race.lo, race.hi) == (last_part, last_part + SIZE)
    assert scene.read(3, address_of("y") + 4 * SIZE) == []


def test_send_and_receive_pipeline_is_ordered_within_its_stream() -> None:
    scene = CollectiveScene()
    scene.collective(RECEIVE, receive="x")
    scene.read(2, "x")
    scene.write(2, "y")
    assert scene.collective(SEND, send="y") == []
    (race,) = scene.write(1, "y")
    assert race.previous.collective is not None
    assert race.previous.collective.function is SEND


def test_buffer_freed_during_the_collective_is_a_use_after_free() -> None:
    scene = CollectiveScene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, stream=1)
    scene.record(1, 1)
    scene.wait(2, 1)
    scene.collective(ALL_REDUCE, "x", "x")
    (race,) = scene.free("x", AllocationKind.STREAM_ORDERED, stream=1)
    assert race.kind is RaceKind.USE_AFTER_FREE


def test_block_reused_by_a_pool_during_the_collective_races() -> None:
    scene = CollectiveScene()
    scene.alloc("x", layer=AllocationLayer.POOL, pool="torch")
    scene.collective(ALL_REDUCE, "x", "x")
    scene.free("x", layer=AllocationLayer.POOL, pool="torch")
    scene.alloc("x", layer=AllocationLayer.POOL, pool="torch")
    (race,) = scene.write(1, "x")
    assert race.kind is RaceKind.REUSE


def test_collectives_of_two_communicators_on_two_streams_race() -> None:
    scene = CollectiveScene()
    scene.call(Communicator(78, 2, rank=0, rank_count=2))
    scene.collective(ALL_REDUCE, "x", "x", stream=2)
    (race,) = scene.collective(BROADCAST, "x", "x", stream=3)
    assert race.previous.collective is not None
    assert race.current.collective is not None


def test_operations_of_one_launch_do_not_race_with_each_other() -> None:
    scene = CollectiveScene()
    operations = [operation_of(SEND, "x"), operation_of(RECEIVE, receive="x")]
    assert scene.call(Launch(2, KERNEL_NAME, pending=True), Accessed(), *operations) == []
    assert len(scene.read(1, "x")) == 1


def test_captured_collective_races_in_each_launch_of_its_graph() -> None:
    scene = CollectiveScene()
    scene.call(
        GraphNode(1, 1, NodeType.LAUNCH, KERNEL_NAME),
        operation_of(ALL_REDUCE, "x", "x", stream=0, node=1),
    )
    scene.call(GraphNode(1, 2, NodeType.LAUNCH, "k"))
    scene.call(GraphEdge(1, 1, 2))
    for _ in range(2):
        scene.call(
            GraphLaunch(2, 1, executable=1, pending=2), Accessed(1, exact=False), Accessed(2)
        )
        (race,) = scene.read(1, "x")
        assert race.previous.collective == CollectiveOperation(ALL_REDUCE, 1, 4, 0)
        assert (race.previous.graph, race.previous.node) == (1, 1)
        scene.device_sync()
    assert scene.engine.coverage.launches_exact == 6  # and two kernels outside of the graph
    assert scene.engine.coverage.collectives == 1


def test_unknown_ranks_and_functions_are_gaps() -> None:
    scene = CollectiveScene(Communicator(77, 1))
    scene.collective(ALL_GATHER, "x", "y")
    scene.collective(CollectiveFunction.UNKNOWN, "x", "y")
    assert scene.write(1, "x", "y") == []
    assert dict(scene.engine.gap_counts) == {UNKNOWN_RANKS: 1, UNKNOWN_FUNCTION: 1}


def test_all_reduce_needs_no_rank() -> None:
    scene = CollectiveScene(Communicator(77, 1))
    scene.collective(ALL_REDUCE, "x", "y")
    assert len(scene.write(1, "x")) == len(scene.write(3, "y")) == 1
    assert not scene.engine.gap_counts


def test_launch_of_a_collective_counts_as_exact() -> None:
    scene = CollectiveScene()
    scene.collective(ALL_REDUCE, "x", "y")
    coverage = scene.engine.coverage
    assert (coverage.launches, coverage.launches_exact, coverage.collectives) == (1, 1, 1)


# --- the accesses against a model of the data flow ----------------------------------------------------

RANK_COUNT = 3


def flows(
    function: CollectiveFunction, buffers: list[Buffers], size: int
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]]]]:
    """Yield each written byte with the bytes that its value comes from, as pairs of rank and address."""
    ranks, root = range(len(buffers)), buffers[0].root
    for rank, own in enumerate(buffers):
        for i in range(size):
            everywhere = [(other, buffers[other].send_address + i) for other in ranks]
            match function:
                case CollectiveFunction.ALL_REDUCE:
                    yield (rank, own.receive_address + i), everywhere
                case CollectiveFunction.REDUCE if rank == root:
                    yield (rank, own.receive_address + i), everywhere
                case CollectiveFunction.BROADCAST:
                    yield (rank, own.receive_address + i), [everywhere[root]]
                case CollectiveFunction.ALL_GATHER:
                    for other in ranks:
                        yield (rank, own.receive_address + other * size + i), [everywhere[other]]
                case CollectiveFunction.REDUCE_SCATTER:
                    parts = [
                        (other, buffers[other].send_address + rank * size + i) for other in ranks
                    ]
                    yield (rank, own.receive_address + i), parts


@given(
    st.sampled_from([ALL_REDUCE, ALL_GATHER, REDUCE_SCATTER, BROADCAST, REDUCE]),
    st.integers(1, 4),
    st.integers(0, RANK_COUNT - 1),
    st.lists(st.sampled_from(["in place", "apart"]), min_size=RANK_COUNT, max_size=RANK_COUNT),
)
def test_accessed_ranges_agree_with_the_flow_of_data(
    function: CollectiveFunction, size: int, root: int, places: list[str]
) -> None:
    buffers = []
    for rank, place in enumerate(places):
        send = receive = 1000
        if place == "apart":
            receive = 2000
        elif function is ALL_GATHER:
            send += rank * size
        elif function is REDUCE_SCATTER:
            receive += rank * size
        buffers.append(Buffers(send, receive, size, Membership(rank, RANK_COUNT), root))
    moves = [
        (written, sources)
        for written, sources in flows(function, buffers, size)
        if sources != [written]
    ]
    read = {source for _, sources in moves for source in sources}
    written = {byte for byte, _ in moves}
    for rank, rank_buffers in enumerate(buffers):
        ranges = list(rank_buffers.accessed_ranges(function))
        for mode, expected in ((READ, read), (WRITE, written)):
            accessed = {
                byte for each in ranges if each.mode & mode for byte in range(each.lo, each.hi)
            }
            assert accessed == {byte for other, byte in expected if other == rank}


def with_collectives(events: list[Event], *, as_kernels: bool) -> list[Event]:
    """Replace every third kernel of a trace by a collective, or by a kernel with the same accesses."""
    membership = Membership(rank=1, rank_count=2)
    replaced = [Event(Communicator(77, 1, rank=1, rank_count=2), seq=0)]
    kernels = {
        event.seq for event in events if isinstance(event.body, Launch) and event.seq % 3 == 0
    }
    for event in events:
        if event.seq not in kernels:
            replaced.append(event)
        elif isinstance(event.body, Launch):
            functions = [function for function in CollectiveFunction if function]
            function = functions[event.seq // 3 % len(functions)]
            addresses = event.seq % BYTE_COUNT, event.seq // 7 % BYTE_COUNT
            buffers = Buffers(*addresses, 1, membership, root=event.seq % 2)
            body = Collective(
                event.body.stream, *addresses, 1, 1, root=buffers.root, function=function,
                datatype=NcclDatatype.INT8,
            )  # fmt: skip
            accesses = [
                Access(lo, hi, AccessMode(mode))
                for lo, hi, mode in buffers.accessed_ranges(function)
                if lo < hi
            ]
            bodies = (
                [event.body, *accesses]
                if as_kernels
                else [replace(event.body, pending=True), Accessed(), body]
            )
            replaced += [replace(event, body=each) for each in bodies]
    return replaced


@settings(max_examples=100, deadline=None)
@given(steps())
def test_engine_agrees_with_brute_force_about_collectives(random_steps: list[Step]) -> None:
    events = trace(random_steps)
    strings = {"": 0}
    records = pack(
        with_collectives(events, as_kernels=False),
        lambda text: strings.setdefault(text, len(strings)),
    )
    races = Engine().feed(records, list(strings))
    expected = unordered_accesses(with_collectives(events, as_kernels=True)).pairs
    assert bool(races) == bool(expected)
    expected_calls = {(pair.earlier.event.seq, pair.later.event.seq) for pair in expected}
    assert {(race.previous.seq, race.current.seq) for race in races} <= expected_calls


# --- several ranks in one process --------------------------------------------------------------------


class TwoRanks(Scene):
    """A process with ranks 0 and 1; rank N has communicator N + 1 and stream N + 1."""

    def __init__(self, key: int = 77) -> None:
        super().__init__()
        for rank in (0, 1):
            self.call(Communicator(key, rank + 1, rank=rank, rank_count=2))

    def collective(
        self, rank: int, function: CollectiveFunction, *, root: int = 0, group: int = 1
    ) -> list[Race]:
        operation = operation_of(function, f"s{rank}", f"r{rank}", stream=rank + 1, root=root)
        return self.call(
            Launch(rank + 1, KERNEL_NAME, pending=True),
            Accessed(),
            replace(operation, communicator=rank + 1, group=group),
        )


@pytest.mark.parametrize(
    ("function", "root", "ordered_ranks"),
    [
        (ALL_REDUCE, 0, {0, 1}),
        (ALL_GATHER, 0, {0, 1}),
        (REDUCE_SCATTER, 0, {0, 1}),
        (BROADCAST, 0, {1}),
        (REDUCE, 0, {0}),
    ],
)
def test_collective_orders_the_work_of_two_ranks(
    function: CollectiveFunction, root: int, ordered_ranks: set[int]
) -> None:
    for first in (0, 1):
        for reader in (0, 1):
            scene = TwoRanks()
            scene.write(2 - reader, "x")  # the other rank writes before the collective
            scene.collective(first, function, root=root)
            scene.collective(1 - first, function, root=root)
            races = scene.read(reader + 1, "x")
            assert (races == []) is (reader in ordered_ranks)


def test_receive_orders_the_work_behind_it_after_the_sender() -> None:
    for first in (0, 1):
        scene = TwoRanks()
        scene.write(1, "x")
        scene.write(2, "y")
        for rank in (first, 1 - first):
            scene.collective(rank, RECEIVE if rank else SEND, root=1 - rank)
        assert scene.read(2, "x") == []
        assert len(scene.read(1, "y")) == 1


def test_collective_does_not_order_the_accesses_of_another_rank() -> None:
    scene = TwoRanks()
    scene.collective(0, ALL_REDUCE)
    scene.collective(1, ALL_REDUCE)
    (race,) = scene.read(3, "r0")
    assert race.previous.collective is not None


def test_collectives_of_other_communicators_order_nothing() -> None:
    scene = CollectiveScene()
    scene.write(1, "x")
    scene.collective(ALL_REDUCE, "y", "y", stream=1)
    scene.collective(ALL_REDUCE, "z", "z", stream=2)
    assert len(scene.read(2, "x")) == 1


def test_collective_kernels_of_xla_do_not_race_with_their_peers() -> None:
    scene = Scene()
    kernel = "all_reduce_1_fusion_1"
    access = Access(address_of("x"), address_of("x") + SIZE, WRITE)
    scene.kernel(1, access, name=kernel, device=0)
    assert scene.kernel(2, access, name=kernel, device=1) == []
    assert dict(scene.engine.gap_counts) == {PEER_KERNELS: 1}
    assert len(scene.kernel(3, access, name="add", device=1)) > 0


def test_collective_kernels_of_xla_race_on_one_device() -> None:
    scene = Scene()
    access = Access(address_of("x"), address_of("x") + SIZE, WRITE)
    scene.kernel(1, access, name="all_reduce")
    assert len(scene.kernel(2, access, name="all_reduce")) == 1
