"""The races that the engine finds in traces, compared with brute force."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from gpu.programs import Program, Run, programs
from hypothesis import example, given, settings
from hypothesis import strategies as st
from sanitize.expected_races import pairs, reported
from sanitize.random_traces import Step, steps, trace
from sanitize.trace_scene import (
    BLOCKING,
    LEGACY,
    NON_BLOCKING,
    READ,
    SIZE,
    WRITE,
    Scene,
    address_of,
)

from cudakit.sanitize.engine import STRAY_ACCESS, Allocations, Engine
from cudakit.sanitize.races import Allocation, Coverage, NamedRange, Race, RaceKind, SyncKind
from cudakit.trace.events import (
    Access,
    Accessed,
    Arenas,
    Copy,
    Event,
    Fill,
    GraphLaunch,
    GraphNode,
    Launch,
    Mark,
    RangePop,
    RangePush,
    StreamCreate,
)
from cudakit.trace.kinds import (
    AllocationKind,
    AllocationLayer,
    Direction,
    HostMemory,
    NodeType,
    Precision,
)
from cudakit.trace.trace_file import RECORD, Records, pack

X = address_of("x")


def records_of(*events: Event) -> Records:
    return pack(events, len)


def test_empty_trace_has_no_race() -> None:
    assert Engine().feed(np.zeros(0, RECORD), [""]) == []


def test_launch_and_its_accesses_may_be_in_two_batches() -> None:
    scene = Scene()
    scene.call(Launch(1, "k"))
    scene.feed([Event(Access(X, X + 4, WRITE), seq=scene.seq)])
    assert scene.engine.coverage == Coverage(launches=1, launches_exact=1, accesses_exact=1)
    assert len(scene.read(2, X, size=4)) == 1


def test_records_of_other_threads_may_precede_the_accesses_of_a_launch() -> None:
    scene = Scene()
    (race,) = scene.feed(
        [
            Event(Launch(1, "k"), seq=100),
            Event(Launch(2, "k"), seq=101),
            Event(Access(X, X + 4, WRITE), seq=100),
            Event(Access(X, X + 4, READ), seq=101),
        ]
    )
    assert (race.previous.seq, race.current.seq) == (100, 101)


def test_late_access_is_counted_as_gap() -> None:
    scene = Scene()
    scene.call(Launch(1, "k"))
    scene.write(2, "y")
    assert scene.feed([Event(Access(X, X + 4, WRITE), seq=scene.seq - 1)]) == []
    assert scene.engine.gap_counts == {STRAY_ACCESS: 1}
    assert scene.read(3, "x") == []


def test_empty_access_does_not_race() -> None:
    scene = Scene()
    scene.kernel(1, Access(X, X, WRITE))
    scene.call(Copy(1, X, X + 64, 0))
    scene.call(Fill(1, X, 0))
    assert scene.write(2, "x") == []


def test_unrelated_records_are_ignored() -> None:
    scene = Scene()
    records = records_of(Event(Mark("here"), seq=50), Event(Launch(1, "k"), seq=51))
    records["kind"][0] = 999  # a kind of a later version
    assert scene.engine.feed(records, [""]) == []
    assert scene.call(Mark("there")) == []
    assert scene.engine.coverage.launches == 1


def test_engine_counts_coverage() -> None:
    scene = Scene()
    scene.kernel(1, Access(X, X + 4, READ), Access(X, X + 4, READ, Precision.MERGED))
    scene.kernel(1, Access(X, X + 4, READ), Access(X, X + 4, READ, Precision.SUMMARY), Accessed())
    scene.launch_with_pointers(1, "x", "y")
    scene.kernel(1)
    scene.copy(1, "x", "y")
    scene.fill(1, "x")
    scene.call(GraphLaunch(1, 1, 1))
    assert scene.engine.coverage == Coverage(
        launches=4,
        launches_unknown=1,
        launches_exact=2,
        launches_whole_tensor=1,
        launches_assumed=1,
        copies=1,
        fills=1,
        accesses_exact=2,
        accesses_summary=1,
        accesses_merged=1,
        accesses_assumed=2,
        graph_launches=1,
    )


def test_launch_precision_is_that_of_its_least_precise_access() -> None:
    scene = Scene()
    scene.kernel(1, Access(X, X + 4, READ), Access(X, X + 4, READ, Precision.ASSUMED))
    scene.kernel(1, Access(X, X + 4, READ, Precision.UNCERTAIN), Access(X, X + 4, READ))
    scene.kernel(1, Access(X, X + 4, READ), Accessed())
    scene.kernel(1, Access(X, X + 4, READ), Accessed(exact=False))
    scene.call(Launch(1, "touches nothing"), Accessed())
    scene.call(Launch(1, "lost"), Accessed(exact=False))
    coverage = scene.engine.coverage
    assert (coverage.launches, coverage.launches_exact, coverage.launches_assumed) == (6, 2, 4)
    assert coverage.launches_unknown == 0


def test_accesses_of_launch_may_span_batches() -> None:
    scene = Scene()
    scene.call(Launch(1, "k"))
    for body, counts in {
        Access(X, X + 4, READ): (0, 1, 0),
        Accessed(exact=False): (0, 0, 1),
        Access(X, X + 8, READ): (0, 0, 1),
    }.items():
        scene.feed([Event(body, seq=scene.seq)])
        coverage = scene.engine.coverage
        assert (
            coverage.launches_unknown,
            coverage.launches_exact,
            coverage.launches_assumed,
        ) == counts
    scene.fill(1, "y")
    assert scene.feed([Event(Accessed(), seq=scene.seq)]) == []
    assert scene.engine.coverage.launches_exact == 0


def test_coverage_counts_launches_without_call_site() -> None:
    scene = Scene()
    launches = (Event(Launch(1, "k"), seq=seq, site=site) for seq, site in ((5, 0), (6, 1), (7, 0)))
    scene.engine.feed(records_of(*launches, Event(Fill(1, X, 4), seq=8)), [""])

    assert scene.engine.coverage.launches == 3
    assert scene.engine.coverage.launches_without_call_site == 2


def test_coverage_reports_peak_memory_of_recording() -> None:
    scene = Scene()
    for device, size_bytes in ((0, 30), (1, 20), (0, 10), (1, 35)):
        scene.call(Arenas(size_bytes), device=device)
    assert scene.engine.coverage.arenas_bytes == 50


def test_accesses_belong_to_the_launching_thread() -> None:
    scene = Scene(strict_threads=True)
    scene.kernel(1, Access(X, X + 4, WRITE), thread=1)
    scene.sync(1, thread=1)
    scene.seq += 1
    recorded = [
        Event(Launch(2, "k"), seq=scene.seq, context=1, thread=1),
        Event(Access(X, X + 4, WRITE), seq=scene.seq, context=1, thread=2),
        Event(Accessed(), seq=scene.seq, context=1, thread=2),
        Event(Fill(2, X, 4), seq=scene.seq + 1, context=1, thread=1),
    ]
    assert scene.feed(recorded) == []
    assert (scene.engine.gap_counts, scene.engine.coverage.launches_exact) == ({}, 2)


def test_repeated_creation_of_a_stream_is_ignored() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.call(StreamCreate(1))
    assert scene.write(1, "x", size=SIZE) == []


def test_race_is_returned_once() -> None:
    scene = Scene()
    scene.write(1, "x")
    assert len(scene.write(2, "x")) == 1
    assert scene.feed([]) == []


def test_last_synchronization_names_record_and_wait() -> None:
    scene = Scene()
    scene.record(1, 1)
    recorded = scene.seq
    scene.write(1, "x")
    scene.wait(2, 1)
    (race,) = scene.read(2, "x")
    sync = race.last_sync
    assert sync is not None
    assert (sync.kind, sync.recorded_seq, sync.waited_seq) == (
        SyncKind.EVENT,
        recorded,
        recorded + 2,
    )
    assert sync.recorded_seq < race.previous.seq


def test_last_synchronization_by_host_or_default_stream() -> None:
    scene = Scene(LEGACY, BLOCKING, NON_BLOCKING, NON_BLOCKING)
    scene.write(3, "y")
    scene.sync(3)
    waited = scene.seq
    scene.write(3, "x")
    (race,) = scene.read(4, "x")
    assert race.last_sync is not None
    assert (race.last_sync.kind, race.last_sync.waited_seq) == (SyncKind.HOST, waited)
    scene.write(2, "z")
    scene.write(1, "z")
    scene.write(1, "w")
    scene.record(1, 1)
    scene.wait(3, 1)
    scene.write(2, "v")
    (race,) = scene.read(3, "v")
    assert race.last_sync is not None
    assert race.last_sync.kind is SyncKind.EVENT


@pytest.mark.parametrize("waits_for_context", [False, True])
def test_wait_for_stream_before_its_first_work_is_last_synchronization(
    waits_for_context: bool,
) -> None:
    scene = Scene()
    scene.write(3, "y")
    if waits_for_context:
        scene.device_sync()
    else:
        scene.sync(1)
    waited = scene.seq
    scene.sync(1)
    scene.write(1, "x")
    (race,) = scene.write(2, "x")
    assert race.last_sync is not None
    assert (race.last_sync.kind, race.last_sync.waited_seq) == (SyncKind.HOST, waited)


def test_wait_before_first_work_is_no_synchronization_of_stream_used_before_it() -> None:
    scene = Scene()
    scene.write(2, "x")
    scene.sync(1)
    scene.read(1, "y")
    scene.record(2, 1)
    (race,) = scene.write(1, "x")
    assert race.last_sync is None


def test_unsynchronized_streams_have_no_last_synchronization() -> None:
    scene = Scene()
    scene.write(1, "x")
    (race,) = scene.write(2, "x")
    assert race.last_sync is None


def test_race_describes_both_operations() -> None:
    scene = Scene()
    scene.launch_with_accesses(1, ["x"], 2, 64, thread=5)
    (race,) = scene.copy(2, "y", "x", thread=6)
    assert (race.previous.name, race.previous.thread, race.previous.site) == ("k", 5, 11)
    assert (race.current.name, race.current.kind.name, race.current.thread) == ("", "COPY", 6)
    assert (race.previous.lo, race.previous.hi) == (address_of("x"), address_of("x") + 64)


def races(
    events: Sequence[Event], *, batch_ends: Sequence[int] = (), prune_above: int = 1024
) -> list[Race]:
    """Return the races of a trace that is fed in batches; ``batch_ends`` are the calls after the batches."""
    engine, strings = Engine(prune_above=prune_above), {"": 0}
    records = pack(events, lambda text: strings.setdefault(text, len(strings)))
    ends = sorted({int((records["seq"] < seq).sum()) for seq in batch_ends})
    found_races: list[Race] = []
    for begin, end in zip([0, *ends], [*ends, len(records)], strict=True):
        found_races += engine.feed(records[begin:end], list(strings))
    return found_races


@settings(max_examples=300, deadline=None)
@given(steps())
@example([("graph", 40, 56, 4), ("kernel", 0, 2, 3), ("graph", 0, 47, 27)])
@example([("kernel", 0, 0, 2), ("graph", 16, 44, 6)])
def test_engine_finds_exactly_the_races_of_brute_force(steps: list[Step]) -> None:
    events = trace(steps)

    assert reported(races(events)) == pairs(events)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_merging_equal_range_states_does_not_change_races(steps: list[Step]) -> None:
    events = trace(steps, same_call_site=True)

    found_races = Counter((race.current.seq, race.previous.stream) for race in races(events))

    streams = {event.seq: event.body.stream for event in events if hasattr(event.body, "stream")}
    expected = pairs(events).elements()
    assert found_races == Counter((later[0], streams[earlier[0]]) for later, earlier in expected)


@settings(max_examples=50, deadline=None)
@given(steps(), st.lists(st.integers(1, 60), max_size=6))
def test_batch_boundaries_make_no_difference(steps: list[Step], batch_ends: list[int]) -> None:
    events = trace(steps)

    assert races(events, batch_ends=batch_ends) == races(events)


@settings(max_examples=100, deadline=None)
@given(steps())
def test_pruning_makes_no_difference(steps: list[Step]) -> None:
    events = trace(steps)
    calls = [event.seq for event in events]

    assert reported(races(events, batch_ends=calls, prune_above=0)) == pairs(events)


@settings(max_examples=60, deadline=None)
@given(programs(), st.sampled_from([None, 1, 2]))
def test_trace_of_simulated_device_gives_the_same_races(program: Program, seed: int | None) -> None:
    events = Run(program, seed=seed).trace

    assert reported(races(events)) == pairs(events)


def test_race_has_ranges_of_both_sides() -> None:
    scene = Scene()
    scene.call(RangePush("step", "mine"))
    scene.call(RangePush("prefetch"))
    scene.write(1, "x")
    scene.call(RangePop())
    (race,) = scene.read(2, "x")

    assert race.previous.ranges == (NamedRange("step", "mine"), NamedRange("prefetch", ""))
    assert race.current.ranges == (NamedRange("step", "mine"),)


def test_graph_nodes_have_ranges_of_graph_launch() -> None:
    scene = Scene()
    access = Access(address_of("x"), address_of("x") + SIZE, WRITE, node=1)
    scene.call(RangePush("capture"))
    scene.call(GraphNode(1, 1, NodeType.COPY), access)
    scene.call(RangePop())
    scene.call(RangePush("replay"))
    scene.call(GraphLaunch(1, 1, executable=1))
    scene.call(RangePop())
    (race,) = scene.read(2, "x")

    assert [(nvtx_range.name, race.current.ranges) for nvtx_range in race.previous.ranges] == [
        ("replay", ())
    ]


# --- Accesses of allocations, copies and fills, and the waits of the host --------------------------


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(1, 10)), max_size=20))
def test_address_belongs_to_the_latest_overlapping_allocation(
    calls: list[tuple[bool, int, int]],
) -> None:
    table, allocation_by_byte = Allocations(), dict[int, Allocation]()
    for seq, (adds, address, size) in enumerate(calls):
        removed_allocations = {
            allocation_by_byte[address]
            for address in range(address, address + size)
            if address in allocation_by_byte
        }
        if adds:
            allocation = Allocation(address, size, AllocationKind.SYNC, site=0, seq=seq)
            table.add(allocation)
        else:
            removed_allocations = {
                allocation
                for allocation in set(allocation_by_byte.values())
                if allocation.address == address
            }
            assert table.remove(address) == next(iter(removed_allocations), None)
        allocation_by_byte = {
            address: allocation
            for address, allocation in allocation_by_byte.items()
            if allocation not in removed_allocations
        }
        if adds:
            allocation_by_byte |= dict.fromkeys(range(address, address + size), allocation)

        assert [table.find(address) for address in range(45)] == [
            allocation_by_byte.get(address) for address in range(45)
        ]


@pytest.mark.parametrize("kind", [AllocationKind.SYNC, AllocationKind.PINNED])
def test_synchronous_free_waits_for_the_context_and_allocation_does_not(
    kind: AllocationKind,
) -> None:
    scene = Scene(NON_BLOCKING, NON_BLOCKING)
    scene.create(3, context=2)
    scene.alloc("x", kind)
    scene.write(1, "y")
    scene.write(3, "z", context=2)
    scene.alloc("w", kind)
    assert len(scene.write(2, "y")) == 1
    scene.free("x", kind)
    assert scene.read(1, "y") == []
    assert len(scene.read(1, "z")) == 1


def test_use_before_stream_ordered_allocation_races() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    assert scene.write(1, "x") == []
    scene.alloc("y", AllocationKind.STREAM_ORDERED, 1)
    (race,) = scene.write(2, "y")
    assert race.kind is RaceKind.USE_BEFORE_ALLOCATION
    assert race.previous.kind.name == "ALLOC"


def test_event_orders_allocation_before_use_in_another_stream() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.record(1, 1)
    scene.wait(2, 1)
    assert scene.write(2, "x") == []


def test_free_before_use_of_another_stream_completes_races() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.record(1, 1)
    scene.wait(2, 1)
    scene.read(2, "x")
    (race,) = scene.free("x", AllocationKind.STREAM_ORDERED, 1)
    assert race.kind is RaceKind.USE_AFTER_FREE
    assert (race.current.kind.name, race.previous.stream) == ("FREE", 2)


def test_use_after_stream_ordered_free_races_in_any_order() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.free("x", AllocationKind.STREAM_ORDERED, 1)
    (race,) = scene.write(1, "x")
    assert race.kind is RaceKind.USE_AFTER_FREE
    assert scene.write(1, "x") == []  # already reported
    scene.device_sync()
    assert scene.read(2, "x") == []


def test_reallocation_is_ordered_after_free() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.write(1, "x", "y")
    scene.free("x", AllocationKind.STREAM_ORDERED, 1)
    assert scene.alloc("x", AllocationKind.STREAM_ORDERED, 2) == []
    assert scene.write(2, "x", "y") == []


def test_free_races_with_each_stream_that_uses_the_memory() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.free("x", AllocationKind.STREAM_ORDERED, 1)
    for stream in (1, 2, 3):
        (race,) = scene.write(stream, "x")
        assert (race.kind, race.previous.kind.name) == (RaceKind.USE_AFTER_FREE, "FREE")


def test_use_after_free_does_not_race_with_the_next_allocation() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.free("x", AllocationKind.STREAM_ORDERED, 1)
    assert len(scene.write(2, "x")) == 1
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 3)
    assert scene.write(3, "x") == []


def test_synchronous_free_of_stream_ordered_memory_is_ordered() -> None:
    scene = Scene()
    scene.alloc("x", AllocationKind.STREAM_ORDERED, 1)
    scene.write(1, "x", "y")
    scene.free("x")
    assert scene.write(2, "y") == []


def test_pool_free_does_not_synchronize() -> None:
    scene = Scene()
    scene.alloc("x", layer=AllocationLayer.POOL)
    scene.write(1, "x", "y")
    scene.free("x", layer=AllocationLayer.POOL)
    scene.alloc("x", layer=AllocationLayer.POOL)
    assert len(scene.write(2, "y")) == 1


def test_event_query_orders_reuse_of_a_block() -> None:
    scene = Scene()
    scene.alloc("x", layer=AllocationLayer.POOL)
    scene.write(1, "x")
    scene.free("x", layer=AllocationLayer.POOL)
    scene.record(1, 1)
    scene.event_query(1)
    scene.alloc("x", layer=AllocationLayer.POOL)
    assert scene.write(2, "x") == []


HOST_TO_DEVICE, DEVICE_TO_HOST = Direction.HOST_TO_DEVICE, Direction.DEVICE_TO_HOST
DEVICE_TO_DEVICE, HOST_TO_HOST = Direction.DEVICE_TO_DEVICE, Direction.HOST_TO_HOST
PINNED, PAGEABLE = HostMemory.PINNED, HostMemory.PAGEABLE


@pytest.mark.parametrize(
    ("direction", "host", "asynchronous", "destination_done", "source_done"),
    [
        (HOST_TO_DEVICE, PINNED, False, True, True),
        (HOST_TO_DEVICE, PINNED, True, False, False),
        (HOST_TO_DEVICE, PAGEABLE, False, False, True),
        (HOST_TO_DEVICE, PAGEABLE, True, False, True),
        (DEVICE_TO_HOST, PINNED, False, True, True),
        (DEVICE_TO_HOST, PINNED, True, False, False),
        (DEVICE_TO_HOST, PAGEABLE, False, True, True),
        (DEVICE_TO_HOST, PAGEABLE, True, True, True),
        (DEVICE_TO_DEVICE, HostMemory.NONE, False, False, False),
        (HOST_TO_HOST, PINNED, True, True, True),
    ],
)
def test_completion_of_copy_depends_on_direction_and_host_memory(
    direction: Direction,
    host: HostMemory,
    asynchronous: bool,
    destination_done: bool,
    source_done: bool,
) -> None:
    scene = Scene()
    scene.copy(1, "x", "P", direction, host, asynchronous=asynchronous)
    assert (scene.read(2, "x") == []) == destination_done
    assert (scene.write(3, "P") == []) == source_done


def test_strict_threads_do_not_wait_for_copy_from_pageable_memory() -> None:
    scene = Scene(strict_threads=True)
    scene.copy(1, "P", "x", DEVICE_TO_HOST, PAGEABLE)
    (race,) = scene.copy(2, "y", "P", HOST_TO_DEVICE, PAGEABLE)
    assert race.kind is RaceKind.HOST


def test_synchronous_copy_from_pageable_memory_waits_for_its_stream() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.copy(1, "y", "P", HOST_TO_DEVICE, PAGEABLE, asynchronous=False)
    assert scene.write(2, "x") == []
    assert len(scene.write(2, "y")) == 1


def test_host_read_during_copy_to_host_races() -> None:
    scene = Scene()
    scene.copy(1, "P", "x", DEVICE_TO_HOST, PINNED)
    (race,) = scene.copy(2, "y", "P", HOST_TO_DEVICE, PAGEABLE)
    assert race.kind is RaceKind.HOST
    assert (race.current.stream, race.previous.stream) == (0, 1)
    assert race.lo == address_of("P")


def test_host_write_during_copy_from_host_races() -> None:
    scene = Scene()
    scene.copy(1, "x", "P", HOST_TO_DEVICE, PINNED)
    (race,) = scene.copy(2, "P", "Q", HOST_TO_HOST, PINNED)
    assert race.kind is RaceKind.HOST
    scene.sync(1)
    assert scene.copy(2, "P", "Q", HOST_TO_HOST, PINNED) == []


def test_two_copies_to_the_same_host_memory_race() -> None:
    scene = Scene()
    scene.copy(1, "P", "x", DEVICE_TO_HOST, PINNED)
    (race,) = scene.copy(2, "P", "y", DEVICE_TO_HOST, PINNED)
    assert race.kind is RaceKind.WRITE_AFTER_WRITE


@pytest.mark.parametrize(
    ("kind", "asynchronous", "is_done"),
    [
        (AllocationKind.PINNED, False, True),
        (AllocationKind.MANAGED, False, True),
        (AllocationKind.PINNED, True, False),
        (AllocationKind.SYNC, False, False),
    ],
)
def test_host_waits_for_synchronous_fill_of_host_memory(
    kind: AllocationKind, asynchronous: bool, is_done: bool
) -> None:
    scene = Scene()
    scene.alloc("x", kind)
    scene.fill(1, "x", asynchronous=asynchronous)
    assert (scene.write(2, "x") == []) == is_done
