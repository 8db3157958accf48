from __future__ import annotations

from collections.abc import Sequence

from core.sanitize.brute_force import unordered_accesses
from core.sanitize.random_traces import Step, steps, trace
from gpu.happens_before import races
from gpu.programs import Program, Run, programs
from hypothesis import given, settings
from hypothesis import strategies as st

from cudakit.core.sanitize.engine import Engine
from cudakit.trace.events import (
    Access,
    Accessed,
    CaptureBegin,
    CaptureEnd,
    Copy,
    Event,
    EventBody,
    EventRecord,
    Fill,
    Free,
    Gap,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    HostCall,
    Launch,
    Memop,
    StreamCreate,
    StreamWait,
)
from cudakit.trace.events import Alloc as Allocated
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    Direction,
    HostCallPhase,
    HostMemory,
    MemopType,
    Precision,
    StreamFlag,
)
from cudakit.trace.kinds import NodeType as Does
from cudakit.trace.layout import pack

READ, WRITE, ATOMIC = (
    AccessMode.READ,
    AccessMode.WRITE,
    AccessMode.READ | AccessMode.WRITE | AccessMode.ATOMIC,
)
STREAMS = (StreamCreate(1, StreamFlag.NON_BLOCKING), StreamCreate(2, StreamFlag.NON_BLOCKING))


def calls(*bodies: EventBody) -> list[Event]:
    """Return a trace of two streams; an access belongs to the call before it."""
    events: list[Event] = []
    for body in (*STREAMS, *bodies):
        seq = len({event.seq for event in events}) + (not isinstance(body, Access | Accessed))
        events.append(Event(body, seq=seq, context=1))
    return events


def pairs(*bodies: EventBody) -> list[tuple[int, int]]:
    """Return the calls of each pair, numbered from the creation of the streams."""
    found = unordered_accesses(calls(*bodies)).pairs
    return [(one.event.seq - 2, other.event.seq - 2) for one, other in found]


def are_silent(events: Sequence[Event]) -> bool:
    strings = {"": 0}
    records = pack(events, lambda text: strings.setdefault(text, len(strings)))
    return not Engine().feed(records, list(strings))


@settings(max_examples=150, deadline=None)
@given(steps())
def test_brute_force_agrees_with_happens_before(steps: list[Step]) -> None:
    events = trace(steps)

    expected = [(race.first.seq, race.second.seq) for race in races(events)]
    found = [(one.event.seq, two.event.seq) for one, two in unordered_accesses(events).pairs]
    assert sorted(found) == sorted(expected)
    assert are_silent(events) == (not found)


@settings(max_examples=40, deadline=None)
@given(programs(), st.sampled_from([None, 1]))
def test_engine_reports_a_simulated_program_only_if_it_has_unordered_work(
    program: Program, seed: int | None
) -> None:
    events = Run(program, seed=seed).trace

    assert are_silent(events) == (not unordered_accesses(events).pairs)


def test_atomics_conflict_with_all_but_atomics() -> None:
    added = (Launch(1, "add"), Access(0, 8, ATOMIC))

    assert pairs(*added, Launch(2, "add"), Access(4, 12, ATOMIC)) == []
    assert pairs(*added, Launch(2, "copy"), Access(4, 12, READ)) == [(1, 2)]


def test_rows_share_only_overlapping_bytes() -> None:
    column = (Launch(1, "column"), Access(0, 68, WRITE, stride_bytes=16, count=5))

    assert pairs(*column, Launch(2, "next"), Access(4, 72, WRITE, stride_bytes=16, count=5)) == []
    assert pairs(*column, Fill(2, 6, 8, rows=2, pitch_bytes=16)) == []
    assert pairs(*column, Fill(2, 6, 11, rows=2, pitch_bytes=16)) == [(1, 2)]


def test_captured_work_runs_at_graph_launch() -> None:
    captured = (
        CaptureBegin(1, 1),
        Fill(1, 0, 8),
        EventRecord(1, 1),
        StreamWait(2, 1),
        Fill(2, 0, 8),
        CaptureEnd(1, 1),
    )
    nodes = (
        GraphNode(1, 1, Does.FILL),
        Access(0, 8, WRITE, node=1),
        GraphNode(1, 2, Does.FILL),
        Access(0, 8, WRITE, node=2),
    )

    assert pairs(*captured, Fill(2, 0, 8)) == []
    assert pairs(*captured, *nodes, GraphLaunch(1, 1, 1)) == [(9, 9)]
    assert pairs(*captured, *nodes, GraphEdge(1, 1, 2), GraphLaunch(1, 1, 1)) == []


def test_brute_force_waits_for_synchronous_copies() -> None:
    down = Direction.DEVICE_TO_HOST
    back = Copy(1, 900, 0, 8, direction=down, host=HostMemory.PAGEABLE, asynchronous=False)
    up = Copy(1, 0, 900, 8, direction=Direction.HOST_TO_DEVICE, host=HostMemory.PAGEABLE)

    assert pairs(back, Fill(2, 0, 8)) == []
    assert pairs(up, Fill(2, 0, 8)) == [(1, 2)]
    assert pairs(up, Fill(2, 900, 8)) == []


def test_brute_force_orders_reallocation_after_free() -> None:
    ordered = AllocationKind.STREAM_ORDERED
    first = (Allocated(0, 8, ordered, 1), Fill(1, 0, 8), Free(0, 0, ordered, 1))

    assert pairs(*first, Allocated(0, 8, ordered, 2), Fill(2, 0, 8)) == []
    assert pairs(*first[:2], Fill(2, 0, 8)) == [(1, 3), (2, 3)]


def test_memory_word_orders_work_before_its_write() -> None:
    waits = (Memop(2, 900, MemopType.WAIT), Fill(2, 0, 8))

    assert pairs(Fill(1, 0, 8), Memop(1, 900, MemopType.WRITE), *waits) == []
    assert pairs(Memop(1, 900, MemopType.WRITE), Fill(1, 0, 8), *waits) == [(2, 4)]


def test_assumed_access_of_node_is_a_doubt_until_recorded() -> None:
    node = (GraphNode(1, 1, Does.LAUNCH), Access(0, 8, READ, Precision.ASSUMED, node=1))
    launch = GraphLaunch(1, 1, 1, pending=1)
    recorded, lost = (
        (launch, Access(0, 8, WRITE, node=1), Accessed(1)),
        (launch, Accessed(1, exact=False)),
    )

    assert unordered_accesses(calls(*node)).doubts == {}
    assert unordered_accesses(calls(*node, *recorded)).doubts == {}
    assert unordered_accesses(calls(*node, *recorded, *lost, launch)).doubts == {
        "an access that is not known exactly": 2
    }
    assert pairs(*node, Fill(2, 0, 8), *recorded) == [(2, 3)]


def test_changed_node_leaves_no_doubt_about_its_earlier_accesses() -> None:
    assumed = (GraphNode(1, 1, Does.LAUNCH), Access(0, 8, READ, Precision.ASSUMED, node=1))
    changed = (GraphNode(1, 1, Does.COPY), Access(8, 16, WRITE, node=1))

    assert unordered_accesses(calls(*assumed, *changed, GraphLaunch(1, 1, 1))).doubts == {}
    assert pairs(*assumed, *changed, GraphLaunch(1, 1, 1), Fill(2, 8, 8)) != []


def test_inexact_access_is_a_doubt() -> None:
    assumed = (Launch(1, "k"), Access(0, 8, READ, Precision.ASSUMED))
    rows = (Launch(1, "k"), Access(0, 8 << 20, WRITE, stride_bytes=8, count=1 << 20))
    others = (Gap("lost", 3), HostCall(1, HostCallPhase.BEGIN), Launch(7, "k"))
    found = unordered_accesses(calls(*assumed, *rows, *others))

    assert found.pairs == []
    assert found.doubts == {
        "an access that is not known exactly": 1,
        "an access with more rows than brute force has time for": 1,
        "lost": 3,
        "a function of the host in a stream": 1,
        "a stream that was not seen to be made": 1,
    }
