from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from gpu.happens_before import races
from gpu.programs import Program, Run, programs
from hypothesis import given, settings
from hypothesis import strategies as st
from sanitize.brute_force import unordered_accesses
from sanitize.random_traces import Step, steps, trace

from cudakit.sanitize.engine import Engine
from cudakit.trace.events import (
    Access,
    Accessed,
    Alloc,
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
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    Direction,
    HostCallPhase,
    HostMemory,
    MemopType,
    NodeType,
    Precision,
    StreamFlag,
)
from cudakit.trace.trace_file import pack

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
    pairs_found = unordered_accesses(calls(*bodies)).pairs
    return [(earlier.event.seq - 2, later.event.seq - 2) for earlier, later in pairs_found]


def are_silent(events: Sequence[Event]) -> bool:
    strings = {"": 0}
    records = pack(events, lambda text: strings.setdefault(text, len(strings)))
    return not Engine().feed(records, list(strings))


def with_host_functions(
    trace: Sequence[Event], host_functions: Sequence[tuple[int, int, int]]
) -> list[Event]:
    """Return the trace of a program that also enqueues host functions, which run some calls later.

    Each host function has three numbers: one that selects the stream, one that selects the call after which
    the function is enqueued, and the number of calls until it runs.
    """
    calls = [list(call) for _, call in groupby(trace, key=lambda event: event.seq)]
    streams = [event.body.stream for event in trace if isinstance(event.body, StreamCreate)]
    first = max(i for i, call in enumerate(calls) if isinstance(call[0].body, StreamCreate))
    inserted: defaultdict[int, list[list[EventBody]]] = defaultdict(list)
    for event, (stream_number, call_number, delay) in enumerate(host_functions, 1 << 16):
        stream = streams[stream_number % len(streams)]
        enqueued = first + call_number % (len(calls) - first)
        run = (
            HostCall(stream, HostCallPhase.BEGIN, event),
            HostCall(stream, HostCallPhase.END, event),
        )
        inserted[enqueued].append([EventRecord(event, stream)])
        inserted[min(enqueued + delay, len(calls) - 1)].append(list(run))
    all_calls: list[list[Event]] = []
    for i, call in enumerate(calls):
        all_calls.append(call)
        all_calls += [[replace(call[0], body=body) for body in bodies] for bodies in inserted[i]]
    return [replace(event, seq=seq) for seq, call in enumerate(all_calls, 1) for event in call]


@settings(max_examples=150, deadline=None)
@given(steps())
def test_brute_force_agrees_with_happens_before(steps: list[Step]) -> None:
    events = trace(steps)

    expected = [(race.first.seq, race.second.seq) for race in races(events)]
    pairs_found = [
        (earlier.event.seq, later.event.seq) for earlier, later in unordered_accesses(events).pairs
    ]
    assert sorted(pairs_found) == sorted(expected)
    assert are_silent(events) == (not pairs_found)


@settings(max_examples=300, deadline=None)
@given(steps(("kernel", "kernel", "host function", "run function"), max_size=10))
def test_engine_orders_host_functions_like_brute_force(steps: list[Step]) -> None:
    """Short traces have few races, so that one wrong order changes whether there is any."""
    events = trace(steps)

    assert are_silent(events) == (not unordered_accesses(events).pairs)


@settings(max_examples=40, deadline=None)
@given(programs(), st.sampled_from([None, 1]))
def test_engine_reports_a_simulated_program_only_if_it_has_unordered_work(
    program: Program, seed: int | None
) -> None:
    events = Run(program, seed=seed).trace

    assert are_silent(events) == (not unordered_accesses(events).pairs)


@settings(max_examples=60, deadline=None)
@given(programs(), st.lists(st.tuples(*[st.integers(0, 59)] * 3), min_size=1, max_size=4))
def test_engine_agrees_on_a_simulated_program_with_host_functions(
    program: Program, host_functions: list[tuple[int, int, int]]
) -> None:
    events = with_host_functions(Run(program).trace, host_functions)

    assert are_silent(events) == (not unordered_accesses(events).pairs)


def test_atomics_conflict_with_all_but_atomics() -> None:
    atomic_launch = (Launch(1, "add"), Access(0, 8, ATOMIC))

    assert pairs(*atomic_launch, Launch(2, "add"), Access(4, 12, ATOMIC)) == []
    assert pairs(*atomic_launch, Launch(2, "copy"), Access(4, 12, READ)) == [(1, 2)]


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
        GraphNode(1, 1, NodeType.FILL),
        Access(0, 8, WRITE, node=1),
        GraphNode(1, 2, NodeType.FILL),
        Access(0, 8, WRITE, node=2),
    )

    assert pairs(*captured, Fill(2, 0, 8)) == []
    assert pairs(*captured, *nodes, GraphLaunch(1, 1, 1)) == [(9, 9)]
    assert pairs(*captured, *nodes, GraphEdge(1, 1, 2), GraphLaunch(1, 1, 1)) == []


def test_brute_force_waits_for_synchronous_copies() -> None:
    to_host = Direction.DEVICE_TO_HOST
    copy_to_host = Copy(
        1, 900, 0, 8, direction=to_host, host=HostMemory.PAGEABLE, asynchronous=False
    )
    copy_to_device = Copy(
        1, 0, 900, 8, direction=Direction.HOST_TO_DEVICE, host=HostMemory.PAGEABLE
    )

    assert pairs(copy_to_host, Fill(2, 0, 8)) == []
    assert pairs(copy_to_device, Fill(2, 0, 8)) == [(1, 2)]
    assert pairs(copy_to_device, Fill(2, 900, 8)) == []


def test_brute_force_orders_reallocation_after_free() -> None:
    ordered = AllocationKind.STREAM_ORDERED
    first_use = (Alloc(0, 8, ordered, 1), Fill(1, 0, 8), Free(0, 0, ordered, 1))

    assert pairs(*first_use, Alloc(0, 8, ordered, 2), Fill(2, 0, 8)) == []
    assert pairs(*first_use[:2], Fill(2, 0, 8)) == [(1, 3), (2, 3)]


def test_memory_word_orders_work_before_its_write() -> None:
    waits = (Memop(2, 900, MemopType.WAIT), Fill(2, 0, 8))

    assert pairs(Fill(1, 0, 8), Memop(1, 900, MemopType.WRITE), *waits) == []
    assert pairs(Memop(1, 900, MemopType.WRITE), Fill(1, 0, 8), *waits) == [(2, 4)]


def test_assumed_access_of_node_is_a_doubt_until_recorded() -> None:
    node = (GraphNode(1, 1, NodeType.LAUNCH), Access(0, 8, READ, Precision.ASSUMED, node=1))
    launch = GraphLaunch(1, 1, 1, pending=1)
    recorded, lost = (
        (launch, Access(0, 8, WRITE, node=1), Accessed(1)),
        (launch, Accessed(1, exact=False)),
    )

    assert unordered_accesses(calls(*node)).uncertainties == {}
    assert unordered_accesses(calls(*node, *recorded)).uncertainties == {}
    assert unordered_accesses(calls(*node, *recorded, *lost, launch)).uncertainties == {
        "an access that is not known exactly": 2
    }
    assert pairs(*node, Fill(2, 0, 8), *recorded) == [(2, 3)]


def test_changed_node_leaves_no_doubt_about_its_earlier_accesses() -> None:
    assumed = (GraphNode(1, 1, NodeType.LAUNCH), Access(0, 8, READ, Precision.ASSUMED, node=1))
    changed = (GraphNode(1, 1, NodeType.COPY), Access(8, 16, WRITE, node=1))

    assert unordered_accesses(calls(*assumed, *changed, GraphLaunch(1, 1, 1))).uncertainties == {}
    assert pairs(*assumed, *changed, GraphLaunch(1, 1, 1), Fill(2, 8, 8)) != []


def test_inexact_access_is_a_doubt() -> None:
    assumed = (Launch(1, "k"), Access(0, 8, READ, Precision.ASSUMED))
    rows = (Launch(1, "k"), Access(0, 8 << 20, WRITE, stride_bytes=8, count=1 << 20))
    skipped_events = (Gap("lost", 3), HostCall(1, HostCallPhase.BEGIN), Launch(7, "k"))
    pairs_found = unordered_accesses(calls(*assumed, *rows, *skipped_events))

    assert pairs_found.pairs == []
    assert pairs_found.uncertainties == {
        "an access that is not known exactly": 1,
        "an access with more rows than brute force has time for": 1,
        "lost": 3,
        "a function of the host in a stream": 1,
        "a stream that was not seen to be made": 1,
    }
