"""The shadow memory in C finds the same races as the shadow memory in Python, also in damaged traces."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from gpu.programs import Program, Run, programs
from hypothesis import given, settings
from hypothesis import strategies as st
from sanitize.random_traces import Step, steps, trace

from cudakit.sanitize import shadow
from cudakit.sanitize.conflicts import (
    Conflict,
    ConflictChecker,
    GraphAccesses,
    NodeAccesses,
    NodeOrder,
)
from cudakit.sanitize.engine import Engine
from cudakit.sanitize.ordering import Call, MemoryAccess, Release
from cudakit.sanitize.races import Coverage, Race
from cudakit.sanitize.records import access_fields, access_record, rows_by_node
from cudakit.sanitize.shadow import Shadow, new_shadow
from cudakit.trace.events import (
    Access,
    Alloc,
    Copy,
    Event,
    EventBody,
    EventRecord,
    Fill,
    Free,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    Launch,
    StreamCreate,
    StreamSync,
    StreamWait,
)
from cudakit.trace.kinds import (
    AccessMode,
    AllocationKind,
    EventKind,
    NodeType,
    Precision,
    StreamFlag,
)
from cudakit.trace.trace_file import ADDRESS_END, RECORD_BYTES, layout, pack

native = pytest.importorskip("cudakit.sanitize._shadow_memory")

READ, WRITE, ATOMIC = AccessMode.READ, AccessMode.WRITE, AccessMode.ATOMIC
MODES = (READ, READ, WRITE, READ | WRITE, ATOMIC, READ | WRITE | ATOMIC)
PRECISIONS = (*[Precision.EXACT] * 6, *Precision)
BASE = 1 << 40
STREAM_COUNT = 3

numbers = st.integers(0, (1 << 16) - 1)


def analyzed(
    events: Sequence[Event], *, is_native: bool, batch_size: int = 0, **options: Any
) -> tuple[list[Race], Coverage, int, int]:
    """Return the races of a trace, its coverage, and the numbers of stored ranges and pointers."""
    engine, strings = Engine(native=is_native, **options), {"": 0}
    records = pack(events, lambda text: strings.setdefault(text, len(strings)))
    races: list[Race] = []
    for begin in range(0, len(records), batch_size or max(len(records), 1)):
        races += engine.feed(records[begin : begin + (batch_size or len(records))], list(strings))
    shadow = engine._shadow.stored
    return races, engine.coverage, shadow.range_state_count, shadow.pointer_state_count


def assert_equal_results(events: Sequence[Event], **options: Any) -> None:
    expected = analyzed(events, is_native=False, **options)
    assert analyzed(events, is_native=True, **options) == expected


@st.composite
def accesses(draw: st.DrawFn) -> Access:
    """Return an access of any precision to a few bytes, or to many rows."""
    mode, precision = draw(st.sampled_from(MODES)), draw(st.sampled_from(PRECISIONS))
    lo = BASE + draw(st.integers(0, 40))
    if draw(st.integers(0, 3)):
        return Access(lo, lo + draw(st.integers(0, 24)), mode, precision)
    stride, count = draw(st.sampled_from([-8, 3, 4, 6, 8])), draw(st.sampled_from([2, 5, 17, 24]))
    width = draw(st.integers(0, 6))
    hi = lo + (count - 1) * abs(stride) + width
    return Access(lo, hi, mode, precision, stride_bytes=stride, count=count)


@st.composite
def calls(draw: st.DrawFn) -> list[EventBody]:
    """Return the events of one call."""
    stream, event = draw(st.integers(1, STREAM_COUNT)), draw(st.integers(1, 2))
    address, size = BASE + draw(st.integers(0, 32)), draw(st.integers(0, 48))
    kind = draw(st.sampled_from([AllocationKind.SYNC, *[AllocationKind.STREAM_ORDERED] * 2]))
    match draw(
        st.sampled_from([*["launch"] * 6, "fill", "record", "wait", "alloc", "free", "sync"])
    ):
        case "launch":
            name = draw(st.sampled_from(["first", "second"]))
            return [Launch(stream, name), *draw(st.lists(accesses(), max_size=6))]
        case "fill":
            rows, pitch = draw(st.sampled_from([(1, 0), (3, 5), (20, 4), (20, 8)]))
            return [Fill(stream, address, size % 6, rows=rows, pitch_bytes=pitch)]
        case "record":
            return [EventRecord(event, stream)]
        case "wait":
            return [StreamWait(stream, event)]
        case "alloc":
            return [Alloc(address, size, kind, stream)]
        case "free":
            return [Free(address, size, kind, stream)]
    return [StreamSync(stream)]


def events_of(bodies_of_calls: list[list[EventBody]]) -> list[Event]:
    created: list[list[EventBody]] = [
        [StreamCreate(stream, StreamFlag.NON_BLOCKING)] for stream in range(1, STREAM_COUNT + 1)
    ]
    return [
        Event(body, seq=seq, context=1, thread=1, site=seq % 3, program_call=seq % 2)
        for seq, bodies in enumerate([*created, *bodies_of_calls], 1)
        for body in bodies
    ]


@settings(max_examples=300, deadline=None)
@given(
    st.lists(calls(), max_size=30),
    st.booleans(),
    st.sampled_from([(0, 1024), (3, 0), (9, 4)]),
    st.sampled_from([2, 3, 8, 1 << 17]),
)
def test_random_accesses_of_all_kinds_give_equal_results(
    bodies: list[list[EventBody]],
    report_possible: bool,
    batches: tuple[int, int],
    max_range_states: int,
) -> None:
    batch_size, prune_above = batches
    assert_equal_results(
        events_of(bodies),
        batch_size=batch_size,
        report_possible=report_possible,
        prune_above=prune_above,
        max_range_states=max_range_states,
    )


@settings(max_examples=100, deadline=None)
@given(steps(), st.booleans())
def test_random_traces_with_graphs_give_equal_results(
    steps: list[Step], same_call_site: bool
) -> None:
    assert_equal_results(trace(steps, same_call_site=same_call_site), batch_size=7, prune_above=0)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 40),
    st.lists(st.tuples(numbers, numbers), max_size=60),
    st.lists(st.tuples(numbers, accesses()), max_size=60),
    st.booleans(),
)
def test_launches_of_random_graphs_give_equal_results(
    node_count: int,
    edges: list[tuple[int, int]],
    node_accesses: list[tuple[int, Access]],
    has_cycles: bool,
) -> None:
    node_numbers = [node * 7919 % 101 for node in range(1, node_count + 1)]
    bodies: list[list[EventBody]] = [
        [
            GraphNode(1, node, NodeType.COPY if index % 3 else NodeType.LAUNCH, "kernel"),
            *(
                replace(access, node=node)
                for number, access in node_accesses
                if number % node_count == index
            ),
        ]
        for index, node in enumerate(node_numbers)
    ]
    for first, second in edges:
        before, after = first % node_count, second % node_count
        if before < after or has_cycles:
            bodies.append([GraphEdge(1, node_numbers[before], node_numbers[after])])
    bodies += [[GraphLaunch(stream, 1, executable=stream // 3)] for stream in (1, 1, 2, 3, 1)]
    assert_equal_results(events_of(bodies))


@settings(max_examples=40, deadline=None)
@given(programs())
def test_simulated_programs_give_equal_results(program: Program) -> None:
    assert_equal_results(Run(program, seed=1).trace, report_possible=True)


def test_random_ranges_of_a_large_allocation_give_equal_results() -> None:
    """Fill, divide and merge many chunks of states."""
    random = np.random.default_rng(3)
    bodies: list[list[EventBody]] = [[Alloc(BASE, 1 << 16)]]
    for number in range(400):
        mode = [READ, WRITE, READ | WRITE][int(random.integers(3))]
        begins = random.integers(0, 1 << 16, 40) + BASE
        sizes = random.choice([1, 4, 64, 5000], 40)
        launched = [
            Access(int(lo), int(lo + size), mode) for lo, size in zip(begins, sizes, strict=True)
        ]
        bodies.append([Launch(1, "scatter"), *launched])
        if number % 90 == 89:
            bodies += [[Free(BASE, 1 << 15, AllocationKind.VIRTUAL)], [StreamSync(1)]]
    assert_equal_results(events_of(bodies), batch_size=500, prune_above=100, max_range_states=700)


def test_many_pointers_and_strided_ranges_keep_the_most_recent_ones() -> None:
    pointers = [
        [
            Launch(1, "kernel"),
            *(Access(BASE + 8 * i, 1 << 50, WRITE, Precision.ASSUMED) for i in part),
        ]
        for part in np.array_split(np.arange(shadow.MAX_POINTER_STATES + 50), 8)
    ]
    rows = [
        Access(lo, lo + 32 * 8, WRITE, stride_bytes=8, count=32)
        for lo in range(BASE, BASE + 512 * (shadow.MAX_STRIDED_STATES + 10), 512)
    ]
    rows = [Access(row.lo, row.hi - 4, WRITE, stride_bytes=8, count=32) for row in rows]
    bodies = [*pointers, [Launch(1, "rows"), *rows], [Fill(2, BASE, 1 << 20)]]
    assert_equal_results(events_of(bodies))


def test_races_with_more_than_256_strided_ranges_are_found() -> None:
    lows = range(BASE, BASE + 4096 * 1000, 4096)
    rows = [Access(lo, lo + 31 * 64 + 4, WRITE, stride_bytes=64, count=32) for lo in lows]
    read = Access(BASE, BASE + 31 * 64 + 4, READ, stride_bytes=64, count=32)
    events = events_of([[Launch(1, "columns"), *rows], [Launch(2, "read"), read]])
    assert_equal_results(events)
    races, *_ = analyzed(events, is_native=True)
    assert [(race.lo, race.hi) for race in races] == [(BASE, BASE + 31 * 64 + 4)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(1, STREAM_COUNT),
            st.integers(0, 5000),
            st.sampled_from([64, 100, 1000]),
            st.integers(17, 40),
            st.sampled_from([READ, WRITE]),
            st.booleans(),
        ),
        max_size=40,
    )
)
def test_strided_accesses_of_any_length_race_as_in_python(
    launches: list[tuple[int, int, int, int, AccessMode, bool]],
) -> None:
    bodies: list[list[EventBody]] = []
    for stream, offset, stride, count, mode, is_strided in launches:
        lo, hi = BASE + offset, BASE + offset + (count - 1) * stride + 8
        rows = {"stride_bytes": stride, "count": count} if is_strided else {}
        bodies.append([Launch(stream, "columns"), Access(lo, hi, mode, **rows)])
    assert_equal_results(events_of(bodies), prune_above=8)


def test_strided_states_of_complete_work_are_removed() -> None:
    engine, counts = Engine(native=True), []
    for number in range(60):
        lows = range(BASE + number * 4, BASE + number * 4 + 4096 * 500, 4096)
        rows = [Access(lo, lo + 31 * 64 + 4, WRITE, stride_bytes=64, count=32) for lo in lows]
        seq = 1000 * number
        events = [Event(body, seq=seq + 1, context=1) for body in (Launch(1, "columns"), *rows)]
        events.append(Event(StreamSync(1), seq=seq + 2, context=1))
        engine.feed(pack(events, lambda _: 0), ["columns"])
        counts.append(engine._shadow.stored.strided_state_count)
    assert max(counts[20:]) <= max(counts[:20])
    assert max(counts) < 10_000


def test_limits_of_both_implementations_are_equal() -> None:
    assert native.MAX_POINTER_STATES == shadow.MAX_POINTER_STATES
    assert native.MAX_STRIDED_STATES == shadow.MAX_STRIDED_STATES


# --- damaged traces

hostile_numbers = st.one_of(
    numbers,
    st.integers(0, (1 << 64) - 1),
    st.sampled_from([0, 1, BASE, ADDRESS_END - 1, ADDRESS_END, (1 << 63) - 1, (1 << 64) - 1]),
)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.tuples(hostile_numbers, hostile_numbers, hostile_numbers, hostile_numbers, numbers),
        max_size=40,
    )
)
def test_accesses_with_any_numbers_do_not_crash(rows: list[tuple[int, int, int, int, int]]) -> None:
    records = np.zeros(len(rows), layout(EventKind.ACCESS))
    for record, (lo, hi, stride, count, number) in zip(records, rows, strict=True):
        record["kind"] = EventKind.ACCESS
        record["lo"], record["hi"], record["count"] = lo, hi, count
        record["stride_bytes"] = np.uint64(stride).astype(np.int64)
        record["mode"], record["precision"] = number % 256, number // 256
    shadow, call = empty_shadow(), Call(1, EventKind.LAUNCH, 0, 1, 1, 0, 1, 1)
    for tick in (1, 2):
        shadow.add_all(memoryview(records.tobytes()), call, position(tick))
    shadow.prune([1, 1])
    shadow.clear(0, (1 << 64) - 1)
    assert shadow.range_state_count <= 1


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=20 * RECORD_BYTES))
def test_records_of_any_bytes_do_not_crash(content: bytes) -> None:
    content = content[: len(content) // RECORD_BYTES * RECORD_BYTES]
    call = Call(1, EventKind.LAUNCH, 0, 1, 1, 0, 1, 1)
    empty_shadow().add_all(memoryview(content), call, position(1))


def position(tick: int) -> Release:
    """Return a position on timeline 1 that is ordered after nothing."""
    return Release(1, tick, [0, 0], [])


def empty_shadow() -> Shadow:
    return new_shadow(ConflictChecker(lambda _: None), find_possible_races=True, native=True)


def test_incomplete_record_is_refused() -> None:
    call, rows = Call(1, EventKind.LAUNCH, 0, 1, 1, 0, 1, 1), b"x" * (RECORD_BYTES + 1)
    accesses = GraphAccesses(NodeOrder([1], {}), [NodeAccesses(call, 0, rows)])
    with pytest.raises(ValueError, match="size of a record"):
        empty_shadow().add_all(memoryview(rows), call, position(1))
    with pytest.raises(ValueError, match="size of a record"):
        empty_shadow().add_graph_launch(accesses, call, position(1))


def test_wrong_arguments_are_refused() -> None:
    shadow: Any = empty_shadow()
    call = Call(1, EventKind.LAUNCH, 0, 1, 1, 0, 1, 1)
    access = MemoryAccess(1 << 40, 1, call, 0, 8, READ, Precision.EXACT)
    for arguments in ((access, [0]), (None, [0]), (access, None), (access, ["tick"])):
        with pytest.raises((TypeError, OverflowError, AttributeError)):
            shadow.add(*arguments)
    with pytest.raises(ValueError, match="max_states"):
        shadow.coarsen(lambda _: None, 1)
    graph_accesses = GraphAccesses(NodeOrder([1], {}), [NodeAccesses(call, 0, b"")])
    for name in ("order", "calls", "rows", "packed_nodes"):
        wrong_accesses = copy(graph_accesses)
        setattr(wrong_accesses, name, None)
        with pytest.raises((TypeError, AttributeError)):
            shadow.add_graph_launch(wrong_accesses, call, position(1))


def test_graph_node_without_position_in_the_order_is_ordered_with_no_node() -> None:
    conflicts: list[Conflict] = []
    shadow = new_shadow(ConflictChecker(conflicts.append), native=True)
    rows = access_record(0, 8, WRITE, Precision.EXACT, 1)
    calls = [Call(1, EventKind.COPY, 0, 1, 1, 0, 1, 1, node=node) for node in (1, 2, 3)]
    order = NodeOrder([1, 2], {2: [1]})
    shadow.checker.node_order = order
    nodes = [NodeAccesses(call, call.node - 1, rows) for call in calls]
    shadow.add_graph_launch(GraphAccesses(order, nodes[:2]), calls[0], position(1))
    assert not conflicts
    nodes[2] = nodes[2]._replace(position=1 << 40)
    shadow.add_graph_launch(GraphAccesses(order, nodes[1:]), calls[0], position(2))
    assert [(c.previous_access.call.node, c.current_access.call.node) for c in conflicts] == [
        (2, 2),
        (2, 3),
    ]


class FailingChecker(ConflictChecker):
    """A checker that calls the shadow memory it serves, which is refused."""

    shadow: Shadow

    def check(self, *_: Any) -> Any:
        self.shadow.clear(0, 100)


def test_error_of_the_checker_leaves_the_shadow_memory_usable() -> None:
    checker = FailingChecker(lambda _: None)
    checker.shadow = shadow = new_shadow(checker, native=True)
    call = Call(1, EventKind.LAUNCH, 0, 1, 1, 0, 1, 1)
    shadow.add(MemoryAccess(0, 5, call, 0, 8, WRITE, Precision.EXACT), [0, 0])
    with pytest.raises(RuntimeError, match="in progress"):
        shadow.add(MemoryAccess(1, 5, call, 4, 12, WRITE, Precision.EXACT), [0, 0])

    shadow.add(MemoryAccess(0, 6, call, 8, 16, WRITE, Precision.EXACT), [9, 9])
    assert shadow.range_state_count == 2


def test_compiled_shadow_memory_is_used_if_installed() -> None:
    shadow = new_shadow(ConflictChecker(lambda _: None))
    assert isinstance(shadow, native.NativeShadow)


def test_record_of_an_access_has_its_fields_where_both_implementations_read_them() -> None:
    access = Access(1, 2, WRITE, Precision.SUMMARY, stride_bytes=-3, count=4, node=5)
    records = pack([Event(access, seq=9, context=8, thread=7, site=6)], lambda _: 0)

    assert list(access_fields(memoryview(records.tobytes()))) == [(1, 2, WRITE, 2, -3, 4)]
    assert list(rows_by_node(memoryview(access_record(1, 2, WRITE, 2, 5)))) == [
        (5, access_record(1, 2, WRITE, 2, 5))
    ]
    shadow, call = empty_shadow(), Call(1, EventKind.LAUNCH, 0, 1, 1, 0, 1, 1)
    shadow.add_all(memoryview(access_record(0, 8, READ, 1, 5)), call, position(1))
    assert shadow.range_state_count == 1


def test_engine_releases_its_memory() -> None:
    random = np.random.default_rng(5)
    bodies: list[list[EventBody]] = [
        [
            Launch(number % 3 + 1, "kernel"),
            *(Access(lo, lo + 64, WRITE) for lo in (BASE + random.integers(0, 9000, 30)).tolist()),
        ]
        for number in range(60)
    ]
    events = events_of(bodies)
    sizes: list[int] = []
    for _ in range(6):
        races, *_ = analyzed(events, is_native=True)
        assert races
        races.clear()
        gc.collect()
        if not tracemalloc.is_tracing():
            tracemalloc.start()  # after the first analysis, which fills caches
        sizes.append(tracemalloc.get_traced_memory()[0])
    tracemalloc.stop()
    # A leak of all accesses would be 400 kB. Python keeps some tuples for later use.
    assert sizes[-1] - sizes[1] < 100_000


LARGEST = (1 << 64) - 1


@pytest.mark.parametrize(
    "body",
    [
        Fill(1, LARGEST, LARGEST),
        Fill(1, BASE, 8, rows=LARGEST, pitch_bytes=LARGEST),
        Fill(1, BASE, 8, rows=1, pitch_bytes=LARGEST),
        Copy(1, LARGEST, BASE, LARGEST),
        Copy(1, BASE, LARGEST, 8, rows=20, source_pitch_bytes=LARGEST),
        Alloc(LARGEST, LARGEST, AllocationKind.STREAM_ORDERED, 1),
        Free(BASE, LARGEST, AllocationKind.STREAM_ORDERED, 1),
        Alloc(BASE, LARGEST),
        Free(LARGEST, 0),
    ],
    ids=str,
)
def test_call_with_impossible_addresses_does_not_crash(body: EventBody) -> None:
    assert_equal_results(events_of([[Fill(2, BASE, 8)], [body], [Fill(3, BASE, 8)]]))


@given(
    stored=st.lists(accesses(), max_size=8),
    lo=st.integers(0, 60),
    size=st.integers(1, 60),
    mode=st.sampled_from(MODES),
    clock=st.lists(st.integers(0, 8), min_size=STREAM_COUNT + 1, max_size=STREAM_COUNT + 1),
)
def test_unordered_accesses_to_a_range_are_those_of_the_python_implementation(
    stored: list[Access], lo: int, size: int, mode: AccessMode, clock: list[int]
) -> None:
    found_accesses = []
    for is_native in (False, True):
        shadow = new_shadow(ConflictChecker(lambda _: None), native=is_native)
        for number, access in enumerate(stored, start=1):
            slot = number % STREAM_COUNT + 1
            call = Call(number, EventKind.LAUNCH, 0, slot, 1, 0, 1, 1)
            stored_access = MemoryAccess(
                slot, number, call, access.lo, access.hi, access.mode, access.precision
            )
            shadow.add(stored_access, [0] * (STREAM_COUNT + 1), access.stride_bytes, access.count)
        found = shadow.find_unordered(BASE + lo, BASE + lo + size, mode, clock)
        found_accesses.append(
            sorted((a.call.seq, a.slot, a.tick, a.lo, a.hi, a.mode) for a in found)
        )
    assert found_accesses[0] == found_accesses[1]
