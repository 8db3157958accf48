"""CUDA's ordering rules for streams, events, the host and its threads, and contexts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path

import pytest
from sanitize.trace_scene import (
    BLOCKING,
    LEGACY,
    NON_BLOCKING,
    PER_THREAD,
    READ,
    SIZE,
    WRITE,
    Scene,
    address_of,
)

from cudakit.sanitize.engine import Engine
from cudakit.sanitize.ordering import UNKNOWN_WORD, Call, StreamOrder, SyncTracker
from cudakit.sanitize.races import Race, SyncKind
from cudakit.sanitize.records import reorder_records
from cudakit.trace.events import (
    Access,
    CaptureBegin,
    CaptureEnd,
    Event,
    EventRecord,
    Gap,
    GraphEdge,
    GraphLaunch,
    GraphNode,
    HostCall,
    Launch,
    Memop,
)
from cudakit.trace.kinds import EventKind, HostCallPhase, MemopType, NodeType, StreamFlag
from cudakit.trace.run_log import LogReader
from cudakit.trace.spool import Batch
from cudakit.trace.trace_file import layout, pack, unpack


def test_work_of_one_stream_is_ordered() -> None:
    scene = Scene()
    assert (
        scene.write(1, "x") + scene.read(1, "x") + scene.write(1, "x") + scene.copy(1, "x", "y")
        == []
    )


def test_legacy_stream_and_blocking_streams_wait_for_each_other() -> None:
    scene = Scene(LEGACY, BLOCKING, BLOCKING)
    assert scene.write(2, "x") + scene.write(1, "x") + scene.write(3, "x") == []


def test_blocking_streams_are_unordered_without_legacy_work_between() -> None:
    scene = Scene(LEGACY, BLOCKING, BLOCKING)
    scene.write(1, "y")
    scene.write(2, "x")
    assert len(scene.write(3, "x")) == 1


def test_wait_in_legacy_stream_orders_blocking_streams() -> None:
    scene = Scene(LEGACY, BLOCKING, BLOCKING)
    scene.write(2, "x")
    scene.wait(1, 99)  # an event that was never recorded
    assert scene.write(3, "x") == []


def test_each_operation_in_the_legacy_stream_waits_for_blocking_streams() -> None:
    scene = Scene(LEGACY, BLOCKING, BLOCKING)
    for _ in range(3):
        assert (
            scene.write(2, "x")
            + scene.write(1, "x", "y")
            + scene.read(3, "x", "y")
            + scene.write(1, "y")
            == []
        )


def test_non_blocking_stream_is_not_ordered_with_legacy_stream() -> None:
    scene = Scene(LEGACY, NON_BLOCKING)
    scene.write(2, "x")
    assert len(scene.write(1, "x")) == 1
    assert len(scene.read(2, "x")) == 1


def test_per_thread_stream_is_a_blocking_stream_per_thread() -> None:
    scene = Scene(LEGACY, PER_THREAD, PER_THREAD)
    scene.write(2, "x")
    assert len(scene.write(3, "x")) == 1
    scene.write(2, "y")
    assert scene.write(1, "y") + scene.write(3, "y") == []


def test_legacy_stream_orders_only_its_own_context() -> None:
    scene = Scene(LEGACY)
    scene.create(2, LEGACY, context=2)
    scene.create(3, BLOCKING, context=2)
    scene.write(3, "x", context=2)
    assert len(scene.write(1, "x")) == 1
    scene.write(3, "y", context=2)
    assert scene.write(2, "y", context=2) == []


def test_legacy_stream_is_ordered_after_destroyed_stream() -> None:
    scene = Scene(LEGACY, BLOCKING)
    scene.write(2, "x")
    scene.destroy(2)
    assert scene.write(1, "x") == []


def test_event_of_legacy_stream_covers_blocking_streams() -> None:
    scene = Scene(LEGACY, BLOCKING, NON_BLOCKING)
    scene.write(2, "x")
    scene.record(1, 1)
    scene.wait(3, 1)
    assert scene.write(3, "x") == []


def test_wait_uses_the_last_record_before_it() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.record(1, 1)
    scene.wait(2, 1)
    scene.record(1, 3)
    assert scene.write(2, "x") == []


def test_wait_for_unrecorded_event_has_no_effect() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.wait(2, 7)
    assert len(scene.write(2, "x")) == 1


def test_event_orders_streams_of_two_devices() -> None:
    scene = Scene(NON_BLOCKING)
    scene.create(2, context=2, device=1)
    scene.write(1, "x")
    scene.record(1, 1)
    scene.wait(2, 1, context=2, device=1)
    assert scene.read(2, "x", context=2, device=1) == []


@pytest.mark.parametrize("sync_call", ["event_sync", "event_query"])
def test_host_is_ordered_after_completed_event(sync_call: str) -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.record(1, 1)
    scene.write(1, "y")
    getattr(scene, sync_call)(1)
    assert scene.write(2, "x") == []
    assert len(scene.write(2, "y")) == 1


@pytest.mark.parametrize("sync_call", ["sync", "query"])
def test_host_is_ordered_after_empty_stream(sync_call: str) -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.write(3, "y")
    getattr(scene, sync_call)(1)
    assert scene.write(2, "x") == []
    assert len(scene.write(2, "y")) == 1


def test_legacy_stream_sync_waits_for_blocking_streams() -> None:
    scene = Scene(LEGACY, BLOCKING, NON_BLOCKING, NON_BLOCKING)
    scene.write(2, "x")
    scene.write(3, "y")
    scene.sync(1)
    assert scene.write(4, "x") == []
    assert len(scene.write(4, "y")) == 1


def test_context_sync_covers_only_its_context() -> None:
    scene = Scene(NON_BLOCKING, NON_BLOCKING)
    scene.create(3, context=2)
    scene.write(1, "x")
    scene.write(3, "y", context=2)
    scene.device_sync(context=2)
    assert scene.read(2, "y") == []
    assert len(scene.read(2, "x")) == 1


def test_stream_destroy_does_not_synchronize() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.destroy(1)
    assert len(scene.write(2, "x")) == 1


def test_stream_with_reused_slot_is_a_new_stream() -> None:
    scene = Scene(NON_BLOCKING, NON_BLOCKING)
    for stream in range(3, 40):
        scene.create(stream)
        assert scene.write(stream, "x") == []
        scene.record(stream, stream)
        scene.destroy(stream)
        scene.device_sync()
    scene.create(40)
    scene.write(40, "y")
    scene.wait(1, 39)  # recorded on a stream whose slot stream 40 reuses
    assert len(scene.write(1, "y")) == 1


def test_destroying_a_stream_twice_or_unknown_is_ignored() -> None:
    scene = Scene()
    scene.write(1, "x")
    for stream in (1, 1, 77):
        scene.destroy(stream)
    scene.device_sync()
    assert scene.write(2, "x") == []


def test_clocks_grow_with_the_number_of_streams() -> None:
    scene = Scene(*[NON_BLOCKING] * 100)
    for stream in range(1, 101):
        assert scene.write(stream, "x") == []
        scene.record(1, stream)
        scene.wait(stream % 100 + 1, 1)
    assert len(scene.write(50, "x")) == 1


def test_captured_work_does_not_run() -> None:
    scene = Scene()
    scene.call(CaptureBegin(1, stream=1))
    scene.write(1, "x")
    scene.record(1, 1)
    scene.wait(2, 1)  # makes stream 2 part of the capture
    scene.write(2, "x")
    assert scene.write(3, "x") == []
    scene.call(CaptureEnd(1, stream=1))
    assert len(scene.write(2, "x")) == 1


def test_host_function_is_ordered_within_its_stream() -> None:
    scene = Scene(strict_threads=True)
    scene.write(1, "x", thread=1)
    scene.call(HostCall(1, HostCallPhase.BEGIN), thread=2)
    scene.write(3, "x", "y", thread=2)
    scene.sync(3, thread=2)
    scene.call(HostCall(1, HostCallPhase.END), thread=2)
    assert scene.write(1, "y", thread=1) == []
    assert len(scene.write(4, "y", thread=1)) == 1


def test_memory_word_wait_is_ordered_after_its_write() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.call(Memop(1, 0x42, MemopType.WRITE))
    scene.write(1, "y")
    scene.call(Memop(2, 0x42, MemopType.WAIT))
    assert scene.read(2, "x") == []
    assert len(scene.read(2, "y")) == 1


def test_wait_for_unwritten_word_makes_no_race_and_is_counted_as_gap() -> None:
    scene = Scene()
    scene.write(1, "x")
    scene.call(Memop(2, 0x42, MemopType.WAIT))
    assert scene.read(2, "x") == []
    assert scene.engine.gap_counts == {UNKNOWN_WORD: 1}


def test_peer_access_uses_the_same_addresses() -> None:
    scene = Scene(NON_BLOCKING)
    scene.create(2, context=2, device=1)
    scene.write(1, "x")
    (race,) = scene.copy(2, "y", "x", context=2, device=1)
    assert (race.previous.device, race.current.device) == (0, 1)


def test_clocks_do_not_grow_with_streams_that_were_destroyed() -> None:
    order = StreamOrder()
    for number in range(1, 2001):
        call = Call(number, EventKind.LAUNCH, 0, number, context=1, device=0, thread=1, site=0)
        order.create_stream(call, NON_BLOCKING)
        assert order.enqueue(call)
        order.sync_stream(call)
        order.destroy_stream(call)
    assert len(order.past_clock()) <= 64


def test_threads_share_the_host_clock_unless_strict() -> None:
    for strict in (False, True):
        scene = Scene(strict_threads=strict)
        scene.read(2, "y", thread=2)  # the thread starts before the wait
        scene.write(1, "x", thread=1)
        scene.sync(1, thread=1)
        assert len(scene.write(2, "x", thread=2)) == strict


def test_new_thread_is_ordered_after_earlier_threads() -> None:
    scene = Scene(strict_threads=True)
    scene.write(1, "x", thread=1)
    scene.sync(1, thread=1)
    assert scene.write(2, "x", thread=2) == []


def test_stream_used_by_two_threads_stays_ordered() -> None:
    scene = Scene(strict_threads=True)
    scene.write(1, "x", thread=1)
    assert scene.write(1, "x", thread=2) == []


def test_gaps_are_counted() -> None:
    scene = Scene()
    scene.call(Gap("an unsupported call", 3))
    scene.call(Gap("an unsupported call"))
    assert scene.engine.gap_counts == {"an unsupported call": 4}


def test_stream_without_recorded_creation_is_counted_as_gap() -> None:
    scene = Scene(NON_BLOCKING)
    scene.write(77, "x")
    assert len(scene.write(1, "x")) == 1
    assert scene.engine.gap_counts == {"stream whose creation was not recorded": 1}


# --- A host function orders the work that was enqueued before it, however late it runs -------------

LOGS = Path(__file__).parents[1] / "sanitize_corpus/logs"
# Number of later calls that are made before the host function runs.
DELAYS = range(4)


def run_after(
    scene: Scene, delay: int, stream: int, event: int, later_calls: list[Callable[[], object]]
) -> None:
    """Make calls, and run the host function after the first ``delay`` of them."""
    for call in later_calls[:delay]:
        call()
    scene.run_host_function(stream, event)
    for call in later_calls[delay:]:
        call()


@pytest.mark.parametrize("delay", DELAYS)
@pytest.mark.parametrize("native", [False, None])
def test_only_work_before_host_function_is_ordered(delay: int, native: bool | None) -> None:
    scene = Scene(native=native)
    scene.write(1, "b")
    scene.host_function(1, 1)
    later_calls = [lambda name=name: scene.write(1, name) for name in ("a", "c", "d")]

    run_after(scene, delay, 1, 1, later_calls)

    assert scene.read(2, "b") == []
    (race,) = scene.read(2, "a")
    assert (race.previous.stream, race.current.stream) == (1, 2)


@pytest.mark.parametrize("delay", DELAYS)
def test_host_copy_races_only_with_work_after_host_function(delay: int) -> None:
    """The host reads both buffers by synchronous copies in another stream."""
    scene = Scene()
    scene.write(1, "b")
    scene.host_function(1, 1)

    run_after(scene, delay, 1, 1, [lambda: scene.write(1, "a")] * 3)

    assert scene.copy(2, "H", "b", asynchronous=False) == []
    assert len(scene.copy(2, "H", "a", asynchronous=False)) == 1


@pytest.mark.parametrize("ends_in_order", [True, False])
def test_host_functions_in_flight_on_two_streams_order_only_their_streams(
    ends_in_order: bool,
) -> None:
    scene = Scene()
    for stream, event in ((1, 1), (2, 2)):
        scene.write(stream, f"b{stream}")
        scene.host_function(stream, event)
        scene.write(stream, f"a{stream}")
    first, second = (1, 2) if ends_in_order else (2, 1)

    scene.run_host_function(first, first)

    assert scene.read(3, f"b{first}") == []
    assert len(scene.read(3, f"a{first}")) == 1
    assert len(scene.read(3, f"b{second}")) == 1
    scene.run_host_function(second, second)
    assert scene.read(4, f"b{second}") == []
    assert len(scene.read(4, f"a{second}")) == 1


def test_host_functions_in_flight_on_one_stream_order_the_work_before_each() -> None:
    scene = Scene()
    for event in (1, 2, 3):
        scene.write(1, f"b{event}")
        scene.host_function(1, event)
    scene.write(1, "a")

    for event in (1, 2, 3):
        scene.run_host_function(1, event)
        assert scene.read(1 + event, f"b{event}") == []
        for later in range(event + 1, 4):
            assert len(scene.read(1 + event, f"b{later}")) == 1
    assert len(scene.read(5, "a")) == 1


def test_host_function_orders_work_that_its_stream_waited_for() -> None:
    scene = Scene()
    scene.write(1, "j")
    scene.record(1, 1)
    scene.wait(2, 1)
    scene.host_function(2, 2)
    scene.write(1, "l")
    scene.record(3, 1)
    scene.wait(2, 3)

    scene.run_host_function(2, 2)

    assert scene.read(3, "j") == []
    assert len(scene.read(3, "l")) == 1


def test_host_function_on_legacy_stream_orders_earlier_work_of_blocking_streams() -> None:
    scene = Scene(LEGACY, BLOCKING, NON_BLOCKING)
    scene.write(2, "b")
    scene.host_function(1, 1)
    scene.write(2, "a")

    scene.run_host_function(1, 1)

    assert scene.read(3, "b") == []
    assert len(scene.read(3, "a")) == 1


def test_host_function_may_run_after_its_stream_was_destroyed() -> None:
    scene = Scene(NON_BLOCKING, NON_BLOCKING)
    scene.write(1, "b")
    scene.host_function(1, 1)
    scene.destroy(1)

    scene.call(HostCall(1, HostCallPhase.BEGIN, 1))  # the engine forgets the stream after this call
    scene.call(HostCall(1, HostCallPhase.END, 1))

    assert scene.read(2, "b") == []
    assert scene.engine.gap_counts == {}


def test_host_function_that_runs_during_a_later_capture_orders_the_work_before_it() -> None:
    scene = Scene()
    scene.write(1, "b")
    scene.host_function(1, 1)
    scene.write(1, "a")
    scene.call(CaptureBegin(1, stream=1))

    scene.run_host_function(1, 1)

    assert scene.read(2, "b") == []
    assert len(scene.read(2, "a")) == 1
    scene.call(CaptureEnd(1, stream=1))


@pytest.mark.parametrize("is_launched_before", [True, False])
def test_host_function_orders_a_graph_launch_before_it(is_launched_before: bool) -> None:
    scene = Scene()
    written = Access(address_of("x"), address_of("x") + SIZE, WRITE, node=1)
    scene.call(GraphNode(1, 1, NodeType.COPY), written)
    if is_launched_before:
        scene.call(GraphLaunch(1, 1, executable=1))
    scene.host_function(1, 1)
    if not is_launched_before:
        scene.call(GraphLaunch(1, 1, executable=1))

    scene.run_host_function(1, 1)

    assert len(scene.read(2, "x")) == (not is_launched_before)


def test_host_function_in_a_graph_orders_the_nodes_of_the_graph_only() -> None:
    """The trace does not contain when the host function of a graph runs."""
    scene = Scene()
    for node, node_type in enumerate((NodeType.COPY, NodeType.HOST_CALL, NodeType.COPY), 1):
        mode = {1: WRITE, 3: READ}.get(node)
        accesses = (
            [Access(address_of("x"), address_of("x") + SIZE, mode, node=node)] if mode else []
        )
        scene.call(GraphNode(1, node, node_type), *accesses)
    for before, after in ((1, 2), (2, 3)):
        scene.call(GraphEdge(1, before, after))

    assert scene.call(GraphLaunch(1, 1, executable=1)) == []
    assert len(scene.write(2, "x")) == 1
    scene.sync(1)
    scene.sync(2)
    assert scene.write(3, "x") == []


def test_later_work_is_ordered_after_the_thread_of_a_host_function() -> None:
    scene = Scene(strict_threads=True)
    scene.write(1, "x", thread=1)
    scene.record(1, 1, thread=1)
    scene.call(HostCall(1, HostCallPhase.BEGIN, 1), thread=2)
    scene.write(3, "x", "y", thread=2)
    scene.sync(3, thread=2)
    scene.call(HostCall(1, HostCallPhase.END, 1), thread=2)
    assert scene.write(1, "y", thread=1) == []
    assert len(scene.write(4, "y", thread=1)) == 1


def test_older_trace_orders_all_work_before_the_function_ran() -> None:
    scene = Scene()
    scene.write(1, "b")
    scene.write(1, "a")
    scene.call(HostCall(1, HostCallPhase.BEGIN), HostCall(1, HostCallPhase.END))
    assert scene.read(2, "b", "a") == []


def test_older_record_of_host_function_has_no_event() -> None:
    body_bytes = pack([Event(HostCall(1, HostCallPhase.BEGIN, event=7), seq=1)], lambda _: 0)
    older = body_bytes.copy()
    older["body"] = b"\x01"  # an older recorder wrote the phase, and zeros behind it
    fields = older.view(layout(EventKind.HOST_CALL))
    assert (fields["phase"][0], fields["event"][0]) == (HostCallPhase.BEGIN, 0)


def test_last_synchronization_names_the_enqueueing_and_the_run_of_the_host_function() -> None:
    scene = Scene()
    scene.write(1, "b")
    scene.host_function(1, 1)
    enqueued = scene.seq
    scene.write(1, "a")
    scene.run_host_function(1, 1)

    (race,) = scene.read(2, "a")

    assert race.last_sync is not None
    assert race.last_sync.kind is SyncKind.HOST
    assert (race.last_sync.recorded_seq, race.last_sync.waited_seq) == (enqueued, scene.seq - 1)
    assert enqueued < race.previous.seq < scene.seq - 1


def test_event_before_a_host_function_is_forgotten_after_the_function() -> None:
    order = StreamOrder()
    syncs = SyncTracker(order, Counter())
    record, run = (Call(seq, EventKind.HOST_CALL, 0, 1, 1, 0, 1, 0) for seq in (1, 2))
    order.create_stream(record, StreamFlag.NON_BLOCKING)
    syncs.record_event(record, 1)
    assert len(syncs) == 1
    for phase in HostCallPhase:
        syncs.run_host_function(run, phase, 1)
    assert len(syncs) == 0


def analyzed_gpu_log(variant: str, *, runs_before: str) -> list[Race]:
    """Return the races of a program on a GPU, whose host function runs directly before a kernel."""
    with LogReader(LOGS / f"cupy_host_function_{variant}.npz") as log:
        (batch,) = log.batches()
    calls = [list(call) for _, call in groupby(in_call_order(batch), key=lambda event: event.seq)]
    enqueued = next(i for i, call in enumerate(calls) if isinstance(call[0].body, HostCall))
    first_event = calls[enqueued][0]
    stream, event = first_event.body.stream, 1 << 20
    phases = (HostCallPhase.BEGIN, HostCallPhase.END)
    run = [replace(first_event, body=HostCall(stream, phase, event)) for phase in phases]
    calls[enqueued] = [replace(first_event, body=EventRecord(event, stream))]
    kernel = next(
        i
        for i, call in enumerate(calls)
        if isinstance(call[0].body, Launch) and call[0].body.name.startswith(runs_before)
    )
    calls.insert(kernel, run)
    strings = {"": 0}
    records = pack(
        [replace(event, seq=seq) for seq, call in enumerate(calls, 1) for event in call],
        lambda text: strings.setdefault(text, len(strings)),
    )
    return Engine().feed(records, list(strings))


def in_call_order(batch: Batch) -> list[Event]:
    in_order, never_read_count = reorder_records(batch.records)
    assert never_read_count == 0
    return list(unpack(in_order, batch.strings))


@pytest.mark.parametrize("runs_before", ["cupy_add", "cupy_multiply"])
def test_race_of_gpu_program_is_found_whenever_its_host_function_runs(runs_before: str) -> None:
    (race,) = analyzed_gpu_log("race", runs_before=runs_before)
    assert race.previous.name.startswith("cupy_add")
    assert race.current.name.startswith("cupy_multiply")


def test_gpu_program_that_waits_for_its_host_function_has_no_race() -> None:
    assert analyzed_gpu_log("fixed", runs_before="cupy_multiply") == []
