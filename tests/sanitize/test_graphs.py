"""Graphs: the accesses of their nodes, their launches, and the memory of graphs that were destroyed."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sanitize.random_traces import Step, steps, trace
from sanitize.test_templates import with_graph_templates
from sanitize.trace_scene import READ, SIZE, WRITE, Scene, address_of

from cudakit.sanitize.detector import RaceDetector
from cudakit.sanitize.findings import RaceCollector
from cudakit.sanitize.graphs import MAX_STORED_BYTES, UNKNOWN_GRAPH
from cudakit.sanitize.races import Confidence, RaceKind, SanitizeResult
from cudakit.stacks import Frame
from cudakit.trace.events import (
    Access,
    Accessed,
    Event,
    EventBody,
    GraphDestroy,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    Launch,
    StreamCreate,
    StreamSync,
    Template,
)
from cudakit.trace.kinds import AccessMode, EventKind, NodeType, Precision, StreamFlag
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import Records, layout, pack


def access(
    node: int, buffer: str, mode: AccessMode, precision: Precision = Precision.EXACT
) -> Access:
    return Access(address_of(buffer), address_of(buffer) + SIZE, mode, precision, node=node)


def build(scene: Scene, *edges: tuple[int, int], graph: int = 1) -> None:
    """Build a graph: node 1 writes x, nodes 2 and 3 write y, node 4 reads x and y."""
    for node, accesses in {
        1: [access(1, "x", WRITE)],
        2: [access(2, "y", WRITE)],
        3: [access(3, "y", WRITE)],
        4: [access(4, "x", READ), access(4, "y", READ)],
    }.items():
        scene.call(GraphNode(graph, node, NodeType.COPY), *accesses)
    for before, after in edges:
        scene.call(GraphEdge(graph, before, after))


CHAIN = ((1, 2), (2, 3), (3, 4))


def test_chained_nodes_are_ordered() -> None:
    scene = Scene()
    build(scene, *CHAIN)
    assert scene.call(GraphLaunch(1, 1, executable=1)) == []


def test_nodes_without_an_edge_race_inside_the_graph() -> None:
    scene = Scene()
    build(scene, (1, 2), (1, 3), (2, 4), (3, 4))
    (race,) = scene.call(GraphLaunch(1, 1, executable=1))
    assert race.kind is RaceKind.WRITE_AFTER_WRITE
    assert (race.previous.node, race.current.node) == (2, 3)
    assert (race.current.graph, race.current.kind, race.current.stream) == (1, EventKind.COPY, 1)


def test_race_with_a_node_hides_races_with_its_ancestors() -> None:
    scene = Scene()
    for node, mode in ((1, READ), (2, READ), (3, WRITE)):
        scene.call(GraphNode(1, node, NodeType.COPY), access(node, "x", mode))
    scene.call(GraphEdge(1, 1, 2))
    (race,) = scene.call(GraphLaunch(1, 1, executable=1))
    assert (race.previous.node, race.current.node) == (2, 3)


def test_edges_may_point_to_lower_node_numbers() -> None:
    scene = Scene()
    build(scene, (3, 2), (2, 1), (1, 4))
    assert scene.call(GraphLaunch(1, 1, executable=1)) == []


def test_graph_launch_is_ordered_within_its_stream() -> None:
    scene = Scene()
    build(scene, *CHAIN)
    scene.write(1, "x", "y")
    assert scene.call(GraphLaunch(1, 1, executable=1)) == []
    assert scene.write(1, "x", "y") == []


def test_graph_launch_races_with_another_stream() -> None:
    scene = Scene()
    build(scene, *CHAIN)
    scene.write(2, "x")
    (race,) = scene.call(GraphLaunch(1, 1, executable=1))
    assert (race.previous.stream, race.current.node) == (2, 1)
    (race,) = scene.read(3, "y")
    assert (race.previous.node, race.previous.graph) == (3, 1)


def test_event_after_graph_launch_covers_all_nodes() -> None:
    scene = Scene()
    build(scene, (1, 4), (2, 3))
    assert len(scene.call(GraphLaunch(1, 1, executable=1))) == 1  # nodes 3 and 4 race
    scene.record(1, 1)
    scene.wait(2, 1)
    assert scene.write(2, "x", "y") == []


def test_launches_of_one_executable_are_ordered_and_of_two_are_not() -> None:
    scene = Scene()
    build(scene, *CHAIN)
    assert scene.call(GraphLaunch(1, 1, executable=1)) == []
    assert scene.call(GraphLaunch(2, 1, executable=1)) == []
    assert scene.call(GraphLaunch(3, 1, executable=2)) != []


def test_accesses_of_nodes_are_recorded_with_each_launch() -> None:
    scene = Scene()
    scene.call(GraphNode(1, 1, NodeType.LAUNCH, "first"))
    scene.call(GraphNode(1, 2, NodeType.COPY), access(2, "x", READ))
    scene.call(GraphNode(1, 3, NodeType.LAUNCH, "last"))
    scene.call(GraphEdge(1, 1, 2))
    accesses = [access(1, "x", WRITE), access(3, "x", WRITE)]
    (race,) = scene.call(GraphLaunch(1, 1, executable=1), *accesses)
    # Node 3 waits for no node: it races with the reader, which implies the race with the writer.
    assert {race.current.node, race.previous.node} <= {1, 2, 3}
    assert "last" in (race.current.name, race.previous.name)
    scene.call(GraphEdge(1, 2, 3))
    assert scene.call(GraphLaunch(1, 1, executable=1), *accesses) == []


def test_recorded_accesses_of_node_replace_assumed_ones() -> None:
    scene = Scene()
    for node in (1, 2):
        assumed = access(node, "x", READ | WRITE, Precision.ASSUMED)
        scene.call(GraphNode(1, node, NodeType.LAUNCH, "k"), assumed)
    scene.copy(2, "x", "z")
    late_bodies = (access(1, "y", WRITE), Accessed(1), Accessed(2, exact=False))
    (race,) = scene.call(GraphLaunch(1, 1, executable=1, pending=2), *late_bodies)
    assert (race.current.node, race.confidence) == (2, Confidence.LIKELY)
    (race,) = scene.read(3, "y")
    assert (race.previous.node, race.confidence) == (1, Confidence.CERTAIN)
    coverage = scene.engine.coverage
    assert (coverage.launches, coverage.launches_exact, coverage.launches_assumed) == (1, 2, 1)


def test_accesses_of_earlier_launch_are_not_attributed_to_a_node() -> None:
    scene = Scene()
    scene.call(
        GraphNode(1, 1, NodeType.LAUNCH, "k"), access(1, "x", READ | WRITE, Precision.ASSUMED)
    )
    launch, graph_launch = Launch(2, "k", pending=True), GraphLaunch(1, 1, 1, pending=1)
    scene.feed(
        [
            *(Event(body, seq=50, context=1) for body in (launch, Accessed())),
            *(Event(body, seq=51, context=1) for body in (graph_launch, Accessed(1))),
        ]
    )
    assert (scene.engine.coverage.launches_exact, scene.engine.coverage.launches_assumed) == (2, 0)


def test_accesses_of_one_graph_launch_do_not_apply_to_another() -> None:
    scene = Scene()
    scene.call(
        GraphNode(1, 1, NodeType.LAUNCH, "k"), access(1, "x", READ | WRITE, Precision.ASSUMED)
    )
    scene.copy(2, "x", "z")
    assert scene.call(GraphLaunch(1, 1, executable=1, pending=1), Accessed(1)) == []
    assert len(scene.call(GraphLaunch(1, 1, executable=1))) == 1
    assert scene.engine.coverage.launches_exact == scene.engine.coverage.launches_assumed == 1


def test_node_with_lost_accesses_is_not_exact() -> None:
    scene = Scene()
    scene.call(GraphNode(1, 1, NodeType.LAUNCH, "k"))
    scene.call(GraphLaunch(1, 1, 1, pending=1), access(1, "x", WRITE), Accessed(1, exact=False))
    assert (scene.engine.coverage.launches_exact, scene.engine.coverage.launches_assumed) == (0, 1)


def test_accesses_of_another_call_are_not_attributed_to_the_launch() -> None:
    scene = Scene()
    scene.call(GraphNode(1, 1, NodeType.LAUNCH, "k"), access(1, "x", WRITE, Precision.ASSUMED))
    scene.feed(
        [Event(GraphLaunch(1, 1, 1), seq=50, context=1), Event(Accessed(1), seq=51, context=1)]
    )
    assert (scene.engine.coverage.launches_exact, scene.engine.coverage.launches_assumed) == (0, 1)


def test_accesses_of_nodes_may_span_batches() -> None:
    scene = Scene()
    for node in (1, 2):
        scene.call(GraphNode(1, node, NodeType.LAUNCH, "k"))
    bodies = [GraphLaunch(1, 1, 1, pending=2)]
    for node in (1, 2):
        bodies += [*[access(node, "x", WRITE)] * 9000, Accessed(node)]
    (race,) = scene.call(*bodies)
    assert (race.previous.node, race.current.node) == (1, 2)
    assert scene.engine.coverage.launches_exact == 2


def test_pointer_arguments_of_graph_kernels_are_checked() -> None:
    scene = Scene()
    scene.call(
        GraphNode(1, 1, NodeType.LAUNCH, "k"), access(1, "x", READ | WRITE, Precision.ASSUMED)
    )
    scene.copy(2, "x", "y")
    (race,) = scene.call(GraphLaunch(1, 1, executable=1))
    assert race.confidence is Confidence.LIKELY


def test_use_of_graph_memory_unordered_with_its_free_node_races() -> None:
    scene = Scene()
    for node, work in ((1, NodeType.ALLOC), (2, NodeType.LAUNCH), (3, NodeType.FREE)):
        scene.call(GraphNode(1, node, work), access(node, "x", WRITE))
    scene.call(GraphEdge(1, 1, 2))
    scene.call(GraphEdge(1, 1, 3))
    (race,) = scene.call(GraphLaunch(1, 1, executable=1))
    assert race.kind is RaceKind.USE_AFTER_FREE


def test_launch_of_unknown_graph_is_counted_as_gap() -> None:
    scene = Scene()
    scene.call(GraphLaunch(1, 9, executable=1))
    assert scene.engine.coverage.graph_launches == 1
    assert scene.engine.gap_counts == {UNKNOWN_GRAPH: 1}


def test_graph_with_a_cycle_is_tolerated() -> None:
    scene = Scene()
    build(scene, (1, 2), (2, 1))
    scene.call(GraphLaunch(1, 1, executable=1))


def test_changed_node_makes_its_new_accesses_in_later_launches() -> None:
    scene = Scene()
    scene.call(GraphNode(1, 1, NodeType.COPY), access(1, "x", WRITE))
    scene.call(GraphNode(1, 2, NodeType.COPY), access(2, "y", WRITE))
    scene.call(GraphEdge(1, 1, 2))
    assert scene.call(GraphLaunch(1, 1, executable=1)) == []
    scene.call(GraphNode(1, 2, NodeType.COPY), access(2, "x", WRITE))
    assert scene.call(GraphLaunch(1, 1, executable=1)) == []
    (race,) = scene.call(
        Launch(2, "k"), Access(address_of("x"), address_of("x") + SIZE, READ, Precision.EXACT)
    )
    assert (race.previous.graph, race.previous.node) == (1, 2)


def test_added_edge_orders_nodes_of_later_launches() -> None:
    scene = Scene()
    scene.call(GraphNode(1, 1, NodeType.COPY), access(1, "x", WRITE))
    scene.call(GraphNode(1, 2, NodeType.COPY), access(2, "x", WRITE))
    scene.call(GraphEdge(1, 1, 2))
    assert scene.call(GraphLaunch(1, 1, executable=1)) == []
    scene.call(GraphNode(1, 3, NodeType.COPY), access(3, "x", READ))
    (race,) = scene.call(GraphLaunch(1, 1, executable=1))
    assert (race.previous.node, race.current.node) == (2, 3)
    scene.call(GraphEdge(1, 2, 3))
    assert scene.call(GraphLaunch(1, 1, executable=1)) == []


def test_equal_launches_keep_their_own_call_and_stream() -> None:
    scene = Scene()
    build(scene, *CHAIN)
    for stream in (1, 2, 3):
        scene.call(GraphLaunch(stream, 1, executable=1))
    launch = scene.seq
    (race,) = scene.write(4, "y")
    assert (race.previous.seq, race.previous.stream, race.previous.node) == (launch, 3, 4)


def test_call_without_site_of_node_has_site_of_its_launch() -> None:
    scene = Scene()
    scene.call(GraphNode(1, 1, NodeType.COPY), access(1, "x", WRITE), site=0, program_call=7)
    sites = []
    for stream in (1, 2):
        scene.call(GraphLaunch(stream, 1, executable=stream), program_call=8)
        sites.append(scene.seq)
    (race,) = scene.call(GraphLaunch(3, 1, executable=3), program_call=9)
    assert [race.previous.site, race.current.site] == [sites[1], scene.seq]
    assert (race.previous.program_call, race.previous.capturing_call) == (8, 7)
    assert (race.current.program_call, race.current.capturing_call) == (9, 7)


@pytest.mark.parametrize("native", [False, True])
def test_accesses_of_equal_launches_are_stored_once(native: bool) -> None:
    scene = Scene(native=native)
    build(scene, *CHAIN)
    cache = scene.engine._graphs._cache
    scene.call(GraphLaunch(1, 1, executable=1))
    stored_bytes = cache.stored_bytes
    for _ in range(50):
        scene.call(GraphLaunch(1, 1, executable=1))
    assert cache.stored_bytes == stored_bytes > 0


def test_stored_accesses_of_changed_graph_are_removed() -> None:
    scene = Scene()
    cache = scene.engine._graphs._cache
    build(scene, *CHAIN, graph=2)
    scene.call(GraphLaunch(1, 2, executable=2))
    bytes_of_other_graph = cache.stored_bytes
    stored_bytes = set()
    for _ in range(20):
        build(scene, *CHAIN)
        scene.call(GraphLaunch(1, 1, executable=1))
        scene.call(GraphLaunch(1, 1, executable=1), access(1, "z", READ))
        stored_bytes.add(cache.stored_bytes)
    assert len(stored_bytes) == 1
    scene.call(GraphLaunch(1, 2, executable=2))
    assert {cache.stored_bytes} == stored_bytes
    assert cache.stored_bytes > bytes_of_other_graph


def test_stored_accesses_of_different_launches_are_bounded() -> None:
    scene = Scene()
    scene.call(GraphNode(1, 1, NodeType.LAUNCH, "k"))
    cache = scene.engine._graphs._cache
    for number in range(40):
        accesses = [
            Access(index * 8, index * 8 + 4 + number % 4, READ, node=1)
            for index in range(4000 + number)
        ]
        assert scene.call(GraphLaunch(1, 1, executable=1), *accesses) == []
        assert 0 < cache.stored_bytes <= MAX_STORED_BYTES


# --- The record of a destroyed graph frees its memory in the analysis, and changes no finding ------


def detected(batches: Sequence[Records], *, strict_threads: bool = False) -> SanitizeResult:
    """Return the result of a trace that is analyzed in batches; the kernels have no names."""
    detector = RaceDetector(strict_threads=strict_threads, report_possible=True)
    report, stacks = (
        RaceCollector(),
        [(), *((Frame("step", "train.py", n),) for n in range(1, 200))],
    )
    for records in batches:
        detector.feed(Batch(1, records, ["", "k"], stacks), report)
    detector.finish(report)
    return detector.result(report)


def packed(events: Sequence[Event]) -> Records:
    return pack(events, ["", "k"].index)


# --- findings -----------------------------------------------------------------------------------------


def graphs_of(call: Sequence[Event]) -> set[int]:
    """Return the graphs that a call adds to or launches."""
    return {
        event.body.graph
        for event in call
        if isinstance(event.body, GraphNode | GraphEdge | GraphLaunch)
    }


def with_destroyed_graphs(events: Sequence[Event], delays: Sequence[int]) -> list[list[Event]]:
    """Return the calls of a trace. Each graph is destroyed a number of calls after its last launch."""
    calls = [list(call) for _, call in groupby(events, key=lambda event: event.seq)]
    last_use = {graph: index for index, call in enumerate(calls) for graph in graphs_of(call)}
    for graph, index in sorted(last_use.items(), key=lambda item: -item[1]):
        destroyed = Event(GraphDestroy(graph, executable=graph), context=1)
        calls.insert(index + 1 + delays[graph % len(delays)], [destroyed])
    return [
        [replace(event, seq=number) for event in call] for number, call in enumerate(calls, start=1)
    ]


def in_arrival_order(calls: Sequence[list[Event]], delays: Sequence[int]) -> list[Event]:
    """Return events in the order in which they arrive: the accesses of graph launches some calls later."""
    arrivals: list[tuple[int, Event]] = []
    for index, (first, *others) in enumerate(calls):
        accessed_count = sum(isinstance(event.body, Accessed) for event in others)
        is_late = isinstance(first.body, GraphLaunch) and accessed_count > 0
        if is_late:
            assert isinstance(first.body, GraphLaunch)
            first = replace(first, body=replace(first.body, pending=accessed_count))
        arrivals.append((index, first))
        arrival = index + is_late * delays[index % len(delays)]
        arrivals += [(arrival, event) for event in others]
    arrivals.sort(key=lambda item: item[0])
    return [event for _, event in arrivals]


numbers = st.lists(st.integers(0, 9), min_size=1, max_size=5)
STEP_NAMES = (
    "kernel",
    "copy",
    "record",
    "wait",
    "sync stream",
    "graph",
    "replay",
    "repeat",
    "change node",
)


@pytest.mark.parametrize("strict_threads", [False, True])
@settings(max_examples=100, deadline=None)
@given(
    steps=steps(STEP_NAMES),
    destroyed_after=numbers,
    accessed_after=numbers,
    threads=numbers,
    batch_sizes=st.lists(st.integers(1, 12), min_size=1, max_size=5),
    uses_templates=st.booleans(),
)
def test_findings_are_equal_with_and_without_records_of_destroyed_graphs(
    steps: list[Step],
    destroyed_after: list[int],
    accessed_after: list[int],
    threads: list[int],
    batch_sizes: list[int],
    uses_templates: bool,
    strict_threads: bool,
) -> None:
    events = trace(steps)
    if uses_templates:
        events = with_graph_templates(events)
    calls = with_destroyed_graphs(events, destroyed_after)
    records = packed(in_arrival_order(calls, accessed_after))
    records["thread"] = np.array(threads)[records["seq"] % len(threads)]
    batches = np.split(records, np.cumsum(batch_sizes * len(records))[: len(records)])
    without_destroyed = [batch[batch["kind"] != EventKind.GRAPH_DESTROY] for batch in batches]

    result = detected(batches, strict_threads=strict_threads)

    assert result == detected(without_destroyed, strict_threads=strict_threads)


def test_race_with_launch_of_a_graph_that_is_destroyed_while_it_runs_is_found() -> None:
    write = [Access(4096, 8192, AccessMode.WRITE, node=1)]
    calls: list[list[EventBody]] = [
        [StreamCreate(1, StreamFlag.NON_BLOCKING)],
        [StreamCreate(2, StreamFlag.NON_BLOCKING)],
        [GraphNode(1, 1, NodeType.COPY), *write],
        [GraphNode(2, 1, NodeType.COPY), *write],
        [GraphLaunch(1, 1, executable=1)],
        [GraphDestroy(1, executable=1)],
        [GraphLaunch(2, 2, executable=2)],
    ]
    result = detected([packed(events_of(calls))])
    (race,) = result.races
    assert (race.previous.graph, race.current.graph) == (1, 2)


def test_launch_of_destroyed_graph_is_a_gap() -> None:
    calls: list[list[EventBody]] = [
        [StreamCreate(1, StreamFlag.NON_BLOCKING)],
        [GraphNode(1, 1, NodeType.COPY), Access(4096, 8192, AccessMode.WRITE, node=1)],
        [GraphDestroy(1, executable=1)],
        [GraphLaunch(1, 1, executable=1)],
    ]
    batches = [packed([event]) for event in events_of(calls)]
    assert detected(batches).gaps == {UNKNOWN_GRAPH: 1}


# --- memory -------------------------------------------------------------------------------------------


def events_of(calls: Sequence[Sequence[EventBody]]) -> list[Event]:
    return [
        Event(body, seq=seq, context=1, thread=1, site=1)
        for seq, bodies in enumerate(calls, start=1)
        for body in bodies
    ]


def one_graph(template_id: int) -> list[list[EventBody]]:
    """Return the calls of a graph of four kernels that is instantiated, launched twice and destroyed.

    The first launch becomes the template 1 if ``template_id`` is 0, otherwise both launches use a template.
    """
    calls: list[list[EventBody]] = []
    accesses: list[EventBody] = []
    for node in range(1, 5):
        lo, pointer = 4096 * node, Precision.ASSUMED
        calls.append(
            [
                GraphNode(1, node, NodeType.LAUNCH, "k"),
                Access(lo, lo + 4096, AccessMode.WRITE, pointer, node=node),
            ]
        )
        accesses += [Access(lo + 8, lo + 64, AccessMode.WRITE, node=node), Accessed(node)]
    calls += [[GraphEdge(1, node, node + 1)] for node in range(1, 4)]
    first_launch = GraphLaunch(1, 1, executable=1, template_id=template_id)
    calls.append([first_launch] if template_id else [first_launch, *accesses, Template(1)])
    calls.append([GraphLaunch(1, 1, executable=1, template_id=1)])
    calls.append([StreamSync(1)])
    calls.append([GraphDestroy(1, executable=1)])
    return calls


def many_graphs(count: int) -> Iterator[Records]:
    """Yield the records of graphs that are used one after the other, some graphs at a time."""
    graphs_per_batch = 50
    yield packed(events_of([[StreamCreate(1, StreamFlag.NON_BLOCKING)]]))
    for first_graph in range(0, count, graphs_per_batch):
        parts = []
        for graph in range(first_graph, first_graph + graphs_per_batch):
            records = FIRST_GRAPH.copy() if graph == 0 else NEXT_GRAPH.copy()
            records["seq"] += np.uint64(1 + 32 * graph)
            for kind, fields in GRAPH_FIELDS.items():
                is_kind = records["kind"] == kind
                for field in fields:
                    records.view(layout(kind))[field][is_kind] = graph + 1
            parts.append(records)
        yield np.concatenate(parts)


FIRST_GRAPH, NEXT_GRAPH = packed(events_of(one_graph(0))), packed(events_of(one_graph(1)))
GRAPH_FIELDS = {
    EventKind.GRAPH_NODE: ("graph",),
    EventKind.GRAPH_EDGE: ("graph",),
    EventKind.GRAPH_LAUNCH: ("graph", "executable"),
    EventKind.GRAPH_DESTROY: ("graph", "executable"),
}


def test_analysis_of_10000_destroyed_graphs_is_as_large_as_of_100() -> None:
    detector, report = RaceDetector(), RaceCollector()
    block_counts: list[int] = []  # numbers of memory blocks that Python has allocated
    for records in many_graphs(10_000):
        detector.feed(Batch(1, records, ["", "k"], [(), ()]), report)
        if detector.result(report).coverage.graph_launches % 2000 == 200:
            gc.collect()
            block_counts.append(sys.getallocatedblocks())
    coverage = detector.result(report).coverage
    assert (coverage.graph_launches, coverage.launches_from_template) == (20_000, 19_999)
    assert len(block_counts) == 10
    # Without the records, each graph keeps about 40 blocks.
    assert block_counts[-1] - block_counts[0] < 1000
