from __future__ import annotations

import pytest
from sanitize.trace_scene import READ, SIZE, WRITE, Scene, address_of

from cudakit.sanitize.graphs import MAX_STORED_BYTES, UNKNOWN_GRAPH
from cudakit.sanitize.races import Confidence, RaceKind
from cudakit.trace.events import Access, Accessed, Event, GraphEdge, GraphLaunch, GraphNode, Launch
from cudakit.trace.kinds import AccessMode, EventKind, NodeType, Precision


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
